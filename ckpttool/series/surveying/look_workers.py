"""Looks at many checkpoints: each has to be opened, which is Python work, so children do a part of it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ckpttool.children import Child, Lost
from ckpttool.errors import CheckpointError
from ckpttool.formats.interface import Unit
from ckpttool.series.members.entry import Entry
from ckpttool.series.members.look import look_at, look_for
from ckpttool.work import default_jobs

WORTH_UNITS = 300
"""So many checkpoints are worth a child, which takes as long to start as these to look at."""
_BATCH = 50

Discovered = tuple[Unit, bool] | str
"""A unit, and whether other checkpoints lie inside it; or the path of a file that may be one."""


class LookResult(NamedTuple):
    """What was seen of something found.

    Attributes:
        unit: The checkpoint; None where a file is none.
        entry: Its entry; None where it has vanished.
    """

    unit: Unit | None
    entry: Entry | None


def look_at_all(found: Iterable[Discovered]) -> list[LookResult | None]:
    """Return what is seen of all that is found, in its order, while it is being found.

    None stands for a file by whose path alone it can't be told: it can't be read, or is a part of more.
    """
    pool = _LookPool()
    batch: list[Discovered] = []
    try:
        for candidate in found:
            batch.append(candidate)
            if len(batch) == _BATCH:
                pool.give(batch)
                batch = []
        pool.give(batch)
        pool.work_off()
    finally:
        pool.dismiss()
    return pool.results()


class _LookPool:
    """Looks at batches: this process, and a child for each other processor once there is enough to do."""

    def __init__(self) -> None:
        self._batches: list[Sequence[Discovered]] = []
        self._waiting: deque[int] = deque()
        self._done: dict[int, list[LookResult | None]] = {}
        self._changed = threading.Condition()
        self._is_complete = self._is_over = False
        self._threads: list[threading.Thread] = []
        self._count = 0

    def give(self, batch: Sequence[Discovered]) -> None:
        """Have a batch looked at."""
        with self._changed:
            self._waiting.append(len(self._batches))
            self._batches.append(batch)
            self._changed.notify()
        self._count += len(batch)
        while len(self._threads) < min(default_jobs() - 1, self._count // WORTH_UNITS):
            self._threads.append(threading.Thread(target=self._employ_child))
            self._threads[-1].start()

    def work_off(self) -> None:
        """Look at what waits, until all has been looked at; no more batches come."""
        with self._changed:
            self._is_complete = True
            self._changed.notify_all()
        self._work(_look_at_batch)
        for thread in self._threads:
            thread.join()
        self._work(_look_at_batch)  # what a child that was killed gave back

    def dismiss(self) -> None:
        """Let the children end, be everything done or not."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def results(self) -> list[LookResult | None]:
        """Return what was seen, in the order in which it was found."""
        return [result for number in range(len(self._batches)) for result in self._done[number]]

    def _employ_child(self) -> None:
        """Have a child take batches as long as there are some."""
        try:
            child = Child(__name__)
        except Lost:
            return
        try:
            self._work(child.ask)
        except Lost:
            pass  # its batch is waiting again
        finally:
            child.dismiss()

    def _work(self, look: Callable[[Sequence[Discovered]], list[LookResult | None]]) -> None:
        """Take batches until no more come, or an interrupt ended it."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_complete or self._is_over)
                if self._is_over or not self._waiting:
                    return
                number = self._waiting.popleft()
            try:
                self._done[number] = look(self._batches[number])
            except Lost:
                self._waiting.append(number)
                raise


def _look_at_batch(batch: Sequence[Discovered]) -> list[LookResult | None]:
    results: list[LookResult | None] = []
    for candidate in batch:
        if isinstance(candidate, str):
            try:
                result = LookResult(*look_for(candidate))
            except CheckpointError:
                results.append(None)
            else:
                is_its_own = result.unit is None or result.unit.path == candidate  # else a part of more
                results.append(result if is_its_own else None)
        else:
            unit, holds_others = candidate
            results.append(LookResult(unit, look_at(unit, holds_others=holds_others)))
    return results


def answers() -> Callable[[Sequence[Discovered]], list[LookResult | None]]:
    """Return what a child answers orders with."""
    return _look_at_batch
