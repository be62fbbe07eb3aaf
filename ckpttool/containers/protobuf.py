"""Wire format of protocol buffers: the fields of a message, without a schema and without recursion.

Source: Protocol Buffers documentation, "Encoding".
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from ckpttool.core.errors import DamagedCheckpoint

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10
_FIXED32, _FIXED64 = struct.Struct("<I"), struct.Struct("<Q")
_WORD = 1 << 64
_SHORT = tuple(bytes([number]) for number in range(1 << 7))


class Field(NamedTuple):
    """One field of a message.

    Attributes:
        number: Field number in the schema.
        kind: Wire type: VARINT, FIXED64, BYTES or FIXED32.
        value: An unsigned integer, or the bytes of a string or message.
        start: Offset in the message of the value's first byte (after the length, for BYTES).
    """

    number: int
    kind: int
    value: int | memoryview
    start: int

    @property
    def data(self) -> memoryview:
        """Return the bytes of a string or message; empty for a number."""
        return self.value if isinstance(self.value, memoryview) else memoryview(b"")

    @property
    def integer(self) -> int:
        """Return the unsigned number; 0 for bytes."""
        return 0 if isinstance(self.value, memoryview) else self.value

    @property
    def signed(self) -> int:
        """Return the number as a signed integer of 64 bits in two's complement, as int64 fields have it."""
        return self.integer - (1 << 64) if self.integer >> 63 else self.integer

    @property
    def text(self) -> str:
        """Return the bytes as text; those that aren't UTF-8 as escapes."""
        return bytes(self.data).decode("utf-8", "backslashreplace")


def varint(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """Return an unsigned base-128 integer and the offset after it.

    Raises:
        ValueError: It has more than 64 bits or 10 bytes, or its last byte is missing.
    """
    # Seven bits a byte, the lowest first; the high bit of a byte means that another one follows. So 64 bits
    # take up to 10 bytes, the last of which has one bit left.
    number = shift = 0
    for byte in data[at : at + _MAX_VARINT_BYTES]:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            if number >> 64:
                raise ValueError(f"a varint at byte {at} of more than 64 bits")
            return number, at + shift // 7
    raise ValueError(f"a varint at byte {at} that doesn't end")


def fields(message: bytes | memoryview, path: str, where: str | None = None) -> Iterator[Field]:
    """Yield the fields of a message in order; their bytes are views of the message, not copies."""
    # A field is a key, ``number << 3 | wire type``, and a value. Nearly all are strings or messages (wire
    # type 2) with a number up to 15 and a length up to 127, so that key and length are one byte each: they
    # take the shortcut below. If such a value reaches beyond the end, the general path raises the error.
    view = memoryview(message)
    at = 0
    try:
        end = len(view)
        while at < end:
            if at + 1 < end and view[at] & 0x87 == BYTES and view[at] > 7 and view[at + 1] < 0x80:
                key, start = view[at], at + 2
                at = start + view[at + 1]
                if at <= end:
                    yield Field(key >> 3, BYTES, view[start:at], start)
                    continue
                at = start - 2
            key, at = varint(view, at)
            field, at = _read_field(view, key >> 3, key & 7, at)
            yield field
    except ValueError as failure:
        raise DamagedCheckpoint(
            path, f"not a valid message: {failure}", where=where, code="protobuf-damaged"
        ) from failure


def _read_field(view: memoryview, number: int, kind: int, at: int) -> tuple[Field, int]:
    """Return the field whose value is at an offset, and the offset after it."""
    if number == 0:
        raise ValueError(f"field number 0 at byte {at}")
    if kind == VARINT:
        value, end = varint(view, at)
        return Field(number, kind, value, at), end
    if kind == BYTES:
        length, start = varint(view, at)
        if start + length > len(view):
            raise ValueError(f"{length:,} bytes announced at byte {at:,} of {len(view):,}")
        return Field(number, kind, view[start : start + length], start), start + length
    layout = {FIXED32: _FIXED32, FIXED64: _FIXED64}.get(kind)
    if layout is None:
        raise ValueError(f"wire type {kind} at byte {at}")
    if at + layout.size > len(view):
        raise ValueError(f"a number that extends past byte {len(view):,}")
    return Field(number, kind, layout.unpack_from(view, at)[0], at), at + layout.size


def encoded_varint(number: int) -> bytes:
    """Return an integer of at most 64 bits in base 128; a negative one in two's complement."""
    if 0 <= number < len(_SHORT):
        return _SHORT[number]
    number %= _WORD
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def number_field(number: int, value: int) -> bytes:
    """Return a field with an integer; empty for 0, the value of a missing field."""
    return encoded_varint(number << 3 | VARINT) + encoded_varint(value) if value else b""


def bytes_field(number: int, value: bytes | memoryview) -> bytes:
    """Return a field with a string or a message, which may be empty."""
    return b"".join((encoded_varint(number << 3 | BYTES), encoded_varint(len(value)), value))


def text_field(number: int, value: str) -> bytes:
    """Return a field with a text; empty for an empty one, the value of a missing field."""
    return bytes_field(number, value.encode()) if value else b""


def fixed32_field(number: int, value: int) -> bytes:
    """Return a field with an unsigned integer in four bytes."""
    return encoded_varint(number << 3 | FIXED32) + value.to_bytes(4, "little")
