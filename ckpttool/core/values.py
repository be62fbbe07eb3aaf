"""Sources of a tensor's elements: stored bytes, and lazy combinations of them.

All values yield blocks of bytes in C order and little-endian, in bounded memory; nothing is read before
that. ``Contiguous`` and ``Strided`` are stored elements. ``Tiled`` and ``Concatenated`` join several values,
``Reordered`` permutes, cuts and selects, and ``Computed`` computes elements as they are read: casts, sums,
signs, decoded ones. Values that can fill any box of their ``shape`` without reading the rest have a method
``fill``, which takes the start of the box and an array of its shape, an item per element. Others are read
from their start.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.core.dtypes import DType, numpy_dtype
from ckpttool.core.errors import DamagedCheckpoint
from ckpttool.core.gather import BOX_BYTES, blocks_by_box, boxes, copy, gather
from ckpttool.core.readable import Buffer, Readable, aligned_buffer, swap_bytes
from ckpttool.core.tensor import Extent, Tensor, Values

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

PASS_BYTES = BOX_BYTES
"""Bytes that are reordered in memory at once, if elements can only be read in their own order."""
_BOX_BYTES = 1 << 22


# Stored elements -------------------------------------------------------------------------------------


class Contiguous(NamedTuple):
    """Contiguous elements in C order.

    ``swap`` is the size in bytes of a word whose byte order is reversed; 1 for none.
    """

    source: Readable
    offset: int
    nbytes: int
    swap: int = 1

    def blocks(self, limit: int) -> Iterator[memoryview]:
        buffer = aligned_buffer(min(self.nbytes, max(16, limit - limit % 16)))
        for start in range(0, self.nbytes, len(buffer) or 1):
            view = memoryview(buffer)[: min(len(buffer), self.nbytes - start)]
            self.source.read_into(self.offset + start, view)
            yield swap_bytes(view, self.swap)


def in_memory(data: bytes, swap: int = 1, name: str = "memory") -> Contiguous:
    """Return the values of elements in memory, as bytes in C order, with a name for errors."""
    return Contiguous(Buffer(name, data), 0, len(data), swap)


def is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether elements with these strides (in elements) are in C order without gaps."""
    expected = 1
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


def c_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a shape that is stored in C order."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def strided_length(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return the number of stored elements from the first to the last one; 0 for an empty shape."""
    if 0 in shape:
        return 0
    return 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))


class Strided(NamedTuple):
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

    def fill(self, start: tuple[int, ...], into: Array) -> None:
        skipped = sum(at * stride for at, stride in zip(start, self.strides, strict=True))
        gather(self.source, self.offset + skipped * self.itemsize, self.strides, self.swap, into)

    def box(self, start: tuple[int, ...], shape: tuple[int, ...]) -> Strided:
        """Return the box of a shape that begins at an index."""
        skipped = sum(at * stride for at, stride in zip(start, self.strides, strict=True))
        return self._replace(offset=self.offset + skipped * self.itemsize, shape=shape)

    def split(self, cuts: Sequence[tuple[int, ...]]) -> Strided:
        """Return the same elements with each axis cut into several, of these lengths."""
        strides = [
            stride * inner
            for stride, parts in zip(self.strides, cuts, strict=True)
            for inner in c_strides(parts)
        ]
        return self._replace(shape=tuple(n for parts in cuts for n in parts), strides=tuple(strides))

    def transpose(self, order: Sequence[int]) -> Strided:
        """Return the same elements with their axes in another order, as NumPy's ``transpose``."""
        return self._replace(
            shape=tuple(self.shape[axis] for axis in order),
            strides=tuple(self.strides[axis] for axis in order),
        )


def as_strided(values: Values | None, shape: tuple[int, ...], itemsize: int) -> Strided | None:
    """Return elements of whole bytes as a strided view of stored ones; None if they aren't such a view.

    None, too, for a view with other axes than the shape: that of a rearranged tensor.
    """
    if isinstance(values, Strided):
        return values if values.shape == shape else None
    if not isinstance(values, Contiguous):
        return None
    return Strided(values.source, values.offset, itemsize, shape, c_strides(shape), values.swap)


def stored_once(values: Values) -> Values:
    """Return the stored elements once each, in any order; an expanded tensor repeats them."""
    if isinstance(values, Computed) and values.inner is not None:
        return values._replace(inner=stored_once(values.inner))
    if not isinstance(values, Strided):
        return values
    # Without the axes of stride 0 (``expand``) and with the others in stored order, most views are
    # contiguous, and are read without gathering. Callers that count elements multiply by the number of
    # repeats.
    axes = [axis for axis, stride in enumerate(values.strides) if stride or values.shape[axis] == 0]
    view = values.transpose(sorted(axes, key=lambda axis: -values.strides[axis]))
    if is_contiguous(view.shape, view.strides):
        return Contiguous(view.source, view.offset, math.prod(view.shape) * view.itemsize, view.swap)
    return view


# Combinations ----------------------------------------------------------------------------------------


