"""Looks at many checkpoints: each has to be opened, which is Python work, so children do a part of it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from ckpttool.children import Child, Lost
from ckpttool.formats.interface import Unit
from ckpttool.series.members.entry import Entry, look_at
from ckpttool.work import default_jobs

WORTH_UNITS = 300
"""So many checkpoints are worth a child, which takes as long to start as these to look at."""
_BATCH = 50

Found = tuple[Unit, bool]
"""A unit, and whether other checkpoints lie inside it."""


def look_at_all(found: Sequence[Found]) -> list[Entry]:
    """Return the entries of checkpoints, in their order, without those that have vanished."""
    if len(found) < WORTH_UNITS or default_jobs() == 1:
        return [entry for entry in _looked_at(found) if entry is not None]
    batches = [found[start : start + _BATCH] for start in range(0, len(found), _BATCH)]
    looked = _shared_out(batches, min(default_jobs(), len(found) // WORTH_UNITS + 1))
    return [
        replace(entry, unit=unit)  # a child's format is a copy of ours
        for batch, entries in zip(batches, looked, strict=True)
        for (unit, _), entry in zip(batch, entries, strict=True)
        if entry is not None
    ]


def _shared_out(batches: Sequence[Sequence[Found]], jobs: int) -> list[list[Entry | None]]:
    """Return the entries of each batch: looked at by this process, and by a child for each other job."""
    waiting = deque(range(len(batches)))
    done: dict[int, list[Entry | None]] = {}
    ends = threading.Event()
    threads = [threading.Thread(target=_assist, args=(batches, waiting, done, ends)) for _ in range(jobs - 1)]
    for thread in threads:
        thread.start()
    try:
        _work_off(batches, waiting, done, _looked_at)
    finally:
        ends.set()
        for thread in threads:
            thread.join()
    _work_off(batches, waiting, done, _looked_at)  # what a child that was killed gave back
    return [done[number] for number in range(len(batches))]


def _assist(
    batches: Sequence[Sequence[Found]],
    waiting: deque[int],
    done: dict[int, list[Entry | None]],
    ends: threading.Event,
) -> None:
    """Have a child take batches as long as there are some."""
    try:
        child = Child(__name__)
    except Lost:
        return
    try:
        _work_off(batches, waiting, done, child.ask, ends)
    except Lost:
        pass  # its batch is waiting again
    finally:
        child.dismiss()


def _work_off(
    batches: Sequence[Sequence[Found]],
    waiting: deque[int],
    done: dict[int, list[Entry | None]],
    look: Callable[[Sequence[Found]], list[Entry | None]],
    ends: threading.Event | None = None,
) -> None:
    """Take batches until none waits, or an interrupt ended it.

    Raises:
        Lost: The child is gone; its batch waits again.
    """
    while waiting and not (ends is not None and ends.is_set()):
        try:
            number = waiting.popleft()
        except IndexError:  # another thread was quicker
            return
        try:
            done[number] = look(batches[number])
        except Lost:
            waiting.append(number)
            raise


def _looked_at(found: Sequence[Found]) -> list[Entry | None]:
    return [look_at(unit, holds_others=holds_others) for unit, holds_others in found]


def answers() -> Callable[[Sequence[Found]], list[Entry | None]]:
    """Return what a child answers orders with."""
    return _looked_at
