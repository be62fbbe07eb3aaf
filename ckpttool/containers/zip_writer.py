"""Writers of zips in the layouts of PyTorch and of NumPy.

Records are stored uncompressed. The checksums of large ones are known only after all are copied, so a zip is
written in two steps: ``finish`` writes the directory, and ``seal`` fills in the missing checksums.

Source: PKWARE APPNOTE 6.3; PyTorch ``caffe2/serialize/inline_container.cc``, ``third_party/miniz/miniz.c``;
CPython ``Lib/zipfile``, as NumPy ``numpy/lib/_npyio_impl.py`` uses it.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, NamedTuple

from isal import isal_zlib

from ckpttool.containers.zip_reader import (
    END,
    END64,
    ENTRY,
    HAS_DESCRIPTOR,
    LOCAL,
    LOCAL_MAGIC,
    SATURATED32,
    UTF8,
    ZIP64_EXTRA,
)
from ckpttool.core.tensor import Tensor
from ckpttool.storage.sink import Sink, WrittenTensor

ALIGNMENT = 64
"""Alignment in bytes of each record's content in PyTorch's zips."""
MAX_NAME = 0xFFFF
"""Limit on a record's name in bytes of UTF-8."""

_LOCATOR64 = struct.Struct("<4sIQI")
_CHECKSUM = struct.Struct("<I")
RECORD_BYTES = LOCAL.size + ENTRY.size + ALIGNMENT + 88
"""Limit on the bytes of a record in PyTorch's zips without its content and its name, which is there twice:
headers, the padding field with a header of 4, 24 bytes of a descriptor, and twice up to 28 of ZIP64."""
END_BYTES = END64.size + _LOCATOR64.size + END.size
"""Limit on the bytes after a directory."""
_CHECKSUM_IN_LOCAL, _CHECKSUM_IN_DESCRIPTOR, _CHECKSUM_IN_CENTRAL = 14, 4, 16

_SATURATED16 = 0xFFFF
_PADDING_EXTRA = 0x4246
_DIRECTORY_MAGIC, _DESCRIPTOR_MAGIC = b"PK\x01\x02", b"PK\x07\x08"
_END_MAGIC, _END64_MAGIC, _LOCATOR64_MAGIC = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"

_SUMMED_AT_ONCE = 1 << 16
"""Size up to which ``Sink.put`` returns the checksum of a tensor at once; larger ones are copied later."""

_Sum = int | WrittenTensor
Piece = bytes | memoryview


class _WrittenRecord(NamedTuple):
    """A written record.

    Attributes:
        header: Offset of the local header from the start of the zip.
        sum: CRC-32, or the copy in progress that will have it.
    """

    name: bytes
    header: int
    size: int
    sum: _Sum

    @property
    def known_sum(self) -> int:
        """Return the checksum, or 0 if ``seal`` fills it in."""
        return self.sum if isinstance(self.sum, int) else 0


