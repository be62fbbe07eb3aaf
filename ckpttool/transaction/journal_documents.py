"""The text of journals and records: what is read back has the right types, and no name leads elsewhere."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from ckpttool.transaction.files import Contents, Fingerprint
from ckpttool.transaction.journal import (
    CONTENT,
    IDENTITY,
    REPLACED,
    ROOTS,
    Exchange,
    Group,
    Kind,
    Location,
    Move,
    Operation,
    OperationList,
    Relink,
    Rewrite,
    Root,
    StoredFile,
)

SCHEMA = "ckpttool.operations/1"


def operations_document(listed: OperationList) -> dict[str, Any]:
    """Return operations as plain data; see ``operations_of``."""
    return {
        "schema": SCHEMA,
        "kind": listed.kind,
        "identity": listed.identity,
        "leader": listed.leader,
        "groups": [
            {
                "path": one.path,
                **_contents_document(one.contents),
                "survivors": one.survivors,
                "new_name": one.new_name,
            }
            for one in listed.groups
        ],
        "operations": [_operation_document(one) for one in listed.operations],
    }


def _operation_document(one: Operation) -> tuple[Any, ...]:
    if isinstance(one, Move):
        return ("move", one.group, _text_of_location(one.source), _text_of_location(one.target))
    if isinstance(one, Exchange):
        return ("put", one.group, one.path, _stored_document(one.old), _stored_document(one.new))
    return ("write" if isinstance(one, Rewrite) else "relink", *one)


def _text_of_location(location: Location) -> str:
    return os.sep.join(location)


def _stored_document(stored: StoredFile | None) -> tuple[Any, ...] | None:
    if stored is None:
        return None
    file = stored.file
    return (_text_of_location(stored.location), file.device, file.inode, file.size, file.mtime_ns)


def operations_of(document: Mapping[str, Any], done: object = None) -> OperationList:
    """Return operations from what ``operations_document`` returned; every name was checked to stay inside.

    Args:
        document: The plain data.
        done: Numbers of the committed groups, from the file beside the journal; None without one.
    """
    kind, identity = document["kind"], document["identity"]
    if kind not in get_args(Kind):
        raise ValueError(f"kind {_shortened(kind)}")
    if identity is None and kind not in ("remove", "slim", "output"):
        raise ValueError("a journal without the identity of its command")
    count = len(document["groups"])
    operations = tuple(_operation_of(one, count) for one in document["operations"])
    targets = [location for one in operations if isinstance(one, Move) for location in (one.target,)]
    targets += [one.old.location for one in operations if isinstance(one, Exchange) and one.old is not None]
    if len(set(targets)) < len(targets):
        raise ValueError("two files at one location")
    listed = OperationList(
        kind,
        (Group("", (), Contents()),) * count,
        operations,
        None if identity is None else identity_of(identity),
    )
    groups = []
    for number, group in enumerate(document["groups"]):
        members = tuple(listed.ends(number))
        if not members and kind != "rename":  # of which all can be texts that are written
            raise ValueError("a checkpoint without members")
        survivors = tuple(name_of(name) for name in group["survivors"])
        path, contents, new_name = text_of(group["path"]), contents_of(group, members), group["new_name"]
        groups.append(
            Group(path, members, contents, survivors, None if new_name is None else name_of(new_name))
        )
    numbers = None if done is None else _group_numbers(done, count)
    leader = document["leader"]
    if leader is not None:
        leader = text_of(leader)
    return replace(listed, groups=tuple(groups), done=numbers, leader=leader)


def _operation_of(value: Sequence[Any], count: int) -> Operation:
    kind, *rest = value
    if kind == "write":
        name, before, after, like = rest
        like = None if like is None else path_of(like)
        return Rewrite(path_of(name), text_or_none(before), text_or_none(after), like)
    if kind == "relink":
        name, before, after = rest
        return Relink(path_of(name), text_of(before), text_of(after))
    if kind == "move":
        group, source, target = rest
        return Move(_group_number(group, count), _location_of(source), _location_of(target))
    if kind == "put":
        group, path, old, new = rest
        path = path_of(path)
        if old is None and new is None:
            raise ValueError("nothing that is put anywhere")
        return Exchange(_group_number(group, count), path, _stored_of(old, path), _stored_of(new, path))
    raise ValueError(f"operation {_shortened(kind)}")


def _stored_of(value: Sequence[Any] | None, path: str) -> StoredFile | None:
    if value is None:
        return None
    location, *numbers = value
    return StoredFile(_location_of(location), Fingerprint(path, *map(count_of, numbers)))


def _location_of(value: object) -> Location:
    name, _, path = text_of(value).partition(os.sep)
    root = next((one for one in ROOTS if one == name), None)
    if root is None:
        raise ValueError(f"{_shortened(value)} is no location")
    return location_in(root, path)


def location_in(root: Root, path: object) -> Location:
    """Return a path below a root; in a trash or a stage it is in a numbered directory."""
    if root == "directory":
        return Location(root, path_of(path))
    above, _, name = text_of(path).partition(os.sep)
    if not (above.isdecimal() or (root == "stage" and above in (CONTENT, REPLACED))):
        raise ValueError(f"{_shortened(path)} is no location in the {root}")
    return Location(root, os.path.join(above, name_of(name)))


def _group_number(value: object, count: int) -> int:
    """Return the number of one of some groups."""
    number = count_of(value)
    if not 0 <= number < count:
        raise ValueError(f"no group {number}")
    return number


def _group_numbers(value: object, count: int) -> frozenset[int]:
    if not isinstance(value, list):
        raise TypeError(f"{_shortened(value)} is no list")
    return frozenset(_group_number(one, count) for one in value)


def identity_of(value: object) -> str:
    """Return an identity."""
    identity = text_of(value)
    if not IDENTITY.fullmatch(identity):
        raise ValueError(f"{_shortened(identity)} is no identity")
    return identity


def is_name(name: str) -> bool:
    """Tell whether a text names an entry of a directory, and nothing elsewhere."""
    return name not in ("", os.curdir, os.pardir) and os.sep not in name and "\0" not in name


def text_of(value: object) -> str:
    """Return a text."""
    if not isinstance(value, str):
        raise TypeError(f"{_shortened(value)} is no text")
    value.encode("utf-8", "surrogateescape")
    return value


def text_or_none(value: object) -> str | None:
    """Return a text, or None."""
    return None if value is None else text_of(value)


def count_of(value: object) -> int:
    """Return a number."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{_shortened(value)} is no number")
    return value


