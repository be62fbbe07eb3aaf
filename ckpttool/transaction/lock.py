"""Locks that let only one command at a time change a directory.

A lock is ``flock`` on a file in the directory, or next to it (``state_dir``). The system releases it when the
process ends, so a kill leaves a file that any command can lock again.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

from ckpttool.core.errors import AccessDenied, CheckpointError, from_os_error
from ckpttool.storage import fs
from ckpttool.storage.directories import NO_FOLLOW, OpenDirectory, try_lock
from ckpttool.transaction.state_dir import state_dir_beside, state_dir_of, user_name

if TYPE_CHECKING:
    from typing_extensions import Self

LOCK = ".ckpttool.lock"
WATCH_LOCK = ".ckpttool-watch.lock"
"""Lock of ``watch``; other commands may change the directory meanwhile, under the other lock."""
BUSY = "locked"
"""Code of the error if another command holds a lock."""
ANOTHER_AT_WORK = "another ckpttool is changing this directory"

_FLAGS = NO_FOLLOW | getattr(os, "O_NONBLOCK", 0)
_MODE = 0o644
"""Others can lock a file that they can read, so a stale lock file of another user is no obstacle."""

DISK_FULL = {errno.ENOSPC, errno.EDQUOT}
"""Error numbers of a full disk or quota."""

_HOLDER = re.compile(rb"pid [0-9]{1,20} on [!-~]{1,255} since [0-9T:+-]{1,40}\n")
_MAX_HOLDER = 400

_UNSUPPORTED = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL}
"""Error numbers of ``flock`` on a file system without locks."""


@contextmanager
def lock_directory(directory: str, lock: str = LOCK, holder: str | None = None) -> Iterator[None]:
    """Hold the lock of a directory; its file is removed afterwards.

    ``holder``, such as ``pid 7 on node3 since 2026-01-31T12:00:00``, is written into the file, for the error
    that other commands report. File systems without locks are used unlocked: every step compares the files
    anyway. So are stores, where each change is conditional.
    """
    where = fs.place_of(directory)
    if not where.can_rename:
        if not where.is_changeable(directory):
            problem = "ckpttool can't change files in this kind of store"
            raise AccessDenied(directory, problem, expected="s3://, gs:// or az://")
        yield
        return
    state_path, suffix = state_dir_of(directory)
    name = lock + suffix
    try:
        place = OpenDirectory(state_path)
    except OSError as error:
        raise from_os_error(error, os.path.join(state_path, name)) from error
    with place:
        descriptor = _acquire(place, name, may_be_directory=holder is None)
        try:
            if holder is not None:
                _write_holder(descriptor, holder)
            yield
        finally:
            # The file is unlinked while it is locked. Another process may have opened it before: once that
            # gets the lock, ``_acquire`` finds another file under the name, or none, and tries again.
            try:
                with suppress(OSError):  # an unlocked file is left then, which the next command uses
                    if _is_same(place, name, descriptor):
                        place.unlink(name)
            finally:
                os.close(descriptor)


class HeldLocks:
    """Locks of directories, each taken once under any of its paths, and held until the context ends."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._held: set[object] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def hold(self, directory: str) -> bool:
        """Lock a directory; return False if it was held already."""
        if self.is_held(directory):
            return False
        self._stack.enter_context(lock_directory(directory))
        self._held.add(_identity_of(directory))
        return True

    def is_held(self, directory: str) -> bool:
        """Return whether a directory is locked here, under any of its paths."""
        return _identity_of(directory) in self._held


def _identity_of(directory: str) -> object:
    """Return device and inode of a directory on a disk; in a store, its URL."""
    # A path isn't enough: links, bind mounts and spellings give one directory several. To lock it a second
    # time would fail, as if another command held the lock.
    if fs.place_of(directory).can_rename:
        with suppress(OSError):  # locking it reports that
            status = fs.stat(directory)
            return status.st_dev, status.st_ino
    return directory


