"""A tensor that lies in several boxes, put together as it is read, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpttool.tensor import Extent, Tensor, Values
from ckpttool.wire.gather import blocks_by_box
from ckpttool.wire.readable import Contiguous
from ckpttool.wire.views import Strided

if TYPE_CHECKING:
    import numpy as np

    from ckpttool.formats.torch.objects import TensorParts


@dataclass(frozen=True, slots=True)
class Tile:
    """Stored elements of a box of the tensor: where it begins, one number an axis, and what is there."""

    start: tuple[int, ...]
    stored: Strided

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(first + length for first, length in zip(self.start, self.stored.shape, strict=True))


@dataclass(frozen=True, slots=True)
class Chunked:
    """Elements that lie in pieces which tile the shape; ``storages`` holds the bytes of each, if known."""

    shape: tuple[int, ...]
    itemsize: int
    pieces: tuple[Tile, ...]
    storages: tuple[Extent, ...] = ()

    def blocks(self, limit: int) -> Iterator[memoryview]:
        return blocks_by_box(self.shape, self.itemsize, limit, self.fill)

    def fill(self, start: tuple[int, ...], into: np.ndarray[Any, Any]) -> None:
        """Fill an array with the box of its shape that begins at an index, little-endian."""
        end = tuple(first + length for first, length in zip(start, into.shape, strict=True))
        for piece in self.pieces:
            low = tuple(map(max, start, piece.start))
            high = tuple(map(min, end, piece.end))
            if all(a < b for a, b in zip(low, high, strict=True)):
                ends = zip(low, high, start, strict=True)
                overlap: Any = (*(slice(a - s, b - s) for a, b, s in ends), ...)
                start_in_piece = tuple(a - first for a, first in zip(low, piece.start, strict=True))
                piece.stored.fill(start_in_piece, into[overlap])

    def once(self) -> Chunked:
        return self


def strided_view(values: Values, shape: tuple[int, ...], itemsize: int) -> Strided | None:
    """Return stored elements as a strided view, or None where they are none."""
    if isinstance(values, Strided):
        return values
    if not isinstance(values, Contiguous):
        return None
    strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return Strided(values.source, values.offset, itemsize, shape, strides, values.swap)


@dataclass(frozen=True, slots=True)
class JoinedRuns:
    """Elements of which runs lie in several places; joined, the runs are in C order.

    ``storages`` are the stored bytes that the runs lie in, if known.
    """

    runs: tuple[Contiguous, ...]
    storages: tuple[Extent, ...] = ()

    def blocks(self, limit: int) -> Iterator[memoryview]:
        for run in self.runs:
            yield from run.blocks(limit)

    def once(self) -> JoinedRuns:
        return self


def storages_of(tensor: Tensor) -> tuple[Extent, ...]:
    """Return the stored bytes that a tensor is made of, in one place or several; none where unknown."""
    if tensor.storage is not None:
        return (tensor.storage,)
    return tensor.values.storages if isinstance(tensor.values, Chunked | JoinedRuns) else ()


def tiled_values(
    shape: tuple[int, ...], starts: Sequence[tuple[int, ...]], parts: Sequence[Tensor | TensorParts]
) -> Values | None:
    """Return the values of a tensor that stored parts tile, from their starts on; None where one has none."""
    pieces = []
    for start, part in zip(starts, parts, strict=True):
        stored = None if part.values is None else strided_view(part.values, part.shape, part.dtype.itemsize)
        if stored is None or part.dtype.bits < 8:
            return None
        pieces.append(Tile(start, stored))
    if not pieces:
        return None
    storages = tuple(part.storage for part in parts if part.storage is not None)
    known = storages if len(storages) == len(parts) else ()
    return Chunked(shape, parts[0].dtype.itemsize, tuple(pieces), known)
