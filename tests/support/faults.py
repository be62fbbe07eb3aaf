"""Faults at the calls that change the disk: each call in turn fails, or kills the process."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

CHANGES = ("open", "rename", "replace", "unlink", "rmdir", "mkdir", "link", "symlink", "fsync", "write")
"""Of ``os``; of ``open`` only calls that may make a file."""


def hit_call(
    number: int,
    fault: Callable[[], object],
    calls: Sequence[str] = CHANGES,
    patch: Callable[[Any, str, Any], object] = setattr,
) -> Callable[[], int]:
    """Have a fault happen before the ``number``-th call from now on; return what counts the calls."""
    made = 0

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal made
            if name != "open" or arguments[1] & os.O_CREAT:
                made += 1
                if made == number:
                    fault()
            return real(*arguments, **options)

        return call

    for name in calls:
        patch(os, name, wrap(name, getattr(os, name)))
    return lambda: made


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