class Concatenated(NamedTuple):
    """Elements that follow each other; ``storages`` are their stored bytes, if known."""

    parts: tuple[Values, ...]
    storages: tuple[Extent, ...] = ()

    def blocks(self, limit: int) -> Iterator[memoryview]:
        for part in self.parts:
            yield from part.blocks(limit)


class Tile(NamedTuple):
    """Stored elements of a box of a tensor, and its start, one number an axis."""

    start: tuple[int, ...]
    stored: Strided

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(first + length for first, length in zip(self.start, self.stored.shape, strict=True))


class Tiled(NamedTuple):
    """Elements in boxes that tile the shape; ``storages`` holds the bytes of each, if known."""

    shape: tuple[int, ...]
    itemsize: int
    tiles: tuple[Tile, ...]
    storages: tuple[Extent, ...] = ()

    def blocks(self, limit: int) -> Iterator[memoryview]:
        return blocks_by_box(self.shape, self.itemsize, limit, self.fill)

    def fill(self, start: tuple[int, ...], into: Array) -> None:
        end = tuple(first + length for first, length in zip(start, into.shape, strict=True))
        for tile in self.tiles:
            low = tuple(map(max, start, tile.start))
            high = tuple(map(min, end, tile.end))
            if all(a < b for a, b in zip(low, high, strict=True)):
                overlap: Any = (*(slice(a - s, b - s) for a, b, s in zip(low, high, start, strict=True)), ...)
                start_in_tile = tuple(a - first for a, first in zip(low, tile.start, strict=True))
                tile.stored.fill(start_in_tile, into[overlap])


def storages_of(tensor: Tensor) -> tuple[Extent, ...]:
    """Return the ranges of stored bytes of a tensor; empty if unknown."""
    if tensor.storage is not None:
        return (tensor.storage,)
    return tensor.values.storages if isinstance(tensor.values, Tiled | Concatenated) else ()


class Computed(NamedTuple):
    """Elements that are computed as they are read.

    Attributes:
        make: Yields blocks in C order and little-endian; takes the limit on their bytes, after ``inner`` if
            there is one.
        inner: Values from which they are computed one by one, in any order.
    """

    make: Callable[..., Iterator[memoryview]]
    inner: Values | None = None

    def blocks(self, limit: int) -> Iterator[memoryview]:
        return self.make(limit) if self.inner is None else self.make(self.inner, limit)


def flip_signs(values: Values, dtype: DType, *, conjugated: bool, negated: bool) -> Computed:
    """Return the elements of a tensor with PyTorch's conj or neg bit applied."""

    def make(values: Values, limit: int) -> Iterator[memoryview]:
        import numpy as np

        # Signs are flipped as bits, which also works for types that NumPy lacks (complex32). The neg bit is
        # for all parts, the conj bit for imaginary ones, which are every second word.
        width = dtype.word_bytes
        for block in values.blocks(limit):
            words = np.frombuffer(block, f"<u{width}").copy()
            sign = words.dtype.type(1 << (8 * width - 1))
            if negated:
                words ^= sign
            if conjugated:
                words[1::2] ^= sign
            yield memoryview(words.view(np.uint8).data)

    return Computed(make, values)


def add(a: Tensor, b: Tensor) -> Computed:
    """Return the sums of the elements of two tensors of one shape and type."""

    def make(limit: int) -> Iterator[memoryview]:
        import numpy as np

        # Both are regrouped into equal blocks, since their sources may yield others. An overflow is infinite,
        # as in the framework, and no warning.
        step = max(16, limit - limit % 16)
        sizes = [min(step, a.nbytes - at) for at in range(0, a.nbytes, step)]
        word = 1 if sys.byteorder == "little" else a.dtype.word_bytes
        for one, other in zip(regroup(a, sizes), regroup(b, sizes), strict=True):
            x, y = (
                np.frombuffer(swap_bytes(memoryview(data), word), np.uint8).view(numpy_dtype(a.dtype))
                for data in (one, other)
            )
            with np.errstate(all="ignore"):
                total = x + y
            yield swap_bytes(memoryview(total.view(np.uint8).data), word)

    return Computed(make)


def all_zero(shape: tuple[int, ...], itemsize: int) -> Strided:
    """Return elements that are all zero."""
    return Strided(Buffer("zeros", bytes(itemsize)), 0, itemsize, shape, (0,) * len(shape))


def regroup(tensor: Tensor, sizes: Iterable[int]) -> Iterator[bytearray]:
    """Yield a tensor's bytes in groups of the given sizes."""
    blocks, held = tensor.blocks(), memoryview(b"")
    for size in sizes:
        group, filled = bytearray(size), 0
        while filled < size:
            if not held:
                more = next(blocks, None)
                if more is None:
                    place = tensor.storage.file if tensor.storage else tensor.name
                    raise DamagedCheckpoint(
                        place, "fewer elements than its shape requires", where=tensor.name
                    )
                held = more
            count = min(len(held), size - filled)
            group[filled : filled + count] = held[:count]
            filled, held = filled + count, held[count:]
        yield group


