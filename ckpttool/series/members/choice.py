"""Which of several series is meant where one checkpoint is wanted: to go on from, or to be looked at."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from ckpttool.checkpoint import Granularity
from ckpttool.series.members.entry import Entry
from ckpttool.series.members.order import Group, in_order

AVERAGED = re.compile(r"(?:^|[^a-z])(?:ema|swa|avg|averaged?)(?![a-z])", re.IGNORECASE)
"""Averages of weights are for use; a training goes on from the weights themselves."""

Rank = tuple[int, bool, bool]


def newest_first(
    groups: Iterable[Group], is_meant: Callable[[Entry], bool] = lambda entry: True
) -> Iterator[Entry]:
    """Yield the checkpoints of all series: the most to resume from first, then the newest.

    Each costs a look at the newest of all series, so whoever takes the first that will do asks for no more.

    Args:
        groups: The series.
        is_meant: Tells which of their checkpoints are yielded.
    """
    for tier in tiers(groups):
        yield from _merged([list(filter(is_meant, one.entries)) for one in tier])


def tiers(groups: Iterable[Group]) -> list[list[Group]]:
    """Return series in the order in which one would resume from them; those of one tier compete."""
    ranked: dict[Rank, list[Group]] = {}
    for one in groups:
        ranked.setdefault(_rank(one), []).append(one)
    return [ranked[rank] for rank in sorted(ranked)]


def _rank(group: Group) -> Rank:
    """Return how little there is to resume from, whether nothing counts, and whether it is an average."""
    sound = [entry for entry in group.entries if entry.is_sound]
    if not sound:
        return 4, True, True
    newest = sound[-1]
    number = newest.fields.number if newest.fields.is_ordinal else None
    is_uncounted = all(value is None for value in (newest.epoch, newest.step, number))
    if newest.has_weights:
        level = 0 if newest.granularity is Granularity.FULL else 1
    else:
        level = 2 if newest.granularity is Granularity.PARTIAL else 3
    return level, is_uncounted, bool(AVERAGED.search(newest.name))


def _merged(waiting: list[list[Entry]]) -> Iterator[Entry]:
    while waiting := [one for one in waiting if one]:
        ordered, _ = in_order([one[-1] for one in waiting])
        newest = ordered[-1]
        yield newest
        next(one for one in waiting if one[-1] is newest).pop()
