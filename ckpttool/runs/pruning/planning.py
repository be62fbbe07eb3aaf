"""Plans of ``prune``: the loop of planning and reading the kept checkpoints, and explanations of a plan.

A plan is made from one survey. Just before a removal, ``prune`` looks again at the checkpoints, at the files
that the kept ones need, and at pointers.
"""

from __future__ import annotations

import os
import re
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from shlex import quote
from typing import Any

from ckpttool.core import name_patterns as patterns
from ckpttool.core.errors import CheckpointError, UsageError
from ckpttool.core.naming import parse_name
from ckpttool.core.report import Problem
from ckpttool.core.result import document_of
from ckpttool.core.text import counted
from ckpttool.formats.discovery import OWN_PREFIX, Globs, Walk, discover, is_excluded
from ckpttool.runs.entry import Entry
from ckpttool.runs.look import FullReader, Progress, no_progress
from ckpttool.runs.pointers.kinds import Pointers
from ckpttool.runs.pointers.search import PointerProtections, names_in
from ckpttool.runs.pruning.protections import (
    RequiredCopies,
    copy_warnings,
    failures,
    foreign_reason,
    own_reasons,
    protections_of,
)
from ckpttool.runs.reasons import Code, Reason, code_of
from ckpttool.runs.retention.directory_rules import lack_warnings, unmatched_names
from ckpttool.runs.retention.plan import (
    NEWEST_UNREAD,
    NO_RULE,
    GroupPlan,
    Protections,
    RetentionPlan,
    fault_of,
    history_of,
    plan,
    plan_saves,
    protections_of_saves,
)
from ckpttool.runs.retention.request import PruneRequest, max_removals
from ckpttool.runs.retention.rules import RULES, History, Policy, metric_lack, ordinal, rank_by_metric
from ckpttool.runs.saves import parts_of, series_of_saves
from ckpttool.runs.scope import Scope
from ckpttool.runs.series import Group, Kind, order_entries
from ckpttool.runs.survey import Survey, survey_directory, upload_warnings
from ckpttool.storage import fs
from ckpttool.storage.fs import Snapshot
from ckpttool.transaction.paths import require_directory, shown
from ckpttool.transaction.state_dir import enclosing_serial

_FEWEST_NUMBERS = 2
"""Fewest numbers in a lookalike's name; a series by a single one has a doubt of its own."""


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """Plan of ``prune``, with the facts and warnings it was made with.

    Attributes:
        plan: Plan of each series.
        problems: Problems for the user.
        warnings: Doubts.
        journals: Paths of pending journals of interrupted commands.
        groups: The series of saves that were planned.
        protections: Facts that override the rules, by the first parts of saves.
        now: Time of the plan, in seconds since 1970.
    """

    plan: RetentionPlan
    problems: tuple[Problem, ...] = ()
    warnings: tuple[str, ...] = ()
    journals: tuple[str, ...] = ()
    groups: tuple[Group, ...] = ()
    protections: Protections = field(default_factory=Protections)
    now: float | None = None

    def _repr_html_(self) -> str:
        """Return a table of kept and removed checkpoints, for notebooks."""
        return self.plan._repr_html_()


def make_plan(
    request: PruneRequest,
    progress: Progress = no_progress,
    known: Survey | None = None,
    reader: FullReader | None = None,
) -> PrunePlan:
    """Return the plan of a request; nothing on disk is changed.

    Args:
        request: Request.
        progress: Progress of reading; see ``prune``.
        known: Survey of the directory, if there is one already.
        reader: Cache of checkpoints that were read already.
    """
    survey = survey_series(require_directory(request.directory), request, progress, known)
    return Planner(request, survey, progress, reader or FullReader(request.jobs, progress)).plan()


