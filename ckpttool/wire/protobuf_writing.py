"""Protocol buffers as they are written: the fields of a message, one behind the other.

Source: Protocol Buffers documentation, "Encoding".
"""

from __future__ import annotations

from ckpttool.wire.protobuf import BYTES, FIXED32, VARINT

_WORD = 1 << 64
_SHORT = tuple(bytes([number]) for number in range(1 << 7))


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
    """Return a field with an integer; nothing for 0, which is what a missing field means."""
    return encoded_varint(number << 3 | VARINT) + encoded_varint(value) if value else b""


def bytes_field(number: int, value: bytes | memoryview) -> bytes:
    """Return a field with a string or a message, an empty one too."""
    return b"".join((encoded_varint(number << 3 | BYTES), encoded_varint(len(value)), value))


def text_field(number: int, value: str) -> bytes:
    """Return a field with a text; nothing for an empty one, which is what a missing field means."""
    return bytes_field(number, value.encode()) if value else b""


def fixed32_field(number: int, value: int) -> bytes:
    """Return a field with an unsigned integer in four bytes."""
    return encoded_varint(number << 3 | FIXED32) + value.to_bytes(4, "little")