def clear_stale(directories: Iterable[str]) -> None:
    """Remove stale lock files in directories; those that are held or can't be removed are skipped."""
    for directory in directories:
        if not fs.place_of(directory).can_rename:  # stores aren't locked
            continue
        state_path, suffix = state_dir_beside(directory)
        if fs.lexists(os.path.join(directory, LOCK)) or fs.lexists(os.path.join(state_path, LOCK + suffix)):
            with suppress(CheckpointError), lock_directory(directory):
                pass


def _write_holder(descriptor: int, holder: str) -> None:
    """Write the holder into a lock file, unless another file was planted in its place."""
    # Another user of the directory could make the lock a hard link of one of this user's files, which would
    # be overwritten. So the file must have one name, and be empty or have the text of an earlier holder.
    status = os.fstat(descriptor)
    is_ours = not status.st_size or _read_holder(descriptor) is not None
    if stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and is_ours:
        with suppress(OSError):  # a full disk, or another user's: it is locked all the same
            os.ftruncate(descriptor, 0)
            os.lseek(descriptor, 0, os.SEEK_SET)
            os.write(descriptor, f"{holder}\n".encode("ascii", "replace"))


def _read_holder(descriptor: int) -> str | None:
    text = os.read(descriptor, _MAX_HOLDER)
    return text.decode().rstrip() if _HOLDER.fullmatch(text) else None


def _acquire(place: OpenDirectory, name: str, *, may_be_directory: bool = True) -> int:
    path = place.join(name)
    while True:
        try:
            descriptor = _open_lock(place, name, may_be_directory=may_be_directory)
        except OSError as error:
            status = place.status(name) if isinstance(error, PermissionError) else None
            if status is not None:
                raise _foreign_lock(path, status) from error
            raise from_os_error(error, path) from error
        try:
            _lock(path, descriptor)
            # The holder before may have unlinked the file after we opened it: then the lock protects nothing,
            # and the next file of this name is tried.
            if stat.S_ISDIR(os.fstat(descriptor).st_mode) or _is_same(place, name, descriptor):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _open_lock(place: OpenDirectory, name: str, *, may_be_directory: bool) -> int:
    """Open a lock file, creating it if needed; on a full disk, open the directory itself to be locked.

    Another user's file is opened read-only.
    """
    path, directory = place.at(name), place.descriptor
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _FLAGS, _MODE, dir_fd=directory)
    except PermissionError:
        with suppress(FileNotFoundError):
            return os.open(path, os.O_RDONLY | _FLAGS, dir_fd=directory)
        raise
    except OSError as error:
        if error.errno in DISK_FULL and may_be_directory and not place.has(name):
            flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)
            return os.open(place.at(os.curdir), flags, dir_fd=directory)
        raise
    status = os.fstat(descriptor)
    if status.st_nlink == 1 and not status.st_size:  # anything else isn't an empty lock file of ours
        with suppress(OSError):  # another user's, or a file system without modes
            os.fchmod(descriptor, _MODE)
    return descriptor


def _lock(path: str, descriptor: int) -> None:
    try:
        is_ours = try_lock(descriptor)
    except OSError as error:
        if error.errno == errno.EBADF:  # NFS locks only what can be written
            raise _foreign_lock(path, os.fstat(descriptor)) from error
        if error.errno not in _UNSUPPORTED:
            raise from_os_error(error, path) from error
        return
    if not is_ours:
        busy = ANOTHER_AT_WORK
        if os.path.basename(path).startswith(WATCH_LOCK):
            busy = f"another ckpttool is watching it: {_read_holder(descriptor) or 'just started'}"
        raise AccessDenied(os.path.dirname(path), busy, code=BUSY)


def _is_same(place: OpenDirectory, name: str, descriptor: int) -> bool:
    status = place.status(name)
    return status is not None and os.path.samestat(status, os.fstat(descriptor))


def _foreign_lock(path: str, status: os.stat_result) -> AccessDenied:
    user = user_name(status.st_uid)
    problem = f"the lock {os.path.basename(path)} belongs to another user, {user}, and can't be opened"
    return AccessDenied(path, problem, expected="remove it if no ckpttool of that user is running here")