class Planner:
    """Plans a prune from a survey, gathering facts: faults, copies, obstacles to slimming.

    Each plan is a pure function of the facts. Checkpoints that it keeps are read in full, those that it
    removes are compared with the required copy, those that it slims are opened. If that yields a new fact,
    such as a damaged survivor, the next plan is made. The loop ends, as no checkpoint is examined twice.
    """

    def __init__(self, request: PruneRequest, survey: Survey, progress: Progress, reader: FullReader) -> None:
        """Gather the facts that every plan needs; with ``--failed``, read the newest of each series."""
        if request.joins_slim and not fs.place_of(survey.root).can_rename:
            raise UsageError("--full: checkpoints in a store can't be slimmed")
        self.request, self.progress = request, progress
        self._survey, self._reader = survey, reader
        self._saves, self._now = series_of_saves(survey.groups), time.time()
        self._faults: dict[str, str] = {}
        self._read: set[str] = set()
        self._failed: dict[str, str] = {}
        self._finite: dict[str, str] = {}
        self._compared: set[str] = set()
        self._copies: RequiredCopies | None = None
        if request.require_copy is not None:
            self._copies = RequiredCopies(survey.root, request.require_copy, progress)
        self._slimmable: dict[str, str | None] = {}
        self._own_reasons = own_reasons(survey, request, request.min_age)
        self._pointers = self._pointers_in(survey.snapshot, asks_trackers=True)
        self._by_pointers = PointerProtections()
        self._find_failed_runs()

    def plan(self) -> PrunePlan:
        """Return a plan that all facts are known for."""
        survey, request = self._survey, self.request
        retention = self._retention()
        # A damaged survivor is replaced by another checkpoint, which is read in turn; one without its copy is
        # kept, which may change which others are. One kind of fact is gathered at a time, as the next plan
        # may not need the others: reading and comparing are expensive.
        while (
            self._read_survivors(retention)
            or self._compare_copies(retention)
            or self._find_unslimmable(retention)
        ):
            retention = self._retention()
        removed, total, limit = len(retention.removals), len(survey.entries), request.max_delete
        if limit is not None and removed > max_removals(limit, total):
            share = f"{removed:,} of {counted(total, 'checkpoint')}"
            raise UsageError(
                f"{share} would be removed, more than --max-delete {limit} allows; nothing was removed"
            )
        chosen = [(group, request.all_policies.of(group)) for group in self._saves]
        protections = protections_of_saves(self._saves, self._protections())
        problems = (
            *_problems(survey, retention, self._faults, self._by_pointers.unread.values()),
            *_lookalikes(chosen, protections, self._now),
        )
        warnings = tuple(_warnings(survey, request, chosen, self._by_pointers, self._now))
        if request.depth == "full":
            retention = _mark_unread_newest(retention, self._read)
        return PrunePlan(retention, problems, warnings, survey.journals, self._saves, protections, self._now)

    def keep_foreign(self) -> None:
        """Protect directories with files that aren't the checkpoint's own."""
        for entry in self._survey.entries:
            if entry.foreign_files:
                self._own_reasons[entry.path].append(foreign_reason(entry))

    def newly_protected(self) -> dict[str, str]:
        """Look at pointers and required copies again; return new reasons to keep checkpoints, by path.

        Trackers are not asked again.
        """
        # Known reasons don't stop a removal: ``--keep-best-runs`` overrides those from within a run.
        now = self._pointers_in(Snapshot(), asks_trackers=False).protections(self._faults)
        found = {} if self._copies is None else self._copies.changed()
        for group in self._survey.groups:
            why = None if group.key in self._by_pointers.skipped else now.skipped.get(group.key)
            for entry in group.entries:
                known = self._by_pointers.reasons.get(entry.path, ())
                new = [one for one in now.reasons.get(entry.path, ()) if one not in known]
                if new or why is not None:
                    found[entry.path] = f"protected since the plan was made: {new[0] if new else why}"
        # A save is removed whole: a new reason for one part protects all parts.
        for save in (entry for group in self._saves for entry in group.entries):
            parts = [part.path for part in parts_of(save)]
            if (reason := next((found[path] for path in parts if path in found), None)) is not None:
                found |= dict.fromkeys(parts, reason)
        return found

    def _pointers_in(self, snapshot: Snapshot, *, asks_trackers: bool) -> Pointers:
        return Pointers(
            self._survey.root,
            self._survey.groups,
            recursive=self.request.recursive,
            exclude=self.request.exclude,
            asks_trackers=asks_trackers,
            errors=self._survey.errors,
            snapshot=snapshot,
        )

    def _find_failed_runs(self) -> None:
        """Find the failed runs, if the request asks for them, by reading each series' newest checkpoint."""
        if self.request.failed is None:
            return
        busy = {
            path
            for path, reasons in self._pointers.protections().reasons.items()
            if any(code_of(reason) is Code.BEING_WRITTEN for reason in reasons)
        }
        self._failed, self._finite, self._faults = failures(
            self._saves,
            self._now,
            busy=busy,
            jobs=self.request.jobs,
            removes=self.request.failed == "remove",
            progress=self.progress,
        )
        self._read = {*self._finite.values(), *self._faults}

    def _protections(self) -> Protections:
        """Return the protections that override all rules."""
        request = self.request
        protections = protections_of(
            self._survey.groups,
            self._by_pointers,
            self._own_reasons,
            self._faults,
            series=request.series,
            policies=request.all_policies,
        )
        return replace(
            protections,
            failed=self._failed,
            finite=self._finite,
            removes_failed=request.failed == "remove",
            unslimmable={path: why for path, why in self._slimmable.items() if why is not None},
            root=self._survey.root,
        )

    def _retention(self) -> RetentionPlan:
        """Return the plan by the facts known so far."""
        self._by_pointers = self._pointers.protections(self._faults)
        try:
            return plan_saves(
                self._survey.groups, self.request.all_policies, self._protections(), now=self._now
            )
        except UsageError as error:
            raise UsageError("; ".join([str(error), *self._survey.remarks])) from error

    def _read_survivors(self, retention: RetentionPlan) -> bool:
        """Read the kept checkpoints in full; return whether one is damaged."""
        unread = _unread_survivors(retention, self._read) if self.request.depth == "full" else []
        damages = {entry.path: self._reader.read(entry).damage for entry in unread}
        damaged = {path: damage for path, damage in damages.items() if damage is not None}
        self._read |= damages.keys()
        self._faults |= damaged
        return bool(damaged)

    def _compare_copies(self, retention: RetentionPlan) -> bool:
        """Compare the checkpoints to remove with their required copies; return whether one isn't proven."""
        if self._copies is None:
            return False
        changed = [entry for entry in retention.changed if entry.path not in self._compared]
        self._compared.update(entry.path for entry in changed)
        unproven = self._copies.unproven(changed)
        for path, why in unproven.items():
            self._own_reasons[path].append(why)
        return bool(unproven)

    def _find_unslimmable(self, retention: RetentionPlan) -> bool:
        """Open the checkpoints to slim; return whether one can't be slimmed."""
        from ckpttool.runs.pruning.slimming import obstacle_to_slimming

        found = {
            entry.path: obstacle_to_slimming(entry, None if group.policy is None else group.policy.dtype)
            for group in retention.groups
            for entry in group.slim
            if entry.path not in self._slimmable
        }
        self._slimmable |= found
        return any(found.values())


