"""Tensors of TensorFlow that lie in slices: whether these cover one, and in which order their bytes follow.

Source: tensorflow/tensorflow ``core/framework/tensor_slice.cc``, ``core/util/tensor_slice_set.cc``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from ckpttool.errors import LimitExceeded
from ckpttool.formats.tensorflow.bundle import BundleEntry, damaged


class Part(NamedTuple):
    """A slice of a tensor, with where each axis starts and how long it is, and where its bytes are."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    entry: BundleEntry


MAX_PAIRS = 2000
"""Slices that are cut along several axes are compared with one another; more would take too long."""


def tile(path: str, whole: BundleEntry, parts: Sequence[Part]) -> None:
    """Require that slices cover a tensor, each element once.

    Raises:
        DamagedCheckpoint: They don't.
    """
    shape, name = whole.shape, whole.name
    for starts, lengths, entry in parts:
        is_inside = len(starts) == len(shape) and all(
            start >= 0 and length >= 0 and start + length <= axis
            for start, length, axis in zip(starts, lengths, shape, strict=False)
        )
        if not is_inside or entry.shape != lengths or entry.dtype is not whole.dtype:
            raise damaged(path, name, f"a slice {list(starts)} + {list(lengths)} that doesn't fit")
    total = sum(math.prod(part.lengths) for part in parts)
    if total != math.prod(shape) or _overlap(path, name, parts):
        raise damaged(path, name, f"slices of {total:,} elements", f"each of {math.prod(shape):,} once")


def _overlap(path: str, name: str, parts: Sequence[Part]) -> bool:
    cut = {
        axis
        for axis in range(len(parts[0].starts))
        if len({(part.starts[axis], part.lengths[axis]) for part in parts}) > 1
    }
    if len(cut) <= 1:
        axis = next(iter(cut), 0)
        ordered = sorted((p.starts[axis], p.lengths[axis]) for p in parts if p.starts and all(p.lengths))
        return any(a + n > b for (a, n), (b, _) in pairwise(ordered))
    if len(parts) > MAX_PAIRS:
        found = f"{len(parts):,} slices along several axes"
        raise LimitExceeded(path, found, expected=f"at most {MAX_PAIRS:,}", where=name)
    return any(_meet(a, b) for at, a in enumerate(parts) for b in parts[at + 1 :])


def _meet(a: Part, b: Part) -> bool:
    return all(
        a.starts[axis] < b.starts[axis] + b.lengths[axis]
        and b.starts[axis] < a.starts[axis] + a.lengths[axis]
        for axis in range(len(a.starts))
    )


class Run(NamedTuple):
    """Bytes of one part that follow each other in the whole tensor, too."""

    part: int
    offset: int
    nbytes: int


def runs(shape: tuple[int, ...], itemsize: int, parts: Sequence[Part]) -> Iterator[Run]:
    """Yield where the bytes of a tensor lie in its slices, in C order; offsets count in the slice."""
    if not math.prod(shape):
        return
    cut = [axis for axis in range(len(shape)) if any(part.lengths[axis] != shape[axis] for part in parts)]
    last = cut[-1] if cut else 0
    inner = math.prod(shape[last + 1 :]) * itemsize
    ordered = sorted(enumerate(parts), key=lambda pair: pair[1].starts[last : last + 1])
    for row in _rows(shape[:last]):
        for number, part in ordered:
            within = [at - start for at, start in zip(row, part.starts, strict=False)]
            if all(0 <= at < n for at, n in zip(within, part.lengths, strict=False)) and all(part.lengths):
                place = 0
                for at, length in zip(within, part.lengths, strict=False):
                    place = place * length + at
                width = (part.lengths[last] if part.lengths else 1) * inner
                yield Run(number, place * width, width)


def _rows(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield all indexes into the outer axes, the last of them fastest."""
    index = [0] * len(shape)
    while True:
        yield tuple(index)
        axis = len(shape) - 1
        while axis >= 0 and index[axis] == shape[axis] - 1:
            index[axis] = 0
            axis -= 1
        if axis < 0:
            return
        index[axis] += 1
