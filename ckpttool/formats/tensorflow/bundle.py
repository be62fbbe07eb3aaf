"""Records of a tensor bundle's index: the header, the entries of tensors, and the keys of slices.

Source: tensorflow/tensorflow ``core/util/tensor_bundle/tensor_bundle.cc``,
``core/protobuf/tensor_bundle.proto``, ``core/lib/strings/ordered_code.cc``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ckpttool.containers.protobuf import Field, fields
from ckpttool.core.dtypes import BY_NAME, DType
from ckpttool.core.errors import DamagedCheckpoint, LimitExceeded
from ckpttool.storage.checksums import unmask_crc

MAX_AXES = 254  # as TensorShape has them
MAX_SLICES = 100_000
_LAST_FIELD = 7  # of BundleEntryProto
MAX_SHARDS = 100_000  # their numbers have five digits

DTYPE_NAMES = (
    *("unknown", "float32", "float64", "int32", "uint8", "int16", "int8", "string", "complex64", "int64"),
    *("bool", "qint8", "quint8", "qint32", "bfloat16", "qint16", "quint16", "uint16", "complex128"),
    *("float16", "resource", "variant", "uint32", "uint64", "float8_e5m2", "float8_e4m3fn"),
    *("float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2fnuz", "int4", "uint4", "int2", "uint2"),
    "float4_e2m1fn",
)
"""Names of the element types by TensorFlow's ``DataType`` number."""
REFERENCE = 100
"""Added to the number of a type for a reference to a variable, in graphs of TensorFlow 1."""
# Types that only TensorFlow has, or that it stores in another width than ``core/dtypes.py``: a bundle gives
# each element of a sub-byte type a byte of its own.
_TENSORFLOW_DTYPES = {
    15: DType("qint16", 16, "quantized", "int16"),
    16: DType("quint16", 16, "quantized", "uint16"),
    29: DType("int4", 8, "integer", "int4"),
    30: DType("uint4", 8, "integer", "uint4"),
    31: DType("int2", 8, "integer", "int2"),
    32: DType("uint2", 8, "integer", "uint2"),
    33: DType("float4_e2m1fn", 8, "float", "float4_e2m1fn"),
}

DTYPES: Mapping[int, DType] = {
    number: BY_NAME[name] for number, name in enumerate(DTYPE_NAMES) if name in BY_NAME
} | _TENSORFLOW_DTYPES
"""Element types by number, of all that a bundle can have."""


class BundleHeader(NamedTuple):
    """First entry of an index, under the empty key."""

    shards: int
    byteorder: Literal["little", "big"]
    producer: int
    min_consumer: int


Slice = tuple[tuple[int, int | None], ...]
"""Start and length on each axis; length None: the whole axis."""


@dataclass(frozen=True, slots=True)
class BundleEntry:
    """Location of a tensor, or of a slice of one; offset and size in bytes.

    Attributes:
        key: Key in the index, not decoded.
        shape: Shape of the tensor, or of the slice if the entry is for one.
        crc32c: Checksum of the elements; of strings and variants, see ``values.py``.
        slices: Parts of a partitioned variable; each has an entry under its ``slice_key``. The entry of the
            variable has shape and type only then.
    """

    key: bytes
    dtype: DType
    shape: tuple[int, ...]
    shard: int
    offset: int
    nbytes: int
    crc32c: int
    slices: tuple[Slice, ...] = ()

    @property
    def name(self) -> str:
        """Return the key as text; bytes that aren't UTF-8 become escapes."""
        return self.key.decode("utf-8", "backslashreplace")

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


def read_header(path: str, message: bytes | memoryview) -> BundleHeader:
    """Parse a BundleHeaderProto."""
    shards = endianness = producer = minimum = 0
    for field in fields(message, path, "header"):
        if field.number == 1:
            shards = field.integer
        elif field.number == 2:
            endianness = field.integer
        elif field.number == 3:
            versions = {inner.number: inner.integer for inner in fields(field.data, path, "header")}
            producer, minimum = versions.get(1, 0), versions.get(2, 0)
    if not 0 < shards <= MAX_SHARDS or endianness not in (0, 1):
        found = f"{shards:,} shards, byte order {endianness}"
        raise DamagedCheckpoint(path, found, where="header", code="bundle-header")
    return BundleHeader(shards, "big" if endianness else "little", producer, minimum)