class ZipWriter(ABC):
    """Writer of a zip that begins at the end of a sink; a file may have several zips."""

    def __init__(self, sink: Sink) -> None:
        self._sink, self._base = sink, sink.offset
        self._records: list[_WrittenRecord] = []
        self._late_sums: list[tuple[int, _Sum]] = []

    def add(self, name: str, data: bytes) -> None:
        """Append a record with these bytes."""
        self.stream(name, len(data), isal_zlib.crc32(data), lambda write: write(data))

    def stream(
        self, name: str, size: int, crc: int, fill: Callable[[Callable[[Piece], None]], object]
    ) -> None:
        """Append a record that is written in pieces.

        Args:
            name: Name of the record.
            size: Number of bytes.
            crc: CRC-32 of all bytes.
            fill: Called with a function that writes a piece.
        """
        raw, header = name.encode(), self._offset
        self._sink.write(self._local(raw, header, size))
        start = self._offset
        fill(self._sink.write)
        if self._offset - start != size:
            raise ValueError(f"{name}: {self._offset - start:,} bytes instead of {size:,}")
        self._end_record(_WrittenRecord(raw, header, size, crc))

    def put(self, name: str, tensor: Tensor, head: bytes = b"") -> None:
        """Append a record with ``head`` and the elements of a tensor."""
        raw, header, size = name.encode(), self._offset, len(head) + tensor.nbytes
        self._sink.write(self._local(raw, header, size))
        self._sink.write(head)
        written = self._sink.put(tensor, "crc32", isal_zlib.crc32(head))
        known = written.checksum if tensor.nbytes <= _SUMMED_AT_ONCE else written
        self._end_record(_WrittenRecord(raw, header, size, known))

    def assemble(self, name: str, size: int, write: Callable[[Sink], WrittenTensor]) -> None:
        """Append a record whose ``size`` bytes ``write`` appends to the sink; its result has their CRC-32."""
        raw, header = name.encode(), self._offset
        self._sink.write(self._local(raw, header, size))
        self._end_record(_WrittenRecord(raw, header, size, write(self._sink)))

    def finish(self) -> None:
        """Write the directory and the end of the zip."""
        start = self._offset
        for record in self._records:
            if isinstance(record.sum, WrittenTensor):
                self._late_sums.append((self._offset + _CHECKSUM_IN_CENTRAL, record.sum))
            self._sink.write(self._entry(record))
        self._sink.write(self._end_of_zip(len(self._records), start, self._offset - start))
        self._records.clear()

    def seal(self) -> None:
        """Wait until all tensors are copied, and fill in the missing checksums."""
        for offset, found in self._late_sums:
            number = found if isinstance(found, int) else found.checksum
            self._sink.patch(self._base + offset, _CHECKSUM.pack(number))
        self._late_sums.clear()

    @property
    def is_sealed(self) -> bool:
        """Return whether no checksum is missing."""
        return not self._late_sums

    @property
    def _offset(self) -> int:
        return self._sink.offset - self._base

    @abstractmethod
    def _local(self, name: bytes, header: int, size: int) -> bytes:
        """Return the local header of a record."""

    @abstractmethod
    def _end_record(self, record: _WrittenRecord) -> None:
        """Write the bytes after the content of a record, if any, and add it to the directory."""

    @abstractmethod
    def _entry(self, record: _WrittenRecord) -> bytes:
        """Return the directory's entry of a record."""

    @abstractmethod
    def _end_of_zip(self, count: int, start: int, nbytes: int) -> bytes:
        """Return the end of a zip with a directory of ``count`` entries."""


class TorchZip(ZipWriter):
    """A zip in the layout of ``torch.save``."""

    # ``torch.load`` with ``calculate_storage_offsets`` doesn't look for records: it computes the offset of
    # each from the sizes and names before it, and reads wrong values from a zip with any other layout. So:
    #
    # - Local headers have no checksum and no sizes; a data descriptor has them, except for empty records.
    # - Sizes and offsets from 4 GiB on are in a ZIP64 field; then the descriptor has sizes of 8 bytes.
    # - A padding field (kind "FB", content "ZZZ…") makes each content begin at a multiple of 64 bytes from
    #   the start of the zip; it is there even if nothing has to be padded.
    # - The ZIP64 end record and its locator are always there.

    def _local(self, name: bytes, header: int, size: int) -> bytes:
        wide = struct.pack("<2Q", size, 0) if size >= SATURATED32 else b""
        wide += struct.pack("<Q", header) if header >= SATURATED32 else b""
        extra = _field(ZIP64_EXTRA, wide) if wide else b""
        unpadded = header + LOCAL.size + len(name) + len(extra) + 4
        extra += _field(_PADDING_EXTRA, b"Z" * (-unpadded % ALIGNMENT))
        flags = _torch_flags(size)
        return LOCAL.pack(LOCAL_MAGIC, 0, flags, 0, 0, 0, 0, 0, 0, len(name), len(extra)) + name + extra

    def _end_record(self, record: _WrittenRecord) -> None:
        self._records.append(record)
        if not record.size:
            return
        if isinstance(record.sum, WrittenTensor):
            self._late_sums.append((self._offset + _CHECKSUM_IN_DESCRIPTOR, record.sum))
        is_wide = max(record.size, record.header) >= SATURATED32
        layout = "<4sI2Q" if is_wide else "<4sI2I"
        self._sink.write(struct.pack(layout, _DESCRIPTOR_MAGIC, record.known_sum, record.size, record.size))

    def _entry(self, record: _WrittenRecord) -> bytes:
        return _directory_entry(record, (0, 0), _torch_flags(record.size), 0, 0, SATURATED32)

    def _end_of_zip(self, count: int, start: int, nbytes: int) -> bytes:
        return _end_records(count, start, nbytes, (798, 45), SATURATED32, always_wide=True)


