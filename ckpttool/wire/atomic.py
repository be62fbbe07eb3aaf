"""Files that appear whole or not at all: written beside, made durable, renamed."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

OWN_PREFIX = ".ckpttool-"
"""Temporary names begin with it; no walk looks at them."""

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)


def write_atomically(path: str | os.PathLike[str], data: bytes, within: str | None = None) -> None:
    """Replace a file's content so that a reader, or a crash, sees all of the old one or all of the new.

    Mode and owner of an existing file stay. A symlink is replaced, not followed.

    Args:
        path: The file.
        data: Its new content.
        within: The directory in which the content waits, on the same file system; None for the file's own.

    Raises:
        OSError: It can't be written; what was there is untouched.
    """
    target = os.fspath(path)
    directory = os.path.dirname(target) or os.curdir
    temporary = os.path.join(within or directory, f"{OWN_PREFIX}{os.urandom(6).hex()}.tmp")
    descriptor = os.open(temporary, _CREATE, 0o666)
    try:
        try:
            _fill(descriptor, data)
            adopt(descriptor, target)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, target)
    except BaseException:
        _discard(temporary)
        raise
    sync_directory(directory)


def sync_directory(directory: str | os.PathLike[str]) -> None:
    """Make what was renamed in a directory durable, where the system can."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync_opened(descriptor)
    finally:
        os.close(descriptor)


def sync_opened(directory: int) -> None:
    """Make what was renamed in an open directory durable, where the file system can."""
    try:
        os.fsync(directory)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # no such thing there
            raise


def _fill(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def adopt(descriptor: int, target: str, directory: int | None = None) -> None:
    """Give an open file the mode and the owner of the one that it replaces, but no right to run as the owner.

    Args:
        descriptor: The file.
        target: The path of the other.
        directory: An open directory that the path starts at.
    """
    try:
        old = os.lstat(target) if directory is None else os.lstat(target, dir_fd=directory)
    except FileNotFoundError:
        return
    if not stat.S_ISREG(old.st_mode) or not hasattr(os, "fchmod"):
        return
    new = os.fstat(descriptor)
    if (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid):
        with suppress(PermissionError):  # only root may give files away
            os.fchown(descriptor, old.st_uid, old.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(old.st_mode) & ~(stat.S_ISUID | stat.S_ISGID))


def _discard(temporary: str) -> None:
    with suppress(OSError):  # the first failure is the one to tell
        os.unlink(temporary)