def survey_series(
    root: str, request: PruneRequest, progress: Progress = no_progress, known: Survey | None = None
) -> Survey:
    """Return the survey of a directory, without the directory itself if it is a checkpoint, too."""
    if (serial := enclosing_serial(root)) is not None:
        raise UsageError(f"{root} is part of the checkpoint {serial}")
    if known is None:
        with progress(root, None) as advance:
            known = survey_directory(root, request, enters_root=True, advance=advance)
    survey = known
    # A run's own directory may be a checkpoint, too, as that of a Hugging Face Trainer, which saves the final
    # model next to ``checkpoint-*``. It holds the others, so it isn't planned with them.
    if not any(entry.unit.path == root for entry in survey.entries):
        return survey
    if len(survey.entries) == 1:
        raise UsageError(f"{root} is a checkpoint itself (name the directory that it is in)")
    return survey._replace(
        groups=tuple(group for group in survey.groups if group.entries[0].unit.path != root)
    )


def _unread_survivors(retention: RetentionPlan, read: Collection[str]) -> list[Entry]:
    """Return the sound survivors that have not been read, of series that lose or slim checkpoints.

    The best runs are read, too, if others are removed for them.
    """
    ranks_decide = any(group.rank is not None and group.rank.is_removed for group in retention.groups)
    return [
        kept.entry
        for group in retention.groups
        if group.remove or group.slim or (ranks_decide and group.rank is not None)
        for kept in group.keep
        if kept.entry.is_sound and kept.entry.path not in read
    ]


def _mark_unread_newest(retention: RetentionPlan, read: Collection[str]) -> RetentionPlan:
    """Return the plan in which the reason of each unread newest checkpoint says so."""
    groups: list[GroupPlan] = []
    for group in retention.groups:
        keep = list(group.keep)
        for number, kept in enumerate(keep):
            if kept.entry.path not in read:
                reasons = (NEWEST_UNREAD if code_of(one) is Code.NEWEST else one for one in kept.reasons)
                keep[number] = kept._replace(reasons=tuple(reasons))
        groups.append(replace(group, keep=tuple(keep)))
    return retention._replace(groups=tuple(groups))


# Warnings and problems ----------------------------------------------------------------------------


def _warnings(
    survey: Survey,
    request: PruneRequest,
    chosen: Sequence[tuple[Group, Policy | None]],
    pointed: PointerProtections,
    now: float,
) -> Iterator[str]:
    yield from survey.warnings
    yield from lack_warnings(chosen, now)
    for rule in request.all_policies.unmatched(survey.groups):
        yield Reason(Code.MATCHED_NOTHING, f"{rule.origin or rule.glob}: no series matches {rule.glob!r}")
    yield from unmatched_names(chosen, survey.root)
    yield from pointed.warnings
    yield from upload_warnings(survey.root)
    yield from copy_warnings(survey.groups)
    yield from _nested_run_warnings(survey, request)


