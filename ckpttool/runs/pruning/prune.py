"""``prune``: survey, plan with consent, removal and slimming."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ckpttool.core.errors import AccessDenied, CheckpointError
from ckpttool.core.options import shows_keywords
from ckpttool.core.report import Problem
from ckpttool.core.result import Result, document_of
from ckpttool.core.text import file_size
from ckpttool.runs.entry import Entry
from ckpttool.runs.look import (
    FullReader,
    Progress,
    all_places,
    listed_by_indexes_above,
    listed_by_indexes_in,
    needing_path,
    no_progress,
)
from ckpttool.runs.pointers.search import raise_error
from ckpttool.runs.pruning.planning import Planner, PrunePlan, make_plan, survey_series
from ckpttool.runs.pruning.protections import foreign_reason
from ckpttool.runs.reasons import Code, Reason
from ckpttool.runs.retention.plan import GroupPlan, KeptEntry, RetentionPlan
from ckpttool.runs.retention.request import PruneKeywords, PruneRequest
from ckpttool.runs.retention.rules import Policy
from ckpttool.runs.survey import Survey
from ckpttool.storage import fs
from ckpttool.storage.fs import Snapshot
from ckpttool.storage.held import holds
from ckpttool.transaction.engine import UndoMethod
from ckpttool.transaction.engines import engine_of
from ckpttool.transaction.files import Contents
from ckpttool.transaction.journal import Group, Recovery, new_identity
from ckpttool.transaction.lock import BUSY, HeldLocks, clear_stale
from ckpttool.transaction.paths import require_directory
from ckpttool.transaction.recovery import directory_of_journal, recover_directory
from ckpttool.transaction.staged_output import clear_areas, has_leftovers, is_leftover_name
from ckpttool.transaction.transaction import Failure, Outcome

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ckpttool.runs.pruning.slimming import Slimming

SCHEMA = "ckpttool.prune/1"
Confirm = Callable[[PrunePlan], bool | None]
"""Returns whether to carry out a plan; None without an answer."""


@dataclass(frozen=True, slots=True, repr=False)
class Pruned(Result):
    """Result of ``prune``; of a dry run, the expected one.

    Attributes:
        plan: Plan, with failed removals moved to the kept checkpoints.
        freed_bytes: Bytes freed by removals and slimming; files in the trash still take their space.
        dry_run: Whether nothing was changed.
        declined: Whether the user declined the plan.
        failed: Why checkpoints were not removed, or not completely, by path.
        problems: Problems for the user.
        warnings: Doubts.
        journals: Journals still to be recovered.
        finished: Paths of interrupted removals that recovery completed.
        put_back: Paths of interrupted removals that recovery reverted.
        trash: Identity of the command in the trash; None if files are removed.
        trashed_bytes: Bytes moved to the trash.
    """

    plan: RetentionPlan
    freed_bytes: int
    dry_run: bool = False
    declined: bool = False
    failed: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    warnings: tuple[str, ...] = ()
    journals: tuple[str, ...] = ()
    finished: tuple[str, ...] = ()
    put_back: tuple[str, ...] = ()
    trash: str | None = None
    trashed_bytes: int = 0

    @property
    def summary(self) -> str:
        """Return the numbers of removed and slimmed checkpoints in a few words."""
        removed, slimmed = (
            ("to remove", "to slim") if self.dry_run or self.declined else ("removed", "slimmed")
        )
        slim = f", {len(self.plan.slimmed):,} {slimmed}" if self.plan.slimmed else ""
        gone = sum(entry.path not in self.failed for entry in self.plan.removals)
        return f"{gone:,} {removed}{slim}, {self.freed_bytes:,} bytes"

    def _repr_html_(self) -> str:
        """Return a table of kept and removed checkpoints, for notebooks."""
        return self.plan.html_with(repr(self))

    @property
    def events(self) -> Iterator[tuple[str, str, str, int | None]]:
        """Yield path, status, description and bytes of each changed checkpoint; none for a dry run.

        The status is ``removed``, ``trashed`` or ``slimmed``. The bytes are None for a slimmed one.
        """
        if self.dry_run or self.declined:
            return
        status, verb = ("removed", "removed") if self.trash is None else ("trashed", "moved to the trash")
        for entry in (one for one in self.plan.removals if one.path not in self.failed):
            yield entry.path, status, f"{verb}, {file_size(entry.nbytes)}", entry.nbytes
        for entry in self.plan.slimmed:
            yield entry.path, "slimmed", "slimmed to its weights", None

    def document(self) -> dict[str, Any]:
        names = {"policy": "plan.rules", "groups": "plan.groups"}
        return {
            "schema": SCHEMA,
            **document_of(self, "dry_run", "declined", "policy", "freed_bytes", names=names),
            "trash": self.trash or None,
            "trashed_bytes": self.trashed_bytes,
            "excess_bytes": sum(one.nbytes for one in self.plan.excess),
            **document_of(self, "groups", "errors", names=names),
            "settled": document_of(self, "finished", "put_back"),
        }


@shows_keywords(PruneRequest, Policy)
@holds("directory")
def prune(
    directory: str | os.PathLike[str] | PruneRequest,
    *,
    dry_run: bool = False,
    trash: bool | str = False,
    confirm: Confirm | None = None,
    progress: Progress | None = None,
    reader: FullReader | None = None,
    **keywords: Unpack[PruneKeywords],
) -> Pruned:
    """Remove the checkpoints that a policy doesn't keep; with ``dry_run``, return the plan.

    Interrupted commands are recovered first. Survivors are verified before anything is removed.

    Args:
        directory: Directory of the checkpoints; or a whole request.
        dry_run: Whether to change nothing.
        trash: Whether removed checkpoints are kept in the trash, from which ``undo`` restores them; or the
            identity of the command, if several prunes are one. Failed runs always are.
        confirm: Called with the plan before anything is removed; nothing is if it returns false. Unless it
            returns true, directories are kept that hold files which aren't the checkpoint's own.
        progress: ``progress(label, total_bytes)`` returns a context with a callback that takes the bytes
            read. While a directory is searched, the total is None, and the callback takes numbers of files.
        reader: Cache of checkpoints that were read in full already.
        keywords: Attributes of ``Policy`` and ``PruneRequest``: ``prune("runs", keep_last=3)``.

    Raises:
        UsageError: The directory is a checkpoint itself, or the policy keeps nothing.
        CheckpointError: The directory can't be read, locked or changed; nothing was removed.
    """
    request = PruneRequest.from_keywords(directory, keywords)
    progress = progress or no_progress
    reader = reader or FullReader(request.jobs, progress)
    trash = trash or request.failed == "remove"
    if dry_run:
        planned = make_plan(request, progress, reader=reader)
        method = _undo_method(request.directory, planned, trash)
        warned = _with_warning(planned, request.directory, method)
        return _result(warned, freed=planned.plan.freed_bytes, dry_run=True)
    root = require_directory(request.directory)
    with _Locks() as locks:
        survey, recovered, leftovers = _recovered_survey(root, request, locks, progress)
        planner = Planner(request, survey, progress, reader)
        planned, method, is_declined = _confirmed_plan(planner, root, trash, locks, confirm)
        if is_declined or not planned.plan.changes:
            result = replace(_result(planned), declined=is_declined)
        else:
            result = _apply(planner, planned, root, trash, method, locks)
        clear_stale(path for path in _directories_of(survey) if not locks.is_held(path))
    return replace(
        result,
        problems=(*(Problem(path, why) for path, why in recovered.failed.items()), *result.problems),
        finished=tuple(recovered.finished),
        put_back=tuple(recovered.put_back),
        warnings=(*recovered.moved, *result.warnings, *leftovers),
    )


# Survey ---------------------------------------------------------------------------------------------


class _Locks(HeldLocks):
    """Locks of directories, and the reasons why some can't be locked."""

    def __init__(self) -> None:
        super().__init__()
        self._refusals: dict[str, AccessDenied] = {}

    def try_hold(self, directory: str) -> bool:
        """Lock a directory; return False if it can't be changed. Another command at work is an error."""
        try:
            self.hold(directory)
        except AccessDenied as refusal:
            if refusal.code == BUSY:
                raise
            self._refusals[directory] = refusal
            return False
        return True

    def require(self, directory: str, message: str) -> None:
        """Raise an error if ``try_hold`` failed; its reason replaces ``{}`` in the message."""
        if (refusal := self._refusals.get(directory)) is not None:
            raise AccessDenied(directory, message.format(refusal.reason)) from refusal


