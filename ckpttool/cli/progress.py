"""Progress lines on stderr, on terminals only: drawn after a delay, and cleared at the end.

Rich is imported when the line is drawn.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ckpttool.cli.render.terminal import shorten
from ckpttool.core.text import printable

if TYPE_CHECKING:
    from ckpttool.runs.look import Progress
    from ckpttool.storage.work import Advance

PATIENCE = 0.5
"""Seconds before a progress line is drawn: short commands show none."""
_COLUMNS_OF_BYTES = 64
"""Columns of a bar with count, bytes, rate and time left; the rest of the line is for the path."""
_SHORTEST_NAME = 14


class ProgressLines:
    """Progress lines of one command, called as a ``Progress``; the delay begins with the creation."""

    def __init__(self) -> None:
        self._due = time.monotonic() + PATIENCE

    @contextmanager
    def __call__(self, label: str, total: int | None) -> Iterator[Advance]:
        """Show the bytes done of a total; without a total, the number of checkpoints."""
        if not _is_watched():
            yield lambda done: None
            return
        line = _Line(self._due, total, _counter if total is None else _bar)
        line.label = label
        with line:
            yield line.advance

    @contextmanager
    def of_all(self, sizes: Iterable[int]) -> Iterator[Progress]:
        """Show one bar for several pieces of work with given sizes, with the number of the current one."""
        if not _is_watched():
            yield self
            return
        pieces = [*sizes]
        line = _Line(self._due, sum(pieces), _bar if len(pieces) == 1 else _bar_of_all)
        number = 0

        @contextmanager
        def piece(label: str, total: int | None) -> Iterator[Advance]:
            nonlocal number
            # A piece is repeated if its file changes while it is read, and may report more or fewer bytes
            # than its size, since passes over a file are estimated. So the bar moves to the start of the
            # piece, never beyond its end, and to its end when it is done: it neither jumps back nor overruns.
            number = min(number + 1, len(pieces))
            line.label, line.position = label, f"{number:,} of {len(pieces):,}"
            end = sum(pieces[:number])
            line.move(end - pieces[number - 1])
            yield lambda nbytes: line.advance(nbytes, at_most=end)
            line.move(end)

        with line:
            yield piece


def progress(label: str, total: int | None) -> Any:
    """Show the progress of a command that does one thing; see ``ProgressLines``."""
    return ProgressLines()(label, total)


def _is_watched() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


class _Line:
    """A progress line that is drawn after a delay; updated from any thread."""

    def __init__(self, due: float, total: int | None, columns: Callable[[], list[Any]]) -> None:
        self.label = self.position = ""
        self._due, self._total, self._columns = due, total, columns
        self._done = 0
        self._drawn: Any = None
        self._lock = threading.Lock()

    def __enter__(self) -> _Line:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._drawn is not None:
                self._drawn.stop()
            self._due = float("inf")

    def advance(self, done: int, *, at_most: int | None = None) -> None:
        """Add to the progress, up to the total."""
        limit = self._total if at_most is None else at_most
        with self._lock:
            self._done = self._done + done if limit is None else min(self._done + done, limit)
            self._draw()

    def move(self, done: int) -> None:
        """Set the progress."""
        with self._lock:
            self._done = done
            self._draw()

    def _draw(self) -> None:
        if time.monotonic() < self._due:
            return
        if self._drawn is None:
            from rich.console import Console
            from rich.progress import Progress as RichProgress

            # Rich would redirect stdout, to write it above the line. Commands print while a line is drawn,
            # and their output must stay on the stream that the caller reads.
            self._drawn = RichProgress(
                *self._columns(),
                console=Console(stderr=True, highlight=False),
                transient=True,
                redirect_stdout=False,
            )
            self._drawn.add_task("", total=self._total, position="")
        room = max(self._drawn.console.width - _COLUMNS_OF_BYTES, _SHORTEST_NAME)
        name = shorten(printable(self.label), room)
        self._drawn.update(
            self._drawn.task_ids[0], completed=self._done, description=name, position=self.position
        )
        self._drawn.start()


def _text(template: str) -> Any:
    from rich.progress import TextColumn

    return TextColumn(template, markup=False)


def _counter() -> list[Any]:
    from rich.progress import SpinnerColumn

    return [SpinnerColumn(), _text("{task.description}: {task.completed:,} looked at")]


def _bar() -> list[Any]:
    from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

    return [
        _text("{task.description}"),
        BarColumn(bar_width=16),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    ]


def _bar_of_all() -> list[Any]:
    name, *bar = _bar()
    return [_text("{task.fields[position]}"), *bar, name]
