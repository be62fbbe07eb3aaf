"""Views of stored elements: transposed, sliced, expanded; lazily conjugated or negated."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckpttool.dtypes import DType
from ckpttool.tensor import Values
from ckpttool.wire.gather import BOX_BYTES, blocks_by_box, gather
from ckpttool.wire.readable import Contiguous, Readable

if TYPE_CHECKING:
    import numpy as np


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
        return blocks_by_box(self.shape, self.itemsize, limit, self.fill, BOX_BYTES)

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


@dataclass(frozen=True, slots=True)
class LazyConjNeg:
    """Elements of a tensor with PyTorch's conj or neg bit: their signs are flipped as they are read."""

    values: Values
    dtype: DType
    conjugated: bool
    negated: bool

    def blocks(self, limit: int) -> Iterator[memoryview]:
        import numpy as np

        width = self.dtype.word_bytes
        for block in self.values.blocks(limit):
            words = np.frombuffer(block, f"<u{width}").copy()
            sign = words.dtype.type(1 << (8 * width - 1))
            if self.negated:
                words ^= sign
            if self.conjugated:
                words[1::2] ^= sign
            yield memoryview(words.view(np.uint8).data)

    def once(self) -> LazyConjNeg:
        return replace(self, values=self.values.once())
