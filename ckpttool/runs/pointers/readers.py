"""Reads pointers: the small files in which frameworks note which checkpoint matters.

``kinds`` has their table. What the pointers lead to is found in ``protection``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

from ckpttool.core.errors import AccessDenied, CheckpointError, from_os_error
from ckpttool.formats.pointer_kind import PointerKind
from ckpttool.runs.members.order import Group
from ckpttool.runs.pointers.kinds import LINE, TRAINER_STATE, protecting_kinds
from ckpttool.runs.reasons import Code, code_of
from ckpttool.storage import fs
from ckpttool.storage.source import NotRegular

BEST_INSIDE = "best_model_path"
"""What a checkpoint of Lightning's says of the best; it lies in a pickle."""

_TEMPORARY = re.compile(
    r"\.?(?P<name>.+?)\.(?:tmp|temp|part|partial|incomplete)(?:[-._][\w-]*)?", re.IGNORECASE
)
_TENSORFLOW = re.compile(r"(?P<name>.+)(?:\.tempstate[0-9]+|_temp(?:_[0-9a-f]{32})?)")
_STAGED = re.compile(r"tmp[-_](?P<name>.+)", re.IGNORECASE)


class Pointer(NamedTuple):
    """A place that names a checkpoint.

    Attributes:
        reason: Why what it names stays, in a word or two.
        holder: The file that names it.
        target: What it names, as it stands there; None where it can't be read.
        formats: The formats that it can mean if it can't be read; None for all.
    """

    reason: str
    holder: str
    target: str | None
    formats: frozenset[str] | None = None

    @property
    def directory(self) -> str:
        """Return the directory that relative names belong to."""
        return os.path.dirname(self.holder) or os.curdir


Names = Mapping[str, os.DirEntry[str]]
OnError = Callable[[CheckpointError], object]
"""Called with what can't be read, and so may name anything."""


def pointers_in(directory: str, names: Names, on_error: OnError) -> Iterator[Pointer]:
    """Yield what the files of frameworks in a directory point to."""
    for kind in protecting_kinds():
        try:
            yield from _pointers(kind, directory, names)
        except CheckpointError as error:
            on_error(error)


def _pointers(kind: PointerKind, directory: str, names: Names) -> Iterator[Pointer]:
    for name in kind.files:
        if name not in names or names[name].is_dir():
            continue
        path = os.path.join(directory, name)
        data = read_small(path, kind.limit)
        targets = None
        with suppress(ValueError):
            if data is not None:
                targets = kind.targets(data.decode("utf-8", "surrogateescape"), names)
        if targets is not None:
            yield from (Pointer(kind.reason(name), path, target) for target in targets)
        elif kind.is_certain:
            yield Pointer(kind.reason(name), path, None, kind.formats)


def read_small(path: str, limit: int) -> bytes | None:
    """Return a small file's content, or None where it is too long, no regular file, or not there.

    Raises:
        CheckpointError: It can't be read: it may name anything.
    """
    try:
        with fs.open_regular(path) as file:
            data = file.read(limit + 1)
    except NotRegular:
        return None
    except OSError as error:
        if fs.is_absence(error):
            return None
        raise from_os_error(error, path) from error
    return data if len(data) <= limit else None


def is_one_name(path: str) -> bool:
    """Tell whether a small text file consists of one line, as one that names a checkpoint does."""
    data = read_small(path, LINE.limit)
    return data is not None and bool(LINE.names(data.decode("utf-8", "surrogateescape")))


def raise_error(error: CheckpointError) -> None:
    """Raise an error: nothing goes on without what can't be read."""
    raise error


def pass_over(error: CheckpointError) -> None:
    """Go on without what can't be read, where nothing is lost by that."""


def names_in(directory: str, on_error: OnError = raise_error) -> Names:
    """Return what lies in a directory, by name; that one can't be listed doesn't say that it is empty."""
    try:
        return {entry.name: entry for entry in fs.entries(directory)}
    except OSError as error:
        if not fs.is_absence(error):
            on_error(from_os_error(error, directory))
        return {}


def from_newest(group: Group, faults: Collection[str], on_error: OnError) -> Iterator[Pointer]:
    """Yield what the newest of a series says of the best: the older ones speak of what may be gone.

    One that is damaged says nothing; one that can't be read may say anything.
    """
    for newest in reversed(group.entries):
        if newest.fault is not None and code_of(newest.fault) is Code.UNREADABLE:
            on_error(AccessDenied(newest.unit.path, newest.fault))
        if not newest.is_sound or newest.path in faults:
            continue
        try:
            is_directory = any(os.sep in file.path for file in newest.contents.files)
            names = names_in(newest.unit.path) if is_directory else {}
            for pointer in _pointers(TRAINER_STATE, newest.unit.path, names):
                yield pointer._replace(holder=newest.unit.path)
        except CheckpointError as error:
            on_error(error)
        for best in newest.best_paths:
            yield Pointer(BEST_INSIDE, newest.unit.path, best)
        return


def temporary_for(name: str) -> str | None:
    """Return the name that a writer's temporary file will have, or None where it is none."""
    match = _TEMPORARY.fullmatch(name) or _STAGED.fullmatch(name) or _TENSORFLOW.fullmatch(name)
    return match["name"] if match else None
