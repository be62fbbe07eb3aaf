"""Rules across the series of a directory: missing metrics, ranks of runs, limits of size.

A run is as good as its best intact checkpoint. A run that can't be ranked, or may still be training, is kept.
Checkpoints that other rules keep count towards no limit of size: together they may exceed it.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from ckpttool.core.errors import UsageError
from ckpttool.core.text import counted, size
from ckpttool.formats.discovery import MATCHED_NOTHING, Globs
from ckpttool.runs.entry import Entry
from ckpttool.runs.reasons import Code, Reason, code_of
from ckpttool.runs.retention.rules import (
    RULES,
    History,
    Policy,
    date_doubts,
    metric_lack,
    ordinal,
    rank_by_metric,
)
from ckpttool.runs.series import Group

SeriesPolicies = Sequence[tuple[Group, Policy | None]]
"""Series, each with its policy."""


def require_metrics(chosen: SeriesPolicies) -> None:
    """Raise UsageError if no checkpoint has the metric that a policy names."""
    for metric, sound in _sound_by_metric(chosen).items():
        if sound and all(entry.recorded_metric(metric) is None for entry in sound):
            known = {name for entry in sound for name in entry.metrics}
            known |= {"loss" for entry in sound if entry.loss is not None}
            there = f"metrics: {', '.join(sorted(known))}" if known else "none has any metric"
            raise UsageError(f"no checkpoint has a metric {metric!r} ({there}; --metrics FILE reads a log)")


def lack_warnings(chosen: SeriesPolicies, now: float | None) -> Iterator[str]:
    """Yield the numbers of checkpoints that rules keep for a missing metric, step, epoch or date."""
    for metric, sound in _sound_by_metric(chosen).items():
        lacks = [metric_lack(entry, metric) is not None for entry in sound]
        yield from _kept_for_lack(lacks, f"no {metric}")
    for count in ("step", "epoch"):
        lacks = [
            getattr(entry, count) is None for entries in _sound_series(chosen, count) for entry in entries
        ]
        yield from _kept_for_lack(lacks, f"no {count}")
    lacks = []
    for entries in _sound_series(chosen, "date"):
        doubts = date_doubts(entries, now)
        lacks += [entry.path in doubts for entry in entries]
    yield from _kept_for_lack(lacks, "no credible date")


def _kept_for_lack(lacks: Sequence[bool], what: str) -> Iterator[str]:
    if count := sum(lacks):
        verb, they = ("has", "it is") if count == 1 else ("have", "they are")
        yield f"{count:,} of {counted(len(lacks), 'checkpoint')} {verb} {what}; {they} kept"


def _sound_by_metric(chosen: SeriesPolicies) -> Mapping[str, list[Entry]]:
    """Return the sound checkpoints of series whose policies name a metric, by the metric."""
    sound: dict[str, list[Entry]] = defaultdict(list)
    for group, policy in chosen:
        if policy is not None and policy.metric is not None:
            sound[policy.metric] += [entry for entry in group.entries if entry.is_sound]
    return sound


def _sound_series(chosen: SeriesPolicies, need: str) -> list[list[Entry]]:
    """Return the sound checkpoints of each series whose policy has a rule with this need."""
    return [
        [entry for entry in group.entries if entry.is_sound]
        for group, policy in chosen
        if policy is not None and any(RULES[name].needs == need for name in policy.rules)
    ]


def unmatched_names(chosen: SeriesPolicies, root: str) -> list[str]:
    """Return a warning for each ``--keep-name`` glob that no checkpoint matches."""
    kept = [(group, policy.keep_names) for group, policy in chosen if policy is not None]
    globs = dict.fromkeys(glob for _, names in kept for glob in names)
    matcher = Globs(tuple(globs), root)
    matched = {
        glob
        for group, names in kept
        if names
        for entry in group.entries
        for path in entry.places
        for glob in matcher.matching(path)
        if glob in names
    }
    return [
        Reason(Code.MATCHED_NOTHING, f"--keep-name {glob!r} {MATCHED_NOTHING}")
        for glob in globs
        if glob not in matched
    ]


_IN_PROGRESS = frozenset({Code.BEING_WRITTEN, Code.TOO_YOUNG})
"""Codes of protections that show that a run may still write checkpoints."""

RankedSeries = tuple[Group, History]


class RunRank(NamedTuple):
    """Decision on a whole run.

    Attributes:
        is_removed: Whether it is removed.
        reason: Its rank, or why it has none.
    """

    is_removed: bool
    reason: str


def rank_runs(
    series: Sequence[tuple[Group, Policy | None, History]], protections: Mapping[str, Sequence[str]]
) -> dict[str, RunRank]:
    """Return the rank of the run of each series whose policy keeps the best runs, by the series' key.

    Args:
        series: All series, each with its policy and history.
        protections: Reasons to keep checkpoints regardless of rules, by path.

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
    """Yield each run with its rank; of equal runs, the one written last is better."""
    metric, count = policy.metric or "", policy.keep_best_runs or 0
    sign = -1 if policy.resolved_mode == "max" else 1
    # A run may have several series, such as one of each name; the best value in any of them counts.
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
        elif any(code_of(reason) in _IN_PROGRESS for reason in reasons):
            yield members, RunRank(False, "its run may be in progress")
        else:
            yield members, RunRank(True, f"{rank}, not one of the best {count:,}")


