"""Series that may be none: what is left alone, and what stays with what."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ckpttool import Policy, list_checkpoints
from tests.support.retention import dry_run, kept_reasons
from tests.support.saves import HOUR, Facts, left_alone, save_all, series_in

PARTS = "numbered from 0 and written at once, with no epoch or step inside: could be parts of one checkpoint"
NOT_COUNTED = "nothing says that its numbers count saves: could be different models"
YEARS = "its numbers could be years: nothing inside says that they count saves"
CONTRADICTED = "the epochs or steps inside don't grow with its numbers: could be different models"
METRICS_ALONE = "its names differ only in a metric"
UNORDERED = "no number in its names or contents shows which is older"
SAYS_SO = (PARTS, NOT_COUNTED, YEARS, CONTRADICTED)
"""Doubts that go if somebody says that it is one series."""


def _saves(form: str, numbers: Sequence[object], *inside: Facts, apart: float = HOUR) -> dict[str, Facts]:
    """Return saves of some numbers, each written later than the one before."""
    told = inside or [{}] * len(numbers)
    return {
        form.format(number): {"modified": at * apart, **one}
        for at, (number, one) in enumerate(zip(numbers, told, strict=True))
    }


def _counts(*pairs: tuple[int | None, int | None]) -> list[Facts]:
    """Return what checkpoints say that have these epochs and steps inside."""
    named = [{"epoch": epoch, "global_step": step} for epoch, step in pairs]
    return [{name: count for name, count in one.items() if count is not None} for one in named]


INSIDE: list[tuple[list[tuple[int | None, int | None]], str | None]] = [
    ([(10, None)] * 3, CONTRADICTED),
    ([(10, 300)] * 3, CONTRADICTED),
    ([(10, None), (10, None), (8, None)], CONTRADICTED),
    ([(10, None), (8, None), (12, None)], CONTRADICTED),
    ([(1, 100), (1, 200), (1, 300)], None),
    ([(0, None), (0, None), (1, None)], None),
    ([(1, 10), (2, 20), (1, 30)], None),
    ([(None, None)] * 3, None),
    ([(1, None), (None, None), (1, None)], CONTRADICTED),
    ([(1, None), (None, None), (None, None)], None),
    ([(1, None), (None, None), (2, None)], None),
]
"""Epochs and steps inside models of numbers that grow."""


@pytest.mark.parametrize(
    ("saves", "why"),
    [
        # Numbered from 0 and written at once they could be parts.
        (_saves("model_{}.pt", (0, 1, 2), apart=1), PARTS),
        (_saves("{}.pt", (0, 1), apart=1), PARTS),
        (_saves("model_{}.pt", (1, 2), apart=1), None),
        (_saves("model_{}.pt", (0, 2), apart=1), None),
        (_saves("model_epoch_{}.pt", (0, 1), apart=1), None),
        (_saves("model_{}.pt", (0, 1, 2)), None),
        # A number after another word may count models.
        *(
            (_saves(f"{stem}{{}}.pt", (10, 20, 30)), NOT_COUNTED)
            for stem in ("digit_", "dncnn_", "llama", "user_", "train_")
        ),
        *(
            (_saves(f"{stem}{{}}.pt", (10, 20, 30)), None)
            for stem in ("model_", "ckpt", "net.", "weights-", "snapshot_", "", "my_state_")
        ),
        # Epochs inside that grow with it settle that.
        (_saves("vae_{}.pt", range(3), *_counts((0, None), (1, None), (2, None))), None),
        (_saves("digit_{}.pt", range(3), *_counts(*[(10, None)] * 3)), NOT_COUNTED),
        *((_saves("model_{}.pt", (1, 2, 3), *_counts(*inside)), why) for inside, why in INSIDE),
        *((_saves("model_epoch_{}.pt", (1, 2, 3), *_counts(*inside)), None) for inside, _ in INSIDE),
        # Numbers like years may be years.
        (_saves("model_{}.pt", (2021, 2022, 2023)), YEARS),
        (_saves("model_{}.pt", (1990, 2100)), YEARS),
        (_saves("model_{}.pt", (1989, 1990)), None),
        (_saves("model_{}.pt", (2000, 2100, 2200)), None),
        (_saves("model_{}.pt", (2021, 2022), *_counts((None, 2021), (None, 2022))), None),
        (_saves("model_step_{}.pt", (2021, 2022)), None),
        # A metric alone orders nothing.
        *(
            (_saves(f"{stem}{{}}.pt", (11, 12, 13)), METRICS_ALONE)
            for stem in ("model_acc_90.", "checkpoint.loss_3.", "model_0.")
        ),
    ],
    ids=str,
)
def test_what_is_doubted(saves: dict[str, Facts], why: str | None, tmp_path: Path) -> None:
    ((key, told),) = left_alone(save_all(tmp_path, saves)).items()
    hint = f" (if they are one series, use --series '{key}')" if why in SAYS_SO else ""
    assert told == (None if why is None else why + hint)
    if why in SAYS_SO:
        assert left_alone(tmp_path, series=(key,)) == {key: None}


@pytest.mark.parametrize(
    "form", ["model_{}.pth", "net_{}.pth", "model ({}).pth", "model.{}", "{}.pth", "checkpoint-v{}.pt"]
)
@pytest.mark.parametrize("count", [(10, None), (None, 500)])
def test_models_that_were_trained_equally_long_are_no_series(tmp_path: Path, form: str, count) -> None:
    save_all(tmp_path, _saves(form, (1, 2, 4, 8), *_counts(*[count] * 4)))
    lengths = {key: len(names) for key, names in series_in(tmp_path).items()}
    assert all(why is not None or lengths[key] == 1 for key, why in left_alone(tmp_path).items())


@pytest.mark.parametrize(
    ("names", "epochs", "why"),
    [
        (("a_1.pt", "a_2.pt"), (None, None), None),
        (("a_1.pt", "a_final.pt"), (None, None), UNORDERED),
        (("a_1.pt", "a_final.pt"), (0, 1), None),
    ],
)
def test_a_series_that_somebody_names_needs_an_order(tmp_path: Path, names, epochs, why) -> None:
    save_all(tmp_path, dict(zip(names, _counts(*((epoch, None) for epoch in epochs)), strict=True)))
    assert left_alone(tmp_path, series=("a_*.pt",)) == {"a_*.pt": why}


def test_a_doubt_counts_where_something_would_go(tmp_path: Path) -> None:
    save_all(tmp_path, _saves("llama{}.pt", (2, 3)))
    doubted = dry_run(tmp_path, policy=Policy(keep_last=1), depth="quick")
    assert (len(doubted.problems), [*kept_reasons(doubted)]) == (1, ["llama3.pt", "llama2.pt"])
    assert left_alone(tmp_path, policy=Policy(keep_last=2)) == {"llama*.pt": None}


@pytest.mark.parametrize(
    ("inside", "stays"),
    [
        ([{"weights": None}] * 2, True),
        ([{"weights": None, "epoch": 1}, {"weights": None, "epoch": 2}], False),
        ([{"weights": None, "state": True}] * 2, False),
    ],
)
def test_what_was_not_trained_stays(tmp_path: Path, inside: list[Facts], stays: bool) -> None:
    save_all(tmp_path, _saves("ckpt_{}.pkl", (1, 2), *inside))
    kept = kept_reasons(dry_run(tmp_path, policy=Policy(keep_last=1), depth="quick"))
    assert ("holds neither weights nor an optimizer" in kept.get("ckpt_1.pkl", ())) == stays


# What counts saves ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("apart", "later"), [(HOUR, 1), (0, 0), (HOUR, 24 * HOUR)])
def test_what_is_saved_with_a_series_counts_its_saves(tmp_path: Path, apart: float, later: float) -> None:
    kinds: dict[str, Any] = {"model": {}, "optim": {"weights": None, "state": True}, "ema": {}, "digit": {}}
    for kind, told in kinds.items():
        for number in (1, 2, 3):
            when = number * apart + later * (kind != "model")
            told = {"weights": kind, **told, "modified": when}
            save_all(tmp_path, {f"{kind}_{number}.pt": told})
    assert [key for key, why in left_alone(tmp_path).items() if why is not None] == ["digit_*.pt"]


def test_parts_of_one_save_may_be_parts_of_one_checkpoint(tmp_path: Path) -> None:
    for kind, told in {"model": {}, "optim": {"weights": None, "state": True}}.items():
        save_all(tmp_path, {f"{kind}_{number}.pt": told for number in (0, 1)})
    assert all((why or "").startswith(PARTS) for why in left_alone(tmp_path).values())


# Epoch and step -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form", ["model_epoch{}_{}.pth", "ckpt-{}-{}.pt", "m.epoch_{}_{}.weights.h5", "cp_{}_{}"]
)
def test_two_numbers_that_grow_are_an_epoch_and_a_step(tmp_path: Path, form: str) -> None:
    names = [form.format(epoch, 700 * epoch) for epoch in (9, 10, 11)]
    save_all(tmp_path, {name: {} for name in names})
    rows = [row.document() for row in list_checkpoints(tmp_path).checkpoints]
    assert [(row["path"], row["epoch"], row["step"]) for row in rows] == [
        (str(tmp_path / name), epoch, 700 * epoch) for name, epoch in zip(names, (9, 10, 11), strict=True)
    ]
    assert left_alone(tmp_path) == {form.format("*", "*"): None}


@pytest.mark.parametrize(
    "names",
    [
        ["model_epoch5_64.pth", "model_epoch5_128.pth", "model_epoch6_64.pth"],
        ["ckpt-5-0.pt", "ckpt-6-0.pt"],
        ["model_5_3500.pt", "model_6_4200.pt"],
    ],
)
def test_other_pairs_of_numbers_are_none(tmp_path: Path, names: list[str]) -> None:
    assert not any(key.count("*") > 1 for key in series_in(save_all(tmp_path, {name: {} for name in names})))