def _recovered_survey(
    root: str, request: PruneRequest, locks: _Locks, progress: Progress
) -> tuple[Survey, Recovery, list[str]]:
    """Recover from interrupted commands in a directory and below.

    Returns:
        The survey after that; the result of the recovery; and leftovers that could not be cleared, in words.
    """
    # A pending journal below is only found by the survey, so recovery there follows it, and a second survey
    # sees its result. Temporary files inside of checkpoints, from interrupted outputs, are cleared likewise.
    recovery = _recover(root, locks)
    survey = survey_series(root, request, progress)
    owners = dict.fromkeys(map(directory_of_journal, survey.journals))
    below = [path for path in owners if fs.isdir(path) and not fs.samefile(path, root)]
    for directory in below:
        recovery.add(_recover(directory, locks))
    inside = {
        os.path.join(entry.directory, os.path.dirname(path))
        for entry in survey.entries
        for path in (*entry.contents.directories, *(file.path for file in entry.contents.files))
        if is_leftover_name(os.path.basename(path))
    }
    littered = [path for path in sorted({root, *_directories_of(survey), *inside}) if has_leftovers(path)]
    left = [why for path in littered for why in clear_areas(path)]
    if below or littered:
        survey = survey_series(root, request, progress)
    return survey, recovery, left


