"""Directories in an object store: requests on objects below a prefix, many at once.

A store has no renames and no locks. Instead, an object is read, replaced or removed only if it still has the
version that was seen.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

from ckpttool.core.errors import from_os_error
from ckpttool.formats import list_kind
from ckpttool.storage import fs, remote
from ckpttool.storage.stores import ObjectReplaced, ObjectStatus
from ckpttool.transaction.files import StalePlan
from ckpttool.transaction.journal import IDENTITY, Kind, Move, OperationList, Root

REQUESTS_AT_ONCE = 16
_COMPARED_AT_ONCE = 1 << 23
"""Size of the parts in which two objects are compared, in bytes."""
_PREFIX, _SUFFIX = ".ckpttool-prune-", ".json"

R = TypeVar("R")
T = TypeVar("T")


class StoreDirectory:
    """Directory in a store. Nothing is cached; all methods raise ``OSError``."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.store, prefix = remote.store_at(directory)
        self._prefix = f"{prefix}/" if prefix else ""

    def key(self, name: str) -> str:
        """Return the key of an object in the bucket."""
        return self._prefix + name

    def status(self, name: str) -> ObjectStatus | None:
        """Return the status of an object; None if it is missing."""
        try:
            return self.store.status(self.key(name))
        except FileNotFoundError:
            return None

    def read(self, name: str, limit: int) -> tuple[bytes, ObjectStatus] | None:
        """Return the bytes and the status of a small object; None if it is missing."""
        status = self.status(name)
        if status is None:
            return None
        if status.size > limit:
            raise OSError(0, f"{status.size:,} bytes; the limit is {limit:,}", self._url(name))
        return self.store.read(self.key(name), 0, status.size, status) if status.size else b"", status

    def is_same(self, name: str, of: ObjectStatus, other: str, of_other: ObjectStatus) -> bool:
        """Return whether two objects have the same bytes; they are compared if the versions differ."""
        # Equal versions (ETags) mean equal bytes, but a copy may have another ETag than its original: on
        # Azure, on Google Cloud Storage, and on S3 if it was uploaded in parts.
        if of.size != of_other.size:
            return False
        if of.version and of.version == of_other.version:
            return True
        return all(
            self.store.read(self.key(name), begin, end, of)
            == self.store.read(self.key(other), begin, end, of_other)
            for begin in range(0, of.size, _COMPARED_AT_ONCE)
            if (end := min(begin + _COMPARED_AT_ONCE, of.size))
        )

    def remove(self, name: str, of: ObjectStatus) -> None:
        """Remove an object if it is unmodified; nothing is done if it is missing."""
        with suppress(FileNotFoundError):
            self.store.remove(self.key(name), of)

    def replace(self, name: str, data: bytes, of: ObjectStatus | None) -> ObjectStatus:
        """Write an object in place of an unmodified one, or of none; return its status."""
        try:
            return self.store.write(self.key(name), [data], len(data), of)
        except (FileExistsError, FileNotFoundError) as error:
            raise ObjectReplaced(self._url(name)) from error

    def remove_now(self, name: str) -> None:
        """Remove an object of ours, whatever its version."""
        if (status := self.status(name)) is not None:
            self.remove(name, status)

    def copy(self, name: str, to: str, size: int) -> None:
        """Copy an object, and require the size of the copy."""
        self.store.copy(self.key(name), self.key(to))
        copied = self.status(to)
        if copied is None or copied.size != size:
            raise ObjectReplaced(self._url(name))

    def _url(self, name: str) -> str:
        return f"{self.directory}/{name}"


def map_on_threads(function: Callable[[T], R], items: Iterable[T]) -> Iterator[tuple[T, R]]:
    """Call a function for items on several threads; yield each with its result. The first error is raised."""
    from concurrent.futures import ThreadPoolExecutor

    given = list(items)
    with ThreadPoolExecutor(REQUESTS_AT_ONCE) as threads:
        yield from zip(given, threads.map(function, given), strict=True)


def results_or_errors(
    function: Callable[[T], R], items: Iterable[T]
) -> Iterator[tuple[T, R | OSError | StalePlan]]:
    """Call a function for items on several threads; yield each with its result or its error."""

    def attempt(item: T) -> R | OSError | StalePlan:
        try:
            return function(item)
        except (OSError, StalePlan) as error:
            return error

    return map_on_threads(attempt, items)


def keeps_versions(urls: Sequence[str]) -> bool:
    """Return whether the store keeps the versions of all these objects when they are removed."""

    def keeps(url: str) -> bool:
        store, name = remote.store_at(url)
        with suppress(FileNotFoundError):
            return store.keeps_version(name)
        return False

    return bool(urls) and all(is_kept for _, is_kept in map_on_threads(keeps, urls))


# Journals -------------------------------------------------------------------------------------------


def journal_name(identity: str) -> str:
    """Return the name of a command's journal in its directory."""
    return f"{_PREFIX}{identity}{_SUFFIX}"


def identity_of_journal(name: str) -> str | None:
    """Return the identity of the command of a journal; None if it isn't the name of one."""
    if not (name.startswith(_PREFIX) and name.endswith(_SUFFIX)):
        return None
    identity = name[len(_PREFIX) : -len(_SUFFIX)]
    return identity if IDENTITY.fullmatch(identity) else None


def journals_in(directory: str) -> list[str]:
    """Return the URLs of the journals in a directory, the oldest first."""
    try:
        names = sorted(fs.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise from_os_error(error, directory) from error
    return [os.path.join(directory, name) for name in names if identity_of_journal(name) is not None]


def require_of_store(listed: OperationList) -> None:
    """Require operations that stores support: whole objects leave the directory, or come back to it."""
    leaving: Mapping[Kind, tuple[Root, Root]] = {
        "remove": ("directory", "stage"),
        "trash": ("directory", "trash"),
    }
    known = [leaving[listed.kind]] if listed.kind in leaving else [pair[::-1] for pair in leaving.values()]
    for one in listed.operations:
        if isinstance(one, Move):
            is_known = (one.source.root, one.target.root) in known
        else:
            is_known = not one.is_link and list_kind(one.name) is not None
        if not is_known:
            raise ValueError("an operation that stores don't support")
    if listed.kind not in (*leaving, "restore"):
        raise ValueError(f"kind {listed.kind}")
    if not all(group.contents.files for group in listed.groups):
        raise ValueError("a checkpoint without objects")
