"""Lazy tensors that transpose, slice, concatenate or add stored ones as they are read, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from ckpttool.core.readable import swap_bytes
from ckpttool.core.tensor import Path, Tensor, Values
from ckpttool.core.values import Concatenated, Reordered, Strided, add, all_zero, as_strided


class LayoutMismatch(ValueError):
    """Raised if a tensor doesn't fit an operation; the message is the reason."""


# Patterns -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pattern:
    """Rearrangement of axes in einops notation: ``h w (c m) -> (c m) 1 h w``.

    Attributes:
        stored: For each stored axis, the named axes that it is split into.
        result: For each axis of the result, the named axes that are merged into it.
        gates: Permutation of the axis ``g``; () keeps the order.
    """

    stored: tuple[tuple[str, ...], ...]
    result: tuple[tuple[str, ...], ...]
    gates: tuple[int, ...] = ()

    def inverse(self) -> Pattern:
        """Return the inverse; the axis ``row``, which the result lacks, is left out."""
        back = tuple(self.gates.index(at) for at in range(len(self.gates)))
        stored = tuple(tuple(name for name in group if name != "row") for group in self.stored)
        return Pattern(self.result, stored, back)


def parse_pattern(text: str, gates: tuple[int, ...] = ()) -> Pattern:
    """Return the pattern of a text like ``i (g u) -> (g u) i``."""
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
    """Return the pattern of ``numpy.transpose(…, order)``."""
    return Pattern(tuple((f"a{at}",) for at in range(len(order))), tuple((f"a{at}",) for at in order))


