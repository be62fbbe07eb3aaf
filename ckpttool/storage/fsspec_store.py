"""Stores through an installed fsspec: ``sftp://``, ``memory://`` and all others that it supports."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any

from ckpttool.core.errors import CheckpointError, MissingPackage, UsageError
from ckpttool.storage.directories import OWN_PREFIX
from ckpttool.storage.stores import Listing, ObjectReplaced, ObjectStatus, Store


class FsspecStore(Store):
    """A file system of fsspec.

    Source: https://filesystem-spec.readthedocs.io
    """

    def __init__(self, root: str) -> None:
        self.root = root
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            scheme = root.partition("://")[0]
            raise MissingPackage(root, f"{scheme}:// needs fsspec", expected="pip install fsspec") from error
        try:
            self._files, self._top = url_to_fs(root)
        except (ImportError, ValueError) as error:
            raise UsageError(f"{root}: {error}") from error

    def status(self, name: str) -> ObjectStatus:
        found = self._info(name)
        if found["type"] != "file":
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{self.root}/{name}")
        return _object_status(found)

    def listing(self, prefix: str) -> Listing:
        with _as_os_errors(f"{self.root}/{prefix}"):
            try:
                rows = self._files.ls(self._path(prefix), detail=True, refresh=True)
            except (FileNotFoundError, NotADirectoryError):
                rows = []
            rows = [row for row in rows if row["name"].strip("/") != self._path(prefix).strip("/")]
            named = [(os.path.basename(row["name"].rstrip("/")), row) for row in rows]
            return Listing(
                frozenset(name for name, row in named if row["type"] == "directory"),
                {name: _object_status(row) for name, row in named if row["type"] == "file"},
            )

    def read(self, name: str, begin: int, end: int, of: ObjectStatus) -> bytes:
        url = f"{self.root}/{name}"
        with _as_os_errors(url):
            data: bytes = self._files.cat_file(self._path(name), start=begin, end=end)
        if not _object_status(self._info(name)).matches(of):
            raise ObjectReplaced(url)
        return data

    def write(
        self, name: str, blocks: Iterable[bytes], size: int, replaces: ObjectStatus | None
    ) -> ObjectStatus:
        """Write a temporary file next to the target, and rename it."""
        # Few of these file systems support conditions. So the target is checked just before the rename, and a
        # change in the moment between isn't noticed.
        url, directory = f"{self.root}/{name}", os.path.dirname(self._path(name))
        temporary = os.path.join(directory, f"{OWN_PREFIX}{os.urandom(6).hex()}.tmp")
        with _as_os_errors(url):
            self._files.makedirs(directory, exist_ok=True)
            try:
                with self._files.open(temporary, "wb") as file:
                    for block in blocks:
                        file.write(block)
                self.require_replaceable(name, replaces)
                self._files.mv(temporary, self._path(name))
            except BaseException:  # Ctrl-C included
                with suppress(OSError):
                    self._files.rm_file(temporary)
                raise
        found = self.status(name)
        if found.size != size:
            raise ObjectReplaced(url)
        return found

    def remove(self, name: str, of: ObjectStatus) -> None:
        self.require_replaceable(name, of)
        with _as_os_errors(f"{self.root}/{name}"):
            self._files.rm_file(self._path(name))

    def _info(self, name: str) -> Mapping[str, Any]:
        with _as_os_errors(f"{self.root}/{name}"):
            self._files.invalidate_cache()  # many of these file systems cache listings
            found: Mapping[str, Any] = self._files.info(self._path(name))
            return found

    def _path(self, name: str) -> str:
        return "/".join(part for part in (self._top.rstrip("/"), name) if part)


def _object_status(found: Mapping[str, Any]) -> ObjectStatus:
    modified = next(
        (found[key] for key in ("mtime", "modified", "created", "LastModified") if found.get(key)), 0
    )
    seconds = modified.timestamp() if isinstance(modified, datetime) else float(modified)
    version = str(found.get("ETag") or found.get("etag") or "")
    return ObjectStatus(found["size"] or 0, int(seconds * 1_000_000_000), version)


@contextmanager
def _as_os_errors(url: str) -> Iterator[None]:
    """Raise the errors of all of fsspec's file systems as ``OSError``."""
    try:
        yield
    except (OSError, CheckpointError):
        raise
    except Exception as error:  # each of fsspec's file systems has errors of its own
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}", url) from error