# Other orders ----------------------------------------------------------------------------------------


class Reordered(NamedTuple):
    """A box of a tensor, with its axes cut and in another order.

    Up to ``PASS_BYTES`` are reordered at once. Larger values that can't fill a box are read in full for each
    part.

    Attributes:
        tensor: The stored tensor.
        cuts: For each of its axes, the lengths of its parts.
        start: For each cut axis, the start of the box.
        counts: For each cut axis, the length of the box.
        order: The cut axes in the order of the result.
        gates: A cut axis, and its index at each place of the result; None for the stored order.
    """

    tensor: Tensor
    cuts: tuple[tuple[int, ...], ...]
    start: tuple[int, ...]
    counts: tuple[int, ...]
    order: tuple[int, ...]
    gates: tuple[int, tuple[int, ...]] | None = None

    def blocks(self, limit: int) -> Iterator[memoryview]:
        shape = tuple(self.counts[axis] for axis in self.order)
        return blocks_by_box(shape, self.tensor.dtype.itemsize, limit, self._fill, PASS_BYTES)

    def as_view(self) -> Values:
        """Return a strided view of the same elements, which is faster, or these if none is possible."""
        stored = self._stored() if self.gates is None else None
        return self if stored is None else stored.box(self.start, self.counts).transpose(self.order)

    def _stored(self) -> Strided | None:
        """Return all of the tensor with its axes cut; None if it isn't a strided view."""
        tensor = self.tensor
        if tensor.dtype.bits < 8:
            return None
        stored = as_strided(tensor.values, tensor.shape, tensor.dtype.itemsize)
        return None if stored is None else stored.split(self.cuts)

    def _fill(self, start: tuple[int, ...], into: Array) -> None:
        """Fill an array with the box of the result that begins at an index."""
        import numpy as np

        low, high = list(self.start), list(self.start)
        for axis, at, length in zip(self.order, start, into.shape, strict=True):
            low[axis] += at
            high[axis] += at + length
        # Three ways, the fastest first: a strided view is gathered directly into the result; other values
        # fill boxes themselves if they know the tensor's axes; else all stored elements are read in their
        # order, and each box of them is copied to where it overlaps the wanted one.
        within = into.transpose(np.argsort(self.order))  # a view whose axes are the stored ones
        parts = list(self._boxes_by_gate(within, low, high))
        filler: Any = self._stored()
        if filler is None and all(len(lengths) == 1 for lengths in self.cuts):
            filler = self.tensor.values
            # A rearranged tensor may be a view with other axes, whose boxes are not those of the tensor.
            if getattr(filler, "shape", None) != self.tensor.shape:
                filler = None
        if hasattr(filler, "fill"):
            for part, begins, _ in parts:
                filler.fill(tuple(begins), part)
            return
        for first, box in self._stored_boxes(into.dtype):
            for part, begins, ends in parts:
                _copy_overlap(box, first, part, begins, ends)

    def _boxes_by_gate(
        self, into: Array, low: list[int], high: list[int]
    ) -> Iterator[tuple[Array, list[int], list[int]]]:
        """Yield the parts of a box that are boxes of the stored tensor: target, start and end of each."""
        # Gates (of an LSTM, say) are slices of one axis in another order: each is a separate box.
        if self.gates is None:
            yield into, low, high
            return
        axis, order = self.gates
        for place in range(low[axis], high[axis]):
            begins, ends = list(low), list(high)
            begins[axis], ends[axis] = order[place], order[place] + 1
            at = place - low[axis]
            yield into[(slice(None),) * axis + (slice(at, at + 1),)], begins, ends

    def _stored_boxes(self, item: np.dtype[Any]) -> Iterator[tuple[tuple[int, ...], Array]]:
        """Yield boxes that cover the tensor, with their starts, in stored order."""
        import numpy as np

        shape = tuple(length for parts in self.cuts for length in parts)
        parts = list(boxes(shape, max(1, _BOX_BYTES // item.itemsize)))
        sizes = [math.prod(lengths) * item.itemsize for _, lengths in parts]
        for (start, lengths), data in zip(parts, regroup(self.tensor, sizes), strict=True):
            yield start, np.frombuffer(data, item).reshape(lengths)


def _copy_overlap(box: Array, first: tuple[int, ...], into: Array, low: list[int], high: list[int]) -> None:
    """Copy the overlap of a box that begins at ``first`` with the one from ``low`` to ``high``."""
    begin = list(map(max, first, low))
    end = [min(at + length, stop) for at, length, stop in zip(first, box.shape, high, strict=True)]
    if all(a < b for a, b in zip(begin, end, strict=True)):
        place = tuple(slice(a - s, b - s) for a, b, s in zip(begin, end, low, strict=True))
        source = tuple(slice(a - s, b - s) for a, b, s in zip(begin, end, first, strict=True))
        copy(box[source], into[place])
