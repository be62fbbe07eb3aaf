"""Objects in stores as files; a directory is a common prefix of their names."""

from __future__ import annotations

import io
import os
from contextlib import AbstractContextManager, suppress
from typing import BinaryIO, ClassVar

from ckpttool.core.errors import from_os_error
from ckpttool.core.urls import plain_url, store_root
from ckpttool.storage import remote
from ckpttool.storage.place import Place, is_change, is_same_file
from ckpttool.storage.remote_source import RemoteFile, RemoteSource
from ckpttool.storage.stores import ObjectStatus, Replaced, Store


class ObjectStores(Place):
    """Object stores, web servers and the Hub, by URL."""

    reads_are_free: ClassVar[bool] = False
    errors_are_verdicts: ClassVar[bool] = False
    keeps_checksums: ClassVar[bool] = True
    opens_by_path: ClassVar[bool] = False
    can_rename: ClassVar[bool] = False
    has_owners: ClassVar[bool] = False
    has_links: ClassVar[bool] = False
    block_bytes: ClassVar[int] = 1 << 25
    """A request takes some time, however few bytes it is for."""

    def require_askable(self, path: str) -> None:
        remote.require_plain(path)

    def root(self, path: str) -> str:
        return store_root(path)

    def status(self, path: str, *, follows: bool = True) -> os.stat_result:
        return remote.look_at(path).status

    def mode(self, path: str, *, follows: bool = True) -> int | None:
        """Return the mode of a path.

        Raises:
            CheckpointError: The store doesn't answer: "there is none" would be a verdict.
        """
        try:
            return remote.look_at(path).status.st_mode
        except FileNotFoundError:
            return None
        except OSError as error:
            raise from_os_error(error, path) from error

    def is_there(self, path: str, *, follows: bool = True) -> bool:
        return self.mode(path) is not None

    def entries(self, path: str) -> list[os.DirEntry[str]]:
        return remote.entries(path)

    def names(self, path: str) -> list[str]:
        return [entry.name for entry in remote.entries(path)]

    def dirname(self, path: str) -> str:
        root = store_root(path)
        return root if len(path.rstrip("/")) <= len(root) else os.path.dirname(path)

    def normpath(self, path: str) -> str:
        return plain_url(path)

    def abspath(self, path: str) -> str:
        return plain_url(path)

    def realpath(self, path: str) -> str:
        return plain_url(path)

    def relpath(self, path: str) -> str:
        return path

    def open_source(self, path: str) -> RemoteSource:
        return RemoteSource(path)

    def open_regular(self, path: str, buffering: int = -1) -> BinaryIO:
        return io.BufferedReader(RemoteFile(RemoteSource(path)))

    def write(self, path: str, data: bytes, replaces: os.stat_result | None) -> None:
        store, name = remote.store_at(path)
        try:
            store.write(name, [data], len(data), object_seen(path, replaces))
        except OSError as error:
            # The answer to the first try may have been lost: then what is there came from here.
            if not is_change(error) or not _holds(store, name, data):
                raise
        finally:
            remote.forget_at(path)

    def remove(self, path: str, seen: os.stat_result) -> None:
        store, name = remote.store_at(path)
        try:
            if (there := object_seen(path, seen)) is not None:
                store.remove(name, there)
        finally:
            remote.forget_at(path)

    def make_directories(self, path: str) -> None:
        """Do nothing: a directory exists once an object is in it."""

    def free_bytes(self, path: str) -> int | None:
        return None

    def clock(self, path: str) -> float:
        return remote.store_at(path)[0].clock()

    def is_changeable(self, path: str) -> bool:
        return remote.store_at(path)[0].is_changeable

    def prefetch_listing(self, directory: str) -> None:
        # What isn't there, or can't be listed, is found missing, or asked for by name.
        with suppress(OSError):
            if remote.store_at(directory)[0].can_list:
                remote.entries(directory)

    def unfinished_uploads(self, directory: str) -> tuple[int, int | None] | None:
        store, name = remote.store_at(directory)
        return store.unfinished_uploads(name)

    def refresh(self, path: str) -> None:
        remote.forget()

    def ask_again(self, path: str) -> None:
        remote.forget_at(path)

    def answers_below(self, directory: str) -> AbstractContextManager[None]:
        return remote.answers_below(directory)


def _holds(store: Store, name: str, data: bytes) -> bool:
    """Return whether an object has some bytes now."""
    try:
        now = store.status(name)
        return now.size == len(data) and (not data or store.read(name, 0, len(data), now) == data)
    except OSError:  # it has gone, or was replaced again
        return False


def object_seen(url: str, seen: os.stat_result | None) -> ObjectStatus | None:
    """Return the status of an object that was seen, for conditional requests; None if nothing was.

    Raises:
        Replaced: The store said something else of it since.
    """
    if seen is None:
        return None
    known = remote.look_at(url)
    if known.object is None or not is_same_file(known.status, seen):
        raise Replaced(url)
    return known.object


PLACE = ObjectStores()
