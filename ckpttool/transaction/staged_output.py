"""Outputs that appear whole or not at all: written in a directory beside, made durable, renamed.

Everything is written below ``.ckpttool-<id>.new/content/`` in the directory of the target, under its final
name. A lock on that directory says that somebody works there; one without a lock is what a kill left. It is
cleared when the next target is staged beside it; see ``staging_area``.

Both directories, and the one of the target, are held open: whoever may write in the target's directory can
put a link in the place of ours, and has nothing written, moved or removed behind it.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import TracebackType
from typing import Literal

from ckpttool.errors import AccessDenied, UsageError, from_os_error
from ckpttool.transaction.staging_area import (
    CONTENT,
    REPLACED,
    SwapPlan,
    claim,
    error_text,
    move_without_replacing,
    new_area_name,
    recover_areas,
    remove_area,
    undo_swap,
    write_plan,
)
from ckpttool.wire.atomic import adopt_mode
from ckpttool.wire.directories import FOLLOWS_NOTHING, HAS_LOCKS, OpenDirectory, try_lock
from ckpttool.wire.sink import Sink, Written
from ckpttool.work import Advance, default_jobs, pool_of_calls

OutputShape = Literal["file", "directory", "prefix"]

_PATIENCE = 3.0
"""For how many seconds others may keep us from making room."""


class StagedOutput:
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
        shape: OutputShape = "file",
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
        """
        self.target = os.fspath(target).rstrip(os.sep)
        self.shape = shape
        directory, self._name = os.path.split(self.target)
        self._replaces = replaces
        self._pool = pool_of_calls(default_jobs() if jobs is None else jobs)
        self._advance = advance
        self._sinks: list[Sink] = []
        self._syncing = pool_of_calls(1)
        self.written: list[Written] = []
        self.warnings: tuple[str, ...] = ()
        self._holds_old = False
        self._open = ExitStack()
        self._area: OpenDirectory | None = None
        try:
            self._directory = self._open.enter_context(OpenDirectory(directory or os.curdir))
            # Only whoever has the lock of the target's directory makes an area there, or clears one: between
            # the making of ours and its own lock, it would look like one that a kill left.
            with _locked_directory(self._directory) as is_alone:
                self.warnings = _recover(self._directory, is_alone=is_alone)
                area = self._open.enter_context(self._directory.make(new_area_name(), 0o700))
                self._area = area
                if area.descriptor is not None and not _may_have(area.descriptor):
                    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), area.path)
                claim(area)
            self._content = self._open.enter_context(area.make(CONTENT))
            self.path = self._content.join(self._name)
            if shape == "directory":
                self._content.make(self._name).close()
        except OSError as error:
            self.discard()
            raise from_os_error(error, directory or os.curdir) from error
        except BaseException:
            self.discard()
            raise

    def __enter__(self) -> StagedOutput:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.discard()

    def create(self, name: str = "") -> Sink:
        """Return a new file of the target.

        Args:
            name: Of a directory, the path in it; of a prefix, what comes behind it; of a file, nothing.
        """
        path = os.path.join(self._name, name) if self.shape == "directory" else self._name + name
        above, own = os.path.split(path)
        with self._content.make_or_open(above) as directory:
            sink = Sink(directory.join(own), self._pool, self._advance, directory)
        self._sinks.append(sink)
        return sink

    def settle(self) -> None:
        """Bring all that was written into the files; the target can be opened at ``path`` then.

        Meanwhile it is made durable by a thread of its own, for which ``commit`` waits.
        """
        self.require_in_place()
        for sink in self._sinks:
            sink.settle()
            self.written += sink.written
        self._pool.close()
        self._syncing.add(self._sync)

    def _sync(self) -> None:
        for sink in self._sinks:
            sink.close()
        self._content.sync_tree()

    def commit(self) -> None:
        """Bring the target to its place, all of it or nothing.

        After an OSError what stood there is back; an AccessDenied says where it lies if it is not.
        """
        # A rename may reach the disk before what was written: after a power cut, the target would be empty.
        self._syncing.settle()
        self._sinks.clear()
        self.require_in_place()
        names = sorted(self._content.names(), key=lambda name: (name.endswith(".index"), name))
        if self._replaces is None and (present := next(filter(self._directory.has, names), None)) is not None:
            raise UsageError(f"{self._directory.join(present)} has come to exist meanwhile")
        old = [name for name in (self._replaces or ()) if self._directory.has(name)]
        is_over_file = not self._directory.holds_directory(self._name)
        if names == old == [self._name] and self.shape == "file" and is_over_file:
            _keep_mode(self._content, self._directory, self._name)
            self._content.replace(self._name, self._directory, self._name)
        else:
            self._swap(names, old)
        self._directory.sync()
        self.discard()

    def require_in_place(self) -> None:
        """Require that paths lead to what is held open, so that what was read back is what was written."""
        area = self._area
        assert area is not None  # it is not discarded
        if area.descriptor is not None and not (
            self._directory.is_at_path() and self._directory.leads_to(os.path.basename(area.path), area)
        ):
            reason = (
                "its directory, or the one in which it was written, was moved away or exchanged meanwhile"
            )
            raise AccessDenied(self.target, f"{reason}; nothing was put there")

    def _swap(self, names: list[str], old: list[str]) -> None:
        """Set aside what gives way, and bring the new to its place; take both back if that fails."""
        area = self._area
        assert area is not None  # it is not discarded
        for name in set(names) & set(old):
            _keep_mode(self._content, self._directory, name)
        # The index of a TensorFlow checkpoint leaves first and comes last: without it there is none.
        old = sorted(old, key=lambda name: not name.endswith(".index"))
        # One new name is there or not. Of more, a kill may leave some: the plan says how to take them back.
        plan = write_plan(self._directory, area, names, old) if old or len(names) > 1 else None
        try:
            if plan is not None:
                with area.open(REPLACED) as aside:
                    for name in old:
                        self._directory.rename(name, aside)
            for name in names:
                move_without_replacing(name, self._content, self._directory)
        except BaseException as error:
            if plan is not None:
                self._put_back(area, plan, error)
            raise

    def _put_back(self, area: OpenDirectory, plan: SwapPlan, error: BaseException) -> None:
        self._holds_old = True  # until it is back: what goes wrong here must not remove it
        try:
            undo_swap(self._directory, area, plan)
        except BaseException as failure:
            raise AccessDenied(
                self.target,
                f"it can't be brought there ({error_text(error)}), and what stood there can't be put back "
                f"({error_text(failure)}): it lies in {area.join(REPLACED)}",
            ) from failure
        self._holds_old = False

    def discard(self) -> None:
        """Leave nothing behind but what was committed; doing it twice is allowed."""
        self._syncing.close()
        self._pool.close()
        for sink in self._sinks:
            with suppress(OSError):  # it goes
                sink.abandon()
        self._sinks.clear()
        area, self._area = self._area, None
        try:
            if area is not None and not self._holds_old:
                remove_area(self._directory, area)
        except OSError as error:  # of what was committed, or of another failure, it changes nothing
            self.warnings += (f"{area.path if area else ''} can't be removed: {error_text(error)}",)
        finally:
            self._open.close()


