"""The rules of a policy: functions from the intact checkpoints of a series to those to keep, and why.

``RULES`` is the table, by the policy's attribute. Rules know nothing of each other: what any of them keeps
stays.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, partial
from itertools import chain, islice, pairwise
from operator import attrgetter
from typing import NamedTuple

from ckpttool.amounts import duration
from ckpttool.formats.globs import Globs
from ckpttool.series.members.entry import Entry
from ckpttool.series.members.order import written_last
from ckpttool.series.retention.dates import PERIODS, date_doubts, save_time
from ckpttool.series.retention.policy import Mode, Policy

_BEST_SO_FAR = re.compile(r"(?:^|[^a-z])(?:best|min|max|lowest|highest)(?![a-z])", re.IGNORECASE)
"""Words in the name of a metric of which only the best value so far is kept."""

KeptWithReasons = Iterator[tuple[Entry, str]]
"""Checkpoints to keep, each with the reason in a few words."""


class Dated(NamedTuple):
    """A checkpoint with its time: in seconds since 1970, and in the local zone."""

    seconds: float
    when: datetime
    entry: Entry


@dataclass(frozen=True)
class History:
    """What the rules see of a series.

    Attributes:
        intact: Its intact checkpoints, the newest first.
        now: In seconds since 1970: what is dated later has no date. None believes every date.
        followers: Paths of those for which the metric of what belongs with them counts.
        root: The directory that globs with a slash are relative to.
    """

    intact: Sequence[Entry]
    now: float | None = None
    followers: Collection[str] = ()
    root: str = os.curdir

    @cached_property
    def written_last(self) -> Sequence[Entry]:
        """Return them with the last written first, where times contradict their order; else none."""
        return written_last(self.intact[::-1])

    @cached_property
    def _doubts(self) -> Mapping[str, str]:
        return date_doubts(self.intact, self.now)

    @cached_property
    def dated(self) -> Sequence[Dated]:
        """Return those with a date that can be believed, the newest first."""
        times = [(save_time(entry), entry) for entry in self.intact if entry.path not in self._doubts]
        return [Dated(seconds, datetime.fromtimestamp(seconds), entry) for seconds, entry in times]

    @cached_property
    def by_time(self) -> Sequence[Dated]:
        """Return those with a date, the last saved first; of equals the newer."""
        return sorted(self.dated, key=attrgetter("seconds"), reverse=True)

    @property
    def undated(self) -> KeptWithReasons:
        """Yield what has no date that can be believed: nobody knows that it is old."""
        doubts = ((entry, self._doubts.get(entry.path)) for entry in self.intact)
        return ((entry, doubt) for entry, doubt in doubts if doubt is not None)


Rule = Callable[[Policy, History], KeptWithReasons]


def _keep_last(policy: Policy, history: History) -> KeptWithReasons:
    """Keep the newest, and as many of what a restarted run wrote last, though its epochs come before."""
    count = policy.keep_last or 0
    for entry in history.intact[:count]:
        yield entry, f"last {count}"
    for entry in history.written_last[:count]:
        yield entry, f"last {count} by time"


def _keep_best(policy: Policy, history: History) -> KeptWithReasons:
    """Keep the best, and what nobody can compare; what follows another stays where that stays."""
    metric, count = policy.metric or "", policy.keep_best
    for entry in rank_by_metric(policy, history)[:count]:
        yield entry, f"best {count} by {metric} ({entry.recorded_metric(metric):.6g})"
    for entry in history.intact:
        unmeasured = metric_lack(entry, metric)
        if unmeasured is not None and not (
            entry.path in history.followers and entry.recorded_metric(metric) is None
        ):
            yield entry, unmeasured


def rank_by_metric(policy: Policy, history: History) -> list[Entry]:
    """Return what has a metric, the best first, and what is infinite last.

    Of equals the newer comes first, unless the metric is carried on.
    """
    metric = policy.metric or ""
    sign = -1 if policy.mode == "max" else 1
    measured = [
        (entry, value)
        for entry in history.intact
        if (value := entry.recorded_metric(metric)) is not None and not math.isnan(value)
    ]
    if is_carried_on(metric, [value for _, value in reversed(measured)], policy.mode):
        measured.reverse()

    def rank(one: tuple[Entry, float]) -> tuple[bool, float]:
        _, value = one
        return math.isinf(value), sign * value if math.isfinite(value) else 0

    return [entry for entry, _ in sorted(measured, key=rank)]


def is_carried_on(metric: str, values: Iterable[float], mode: Mode | None) -> bool:
    """Tell whether later checkpoints repeat a metric, as they do ``best_loss``: of equals the oldest has it.

    So it is with what is named so, and with what never gets worse and repeats its best value.
    """
    if metric.startswith("best"):
        return True
    sign = -1 if mode == "max" else 1
    known = [sign * value if math.isfinite(value) else math.inf for value in values]
    if any(one < two for one, two in pairwise(known)):
        return False
    return known[-2:-1] == known[-1:] or _BEST_SO_FAR.search(metric) is not None


def metric_lack(entry: Entry, metric: str) -> str | None:
    """Return why a checkpoint can't be compared by a metric, or None where it can."""
    value = entry.recorded_metric(metric)
    if value is None:
        return f"no {metric}"
    return f"{metric} is NaN" if math.isnan(value) else None


