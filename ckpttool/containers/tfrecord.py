"""TFRecord files, the format of TensorBoard's event files: consecutive records with checksums.

A record is its length (8 bytes), the length's checksum (4), the data, and the data's checksum (4), all
little-endian; the checksums are masked CRC-32C.

Source: tensorflow/tensorflow ``core/lib/io/record_writer.h``, ``record_reader.cc``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import BinaryIO

from ckpttool.core.errors import DamagedCheckpoint, Truncated, from_os_error
from ckpttool.storage.checksums import crc32c, mask_crc

MAX_RECORD = 1 << 24
"""Limit in bytes on records that are returned; larger ones are only checked. A plotted number has dozens."""

_HEAD = struct.Struct("<QI")
_LENGTH_BYTES, _FOOT_BYTES = 8, 4
_BLOCK = 1 << 20


def is_record_head(start: bytes) -> bool:
    """Return whether a file begins with a length and its checksum, as TFRecord files do."""
    if len(start) < _HEAD.size:
        return False
    _, checksum = _HEAD.unpack_from(start)
    return mask_crc(crc32c(start[:_LENGTH_BYTES])) == int(checksum)


def records(file: BinaryIO, path: str) -> Iterator[tuple[int, bytes | None]]:
    """Yield offset and data of the records of an open file; no data if larger than ``MAX_RECORD``.

    Raises:
        Truncated: The file ends within a record, as while it is being written.
        DamagedCheckpoint: A checksum is wrong; later records can't be found without their lengths.
    """
    from google_crc32c import value as crc

    offset = 0
    while True:
        head = _read_bytes(file, path, _HEAD.size)
        if not head:
            return
        if len(head) < _HEAD.size:
            raise _truncation(path, offset, len(head), _HEAD.size)
        nbytes, checksum = _HEAD.unpack(head)
        if mask_crc(crc(head[:_LENGTH_BYTES])) != checksum:
            found = "wrong checksum of a record's length"
            raise DamagedCheckpoint(path, found, where=f"byte {offset:,}")
        # The length has a checksum, so a large one is no damage. It is only summed, in blocks.
        data = _read_bytes(file, path, nbytes) if nbytes <= MAX_RECORD else None
        if data is not None and len(data) < nbytes:
            raise _truncation(path, offset, len(data), nbytes)
        data_crc = _streamed_crc(file, path, offset, nbytes) if data is None else crc(data)
        foot = _read_bytes(file, path, _FOOT_BYTES)
        if len(foot) < _FOOT_BYTES:
            raise _truncation(path, offset, nbytes + len(foot), nbytes + _FOOT_BYTES)
        if mask_crc(data_crc) != int.from_bytes(foot, "little"):
            found = "wrong checksum of a record"
            raise DamagedCheckpoint(path, found, where=f"byte {offset:,}")
        yield offset, data
        offset += _HEAD.size + nbytes + _FOOT_BYTES


def encoded_record(data: bytes) -> bytes:
    """Return data as a record."""
    length = struct.pack("<Q", len(data))
    head = length + struct.pack("<I", mask_crc(crc32c(length)))
    return head + data + struct.pack("<I", mask_crc(crc32c(data)))


def _streamed_crc(file: BinaryIO, path: str, offset: int, nbytes: int) -> int:
    """Return the checksum of data that is too large for memory."""
    crc, left = 0, nbytes
    while left:
        block = _read_bytes(file, path, min(left, _BLOCK))
        if not block:
            raise _truncation(path, offset, nbytes - left, nbytes)
        crc, left = crc32c(block, crc), left - len(block)
    return crc


def _read_bytes(file: BinaryIO, path: str, nbytes: int) -> bytes:
    try:
        return file.read(nbytes)
    except OSError as error:
        raise from_os_error(error, path) from error


def _truncation(path: str, offset: int, found: int, expected: int) -> Truncated:
    return Truncated(
        path,
        f"the file ends after {found:,} bytes of a record",
        expected=f"{expected:,}",
        where=f"byte {offset:,}",
    )
