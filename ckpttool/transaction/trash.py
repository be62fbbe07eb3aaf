"""The trash: checkpoints that ``prune --trash`` moved aside, until it is undone or the trash is emptied.

A trash next to its directory has that directory's name, which another directory may get later. So each record
in it has the inode of its directory. The device isn't recorded: its number may change with a new mount, and a
trash is always on the file system of its directory.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field

from ckpttool.core.errors import CheckpointError, from_os_error
from ckpttool.core.report import Problem
from ckpttool.storage import fs
from ckpttool.storage.held import holds
from ckpttool.transaction.engines import engine_of
from ckpttool.transaction.history import (
    RECORD,
    CommandRecord,
    UndoStep,
    identities,
    inode_of,
    make_trash,
    open_trash,
    read_record,
    tidy,
    write_record,
)
from ckpttool.transaction.lock import lock_directory
from ckpttool.transaction.paths import shown, without_trailing_slashes
from ckpttool.transaction.record_undo import operations_in_copy
from ckpttool.transaction.recovery import recover_directory
from ckpttool.transaction.state_dir import OWNER, TRASH, StateDir, state_dir_beside, state_dirs
from ckpttool.transaction.transaction import Failure

_MARK = TRASH + OWNER


@dataclass(slots=True)
class EmptiedTrash:
    """Result of emptying a trash.

    Attributes:
        dry_run: Whether nothing was changed.
        removed: Original paths of the removed checkpoints.
        freed_bytes: Bytes that were freed.
        left_bytes: Bytes of listed checkpoints that are kept because they have changed.
        problems: Files that are kept because they have changed, or no record lists them.
        warnings: Results of recovered commands, and notes on copied directories.
    """

    dry_run: bool
    removed: list[str] = field(default_factory=list)
    freed_bytes: int = 0
    left_bytes: int = 0
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


@holds("directory")
def empty(directory: str, older_than: int | None = None, dry_run: bool = False) -> EmptiedTrash:
    """Remove the checkpoints that records in a directory's trash list, for good.

    Args:
        directory: The directory.
        older_than: Minimum age in seconds; None for all.
        dry_run: Whether to change nothing.
    """
    directory, emptied = without_trailing_slashes(directory), EmptiedTrash(dry_run)
    has_trash = any(fs.isdir(state_dir.trash) for state_dir in state_dirs(directory))
    if not (has_trash or records_under_other_names(directory)):
        return emptied
    with nullcontext() if dry_run else lock_directory(directory):
        if not dry_run:
            recovery = recover_directory(directory)
            emptied.problems += [Problem(path, why) for path, why in recovery.failed.items()]
            emptied.warnings += recovery.results
            adopt(directory, records_under_other_names(directory))
        for state_dir, identity in trash_places(directory):
            if older_than is None or engine_of(directory).age(identity) >= older_than:
                _empty_place(directory, state_dir, identity, emptied)
    return emptied


def _empty_place(directory: str, state_dir: StateDir, identity: str, emptied: EmptiedTrash) -> None:
    """Empty the place of one command in a trash."""
    path, listed = state_dir.trash_place(identity), tuple[UndoStep, ...]()
    try:
        record = read_record(directory, state_dir, identity)
        if record is not None and is_of_other_directory(record):
            emptied.problems.append(other_directory_problem(record))
            return
        # Files are removed before the record is rewritten. After a kill in between, the record lists some
        # that are missing, which the next run takes for removed.
        if record is not None:
            left = tuple(_empty_step(record, step, emptied) for step in record.steps)
            listed = record.steps if emptied.dry_run else left
            if not emptied.dry_run:
                write_record(record._replace(steps=tuple(step for step in left if step.undoing.groups)))
        if not emptied.dry_run:
            tidy(state_dir, identity)
        emptied.problems += _unlisted_files(path, listed)
    except OSError as error:
        raise from_os_error(error, path) from error
    except CheckpointError as failure:
        emptied.problems.append(Problem(path, f"left unchanged: {failure.reason}"))


def _empty_step(record: CommandRecord, step: UndoStep, emptied: EmptiedTrash) -> UndoStep:
    """Remove the checkpoints that a step would restore; return the step with those that are left."""
    if not step.undoing.is_from_trash:  # a rename has no files in the trash
        return step._replace(undoing=step.undoing.subset([]))
    listed, warning = operations_in_copy(record.directory, step.undoing, record.state_dir)
    if warning is not None:
        emptied.warnings.append(f"{shown(record.directory)}: {warning}")
    left: list[int] = []
    for number, freed in engine_of(record.directory).purge(record, listed, dry_run=emptied.dry_run):
        group = listed.groups[number]
        path = shown(os.path.join(record.directory, os.path.basename(group.path)))
        if isinstance(freed, Exception):
            problem = f"left in {shown(record.place)}: {Failure.of(freed).text()}"
            emptied.problems.append(Problem(path, problem))
            emptied.left_bytes += group.contents.nbytes
            left.append(number)
        else:
            emptied.removed.append(path)
            emptied.freed_bytes += freed
    return step._replace(undoing=listed.subset(left))


def _unlisted_files(place: str, steps: Iterable[UndoStep]) -> Iterator[Problem]:
    """Yield the files in a command's place in the trash that no record lists."""
    listed = {RECORD}
    for group in (group for step in steps for group in step.undoing.groups):
        listed.update(file.path for file in group.contents.files)
        listed.update(group.contents.directories)
        listed.update(os.path.dirname(member) for member in group.members)
    for directory, names, files in fs.walk(place, _raise_unless_gone):
        for name in sorted([*names, *files]):
            path = os.path.join(directory, name)
            holds_something = name in names and not fs.islink(path) and fs.listdir(path)
            if os.path.relpath(path, place) not in listed and not holds_something:  # its entries are reported
                yield Problem(path, "not listed in any record; kept")


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