def _recover(directory: str, locks: _Locks) -> Recovery:
    if locks.try_hold(directory):
        return recover_directory(directory)
    if engine_of(directory).journals():
        locks.require(directory, "can't recover interrupted commands: {}")
    return Recovery()


def _directories_of(survey: Survey) -> set[str]:
    return {entry.directory for entry in survey.entries}


# Plan -----------------------------------------------------------------------------------------------


def _confirmed_plan(
    planner: Planner, root: str, trash: str | bool, locks: _Locks, confirm: Confirm | None
) -> tuple[PrunePlan, UndoMethod, bool]:
    """Plan, and ask for consent to changes.

    Without an answer, directories with files that aren't the checkpoint's own are kept.

    Returns:
        The plan; how its removals can be undone; and whether the user declined it.
    """
    planned, agreed = planner.plan(), None
    if planned.plan.changes:
        locks.require(root, "{}; nothing was removed")
    method = _undo_method(root, planned, trash)
    if planned.plan.changes and confirm is not None:
        agreed = confirm(_with_warning(planned, root, method))
    if agreed is None and any(entry.foreign_files for entry in planned.plan.removals):
        planner.keep_foreign()
        kept = planner.plan()
        removed = {entry.path for entry in kept.plan.removals}
        problems = [
            Problem(entry.path, f"not removed: {foreign_reason(entry)}")
            for entry in planned.plan.removals
            if entry.path not in removed and entry.foreign_files
        ]
        planned = replace(kept, problems=(*kept.problems, *problems))
    return planned, method, agreed is False


def _undo_method(root: str, planned: PrunePlan, trash: str | bool) -> UndoMethod:
    removals = [(one.directory, one.contents) for one in planned.plan.removals]
    return engine_of(root).undo_method(removals, is_trash=bool(trash))


