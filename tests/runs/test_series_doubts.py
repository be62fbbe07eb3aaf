"""Series that may be none: what is left alone, and what stays with what."""

from __future__ import annotations

import pytest

from ckpttool import Granularity, Policy
from ckpttool.runs.members.saves import series_of_saves
from ckpttool.runs.members.series_doubts import (
    CONTRADICTED,
    METRICS_ALONE,
    NOT_COUNTED,
    PARTS,
    UNORDERED,
    YEARS,
    doubt_of,
    untrained_entries,
)
from ckpttool.runs.retention.save_plan import doubts_of
from tests.support.directories import Entry
from tests.support.retention import doubts_about, series_of, series_plan

HOUR = 3600 * 10**9


def _saves(entry, names: list[str], *, apart: int = HOUR, **known: object) -> list[Entry]:
    return [entry(name, modified=count * apart, **known) for count, name in enumerate(names)]


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (["model_0.pt", "model_1.pt", "model_2.pt"], PARTS),
        (["0.pt", "1.pt"], PARTS),
        (["model_1.pt", "model_2.pt"], None),
        (["model_0.pt", "model_2.pt"], None),
        (["model_epoch_0.pt", "model_epoch_1.pt"], None),
    ],
)
def test_what_is_numbered_from_zero_and_written_at_once_could_be_parts(entry, names, why) -> None:
    assert doubts_about(_saves(entry, names, apart=10**9)) == [why]


def test_what_is_written_one_after_another_is_no_set_of_parts(entry) -> None:
    assert doubts_about(_saves(entry, ["model_0.pt", "model_1.pt", "model_2.pt"])) == [None]


@pytest.mark.parametrize("stem", ["digit_", "dncnn_", "llama", "user_", "train_"])
def test_a_number_after_another_word_may_count_models(entry, stem: str) -> None:
    names = [f"{stem}{number}.pt" for number in (10, 20, 30)]
    assert doubts_about(_saves(entry, names)) == [NOT_COUNTED]


@pytest.mark.parametrize("stem", ["model_", "ckpt", "net.", "weights-", "snapshot_", "", "my_state_"])
def test_a_number_after_a_plain_word_counts_saves(entry, stem: str) -> None:
    names = [f"{stem}{number}.pt" for number in (10, 20, 30)]
    assert doubts_about(_saves(entry, names)) == [None]


def test_epochs_inside_that_grow_with_the_names_settle_it(entry) -> None:
    entries = [entry(f"vae_{number}.pt", inside=(number, None)) for number in range(3)]
    assert doubts_about(entries) == [None]
    entries = [entry(f"digit_{number}.pt", inside=(10, None)) for number in range(3)]
    assert doubts_about(entries) == [NOT_COUNTED]


@pytest.mark.parametrize(
    "names", ["model_{}.pth", "net_{}.pth", "model ({}).pth", "model.{}", "{}.pth", "checkpoint-v{}.pt"]
)
def test_models_that_were_trained_equally_long_are_no_series(entry, names: str) -> None:
    alike = [
        entry(names.format(number), inside=(10, None), modified=number * HOUR) for number in (1, 2, 4, 8)
    ]
    assert all(doubt_of(one) for one in series_of(alike) if len(one.entries) > 1)
    steps = [entry(names.format(number), inside=(None, 500), modified=number * HOUR) for number in (1, 2, 4)]
    assert all(doubt_of(one) for one in series_of(steps) if len(one.entries) > 1)


@pytest.mark.parametrize(
    ("inside", "why"),
    [
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
    ],
)
def test_counts_inside_go_on_where_numbers_count_saves(entry, inside, why: str | None) -> None:
    saves = [entry(f"model_{at + 1}.pt", inside=told, modified=at * HOUR) for at, told in enumerate(inside)]
    assert doubts_about(saves) == [why]
    named = [entry(f"model_epoch_{at + 1}.pt", inside=told) for at, told in enumerate(inside)]
    assert doubts_about(named) == [None]


@pytest.mark.parametrize(
    ("numbers", "why"),
    [((2021, 2022, 2023), YEARS), ((1990, 2100), YEARS), ((1989, 1990), None), ((2000, 2100, 2200), None)],
)
def test_what_is_numbered_like_years_may_be_years(entry, numbers: tuple[int, ...], why: str | None) -> None:
    assert doubts_about(_saves(entry, [f"model_{number}.pt" for number in numbers])) == [why]
    counted = [entry(f"model_{number}.pt", inside=(None, number)) for number in numbers]
    assert doubts_about(counted) == [None]
    named = [entry(f"model_step_{number}.pt") for number in numbers]
    assert doubts_about(named) == [None]