def lengths_of(shape: tuple[int, ...], pattern: Pattern, known: Mapping[str, int]) -> dict[str, int]:
    """Return the length of each named axis.

    Raises:
        LayoutMismatch: The shape doesn't fit the pattern.
    """
    if len(shape) != len(pattern.stored):
        raise LayoutMismatch(f"{len(shape)} axes, not {len(pattern.stored)}")
    # An axis of the file may be the product of several named ones: ``(h w c)``. All but one of them must be
    # known before it, from an earlier axis or from ``known``; the last one is the quotient.
    lengths = dict(known)
    for length, names in zip(shape, pattern.stored, strict=True):
        open_names = [name for name in names if name not in lengths]
        rest = math.prod(lengths[name] for name in names if name in lengths)
        if len(open_names) > 1:
            raise LayoutMismatch(f"unknown length of {open_names[0]}")
        if open_names and (rest == 0 or length % rest):
            raise LayoutMismatch(f"an axis of {length:,}, which {rest:,} does not divide")
        if not open_names and length != rest:
            raise LayoutMismatch(f"an axis of {length:,}, not {rest:,}")
        lengths.update((name, length // rest) for name in open_names)
    return lengths


# Tensors --------------------------------------------------------------------------------------------


def rearrange(
    tensor: Tensor,
    pattern: Pattern,
    path: Path,
    *,
    sizes: Mapping[str, int] | None = None,
    row: int | None = None,
) -> Tensor:
    """Return a lazy tensor in another layout and under another path.

    Args:
        tensor: As stored.
        pattern: Rearrangement of its axes.
        path: Path of the result.
        sizes: Lengths of named axes that don't follow from the shape.
        row: Index to take of the axis ``row``, which the result lacks.

    Raises:
        LayoutMismatch: Its shape doesn't fit the pattern, or its elements aren't whole bytes.
    """
    if tensor.dtype.bits < 8:
        raise LayoutMismatch(f"elements of {tensor.dtype.bits} bits")
    lengths = lengths_of(tensor.shape, pattern, sizes or {})
    names = [name for group in pattern.stored for name in group]
    order = [name for group in pattern.result for name in group]
    shape = tuple(math.prod(lengths[name] for name in group) for group in pattern.result)
    long_names = [name for name in names if lengths[name] != 1]
    if row is None and not pattern.gates and long_names == [name for name in order if lengths[name] != 1]:
        return replace(tensor, path=path, shape=shape)  # only axes of length 1 move: the order stays
    # Permuted gates: if ``g`` is the outermost axis of the result, the result is the concatenation of one
    # strided piece per gate. Otherwise gates alternate within rows; ``Reordered`` permutes them as it reads.
    start = {name: 0 for name in names} | ({} if row is None else {"row": row})
    count = dict(lengths) | ({} if row is None else {"row": 1})
    order = ["row", *order] if row is not None else order
    is_outermost = bool(pattern.gates) and order[0] == "g"
    steps = [{"g": at} for at in pattern.gates] if is_outermost else [{}]
    pieces = []
    for step in steps:
        begins, extents = start | step, count | dict.fromkeys(step, 1)
        pieces.append(
            Reordered(
                tensor,
                tuple(tuple(lengths[name] for name in group) for group in pattern.stored),
                tuple(begins[name] for name in names),
                tuple(extents[name] for name in names),
                tuple(names.index(name) for name in order),
                (names.index("g"), pattern.gates) if pattern.gates and not is_outermost else None,
            )
        )
    return _tensor_of(
        tensor, path, shape, None if tensor.values is None else tuple(piece.as_view() for piece in pieces)
    )


def _tensor_of(like: Tensor, path: Path, shape: tuple[int, ...], values: tuple[Values, ...] | None) -> Tensor:
    found = None if values is None else values[0] if len(values) == 1 else Concatenated(values)
    return Tensor(path, like.dtype, shape, like.role, found, shares_with=like.shares_with)


def concatenate(tensors: Sequence[Tensor], path: Path) -> Tensor:
    """Return a lazy concatenation of tensors along their first axis.

    Raises:
        LayoutMismatch: They differ in the other axes or in dtype.
    """
    first = tensors[0]
    if not first.shape or any(one.shape[1:] != first.shape[1:] or not one.shape for one in tensors):
        raise LayoutMismatch("shapes " + ", ".join(str(list(one.shape)) for one in tensors))
    if any(one.dtype is not first.dtype for one in tensors) or first.dtype.bits < 8:
        raise LayoutMismatch("types " + ", ".join(one.dtype.name for one in tensors))
    shape = (sum(one.shape[0] for one in tensors), *first.shape[1:])
    values = tuple(one.values for one in tensors if one.values is not None)
    return _tensor_of(first, path, shape, values if len(values) == len(tensors) else None)


def cut(tensor: Tensor, start: int, count: int, path: Path) -> Tensor:
    """Return the lazy slice ``tensor[start:start + count]``.

    Raises:
        LayoutMismatch: It has fewer rows, or its elements aren't whole bytes.
    """
    if not tensor.shape or start + count > tensor.shape[0] or tensor.dtype.bits < 8:
        raise LayoutMismatch(f"rows {start:,}..{start + count:,} of shape {list(tensor.shape)}")
    lengths, rest = tensor.shape, tensor.shape[1:]
    counts = (count, *rest)
    order = tuple(range(len(lengths)))
    piece = Reordered(tensor, tuple((one,) for one in lengths), (start, *(0 for _ in rest)), counts, order)
    return _tensor_of(tensor, path, counts, None if tensor.values is None else (piece.as_view(),))


def add_tensors(a: Tensor, b: Tensor, path: Path) -> Tensor:
    """Return the lazy sum of two tensors, in their dtype.

    Raises:
        LayoutMismatch: They differ in shape or dtype, or NumPy can't add the dtype.
    """
    if a.shape != b.shape or a.dtype is not b.dtype:
        raise LayoutMismatch(f"{a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}")
    if a.dtype.kind not in ("float", "complex", "integer") or a.dtype.numpy is None or a.dtype.bits < 8:
        raise LayoutMismatch(f"elements of type {a.dtype}")
    known = a.values is not None and b.values is not None
    return _tensor_of(a, path, a.shape, (add(a, b),) if known else None)


def zeros(like: Tensor, path: Path) -> Tensor:
    """Return a lazy tensor of zeros of the same shape and dtype."""
    shape, itemsize = ((like.nbytes,), 1) if like.dtype.bits < 8 else (like.shape, like.dtype.itemsize)
    return Tensor(path, like.dtype, like.shape, like.role, all_zero(shape, itemsize))


# Samples --------------------------------------------------------------------------------------------


def elements(tensor: Tensor, positions: Sequence[int]) -> bytes:
    """Return the little-endian bytes of the elements at some positions (C order, ascending)."""
    parts = _strided_parts(tensor)
    itemsize = tensor.dtype.itemsize
    if parts is None:
        return _streamed_elements(tensor, positions)
    # Each position is split into an index per axis (divmod from the last axis), which the strides of the view
    # turn into an offset in the file: one short read per element, whatever the layout.
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
    if isinstance(values, Strided):  # may have more axes than the tensor: those of its pattern
        return (values,)
    if isinstance(values, Concatenated):
        parts = tuple(part for part in values.parts if isinstance(part, Strided))
        return parts if len(parts) == len(values.parts) else None
    view = None if tensor.dtype.bits < 8 else as_strided(values, tensor.shape, tensor.dtype.itemsize)
    return None if view is None else (view,)


def _streamed_elements(tensor: Tensor, positions: Sequence[int]) -> bytes:
    itemsize = tensor.dtype.itemsize
    # The elements are computed or compressed, so all blocks before a position are read, too. Blocks are whole
    # elements, and positions ascend: one pass finds all of them.
    found, begin, waiting = [], 0, list(reversed(positions))
    for block in tensor.blocks():
        end = begin + len(block)
        while waiting and (waiting[-1] + 1) * itemsize <= end:
            at = waiting.pop() * itemsize - begin
            found.append(bytes(block[at : at + itemsize]))
        begin = end
    return b"".join(found)