def _with_warning(planned: PrunePlan, root: str, method: UndoMethod) -> PrunePlan:
    """Return a plan with a warning if its removals can't be undone although users expect it."""
    warning = engine_of(root).loss_warning
    if method is not UndoMethod.NONE or warning is None or not planned.plan.removals:
        return planned
    return replace(planned, warnings=(*planned.warnings, Reason(Code.FOR_GOOD, warning)))


# Apply ----------------------------------------------------------------------------------------------


def _apply(
    planner: Planner,
    planned: PrunePlan,
    root: str,
    trash: str | bool,
    method: UndoMethod,
    locks: _Locks,
) -> Pruned:
    """Remove checkpoints as planned, then slim others, the oldest first."""
    # Hours may have passed since the survey, while a training went on. So pointers and required copies are
    # read again here, and each checkpoint and the files that survivors need right before its removal.
    # Removals come first: slimming needs free space for the new files.
    identity = new_identity() if trash is True else trash or None
    fs.refresh(root)
    protected = planner.newly_protected()
    result = _remove(locks, root, planned, protected, identity, method)
    if not planned.plan.slimmed:
        return result
    from ckpttool.runs.pruning.slimming import Slimming

    return _slim(locks, result, protected, Slimming(identity, planner.request.jobs, planner.progress))


def _remove(
    locks: _Locks,
    root: str,
    planned: PrunePlan,
    protected: Mapping[str, str],
    identity: str | None,
    method: UndoMethod,
) -> Pruned:
    """Remove checkpoints as planned, directory by directory; report those that can't be removed."""
    total = Outcome()
    command = identity or new_identity()
    by_directory = _removals_by_directory(planned.plan.groups)
    survivors = [kept.entry for group in planned.plan.groups for kept in group.keep]
    # Places that survivors need besides their own files, each with the path that needs it.
    snapshot = Snapshot()
    needed = {
        **listed_by_indexes_above(root, snapshot, raise_error),
        **{place: entry.path for entry in survivors for place in all_places(entry.needed_paths, snapshot)},
    }
    # A directory that can't be locked or changed doesn't stop the others; if it is the only one, its error is
    # that of the command.
    for directory, parts in by_directory.items():
        try:
            locks.hold(directory)
            removals = _removals(directory, parts, needed, protected, total)
            outcome = engine_of(directory).remove(removals, command, method)
        except CheckpointError as failure:
            if len(by_directory) == 1:
                raise
            paths = (one.path for _, entries in parts for one in entries if one.path not in total.failures)
            outcome = Outcome(failures=dict.fromkeys(paths, Failure(failure.reason)))
        total.add(outcome)
    # A stranded checkpoint is removed in part, or still in the stage: the result doesn't call it kept.
    failure_text = "not removed" if identity is None else "not moved to the trash"
    stayed = {
        path: f"{failure_text}: {why}" for path, why in total.failed.items() if path not in total.stranded
    }
    groups: list[GroupPlan] = []
    for group in planned.plan.groups:
        kept = [KeptEntry(one, (stayed[one.path],)) for one in group.remove if one.path in stayed]
        removed = tuple(one for one in group.remove if one.path not in stayed)
        groups.append(replace(group, keep=(*group.keep, *kept), remove=removed))
    freed = total.freed if identity is None else 0
    problems = [Problem(path, stayed.get(path, why)) for path, why in total.failed.items()]
    return replace(
        _result(planned, freed=freed),
        plan=planned.plan._replace(groups=tuple(groups)),
        failed=total.failed,
        trash=identity,
        trashed_bytes=total.freed - freed,
        problems=(*planned.problems, *problems),
    )


