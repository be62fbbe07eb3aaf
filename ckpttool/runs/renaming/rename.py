"""``rename``: its request, its plan, the operations, and the command."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ckpttool.core.errors import AccessDenied, CheckpointError, UsageError
from ckpttool.core.options import shows_keywords, with_keywords
from ckpttool.core.report import Problem
from ckpttool.core.result import Result, document_of
from ckpttool.runs.entry import Entry
from ckpttool.runs.pointers.kinds import Pointers, kind_of, unreadable_parent_warnings
from ckpttool.runs.pointers.notes import may_protect, protecting_text
from ckpttool.runs.pointers.programs import links_near
from ckpttool.runs.pointers.search import names_in
from ckpttool.runs.reasons import Code, code_of
from ckpttool.runs.renaming.names import (
    RenamePlan,
    Renaming,
    fold_name,
    lost_lookups,
    manager_prefixes,
    name_doubts,
    namesake_warnings,
    plan_names,
    reason_to_leave,
    stale_best_paths,
)
from ckpttool.runs.renaming.pointer_updates import (
    NoteRewriter,
    PathRenames,
    PointerUpdates,
    Scene,
    link_holders,
    note_directories,
    updates_for,
)
from ckpttool.runs.renaming.template import FIELDS, Template, TemplateField, parse_template
from ckpttool.runs.scope import Scope, ScopeKeywords
from ckpttool.runs.survey import survey_directory
from ckpttool.storage import fs
from ckpttool.storage.fs import Snapshot
from ckpttool.storage.held import holds
from ckpttool.transaction.files import Contents
from ckpttool.transaction.journal import (
    FILES,
    Group,
    Location,
    Move,
    OperationList,
    Recovery,
    Rewrite,
    new_identity,
)
from ckpttool.transaction.lock import HeldLocks
from ckpttool.transaction.paths import require_directory, shown
from ckpttool.transaction.recovery import recover_directory
from ckpttool.transaction.state_dir import enclosing_serial
from ckpttool.transaction.transaction import Transaction

if TYPE_CHECKING:
    from typing_extensions import Unpack


NewNames = dict[str, dict[str, str]]
"""New names by old ones, by directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenameRequest(Scope):
    """Options of ``rename``: besides those of ``Scope``, the directory and the template.

    Attributes:
        directory: Directory of the checkpoints.
        template: Template of their names.
        keeps: Why checkpoints keep their names, by path; pointers in them are still updated.
    """

    directory: str
    template: str
    keeps: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PlannedNames:
    """Plan of ``rename``, with problems and warnings.

    Attributes:
        plan: New names.
        scene: The checkpoints, and the files that may name them.
        update_count: Number of pointers, symlinks and other texts to update.
        problems: Problems for the user, which don't prevent renames.
        warnings: Doubts about names.
        journals: Pending journals of interrupted commands.
    """

    plan: RenamePlan
    scene: Scene
    update_count: int = 0
    problems: tuple[Problem, ...] = ()
    warnings: tuple[str, ...] = ()
    journals: tuple[str, ...] = ()


