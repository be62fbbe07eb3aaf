"""Directory handles that confine a command to the directories it was given.

Anyone who can write to a directory can replace a subdirectory by a symlink or another directory between two
system calls. While a root is held, paths below it are resolved component by component with ``openat`` and
``O_NOFOLLOW``, starting at the root's descriptor. The device and inode of each directory are remembered: a
directory never becomes a symlink, or another directory, during a command.

Without held roots, and where the system lacks ``dir_fd`` (Windows), paths are resolved as usual.
"""

from __future__ import annotations

import errno
import inspect
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from itertools import chain, takewhile
from typing import NamedTuple, ParamSpec, TypeVar

from ckpttool.core.errors import AccessDenied
from ckpttool.core.urls import is_url

IS_SUPPORTED = {os.open, os.mkdir, os.rename, os.link, os.unlink, os.rmdir, os.stat} <= os.supports_dir_fd
"""Whether the system can work below open directories."""
MAX_OPEN = 64
"""Maximum number of descriptors kept open besides those of the roots; see ``source.MAX_OPEN``."""

DIRECTORY = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
"""Flags to open a directory for listing."""
_PASSAGE = DIRECTORY | getattr(os, "O_PATH", 0)
"""Flags to open a directory for lookups, which needs no read permission."""
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_NO_DIRECTORY = {errno.ELOOP, errno.ENOTDIR}
"""Error numbers of opening a symlink or a file as a directory."""
_MAX_LINKS = 40
"""Maximum number of symlinks followed in a path, as in Linux."""

P = ParamSpec("P")
T = TypeVar("T")

Identity = tuple[int, int]
"""Device and inode of a directory."""


class PathReplaced(AccessDenied, OSError):
    """A directory was replaced while a command used it.

    It is an ``OSError`` for callers that handle these, and a ``CheckpointError`` for messages to the user.
    """

    def __init__(self, path: str, *, since: str = "it was first seen") -> None:
        reason = f"another process has replaced {os.path.basename(path)} since {since}"
        super().__init__(path, reason)
        self.errno, self.strerror, self.filename = errno.ESTALE, reason, path