def _slim(locks: _Locks, result: Pruned, protected: Mapping[str, str], slimming: Slimming) -> Pruned:
    """Slim checkpoints as planned; report those that were left whole."""
    # A training resumes from the newest, which is kept whole: if one of these has changed since it was read,
    # no older checkpoint of the series loses its training state.
    slimmed = {entry.path for entry in result.plan.slimmed}
    for group in result.plan.groups:
        whole = [one.entry for one in group.keep if one.entry.is_sound and one.entry.path not in slimmed]
        changed = next((one for one in whole if not one.is_unchanged), None) if group.slim else None
        for entry in reversed(group.slim):
            if entry.path in protected:
                slimming.failed[entry.path] = protected[entry.path]
                continue
            if changed is not None:
                slimming.failed[entry.path] = f"{changed.name}, which is kept whole, has changed"
                continue
            try:
                locks.hold(entry.directory)
            except CheckpointError as failure:
                slimming.failed[entry.path] = failure.reason
            else:
                slimming.slim(group, entry)
    is_trash = result.trash is not None
    problems = [Problem(path, f"not slimmed: {why}") for path, why in slimming.failed.items()]
    groups = tuple(group.with_whole(slimming.failed) for group in result.plan.groups)
    return replace(
        result,
        plan=result.plan._replace(groups=groups),
        freed_bytes=result.freed_bytes + (0 if is_trash else slimming.freed),
        trashed_bytes=result.trashed_bytes + (slimming.freed if is_trash else 0),
        failed={**result.failed, **slimming.failed},
        problems=(*result.problems, *problems),
    )


def _removals_by_directory(groups: Sequence[GroupPlan]) -> dict[str, list[tuple[GroupPlan, list[Entry]]]]:
    """Return removals by directory, grouped by series, the oldest first."""
    removals: dict[str, list[tuple[GroupPlan, list[Entry]]]] = defaultdict(list)
    for group in groups:
        for entry in reversed(group.remove):
            parts = removals[entry.directory]
            if not parts or parts[-1][0] is not group:
                parts.append((group, []))
            parts[-1][1].append(entry)
    return removals


def _removals(
    directory: str,
    parts: Sequence[tuple[GroupPlan, Sequence[Entry]]],
    needed: Mapping[str, str],
    protected: Mapping[str, str],
    total: Outcome,
) -> list[Group]:
    """Return the removals in a directory; a series whose survivors have changed is left alone.

    A checkpoint with a file that a survivor needs isn't removed, even if it is planned.
    """
    removals: list[Group] = []
    # Indexes are read again, as a shard may have been listed by another index since the survey.
    paths = [entry.path for _, entries in parts for entry in entries]
    real = fs.realpath(directory)
    needed = {**listed_by_indexes_in(directory, real, paths), **needed}
    for group, entries in parts:
        survivors = [kept.entry for kept in group.keep if kept.entry.is_sound]
        changed = next((entry for entry in survivors if not entry.is_unchanged), None)
        for entry in entries:
            user = needing_path(real, entry.contents, needed)
            if changed is not None:
                total.failures[entry.path] = Failure(f"{changed.name}, which is kept, has changed")
            elif user is not None:
                name = os.path.basename(user)
                total.failures[entry.path] = Failure(f"{name}, which is kept, needs a part of it")
            elif entry.path in protected:
                total.failures[entry.path] = Failure(protected[entry.path])
            else:
                neighbours = [kept for kept in survivors if kept.directory == entry.directory]
                removals.append(_removal_group(entry, neighbours))
    return removals


def _removal_group(entry: Entry, survivors: Sequence[Entry]) -> Group:
    # Files are in the order of removal: that of the members, so that an index goes before its shards.
    members = entry.members_to_remove
    place = {name: number for number, name in enumerate(members)}
    files = sorted(entry.contents.files, key=lambda file: place[file.path.split(os.sep)[0]])
    names = tuple(name for survivor in survivors for name in survivor.unit.members)
    return Group(entry.path, members, Contents(tuple(files), entry.contents.directories), names)


def _result(planned: PrunePlan, *, freed: int = 0, dry_run: bool = False) -> Pruned:
    return Pruned(
        plan=planned.plan,
        freed_bytes=freed,
        dry_run=dry_run,
        problems=planned.problems,
        warnings=planned.warnings,
        journals=planned.journals,
    )
