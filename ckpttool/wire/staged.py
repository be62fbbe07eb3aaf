"""Targets that appear whole or not at all: written in a directory beside, made durable, renamed.

Everything is written below ``.ckpttool-<id>.new/content/`` in the directory of the target, under its final
name. A lock on that directory says that somebody works there; one without a lock is what a kill left. It is
cleared when the next target is staged beside it; see ``recovering``.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Literal

from ckpttool.errors import AccessDenied, UsageError, from_os_error
from ckpttool.wire.area import (
    CONTENT,
    REPLACED,
    Plan,
    claim,
    is_directory,
    new_area,
    plan,
    remove,
    stands,
)
from ckpttool.wire.atomic import adopt, sync_directory
from ckpttool.wire.directories import walk
from ckpttool.wire.recovering import bring, clear, told, undo
from ckpttool.wire.sink import Crew, Sink, Written
from ckpttool.work import Advance, default_jobs

try:
    import fcntl
except ImportError:  # no such locks on Windows
    fcntl = None  # type: ignore[assignment]

Shape = Literal["file", "directory", "prefix"]

_PATIENCE = 3.0
"""For how many seconds others may keep us from making room."""


class Staged:
    """One target on its way.

    Attributes:
        target: Where it will stand.
        path: Where it stands now: to be opened and checked before it is committed.
        written: The tensors in it that went through a sink, once it is settled.
        warnings: What lies beside it, left by a kill, and could not be cleared, each in a sentence.
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
        self._syncing: threading.Thread | None = None
        self._not_durable: BaseException | None = None
        self.written: list[Written] = []
        self.warnings: tuple[str, ...] = ()
        self._area, self._lock = "", -1
        self._holds_old = False
        try:
            self._enter()
            self._content = os.path.join(self._area, CONTENT)
            self.path = os.path.join(self._content, self._name)
            os.makedirs(self.path if shape == "directory" else self._content)
        except OSError as error:
            self.discard()
            raise from_os_error(error, self._directory) from error
        except BaseException:
            self.discard()
            raise

    def _enter(self) -> None:
        """Make a locked area, beside what kills left as far as that can't be cleared.

        Raises:
            OSError: It can't be made.
        """
        with _locked(self._directory) as is_alone:
            if is_alone:
                self.warnings = (*clear(self._directory),)
            else:
                self.warnings = (f"{self._directory} is locked: what kills left there is not looked for",)
            area = new_area(self._directory)
            os.mkdir(area, 0o700)
            self._area = area
            if fcntl is not None:
                self._lock = os.open(area, os.O_RDONLY)
                _lock(self._lock)
            claim(area)

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
        """Bring all that was written into the files; the target can be opened at ``path`` then.

        Meanwhile it is made durable by a thread of its own, for which ``commit`` waits.

        Raises:
            CheckpointError, OSError: See ``Crew.settle``.
        """
        for sink in self._sinks:
            sink.settle()
            self.written += sink.written
        self._crew.close()
        self._syncing = threading.Thread(target=self._make_durable)
        self._syncing.start()

    def _make_durable(self) -> None:
        try:
            for sink in self._sinks:
                sink.close()
            for directory, _, _ in walk(self._content):
                sync_directory(directory)
        except BaseException as failure:  # noqa: BLE001 - handed to the thread that commits, which raises it
            self._not_durable = failure

    def _wait_until_durable(self) -> None:
        if self._syncing is not None:
            self._syncing.join()
            self._syncing = None

    def commit(self) -> None:
        """Bring the target to its place, all of it or nothing.

        Raises:
            UsageError: Something came to stand there meanwhile.
            OSError: It can't be brought there; what stood there is back.
            AccessDenied: It can't be brought there, and what stood there could not be put back.
        """
        self._wait_until_durable()
        if self._not_durable is not None:
            raise self._not_durable
        self._sinks.clear()
        names = sorted(os.listdir(self._content), key=lambda name: (name.endswith(".index"), name))
        if self._replaces is None:
            self._require_absent(names)
        old = [name for name in (self._replaces or ()) if stands(os.path.join(self._directory, name))]
        if names == old == [self._name] and self.shape == "file" and not is_directory(self.target):
            self._replace_file()
        else:
            self._move(names, old)
        sync_directory(self._directory)
        self.discard()

    def _require_absent(self, names: list[str]) -> None:
        for name in names:
            if stands(os.path.join(self._directory, name)):
                raise UsageError(f"{os.path.join(self._directory, name)} has come to exist meanwhile")

    def _replace_file(self) -> None:
        _keep_mode(self.path, self.target)
        os.replace(self.path, self.target)

    def _move(self, names: list[str], old: list[str]) -> None:
        for name in set(names) & set(old):
            _keep_mode(os.path.join(self._content, name), os.path.join(self._directory, name))
        # The index of a TensorFlow checkpoint leaves first and comes last: without it there is none.
        old = sorted(old, key=lambda name: not name.endswith(".index"))
        moves = plan(self._directory, self._area, names, old) if old or len(names) > 1 else None
        try:
            for name in old:
                os.rename(os.path.join(self._directory, name), os.path.join(self._area, REPLACED, name))
            for name in names:
                bring(os.path.join(self._content, name), os.path.join(self._directory, name))
        except BaseException as error:
            if moves is not None:
                self._undo(moves, error)
            raise

    def _undo(self, moves: Plan, error: BaseException) -> None:
        self._holds_old = True  # until it is back: what goes wrong here must not remove it
        try:
            undo(self._directory, self._area, moves)
        except BaseException as failure:
            raise AccessDenied(
                self.target,
                f"it can't be brought there ({told(error)}), and what stood there can't be put back "
                f"({told(failure)}): it lies in {os.path.join(self._area, REPLACED)}",
            ) from failure
        self._holds_old = False

    def discard(self) -> None:
        """Leave nothing behind but what was committed; doing it twice is allowed."""
        self._wait_until_durable()
        self._crew.close()
        for sink in self._sinks:
            with suppress(OSError):  # it goes
                sink.abandon()
        self._sinks.clear()
        area, self._area = self._area, ""
        lock, self._lock = self._lock, -1
        try:
            if area and not self._holds_old:
                remove(area)
        except OSError as error:  # of what was committed, or of another failure, it changes nothing
            self.warnings += (f"{area} can't be removed: {told(error)}",)
        finally:
            if lock >= 0:
                os.close(lock)


@contextmanager
def _locked(directory: str) -> Iterator[bool]:
    """Keep others from making or clearing areas in a directory; tell whether they are kept from it.

    Raises:
        OSError: It can't be opened.
    """
    if fcntl is None:
        yield True
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        until = time.monotonic() + _PATIENCE
        while not (is_alone := _is_locked(descriptor)) and time.monotonic() < until:
            time.sleep(0.02)
        yield is_alone
    finally:
        os.close(descriptor)


def _is_locked(descriptor: int) -> bool:
    """Lock a directory; tell whether nobody else had."""
    try:
        _lock(descriptor)
    except BlockingIOError:
        return False
    return True


def _lock(descriptor: int) -> None:
    """Lock a directory, where the file system has locks; where it has none, nobody clears anything.

    Raises:
        BlockingIOError: Somebody else has locked it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return


def _keep_mode(path: str, old: str) -> None:
    """Give a file the mode and the owner of the one that gives way to it, and a directory the mode."""
    if is_directory(path) and is_directory(old):
        os.chmod(path, stat.S_IMODE(os.lstat(old).st_mode))
    elif os.path.isfile(path):
        descriptor = os.open(path, os.O_RDWR)
        try:
            adopt(descriptor, old)
        finally:
            os.close(descriptor)
