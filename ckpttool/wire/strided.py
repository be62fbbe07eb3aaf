"""Elements that don't lie in C order: transposed, sliced and expanded views of stored bytes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpttool.wire.readable import Readable, swapped

if TYPE_CHECKING:
    import numpy as np

_READ_BYTES = 1 << 23
_WASTE = 4  # one long read of four times what is wanted beats many short ones


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

    Blocks are gathered box by box, in memory of the order of the block's size whatever the strides.
    """

    source: Readable
    offset: int
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    swap: int = 1

    def blocks(self, limit: int) -> Iterator[memoryview]:
        import numpy as np

        if 0 in self.shape:
            return
        for start, shape in boxes(self.shape, max(1, max(limit, _READ_BYTES) // self.itemsize)):
            gathered = np.ascontiguousarray(self._gather(start, shape)).reshape(-1).view(np.uint8)
            step = max(16, limit - limit % 16)
            for at in range(0, gathered.nbytes, step):
                yield swapped(memoryview(gathered.data)[at : at + step], self.swap)

    def once(self) -> Strided:
        """Return the view with each stored element once: without the axes that repeat it."""
        kept = [axis for axis, stride in enumerate(self.strides) if stride or self.shape[axis] == 0]
        shape, strides = tuple(self.shape[a] for a in kept), tuple(self.strides[a] for a in kept)
        return Strided(self.source, self.offset, self.itemsize, shape, strides, self.swap)

    def _gather(self, start: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        """Return a box of the view, one item of ``itemsize`` bytes an element."""
        import numpy as np

        order = sorted(range(len(shape)), key=lambda axis: -self.strides[axis])
        offset = sum(at * stride for at, stride in zip(start, self.strides, strict=True))
        split = self._split(order, shape)
        outer, inner = order[:split], order[split:]
        run = reach(tuple(shape[a] for a in inner), tuple(self.strides[a] for a in inner))
        # A stride of 0 repeats what is stored once: one element of such an axis is read.
        stored = [shape[a] if self.strides[a] else 1 for a in outer]
        item = np.dtype(f"V{self.itemsize}")
        box = np.empty([*stored, run], item)
        rows = memoryview(box.reshape(-1).view(np.uint8).data)
        width = run * self.itemsize
        for row, index in enumerate(itertools.product(*map(range, stored))):
            at = offset + sum(i * self.strides[a] for i, a in zip(index, outer, strict=True))
            self.source.read_into(self.offset + at * self.itemsize, rows[row * width : (row + 1) * width])
        steps = [0 if not self.strides[a] else box.strides[k] for k, a in enumerate(outer)]
        steps += [self.strides[a] * self.itemsize for a in inner]
        view: np.ndarray[Any, Any] = np.lib.stride_tricks.as_strided(
            box, [shape[a] for a in order], steps, writeable=False
        )
        box_in_order: np.ndarray[Any, Any] = view.transpose(np.argsort(order))
        return box_in_order

    def _split(self, order: list[int], shape: tuple[int, ...]) -> int:
        """Return how many of the axes, widest stride first, are walked; the rest is read in one run."""
        reads = 1
        for split, axis in enumerate(order):
            run = reach(tuple(shape[a] for a in order[split:]), tuple(self.strides[a] for a in order[split:]))
            if reads * run <= _WASTE * math.prod(shape):
                return split
            reads *= shape[axis] if self.strides[axis] else 1
        return len(order)


def boxes(shape: tuple[int, ...], limit: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a shape into boxes of at most ``limit`` elements that follow each other in C order.

    Yields where each starts and its shape.
    """
    axis, below = len(shape), 1
    while axis > 0 and below * shape[axis - 1] <= limit:
        axis -= 1
        below *= shape[axis]
    if axis == 0:
        yield (0,) * len(shape), shape
        return
    rows = max(1, limit // below)
    for index in _indices(shape[: axis - 1]):
        for first in range(0, shape[axis - 1], rows):
            count = min(rows, shape[axis - 1] - first)
            start = (*index, first) + (0,) * (len(shape) - axis)
            yield start, (1,) * len(index) + (count,) + shape[axis:]


def _indices(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield all indices of a shape in C order; unlike ``itertools.product``, in constant memory."""
    for flat in range(math.prod(shape)):
        index = []
        for length in reversed(shape):
            flat, at = divmod(flat, length)
            index.append(at)
        yield tuple(reversed(index))
