"""What was put into the trash or renamed, as each command records it: all that an undo needs.

``.ckpttool-trash/<identity>/record.json`` lists steps. Each is what takes one journal back: the same
moves the other way round, of what came there, and what pointers said before.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple

from ckpttool.core.errors import from_os_error
from ckpttool.io import fs
from ckpttool.io.atomic import write_in
from ckpttool.io.directories import OpenDirectory, make_directory, remove_directory, sync_descriptor
from ckpttool.transaction.files import Fingerprint, contents, opened
from ckpttool.transaction.journal import (
    IDENTITY,
    Kind,
    Move,
    Moves,
    Relink,
    Rewrite,
    contents_at_target,
    count_of,
    identity_of,
    is_temporary,
    moves_document,
    moves_of,
    old_name,
    text_of,
)
from ckpttool.transaction.state_dir import (
    LEFT_AS_IT_IS,
    StateDir,
    open_own,
    read_own,
    require_own,
    require_own_status,
    state_dir_beside,
)

RECORD = "record.json"
SCHEMA = "ckpttool.record/1"
MAX_RECORD = 1 << 30


class UndoStep(NamedTuple):
    """What takes one journal back, with the name of the directory that the journal lay in."""

    journal: str
    undoing: Moves


class CommandRecord(NamedTuple):
    """What one command did to a directory, in the order in which it did it.

    Attributes:
        directory: The directory.
        state_dir: Where its trash lies.
        identity: The command's.
        kind: What it did: "trash" or "rename".
        steps: What takes it back, the last first to be done.
        is_told: Whether somebody was told already that it can't be taken back, as far as it is left.
        root: The inode of the directory, where its trash lies beside it and bears nothing of it but its name;
            None of older records.
    """

    directory: str
    state_dir: StateDir
    identity: str
    kind: Kind
    steps: tuple[UndoStep, ...] = ()
    is_told: bool = False
    root: int | None = None

    @property
    def has_moves(self) -> bool:
        """Tell whether checkpoints have moved, and not only what points at them was changed."""
        return any(step.undoing.moves for step in self.steps)

    @property
    def place(self) -> str:
        """Return the directory that it lies in, with what was put aside."""
        return self.state_dir.trash_place(self.identity)

    @property
    def path(self) -> str:
        """Return where it lies."""
        return os.path.join(self.place, RECORD)


def inode_of(directory: str) -> int | None:
    """Return the inode of a directory; None where there is none."""
    try:
        return fs.stat(directory).st_ino
    except OSError:
        return None


def state_dirs(directory: str) -> tuple[StateDir, ...]:
    """Return where a trash of a directory may lie: in it, or beside it (see ``state_dir``)."""
    return StateDir(directory), state_dir_beside(directory)


def moment_of(identity: str) -> str:
    """Return when a command was run: local time, and how far that is from UTC."""
    from datetime import datetime

    try:
        when = datetime.strptime(f"{identity[:15]}+0000", "%Y%m%dT%H%M%S%z")
        return when.astimezone().isoformat(" ")
    except (ValueError, OverflowError, OSError):  # the directory's name is no time that we wrote
        return identity


def identities(state_dir: StateDir) -> list[str]:
    """Return the identities of the commands that have a place in a trash, the oldest first."""
    require_own_trash(state_dir)
    try:
        return sorted(
            entry.name
            for entry in fs.entries(state_dir.trash)
            if IDENTITY.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        )
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise from_os_error(error, state_dir.trash) from error


def read_record(directory: str, state_dir: StateDir, identity: str) -> CommandRecord | None:
    """Return the record of a command, or None where there is none."""
    require_own_trash(state_dir)
    if not fs.lexists(state_dir.trash_place(identity)):
        return None
    return read_own(
        directory,
        state_dir.path,
        state_dir.trash_name,
        identity,
        RECORD,
        what="a record",
        parse=lambda document: _record_of(document, directory, state_dir, identity),
        most=MAX_RECORD,
    )


def _record_of(
    document: Mapping[str, Any], directory: str, state_dir: StateDir, identity: str
) -> CommandRecord:
    if document["schema"] != SCHEMA:
        raise ValueError(f"schema {document['schema']!r}")
    if identity_of(document["identity"]) != identity:
        raise ValueError("it is another command's")
    if document["kind"] not in ("trash", "rename"):
        raise ValueError(f"kind {document['kind']!r}")
    steps = tuple(
        UndoStep(text_of(step["journal"]), moves_of(step["undoing"], directory, state_dir))
        for step in document["steps"]
    )
    undoing = [step.undoing for step in steps]
    if any(one.identity != identity or one.kind != "restore" or one.chain is not None for one in undoing):
        raise ValueError("a step of another command")
    return CommandRecord(
        directory,
        state_dir,
        identity,
        document["kind"],
        steps,
        is_told=document.get("told") is True,
        root=None if document.get("root") is None else count_of(document["root"]),
    )


def write_record(record: CommandRecord) -> None:
    """Write a record down, synced to disk; one without a step goes."""
    if not record.steps:
        if fs.lexists(record.path):
            with _opened_place(record) as place:
                place.unlink(RECORD)
        return
    data = {
        "schema": SCHEMA,
        "identity": record.identity,
        "kind": record.kind,
        "steps": [
            {"journal": step.journal, "undoing": moves_document(step.undoing, record.directory)}
            for step in record.steps
        ],
        "told": record.is_told,
        "root": record.root,
    }
    make_place(record.state_dir, record.identity)
    with _opened_place(record) as place:
        write_in(place, RECORD, json.dumps(data).encode())


def _opened_place(record: CommandRecord) -> AbstractContextManager[OpenDirectory]:
    return open_own(record.directory, record.state_dir.path, record.state_dir.trash_name, record.identity)


def add_to_record(directory: str, state_dir: StateDir, done: Moves, stage: str, target: int) -> None:
    """Record what was done; doing it twice is allowed. What was taken back is in no record any more.

    Args:
        directory: Where it was done.
        state_dir: Where its trash lies.
        done: What was done.
        stage: The path of the directory that the journal lies in, and for later moves of it their number.
        target: Descriptor of the directory that the checkpoints came to.
    """
    if done.kind == "restore":
        _drop_restored_moves(directory, state_dir, done, target)
    elif not done.is_empty:
        record = read_record(directory, state_dir, done.identity)
        record = record or _new_record(directory, state_dir, done.identity, done.kind)
        # A step of this journal is there already if a kill came after it was recorded: it is replaced.
        step = UndoStep(os.path.basename(stage), inverse(done, target))
        others = tuple(other for other in record.steps if other.journal != step.journal)
        write_record(record._replace(steps=(*others, step)))


def inverse(done: Moves, target: int) -> Moves:
    """Return what takes moves back that were made."""
    rewritten = {rewrite.name for rewrite in done.rewrites}
    moves: list[Move] = []
    for move in done.moves:
        there = contents_at_target(move)
        if any(file.path in rewritten for file in there.files):  # a pointer in it says something else now
            there = contents(target, [new for _, new in move.members])
        back = tuple((new, old) for old, new in move.members)
        moves.append(Move(move.path, back, there, move.successors))
    return Moves(
        kind="restore",
        identity=done.identity,
        moves=tuple(moves),
        rewrites=tuple(
            Rewrite(old_name(done, rewrite.name), rewrite.after, rewrite.before) for rewrite in done.rewrites
        ),
        relinks=tuple(Relink(old_name(done, link.name), link.after, link.before) for link in done.relinks),
        source=done.target,
        target=done.source,
    )


def _drop_restored_moves(directory: str, state_dir: StateDir, done: Moves, target: int) -> None:
    """Take what is back in its place out of the record, with what pointers said once nothing is left."""
    record = read_record(directory, state_dir, done.identity)
    if record is None:
        return
    back = {move.members for move in done.moves}
    now = _current_fingerprints(done, target)
    steps: list[UndoStep] = []
    for step in record.steps:
        left: list[Move] = []
        for move in step.undoing.moves:
            if move.members not in back:
                files = tuple(now.get(file.path, file) for file in move.contents.files)
                left.append(replace(move, contents=replace(move.contents, files=files)))
        if left or not (step.undoing.moves or _has_same_pointers(step.undoing, done)):
            steps.append(step._replace(undoing=replace(step.undoing, moves=tuple(left))))
    write_record(record._replace(steps=tuple(steps)))


def _current_fingerprints(done: Moves, target: int) -> dict[str, Fingerprint]:
    """Return the files of what has moved, and those that were written anew, as they are now, by path."""
    if done.target != done.source:  # in a trash, no name is one of two files
        return {}
    files = {file.path: file for move in done.moves for file in contents_at_target(move).files}
    for rewrite in done.rewrites:
        with suppress(OSError):  # it has gone since, and who needs it is told
            files |= {file.path: file for file in contents(target, [rewrite.name]).files}
    return files


def remove_from_record(directory: str, state_dir: StateDir, moves: Moves, stage: str, source: int) -> None:
    """Make a record say what it said before some moves, which were taken back.

    Args:
        directory: Where they were made.
        state_dir: Where its trash lies.
        moves: The moves.
        stage: The path of the directory that the journal lies in.
        source: Descriptor of the directory that the checkpoints have come back to.
    """
    record = read_record(directory, state_dir, moves.identity)
    if moves.kind == "restore":
        kind: Kind = "rename" if moves.source == directory else "trash"
        record = record or _new_record(directory, state_dir, moves.identity, kind)
        _add_unrestored_moves(record, moves, stage, source)
    elif record is not None:
        steps = tuple(step for step in record.steps if step.journal != os.path.basename(stage))
        if steps != record.steps:
            write_record(record._replace(steps=steps))


def _add_unrestored_moves(record: CommandRecord, moves: Moves, stage: str, source: int) -> None:
    """Record again what was not taken back after all, with its files as they are now."""
    rewritten = {old_name(moves, rewrite.name) for rewrite in moves.rewrites}
    now: dict[tuple[tuple[str, str], ...], Move] = {}
    for move in moves.moves:
        if any(file.path in rewritten for file in move.contents.files):  # it was written anew
            move = replace(move, contents=contents(source, [old for old, _ in move.members]))
        now[move.members] = move
    steps: list[UndoStep] = []
    for step in record.steps:
        noted = tuple(now.pop(move.members, move) for move in step.undoing.moves)
        steps.append(step._replace(undoing=replace(step.undoing, moves=noted)))
    is_noted = any(_has_same_pointers(step.undoing, moves) for step in steps)
    if now or not (moves.moves or is_noted):
        steps.append(UndoStep(os.path.basename(stage), replace(moves, moves=tuple(now.values()))))
    if tuple(steps) != record.steps:
        write_record(record._replace(steps=tuple(steps)))


def _has_same_pointers(undoing: Moves, done: Moves) -> bool:
    """Tell whether moves change the same pointers in the same way."""
    return (undoing.rewrites, undoing.relinks) == (done.rewrites, done.relinks)


def _new_record(directory: str, state_dir: StateDir, identity: str, kind: Kind) -> CommandRecord:
    return CommandRecord(
        directory, state_dir, identity, kind, root=inode_of(directory) if state_dir.suffix else None
    )


def drop_step(record: CommandRecord, step: UndoStep) -> None:
    """Take a step out of a record, as that is now; without any, it goes."""
    current = read_record(record.directory, record.state_dir, record.identity)
    if current is not None:
        steps = tuple(other for other in current.steps if other.journal != step.journal)
        write_record(current._replace(steps=steps))
    tidy(record.state_dir, record.identity)


# The directories of a trash -------------------------------------------------------------------------

_ANOTHERS = (
    f"{LEFT_AS_IT_IS}, and nobody else can rename, undo or use a trash here: its owner can take back what "
    "lies in it, or empty it (prune --empty-trash), or root can remove it"
)


def require_own_trash(state_dir: StateDir) -> None:
    """Require that a trash was made by this user, or by the owner of its directory, or isn't there."""
    if fs.lexists(state_dir.trash):
        require_own(state_dir.trash, _directory_of_trash(state_dir), _ANOTHERS)


