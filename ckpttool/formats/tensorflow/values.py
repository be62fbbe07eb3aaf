"""The elements of tensors in a bundle: in one piece, in slices, and of types that have no fixed size.

A string's or a variant's checksum is not that of the bytes as they lie: lengths, which are stored as varints,
are summed as whole integers.

Source: tensorflow/tensorflow ``core/util/tensor_bundle/tensor_bundle.cc``, ``ReadStringTensor`` and
``ReadVariantTensor``, ``core/framework/tensor_slice.cc``, ``core/util/tensor_slice_set.cc``.
"""

from __future__ import annotations

import math
import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations, pairwise
from typing import Literal, NamedTuple

from ckpttool.errors import DamagedCheckpoint, LimitExceeded
from ckpttool.formats.tensorflow.bundle import BundleEntry, bundle_damage
from ckpttool.wire.protobuf import varint
from ckpttool.wire.readable import Readable, swap_bytes
from ckpttool.wire.source import Source

MAX_STRINGS = 20_000_000
"""Elements of a tensor of strings; their lengths are held in memory while it is verified."""
_WINDOW = 1 << 16
_MAX_VARINT = 10
_MAX_U32 = (1 << 32) - 1
ByteOrder = Literal["little", "big"]
MAX_PAIRS = 2000
"""Slices that are cut along several axes are compared with one another; more would take too long."""


class SlicedValues(NamedTuple):
    """Elements that lie in slices, each in one piece; they are put together as they are read."""

    shape: tuple[int, ...]
    itemsize: int
    parts: tuple[TensorSlice, ...]
    sources: tuple[Readable, ...]
    swap: int = 1

    def blocks(self, limit: int) -> Iterator[memoryview]:
        total = math.prod(self.shape) * self.itemsize
        buffer = memoryview(bytearray(min(total, max(16, limit - limit % 16))))
        filled = 0
        for part, offset, nbytes in slice_runs(self.shape, self.itemsize, self.parts):
            start = self.parts[part].entry.offset + offset
            end = start + nbytes
            while start < end:
                count = min(end - start, len(buffer) - filled)
                self.sources[part].read_into(start, buffer[filled : filled + count])
                start, filled = start + count, filled + count
                if filled == len(buffer):
                    yield swap_bytes(buffer, self.swap)
                    filled = 0
        if filled:
            yield swap_bytes(buffer[:filled], self.swap)

    def once(self) -> SlicedValues:
        return self


