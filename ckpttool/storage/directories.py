"""Open directories, and files that appear in them whole or not at all.

Another user of a shared directory can replace a subdirectory with a symlink between any two calls. So a
directory in which something is changed is opened once, right after it was made, without following a link, and
everything else uses its descriptor. If the system has no such calls (Windows), paths are used.

A small file is written under a temporary name, synced, and renamed. It is locked until then. After a kill it
has no lock any more, and the next write of the same file removes it, as does the recovery of interrupted
outputs (``transaction.staged_output``).
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import TypeVar

from ckpttool.storage import held as held_directories
from ckpttool.storage.held import DIRECTORY, IS_SUPPORTED, PathReplaced

try:
    import fcntl
except ImportError:  # no such locks on Windows
    fcntl = None  # type: ignore[assignment]  # callers check HAS_LOCKS before

HAS_LOCKS = fcntl is not None

NO_FOLLOW = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL
"""Flags that create a file, and fail if it exists; ``O_EXCL`` refuses a symlink, too."""

_NOT_THE_DIRECTORY = {errno.ELOOP, errno.ENOTDIR, errno.ENOENT}
_MADE = "it was created"
_PROBE = ".ckpttool-probe"
_BUSY = {errno.EBUSY, errno.ENOTEMPTY, errno.EEXIST}
RETRIES = 5
RETRY_SECONDS = 0.2
"""On NFS, a file that was open when it was unlinked keeps its directory busy for a moment."""
_T = TypeVar("_T")
_UNLINKABLE = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL}
"""Error numbers of ``link`` on a file system without hard links, or if a file can't have more of them."""
_CLOSED = -1
"""Invalid descriptor: every call with it fails."""


