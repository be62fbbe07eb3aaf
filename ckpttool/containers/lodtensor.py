"""Paddle's tensor streams: LoDTensor, SelectedRows, and files of several LoDTensors.

All numbers are little-endian::

    LoDTensor     version (uint32, 0), number of levels (uint64), the levels, tensor
    level         size in bytes (uint64), bounds of sequences (uint64 each)
    SelectedRows  version (uint32, 0), number of rows (uint64), rows (int64 each), height (int64), tensor
    tensor        version (uint32, 0), size (int32) of TensorDesc, TensorDesc (protocol buffer), elements

Nothing is aligned or named, nothing has a checksum, and the elements have no stated size: Paddle itself loads
a truncated file without an error. So a stream must end exactly where its file ends, or the next one begins.

Source: PaddlePaddle/Paddle ``paddle/fluid/framework/lod_tensor.cc``, ``selected_rows.cc``,
``tensor_util.cc``, ``framework.proto``.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Iterator
from typing import NamedTuple

from ckpttool.containers.protobuf import BYTES, VARINT, encoded_varint, fields, varint
from ckpttool.core.dtypes import BY_NAME, DType
from ckpttool.core.errors import DamagedCheckpoint, LimitExceeded, Truncated, require_at_most
from ckpttool.core.readable import Readable

MAX_LEVELS = 8
"""Limit on nested sequences, above that of any model; a SelectedRows read as LoDTensor has thousands."""
MAX_AXES = 64
MAX_TENSORS = 1_000_000
MAX_OFFSETS = 1 << 24
"""Limit on the bounds of a level that are checked."""

_MAX_DESCRIPTION = 1 << 16
_MAX_INT64 = (1 << 63) - 1
_U32, _I32, _U64, _I64 = (struct.Struct(code) for code in ("<I", "<i", "<Q", "<q"))

# The numbers of ``VarType.Type`` that are types of elements.
ELEMENTS: dict[int, DType] = {
    number: BY_NAME[name]
    for number, name in {
        0: "bool",
        1: "int16",
        2: "int32",
        3: "int64",
        4: "float16",
        5: "float32",
        6: "float64",
        19: "uint64",
        20: "uint8",
        21: "int8",
        22: "bfloat16",
        23: "complex64",
        24: "complex128",
        32: "float8_e4m3fn",
        33: "float8_e5m2",
    }.items()
}
NUMBERS: dict[str, int] = {dtype.name: number for number, dtype in ELEMENTS.items()}
"""Number of ``VarType.Type`` by name of the element type."""
NO_LEVELS = bytes(8)
"""Bytes of the levels of a tensor without any: their number, 0."""
_VERSION = bytes(4)
_DATA_TYPE, _DIMS = 0x08, 0x10  # fields 1 and 2 of TensorDesc, both varints


class Rows(NamedTuple):
    """The row numbers of a SelectedRows: ``total`` int64 at ``offset``, out of ``height`` rows."""

    offset: int
    total: int
    height: int


class Stream(NamedTuple):
    """One stream: its elements in ``nbytes`` bytes at ``offset``.

    Attributes:
        lod: For each level of sequences, the position of its bounds: offset, number of uint64.
        rows: The row numbers of a SelectedRows; None for a LoDTensor.
        end: Offset after the stream.
    """

    dtype: DType
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    lod: tuple[tuple[int, int], ...] = ()
    rows: Rows | None = None

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


def read_file(source: Readable) -> Stream:
    """Return the single stream of a file: a LoDTensor or a SelectedRows that ends with the file."""
    # Both begin alike, and no field distinguishes them: so the first reading that ends exactly with the file
    # is taken. If none does, the error is that of a LoDTensor.
    if not source.size:
        raise Truncated(source.path, "an empty file", expected="a tensor")
    try:
        stream = read_lod_tensor(source, 0)
        return _require_end(source, stream)
    except DamagedCheckpoint as failure:
        for with_lod in (False, True):
            try:
                return _require_end(source, read_selected_rows(source, with_lod=with_lod))
            except DamagedCheckpoint:
                continue
        raise failure


def read_all(source: Readable) -> Iterator[Stream]:
    """Yield the consecutive LoDTensors of a file, up to its end."""
    at = count = 0
    while at < source.size:
        stream = read_lod_tensor(source, at, f"tensor #{count:,}")
        source.check(stream.offset, stream.nbytes, f"tensor #{count:,}")
        at = stream.end
        count += 1
        if count > MAX_TENSORS:
            raise LimitExceeded(source.path, f"more than {MAX_TENSORS:,} tensors")
        yield stream


def starts_like_stream(source: Readable) -> bool:
    """Return whether a file begins with the complete header of a stream."""
    if source.size < _U32.size or source.read(0, _U32.size) != bytes(_U32.size):
        return False
    for read in (read_lod_tensor, read_selected_rows):
        try:
            read(source)
        except DamagedCheckpoint:
            continue
        return True
    return False


def read_lod_tensor(source: Readable, at: int = 0, where: str | None = None) -> Stream:
    """Return the LoDTensor whose header is at an offset; its end isn't checked."""
    at = _skip_version(source, at, where)
    lod, at = _read_levels(source, at, where)
    return _read_tensor(source, at, where)._replace(lod=lod)