def _problems(
    survey: Survey, retention: RetentionPlan, faults: Mapping[str, str], unread: Collection[str]
) -> Iterator[Problem]:
    for error in survey.errors:
        if error.path not in unread:  # else it is reported with the series that it leaves alone
            yield Problem(shown(error.path), error.reason)
    for excess in retention.excess:
        if excess.is_inevitable:
            yield Problem(shown(survey.root), str(excess))
    for group in retention.groups:
        if group.excess is not None and group.excess.is_inevitable:
            yield Problem(group.key, str(group.excess))
        if group.skipped not in (None, NO_RULE):
            yield Problem(group.key, f"left alone: {group.skipped}")
        for entry in (kept.entry for kept in group.keep):
            fault = entry.fault or faults.get(entry.path)
            # A faulty one may be a temporary file, which its writer has removed meanwhile.
            names = (os.path.join(entry.directory, name) for name in entry.unit.members)
            if fault and any(map(fs.lexists, names)):
                yield Problem(entry.path, f"{fault}; it is kept")


def _nested_run_warnings(survey: Survey, scope: Scope) -> Iterator[str]:
    """Yield a warning for each directory named like a series' checkpoint that contains checkpoints."""
    known = {fs.normpath(entry.unit.path) for entry in survey.entries}
    blanks = {
        name: parse_name(name).blank
        for name, found in sorted(names_in(survey.root, survey.snapshot).items() if known else ())
        if found.is_dir(follow_symlinks=False)
        and not name.startswith(OWN_PREFIX)
        and fs.normpath(found.path) not in known
    }
    # Few directories have such names, and only their possible series is asked for directories.
    alike = [entry for entry in survey.entries if entry.fields.blank in blanks.values()]
    series = {entry.fields.blank for entry in alike if survey.snapshot.isdir(entry.unit.path)}
    walk = Walk(recursive=False, exclude=Globs(scope.exclude, survey.root))
    for path in (os.path.join(survey.root, name) for name, blank in blanks.items() if blank in series):
        if is_excluded(path, walk):
            continue
        try:
            count = sum(fs.isdir(unit.path) for unit in discover(path, walk))
        except CheckpointError:  # the survey says so
            continue
        if count:
            inside = f"it contains {counted(count, 'other checkpoint')}"
            yield f"{shown(path)}: not part of the series: {inside}; treated as a separate run"


def _lookalikes(
    chosen: Sequence[tuple[Group, Policy | None]], protections: Protections, now: float
) -> Iterator[Problem]:
    """Yield problems with single checkpoints that look like a series that a policy would change."""
    # Numbers of unknown meaning aren't blanked, so checkpoints with several of them in their names are a
    # series of one each, and are kept for ever. If such names differ only in numbers, and the signature is
    # the same, a problem says that ``--series`` joins them; a plan as if they were joined shows whether that
    # matters.
    alike: dict[tuple[str, str, Kind], list[tuple[Entry, Policy]]] = defaultdict(list)
    for group, policy in chosen:
        entry = group.entries[0]
        is_alone = len(group.entries) == 1 and entry.is_sound and group.key not in protections.skipped
        if policy is not None and is_alone:
            pattern = _name_pattern(entry.name)
            if pattern.count("*") >= _FEWEST_NUMBERS:
                kind = entry.format, entry.granularity, entry.signature
                alike[entry.directory, pattern, kind].append((entry, policy))
    for (directory, pattern, _), singles in alike.items():
        entries = order_entries([entry for entry, _ in singles])[0]
        if len(entries) == 1:
            continue
        try:
            changes = plan([Group(pattern, entries)], singles[0][1], protections, now=now).changes
        except UsageError:  # its rules can't rank these
            continue
        if changes:
            why = f"{counted(len(entries), 'checkpoint')} could be one series"
            message = f"left alone: {why} (--series {quote(pattern)} makes them one)"
            yield Problem(shown(os.path.join(directory, pattern)), message)


def _name_pattern(name: str) -> str:
    """Return a name with a ``*`` for each number except those of siblings: folds, seeds, ranks."""

    def blank(match: re.Match[str]) -> str:
        return match[0] if patterns.SIBLING.search(name[: match.start()]) else "*"

    return re.sub(r"[0-9]+(?:\.[0-9]+)?", blank, name)


