"""What orders a series: the counts that all of it have, and which of those decides where they disagree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ckpttool.series.members.entry import Entry

CONTRADICTION_SECONDS = 60
"""Copies made in one go have times within moments of one another; a restarted run has not."""

Criterion = Callable[[Entry], Any]

_INSIDE: tuple[Criterion, ...] = (lambda entry: entry.inside[0], lambda entry: entry.inside[1])
_NAMED: tuple[Criterion, ...] = (
    lambda entry: entry.fields.epoch,
    lambda entry: entry.fields.step,
    lambda entry: entry.fields.number,
)
COUNTS: tuple[Criterion, ...] = (*_INSIDE, *_NAMED)
"""Epoch and step inside, then epoch, step and number of the name."""
CRITERIA: tuple[Criterion, ...] = (*COUNTS, lambda entry: entry.saved_at)
"""The counts, and the time inside."""

_EPOCHS, _STEPS = (_INSIDE[0], _NAMED[0]), (_INSIDE[1], _NAMED[1])


def had_by_all(entries: Sequence[Entry], criteria: Sequence[Criterion] = CRITERIA) -> list[Criterion]:
    """Return the criteria that all checkpoints have."""
    return [one for one in criteria if all(one(entry) is not None for entry in entries)]


def places(entries: Sequence[Entry], criteria: Sequence[Criterion]) -> list[tuple[Any, ...]]:
    """Return the places of checkpoints by some criteria."""
    return [tuple(one(entry) for one in criteria) for entry in entries]


def in_order_of(entries: Sequence[Entry], criteria: Sequence[Criterion]) -> list[Entry]:
    """Return checkpoints from the oldest to the newest by some criteria, and by their files' times."""

    def place(entry: Entry) -> tuple[Any, ...]:
        return (*(one(entry) for one in criteria), entry.modified_ns, entry.unit.path)

    return sorted(entries, key=place)


@dataclass(frozen=True, slots=True)
class Decision:
    """What orders a series.

    Attributes:
        criteria: What decides, the first first.
        usual: What would if nothing disagreed.
        counts: What reads epochs and steps, where these disagree.
        named: What the names count, where what is inside disagrees.
        warnings: What disagrees, and what decides.
    """

    criteria: Sequence[Criterion]
    usual: Sequence[Criterion]
    counts: tuple[Criterion, Criterion] | None
    named: Sequence[Criterion]
    warnings: Sequence[str]


def decision(entries: Sequence[Entry]) -> Decision:
    """Return what orders checkpoints.

    Times may settle what disagrees. Where they don't, epochs come before steps, and what is inside before
    the names, unless it begins again while they go on.
    """
    usual = criteria = had_by_all(entries)
    warnings = []
    counts = _disagreeing(entries)
    if counts is not None:
        epochs, steps = counts
        if _confirm(entries, steps):
            criteria = [steps, epochs, *(one for one in usual if one not in counts)]
        first = "steps" if criteria[0] is steps else "epochs"
        warnings.append(f"epochs and steps disagree about the order; {first} decide")
    named = _contradicting_names(entries, criteria)
    if named:
        decides = _is_borne_out(entries, named, criteria) or (
            _begins_again(entries, named) and not _is_borne_out(entries, criteria, named)
        )
        first = "the names decide" if decides else "what is inside decides"
        criteria = [*named, *(one for one in criteria if one not in named)] if decides else criteria
        warnings = [] if decides else warnings
        warnings.append(f"the names and what is inside disagree about the order; {first}")
    return Decision(criteria, usual, counts, named, warnings)


