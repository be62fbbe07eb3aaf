"""Records of commands that can be undone, and the trash where they are kept.

``.ckpttool-trash/<identity>/record.json`` lists steps: each is the list of operations that reverts one
journal.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Literal, NamedTuple, get_args

from ckpttool.core.errors import from_os_error
from ckpttool.storage import fs
from ckpttool.storage.directories import (
    OpenDirectory,
    remove_directory,
    write_in,
)
from ckpttool.transaction.journal import IDENTITY, OperationList
from ckpttool.transaction.journal_documents import (
    count_of,
    identity_of,
    operations_document,
    text_of,
)
from ckpttool.transaction.old_journals import STORE_REMOVALS, list_of, store_removals_of
from ckpttool.transaction.stages import is_temporary
from ckpttool.transaction.state_dir import (
    LEFT_UNCHANGED,
    TRASH,
    StateDir,
    read_own,
    require_own,
    require_own_status,
)

RECORD = "record.json"
SCHEMA = "ckpttool.record/1"
MAX_RECORD = 1 << 30


RecordKind = Literal["trash", "rename", "prune"]


class UndoStep(NamedTuple):
    """Operations that undo one journal, with the name of its stage."""

    journal: str
    undoing: OperationList


class CommandRecord(NamedTuple):
    """Changes that one command made to a directory.

    Attributes:
        directory: The directory.
        state_dir: Location of its trash.
        identity: Identity of the command.
        kind: "trash", "rename", or "prune" in a bucket that keeps versions.
        steps: Undo steps, in the order in which the journals were done.
        has_warned: Whether the user has been warned that the rest can't be undone.
        root: Inode of the directory, if its trash is next to it, where only the name refers to it. None in a
            trash inside of the directory, and in older records.
    """

    directory: str
    state_dir: StateDir
    identity: str
    kind: RecordKind
    steps: tuple[UndoStep, ...] = ()
    has_warned: bool = False
    root: int | None = None

    @property
    def has_moves(self) -> bool:
        """Whether it moved checkpoints, and not only changed pointers."""
        return any(step.undoing.groups for step in self.steps)

    @property
    def place(self) -> str:
        """Path of its directory in the trash, which also holds the checkpoints."""
        return self.state_dir.trash_place(self.identity)

    @property
    def path(self) -> str:
        """Path of the record."""
        return os.path.join(self.place, RECORD)


def inode_of(directory: str) -> int | None:
    """Return the inode of a directory; None if it doesn't exist."""
    try:
        return fs.stat(directory).st_ino
    except OSError as error:
        if fs.is_absence(error):
            return None
        raise from_os_error(error, directory) from error


def local_time_of(identity: str) -> str:
    """Return the time of a command as local time with its UTC offset."""
    from datetime import datetime

    try:
        when = datetime.strptime(f"{identity[:15]}+0000", "%Y%m%dT%H%M%S%z")
        return when.astimezone().isoformat(" ")
    except (ValueError, OverflowError, OSError):  # a directory of this name that we didn't make
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
    """Return the record of a command; None if it has none."""
    require_own_trash(state_dir)
    if not fs.lexists(state_dir.trash_place(identity)):
        return None

    def parse(document: Mapping[str, Any]) -> CommandRecord:
        return _record_of(document, directory, state_dir, identity)

    names = state_dir.trash_name, identity, RECORD
    return read_own(directory, state_dir.path, *names, kind="a record", parse=parse, most=MAX_RECORD)


def _record_of(
    document: Mapping[str, Any], directory: str, state_dir: StateDir, identity: str
) -> CommandRecord:
    if document["schema"] == STORE_REMOVALS:
        removed = store_removals_of(document)
        kind: RecordKind = "trash" if removed.kind == "trash" else "prune"
        steps: tuple[UndoStep, ...] = (UndoStep(identity, removed.inverse()),)
    elif document["schema"] == SCHEMA:
        kind = document["kind"]
        steps = tuple(UndoStep(text_of(one["journal"]), list_of(one["undoing"])) for one in document["steps"])
    else:
        raise ValueError(f"schema {document['schema']!r}")
    if identity_of(document["identity"]) != identity:
        raise ValueError("it belongs to another command")
    if kind not in get_args(RecordKind):
        raise ValueError(f"kind {kind!r}")
    can_rename = fs.place_of(directory).can_rename
    for _, undoing in steps:
        if not can_rename:
            from ckpttool.transaction.store_directory import require_of_store

            require_of_store(undoing)
        if undoing.identity != identity or undoing.kind != "restore":
            raise ValueError("a step of another command")
    has_warned, root = document.get("told") is True, document.get("root") if can_rename else None
    root = None if root is None else count_of(root)
    return CommandRecord(directory, state_dir, identity, kind, steps, has_warned, root)


def write_record(record: CommandRecord) -> None:
    """Write a record, synced to disk, or remove it if no step is left."""
    if not fs.place_of(record.directory).has_owners:
        _write_in_store(record)
    elif record.steps:
        make_place(record.state_dir, record.identity)
        with open_place(record.state_dir, record.identity) as place:
            write_in(place, RECORD, _text_of(record))
    elif fs.lexists(record.path):
        with open_place(record.state_dir, record.identity) as place:
            place.unlink(RECORD)


