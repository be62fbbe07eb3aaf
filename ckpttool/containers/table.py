"""Sorted string tables (sstables), the format of TensorFlow's checkpoint indexes and V1 checkpoints.

A table is blocks of data, an empty metaindex block, an index block, and a footer::

    block    entries, restart points, their number
    trailer  after each block: compression (1 byte: 0 none, 1 Snappy), masked CRC-32C (4)
    index    a block: for each block of data a key from its last one on, and the block's handle
    handle   offset and size of a block without its trailer, as two varints
    footer   handles of metaindex and index, zeros up to byte 40, magic number (8)

All bytes are accounted for: blocks follow each other without gaps, each has a checksum, and the rest of the
footer must be zero. With varints in their shortest form, any flipped bit is found.

Source: google/leveldb ``doc/table_format.md``; tensorflow/tensorflow ``core/lib/io/format.cc``; google/snappy
``format_description.txt``.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterator
from itertools import takewhile
from typing import NamedTuple

from ckpttool.containers.compressed import Budget
from ckpttool.containers.protobuf import encoded_varint, varint
from ckpttool.core.errors import DamagedCheckpoint, LimitExceeded, Truncated, require_at_most
from ckpttool.core.readable import MAX_READ
from ckpttool.storage.checksums import crc32c, mask_crc, unmask_crc
from ckpttool.storage.sink import Sink
from ckpttool.storage.source import Source

_LITERAL = 0
_LONG_LITERAL = 60
"""Lengths of literals from here on mean that the length is in the next one to four bytes."""
_OFFSET_BYTES = (0, 1, 2, 4)
"""Size of the offset by kind of element; a literal has none."""


def decompressed_size(data: bytes | memoryview) -> int:
    """Return the decompressed size that Snappy data declares."""
    return varint(data, 0)[0]


def decompress(data: bytes | memoryview) -> bytes:
    """Return decompressed Snappy data; at most its declared size, and 22 bytes per compressed byte.

    Raises:
        ValueError: The data is damaged.
    """
    # Two bits of a tag are the kind of an element: 0 a literal, 1 to 3 a copy of earlier output, with an
    # offset of 1, 2 or 4 bytes. The largest expansion is a copy of 64 bytes by three.
    size, at = varint(data, 0)
    data, made = bytes(data), bytearray()  # indexing bytes is twice as fast as a view of them
    while at < len(data):
        tag = data[at]
        kind, length, at = tag & 3, tag >> 2, at + 1
        if kind == _LITERAL:
            if length >= _LONG_LITERAL:
                behind = at + length - _LONG_LITERAL + 1
                length, at = int.from_bytes(data[at:behind], "little"), behind
            start, at = at, at + length + 1
            made += data[start:at]
        else:
            start, at = at, at + _OFFSET_BYTES[kind]
            offset = int.from_bytes(data[start:at], "little")
            if kind == 1:  # the upper three of eleven bits are in the tag
                offset, length = offset | tag >> 5 << 8, (length & 7) + 3
            _copy(made, offset, length + 1)
        if len(made) > size or at > len(data):
            raise ValueError(f"an element at byte {start:,} that doesn't fit")
    if len(made) != size:
        raise ValueError(f"{len(made):,} bytes instead of {size:,}")
    return bytes(made)


def first_bytes(data: bytes | memoryview) -> bytes | memoryview:
    """Return the first decompressed bytes of Snappy data, as far as its first literal is in ``data``."""
    try:
        _, at = varint(data, 0)
    except ValueError:
        return b""
    if at >= len(data) or data[at] & 3 != _LITERAL:
        return b""  # a copy, before any output
    length = data[at] >> 2
    extra = max(0, length - _LONG_LITERAL + 1)
    start = at + 1 + extra
    return data[start : start + length + 1] if extra == 0 else data[start:]


def _copy(made: bytearray, offset: int, length: int) -> None:
    """Append ``length`` bytes from ``offset`` before the end; a copy that overlaps itself repeats them."""
    start = len(made) - offset
    if start < 0 or not offset:
        raise ValueError(f"a copy from {offset:,} bytes before byte {len(made):,}")
    if length <= offset:
        made += made[start : start + length]
    else:
        pattern = made[start:]
        made += (pattern * (length // offset + 1))[:length]


MAGIC = bytes.fromhex("57fb808b247547db")
FOOTER_BYTES = 48
TRAILER_BYTES = 5  # one of the compression, four of the checksum

_HANDLES_BYTES = FOOTER_BYTES - len(MAGIC)
_PLAIN, _SNAPPY = 0, 1
_U32 = struct.Struct("<I")
_MAX_KEY = 1 << 16


class Handle(NamedTuple):
    """Offset and size of a block, without its trailer."""

    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes + TRAILER_BYTES


class Table:
    """A table whose index is read and checked; its blocks are read on demand.

    Attributes:
        blocks: For each block of data, in order: the largest key that it may have, and its handle.
    """

    def __init__(self, source: Source) -> None:
        """Read the footer and the index."""
        self._source = source
        self.path = source.path
        self._last_inflated: tuple[Handle, memoryview] | None = None
        metaindex, index = self._footer()
        self.blocks = [
            (key, self._parse_handle(bytes(value), "index block"))
            for key, value in self._entries(index, "index block", None, self._budget())
        ]
        expected = 0  # blocks are adjacent
        for handle in (*(handle for _, handle in self.blocks), metaindex, index):
            if handle.offset != expected:
                raise self._damage(f"a block at byte {handle.offset:,}", "index block", f"{expected:,}")
            expected = handle.end
        if expected + FOOTER_BYTES != source.size:
            found = f"{source.size:,} bytes"
            raise self._damage(found, "footer", f"{expected + FOOTER_BYTES:,} for all blocks")
        if next(self._entries(metaindex, "metaindex block", None, self._budget()), None) is not None:
            raise self._damage("unknown entries", "metaindex block", "none")

    def _budget(self) -> Budget:
        return Budget(self.path, self._source.size, "keys")

    def _damage(self, found: str, where: str, expected: str | None = None) -> DamagedCheckpoint:
        return DamagedCheckpoint(self.path, found, expected=expected, where=where, code="table-damaged")

    def _footer(self) -> tuple[Handle, Handle]:
        size = self._source.size
        if size < FOOTER_BYTES:
            raise Truncated(self.path, f"truncated: {size:,} bytes", expected=f"at least {FOOTER_BYTES}")
        footer = self._source.read(size - FOOTER_BYTES, FOOTER_BYTES, "footer")
        if footer[_HANDLES_BYTES:] != MAGIC:
            found = (
                f"no magic number in {footer[_HANDLES_BYTES:].hex(' ')}; the table is truncated or damaged"
            )
            raise self._damage(found, "footer", MAGIC.hex(" "))
        try:
            numbers, at = [], 0
            for _ in range(4):
                number, at = _shortest(footer, at)
                numbers.append(number)
        except ValueError as failure:
            raise self._damage(str(failure), "footer") from failure
        if any(footer[at:_HANDLES_BYTES]):
            raise self._damage("bytes after the block handles", "footer", "zeros")
        return Handle(*numbers[:2]), Handle(*numbers[2:])

    def _parse_handle(self, data: bytes, where: str) -> Handle:
        try:
            offset, at = _shortest(data, 0)
            nbytes, end = _shortest(data, at)
        except ValueError as failure:
            raise self._damage(str(failure), where) from failure
        if end != len(data):
            raise self._damage("bytes after a block handle", where)
        return Handle(offset, nbytes)

    def entries(self) -> Iterator[tuple[bytes, memoryview]]:
        """Yield all keys with their values, in order; every block is checked."""
        before, budget = None, self._budget()
        for number, (last, handle) in enumerate(self.blocks):
            for key, value in self._entries(handle, f"block {number}", before, budget):
                yield key, value
                before = key
            if before is not None and before > last:
                raise self._damage("keys after the last one in the index", f"block {number}")

    def block(self, number: int) -> Iterator[tuple[bytes, memoryview]]:
        """Yield the keys and values of one block."""
        return self._entries(self.blocks[number][1], f"block {number}", None, self._budget())

    def find(self, key: bytes) -> tuple[int, memoryview] | None:
        """Return the number of the block with a key, and the key's value; None if the key is missing."""
        number = self.block_of(key)
        if number is None:
            return None
        value = next((value for one, value in self.block(number) if one == key), None)
        return None if value is None else (number, value)

    def block_of(self, key: bytes) -> int | None:
        """Return the number of the only block that may have a key; None if the key is above all blocks."""
        number = bisect_left(self.blocks, key, key=lambda block: block[0])
        return number if number < len(self.blocks) else None

    def stored_checksum(self, handle: Handle) -> int:
        """Return the stored CRC-32C of a block and its compression byte."""
        data = self._source.read(handle.offset + handle.nbytes + 1, 4, "block trailer")
        return unmask_crc(_U32.unpack(data)[0])

    def _contents(self, handle: Handle, where: str) -> memoryview:
        if self._last_inflated is not None and self._last_inflated[0] == handle:
            return self._last_inflated[1]  # consecutive searches mostly need the same block
        if handle.nbytes > MAX_READ - TRAILER_BYTES:
            found = f"a block of {handle.nbytes:,} bytes"
            raise LimitExceeded(self.path, found, expected=f"at most {MAX_READ:,}", where=where)
        data = self._source.read(handle.offset, handle.nbytes + TRAILER_BYTES, where)
        stored = unmask_crc(_U32.unpack_from(data, handle.nbytes + 1)[0])
        found_crc = crc32c(memoryview(data)[: handle.nbytes + 1])
        if found_crc != stored:
            found = f"CRC-32C is {found_crc:08x} instead of {stored:08x}"
            raise DamagedCheckpoint(self.path, found, where=where, code="checksum-mismatch")
        kind, body = data[handle.nbytes], memoryview(data)[: handle.nbytes]
        if kind not in (_PLAIN, _SNAPPY):
            raise self._damage(f"compression type {kind}", where, "0 or 1")
        if kind == _PLAIN:
            return body
        try:
            size = decompressed_size(body)
            require_at_most(self.path, MAX_READ, size, "a block of {:,} bytes", where)
            contents = memoryview(decompress(body))
        except ValueError as failure:
            raise self._damage(f"a block that can't be decompressed: {failure}", where) from failure
        self._last_inflated = handle, contents
        return contents

    def _entries(
        self, handle: Handle, where: str, before: bytes | None, budget: Budget
    ) -> Iterator[tuple[bytes, memoryview]]:
        """Yield a block's keys and values; ``before`` is the last key of the previous block, or None."""
        # An entry is three varints (bytes shared with the previous key, bytes added, bytes of the value), the
        # added bytes of the key, and the value. Keys strictly ascend.
        data = self._contents(handle, where)
        end = self._end_of_entries(data, where)
        at, key = 0, before
        previous = b""
        while at < end:
            try:
                shared, at = _shortest(data, at)
                added, at = _shortest(data, at)
                length, at = _shortest(data, at)
            except ValueError as failure:
                raise self._damage(str(failure), where) from failure
            if shared > len(previous) or shared + added > _MAX_KEY or at + added + length > end:
                raise self._damage(f"an entry that doesn't fit, at byte {at:,}", where)
            previous = previous[:shared] + bytes(data[at : at + added])
            # A byte that isn't ASCII may be shown as an escape of four characters; keys of slices, which
            # begin with 0, are never shown.
            is_short = previous.isascii() or previous[:1] == b"\0"
            budget.charge(len(previous) * (1 if is_short else 4), where)
            if key is not None and previous <= key:
                raise self._damage("keys out of order", where, "each greater than the one before")
            at += added
            yield previous, data[at : at + length]
            at, key = at + length, previous

    def _end_of_entries(self, data: memoryview, where: str) -> int:
        """Check the restart points of a block, and return their offset, where the entries end."""
        # A block ends in the offsets of its restart points, entries whose key is complete, and their number.
        # Readers search them by bisection, so that wrong ones would hide keys from those readers.
        if len(data) < 8:
            raise self._damage(f"a block of {len(data)} bytes", where, "at least 8")
        count: int = _U32.unpack_from(data, len(data) - 4)[0]
        end = len(data) - 4 - 4 * count
        if end < 0 or count == 0:
            raise self._damage(f"{count:,} restart points in {len(data):,} bytes", where)
        last = -1
        for (restart,) in _U32.iter_unpack(data[end:-4]):
            if restart <= last or (last < 0 and restart):
                raise self._damage("restart points out of order", where)
            last = restart
        if last > end:
            raise self._damage("a restart point outside the entries", where)
        return end


