"""Bounds-checked reads of a file, or of a part of one.

Files are read with ``pread`` and never mapped: if a trainer truncates a mapped file, the process is killed,
and every touched page counts as memory.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import ClassVar

from ckpttool.core.errors import AccessDenied, DamagedCheckpoint, Truncated, from_os_error
from ckpttool.core.readable import Readable
from ckpttool.storage import held

MAX_OPEN = 64
"""Limit on open files: a checkpoint may have thousands, and macOS lets a process open 256."""


# O_NONBLOCK: opening a pipe that was planted under a file's name would wait for a writer.
_READ = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)


class _Descriptor:
    """An open file, closed with its last user."""

    __slots__ = ("number",)

    def __init__(self, path: str) -> None:
        self.number = -1
        try:
            self.number = regular_descriptor(path)
        except OSError as error:
            raise from_os_error(error, path) from error
        except ValueError as error:
            raise AccessDenied(path, str(error)) from error

    # Default arguments: at exit, global names may have been deleted.
    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self.number >= 0:
            close(self.number)


_kept: dict[int, _Descriptor] = {}
"""Open files of the process by the ``id`` of their ``Source``, oldest first."""
# A reader refers to the descriptor meanwhile. So one that is removed from here isn't closed while another
# thread reads from it. A finalizer may run at any point, also in a thread that changes this, so a lock could
# deadlock: each step is a single operation on the dictionary instead, which is atomic.


class Source(Readable):
    """File that is open for reading.

    If more than ``MAX_OPEN`` files are open, the one that was opened first is closed, and opened again when
    it is read next. It has to be the same file then.
    """

    __slots__ = ("_identity", "_is_closed", "_lock", "path", "size")

    _called: ClassVar[str] = "file"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open a regular file."""
        self._is_closed = True
        self.path = os.fspath(path)
        self._lock = threading.Lock()
        descriptor = _Descriptor(self.path)
        status = os.fstat(descriptor.number)
        self.size = status.st_size
        self._identity = status.st_dev, status.st_ino
        self._is_closed = False
        self._remember(descriptor)

    @property
    def identity(self) -> tuple[int, int]:
        """Device and inode of the file."""
        return self._identity

    def close(self) -> None:
        """Close the file; may be called twice."""
        self._is_closed = True
        _kept.pop(id(self), None)

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self, kept: dict[int, _Descriptor] = _kept) -> None:  # see ``_Descriptor``
        kept.pop(id(self), None)

    def read_into(self, offset: int, buffer: memoryview, where: str | None = None) -> None:
        descriptor = _kept.get(id(self)) or self._reopen(where)
        done, wanted = 0, len(buffer)
        while done < wanted:
            try:
                count = self._read_some(descriptor.number, offset + done, buffer[done:])
            except OSError as error:
                raise from_os_error(error, self.path) from error
            if count == 0:
                found = f"the file ends at byte {os.fstat(descriptor.number).st_size}"
                raise Truncated(self.path, found, expected=f"{self.size} when it was opened", where=where)
            done += count

    @property
    def content_tag(self) -> str:
        """ETag of an object if its store computes that of the bytes; empty otherwise."""
        return ""

    @property
    def version(self) -> str:
        """Version of an object in a store; empty for a file on a disk."""
        return ""

    @property
    def begin(self) -> int:
        """Offset in the file of this source's first byte."""
        return 0

    def in_blocks(self, nbytes: int) -> Iterator[bytes]:
        """Yield all bytes in order, ``nbytes`` at a time."""
        for begin in range(0, self.size, nbytes):
            yield self.read(begin, min(nbytes, self.size - begin))

    def copy_to(self, descriptor: int, offset: int, to: int, nbytes: int) -> None:
        """Have the kernel copy bytes of this file from ``offset`` to the offset ``to`` of another."""
        copy = getattr(os, "copy_file_range", None)
        if copy is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        own = _kept.get(id(self)) or self._reopen(None)
        done = 0
        while done < nbytes:
            count = copy(own.number, descriptor, nbytes - done, offset + done, to + done)
            if count == 0:
                size = os.fstat(own.number).st_size
                raise Truncated(
                    self.path, f"the file ends at byte {size}", expected=f"{self.size} when it was opened"
                )
            done += count

    def _reopen(self, where: str | None) -> _Descriptor:
        if self._is_closed:
            raise AccessDenied(self.path, "it was closed", where=where)
        descriptor = _Descriptor(self.path)
        status = os.fstat(descriptor.number)
        if (status.st_dev, status.st_ino) != self._identity:
            raise DamagedCheckpoint(self.path, "it was replaced while it was read", where=where)
        self._remember(descriptor)
        return descriptor

    def _remember(self, descriptor: _Descriptor) -> None:
        _kept[id(self)] = descriptor
        for oldest in list(_kept)[: max(0, len(_kept) - MAX_OPEN)]:
            _kept.pop(oldest, None)

    if hasattr(os, "preadv"):

        def _read_some(self, descriptor: int, offset: int, buffer: memoryview) -> int:
            return os.preadv(descriptor, [buffer], offset)

    else:

        def _read_some(self, descriptor: int, offset: int, buffer: memoryview) -> int:
            with self._lock:
                os.lseek(descriptor, offset, os.SEEK_SET)
                data = os.read(descriptor, len(buffer))
            buffer[: len(data)] = data
            return len(data)


class Part(Source):
    """Range of an open source, read like a file of its own; closing it leaves the source open."""

    __slots__ = ("_whole", "base")

    def __init__(self, whole: Source, base: int, nbytes: int, where: str | None = None) -> None:
        """Use ``nbytes`` bytes from the offset ``base`` on."""
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

    @property
    def reads_are_free(self) -> bool:
        return self._whole.reads_are_free

    @property
    def begin(self) -> int:
        return self._whole.begin + self.base

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        self._whole.prefetch((self.base + begin, self.base + min(end, self.size)) for begin, end in ranges)

    def copy_to(self, descriptor: int, offset: int, to: int, nbytes: int) -> None:
        self.check(offset, nbytes)
        self._whole.copy_to(descriptor, self.base + offset, to, nbytes)


class NotRegular(OSError):
    """The path is a pipe, a device, a socket or a directory."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.EINVAL, "not a regular file", path)


def regular_descriptor(path: str, *, follows: bool = True, dir_fd: int | None = None) -> int:
    """Open a regular file for reading; return its descriptor.

    ``follows``: whether the path may be a symlink. ``dir_fd``: open directory that it is relative to.
    """
    # The type is checked on the open descriptor: between a check of the path and the
    # opening, it could be replaced.
    flags = _READ if follows else _READ | _NO_FOLLOW
    descriptor = held.open_file(path, flags) if dir_fd is None else os.open(path, flags, dir_fd=dir_fd)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise NotRegular(path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
