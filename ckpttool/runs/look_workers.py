"""Opens many checkpoints for a survey. That is Python work, so child processes share it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.core.errors import CheckpointError
from ckpttool.formats.interface import Unit
from ckpttool.runs.entry import Entry
from ckpttool.runs.look import look_at, look_at_path
from ckpttool.storage import fs
from ckpttool.storage.children import Child, ChildLost
from ckpttool.storage.held import HeldRoots, adopt_roots, held_roots
from ckpttool.storage.work import (
    Advance,
    Pool,
    TaskReturned,
    answer_of,
    default_jobs,
    no_advance,
    not_the_same,
    not_visible,
    path_everywhere,
    submitted,
    worker_of,
)
from ckpttool.transaction.files import contents
from ckpttool.transaction.paths import shown

if TYPE_CHECKING:
    from concurrent.futures import Executor

WORTH_UNITS = 300
"""Number of checkpoints that take as long to open as a child takes to start."""
_BATCH = 50
_SHARED_BATCH = 4
"""Checkpoints per task of an executor, whose workers mostly wait for a store or a network."""

Discovered = tuple[Unit, bool] | str
"""A unit, and whether its directory contains other checkpoints; or the path of a possible file."""


_Task = tuple[int, Sequence[Discovered]]
"""A batch, with its number."""


class LookResult(NamedTuple):
    """Result of looking at a unit or a path.

    Attributes:
        unit: The checkpoint; None if a file is none.
        entry: Its entry; None if it has vanished.
        unread: Why a file that looks like a model isn't read.
    """

    unit: Unit | None
    entry: Entry | None
    unread: str | None = None


def look_at_all(
    found: Iterable[Discovered], executor: Executor | None = None, advance: Advance = no_advance
) -> Sequence[LookResult | CheckpointError | None]:
    """Return the results for everything found, in order; looks start during the search.

    None is the result for a file that can't be read, or is a part of a larger unit.

    Args:
        found: Units and paths to look at.
        executor: Runs the work instead of this process and its children, on machines that see the same files;
            if a worker doesn't see them, or is lost, the result is an error.
        advance: Called with the number of results, from any thread.
    """
    # Batches are put into a pool while the search goes on, and children start as soon as there are enough of
    # them to be worth it. After the search, this process takes batches, too. A batch of a killed child is
    # returned to the pool.
    if executor is not None:
        return [*_look_in_executor(found, executor, advance)]
    done: dict[int, list[LookResult | None]] = {}
    count = children = 0
    with Pool[_Task]() as pool:
        for number, batch in enumerate(_batches(found, _BATCH)):
            pool.add((number, batch))
            advance(0)
            count += len(batch)
            if children < min(default_jobs() - 1, count // WORTH_UNITS):
                children += 1
                pool.start(partial(_child, done, advance))
        pool.work(worker_of(partial(_look, done, advance)))
    return [result for number in range(len(done)) for result in done[number]]


def _batches(found: Iterable[Discovered], size: int) -> Iterator[Sequence[Discovered]]:
    candidates = iter(found)
    while batch := list(islice(candidates, size)):
        yield batch


def _look(done: dict[int, list[LookResult | None]], advance: Advance, task: _Task) -> None:
    number, batch = task
    done[number] = _look_at_batch(batch)
    advance(len(batch))


@contextmanager
def _child(done: dict[int, list[LookResult | None]], advance: Advance) -> Iterator[Callable[[_Task], None]]:
    """Yield a function that looks at a batch in a child; if the child is killed, the batch is returned."""
    try:
        child = Child(__name__)
    except ChildLost as error:
        raise TaskReturned from error

    def look(task: _Task) -> None:
        number, batch = task
        try:
            done[number] = child.ask((held_roots(map(_path_of, batch)), batch))
        except ChildLost as error:
            raise TaskReturned from error
        advance(len(batch))

    try:
        yield look
    finally:
        child.dismiss()


def _look_at_batch(batch: Sequence[Discovered]) -> list[LookResult | None]:
    results: list[LookResult | None] = []
    for candidate in batch:
        if isinstance(candidate, str):
            try:
                result = LookResult(*look_at_path(candidate))
            except CheckpointError:
                results.append(None)
            else:
                # A file of a larger unit has that unit's path; the search resolves it, as it sees the others.
                is_its_own = result.unit is None or result.unit.path == candidate
                results.append(result if is_its_own else None)
        else:
            unit, holds_others = candidate
            results.append(LookResult(unit, look_at(unit, holds_others=holds_others)))
    return results


# Executors ------------------------------------------------------------------------------------------


def _look_in_executor(
    found: Iterable[Discovered], executor: Executor, advance: Advance
) -> Iterator[LookResult | CheckpointError | None]:
    """Yield the results of an executor, under the original paths."""
    # Workers may have another working directory, so they get absolute paths; results are given the paths of
    # the search again. Batches are recorded as they are submitted, as the search goes on meanwhile.
    given: list[Sequence[Discovered]] = []

    def absolute() -> Iterator[Sequence[Discovered]]:
        for batch in _batches(found, _SHARED_BATCH):
            given.append(batch)
            yield [*map(_with_absolute_path, batch)]

    with closing(submitted(_look_as_worker, absolute(), executor)) as futures:
        for number, future in enumerate(futures):
            batch = given[number]
            answer = answer_of(future, "")
            for at, candidate in enumerate(batch):
                yield _under_own_path(
                    candidate, answer if isinstance(answer, CheckpointError) else answer[at]
                )
            advance(len(batch))


def _with_absolute_path(candidate: Discovered) -> Discovered:
    if isinstance(candidate, str):
        return path_everywhere(candidate)
    unit, holds_others = candidate
    return unit._replace(path=path_everywhere(unit.path)), holds_others


def _under_own_path(
    candidate: Discovered, result: LookResult | CheckpointError | None
) -> LookResult | CheckpointError | None:
    path = _path_of(candidate)
    if isinstance(result, CheckpointError):
        places = _places_of(candidate)
        if places and not any(map(fs.lexists, places)):  # it was removed meanwhile
            return LookResult(None, None)
        error = CheckpointError(path, result.found, expected=result.expected)
        error.__cause__ = result
        return error
    if result is None or result.unit is None:
        return result
    # The worker's machine may see other files under the same path. In a store, asking again costs a request.
    may_compare = fs.place_of(path).reads_are_free
    if result.entry is not None and may_compare and not _has_same_files(path, result.entry):
        return not_the_same(path, "that opened it")
    unit = result.unit._replace(path=path)
    entry = result.entry and replace(result.entry, path=shown(path), unit=unit)
    return LookResult(unit, entry)


def _has_same_files(path: str, entry: Entry) -> bool:
    try:
        return entry.contents.has_sizes_of(contents(os.path.dirname(path) or os.curdir, entry.unit.members))
    except OSError:
        return False


def _look_as_worker(batch: Sequence[Discovered]) -> list[LookResult | CheckpointError | None]:
    results: list[LookResult | CheckpointError | None] = []
    for candidate in batch:
        missing = next((path for path in _places_of(candidate) if not fs.lexists(path)), None)
        if missing is None:
            results += _look_at_batch([candidate])
        else:
            results.append(not_visible(missing, os.path.basename(missing)))
    return results


def _path_of(candidate: Discovered) -> str:
    return candidate if isinstance(candidate, str) else candidate[0].path


def _places_of(candidate: Discovered) -> list[str]:
    """Return the paths that a worker must see to look at a candidate; none in a store, where asking costs."""
    if isinstance(candidate, str):
        return [candidate] if fs.place_of(candidate).reads_are_free else []
    unit, _ = candidate
    if not fs.place_of(unit.path).reads_are_free:
        return []
    return [os.path.join(os.path.dirname(unit.path), name) for name in unit.members]


def _look_as_child(order: tuple[HeldRoots, Sequence[Discovered]]) -> list[LookResult | None]:
    roots, batch = order
    with adopt_roots(roots):
        return _look_at_batch(batch)


def answers() -> Callable[[tuple[HeldRoots, Sequence[Discovered]]], list[LookResult | None]]:
    """Return the function that a child process answers with."""
    return _look_as_child
