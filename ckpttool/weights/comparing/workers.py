"""Ranges of tensor pairs, and the workers that compare their bytes or measure their values."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ckpttool.core.tensor import Tensor
from ckpttool.storage.work import Advance, Pool
from ckpttool.weights.comparing.elements import (
    Buffers,
    ElementReader,
    Side,
    Unreadable,
    contiguous_values,
    stream_key,
)
from ckpttool.weights.comparing.statistics import Tally, Tolerance

_BUFFER_BYTES = 1 << 18
"""Bytes per side that are read and compared at once: both buffers fit in a core's own cache."""
_FIRST_BYTES = 1 << 15
"""Size of the first read: after training, most tensors differ within it, so the rest isn't read."""
_RANGE_BYTES, _RANGE_ELEMENTS = 1 << 24, 1 << 21
"""Bytes, and elements, of a tensor that one thread compares; a larger tensor is shared by several."""
_REPORTED_BYTES = 1 << 22
"""Minimum number of bytes between two progress reports of a thread."""


@dataclass(slots=True, eq=False)
class TensorPair:
    """Two tensors, and the state of their comparison.

    Attributes:
        failure: Read error that ended the comparison, or None.
        differs: Whether their bytes differ, or their dtypes do.
        tallies: Measurements of the ranges done so far.
        unread: Bytes of both sides not yet reported as progress.
    """

    a: Tensor
    b: Tensor
    failure: Unreadable | None = None
    differs: bool = False
    tallies: list[Tally] = field(default_factory=list)
    unread: int = 0

    @property
    def is_open(self) -> bool:
        """Return whether all bytes compared so far are equal."""
        return self.failure is None and not self.differs

    @property
    def stream_key(self) -> int | None:
        """Return a key shared by pairs to be read one after another; None if order doesn't matter."""
        return stream_key(self.a) or stream_key(self.b)

    @property
    def identity(self) -> object:
        """Return a key that is equal for pairs of tied tensors: same bytes, dtype, shape and byte order."""
        identity: list[object] = []
        for tensor in (self.a, self.b):
            place = contiguous_values(tensor)
            if place is None:
                return id(self)
            source = id(place.source)
            identity += source, place.offset, place.nbytes, place.swap, tensor.dtype, tensor.shape
        return tuple(identity)

    def elements(self, *, as_stored: bool = False) -> tuple[ElementReader, ElementReader]:
        """Return readers of both sides; ``as_stored`` keeps the file's byte order."""
        return (
            ElementReader(self.a, Side.A, as_stored=as_stored),
            ElementReader(self.b, Side.B, as_stored=as_stored),
        )


@dataclass(frozen=True, slots=True)
class WorkRange:
    """A range of one pair, in the unit of its worker (bytes or elements); ``nbytes`` is the size per side."""

    pair: TensorPair
    start: int
    count: int
    nbytes: int


RangePool = Pool[list[WorkRange]]
"""Pool of threads whose work items are batches of ranges."""


def byte_ranges(pair: TensorPair, *, whole: bool = False) -> Iterator[WorkRange]:
    nbytes = pair.a.nbytes
    step = nbytes if whole else _RANGE_BYTES
    for start in range(0, nbytes, step):
        yield WorkRange(pair, start, min(step, nbytes - start), min(step, nbytes - start))


def element_ranges(pair: TensorPair, *, whole: bool = False) -> Iterator[WorkRange]:
    size = pair.a.size
    step = size if whole else _RANGE_ELEMENTS
    for start in range(0, size, step):
        count = min(step, size - start)
        yield WorkRange(pair, start, count, pair.a.dtype.nbytes(count))


_lock = threading.Lock()
"""Guards ``TensorPair.unread``."""


class PairWorker(ABC):
    """Worker of one thread with its buffers.

    As a context manager, it gives the function that processes ranges, and reports its progress at most every
    few MiB.
    """

    def __init__(self, pool: RangePool, advance: Advance) -> None:
        self._pool = pool
        self._advance = advance
        self._unreported = 0

    def __enter__(self) -> Callable[[list[WorkRange]], None]:
        return self._process

    def __exit__(self, *_: object) -> None:
        """Report pending progress and release resources."""
        self._report()

    @abstractmethod
    def _compare(self, part: WorkRange) -> None:
        """Compare a range."""

    def _process(self, ranges: list[WorkRange]) -> None:
        for part in ranges:
            self._pool.check()
            self.do(part)

    def do(self, part: WorkRange) -> None:
        """Compare a range, unless an earlier range of the pair was unreadable."""
        if part.pair.failure is None:
            try:
                self._compare(part)
            except Unreadable as failure:
                part.pair.failure = failure

    def _count(self, pair: TensorPair, nbytes: int) -> None:
        """Count bytes as done, and raise if the comparison was cancelled."""
        # The second pass reads pairs that the first one has read in part. A byte is reported once, whichever
        # pass reads it first; the rest of ``unread`` is reported when the comparison ends.
        with _lock:
            counted = min(nbytes, pair.unread)
            pair.unread -= counted
        self._unreported += counted
        if self._unreported >= _REPORTED_BYTES:
            self._report()
        self._pool.check()

    def _report(self) -> None:
        if self._unreported:
            self._advance(self._unreported)
        self._unreported = 0


class BytesWorker(PairWorker):
    """Compares stored bytes, and sets ``TensorPair.differs``."""

    def __init__(self, pool: RangePool, advance: Advance) -> None:
        super().__init__(pool, advance)
        self._buffers = Buffers(_BUFFER_BYTES)

    def _compare(self, part: WorkRange) -> None:
        pair, buffers = part.pair, self._buffers
        if pair.a.nbytes != pair.b.nbytes:
            pair.differs = True
        # Big-endian files: if both sides have one byte order, equality doesn't need the bytes swapped.
        places = contiguous_values(pair.a), contiguous_values(pair.b)
        has_one_order = None not in places and len({one.swap for one in places if one is not None}) == 1
        a, b = pair.elements(as_stored=has_one_order)
        start, end, step = part.start, part.start + part.count, _FIRST_BYTES
        while start < end and not pair.differs:
            # Another thread may have found a difference in another range: the pair is then done (the loop
            # looks at ``pair.differs``), since values are measured in the second pass.
            nbytes = min(step, end - start)
            a.read_into(start, buffers.a[:nbytes])
            b.read_into(start, buffers.b[:nbytes])
            if not buffers.same(nbytes):
                pair.differs = True
            self._count(pair, 2 * nbytes)
            start, step = start + nbytes, _BUFFER_BYTES


class ValuesWorker(PairWorker):
    """Measures differences of values, and appends a ``Tally`` per range."""

    def __init__(self, pool: RangePool, advance: Advance, tolerance: Tolerance) -> None:
        from ckpttool.weights.comparing.kernels import Workspace

        super().__init__(pool, advance)
        self._workspace = Workspace(tolerance)

    def _compare(self, part: WorkRange) -> None:
        import numpy as np

        from ckpttool.weights.comparing.kernels import BLOCK_ELEMENTS

        pair, buffers, tally = part.pair, self._workspace.buffers, Tally()
        dtypes = pair.a.dtype, pair.b.dtype
        self._workspace.set_dtypes(dtypes)
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
