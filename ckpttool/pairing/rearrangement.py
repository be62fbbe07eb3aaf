"""Lazy tensors made of others: transposed, cut, joined or summed, in bounded memory."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from ckpttool.dtypes import DType, numpy_dtype
from ckpttool.errors import DamagedCheckpoint
from ckpttool.formats.content.chunks import Chunked
from ckpttool.tensor import Path, Tensor, Values
from ckpttool.wire.gather import BOX_BYTES, blocks_by_box, boxes, copy
from ckpttool.wire.hdf5 import LibraryValues, slabs
from ckpttool.wire.readable import Contiguous, InMemory, swap_bytes
from ckpttool.wire.source import Buffer
from ckpttool.wire.views import Strided

if TYPE_CHECKING:
    import numpy as np

    Box = tuple[tuple[int, ...], np.ndarray[Any, Any]]
    "Where a box begins, and its elements."

PASS_BYTES = BOX_BYTES
"""How many bytes are put in order in memory, where the elements can only be read in their own order."""
_BOX_BYTES = 1 << 22


class Unfit(ValueError):
    """A tensor can't be arranged in the way that was asked for; the text says why."""


# Patterns -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pattern:
    """How the axes of a stored tensor become those of the result: ``h w (c m) -> (c m) 1 h w``.

    Attributes:
        stored: For each axis as stored, the names of what it is cut into.
        result: For each axis of the result, the names of what is merged into it.
        gates: In which order the parts of the axis ``g`` follow each other; () is as they are.
    """

    stored: tuple[tuple[str, ...], ...]
    result: tuple[tuple[str, ...], ...]
    gates: tuple[int, ...] = ()

    def inverse(self) -> Pattern:
        """Return the way back; what was taken from one ``row`` becomes one row."""
        back = tuple(self.gates.index(at) for at in range(len(self.gates)))
        stored = tuple(tuple(name for name in group if name != "row") for group in self.stored)
        return Pattern(self.result, stored, back)


def pattern(text: str, gates: tuple[int, ...] = ()) -> Pattern:
    """Return the pattern that a text like ``i (g u) -> (g u) i`` stands for."""
    stored, _, result = text.partition("->")
    return Pattern(_axes(stored), _axes(result), gates)


def _axes(text: str) -> tuple[tuple[str, ...], ...]:
    found: list[tuple[str, ...]] = []
    group: list[str] | None = None
    for word in text.replace("(", " ( ").replace(")", " ) ").split():
        if word == "(":
            group = []
        elif word == ")":
            found.append(tuple(group or ()))
            group = None
        elif group is not None:
            group.append(word)
        else:
            found.append(() if word == "1" else (word,))
    return tuple(found)


def transpose_pattern(order: Sequence[int]) -> Pattern:
    """Return the pattern whose axis ``k`` is the stored axis ``order[k]``, as NumPy's ``transpose``."""
    return Pattern(tuple((f"a{at}",) for at in range(len(order))), tuple((f"a{at}",) for at in order))


