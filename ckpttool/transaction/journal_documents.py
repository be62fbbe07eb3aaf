"""JSON form of journals and records.

A journal may be damaged or planted. So parsing checks types and names: none points outside the directory, the
stage or the trash.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, get_args

from ckpttool.transaction.files import Contents, Fingerprint
from ckpttool.transaction.journal import (
    CONTENT,
    IDENTITY,
    REPLACED,
    ROOTS,
    Group,
    Kind,
    Location,
    Move,
    Operation,
    OperationList,
    Rewrite,
    StoredFile,
)

T = TypeVar("T")

SCHEMA = "ckpttool.operations/1"


def operations_document(listed: OperationList) -> dict[str, Any]:
    """Return operations as plain data; see ``operations_of``."""
    return {
        "schema": SCHEMA,
        "kind": listed.kind,
        "identity": listed.identity,
        "leader": listed.leader,
        "followers": listed.followers,
        "groups": [
            {
                "path": one.path,
                **_contents_document(one.contents),
                "survivors": one.survivors,
                "new_name": one.new_name,
            }
            for one in listed.groups
        ],
        "operations": [_operation_document(one, listed) for one in listed.operations],
    }


def _operation_document(one: Operation, listed: OperationList) -> tuple[Any, ...]:
    """Return an operation as plain data."""
    # A ``put`` is a move that replaces a file, or brings or takes one that the group doesn't list. It has the
    # fingerprints of the files with it.
    if isinstance(one, Rewrite):
        return ("relink", one.name, one.before, one.after) if one.is_link else ("write", *one[:4])
    if one.file is None and one.replaces is None:
        return ("move", one.group, os.sep.join(one.source), os.sep.join(one.target))
    file = one.file or listed.files_at(one.group, one.source.path)[0]
    if one.target.is_private:
        return ("put", one.group, one.source.path, _stored_document(one.target, file), None)
    aside = None if one.replaces is None else _stored_document(*one.replaces)
    return ("put", one.group, one.target.path, aside, _stored_document(one.source, file))


def _stored_document(location: Location, file: Fingerprint) -> tuple[Any, ...]:
    return (os.sep.join(location), file.device, file.inode, file.size, file.mtime_ns)


def operations_of(document: Mapping[str, Any], done: object = None) -> OperationList:
    """Parse operations from plain data, see ``operations_document``; all names are checked.

    Args:
        document: The plain data.
        done: Numbers of the committed groups, from ``done.json``; None without it.
    """
    kind, identity = document["kind"], document["identity"]
    if kind not in get_args(Kind):
        raise ValueError(f"kind {_shortened(kind)}")
    if identity is None and kind not in ("remove", "slim", "output"):
        raise ValueError("no identity of the command")
    count = len(document["groups"])
    operations = tuple(_operations_of(document["operations"], count))
    moves = [one for one in operations if isinstance(one, Move)]
    ends = [one.target if one.replaces is None else one.replaces.location for one in moves]
    if len(set(ends)) < len(ends):
        raise ValueError("two files at one location")
    listed = OperationList(
        kind, (Group("", (), Contents()),) * count, operations, optional(identity_of, identity)
    )
    groups = []
    for number, group in enumerate(document["groups"]):
        members = tuple(listed.final_locations(number))
        if not members and kind != "rename":  # in a rename, all operations of a group may be rewrites
            raise ValueError("a checkpoint without members")
        survivors, new_name = tuple(map(name_of, group["survivors"])), optional(name_of, group["new_name"])
        contents = contents_of(group, members)
        groups.append(Group(text_of(group["path"]), members, contents, survivors, new_name))
    listed = replace(
        listed,
        groups=tuple(groups),
        done=optional(partial(_group_numbers, count=count), done),
        leader=optional(text_of, document["leader"]),
        followers=tuple(map(text_of, document.get("followers", ()))),
    )
    for one in moves:
        if one.replaces and not (one.file or listed.files_at(one.group, one.source.path)):
            raise ValueError("a file without its fingerprint")
    return listed


def _operations_of(values: Sequence[Any], count: int) -> Iterator[Operation]:
    restored = set(_restored(values))
    for kind, *fields in values:
        if kind == "write":
            name, before, after, like = fields
            texts = optional(text_of, before), optional(text_of, after)
            yield Rewrite(path_of(name), *texts, optional(path_of, like))
        elif kind == "relink":
            name, before, after = fields
            yield Rewrite(path_of(name), text_of(before), text_of(after), is_link=True)
        elif kind == "move":
            group, source, target = fields
            yield Move(_group_number(group, count), _location_of(source), _location_of(target))
        elif kind == "put":
            number = _group_number(fields[0], count)
            yield _put_of(number, *fields[1:], is_restored=number in restored)
        else:
            raise ValueError(f"unknown operation {_shortened(kind)}")


def _restored(values: Sequence[Any]) -> Iterator[int]:
    """Yield the numbers of the groups that are restored from the trash."""
    for kind, *fields in values:
        if kind == "move":
            group, source, _ = fields
        elif kind == "put" and fields[-1] is not None:
            group, (source, *_) = fields[0], fields[-1]
        else:
            continue
        if _location_of(source).root == "trash":
            yield count_of(group)


def _put_of(group: int, path: object, old: Any, new: Any, *, is_restored: bool) -> Move:
    """Return the move that a ``put`` describes."""
    # A group that is restored from the trash lists the files there, and its move needs no fingerprint of its
    # own. The file that leaves the checkpoint for it is listed nowhere else.
    here = Location("directory", path_of(path))
    replaced, file = (optional(partial(_stored_of, path=here.path), one) for one in (old, new))
    if file is not None:
        is_listed = file.location.root == "trash"
        return Move(group, file.location, here, None if is_listed else file.file, replaced)
    if replaced is None:
        raise ValueError("a put without a file")
    return Move(group, here, replaced.location, replaced.file if is_restored else None)


def _stored_of(value: Sequence[Any], path: str) -> StoredFile:
    location, *numbers = value
    return StoredFile(_location_of(location), Fingerprint(path, *map(count_of, numbers)))


def _location_of(value: object) -> Location:
    """Parse a location; in a trash or a stage, it has to be in a numbered directory."""
    name, _, path = text_of(value).partition(os.sep)
    root = next((one for one in ROOTS if one == name), None)
    if root is None:
        raise ValueError(f"{_shortened(value)} is not a location")
    if root == "directory":
        return Location(root, path_of(path))
    above, _, name = path.partition(os.sep)
    if not (above.isdecimal() or (root == "stage" and above in (CONTENT, REPLACED))):
        raise ValueError(f"{_shortened(path)} is not a location in the {root}")
    return Location(root, os.path.join(above, name_of(name)))


def _group_number(value: object, count: int) -> int:
    """Check that a value is the number of a group."""
    number = count_of(value)
    if not 0 <= number < count:
        raise ValueError(f"no group {number}")
    return number


def _group_numbers(value: object, count: int) -> frozenset[int]:
    if not isinstance(value, list):
        raise TypeError(f"{_shortened(value)} is not a list")
    return frozenset(_group_number(one, count) for one in value)


def optional(check: Callable[[Any], T], value: object) -> T | None:
    """Apply a check to a value, unless it is None."""
    return None if value is None else check(value)


def identity_of(value: object) -> str:
    """Check that a value is the identity of a command."""
    identity = text_of(value)
    if not IDENTITY.fullmatch(identity):
        raise ValueError(f"{_shortened(identity)} is not the identity of a command")
    return identity


def is_name(name: str) -> bool:
    """Return whether a text can be the name of an entry in a directory."""
    return name not in ("", os.curdir, os.pardir) and os.sep not in name and "\0" not in name


def text_of(value: object) -> str:
    """Check that a value is a string that can be encoded as a file name."""
    if not isinstance(value, str):
        raise TypeError(f"{_shortened(value)} is not a string")
    value.encode("utf-8", "surrogateescape")
    return value


def count_of(value: object) -> int:
    """Check that a value is an integer."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{_shortened(value)} is not an integer")
    return value


