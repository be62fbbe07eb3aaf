"""Programs of Paddle, message by message."""

from __future__ import annotations

from tests.support.protobuf import bytes_field, number_field


def field(number: int, content: bytes | int) -> bytes:
    """Return a field with a number, or with bytes or a message."""
    return number_field(number, content) if isinstance(content, int) else bytes_field(number, content)


def program(*parts: bytes) -> bytes:
    """Return a program of one block."""
    block = b"\x08\x00\x10" + b"\xff" * 9 + b"\x01" + b"".join(parts)
    return field(1, block)


def operator(kind: str, *attributes: bytes) -> bytes:
    """Return an operator, as a part of a program."""
    return field(4, field(3, kind.encode()) + b"".join(field(4, attribute) for attribute in attributes))
