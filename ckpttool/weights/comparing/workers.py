"""Pairs of tensors, cut into ranges, and what threads do with these: compare bytes, measure values."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from ckpttool.core.tensor import Tensor
from ckpttool.storage.work import Advance, Pool
from ckpttool.weights.comparing.elements import Buffers, Elements, Side, Unreadable, place_of, stream_of
from ckpttool.weights.comparing.statistics import Tally, Tolerance

_BUFFER_BYTES = 1 << 18
"""What is read of each side and compared at once: both have to stay in a processor's own cache."""
_FIRST_BYTES = 1 << 15
"""What is read of each side first: after training, most tensors differ here already."""
_RANGE_BYTES = 1 << 24
_RANGE_ELEMENTS = 1 << 21
_REPORTED_BYTES = 1 << 22


@dataclass(slots=True, eq=False)
class TensorPair:
    """Two tensors on the way to an outcome.

    Attributes:
        failure: Why they can't be compared any further.
        differs: Whether their bytes are known to differ, or mean something else.
        tallies: What is known of their values, in parts.
        unread: How many bytes of both nobody was told of yet.
    """

    a: Tensor
    b: Tensor
    failure: Unreadable | None = None
    differs: bool = False
    tallies: list[Tally] = field(default_factory=list)
    unread: int = 0

    @property
    def is_open(self) -> bool:
        """Return whether reading on can find something new."""
        return self.failure is None and not self.differs

    @property
    def stream(self) -> int | None:
        """Return what pairs share that are read in turn; None where any thread can read any part."""
        return stream_of(self.a) or stream_of(self.b)

    @property
    def identity(self) -> object:
        """Return what pairs of tied tensors have in common: the same bytes, read in the same way."""
        identity: list[object] = []
        for tensor in (self.a, self.b):
            place = place_of(tensor)
            if place is None:
                return id(self)
            source = id(place.source)
            identity += source, place.offset, place.nbytes, place.swap, tensor.dtype, tensor.shape
        return tuple(identity)

    def elements(self, *, as_stored: bool = False) -> tuple[Elements, Elements]:
        """Return the bytes of both sides, in one byte order."""
        return (
            Elements(self.a, Side.A, as_stored=as_stored),
            Elements(self.b, Side.B, as_stored=as_stored),
        )


@dataclass(frozen=True, slots=True)
class WorkRange:
    """A part of the work on one pair: from where on, and how much; ``nbytes`` is what is read."""

    pair: TensorPair
    start: int
    count: int
    nbytes: int


RangePool = Pool[list[WorkRange]]
"""Threads that take ranges of pairs, small ones many at a time."""


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


class RangeCutter(Protocol):
    def __call__(self, pair: TensorPair, *, whole: bool = False) -> Iterator[WorkRange]:
        """Cut a pair into ranges, or not."""


def byte_ranges(pair: TensorPair, *, whole: bool = False) -> Iterator[WorkRange]:
    """Yield the ranges of a pair in bytes."""
    nbytes = pair.a.nbytes
    step = nbytes if whole else _RANGE_BYTES
    for start in range(0, nbytes, step):
        yield WorkRange(pair, start, min(step, nbytes - start), min(step, nbytes - start))


def element_ranges(pair: TensorPair, *, whole: bool = False) -> Iterator[WorkRange]:
    """Yield the ranges of a pair in elements."""
    size = pair.a.size
    step = size if whole else _RANGE_ELEMENTS
    for start in range(0, size, step):
        count = min(step, size - start)
        yield WorkRange(pair, start, count, pair.a.dtype.nbytes(count))


_lock = threading.Lock()
"""Held while the bytes of a pair are counted."""


class PairWorker(ABC):
    """What one thread needs for its ranges."""

    def __init__(self, pool: RangePool, meter: Meter) -> None:
        self._pool = pool
        self._meter = meter

    @abstractmethod
    def _do(self, part: WorkRange) -> None:
        """Compare a range."""

    def do(self, part: WorkRange) -> None:
        """Compare a range, unless it is known that the pair can't be."""
        if part.pair.failure is None:
            try:
                self._do(part)
            except Unreadable as failure:
                part.pair.failure = failure

    def end(self) -> None:
        """Tell how much was done, and give back what was taken: there is no more to do."""
        self._meter.flush()

    def _count(self, pair: TensorPair, nbytes: int) -> None:
        """Count bytes as done, and see whether the answer is still waited for."""
        with _lock:
            counted = min(nbytes, pair.unread)
            pair.unread -= counted
        self._meter.add(counted)
        self._pool.check()


class BytesWorker(PairWorker):
    """Finds out whether the bytes of both sides are the same."""

    def __init__(self, pool: RangePool, meter: Meter) -> None:
        super().__init__(pool, meter)
        self._buffers = Buffers(_BUFFER_BYTES)

    def _do(self, part: WorkRange) -> None:
        pair, buffers = part.pair, self._buffers
        if pair.a.nbytes != pair.b.nbytes:
            pair.differs = True
        # In one byte order, both sides can be compared as they lie.
        places = place_of(pair.a), place_of(pair.b)
        has_one_order = None not in places and len({one.swap for one in places if one is not None}) == 1
        a, b = pair.elements(as_stored=has_one_order)
        start, end, step = part.start, part.start + part.count, _FIRST_BYTES
        while start < end and not pair.differs:
            nbytes = min(step, end - start)
            a.read_into(start, buffers.a[:nbytes])
            b.read_into(start, buffers.b[:nbytes])
            if not buffers.same(nbytes):
                pair.differs = True
            self._count(pair, 2 * nbytes)
            start, step = start + nbytes, _BUFFER_BYTES


class ValuesWorker(PairWorker):
    """Finds out how far values lie apart."""

    def __init__(self, pool: RangePool, meter: Meter, tolerance: Tolerance) -> None:
        from ckpttool.weights.comparing.kernels import Workspace

        super().__init__(pool, meter)
        self._workspace = Workspace(tolerance)

    def _do(self, part: WorkRange) -> None:
        import numpy as np

        from ckpttool.weights.comparing.kernels import BLOCK_ELEMENTS

        pair, buffers, tally = part.pair, self._workspace.buffers, Tally()
        dtypes = pair.a.dtype, pair.b.dtype
        self._workspace.take(dtypes)
        a, b = pair.elements()
        with np.errstate(all="ignore"):
            for start in range(part.start, part.start + part.count, BLOCK_ELEMENTS):
                count = min(BLOCK_ELEMENTS, part.start + part.count - start)
                sizes = dtypes[0].nbytes(count), dtypes[1].nbytes(count)
                a.read_into(dtypes[0].nbytes(start), buffers.a[: sizes[0]])
                b.read_into(dtypes[1].nbytes(start), buffers.b[: sizes[1]])
                self._workspace.tally(tally, count, start)
                self._count(pair, sum(sizes))
        tally.condense()
        pair.tallies.append(tally)
