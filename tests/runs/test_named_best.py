"""Series all of which are named best: what thins them out, and what still stays for its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ckpttool import Policy, PruneRequest, prune
from ckpttool.runs.members.entry import Entry
from ckpttool.runs.members.order import group
from ckpttool.runs.pruning.protections import best_of_many

BEST = Policy(keep_best=1, metric="acc", mode="max")
LAST = Policy(keep_last=1)
SAVES = {2: 0.77, 5: 0.8, 9: 0.83, 11: 0.82}


def _lifted(entries: list[Entry], policy: Policy | None, *faults: str) -> list[str]:
    (one,) = group(entries)
    return sorted(path.removeprefix("run/") for path in best_of_many(one, policy, faults))


def _saves(entry: Callable[..., Entry], name: str, **told: object) -> list[Entry]:
    return [
        entry(name.format(at=at, epoch=epoch, acc=acc), inside=(epoch, None), metrics={"acc": acc}, **told)
        for at, (epoch, acc) in enumerate(SAVES.items())
    ]


def test_a_policy_that_ranks_decides(entry) -> None:
    assert len(_lifted(_saves(entry, "best_epoch_{epoch}.pt"), BEST)) == 4
    other = Policy(keep_best=1, metric="loss", mode="min")
    assert _lifted(_saves(entry, "best_epoch_{epoch}.pt"), other) == []
    assert _lifted(_saves(entry, "best_epoch_{epoch}.pt"), LAST) == []


@pytest.mark.parametrize("policy", [None, LAST])
def test_without_one_the_ends_of_a_metric_in_the_names_stay(entry, policy) -> None:
    saves = _saves(entry, "best_acc={acc}_epoch={epoch}.pt")
    assert _lifted(saves, policy) == ["best_acc=0.82_epoch=11.pt", "best_acc=0.8_epoch=5.pt"]
    assert _lifted(saves, policy, "run/best_acc=0.83_epoch=9.pt") == ["best_acc=0.8_epoch=5.pt"]
    saves[1] = entry("best_acc=nan_epoch=5.pt", inside=(5, None))
    assert _lifted(saves, policy) == ["best_acc=0.82_epoch=11.pt"]


@pytest.mark.parametrize(
    "name",
    ["best_model_{at}.pt", "best_model_{at}.h5", "model_epoch_{epoch}.pt", "bestow_epoch_{epoch}.pt"],
)
def test_folds_and_what_is_not_named_best_are_none_of_many(entry, name: str) -> None:
    assert _lifted(_saves(entry, name), BEST) == []


def test_what_two_runs_call_the_best_stays(entry) -> None:
    saves = _saves(entry, "best_acc={acc}_epoch={epoch}.pt")
    again = entry("best_acc=0.7_epoch=9.pt", inside=(9, None), metrics={"acc": 0.7})
    assert _lifted([*saves, again], BEST) == []
    assert _lifted(saves[:1], BEST) == []


def test_the_best_of_many_are_thinned_out(series: Path) -> None:
    for epoch in range(1, 11):
        path = series / f"model_epoch_{epoch}.pth"
        path.rename(series / f"best_acc=0.{epoch:02}_epoch_{epoch}.pth") if epoch < 8 else path.unlink()
    left = {1: [1, 7], 2: [1, 6, 7]}
    for count, epochs in left.items():
        made = prune(series, keep_last=count, dry_run=True).plan
        assert sorted(one.entry.fields.epoch for one in made.groups[0].keep) == epochs
    made = prune(
        PruneRequest(directory=str(series), policy=Policy(keep_best=1, metric="acc", mode="max")),
        dry_run=True,
    ).plan
    assert [(one.entry.fields.epoch, one.reasons) for one in made.groups[0].keep] == [
        (7, ("newest", "best 1 by acc (0.07)"))
    ]
