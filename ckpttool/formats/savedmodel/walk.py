"""Lazy reader of Protocol Buffers messages in files of up to 2 GiB.

A ``Message`` is a range of the file. Its fields are found by reading keys and lengths through a window of
256 KiB; long contents, above all the values of constants, are skipped without reading them.

Source: Protocol Buffers documentation, "Encoding".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ckpttool.containers.protobuf import BYTES, FIXED32, FIXED64, VARINT, varint
from ckpttool.core.errors import DamagedCheckpoint, LimitExceeded
from ckpttool.core.readable import Readable

MAX_FIELDS = 20_000_000
"""Limit on fields that are read; a graph of 500,000 nodes has as many."""

MAX_DEPTH = 100
"""Limit on the nesting of messages, as in Protocol Buffers."""

MAX_NAME = 1 << 16
MAX_TEXT = 1 << 26
"""Limit on the bytes of all names that are kept in memory."""

_WINDOW = 1 << 18
_SHORT = 1 << 14
_LONGEST = 10
_FIXED = {FIXED32: 4, FIXED64: 8}


class Window:
    """Buffer of the part of a file that was read last, with the counts for the limits."""

    __slots__ = ("base", "data", "fields", "source", "text")

    def __init__(self, source: Readable) -> None:
        self.source = source
        self.fields = 0
        self.text = 0
        self.data = b""
        self.base = 0

    def varint(self, at: int, end: int) -> tuple[int, int]:
        """Return a varint and the offset after it, which is at most ``end``.

        Raises:
            ValueError: The varint doesn't end before ``end``.
        """
        # A varint has up to ten bytes, and the window may end inside it. So the window is read again from the
        # varint on, unless ten bytes follow.
        here = at - self.base
        if here < 0 or here + _LONGEST > len(self.data):
            self.data = self.source.read(at, max(0, min(_WINDOW, self.source.size - at)))
            self.base, here = at, 0
        if at < end and here < len(self.data) and self.data[here] < 0x80:
            return self.data[here], at + 1
        number, used = varint(self.data[here : here + min(_LONGEST, end - at)], 0)
        return number, at + used

    def count(self, fields: int = 1) -> None:
        """Count fields against ``MAX_FIELDS``."""
        self.fields += fields
        if self.fields > MAX_FIELDS:
            raise LimitExceeded(self.source.path, f"more than {MAX_FIELDS:,} fields", expected="less")

    def keep(self, nbytes: int) -> None:
        """Count bytes of names that are kept in memory against ``MAX_TEXT``."""
        self.text += nbytes
        if self.text > MAX_TEXT:
            found = f"names of more than {MAX_TEXT:,} bytes together"
            raise LimitExceeded(self.source.path, found, expected="less")

    def read(self, at: int, nbytes: int) -> bytes:
        """Return bytes of the file, from the buffer if possible."""
        here = at - self.base
        if here >= 0 and here + nbytes <= len(self.data):
            return self.data[here : here + nbytes]
        return self.source.read(at, nbytes)


class Message(NamedTuple):
    """Message, or string, in the range ``start`` to ``end`` of a file."""

    window: Window
    start: int
    end: int
    depth: int = 0

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    def parts(self) -> Iterator[tuple[int, Message]]:
        """Yield number and content of all length-delimited fields: messages, strings and packed numbers.

        Fields of another wire type than the message declares are skipped, as Protocol Buffers does.
        """
        for key, _, part in self._walk():
            if key & 7 == BYTES:
                yield key >> 3, part

    def numbers(self) -> Iterator[tuple[int, int]]:
        """Yield number and value of all varint fields."""
        for key, value, _ in self._walk():
            if key & 7 == VARINT:
                yield key >> 3, value

    def fields(self) -> Iterator[tuple[int, int | None, Message | None]]:
        """Yield number, varint value and length-delimited content of all fields; one of the two is None."""
        for key, value, part in self._walk():
            kind = key & 7
            yield key >> 3, value if kind == VARINT else None, part if kind == BYTES else None

    def _walk(self) -> Iterator[tuple[int, int, Message]]:
        """Yield the key, the varint value (else 0) and the content of each field."""
        # The first branch is the fast path for a length-delimited field whose key and length are one byte
        # each (0x87 masks the continuation bit and the wire type). Nearly all fields of a graph are such.
        window, at, end, depth = self.window, self.start, self.end, self.depth + 1
        self._check_depth()
        try:
            while at < end:
                data, here = window.data, at - window.base
                if 0 <= here < len(data) - 1 and data[here] & 0x87 == BYTES and data[here + 1] < 0x80:
                    key, value, size, at = data[here], 0, data[here + 1], at + 2  # as nearly all are
                else:
                    key, value, size, at = self._measure(at)
                if key < 8:
                    raise ValueError(f"field number 0 before byte {at:,}")
                if at + size > end:
                    raise ValueError(f"{size:,} bytes announced at byte {at:,} of {end:,}")
                window.count()
                yield key, value, Message(window, at, at + size, depth)
                at += size
        except ValueError as failure:
            path, reason = window.source.path, f"not a valid message: {failure}"
            raise DamagedCheckpoint(path, reason, code="protobuf-damaged") from failure

    def short_parts(self) -> list[tuple[int, int, bytes]] | None:
        """Return number, offset and bytes of each field; None if the message isn't short and plain."""
        # Graphs have a node in some hundred bytes, nearly all with fields of one key byte and a length of at
        # most two. Those are parsed from one read, several times as fast as by ``fields``.
        if self.nbytes > _SHORT:
            return None
        self._check_depth()
        data, start = self.window.read(self.start, self.nbytes), self.start
        at, end, parts = 0, len(data), []
        try:
            while at < end:
                key, size = data[at], data[at + 1]
                if key & 0x87 != BYTES or key < 8:
                    return None
                at += 2
                if size >= 0x80:
                    size, at = size & 0x7F | data[at] << 7, at + 1
                    if size >= 0x4000:
                        return None
                parts.append((key >> 3, start + at, data[at : at + size]))
                at += size
        except IndexError:
            return None
        self.window.count(len(parts))
        return parts if at == end else None

    def _measure(self, at: int) -> tuple[int, int, int, int]:
        """Return a field's key, varint value (else 0), size of its content (else 0), and offset of that."""
        key, at = self.window.varint(at, self.end)
        kind = key & 7
        if kind == VARINT:
            value, at = self.window.varint(at, self.end)
            return key, value, 0, at
        if kind == BYTES:
            size, at = self.window.varint(at, self.end)
            return key, 0, size, at
        if kind not in _FIXED:
            raise ValueError(f"wire type {kind} before byte {at:,}")
        return key, 0, _FIXED[kind], at

    def _check_depth(self) -> None:
        if self.depth > MAX_DEPTH:
            path = self.window.source.path
            raise LimitExceeded(path, f"messages nested more than {MAX_DEPTH} deep", expected="less")

    def text(self) -> str:
        """Return the bytes as text; bytes that aren't UTF-8 become escapes."""
        return self.data(MAX_NAME).decode("utf-8", "backslashreplace")

    def stable_text(self) -> str:
        """Return the bytes as text that is kept in memory, and counts for its limit."""
        self.window.keep(self.nbytes)
        return self.text()

    def data(self, limit: int) -> bytes:
        """Return the bytes; raise ``LimitExceeded`` if they are more than ``limit``."""
        if self.nbytes > limit:
            found = f"{self.nbytes:,} bytes at byte {self.start:,}"
            raise LimitExceeded(self.window.source.path, found, expected=f"at most {limit:,}")
        return self.window.read(self.start, self.nbytes)


def signed(value: int) -> int:
    """Return the value of an int64 field, a varint in two's complement."""
    return value - (1 << 64) if value >> 63 else value


def message_in(source: Readable) -> Message:
    """Return the message of a whole file."""
    return Message(Window(source), 0, source.size)