@dataclass(frozen=True, slots=True)
class Explanation:
    """Reasons why a checkpoint is kept or removed.

    Attributes:
        entry: The checkpoint.
        is_kept: Whether it is kept, whole or slimmed.
        reasons: Reasons to keep it.
        against: Why each rule doesn't keep it.
        place: Its position in its series: ``7th newest of 12``, and its rank by the policy's metric.
        key: The key of its series.
        requested_path: The path given by the user, if it is a part of the checkpoint or a link to it.
        slims: Whether it is kept without its training state.
    """

    entry: Entry
    is_kept: bool
    reasons: tuple[str, ...]
    against: tuple[str, ...]
    place: tuple[str, ...] = ()
    key: str = ""
    requested_path: str | None = None
    slims: bool = False

    def document(self) -> dict[str, Any]:
        keys = ("path", "group", "stays", "slims", "place", "reasons", "against")
        return document_of(self, *keys, names={"path": "entry.path", "group": "key", "stays": "is_kept"})


def explain(planned: PrunePlan, path: str) -> Explanation:
    """Return the reasons why a checkpoint is kept or removed."""
    group, group_plan, save, entry = _find(planned, path)
    kept = next((kept for kept in group_plan.keep if kept.entry is entry), None)
    history = history_of(group, planned.protections, planned.now)
    reasons: list[str] = []
    if group_plan.skipped is not None:
        reasons.append(f"its series is left alone: {group_plan.skipped}")
    for reason in kept.reasons if kept is not None else ():
        holder = planned.protections.holders.get((entry.path, reason))
        reasons.append(reason if holder is None else f"{reason} ({holder})")
    return Explanation(
        entry,
        is_kept=kept is not None,
        reasons=tuple(reasons),
        against=tuple(_against(planned, group_plan, save, entry, history)),
        place=tuple(_place(group_plan.policy, save, history)),
        key=group_plan.key,
        requested_path=None if fs.normpath(path) == fs.normpath(entry.path) else path,
        slims=entry in group_plan.slim,
    )


def _find(planned: PrunePlan, path: str) -> tuple[Group, GroupPlan, Entry, Entry]:
    """Return series, plan, save and entry of the checkpoint at a path, or of the innermost around it."""
    saves = {
        part.path: (group, save)
        for group in planned.groups
        for save in group.entries
        for part in parts_of(save)
    }
    known: dict[str, tuple[Group, GroupPlan, Entry, Entry]] = {}
    for group_plan in planned.plan.groups:
        for entry in (*(kept.entry for kept in group_plan.keep), *group_plan.remove):
            group, save = saves[entry.path]
            for name in {entry.name, *entry.unit.members}:
                known[fs.realpath(os.path.join(entry.directory, name))] = group, group_plan, save, entry
    # The path may be a file inside a checkpoint: the innermost checkpoint around it is meant.
    real = fs.realpath(path)
    while real not in known:
        above = fs.dirname(real)
        if above == real:
            raise UsageError(f"{path} is not one of the checkpoints found")
        real = above
    return known[real]


def _against(
    planned: PrunePlan, group_plan: GroupPlan, save: Entry, entry: Entry, history: History
) -> Iterator[str]:
    if planned.plan.removes_failed and group_plan.failed is not None:
        yield f"its series failed: {group_plan.failed}"
        return
    if group_plan.rank is not None and group_plan.rank.is_removed:
        yield group_plan.rank.reason
        return
    fault = fault_of(save, planned.protections)
    if fault is not None:
        yield f"rules ignore it: {fault}"
        if entry in group_plan.remove:
            yield "--incomplete remove: an intact one is newer"
        return
    policy = group_plan.policy
    if policy is None:
        return
    for name, rule in RULES.items():
        if name in policy.rules and rule.keep is not None and rule.against is not None:
            kept_by_rule = {kept.path for kept, _ in rule.keep(policy, history)}
            if save.path not in kept_by_rule or (rule.alters and entry in group_plan.slim):
                yield rule.against(policy, history, save)
    if entry.path in group_plan.whole:
        yield f"it is kept whole: {group_plan.whole[entry.path]}"
    if entry.path in group_plan.over_limit:
        yield group_plan.over_limit[entry.path]


def _place(policy: Policy | None, entry: Entry, history: History) -> Iterator[str]:
    if entry not in history.intact:
        return
    place, count = history.intact.index(entry) + 1, len(history.intact)
    yield "the only intact one" if count == 1 else f"{ordinal(place, 'newest')} of {count:,}"
    if policy is not None and policy.metric is not None and metric_lack(entry, policy.metric) is None:
        order = rank_by_metric(policy, history)
        rank = ordinal(order.index(entry) + 1, "best")
        yield f"{rank} of {len(order):,} by {policy.metric} ({entry.recorded_metric(policy.metric):.6g})"