def plan_rename(request: RenameRequest) -> PlannedNames:
    """Return the new names of checkpoints; nothing on disk is changed.

    Raises:
        UsageError: The template isn't valid, or the directory is a checkpoint itself.
        CheckpointError: The directory can't be looked at.
    """
    template = parse_template(request.template)
    root = require_directory(request.directory)
    if (serial := enclosing_serial(root)) is not None:
        raise UsageError(f"{root} is a part of the checkpoint {serial}")
    surveyed = survey_directory(root, request, enters_root=True)
    entries = tuple(entry for entry in surveyed.entries if entry.unit.path != root)
    if surveyed.entries and not entries:
        raise UsageError(f"{root} is a checkpoint itself (name the directory that it is in)")
    snapshot = surveyed.snapshot
    existing_names = {
        directory: names_in(directory, snapshot) for directory in {entry.directory for entry in entries}
    }
    kept_names = {
        entry.path: why
        for entry in entries
        if (why := reason_to_leave(entry, existing_names[entry.directory]))
    }
    pointers = Pointers(
        root, surveyed.groups, recursive=request.recursive, asks_trackers=True, snapshot=snapshot
    )
    # A writer goes on under the old name, and another checkpoint's index or a tracker isn't updated here. All
    # other pointers are, and are no reason to keep a name.
    for path, reasons in pointers.protections().reasons.items():
        for reason in reasons:
            if code_of(reason) in (Code.BEING_WRITTEN, Code.PART_OF, Code.REGISTERED):
                kept_names.setdefault(path, reason)
    kept_names |= request.keeps
    unknown, known = _unknown_fields(template, [one for one in entries if one.path not in kept_names])
    for one in unknown:
        if not one.is_optional:
            problem = f"no checkpoint has a field {one.name} (choose from {known})"
            raise UsageError(f"template {template.text!r}: {problem}")
    scene = Scene(
        root, entries, links_near(root, snapshot), note_directories(root, entries, snapshot), snapshot
    )
    plan, path_renames, updates = _plan_with_updates(template, scene, existing_names, kept_names)
    errors = [Problem(shown(error.path), error.reason) for error in surveyed.errors]
    problems = [*errors, *(replace(one, outcome="left alone") for one in plan.kept)]
    if not plan.refused:
        problems += _stale_notes(updates, NoteRewriter(scene, path_renames))
    warnings = [
        f"{shown(path)}: can't be updated, and may contain old names: {why}"
        for path, why in updates.faults.items()
    ]
    renamed = [(one.entry, one.name) for one in plan.renamings]
    warnings += [*lost_lookups(renamed), *stale_best_paths(entries, [entry for entry, _ in renamed])]
    warnings += [*surveyed.remarks, *name_doubts(plan.renamings, template)]
    warnings += namesake_warnings(plan.renamings, entries, existing_names)
    unknown, known = _unknown_fields(template, [one for one in entries if one.path not in kept_names])
    for one in unknown:
        problem = f"no checkpoint has a field {one.name}; every name omits it"
        warnings.append(f"{one.shown} of the template: {problem} (choose from {known})")
    warnings += unreadable_parent_warnings(root, snapshot)
    return PlannedNames(plan, scene, updates.count, tuple(problems), tuple(warnings), surveyed.journals)


def _plan_with_updates(
    template: Template,
    scene: Scene,
    existing_names: Mapping[str, Mapping[str, object]],
    kept_names: dict[str, str],
) -> tuple[RenamePlan, PathRenames, PointerUpdates]:
    """Return a plan, its names and updates, in which checkpoints named in unchangeable files keep theirs."""
    # A checkpoint that keeps its name may collide with a new one, or need other updates, so the plan is made
    # again. Each round keeps at least one more name, so this ends.
    managed = {directory: manager_prefixes(directory) for directory in existing_names}
    while True:
        plan = plan_names(scene.entries, template, existing_names, kept_names, managed)
        path_renames = PathRenames(names_of(plan.renamings), scene.snapshot)
        updates = updates_for(scene, path_renames)
        reasons = dict(_reasons_to_stay(plan, scene, path_renames, updates))
        if not reasons:
            return plan, path_renames, updates
        kept_names |= reasons


def _reasons_to_stay(
    plan: RenamePlan, scene: Scene, path_renames: PathRenames, updates: PointerUpdates
) -> Iterator[tuple[str, str]]:
    """Yield checkpoints that keep their names, as a file that names them can't be changed, with reasons."""
    entries = {(one.entry.directory, one.entry.name): one.entry for one in plan.renamings}
    for holder in link_holders(scene, entries, path_renames):
        yield entries[holder].path, "a symlink in it points to a checkpoint that is renamed"
    by_directory: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries.values():
        by_directory[entry.directory].append(entry)
    for path, why in updates.faults.items():
        directory, name = os.path.split(path)
        kind = kind_of(name)
        blocks_renames = kind is not None and kind.blocks_renames
        formats = None if kind is None else kind.formats
        for entry in by_directory[directory or os.curdir]:
            is_meant = blocks_renames and (formats is None or entry.format in formats)
            if is_meant or name in entry.unit.members:
                yield entry.path, f"{shown(path)} names it, and can't be updated: {why}"


def _unknown_fields(template: Template, entries: Sequence[Entry]) -> tuple[list[TemplateField], str]:
    """Return the metrics in a template that no checkpoint has, and the names of existing fields."""
    known = {name for entry in entries for name in entry.metrics if entry.metric(name) is not None}
    known |= {"loss" for entry in entries if entry.metric("loss") is not None}
    names = (*FIELDS, *sorted(known))
    unknown = [field for field in template.fields if entries and field.name not in names]
    return unknown, ", ".join(names)


