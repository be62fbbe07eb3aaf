"""Whole tensors from parts in several files or items, and checks of the parts.

Distributed checkpoints, ranks' files and TensorFlow's slices have boxes of a tensor, with offsets on each
axis. ZeRO's ranks and Fluid's parameter servers have runs of consecutive elements, to be concatenated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeVar

from ckpttool.core.errors import LimitExceeded
from ckpttool.core.report import Finding, error
from ckpttool.core.tensor import Path, Role, Tensor
from ckpttool.core.values import Concatenated, Contiguous, Tile, Tiled, as_strided
from ckpttool.formats.content.tree import TensorParts

_MAX_COMPARED = 5_000_000
"""Limit on the pairs of boxes of one tensor that are compared."""

T = TypeVar("T", Tensor, TensorParts)


class Box(NamedTuple):
    """A box in a tensor: offset and length on each axis, in elements."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(start + length for start, length in zip(self.offsets, self.lengths, strict=True))

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.lengths)

    def is_inside(self, shape: Sequence[int]) -> bool:
        """Return whether the box is inside a tensor of a shape with as many axes."""
        return all(end <= length for end, length in zip(self.ends, shape, strict=True))

    def __str__(self) -> str:
        ranges = zip(self.offsets, self.ends, strict=True)
        return "[" + ", ".join(f"{start}:{end}" for start, end in ranges) + "]"


@dataclass(frozen=True, slots=True)
class Piece(Generic[T]):
    """A box with its elements.

    Attributes:
        box: The box in the whole tensor.
        part: The tensor in a file that has the elements; None if it is lost.
        start: Offset of the box in ``part``; None if ``part`` is the box.
    """

    box: Box
    part: T | None
    start: tuple[int, ...] | None = None


def assemble(path: str, name: str, whole: T, pieces: Sequence[Piece[T]]) -> tuple[T, Finding | None]:
    """Return a tensor with the values of its pieces, or without values and with an error if they don't fit.

    Without values, and without an error, if a piece is lost or isn't a strided view of stored bytes.

    Args:
        path: The checkpoint, for errors.
        name: The tensor's name, for findings.
        whole: The tensor without values.
        pieces: All of its pieces.
    """
    fault = _find_fault(path, name, whole.shape, [piece.box for piece in pieces])
    if fault is not None:
        return whole, fault
    parts = [piece.part for piece in pieces]
    only = parts[0] if len(parts) == 1 and pieces[0].start is None else None
    if only is not None and only.shape == whole.shape:
        return only, None
    return replace(whole, values=_tiled(whole, pieces)), None


def _tiled(whole: T, pieces: Sequence[Piece[T]]) -> Tiled | None:
    """Return the lazy values of pieces in one tensor; None if some can't be read in place."""
    tiles, storages = [], []
    for piece in pieces:
        part = piece.part
        stored = None if part is None else as_strided(part.values, part.shape, part.dtype.itemsize)
        # Packed elements of less than a byte have no address, so a box of them can't be cut out in place.
        if part is None or stored is None or part.dtype.bits < 8:
            return None
        start = (0,) * len(part.shape) if piece.start is None else piece.start
        tiles.append(Tile(piece.box.offsets, stored.box(start, piece.box.lengths)))
        storages += [part.storage] if part.storage is not None else []
    # Storages are stated for all pieces or for none.
    known = tuple(dict.fromkeys(storages)) if len(storages) == len(pieces) else ()
    return Tiled(whole.shape, whole.dtype.itemsize, tuple(tiles), known)


def _find_fault(path: str, name: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> Finding | None:
    """Return an error if a box is outside the shape, two overlap, or elements are missing."""
    # If no two boxes overlap, they fill the tensor exactly if their sizes add up to its size.
    outside = next((box for box in boxes if not box.is_inside(shape)), None)
    if outside is not None:
        return error("chunks-wrong", f"a chunk {outside} is outside shape {list(shape)}", name)
    overlap = find_overlap(path, name, boxes)
    if overlap is not None:
        return error("chunks-wrong", f"chunks {overlap[0]} and {overlap[1]} overlap", name)
    total, expected = sum(box.size for box in boxes), math.prod(shape)
    if total != expected:
        return error("chunks-wrong", f"the chunks have {total:,} of {expected:,} elements", name)
    return None


def find_overlap(path: str, name: str, boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Return two boxes that share an element, or None."""
    # A sweep along the axis that is cut most: a box is compared only with those that it meets on this axis,
    # instead of with all. Hostile boxes may all meet, so that the number of comparisons is limited.
    filled = [box for box in boxes if box.size]
    if len(filled) < 2:
        return None
    axes = range(len(filled[0].lengths))
    if not axes:
        return filled[0], filled[1]
    axis = max(axes, key=lambda axis: len({box.offsets[axis] for box in filled}))
    active: list[Box] = []
    compared = 0
    for box in sorted(filled, key=lambda box: box.offsets[axis]):
        active = [other for other in active if other.ends[axis] > box.offsets[axis]]
        compared += len(active)
        if compared > _MAX_COMPARED:
            raise LimitExceeded(path, f"{len(filled):,} chunks are too many to compare", where=name)
        for other in active:
            if all(
                a < d and c < b
                for a, b, c, d in zip(box.offsets, box.ends, other.offsets, other.ends, strict=True)
            ):
                return other, box
        active.append(box)
    return None


# Runs -----------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """``size`` elements from ``start`` of the concatenation of flat tensors."""

    tensors: Sequence[Tensor]
    start: int
    size: int

    def pieces(self) -> list[Contiguous] | None:
        """Return the stored elements; None if the tensors have fewer, or aren't contiguous."""
        # ZeRO's offsets count over all flat tensors of a rank, so a run is located in their concatenation: it
        # may begin in any of them, and end in a later one.
        pieces, start, count = [], self.start, self.size
        for tensor in self.tensors:
            values, width = tensor.values, tensor.dtype.itemsize
            take = min(count, tensor.size - start)
            if take > 0:
                if not isinstance(values, Contiguous):
                    return None
                pieces.append(values._replace(offset=values.offset + start * width, nbytes=take * width))
                count -= take
            start = max(0, start - tensor.size)
        return pieces if count == 0 else None


def join_runs(path: Path, shape: tuple[int, ...], role: Role, runs: Sequence[Run]) -> Tensor | None:
    """Return a tensor of consecutive runs; padding after its last element is cut off.

    None if a run is missing, has too few elements, or has another type.
    """
    dtypes = {tensor.dtype for run in runs for tensor in run.tensors}
    if len(dtypes) != 1:
        return None
    dtype, joined = dtypes.pop(), []
    missing = dtype.nbytes(math.prod(shape))
    for run in runs:
        pieces = run.pieces()
        if pieces is None:
            return None
        for piece in pieces:
            joined.append(piece._replace(nbytes=min(missing, piece.nbytes)))
            missing -= joined[-1].nbytes
    storages = [tensor.storage for run in runs for tensor in run.tensors if tensor.storage is not None]
    values = Concatenated(tuple(joined), tuple(storages))
    return None if missing else Tensor(path, dtype, shape, role, values)
