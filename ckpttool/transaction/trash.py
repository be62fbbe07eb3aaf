"""The trash: what a prune has put aside, on the same file system, until it is emptied or taken back.

One beside its directory bears a name, which other directories may have since. So each record in it keeps the
inode of its directory. The device is of no use: it may be another number once the file system is mounted
anew, and a trash lies on the file system of its directory in any case.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from ckpttool.core.errors import CheckpointError, from_os_error
from ckpttool.storage import fs
from ckpttool.storage.directories import rename
from ckpttool.storage.held import holds
from ckpttool.transaction.copies import operations_in_copy
from ckpttool.transaction.engines import engine_of
from ckpttool.transaction.files import opened
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
from ckpttool.transaction.moves import failure_text
from ckpttool.transaction.paths import Problem, bare, shown
from ckpttool.transaction.recovery import recover_directory
from ckpttool.transaction.state_dir import (
    OWNER,
    TRASH,
    StateDir,
    state_dir_beside,
    state_dirs,
)

_MARK = TRASH + OWNER


class EmptiedTrash(NamedTuple):
    """What was removed from a trash, or would be.

    Attributes:
        removed: The checkpoints, by the paths that they had.
        freed_bytes: How many bytes that freed.
        dry_run: Whether nothing was changed.
        problems: What lies there that no record lists, or is not as it was, and is left.
        warnings: What became of an interrupted command, and which directory is a copy.
        left_bytes: How many bytes lie in the trash that records list, and are left as they have changed.
    """

    removed: tuple[str, ...] = ()
    freed_bytes: int = 0
    dry_run: bool = False
    problems: tuple[Problem, ...] = ()
    warnings: tuple[str, ...] = ()
    left_bytes: int = 0


@dataclass(slots=True)
class _Emptying:
    """What became of a trash so far."""

    dry_run: bool
    removed: list[str] = field(default_factory=list)
    freed: int = 0
    left: int = 0
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


@holds("directory")
def empty(directory: str, older_than: int | None = None, dry_run: bool = False) -> EmptiedTrash:
    """Remove what the records of a directory's trash list, and nothing else. It can't be taken back then.

    Args:
        directory: The directory whose trash it is.
        older_than: Only what was put there more than so many seconds ago.
        dry_run: Whether to change nothing.
    """
    directory = bare(directory)
    if not any(fs.isdir(state_dir.trash) for state_dir in all_state_dirs(directory)):
        return EmptiedTrash(dry_run=dry_run)
    emptying = _Emptying(dry_run)
    with nullcontext() if dry_run else lock_directory(directory):
        if not dry_run:
            recovery = recover_directory(directory)
            emptying.problems += [Problem(path, why) for path, why in recovery.failed.items()]
            emptying.warnings += recovery.moved
            adopt_renamed_trashes(directory)
        for state_dir in all_state_dirs(directory):
            for identity in identities(state_dir):
                if older_than is None or engine_of(directory).age(identity) >= older_than:
                    _empty_place(directory, state_dir, identity, emptying)
    return _emptied(emptying)


def _emptied(emptying: _Emptying) -> EmptiedTrash:
    return EmptiedTrash(
        removed=tuple(emptying.removed),
        freed_bytes=emptying.freed,
        dry_run=emptying.dry_run,
        problems=tuple(emptying.problems),
        warnings=tuple(emptying.warnings),
        left_bytes=emptying.left,
    )


def _empty_place(directory: str, state_dir: StateDir, identity: str, emptying: _Emptying) -> None:
    """Remove what one command has put into a trash."""
    path = state_dir.trash_place(identity)
    try:
        record = read_record(directory, state_dir, identity)
        if state_dir not in state_dirs(directory) and not (record and belongs_to_directory(record)):
            return
        if record is not None and is_of_other_directory(record):
            emptying.problems.append(other_directory_problem(record))
            return
        listed = () if record is None else record.steps
        left = () if record is None else tuple(_empty_step(record, step, emptying) for step in listed)
        if not emptying.dry_run:
            if record is not None:
                write_record(record._replace(steps=tuple(step for step in left if step.undoing.groups)))
            tidy(state_dir, identity)
            listed = left
        emptying.problems += _unlisted_files(path, listed)
    except OSError as error:
        raise from_os_error(error, path) from error
    except CheckpointError as failure:
        emptying.problems.append(Problem(path, f"left as it is: {failure.reason}"))


def _empty_step(record: CommandRecord, step: UndoStep, emptying: _Emptying) -> UndoStep:
    """Remove what a step would put back; return it with what could not be removed."""
    if not step.undoing.is_from_trash:  # a renaming: nothing of it lies here
        return step._replace(undoing=step.undoing.only([]))
    listed, warning = operations_in_copy(record.directory, step.undoing, record.state_dir)
    if warning is not None:
        emptying.warnings.append(f"{shown(record.directory)}: {warning}")
    left: list[int] = []
    for number, freed in engine_of(record.directory).purge(record, listed, dry_run=emptying.dry_run):
        group = listed.groups[number]
        path = shown(os.path.join(record.directory, os.path.basename(group.path)))
        if isinstance(freed, Exception):
            problem = f"left in {shown(record.place)}: {failure_text(freed)}"
            emptying.problems.append(Problem(path, problem))
            emptying.left += group.contents.nbytes
            left.append(number)
        else:
            emptying.removed.append(path)
            emptying.freed += freed
    return step._replace(undoing=listed.only(left))


def _unlisted_files(place: str, steps: Iterable[UndoStep]) -> Iterator[Problem]:
    """Yield what lies in a command's place in the trash, and no record lists."""
    listed = {RECORD}
    for group in (group for step in steps for group in step.undoing.groups):
        listed.update(file.path for file in group.contents.files)
        listed.update(group.contents.directories)
        listed.update(os.path.dirname(member) for member in group.members)
    for directory, names, files in fs.walk(place, _raise_unless_gone):
        for name in sorted([*names, *files]):
            path = os.path.join(directory, name)
            holds_something = name in names and not fs.islink(path) and fs.listdir(path)
            if os.path.relpath(path, place) not in listed and not holds_something:  # what it holds is told
                yield Problem(path, "no record lists it; it is left")


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


