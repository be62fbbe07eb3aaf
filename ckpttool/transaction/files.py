"""Which files a checkpoint consists of, and how a change to one of them is noticed."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from ckpttool.formats.interface import SIDECARS
from ckpttool.storage import fs, held
from ckpttool.storage.directories import FOLLOWS_NOTHING

MAX_LEVELS = 100
"""How deep directories may lie in a checkpoint: each is open while those in it are looked at."""


class StalePlan(Exception):
    """What is on the disk isn't what the plan was made for.

    Attributes:
        problem: What is different.
        since_plan: Whether it has become so since the plan was made.
    """

    def __init__(self, problem: str, *, since_plan: bool = False) -> None:
        super().__init__(f"{problem} since the plan was made" if since_plan else problem)
        self.problem = problem
        self.since_plan = since_plan


class NameTaken(StalePlan):
    """Another file has the name that a file was to get."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{os.path.basename(path)} already exists")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a file was when it was looked at.

    Attributes:
        path: Relative to the directory in which its checkpoint lies.
        size: In bytes.
        links: How many names it has; others may come and go without a change to it.
        version: ETag of an object in a store.
    """

    path: str
    device: int
    inode: int
    size: int
    mtime_ns: int
    links: int = field(default=1, compare=False)
    version: str = field(default="", compare=False, kw_only=True)

    def is_of(self, status: os.stat_result) -> bool:
        """Return whether a file is this one, even if the file system was mounted anew since."""
        return (status.st_ino, status.st_size, status.st_mtime_ns) == (self.inode, self.size, self.mtime_ns)


@dataclass(frozen=True, slots=True)
class Contents:
    """All files below some names of a directory, and the directories that they lie in.

    Attributes:
        crosses: Whether a directory among them lies on another device than the one that it is in. Of files
            that says nothing: an overlay gives theirs as those of its layers.
        symlinks: Which of the files are symlinks, by their paths; a journal doesn't tell.
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
        """Return whether nothing was changed, added or taken away, in whatever order it is listed."""
        return set(self.files) == set(other.files) and set(self.directories) == set(other.directories)

    def has_sizes_of(self, other: Contents) -> bool:
        """Return whether the same files have the same sizes, but for manifests, which may come later."""
        ours, theirs = (
            {(file.path, file.size) for file in one.files if not file.path.endswith(SIDECARS)}
            for one in (self, other)
        )
        return ours == theirs

    @property
    def nbytes(self) -> int:
        """Return the bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def modified_ns(self) -> int:
        """Return when the newest file was changed, in nanoseconds since 1970."""
        return max((file.mtime_ns for file in self.files), default=0)


def contents(directory: str | int, members: Iterable[str]) -> Contents:
    """Return what lies at some names of a directory; symlinks are looked at, never through.

    Raises:
        OSError: Something there can't be looked at, or vanished.
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
    """Return what a file is now, from its ``lstat``."""
    return Fingerprint(
        path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_nlink
    )


def _walk(
    directory: str | int, members: Iterable[str], levels: int = MAX_LEVELS
) -> Iterator[tuple[str, os.stat_result]]:
    """Yield paths relative to a directory, given by its path or by its open descriptor."""
    if not levels:
        raise OSError(errno.ENAMETOOLONG, f"directories nested over {MAX_LEVELS} deep in a checkpoint")
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
    """Open a directory and yield its descriptor; below ``parent`` no symlink is followed, at no step.

    Raises:
        OSError: There is none, or it is something else.
    """
    if parent is None:
        descriptor = held.open_directory(path)
    else:
        descriptor = os.dup(parent)
        for name in filter(None, path.split(os.sep)):
            above = descriptor
            try:
                descriptor = os.open(name, held.DIRECTORY | FOLLOWS_NOTHING, dir_fd=above)
            finally:
                os.close(above)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def opened_parent(path: str, place: int) -> Iterator[tuple[int, str]]:
    """Open the directory that a path lies in, and yield it with the name in it."""
    above, name = os.path.split(path)
    with opened(above, place) as directory:
        yield directory, name


def status_of(name: str, directory: int) -> os.stat_result | None:
    """Return the status of a name in an open directory, or None where there is none."""
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None


def status_at(path: str, place: int) -> os.stat_result | None:
    """Return the status of a path below an open directory, or None where there is none."""
    try:
        with opened_parent(path, place) as (directory, name):
            return status_of(name, directory)
    except (FileNotFoundError, NotADirectoryError):
        return None