# Records of a directory -----------------------------------------------------------------------------


def trash_places(directory: str) -> Iterator[tuple[StateDir, str]]:
    """Yield the places of commands in a directory's trash, including one under an earlier name of it."""
    for state_dir in state_dirs(directory):
        yield from ((state_dir, identity) for identity in identities(state_dir))
    yield from ((record.state_dir, record.identity) for record in records_under_other_names(directory))


def records_of(directory: str, command: str | None = None) -> Iterator[CommandRecord]:
    """Yield the records in a directory's trash, or of one command; some may belong to another directory."""
    for state_dir, identity in trash_places(directory):
        if command in (None, identity):
            record = read_record(directory, state_dir, identity)
            if record is not None:
                yield record


def records_under_other_names(directory: str) -> list[CommandRecord]:
    """Return the records in the parent directory that were made for a directory under another name."""
    if not fs.place_of(directory).opens_by_path:
        return []
    beside = state_dir_beside(directory)
    try:
        names = sorted(name for name in fs.listdir(beside.path) if name.startswith(_MARK))
    except OSError:  # what can't be listed can't be searched
        return []
    inode = inode_of(directory)
    others = (StateDir(beside.path, name.removeprefix(TRASH)) for name in names if name != beside.trash_name)
    return [
        record for other in others for record in _records_beside(directory, other) if record.root == inode
    ]


def adopt(directory: str, records: Iterable[CommandRecord]) -> None:
    """Move records, with their checkpoints, to the trash under the current name of a locked directory."""
    # If a directory was renamed, the trash next to it has its old name. Records are of this
    # directory if they have its inode.
    beside = state_dir_beside(directory)
    for record in records:
        try:
            make_trash(beside)
            with open_trash(record.state_dir) as old, open_trash(beside) as new:
                old.rename(record.identity, new)
        except OSError as error:
            raise from_os_error(error, record.place) from error
        tidy(record.state_dir, record.identity)


def is_of_other_directory(record: CommandRecord) -> bool:
    """Return whether a record belongs to another directory of the same name; False in a copy of that one."""
    # A copy of the directory has another inode than recorded, like an unrelated directory of the same name.
    # But its files have the recorded sizes and times.
    if record.root is None or record.root == inode_of(record.directory):
        return False
    copies = (operations_in_copy(record.directory, one.undoing, record.state_dir) for one in record.steps)
    return all(note is None for _, note in copies)


def other_directory_problem(record: CommandRecord) -> Problem:
    """Return the problem for a record of another directory; see ``is_of_other_directory``."""
    name = shown(record.directory)
    text = f"kept: it belongs to a directory that was named {name} before"
    place = shown(path_as_given(record.directory, record.place))
    now = renamed_directory(record)
    if now is None:
        return Problem(place, f"{text}; move the files you need elsewhere, or remove it")
    other = shown(path_as_given(record.directory, now))
    return Problem(place, f"{text}, and is {other} now (undo {other})")


def renamed_directory(record: CommandRecord) -> str | None:
    """Return the path of the directory that a record was made for, if it was renamed within its parent."""
    return next(
        (path for path, inode in _directories_in(record.state_dir.path) if inode == record.root), None
    )


def path_as_given(directory: str, path: str) -> str:
    """Return a path in the parent directory, spelled like the path of the directory."""
    above = os.path.dirname(directory) or os.curdir
    real = os.path.dirname(fs.realpath(directory))
    is_above = fs.isdir(above) and fs.samefile(above, real)
    return os.path.join(above, os.path.relpath(path, real)) if is_above else path


def directories_of_trash(parent: str, name: str) -> Iterator[str]:
    """Yield the directories that a trash in their parent is for: by its name, then by its records."""
    named = os.path.join(parent, name.removeprefix(_MARK))
    if fs.isdir(named):
        yield named
    directory = named if fs.isdir(named) else parent
    roots = {record.root for record in _records_beside(directory, StateDir(parent, name.removeprefix(TRASH)))}
    for path, inode in _directories_in(parent):
        if inode in roots and path != named:
            yield path


def _records_beside(directory: str, state_dir: StateDir) -> Iterator[CommandRecord]:
    """Yield the records in a trash that have the inode of their directory."""
    with suppress(CheckpointError):  # the trash is another user's
        for identity in identities(state_dir):
            with suppress(CheckpointError):  # unreadable; commands on the directory of its name report that
                record = read_record(directory, state_dir, identity)
                if record is not None and record.root is not None:
                    yield record


def _directories_in(parent: str) -> Iterator[tuple[str, int]]:
    try:
        found = fs.entries(parent)
    except OSError:  # what can't be listed can't be searched
        return
    yield from ((entry.path, entry.inode()) for entry in found if entry.is_dir(follow_symlinks=False))
