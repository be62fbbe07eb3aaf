"""Sorted tables of keys and values as TensorFlow writes them: blocks, their index, and a footer.

Source: google/leveldb ``doc/table_format.md``; tensorflow/tensorflow ``core/lib/io/table_builder.cc``.
"""

from __future__ import annotations

import struct
from itertools import takewhile

from ckpttool.containers.protobuf import encoded_varint
from ckpttool.containers.sstable.sstable import FOOTER_BYTES, MAGIC, Handle
from ckpttool.storage.crc import crc32c, mask_crc
from ckpttool.storage.sink import Sink

BLOCK_BYTES = 1 << 18
"""How full a block is before the next one begins, as TensorFlow has it."""

_RESTART_INTERVAL = 16
_PLAIN = b"\0"
_U32 = struct.Struct("<I")


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
        self._sink.write(contents + _PLAIN)
        self._sink.write(_U32.pack(mask_crc(crc32c(contents + _PLAIN))))
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
        """Return the entries with the places of the restart points behind them."""
        restarts = b"".join(map(_U32.pack, (*self._restarts, len(self._restarts))))
        return bytes(self._entries) + restarts