def _best(policy: Policy, history: History) -> float | None:
    """Return the best value of a series, None without any; an infinite value counts as the worst."""
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
    """Return reasons to keep checkpoints of removed runs, by path: those that come from outside of the runs.

    Args:
        entries: The checkpoints of these runs.
        reasons: Their protections, by path.
        holders: The file that a reason comes from, by the checkpoint's path and the reason.
    """
    # A reason's holder is the file that it comes from. If that is (in) a checkpoint of a removed run, such as
    # the newest one that names the best, it counts only if this checkpoint is kept for another reason; so the
    # kept ones are extended until no more follow. Reasons without a holder, or with one elsewhere, count.
    paths = {entry.path for entry in entries}
    inner_holders: dict[tuple[str, str], str | None] = {}
    for entry in entries:
        for reason in reasons.get(entry.path, ()):
            place = holders.get((entry.path, reason), "")
            while place and place not in paths and os.path.dirname(place) != place:
                place = os.path.dirname(place)
            inner_holders[entry.path, reason] = place if place in paths else None
    kept = {path for (path, _), holder in inner_holders.items() if holder is None}
    while more := {path for (path, _), holder in inner_holders.items() if holder in kept} - kept:
        kept |= more
    found: dict[str, list[str]] = defaultdict(list)
    for (path, reason), holder in inner_holders.items():
        if holder is None or holder in kept:
            found[path].append(reason)
    return found


@dataclass(frozen=True, slots=True)
class Draft:
    """Plan of a series before limits of size.

    Attributes:
        policy: Its policy; None without one.
        reasons: Reasons to keep each checkpoint, by path; empty if only a limit may keep it.
        candidates: Checkpoints that are kept if no limit removes them, the oldest first.
        unlimited: Paths of checkpoints that no limit removes.
        undated: Why checkpoints have no credible date, by path: they may be the newest.
        rank: The rank of its run, if its policy ranks runs.
        slim: Checkpoints to slim if they are kept.
    """

    policy: Policy | None
    reasons: Mapping[str, Sequence[str]]
    candidates: Sequence[Entry]
    unlimited: Collection[str]
    undated: Mapping[str, str] = field(default_factory=dict)
    rank: RunRank | None = None
    slim: Sequence[Entry] = ()

    def reasons_with_limits(self, too_large: Collection[str]) -> dict[str, list[str]]:
        """Return reasons to keep each checkpoint, by path, given those that exceed a limit."""
        reasons = {path: list(reasons) for path, reasons in self.reasons.items()}
        policy = self.policy
        if policy is None or not policy.has_limit:
            return reasons
        for entry in self.candidates:
            if entry.path in too_large or entry.path in self.unlimited:
                continue
            fits = [] if policy.max_size is None else [f"fits {size(policy.max_size)}"]
            if policy.max_total_size is not None:
                # A checkpoint without a date may be new: it is kept, with that reason.
                undated = self.undated.get(entry.path)
                fits.append(undated or f"fits {size(policy.max_total_size)} in total")
            reasons[entry.path] = list(dict.fromkeys((*reasons[entry.path], *fits)))
        return reasons