def _stale_notes(updates: PointerUpdates, notes: NoteRewriter) -> Iterator[Problem]:
    """Yield the notes that will have old names of checkpoints after the rename."""
    for note in updates.notes:
        names = list(notes.lost(note))
        if not names:
            continue
        more, those = (f" (and {len(names) - 1:,} more)", "them") if len(names) > 1 else ("", "it")
        protects = may_protect(note.name) and protecting_text(note.before)
        lost = f": prune will no longer keep {those} for this note" if protects else ""
        path = shown(os.path.join(note.directory, note.name))
        yield Problem(path, f"{note.name} names {names[0]}{more} and isn't updated{lost}")


def names_of(renamings: Iterable[Renaming]) -> NewNames:
    """Return new names by old ones, by directory."""
    names: NewNames = defaultdict(dict)
    for one in renamings:
        names[one.entry.directory] |= one.names
    return names


def rename_operations(
    renamings: Sequence[Renaming], rewrites: Sequence[Rewrite], relinks: Sequence[Rewrite], identity: str
) -> OperationList:
    """Return the operations that rename the checkpoints of one directory and update their pointers.

    Args:
        renamings: The checkpoints with their names.
        rewrites: Updates of texts; an index is created under its new name.
        relinks: Updates of symlinks.
        identity: Identity of the command.
    """
    # A checkpoint has both names until the commit. If one gets the name of another, or a name that a file
    # system may take for its own (``Model.pt``, ``model.pt``), both are moved to the stage first, and from
    # there to their new names. An index is moved last: without it, the rest is no checkpoint.
    staged = _staged(renamings)
    written = {one.name for one in rewrites if one.after is None}
    groups: list[Group] = []
    names: list[dict[str, str]] = []
    for one in renamings:
        new = one.names
        members = [name for name in one.entry.members_to_remove if name not in written and new[name] != name]
        files = tuple(file for file in one.entry.contents.files if file.path not in written)
        contents = Contents(files, one.entry.contents.directories)
        groups.append(Group(one.entry.path, tuple(members), contents, new_name=one.name))
        names.append({name: new[name] for name in members})
    operations: list[Move] = []
    for number, group in enumerate(groups):
        if number not in staged:
            operations += (
                Move(number, _in_directory(old), _in_directory(names[number][old]))
                for old in reversed(group.members)
            )
    for number in sorted(staged):
        operations += (Move(number, _in_directory(old), _in_stage(old)) for old in groups[number].members)
    for number in sorted(staged):
        operations += (
            Move(number, _in_stage(old), _in_directory(names[number][old]))
            for old in reversed(groups[number].members)
        )
    return OperationList(
        "rename", tuple(groups), (*operations, *_merged_rewrites(rewrites), *relinks), identity
    )


def _staged(renamings: Sequence[Renaming]) -> set[int]:
    """Return the numbers of the checkpoints that are renamed through the stage: old and new names overlap."""
    owners = {fold_name(old): number for number, one in enumerate(renamings) for old in one.names}
    staged: set[int] = set()
    for number, one in enumerate(renamings):
        for old, new in one.names.items():
            owner = owners.get(fold_name(new))
            if owner is not None and new != old:
                staged |= {number, owner}
    return staged


def _merged_rewrites(rewrites: Sequence[Rewrite]) -> list[Rewrite]:
    """Merge rewrites of the same file."""
    # A new index may replace the old one of another checkpoint. New texts are written first, and old ones
    # removed last, so that an index always exists.
    joined: dict[str, Rewrite] = {}
    for one in rewrites:
        other = joined.get(one.name)
        if other is None:
            joined[one.name] = one
        else:
            new, old = (one, other) if one.before is None else (other, one)
            joined[one.name] = Rewrite(one.name, old.before, new.after, like=one.name)
    return sorted(joined.values(), key=lambda one: (one.after is None, one.before is not None))


def _in_directory(name: str) -> Location:
    return Location("directory", name)


def _in_stage(name: str) -> Location:
    return Location("stage", os.path.join(FILES, name))


