"""Series all of which are named best: what thins them out, and what still stays for its name."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from ckpttool import Policy
from tests.support.retention import dry_run, kept_reasons
from tests.support.runs import flip_value
from tests.support.saves import START, save

BEST = Policy(keep_best=1, metric="acc", mode="max")
LAST = Policy(keep_last=1)
SAVES = {2: 0.77, 5: 0.8, 9: 0.83, 11: 0.82}
NAMED = "best_acc={acc}_epoch={epoch}.pt"


def _saved(run: Path, form: str, saves: dict[int, float]) -> list[str]:
    names = [form.format(at=at, epoch=epoch, acc=acc) for at, (epoch, acc) in enumerate(saves.items())]
    for name, (epoch, acc) in zip(names, saves.items(), strict=True):
        save(run / name, epoch=epoch, metrics={"acc": acc})
    return names


def _for_their_names(run: Path, policy: Policy) -> set[str]:
    kept = kept_reasons(dry_run(run, policy=policy))
    return {name for name, reasons in kept.items() if "named best" in reasons}


@pytest.mark.parametrize(
    ("form", "policy", "stay"),
    [
        ("best_epoch_{epoch}.pt", BEST, ""),
        ("best_epoch_{epoch}.pt", LAST, "all"),  # no metric in the names
        (NAMED, BEST, ""),
        (NAMED, LAST, "ends"),
        # Folds, and what is not named best.
        ("best_model_{at}.pt", BEST, "all"),
        ("best_model_{at}.h5", BEST, "all"),
        ("model_epoch_{epoch}.pt", BEST, ""),
        ("bestow_epoch_{epoch}.pt", BEST, ""),
    ],
)
def test_what_stays_for_its_name(tmp_path: Path, form: str, policy: Policy, stay: str) -> None:
    names = _saved(tmp_path, form, SAVES)
    ends = {name for name in names if "0.77" in name or "0.83" in name}
    assert _for_their_names(tmp_path, policy) == {"": set(), "all": set(names), "ends": ends}[stay]


def test_the_ends_of_a_metric_are_those_of_what_is_intact(tmp_path: Path) -> None:
    low, _, best, last = _saved(tmp_path, NAMED, SAVES)
    flip_value(tmp_path / best)
    os.utime(tmp_path / best, (START, START))
    assert _for_their_names(tmp_path, LAST) == {low, best, last}


def test_what_is_no_number_is_no_end_and_stays(tmp_path: Path) -> None:
    low, nan, best, _ = _saved(tmp_path, NAMED, SAVES | {5: math.nan})
    assert _for_their_names(tmp_path, LAST) == {low, nan, best}


def test_what_two_runs_call_the_best_stays(tmp_path: Path) -> None:
    names = _saved(tmp_path, NAMED, SAVES)
    again = save(tmp_path / "best_acc=0.7_epoch=9.pt", epoch=9, metrics={"acc": 0.7})
    assert _for_their_names(tmp_path, BEST) == {*names, again.name}
    for name in (*names[1:], again.name):
        (tmp_path / name).unlink()
    assert _for_their_names(tmp_path, BEST) == {names[0]}


def test_the_best_of_many_are_thinned_out(series: Path) -> None:
    for epoch in range(1, 11):
        path = series / f"model_epoch_{epoch}.pth"
        path.rename(series / f"best_acc=0.{epoch:02}_epoch_{epoch}.pth") if epoch < 8 else path.unlink()
    for count, epochs in {1: [7, 1], 2: [7, 6, 1]}.items():
        kept = kept_reasons(dry_run(series, policy=Policy(keep_last=count)))
        assert [*kept] == [f"best_acc=0.{epoch:02}_epoch_{epoch}.pth" for epoch in epochs]
    kept = kept_reasons(dry_run(series, policy=BEST))
    assert kept == {"best_acc=0.07_epoch_7.pth": ("newest", "best 1 by acc (0.07)")}
