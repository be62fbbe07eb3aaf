"""Elements of partitioned variables, strings and variants in a bundle.

Strings are stored as all lengths (varints), the masked CRC of the lengths, all bytes; variants one by one as
length, bytes, masked CRC so far. Their checksum isn't that of the stored bytes: it covers each length as an
integer of fixed size, in the byte order of the bundle.

Source: tensorflow/tensorflow ``core/util/tensor_bundle/tensor_bundle.cc``, ``ReadStringTensor`` and
``ReadVariantTensor``, ``core/framework/tensor_slice.cc``, ``core/util/tensor_slice_set.cc``.
"""

from __future__ import annotations

import math
import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

from ckpttool.containers.protobuf import varint
from ckpttool.core.errors import DamagedCheckpoint, require_at_most
from ckpttool.core.readable import Readable
from ckpttool.core.tensor import Values
from ckpttool.core.values import Concatenated, Contiguous, Strided, Tile, Tiled, c_strides
from ckpttool.formats.content.boxes import Box, find_overlap
from ckpttool.formats.tensorflow.bundle import BundleEntry, Slice, bundle_damage
from ckpttool.storage.source import Source

MAX_STRINGS = 20_000_000
"""Limit on the elements of a string tensor; their lengths are in memory while it is verified."""
_WINDOW = 1 << 16
_MAX_VARINT = 10
_MAX_U32 = (1 << 32) - 1
ByteOrder = Literal["little", "big"]


class TensorSlice(NamedTuple):
    """Slice of a tensor: its box, and the entry that locates its bytes."""

    box: Box
    entry: BundleEntry


def slice_box(axes: Slice, shape: Sequence[int]) -> Box:
    """Return the box of a slice; it isn't checked to be inside the tensor."""
    pairs = list(zip(axes, shape, strict=False))
    lengths = tuple(whole if length is None else length for (_, length), whole in pairs)
    return Box(tuple(start for (start, _), _ in pairs), lengths)


def require_tiling(path: str, whole: BundleEntry, parts: Sequence[TensorSlice]) -> None:
    """Raise ``DamagedCheckpoint`` unless slices cover each element of a tensor exactly once."""
    # Slices that are inside the tensor, don't overlap and have as many elements as it has tile it.
    shape, name = whole.shape, whole.name
    for box, entry in parts:
        is_box = len(box.offsets) == len(shape) and min((*box.offsets, *box.lengths), default=0) >= 0
        is_fitting = is_box and box.is_inside(shape)
        if not is_fitting or entry.shape != box.lengths or entry.dtype is not whole.dtype:
            found = f"a slice {list(box.offsets)} + {list(box.lengths)} that doesn't fit"
            raise bundle_damage(path, name, found)
    boxes = [part.box for part in parts]
    total = sum(box.size for box in boxes)
    if total != math.prod(shape) or find_overlap(path, name, boxes):
        raise bundle_damage(path, name, f"slices of {total:,} elements", f"each of {math.prod(shape):,} once")


def sliced_values(
    whole: BundleEntry, parts: Sequence[TensorSlice], sources: Sequence[Readable], swap: int = 1
) -> Values:
    """Return the values of a partitioned variable; each slice is contiguous in its source."""
    size, boxes = whole.dtype.itemsize, [part.box for part in parts]
    stored = [
        Contiguous(source, part.entry.offset, part.box.size * size, swap)
        for part, source in zip(parts, sources, strict=True)
    ]
    # Variables are usually partitioned along the first axis: then the slices follow each other, and can be
    # read in long runs. Otherwise each row of the tensor is put together from tiles.
    if all(box.lengths[1:] == whole.shape[1:] for box in boxes):
        order = sorted(range(len(parts)), key=lambda at: boxes[at].offsets[:1])
        return Concatenated(tuple(stored[at] for at in order))
    tiles = (
        Tile(box.offsets, Strided(one.source, one.offset, size, box.lengths, c_strides(box.lengths), swap))
        for box, one in zip(boxes, stored, strict=True)
    )
    return Tiled(whole.shape, size, tuple(tiles))


# Strings and variants -------------------------------------------------------------------------------


