"""Looks at many checkpoints: each has to be opened, which is Python work, so children do a part of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.core.errors import CheckpointError
from ckpttool.formats.interface import Unit
from ckpttool.io.children import Child, Lost
from ckpttool.io.work import Advance, Pool, TaskReturned, default_jobs, in_order, no_advance, worker_of
from ckpttool.runs.members.entry import Entry
from ckpttool.runs.members.look import look_at, look_for

if TYPE_CHECKING:
    from concurrent.futures import Executor

WORTH_UNITS = 300
"""So many checkpoints are worth a child, which takes as long to start as these to look at."""
_BATCH = 50
_SHARED_BATCH = 4
"""How many are handed over to others at once, who wait for a store or a network meanwhile."""

Discovered = tuple[Unit, bool] | str
"""A unit, and whether other checkpoints lie inside it; or the path of a file that may be one."""


_Task = tuple[int, Sequence[Discovered]]
"""A batch, with its number."""


class LookResult(NamedTuple):
    """What was seen of something found.

    Attributes:
        unit: The checkpoint; None where a file is none.
        entry: Its entry; None where it has vanished.
    """

    unit: Unit | None
    entry: Entry | None


def look_at_all(
    found: Iterable[Discovered], executor: Executor | None = None, advance: Advance = no_advance
) -> list[LookResult | None]:
    """Return what is seen of all that is found, in its order, while it is being found.

    None stands for a file by whose path alone it can't be told: it can't be read, or is a part of more.

    Args:
        found: What is to be looked at.
        executor: Looks at it instead of this process and its children, wherever it has the files.
        advance: Called with the number of those looked at, from any thread.
    """
    if executor is not None:
        parts = in_order(_look_at_part, _batches(found, _SHARED_BATCH), 1, executor)
        return [result for part in parts for result in part]
    done: dict[int, list[LookResult | None]] = {}
    count = children = 0
    with Pool[_Task]() as pool:
        for number, batch in enumerate(_batches(found)):
            pool.add((number, batch))
            advance(0)
            count += len(batch)
            if children < min(default_jobs() - 1, count // WORTH_UNITS):
                children += 1
                pool.start(partial(_child, done, advance))
        pool.work(worker_of(partial(_look, done, advance)))
    return [result for number in range(len(done)) for result in done[number]]


def _batches(found: Iterable[Discovered], size: int = _BATCH) -> Iterator[Sequence[Discovered]]:
    candidates = iter(found)
    while batch := list(islice(candidates, size)):
        yield batch


def _look(done: dict[int, list[LookResult | None]], advance: Advance, task: _Task) -> None:
    number, batch = task
    done[number] = _look_at_batch(batch)
    advance(len(batch))


@contextmanager
def _child(done: dict[int, list[LookResult | None]], advance: Advance) -> Iterator[Callable[[_Task], None]]:
    """Yield what has a child look at batches; one that is killed gives its batch back."""
    try:
        child = Child(__name__)
    except Lost as error:
        raise TaskReturned from error

    def look(task: _Task) -> None:
        number, batch = task
        try:
            done[number] = child.ask(batch)
        except Lost as error:
            raise TaskReturned from error
        advance(len(batch))

    try:
        yield look
    finally:
        child.dismiss()


def _look_at_part(batch: Sequence[Discovered], check: Callable[[], None]) -> list[LookResult | None]:
    check()
    return _look_at_batch(batch)


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
