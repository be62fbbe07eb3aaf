"""Undoes the last prune into the trash, or the last rename: restores checkpoints under their old names."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ckpttool.core.errors import AccessDenied, CheckpointError, from_os_error
from ckpttool.core.report import Problem
from ckpttool.core.result import Result, document_of
from ckpttool.formats.discovery import OWN_PREFIX
from ckpttool.formats.interface import natural
from ckpttool.runs.pointers.kinds import note_kind, pointers_in
from ckpttool.runs.pointers.notes import read_note
from ckpttool.runs.pointers.pin_lists import lists_for, pins_of
from ckpttool.runs.pointers.search import ignore_error, names_in, path_parts
from ckpttool.storage import fs
from ckpttool.storage.fs import Snapshot
from ckpttool.storage.held import holds
from ckpttool.transaction.history import (
    CommandRecord,
    RecordKind,
    identities,
    local_time_of,
    read_record,
    write_record,
)
from ckpttool.transaction.lock import HeldLocks
from ckpttool.transaction.paths import require_directory, shown
from ckpttool.transaction.record_undo import RecordUndo, undo_record
from ckpttool.transaction.recovery import recover_directory
from ckpttool.transaction.state_dir import (
    OWNER,
    TRASH,
    state_dirs,
)
from ckpttool.transaction.trash import (
    adopt,
    directories_of_trash,
    is_of_other_directory,
    other_directory_problem,
    path_as_given,
    records_of,
    records_under_other_names,
    renamed_directory,
)

_LEVELS_BELOW = 3
"""Levels of subdirectories that are searched for undoable commands if a directory has none."""


@dataclass(frozen=True, slots=True)
class RestoredCheckpoint:
    """Restored checkpoint: its path, and the path that it had before the undo."""

    path: str
    was: str


@dataclass(frozen=True, slots=True, repr=False)
class Undone(Result):
    """Result of ``undo``; of a dry run, the expected one.

    Attributes:
        identity: Identity of the undone command; None if there was none.
        kind: Kind of the command: "trash" or "rename", or "prune" in a bucket that keeps versions.
        restored: Restored checkpoints.
        pointers: Paths of restored pointers, and of files that belong to restored checkpoints.
        dry_run: Whether nothing was changed.
        problems: Reasons why something could not be undone.
        warnings: Results of recovery, and pointers that aren't changed.
        below: Number of subdirectories with undoable commands, if the directory has none.
    """

    identity: str | None = None
    kind: RecordKind | None = None
    restored: tuple[RestoredCheckpoint, ...] = ()
    pointers: tuple[str, ...] = ()
    dry_run: bool = False
    problems: tuple[Problem, ...] = ()
    warnings: tuple[str, ...] = ()
    below: int = 0

    @property
    def summary(self) -> str:
        """Return the number of restored checkpoints."""
        return f"{len(self.restored):,} {'to restore' if self.dry_run else 'restored'}"

    def document(self) -> dict[str, Any]:
        return {
            "schema": "ckpttool.undo/1",
            **document_of(self, "dry_run", "id", "command", names={"id": "identity"}),
            **document_of(self, "restored", "pointers", "errors"),
        }

    @property
    def command(self) -> str | None:
        """Return the name of the undone command."""
        return "prune" if self.kind == "trash" else self.kind


@holds("directory")
def undo(directory: str | os.PathLike[str], *, recursive: bool = True, dry_run: bool = False) -> Undone:
    """Undo the last prune into the trash, or the last rename, of a directory.

    If an earlier undo couldn't restore anything of that command, the command before it is undone.

    Args:
        directory: The directory.
        recursive: Whether to undo the same command in all directories below, too.
        dry_run: Whether to change nothing.

    Raises:
        UsageError: It is a file.
        CheckpointError: It can't be read, locked or changed.
    """
    # One command may have changed many directories; its records have the same identity in each. The last
    # command of all directories is undone. Records that remain are marked as reported, so that the next undo
    # can revert an older command instead of failing forever for the same reasons.
    root = require_directory(directory)
    places = list(dict.fromkeys([root, *directories_with_trash(root)])) if recursive else [root]
    with HeldLocks() as locks:
        progress = _UndoProgress(locks, dry_run)
        for place in places:
            progress.hold(place)
        for place in places:
            progress.adopt(place)
        commands = progress.commands(places)
        for number, identity in enumerate(commands):
            records = [record for place in places for record in _records(place, identity)]
            if not records:
                raise AccessDenied(root, "its trash was removed or replaced in the meantime")
            above = _record_above(root, identity) if records[0].kind == "rename" else None
            if above is not None and progress.hold(above.directory):
                above = _record_above(root, identity)  # recovery may have changed it
            progress.identity, progress.kind = identity, records[0].kind
            progress.undo_records(records, above, is_tree=recursive)
            older = commands[number + 1 :]
            if older and not dry_run:
                _mark_reported(records)
            if progress.restored or progress.pointers:
                break
            if older and not all(record.has_warned for record in records):
                hint = f"the next undo reverts the command before it, of {local_time_of(older[0])}"
                progress.warnings.append(f"nothing was restored; {hint}")
                return progress.result()
        if not commands and not recursive:
            return progress.result(below=_count_below(root))
    if progress.kind == "rename":
        waits = progress.identity is not None and _record_above(root, progress.identity) is not None
        progress.problems += _stale_names(progress.restored, progress.pointers, above=not waits)
    return progress.result()


class _UndoProgress:
    """State of an undo: locked directories, and results so far."""

    def __init__(self, locks: HeldLocks, dry_run: bool) -> None:
        self.identity: str | None = None
        self.kind: RecordKind | None = None
        self.restored: list[RestoredCheckpoint] = []
        self.pointers: list[str] = []
        self.problems: list[Problem] = []
        self.warnings: list[str] = []
        self._locks = locks
        self._dry_run = dry_run

    def result(self, below: int = 0) -> Undone:
        """Return the result."""
        return Undone(
            identity=self.identity,
            kind=self.kind,
            restored=tuple(self.restored),
            pointers=tuple(self.pointers),
            dry_run=self._dry_run,
            problems=tuple(self.problems),
            warnings=tuple(self.warnings),
            below=below,
        )

    def hold(self, directory: str) -> bool:
        """Lock a directory, and recover from interrupted commands in it; return whether it was locked now."""
        if self._dry_run or not self._locks.hold(directory):
            return False
        recovery = recover_directory(directory)
        self.problems += [Problem(path, why) for path, why in recovery.failed.items()]
        self.warnings += recovery.results
        return True

    def adopt(self, directory: str) -> None:
        """Move the trash of a directory that was renamed since to its new name."""
        found = records_under_other_names(directory)
        if not self._dry_run:
            adopt(directory, found)
        for trash in dict.fromkeys(record.state_dir.trash for record in found):
            text = f"its trash still has the directory's old name: {shown(path_as_given(directory, trash))}"
            self.warnings.append(f"{shown(directory)}: {text}")

    def commands(self, places: Sequence[str]) -> list[str]:
        """Return the identities of undoable commands, the last first; report those of other directories."""
        held = {fs.realpath(place) for place in places}
        commands: set[str] = set()
        foreign: list[Problem] = []
        for record in (record for place in places for record in records_of(place)):
            if not is_of_other_directory(record):
                commands.add(record.identity)
            elif fs.realpath(renamed_directory(record) or "") not in held:
                # Otherwise it is undone in the directory of its new name.
                foreign.append(other_directory_problem(record))
        if commands:
            self.warnings += [f"{problem.path}: {problem.message}" for problem in foreign]
        else:
            self.problems += foreign
        return sorted(commands, reverse=True)  # an identity begins with the time of its command

    def undo_records(
        self, records: Sequence[CommandRecord], above: CommandRecord | None, *, is_tree: bool
    ) -> None:
        """Undo the records of one command; ``above`` is its record in the directory above."""
        restored: list[str] = []
        is_whole = True
        for record in records:
            below = [] if is_tree else _renamed_below(record)
            if below:
                why = f"the same rename also changed {below[0]} (undo without --no-recursive restores both)"
                self.problems.append(Problem(shown(record.directory), why, "not restored"))
                continue
            done = undo_record(record, self._dry_run)
            self._add(done)
            is_whole &= not done.problems
            if done.restored:
                restored.append(record.directory)
        if above is not None and restored:
            self._add(_undo_record_above(above, restored, is_whole, self._dry_run))

    def _add(self, done: RecordUndo) -> None:
        self.restored += [RestoredCheckpoint(path, was) for path, was in done.restored.items()]
        self.pointers += done.pointers
        self.problems += done.problems
        self.warnings += done.warnings


def _mark_reported(records: Sequence[CommandRecord]) -> None:
    """Mark remaining records as reported, so that the next undo takes an older command."""
    for record in records:
        left = read_record(record.directory, record.state_dir, record.identity)
        if left is not None and not left.has_warned:
            try:
                write_record(left._replace(has_warned=True))
            except OSError as error:
                raise from_os_error(error, left.path) from error


def _count_below(root: str) -> int:
    """Return the number of subdirectories with undoable commands, down to a few levels."""
    count = 0
    for place in directories_with_trash(root, levels=_LEVELS_BELOW):
        with suppress(CheckpointError):  # reported by an undo of that directory
            count += any(not is_of_other_directory(record) for record in records_of(place))
    return count


# Records -------------------------------------------------------------------------------------------


def directories_with_trash(root: str, *, levels: int | None = None) -> Iterator[str]:
    """Yield the directories in a tree that have a trash, also one next to them.

    Args:
        root: The tree.
        levels: Limit on the levels to descend; None for no limit.
    """
    seen: set[str] = set()
    for directory, names, _ in fs.walk(root, _raise_store_error):
        for name in sorted(names):
            if name == TRASH or name.startswith(TRASH + OWNER):
                for place in [directory] if name == TRASH else directories_of_trash(directory, name):
                    if place not in seen:
                        seen.add(place)
                        yield place
        inside = (name for name in names if not name.startswith(OWN_PREFIX) and name != ".git")
        names[:] = sorted(inside, key=natural)
        if levels is not None and directory.removeprefix(root).count(os.sep) >= levels:
            names.clear()
    if root not in seen and any(identities(state_dir) for state_dir in state_dirs(root)):
        yield root


def _raise_store_error(error: OSError) -> None:
    """Raise errors of a store, and ignore those of a disk."""
    # A directory on a disk that this user can't read has no trash of this user. A store's errors concern a
    # request, and say nothing about what is there.
    path = os.fspath(error.filename or "")
    if not fs.place_of(path).errors_concern_files and not isinstance(error, FileNotFoundError):
        raise from_os_error(error, path)


def _records(directory: str, identity: str) -> Iterator[CommandRecord]:
    """Yield the records of one command in a directory."""
    return (one for one in records_of(directory, identity) if not is_of_other_directory(one))


def _renamed_below(record: CommandRecord) -> list[str]:
    """Return the directories below with renames of a command, if a record has only pointers."""
    if record.has_moves or not record.steps:
        return []
    return [
        shown(place)
        for place in directories_with_trash(record.directory)
        if place != record.directory and any(one.has_moves for one in _records(place, record.identity))
    ]


def _record_above(root: str, identity: str) -> CommandRecord | None:
    """Return the record of a command's pointer changes in the directory above; None if it has none."""
    above = os.path.dirname(root) or os.curdir
    real = os.path.dirname(fs.realpath(root))
    if not fs.isdir(above) or not fs.samefile(above, real):
        above = real
    if fs.samefile(above, root):
        return None
    try:
        return next(iter(_records(above, identity)), None)
    except AccessDenied:  # another user's trash, which has no records of this one
        return None


