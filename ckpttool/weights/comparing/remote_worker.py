"""Measures values in child processes.

NumPy releases the interpreter lock but takes it back after each of the kernels' short operations: two threads
took longer than one. A child gets paths and offsets, reads the elements itself, and answers with a ``Tally``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

from ckpttool.core.dtypes import BY_NAME
from ckpttool.core.errors import CheckpointError, DamagedCheckpoint
from ckpttool.core.tensor import Tensor
from ckpttool.core.values import Contiguous
from ckpttool.storage import fs
from ckpttool.storage.children import Child, ChildLost
from ckpttool.storage.source import Source
from ckpttool.storage.work import Advance, no_advance
from ckpttool.weights.comparing.elements import contiguous_values
from ckpttool.weights.comparing.statistics import Tally, Tolerance
from ckpttool.weights.comparing.workers import (
    PairWorker,
    RangePool,
    TensorPair,
    ValuesWorker,
    WorkRange,
)

WORTH_BYTES = 1 << 28
"""Bytes of both sides per child: measuring these takes as long as starting a child."""

MAX_CHILDREN = 3
"""Maximum number of children; more would exceed the memory limit of a diff."""


class RemoteWorker(PairWorker):
    """Sends the ranges of one thread to a child; measures those that no child can read in this process."""

    def __init__(self, pool: RangePool, advance: Advance, tolerance: Tolerance) -> None:
        super().__init__(pool, advance)
        self._tolerance = tolerance
        self._own: ValuesWorker | None = None
        self._child: Child | None = None  # None, too, if none can be started
        with suppress(ChildLost):
            self._child = Child(__name__)

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        if self._own is not None:
            self._own.__exit__()
        self._dismiss()

    def _compare(self, part: WorkRange) -> None:
        request = _request(part, self._tolerance)
        tally = None if request is None else self._answer(request)
        if tally is None:
            if self._own is None:
                self._own = ValuesWorker(self._pool, self._advance, self._tolerance)
            self._own.do(part)
            return
        part.pair.tallies.append(tally)
        self._count(part.pair, sum(one.dtype.nbytes(part.count) for one in (part.pair.a, part.pair.b)))

    def _answer(self, request: Mapping[str, Any]) -> Tally | None:
        """Return the child's tally; None if it couldn't read the range, or has exited."""
        # A child that exits (killed for its memory, say) is not replaced: this thread measures all other
        # ranges in this process, which gives the same results.
        if self._child is None:
            return None
        try:
            answer = self._child.ask(request)
        except ChildLost:
            self._dismiss()
            return None
        return answer if isinstance(answer, Tally) else None

    def _dismiss(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.dismiss()


def _request(part: WorkRange, tolerance: Tolerance) -> dict[str, Any] | None:
    """Return the request for a range; None if only this process can read it (memory, remote, computed)."""
    sides = []
    for tensor in (part.pair.a, part.pair.b):
        place = contiguous_values(tensor)
        if place is None or type(place.source) is not Source:
            return None
        sides.append(
            {
                "path": os.fsdecode(place.source.path),
                "identity": place.source.identity,
                "offset": place.offset,
                "swap": place.swap,
                "dtype": tensor.dtype.name,
                "size": tensor.size,
            }
        )
    limits = {"rtol": tolerance.rtol, "atol": tolerance.atol, "bitwise": tolerance.bitwise}
    return {"sides": sides, "start": part.start, "count": part.count, "tolerance": limits}


# In the child ----------------------------------------------------------------------------------------


def answers() -> Callable[[Mapping[str, Any]], Tally | None]:
    """Return the function with which the child process answers requests.

    It returns None for a range that can't be read; the parent then reads it itself and gets the error.
    """
    sources: dict[tuple[Any, ...], Source] = {}

    def tensor_of(side: Mapping[str, Any]) -> Tensor:
        path, identity = side["path"], tuple(side["identity"])
        source = sources.get((path, identity))
        if source is None:
            source = sources[path, identity] = fs.open_source(path)
        # The child opens files by path; one that was replaced since the parent opened it is refused.
        if source.identity != identity:
            raise DamagedCheckpoint(path, "it was replaced while it was read")
        dtype = BY_NAME[side["dtype"]]
        values = Contiguous(source, side["offset"], dtype.nbytes(side["size"]), side["swap"])
        return Tensor((), dtype, (side["size"],), values=values)

    @cache
    def worker_of(tolerance: Tolerance) -> ValuesWorker:
        return ValuesWorker(RangePool(), no_advance, tolerance)

    def answer(request: Mapping[str, Any]) -> Tally | None:
        worker = worker_of(Tolerance(**request["tolerance"]))
        try:
            a, b = map(tensor_of, request["sides"])
            pair = TensorPair(a, b)
            worker.do(WorkRange(pair, request["start"], request["count"], 0))
        except CheckpointError:
            return None
        return None if pair.failure is not None else pair.tallies[0]

    return answer
