"""Objects in stores as files, read by few large requests; a directory is a common prefix of their names.

Readers ask for many small ranges. So each request asks for a window that begins with the range: a small one
at a new place, and one of twice the size at the end of the last one, because a sequential reader will
continue. ``prefetch`` asks for many ranges at once.
"""

from __future__ import annotations

import errno
import io
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from typing import BinaryIO, ClassVar

from ckpttool.core.errors import AccessDenied, from_os_error
from ckpttool.core.urls import plain_url, store_root
from ckpttool.storage import remote
from ckpttool.storage.checksums import is_content_tag
from ckpttool.storage.place import Place, is_change, is_same_file
from ckpttool.storage.source import Source
from ckpttool.storage.stores import ObjectReplaced, ObjectStatus, Store

FIRST_WINDOW, NEW_WINDOW = 1 << 16, 1 << 14
"""Window sizes in bytes: at the beginning, where most headers are, and at any other new place."""
LARGEST_WINDOW = 1 << 23
MAX_CACHED = 1 << 27
"""Limit on cached windows of all objects, in bytes."""
MOST_APART = 1 << 16
"""Ranges at most this far apart are read by one request, which takes less time than two."""
REQUESTS_AT_ONCE = 16
MOST_PREFETCHED = 1 << 26
BLOCKS_AT_ONCE = 4

_Object = tuple[str, str]
"""URL and version of an object."""


class _Windows:
    """Cache of windows of all objects, least recently used first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_age: OrderedDict[tuple[_Object, int], bytes] = OrderedDict()
        self._begins: dict[_Object, list[int]] = {}
        self._nbytes = 0

    def find(self, of: _Object, offset: int) -> tuple[int, bytes] | None:
        """Return the beginning and the bytes of a window that contains an offset."""
        with self._lock:
            for begin in self._begins.get(of, ()):
                if begin <= offset < begin + len(data := self._by_age[of, begin]):
                    self._by_age.move_to_end((of, begin))
                    return begin, data
        return None

    def length_before(self, of: _Object, offset: int) -> int:
        """Return the length of the window that ends at an offset; 0 without one."""
        with self._lock:
            lengths = (
                len(data)
                for begin in self._begins.get(of, ())
                if begin + len(data := self._by_age[of, begin]) == offset
            )
            return max(lengths, default=0)

    def add(self, of: _Object, begin: int, data: bytes) -> None:
        with self._lock:
            if (known := self._by_age.pop((of, begin), None)) is not None:
                self._nbytes -= len(known)
                self._begins[of].remove(begin)
            self._by_age[of, begin] = data
            self._begins.setdefault(of, []).append(begin)
            self._nbytes += len(data)
            while self._nbytes > MAX_CACHED:
                (owner, first), oldest = self._by_age.popitem(last=False)
                self._begins[owner].remove(first)
                if not self._begins[owner]:
                    del self._begins[owner]
                self._nbytes -= len(oldest)


_windows = _Windows()


class RemoteSource(Source):
    """Object in a store; all reads are of the version that it had when it was opened."""

    __slots__ = ("_key", "_name", "_object", "_store")

    def __init__(self, url: str) -> None:
        """Ask for the status of an object."""
        self._is_closed = True
        self.path = url
        try:
            status, found = remote.cached_status(url)
            self._store, self._name = remote.store_at(url)
        except OSError as error:
            raise from_os_error(error, url) from error
        if found is None:
            raise AccessDenied(url, "a directory in a store, not an object")
        self._object = found
        # The key of cached windows. Some servers state no version: then size and time tell versions apart.
        self._key = url, f"{found.version} {found.size} {found.modified_ns}"
        self.size = found.size
        self._identity = status.st_dev, status.st_ino
        self._is_closed = False

    @property
    def content_tag(self) -> str:
        # Other stores may have ETags of the same form that aren't computed of the bytes.
        is_computed = self._store.has_content_tags and is_content_tag(self.version, self.size)
        return self.version if is_computed else ""

    @property
    def version(self) -> str:
        return self._object.version

    @property
    def reads_are_free(self) -> bool:
        return False

    def close(self) -> None:
        self._is_closed = True

    def read_into(self, offset: int, buffer: memoryview, where: str | None = None) -> None:
        if self._is_closed:
            raise AccessDenied(self.path, "it was closed", where=where)
        self.check(offset, len(buffer), where)
        done = 0
        while done < len(buffer):
            begin, data = self._window(offset + done, len(buffer) - done, where)
            part = memoryview(data)[offset + done - begin :][: len(buffer) - done]
            buffer[done : done + len(part)] = part
            done += len(part)

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Request ranges (begin and end) before they are read; close ones are joined."""
        # Only a hint: one range is read as well without it, and ranges that exceed the limit would displace
        # each other in the cache before they are read.
        wanted = list(_joined(sorted(ranges), self.size))
        missing = [one for one in wanted if _windows.find(self._key, one[0]) is None]
        if len(missing) < 2 or sum(end - begin for begin, end in missing) > MOST_PREFETCHED:
            return
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(min(REQUESTS_AT_ONCE, len(missing))) as threads:
            for _ in threads.map(lambda one: self._fetch(one[0], one[1], None), missing):
                pass

    def in_blocks(self, nbytes: int) -> Iterator[bytes]:
        """Yield all bytes in order, ``nbytes`` at a time; the next blocks are requested meanwhile."""
        from concurrent.futures import Future, ThreadPoolExecutor

        coming: deque[Future[bytes]] = deque()
        with ThreadPoolExecutor(BLOCKS_AT_ONCE) as threads:
            try:
                for begin in range(0, self.size, nbytes):
                    end = min(begin + nbytes, self.size)
                    coming.append(threads.submit(self._request, begin, end, None))
                    if len(coming) == BLOCKS_AT_ONCE:
                        yield coming.popleft().result()
                while coming:
                    yield coming.popleft().result()
            finally:
                for future in coming:
                    future.cancel()

    def copy_to(self, descriptor: int, offset: int, to: int, nbytes: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    def _window(self, offset: int, nbytes: int, where: str | None) -> tuple[int, bytes]:
        known = _windows.find(self._key, offset)
        if known is not None:
            return known
        least = FIRST_WINDOW if offset == 0 else NEW_WINDOW
        length = max(nbytes, least, 2 * _windows.length_before(self._key, offset))
        end = min(offset + min(length, LARGEST_WINDOW), self.size)
        return offset, self._fetch(offset, end, where)

    def _fetch(self, begin: int, end: int, where: str | None) -> bytes:
        data = self._request(begin, end, where)
        _windows.add(self._key, begin, data)
        return data

    def _request(self, begin: int, end: int, where: str | None) -> bytes:
        try:
            with remote.recording_failures(self.path):
                data = self._store.read(self._name, begin, end, self._object)
                if len(data) != end - begin:
                    found = f"bytes {begin}..{end}: the store sent {len(data):,} bytes"
                    raise OSError(errno.EIO, found, self.path)
        except OSError as error:
            failure = from_os_error(error, self.path)
            failure.where = where
            raise failure from error
        return data


def _joined(ranges: Iterable[tuple[int, int]], size: int) -> Iterable[tuple[int, int]]:
    """Yield sorted ranges, joining those that are close to each other."""
    begin = end = -1
    for start, stop in ranges:
        stop = min(stop, size)
        if end >= 0 and start <= end + MOST_APART:
            end = max(end, stop)
            continue
        if end > begin:
            yield begin, end
        begin, end = start, stop
    if end > begin >= 0:
        yield begin, end


class RemoteFile(io.RawIOBase):
    """Object as a seekable binary file."""

    def __init__(self, source: RemoteSource) -> None:
        super().__init__()
        self._source, self._at = source, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._source.size)[whence]
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = max(0, min(len(buffer), self._source.size - self._at))
        self._source.read_into(self._at, memoryview(buffer)[:count])
        self._at += count
        return count

    def close(self) -> None:
        self._source.close()
        super().close()


