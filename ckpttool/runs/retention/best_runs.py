"""The ranks of runs: ``--keep-best-runs`` removes all of those that are not among the best.

A run is as good as its best intact checkpoint. One that nobody can rank, or that may be going on, stays.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from ckpttool.core.errors import UsageError
from ckpttool.runs.members.entry import Entry
from ckpttool.runs.members.order import Group
from ckpttool.runs.reasons import Code, code_of
from ckpttool.runs.retention.rules import History, Policy, metric_lack, ordinal, rank_by_metric

_GOES_ON = frozenset({Code.BEING_WRITTEN, Code.TOO_YOUNG})

RankedSeries = tuple[Group, History]


class RunRank(NamedTuple):
    """Whether all of a run goes, and why it does or doesn't."""

    goes: bool
    reason: str


def rank_runs(
    series: Sequence[tuple[Group, Policy | None, History]], protections: Mapping[str, Sequence[str]]
) -> dict[str, RunRank]:
    """Return the rank of the run of each series whose policy keeps the best runs, by the series' key.

    Args:
        series: All series, each with its policy and what rules see of it.
        protections: Why checkpoints stay whatever rules say, by path.

    Raises:
        UsageError: A series is of several runs.
    """
    by_policy: dict[Policy, dict[str, list[RankedSeries]]] = defaultdict(lambda: defaultdict(list))
    for group, policy, history in series:
        if policy is not None and policy.keep_best_runs is not None:
            runs = {entry.run for entry in group.entries}
            if len(runs) > 1:
                several = f"{group.key} has checkpoints of {len(runs):,} runs"
                raise UsageError(f"--keep-best-runs: {several} (--group-by run separates them)")
            by_policy[policy][runs.pop()].append((group, history))
    return {
        group.key: rank
        for policy, by_run in by_policy.items()
        for members, rank in _ranks(policy, list(by_run.values()), protections)
        for group, _ in members
    }


def _ranks(
    policy: Policy, runs: Sequence[Sequence[RankedSeries]], protections: Mapping[str, Sequence[str]]
) -> Iterator[tuple[Sequence[RankedSeries], RunRank]]:
    """Yield each run with its rank; of equals, the one that was written last is the better."""
    metric, count = policy.metric or "", policy.keep_best_runs or 0
    sign = -1 if policy.resolved_mode == "max" else 1
    measured: list[tuple[float, int, Sequence[RankedSeries]]] = []
    for members in runs:
        entries = [entry for group, _ in members for entry in group.entries]
        best = [_best(policy, history) for _, history in members]
        values = [sign * value for value in best if value is not None]
        if not values:
            yield members, RunRank(False, f"its run has no {metric}")
        else:
            measured.append((min(values), -max(entry.modified_ns for entry in entries), members))
    for place, (value, _, members) in enumerate(sorted(measured, key=lambda one: one[:2]), 1):
        rank = f"{ordinal(place, 'best')} run by {metric} ({sign * value:.6g})"
        reasons = chain.from_iterable(
            protections.get(entry.path, ()) for group, _ in members for entry in group.entries
        )
        if place <= count:
            yield members, RunRank(False, rank)
        elif any(code_of(reason) in _GOES_ON for reason in reasons):
            yield members, RunRank(False, "its run may be going on")
        else:
            yield members, RunRank(True, f"{rank}, not one of the best {count:,}")


def _best(policy: Policy, history: History) -> float | None:
    """Return the best value of a series; an infinite one is the worst there is."""
    metric = policy.metric or ""
    ranked = [entry for entry in rank_by_metric(policy, history) if metric_lack(entry, metric) is None]
    value = ranked[0].recorded_metric(metric) if ranked else None
    if value is None or math.isfinite(value):
        return value
    return -math.inf if policy.resolved_mode == "max" else math.inf


def reasons_from_outside(
    entries: Sequence[Entry],
    reasons: Mapping[str, Sequence[str]],
    holders: Mapping[tuple[str, str], str],
) -> dict[str, list[str]]:
    """Return why checkpoints of runs that go stay, by path.

    What such a run's own checkpoints call its best goes with them, unless a checkpoint that says so stays.

    Args:
        entries: The checkpoints of these runs.
        reasons: All that protects them, by path.
        holders: The file that a reason comes from, by the checkpoint's path and the reason.
    """
    paths = {entry.path for entry in entries}
    speakers: dict[tuple[str, str], str | None] = {}
    for entry in entries:
        for reason in reasons.get(entry.path, ()):
            place = holders.get((entry.path, reason), "")
            while place and place not in paths and os.path.dirname(place) != place:
                place = os.path.dirname(place)
            speakers[entry.path, reason] = place if place in paths else None
    staying = {path for (path, _), speaker in speakers.items() if speaker is None}
    while more := {path for (path, _), speaker in speakers.items() if speaker in staying} - staying:
        staying |= more
    found: dict[str, list[str]] = defaultdict(list)
    for (path, reason), speaker in speakers.items():
        if speaker is None or speaker in staying:
            found[path].append(reason)
    return found
