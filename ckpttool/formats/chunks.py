"""A tensor that lies in several boxes, put together as it is read, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpttool.checkpoint import Extent, Tensor, Values
from ckpttool.wire.readable import Contiguous
from ckpttool.wire.strided import Strided, boxes

if TYPE_CHECKING:
    import numpy as np

    from ckpttool.formats.torch_objects import TensorParts

_GATHERED_BYTES = 1 << 23


@dataclass(frozen=True, slots=True)
class Piece:
    """Stored elements of a box of the tensor: where it begins, one number an axis, and what is there."""

    start: tuple[int, ...]
    stored: Strided

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(at + length for at, length in zip(self.start, self.stored.shape, strict=True))


@dataclass(frozen=True, slots=True)
class Chunked:
    """Elements that lie in pieces which tile the shape; ``storages`` holds the bytes of each, if known."""

    shape: tuple[int, ...]
    itemsize: int
    pieces: tuple[Piece, ...]
    storages: tuple[Extent, ...] = ()

    def blocks(self, limit: int) -> Iterator[memoryview]:
        import numpy as np

        if 0 in self.shape:
            return
        for start, shape in boxes(self.shape, max(1, max(limit, _GATHERED_BYTES) // self.itemsize)):
            gathered = self._gather(start, shape).reshape(-1).view(np.uint8)
            step = max(16, limit - limit % 16)
            for at in range(0, gathered.nbytes, step):
                yield memoryview(gathered.data)[at : at + step]

    def once(self) -> Chunked:
        return self

    def _gather(self, start: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        """Return a box of the tensor, one item of ``itemsize`` bytes an element."""
        import numpy as np

        item = np.dtype(f"V{self.itemsize}")
        box = np.empty(shape, item)
        end = tuple(at + length for at, length in zip(start, shape, strict=True))
        for piece in self.pieces:
            low = tuple(map(max, start, piece.start))
            high = tuple(map(min, end, piece.end))
            if all(a < b for a, b in zip(low, high, strict=True)):
                inner = tuple(b - a for a, b in zip(low, high, strict=True))
                raw = b"".join(_part(piece, low, inner).blocks(_GATHERED_BYTES))
                place = tuple(slice(a - s, b - s) for a, b, s in zip(low, high, start, strict=True))
                box[place] = np.frombuffer(raw, item).reshape(inner)
        return box


def _part(piece: Piece, low: tuple[int, ...], shape: tuple[int, ...]) -> Values:
    """Return the elements of a box inside a piece."""
    stored = piece.stored
    steps = zip(low, piece.start, stored.strides, strict=True)
    skipped = sum((at - first) * stride for at, first, stride in steps)
    offset = stored.offset + stored.itemsize * skipped
    return Strided(stored.source, offset, stored.itemsize, shape, stored.strides, stored.swap)


def as_strided(values: Values, shape: tuple[int, ...], itemsize: int) -> Strided | None:
    """Return stored elements as a strided view, or None where they are none."""
    if isinstance(values, Strided):
        return values
    if not isinstance(values, Contiguous):
        return None
    strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return Strided(values.source, values.offset, itemsize, shape, strides, values.swap)


@dataclass(frozen=True, slots=True)
class Joined:
    """Elements of which runs lie in several places; joined, the runs are in C order.

    ``storages`` are the stored bytes that the runs lie in, if known.
    """

    runs: tuple[Contiguous, ...]
    storages: tuple[Extent, ...] = ()

    def blocks(self, limit: int) -> Iterator[memoryview]:
        for run in self.runs:
            yield from run.blocks(limit)

    def once(self) -> Joined:
        return self


def storages_of(tensor: Tensor) -> tuple[Extent, ...]:
    """Return the stored bytes that a tensor is made of, in one place or several; none where unknown."""
    if tensor.storage is not None:
        return (tensor.storage,)
    return tensor.values.storages if isinstance(tensor.values, Chunked | Joined) else ()


def put_together(
    shape: tuple[int, ...], starts: Sequence[tuple[int, ...]], parts: Sequence[Tensor | TensorParts]
) -> Values | None:
    """Return the values of a tensor that stored parts tile, from their starts on; None where one has none."""
    pieces = []
    for start, part in zip(starts, parts, strict=True):
        stored = None if part.values is None else as_strided(part.values, part.shape, part.dtype.itemsize)
        if stored is None or part.dtype.bits < 8:
            return None
        pieces.append(Piece(start, stored))
    storages = tuple(part.storage for part in parts if part.storage is not None)
    known = storages if len(storages) == len(parts) else ()
    return Chunked(shape, parts[0].dtype.itemsize, tuple(pieces), known)