def _shortest(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """Return a varint and the offset after it; raise ValueError if it isn't in its shortest form."""
    number, end = varint(data, at)
    if end - at > 1 and data[end - 1] == 0:
        raise ValueError(f"an overlong varint at byte {at:,}")
    return number, end


def begins_with_empty_key(head: bytes) -> bool:
    """Return whether a table with these first bytes may begin with the empty key, compressed or not."""
    return any(start[:2] == b"\0\0" for start in (head, first_bytes(head)))


BLOCK_BYTES = 1 << 18
"""Size at which a block of data ends; TensorFlow's default."""

_RESTART_INTERVAL = 16
_PLAIN_TYPE = b"\0"


class TableWriter:
    """Writer of a table."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._block = _BlockBuilder(_RESTART_INTERVAL)
        self._index = _BlockBuilder(1)
        self._last: bytes | None = None

    def add(self, key: bytes, value: bytes) -> None:
        """Append a key with its value; keys must ascend."""
        if self._last is not None and key <= self._last:
            raise ValueError(f"key {key!r} does not follow {self._last!r}")
        if self._block.nbytes >= BLOCK_BYTES:
            self._end_block()
        self._block.add(key, value)
        self._last = key

    def finish(self) -> None:
        """Write the last block, the metaindex, the index and the footer."""
        if self._block.nbytes:
            self._end_block()
        metaindex, index = self._write_block(_BlockBuilder(1)), self._write_block(self._index)
        handles = b"".join(map(encoded_varint, (*metaindex, *index)))
        self._sink.write(handles.ljust(FOOTER_BYTES - len(MAGIC), b"\0") + MAGIC)

    def _end_block(self) -> None:
        # A key of the index is any one from the last key of the block up to the first of the next one; the
        # last key is the simplest.
        handle = self._write_block(self._block)
        self._index.add(self._block.last, b"".join(map(encoded_varint, handle)))
        self._block = _BlockBuilder(_RESTART_INTERVAL)

    def _write_block(self, block: _BlockBuilder) -> Handle:
        contents = block.contents()
        handle = Handle(self._sink.offset, len(contents))
        self._sink.write(contents + _PLAIN_TYPE)
        self._sink.write(_U32.pack(mask_crc(crc32c(contents + _PLAIN_TYPE))))
        return handle


class _BlockBuilder:
    """Entries of a block in the order of their keys; each has only the part that differs from the last key.

    Every ``interval`` entries, at a restart point, the key is complete.

    Attributes:
        last: The key of the last entry.
    """

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._entries = bytearray()
        self._restarts = [0]
        self._count = 0
        self.last = b""

    @property
    def nbytes(self) -> int:
        """Return the bytes of the entries."""
        return len(self._entries)

    def add(self, key: bytes, value: bytes) -> None:
        shared = 0
        if self._count % self._interval:
            pairs = zip(self.last, key, strict=False)
            shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        elif self._count:
            self._restarts.append(len(self._entries))
        for length in (shared, len(key) - shared, len(value)):
            self._entries += encoded_varint(length)
        self._entries += key[shared:]
        self._entries += value
        self._count += 1
        self.last = key

    def contents(self) -> bytes:
        """Return the entries, followed by the offsets of the restart points and their number."""
        restarts = b"".join(map(_U32.pack, (*self._restarts, len(self._restarts))))
        return bytes(self._entries) + restarts
