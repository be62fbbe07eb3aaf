"""A PyTorch zip whose values are holes: gigabytes of zeros that take no room on the disk.

Written with our own hands, because ``torch.save`` writes every byte. ``torch.load(mmap=True)`` reads it.

Source: PyTorch ``caffe2/serialize/inline_container.cc``; PKWARE APPNOTE 6.3.
"""

from __future__ import annotations

import io
import pickle
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR64 = struct.Struct("<4sIQI")
_END = struct.Struct("<4s4H2IH")
_EXTRA = struct.Struct("<2H")
_OFFSET64 = struct.Struct("<2HQ")
_PADDING_EXTRA, _ZIP64_EXTRA = 0x4246, 0x0001  # "FB", as PyTorch pads
_ALIGNMENT = 64
_SATURATED = 0xFFFFFFFF
_ZERO_CHUNK = bytes(1 << 20)


@dataclass(frozen=True, slots=True)
class _Record:
    name: bytes
    crc32: int
    nbytes: int
    header: int


class _StorageReference:
    """Stands in a pickle for the storage of a tensor."""

    def __init__(self, key: str, count: int) -> None:
        self.key = key
        self.count = count


class _TensorReference:
    """Is pickled as PyTorch pickles a contiguous float32 tensor."""

    def __init__(self, key: str, shape: tuple[int, int]) -> None:
        self.key = key
        self.shape = shape

    def __reduce__(self) -> tuple[Any, ...]:
        from collections import OrderedDict

        import torch

        rows, columns = self.shape
        storage = _StorageReference(self.key, rows * columns)
        return torch._utils._rebuild_tensor_v2, (storage, 0, self.shape, (columns, 1), False, OrderedDict())


class _Pickler(pickle._Pickler):  # the one in C looks for persistent_id on its own type only
    def persistent_id(self, obj: object) -> tuple[Any, ...] | None:
        import torch

        if not isinstance(obj, _StorageReference):
            return None
        return "storage", torch.FloatStorage, obj.key, "cpu", obj.count


def write_zeros(path: Path, shapes: Mapping[str, tuple[int, int]]) -> None:
    """Write a state dict of float32 zeros, by name and shape."""
    keys = {name: str(index) for index, name in enumerate(shapes)}
    pickled = io.BytesIO()
    state = {name: _TensorReference(keys[name], shape) for name, shape in shapes.items()}
    _Pickler(pickled, protocol=2).dump(state)
    checksums = {4 * rows * columns: 0 for rows, columns in shapes.values()}
    checksums = {nbytes: crc32_of_zeros(nbytes) for nbytes in checksums}
    with path.open("wb") as stream:
        records = [_write(stream, "data.pkl", pickled.getvalue()), _write(stream, "byteorder", b"little")]
        for name, (rows, columns) in shapes.items():
            nbytes = 4 * rows * columns
            records.append(_begin(stream, f"data/{keys[name]}", nbytes, checksums[nbytes]))
            stream.seek(nbytes, io.SEEK_CUR)
        records.append(_write(stream, "version", b"3\n"))
        _write_directory(stream, records)


def crc32_of_zeros(nbytes: int) -> int:
    """Return the CRC-32 of ``nbytes`` zero bytes."""
    checksum = 0
    for start in range(0, nbytes, len(_ZERO_CHUNK)):
        checksum = zlib.crc32(_ZERO_CHUNK[: nbytes - start], checksum)
    return checksum


def _write(stream: BinaryIO, name: str, content: bytes) -> _Record:
    record = _begin(stream, name, len(content), zlib.crc32(content))
    stream.write(content)
    return record


def _begin(stream: BinaryIO, name: str, nbytes: int, crc32: int) -> _Record:
    """Write the local header of a record, padded so that its content is aligned."""
    record = _Record(f"archive/{name}".encode(), crc32, nbytes, stream.tell())
    unpadded = record.header + _LOCAL.size + len(record.name) + _EXTRA.size
    padding = -unpadded % _ALIGNMENT
    extra = _EXTRA.pack(_PADDING_EXTRA, padding) + b"Z" * padding
    lengths = (len(record.name), len(extra))
    stream.write(_LOCAL.pack(b"PK\x03\x04", 0, 0, 0, 0, 0, crc32, nbytes, nbytes, *lengths))
    stream.write(record.name + extra)
    return record


def _write_directory(stream: BinaryIO, records: list[_Record]) -> None:
    """Write the central directory and the end records; an offset beyond 4 GiB goes into an extra field."""
    start, count = stream.tell(), len(records)
    for record in records:
        is_far = record.header >= _SATURATED
        extra = _OFFSET64.pack(_ZIP64_EXTRA, 8, record.header) if is_far else b""
        sizes = (record.crc32, record.nbytes, record.nbytes, len(record.name), len(extra))
        offset = _SATURATED if is_far else record.header
        stream.write(_CENTRAL.pack(b"PK\x01\x02", 0, 0, 0, 0, 0, 0, *sizes, 0, 0, 0, 0, offset))
        stream.write(record.name + extra)
    end = stream.tell()
    nbytes = end - start
    stream.write(_END64.pack(b"PK\x06\x06", _END64.size - 12, 45, 45, 0, 0, count, count, nbytes, start))
    stream.write(_LOCATOR64.pack(b"PK\x06\x07", 0, end, 1))
    stream.write(_END.pack(b"PK\x05\x06", 0, 0, count, count, nbytes, min(start, _SATURATED), 0))
