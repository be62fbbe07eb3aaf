"""Reads the directories and small files that hold pointers."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple

from ckpttool.core.errors import CheckpointError, from_os_error
from ckpttool.formats.discovery import OWN_PREFIX
from ckpttool.formats.pointer_kind import PointerKind, TextKind
from ckpttool.storage import fs
from ckpttool.storage.snapshot import Names, Snapshot
from ckpttool.storage.source import NotRegular

_TEMPORARY = re.compile(
    r"\.?(?P<name>.+?)\.(?:tmp|temp|part|partial|incomplete)(?:[-._][\w-]*)?", re.IGNORECASE
)
_TENSORFLOW = re.compile(r"(?P<name>.+)(?:\.tempstate[0-9]+|_temp(?:_[0-9a-f]{32})?)")
_STAGED = re.compile(r"tmp[-_](?P<name>.+)", re.IGNORECASE)


class Pointer(NamedTuple):
    """Pointer to a checkpoint.

    Attributes:
        kind: Its kind.
        reason: Reason to protect the target, in a word or two.
        holder: Path of the file that holds it.
        target: Path of the target, as written; None if it can't be read.
    """

    kind: PointerKind
    reason: str
    holder: str
    target: str | None

    @property
    def directory(self) -> str:
        """Return the directory that relative names belong to."""
        return os.path.dirname(self.holder) or os.curdir


OnError = Callable[[CheckpointError], object]
"""Called with the error of a file or directory that can't be read; it may name any checkpoint."""


def pointers_of(kind: TextKind, directory: str, names: Names, snapshot: Snapshot) -> Iterator[Pointer]:
    """Yield the pointers in files of a kind in a directory; ``names`` are all names there.

    Raises:
        CheckpointError: A file can't be read.
    """
    others = (name for name in sorted(names) if name not in kind.files and kind.matches(name))
    for name in (*kind.files, *others):
        path = os.path.join(directory, name)
        try:
            if name not in names or names[name].is_dir():
                continue
        except OSError as error:  # a symlink in a circle
            raise from_os_error(error, path) from error
        data = read_small(path, kind.limit, snapshot)
        targets = None
        with suppress(ValueError):
            if data is not None:
                targets = kind.targets(data.decode("utf-8", "surrogateescape"), names)
        if targets is not None:
            yield from (Pointer(kind, kind.reason(name), path, target) for target in targets)
        elif kind.is_certain:
            yield Pointer(kind, kind.reason(name), path, None)


def read_small(path: str, limit: int, snapshot: Snapshot) -> bytes | None:
    """Return the content of a small file; None if it is too large, not a regular file, or missing.

    Raises:
        CheckpointError: It can't be read: it may name anything.
    """
    try:
        data = snapshot.read(path, limit)
    except NotRegular:
        return None
    except OSError as error:
        if fs.is_absence(error):
            return None
        raise from_os_error(error, path) from error
    return data if len(data) <= limit else None


def raise_error(error: CheckpointError) -> None:
    """Raise an error, if nothing can be decided without the unreadable file."""
    raise error


def pass_over(error: CheckpointError) -> None:
    """Ignore an error, if the unreadable file can't matter."""


def names_in(directory: str, snapshot: Snapshot, on_error: OnError = raise_error) -> Names:
    """Return the entries of a directory by name; none if it is missing, or its error is ignored."""
    try:
        return snapshot.names(directory)
    except OSError as error:
        if not fs.is_absence(error):
            on_error(from_os_error(error, directory))
        return {}


def temporary_for(name: str) -> str | None:
    """Return the final name of a writer's temporary file; None if the name isn't a temporary one."""
    match = _TEMPORARY.fullmatch(name) or _STAGED.fullmatch(name) or _TENSORFLOW.fullmatch(name)
    return match["name"] if match else None


def is_ours(name: str) -> bool:
    """Return whether a directory holds no pointers of users: one of ckpttool's own, or of Git."""
    return name.startswith(OWN_PREFIX) or name == ".git"