def lengths_of(shape: tuple[int, ...], way: Pattern, known: Mapping[str, int]) -> dict[str, int]:
    """Return the length of each named axis.

    Raises:
        Unfit: The shape isn't one that the pattern can have.
    """
    if len(shape) != len(way.stored):
        raise Unfit(f"{len(shape)} axes, not {len(way.stored)}")
    lengths = dict(known)
    for length, names in zip(shape, way.stored, strict=True):
        open_names = [name for name in names if name not in lengths]
        rest = math.prod(lengths[name] for name in names if name in lengths)
        if len(open_names) > 1:
            raise Unfit(f"nothing says how long {open_names[0]} is")
        if open_names and (rest == 0 or length % rest):
            raise Unfit(f"an axis of {length:,}, which {rest:,} does not divide")
        if not open_names and length != rest:
            raise Unfit(f"an axis of {length:,}, not {rest:,}")
        lengths.update((name, length // rest) for name in open_names)
    return lengths


# Tensors --------------------------------------------------------------------------------------------


def rearrange(
    tensor: Tensor,
    way: Pattern,
    path: Path,
    *,
    sizes: Mapping[str, int] | None = None,
    row: int | None = None,
) -> Tensor:
    """Return a tensor in another layout, under another path; no value is read.

    Args:
        tensor: As stored.
        way: How its axes become those of the result.
        path: What the result is called.
        sizes: Lengths of named axes that the shape doesn't tell.
        row: Of the axis named ``row``, which the result hasn't got, the index that is taken.

    Raises:
        Unfit: Its shape is none for the pattern, or its elements are no whole bytes.
    """
    if tensor.dtype.bits < 8:
        raise Unfit(f"elements of {tensor.dtype.bits} bits")
    lengths = lengths_of(tensor.shape, way, sizes or {})
    names = [name for group in way.stored for name in group]
    order = [name for group in way.result for name in group]
    shape = tuple(math.prod(lengths[name] for name in group) for group in way.result)
    long_names = [name for name in names if lengths[name] != 1]
    if row is None and not way.gates and long_names == [name for name in order if lengths[name] != 1]:
        return replace(tensor, path=path, shape=shape)  # the elements follow each other as they are stored
    start = {name: 0 for name in names} | ({} if row is None else {"row": row})
    count = dict(lengths) | ({} if row is None else {"row": 1})
    order = ["row", *order] if row is not None else order
    is_outermost = bool(way.gates) and order[0] == "g"
    steps = [{"g": at} for at in way.gates] if is_outermost else [{}]
    pieces = []
    for step in steps:
        begins, extents = start | step, count | dict.fromkeys(step, 1)
        pieces.append(
            RearrangedPiece(
                tensor,
                tuple(tuple(lengths[name] for name in group) for group in way.stored),
                tuple(begins[name] for name in names),
                tuple(extents[name] for name in names),
                tuple(names.index(name) for name in order),
                (names.index("g"), way.gates) if way.gates and not is_outermost else None,
            )
        )
    return _tensor_of(tensor, path, shape, None if tensor.values is None else tuple(map(values_of, pieces)))


def _tensor_of(like: Tensor, path: Path, shape: tuple[int, ...], values: tuple[Values, ...] | None) -> Tensor:
    found = None if values is None else values[0] if len(values) == 1 else ValueSequence(values)
    return Tensor(path, like.dtype, shape, like.role, found, shares_with=like.shares_with)


def concatenate(tensors: Sequence[Tensor], path: Path) -> Tensor:
    """Return tensors joined along their first axis.

    Raises:
        Unfit: They differ in the other axes or in the type of their elements.
    """
    first = tensors[0]
    if not first.shape or any(one.shape[1:] != first.shape[1:] or not one.shape for one in tensors):
        raise Unfit("shapes " + ", ".join(str(list(one.shape)) for one in tensors))
    if any(one.dtype is not first.dtype for one in tensors) or first.dtype.bits < 8:
        raise Unfit("types " + ", ".join(one.dtype.name for one in tensors))
    shape = (sum(one.shape[0] for one in tensors), *first.shape[1:])
    values = tuple(one.values for one in tensors if one.values is not None)
    return _tensor_of(first, path, shape, values if len(values) == len(tensors) else None)


def cut(tensor: Tensor, start: int, count: int, path: Path) -> Tensor:
    """Return some rows of a tensor: indexes of its first axis from ``start`` on.

    Raises:
        Unfit: It hasn't got them, or its elements are no whole bytes.
    """
    if not tensor.shape or start + count > tensor.shape[0] or tensor.dtype.bits < 8:
        raise Unfit(f"rows {start:,}..{start + count:,} of shape {list(tensor.shape)}")
    lengths, rest = tensor.shape, tensor.shape[1:]
    counts = (count, *rest)
    order = tuple(range(len(lengths)))
    piece = RearrangedPiece(
        tensor, tuple((one,) for one in lengths), (start, *(0 for _ in rest)), counts, order
    )
    return _tensor_of(tensor, path, counts, None if tensor.values is None else (values_of(piece),))


def add_tensors(a: Tensor, b: Tensor, path: Path) -> Tensor:
    """Return the sum of two tensors, in the type of their elements.

    Raises:
        Unfit: They differ in shape or type, or are of a type that NumPy can't add.
    """
    if a.shape != b.shape or a.dtype is not b.dtype:
        raise Unfit(f"{a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}")
    if a.dtype.kind not in ("float", "complex", "integer") or a.dtype.numpy is None or a.dtype.bits < 8:
        raise Unfit(f"elements of type {a.dtype}")
    known = a.values is not None and b.values is not None
    return _tensor_of(a, path, a.shape, (ValueSum(a, b),) if known else None)


def zeros(like: Tensor, path: Path) -> Tensor:
    """Return a tensor of the same shape and type in which all is zero."""
    return Tensor(path, like.dtype, like.shape, like.role, ZeroValues(like.nbytes))


@dataclass(frozen=True, slots=True)
class RearrangedPiece:
    """A box of a stored tensor, its axes in the order in which they are wanted.

    Attributes:
        tensor: As stored.
        cuts: For each of its axes, the lengths of what it is cut into.
        start: For each cut axis, where the box begins.
        count: For each cut axis, how long the box is.
        order: The cut axes in the order of the result.
        gates: A cut axis, and which of its indexes stands at each place of the result; None: as they are.
    """

    tensor: Tensor
    cuts: tuple[tuple[int, ...], ...]
    start: tuple[int, ...]
    count: tuple[int, ...]
    order: tuple[int, ...]
    gates: tuple[int, tuple[int, ...]] | None = None


def values_of(piece: RearrangedPiece) -> Values:
    stored = as_strided(piece.tensor) if piece.gates is None else None
    return ReorderedValues(piece) if stored is None else _strided_view(piece, stored)


def as_strided(tensor: Tensor) -> Strided | None:
    """Return a tensor's elements as a strided view of stored bytes, or None where they are none."""
    values = tensor.values
    if isinstance(values, InMemory):
        values = Contiguous(Buffer(tensor.name, values.data), 0, len(values.data), values.swap)
    if isinstance(values, Strided):
        return values if values.shape == tensor.shape else None
    if not isinstance(values, Contiguous) or tensor.dtype.bits < 8:
        return None
    strides = _c_strides(tensor.shape)
    return Strided(values.source, values.offset, tensor.dtype.itemsize, tensor.shape, strides, values.swap)


def _c_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _strided_view(piece: RearrangedPiece, stored: Strided) -> Strided:
    """Return a box as a strided view: an axis that is cut gives each part a stride of its own."""
    strides: list[int] = []
    for stride, parts in zip(stored.strides, piece.cuts, strict=True):
        strides += [stride * inner for inner in _c_strides(parts)]
    skipped = sum(at * stride for at, stride in zip(piece.start, strides, strict=True))
    return Strided(
        stored.source,
        stored.offset + skipped * stored.itemsize,
        stored.itemsize,
        tuple(piece.count[axis] for axis in piece.order),
        tuple(strides[axis] for axis in piece.order),
        stored.swap,
    )


@dataclass(frozen=True, slots=True)
class ValueSequence:
    """Values that follow each other."""

    parts: tuple[Values, ...]

    def blocks(self, limit: int) -> Iterator[memoryview]:
        for part in self.parts:
            yield from part.blocks(limit)

    def once(self) -> ValueSequence:
        return self


@dataclass(frozen=True, slots=True)
class ReorderedValues:
    """Elements in another order than the one in which alone they can be read.

    As much as fits into ``PASS_BYTES`` is put in order at once; of what is larger, all is read once for
    each part.
    """

    piece: RearrangedPiece

    def blocks(self, limit: int) -> Iterator[memoryview]:
        shape = tuple(self.piece.count[axis] for axis in self.piece.order)
        return blocks_by_box(shape, self.piece.tensor.dtype.itemsize, limit, self._fill, PASS_BYTES)

    def once(self) -> ReorderedValues:
        return self

    def _fill(self, start: tuple[int, ...], into: np.ndarray[Any, Any]) -> None:
        """Fill an array with the box of the result that begins at an index."""
        import numpy as np

        piece = self.piece
        low, high = list(piece.start), list(piece.start)
        for axis, at, length in zip(piece.order, start, into.shape, strict=True):
            low[axis] += at
            high[axis] += at + length
        within = into.transpose(np.argsort(piece.order))  # a view whose axes are the stored ones
        parts = list(_copy_by_gate(within, low, high, piece.gates))
        fill = _filler(piece)
        if fill is not None:
            for part, begins, _ in parts:
                fill(tuple(begins), part)
            return
        for first, box in _stored_boxes(piece, low, high, into.dtype):
            for part, begins, ends in parts:
                _copy(box, first, part, begins, ends)


def _filler(piece: RearrangedPiece) -> Callable[[tuple[int, ...], np.ndarray[Any, Any]], None] | None:
    """Return what fills a box of stored elements without reading others, None where nothing can."""
    stored, values = as_strided(piece.tensor), piece.tensor.values
    if stored is not None:
        shape = tuple(length for parts in piece.cuts for length in parts)
        order = tuple(range(len(shape)))
        return _strided_view(replace(piece, start=(0,) * len(shape), count=shape, order=order), stored).fill
    if isinstance(values, Chunked) and all(len(parts) == 1 for parts in piece.cuts):
        return values.fill
    return None


def _copy_by_gate(
    into: np.ndarray[Any, Any], low: list[int], high: list[int], gates: tuple[int, tuple[int, ...]] | None
) -> Iterator[tuple[np.ndarray[Any, Any], list[int], list[int]]]:
    """Yield the parts of a box that are boxes as stored, too: where each goes, where it begins and ends."""
    if gates is None:
        yield into, low, high
        return
    axis, order = gates
    for place in range(low[axis], high[axis]):
        begins, ends = list(low), list(high)
        begins[axis], ends[axis] = order[place], order[place] + 1
        at = place - low[axis]
        yield into[(slice(None),) * axis + (slice(at, at + 1),)], begins, ends


def _copy(
    box: np.ndarray[Any, Any],
    first: tuple[int, ...],
    into: np.ndarray[Any, Any],
    low: list[int],
    high: list[int],
) -> None:
    """Copy what a box that begins at ``first`` has of the one from ``low`` to ``high``."""
    begin = list(map(max, first, low))
    end = [min(at + length, stop) for at, length, stop in zip(first, box.shape, high, strict=True)]
    if all(a < b for a, b in zip(begin, end, strict=True)):
        place = tuple(slice(a - s, b - s) for a, b, s in zip(begin, end, low, strict=True))
        source = tuple(slice(a - s, b - s) for a, b, s in zip(begin, end, first, strict=True))
        copy(box[source], into[place])


def _stored_boxes(
    piece: RearrangedPiece, low: list[int], high: list[int], item: np.dtype[Any]
) -> Iterator[Box]:
    """Yield boxes of stored elements that cover the one from ``low`` to ``high``."""
    values = piece.tensor.values
    if isinstance(values, LibraryValues) and all(len(parts) == 1 for parts in piece.cuts):
        return _read_slabs(values, low, high, item)
    shape = tuple(length for parts in piece.cuts for length in parts)
    return _read_boxes(piece.tensor, shape, item)


def _read_slabs(values: LibraryValues, low: list[int], high: list[int], item: np.dtype[Any]) -> Iterator[Box]:
    """Yield what HDF5 reads of its chunks alone that are needed."""
    import numpy as np

    wanted = tuple(end - start for start, end in zip(low, high, strict=True))
    for start, count in slabs(wanted, item.itemsize, values.dataset.chunk):
        first = tuple(at + inner for at, inner in zip(low, start, strict=True))
        data = swap_bytes(memoryview(values.read_block(first, count)), values.swap)
        yield first, np.frombuffer(data, item).reshape(count)


def _read_boxes(tensor: Tensor, shape: tuple[int, ...], item: np.dtype[Any]) -> Iterator[Box]:
    """Yield boxes that cover a tensor, in the order of reading."""
    import numpy as np

    parts = list(boxes(shape, max(1, _BOX_BYTES // item.itemsize)))
    sizes = [math.prod(lengths) * item.itemsize for _, lengths in parts]
    for (start, lengths), data in zip(parts, regroup(tensor, sizes), strict=True):
        yield start, np.frombuffer(data, item).reshape(lengths)


def regroup(tensor: Tensor, sizes: Iterable[int]) -> Iterator[bytearray]:
    """Yield a tensor's bytes in groups of the sizes that are wanted."""
    blocks, held = tensor.blocks(), memoryview(b"")
    for size in sizes:
        group, filled = bytearray(size), 0
        while filled < size:
            if not held:
                more = next(blocks, None)
                if more is None:
                    place = tensor.storage.file if tensor.storage else tensor.name
                    raise DamagedCheckpoint(place, "fewer elements than its shape says", where=tensor.name)
                held = more
            count = min(len(held), size - filled)
            group[filled : filled + count] = held[:count]
            filled, held = filled + count, held[count:]
        yield group


@dataclass(frozen=True, slots=True)
class ValueSum:
    """The sums of the elements of two tensors of one shape and type."""

    a: Tensor
    b: Tensor

    def blocks(self, limit: int) -> Iterator[memoryview]:
        import numpy as np

        step = max(16, limit - limit % 16)
        sizes = [min(step, self.a.nbytes - at) for at in range(0, self.a.nbytes, step)]
        for one, other in zip(regroup(self.a, sizes), regroup(self.b, sizes), strict=True):
            with np.errstate(all="ignore"):
                total = _native(one, self.a.dtype) + _native(other, self.a.dtype)
            word = 1 if sys.byteorder == "little" else self.a.dtype.word_bytes
            yield swap_bytes(memoryview(total.view(np.uint8).data), word)

    def once(self) -> ValueSum:
        return self


@dataclass(frozen=True, slots=True)
class ZeroValues:
    """Elements that are all zero; ``nbytes`` is how many bytes they take."""

    nbytes: int

    def blocks(self, limit: int) -> Iterator[memoryview]:
        block = memoryview(bytes(min(self.nbytes, limit)))
        for start in range(0, self.nbytes, limit):
            yield block[: self.nbytes - start]

    def once(self) -> ZeroValues:
        return self


def _native(data: bytearray, dtype: DType) -> np.ndarray[Any, Any]:
    import numpy as np

    word = 1 if sys.byteorder == "little" else dtype.word_bytes
    return np.frombuffer(swap_bytes(memoryview(data), word), np.uint8).view(numpy_dtype(dtype))


# Samples --------------------------------------------------------------------------------------------


def elements(tensor: Tensor, positions: Sequence[int]) -> bytes:
    """Return the bytes of some elements, little-endian; positions count in C order and ascend."""
    parts = _strided_parts(tensor)
    itemsize = tensor.dtype.itemsize
    if parts is None:
        return _streamed_elements(tensor, positions)
    ends = list(accumulate(math.prod(part.shape) for part in parts))
    found = []
    for position in positions:
        at = next(number for number, end in enumerate(ends) if position < end)
        part, rest = parts[at], position - (ends[at - 1] if at else 0)
        offset = 0
        for length, stride in zip(reversed(part.shape), reversed(part.strides), strict=True):
            rest, index = divmod(rest, length)
            offset += index * stride
        data = part.source.read(part.offset + offset * itemsize, itemsize)
        found.append(bytes(swap_bytes(memoryview(data), part.swap)))
    return b"".join(found)


def _strided_parts(tensor: Tensor) -> tuple[Strided, ...] | None:
    values = tensor.values
    if isinstance(values, Strided):  # an arranged tensor's has more axes than the tensor
        return (values,)
    if isinstance(values, ValueSequence):
        parts = tuple(part for part in values.parts if isinstance(part, Strided))
        return parts if len(parts) == len(values.parts) else None
    one = as_strided(tensor)
    return None if one is None else (one,)


def _streamed_elements(tensor: Tensor, positions: Sequence[int]) -> bytes:
    itemsize = tensor.dtype.itemsize
    found, begin, waiting = [], 0, list(reversed(positions))
    for block in tensor.blocks():
        end = begin + len(block)
        while waiting and (waiting[-1] + 1) * itemsize <= end:
            at = waiting.pop() * itemsize - begin
            found.append(bytes(block[at : at + itemsize]))
        begin = end
    return b"".join(found)
