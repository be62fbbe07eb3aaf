"""From a directory to a plan: what lies there, who points at it, and whether what stays is intact."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from shlex import quote
from typing import Literal

from ckpttool.errors import UsageError
from ckpttool.formats.discovery import OWN_PREFIX
from ckpttool.formats.globs import Globs, last_name
from ckpttool.report import counted
from ckpttool.series.changing.home import serial_around
from ckpttool.series.changing.strictly import is_name
from ckpttool.series.members.entry import Entry
from ckpttool.series.members.full_read import Progress, no_progress, read_all
from ckpttool.series.members.order import Group
from ckpttool.series.members.series_doubts import (
    METRICS_ALONE,
    NOTHING_TRAINED,
    UNORDERED,
    WITNESS,
    copy_warnings,
    untrained_entries,
    witnesses,
)
from ckpttool.series.mounts import HOLDS_MOUNT, is_mounted, mount_points
from ckpttool.series.paths import require_directory, shown
from ckpttool.series.pointers.protection import Pointed, follow, unseen_above
from ckpttool.series.pruning.inside import passed_over, told_inside
from ckpttool.series.reasons import Code, Problem, Reason, code_of
from ckpttool.series.retention.companions import doubts_of, followers, reasons_to_stay, saved_together
from ckpttool.series.retention.failed_runs import Failures, failures
from ckpttool.series.retention.lookalikes import lookalikes
from ckpttool.series.retention.missing_metrics import lack_warnings, unmatched_names
from ckpttool.series.retention.named_best import best_of_many, protecting_reasons
from ckpttool.series.retention.plan import NEWEST_UNREAD, NO_RULE, KeptEntry, Protections, RetentionPlan, plan
from ckpttool.series.retention.policy import Policies, Policy, delete_limit
from ckpttool.series.surveying.survey import Scope, Survey, survey

Depth = Literal["quick", "full"]
Failed = Literal["list", "remove"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(Scope):
    """What is to be thinned out, and how: besides what is looked at, which is a ``Scope``.

    Attributes:
        directory: Where the checkpoints lie.
        policy: Which of them are wanted.
        min_age: What changed less than so many seconds ago stays.
        depth: How the survivors are verified: their structure, or every byte.
        jobs: Number of threads.
        policies: Policies by path, instead of the one policy.
        failed: Whether series that failed are listed, or removed as a whole; None doesn't look for them.
        max_delete: How much may go at most: ``10``, or ``20%`` of all checkpoints.

    Raises:
        UsageError: There is nothing to go by, or ``max_delete`` is no limit.
    """

    directory: str
    policy: Policy | None = None
    min_age: int = 0
    depth: Depth = "full"
    jobs: int | None = None
    policies: Policies | None = None
    failed: Failed | None = None
    max_delete: str | None = None

    def __post_init__(self) -> None:
        if self.max_delete is not None:
            delete_limit(self.max_delete)
        wanted = self.wanted
        if wanted.default is None and not wanted.rules and self.failed is None:
            raise UsageError("no rule says what to keep (--keep N keeps the newest N)")

    @property
    def wanted(self) -> Policies:
        """Return the policies, of which there may be one alone, or none."""
        return self.policies or Policies(self.policy)


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, with what was found on the way.

    Attributes:
        plan: What stays and what goes.
        problems: What must be looked at.
        warnings: What is doubtful.
        journals: What an interrupted prune left.
        groups: The series that were planned.
        protections: What was stronger than every rule.
        now: When that was, in seconds since 1970.
    """

    plan: RetentionPlan
    problems: tuple[Problem, ...] = ()
    warnings: tuple[str, ...] = ()
    journals: tuple[str, ...] = ()
    groups: tuple[Group, ...] = ()
    protections: Protections = field(default_factory=Protections)
    now: float | None = None


