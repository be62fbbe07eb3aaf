"""A clock that stands still but for sleeps, in place of the computer's."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

START = 1_700_000_000.0
"""Seconds since 1970 at which it starts."""


class Clock:
    """Tells the time in this process; what happens meanwhile is told beforehand.

    Attributes:
        now: Seconds since it was started.
    """

    def __init__(self, patch: pytest.MonkeyPatch, start: float = START) -> None:
        self.now = 0.0
        self._start = start
        self._happening: list[tuple[float, Callable[[], object]]] = []
        for name in ("time", "monotonic", "sleep"):
            patch.setattr(time, name, getattr(self, name))

    def time(self) -> float:
        return self._start + self.now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float, /) -> None:
        assert seconds > 0
        self.now += seconds
        while self._happening and self._happening[0][0] <= self.now:
            self._happening.pop(0)[1]()

    def at(self, second: float, step: Callable[[], object]) -> None:
        """Let something happen at a second."""
        self._happening.append((second, step))

    def stamp(self, path: Path) -> None:
        """Give a file the time that it is."""
        os.utime(path, (self.time(), self.time()))
