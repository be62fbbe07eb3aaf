"""Reads an object in a store as a file is read, by few and large requests.

Most readers ask for some bytes here and the next ones there. So each request asks for a window around what is
wanted: a small one at a new place, and one of twice the size where the last one ended, since whoever reads
on will do so again. ``prefetch`` asks for many places at once.
"""

from __future__ import annotations

import errno
import io
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator

from ckpttool.core.errors import AccessDenied, from_os_error
from ckpttool.storage import remote
from ckpttool.storage.checksums import is_content_tag
from ckpttool.storage.source import Source

FIRST_WINDOW, NEW_WINDOW = 1 << 16, 1 << 14
"""Bytes that are asked for at the beginning, where most headers are, and at any other new place."""
LARGEST_WINDOW = 1 << 23
MAX_CACHED = 1 << 27
"""The most bytes of all objects that are kept for those who read on."""
MOST_APART = 1 << 16
"""Ranges so many bytes apart come with one request: to ask again takes longer than to receive them."""
REQUESTS_AT_ONCE = 16
MOST_PREFETCHED = 1 << 26
BLOCKS_AT_ONCE = 4

_Object = tuple[str, str]
"""A URL, and the version of what is there."""


class _Windows:
    """What was received last of all objects: of each, ranges of bytes by where they begin."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_age: OrderedDict[tuple[_Object, int], bytes] = OrderedDict()
        self._begins: dict[_Object, list[int]] = {}
        self._nbytes = 0

    def find(self, of: _Object, offset: int) -> tuple[int, bytes] | None:
        """Return where a window begins that holds a byte, and its bytes."""
        with self._lock:
            for begin in self._begins.get(of, ()):
                if begin <= offset < begin + len(data := self._by_age[of, begin]):
                    self._by_age.move_to_end((of, begin))
                    return begin, data
        return None

    def length_before(self, of: _Object, offset: int) -> int:
        """Return how long the window is that ends at an offset; 0 where none does."""
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
    """An object in a store; all that is read is of the version that it had when it was opened."""

    __slots__ = ("_key", "_name", "_object", "_store")

    def __init__(self, url: str) -> None:
        """Ask for the status of an object."""
        self._is_closed = True
        self.path = url
        try:
            status, found = remote.look_at(url)
            self._store, self._name = remote.store_at(url)
        except OSError as error:
            raise from_os_error(error, url) from error
        if found is None:
            raise AccessDenied(url, "a directory in a store, not an object")
        self._object = found
        self._key = url, f"{found.version} {found.size} {found.modified_ns}"
        self.size = found.size
        self._identity = status.st_dev, status.st_ino
        self._is_closed = False

    @property
    def content_tag(self) -> str:
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
        """Ask for ranges, each from an offset to another, before they are read; neighbours come together."""
        wanted = list(_joined(sorted(ranges), self.size))
        missing = [one for one in wanted if _windows.find(self._key, one[0]) is None]
        if len(missing) < 2 or sum(end - begin for begin, end in missing) > MOST_PREFETCHED:
            return
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(min(REQUESTS_AT_ONCE, len(missing))) as threads:
            for _ in threads.map(lambda one: self._fetch(one[0], one[1], None), missing):
                pass

    def in_blocks(self, nbytes: int) -> Iterator[bytes]:
        """Yield all bytes in their order, so many at a time; the next ones are on their way meanwhile."""
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
            with remote.noted_failures(self.path):
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
    """Yield ranges in order, those that lie near each other as one."""
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
    """An object as a file that is read from its beginning."""

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
