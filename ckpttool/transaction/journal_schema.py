"""What ckpttool has written down for itself, read back: each value is of its type, each name stays inside."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

from ckpttool.transaction.files import Contents, Fingerprint


def is_name(name: str) -> bool:
    """Tell whether a text names an entry of a directory, and nothing elsewhere."""
    return name not in ("", os.curdir, os.pardir) and os.sep not in name and "\0" not in name


def text_of(value: object) -> str:
    """Return a text."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    value.encode("utf-8", "surrogateescape")
    return value


def text_or_none(value: object) -> str | None:
    """Return a text, or None."""
    return None if value is None else text_of(value)


def count_of(value: object) -> int:
    """Return a number."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value!r} is no number")
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
        raise ValueError(f"{name!r} leads out of the directory")
    return name


def path_of(value: object) -> str:
    """Return a path of one or more names, relative to a directory."""
    path = text_of(value)
    if not all(map(is_name, path.split(os.sep))):
        raise ValueError(f"{path!r} leads out of the directory")
    return path


def path_below(value: object, members: Collection[str]) -> str:
    """Return a path that is one of some others, or lies below one."""
    path = path_of(value)
    parts = path.split(os.sep)
    if not any(os.sep.join(parts[:count]) in members for count in range(1, len(parts) + 1)):
        raise ValueError(f"{path!r} leads out of the directory")
    return path


def contents_of(document: Mapping[str, Any], members: Collection[str]) -> Contents:
    """Return the files and directories that lie at some members."""
    files = tuple(
        Fingerprint(path_below(path, members), *(count_of(number) for number in numbers))
        for path, *numbers in document["files"]
    )
    return Contents(files, tuple(path_below(path, members) for path in document["directories"]))


def contents_document(contents: Contents) -> dict[str, Any]:
    """Return what ``contents_of`` reads."""
    return {
        "directories": contents.directories,
        "files": [(file.path, file.device, file.inode, file.size, file.mtime_ns) for file in contents.files],
    }
