"""Reads journals and records of version 0.1 as lists of operations.

Removals and moves had journals of their own, and a record listed moves. A renaming could have several lists
in one journal, one for each wave of names. No file said what is committed: moves are once they are recorded,
a removal once it has left the directory, an output once all of it is at its place.
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
from ckpttool.transaction.files import Contents, Fingerprint, contents, opened, status_at
from ckpttool.transaction.journal import (
    CONTENT,
    FILES,
    REPLACED,
    Exchange,
    Group,
    Location,
    Move,
    Operation,
    OperationList,
    Relink,
    Rewrite,
    Root,
    SpareLocations,
    StoredFile,
    output_operations,
)
from ckpttool.transaction.journal_documents import (
    SCHEMA,
    contents_of,
    count_of,
    identity_of,
    location_in,
    name_of,
    names_of,
    operations_of,
    path_of,
    text_of,
    text_or_none,
)
from ckpttool.transaction.state_dir import open_own

REMOVALS = "ckpttool.journal/1"
MOVES = frozenset({"ckpttool.moves/1", "ckpttool.moves-in-a-row/1", "ckpttool.swaps/1", "ckpttool.swaps/2"})
STORE_REMOVALS = "ckpttool.store-removal/1"
"""Schema of removals from a store, and of their records."""

MOVING = "moving"
"""File in which an output noted what it moves."""

_ROOTS: Mapping[str, Root] = {"directory": "directory", "trash": "trash"}


# Moves ----------------------------------------------------------------------------------------------


def list_of(document: Mapping[str, Any]) -> OperationList:
    """Return operations from plain data of any version, but for removals."""
    schema = document["schema"]
    if schema == SCHEMA:
        return operations_of(document)
    if schema not in MOVES:
        raise ValueError(f"schema {schema!r}")
    before = [list_of(earlier) for earlier in reversed(document.get("before", ()))]
    return _joined([*before, _moves_of(document)])


def _joined(lists: Sequence[OperationList]) -> OperationList:
    """Return one list for several that follow each other."""
    last = lists[-1]
    groups: list[Group] = []
    operations: list[Operation] = []
    for one in lists:
        if one.identity != last.identity:
            raise ValueError("moves of another journal go before")
        operations += (
            step._replace(group=step.group + len(groups)) if isinstance(step, Move | Exchange) else step
            for step in one.operations
        )
        groups += one.groups
    return replace(last, groups=tuple(groups), operations=tuple(operations))


def _moves_of(document: Mapping[str, Any]) -> OperationList:
    kind = document["kind"]
    if kind not in ("trash", "rename", "restore"):
        raise ValueError(f"kind {kind!r}")
    source, target = (_ROOTS[document[side]] for side in ("source", "target"))
    is_back, spare = kind == "restore", SpareLocations()
    rewrites = _rewrites_of(document["rewrites"])
    groups: list[Group] = []
    operations: list[Operation] = []
    for number, move in enumerate(document["moves"]):
        members = [(location_in(source, old), location_in(target, new)) for old, new in move["members"]]
        if not 0 < len(members) == len({old for old, _ in members}) == len({new for _, new in members}):
            raise ValueError("no member, or two of one name")
        names = [(old.path, new.path) for old, new in members]
        path, members_before = text_of(move["path"]), tuple(old for old, _ in names)
        new_name = _new_name(path, names, rewrites) if is_back and source == target else None
        group = Group(path, members_before, contents_of(move, members_before), new_name=new_name)
        groups.append(group)
        operations += _steps_of(
            number, group, members, _successors_of(move, members, spare, is_back), is_back
        )
    pointers: list[Operation] = [*rewrites]
    pointers += (
        Relink(path_of(link["name"]), text_of(link["before"]), text_of(link["after"]))
        for link in document["relinks"]
    )
    steps = [*pointers, *operations] if kind == "trash" else [*operations, *pointers]
    return OperationList(kind, tuple(groups), tuple(steps), identity_of(document["identity"]))


def _new_name(path: str, names: Sequence[tuple[str, str]], rewrites: Sequence[Rewrite]) -> str:
    """Return what a renaming called a checkpoint, from what reverts it."""
    now = {old: new for new, old in names}
    now |= {one.name: one.like for one in rewrites if one.before is None and one.like is not None}
    base = os.path.basename(path)
    if base + INDEX in now:
        return now[base + INDEX].removesuffix(INDEX)
    return now.get(base, names[0][0])


def _successors_of(
    move: Mapping[str, Any],
    members: Sequence[tuple[Location, Location]],
    spare: SpareLocations,
    is_back: bool,
) -> dict[str, StoredFile]:
    """Return the files that take the place of others, by their paths; what is reverted sets them aside."""
    listed = [(one["name"], one) for one in move.get("successors", ())]
    if (single := move.get("successor")) is not None:  # that of the only file
        listed.append((next(place.path for place in members[0] if place.root == "directory"), single))
    found: dict[str, StoredFile] = {}
    for name, one in listed:
        waits, path = path_of(one["waits"]), path_of(name)
        location = spare.location(path) if is_back else Location("directory", waits)
        found[path] = StoredFile(location, Fingerprint(path, *map(count_of, one["file"])))
    return found


def _steps_of(
    number: int,
    group: Group,
    members: Sequence[tuple[Location, Location]],
    successors: Mapping[str, StoredFile],
    is_back: bool,
) -> Iterator[Move | Exchange]:
    """Yield the operations of one checkpoint: its index is the first to leave, and the last to come."""

    def exchange(path: str, other: StoredFile | None) -> Exchange:
        old, new = (successors[path], other) if is_back else (other, successors[path])
        return Exchange(number, path, old, new)

    files = {file.path: file for file in group.contents.files}
    known = {location.path for pair in members for location in pair if location.root == "directory"}
    yield from (exchange(path, None) for path in successors if path not in known)
    goes_to_trash = all(new.is_private for _, new in members)
    for old, new in members if goes_to_trash else reversed(members):
        here, aside = (new, old) if is_back else (old, new)
        if here.path in successors:
            yield exchange(here.path, StoredFile(aside, replace(files[old.path], path=here.path)))
        else:
            yield Move(number, old, new)


def _rewrites_of(documents: Sequence[Mapping[str, Any]]) -> list[Rewrite]:
    """Return pointers that are written; an index that is new somewhere follows one that goes elsewhere."""
    found = [
        Rewrite(path_of(one["name"]), text_or_none(one["before"]), text_or_none(one["after"]))
        for one in documents
    ]
    for at, one in enumerate(found):
        near = [found[other] for other in (at + 1, at - 1) if 0 <= other < len(found)]
        if one.before is None:
            like = next((other.name for other in near if other.after is None), None)
            found[at] = one._replace(like=like)
        elif one.after is None:
            like = next((other.name for other in near if other.before is None), None)
            found[at] = one._replace(like=like)
    return sorted(found, key=lambda one: (one.after is None, one.before is not None))


def with_recorded(
    listed: OperationList, journal: str, steps: Sequence[tuple[str, OperationList]]
) -> OperationList:
    """Return moves with the groups that are committed: those in the record.

    Args:
        listed: The moves.
        journal: Name of their stage.
        steps: Names of journals in the record of the command, each with what undoes it.
    """
    numbers = range(len(listed.groups))
    if listed.kind == "restore":
        left = {undoing.names(at) for _, undoing in steps for at in range(len(undoing.groups))}
        done = frozenset(number for number in numbers if listed.names(number) not in left)
        is_dropped = all(undoing.pointers != listed.pointers for _, undoing in steps)
        return replace(listed, done=done) if done or (is_dropped and not listed.groups) else listed
    for name, undoing in steps:
        if name == journal:
            recorded = {frozenset(undoing.names(at)) for at in range(len(undoing.groups))}
            moved = [frozenset(pair[::-1] for pair in listed.names(number)) for number in numbers]
            return replace(listed, done=frozenset(at for at in numbers if moved[at] in recorded))
    return listed


# Removals -------------------------------------------------------------------------------------------


def removals_of(document: Mapping[str, Any], directory: str, stage: str) -> OperationList:
    """Return the operations of a journal of removals; those that have left the directory are committed."""
    groups: list[Group] = []
    for one in document["removals"]:
        members = names_of(one["members"])
        survivors = tuple(name_of(name) for name in one["survivors"])
        groups.append(Group(text_of(one["path"]), members, contents_of(one, members), survivors))
    shared = next((number for number, one in enumerate(groups) if one.is_single), 0)
    operations: list[Move] = []
    done: set[int] = set()
    try:
        with opened(directory) as here, open_own(directory, *os.path.split(stage)) as inner:
            for number, group in enumerate(groups):
                # Single files shared the place of the first of them; 0.1.0 gave each its own.
                has_own = not group.is_single or inner.has(str(number))
                place = str(number if has_own else shared)
                operations += (
                    Move(number, Location("directory", name), Location("stage", os.path.join(place, name)))
                    for name in group.members
                )
                if _has_left(group, here, inner.fd, place):
                    done.add(number)
    except OSError as error:
        raise from_os_error(error, stage) from error
    return OperationList("remove", tuple(groups), tuple(operations), done=frozenset(done))


def _has_left(group: Group, directory: int, stage: int, place: str) -> bool:
    """Tell whether a removed checkpoint is only in the stage, or partly unlinked."""

    def staged(path: str) -> os.stat_result | None:
        return status_at(os.path.join(place, path), stage)

    here = {file: status_at(file.path, directory) for file in group.contents.files}
    is_there = [status is not None or staged(file.path) is not None for file, status in here.items()]
    is_here = any(status is not None and file.is_of(status) for file, status in here.items())
    has_begun = any(staged(name) is not None for name in group.members)
    return (has_begun and not (is_here and all(is_there))) or not any(is_there)


def store_removals_of(document: Mapping[str, Any]) -> OperationList:
    """Return the operations of a journal of removals from a store; those in a record are committed."""
    identity, way = identity_of(document["identity"]), document["way"]
    if way not in ("none", "versions", "copies"):
        raise ValueError(f"way {way!r}")
    target: Root = "trash" if way == "copies" else "stage"
    groups: list[Group] = []
    for one in document["checkpoints"]:
        files = tuple(
            Fingerprint(path_of(path), 0, 0, count_of(size), count_of(modified), version=text_of(version))
            for path, size, modified, version in one["objects"]
        )
        if not files:
            raise ValueError("a checkpoint without an object")
        members = tuple(dict.fromkeys(file.path.partition("/")[0] for file in files))
        groups.append(Group(text_of(one["name"]), members, Contents(files)))
    moves = (
        Move(number, Location("directory", name), Location(target, os.path.join(FILES, name)))
        for number, group in enumerate(groups)
        for name in group.members
    )
    state = document["state"]
    pointers = () if state is None else (Rewrite(NAME, text_of(state[0]), text_of(state[1])),)
    return OperationList(
        "trash" if way == "copies" else "remove",
        tuple(groups),
        (*moves, *pointers),
        None if way == "none" else identity,
        done=None if document["copying"] is True else frozenset(range(len(groups))),
    )


# Outputs --------------------------------------------------------------------------------------------


def output_of(document: Mapping[str, Any], directory: OpenDirectory, area: OpenDirectory) -> OperationList:
    """Return the operations of an output, which is committed if all of it is at its place.

    The document has the new names, with inode and time of each, and the old ones with their inodes.
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
                raise DamagedCheckpoint(aside.join(name), "it is not what was set aside")
        leave = {name: contents((aside if aside.has(name) else directory).fd, [name]) for name in inodes}
        come: dict[str, Contents] = {}
        has_come = bool(marks)
        for name, mark in marks.items():
            status = directory.status(name)
            is_here = status is not None and (status.st_ino, status.st_mtime_ns) == mark
            has_come &= is_here
            if not (is_here or content.has(name)):
                problem = f"it has come to stand there, or was changed; the old is in {aside.path}"
                raise DamagedCheckpoint(directory.join(name), problem)
            come[name] = contents((directory if is_here else content).fd, [name])
    listed = output_operations(area.path, come, leave)
    return replace(listed, done=frozenset(range(len(listed.groups))) if has_come else None)


def _decoded(name: str) -> str:
    """Return a name, each byte of which is a character in the plain data."""
    return name_of(os.fsdecode(name.encode("latin-1")))