def _undo_record_above(
    above: CommandRecord, restored: Sequence[str], is_whole: bool, dry_run: bool
) -> RecordUndo:
    """Undo pointer changes in the directory above, unless other directories still need them.

    Args:
        above: Record in that directory.
        restored: The directories below with restored checkpoints.
        is_whole: Whether all checkpoints of the command were restored.
        dry_run: Whether to change nothing.
    """
    # Notes in the directory above have the names of checkpoints in several directories below, and are
    # restored as a whole, as they were before the rename. So they wait until the last of these directories is
    # restored.
    places = [
        place for place in directories_with_trash(above.directory) if not fs.samefile(place, above.directory)
    ]
    waiting = [place for place in places if any(_records(place, above.identity))]
    if dry_run and is_whole:
        back = set(map(fs.realpath, restored))
        waiting = [place for place in waiting if fs.realpath(place) not in back]
    if not waiting and not above.has_moves:
        return undo_record(above, dry_run)
    why = f"pointers here may still have the new names (undo {above.directory} restores all of it)"
    return RecordUndo(warnings=[f"{shown(above.directory)}: {why}"])


# Stale names --------------------------------------------------------------------------------------


def _stale_names(
    restored: Iterable[RestoredCheckpoint], pointers: Iterable[str], *, above: bool
) -> Iterator[Problem]:
    """Yield the pointers and notes that have the names of checkpoints before the undo.

    Args:
        restored: Checkpoints with their old names again, or in a dry run.
        pointers: Paths of restored pointers, or in a dry run.
        above: Whether notes in the directory above count, too.
    """
    # A pointer written after the rename has the new name of a checkpoint, and dangles after the undo. It is
    # reported but not changed. Files that the rename itself changed are restored with the checkpoints.
    restored_files = set(map(os.path.abspath, pointers))
    by_directory: dict[str, dict[str, RestoredCheckpoint]] = defaultdict(dict)
    for checkpoint in restored:
        name = os.path.basename(checkpoint.was)
        by_directory[os.path.dirname(checkpoint.path) or os.curdir][name] = checkpoint
    for directory, known in by_directory.items():
        stale: dict[str, RestoredCheckpoint] = {}
        for path, target in _pointers_in(directory):
            parts = path_parts(target)
            if parts and parts[-1] in known:
                stale.setdefault(path, known[parts[-1]])
        stale |= {path: one for path, one in _notes_in(directory, known) if path not in stale}
        if above:
            real = fs.realpath(directory)
            by_path = {f"{os.path.basename(real)}/{name}": one for name, one in known.items()}
            stale |= dict(_notes_in(os.path.dirname(real), by_path))
        moved = {os.path.abspath(one.was): os.path.abspath(one.path) for one in known.values()}
        for path, checkpoint in stale.items():
            parent, name = os.path.split(os.path.abspath(path))
            path_afterwards = os.path.join(moved.get(parent, parent), name)
            if path_afterwards not in restored_files:
                yield _stale_name(path, checkpoint)
        for file, pinned in _pins_in(directory):
            # A pin that was set after the rename has the new name.
            is_restored = os.path.abspath(file) in restored_files
            if pinned in moved and (not is_restored or not fs.lexists(pinned)):
                yield _stale_name(file, known[os.path.basename(pinned)])


