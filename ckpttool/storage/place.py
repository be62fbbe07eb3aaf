"""Interface of places (disks and stores), and the disk.

All differences between a disk and a store are methods or attributes of the place, so that commands don't
depend on where their files are. ``fs.place_of`` returns the place of a path.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext, suppress
from stat import S_ISDIR
from typing import BinaryIO, ClassVar, cast

from ckpttool.core.errors import from_os_error
from ckpttool.storage import held
from ckpttool.storage.directories import OpenDirectory, write_atomically
from ckpttool.storage.source import Source, regular_descriptor


def is_change(error: OSError) -> bool:
    """Return whether an error means that another program has changed the file meanwhile."""
    return error.errno == errno.ESTALE or isinstance(error, FileExistsError | FileNotFoundError)


class Place(ABC):
    """Files and directories of one kind of place. All methods raise ``OSError`` unless they say otherwise.

    Attributes:
        reads_are_free: Whether looking at more files takes no requests, which cost time and money.
        errors_concern_files: Whether an error while reading is about the file, rather than about a network.
        keeps_checksums: Whether the checksums of a file can be asked for without reading it.
        opens_by_path: Whether other software, such as libraries, can open files by their paths.
        can_rename: Whether files can be renamed and directories locked, as staging needs it.
        has_owners: Whether files have owners; journals and records of other users are ignored.
        has_links: Whether it can have symlinks.
        block_bytes: Size of the blocks in which a whole file is copied.
    """

    reads_are_free: ClassVar[bool]
    errors_concern_files: ClassVar[bool]
    keeps_checksums: ClassVar[bool]
    opens_by_path: ClassVar[bool]
    can_rename: ClassVar[bool]
    has_owners: ClassVar[bool]
    has_links: ClassVar[bool]
    block_bytes: ClassVar[int]

    @abstractmethod
    def require_askable(self, path: str) -> None:
        """Raise ``UsageError`` if a user's path can't be requested, or has secrets in it."""

    @abstractmethod
    def root(self, path: str) -> str:
        """Return the URL of the store that a path is in; empty for the disk."""

    @abstractmethod
    def status(self, path: str, *, follows: bool = True) -> os.stat_result:
        """Return the status of a path; of an object, inode and device are hashes of its version and store."""

    @abstractmethod
    def mode(self, path: str, *, follows: bool = True) -> int | None:
        """Return the mode of a path; None if it is missing, on a disk also if it can't be looked at."""

    @abstractmethod
    def is_there(self, path: str, *, follows: bool = True) -> bool:
        """Return whether a path exists.

        Raises:
            CheckpointError: The place doesn't answer.
        """

    @abstractmethod
    def entries(self, path: str) -> list[os.DirEntry[str]]:
        """Return the entries of a directory, in no order."""

    @abstractmethod
    def names(self, path: str) -> list[str]:
        """Return the names in a directory, in no order."""

    @abstractmethod
    def dirname(self, path: str) -> str:
        """Return the parent directory; that of a root is the root itself."""

    @abstractmethod
    def normpath(self, path: str) -> str:
        """Return a path without ``.``, ``..`` and doubled slashes."""

    @abstractmethod
    def abspath(self, path: str) -> str:
        """Return a path that doesn't depend on the working directory."""

    @abstractmethod
    def realpath(self, path: str) -> str:
        """Return a path without symlinks."""

    @abstractmethod
    def relpath(self, path: str) -> str:
        """Return a path as it is shown from the working directory."""

    @abstractmethod
    def open_source(self, path: str) -> Source:
        """Open a file for reading at any offset."""

    @abstractmethod
    def open_regular(self, path: str, buffering: int = -1) -> BinaryIO:
        """Open a file for reading as a stream; raise ``NotRegular`` if it isn't a regular file."""

    @abstractmethod
    def write(self, path: str, data: bytes, replaces: os.stat_result | None) -> None:
        """Write a small file atomically, replacing the one that was seen, or none.

        Raises:
            OSError: ESTALE or EEXIST if the path has another file now.
        """

    @abstractmethod
    def remove(self, path: str, seen: os.stat_result) -> None:
        """Remove a file, unless it has changed since it was seen (``OSError`` with ESTALE)."""

    @abstractmethod
    def make_directories(self, path: str) -> None:
        """Make a directory with its parents, unless they exist."""

    @abstractmethod
    def free_bytes(self, path: str) -> int | None:
        """Return the free space of a directory in bytes; None if space isn't limited."""

    @abstractmethod
    def clock(self, path: str) -> float:
        """Return the current time of the clock that sets modification times, in seconds since 1970."""

    @abstractmethod
    def is_changeable(self, path: str) -> bool:
        """Return whether files at a path can be removed, and written conditionally."""

    @abstractmethod
    def prefetch_listing(self, directory: str) -> None:
        """Cache a directory's entries, if one request returns all of them. Nothing is raised."""

    @abstractmethod
    def unfinished_uploads(self, directory: str) -> tuple[int, int | None] | None:
        """Return the number of unfinished uploads to a directory, and their bytes if known; None if 0."""

    @abstractmethod
    def refresh(self, path: str) -> None:
        """Discard cached answers."""

    @abstractmethod
    def ask_again(self, path: str) -> None:
        """Discard cached answers about a single path."""

    @abstractmethod
    def raising_failed_requests(self, directory: str) -> AbstractContextManager[None]:
        """Return a context that raises, at its end, the first failed request below a directory.

        A reader may have taken the failure for damage.
        """


