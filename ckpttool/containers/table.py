"""Sorted tables of keys and values, in blocks that Snappy may compress; TensorFlow's checkpoints have them.

All bytes of a table are accounted for: its blocks follow each other without gaps, each with a checksum, and
everything in the footer besides the positions of two blocks must be zero.

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
"""From here on, the length of a literal is in one to four bytes of its own."""
_OFFSET_BYTES = (0, 1, 2, 4)
"""Of each kind of element; a literal has no offset."""


def decompressed_size(data: bytes | memoryview) -> int:
    """Return how many bytes compressed data says that it makes."""
    return varint(data, 0)[0]


def decompress(data: bytes | memoryview) -> bytes:
    """Return what data holds: never more than it says, nor more than 22 bytes for each of its own.

    Damage is a ValueError.
    """
    size, at = varint(data, 0)
    data, made = bytes(data), bytearray()  # bytes are looked at twice as fast as a view of them
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
            if kind == 1:  # eleven bits, three of which lie in the tag
                offset, length = offset | tag >> 5 << 8, (length & 7) + 3
            _copy(made, offset, length + 1)
        if len(made) > size or at > len(data):
            raise ValueError(f"an element at byte {start:,} that doesn't fit")
    if len(made) != size:
        raise ValueError(f"{len(made):,} bytes instead of {size:,}")
    return bytes(made)


def first_bytes(data: bytes | memoryview) -> bytes | memoryview:
    """Return the bytes that compressed data begins with, as far as they are in ``data`` as they are."""
    try:
        _, at = varint(data, 0)
    except ValueError:
        return b""
    if at >= len(data) or data[at] & 3 != _LITERAL:
        return b""  # nothing was made that could be copied
    length = data[at] >> 2
    extra = max(0, length - _LONG_LITERAL + 1)
    start = at + 1 + extra
    return data[start : start + length + 1] if extra == 0 else data[start:]


def _copy(made: bytearray, offset: int, length: int) -> None:
    """Append bytes that lie ``offset`` before the end; they may reach into what is being appended."""
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
    """Where a block lies, in bytes, without its trailer."""

    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes + TRAILER_BYTES


class Table:
    """A table whose index is read and checked; its blocks are read one by one.

    Attributes:
        blocks: The last possible key of each block of data, and where the block lies; in order.
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
        expected = 0  # the blocks lie one behind the other, and nothing between them
        for handle in (*(handle for _, handle in self.blocks), metaindex, index):
            if handle.offset != expected:
                raise self._damage(f"a block at byte {handle.offset:,}", "index block", f"{expected:,}")
            expected = handle.end
        if expected + FOOTER_BYTES != source.size:
            found = f"{source.size:,} bytes"
            raise self._damage(found, "footer", f"{expected + FOOTER_BYTES:,} for all blocks")
        if next(self._entries(metaindex, "metaindex block", None, self._budget()), None) is not None:
            raise self._damage("entries that nobody knows", "metaindex block", "none")

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
            found = f"no table ends in {footer[_HANDLES_BYTES:].hex(' ')}; it is truncated or damaged"
            raise self._damage(found, "footer", MAGIC.hex(" "))
        try:
            numbers, at = [], 0
            for _ in range(4):
                number, at = _shortest(footer, at)
                numbers.append(number)
        except ValueError as failure:
            raise self._damage(str(failure), "footer") from failure
        if any(footer[at:_HANDLES_BYTES]):
            raise self._damage("bytes behind the places of the blocks", "footer", "zeros")
        return Handle(*numbers[:2]), Handle(*numbers[2:])

    def _parse_handle(self, data: bytes, where: str) -> Handle:
        try:
            offset, at = _shortest(data, 0)
            nbytes, end = _shortest(data, at)
        except ValueError as failure:
            raise self._damage(str(failure), where) from failure
        if end != len(data):
            raise self._damage("bytes behind the place of a block", where)
        return Handle(offset, nbytes)

    def entries(self) -> Iterator[tuple[bytes, memoryview]]:
        """Yield all keys with their values, in order; every block is checked."""
        before, budget = None, self._budget()
        for number, (last, handle) in enumerate(self.blocks):
            for key, value in self._entries(handle, f"block {number}", before, budget):
                yield key, value
                before = key
            if before is not None and before > last:
                raise self._damage("keys behind the one that the index states", f"block {number}")

    def block(self, number: int) -> Iterator[tuple[bytes, memoryview]]:
        """Yield the keys of one block with their values."""
        return self._entries(self.blocks[number][1], f"block {number}", None, self._budget())

    def find(self, key: bytes) -> tuple[int, memoryview] | None:
        """Return the number of the block that holds a key, and its value; None if there is none."""
        number = self.block_of(key)
        if number is None:
            return None
        value = next((value for one, value in self.block(number) if one == key), None)
        return None if value is None else (number, value)

    def block_of(self, key: bytes) -> int | None:
        """Return the number of the only block that may hold a key."""
        number = bisect_left(self.blocks, key, key=lambda block: block[0])
        return number if number < len(self.blocks) else None

    def stored_checksum(self, handle: Handle) -> int:
        """Return the CRC-32C of a block and its type byte, as the file states it."""
        data = self._source.read(handle.offset + handle.nbytes + 1, 4, "block trailer")
        return unmask_crc(_U32.unpack(data)[0])

    def _contents(self, handle: Handle, where: str) -> memoryview:
        if self._last_inflated is not None and self._last_inflated[0] == handle:
            return self._last_inflated[1]  # the one before, in which the next key is looked for, too
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
        """Yield a block's keys and values; ``before`` is the key in front of them, None for none."""
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
            # What is no ASCII may be spelled out, four characters a byte; keys of slices are never shown.
            is_short = previous.isascii() or previous[:1] == b"\0"
            budget.charge(len(previous) * (1 if is_short else 4), where)
            if key is not None and previous <= key:
                raise self._damage("keys out of order", where, "each greater than the one before")
            at += added
            yield previous, data[at : at + length]
            at, key = at + length, previous

    def _end_of_entries(self, data: memoryview, where: str) -> int:
        """Return where the entries of a block end and its restart points begin."""
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
    """Return a varint and the offset after it; a longer spelling than needed is refused."""
    number, end = varint(data, at)
    if end - at > 1 and data[end - 1] == 0:
        raise ValueError(f"a varint at byte {at:,} that is longer than it has to be")
    return number, end