def read_entry(path: str, key: bytes, message: bytes | memoryview) -> BundleEntry:
    """Parse a BundleEntryProto; a field that is 0 isn't stored."""
    name = key.decode("utf-8", "backslashreplace")
    stated: dict[int, Field] = {}
    shape: tuple[int, ...] = ()
    slices = []
    for field in fields(message, path, name):
        if field.number <= _LAST_FIELD:
            stated[field.number] = field
        if field.number == 2:
            shape = read_shape(path, name, field.data)
        elif field.number == 7:
            slices.append(read_slice(path, name, field.data))
            require_slice_limit(path, name, len(slices))
    number, shard, offset, nbytes = (stated[at].signed if at in stated else 0 for at in (1, 3, 4, 5))
    dtype = read_dtype(path, name, number)
    crc = unmask_crc(stated[6].integer if 6 in stated else 0)
    if min(shard, offset, nbytes) < 0:
        raise bundle_damage(path, name, f"shard {shard}, offset {offset}, {nbytes} bytes")
    entry = BundleEntry(key, dtype, shape, shard, offset, nbytes, crc, tuple(slices))
    # The entry of a partitioned variable has no bytes, as its slices have entries of their own. The size of
    # strings and variants doesn't follow from the shape: it is checked when their lengths are read.
    if not slices and dtype.kind != "string" and nbytes != dtype.nbytes(math.prod(shape)):
        found = f"{nbytes:,} bytes for {dtype} of shape {list(shape)}"
        raise bundle_damage(path, name, found, f"{dtype.nbytes(math.prod(shape)):,}")
    return entry


def bundle_damage(path: str, where: str, found: str, expected: str | None = None) -> DamagedCheckpoint:
    """Return an error about an entry of the index."""
    return DamagedCheckpoint(path, found, expected=expected, where=where, code="bundle-entry")


def read_dtype(path: str, name: str, number: int) -> DType:
    """Return the element type of a TensorFlow ``DataType`` number."""
    dtype = DTYPES.get(number - REFERENCE if number > REFERENCE else number)
    if dtype is None:
        raise bundle_damage(path, name, f"element type {number}", "one that TensorFlow has")
    return dtype


def read_shape(path: str, name: str, message: memoryview) -> tuple[int, ...]:
    """Parse a TensorShapeProto."""
    lengths = []
    for field in fields(message, path, name):
        if field.number == 3 and field.integer:
            raise bundle_damage(path, name, "a shape of unknown rank")
        if field.number == 2:
            stated = [inner.signed for inner in fields(field.data, path, name) if inner.number == 1]
            lengths.append(stated[-1] if stated else 0)
            if len(lengths) > MAX_AXES:
                break
    if min(lengths, default=0) < 0 or len(lengths) > MAX_AXES:
        raise bundle_damage(path, name, f"shape {lengths[:8]}", f"at most {MAX_AXES} axes, none below 0")
    return tuple(lengths)


def require_slice_limit(path: str, name: str, slices: int) -> None:
    """Raise ``LimitExceeded`` if a tensor has more slices than a training job could have had workers."""
    if slices > MAX_SLICES:
        found = f"more than {MAX_SLICES:,} slices"
        raise LimitExceeded(path, found, where=name)


def read_slice(path: str, name: str, message: memoryview) -> Slice:
    """Parse a TensorSliceProto; an absent length means the whole axis."""
    axes: list[tuple[int, int | None]] = []
    for field in fields(message, path, name):
        if field.number == 1:
            stated = {inner.number: inner.signed for inner in fields(field.data, path, name)}
            axes.append((stated.get(1, 0), stated.get(2)))
            if len(axes) > MAX_AXES:
                break
    return tuple(axes)


def slice_key(name: bytes, part: Slice) -> bytes:
    """Return the key of a slice's entry in an index."""
    # Keys of slices are in OrderedCode: 00, the name with 00 and FF escaped, its end 00 01, the number of
    # axes, then start and length for each axis (-1 for a whole one). They sort before all names, because of
    # the 00.
    escaped = b"".join(_ESCAPES.get(byte, bytes([byte])) for byte in name)
    count = len(part).to_bytes((len(part).bit_length() + 7) // 8, "big")
    axes = [number for start, length in part for number in (start, -1 if length is None else length)]
    return b"\0" + escaped + b"\0\1" + bytes([len(count)]) + count + b"".join(map(_ordered_number, axes))


_ESCAPES = {0: b"\0\xff", 255: b"\xff\0"}
_HEADERS = (0x80, 0xC0, 0xE0, 0xF0, 0xF8, 0xFC, 0xFE, 0xFF, 0xFF, 0xFF)


def _ordered_number(number: int) -> bytes:
    """Return a signed number in OrderedCode, whose bytes sort like the numbers."""
    # ``size`` bytes hold 7 * size - 1 bits of two's complement, big-endian. The first bits, a unary length
    # like UTF-8's, are XORed with them; from nine bytes on they reach into the second byte.
    size = (~number if number < 0 else number).bit_length() // 7 + 1
    data = bytearray((number & ((1 << 8 * size) - 1)).to_bytes(size, "big"))
    data[0] ^= _HEADERS[size - 1]
    if size >= 9:
        data[1] ^= 0x80 if size == 9 else 0xC0
    return bytes(data)