@contextmanager
def open_trash(state_dir: StateDir, around: int) -> Iterator[int]:
    """Open a trash in an open directory, and require that what was opened is ours."""
    with opened(state_dir.trash_name, around) as trash:
        owner = fs.stat(_directory_of_trash(state_dir))
        require_own_status(state_dir.trash, os.fstat(trash), owner, _ANOTHERS)
        yield trash


def _directory_of_trash(state_dir: StateDir) -> str:
    is_there = fs.isdir(state_dir.directory)
    return state_dir.directory if is_there else state_dir.path  # it may have got another name


def make_room(directory: str, state_dir: StateDir, moves: Moves) -> None:
    """Make the places in the trash that some moves leave or come to, as far as they are not there."""
    require_own_trash(state_dir)
    for side, place in enumerate((moves.source, moves.target)):
        if place != directory:
            numbers = {os.path.dirname(pair[side]) for move in moves.moves for pair in move.members}
            make_place(state_dir, moves.identity, numbers)


def make_trash(state_dir: StateDir) -> None:
    """Make a trash, if it is not there; others can't look inside."""
    require_own_trash(state_dir)
    with opened(state_dir.path) as around:
        if _make_directory(state_dir.trash_name, around):
            sync_descriptor(around)
        with open_trash(state_dir, around):
            return


