"""Reading of stored elements into another order, tile by tile, in tiles that fit into a processor's cache.

A tile has long runs both in the stored bytes, which are read one by one, and in the result.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.core.readable import Readable, aligned_buffer

if TYPE_CHECKING:
    import numpy as np

BOX_BYTES = 1 << 26
"""Limit on the bytes of a tensor that are reordered in memory at once; larger ones take several passes."""

_SMALL_BOX_BYTES = 1 << 23
_LARGE_BOXES = 2
"""Number of boxes that may be larger than that at a time, in all threads."""
_TILE_BYTES = 1 << 19
"""About a processor's second-level cache."""
_RUN_BYTES = 1 << 14
"""Size of a run whose copying takes longer than a system call."""
_GAP_BYTES = 1 << 12
"""Gaps up to this size are read, too, which is faster than two reads."""
_LINES_BYTES = 1 << 9
"""Size of a run of the result, so that most cache lines are written completely."""
_PERIOD_BYTES = 1 << 8
"""Distance of rows, or a divisor of it, at which they compete for the same few cache lines."""
_WORDS = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}
_large_boxes = threading.BoundedSemaphore(_LARGE_BOXES)


@contextmanager
def _box_room(wanted: int) -> Iterator[int]:
    """Yield the limit on a box, in bytes; if two large boxes are in use, a smaller one, without waiting."""
    # A larger box needs fewer passes over the stored bytes. At most two of 64 MiB exist at a time, so that
    # memory doesn't grow with the number of threads by more than 8 MiB each.
    is_large = wanted > _SMALL_BOX_BYTES and _large_boxes.acquire(blocking=False)
    try:
        yield BOX_BYTES if is_large else _SMALL_BOX_BYTES
    finally:
        if is_large:
            _large_boxes.release()