def make_plan(request: Request, progress: Progress = no_progress, known: Survey | None = None) -> Planned:
    """Return what a policy does to a directory; nothing on disk is changed.

    Args:
        request: What is to be thinned out, and how.
        progress: Is told what is read.
        known: What lies in the directory, where somebody has looked already.

    Raises:
        UsageError: The directory is a checkpoint itself, or the policy keeps nothing.
        CheckpointError: The directory can't be looked at.
    """
    wanted = request.wanted
    root = require_directory(request.directory)
    found = _surveyed(root, request, known)
    now = time.time()
    pointed = follow(root, found.groups, recursive=request.recursive)
    failed = _failed(request, found, pointed, now, progress)
    faults, checked = dict(failed.faults), set(failed.finite.values())
    if faults:
        pointed = follow(root, found.groups, faults, recursive=request.recursive)
    following = followers([(one, wanted.of(one)) for one in found.groups])
    together = saved_together(found.groups)
    while True:
        protections = replace(
            _protections(request, found, pointed, faults),
            failed=failed.reasons,
            finite=failed.finite,
            removes_failed=request.failed == "remove",
            followers=following,
            together=together,
        )
        try:
            made, protections = _with_companions(found, wanted, protections, now)
        except UsageError as error:
            raise UsageError("; ".join([str(error), *found.remarks])) from error
        unread = [entry for entry in _survivors(made, faults) if entry.path not in checked]
        if not unread or request.depth == "quick":
            break
        checked.update(entry.path for entry in unread)
        read = ((entry.path, read_all(entry, request.jobs, progress).damage) for entry in unread)
        damaged = {path: fault for path, fault in read if fault is not None}
        if damaged:
            faults |= damaged
            pointed = follow(root, found.groups, faults, recursive=request.recursive)
    _require_few(made, found, request.max_delete)
    chosen = [(one, planned.policy) for one, planned in zip(found.groups, made.groups, strict=True)]
    warnings = (*found.warnings, *lack_warnings(chosen, now, following), *_unmatched(wanted, found))
    warnings = (*warnings, *unmatched_names(chosen, root), *pointed.warnings, *unseen_above(root))
    warnings = (*warnings, *copy_warnings(found.groups), *passed_over(found, request))
    alike = (Problem(path, told) for path, told in lookalikes(chosen, protections, now))
    problems = (*_problems(found, made, faults), *alike)
    if request.depth == "full":
        made = _as_read(made, {*checked, *faults})
    return Planned(made, problems, warnings, found.journals, found.groups, protections, now)


def _with_companions(
    found: Survey, wanted: Policies, protections: Protections, now: float
) -> tuple[RetentionPlan, Protections]:
    """Return a plan in which what stays keeps what belongs with it: an optimizer's file, an average's."""
    while True:
        made = plan(found.groups, wanted, protections, now=now)
        reasons = reasons_to_stay(made, protections.faults)
        if not reasons:
            return made, protections
        told = {path: [*protections.reasons.get(path, ()), *more] for path, more in reasons.items()}
        protections = replace(protections, reasons={**protections.reasons, **told})


def _as_read(made: RetentionPlan, read: Collection[str]) -> RetentionPlan:
    """Return a plan that calls nothing the newest without saying so where it was not read."""
    groups = tuple(
        replace(one, keep=tuple(_as_looked_at(kept, read) for kept in one.keep)) for one in made.groups
    )
    return replace(made, groups=groups)


def _as_looked_at(kept: KeptEntry, read: Collection[str]) -> KeptEntry:
    if kept.entry.path in read:
        return kept
    reasons = (NEWEST_UNREAD if code_of(one) is Code.NEWEST else one for one in kept.reasons)
    return replace(kept, reasons=tuple(reasons))


def _failed(request: Request, found: Survey, pointed: Pointed, now: float, progress: Progress) -> Failures:
    """Return what failed, where somebody asked for that."""
    if request.failed is None:
        return Failures()
    busy = {
        path
        for path, why in pointed.reasons.items()
        if any(code_of(one) is Code.BEING_WRITTEN for one in why)
    }
    goes = request.failed == "remove"
    return failures(found.groups, now, busy=busy, jobs=request.jobs, goes=goes, progress=progress)


def _require_few(made: RetentionPlan, found: Survey, limit: str | None) -> None:
    """Require that no more goes than is allowed.

    Raises:
        UsageError: More would go.
    """
    removed, total = len(made.removals), len(found.entries)
    if limit is not None and not delete_limit(limit).allows(removed, total):
        told = f"{removed:,} of {counted(total, 'checkpoint')} would go"
        raise UsageError(f"{told}, more than --max-delete {limit} allows; nothing was removed")


def _unmatched(wanted: Policies, found: Survey) -> Iterator[str]:
    for rule in wanted.unmatched(found.groups):
        yield Reason(Code.MATCHED_NOTHING, f"{rule.origin or rule.glob}: no series matches {rule.glob!r}")


