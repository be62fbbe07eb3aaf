"""Raw Snappy, in which tables compress their blocks: literals, and copies of what was made before.

Source: google/snappy ``format_description.txt``.
"""

from __future__ import annotations

from ckpttool.containers.protobuf import varint

_LITERAL = 0
_LONG_LITERAL = 60
"""From here on, the length of a literal stands in one to four bytes of its own."""
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
    """Return the bytes that compressed data begins with, as far as they lie in ``data`` as they are."""
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