def blocks_by_box(
    shape: tuple[int, ...],
    itemsize: int,
    limit: int,
    fill: Callable[[tuple[int, ...], np.ndarray[Any, Any]], None],
    most: int = BOX_BYTES,
) -> Iterator[memoryview]:
    """Yield the bytes of a tensor that is assembled box by box, at most ``limit`` at once.

    Args:
        shape: Shape of the tensor.
        itemsize: Bytes of an element.
        limit: Limit on the bytes of a block.
        fill: Called with the start of a box in the tensor, and an array of its shape to fill.
        most: Limit on the bytes of a box.
    """
    import numpy as np

    if 0 in shape:
        return
    # Blocks are multiples of 16 bytes, the largest element (complex128), so that none is cut.
    step, total = max(16, limit - limit % 16), math.prod(shape) * itemsize
    with _box_room(min(most, total)) as room:
        nbytes = max(min(room, most, total), itemsize)
        memory = aligned_buffer(nbytes)
        for start, lengths in boxes(shape, nbytes // itemsize):
            count = math.prod(lengths)
            fill(start, np.frombuffer(memory, f"V{itemsize}", count).reshape(lengths))
            for at in range(0, count * itemsize, step):
                yield memory[at : min(at + step, count * itemsize)]


def boxes(shape: tuple[int, ...], limit: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a shape into boxes of at most ``limit`` elements that follow each other in C order.

    Yields the start and the shape of each.
    """
    # The innermost axes that fit are taken whole, some rows of the next axis, and one index of each other:
    # only such boxes are contiguous in the result.
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


# Tiles ----------------------------------------------------------------------------------------------

# A transposed tensor has long runs in the file along one axis, and long runs in the result along another.
# Copying it element by element along either would touch a new cache line for each element of the other. So
# it is copied tile by tile: a tile fits in the second-level cache, has runs in the file long enough to be
# worth a system call (16 KiB), and then runs in the result of some cache lines (512 bytes). Sources that only
# go forwards (compressed ones) are read in stored order: runs cover gaps of any size there.


class _Tiling(NamedTuple):
    """A box that is cut into tiles; axes are in stored order, the widest step first.

    Attributes:
        lengths: Of the axes; 1 if a step of 0 repeats a stored element.
        steps: From one index to the next in the stored elements.
        strides: The same in the result, in bytes.
        itemsize: Of an element, in bytes.
        forwards: Whether tiles must be read in stored order.
    """

    lengths: tuple[int, ...]
    steps: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    forwards: bool = False

    def runs(self, sizes: Sequence[int]) -> tuple[int, int, int]:
        """Return the first axis that a run covers in a tile, elements per run, and the number of runs.

        A run is read at once: the innermost axes, as long as the gaps between them are small.
        """
        split, run, count = len(sizes), 1, 1
        for axis in range(len(sizes) - 1, -1, -1):
            size, step = sizes[axis], self.steps[axis]
            is_near = self.forwards or (step - run) * self.itemsize <= _GAP_BYTES
            if count == 1 and (size == 1 or is_near):
                split, run = axis, run + (size - 1) * step
            else:
                count *= size
        return split, run, count

    def sizes(self) -> tuple[int, ...]:
        """Return the lengths of a tile's axes."""
        if self._nbytes(self.lengths) <= _TILE_BYTES:
            return self.lengths
        sizes = [1] * len(self.lengths)
        stored = range(len(sizes) - 1, -1, -1)
        made = sorted(stored, key=lambda axis: self.strides[axis])
        if not self.forwards:
            self._grow(sizes, stored, _RUN_BYTES)
            self._grow(sizes, made, _LINES_BYTES)
        self._grow(sizes, stored, _TILE_BYTES)
        return tuple(sizes)

    def _nbytes(self, sizes: Sequence[int]) -> int:
        _, run, count = self.runs(sizes)
        return count * run * self.itemsize

    def _grow(self, sizes: list[int], axes: Sequence[int], goal: int) -> None:
        """Lengthen one axis after the other until they span ``goal`` bytes, or the tile is full."""
        nbytes = self.itemsize
        for axis in axes:
            size, least = min(self.lengths[axis], -(-goal // nbytes)), sizes[axis]
            # A guess in proportion to the excess, and then one less at a time: with gaps that are read, too,
            # the bytes of a tile aren't proportional to its length.
            while size > least:
                sizes[axis] = size
                tile_bytes = self._nbytes(sizes)
                if tile_bytes <= _TILE_BYTES:
                    break
                size = max(least, min(size - 1, size * _TILE_BYTES // tile_bytes))
            sizes[axis] = max(size, least)
            nbytes *= sizes[axis]
            if sizes[axis] < self.lengths[axis]:
                return

    def tiles(self, sizes: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Yield the start and the sizes of each tile."""
        starts = [range(0, length, size) for length, size in zip(self.lengths, sizes, strict=True)]
        for start in itertools.product(*starts):
            ends = zip(sizes, self.lengths, start, strict=True)
            yield start, tuple(min(size, length - at) for size, length, at in ends)


# Gathering ------------------------------------------------------------------------------------------


def gather(
    source: Readable,
    offset: int,
    steps: tuple[int, ...],
    swap: int,
    into: np.ndarray[Any, Any],
) -> None:
    """Fill an array with stored elements of the same itemsize; it may be a view in any order.

    Args:
        source: The stored bytes.
        offset: Of the first element, in bytes.
        steps: For each axis, from one index to the next, in elements; 0 repeats a stored element.
        swap: Bytes of a word whose order is to be reversed; 1 for none.
        into: The array to fill; an item is an element.
    """
    import numpy as np

    if into.size == 0:
        return
    # Axes of length 1 are dropped, and the others sorted by their stored step, the widest first: then the
    # last axes of a tile are the runs to read. An axis that repeats an element (step 0) has length 1 in the
    # tiling, and ``copyto`` broadcasts it.
    itemsize = into.itemsize
    item = _WORDS.get(itemsize, f"V{itemsize}")
    wide = [axis for axis in range(into.ndim) if into.shape[axis] > 1]
    order = sorted(wide, key=lambda axis: -steps[axis])
    kept: Any = (*(slice(None) if axis in wide else 0 for axis in range(into.ndim)), ...)
    target = into[kept].transpose([wide.index(axis) for axis in order]).view(item)
    in_order = tuple(steps[axis] for axis in order)
    lengths = tuple(n if step else 1 for n, step in zip(target.shape, in_order, strict=True))
    tiling = _Tiling(lengths, in_order, target.strides, itemsize, source.forwards)
    reader = _TileReader(source, offset, tiling, swap, np.dtype(item))
    for start, sizes in tiling.tiles(tiling.sizes()):
        places = zip(start, sizes, in_order, strict=True)
        place: Any = (*(slice(at, at + size) if step else slice(None) for at, size, step in places), ...)
        np.copyto(target[place], reader.tile(start, sizes))


class _TileReader:
    """Reads tiles of a box into one buffer."""

    def __init__(
        self, source: Readable, offset: int, tiling: _Tiling, swap: int, item: np.dtype[Any]
    ) -> None:
        self._source, self._offset, self._tiling, self._swap, self._item = source, offset, tiling, swap, item
        self._plans: dict[tuple[int, ...], tuple[int, int, int, list[int]]] = {}
        self._buffer = memoryview(b"")

    def tile(self, start: tuple[int, ...], sizes: tuple[int, ...]) -> np.ndarray[Any, Any]:
        """Return a tile of stored elements with the axes of the tiling; valid until the next call."""
        import numpy as np

        if sizes not in self._plans:
            self._plans[sizes] = self._plan(sizes)
        split, run, pitch, offsets = self._plans[sizes]
        itemsize, steps = self._item.itemsize, self._tiling.steps
        used = len(offsets) * pitch * itemsize
        if len(self._buffer) < used:
            self._buffer = aligned_buffer(used)
        first = sum(at * step for at, step in zip(start, steps, strict=True))
        base, width, at = self._offset + first * itemsize, run * itemsize, 0
        for offset in offsets:
            self._source.read_into(base + offset, self._buffer[at : at + width])
            at += pitch * itemsize
        if self._swap > 1:
            np.frombuffer(self._buffer[:used], f"u{self._swap}").byteswap(inplace=True)
        # In the buffer, axes within a run keep their stored steps, as gaps are read, too. The axes before
        # them step over whole runs, which lie at a distance of the pitch.
        strides = [step * itemsize if size > 1 else 0 for step, size in zip(steps, sizes, strict=True)]
        below = pitch * itemsize
        for axis in range(split - 1, -1, -1):
            strides[axis] = below
            below *= sizes[axis]
        items = np.frombuffer(self._buffer, self._item, used // itemsize)
        return np.lib.stride_tricks.as_strided(items, sizes, strides, writeable=False)

    def _plan(self, sizes: tuple[int, ...]) -> tuple[int, int, int, list[int]]:
        """Return the first axis that a run covers, elements per run, the pitch, and each run's byte offset.

        The pitch is the distance of runs in the buffer, in elements.
        """
        (split, run, count), itemsize = self._tiling.runs(sizes), self._item.itemsize
        offsets = [0]
        for size, step in zip(sizes[:split], self._tiling.steps, strict=False):
            offsets = [at + index * step * itemsize for at in offsets for index in range(size)]
        pitch = run
        if count > 1 and run * itemsize % _PERIOD_BYTES == 0:
            # Rows at a distance of a multiple of 256 bytes map to the same few sets of the cache, and evict
            # each other when the tile is read down a column. One more cache line per row spreads them.
            pitch += max(1, 64 // itemsize)
        return split, run, pitch, offsets


def copy(stored: np.ndarray[Any, Any], into: np.ndarray[Any, Any]) -> None:
    """Copy an array into another of its shape and type, tile by tile, with axes in any order."""
    if stored.size == 0:
        return
    order = sorted(range(stored.ndim), key=lambda axis: -stored.strides[axis])
    source, target = stored.transpose(order), into.transpose(order)
    item = _WORDS.get(into.itemsize, f"V{into.itemsize}")
    source, target = source.view(item), target.view(item)
    steps = tuple(stride // source.itemsize for stride in source.strides)
    tiling = _Tiling(source.shape, steps, target.strides, source.itemsize)
    for start, sizes in tiling.tiles(tiling.sizes()):
        place: Any = (*(slice(at, at + size) for at, size in zip(start, sizes, strict=True)), ...)
        target[place] = source[place]
