"""What became of several directories: told together, and each checkpoint once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpttool.series.reasons import true_of_all

if TYPE_CHECKING:
    from ckpttool.series.members.entry import Entry
    from ckpttool.series.pruning.prune import Pruned
    from ckpttool.series.retention.plan import GroupPlan


def together(outcomes: Sequence[Pruned]) -> Pruned:
    """Return what became of several directories as one."""
    first = outcomes[0]
    if len(outcomes) == 1:
        return first
    plan = replace(
        first.plan,
        groups=tuple(group for one in outcomes for group in one.plan.groups),
        excess=tuple(excess for one in outcomes for excess in one.plan.excess),
    )
    freed = plan.freed_bytes if first.dry_run else sum(one.freed_bytes for one in outcomes)
    return replace(
        first,
        plan=plan,
        freed_bytes=0 if first.trash == "" else freed,
        trash=next((one.trash for one in outcomes if one.trash is not None), None),
        trashed_bytes=freed if first.trash == "" else sum(one.trashed_bytes for one in outcomes),
        declined=any(one.declined for one in outcomes),
        failed={path: why for one in outcomes for path, why in one.failed.items()},
        problems=tuple(problem for one in outcomes for problem in one.problems),
        warnings=tuple(true_of_all([one.warnings for one in outcomes])),
        journals=tuple(path for one in outcomes for path in one.journals),
        finished=tuple(path for one in outcomes for path in one.finished),
        put_back=tuple(path for one in outcomes for path in one.put_back),
    )


def apart(outcomes: Sequence[Pruned]) -> list[Pruned]:
    """Return what became of directories that may overlap, each checkpoint once: where it came first."""
    seen: set[str] = set()
    told = []
    for one in outcomes:
        places = {entry.directory for group in one.plan.groups for entry in _entries(group)}
        real = {place: os.path.realpath(place) for place in places}
        groups = [_without(group, seen, real) for group in one.plan.groups]
        seen |= {_real(entry, real) for group in one.plan.groups for entry in _entries(group)}
        kept = tuple(group for group in groups if group.keep or group.remove)
        told.append(replace(one, plan=replace(one.plan, groups=kept)))
    return told


def _entries(group: GroupPlan) -> Iterator[Entry]:
    yield from (kept.entry for kept in group.keep)
    yield from group.remove


def _real(entry: Entry, real: Mapping[str, str]) -> str:
    return os.path.join(real[entry.directory], entry.name)


def _without(group: GroupPlan, seen: Set[str], real: Mapping[str, str]) -> GroupPlan:
    if not seen:
        return group
    keep = tuple(kept for kept in group.keep if _real(kept.entry, real) not in seen)
    return replace(
        group, keep=keep, remove=tuple(entry for entry in group.remove if _real(entry, real) not in seen)
    )
