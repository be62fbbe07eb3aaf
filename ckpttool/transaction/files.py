"""Files of a checkpoint, and the fingerprints that reveal a change to one of them."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from ckpttool.formats.interface import MANIFEST_SUFFIXES
from ckpttool.storage import fs, held
from ckpttool.storage.directories import NO_FOLLOW

MAX_LEVELS = 100
"""Limit on nested directories in a checkpoint: each takes an open descriptor while it is walked."""


class StalePlan(Exception):
    """The files on the disk don't match the plan.

    Attributes:
        problem: The difference, in words.
        since_plan: Whether it is a change since the plan was made.
    """

    def __init__(self, problem: str, *, since_plan: bool = False) -> None:
        super().__init__(f"{problem} since the plan was made" if since_plan else problem)
        self.problem = problem
        self.since_plan = since_plan


class NameTaken(StalePlan):
    """Another file has the new name of a file."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{os.path.basename(path)} already exists")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Identity and state of a file when the plan was made.

    Attributes:
        path: Path relative to the directory of its checkpoint.
        size: Size in bytes.
        links: Number of hard links; not compared, since adding or removing one doesn't change the file.
        version: ETag of an object in a store; empty on a disk.
    """

    path: str
    device: int
    inode: int
    size: int
    mtime_ns: int
    links: int = field(default=1, compare=False)
    version: str = field(default="", compare=False, kw_only=True)

    def is_of(self, status: os.stat_result) -> bool:
        """Return whether a file is this one, unmodified."""
        # The device isn't compared: its number may change when the file system is mounted anew.
        return (status.st_ino, status.st_size, status.st_mtime_ns) == (self.inode, self.size, self.mtime_ns)


@dataclass(frozen=True, slots=True)
class Contents:
    """All files at or below some names of a directory, and all directories among them.

    Attributes:
        crosses: Whether a directory is on another device than its parent. Devices of files aren't compared,
            because an overlay reports those of its layers.
        symlinks: Paths of the files that are symlinks; not recorded in journals.
    """

    files: tuple[Fingerprint, ...] = ()
    directories: tuple[str, ...] = ()
    crosses: bool = field(default=False, compare=False)
    symlinks: frozenset[str] = field(default=frozenset(), compare=False)

    def renamed(self, names: Mapping[str, str]) -> Contents:
        """Return the contents with new names for the top-level entries."""

        def new(path: str) -> str:
            first, mark, rest = path.partition(os.sep)
            return names[first] + mark + rest

        files = tuple(replace(file, path=new(file.path)) for file in self.files)
        return Contents(files, tuple(map(new, self.directories)))

    def is_same_as(self, other: Contents) -> bool:
        """Return whether both have the same files and directories, in any order."""
        return set(self.files) == set(other.files) and set(self.directories) == set(other.directories)

    def has_sizes_of(self, other: Contents) -> bool:
        """Return whether both have the same files and sizes, except for manifests, which may come later."""
        ours, theirs = (
            {(file.path, file.size) for file in one.files if not file.path.endswith(MANIFEST_SUFFIXES)}
            for one in (self, other)
        )
        return ours == theirs

    @property
    def nbytes(self) -> int:
        """Total size of all files in bytes."""
        return sum(file.size for file in self.files)

    @property
    def modified_ns(self) -> int:
        """Modification time of the newest file, in nanoseconds since 1970."""
        return max((file.mtime_ns for file in self.files), default=0)


def contents(directory: str | int, members: Iterable[str]) -> Contents:
    """Return the contents at or below some names of a directory; symlinks aren't followed.

    Raises:
        OSError: An entry can't be read, or has vanished.
    """
    files: list[Fingerprint] = []
    devices: dict[str, int] = {}
    symlinks: set[str] = set()
    crosses = False
    for path, status in _walk(directory, members):
        if stat.S_ISDIR(status.st_mode):
            devices[path] = status.st_dev
            crosses |= devices.get(os.path.dirname(path), status.st_dev) != status.st_dev
        else:
            files.append(fingerprint(path, status))
            if stat.S_ISLNK(status.st_mode):
                symlinks.add(path)
    return Contents(tuple(files), tuple(devices), crosses, frozenset(symlinks))


def joined(parts: Iterable[Contents]) -> Contents:
    """Merge the contents of several members."""
    files: list[Fingerprint] = []
    directories: list[str] = []
    for one in parts:
        files += one.files
        directories += one.directories
    return Contents(tuple(files), tuple(directories))


def fingerprint(path: str, status: os.stat_result) -> Fingerprint:
    """Return the fingerprint of a file from its ``lstat``."""
    return Fingerprint(
        path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_nlink
    )


def _walk(
    directory: str | int, members: Iterable[str], levels: int = MAX_LEVELS
) -> Iterator[tuple[str, os.stat_result]]:
    """Yield paths relative to a directory, given by its path or by its open descriptor."""
    if not levels:
        raise OSError(errno.ENAMETOOLONG, f"directories nested more than {MAX_LEVELS} deep")
    for name in members:
        if isinstance(directory, int):
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        else:
            status = fs.lstat(os.path.join(directory, name))
        yield name, status
        if stat.S_ISDIR(status.st_mode):
            for inner, below in _below(directory, name, levels - 1):
                yield os.path.join(name, inner), below


def _below(directory: str | int, name: str, levels: int) -> Iterator[tuple[str, os.stat_result]]:
    if not isinstance(directory, int):
        path = os.path.join(directory, name)
        yield from _walk(path, sorted(fs.listdir(path)), levels)
        return
    with opened(name, directory) as descriptor:
        yield from _walk(descriptor, sorted(os.listdir(descriptor)), levels)


@contextmanager
def opened(path: str, parent: int | None = None) -> Iterator[int]:
    """Open a directory and yield its descriptor; below ``parent``, no symlink is followed.

    Raises:
        OSError: It doesn't exist, or isn't a directory.
    """
    # O_NOFOLLOW concerns only the last component of a path. So each component is opened on its own, relative
    # to the descriptor of the one before.
    if parent is None:
        descriptor = held.open_directory(path)
    else:
        descriptor = os.dup(parent)
        for name in filter(None, path.split(os.sep)):
            above = descriptor
            try:
                descriptor = os.open(name, held.DIRECTORY | NO_FOLLOW, dir_fd=above)
            finally:
                os.close(above)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def opened_parent(path: str, place: int) -> Iterator[tuple[int, str]]:
    """Open the parent directory of a path, and yield its descriptor with the name of the entry."""
    above, name = os.path.split(path)
    with opened(above, place) as directory:
        yield directory, name


def status_of(name: str, directory: int) -> os.stat_result | None:
    """Return the status of an entry in an open directory; None if it is missing."""
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None


def status_at(path: str, place: int) -> os.stat_result | None:
    """Return the status of a path below an open directory; None if it is missing."""
    try:
        with opened_parent(path, place) as (directory, name):
            return status_of(name, directory)
    except (FileNotFoundError, NotADirectoryError):
        return None
