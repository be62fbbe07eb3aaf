"""The opcodes of protocol 2, as they are written.

Source: CPython ``Lib/pickle.py``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ckpttool.errors import Unsupported

MAX_TEXT = 0xFFFFFFFF
"""The most bytes of one text: its length takes four bytes."""


class Op(bytes):
    """Bytes of a pickle, as they are."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, eq=False)
class Put:
    """A place at which the top of the stack is remembered, under a key of the writer's own."""

    key: Any


@dataclass(frozen=True, slots=True)
class Named:
    """A name of the writer's own that is to be imported."""

    module: str
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Streamed:
    """Bytes of a pickle that are read when they are written."""

    blocks: Callable[[], Iterator[bytes]]


MARK, NONE = Op(b"("), Op(b"N")
EMPTY_LIST, EMPTY_DICT, EMPTY_TUPLE = Op(b"]"), Op(b"}"), Op(b")")
TUPLE, TUPLES = Op(b"t"), {1: Op(b"\x85"), 2: Op(b"\x86"), 3: Op(b"\x87")}
APPENDS, SETITEMS = Op(b"e"), Op(b"u")
REDUCE, NEWOBJ, BUILD, BINPERSID = Op(b"R"), Op(b"\x81"), Op(b"b"), Op(b"Q")
FALSE, TRUE = Op(b"\x89"), Op(b"\x88")
LATIN1 = Op(b"X\x06\0\0\0latin1")


def spelled_int(number: int) -> Op:
    """Return the opcode that pushes a number."""
    if 0 <= number < 1 << 8:
        return Op(b"K" + bytes([number]))
    if 0 <= number < 1 << 16:
        return Op(b"M" + number.to_bytes(2, "little"))
    if -(1 << 31) <= number < 1 << 31:
        return Op(b"J" + number.to_bytes(4, "little", signed=True))
    length = (number if number >= 0 else ~number).bit_length() // 8 + 1
    data = number.to_bytes(length, "little", signed=True)
    # PyTorch's weights_only knows no longer ones; they are what Python writes.
    head = b"\x8a" + bytes([length]) if length < 256 else b"\x8b" + struct.pack("<i", length)
    return Op(head + data)


def spelled_float(number: float) -> Op:
    """Return the opcode that pushes a float."""
    return Op(b"G" + struct.pack(">d", number))


def spelled_text(text: str) -> Op:
    """Return the opcode that pushes a text."""
    data = text.encode("utf-8", "surrogatepass")
    return Op(text_header(len(data)) + data)


def text_header(nbytes: int) -> bytes:
    """Return what stands before a text of so many bytes."""
    if nbytes > MAX_TEXT:
        found = f"{nbytes:,} bytes of text or of an array"
        raise Unsupported("a pickle", found, expected=f"at most {MAX_TEXT:,}")
    return b"X" + nbytes.to_bytes(4, "little")


def encoded(text: Op | Streamed) -> list[Any]:
    """Return bytes as protocol 2 has them: text that is encoded again."""
    return [Named("_codecs", "encode"), text, LATIN1, TUPLES[2], REDUCE]
