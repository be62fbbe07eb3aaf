"""Converts journals and records of earlier versions to lists of operations.

Until 0.2 removals and moves had journals of their own, and a record listed moves. A renaming could have
several lists in one journal, one for each wave of names.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ckpttool.formats.tensorflow.prefix import INDEX
from ckpttool.formats.tensorflow.state import NAME
from ckpttool.transaction.files import Contents, Fingerprint
from ckpttool.transaction.journal import (
    FILES,
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

REMOVALS = "ckpttool.journal/1"
"""Schema of removals."""
MOVES = frozenset({"ckpttool.moves/1", "ckpttool.moves-in-a-row/1", "ckpttool.swaps/1", "ckpttool.swaps/2"})
"""Schemas of moves."""

STORE_REMOVALS = "ckpttool.store-removal/1"
"""Schema of removals from a store, and of their records."""

MOVING = "moving"
"""File in which an output noted what it moves."""

_PLACES: Mapping[str, Root] = {"directory": "directory", "trash": "trash"}


def list_of(document: Mapping[str, Any]) -> OperationList:
    """Return operations from plain data of any version, but for removals."""
    schema = document["schema"]
    if schema == SCHEMA:
        return operations_of(document)
    if schema not in MOVES:
        raise ValueError(f"schema {schema!r}")
    before = [list_of(earlier) for earlier in reversed(document.get("before", ()))]
    return _joined([*before, _moves_of(document)])


def removals_of(document: Mapping[str, Any]) -> list[Group]:
    """Return the checkpoints of a journal of removals."""
    groups: list[Group] = []
    for one in document["removals"]:
        members = names_of(one["members"])
        survivors = tuple(name_of(name) for name in one["survivors"])
        groups.append(Group(text_of(one["path"]), members, contents_of(one, members), survivors))
    return groups


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


class OldOutput(NamedTuple):
    """What an output moves: new names with inode and time of what comes, old ones with inodes."""

    new: dict[str, tuple[int, int]]
    old: dict[str, int]


def old_output_of(document: Mapping[str, Any]) -> OldOutput:
    """Return what an output moves from its plain data."""
    new, old = document["new"], document["old"]
    if not (isinstance(new, dict) and isinstance(old, dict)):
        raise TypeError("no names")
    come = {_decoded(name): (count_of(inode), count_of(time)) for name, (inode, time) in new.items()}
    return OldOutput(come, {_decoded(name): count_of(inode) for name, inode in old.items()})


def _decoded(name: str) -> str:
    """Return a name, each byte of which is a character in the plain data."""
    return name_of(os.fsdecode(name.encode("latin-1")))


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
    source, target = (_PLACES[document[side]] for side in ("source", "target"))
    spare = SpareLocations()
    rewrites = _rewrites_of(document["rewrites"])
    groups: list[Group] = []
    operations: list[Operation] = []
    for number, move in enumerate(document["moves"]):
        members = [(location_in(source, old), location_in(target, new)) for old, new in move["members"]]
        if not 0 < len(members) == len({old for old, _ in members}) == len({new for _, new in members}):
            raise ValueError("no member, or two of one name")
        names = tuple(old.path for old, _ in members)
        contents, path = contents_of(move, names), text_of(move["path"])
        new_name = None
        if kind == "restore" and source == target:
            new_name = _new_name(path, [(old.path, new.path) for old, new in members], rewrites)
        groups.append(Group(path, names, contents, new_name=new_name))
        successors = {one.path: (waits, one) for waits, one in _successors_of(move, members)}
        operations += _steps_of(number, members, contents, successors, spare, is_back=kind == "restore")
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
    move: Mapping[str, Any], members: Sequence[tuple[Location, Location]]
) -> Iterator[tuple[str, Fingerprint]]:
    """Yield the files that took the place of others, each with the path at which it waited."""
    one = move.get("successor")
    if one is not None:  # the one of a file
        name = next(location.path for location in members[0] if location.root == "directory")
        yield path_of(one["waits"]), Fingerprint(name, *map(count_of, one["file"]))
    for one in move.get("successors", ()):
        yield path_of(one["waits"]), Fingerprint(path_of(one["name"]), *map(count_of, one["file"]))


def _steps_of(
    number: int,
    members: Sequence[tuple[Location, Location]],
    contents: Contents,
    successors: dict[str, tuple[str, Fingerprint]],
    spare: SpareLocations,
    *,
    is_back: bool,
) -> Iterator[Move | Exchange]:
    """Yield the operations of one checkpoint: its index is the first to leave, and the last to come."""
    files = {file.path: file for file in contents.files}
    known = {location.path for pair in members for location in pair if location.root == "directory"}
    for path, (waits, file) in successors.items():
        if path not in known:
            stored = StoredFile(spare.location(path) if is_back else Location("directory", waits), file)
            yield Exchange(number, path, stored if is_back else None, None if is_back else stored)
    for old, new in members if _go_to_trash(members) else reversed(members):
        path = new.path if is_back else old.path
        if path not in successors:
            yield Move(number, old, new)
            continue
        waits, file = successors[path]
        noted = replace(files[old.path], path=path)
        if is_back:
            yield Exchange(number, path, StoredFile(spare.location(path), file), StoredFile(old, noted))
        else:
            successor = StoredFile(Location("directory", waits), file)
            yield Exchange(number, path, StoredFile(new, noted), successor)


def _go_to_trash(members: Sequence[tuple[Location, Location]]) -> bool:
    """Tell whether members go to the trash."""
    return all(new.is_private for _, new in members)


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