def clear_beside(target: str) -> tuple[str, ...]:
    """Finish or take back what a kill left where a target is to stand, before anybody looks what is there.

    Returns:
        What could not be, each in a sentence.
    """
    parent = os.path.dirname(target.rstrip(os.sep)) or os.curdir
    try:
        with OpenDirectory(parent) as directory, _locked_directory(directory) as is_alone:
            return _recover(directory, is_alone=is_alone)
    except OSError as error:
        raise from_os_error(error, parent) from error


def _recover(directory: OpenDirectory, *, is_alone: bool) -> tuple[str, ...]:
    if is_alone:
        return (*recover_areas(directory),)
    return (f"{directory.path} is locked: what kills left there is not looked for",)


@contextmanager
def _locked_directory(directory: OpenDirectory) -> Iterator[bool]:
    """Keep others from making or clearing areas in a directory; yield whether they are kept from it."""
    if not HAS_LOCKS or directory.descriptor is None:
        yield True
        return
    # Opened again: the lock goes with this descriptor, while the other stays open as long as the target.
    with directory.open(os.curdir) as again:
        assert again.descriptor is not None  # as that of the other is not
        until = time.monotonic() + _PATIENCE
        while not (is_alone := _may_have(again.descriptor)) and time.monotonic() < until:
            time.sleep(0.02)
        yield is_alone


def _may_have(descriptor: int) -> bool:
    """Lock a directory, if nobody else has; on a file system without locks, nobody clears anything."""
    try:
        return try_lock(descriptor)
    except OSError:
        return True


def _keep_mode(content: OpenDirectory, directory: OpenDirectory, name: str) -> None:
    """Give a file the mode and the owner of the one that gives way to it, and a directory the mode."""
    new, old = content.status(name), directory.status(name)
    if new is None or old is None:
        return
    if stat.S_ISDIR(new.st_mode) and stat.S_ISDIR(old.st_mode):
        with content.open(name) as place:
            os.chmod(place.path if place.descriptor is None else place.descriptor, stat.S_IMODE(old.st_mode))
    elif stat.S_ISREG(new.st_mode):
        descriptor = os.open(content.at(name), os.O_RDWR | FOLLOWS_NOTHING, dir_fd=content.descriptor)
        try:
            adopt_mode(descriptor, directory.at(name), directory.descriptor)
        finally:
            os.close(descriptor)