class TensorSlice(NamedTuple):
    """A slice of a tensor, with where each axis starts and how long it is, and where its bytes are."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    entry: BundleEntry


def require_tiling(path: str, whole: BundleEntry, parts: Sequence[TensorSlice]) -> None:
    """Require that slices cover a tensor, each element once."""
    shape, name = whole.shape, whole.name
    for starts, lengths, entry in parts:
        is_inside = len(starts) == len(shape) and all(
            start >= 0 and length >= 0 and start + length <= axis
            for start, length, axis in zip(starts, lengths, shape, strict=False)
        )
        if not is_inside or entry.shape != lengths or entry.dtype is not whole.dtype:
            raise bundle_damage(path, name, f"a slice {list(starts)} + {list(lengths)} that doesn't fit")
    total = sum(math.prod(part.lengths) for part in parts)
    if total != math.prod(shape) or _overlap(path, name, parts):
        raise bundle_damage(path, name, f"slices of {total:,} elements", f"each of {math.prod(shape):,} once")


def _overlap(path: str, name: str, parts: Sequence[TensorSlice]) -> bool:
    """Return whether two slices share elements; cut along one axis, neighbours alone are compared."""
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
    return any(
        all(
            a.starts[axis] < b.starts[axis] + b.lengths[axis]
            and b.starts[axis] < a.starts[axis] + a.lengths[axis]
            for axis in range(len(a.starts))
        )
        for a, b in combinations(parts, 2)
    )


class SliceRun(NamedTuple):
    """Bytes of one slice that follow each other in the whole tensor, too."""

    part: int
    offset: int
    nbytes: int


def slice_runs(shape: tuple[int, ...], itemsize: int, parts: Sequence[TensorSlice]) -> Iterator[SliceRun]:
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
                yield SliceRun(number, place * width, width)


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


# Strings and variants -------------------------------------------------------------------------------


class ChecksummedBytes:
    """The bytes that a checksum was computed of, if they are not the stored ones."""

    def __init__(self, source: Source, segments: list[bytes | tuple[int, int]]) -> None:
        """Join segments: bytes, and ranges of the file as offset and length."""
        self._source = source
        self._segments = segments
        sizes = (len(one) if isinstance(one, bytes) else one[1] for one in segments)
        self._ends = list(accumulate(sizes))

    @property
    def nbytes(self) -> int:
        """Return how many bytes there are."""
        return self._ends[-1] if self._ends else 0

    def read(self, offset: int, buffer: memoryview) -> None:
        """Fill a buffer from an offset; see ``Span.read``."""
        done, at = 0, bisect_right(self._ends, offset)
        while done < len(buffer):
            segment = self._segments[at]
            size = len(segment) if isinstance(segment, bytes) else segment[1]
            start = offset + done - (self._ends[at] - size)
            count = min(size - start, len(buffer) - done)
            into = buffer[done : done + count]
            if isinstance(segment, bytes):
                into[:] = segment[start : start + count]
            else:
                self._source.read_into(segment[0] + start, into)
            done, at = done + count, at + 1


def checksummed_bytes(
    source: Source, entry: BundleEntry, byteorder: ByteOrder, name: str
) -> ChecksummedBytes:
    """Return the bytes that the checksum of a tensor of strings or variants stands for."""
    count = math.prod(entry.shape)
    if count > MAX_STRINGS:
        raise LimitExceeded(
            source.path, f"{count:,} strings", expected=f"at most {MAX_STRINGS:,}", where=name
        )
    if count > entry.nbytes:
        raise _unfit(source, name, f"{count:,} elements in {entry.nbytes:,} bytes")
    if entry.dtype.name == "variant":
        return ChecksummedBytes(source, list(_variant_segments(source, entry, byteorder, name, count)))
    lengths, start = _string_lengths(source, entry, name, count)
    if start + 4 + sum(lengths) != entry.end:
        raise _unfit(source, name, f"strings of {sum(lengths):,} bytes in {entry.end - start:,}")
    if max(lengths, default=0) <= _MAX_U32:
        words = array("I", lengths)
        if byteorder != sys.byteorder:
            words.byteswap()
        table = words.tobytes()
    else:
        table = b"".join(length.to_bytes(8 if length > _MAX_U32 else 4, byteorder) for length in lengths)
    return ChecksummedBytes(source, [table, (start, entry.end - start)])


def _unfit(source: Source, name: str, found: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(source.path, found, where=name, code="checksum-mismatch")


def _string_lengths(source: Source, entry: BundleEntry, name: str, count: int) -> tuple[array[int], int]:
    """Return the lengths of strings, and the offset behind them."""
    lengths, at = array("Q"), entry.offset
    while len(lengths) < count:
        window = source.read(at, min(_WINDOW, entry.end - at), name)
        is_last, place = at + len(window) == entry.end, 0
        try:
            while len(lengths) < count and (is_last or place + _MAX_VARINT <= len(window)):
                length, place = varint(window, place)
                lengths.append(length)
        except ValueError as failure:
            raise _unfit(source, name, str(failure)) from failure
        at += place
    return lengths, at


def _variant_segments(
    source: Source, entry: BundleEntry, byteorder: ByteOrder, name: str, count: int
) -> Iterator[bytes | tuple[int, int]]:
    """Yield for each variant its length, as it is summed, and where its bytes and its checksum lie."""
    at = entry.offset
    for _ in range(count):
        head = source.read(at, min(_MAX_VARINT, entry.end - at), name)
        try:
            length, place = varint(head, 0)
        except ValueError as failure:
            raise _unfit(source, name, str(failure)) from failure
        at += place
        if at + length + 4 > entry.end:
            raise _unfit(source, name, f"a variant of {length:,} bytes")
        yield length.to_bytes(8, byteorder)
        yield at, length + 4
        at += length + 4
    if at != entry.end:
        raise _unfit(source, name, f"{entry.end - at:,} bytes behind the last variant")


def decoded_strings(data: bytes, count: int) -> list[bytes]:
    """Return the strings of a small payload.

    Raises:
        ValueError: It holds fewer.
    """
    lengths, at = [], 0
    for _ in range(count):
        length, at = varint(data, at)
        lengths.append(length)
    ends = list(accumulate(lengths, initial=at + 4))
    if ends[-1] != len(data):
        raise ValueError(f"strings up to byte {ends[-1]:,} of {len(data):,}")
    return [data[start:end] for start, end in pairwise(ends)]