def _keep_every(count: str, policy: Policy, history: History) -> KeptWithReasons:
    """Keep the first of each stretch of so many steps, or epochs, and what has none."""
    each = getattr(policy, f"keep_every_{count}s")
    value_of = attrgetter(count)
    stretch = count if each == 1 else f"{each:,} {count}s"
    for entry in stretches(each, value_of, history).values():
        yield entry, f"every {stretch} ({number(value_of(entry))})"
    for entry in history.intact:
        if value_of(entry) is None:
            yield entry, f"no {count}"


def stretches(each: int, value_of: Callable[[Entry], float | None], history: History) -> dict[int, Entry]:
    """Return the first checkpoint at or after each multiple, by the multiple; of equals the newer."""
    first: dict[int, Entry] = {}
    for entry in sorted(
        (one for one in history.intact if value_of(one) is not None), key=lambda one: value_of(one) or 0
    ):
        first.setdefault(int((value_of(entry) or 0) // each), entry)
    return first


def number(value: float) -> str:
    """Return an epoch or a step as people write it."""
    return f"{int(value):,}" if value == int(value) else f"{value:,}"


def _keep_periods(rule: str, policy: Policy, history: History) -> KeptWithReasons:
    """Keep the newest of each of so many natural periods that have one, and what has no date."""
    count = getattr(policy, rule)
    word = rule.removeprefix("keep_")
    for period, entry in islice(newest_of_periods(rule, history), count):
        yield entry, f"{word} {period}"
    yield from history.undated


def newest_of_periods(rule: str, history: History) -> Iterator[tuple[str, Entry]]:
    """Yield each natural period that has a checkpoint, in words, and its newest one; the newest first."""
    key, format = PERIODS[rule]
    seen: set[Hashable] = set()
    for _, when, entry in history.by_time:
        if (period := key(when)) not in seen:
            seen.add(period)
            yield when.strftime(format), entry


def _keep_within(policy: Policy, history: History) -> KeptWithReasons:
    """Keep what is not much older than the newest that has a date, and what has none."""
    span = policy.keep_within or 0
    for seconds, _, entry in history.dated:
        if seconds >= history.dated[0].seconds - span:
            yield entry, f"within {duration(span)}"
    yield from history.undated


def _keep_younger(policy: Policy, history: History) -> KeptWithReasons:
    """Keep what was saved a short time ago from now, and what has no date; else the newest."""
    span = policy.older_than or 0
    is_young = [one for one in history.dated if history.now is None or one.seconds > history.now - span]
    for _, _, entry in is_young:
        yield entry, f"younger than {duration(span)}"
    undated = list(history.undated)
    yield from undated
    if not is_young and not undated:
        for entry in history.intact[:1]:
            yield entry, f"none is younger than {duration(span)}"


def _keep_named(policy: Policy, history: History) -> KeptWithReasons:
    globs = Globs(policy.keep_names, history.root)
    for entry in history.intact:
        glob = next(chain.from_iterable(map(globs.of, entry.places)), None)
        if glob is not None:
            yield entry, f"name {glob}"


RULES: Mapping[str, Rule] = {
    "keep_last": _keep_last,
    "keep_best": _keep_best,
    "keep_every_steps": partial(_keep_every, "step"),
    "keep_every_epochs": partial(_keep_every, "epoch"),
    **{name: partial(_keep_periods, name) for name in PERIODS},
    "keep_within": _keep_within,
    "older_than": _keep_younger,
    "keep_names": _keep_named,
}