class OpenDirectory:
    """Open directory; a context manager.

    Its methods take names of entries, and none of them follows a symlink.

    Attributes:
        path: Path that it was opened by, for messages.
        descriptor: Descriptor for the ``dir_fd`` of calls; None if the system doesn't support that.
    """

    __slots__ = ("descriptor", "path")

    def __init__(self, path: str, descriptor: int | None = None) -> None:
        """Open a directory, unless ``descriptor`` is given; links below held directories aren't followed."""
        self.path = path
        self.descriptor = descriptor
        if descriptor is None and IS_SUPPORTED:
            self.descriptor = held_directories.open_directory(path)

    def __enter__(self) -> OpenDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the directory; may be called twice."""
        descriptor, self.descriptor = self.descriptor, _CLOSED
        if descriptor is not None and descriptor != _CLOSED:
            os.close(descriptor)

    @property
    def fd(self) -> int:
        """The descriptor, on systems with ``dir_fd``."""
        assert self.descriptor is not None  # as ``IS_SUPPORTED`` says
        return self.descriptor

    def at(self, name: str) -> str:
        """Return the path of an entry for a call with ``dir_fd=self.descriptor``."""
        return self.join(name) if self.descriptor is None else name

    def join(self, name: str) -> str:
        """Return the path of an entry, for messages."""
        return os.path.join(self.path, name)

    def names(self) -> list[str]:
        """Return the names of the entries."""
        return os.listdir(self.path or os.curdir if self.descriptor is None else self.descriptor)

    def own_status(self) -> os.stat_result:
        """Return the status of the directory itself."""
        return os.stat(self.path or os.curdir) if self.descriptor is None else os.fstat(self.descriptor)

    def status(self, name: str) -> os.stat_result | None:
        """Return the status of an entry; None if it is missing. Any other failure raises OSError."""
        try:
            return os.lstat(self.at(name), dir_fd=self.descriptor)
        except FileNotFoundError:
            return None

    def has(self, name: str) -> bool:
        """Return whether an entry exists."""
        return self.status(name) is not None

    def holds_directory(self, name: str) -> bool:
        """Return whether an entry is a directory, not a symlink to one."""
        status = self.status(name)
        return status is not None and stat.S_ISDIR(status.st_mode)

    def open(self, name: str) -> OpenDirectory:
        """Open a subdirectory."""
        if self.descriptor is None:
            return OpenDirectory(self.join(name))
        flags = DIRECTORY | NO_FOLLOW
        return OpenDirectory(self.join(name), os.open(name, flags, dir_fd=self.descriptor))

    def make(self, name: str, mode: int = 0o777) -> OpenDirectory:
        """Create a subdirectory and return it, open."""
        # Between ``mkdir`` and ``open``, another user may replace the directory. So the opened one must be
        # empty and ours; otherwise, nothing is written in it.
        os.mkdir(self.at(name), mode, dir_fd=self.descriptor)
        try:
            made = self.open(name)
        except OSError as error:
            self._withdraw(name)
            if error.errno in _NOT_THE_DIRECTORY:
                raise PathReplaced(self.join(name), since=_MADE) from error
            raise
        except BaseException:  # Ctrl-C included
            self._withdraw(name)
            raise
        try:
            if not _is_new(made):
                raise PathReplaced(self.join(name), since=_MADE)
            if self.descriptor is not None and made.descriptor is not None:
                held_directories.remember(self.descriptor, name, made.descriptor)
        except BaseException:
            made.close()
            self._withdraw(name)
            raise
        return made

    def _withdraw(self, name: str) -> None:
        with suppress(OSError):  # anything but an empty directory isn't the one that was made
            os.rmdir(self.at(name), dir_fd=self.descriptor)

    def make_or_open(self, path: str) -> OpenDirectory:
        """Open a directory at a path below; missing directories are created."""
        here = self.open(os.curdir)
        for name in filter(None, path.split(os.sep)):
            with here as above:
                here = above.open(name) if above.has(name) else above.make(name)
        return here

    def create(self, name: str, mode: int = 0o666) -> int:
        """Create a file; return its descriptor."""
        return os.open(self.at(name), CREATE, mode, dir_fd=self.descriptor)

    def rename(self, name: str, there: OpenDirectory) -> None:
        """Move an entry to another directory, in which its name is free."""
        rename(self.at(name), self.descriptor, there.at(name), there.descriptor)

    def replace(self, name: str, there: OpenDirectory, other: str) -> None:
        """Move a file to another directory and name, replacing the file that has it."""
        here = self.descriptor
        os.replace(self.at(name), there.at(other), src_dir_fd=here, dst_dir_fd=there.descriptor)

    def unlink(self, name: str) -> None:
        """Unlink an entry that isn't a directory."""
        os.unlink(self.at(name), dir_fd=self.descriptor)

    def remove(self, name: str) -> None:
        """Remove an entry, a directory with everything in it."""
        if not self.holds_directory(name):
            self.unlink(name)
        elif self.descriptor is None:
            shutil.rmtree(self.join(name))
        else:
            self._remove_tree(name)

    def _remove_tree(self, name: str) -> None:
        """Remove a directory and everything below, the innermost first."""
        # Each level is opened below the one before, without following links. There is no recursion, so only
        # the number of open files limits the depth.
        stack = [self.open(name)]
        pending = [iter(stack[0].names())]
        try:
            while stack:
                entry = next(pending[-1], None)
                if entry is None:
                    pending.pop()
                    done = stack.pop()
                    done.close()
                    (stack[-1] if stack else self)._rmdir(os.path.basename(done.path))
                elif stack[-1].holds_directory(entry):
                    stack.append(stack[-1].open(entry))
                    pending.append(iter(stack[-1].names()))
                else:
                    stack[-1].unlink(entry)
        finally:
            for directory in stack:
                directory.close()

    def _rmdir(self, name: str) -> None:
        remove_directory(self.at(name), self.descriptor)

    def remove_held(self, held: OpenDirectory, name: str) -> None:
        """Remove an empty subdirectory that is open; raise PathReplaced if its name is another entry's."""
        if not self.leads_to(name, held):
            raise PathReplaced(held.path, since=_MADE)
        self._rmdir(name)

    def leads_to(self, name: str, held: OpenDirectory) -> bool:
        """Return whether an entry is a given open directory."""
        status = self.status(name)
        return status is not None and os.path.samestat(status, held.own_status())

    def is_at_path(self) -> bool:
        """Return whether the path still leads to this directory."""
        try:
            return os.path.samestat(os.stat(self.path or os.curdir), self.own_status())
        except FileNotFoundError:
            return False

    def sync(self) -> None:
        """Make changes of entries durable, if the file system can."""
        if self.descriptor is not None:
            sync_descriptor(self.descriptor)

    def sync_tree(self) -> None:
        """Make changes of entries durable, here and in all directories below."""
        if self.descriptor is not None:
            for _, _, _, descriptor in os.fwalk(os.curdir, dir_fd=self.descriptor):
                sync_descriptor(descriptor)


def sync_descriptor(directory: int) -> None:
    """Make changes of entries in an open directory durable, if the file system can."""
    try:
        os.fsync(directory)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # not supported there
            raise


def _is_new(made: OpenDirectory) -> bool:
    """Return whether a directory is this user's and empty, except for dot files of the file system."""
    if made.descriptor is None:
        return True
    if not all(name.startswith(".") for name in made.names()):
        return False
    owner = os.fstat(made.descriptor).st_uid
    if owner == os.geteuid():
        return True
    # An NFS server may map root to another user, and a mount may give all files to one user. So the owner of
    # a new file is compared.
    descriptor = made.create(_PROBE, 0o600)
    try:
        return owner == os.fstat(descriptor).st_uid
    finally:
        os.close(descriptor)
        made.unlink(_PROBE)


