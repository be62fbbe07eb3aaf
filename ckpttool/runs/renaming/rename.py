"""Gives the checkpoints of a directory the names that a template makes of them."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ckpttool.core.errors import AccessDenied, CheckpointError, UsageError
from ckpttool.core.options import shows_keywords, with_keywords
from ckpttool.core.result import Result, document_of
from ckpttool.runs.renaming.names import Renaming
from ckpttool.runs.renaming.plan import PlannedNames, RenameRequest, names_of, plan_rename
from ckpttool.runs.renaming.pointer_updates import updates_for
from ckpttool.runs.renaming.scene import PathRenames
from ckpttool.runs.renaming.steps import rename_operations
from ckpttool.runs.renaming.template import parse_template
from ckpttool.runs.scope import ScopeKeywords
from ckpttool.storage import fs
from ckpttool.storage.held import holds
from ckpttool.storage.snapshot import Snapshot
from ckpttool.transaction.journal import OperationList, Recovery, new_identity
from ckpttool.transaction.lock import lock_directory
from ckpttool.transaction.moves import Moves
from ckpttool.transaction.paths import Problem, require_directory
from ckpttool.transaction.recovery import recover_directory

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True, slots=True, repr=False)
class RenameResult(Result):
    """What was done, or would be.

    Attributes:
        planned: The plan.
        renames: Old and new paths of what was renamed; of a dry run, of what would be.
        dry_run: Whether nothing was changed.
        declined: Whether the confirmation was refused.
        failed: Why some have their old names, or other ones than they were to have, by path.
        stale: Why a directory could not be reverted, by its path.
        recoveries: What an interrupted command had begun, and what became of it now.
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
        """Return it in a few words."""
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
        """Tell whether nothing was renamed since some names can't be given."""
        return bool(self.planned.plan.refused) and not self.dry_run

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Return all that must be looked at."""
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
    """Give checkpoints their names; with ``dry_run`` say what these would be.

    What an interrupted command left is settled first. Where one name can't be given, none is.

    Args:
        directory: Where the checkpoints lie; or a whole request.
        template: What their names are to be, such as ``{run}-e{epoch:04d}``.
        dry_run: Whether to change nothing.
        confirm: Called with the plan before anything is renamed; nothing is unless it returns true.
        keywords: Attributes of ``Scope``, such as ``exclude``.

    Raises:
        UsageError: The template is missing or isn't valid, or the directory is a checkpoint itself.
        CheckpointError: The directory can't be looked at, locked or changed; nothing was renamed.
    """
    request = _request(directory, template, keywords)
    if not fs.place_of(request.directory).can_rename:
        hint = "rename checkpoints before they are copied there"
        raise UsageError(f"{request.directory}: nothing can be renamed in a store ({hint})")
    if dry_run:
        planned = plan_rename(request)
        pairs = ((one.entry.path, one.to) for one in planned.plan.renamings)
        return RenameResult(planned, tuple(pairs), dry_run=True)
    root = require_directory(request.directory)
    parse_template(request.template)
    with ExitStack() as stack:
        locks = _RenameLocks(stack)
        if os.access(root, os.W_OK):
            locks.acquire(root)
        planned = plan_rename(request)
        directories = _changed_directories(planned)
        for directory in directories:
            locks.acquire(directory)
        recoveries = locks.recoveries
        if any(one.finished or one.put_back or one.moved for one in recoveries) or len(recoveries) > 1:
            # What was settled, or locked only once the plan was made, may have changed meanwhile.
            planned = plan_rename(request)
            locked = {*directories, *map(fs.realpath, locks.directories)}
            if not locked.issuperset(_changed_directories(planned)):
                raise AccessDenied(root, "it changed while it was looked at; nothing was renamed")
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
    """Return the directories in which something gets another name, or names something that does."""
    names = names_of(planned.plan.renamings)
    if not names or planned.plan.refused:
        return []
    updates = updates_for(planned.scene, PathRenames(names, planned.scene.snapshot))
    return list(dict.fromkeys((*names, *updates.directories)))


class _RenameLocks:
    """The directories that are locked, each once by whatever path, and what was interrupted in them."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._recoveries: dict[tuple[int, int], tuple[str, Recovery]] = {}

    def acquire(self, directory: str) -> None:
        """Lock a directory, and settle what was interrupted there."""
        status = fs.stat(directory)
        identity = status.st_dev, status.st_ino
        if identity not in self._recoveries:
            self._stack.enter_context(lock_directory(directory))
            self._recoveries[identity] = directory, recover_directory(directory)

    @property
    def recoveries(self) -> tuple[Recovery, ...]:
        return tuple(recovery for _, recovery in self._recoveries.values())

    @property
    def directories(self) -> list[str]:
        return [directory for directory, _ in self._recoveries.values()]