def begins_with_empty_key(head: bytes) -> bool:
    """Return whether a table with these first bytes may begin with the empty key, compressed or not."""
    return any(start[:2] == b"\0\0" for start in (head, first_bytes(head)))


BLOCK_BYTES = 1 << 18
"""How full a block is before the next one begins, as TensorFlow has it."""

_RESTART_INTERVAL = 16
_PLAIN_TYPE = b"\0"


class TableWriter:
    """A table that is written to a file, from its first key to its footer."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._block = _BlockBuilder(_RESTART_INTERVAL)
        self._index = _BlockBuilder(1)
        self._last: bytes | None = None

    def add(self, key: bytes, value: bytes) -> None:
        """Append a key with its value."""
        if self._last is not None and key <= self._last:
            raise ValueError(f"key {key!r} behind {self._last!r}")
        if self._block.nbytes >= BLOCK_BYTES:
            self._end_block()
        self._block.add(key, value)
        self._last = key

    def finish(self) -> None:
        """Write what a table ends with."""
        if self._block.nbytes:
            self._end_block()
        metaindex, index = self._write_block(_BlockBuilder(1)), self._write_block(self._index)
        handles = b"".join(map(encoded_varint, (*metaindex, *index)))
        self._sink.write(handles.ljust(FOOTER_BYTES - len(MAGIC), b"\0") + MAGIC)

    def _end_block(self) -> None:
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
    """Entries in the order of their keys; each tells only in what its key differs from the one before.

    Every so many entries, at a restart point, a key stands whole.

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
        """Append an entry."""
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
        """Return the entries with the places of the restart points after them."""
        restarts = b"".join(map(_U32.pack, (*self._restarts, len(self._restarts))))
        return bytes(self._entries) + restarts