def _surveyed(root: str, request: Request, known: Survey | None) -> Survey:
    if (serial := serial_around(root)) is not None:
        raise UsageError(f"{root} is a part of the checkpoint {serial}")
    found = known or survey(root, request, enters_root=True)
    itself = [entry for entry in found.entries if entry.unit.path == root]
    if itself and len(found.entries) == 1:
        raise UsageError(f"{root} is a checkpoint itself (name the directory that it lies in)")
    if not itself:
        return found
    groups = tuple(one for one in found.groups if one.entries[0].unit.path != root)
    return replace(found, groups=groups)


def _protections(request: Request, found: Survey, pointed: Pointed, faults: Mapping[str, str]) -> Protections:
    reasons: dict[str, list[str]] = defaultdict(list)
    youngest = time.time_ns() - request.min_age * 10**9
    points = mount_points(below=found.root) or ()
    excluded = Globs(request.exclude, found.root)
    of_many = {path for one in found.groups for path in best_of_many(one, request.wanted.of(one), faults)}
    for entry in found.entries:
        reasons[entry.path] += protecting_reasons(pointed.reasons.get(entry.path, ()), entry, of_many)
        reasons[entry.path] += _own_reasons(entry, points)
        parts = (glob for place in entry.places for glob in excluded.of(place))
        reasons[entry.path] += [f"--exclude {glob}" for glob in islice(parts, 1)]
        if request.min_age and entry.modified_ns > youngest:
            reasons[entry.path].append("too young")
    for one in found.groups:
        for entry in untrained_entries(one):
            reasons[entry.path].append(NOTHING_TRAINED)
    told = set(map(last_name, request.series))
    for entry in (entry for one in found.groups for entry in witnesses(one, told, faults)):
        reasons[entry.path].append(WITNESS)
    why = doubts_of(found.groups, told)
    doubts = {one.key: _advised(one, why[one.key]) for one in found.groups if one.key in why}
    return Protections(reasons, pointed.skipped, faults, doubts, holders=pointed.holders, root=found.root)


def _own_reasons(entry: Entry, mount_points: Collection[str]) -> Iterator[str]:
    """Yield why a checkpoint is not to be touched, whatever points at it."""
    if entry.holds_others:
        yield "holds other checkpoints"
    if (inside := told_inside(entry)) is not None:
        yield inside
    if entry.is_step_directory and (own := _own_name_in(entry)) is not None:
        yield f"{own} lies in it"
    if entry.is_link:
        yield "is a symlink"
    if not all(map(is_name, entry.unit.members)):
        yield "has parts elsewhere"
    if entry.contents.crosses or is_mounted(entry.directory, entry.unit.members, mount_points):
        yield HOLDS_MOUNT


def _own_name_in(entry: Entry) -> str | None:
    """Return what a command left in a directory when it took each file for a checkpoint: pins, a trash."""
    names = (name for file in entry.contents.files for name in file.path.split(os.sep))
    return next((name for name in names if name.startswith(OWN_PREFIX)), None)


def _advised(group: Group, why: str) -> str:
    """Return a doubt, and what somebody can do who knows better."""
    if why in (METRICS_ALONE, UNORDERED):
        return why
    return f"{why} (if they are one series, say --series {quote(group.entries[0].fields.blank)})"


def _survivors(made: RetentionPlan, faults: Mapping[str, str]) -> Iterator[Entry]:
    """Yield what stays, as far as it is thought to be sound, where something else goes."""
    for one in made.groups:
        for kept in one.keep if one.remove else ():
            if kept.entry.is_sound and kept.entry.path not in faults:
                yield kept.entry


def _is_there(entry: Entry) -> bool:
    """Tell whether any of a checkpoint is still there: its writer may have removed it meanwhile."""
    return any(os.path.lexists(os.path.join(entry.directory, name)) for name in entry.unit.members)


def _problems(found: Survey, made: RetentionPlan, faults: Mapping[str, str]) -> Iterator[Problem]:
    for error in found.errors:
        yield Problem(shown(error.path), error.reason)
    for excess in made.excess:
        if excess.is_inevitable:
            yield Problem(shown(found.root), str(excess))
    for one in made.groups:
        if one.excess is not None and one.excess.is_inevitable:
            yield Problem(one.key, str(one.excess))
        if one.skipped not in (None, NO_RULE):
            yield Problem(one.key, f"left alone: {one.skipped}")
        for kept in one.keep:
            fault = kept.entry.fault or faults.get(kept.entry.path)
            if fault and _is_there(kept.entry):
                yield Problem(kept.entry.path, f"{fault}; it is kept")
