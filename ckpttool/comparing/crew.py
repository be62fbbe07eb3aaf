"""Threads that share the work on pairs of tensors: large ones in ranges, small ones many at a time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from ckpttool.work import Advance

T = TypeVar("T")

MAX_STREAMS = 2
"""How many tensors are put together as they are read at once: each takes tens of MiB a side."""

_BATCH_BYTES = 1 << 22
_BATCH_RANGES = 256
_REPORTED_BYTES = 1 << 22


class CrewStopped(Exception):
    """Somebody waits no longer for the answer."""


@dataclass(frozen=True, slots=True)
class WorkRange(Generic[T]):
    """A part of the work on one item: from where on, and how much; ``nbytes`` is what is read."""

    item: T
    start: int
    count: int
    nbytes: int


class RangeWorker(Protocol[T]):
    """What does ranges in one thread."""

    def do(self, part: WorkRange[T]) -> None:
        """Do one range."""

    def end(self) -> None:
        """Tell what was not told yet, and give back what was taken: there is no more to do."""


def batches(ranges: Iterable[WorkRange[T]]) -> Iterator[list[WorkRange[T]]]:
    """Yield ranges in their order, small ones together."""
    batch: list[WorkRange[T]] = []
    nbytes = 0
    for one in ranges:
        batch.append(one)
        nbytes += one.nbytes
        if nbytes >= _BATCH_BYTES or len(batch) >= _BATCH_RANGES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


class Meter:
    """Tells how many bytes are done, not too often; one a thread."""

    def __init__(self, advance: Advance) -> None:
        self._advance = advance
        self._pending = 0

    def add(self, nbytes: int) -> None:
        """Count bytes as done."""
        self._pending += nbytes
        if self._pending >= _REPORTED_BYTES:
            self.flush()

    def flush(self) -> None:
        """Tell what was not told yet."""
        if self._pending:
            self._advance(self._pending)
        self._pending = 0


class RangeCrew(Generic[T]):
    """Threads that work off batches; the calling thread is one of them.

    An exception in one of them, Ctrl-C above all, stops the others at their next block.
    """

    def __init__(self, placed: Iterable[list[WorkRange[T]]], streamed: Iterable[list[WorkRange[T]]]) -> None:
        """Take what can be read anywhere, and what has to be read from its start on."""
        self._placed, self._streamed = deque(placed), deque(streamed)
        self._lock = threading.Lock()
        self._streams = 0
        self._stop = threading.Event()
        self._error: BaseException | None = None

    def work(self, begin: Sequence[Callable[[], RangeWorker[T]]]) -> None:
        """Do all the work, in at most a thread for each of ``begin``, which it calls for its worker."""
        threads = min(len(begin), len(self._placed) + min(len(self._streamed), MAX_STREAMS))
        own, *helpers = begin[: max(1, threads)]
        others = [threading.Thread(target=self._work, args=(one,), daemon=True) for one in helpers]
        try:
            for thread in others:
                thread.start()
            self._work(own)
            for thread in others:
                thread.join()
        except BaseException:  # Ctrl-C while waiting
            self._stop.set()
            raise
        if self._error is not None:
            raise self._error

    def check(self) -> None:
        """Require that the answer is still waited for."""
        if self._stop.is_set():
            raise CrewStopped

    def _work(self, begin: Callable[[], RangeWorker[T]]) -> None:
        try:
            worker = begin()
            try:
                while (batch := self._next_batch()) is not None:
                    ranges, is_streamed = batch
                    for one in ranges:
                        self.check()
                        worker.do(one)
                    if is_streamed:
                        with self._lock:
                            self._streams -= 1
            finally:
                worker.end()
        except CrewStopped:
            return
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits, which raises it
            self._error = error
            self._stop.set()

    def _next_batch(self) -> tuple[list[WorkRange[T]], bool] | None:
        """Return the next batch, and whether it is streamed; these come first, since they can't be shared."""
        with self._lock:
            if self._stop.is_set():
                return None
            if self._streamed and self._streams < MAX_STREAMS:
                self._streams += 1
                return self._streamed.popleft(), True
            return (self._placed.popleft(), False) if self._placed else None