def link_or_rename(
    name: str,
    here: int | None,
    other: str,
    there: int | None,
    is_taken: Callable[[], bool],
    *,
    is_strict: bool = False,
) -> bool:
    """Move an entry to another directory or name without replacing an existing entry.

    A file gets a second name, and the caller unlinks the first one. A directory is renamed, and so is a file
    that can't have two names.

    Args:
        name: Name of the entry, or its path if ``here`` is None.
        here: Descriptor of its directory.
        other: New name, or path.
        there: Descriptor of the new directory.
        is_taken: Returns whether another entry has the new name; called before a rename.
        is_strict: Whether to raise failures of ``link`` if the file system supports links. When something is
            moved back, a rename is better than to leave it.

    Returns:
        Whether it has both names now.
    """
    # ``rename`` would replace an entry that appears between the check and the call; ``link`` never does. Only
    # for directories, and without hard links, this moment remains.
    if not stat.S_ISDIR(os.lstat(name, dir_fd=here).st_mode):
        try:
            os.link(name, other, src_dir_fd=here, dst_dir_fd=there, follow_symlinks=False)
            if there is not None:
                held_directories.forget(there, other)
            return True
        except FileExistsError:
            raise
        except OSError as error:
            if error.errno not in _UNLINKABLE and is_strict:
                raise
    if is_taken():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), other)
    retry_while_busy(lambda: rename(name, here, other, there))
    return False


def rename(name: str, here: int | None, other: str, there: int | None) -> None:
    """Rename an entry of an open directory, replacing an entry of the other name if possible."""
    os.rename(name, other, src_dir_fd=here, dst_dir_fd=there)
    for directory, gone in ((here, name), (there, other)):
        if directory is not None:
            held_directories.forget(directory, gone)


def remove_directory(name: str, directory: int | None) -> None:
    """Remove an empty subdirectory of an open directory."""
    os.rmdir(name, dir_fd=directory)
    if directory is not None:
        held_directories.forget(directory, name)


def retry_while_busy(step: Callable[[], _T]) -> _T:
    """Call a function, and repeat it for a while if the file system reports that something is busy."""
    # ``_BUSY`` has ENOTEMPTY and EEXIST: either is the error of ``rmdir`` while NFS keeps
    # the name of such a file.
    for _ in range(RETRIES - 1):
        try:
            return step()
        except OSError as error:
            if error.errno not in _BUSY:
                raise
        time.sleep(RETRY_SECONDS)
    return step()


def try_lock(descriptor: int) -> bool:
    """Lock an open file until it is closed; return False if another process has locked it.

    Raises:
        OSError: The file system has no locks. On a system without locks, True is returned.
    """
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


OWN_PREFIX = ".ckpttool-"
"""Prefix of temporary names, which walks skip."""

_SCRATCH = re.compile(re.escape(OWN_PREFIX) + r"[0-9a-f]{12}\.tmp")
_TRIES = 3
"""Attempts to write a file if others remove its temporary file before it is locked."""


def write_atomically(path: str | os.PathLike[str], data: bytes, mode: int = 0o666) -> None:
    """Replace a file's content atomically: readers, and a crash, see the old content or the new one.

    Mode and owner of an existing file are kept; ``mode`` is for a new one. A symlink is replaced.
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
        except BaseException as error:  # Ctrl-C included
            if isinstance(error, FileNotFoundError) and tries_left:
                continue  # another process removed it before it was locked, as a leftover
            with suppress(OSError):  # the first failure is reported
                directory.unlink(temporary)
            raise
    directory.sync()


def _create_scratch(directory: OpenDirectory, name: str, mode: int) -> tuple[str, int]:
    """Return the name and the descriptor of a new locked file that will be renamed to ``name``."""
    import hashlib

    # The name is the same for each write of the same file, so that a leftover of a kill is found without
    # listing the directory.
    temporary = f"{OWN_PREFIX}{hashlib.blake2b(os.fsencode(name), digest_size=6).hexdigest()}.tmp"
    remove_leftover(directory, temporary)
    try:
        descriptor = directory.create(temporary, mode)
    except FileExistsError:  # another process is writing the same file, or the leftover can't be removed
        temporary = f"{OWN_PREFIX}{os.urandom(6).hex()}.tmp"
        descriptor = directory.create(temporary, mode)
    with suppress(OSError):  # without locks, no process removes leftovers
        try_lock(descriptor)
    return temporary, descriptor


def is_scratch_name(name: str) -> bool:
    """Return whether a name is that of a scratch file."""
    return _SCRATCH.fullmatch(name) is not None


def remove_leftover(directory: OpenDirectory, name: str) -> None:
    """Remove the scratch file of a killed write, unless it is locked or another user's."""
    with suppress(OSError):  # it is missing, or the file system has no locks
        status = directory.status(name) if HAS_LOCKS else None
        if status is None or not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            return
        # The name may be planted: as a pipe, at which opening would wait without O_NONBLOCK, or as a second
        # name of a file of this user.
        flags = NO_FOLLOW | os.O_NONBLOCK
        try:
            descriptor = os.open(directory.at(name), flags | os.O_RDWR, dir_fd=directory.descriptor)
        except PermissionError:  # it is read-only
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
    """Make changes of entries in a directory durable, if the system can."""
    with OpenDirectory(os.fspath(path)) as directory:
        directory.sync()


def adopt_mode(descriptor: int, target: str, dir_fd: int | None = None) -> None:
    """Give an open file the mode and owner of the one that it replaces, without setuid and setgid bits."""
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
