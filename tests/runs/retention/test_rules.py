"""Each rule by itself, and what histories it must not be fooled by."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from datetime import datetime, timezone

import pytest

from ckpttool import Policy, UsageError
from tests.support.directories import Entry, faulty_entry, file_of, incomplete
from tests.support.retention import GroupPlan, lacks, plan_of, policies, series_of, series_plan

NOW = datetime(2026, 5, 10, 12, tzinfo=timezone.utc).timestamp()
DAY = 86_400


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def _plan(entries: list[Entry], **rules: object) -> GroupPlan:
    return series_plan(entries, Policy(**rules), now=NOW)


def _kept(made: GroupPlan) -> dict[str, str]:
    return {kept.entry.name: ", ".join(kept.reasons) for kept in made.keep}


def _measured(entry, *values: float | None, metric: str = "val_loss") -> list[Entry]:
    return [
        entry(f"m_epoch_{epoch}.pt", metrics={} if value is None else {metric: value})
        for epoch, value in enumerate(values, 1)
    ]


# The best -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "kept"),
    [
        (
            "min",
            {
                "m_epoch_5.pt": "newest",
                "m_epoch_4.pt": "best 2 by val_loss (0.118)",
                "m_epoch_2.pt": "best 2 by val_loss (0.25)",
            },
        ),
        (
            "max",
            {
                "m_epoch_5.pt": "newest, best 2 by val_loss (0.5)",
                "m_epoch_1.pt": "best 2 by val_loss (0.75)",
            },
        ),
    ],
)
def test_the_best(entry, mode, kept) -> None:
    entries = _measured(entry, 0.75, 0.25, 0.375, 0.118, 0.5)
    assert _kept(_plan(entries, keep_best=2, metric="val_loss", mode=mode)) == kept


def test_of_equals_the_newer_is_better(entry) -> None:
    made = _plan(_measured(entry, 0.5, 0.5, 0.5, 0.9), keep_best=1, metric="val_loss", mode="min")
    assert _kept(made) == {"m_epoch_4.pt": "newest", "m_epoch_3.pt": "best 1 by val_loss (0.5)"}


@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_metric_that_is_missing_or_nan_is_kept_and_never_best(entry, mode) -> None:
    made = _plan(_measured(entry, math.nan, None, 0.5, 0.5), keep_best=1, metric="val_loss", mode=mode)
    assert _kept(made) == {
        "m_epoch_4.pt": "newest",
        "m_epoch_3.pt": "best 1 by val_loss (0.5)",
        "m_epoch_2.pt": "no val_loss",
        "m_epoch_1.pt": "val_loss is NaN",
    }


@pytest.mark.parametrize(("mode", "infinite"), [("min", -math.inf), ("max", math.inf), ("min", math.inf)])
def test_what_is_infinite_is_the_worst(entry, mode, infinite) -> None:
    entries = _measured(entry, infinite, 0.25, 0.75, infinite)
    for count, worst in ((2, set()), (3, {"m_epoch_4.pt"})):
        made = _plan(entries, keep_best=count, metric="val_loss", mode=mode)
        assert {one.entry.name for one in made.keep} == {
            "m_epoch_4.pt",
            "m_epoch_3.pt",
            "m_epoch_2.pt",
        } | worst


def test_loss_is_a_metric(entry) -> None:
    entries = [entry(f"m_epoch_{epoch}.pt", loss=loss) for epoch, loss in ((1, 0.5), (2, 0.25), (3, 1.0))]
    made = _plan(entries, keep_best=1, metric="loss", mode="min")
    assert _kept(made) == {"m_epoch_3.pt": "newest", "m_epoch_2.pt": "best 1 by loss (0.25)"}


def test_a_metric_that_none_has_is_refused(entry) -> None:
    entries = [*_measured(entry, 0.5, 0.25), entry("n_epoch_1.pt", loss=1.0, metrics={"acc": 0.5})]
    with pytest.raises(UsageError) as refusal:
        plan_of(entries, Policy(keep_best=1, metric="val_los", mode="min"))
    assert str(refusal.value) == (
        "no checkpoint has a metric 'val_los' (metrics: acc, loss, val_loss; --metrics FILE reads a log)"
    )
    with pytest.raises(UsageError, match="none has any"):
        _plan(_measured(entry, None, None), keep_best=1, metric="val_loss", mode="min")


def test_a_metric_that_another_series_has_is_no_mistake(entry) -> None:
    entries = [*_measured(entry, 0.5, 0.25, 0.75), entry("n_epoch_1.pt"), entry("n_epoch_2.pt")]
    made = plan_of(entries, Policy(keep_best=1, metric="val_loss", mode="min"))
    assert [_kept(one) for one in made.groups] == [
        {"m_epoch_3.pt": "newest", "m_epoch_2.pt": "best 1 by val_loss (0.25)"},
        {"n_epoch_2.pt": "newest, no val_loss", "n_epoch_1.pt": "no val_loss"},
    ]


def test_what_lacks_something_is_counted(entry) -> None:
    entries = _measured(entry, 0.5, None, math.nan, 0.25)
    policy = Policy(keep_best=1, metric="val_loss", mode="min", keep_every_steps=10, keep_daily=1)
    assert lacks(entries, policy, NOW) == [
        "2 of 4 checkpoints have no val_loss; they are kept",
        "4 of 4 checkpoints have no step; they are kept",
        "4 of 4 checkpoints have no credible date; they are kept",
    ]
    entries = _measured(entry, 0.5, None)
    said = lacks(entries, Policy(keep_best=1, metric="val_loss", mode="min"), NOW)
    assert said == ["1 of 2 checkpoints has no val_loss; it is kept"]
    assert not lacks(entries, Policy(keep_last=1), NOW) + lacks(entries, None, NOW)


# Steps and epochs -----------------------------------------------------------------------------------


def test_every_so_many_steps(entry) -> None:
    entries = [entry(f"m_step_{step}.pt") for step in (500, 3999, 4000, 4001, 4999)]
    assert _kept(_plan(entries, keep_every_steps=1000)) == {
        "m_step_4999.pt": "newest",
        "m_step_4000.pt": "every 1,000 steps (4,000)",
        "m_step_3999.pt": "every 1,000 steps (3,999)",
        "m_step_500.pt": "every 1,000 steps (500)",
    }


def test_what_has_no_step_is_kept(entry) -> None:
    entries = [entry(f"m_epoch_{epoch}.pt", step=step) for epoch, step in ((1, None), (2, 5), (3, 6), (4, 7))]
    assert _kept(_plan(entries, keep_every_steps=10)) == {
        "m_epoch_4.pt": "newest",
        "m_epoch_2.pt": "every 10 steps (5)",
        "m_epoch_1.pt": "no step",
    }


def test_epochs_with_a_fraction(entry) -> None:
    entries = [
        entry(f"m_step_{step}.pt", epoch=epoch, counts_inside=(epoch, step))
        for step, epoch in enumerate((0.5, 1.0, 1.5, 2.25, 2.5), 1)
    ]
    assert _kept(_plan(entries, keep_every_epochs=1)) == {
        "m_step_5.pt": "newest",
        "m_step_4.pt": "every epoch (2.25)",
        "m_step_2.pt": "every epoch (1)",
        "m_step_1.pt": "every epoch (0.5)",
    }


# Times ----------------------------------------------------------------------------------------------


def _dated(entry, *days: float) -> list[Entry]:
    """Return checkpoints that were saved so many days before now."""
    return [entry(f"m_epoch_{epoch}.pt", saved_at=NOW - day * DAY) for epoch, day in enumerate(days, 1)]


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({"keep_within": 7 * DAY}, "within 7d"),
        ({"keep_daily": 1}, "daily 2026-05-09"),
        ({"keep_weekly": 1}, "weekly 2026-W19"),
    ],
)
@pytest.mark.parametrize(("wrong", "date"), [(-1, "2026-05-11"), (-29_127, "2106-02-07")])
def test_a_clock_in_the_future_does_not_make_all_else_old(entry, told, reason, wrong, date) -> None:
    entries = _dated(entry, 30, 20, 1, wrong)
    assert _kept(_plan(entries, **told)) == {
        "m_epoch_4.pt": f"newest, dated in the future ({date})",
        "m_epoch_3.pt": reason,
    }
    entries = _dated(entry, 30, wrong, 20, 1)
    assert _kept(_plan(entries, **told)) == {
        "m_epoch_4.pt": f"newest, {reason}",
        "m_epoch_2.pt": f"dated in the future ({date})",
    }


def test_a_clock_that_was_not_set_makes_nothing_old(entry) -> None:
    entries = [
        entry("m_epoch_1.pt", modified=0),
        entry("m_epoch_2.pt", saved_at=datetime(1980, 1, 1, tzinfo=timezone.utc).timestamp()),
        *(entry(f"m_epoch_{epoch}.pt", saved_at=NOW - 3 + epoch) for epoch in (3, 4)),
    ]
    assert _kept(_plan(entries, keep_within=60)) == {
        "m_epoch_4.pt": "newest, dated in the future (2026-05-10)",
        "m_epoch_3.pt": "within 1min",
        "m_epoch_2.pt": "dated 1980-01-01, by a clock that wasn't set",
        "m_epoch_1.pt": "dated 1970-01-01, by a clock that wasn't set",
    }


def test_a_date_that_no_calendar_has_is_none(entry) -> None:
    entries = [*_dated(entry, 3, 2, 1), entry("m_epoch_4.pt", saved_at=1e18)]
    assert _kept(series_plan(entries, Policy(keep_daily=1))) == {
        "m_epoch_4.pt": "newest, dated 1000000000000000000 s after 1970",
        "m_epoch_3.pt": "daily 2026-05-09",
    }


def test_only_what_is_older_goes_as_the_clock_has_it_now(entry) -> None:
    """Unlike ``keep_within``, which goes by the newest: of a run that ended long ago, the newest stays."""
    entries = _dated(entry, 40, 31, 29, 1)
    made = _plan(entries, older_than=30 * DAY)
    assert [one.name for one in made.remove] == ["m_epoch_2.pt", "m_epoch_1.pt"]
    assert _kept(made)["m_epoch_3.pt"] == "younger than 30d"
    ended = _dated(entry, 400, 399, 398)
    assert _kept(_plan(ended, older_than=30 * DAY)) == {"m_epoch_3.pt": "newest, none is younger than 30d"}
    assert _kept(_plan(ended, older_than=30 * DAY, keep_last=2)).keys() == {"m_epoch_3.pt", "m_epoch_2.pt"}
    assert not _plan(ended, keep_within=30 * DAY).remove


@pytest.mark.parametrize(
    "told", [{"keep_within": 60}, {"older_than": 60}, {"keep_daily": 1}, {"keep_hourly": 1}]
)
def test_the_times_of_a_copy_are_no_dates(entry, told) -> None:
    start = int(NOW - 10 * DAY) * 10**9
    copied = [entry(f"m_epoch_{epoch}.pt", modified=start + epoch * 10**8) for epoch in range(1, 31)]
    made = _plan(copied, **told)
    assert not made.remove
    assert _kept(made)["m_epoch_1.pt"] == "no date (30 files within 3 s, as if copied)"
    said = "30 of 30 checkpoints have no credible date; they are kept"
    assert lacks(copied, Policy(**told), NOW) == [said]
    went_on = [entry(f"m_epoch_{30 + day}.pt", modified=start + day * DAY * 10**9) for day in (1, 2, 3)]
    assert [one.name for one in _plan([*copied, *went_on], **told).remove] == [
        "m_epoch_32.pt",
        "m_epoch_31.pt",
    ]


def test_a_fast_run_has_dates_and_what_is_recorded_inside_is_one(entry) -> None:
    start = int(NOW - DAY) * 10**9
    fast = [entry(f"m_epoch_{at}.pt", modified=start + at * 10 * 10**9) for at in range(1, 31)]
    assert len(_plan(fast, keep_within=60).keep) == 7
    inside = [
        entry(f"m_epoch_{at}.pt", modified=start, saved_at=NOW - (31 - at) * 3600.0) for at in range(1, 31)
    ]
    assert len(_plan(inside, keep_within=3600).keep) == 2
    two = [entry("m_epoch_1.pt", modified=start), entry("m_epoch_2.pt", modified=start + 10**9)]
    assert [one.name for one in _plan(two, keep_daily=1).remove] == ["m_epoch_1.pt"]


def test_a_copy_onto_which_a_fast_run_follows_at_once_is_known(entry) -> None:
    start = int(NOW - DAY) * 10**9
    copied = [entry(f"m_epoch_{at}.pt", modified=start + at * 10**8) for at in range(10)]
    fast = [entry(f"m_epoch_{at}.pt", modified=start + (at - 9) * 30 * 10**9) for at in range(10, 20)]
    kept = _kept(_plan([*copied, *fast], keep_hourly=1))
    assert sum("as if copied" in why for why in kept.values()) == 10


def test_of_one_moment_the_newer_is_the_newest(entry) -> None:
    assert _kept(_plan(_dated(entry, 2, 2, 1, 1), keep_daily=2)) == {
        "m_epoch_4.pt": "newest, daily 2026-05-09",
        "m_epoch_2.pt": "daily 2026-05-08",
    }


@pytest.mark.parametrize(
    "rule", ["keep_last", "keep_hourly", "keep_daily", "keep_weekly", "keep_monthly", "keep_yearly"]
)
def test_more_than_there_can_be_are_all(entry, rule) -> None:
    assert _plan(_dated(entry, 1000, 500, 1), **{rule: 10**20}).remove == ()


# Names and size -------------------------------------------------------------------------------------


def test_names(entry) -> None:
    entries = [entry(f"m_epoch_{epoch}.pt") for epoch in (1, 2, 10, 20)]
    assert _kept(_plan(entries, keep_names=("*_1*.pt", "*0.pt"))) == {
        "m_epoch_20.pt": "newest, name *0.pt",
        "m_epoch_10.pt": "name *_1*.pt",
        "m_epoch_1.pt": "name *_1*.pt",
    }


def test_a_name_may_have_a_newline(entry) -> None:
    entries = [entry(f"m\n_epoch_{epoch}.pt") for epoch in (1, 2, 3)]
    assert _kept(_plan(entries, keep_names=("m\n*_1.pt",))) == {
        "m\n_epoch_3.pt": "newest",
        "m\n_epoch_1.pt": "name m\n*_1.pt",
    }


def test_names_that_nothing_has_are_refused_where_something_would_go(entry) -> None:
    entries = [entry(f"m_epoch_{epoch}.pt") for epoch in (1, 2)]
    with pytest.raises(UsageError, match=r"run/m_epoch_\*\.pt: the policy would keep no checkpoint"):
        _plan(entries, keep_names=("best*",))
    assert _kept(_plan(entries[:1], keep_names=("best*",))) == {"m_epoch_1.pt": "newest"}


def test_the_size_alone_keeps_the_newest_that_fit(entry) -> None:
    entries = [entry(f"m_epoch_{epoch}.pt") for epoch in (1, 2, 3, 4)]  # 100 bytes each
    assert _kept(_plan(entries, max_size=250)) == {
        "m_epoch_4.pt": "newest",
        "m_epoch_3.pt": "fits 250 bytes",
    }
    assert not _plan(entries, max_size=400).remove


def test_what_is_protected_stays_though_there_is_no_room(entry) -> None:
    entries = [entry(f"m_epoch_{epoch}.pt") for epoch in (1, 2, 3, 4, 5)]
    protections = {
        "reasons": {"run/m_epoch_1.pt": ["pinned"]},
        "faults": {"run/m_epoch_2.pt": "damaged: crc"},
    }
    made = series_plan(entries, Policy(max_size=400), **protections)
    assert _kept(made) == {
        "m_epoch_5.pt": "newest",
        "m_epoch_4.pt": "fits 400 bytes",
        "m_epoch_2.pt": "damaged: crc",
        "m_epoch_1.pt": "pinned",
    }
    assert made.excess is None
    made = series_plan(entries, Policy(max_size=299), **protections)
    assert sorted(_kept(made)) == ["m_epoch_1.pt", "m_epoch_2.pt", "m_epoch_5.pt"]
    assert str(made.excess) == "300 bytes kept, 1 byte more than --max-size 299 bytes"
    assert made.excess.is_inevitable


def test_what_other_rules_keep_stays_beside_what_fits(entry) -> None:
    entries = [entry(f"m_epoch_{epoch}.pt") for epoch in (1, 2, 3, 4)]
    made = _plan(entries, max_size=200, keep_names=("*_1.pt", "*_3.pt"))
    assert _kept(made) == {
        "m_epoch_4.pt": "newest",
        "m_epoch_3.pt": "name *_3.pt, fits 200 bytes",
        "m_epoch_1.pt": "name *_1.pt",
    }
    assert str(made.excess) == "300 bytes kept, 100 bytes more than --max-size 200 bytes"
    assert made.excess.is_inevitable
    assert not _plan(entries, max_size=200, keep_names=("*_1.pt",)).excess.is_inevitable  # 4 and 1 fit alone
    assert list(_kept(_plan(entries, max_size=200, keep_names=("best*",)))) == [
        "m_epoch_4.pt",
        "m_epoch_3.pt",
    ]


def _of_two_runs(entry, a: list[float], b: list[float]) -> list[Entry]:
    """Return the checkpoints of two series, 100 bytes each, that were saved at some days before now."""
    return [
        entry(f"{run}_epoch_{epoch}.pt", saved_at=NOW - day * DAY)
        for run, days in (("a", a), ("b", b))
        for epoch, day in enumerate(days, 1)
    ]


def _kept_of_all(entries: list[Entry], policy: Policy, **protections: object):
    made = plan_of(entries, policy, now=NOW, **protections)
    return {kept.entry.name.removesuffix(".pt") for one in made.groups for kept in one.keep}, made.excess


def test_the_oldest_of_all_series_go_first(entry) -> None:
    entries = _of_two_runs(entry, [9, 7, 1], [8, 6, 5])
    newest = {"a_epoch_3", "b_epoch_3"}
    assert _kept_of_all(entries, Policy(max_total_size=600))[0] == {one.name[:-3] for one in entries}
    assert _kept_of_all(entries, Policy(max_total_size=599)) == (
        {one.name[:-3] for one in entries} - {"a_epoch_1"},
        (),
    )
    assert _kept_of_all(entries, Policy(max_total_size=399))[0] == newest | {"b_epoch_2"}
    kept, (excess,) = _kept_of_all(entries, Policy(max_total_size=199))
    assert kept == newest
    assert str(excess) == "200 bytes kept in total, 1 byte more than --max-total-size 199 bytes"
    assert excess.is_inevitable


def test_a_run_that_is_long_over_keeps_its_newest_alone(entry) -> None:
    entries = _of_two_runs(entry, [99, 98, 97], [3, 2, 1])
    kept, _ = _kept_of_all(entries, Policy(max_total_size=400))
    assert kept == {"a_epoch_3", "b_epoch_1", "b_epoch_2", "b_epoch_3"}


def test_what_is_protected_or_kept_by_rules_counts_in_the_total(entry) -> None:
    entries = _of_two_runs(entry, [9, 7, 1], [8, 6, 5])
    pinned = {"run/a_epoch_1.pt": ["pinned"]}
    assert _kept_of_all(entries, Policy(max_total_size=400), reasons=pinned)[0] == {
        *("a_epoch_1", "a_epoch_3", "b_epoch_2", "b_epoch_3")
    }
    kept, (excess,) = _kept_of_all(entries, Policy(max_total_size=300, keep_names=("a*_1.pt",)))
    assert kept == {"a_epoch_1", "a_epoch_3", "b_epoch_2", "b_epoch_3"}
    assert (excess.nbytes, excess.is_inevitable) == (100, False)


def test_a_series_that_is_left_alone_counts_in_the_total(entry) -> None:
    entries = _of_two_runs(entry, [9, 8], [3, 2])
    skipped = {series_of(entries)[0].key: "why"}
    kept, (excess,) = _kept_of_all(entries, Policy(max_total_size=200), skipped=skipped)
    assert kept == {"a_epoch_1", "a_epoch_2", "b_epoch_2"}
    assert (excess.nbytes, excess.is_inevitable) == (100, True)


def test_both_limits_hold(entry) -> None:
    entries = _of_two_runs(entry, [9, 8, 7, 6], [5, 4, 3, 2])
    assert _kept_of_all(entries, Policy(max_size=300, max_total_size=400)) == (
        {"a_epoch_4", "b_epoch_2", "b_epoch_3", "b_epoch_4"},
        (),
    )
    assert _kept_of_all(entries, Policy(max_size=200, max_total_size=9999))[0] == {
        *("a_epoch_3", "a_epoch_4", "b_epoch_3", "b_epoch_4")
    }


def test_what_has_no_date_is_not_older_than_others(entry) -> None:
    entries = _of_two_runs(entry, [9, 1], [8, 7])
    entries[0] = entry("a_epoch_1.pt", saved_at=NOW + DAY)
    kept, (excess,) = _kept_of_all(entries, Policy(max_total_size=100))
    assert kept == {"a_epoch_1", "a_epoch_2", "b_epoch_2"}
    assert excess.is_inevitable
    assert lacks(entries, Policy(max_total_size=1), NOW) == [
        "1 of 4 checkpoints has no credible date; it is kept"
    ]


def test_a_rule_for_some_series_alone_decides_about_them_and_they_count(entry) -> None:
    entries = _of_two_runs(entry, [9, 8, 7], [3, 2, 1])
    whole = ("run/a_*", Policy(keep_names=("*",)))
    made = plan_of(entries, policies(Policy(max_total_size=400), whole), now=NOW)
    assert [one.name for one in made.removals] == ["b_epoch_2.pt", "b_epoch_1.pt"]
    with pytest.raises(UsageError, match="--max-total-size limits all series"):
        policies(None, ("run/a_*", Policy(max_total_size=400)))


def test_bytes_with_two_names_count_once(entry) -> None:
    shared = file_of("shared", 7, links=3)
    entries = [
        entry(f"m_epoch_{epoch}.pt", files=[shared, file_of("own", 100 + epoch, 10)]) for epoch in (1, 2, 3)
    ]
    assert not _plan(entries, max_size=130).remove
    assert [one.name for one in _plan(entries, max_size=129).remove] == ["m_epoch_1.pt"]


# Incomplete ones ------------------------------------------------------------------------------------


def _cut(epoch: int, modified: int = 0) -> Entry:
    return faulty_entry(f"m_epoch_{epoch}.pt", incomplete("a shard is missing"), modified=modified)


def test_incomplete_ones_go_where_something_newer_is_intact(entry) -> None:
    entries = [_cut(1), entry("m_epoch_2.pt"), _cut(3), entry("m_epoch_4.pt"), _cut(5)]
    pinned = {"run/m_epoch_3.pt": ["pinned"]}
    made = series_plan(entries, Policy(keep_last=5, incomplete="remove"), reasons=pinned)
    assert [one.name for one in made.remove] == ["m_epoch_1.pt"]
    assert not _plan(entries, keep_last=5).remove


@pytest.mark.parametrize("glob", ["*_epoch_3*", "m_epoch_3.pt", "run/*_3.pt"])
def test_a_name_keeps_an_incomplete_one_too(entry, glob: str) -> None:
    entries = [_cut(1), entry("m_epoch_2.pt"), _cut(3), entry("m_epoch_4.pt"), _cut(5)]
    made = _plan(entries, keep_last=5, keep_names=(glob,), incomplete="remove")
    assert [one.name for one in made.remove] == ["m_epoch_1.pt"]
    assert _kept(made)["m_epoch_3.pt"] == f"name {glob}, incomplete: a shard is missing"
    with pytest.raises(UsageError, match="would keep no checkpoint"):
        _plan(entries, keep_names=(glob,), incomplete="remove")


def test_an_incomplete_one_that_was_written_last_may_be_being_written(entry) -> None:
    entries = [_cut(1, modified=100), *(entry(f"m_epoch_{epoch}.pt", modified=99) for epoch in (2, 3))]
    assert not _plan(entries, keep_last=5, incomplete="remove").remove


def test_the_only_ones_stay_though_they_are_incomplete(entry) -> None:
    assert not _plan([_cut(1), _cut(2)], keep_last=1, incomplete="remove").remove
    entries = [_cut(1), entry("m_epoch_2.pt")]
    damaged = {"run/m_epoch_2.pt": "damaged: checksum"}
    assert not series_plan(entries, Policy(keep_last=1, incomplete="remove"), faults=damaged).remove


# A restarted run ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "told", [{"keep_every_epochs": 100}, {"keep_names": ("*_1.pt",)}, {"max_size": 1}, {"keep_daily": 1}]
)
def test_what_a_restarted_run_wrote_last_stays_under_every_rule(entry, told) -> None:
    start = int(NOW - 100 * DAY) * 10**9
    hour = 3600 * 10**9
    entries = [entry(f"m_epoch_{epoch}.pt", modified=start + epoch * hour) for epoch in range(1, 10)]
    entries[3] = entry("m_epoch_4.pt", modified=start + 50 * hour)
    kept = _kept(_plan(entries, **told))
    assert "written last" in kept["m_epoch_4.pt"]
    assert "newest" in kept["m_epoch_9.pt"]


def test_the_last_of_a_restarted_run_are_those_by_time_too(entry) -> None:
    hour = 3600 * 10**9
    entries = [entry(f"m_epoch_{epoch}.pt", modified=epoch * hour) for epoch in range(1, 10)]
    entries[:2] = [entry(f"m_epoch_{epoch}.pt", modified=(50 + epoch) * hour) for epoch in (1, 2)]
    assert _kept(_plan(entries, keep_last=2)) == {
        "m_epoch_9.pt": "newest, last 2",
        "m_epoch_8.pt": "last 2",
        "m_epoch_2.pt": "written last, last 2 by time",
        "m_epoch_1.pt": "last 2 by time",
    }


@pytest.mark.parametrize(
    ("metric", "mode", "values", "best"),
    [
        ("valid_loss_min", "min", (0.9, 0.6, 0.2, 0.2, 0.2), [3]),
        ("loss", "min", (0.9, 0.2, 0.2), [2]),
        ("acc", "max", (0.1, 0.9, 0.9), [2]),
        ("acc", "max", (0.1, 0.9, 0.9, 0.8), [3]),
        ("acc", "max", (0.9, 0.1, 0.2, 0.9, 0.9), [5]),
        ("loss", "min", (0.6, 0.6, 0.2), [3, 2]),
        ("min_val_loss", "min", (0.6, 0.6, 0.2), [3, 1]),
        ("max_acc", "max", (0.6, 0.5, 0.6), [3]),
        ("loss", "min", (math.inf, 0.2, 0.2), [2]),
        ("loss", "min", (0.2, -math.inf, 0.2), [3]),
        ("minority_loss", "min", (0.6, 0.6, 0.2), [3, 2]),
    ],
)
def test_a_best_value_that_is_carried_on_is_that_of_the_oldest(entry, metric, mode, values, best) -> None:
    entries = _measured(entry, *values, metric=metric)
    made = _plan(entries, keep_best=len(best), metric=metric, mode=mode)
    kept = {one.entry.fields.epoch for one in made.keep if any("best" in why for why in one.reasons)}
    assert kept == set(best)
    again = _plan([one.entry for one in made.keep], keep_best=len(best), metric=metric, mode=mode)
    assert not again.remove


@pytest.mark.parametrize(("metric", "best"), [("best_acc", "m_epoch_2.pt"), ("acc", "m_epoch_3.pt")])
def test_of_equals_the_newer_is_best_unless_the_metric_is_carried_on(entry, metric: str, best: str) -> None:
    entries = _measured(entry, 0.1, 0.9, 0.9, 0.2, metric=metric)
    kept = _kept(_plan(entries, keep_best=1, metric=metric, mode="max"))
    assert kept == {"m_epoch_4.pt": "newest", best: f"best 1 by {metric} (0.9)"}


# What a plan says -------------------------------------------------------------------------------------


def test_reasons(entry) -> None:
    entries = [entry(f"m_epoch_{epoch}.pth") for epoch in range(1, 6)]
    entries.append(entry("m_epoch_6.pth", fault=incomplete("a shard is missing"), is_complete=False))
    protected = {"run/m_epoch_1.pth": ["latest", "symlink best"]}
    made = series_plan(entries, Policy(keep_last=2), reasons=protected)
    assert [(kept.entry.name, kept.reasons) for kept in made.keep] == [
        ("m_epoch_6.pth", ("incomplete: a shard is missing",)),
        ("m_epoch_5.pth", ("newest", "last 2")),
        ("m_epoch_4.pth", ("last 2",)),
        ("m_epoch_1.pth", ("latest", "symlink best")),
    ]
    assert [one.name for one in made.remove] == ["m_epoch_3.pth", "m_epoch_2.pth"]


def test_the_newest_incomplete_one_stays_as_such_where_none_is_complete() -> None:
    entries = [faulty_entry(f"m_epoch_{n}.pth", incomplete("a shard is missing")) for n in (1, 2)]
    made = series_plan(entries, Policy(keep_last=1))
    assert made.keep[0].reasons == ("none is intact", "incomplete: a shard is missing")
    assert not made.remove


def test_bytes_that_have_another_name_are_not_freed(entry) -> None:
    def linked(name: str, inode: int, links: int) -> Entry:
        return entry(name, files=[file_of(name, inode, links=links)])

    saves = [linked("a_epoch_1.pt", 1, 1), linked("a_epoch_2.pt", 2, 2), linked("a_epoch_3.pt", 2, 2)]
    assert plan_of(saves, Policy(keep_last=1)).freed_bytes == 100
    assert plan_of([*saves, linked("a_epoch_4.pt", 3, 1)], Policy(keep_last=1)).freed_bytes == 200
