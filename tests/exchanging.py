"""Another user at work beside a command: he owns the directory, and exchanges what is made in it."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

CALLS = (
    *("open", "mkdir", "rename", "replace", "link", "symlink", "unlink", "rmdir", "fsync", "pwrite", "write"),
    *("fchmod", "chmod", "fchown", "utime", "lstat", "stat", "fstat", "listdir", "scandir", "close"),
)
Way = Literal["a link", "a directory"]
WAYS: tuple[Way, ...] = ("a link", "a directory")

_NAMES = (
    "owner",
    "moving",
    "journal.json",
    "record.json",
    "ckpt",
    "ckpt.index",
    ".ckpttool-000000000000.tmp",
)
_BELOW = ("content/ckpt", "replaced/ckpt", "0/model_epoch_1.pth")


class Bystander:
    """A directory of somebody else's, with all the names that a command could write or remove in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for name in (*_NAMES, *_BELOW):
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(f"untouched: {name}".encode())
        self._node = path.stat().st_ino
        self._before = self._states()

    def _states(self) -> dict[str, tuple[object, ...]]:
        names = sorted(str(one.relative_to(self.path)) for one in self.path.rglob("*"))
        return {name: self._state(self.path / name) for name in (".", *names)}

    @staticmethod
    def _state(path: Path) -> tuple[object, ...]:
        found = path.lstat()
        data = path.read_bytes() if path.is_file() else b""
        return (
            found.st_ino,
            found.st_mode,
            found.st_uid,
            found.st_nlink,
            found.st_size,
            found.st_mtime_ns,
            data,
        )

    def require_untouched(self, place: Path, *, may_gain: bool = False) -> None:
        """Require that all in it is as it was, where it lies or in ``place``, from where it comes back.

        Args:
            place: Where it may have been brought.
            may_gain: Whether something may have come to it, and be there still.
        """
        for path in place.iterdir():
            if path.lstat().st_ino == self._node:
                path.rename(self.path)
        if may_gain:
            known = {self.path / where for where in self._before}
            for path in sorted({*self.path.rglob("*")} - known, reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            for where, before in self._before.items():
                after = self._state(self.path / where)
                assert after == before or (self.path / where).is_dir()  # its time is another then
            self._before = self._states()
        assert self._states() == self._before


class Exchange:
    """Exchanges all that is called ``.ckpttool-…`` in a directory, before the call of some number."""

    def __init__(self, patched: pytest.MonkeyPatch, place: Path, by: Path, way: Way, number: int) -> None:
        self.count, self.is_done = 0, False
        self._place, self._by, self._way, self._number = place, by, way, number
        self._lock = threading.RLock()
        self._real = {name: getattr(os, name) for name in CALLS}
        for name in CALLS:
            patched.setattr(os, name, self._watched(self._real[name]))

    def _watched(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            with self._lock:
                self.count += 1
                if self.count >= self._number and not self.is_done:
                    self._exchange()
            return real(*arguments, **options)

        return call

    def _exchange(self) -> None:
        """Exchange what is there; where nothing is yet, wait for it."""
        # First, as the collector may close a descriptor, and so call this, between any two lines.
        self.is_done = True
        for name in self._real["listdir"](self._place):
            path = os.path.join(self._place, name)
            if name.startswith(".ckpttool-") and os.path.isdir(path) and not os.path.islink(path):
                self._real["rename"](path, os.path.join(self._place, f"taken-{name}"))
                if self._way == "a link":
                    self._real["symlink"](self._by, path)
                else:
                    self._real["rename"](self._by, path)
                return
        self.is_done = self.count > self._number + 3


def exchanges(
    tmp_path: Path,
    way: Way,
    lay_out: Callable[[Path], None],
    work: Callable[[Path], object],
    *,
    may_gain: bool = False,
    first: int = 1,
    step: int = 1,
) -> Iterator[tuple[Path, Exception | None]]:
    """Do some work once for each call of the system that it makes, with an exchange before that call.

    Args:
        tmp_path: Where to work.
        way: What comes to stand in the place of what is exchanged.
        lay_out: Writes what lies in the directory.
        work: What is done in it.
        may_gain: Whether a directory that is brought there may have something put into it.
        first: The call before which the first exchange comes.
        step: Of how many calls one is tried.

    Yields:
        The directory that it was done in, and how it failed; nobody else's was touched meanwhile.
    """
    bystander = Bystander(tmp_path / "bystander")
    for number in itertools.count(first, step):
        place = tmp_path / f"place-{number}"
        place.mkdir()
        lay_out(place)
        failure: Exception | None = None
        with pytest.MonkeyPatch.context() as patched:
            exchange = Exchange(patched, place, bystander.path, way, number)
            try:
                work(place)
            except Exception as error:  # noqa: BLE001 - handed to the test, which knows what it may be
                failure = error
        if exchange.count < number:
            bystander.require_untouched(place)
            return
        yield place, failure
        bystander.require_untouched(place, may_gain=may_gain and way == "a directory")