def names_of(values: object) -> tuple[str, ...]:
    """Return one or more names, each of which stands once."""
    if not isinstance(values, list):
        raise TypeError(f"{values!r} is no list")
    names = tuple(map(name_of, values))
    if not names or len(set(names)) < len(names):
        raise ValueError("no member, or two of one name")
    return names


def name_of(value: object) -> str:
    """Return a name."""
    name = text_of(value)
    if not is_name(name):
        raise ValueError(f"{_shortened(name)} leads out of the directory")
    return name


def path_of(value: object) -> str:
    """Return a path of one or more names, relative to a directory."""
    path = text_of(value)
    if not all(map(is_name, path.split(os.sep))):
        raise ValueError(f"{_shortened(path)} leads out of the directory")
    return path


def _shortened(text: object) -> str:
    """Return what stands in a journal, shortened for a message."""
    return reprlib.repr(text)


def contents_of(document: Mapping[str, Any], members: Iterable[str]) -> Contents:
    """Return the files and directories that lie at some members."""
    known = frozenset(members)
    depths = {member.count(os.sep) + 1 for member in known}

    def below(value: object) -> str:
        path = path_of(value)
        parts = path.split(os.sep)
        if not any(os.sep.join(parts[:depth]) in known for depth in depths):
            raise ValueError(f"{_shortened(path)} leads out of the directory")
        return path

    files = tuple(
        Fingerprint(
            below(path), *map(count_of, (device, inode, size, time)), version=text_of("".join(version))
        )
        for path, device, inode, size, time, *version in document["files"]
    )
    return Contents(files, tuple(map(below, document["directories"])))


def _contents_document(contents: Contents) -> dict[str, Any]:
    """Return what ``contents_of`` reads."""
    return {
        "directories": contents.directories,
        "files": [
            (file.path, file.device, file.inode, file.size, file.mtime_ns, *filter(None, [file.version]))
            for file in contents.files
        ],
    }