def _write_in_store(record: CommandRecord) -> None:
    from ckpttool.storage import remote
    from ckpttool.transaction.store_directory import StoreDirectory

    place, name = StoreDirectory(record.directory), f"{TRASH}/{record.identity}/{RECORD}"
    if record.steps:
        place.replace(name, _text_of(record), place.status(name))
    else:
        place.remove_now(name)
    remote.forget()


def _text_of(record: CommandRecord) -> bytes:
    document = {
        "schema": SCHEMA,
        "identity": record.identity,
        "kind": record.kind,
        "steps": [
            {"journal": step.journal, "undoing": operations_document(step.undoing)} for step in record.steps
        ],
        "told": record.has_warned,
        "root": record.root,
    }
    return json.dumps(document).encode()


def add_step(directory: str, state_dir: StateDir, identity: str, kind: RecordKind, step: UndoStep) -> None:
    """Add an undo step to a command's record; it replaces an earlier step of the same journal."""
    record = read_record(directory, state_dir, identity)
    if record is None:
        root = inode_of(directory) if state_dir.suffix else None
        record = CommandRecord(directory, state_dir, identity, kind, root=root)
    others = tuple(other for other in record.steps if other.journal != step.journal)
    write_record(record._replace(steps=(*others, step)))


def drop_step(directory: str, state_dir: StateDir, identity: str, journal: str) -> None:
    """Remove the undo steps of a journal from a record, and the record if no step is left."""
    record = read_record(directory, state_dir, identity)
    if record is None:
        return
    steps = tuple(step for step in record.steps if not f"{step.journal}.".startswith(f"{journal}."))
    if steps != record.steps:
        write_record(record._replace(steps=steps))
    tidy(state_dir, identity)


def drop_groups(directory: str, state_dir: StateDir, restored: OperationList) -> None:
    """Remove restored checkpoints from a record, and its pointers once no checkpoint is left."""
    assert restored.identity is not None  # of the command that is undone
    record = read_record(directory, state_dir, restored.identity)
    if record is None:
        return
    back = {restored.old_and_new_paths(number) for number in range(len(restored.groups))}
    steps: list[UndoStep] = []
    for step in record.steps:
        undoing = step.undoing
        left = [
            number for number in range(len(undoing.groups)) if undoing.old_and_new_paths(number) not in back
        ]
        if left or not (undoing.groups or undoing.pointers == restored.pointers):
            steps.append(step._replace(undoing=undoing.subset(left)))
    write_record(record._replace(steps=tuple(steps)))


# The directories of a trash -------------------------------------------------------------------------

_ANOTHERS = (
    f"{LEFT_UNCHANGED}; until its owner runs undo or prune --empty-trash, or root removes it, "
    "no other user can rename, undo or use a trash here"
)


def require_own_trash(state_dir: StateDir) -> None:
    """Require that a trash was made by this user, or by the owner of its directory, or isn't there."""
    if fs.lexists(state_dir.trash):
        require_own(state_dir.trash, _directory_of_trash(state_dir), _ANOTHERS)


def _directory_of_trash(state_dir: StateDir) -> str:
    is_there = fs.isdir(state_dir.directory)
    return state_dir.directory if is_there else state_dir.path  # the directory may have been renamed


@contextmanager
def open_trash(state_dir: StateDir) -> Iterator[OpenDirectory]:
    """Open a trash, and require that it is ours."""
    with OpenDirectory(state_dir.path) as state, state.open(state_dir.trash_name) as trash:
        owner = fs.stat(_directory_of_trash(state_dir))
        require_own_status(state_dir.trash, trash.own_status(), owner, _ANOTHERS)
        yield trash


@contextmanager
def open_place(state_dir: StateDir, identity: str) -> Iterator[OpenDirectory]:
    """Open the place of a command in a trash, and require that both are ours."""
    with open_trash(state_dir) as trash, trash.open(identity) as place:
        require_own_status(place.path, place.own_status(), trash.own_status())
        yield place


def make_trash(state_dir: StateDir) -> None:
    """Create the trash, with mode 0700, if it doesn't exist."""
    require_own_trash(state_dir)
    with OpenDirectory(state_dir.path) as state:
        _make_directory(state_dir.trash_name, state)


def make_place(state_dir: StateDir, identity: str, numbers: Collection[str] = ()) -> None:
    """Create a command's place in the trash, and numbered directories in it, all with mode 0700."""
    make_trash(state_dir)
    with open_trash(state_dir) as trash:
        _make_directory(identity, trash)
        with trash.open(identity) as place:
            for number in sorted(numbers):
                _make_directory(number, place)


def _make_directory(name: str, place: OpenDirectory) -> None:
    with suppress(FileExistsError):
        place.make(name, 0o700).close()
        place.sync()


def tidy(state_dir: StateDir, identity: str) -> None:
    """Remove a command's half-written files and empty directories from the trash, and the trash if empty.

    Errors are ignored: emptying the trash tries again. A store has no directories.
    """
    if not fs.place_of(state_dir.path).can_rename:
        return
    with suppress(OSError), OpenDirectory(state_dir.path) as state:
        with suppress(OSError), state.open(state_dir.trash_name) as trash:
            with suppress(OSError), trash.open(identity) as place:
                for name in place.names():
                    with suppress(OSError):  # it isn't empty, or isn't ours to remove
                        if name.isdecimal():
                            remove_directory(name, place.descriptor)
                        elif is_temporary(name):
                            place.unlink(name)
            remove_directory(identity, trash.descriptor)
        remove_directory(state_dir.trash_name, state.descriptor)