@dataclass(frozen=True, slots=True, repr=False)
class RenameResult(Result):
    """Result of ``rename``; of a dry run, the expected one.

    Attributes:
        planned: The plan.
        renames: Old and new paths; of a dry run, the planned ones.
        dry_run: Whether nothing was changed.
        declined: Whether the confirmation was refused.
        failed: Why checkpoints don't have their new names, by path.
        stale: Why a directory could not be reverted, by its path.
        recoveries: Results of recovery, and journals of this command that recovery has to finish.
    """

    planned: PlannedNames
    renames: tuple[tuple[str, str], ...] = ()
    dry_run: bool = False
    declined: bool = False
    failed: Mapping[str, str] = field(default_factory=dict)
    stale: Mapping[str, str] = field(default_factory=dict)
    recoveries: tuple[Recovery, ...] = ()

    @property
    def summary(self) -> str:
        """Return the number of renamed checkpoints in a few words."""
        return f"{len(self.renames):,} {'to rename' if self.dry_run or self.declined else 'renamed'}"

    def document(self) -> dict[str, Any]:
        return {
            "schema": "ckpttool.rename/1",
            **document_of(self, "dry_run", "declined"),
            "renames": [{"from": old, "to": new} for old, new in self.renames],
            **document_of(self, "errors", "warnings", names={"warnings": "planned.warnings"}),
        }

    @property
    def is_refused(self) -> bool:
        """Return whether nothing was renamed because some names are invalid."""
        return bool(self.planned.plan.refused) and not self.dry_run

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Return all problems for the user."""
        failed = (Problem(path, f"not renamed: {why}") for path, why in self.failed.items())
        stale = (Problem(path, f"not reverted: {why}") for path, why in self.stale.items())
        unrecovered = (Problem(path, why) for one in self.recoveries for path, why in one.failed.items())
        return (*unrecovered, *self.planned.plan.refused, *self.planned.problems, *failed, *stale)


Confirm = Callable[[PlannedNames], bool]


@shows_keywords(RenameRequest)
@holds("directory")
def rename(
    directory: str | os.PathLike[str] | RenameRequest,
    template: str | None = None,
    *,
    dry_run: bool = False,
    confirm: Confirm | None = None,
    **keywords: Unpack[ScopeKeywords],
) -> RenameResult:
    """Rename checkpoints by a template; with ``dry_run``, return the plan.

    Interrupted commands are recovered first. If one name is invalid, nothing is renamed.

    Args:
        directory: Directory of the checkpoints; or a whole request.
        template: Template of their names, such as ``{run}-e{epoch:04d}``.
        dry_run: Whether to change nothing.
        confirm: Called with the plan before anything is renamed; nothing is unless it returns true.
        keywords: Attributes of ``Scope``, such as ``exclude``.

    Raises:
        UsageError: The template is missing or isn't valid, or the directory is a checkpoint itself.
        CheckpointError: The directory can't be looked at, locked or changed; nothing was renamed.
    """
    request = _request(directory, template, keywords)
    if not fs.place_of(request.directory).can_rename:
        hint = "rename checkpoints before you copy them there"
        raise UsageError(f"{request.directory}: can't rename in a store ({hint})")
    if dry_run:
        planned = plan_rename(request)
        pairs = ((one.entry.path, one.to) for one in planned.plan.renamings)
        return RenameResult(planned, tuple(pairs), dry_run=True)
    root = require_directory(request.directory)
    parse_template(request.template)
    with _RenameLocks() as locks:
        # A root may be read-only if only directories below it have checkpoints.
        if os.access(root, os.W_OK):
            locks.acquire(root)
        planned = plan_rename(request)
        directories = _changed_directories(planned)
        for directory in directories:
            locks.acquire(directory)
        recoveries = tuple(locks.recoveries.values())
        if any(one.finished or one.put_back or one.moved for one in recoveries) or len(recoveries) > 1:
            # Which directories to lock is known only from a plan, and the plan counts only under the locks.
            # Directories that were recovered, or locked after the plan, may have changed since its survey.
            planned = plan_rename(request)
            locked = {*directories, *map(fs.realpath, locks.recoveries)}
            if not locked.issuperset(_changed_directories(planned)):
                raise AccessDenied(root, "it changed during the survey; nothing was renamed")
        result = RenameResult(planned, recoveries=recoveries)
        if not planned.plan.renamings or planned.plan.refused:
            return result
        if confirm is not None and not confirm(planned):
            return replace(result, declined=True)
        return _carry_out(planned, result)


def _request(
    directory: str | os.PathLike[str] | RenameRequest, template: str | None, keywords: Mapping[str, Any]
) -> RenameRequest:
    if isinstance(directory, RenameRequest):
        return with_keywords(directory, keywords if template is None else {**keywords, "template": template})
    if template is None:
        raise UsageError("rename needs a template, such as {run}-e{epoch:04d}")
    return with_keywords(RenameRequest(directory=os.fspath(directory), template=template), keywords)


def _changed_directories(planned: PlannedNames) -> list[str]:
    """Return the directories with renamed checkpoints or updated files."""
    names = names_of(planned.plan.renamings)
    if not names or planned.plan.refused:
        return []
    updates = updates_for(planned.scene, PathRenames(names, planned.scene.snapshot))
    return list(dict.fromkeys((*names, *updates.directories)))


class _RenameLocks(HeldLocks):
    """Locks of directories, and the results of recovery in them."""

    def __init__(self) -> None:
        super().__init__()
        self.recoveries: dict[str, Recovery] = {}

    def acquire(self, directory: str) -> None:
        """Lock a directory, and recover from interrupted commands in it."""
        if self.hold(directory):
            self.recoveries[directory] = recover_directory(directory)


def _carry_out(planned: PlannedNames, result: RenameResult) -> RenameResult:
    """Rename all checkpoints of all directories, or none."""
    lists = _operation_lists(planned)
    begun: dict[str, Transaction] = {}
    with ExitStack() as stack:
        failed: dict[str, str] = {}
        for directory, listed in lists.items():
            try:
                begun[directory] = stack.enter_context(Transaction(directory, listed))
                failed |= begun[directory].outcome.failed
            except CheckpointError as failure:
                if len(lists) == 1:
                    raise  # nothing was renamed anywhere
                failed |= _failed_with(listed, directory, failure)
            if failed:
                return _nothing_renamed(planned, result, failed, begun)
        for number, (directory, moves) in enumerate(begun.items()):
            try:
                moves.commit()
                failed |= moves.outcome.failed
            except CheckpointError as failure:
                failed |= _failed_with(lists[directory], directory, failure)
            # The commit of the first directory decides for all.
            if failed and not number and not moves.is_committed:
                if moves.is_committed is None:
                    for other in begun.values():
                        other.leave()
                return _nothing_renamed(planned, result, failed, begun)
        # The journal of the first is removed last: until then it says that the others are committed.
        left = Recovery()
        for directory, moves in reversed(begun.items()):
            try:
                moves.close()
            except CheckpointError as failure:
                left.failed[directory] = failure.reason
    renames = ((one.entry.path, one.to) for one in planned.plan.renamings if one.entry.path not in failed)
    recoveries = (*result.recoveries, left)
    return replace(result, renames=tuple(renames), failed=failed, recoveries=recoveries)


def _failed_with(listed: OperationList, directory: str, failure: CheckpointError) -> dict[str, str]:
    """Return one reason for all checkpoints of a list, or for the directory if only pointers change."""
    return dict.fromkeys([one.path for one in listed.groups] or [directory], failure.reason)


def _operation_lists(planned: PlannedNames) -> dict[str, OperationList]:
    """Return the operations by directory; the commit of the first directory commits all."""
    # Each directory has a journal. Those of the others name the first one as their leader: recovery completes
    # them if the leader was committed, and reverts them otherwise, so that a kill leaves all or none renamed.
    identity = new_identity()
    renamings: dict[str, list[Renaming]] = defaultdict(list)
    for one in planned.plan.renamings:
        renamings[one.entry.directory].append(one)
    # Files are read anew, as they may have changed while the user was asked.
    now = replace(planned.scene, snapshot=Snapshot())
    updates = updates_for(now, PathRenames(names_of(planned.plan.renamings), now.snapshot))
    directories = list(dict.fromkeys([*renamings, *updates.directories]))
    lists = {
        directory: rename_operations(
            renamings[directory], updates.rewrites[directory], updates.relinks[directory], identity
        )
        for directory in directories
    }
    first, *others = map(fs.realpath, directories)
    followers = tuple(os.path.relpath(other, first) for other in others)
    leaders = [None, *(os.path.relpath(first, other) for other in others)]
    return {
        directory: replace(listed, leader=leader, followers=() if leader else followers)
        for (directory, listed), leader in zip(lists.items(), leaders, strict=True)
    }


def _nothing_renamed(
    planned: PlannedNames, result: RenameResult, failed: Mapping[str, str], begun: Mapping[str, Transaction]
) -> RenameResult:
    # Errors are shown by checkpoint; those without an error of their own get the first one.
    culprit, why = next(iter(failed.items()))
    paths = [one.entry.path for one in planned.plan.renamings]
    reason = f"{os.path.basename(culprit)}: {why}; all of them are renamed, or none"
    failures = {path: why for path, why in failed.items() if path in paths}
    failures |= {path: reason for path in paths if path not in failed}
    return replace(result, failed=failures, stale=_reverted(begun))


def _reverted(begun: Mapping[str, Transaction]) -> dict[str, str]:
    """Revert the moves of all directories; return the errors by directory."""
    stale: dict[str, str] = {}
    for directory, moves in reversed(list(begun.items())):
        try:
            moves.revert()
        except CheckpointError as failure:
            stale[directory] = failure.reason
    return stale
