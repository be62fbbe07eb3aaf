"""Files that appear whole or not at all: written beside, made durable, renamed."""

from __future__ import annotations

import os
import stat
from contextlib import suppress

from ckpttool.io.directories import OpenDirectory

OWN_PREFIX = ".ckpttool-"
"""Temporary names begin with it; no walk looks at them."""


def write_atomically(path: str | os.PathLike[str], data: bytes, mode: int = 0o666) -> None:
    """Replace a file's content so that a reader, or a crash, sees all of the old one or all of the new.

    Mode and owner of an existing file stay; ``mode`` is for a new one. A symlink is replaced, not followed.
    """
    parent, name = os.path.split(os.fspath(path))
    with OpenDirectory(parent) as directory:
        write_in(directory, name, data, mode=mode)


def write_in(
    directory: OpenDirectory,
    name: str,
    data: bytes,
    scratch: OpenDirectory | None = None,
    *,
    mode: int = 0o666,
) -> None:
    """Replace the content of a file in an open directory; see ``write_atomically``.

    ``scratch`` is the directory in which the content waits, on the same file system; None for the file's own.
    """
    scratch = directory if scratch is None else scratch
    temporary = f"{OWN_PREFIX}{os.urandom(6).hex()}.tmp"
    descriptor = scratch.create(temporary, mode)
    try:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            adopt_mode(descriptor, directory.at(name), directory.descriptor)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        scratch.replace(temporary, directory, name)
    except BaseException:  # Ctrl-C, too, leaves no scratch file behind
        with suppress(OSError):  # the first failure is the one to tell
            scratch.unlink(temporary)
        raise
    directory.sync()


def sync_directory(path: str | os.PathLike[str]) -> None:
    """Make what was renamed in a directory durable, where the system can."""
    with OpenDirectory(os.fspath(path)) as directory:
        directory.sync()


def adopt_mode(descriptor: int, target: str, dir_fd: int | None = None) -> None:
    """Give an open file mode and owner of the one that it replaces, but no right to run as the owner."""
    try:
        old = os.lstat(target, dir_fd=dir_fd)
    except FileNotFoundError:
        return
    if not stat.S_ISREG(old.st_mode) or not hasattr(os, "fchmod"):
        return
    new = os.fstat(descriptor)
    if (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid):
        with suppress(PermissionError):  # only root may give files away
            os.fchown(descriptor, old.st_uid, old.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(old.st_mode) & ~(stat.S_ISUID | stat.S_ISGID))