def _carry_out(planned: PlannedNames, result: RenameResult) -> RenameResult:
    """Rename all checkpoints of all directories, or none."""
    lists = _operation_lists(planned)
    begun: dict[str, Moves] = {}
    with ExitStack() as stack:
        failed: dict[str, str] = {}
        for directory, listed in lists.items():
            try:
                begun[directory] = stack.enter_context(Moves(directory, listed))
                failed |= begun[directory].outcome.failed
            except CheckpointError as failure:
                if len(lists) == 1:
                    raise  # nothing was renamed anywhere
                failed |= dict.fromkeys([one.path for one in listed.groups] or [directory], failure.reason)
            if failed:
                return _nothing_renamed(planned, result, failed, begun)
        for number, (directory, moves) in enumerate(begun.items()):
            try:
                moves.commit()
                failed |= moves.outcome.failed
            except CheckpointError as failure:
                failed |= dict.fromkeys(
                    [one.path for one in lists[directory].groups] or [directory], failure.reason
                )
            if failed and not number and not moves.is_committed:  # what commits all the others has failed
                if moves.is_committed is None:
                    for other in begun.values():
                        other.leave()
                return _nothing_renamed(planned, result, failed, begun)
    renames = ((one.entry.path, one.to) for one in planned.plan.renamings if one.entry.path not in failed)
    return replace(result, renames=tuple(renames), failed=failed)


def _operation_lists(planned: PlannedNames) -> dict[str, OperationList]:
    """Return the operations by directory; the commit of the first directory commits all."""
    identity = new_identity()
    renamings: dict[str, list[Renaming]] = defaultdict(list)
    for one in planned.plan.renamings:
        renamings[one.entry.directory].append(one)
    now = replace(planned.scene, snapshot=Snapshot())  # somebody may have taken long to agree
    updates = updates_for(now, PathRenames(names_of(planned.plan.renamings), now.snapshot))
    directories = list(dict.fromkeys([*renamings, *updates.directories]))
    lists = {
        directory: rename_operations(
            renamings[directory], updates.rewrites[directory], updates.relinks[directory], identity
        )
        for directory in directories
    }
    first = fs.realpath(directories[0])
    return {
        directory: replace(listed, leader=os.path.relpath(first, fs.realpath(directory)) if number else None)
        for number, (directory, listed) in enumerate(lists.items())
    }


def _nothing_renamed(
    planned: PlannedNames, result: RenameResult, failed: Mapping[str, str], begun: Mapping[str, Moves]
) -> RenameResult:
    return replace(result, failed=_with_others(planned, failed), stale=_reverted(begun))


def _reverted(begun: Mapping[str, Moves]) -> dict[str, str]:
    """Revert the moves of all directories; return the errors by directory."""
    stale: dict[str, str] = {}
    for directory, moves in reversed(list(begun.items())):
        try:
            moves.revert()
        except CheckpointError as failure:
            stale[directory] = failure.reason
    return stale


def _with_others(planned: PlannedNames, failed: Mapping[str, str]) -> dict[str, str]:
    """Return the errors by path; checkpoints without an error of their own get the first one."""
    culprit, why = next(iter(failed.items()))
    paths = {one.entry.path for one in planned.plan.renamings}
    why = f"{os.path.basename(culprit)}: {why}; all of them are renamed, or none"
    others = {one.entry.path: why for one in planned.plan.renamings if one.entry.path not in failed}
    return {path: why for path, why in failed.items() if path in paths} | others
