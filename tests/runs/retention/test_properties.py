"""What no history and no policy may ever make a plan do."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from hypothesis import assume, given
from hypothesis import strategies as st

from ckpttool import Policy, UsageError
from ckpttool.runs.retention.rules import LIMITS, RULES
from ckpttool.runs.series import order_entries
from tests.support.directories import Entry, damaged, faulty_entry, file_of, incomplete, make_entry
from tests.support.retention import GroupPlan, RetentionPlan, plan_of, series_of

NOW = 1_790_000_000.0
DAY = 86_400
FINITE = "newest intact and finite one of a failed run"

_FAULTS = st.sampled_from([None] * 6 + [damaged("cut short"), incomplete("a shard is missing")])
_TIMES = st.one_of(
    st.floats(NOW - 900 * DAY, NOW), st.sampled_from([NOW - 3600, NOW - DAY, NOW + DAY, 4.29e9, 0.0])
)
_VALUES = st.one_of(
    st.none(), st.floats(0, 1), st.sampled_from([0.5, 0.5, float("nan"), float("inf"), -float("inf")])
)


@st.composite
def _entries(draw: st.DrawFn) -> list[Entry]:
    names = draw(
        st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 40)), min_size=1, max_size=14, unique=True)
    )
    return [_entry(draw, series, epoch) for series, epoch in names]


def _entry(draw: st.DrawFn, series: str, epoch: int) -> Entry:
    name = f"{series}_epoch_{epoch}.pth"
    fault, value, when = draw(_FAULTS), draw(_VALUES), draw(_TIMES)
    step = draw(st.one_of(st.none(), st.integers(0, 5000)))
    inode, size = draw(st.integers(1, 12)), draw(st.integers(0, 100))
    known = {
        "files": [
            file_of(name, inode, inode * 10 + 1, modified=int(when * 10**9), links=2),
            file_of(f"{name}.sha", 1000 + epoch * 2 + (series == "a"), size),
        ],
        "step": step,
        "saved_at": draw(st.sampled_from([when, None])),
        "metrics": {} if value is None else {"m": value},
    }
    if fault is None:
        return make_entry(name, counts_inside=(epoch, step), **known)
    return faulty_entry(name, fault, counts_inside=(None, None), **known)


_ALWAYS = frozenset(
    {
        *("newest", "newest by epoch", "newest by step", "newest by its name", "newest by its contents"),
        *("written last", "latest", "none is intact"),
    }
)
_COUNTS = st.integers(1, 6)
_BEST = st.fixed_dictionaries(
    {"keep_best": _COUNTS, "metric": st.just("m"), "mode": st.sampled_from(["min", "max"])}
)
_OTHERS = st.fixed_dictionaries(
    {},
    optional={
        **{
            name: _COUNTS
            for name in (
                *("keep_last", "keep_hourly", "keep_daily", "keep_weekly", "keep_monthly", "keep_yearly"),
                *("keep_every_steps", "keep_every_epochs"),
            )
        },
        "keep_within": st.integers(1, 900 * DAY),
        "keep_names": st.sampled_from([("a*",), ("*_1*", "*3.pth")]),
        "max_size": st.integers(1, 1500),
        "max_total_size": st.integers(1, 3000),
        "incomplete": st.sampled_from(["keep", "remove"]),
    },
)
_POLICIES = (
    st.tuples(st.one_of(st.just({}), _BEST), _OTHERS)
    .map(lambda both: {**both[0], **both[1]})
    .filter(lambda told: bool(told.keys() - {"incomplete"}))
)


Protected = dict[str, Any]
"""What is stronger than every rule, by its kind."""


def _planned(
    entries: Sequence[Entry], told: Mapping[str, object], protected: Protected | None = None
) -> RetentionPlan:
    """Return a plan; what is refused is no history to learn from."""
    try:
        return plan_of(entries, Policy(**told), now=NOW, **protected or {})
    except UsageError as refusal:
        assume(
            "no checkpoint has a metric" not in str(refusal)
            and "would keep no checkpoint" not in str(refusal)
        )
        raise


def _gone(made: RetentionPlan) -> set[str]:
    return {entry.path for entry in made.removals}


@st.composite
def _protections(draw: st.DrawFn, entries: Sequence[Entry]) -> Protected:
    paths = st.sampled_from([entry.path for entry in entries])
    reasons = {path: ["latest"] for path in draw(st.sets(paths, max_size=4))}
    sound = {entry.path for entry in entries if entry.is_sound}
    faults = {path: "damaged: checksum" for path in draw(st.sets(paths, max_size=4)) & sound}
    return {"reasons": reasons, "faults": faults}


@given(_entries(), _POLICIES, st.data(), st.randoms(use_true_random=False))
def test_what_holds_of_every_plan(entries, told, data, order: random.Random) -> None:
    """All that is asked of one plan: to draw checkpoints takes longer than to plan."""
    protected = data.draw(_protections(entries))
    made = _planned(entries, told, protected)
    _the_newest_and_what_is_protected_stays(entries, protected, _gone(made))
    _every_checkpoint_is_told_of_once_with_a_reason(entries, made)
    _no_order_matters(entries, told, protected, made, order)
    _what_is_damaged_does_not_count(entries, told, protected)
    _incomplete_ones_go_only_where_something_newer_is_intact(entries, told)
    keys = [one.key for one in series_of(entries)]
    unread = data.draw(st.sets(st.sampled_from(keys)))
    _nothing_goes_of_a_series_that_an_unread_pointer_could_name(entries, told, protected, unread)
    _a_failed_run_keeps_its_newest_finite_one_what_rules_keep_and_what_is_protected(
        entries, told, protected, data
    )


def _the_newest_and_what_is_protected_stays(
    entries: Sequence[Entry], protected: Protected, gone: set[str]
) -> None:
    assert not gone & protected["reasons"].keys()
    assert not gone & protected["faults"].keys()
    assert not gone & {one.path for one in entries if (one.fault or "").startswith("damaged")}
    for one in series_of(entries):
        intact = [two for two in one.entries if two.is_sound and two.path not in protected["faults"]]
        if intact:
            newest = order_entries(intact)[0][-1]
            assert newest.path not in gone
            written = max(intact, key=lambda two: two.modified_ns)
            assert written.path not in gone or written.modified_ns - newest.modified_ns <= 60 * 10**9
        else:
            assert not gone & {two.path for two in one.entries}


def _nothing_goes_of_a_series_that_an_unread_pointer_could_name(
    entries: Sequence[Entry], told: Mapping[str, object], protected: Protected, unread: set[Any]
) -> None:
    gone = _gone(_planned(entries, told, protected))
    skipped = {key: "best.txt: permission denied; it may name any checkpoint" for key in unread}
    made = _planned(entries, told, {**protected, "skipped": skipped})
    assert not any(one.remove or one.slim for one in made.groups if one.key in unread)
    if not {"max_size", "max_total_size"} & told.keys():
        named = {one.path for series in series_of(entries) if series.key in unread for one in series.entries}
        assert _gone(made) == gone - named


def _every_checkpoint_is_told_of_once_with_a_reason(entries: Sequence[Entry], made: RetentionPlan) -> None:
    paths = [kept.entry.path for one in made.groups for kept in one.keep]
    assert sorted([*paths, *(entry.path for entry in made.removals)]) == sorted(one.path for one in entries)
    assert all(kept.reasons for one in made.groups for kept in one.keep)
    assert all(len(set(kept.reasons)) == len(kept.reasons) for one in made.groups for kept in one.keep)


@st.composite
def _contradicting(draw: st.DrawFn) -> list[Entry]:
    """Draw a series whose names count otherwise than what is inside, which may begin again."""
    epochs = draw(st.lists(st.integers(0, 40), min_size=1, max_size=10, unique=True))
    entries = [_entry(draw, "a", epoch) for epoch in epochs]
    insides = [(draw(st.integers(0, 12)), draw(st.none() | st.integers(0, 12))) for _ in entries]
    return [
        replace(one, counts_inside=(None, None) if one.fault else inside)
        for one, inside in zip(entries, insides, strict=True)
    ]


@given(_contradicting(), _POLICIES, st.data())
def test_the_newest_by_name_and_by_what_is_inside_stay(entries, told, data) -> None:
    protected = data.draw(_protections(entries)) | {"reasons": {}}
    made = _planned(entries, told, protected)
    intact = [one for one in entries if one.is_sound and one.path not in protected["faults"]]
    assume(intact)
    gone = _gone(made)
    assert max(intact, key=lambda one: one.fields.epoch or 0).path not in gone
    first = max(one.counts_inside[0] or 0 for one in intact)
    assert any(one.counts_inside[0] == first and one.path not in gone for one in intact)
    written = max(one.modified_ns for one in intact)
    kept = [one.modified_ns for one in intact if one.path not in gone]
    assert written - max(kept) <= 60 * 10**9
    if told.keys().isdisjoint({*LIMITS, "incomplete"}):
        assert gone == _gone(_planned(intact, told))


@given(_entries(), _BEST)
def test_the_best_of_what_was_kept_are_the_same(entries, best) -> None:
    made = _planned(entries, best)
    kept = [one.entry for group in made.groups for one in group.keep]
    # Without those that went, equal values may look carried on, so that the older counts as the better one.
    for again in _planned(kept, best).groups:
        values = {one.entry.metric("m") for one in again.keep}
        assert all(entry.metric("m") in values for entry in again.remove)


COUNTED = [
    "keep_last",
    "keep_best",
    "keep_hourly",
    "keep_daily",
    "keep_weekly",
    "keep_monthly",
    "keep_yearly",
]


@given(_entries(), _POLICIES, st.sampled_from([*COUNTED, "keep_within"]), st.integers(1, 10), st.data())
def test_a_larger_number_or_limit_keeps_a_superset_and_both_what_each_keeps(
    entries, told, name, count, data
) -> None:
    told = {key: value for key, value in told.items() if key not in LIMITS}
    counted = told | ({"metric": "m", "mode": told.get("mode", "min")} if name == "keep_best" else {})
    protected = data.draw(_protections(entries))
    size = DAY if name == "keep_within" else 1
    less, more = (_gone(_planned(entries, counted | {name: n * size}, protected)) for n in (count, count + 1))
    assert more <= less
    limit, raised = data.draw(st.integers(1, 1500)), data.draw(st.integers(1, 500))
    for name in LIMITS:
        _the_size_is_never_passed_but_by_what_always_stays(entries, name, limit, protected)
        tight, wide = (_gone(_planned(entries, told | {name: n})) for n in (limit, limit + raised))
        assert wide <= tight
    rules = {key: value for key, value in told.items() if key != "incomplete"}
    if not rules:
        return
    ruled = _gone(_planned(entries, rules, protected))
    for name in LIMITS:
        limited = _gone(_planned(entries, {name: limit}, protected))
        assert _gone(_planned(entries, rules | {name: limit}, protected)) == ruled & limited


def _no_order_matters(
    entries: Sequence[Entry],
    told: Mapping[str, object],
    protected: Protected,
    first: RetentionPlan,
    order: random.Random,
) -> None:
    assert _planned(entries, told, protected) == first
    assert _planned(order.sample(entries, len(entries)), told, protected) == first
    rules = dict(order.sample(list(RULES.items()), len(RULES)))
    with patch.dict(RULES, rules, clear=True):
        again = _planned(entries, dict(order.sample(list(told.items()), len(told))), protected)
    assert _gone(again) == _gone(first)


def _what_is_damaged_does_not_count(
    entries: Sequence[Entry], told: Mapping[str, object], protected: Protected
) -> None:
    """Require that the intact ones fare as if the damaged ones had never been there."""
    told = {key: value for key, value in told.items() if key not in (*LIMITS, "incomplete")}
    protected = protected | {"reasons": {}}
    intact = [one for one in entries if one.is_sound and one.path not in protected["faults"]]
    if told and intact:
        assert _gone(_planned(entries, told, protected)) == _gone(_planned(intact, told))


def _the_size_is_never_passed_but_by_what_always_stays(
    entries: Sequence[Entry], name: str, limit: int, protected: Protected
) -> None:
    made = _planned(entries, {name: limit}, protected)
    parts = [[one] for one in made.groups] if name == "max_size" else [list(made.groups)]
    excesses = [one.excess for one in made.groups] if name == "max_size" else [*made.excess, None][:1]
    for part, excess in zip(parts, excesses, strict=True):
        over = _nbytes(part) - limit
        assert (excess is None) == (over <= 0)
        for kept in [kept for one in part for kept in one.keep] if excess is not None else ():
            fault = kept.entry.fault or protected["faults"].get(kept.entry.path)
            is_undated = name == "max_total_size" and "date" in "".join(kept.reasons)
            assert fault is not None or is_undated or _ALWAYS & set(kept.reasons)
            assert (excess.nbytes, excess.is_inevitable) == (over, True)


def _a_failed_run_keeps_its_newest_finite_one_what_rules_keep_and_what_is_protected(
    entries: Sequence[Entry], told: Mapping[str, object], protected: Protected, data: st.DataObject
) -> None:
    failed, finite = {}, {}
    for one in series_of(entries):
        intact = [two.path for two in one.entries if two.is_sound and two.path not in protected["faults"]]
        if data.draw(st.booleans()):
            failed[one.key] = "NaN"
            finite |= {one.key: data.draw(st.sampled_from(intact))} if intact else {}
    listed = protected | {"failed": failed, "finite": finite}
    without = _gone(_planned(entries, told, protected))
    assert _gone(_planned(entries, told, listed)) == without
    made = _planned(entries, told, listed | {"removes_failed": True})
    gone = _gone(made)
    assert not gone & set(finite.values())
    assert not gone & protected["reasons"].keys()
    for one in made.groups:
        if one.key not in failed:
            assert {entry.path for entry in one.remove} <= without
    if told.keys().isdisjoint(LIMITS):
        always = _ALWAYS | {"no rule", FINITE}
        for one in _planned(entries, told, protected).groups:
            ruled = {
                kept.entry.path
                for kept in one.keep
                if kept.entry.is_sound and kept.entry.path not in protected["faults"]
                if set(kept.reasons) - always
            }
            assert not gone & ruled


def _nbytes(groups: Sequence[GroupPlan]) -> int:
    """Return the bytes of all files, of which two may have one inode."""
    kept = [kept.entry for one in groups for kept in one.keep]
    files = {file.inode: file.size for entry in kept for file in entry.contents.files}
    return sum(files.values())


def _incomplete_ones_go_only_where_something_newer_is_intact(
    entries: Sequence[Entry], told: Mapping[str, object]
) -> None:
    made = _planned(entries, told | {"incomplete": "remove"})
    order = {entry.path: place for one in series_of(entries) for place, entry in enumerate(one.entries)}
    for one in made.groups:
        intact = [kept.entry for kept in one.keep if kept.entry.is_sound]
        for entry in (entry for entry in one.remove if entry.fault is not None):
            assert entry.fault.startswith("incomplete")
            assert any(
                order[two.path] > order[entry.path] and two.modified_ns >= entry.modified_ns for two in intact
            )
