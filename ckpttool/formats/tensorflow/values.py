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

from ckpttool.containers.protobuf import varint
from ckpttool.core.errors import DamagedCheckpoint, LimitExceeded
from ckpttool.core.readable import Readable
from ckpttool.core.tensor import Values
from ckpttool.core.values import Concatenated, Contiguous, Strided, Tile, Tiled, c_strides
from ckpttool.formats.tensorflow.bundle import BundleEntry, bundle_damage
from ckpttool.storage.source import Source

MAX_STRINGS = 20_000_000
"""Elements of a tensor of strings; their lengths are held in memory while it is verified."""
_WINDOW = 1 << 16
_MAX_VARINT = 10
_MAX_U32 = (1 << 32) - 1
ByteOrder = Literal["little", "big"]
MAX_PAIRS = 2000
"""Slices that are cut along several axes are compared with one another; more would take too long."""


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


def sliced_values(
    whole: BundleEntry, parts: Sequence[TensorSlice], sources: Sequence[Readable], swap: int = 1
) -> Values:
    """Return the elements of a tensor that lie in slices, each in one piece in a source of its own."""
    size = whole.dtype.itemsize
    stored = [
        Contiguous(source, part.entry.offset, math.prod(part.lengths) * size, swap)
        for part, source in zip(parts, sources, strict=True)
    ]
    if all(part.lengths[1:] == whole.shape[1:] for part in parts):  # one behind the other
        order = sorted(range(len(parts)), key=lambda at: parts[at].starts[:1])
        return Concatenated(tuple(stored[at] for at in order))
    tiles = (
        Tile(part.starts, Strided(one.source, one.offset, size, part.lengths, c_strides(part.lengths), swap))
        for part, one in zip(parts, stored, strict=True)
    )
    return Tiled(whole.shape, size, tuple(tiles))


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
