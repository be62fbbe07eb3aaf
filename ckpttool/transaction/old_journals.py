"""Reader of version 0.1's journals and records, which are converted to today's plain data.

Removals and moves had journals of their own, and a record listed moves. A rename could have several lists in
one journal, one for each wave of names. The commit was recorded nowhere. So moves count as committed if the
record has them, a removal if it has left the directory, and an output if all of it is in place.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpttool.core.errors import DamagedCheckpoint, from_os_error
from ckpttool.formats.tensorflow.prefix import INDEX
from ckpttool.formats.tensorflow.state import NAME
from ckpttool.storage.directories import OpenDirectory
from ckpttool.transaction.files import Contents, contents, opened, status_at
from ckpttool.transaction.journal import (
    CONTENT,
    FILES,
    REPLACED,
    Group,
    OperationList,
    SpareLocations,
    output_operations,
)
from ckpttool.transaction.journal_documents import (
    SCHEMA,
    count_of,
    identity_of,
    name_of,
    operations_of,
    text_of,
)
from ckpttool.transaction.state_dir import open_own

REMOVALS = "ckpttool.journal/1"
MOVES = frozenset({"ckpttool.moves/1", "ckpttool.moves-in-a-row/1", "ckpttool.swaps/1", "ckpttool.swaps/2"})
STORE_REMOVALS = "ckpttool.store-removal/1"
"""Schema of removals from a store, and of their records."""

MOVING = "moving"
"""Name of the journal in an output's area."""

Operation = tuple[Any, ...]
"""An operation as plain data; see ``journal_documents``."""


def _document(
    kind: str, identity: object, groups: Sequence[Mapping[str, Any]], operations: Sequence[Operation]
) -> dict[str, Any]:
    return {
        "kind": kind,
        "identity": identity,
        "leader": None,
        "groups": [{"survivors": [], "new_name": None, "directories": [], **group} for group in groups],
        "operations": operations,
    }


def _at(root: str, *names: object) -> str:
    return os.sep.join((root, *map(text_of, names)))


# Moves ----------------------------------------------------------------------------------------------


def list_of(document: Mapping[str, Any]) -> OperationList:
    """Return operations from plain data of any version, except removals."""
    schema = document["schema"]
    if schema == SCHEMA:
        return operations_of(document)
    if schema not in MOVES:
        raise ValueError(f"schema {schema!r}")
    groups: list[Mapping[str, Any]] = []
    operations: list[Operation] = []
    for wave in (*reversed(document.get("before", ())), document):
        if wave["schema"] not in MOVES or wave["identity"] != document["identity"]:
            raise ValueError("preceded by moves of another journal")
        if wave["kind"] not in ("trash", "rename", "restore"):
            raise ValueError(f"kind {wave['kind']!r}")
        if not {wave["source"], wave["target"]} <= {"directory", "trash"}:
            raise ValueError(f"moves from {wave['source']!r} to {wave['target']!r}")
        writes = _writes_of(wave["rewrites"])
        pointers = [
            *writes,
            *(("relink", one["name"], one["before"], one["after"]) for one in wave["relinks"]),
        ]
        moves = [
            step
            for number, move in enumerate(wave["moves"], len(groups))
            for step in _steps_of(wave, move, number)
        ]
        operations += [*pointers, *moves] if wave["kind"] == "trash" else [*moves, *pointers]
        groups += (
            {key: move[key] for key in ("path", "files", "directories")}
            | {"new_name": _new_name(wave, move, writes)}
            for move in wave["moves"]
        )
    return operations_of(_document(document["kind"], document["identity"], groups, operations))


