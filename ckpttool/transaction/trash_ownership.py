"""Whose a trash is that lies beside a directory: it bears a name, which other directories may have since.

So each record in it keeps the inode of its directory. The device is of no use: it may be another number once
the file system is mounted anew, and a trash lies on the file system of its directory in any case.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

from ckpttool.errors import CheckpointError, from_os_error
from ckpttool.transaction.copies import has_lost_times, is_of_copy, moves_of_copy
from ckpttool.transaction.files import opened
from ckpttool.transaction.history import CommandRecord, identities, inode_of, read_record, state_dirs
from ckpttool.transaction.moves import TRASH
from ckpttool.transaction.paths import Problem, shown
from ckpttool.transaction.state_dir import OWNER, StateDir, state_dir_beside
from ckpttool.transaction.trash_directories import make_trash, open_trash, tidy

_MARK = TRASH + OWNER


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
    return is_for_other_inode(record) and not any(
        is_of_copy(moves_of_copy(record.directory, step.undoing), step.undoing)
        or has_lost_times(record.directory, step.undoing)
        for step in record.steps
    )


def other_directory_problem(record: CommandRecord) -> Problem:
    """Return what is to be told of a record for which ``is_of_other_directory`` is true."""
    name = shown(record.directory)
    text = f"it belongs to a directory that was {name} before, and is left as it is"
    place = shown(path_as_given(record.directory, record.place))
    now = renamed_directory(record)
    if now is None:
        return Problem(place, f"{text}; take out of it by hand what you need, or remove it")
    other = shown(path_as_given(record.directory, now))
    return Problem(place, f"{text}: that is {other} now (undo {other})")


def path_as_given(directory: str, path: str) -> str:
    """Return the path of what lies beside a directory in the words in which that was given."""
    above = os.path.dirname(directory) or os.curdir
    real = os.path.dirname(os.path.realpath(directory))
    is_above = os.path.isdir(above) and os.path.samefile(above, real)
    return os.path.join(above, os.path.relpath(path, real)) if is_above else path


def trashes_under_other_names(directory: str) -> list[StateDir]:
    """Return where the trash of a directory lies that had another name when something was put there."""
    beside = state_dir_beside(directory)
    try:
        with os.scandir(beside.path) as entries:
            names = sorted(entry.name for entry in entries if entry.name.startswith(_MARK))
    except OSError:  # what can't be listed can't be searched
        return []
    inode = inode_of(directory)
    others = [
        StateDir(beside.path, name.removeprefix(TRASH)) for name in names if name != TRASH + beside.suffix
    ]
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
                        os.rename(name, name, src_dir_fd=old, dst_dir_fd=new)
                except OSError as error:
                    raise from_os_error(error, record.place) from error
                tidy(state_dir, name)
    return others


def directories_of_trash(around: str, name: str) -> Iterator[str]:
    """Yield the directories that a trash beside them is of: by the name of it, and by what lies there."""
    named = os.path.join(around, name.removeprefix(_MARK))
    if os.path.isdir(named):
        yield named
    directory = named if os.path.isdir(named) else around
    roots = {record.root for record in _records(directory, StateDir(around, name.removeprefix(TRASH)))}
    for path, inode in _directories_in(around):
        if inode in roots and path != named:
            yield path


def _records(directory: str, state_dir: StateDir) -> Iterator[CommandRecord]:
    """Yield the records in a trash that tell which directory they were made for."""
    with suppress(CheckpointError):  # another's, or none that can be read: whoever has its name is told
        for identity in identities(directory, state_dir):
            record = read_record(directory, state_dir, identity)
            if record is not None and record.root is not None:
                yield record


def _directories_in(around: str) -> Iterator[tuple[str, int]]:
    try:
        with os.scandir(around) as entries:
            yield from (
                (entry.path, entry.inode()) for entry in entries if entry.is_dir(follow_symlinks=False)
            )
    except OSError:  # what can't be listed can't be searched
        return
