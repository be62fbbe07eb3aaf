"""Files that appear whole or not at all: written beside, made durable, renamed.

What is being written is locked. A kill leaves it without its lock, and the next write of the same file takes
it away; so does whoever clears a directory of areas (``transaction.staged_output``).
"""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress

from ckpttool.storage.directories import FOLLOWS_NOTHING, HAS_LOCKS, OpenDirectory, try_lock

OWN_PREFIX = ".ckpttool-"
"""Temporary names begin with it; no walk looks at them."""

_SCRATCH = re.compile(re.escape(OWN_PREFIX) + r"[0-9a-f]{12}\.tmp")
_TRIES = 3
"""How often a file is written that others take away before it is locked."""


def write_atomically(path: str | os.PathLike[str], data: bytes, mode: int = 0o666) -> None:
    """Replace a file's content so that a reader, or a crash, sees all of the old one or all of the new.

    Mode and owner of an existing file stay; ``mode`` is for a new one. A symlink is replaced, not followed.
    """
    parent, name = os.path.split(os.fspath(path))
    with OpenDirectory(parent) as directory:
        write_in(directory, name, data, mode=mode)


def write_in(directory: OpenDirectory, name: str, data: bytes, *, mode: int = 0o666) -> None:
    """Replace the content of a file in an open directory; see ``write_atomically``."""
    for tries_left in reversed(range(_TRIES)):
        temporary, descriptor = _create_scratch(directory, name, mode)
        try:
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(descriptor, view) :]
                adopt_mode(descriptor, directory.at(name), directory.descriptor)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            directory.replace(temporary, directory, name)
            break
        except BaseException as error:  # Ctrl-C, too, leaves no scratch file behind
            if isinstance(error, FileNotFoundError) and tries_left:
                continue  # somebody took it away while it had no lock
            with suppress(OSError):  # the first failure is the one to tell
                directory.unlink(temporary)
            raise
    directory.sync()


def _create_scratch(directory: OpenDirectory, name: str, mode: int) -> tuple[str, int]:
    """Return the name and the descriptor of a new file, which is locked, for what is to have a name."""
    import hashlib

    # The same for each write of the same file, so that what a kill left is found without a listing.
    temporary = f"{OWN_PREFIX}{hashlib.blake2b(os.fsencode(name), digest_size=6).hexdigest()}.tmp"
    remove_leftover(directory, temporary)
    try:
        descriptor = directory.create(temporary, mode)
    except FileExistsError:  # somebody is writing the same file, or it can't be told
        temporary = f"{OWN_PREFIX}{os.urandom(6).hex()}.tmp"
        descriptor = directory.create(temporary, mode)
    with suppress(OSError):  # a file system without locks, on which nobody takes anything away
        try_lock(descriptor)
    return temporary, descriptor


def is_scratch_name(name: str) -> bool:
    """Tell whether a file that is being written would be called so."""
    return _SCRATCH.fullmatch(name) is not None


def remove_leftover(directory: OpenDirectory, name: str) -> None:
    """Remove what a kill left of a file that was being written; what is locked or another user's stays."""
    with suppress(OSError):  # it has gone, or nobody can tell whether it is locked
        status = directory.status(name) if HAS_LOCKS else None
        if status is None or not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            return
        flags = FOLLOWS_NOTHING | os.O_NONBLOCK
        try:
            descriptor = os.open(directory.at(name), flags | os.O_RDWR, dir_fd=directory.descriptor)
        except PermissionError:  # it is to be read alone
            descriptor = os.open(directory.at(name), flags | os.O_RDONLY, dir_fd=directory.descriptor)
        try:
            if (
                os.path.samestat(status, os.fstat(descriptor))
                and status.st_nlink == 1
                and try_lock(descriptor)
            ):
                directory.unlink(name)
        finally:
            os.close(descriptor)


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
