"""The elements of tensors in a bundle: in one piece, in slices, and of types that have no fixed size.

A string's or a variant's checksum is not that of the bytes as they lie: lengths, which are stored as varints,
are summed as whole integers.

Source: tensorflow/tensorflow ``core/util/tensor_bundle/tensor_bundle.cc``, ``ReadStringTensor`` and
``ReadVariantTensor``.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

from ckpttool.errors import DamagedCheckpoint, LimitExceeded
from ckpttool.formats.tensorflow.bundle import BundleEntry
from ckpttool.formats.tensorflow.slices import Part, runs
from ckpttool.wire.protobuf import varint
from ckpttool.wire.readable import Readable, swapped
from ckpttool.wire.source import Source

MAX_STRINGS = 20_000_000
"""Elements of a tensor of strings; their lengths are held in memory while it is verified."""

_WINDOW = 1 << 16
_MAX_VARINT = 10
_MAX_U32 = (1 << 32) - 1

ByteOrder = Literal["little", "big"]


class Sliced(NamedTuple):
    """Elements that lie in slices, each in one piece; they are put together as they are read."""

    shape: tuple[int, ...]
    itemsize: int
    parts: tuple[Part, ...]
    sources: tuple[Readable, ...]
    swap: int = 1

    def blocks(self, limit: int) -> Iterator[memoryview]:
        total = math.prod(self.shape) * self.itemsize
        buffer = memoryview(bytearray(min(total, max(16, limit - limit % 16))))
        filled = 0
        for part, offset, nbytes in runs(self.shape, self.itemsize, self.parts):
            start, end = (
                self.parts[part].entry.offset + offset,
                self.parts[part].entry.offset + offset + nbytes,
            )
            while start < end:
                count = min(end - start, len(buffer) - filled)
                self.sources[part].read_into(start, buffer[filled : filled + count])
                start, filled = start + count, filled + count
                if filled == len(buffer):
                    yield swapped(buffer, self.swap)
                    filled = 0
        if filled:
            yield swapped(buffer[:filled], self.swap)

    def once(self) -> Sliced:
        return self


class Summed:
    """The bytes that a checksum was computed of, where they are not those that are stored."""

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


def summed(source: Source, entry: BundleEntry, byteorder: ByteOrder, name: str) -> Summed:
    """Return the bytes that the checksum of a tensor of strings or variants stands for.

    Raises:
        DamagedCheckpoint: What is stored doesn't fit its size.
    """
    count = math.prod(entry.shape)
    if count > MAX_STRINGS:
        raise LimitExceeded(
            source.path, f"{count:,} strings", expected=f"at most {MAX_STRINGS:,}", where=name
        )
    if count > entry.nbytes:
        raise _unfit(source, name, f"{count:,} elements in {entry.nbytes:,} bytes")
    if entry.dtype.name == "variant":
        return Summed(source, list(_variants(source, entry, byteorder, name, count)))
    lengths, start = _lengths(source, entry, name, count)
    if start + 4 + sum(lengths) != entry.end:
        raise _unfit(source, name, f"strings of {sum(lengths):,} bytes in {entry.end - start:,}")
    if max(lengths, default=0) <= _MAX_U32:
        words = array("I", lengths)
        if byteorder != _native():
            words.byteswap()
        table = words.tobytes()
    else:
        table = b"".join(one.to_bytes(8 if one > _MAX_U32 else 4, byteorder) for one in lengths)
    return Summed(source, [table, (start, entry.end - start)])


def _native() -> ByteOrder:
    return "little" if array("I", [1]).tobytes()[0] else "big"


def _unfit(source: Source, name: str, found: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(source.path, found, where=name, code="checksum-mismatch")


def _lengths(source: Source, entry: BundleEntry, name: str, count: int) -> tuple[array[int], int]:
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


def _variants(
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