def make_place(state_dir: StateDir, identity: str, numbers: Collection[str] = ()) -> None:
    """Make the place of a command in the trash, and numbered directories in it; others can't look inside."""
    require_own_trash(state_dir)
    with opened(state_dir.path) as around:
        is_new = _make_directory(state_dir.trash_name, around)
        with open_trash(state_dir, around) as root:
            is_new |= _make_directory(identity, root)
            with opened(identity, root) as place:
                made = [_make_directory(number, place) for number in sorted(numbers)]
                if is_new or any(made):
                    for changed in (around, root, place):
                        sync_descriptor(changed)


def _make_directory(name: str, place: int) -> bool:
    """Make a directory if it isn't there; tell whether it wasn't."""
    try:
        os.close(make_directory(name, 0o700, place))
    except FileExistsError:
        return False
    return True


def tidy(state_dir: StateDir, identity: str) -> None:
    """Remove a command's directories and half-written files from the trash, and the trash, where empty.

    What can't be removed stays, and is removed when the trash is emptied.
    """
    with suppress(OSError), opened(state_dir.path) as around:
        with suppress(OSError), opened(state_dir.trash_name, around) as root:
            with suppress(OSError), opened(identity, root) as place:
                for name in os.listdir(place):
                    if name.isdecimal():
                        _remove_directory(name, place)
                    elif is_temporary(name):
                        with suppress(OSError):  # it isn't ours to remove
                            os.unlink(name, dir_fd=place)
            _remove_directory(identity, root)
        _remove_directory(state_dir.trash_name, around)


def _remove_directory(name: str, place: int) -> None:
    with suppress(OSError):  # it isn't empty, or isn't there
        remove_directory(name, place)
