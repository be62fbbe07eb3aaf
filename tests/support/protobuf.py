"""Messages of Protocol Buffers, field by field, independent of the package's own encoder."""

from __future__ import annotations


def varint(number: int) -> bytes:
    """Return an unsigned base-128 integer."""
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def bytes_field(number: int, content: bytes | str) -> bytes:
    """Return a field of bytes, text or a message."""
    data = content.encode() if isinstance(content, str) else content
    return varint(number << 3 | 2) + varint(len(data)) + data


def number_field(number: int, value: int) -> bytes:
    """Return a field with a number."""
    return varint(number << 3) + varint(value)