class ObjectStores(Place):
    """Object stores, web servers and the Hub, by URL."""

    reads_are_free: ClassVar[bool] = False
    errors_concern_files: ClassVar[bool] = False
    keeps_checksums: ClassVar[bool] = True
    opens_by_path: ClassVar[bool] = False
    can_rename: ClassVar[bool] = False
    has_owners: ClassVar[bool] = False
    has_links: ClassVar[bool] = False
    block_bytes: ClassVar[int] = 1 << 25
    """Larger than on a disk, since each request takes time whatever its size."""

    def require_askable(self, path: str) -> None:
        remote.require_plain(path)

    def root(self, path: str) -> str:
        return store_root(path)

    def status(self, path: str, *, follows: bool = True) -> os.stat_result:
        return remote.cached_status(path).status

    def mode(self, path: str, *, follows: bool = True) -> int | None:
        """Return the mode of a path.

        Raises:
            CheckpointError: The store doesn't answer, so it is unknown whether the path exists.
        """
        try:
            return remote.cached_status(path).status.st_mode
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
            # If the answer to a successful request was lost, the retry fails its condition. The object is
            # ours if it has our bytes.
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
        # If it fails, names are requested one by one.
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

    def raising_failed_requests(self, directory: str) -> AbstractContextManager[None]:
        return remote.raising_failed_requests(directory)


def _holds(store: Store, name: str, data: bytes) -> bool:
    """Return whether an object consists of some bytes now."""
    try:
        now = store.status(name)
        return now.size == len(data) and (not data or store.read(name, 0, len(data), now) == data)
    except OSError:  # it was removed or replaced again
        return False


def object_seen(url: str, seen: os.stat_result | None) -> ObjectStatus | None:
    """Return the status of an object that was seen, for conditional requests; None if nothing was.

    Raises:
        ObjectReplaced: It has changed since.
    """
    if seen is None:
        return None
    known = remote.cached_status(url)
    if known.object is None or not is_same_file(known.status, seen):
        raise ObjectReplaced(url)
    return known.object


PLACE = ObjectStores()