def _steps_of(wave: Mapping[str, Any], move: Mapping[str, Any], number: int) -> Iterator[Operation]:
    """Yield the operations of one checkpoint."""
    # Members are listed in the order in which they leave, the index first. They come back in reverse order,
    # since without its index the rest isn't taken for a checkpoint.
    source, target, members = wave["source"], wave["target"], move["members"]
    if not 0 < len(members) == len({old for old, _ in members}):
        raise ValueError("no member, or two with the same name")
    is_back = wave["kind"] == "restore"
    successors = _successors_of(move, members[0][source != "directory"], is_back=is_back)

    def put(path: str, other: Sequence[Any] | None) -> Operation:
        old, new = (successors[path], other) if is_back else (other, successors[path])
        return ("put", number, path, old, new)

    files = {path: numbers for path, *numbers in move["files"]}
    known = {one[side] for one in members for side in (0, 1) if (source, target)[side] == "directory"}
    yield from (put(path, None) for path in successors if path not in known)
    for old, new in members if target == "trash" else reversed(members):
        here, aside = (new, _at(source, old)) if is_back else (old, _at(target, new))
        if here in successors:
            yield put(here, (aside, *files[old]))
        else:
            yield ("move", number, _at(source, old), _at(target, new))


def _successors_of(move: Mapping[str, Any], only: str, *, is_back: bool) -> dict[str, Sequence[Any]]:
    """Return location and fingerprint of the files that replace others, by path.

    Args:
        move: The checkpoint.
        only: Path of its file, if it is a single one.
        is_back: Whether it is restored, so that these files are set aside.
    """
    spare = SpareLocations()
    listed = [(one["name"], one) for one in move.get("successors", ())]
    if (single := move.get("successor")) is not None:
        listed.append((only, single))
    return {
        path: (os.sep.join(spare.location(path)) if is_back else _at("directory", one["waits"]), *one["file"])
        for path, one in listed
    }


def _writes_of(rewrites: Sequence[Mapping[str, Any]]) -> list[Operation]:
    """Return rewrites of pointers; a new index is made like the removed one next to it, and vice versa."""
    found: list[Operation] = []
    for at, one in enumerate(rewrites):
        near = [rewrites[other] for other in (at + 1, at - 1) if 0 <= other < len(rewrites)]
        other_end = "after" if one["before"] is None else "before" if one["after"] is None else None
        like = next((other["name"] for other in near if other_end and other[other_end] is None), None)
        found.append(("write", one["name"], one["before"], one["after"], like))
    return sorted(found, key=lambda one: (one[3] is None, one[2] is not None))


def _new_name(wave: Mapping[str, Any], move: Mapping[str, Any], writes: Sequence[Operation]) -> str | None:
    """Return the name that a rename gave a checkpoint, from the moves that revert it."""
    if wave["kind"] != "restore" or wave["source"] != wave["target"]:
        return None
    now = {old: new for new, old in move["members"]}
    now |= {name: like for _, name, before, _, like in writes if before is None and like is not None}
    base = os.path.basename(text_of(move["path"]))
    if base + INDEX in now:
        return text_of(now[base + INDEX]).removesuffix(INDEX)
    return text_of(now.get(base, move["members"][0][0]))


def with_recorded(
    listed: OperationList, journal: str, steps: Sequence[tuple[str, OperationList]]
) -> OperationList:
    """Return moves with the committed groups, which are those in the record.

    Args:
        listed: The moves.
        journal: Name of their stage.
        steps: Undo steps of the record: names of journals, each with the operations that undo it.
    """
    numbers = range(len(listed.groups))
    if listed.kind == "restore":
        left = {undoing.old_and_new_paths(at) for _, undoing in steps for at in range(len(undoing.groups))}
        done = frozenset(number for number in numbers if listed.old_and_new_paths(number) not in left)
        is_dropped = all(undoing.pointers != listed.pointers for _, undoing in steps)
        return replace(listed, done=done) if done or (is_dropped and not listed.groups) else listed
    for name, undoing in steps:
        if name == journal:
            recorded = {frozenset(undoing.old_and_new_paths(at)) for at in range(len(undoing.groups))}
            moved = [frozenset(pair[::-1] for pair in listed.old_and_new_paths(number)) for number in numbers]
            return replace(listed, done=frozenset(at for at in numbers if moved[at] in recorded))
    return listed


# Removals -------------------------------------------------------------------------------------------