@pytest.mark.parametrize("stem", ["model_acc_90.", "checkpoint.loss_3.", "model_0."])
def test_a_metric_alone_orders_nothing(entry, stem: str) -> None:
    names = [f"{stem}{number}.pt" for number in (11, 12, 13)]
    assert doubts_about(_saves(entry, names)) == [METRICS_ALONE]


def test_a_series_that_somebody_names_needs_an_order(entry) -> None:
    for names, why in ((["a_1.pt", "a_2.pt"], None), (["a_1.pt", "a_final.pt"], UNORDERED)):
        (one,) = series_of([entry(name) for name in names], declared=["a_*.pt"])
        assert doubt_of(one, ["a_*.pt"]) == why
    epochs = [entry(name, inside=(at, None)) for at, name in enumerate(("a_1.pt", "a_final.pt"))]
    (one,) = series_of(epochs, declared=["a_*.pt"])
    assert doubt_of(one, ["a_*.pt"]) is None


def test_a_doubt_counts_where_something_would_go(entry) -> None:
    saves = _saves(entry, ["llama2.pt", "llama3.pt"])
    doubts = {series_of(saves)[0].key: NOT_COUNTED}
    left = series_plan(saves, Policy(keep_last=1), doubts=doubts)
    assert (left.skipped, left.remove, len(left.keep)) == (NOT_COUNTED, (), 2)
    assert series_plan(saves, Policy(keep_last=2), doubts=doubts).skipped is None


def test_what_was_not_trained_stays(entry) -> None:
    told = {"granularity": Granularity.LIGHTWEIGHT}
    (one,) = series_of(_saves(entry, ["ckpt_1.pkl", "ckpt_2.pkl"], **told))
    assert len(untrained_entries(one)) == 2
    counted = [entry(f"ckpt_{number}.pkl", inside=(number, None), **told) for number in (1, 2)]
    assert [untrained_entries(one) for one in series_of(counted)] == [[]]
    (one,) = series_of(_saves(entry, ["ckpt_1.pkl", "ckpt_2.pkl"], granularity=Granularity.PARTIAL))
    assert untrained_entries(one) == []


# What counts saves ------------------------------------------------------------------------------


def _saved_together(entry, kinds: dict[str, dict[str, object]], apart: int, later: int = 0) -> set[str]:
    """Return the kinds that are in doubt; all but the models are written so much later."""
    entries = [
        entry(
            f"{kind}_{number}.pt", signature=kind, modified=number * apart + later * (kind != "model"), **told
        )
        for kind, told in kinds.items()
        for number in (1, 2, 3)
    ]
    return {
        key.removeprefix("run/").removesuffix("_*.pt")
        for key in doubts_of(series_of_saves(series_of(entries)))
    }


@pytest.mark.parametrize(
    ("apart", "later", "doubtful"),
    [
        (HOUR, 10**9, {"digit"}),
        (0, 0, {"digit"}),
        (HOUR, 24 * HOUR, {"digit"}),
    ],
)
def test_what_is_saved_with_a_series_counts_its_saves(entry, apart: int, later: int, doubtful) -> None:
    weights = {"has_weights": True}
    kinds = {"model": weights, "optim": {}, "ema": weights, "digit": weights}
    assert _saved_together(entry, kinds, apart, later) == doubtful
    parts = [entry(f"{kind}_{number}.pt", signature=kind) for kind in ("model", "optim") for number in (0, 1)]
    assert len(doubts_of(series_of_saves(series_of(parts)))) == 1


# Epoch and step -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form", ["model_epoch{}_{}.pth", "ckpt-{}-{}.pt", "m.epoch_{}_{}.weights.h5", "cp_{}_{}"]
)
def test_two_numbers_that_grow_are_an_epoch_and_a_step(entry, form: str) -> None:
    names = [form.format(epoch, 700 * epoch) for epoch in (9, 10, 11)]
    entries = [entry(name, inside=(None, None), epoch=None, step=None) for name in names]
    (one,) = series_of(entries)
    assert [(two.name, two.epoch, two.step) for two in one.entries] == [
        (name, epoch, 700 * epoch) for name, epoch in zip(names, (9, 10, 11), strict=True)
    ]
    assert doubts_about(entries) == [None]


@pytest.mark.parametrize(
    "names",
    [
        ["model_epoch5_64.pth", "model_epoch5_128.pth", "model_epoch6_64.pth"],
        ["ckpt-5-0.pt", "ckpt-6-0.pt"],
        ["model_5_3500.pt", "model_6_4200.pt"],
    ],
)
def test_other_pairs_of_numbers_are_none(entry, names: list[str]) -> None:
    assert not any(one.key.count("*") > 1 for one in series_of([entry(name) for name in names]))
