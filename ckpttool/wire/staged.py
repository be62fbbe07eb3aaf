"""Targets that appear whole or not at all: written in a directory beside, made durable, renamed.

Everything is written below ``.ckpttool-<id>.new/content/`` in the directory of the target, under its final
name. A lock on that directory says that somebody works there; one without a lock is what a kill left. It is
cleared when the next target is staged beside it: what it had set aside is put back, unless all of the new had
come to its place.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType
from typing import Literal

from ckpttool.errors import UsageError, from_os_error
from ckpttool.wire.atomic import OWN_PREFIX, adopt, sync_directory, write_atomically
from ckpttool.wire.sink import Crew, Sink, Written
from ckpttool.work import Advance, default_jobs

try:
    import fcntl
except ImportError:  # no such locks on Windows: what a kill left stays there
    fcntl = None  # type: ignore[assignment]

Shape = Literal["file", "directory", "prefix"]

_NEW = re.compile(re.escape(OWN_PREFIX) + r"[0-9a-f]{12}\.new")
_CONTENT, _REPLACED, _MOVING = "content", "replaced", "moving"


class Staged:
    """One target on its way.

    Attributes:
        target: Where it will stand.
        path: Where it stands now: to be opened and checked before it is committed.
        written: The tensors in it that went through a sink, once it is settled.
    """

    def __init__(
        self,
        target: str | os.PathLike[str],
        shape: Shape = "file",
        *,
        replaces: Iterable[str] | None = None,
        jobs: int | None = None,
        advance: Advance = lambda nbytes: None,
    ) -> None:
        """Make room for a target.

        Args:
            target: Where it is to stand: a file, a directory, or the prefix of several files.
            shape: Which of these it is.
            replaces: Names beside it that give way to it; None where nothing may stand there.
            jobs: How many threads copy tensors.
            advance: Told the bytes that were copied.

        Raises:
            CheckpointError: Nothing can be written there.
        """
        self.target = os.fspath(target).rstrip(os.sep)
        self.shape = shape
        self._directory, self._name = os.path.split(self.target)
        self._directory = self._directory or os.curdir
        self._replaces = replaces
        self._crew = Crew(default_jobs() if jobs is None else jobs)
        self._advance = advance
        self._sinks: list[Sink] = []
        self.written: list[Written] = []
        self._lock: int | None = None
        self._holds_old = False
        try:
            self._area, self._lock = _entered(self._directory)
            self._content = os.path.join(self._area, _CONTENT)
            self.path = os.path.join(self._content, self._name)
            os.makedirs(self.path if shape == "directory" else self._content)
        except OSError as error:
            if self._lock is not None:
                self.discard()
            raise from_os_error(error, self._directory) from error

    def __enter__(self) -> Staged:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.discard()

    def create(self, name: str = "") -> Sink:
        """Return a new file of the target.

        Args:
            name: Of a directory, the path in it; of a prefix, what comes behind it; of a file, nothing.

        Raises:
            OSError: It can't be made.
        """
        path = self.place(name)
        if self.shape == "directory":
            os.makedirs(os.path.dirname(path), exist_ok=True)
        sink = Sink(path, self._crew, self._advance)
        self._sinks.append(sink)
        return sink

    def place(self, name: str = "") -> str:
        """Return where a file of the target lies while it is written; see ``create``."""
        return os.path.join(self.path, name) if self.shape == "directory" else self.path + name

    def settle(self) -> None:
        """Make durable and close all files; the target can be opened at ``path`` then.

        Raises:
            CheckpointError, OSError: See ``Sink.close``.
        """
        for sink in self._sinks:
            sink.close()
            self.written += sink.written
        self._sinks.clear()
        self._crew.close()
        for directory, _, _ in os.walk(self._content):
            sync_directory(directory)

    def commit(self) -> None:
        """Bring the target to its place, all of it or nothing.

        Raises:
            UsageError: Something came to stand there meanwhile.
            OSError: It can't be brought there; what stood there is back.
        """
        names = sorted(os.listdir(self._content), key=lambda name: (name.endswith(".index"), name))
        if self._replaces is None:
            self._require_absent(names)
        old = [name for name in (self._replaces or ()) if _stands(os.path.join(self._directory, name))]
        if names == old == [self._name] and self.shape == "file" and not _is_directory(self.target):
            self._replace_file()
        else:
            self._move(names, old)
        sync_directory(self._directory)
        self.discard()

    def _require_absent(self, names: list[str]) -> None:
        for name in names:
            if _stands(os.path.join(self._directory, name)):
                raise UsageError(f"{os.path.join(self._directory, name)} has come to exist meanwhile")

    def _replace_file(self) -> None:
        _keep_mode(self.path, self.target)
        os.replace(self.path, self.target)

    def _move(self, names: list[str], old: list[str]) -> None:
        aside = os.path.join(self._area, _REPLACED)
        for name in set(names) & set(old):
            _keep_mode(os.path.join(self._content, name), os.path.join(self._directory, name))
        if old or len(names) > 1:
            os.mkdir(aside)
            plan = {name: _identity(os.path.join(self._content, name)) for name in names}
            write_atomically(os.path.join(self._area, _MOVING), json.dumps(plan).encode())
        try:
            # The index of a TensorFlow checkpoint leaves first and comes last: without it there is none.
            for name in sorted(old, key=lambda name: not name.endswith(".index")):
                os.rename(os.path.join(self._directory, name), os.path.join(aside, name))
            for name in names:
                self._bring(os.path.join(self._content, name), os.path.join(self._directory, name))
        except BaseException:
            self._holds_old = True  # until it is back: what goes wrong here must not remove it
            _put_back(self._directory, self._area)
            self._holds_old = False
            raise

    @staticmethod
    def _bring(path: str, to: str) -> None:
        """Rename a file or a directory to where nothing stands."""
        if os.path.isdir(path):
            os.rename(path, to)
            return
        try:
            os.link(path, to, follow_symlinks=False)  # unlike a renaming, it never replaces
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links
            os.rename(path, to)
        else:
            with suppress(OSError):  # it goes with the area
                os.unlink(path)

    def discard(self) -> None:
        """Leave nothing behind but what was committed; doing it twice is allowed."""
        self._crew.close()
        for sink in self._sinks:
            with suppress(OSError):  # it goes
                sink.abandon()
        self._sinks.clear()
        if self._lock is not None:
            if not self._holds_old:
                with suppress(OSError):  # which is told even where errors are to be ignored
                    shutil.rmtree(self._area, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


def _entered(directory: str) -> tuple[str, int]:
    """Return a new locked area in a directory, cleared of what kills left; and the lock."""
    with _Locked(directory):
        clear(directory)
        area = os.path.join(directory, f"{OWN_PREFIX}{os.urandom(6).hex()}.new")
        os.mkdir(area, 0o700)
        try:
            descriptor = os.open(area, os.O_RDONLY)
        except BaseException:
            os.rmdir(area)
            raise
        if fcntl is not None:
            with suppress(OSError):  # a file system without locks: nobody clears anything there
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return area, descriptor


class _Locked:
    """A directory in which nobody else makes or clears an area meanwhile."""

    def __init__(self, directory: str) -> None:
        self._descriptor = os.open(directory, os.O_RDONLY)

    def __enter__(self) -> None:
        if fcntl is not None:
            with suppress(OSError):
                fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def __exit__(self, *exception: object) -> None:
        os.close(self._descriptor)


def clear(directory: str) -> None:
    """Remove the areas in a directory that a kill left; what one had set aside is put back first."""
    if fcntl is None:
        return
    for name in os.listdir(directory):
        area = os.path.join(directory, name)
        if _NEW.fullmatch(name) and os.path.isdir(area) and not os.path.islink(area):
            with suppress(OSError):  # somebody else's, or of a file system without locks
                descriptor = os.open(area, os.O_RDONLY)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _put_back(directory, area)
                    shutil.rmtree(area)
                finally:
                    os.close(descriptor)


def _put_back(directory: str, area: str) -> None:
    """Bring back what was set aside, unless all of the new stands in its place.

    Raises:
        OSError: It can't be brought back, or something else came to stand there meanwhile.
    """
    aside, content = os.path.join(area, _REPLACED), os.path.join(area, _CONTENT)
    moved = _planned(area)
    if moved is None or not os.path.isdir(content) or not os.listdir(content):
        return
    for name, identity in moved.items():
        place = os.path.join(directory, os.path.basename(name))
        if _stands(place) and _identity(place) == identity:
            _remove(place)
    for name in os.listdir(aside):
        place = os.path.join(directory, name)
        if _stands(place):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), place)
        os.rename(os.path.join(aside, name), place)


def _planned(area: str) -> dict[str, list[int]] | None:
    """Return what was to be brought to its place, by name; None where nothing was moved yet.

    Raises:
        OSError: It can't be read.
    """
    try:
        with open(os.path.join(area, _MOVING), encoding="ascii") as plan:
            moved: dict[str, list[int]] = json.load(plan)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), area) from error
    return moved


def _identity(path: str) -> list[int]:
    """Return what stays the same of a file or a directory that is renamed."""
    status = os.lstat(path)
    return [status.st_dev, status.st_ino]


def _stands(path: str) -> bool:
    """Tell whether anything has this name; unlike ``os.path.lexists``, it never says no for not knowing.

    Raises:
        OSError: It can't be told.
    """
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    return True


def _is_directory(path: str) -> bool:
    return stat.S_ISDIR(os.lstat(path).st_mode)


def _keep_mode(path: str, old: str) -> None:
    """Give a file the mode and the owner of the one that gives way to it, and a directory the mode."""
    if _is_directory(path) and _is_directory(old):
        os.chmod(path, stat.S_IMODE(os.lstat(old).st_mode))
    elif os.path.isfile(path):
        descriptor = os.open(path, os.O_RDWR)
        try:
            adopt(descriptor, old)
        finally:
            os.close(descriptor)


def _remove(path: str) -> None:
    if _is_directory(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)
