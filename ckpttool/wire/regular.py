"""Regular files alone are opened to be read.

A named pipe keeps whoever opens it waiting for a writer, and may lie wherever a file is expected.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO

_READ = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
_FOLLOWS_NOTHING = getattr(os, "O_NOFOLLOW", 0)


class NotRegular(OSError):
    """It is a pipe, a device, a socket or a directory."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.EINVAL, "not a regular file", path)


def regular_descriptor(path: str, *, follows: bool = True, place: int | None = None) -> int:
    """Return a descriptor that reads a regular file; what it is was asked after it was opened.

    Args:
        path: The file.
        follows: Whether it may be a symlink.
        place: An open directory that the path starts at.
    """
    descriptor = os.open(path, _READ if follows else _READ | _FOLLOWS_NOTHING, dir_fd=place)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise NotRegular(path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_regular(path: str | os.PathLike[str], buffering: int = -1) -> BinaryIO:
    """Return a regular file, opened to be read as bytes; raises what ``regular_descriptor`` does."""
    # Python's own opening would say of a directory that it is one.
    return open(regular_descriptor(os.fspath(path)), "rb", buffering=buffering)