def read_selected_rows(source: Readable, *, with_lod: bool = False) -> Stream:
    """Return the SelectedRows at the beginning of a file.

    ``with_lod``: whether its values are a complete LoDTensor, as some releases of 2018 wrote them.
    """
    at = _skip_version(source, 0, None)
    count = _read_number(source, _U64, at, "rows")
    at += _U64.size
    source.check(at, 8 * count, "rows")
    height = _read_number(source, _I64, at + 8 * count, "height")
    rows = Rows(at, count, height)
    at += 8 * count + _I64.size
    stream = read_lod_tensor(source, at) if with_lod else _read_tensor(source, at, None)
    if not stream.shape or stream.shape[0] < count:
        raise _damage(source, "rows", f"{count:,} rows and values of shape {stream.shape}", "rows-mismatch")
    if not height >= 0:
        raise _damage(source, "height", f"a height of {height:,}", "rows-mismatch")
    return stream._replace(rows=rows)


def _damage(source: Readable, where: str | None, found: str, code: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(source.path, found, where=where, code=code)


def _require_end(source: Readable, stream: Stream) -> Stream:
    if stream.end > source.size:
        raise Truncated(source.path, f"truncated: {source.size:,} of {stream.end:,} bytes")
    if stream.end < source.size:
        found = f"trailing bytes after the tensor: {source.size - stream.end:,}"
        raise DamagedCheckpoint(source.path, found, expected=f"{stream.end:,} in all", code="trailing-bytes")
    return stream


def _read_number(source: Readable, layout: struct.Struct, at: int, where: str | None) -> int:
    (number,) = layout.unpack(source.read(at, layout.size, where))
    return int(number)


def _skip_version(source: Readable, at: int, where: str | None) -> int:
    """Check that the version is 0, and return the offset after it."""
    version = _read_number(source, _U32, at, where)
    if version != 0:
        raise _damage(source, where, f"version {version:,} at byte {at:,}", "tensor-version")
    return at + _U32.size


def _read_levels(source: Readable, at: int, where: str | None) -> tuple[tuple[tuple[int, int], ...], int]:
    """Return the positions of the bounds of all levels, as in ``Stream.lod``, and the offset after them."""
    count = _read_number(source, _U64, at, where)
    require_at_most(source.path, MAX_LEVELS, count, "{:,} levels of sequences", where)
    at += _U64.size
    levels = []
    for _ in range(count):
        nbytes = _read_number(source, _U64, at, where)
        at += _U64.size
        source.check(at, nbytes, where)
        if nbytes % _U64.size:
            raise _damage(source, where, f"a level of sequences of {nbytes:,} bytes", "lod-damaged")
        levels.append((at, nbytes // _U64.size))
        at += nbytes
    return tuple(levels), at


def _read_tensor(source: Readable, at: int, where: str | None) -> Stream:
    at = _skip_version(source, at, where)
    nbytes = _read_number(source, _I32, at, where)
    at += _I32.size
    if not 0 < nbytes <= _MAX_DESCRIPTION:
        raise _damage(source, where, f"a description of {nbytes:,} bytes", "tensor-description")
    dtype, shape = describe(source.read(at, nbytes, where), source.path, where)
    at += nbytes
    return Stream(dtype, shape, at, dtype.nbytes(math.prod(shape)))


def describe(message: bytes | memoryview, path: str, where: str | None) -> tuple[DType, tuple[int, ...]]:
    """Return the type and shape in a ``TensorDesc``; raises for lengths of -1, which only programs have."""
    number, shape = parse_description(message, path, where)
    if number not in ELEMENTS:
        raise DamagedCheckpoint(path, f"element type {number}", where=where, code="unknown-dtype")
    require_at_most(path, MAX_AXES, len(shape), "{:,} axes", where)
    if any(length < 0 for length in shape) or math.prod(shape) > _MAX_INT64:
        raise DamagedCheckpoint(path, f"shape {shape}", where=where, code="tensor-description")
    return ELEMENTS[number], shape


def parse_description(
    message: bytes | memoryview, path: str, where: str | None
) -> tuple[int | None, tuple[int, ...]]:
    """Return the number of the type, None if missing, and the shape of a ``TensorDesc``, unchecked."""
    if len(message) > _MAX_DESCRIPTION:
        raise LimitExceeded(path, f"a description of {len(message):,} bytes", where=where)
    number: int | None = None
    shape: list[int] = []
    for field in fields(message, path, where):
        if (field.number, field.kind) == (1, VARINT):
            number = field.integer
        elif (field.number, field.kind) == (2, VARINT):
            shape.append(field.signed)
        elif (field.number, field.kind) == (2, BYTES):
            shape += _packed_integers(field.data, path, where)
        else:
            found = f"field {field.number} in the description of a tensor"
            raise DamagedCheckpoint(path, found, where=where, code="tensor-description")
    return number, tuple(shape)


def _packed_integers(data: memoryview, path: str, where: str | None) -> Iterator[int]:
    at = 0
    while at < len(data):
        try:
            number, at = varint(data, at)
        except ValueError as failure:
            raise DamagedCheckpoint(path, str(failure), where=where, code="tensor-description") from failure
        yield number - (1 << 64) if number >> 63 else number


def integers(source: Readable, offset: int, count: int) -> array[int]:
    """Return the signed 64-bit integers at an offset; the caller limits ``count``."""
    numbers = array("q", source.read(offset, 8 * count))
    if struct.pack("=H", 1) != struct.pack("<H", 1):
        numbers.byteswap()
    return numbers


def lod_bytes(source: Readable, stream: Stream) -> bytes:
    """Return the levels of a tensor as in the file: their number, and each with its size."""
    if not stream.lod:
        return bytes(_U64.size)
    start = stream.lod[0][0] - 2 * _U64.size
    offset, count = stream.lod[-1]
    return source.read(start, offset + count * _U64.size - start)


def lod_fault(source: Readable, stream: Stream) -> str | None:
    """Return the reason why Paddle would refuse the sequences of a tensor; None if they are valid."""
    # The bounds of a level begin with 0 and never fall; they end with the number of sequences in the next
    # level, or in the last level with the length of the first axis.
    for level, (offset, count) in enumerate(stream.lod):
        if count > MAX_OFFSETS:
            return f"level {level} has {count:,} bounds, which were not compared"
        bounds = integers(source, offset, count)
        is_last = level + 1 == len(stream.lod)
        below = (stream.shape[0] if stream.shape else 1) if is_last else stream.lod[level + 1][1] - 1
        if count < 2 or bounds[0] != 0 or any(bounds[at] > bounds[at + 1] for at in range(count - 1)):
            return f"the bounds of level {level} don't increase from 0"
        if bounds[-1] != below:
            return f"level {level} ends at {bounds[-1]:,} instead of {below:,}"
    return None


def lod_tensor_header(dtype: DType, shape: tuple[int, ...], levels: bytes = NO_LEVELS) -> bytes:
    """Return the bytes before the elements of a LoDTensor; ``levels`` as from ``lod_bytes``."""
    return _VERSION + levels + tensor_header(dtype, shape)


def rows_header(count: int) -> bytes:
    """Return the bytes before the row numbers of a SelectedRows."""
    return _VERSION + struct.pack("<Q", count)


def values_header(height: int, dtype: DType, shape: tuple[int, ...]) -> bytes:
    """Return the bytes between the row numbers of a SelectedRows and its elements."""
    return struct.pack("<q", height) + tensor_header(dtype, shape)


def tensor_header(dtype: DType, shape: tuple[int, ...]) -> bytes:
    """Return the version, size and ``TensorDesc`` before the elements of any stream."""
    axes = b"".join(bytes([_DIMS]) + encoded_varint(length) for length in shape)
    description = bytes([_DATA_TYPE]) + encoded_varint(NUMBERS[dtype.name]) + axes
    return _VERSION + struct.pack("<i", len(description)) + description