class NumpyZip(ZipWriter):
    """A zip as ``numpy.savez`` writes it: unaligned, with checksums in local headers, and ZIP64 fields."""

    _VERSION: ClassVar[int] = 45
    _DATE: ClassVar[int] = 33  # 1 January 1980, the earliest date of a zip
    _ATTRIBUTES: ClassVar[int] = 0o600 << 16
    _LIMIT: ClassVar[int] = 1 << 31

    def _local(self, name: bytes, header: int, size: int) -> bytes:
        extra = _field(ZIP64_EXTRA, struct.pack("<2Q", size, size))
        flags, wide, lengths = _numpy_flags(name), SATURATED32, (len(name), len(extra))
        fields = (self._VERSION, flags, 0, 0, self._DATE, 0, wide, wide, *lengths)
        return LOCAL.pack(LOCAL_MAGIC, *fields) + name + extra

    def _end_record(self, record: _WrittenRecord) -> None:
        self._records.append(record)
        self._late_sums.append((record.header + _CHECKSUM_IN_LOCAL, record.sum))

    def _entry(self, record: _WrittenRecord) -> bytes:
        versions = (3 << 8 | self._VERSION, self._VERSION)
        flags = _numpy_flags(record.name)
        return _directory_entry(record, versions, flags, self._DATE, self._ATTRIBUTES, self._LIMIT)

    def _end_of_zip(self, count: int, start: int, nbytes: int) -> bytes:
        versions = (self._VERSION, self._VERSION)
        return _end_records(count, start, nbytes, versions, self._LIMIT, always_wide=False)


def _torch_flags(size: int) -> int:
    return UTF8 | HAS_DESCRIPTOR if size else UTF8


def _numpy_flags(name: bytes) -> int:
    return 0 if name.isascii() else UTF8


def _field(kind: int, content: bytes) -> bytes:
    return struct.pack("<2H", kind, len(content)) + content


def _directory_entry(
    record: _WrittenRecord, versions: tuple[int, int], flags: int, date: int, attributes: int, limit: int
) -> bytes:
    """Return an entry of the directory, with sizes and offsets from ``limit`` on in a ZIP64 field."""
    size, header, wide = record.size, record.header, b""
    if size >= limit:
        wide, size = struct.pack("<2Q", size, size), SATURATED32
    if header >= limit:
        wide, header = wide + struct.pack("<Q", header), SATURATED32
    extra = _field(ZIP64_EXTRA, wide) if wide else b""
    fields = (*versions, flags, 0, 0, date, record.known_sum, size, size, len(record.name), len(extra))
    return ENTRY.pack(_DIRECTORY_MAGIC, *fields, 0, 0, 0, attributes, header) + record.name + extra


def _end_records(
    count: int, start: int, nbytes: int, versions: tuple[int, int], limit: int, *, always_wide: bool
) -> bytes:
    """Return the end records of a zip with a directory of ``nbytes`` at ``start``; ZIP64 ones if needed."""
    wide = b""
    if always_wide or count >= _SATURATED16 or max(start, nbytes) >= limit:
        wide = END64.pack(_END64_MAGIC, END64.size - 12, *versions, 0, 0, count, count, nbytes, start)
        wide += _LOCATOR64.pack(_LOCATOR64_MAGIC, 0, start + nbytes, 1)
    counts = min(count, _SATURATED16), min(count, _SATURATED16)
    sizes = min(nbytes, SATURATED32), min(start, SATURATED32)
    return wide + END.pack(_END_MAGIC, 0, 0, *counts, *sizes, 0)
