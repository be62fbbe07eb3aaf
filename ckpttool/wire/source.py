"""Bounds-checked reads of an open file.

Files are read with ``pread`` and never through a map: a map of a file that a trainer cuts short kills the
process, and counts every touched page as memory.
"""

from __future__ import annotations

import os
import stat
import threading
from typing import TYPE_CHECKING

from ckpttool.errors import AccessDenied, LimitExceeded, Truncated, from_os_error

if TYPE_CHECKING:
    pass

MAX_READ = 1 << 28
"""The most bytes that one ``read`` may ask for; all larger data is streamed."""

_OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
# A named pipe would block the open for ever.
_NEVER_BLOCK = getattr(os, "O_NONBLOCK", 0)


class Source:
    """A file, opened for reading; offsets and sizes are in bytes."""

    __slots__ = ("_descriptor", "_lock", "path", "size")

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open a regular file.

        Raises:
            NotFound, AccessDenied: It can't be opened.
        """
        self.path = os.fspath(path)
        self._descriptor = -1
        self._lock = threading.Lock()
        try:
            self._descriptor = os.open(self.path, _OPEN_FLAGS | _NEVER_BLOCK)
            status = os.fstat(self._descriptor)
        except OSError as error:
            raise from_os_error(error, self.path) from error
        except ValueError as error:
            raise AccessDenied(self.path, str(error)) from error
        self.size = status.st_size
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise AccessDenied(self.path, "not a regular file")

    def close(self) -> None:
        """Close the file; closing twice is allowed."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def read(self, offset: int, nbytes: int, where: str | None = None) -> bytes:
        """Return exactly ``nbytes`` bytes from ``offset``.

        Raises:
            Truncated: The range isn't inside the file, or the file became shorter.
            LimitExceeded: More than ``MAX_READ`` bytes are asked for.
        """
        if nbytes > MAX_READ:
            raise LimitExceeded(
                self.path, f"{nbytes:,} bytes to read at once", expected=f"at most {MAX_READ:,}", where=where
            )
        self.check(offset, nbytes, where)
        buffer = bytearray(nbytes)
        self.read_into(offset, memoryview(buffer), where)
        return bytes(buffer)

    def check(self, offset: int, nbytes: int, where: str | None = None) -> None:
        """Require that a range lies inside the file.

        Raises:
            Truncated: It doesn't.
        """
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size:
            found = f"bytes {offset}..{offset + nbytes} lie outside the file"
            raise Truncated(self.path, found, expected=f"{self.size} bytes", where=where)

    def read_into(self, offset: int, buffer: memoryview, where: str | None = None) -> None:
        """Fill a buffer from ``offset``.

        Raises:
            Truncated: The file ends before; it became shorter since it was opened.
        """
        done, wanted = 0, len(buffer)
        while done < wanted:
            try:
                count = self._read_some(offset + done, buffer[done:])
            except OSError as error:
                raise from_os_error(error, self.path) from error
            if count == 0:
                found = f"the file ends at byte {os.fstat(self._descriptor).st_size}"
                raise Truncated(self.path, found, expected=f"{self.size} when it was opened", where=where)
            done += count

    if hasattr(os, "preadv"):

        def _read_some(self, offset: int, buffer: memoryview) -> int:
            return os.preadv(self._descriptor, [buffer], offset)

    else:

        def _read_some(self, offset: int, buffer: memoryview) -> int:
            with self._lock:
                os.lseek(self._descriptor, offset, os.SEEK_SET)
                data = os.read(self._descriptor, len(buffer))
            buffer[: len(data)] = data
            return len(data)


class Part(Source):
    """A range of an open file, read as if it were a file of its own; closing it leaves the file open."""

    __slots__ = ("_whole", "base")

    def __init__(self, whole: Source, base: int, nbytes: int, where: str | None = None) -> None:
        """Take the ``nbytes`` bytes from the offset ``base`` on.

        Raises:
            Truncated: They don't lie inside the file.
        """
        whole.check(base, nbytes, where)
        self._whole = whole
        self.path = whole.path
        self.base = base
        self.size = nbytes

    def close(self) -> None:
        pass

    def read_into(self, offset: int, buffer: memoryview, where: str | None = None) -> None:
        self.check(offset, len(buffer), where)
        self._whole.read_into(self.base + offset, buffer, where)


class Buffer:
    """Bytes in memory, read like a file: what had to be decompressed."""

    __slots__ = ("_data", "path", "size")

    def __init__(self, path: str, data: bytes) -> None:
        self.path = path
        self._data = data
        self.size = len(data)

    def read(self, offset: int, nbytes: int, where: str | None = None) -> bytes:
        """Return exactly ``nbytes`` bytes from ``offset``.

        Raises:
            Truncated: The range isn't inside the data.
        """
        self.check(offset, nbytes, where)
        return self._data[offset : offset + nbytes]

    def check(self, offset: int, nbytes: int, where: str | None = None) -> None:
        """Require that a range lies inside the data.

        Raises:
            Truncated: It doesn't.
        """
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size:
            found = f"bytes {offset}..{offset + nbytes} lie outside the data"
            raise Truncated(self.path, found, expected=f"{self.size} bytes", where=where)

    def read_into(self, offset: int, buffer: memoryview, where: str | None = None) -> None:
        """Fill a buffer from ``offset``.

        Raises:
            Truncated: The data ends before.
        """
        buffer[:] = self.read(offset, len(buffer), where)
