"""Values of an HDF5 dataset that only libhdf5 can read: its chunks, and its elements in blocks."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from typing import NamedTuple

from ckpttool.errors import DamagedCheckpoint
from ckpttool.wire.hdf5 import FLETCHER32, Dataset, Location
from ckpttool.wire.readable import swapped

BLOCK_BYTES = 1 << 23
"""How many bytes one request for values asks for, where the chunks allow it."""


class Chunk(NamedTuple):
    """Stored elements of a dataset: where in the dataset, and where in the file, in bytes."""

    start: tuple[int, ...]
    offset: int
    nbytes: int
    skips_filters: bool


def stored_chunks(location: Location, dataset: Dataset) -> tuple[Chunk, ...]:
    """Return the stored chunks of a dataset, in the order of the file."""
    if dataset.chunk is None or not dataset.stored:
        return ()
    frames = location.ask("chunks", dataset=dataset.raw)
    told = (one for _, payload in frames for one in json.loads(payload)["chunks"])
    found = (Chunk(tuple(start), offset, nbytes, mask != 0) for start, offset, nbytes, mask in told)
    return tuple(sorted(found, key=lambda chunk: chunk.offset))


class Summed(NamedTuple):
    """A checksum, and of how many bytes."""

    crc32: int
    nbytes: int


def summed(location: Location, dataset: Dataset, limit: int) -> Summed | None:
    """Return the CRC-32 of all elements of a dataset; None where they can't be read, or are too many.

    Elements of one size are summed as they are stored; of texts and arrays of any length, each with its
    length; of references, what they lead to.
    """
    try:
        frames = location.ask("sum", dataset=dataset.raw, limit=limit)
    except DamagedCheckpoint:
        return None
    for told in (json.loads(payload) for _, payload in frames):
        if told["k"] == "sum":
            return Summed(told["crc32"], told["nbytes"])
    return None


class Streamed(NamedTuple):
    """Elements that only libhdf5 can read, asked for block by block.

    ``swap`` is the bytes of a word whose order is to be reversed, 1 for none.
    """

    location: Location
    dataset: Dataset
    swap: int = 1

    def blocks(self, limit: int) -> Iterator[memoryview]:
        limit = max(16, limit - limit % 16)
        for start, count in slabs(self.dataset.shape or (), self.dataset.kind.size, self.dataset.chunk):
            data = memoryview(self.read(start, count))
            for at in range(0, len(data), limit):
                yield swapped(data[at : at + limit], self.swap)

    def once(self) -> Streamed:
        return self

    def read(self, start: tuple[int, ...], count: tuple[int, ...], silent: bool = False) -> bytes:
        """Return the elements of a block as they are stored; nothing where ``silent``."""
        request = {"dataset": self.dataset.raw, "start": start, "count": count, "silent": silent}
        try:
            frames = self.location.ask("block", **request)
        except DamagedCheckpoint as failure:
            is_summed = FLETCHER32 in self.dataset.filters and "filter" in failure.found
            code = "checksum-mismatch" if is_summed else failure.code
            found = f"{self.dataset.name}: {failure.found}"
            raise DamagedCheckpoint(self.location.path, found, where=failure.where, code=code) from failure
        data = b"".join(payload for kind, payload in frames if kind == b"D")
        expected = 0 if silent else math.prod(count) * self.dataset.kind.size
        if len(data) != expected:
            raise DamagedCheckpoint(self.location.path, f"{len(data):,} bytes", expected=f"{expected:,}")
        return data


def slabs(
    shape: tuple[int, ...], itemsize: int, chunk: tuple[int, ...] | None, budget: int = BLOCK_BYTES
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield start and count of blocks that cover a dataset in C order, of whole chunks where they fit."""
    if not all(shape):
        return
    axis, inner = len(shape), itemsize
    while axis > 0 and inner * shape[axis - 1] <= budget:
        axis -= 1
        inner *= shape[axis]
    if axis == 0:
        yield (0,) * len(shape), shape
        return
    axis -= 1
    step = max(1, budget // inner)
    if chunk and step > chunk[axis]:
        step -= step % chunk[axis]
    rest = shape[axis + 1 :]
    for outer in itertools.product(*map(range, shape[:axis])):
        for start in range(0, shape[axis], step):
            count = min(step, shape[axis] - start)
            yield (*outer, start, *(0,) * len(rest)), (*(1,) * axis, count, *rest)
