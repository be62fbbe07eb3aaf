"""Elements that don't lie in C order: transposed, sliced and expanded views of stored bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpttool.wire.gather import BOX_BYTES, filled, gather
from ckpttool.wire.readable import Contiguous, Readable

if TYPE_CHECKING:
    import numpy as np

_READ_BYTES = BOX_BYTES


def is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Tell whether elements with these strides (in elements) lie in C order without gaps."""
    expected = 1
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


def reach(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return the number of stored elements from the first to the last one; 0 for an empty shape."""
    if 0 in shape:
        return 0
    return 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))


@dataclass(frozen=True, slots=True)
class Strided:
    """A strided view of stored elements; offset and sizes in bytes, strides in elements, none negative.

    Blocks are gathered box by box, in bounded memory whatever the strides.
    """

    source: Readable
    offset: int
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    swap: int = 1

    def blocks(self, limit: int) -> Iterator[memoryview]:
        return filled(self.shape, self.itemsize, limit, self.fill, _READ_BYTES)

    def fill(self, start: tuple[int, ...], into: np.ndarray[Any, Any]) -> None:
        """Fill an array with the box of its shape that begins at an index, little-endian."""
        skipped = sum(at * stride for at, stride in zip(start, self.strides, strict=True))
        gather(self.source, self.offset + skipped * self.itemsize, self.strides, self.swap, into)

    def once(self) -> Strided | Contiguous:
        """Return each stored element once, in the order of the file: without the axes that repeat it."""
        kept = [axis for axis, stride in enumerate(self.strides) if stride or self.shape[axis] == 0]
        kept.sort(key=lambda axis: -self.strides[axis])
        shape, strides = tuple(self.shape[a] for a in kept), tuple(self.strides[a] for a in kept)
        if is_contiguous(shape, strides):
            return Contiguous(self.source, self.offset, math.prod(shape) * self.itemsize, self.swap)
        return Strided(self.source, self.offset, self.itemsize, shape, strides, self.swap)