def _stale_name(path: str, checkpoint: RestoredCheckpoint) -> Problem:
    old, new = os.path.basename(checkpoint.path), os.path.basename(checkpoint.was)
    message = f"it still names {new}, which is {old} again (to keep it, pin {old})"
    return Problem(shown(os.path.normpath(path)), message)


def _pointers_in(directory: str) -> Iterator[tuple[str, str]]:
    """Yield the pointer files in a directory and its subdirectories, with their targets."""
    snapshot = Snapshot()
    around = names_in(directory, snapshot, ignore_error)
    inside = [entry.path for entry in around.values() if entry.is_dir(follow_symlinks=False)]
    for place in (directory, *inside):
        for pointer in pointers_in(place, names_in(place, snapshot, ignore_error), snapshot, ignore_error):
            if pointer.target is not None:
                yield pointer.holder, pointer.target


def _notes_in(
    directory: str, known: Mapping[str, RestoredCheckpoint]
) -> Iterator[tuple[str, RestoredCheckpoint]]:
    """Yield the notes in a directory that name one of the checkpoints, each with the first that it names."""
    levels = next(iter(known)).count("/") + 1
    snapshot = Snapshot()
    for name, file in names_in(directory, snapshot, ignore_error).items():
        kind = note_kind(name)
        text = None if kind is None else read_note(file, snapshot, ignore_error)
        if kind is not None and text is not None:
            named = ("/".join(path_parts(word)[-levels:]) for word in kind.names(text))
            checkpoint = next((known[path] for path in named if path in known), None)
            if checkpoint is not None:
                yield file.path, checkpoint


def _pins_in(directory: str) -> Iterator[tuple[str, str]]:
    """Yield the lists of pins for a directory, with the path of each checkpoint that is pinned."""
    for file in lists_for(directory):
        try:
            pins = pins_of(file)
        except CheckpointError:  # reported where pins are followed
            continue
        yield from ((file, os.path.abspath(pin.path)) for pin in pins)