class Excess(NamedTuple):
    """Excess of kept checkpoints over a limit of size.

    Attributes:
        rule: The limit's attribute in ``Policy``.
        limit: The limit, in bytes.
        kept_bytes: Bytes of all kept checkpoints.
        required_bytes: Bytes of those that are protected, or kept by other rules; if these alone exceed the
            limit, it can't be met.
    """

    rule: str
    limit: int
    kept_bytes: int
    required_bytes: int

    @property
    def nbytes(self) -> int:
        """Return the excess in bytes."""
        return self.kept_bytes - self.limit

    @property
    def is_inevitable(self) -> bool:
        """Return whether the limit can't be met."""
        return self.required_bytes > self.limit

    def __str__(self) -> str:
        kept = f"{size(self.kept_bytes)} {'kept' if self.rule == 'max_size' else 'kept in total'}"
        return f"{kept}, {size(self.nbytes)} more than {RULES[self.rule].flags[0]} {size(self.limit)}"


def excess(rule: str, limit: int | None, kept: Sequence[Entry], required: Iterable[Entry]) -> Excess | None:
    """Return the excess of kept checkpoints over a limit; None if there is none."""
    if limit is None or (kept_bytes := used_bytes(kept)) <= limit:
        return None
    return Excess(rule, limit, kept_bytes, used_bytes(required))


def removals_for_limits(drafts: Sequence[Draft]) -> dict[str, str]:
    """Return why checkpoints exceed a limit, by path: first that of their series, then the total one."""
    # Limits drop the oldest checkpoints until the rest fits, but none that is protected or newest
    # (``unlimited``). The total limit drops from all series by time, whatever their sizes; it keeps undated
    # checkpoints, which may be new.
    reasons: dict[str, str] = {}
    for draft in drafts:
        if draft.policy is not None and (limit := draft.policy.max_size) is not None:
            why = f"--max-size {size(limit)}: the oldest are removed until the rest fits"
            reasons.update(dict.fromkeys(_drop_oldest(draft.candidates, draft.unlimited, limit), why))
    limit = total_limit(draft.policy for draft in drafts)
    if limit is None:
        return reasons
    saves: list[Entry] = []
    unlimited: set[str] = set()
    for draft in drafts:
        saves += [entry for entry in draft.candidates if entry.path not in reasons]
        # A series without this limit keeps everything, whatever the total is.
        if draft.policy is not None and draft.policy.max_total_size is not None:
            unlimited.update((*draft.unlimited, *draft.undated))
        else:
            unlimited.update(entry.path for entry in draft.candidates)
    why = f"--max-total-size {size(limit)}: the oldest of all series are removed until the rest fits"
    saves.sort(key=attrgetter("save_time"))
    reasons.update(dict.fromkeys(_drop_oldest(saves, unlimited, limit), why))
    return reasons


def total_limit(policies: Iterable[Policy | None]) -> int | None:
    """Return the limit of all series together, None without one."""
    return next((one.max_total_size for one in policies if one is not None and one.max_total_size), None)


def _drop_oldest(saves: Sequence[Entry], unlimited: Collection[str], limit: int) -> list[str]:
    """Return the paths of the oldest checkpoints to remove until the rest fits a limit."""
    # Trainers hard-link a checkpoint as best or last, so files are counted by device and inode, and removing
    # a checkpoint frees only files that no remaining one has.
    names, sizes = _files(saves)
    total = sum(sizes.values())
    dropped = []
    for entry in saves:
        if total <= limit:
            break
        if entry.path in unlimited:
            continue
        dropped.append(entry.path)
        for file in entry.contents.files:
            key = file.device, file.inode
            names[key] -= 1
            total -= 0 if names[key] else sizes[key]
    return dropped


def used_bytes(entries: Iterable[Entry]) -> int:
    """Return the bytes of all files of some checkpoints; those with several names count once."""
    return sum(_files(entries)[1].values())


def _files(entries: Iterable[Entry]) -> tuple[dict[tuple[int, int], int], dict[tuple[int, int], int]]:
    """Return the number of names that files have in the checkpoints, and their sizes, by device and inode."""
    names: dict[tuple[int, int], int] = defaultdict(int)
    sizes: dict[tuple[int, int], int] = {}
    for file in (file for entry in entries for file in entry.contents.files):
        names[file.device, file.inode] += 1
        sizes[file.device, file.inode] = file.size
    return names, sizes
