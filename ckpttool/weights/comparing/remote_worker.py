"""Values measured in processes beside this one, since threads of one would wait for each other's NumPy.

NumPy works without the interpreter lock, but has to get it back after each of its short steps; two threads
took longer than one. A child is told where the elements lie, reads them itself, and answers with a tally.
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
from ckpttool.storage.children import Child, Lost
from ckpttool.storage.source import Source
from ckpttool.weights.comparing.elements import place_of
from ckpttool.weights.comparing.statistics import Tally, Tolerance
from ckpttool.weights.comparing.workers import (
    Meter,
    PairWorker,
    RangePool,
    TensorPair,
    ValuesWorker,
    WorkRange,
)

WORTH_BYTES = 1 << 28
"""So many bytes of both sides are worth a child, which takes as long to start as these to measure."""

MAX_CHILDREN = 3
"""With more, all together would take more memory than one diff may."""


class RemoteWorker(PairWorker):
    """Lets a child do the ranges of one thread; what no child can do, it does itself."""

    def __init__(self, pool: RangePool, meter: Meter, tolerance: Tolerance) -> None:
        super().__init__(pool, meter)
        self._tolerance = tolerance
        self._own: ValuesWorker | None = None
        self._child: Child | None = None  # None, too, if none can be started
        with suppress(Lost):
            self._child = Child(__name__)

    def end(self) -> None:
        super().end()
        if self._own is not None:
            self._own.end()
        self._dismiss()

    def _do(self, part: WorkRange) -> None:
        request = _request(part, self._tolerance)
        tally = None if request is None else self._answer(request)
        if tally is None:
            if self._own is None:
                self._own = ValuesWorker(self._pool, self._meter, self._tolerance)
            self._own.do(part)
            return
        part.pair.tallies.append(tally)
        self._count(part.pair, sum(one.dtype.nbytes(part.count) for one in (part.pair.a, part.pair.b)))

    def _answer(self, request: Mapping[str, Any]) -> Tally | None:
        """Return the child's tally; None where it can't tell one, or is gone."""
        if self._child is None:
            return None
        try:
            answer = self._child.ask(request)
        except Lost:
            self._dismiss()
            return None
        return answer if isinstance(answer, Tally) else None

    def _dismiss(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.dismiss()


def _request(part: WorkRange, tolerance: Tolerance) -> dict[str, Any] | None:
    """Return what a child has to know of a range; None where only this process can read it."""
    sides = []
    for tensor in (part.pair.a, part.pair.b):
        place = place_of(tensor)
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
    """Return what a child answers requests with; what can't be read is for the parent to find out."""
    sources: dict[tuple[Any, ...], Source] = {}

    def tensor_of(side: Mapping[str, Any]) -> Tensor:
        path, identity = side["path"], tuple(side["identity"])
        source = sources.get((path, identity))
        if source is None:
            source = sources[path, identity] = fs.open_source(path)
        if source.identity != identity:
            raise DamagedCheckpoint(path, "it was replaced while it was read")
        dtype = BY_NAME[side["dtype"]]
        values = Contiguous(source, side["offset"], dtype.nbytes(side["size"]), side["swap"])
        return Tensor((), dtype, (side["size"],), values=values)

    @cache
    def worker_of(tolerance: Tolerance) -> ValuesWorker:
        return ValuesWorker(RangePool(), Meter(lambda nbytes: None), tolerance)

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