class ChecksummedBytes:
    """Bytes that the checksum of strings or variants covers, as a stream of segments.

    A segment is bytes, or offset and length of a range of the file.
    """

    def __init__(self, source: Source, segments: list[bytes | tuple[int, int]]) -> None:
        self._source = source
        self._segments = segments
        sizes = (len(one) if isinstance(one, bytes) else one[1] for one in segments)
        self._ends = list(accumulate(sizes))

    @property
    def nbytes(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, offset: int, buffer: memoryview) -> None:
        """Fill a buffer from an offset of the stream; see ``Span.read``."""
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
    """Return the bytes that the checksum of a tensor of strings or variants covers."""
    # Each element takes a byte at least, for its length. So the size of the entry limits the number of
    # elements that a hostile shape can claim, before any list of lengths is made.
    count = math.prod(entry.shape)
    require_at_most(source.path, MAX_STRINGS, count, "{:,} strings", name)
    if count > entry.nbytes:
        raise _damage(source, name, f"{count:,} elements in {entry.nbytes:,} bytes")
    if entry.dtype.name == "variant":
        return ChecksummedBytes(source, list(_variant_segments(source, entry, byteorder, name, count)))
    lengths, start = _string_lengths(source, entry, name, count)
    if start + 4 + sum(lengths) != entry.end:
        raise _damage(source, name, f"strings of {sum(lengths):,} bytes in {entry.end - start:,}")
    if max(lengths, default=0) <= _MAX_U32:  # as nearly always; millions of lengths are converted at once
        words = array("I", lengths)
        if byteorder != sys.byteorder:
            words.byteswap()
        table = words.tobytes()
    else:
        table = b"".join(length.to_bytes(8 if length > _MAX_U32 else 4, byteorder) for length in lengths)
    return ChecksummedBytes(source, [table, (start, entry.end - start)])


def _damage(source: Source, name: str, found: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(source.path, found, where=name, code="checksum-mismatch")


def _string_lengths(source: Source, entry: BundleEntry, name: str, count: int) -> tuple[array[int], int]:
    """Return the lengths of strings, and the offset after the lengths."""
    # Nothing states the size of the lengths. They are decoded from windows; near the end of a window that
    # isn't the last, a varint might be cut off, so the next window begins with it.
    lengths, at = array("Q"), entry.offset
    while len(lengths) < count:
        window = source.read(at, min(_WINDOW, entry.end - at), name)
        is_last, place = at + len(window) == entry.end, 0
        try:
            while len(lengths) < count and (is_last or place + _MAX_VARINT <= len(window)):
                length, place = varint(window, place)
                lengths.append(length)
        except ValueError as failure:
            raise _damage(source, name, str(failure)) from failure
        at += place
    return lengths, at


def _variant_segments(
    source: Source, entry: BundleEntry, byteorder: ByteOrder, name: str, count: int
) -> Iterator[bytes | tuple[int, int]]:
    """Yield for each variant its length as the checksum covers it, and the range of its bytes and CRC."""
    at = entry.offset
    for _ in range(count):
        head = source.read(at, min(_MAX_VARINT, entry.end - at), name)
        try:
            length, place = varint(head, 0)
        except ValueError as failure:
            raise _damage(source, name, str(failure)) from failure
        at += place
        if at + length + 4 > entry.end:
            raise _damage(source, name, f"a variant of {length:,} bytes")
        yield length.to_bytes(8, byteorder)
        yield at, length + 4
        at += length + 4
    if at != entry.end:
        raise _damage(source, name, f"{entry.end - at:,} bytes after the last variant")


def decoded_strings(data: bytes, count: int) -> list[bytes]:
    """Decode a tensor of ``count`` strings that is in memory.

    Raises:
        ValueError: The lengths don't add up to the size of the data.
    """
    lengths, at = [], 0
    for _ in range(count):
        length, at = varint(data, at)
        lengths.append(length)
    ends = list(accumulate(lengths, initial=at + 4))
    if ends[-1] != len(data):
        raise ValueError(f"strings up to byte {ends[-1]:,} of {len(data):,}")
    return [data[start:end] for start, end in pairwise(ends)]
