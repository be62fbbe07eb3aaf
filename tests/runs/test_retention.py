"""The policy as a pure function: what stays, why, and what no input may ever make it do."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool import Policy, UsageError
from tests.support.directories import Entry, damaged, faulty_entry, file_of, incomplete, make_entry
from tests.support.retention import plan_of, series_of, series_plan


def _entry(series: str, epoch: int, fault: str | None) -> Entry:
    name = f"{series}_epoch_{epoch}.pth"
    if fault is None:
        return make_entry(name, modified=epoch, epoch=None)
    return faulty_entry(name, fault, modified=epoch, epoch=None, inside=(None, None))


FAULTS = st.sampled_from([None, None, None, damaged("cut short"), incomplete("a shard is missing")])
SERIES = st.dictionaries(
    st.tuples(st.sampled_from("abc"), st.integers(0, 30)), FAULTS, min_size=1, max_size=25
).map(lambda told: [_entry(*key, fault) for key, fault in told.items()])


@given(SERIES, st.integers(1, 8), st.data())
def test_what_is_protected_newest_or_faulty_stays(entries, keep, data) -> None:
    protected = data.draw(st.sets(st.sampled_from([entry.path for entry in entries])))
    made = plan_of(entries, Policy(keep_last=keep), reasons={path: ["latest"] for path in protected})
    gone = {entry.path for entry in made.removals}
    assert not gone & protected
    assert not gone & {entry.path for entry in entries if entry.fault}
    for one in series_of(entries):
        intact = [entry.path for entry in one.entries if entry.is_sound]
        assert not gone & set(intact[-keep:])
        assert len([path for path in intact if path not in gone]) >= min(keep, len(intact))


@given(SERIES, st.integers(1, 8))
def test_what_a_read_finds_damaged_does_not_count(entries, keep) -> None:
    newest = {one.entries[-1].path: "damaged: checksum" for one in series_of(entries)}
    made = plan_of(entries, Policy(keep_last=keep), faults=newest)
    for one in made.groups:
        intact = [kept for kept in one.keep if kept.entry.is_sound and kept.entry.path not in newest]
        assert len(intact) >= keep or not one.remove
        assert not set(newest) & {entry.path for entry in one.remove}


@given(SERIES, st.integers(1, 8))
def test_a_larger_number_keeps_a_superset(entries, keep) -> None:
    less, more = (
        {entry.path for entry in plan_of(entries, Policy(keep_last=n)).removals} for n in (keep, keep + 1)
    )
    assert more <= less


@given(SERIES, st.integers(1, 8), st.randoms(use_true_random=False))
def test_the_order_of_the_input_does_not_matter(entries, keep, order: random.Random) -> None:
    shuffled = order.sample(entries, len(entries))
    plans = [plan_of(one, Policy(keep_last=keep)) for one in (entries, shuffled)]
    assert plans[0] == plans[1]


@given(SERIES, st.integers(1, 8))
def test_every_checkpoint_is_told_of_once(entries, keep) -> None:
    made = plan_of(entries, Policy(keep_last=keep))
    told = [kept.entry.path for one in made.groups for kept in one.keep]
    told += [entry.path for entry in made.removals]
    assert sorted(told) == sorted(entry.path for entry in entries)
    assert all(kept.reasons for one in made.groups for kept in one.keep)


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


def test_a_series_that_is_skipped_is_left_alone(entry) -> None:
    entries = [entry(f"m_epoch_{epoch}.pth") for epoch in range(1, 6)]
    skipped = {"run/m_epoch_*.pth": "latest leads nowhere"}
    made = series_plan(entries, Policy(keep_last=2), skipped=skipped)
    assert (made.skipped, made.remove, len(made.keep)) == ("latest leads nowhere", (), 5)


def test_the_newest_incomplete_one_stays_as_such_where_none_is_complete() -> None:
    entries = [faulty_entry(f"m_epoch_{n}.pth", incomplete("a shard is missing")) for n in (1, 2)]
    made = series_plan(entries, Policy(keep_last=1))
    assert made.keep[0].reasons == ("none is intact", "incomplete: a shard is missing")
    assert not made.remove


@pytest.mark.parametrize("told", [{}, {"keep_last": 0}, {"keep_last": -3}])
def test_a_policy_that_keeps_nothing_is_refused(told) -> None:
    with pytest.raises(UsageError):
        Policy(**told)


def test_bytes_that_have_another_name_are_not_freed(entry) -> None:
    def linked(name: str, inode: int, links: int) -> Entry:
        return entry(name, files=[file_of(name, inode, links=links)])

    saves = [linked("a_epoch_1.pt", 1, 1), linked("a_epoch_2.pt", 2, 2), linked("a_epoch_3.pt", 2, 2)]
    assert plan_of(saves, Policy(keep_last=1)).freed_bytes == 100
    assert plan_of([*saves, linked("a_epoch_4.pt", 3, 1)], Policy(keep_last=1)).freed_bytes == 200