# Whose a trash is ---------------------------------------------------------------------------------


def is_for_other_inode(record: CommandRecord) -> bool:
    """Tell whether a record was made for another directory than the one that has its name now."""
    return record.root is not None and record.root != inode_of(record.directory)


def belongs_to_directory(record: CommandRecord) -> bool:
    """Tell whether a record lies under the name of its directory, or was made for that under another name."""
    is_named = record.state_dir in state_dirs(record.directory)
    return is_named or (record.root is not None and record.root == inode_of(record.directory))


def renamed_directory(record: CommandRecord) -> str | None:
    """Return the directory beside that a record was made for, if it lies there under another name."""
    return next(
        (path for path, inode in _directories_in(record.state_dir.path) if inode == record.root), None
    )


def is_of_other_directory(record: CommandRecord) -> bool:
    """Tell whether a record beside a directory was made for another one of its name, and not in a copy."""
    return is_for_other_inode(record) and all(
        operations_in_copy(record.directory, step.undoing, record.state_dir)[1] is None
        for step in record.steps
    )


def other_directory_problem(record: CommandRecord) -> Problem:
    """Return what is to be told of a record for which ``is_of_other_directory`` is true."""
    name = shown(record.directory)
    text = f"it belongs to a directory that was {name} before, and is left as it is"
    place = shown(path_as_given(record.directory, record.place))
    now = renamed_directory(record)
    if now is None:
        return Problem(place, f"{text}; move out by hand what you need, or remove it")
    other = shown(path_as_given(record.directory, now))
    return Problem(place, f"{text}: that is {other} now (undo {other})")


def path_as_given(directory: str, path: str) -> str:
    """Return the path of what lies beside a directory in the words in which that was given."""
    above = os.path.dirname(directory) or os.curdir
    real = os.path.dirname(fs.realpath(directory))
    is_above = fs.isdir(above) and fs.samefile(above, real)
    return os.path.join(above, os.path.relpath(path, real)) if is_above else path


def trashes_under_other_names(directory: str) -> list[StateDir]:
    """Return where the trash of a directory lies that had another name when something was put there."""
    if not fs.place_of(directory).opens_by_path:
        return []
    beside = state_dir_beside(directory)
    try:
        names = sorted(name for name in fs.listdir(beside.path) if name.startswith(_MARK))
    except OSError:  # what can't be listed can't be searched
        return []
    inode = inode_of(directory)
    others = [StateDir(beside.path, name.removeprefix(TRASH)) for name in names if name != beside.trash_name]
    return [
        state_dir
        for state_dir in others
        if any(record.root == inode for record in _records(directory, state_dir))
    ]


def all_state_dirs(directory: str) -> tuple[StateDir, ...]:
    """Return where a trash of a directory lies, or may lie."""
    return *state_dirs(directory), *trashes_under_other_names(directory)


def adopt_renamed_trashes(directory: str) -> list[StateDir]:
    """Have the trash of a directory that got another name follow it; return where it lay.

    Args:
        directory: The directory; it is locked.
    """
    beside = state_dir_beside(directory)
    others = trashes_under_other_names(directory)
    for state_dir in others:
        for record in _records(directory, state_dir):
            if record.root == inode_of(directory):
                name = record.identity
                try:
                    make_trash(beside)
                    with (
                        opened(state_dir.path) as around,
                        open_trash(state_dir, around) as old,
                        open_trash(beside, around) as new,
                    ):
                        rename(name, old, name, new)
                except OSError as error:
                    raise from_os_error(error, record.place) from error
                tidy(state_dir, name)
    return others


def directories_of_trash(around: str, name: str) -> Iterator[str]:
    """Yield the directories that a trash beside them is of: by the name of it, and by what lies there."""
    named = os.path.join(around, name.removeprefix(_MARK))
    if fs.isdir(named):
        yield named
    directory = named if fs.isdir(named) else around
    roots = {record.root for record in _records(directory, StateDir(around, name.removeprefix(TRASH)))}
    for path, inode in _directories_in(around):
        if inode in roots and path != named:
            yield path


def _records(directory: str, state_dir: StateDir) -> Iterator[CommandRecord]:
    """Yield the records in a trash that tell which directory they were made for."""
    with suppress(CheckpointError):  # another's, or none that can be read: whoever has its name is told
        for identity in identities(state_dir):
            record = read_record(directory, state_dir, identity)
            if record is not None and record.root is not None:
                yield record


def _directories_in(around: str) -> Iterator[tuple[str, int]]:
    try:
        found = fs.entries(around)
    except OSError:  # what can't be listed can't be searched
        return
    yield from ((entry.path, entry.inode()) for entry in found if entry.is_dir(follow_symlinks=False))