def is_same_file(status: os.stat_result | None, other: os.stat_result | None) -> bool:
    """Return whether two statuses are of one file with the same contents; None means no file."""
    return _mark(status) == _mark(other)


def _mark(status: os.stat_result | None) -> tuple[int, ...] | None:
    return status and (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG}


def is_absence(error: OSError) -> bool:
    """Return whether an error means that a path doesn't exist, not that its existence is unknown."""
    return error.errno in _ABSENT


class Disk(Place):
    """File systems of this machine."""

    reads_are_free: ClassVar[bool] = True
    errors_concern_files: ClassVar[bool] = True
    keeps_checksums: ClassVar[bool] = False
    opens_by_path: ClassVar[bool] = True
    can_rename: ClassVar[bool] = True
    has_owners: ClassVar[bool] = True
    has_links: ClassVar[bool] = True
    block_bytes: ClassVar[int] = 1 << 23

    def require_askable(self, path: str) -> None:
        """Accept every path."""

    def root(self, path: str) -> str:
        return ""

    def status(self, path: str, *, follows: bool = True) -> os.stat_result:
        return held.status(path, follows=follows)

    def mode(self, path: str, *, follows: bool = True) -> int | None:
        """Return the mode of a path.

        Raises:
            PathReplaced: A directory on the way was replaced.
        """
        try:
            return held.status(path, follows=follows).st_mode
        except held.PathReplaced:  # an OSError that must not be taken for "missing"
            raise
        except (OSError, ValueError):
            return None

    def is_there(self, path: str, *, follows: bool = True) -> bool:
        try:
            held.status(path, follows=follows)
        except held.PathReplaced:
            raise
        except ValueError:  # a NUL in the path
            return False
        except OSError as error:
            if is_absence(error):
                return False
            raise from_os_error(error, path) from error
        return True

    def entries(self, path: str) -> list[os.DirEntry[str]]:
        known = held.entries(path)
        if known is not None:
            return cast("list[os.DirEntry[str]]", known)
        with os.scandir(path) as found:
            return list(found)

    def names(self, path: str) -> list[str]:
        return held.names(path)

    def dirname(self, path: str) -> str:
        return os.path.dirname(path)

    def normpath(self, path: str) -> str:
        return os.path.normpath(path)

    def abspath(self, path: str) -> str:
        return os.path.abspath(path)

    def realpath(self, path: str) -> str:
        return held.real_path(path)

    def relpath(self, path: str) -> str:
        return os.path.relpath(path)

    def open_source(self, path: str) -> Source:
        return Source(path)

    def open_regular(self, path: str, buffering: int = -1) -> BinaryIO:
        # ``open`` with a path would raise IsADirectoryError for a directory, and wait at a pipe.
        return open(regular_descriptor(path), "rb", buffering=buffering)

    def write(self, path: str, data: bytes, replaces: os.stat_result | None) -> None:
        # Unlike a store, a disk has no conditional write: a change after this check isn't noticed.
        self._require_unchanged(path, replaces)
        self.make_directories(os.path.dirname(path))
        write_atomically(path, data)

    def remove(self, path: str, seen: os.stat_result) -> None:
        self._require_unchanged(path, seen)
        above, name = os.path.split(path)
        with OpenDirectory(above) as directory:
            directory.unlink(name)

    def _require_unchanged(self, path: str, seen: os.stat_result | None) -> None:
        now = None
        with suppress(FileNotFoundError, NotADirectoryError):
            now = held.status(path)
        if not is_same_file(now, seen):
            raise OSError(errno.ESTALE, "it was changed meanwhile", path)

    def make_directories(self, path: str) -> None:
        above, name = os.path.split(path.rstrip(os.sep))
        if S_ISDIR(self.mode(path or os.curdir) or 0) or not name:
            return
        self.make_directories(above)
        with OpenDirectory(above) as directory:
            if not directory.has(name):
                directory.make(name).close()

    def free_bytes(self, path: str) -> int | None:
        return shutil.disk_usage(path).free

    def clock(self, path: str) -> float:
        return time.time()

    def is_changeable(self, path: str) -> bool:
        """Return True: permissions are checked when the directory is locked."""
        return True

    def prefetch_listing(self, directory: str) -> None:
        """Do nothing: the system is asked each time."""

    def unfinished_uploads(self, directory: str) -> tuple[int, int | None] | None:
        return None

    def refresh(self, path: str) -> None:
        """Do nothing: the system is asked each time."""

    def ask_again(self, path: str) -> None:
        """Do nothing: the system is asked each time."""

    def raising_failed_requests(self, directory: str) -> AbstractContextManager[None]:
        return nullcontext()
