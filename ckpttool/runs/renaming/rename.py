"""Gives the checkpoints of a directory the names that a template makes of them."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ckpttool.core.documents import document_of
from ckpttool.core.errors import AccessDenied, CheckpointError, UsageError, from_os_error
from ckpttool.core.keywords import shows_keywords, with_keywords
from ckpttool.core.result import Result
from ckpttool.io import fs
from ckpttool.io.held import holds
from ckpttool.runs.members.entry import Entry
from ckpttool.runs.pointers.readers import names_in
from ckpttool.runs.renaming.plan import NewNames, PlannedNames, RenameRequest, names_of, plan_rename
from ckpttool.runs.renaming.pointer_updates import updates_for
from ckpttool.runs.renaming.scene import PathRenames, Scene, Updates, links_near
from ckpttool.runs.renaming.steps import RenameStep, entry_after, next_wave, refresh, remaining_step, steps
from ckpttool.runs.renaming.template import parse_template
from ckpttool.runs.scope import ScopeKeywords
from ckpttool.transaction.journal import Kind, Moves, Recovery, new_identity
from ckpttool.transaction.lock import lock_directory
from ckpttool.transaction.move_transaction import ChainedMoves, apply_moves
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
        declined: Whether somebody was asked, and said no.
        failed: Why some have their old names, or other ones than they were to have, by path.
        stale: Why what names them in another directory has old names, by that directory.
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
        stale = (
            Problem(path, f"pointers here still have the old names: {why}")
            for path, why in self.stale.items()
        )
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
    if fs.is_remote(request.directory):
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
        if any(one.finished or one.put_back for one in recoveries) or len(recoveries) > 1:
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
        return _PlannedRename(planned).finish(result)


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
    names = names_of(steps(planned.plan.renamings))
    if not names or planned.plan.refused:
        return []
    return list(dict.fromkeys((*names, *updates_for(planned.scene, PathRenames(names)).directories)))


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


class _PlannedRename:
    """A plan that is being carried out: what waits, and what became of the rest."""

    def __init__(self, planned: PlannedNames) -> None:
        self._identity = new_identity()
        self._scene = planned.scene
        self._first = planned.scene.entries
        self._entries = list(planned.scene.entries)
        self._numbers: dict[str, list[int]] = defaultdict(list)
        for number, entry in enumerate(planned.scene.entries):
            self._numbers[entry.directory].append(number)
        self._waiting: dict[str, list[RenameStep]] = defaultdict(list)
        for step in steps(planned.plan.renamings):
            self._waiting[step.entry.directory].append(step)
        self._planned = {directory: tuple(waiting) for directory, waiting in self._waiting.items()}
        self._chains: dict[str, ChainedMoves] = {}
        self._renames: list[tuple[str, str]] = []
        self._failed: dict[str, str] = {}
        self._stale: dict[str, str] = {}

    def finish(self, result: RenameResult) -> RenameResult:
        """Carry the plan out; return what became of it."""
        with ExitStack() as stack:
            self._chains = {
                directory: stack.enter_context(ChainedMoves(directory)) for directory in self._waiting
            }
            while any(self._waiting.values()):
                # What leads into several directories is changed once a wave was made in each of them.
                done: list[RenameStep] = []
                before = self._scene
                for directory in list(self._waiting):
                    done += self._make_wave(directory)
                    if self._failed:
                        self._undo_all()
                        return replace(result, failed=self._failed, stale=self._stale)
                self._refresh_scene()
                self._update_elsewhere(names_of(done), before)
            for chain in self._chains.values():
                chain.end()
        order = {renaming.entry.path: number for number, renaming in enumerate(result.planned.plan.renamings)}
        self._renames.sort(key=lambda pair: order[pair[0]])
        return replace(result, renames=tuple(self._renames), failed=self._failed, stale=self._stale)

    def _make_wave(self, directory: str) -> list[RenameStep]:
        """Make the next steps in a directory; return those that were made."""
        waiting = self._waiting.pop(directory)
        new_names = (new for step in waiting for new in step.names.values())
        wave = next_wave(waiting, {*names_in(directory), *new_names})
        if not wave:
            return []
        updates = updates_for(self._scene, PathRenames(names_of(wave)), directory=directory)
        # What is made can be taken back until the last directory has had its turn.
        has_more = (
            len(self._planned) > 1 or len(wave) < len(waiting) or not all(step.is_last for step in wave)
        )
        try:
            failed = self._move(directory, wave, updates, has_more=has_more)
        except CheckpointError as failure:
            if len(self._planned) == 1 and not self._renames:
                raise  # nothing was renamed anywhere
            failed = dict.fromkeys((step.renaming.entry.path for step in wave), failure.reason)
        if failed:
            self._failed |= failed
            return []
        entries = self._refresh_entries(directory, wave)
        made = {step.renaming.entry.path for step in wave}
        rest = [
            replace(step, entry=entries.get(step.entry.path, step.entry))
            for step in waiting
            if step.renaming.entry.path not in made
        ]
        rest += [remaining_step(step, entries[step.entry.path]) for step in wave if not step.is_last]
        if rest:
            self._waiting[directory] = rest
        self._renames += [(step.renaming.entry.path, step.renaming.to) for step in wave if step.is_last]
        return wave

    def _move(
        self, directory: str, wave: Sequence[RenameStep], updates: Updates, *, has_more: bool
    ) -> Mapping[str, str]:
        """Move the files of some steps in a directory; return why some failed, by their paths."""
        rewrites = tuple(updates.rewrites.get(directory, ()))
        rewritten = {rewrite.name for rewrite in rewrites if rewrite.after is None}
        moves = Moves(
            kind="rename",
            identity=self._identity,
            moves=tuple(step.without(rewritten) for step in wave),
            rewrites=rewrites,
            relinks=tuple(updates.relinks.get(directory, ())),
            source=directory,
            target=directory,
        )
        return self._chains[directory].make(moves, has_more=has_more).failed

    def _undo_all(self) -> None:
        """Give all checkpoints their old names again, since one failed; say so of each."""
        culprit, why = next(iter(self._failed.items()))
        why = f"{os.path.basename(culprit)}: {why}; all of them are renamed, or none"
        for directory, planned in self._planned.items():
            try:
                self._chains[directory].undo()
            except CheckpointError as failure:
                self._stale[directory] = failure.reason
            for step in planned:
                self._failed.setdefault(step.renaming.entry.path, why)
            self._restore_elsewhere(directory)

    def _restore_elsewhere(self, directory: str) -> None:
        """Have what names checkpoints of a directory from others say their old names again."""
        before, old_names = self._scene, dict[str, str]()
        for number in self._numbers[directory]:
            now, first = self._entries[number], self._first[number]
            old_names |= zip((*now.unit.members, now.name), (*first.unit.members, first.name), strict=True)
            self._entries[number] = _current_entry(first)
        changed = {now: old for now, old in old_names.items() if now != old}
        if changed:
            self._refresh_scene()
            self._update_elsewhere({directory: changed}, before, kind="restore")

    def _refresh_entries(self, directory: str, done: Sequence[RenameStep]) -> dict[str, Entry]:
        """Return the checkpoints of a directory as they are now, by the paths that they had before."""
        made = {step.entry.path: step for step in done}
        entries: dict[str, Entry] = {}
        for number in self._numbers[directory]:
            entry = self._entries[number]
            entries[entry.path] = self._entries[number] = _current_entry(entry, made.get(entry.path))
        return entries

    def _refresh_scene(self) -> None:
        """Take the scene as it is once each directory has had its turn."""
        self._scene = replace(self._scene, entries=tuple(self._entries), links=links_near(self._scene.root))

    def _update_elsewhere(self, names: NewNames, before: Scene, kind: Kind = "rename") -> None:
        """Change what names checkpoints from other directories than their own; note what fails."""
        if not names:
            return
        updates = updates_for(self._scene, PathRenames(names), before=before)
        for directory in updates.directories:
            moves = Moves(
                kind=kind,
                identity=self._identity,
                moves=(),
                rewrites=tuple(updates.rewrites.get(directory, ())),
                relinks=tuple(updates.relinks.get(directory, ())),
                source=directory,
                target=directory,
            )
            try:
                apply_moves(directory, moves)
            except CheckpointError as failure:
                self._stale[directory] = failure.reason
        if not updates.directories:
            return
        self._scene = replace(self._scene, links=links_near(self._scene.root))
        for directory in updates_for(self._scene, PathRenames(names), before=before).directories:
            self._stale.setdefault(directory, "it has changed since the plan was made")


def _current_entry(entry: Entry, step: RenameStep | None = None) -> Entry:
    """Return a checkpoint with its files as they are now, after a step."""
    try:
        return entry_after(replace(step, entry=entry)) if step else refresh(entry)
    except OSError as error:
        raise from_os_error(error, entry.path) from error