def removals_of(document: Mapping[str, Any], directory: str, stage: str) -> OperationList:
    """Return the operations of a journal of removals; groups that have left the directory are committed."""
    removals = document["removals"]
    is_single = [len(one["members"]) == len(one["files"]) == 1 and not one["directories"] for one in removals]
    shared = is_single.index(True) if True in is_single else 0
    try:
        with opened(directory) as here, open_own(directory, *os.path.split(stage)) as inner:
            # Single files shared the place of the first of them; 0.1.0 gave each its own.
            places = [
                str(shared if is_shared and not inner.has(str(number)) else number)
                for number, is_shared in enumerate(is_single)
            ]
            moves = [
                ("move", number, _at("directory", name), _at("stage", places[number], name))
                for number, one in enumerate(removals)
                for name in one["members"]
            ]
            listed = operations_of(_document("remove", None, removals, moves))
            done = frozenset(
                number
                for number, group in enumerate(listed.groups)
                if _has_left(group, here, inner.fd, places[number])
            )
    except OSError as error:
        raise from_os_error(error, stage) from error
    return replace(listed, done=done)


def _has_left(group: Group, directory: int, stage: int, place: str) -> bool:
    """Return whether a removed checkpoint is only in the stage, or partly unlinked."""

    def staged(path: str) -> os.stat_result | None:
        return status_at(os.path.join(place, path), stage)

    here = {file: status_at(file.path, directory) for file in group.contents.files}
    is_there = [status is not None or staged(file.path) is not None for file, status in here.items()]
    is_here = any(status is not None and file.is_of(status) for file, status in here.items())
    has_begun = any(staged(name) is not None for name in group.members)
    return (has_begun and not (is_here and all(is_there))) or not any(is_there)


def store_removals_of(document: Mapping[str, Any]) -> OperationList:
    """Return the operations of a journal of removals from a store; it is committed after the copying."""
    identity, way, state = identity_of(document["identity"]), document["way"], document["state"]
    if way not in ("none", "versions", "copies"):
        raise ValueError(f"way {way!r}")
    target = "trash" if way == "copies" else "stage"
    groups = [
        {"path": one["name"], "files": [(path, 0, 0, *status) for path, *status in one["objects"]]}
        for one in document["checkpoints"]
    ]
    operations: list[Operation] = [
        ("move", number, _at("directory", name), _at(target, FILES, name))
        for number, group in enumerate(groups)
        for name in dict.fromkeys(text_of(path).partition("/")[0] for path, *_ in group["files"])
    ]
    if state is not None:
        operations.append(("write", NAME, *state, None))
    kind, is_done = "trash" if way == "copies" else "remove", document["copying"] is not True
    return operations_of(
        _document(kind, None if way == "none" else identity, groups, operations),
        [*range(len(groups))] if is_done else None,
    )


# Outputs --------------------------------------------------------------------------------------------


def output_of(document: Mapping[str, Any], directory: OpenDirectory, area: OpenDirectory) -> OperationList:
    """Return the operations of an output, which is committed if all of it is in place.

    The document lists the new names with their inodes and times, and the old names with their inodes.
    """
    new, old = document["new"], document["old"]
    if not (isinstance(new, dict) and isinstance(old, dict)):
        raise TypeError("no names")
    marks = {_decoded(name): (count_of(inode), count_of(time)) for name, (inode, time) in new.items()}
    inodes = {_decoded(name): count_of(inode) for name, inode in old.items()}
    with area.open(REPLACED) as aside, area.open(CONTENT) as content:
        for name in aside.names():
            status = aside.status(name)
            if status is None or status.st_ino != inodes.get(name):
                raise DamagedCheckpoint(aside.join(name), "not the file that was set aside")
        leave = {name: contents((aside if aside.has(name) else directory).fd, [name]) for name in inodes}
        come: dict[str, Contents] = {}
        has_come = bool(marks)
        for name, mark in marks.items():
            status = directory.status(name)
            is_here = status is not None and (status.st_ino, status.st_mtime_ns) == mark
            has_come &= is_here
            if not (is_here or content.has(name)):
                problem = f"created or changed meanwhile; the old version is in {aside.path}"
                raise DamagedCheckpoint(directory.join(name), problem)
            come[name] = contents((directory if is_here else content).fd, [name])
    listed = output_operations(area.path, come, leave)
    return replace(listed, done=frozenset(range(len(listed.groups))) if has_come else None)


def _decoded(name: str) -> str:
    """Check a name whose bytes are stored as Latin-1 characters, and decode it."""
    return name_of(os.fsdecode(name.encode("latin-1")))
