"""Functions of ``os`` and ``os.path`` for paths on disks and URLs of stores.

``place_of`` returns the place of a path. A ``Snapshot`` caches answers, so that a plan is of one state.
"""

from __future__ import annotations

import os
import stat as stat_module
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import BinaryIO, TypeVar, cast

from ckpttool.core.errors import CheckpointError
from ckpttool.core.urls import is_url
from ckpttool.storage import held
from ckpttool.storage.directories import OpenDirectory
from ckpttool.storage.place import Disk, Place
from ckpttool.storage.place import is_absence as is_absence
from ckpttool.storage.place import is_change as is_change
from ckpttool.storage.place import is_same_file as is_same_file
from ckpttool.storage.source import Source

_DISK = Disk()


def place_of(path: str) -> Place:
    """Return the place of a path; the modules of stores are imported only for URLs."""
    if not is_url(path):
        return _DISK
    from ckpttool.storage.object_stores import PLACE

    return PLACE


def stat(path: str) -> os.stat_result:
    """Return the status of a path; of an object, inode and device are hashes of its version and store."""
    return place_of(path).status(path)


def lstat(path: str) -> os.stat_result:
    return place_of(path).status(path, follows=False)


def lexists(path: str) -> bool:
    """Return whether a path exists, even as a broken link; raise ``CheckpointError`` if that is unknown."""
    return place_of(path).is_there(path, follows=False)


def exists(path: str) -> bool:
    """Return whether a path exists, following links; raise ``CheckpointError`` if that is unknown."""
    return place_of(path).is_there(path)


def isfile(path: str) -> bool:
    return stat_module.S_ISREG(place_of(path).mode(path) or 0)


def isdir(path: str) -> bool:
    return stat_module.S_ISDIR(place_of(path).mode(path) or 0)


def islink(path: str) -> bool:
    place = place_of(path)
    return place.has_links and stat_module.S_ISLNK(place.mode(path, follows=False) or 0)


def readlink(path: str) -> str:
    """Return the target of a symlink."""
    return held.read_link(path)


def unlink(path: str) -> None:
    """Unlink a file on a disk."""
    above, name = os.path.split(path)
    with OpenDirectory(above) as directory:
        directory.unlink(name)


def set_modified(path: str, nanoseconds: int) -> None:
    """Set access and modification time of a file on a disk, in nanoseconds since 1970."""
    above, name = os.path.split(path)
    with OpenDirectory(above) as directory:
        os.utime(directory.at(name), ns=(nanoseconds, nanoseconds), dir_fd=directory.descriptor)


def makedirs(path: str) -> None:
    """Make a directory with its parents, unless they exist."""
    place_of(path).make_directories(path)


def getsize(path: str) -> int:
    return stat(path).st_size


def listdir(path: str) -> list[str]:
    return place_of(path).names(path)


def entries(path: str) -> list[os.DirEntry[str]]:
    """Return the entries of a directory, in no order."""
    return place_of(path).entries(path)


def dirname(path: str) -> str:
    """Return the parent directory; that of a store itself, and of ``/``, is the same."""
    return place_of(path).dirname(path)


def refresh(path: str) -> None:
    """Discard cached answers of a store; those of a disk are never cached."""
    place_of(path).refresh(path)


def raising_failed_requests(directory: str) -> AbstractContextManager[None]:
    """Return a context that raises, at its end, the first request below a directory that failed."""
    return place_of(directory).raising_failed_requests(directory)


def normpath(path: str) -> str:
    """Return a path without ``.``, ``..`` and doubled slashes."""
    return place_of(path).normpath(path)


def abspath(path: str) -> str:
    return place_of(path).abspath(path)


def isabs(path: str) -> bool:
    return bool(root_of(path)) or os.path.isabs(path)


def root_of(path: str) -> str:
    """Return the URL of the store that a path is in; empty for the disk."""
    return place_of(path).root(path)


def samefile(path: str, other: str) -> bool:
    if root_of(path) or root_of(other):
        return normpath(path) == normpath(other)
    return os.path.samestat(stat(path), stat(other))


def commonpath(paths: list[str]) -> str:
    """Return the common parent of paths; empty if they are in several places."""
    # ``os.path.commonpath`` would take ``s3:`` for a directory, so only the paths inside
    # of the store are compared.
    roots = {root_of(path) for path in paths}
    if len(roots) > 1:
        return ""
    (root,) = roots
    if not root:
        return os.path.commonpath(paths)
    return root + os.path.commonpath([path.removeprefix(root) or "/" for path in paths]).rstrip("/")


def realpath(path: str) -> str:
    return place_of(path).realpath(path)