class Descriptor:
    """Directory descriptor that closes itself with its last reference."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


class OpenEntry(NamedTuple):
    """Open directory and name of an entry."""

    directory: HeldDirectory
    descriptor: Descriptor
    name: str

    @property
    def dir_fd(self) -> int:
        """Descriptor to pass as ``dir_fd``."""
        return self.descriptor.number

    @property
    def was_no_link(self) -> bool:
        """Whether the entry was no symlink when it was first seen."""
        return self.name in self.directory.listed or self.name in self.directory.files


class HeldDirectory:
    """A root, or a directory below it.

    Attributes:
        above: Parent directory; None for a root.
        name: Name in the parent; of a root, its path.
        identity: Device and inode; None before the first look.
        is_link: Whether the name is that of a symlink to the directory.
        is_named: Whether the user named this directory.
        inner: Subdirectories that were used, by name.
        listed: Names of entries that were directories when first seen.
        files: Names of entries that were neither directories nor symlinks.
    """

    __slots__ = (
        "_descriptor",
        "above",
        "files",
        "identity",
        "inner",
        "is_link",
        "is_named",
        "listed",
        "name",
    )

    def __init__(self, name: str, above: HeldDirectory | None = None) -> None:
        self.name, self.above = name, above
        self.identity: Identity | None = None
        self.is_link = self.is_named = False
        self.inner: dict[str, HeldDirectory] = {}
        self.listed: set[str] = set()
        self.files: set[str] = set()
        self._descriptor: Descriptor | None = None

    @property
    def path(self) -> str:
        """Path with symlinks resolved."""
        names: list[str] = []
        for one in self.upwards():
            if one.above is None:
                return os.path.join(one.name, *reversed(names))
            if one.is_link:
                link = os.path.join(one.above.path, one.name)
                return os.path.join(os.path.realpath(link), *reversed(names))
            names.append(one.name)
        raise AssertionError("the last has nothing above it")

    @property
    def is_known(self) -> bool:
        """Whether it was seen as a directory or as a symlink to one."""
        return self.identity is not None or (self.above is not None and self.name in self.above.listed)

    @property
    def lies_behind_link(self) -> bool:
        """Whether it is reached through a symlink that the user did not name."""
        return any(one.is_link and not one.is_named for one in self.upwards())

    @property
    def top(self) -> HeldDirectory:
        """The root."""
        *_, last = self.upwards()
        return last

    def upwards(self) -> Iterator[HeldDirectory]:
        """Yield the directory and its parents up to the root."""
        one: HeldDirectory | None = self
        while one is not None:
            yield one
            one = one.above

    def parent(self) -> HeldDirectory | None:
        """Return the parent, None if the directory is missing or a symlink."""
        if not self.is_known:
            try:
                self.descriptor()
            except OSError:
                return None
        return None if self.is_link else self.above

    def at(self, name: str) -> HeldDirectory:
        """Return a subdirectory, which need not exist."""
        found = self.inner.get(name)
        if found is None:
            found = self.inner.setdefault(name, HeldDirectory(name, self))
        return found

    def descriptor(self) -> Descriptor:
        """Return the cached descriptor for lookups."""
        if (found := self._descriptor) is not None:
            return found
        # All missing descriptors between the next open parent and this directory are opened,
        # top-down. If too many are open, the oldest are closed; a ``Descriptor`` that is in use
        # elsewhere remains open as long.
        with _lock:
            for one in reversed([*takewhile(lambda one: one._descriptor is None, self.upwards())]):
                opened = one._descriptor = Descriptor(one.open(_PASSAGE))
                _kept[one] = None
                for oldest in list(_kept)[: max(0, len(_kept) - MAX_OPEN)]:
                    oldest.close()
            return self._descriptor or opened

    def open(self, flags: int = DIRECTORY) -> int:
        """Open a new descriptor.

        Raises:
            PathReplaced: Its name is another entry's now.
            OSError: It is missing, or can't be opened.
        """
        if self.above is None:
            assert self._descriptor is not None  # as long as it is held
            return os.open(os.curdir, flags, dir_fd=self._descriptor.number)
        number = self._open_in(self.above, flags)
        try:
            self.identify(_identity(number))
        except BaseException:
            os.close(number)
            raise
        return number

    def _open_in(self, above: HeldDirectory, flags: int) -> int:
        # At first sight a symlink is followed, as in the cache of Hugging Face. From then on the entry
        # remains a link, or never becomes one: a directory that was seen is opened with O_NOFOLLOW, and a
        # link that appears in its place is refused.
        place = above.descriptor()
        try:
            if self.is_link:
                return os.open(self.name, flags, dir_fd=place.number)
            return os.open(self.name, flags | _NO_LINK, dir_fd=place.number)
        except OSError as error:
            if error.errno not in _NO_DIRECTORY or self.is_link:
                raise
            if self.is_known:
                raise PathReplaced(self.path) from error
            status = os.lstat(self.name, dir_fd=place.number)
            if not stat.S_ISLNK(status.st_mode):
                raise
        number = os.open(self.name, flags, dir_fd=place.number)
        self.is_link = True
        return number

    def identify(self, identity: Identity) -> None:
        """Record the identity, or require the recorded one."""
        if self.identity is None:
            self.identity = identity
            with _lock:
                _known.setdefault(identity, []).append(self)
        elif identity != self.identity:
            raise PathReplaced(self.path)

    def hold(self) -> None:
        """Open a root."""
        self._descriptor = Descriptor(os.open(self.name, _PASSAGE))
        self.identify(_identity(self._descriptor.number))

    def close(self) -> None:
        """Close the cached descriptor; it is reopened on demand."""
        _kept.pop(self, None)
        self._descriptor = None

    def forget(self) -> None:
        """Close and forget the directory and all below it."""
        pending = [self]
        while pending:
            one = pending.pop()
            one.close()
            if one.identity is not None:
                same = _known.get(one.identity, [])
                if one in same:
                    same.remove(one)
                if not same:
                    _known.pop(one.identity, None)
            pending += one.inner.values()
            one.inner.clear()


def _identity(descriptor: int) -> Identity:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


class _Hold(NamedTuple):
    directory: HeldDirectory
    spellings: tuple[str, ...]


_lock = threading.RLock()
_holds: list[_Hold] = []
_found: dict[str, HeldDirectory | None] = {}
"""Cache of directories by path; None for paths outside of all roots."""
_known: dict[Identity, list[HeldDirectory]] = {}
_kept: dict[HeldDirectory, None] = {}
"""Directories with a cached descriptor besides the roots, oldest first."""


@contextmanager
def holding(*paths: str | os.PathLike[str]) -> Iterator[None]:
    """Hold the directories of some paths during the context: the paths themselves, and their parents.

    They are held for all threads. A directory that can't be opened isn't held; using it raises the error.
    """
    named = [os.fspath(path) for path in paths]
    given = [path for path in named if not is_url(path) and "\0" not in path]
    places = [one for path in given for one in (os.path.dirname(os.path.abspath(path)), path)]
    held: list[_Hold] = []
    try:
        with _lock:
            # Shorter paths first: a directory below another root is then held as a part
            # of it, with one identity.
            for path in sorted(places if IS_SUPPORTED else (), key=lambda path: len(os.path.abspath(path))):
                hold = _hold(path)
                if hold is not None:
                    held.append(hold)
                    _holds.append(hold)
                    _look_again()
        yield
    finally:
        with _lock:
            for hold in held:
                _holds.remove(hold)
                top = hold.directory.top
                if not any(other.directory.top is top for other in _holds):
                    top.forget()
            _look_again()


def holds(*parameters: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function to hold the paths in some parameters, which may be requests with paths."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)

        @wraps(function)
        def hold(*positional: P.args, **named: P.kwargs) -> T:
            try:
                given = signature.bind(*positional, **named).arguments
            except TypeError:  # calling the function raises it again
                given = {}
            with holding(*chain.from_iterable(_paths_in(given.get(name)) for name in parameters)):
                return function(*positional, **named)

        return hold

    return decorate


def _paths_in(value: object) -> list[str | os.PathLike[str]]:
    if isinstance(value, str | os.PathLike):
        return [value]
    if isinstance(value, list | tuple):
        return [path for one in value for path in _paths_in(one)]
    named = (getattr(value, name, None) for name in ("directory", "sources", "destination", "path"))
    return [path for one in named if one is not None for path in _paths_in(one)]


def _hold(path: str) -> _Hold | None:
    # An output that doesn't exist yet is held by its nearest existing parent.
    while not os.path.isdir(path or os.curdir):
        above = os.path.dirname(path)
        if above == path:
            return None
        path = above
    path = path or os.curdir
    try:
        directory = directory_at(path)
        if directory is None:
            directory = HeldDirectory(os.path.realpath(path))
            directory.hold()
        else:
            directory.descriptor()
    except OSError:
        return None
    directory.is_named = True
    spellings = path, path.rstrip(os.sep), os.path.abspath(path), directory.path
    return _Hold(directory, tuple(filter(None, spellings)))


def _look_again() -> None:
    """Reset the cache of paths to the roots."""
    global _found
    _found = {path: hold.directory for hold in reversed(_holds) for path in hold.spellings}


def forget(directory: int, name: str) -> None:
    """Forget the identity of an entry that was renamed, removed or replaced by this program."""
    # Otherwise our own change would look like one by another user, and raise PathReplaced.
    if not _holds:
        return
    with _lock:
        for place in list(_known.get(_identity(directory), ())):
            place.listed.discard(name)
            place.files.discard(name)
            inner = place.inner.pop(name, None)
            if inner is not None:
                inner.forget()
                _look_again()


def remember(directory: int, name: str, made: int) -> None:
    """Record the identity of a directory that this program just created."""
    if not _holds:
        return
    forget(directory, name)
    with _lock:
        for place in list(_known.get(_identity(directory), ())):
            place.listed.add(name)
            place.at(name).identify(_identity(made))


# For other processes --------------------------------------------------------------------------------


class HeldRoots(NamedTuple):
    """Roots and known directories, to be passed to a child process."""

    paths: tuple[str, ...] = ()
    seen: tuple[tuple[str, Identity | None], ...] = ()


def held_roots(paths: Iterable[str]) -> HeldRoots:
    """Return the roots and the known parents of some paths."""
    if not _holds:
        return HeldRoots()
    # The child starts with the parents' identities, so that a directory that is replaced in between is
    # noticed.
    seen: dict[str, Identity | None] = {}
    for path in {os.path.dirname(path) for path in paths}:
        directory = directory_at(path)
        while directory is not None and directory.path not in seen:
            if directory.is_known:
                seen[directory.path] = directory.identity
            directory = directory.above
    return HeldRoots(tuple(hold.spellings[0] for hold in _holds), tuple(seen.items()))


@contextmanager
def adopt_roots(roots: HeldRoots) -> Iterator[None]:
    """Hold the roots of another process and adopt its identities.

    Raises:
        PathReplaced: A directory has been replaced since.
    """
    with holding(*roots.paths):
        for path, identity in roots.seen:
            directory = directory_at(path)
            if directory is not None and directory.above is not None:
                directory.above.listed.add(directory.name)
            if directory is not None and identity is not None:
                directory.identify(identity)
        yield


# Lookups by path ------------------------------------------------------------------------------------


def directory_at(path: str) -> HeldDirectory | None:
    """Return the directory at a path, which need not exist; None outside of all roots."""
    if not _holds:
        return None
    try:
        return _found[path]
    except KeyError:
        pass
    with _lock:
        found = _found[path] = _find(path or os.curdir)
        return found


def _find(path: str) -> HeldDirectory | None:
    # A relative path may lead out of the working directory, and into a root from there. Leading ``..`` are
    # resolved by name: the working directory that ``getcwd`` returns has no symlinks.
    found = _find_below(path)
    if found is None and not os.path.isabs(path):
        here = os.getcwd()
        while path == os.pardir or path.startswith(os.pardir + os.sep):
            here, path = os.path.dirname(here), path[len(os.pardir) :].lstrip(os.sep)
        found = _find_below(os.path.join(here, path))
    return found


def _find_below(path: str) -> HeldDirectory | None:
    names: list[str] = []
    start = path
    # The longest known prefix of the path is taken, and the rest resolved name by name. The cache has the
    # spellings of all roots.
    while (found := _found.get(start)) is None:
        above, name = os.path.split(start)
        if above == start or not above:
            return None
        names.append(name)
        start = above
    for name in reversed(names):
        if found is None:
            return None
        if name == os.pardir:
            found = found.parent()
        elif name not in ("", os.curdir):
            found = found.at(name)
    return found


def _entry_at(path: str) -> OpenEntry | None:
    """Return the open parent and the name of a path, None outside of all roots.

    Raises:
        OSError: There is no such directory, or another one than before.
    """
    if not _holds:
        return None
    above, _, name = path.rpartition(os.sep)
    if name in ("", os.curdir, os.pardir):
        directory = directory_at(path)
        if directory is None or directory.above is None:
            return None
        directory, name = directory.above, directory.name
        return OpenEntry(directory, directory.descriptor(), name)
    directory = directory_at(above or (os.sep if path.startswith(os.sep) else os.curdir))
    return None if directory is None else OpenEntry(directory, directory.descriptor(), name)


def status(path: str, *, follows: bool = True) -> os.stat_result:
    """Return the status of a path; a symlink is followed only if it was one when first seen."""
    if not _holds:
        return os.stat(path) if follows else os.lstat(path)
    try:
        entry = _entry_at(path)
        if entry is None:
            directory = directory_at(path) if follows else None
            if directory is None:
                return os.stat(path) if follows else os.lstat(path)
            descriptor = directory.descriptor()  # referred to, so that no other thread's use closes it
            return os.fstat(descriptor.number)
        # The kind of each entry is remembered at first sight. A name that was no link is
        # never followed afterwards.
        found = os.lstat(entry.name, dir_fd=entry.dir_fd)
        if stat.S_ISDIR(found.st_mode):
            entry.directory.listed.add(entry.name)
        elif not stat.S_ISLNK(found.st_mode):
            entry.directory.files.add(entry.name)
        elif follows and not entry.was_no_link:
            return os.stat(entry.name, dir_fd=entry.dir_fd)
        return found
    except OSError as error:
        error.filename = path
        raise


def open_directory(path: str) -> int:
    """Open a directory that is going to be changed.

    Symlinks above a held directory are followed, but none below it.
    """
    directory = directory_at(path)
    return os.open(path or os.curdir, DIRECTORY) if directory is None else _opened(directory, path)


def _opened(directory: HeldDirectory, path: str, *, follows: bool = False) -> int:
    try:
        number = directory.open()
        if not follows and directory.lies_behind_link:
            os.close(number)
            raise OSError(errno.ELOOP, "it is reached through a symlink, which is not followed", path)
    except OSError as error:
        error.filename = path
        raise
    return number


def open_file(path: str, flags: int, mode: int = 0o777) -> int:
    """Open a file; a symlink is followed only if it was one when first seen."""
    entry = _entry_at(path)
    if entry is None:
        return os.open(path, flags, mode)
    if entry.was_no_link:
        flags |= _NO_LINK
    try:
        return os.open(entry.name, flags, mode, dir_fd=entry.dir_fd)
    except OSError as error:
        if error.errno == errno.ELOOP and entry.was_no_link:
            raise PathReplaced(path) from error
        error.filename = path
        raise


def read_link(path: str) -> str:
    """Return the target of a symlink."""
    entry = _entry_at(path)
    return os.readlink(path) if entry is None else os.readlink(entry.name, dir_fd=entry.dir_fd)


def real_path(path: str, links: int = _MAX_LINKS) -> str:
    """Return a path with symlinks resolved; below the roots, known directories count as no symlinks."""
    directory = directory_at(path)
    if directory is None or not links:
        return os.path.realpath(path)
    if directory.above is None:
        return directory.path
    above = directory.above
    if directory.name not in above.listed and directory.name not in above.files:
        try:
            place = above.descriptor()
            target = os.readlink(directory.name, dir_fd=place.number)
        except (OSError, ValueError):  # it isn't a symlink, or is missing
            pass
        else:
            return real_path(os.path.join(above.path, target), links - 1)
    return os.path.join(above.path, directory.name)


class HeldEntry:
    """Directory entry with the interface of ``os.DirEntry``."""

    __slots__ = ("_inode", "_is_directory", "_is_file", "_is_link", "name", "path")

    def __init__(self, entry: os.DirEntry[str], path: str) -> None:
        self.name, self.path = entry.name, path
        self._inode = entry.inode()
        self._is_link = entry.is_symlink()
        self._is_directory = entry.is_dir(follow_symlinks=False)
        self._is_file = entry.is_file(follow_symlinks=False)

    def inode(self) -> int:
        return self._inode

    def is_symlink(self) -> bool:
        return self._is_link

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        if self._is_link and follow_symlinks:
            return self._leads_to(stat.S_IFDIR)
        return self._is_directory

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        if self._is_link and follow_symlinks:
            return self._leads_to(stat.S_IFREG)
        return self._is_file

    def _leads_to(self, kind: int) -> bool:
        try:
            return stat.S_IFMT(status(self.path).st_mode) == kind
        except FileNotFoundError:
            return False

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return status(self.path, follows=follow_symlinks)

    def __fspath__(self) -> str:
        return self.path


def names(path: str) -> list[str]:
    """Return the names in a directory in arbitrary order."""
    directory = directory_at(path)
    if directory is None:
        return os.listdir(path)
    descriptor = Descriptor(_opened(directory, path, follows=True))
    return os.listdir(descriptor.number)


def entries(path: str) -> list[HeldEntry] | None:
    """Return the entries of a directory in arbitrary order, None outside of all roots."""
    directory = directory_at(path)
    if directory is None:
        return None
    descriptor = Descriptor(_opened(directory, path, follows=True))
    with os.scandir(descriptor.number) as listed:
        found = [HeldEntry(entry, os.path.join(path, entry.name)) for entry in listed]
    for entry in found:
        if not entry.is_symlink():
            (directory.listed if entry.is_dir() else directory.files).add(entry.name)
    return found
