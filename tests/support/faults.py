"""Faults at calls of the system: one that changes the disk fails or kills the process, a link is closed."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from ckpttool import CheckpointError
from ckpttool.storage import directories

CHANGES = ("open", "rename", "replace", "unlink", "rmdir", "mkdir", "link", "symlink", "fsync", "write")
"""Of ``os``; of ``open`` only calls that may make a file."""


def wait_for_no_disk() -> None:
    """Let this process force nothing onto the disk: what lies in the system's cache survives a kill."""
    os.fsync = lambda descriptor: None


class DiskStep(NamedTuple):
    """A call that changes the disk, or makes it durable, and the inode of the file that it is about."""

    call: str
    inode: int


def disk_steps(patch: pytest.MonkeyPatch) -> list[DiskStep]:
    """Return the list that gets each call from now on that renames, links, unlinks or forces a file."""
    steps: list[DiskStep] = []

    def watch(name: str, inode: Callable[..., int]) -> None:
        real = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            steps.append(DiskStep(name, inode(*arguments, options.get("src_dir_fd", options.get("dir_fd")))))
            return real(*arguments, **options)

        patch.setattr(os, name, call)

    watch("fsync", lambda descriptor, place: os.fstat(descriptor).st_ino)
    for name in ("rename", "replace", "link", "unlink"):
        watch(name, lambda source, *more: os.lstat(source, dir_fd=more[-1]).st_ino)
    return steps


def hit_call(
    number: int,
    fault: Callable[[], object],
    calls: Sequence[str] = CHANGES,
    patch: Callable[[Any, str, Any], object] = setattr,
    *,
    lasts: bool = False,
) -> Callable[[], int]:
    """Have a fault happen before the ``number``-th call from now on; return what counts the calls.

    One that lasts happens before all that follow, too.
    """
    made = 0

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal made
            if name != "open" or arguments[1] & os.O_CREAT:
                made += 1
                if made == number or (lasts and made > number > 0):
                    fault()
            return real(*arguments, **options)

        return call

    for name in calls:
        patch(os, name, wrap(name, getattr(os, name)))
    return lambda: made


def retry_at_once(patch: Callable[[Any, str, Any], object] = setattr) -> None:
    """Let a directory that is in use be tried again without a pause."""
    patch(directories, "RETRY_SECONDS", 0)


@contextmanager
def ends_all_threads() -> Iterator[None]:
    """Require that Ctrl-C ends what is done in a context, and all threads that it has started."""
    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        yield
    assert not set(threading.enumerate()) - before


def interrupt_hand_out(patch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """Let Ctrl-C come once a module has handed out its first batch of tasks."""
    real = module.batches

    def batches(*arguments: Any) -> Iterator[Any]:
        yield next(real(*arguments))
        raise KeyboardInterrupt

    patch.setattr(module, "batches", batches)


def fill_disk(patch: pytest.MonkeyPatch, has_room: Callable[[], bool] = lambda: False) -> list[object]:
    """Refuse what is written to a file until there is room; return what was written nevertheless."""
    write, written = os.write, []

    def written_or_refused(descriptor: int, data: Any) -> int:
        if not has_room():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(bytes(data))
        return write(descriptor, data)

    patch.setattr(os, "write", written_or_refused)
    return written


def kill() -> None:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def in_child(work: Callable[[], object]) -> int:
    """Do something in a child process, which ends without a word; return its status."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the parent is told
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def is_killed_at(number: int, work: Callable[[], object], calls: Sequence[str] = CHANGES) -> bool:
    """Do something in a child process that is killed before its ``number``-th call; tell whether it was."""

    def doomed() -> None:
        hit_call(number, kill, calls)
        work()

    status = in_child(doomed)
    assert status in (0, -signal.SIGKILL)
    return status != 0


class Killed(BaseException):
    """Ends a command without any of its handlers, as a kill would."""


def dies_at(number: int, work: Callable[[], object], calls: Sequence[str] = CHANGES) -> bool:
    """Do something that changes nothing any more from its ``number``-th call on; tell whether it came to it.

    For a command without threads that is what a kill does, but in this process.
    """
    return is_hit_at(number, work, Killed(), calls, lasts=True)


def is_hit_at(
    number: int,
    work: Callable[[], object],
    error: BaseException,
    calls: Sequence[str] = CHANGES,
    *,
    lasts: bool = False,
) -> bool:
    """Do something whose ``number``-th call fails, with which it may end; tell whether it came to it."""

    def fail() -> None:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        made = hit_call(number, fail, calls, patch.setattr, lasts=lasts)
        try:
            work()
        except (CheckpointError, KeyboardInterrupt, Killed) as failure:
            assert "\n" not in str(failure)
        return made() >= number


class Fault:
    """Makes the k-th call that changes the disk fail."""

    CALLS = ("rename", "replace", "unlink", "rmdir", "mkdir", "link", "fsync", "write")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._count: Callable[[], int] = lambda: 0

    @property
    def made(self) -> int:
        """Return how many calls there were since the fault was set."""
        return self._count()

    def at(self, number: int, error: BaseException) -> None:
        """Let the ``number``-th call from now on raise an error, once."""

        def fail() -> None:
            raise error

        self._count = hit_call(number, fail, self.CALLS, self._monkeypatch.setattr)

    def none(self) -> None:
        """Let all calls do what they should again."""
        self._monkeypatch.undo()


class _ClosedLink:
    """The entry of a link into a directory that is closed to this user."""

    def __init__(self, entry: os.DirEntry[str]) -> None:
        self.name, self.path, self.is_symlink = entry.name, entry.path, entry.is_symlink

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        if follow_symlinks:
            raise PermissionError(errno.EACCES, "Permission denied", self.path)
        return False

    is_dir = is_file


def path_at(name: str | int | os.PathLike[str], dir_fd: int | None = None) -> str:
    """Return the path of what a call is given: a path, a descriptor, or a name in an open directory."""
    if isinstance(name, int):
        return os.readlink(f"/proc/self/fd/{name}")
    return os.fspath(name) if dir_fd is None else os.path.join(path_at(dir_fd), name)


def close_link(link: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a link into a directory that no user but root could enter; root could."""
    link.symlink_to(link.parent.parent / "closed" / link.name)
    scandir = os.scandir

    class Scanning:
        def __init__(self, *arguments: Any) -> None:
            self._entries = scandir(*arguments)
            self.close = self._entries.close

        def __enter__(self) -> Scanning:
            return self

        def __exit__(self, *failure: object) -> None:
            self.close()

        def __iter__(self) -> Iterator[Any]:
            return self

        def __next__(self) -> Any:
            entry = next(self._entries)
            return _ClosedLink(entry) if entry.path == str(link) else entry

    monkeypatch.setattr(os, "scandir", Scanning)