def relpath(path: str) -> str:
    """Return a path as it is shown from the working directory."""
    return place_of(path).relpath(path)


def open_source(path: str | os.PathLike[str]) -> Source:
    """Open a file or an object for reading at any offset."""
    name = os.fspath(path)
    return place_of(name).open_source(name)


def open_regular(path: str | os.PathLike[str], buffering: int = -1) -> BinaryIO:
    """Open a regular file for reading as a stream; errors as in ``regular_descriptor``."""
    name = os.fspath(path)
    return place_of(name).open_regular(name, buffering)


def walk(
    top: str, on_error: Callable[[OSError], object] = lambda error: None
) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield each directory with the names of its subdirectories and of its other entries, top-down.

    As with ``os.walk``, links to directories are listed as directories and not followed, and directories that
    the caller removes from the list are not entered.
    """
    # ``os.walk`` recurses before Python 3.12, so deep directories would exceed the limit on recursion.
    pending = [top]
    while pending:
        directory = pending.pop()
        subdirectories: list[str] = []
        others: list[str] = []
        links: set[str] = set()
        try:
            for entry in entries(directory):
                try:
                    is_directory = entry.is_dir()
                except OSError:  # unknown: not a directory, as in os.walk
                    is_directory = False
                (subdirectories if is_directory else others).append(entry.name)
                if entry.is_symlink():
                    links.add(entry.name)
        except OSError as error:
            on_error(error)
            continue
        yield directory, subdirectories, others
        pending += [os.path.join(directory, name) for name in reversed(subdirectories) if name not in links]


T = TypeVar("T")

Names = Mapping[str, os.DirEntry[str]]
_KEPT_BYTES = 1 << 16
"""Larger contents, such as a trainer's history, aren't cached: a sweep has thousands of them."""


class Snapshot:
    """Cache of files and directories as they were when first looked at.

    Errors are cached, too, and raised again. Plans are made from snapshots; carrying out a plan looks at the
    files again.
    """

    def __init__(self) -> None:
        self._answers: dict[tuple[object, ...], object] = {}

    def _once(self, ask: Callable[[], T], *question: object) -> T:
        # Errors are answers, too: a file that appears or vanishes while a plan is made must not be there for
        # one rule and missing for the next.
        if question not in self._answers:
            try:
                self._answers[question] = ask()
            except (OSError, ValueError, CheckpointError) as error:
                self._answers[question] = error
        answer = self._answers[question]
        if isinstance(answer, Exception):  # without the traceback, which would grow each time
            raise answer.with_traceback(None)
        return cast(T, answer)

    def names(self, directory: str) -> Names:
        """Return the entries of a directory by name; raises ``OSError``."""
        return self._once(lambda: {entry.name: entry for entry in entries(directory)}, "names", directory)

    def exists(self, path: str) -> bool:
        """Return whether a path exists, following links; raise ``CheckpointError`` if that is unknown."""
        return self._once(lambda: exists(path), "exists", path)

    def lexists(self, path: str) -> bool:
        """Return whether a path exists, even as a broken link; raise ``CheckpointError`` if unknown."""
        return self._once(lambda: lexists(path), "lexists", path)

    def isdir(self, path: str) -> bool:
        """Return whether a path is a directory, or a link to one."""
        return self._once(lambda: isdir(path), "isdir", path)

    def islink(self, path: str) -> bool:
        """Return whether a path is a symlink."""
        return self._once(lambda: islink(path), "islink", path)

    def status(self, path: str) -> os.stat_result:
        """Return the status of a path; raises ``OSError``."""
        return self._once(lambda: stat(path), "status", path)

    def is_closed(self, path: str) -> bool:
        """Return whether a path is in a directory that this user may not enter."""
        try:
            self._once(lambda: lstat(path), "own status", path)
        except PermissionError:
            return True
        except OSError:
            return False
        return False

    def realpath(self, path: str) -> str:
        """Return a path without symlinks."""
        return self._once(lambda: realpath(path), "realpath", path)

    def readlink(self, path: str) -> str:
        """Return the target of a symlink; raises ``OSError``."""
        return self._once(lambda: readlink(path), "readlink", path)

    def read(self, path: str, limit: int) -> bytes:
        """Return the first bytes of a regular file, one more than ``limit`` if it is longer.

        Raises:
            NotRegular: It is a directory, a pipe or the like.
            OSError: It can't be read.
        """
        data = self._once(lambda: _read(path, limit), "read", path, limit)
        if len(data) > _KEPT_BYTES:
            del self._answers["read", path, limit]
        return data


def _read(path: str, limit: int) -> bytes:
    with open_regular(path) as file:
        return file.read(limit + 1)