def name_of(value: object) -> str:
    """Check that a value is the name of an entry in a directory."""
    name = text_of(value)
    if not is_name(name):
        raise ValueError(f"{_shortened(name)} points outside the directory")
    return name


def path_of(value: object) -> str:
    """Check that a value is a relative path, without ``.`` and ``..``."""
    path = text_of(value)
    if not all(map(is_name, path.split(os.sep))):
        raise ValueError(f"{_shortened(path)} points outside the directory")
    return path


def _shortened(text: object) -> str:
    return reprlib.repr(text)


def contents_of(document: Mapping[str, Any], members: Iterable[str]) -> Contents:
    """Parse the files and directories at or below some members."""
    known = frozenset(members)
    depths = {member.count(os.sep) + 1 for member in known}

    def below(value: object) -> str:
        path = path_of(value)
        parts = path.split(os.sep)
        if not any(os.sep.join(parts[:depth]) in known for depth in depths):
            raise ValueError(f"{_shortened(path)} points outside the directory")
        return path

    files = tuple(
        Fingerprint(
            below(path), *map(count_of, (device, inode, size, time)), version=text_of("".join(version))
        )
        for path, device, inode, size, time, *version in document["files"]
    )
    return Contents(files, tuple(map(below, document["directories"])))


def _contents_document(contents: Contents) -> dict[str, Any]:
    """Return contents as plain data; see ``contents_of``."""
    return {
        "directories": contents.directories,
        "files": [
            (file.path, file.device, file.inode, file.size, file.mtime_ns, *filter(None, [file.version]))
            for file in contents.files
        ],
    }