def newest_otherwise(entries: Sequence[Entry]) -> Iterator[tuple[Entry, str]]:
    """Yield what is newest by a count that didn't decide, and by which: epoch, step, name, what is inside.

    Args:
        entries: Sound ones, at least one.
    """
    found = decision(entries)
    others: list[tuple[Sequence[Criterion], str]] = []
    if found.counts is not None:
        others += [(found.counts, "epoch"), (found.counts[::-1], "step")]
    if found.named:
        others += [(found.named, "its name"), (found.usual, "what is inside")]
    told = {in_order_of(entries, found.criteria)[-1].path} if others else set()
    for criteria, name in others:
        newest = in_order_of(entries, criteria)[-1]
        if newest.path not in told:
            told.add(newest.path)
            yield newest, name


def is_flat(entries: Sequence[Entry]) -> bool:
    """Tell whether all files are of one moment, as a copy makes them: their times say nothing then."""
    times = [entry.modified_ns for entry in entries]
    return max(times) - min(times) <= CONTRADICTION_SECONDS * 10**9


def _contradicting_names(entries: Sequence[Entry], criteria: Sequence[Criterion]) -> list[Criterion]:
    """Return the counts of the names where they tell all apart, and the order by what is inside is another.

    Only in a series of one name do they count the same, and only after some words do they count saves.
    """
    named = had_by_all(entries, _NAMED)
    if not named or not any(one in _INSIDE for one in criteria) or not _count_alike(entries):
        return []
    rows = sorted(zip(places(entries, named), places(entries, criteria), strict=True))
    is_told_apart = all(one[0] < two[0] for one, two in pairwise(rows))
    is_same = all(one[1] <= two[1] for one, two in pairwise(rows))
    return named if is_told_apart and not is_same else []


def _begins_again(entries: Sequence[Entry], named: Sequence[Criterion]) -> bool:
    """Tell whether what is inside counts anew while the names go on: it repeats, or falls behind for good."""
    inside = had_by_all(entries, _INSIDE)
    if len(set(places(entries, inside))) < len(entries):
        return True
    count = named[0]
    same = next((kind[0] for kind in (_EPOCHS, _STEPS) if count in kind), inside[0])
    if same not in inside:
        return False
    behind = [count(entry) - same(entry) for entry in in_order_of(entries, named)]
    return behind[0] >= -1 and all(one <= two for one, two in pairwise(behind))


def _count_alike(entries: Sequence[Entry]) -> bool:
    blanks = {entry.fields.blank for entry in entries}
    return len(blanks) == 1 and all(entry.fields.is_ordinal for entry in entries)


def _is_borne_out(
    entries: Sequence[Entry], criteria: Sequence[Criterion], others: Sequence[Criterion]
) -> bool:
    """Tell whether the files' times bear one order out rather than another, and aren't those of a copy."""
    times, other_times = (
        [entry.modified_ns for entry in in_order_of(entries, one)] for one in (criteria, others)
    )
    latest = max(times)
    is_last = times[-1] == latest > other_times[-1]
    return is_last and not is_flat(entries) and _descents(times) <= _descents(other_times)


def _descents(times: Sequence[int]) -> int:
    return sum(later <= earlier for earlier, later in pairwise(times))


def _disagreeing(entries: Sequence[Entry]) -> tuple[Criterion, Criterion] | None:
    """Return what reads epochs and steps where these differ about the order: one of them began again."""
    epochs, steps = (next(iter(had_by_all(entries, kind)), None) for kind in (_EPOCHS, _STEPS))
    if epochs is None or steps is None:
        return None
    pairs = [(epochs(entry), steps(entry)) for entry in entries]
    is_same = sorted(pairs) == sorted(pairs, key=lambda pair: (pair[1], pair[0]))
    return None if is_same else (epochs, steps)


def _confirm(entries: Sequence[Entry], count: Criterion) -> bool:
    """Tell whether the files' times bear a count out: each later one was clearly written later."""
    ordered = sorted(entries, key=lambda entry: (count(entry), entry.modified_ns))
    times = [entry.modified_ns for entry in ordered]
    return all(later - earlier > CONTRADICTION_SECONDS * 10**9 for earlier, later in pairwise(times))
