"""Walks a message of up to 2 GiB in its file: fields are looked at where they lie, and never decoded whole.

What is long, above all the values of constants, is stepped over by its length.

Source: Protocol Buffers documentation, "Encoding".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ckpttool.containers.protobuf import BYTES, FIXED32, FIXED64, VARINT, varint
from ckpttool.core.errors import DamagedCheckpoint, LimitExceeded
from ckpttool.core.readable import Readable

MAX_FIELDS = 20_000_000
"""The most fields that are looked at; a graph of 500,000 nodes has as many."""

MAX_DEPTH = 100
"""How deep messages may be nested; Protocol Buffers has the same limit."""

MAX_NAME = 1 << 16
MAX_TEXT = 1 << 26
"""The most bytes of names that are kept, together."""

_WINDOW = 1 << 18
_SHORT = 1 << 14
_LONGEST = 10
_FIXED = {FIXED32: 4, FIXED64: 8}


class Window:
    """The part of a file that was read last, and how much of the budgets is used."""

    __slots__ = ("base", "data", "fields", "source", "text")

    def __init__(self, source: Readable) -> None:
        self.source = source
        self.fields = 0
        self.text = 0
        self.data = b""
        self.base = 0

    def varint(self, at: int, end: int) -> tuple[int, int]:
        """Return a number and the offset behind it, which is at most ``end``.

        Raises:
            ValueError: It doesn't end there.
        """
        here = at - self.base
        if here < 0 or here + _LONGEST > len(self.data):
            self.data = self.source.read(at, max(0, min(_WINDOW, self.source.size - at)))
            self.base, here = at, 0
        if at < end and here < len(self.data) and self.data[here] < 0x80:
            return self.data[here], at + 1
        number, used = varint(self.data[here : here + min(_LONGEST, end - at)], 0)
        return number, at + used

    def count(self, fields: int = 1) -> None:
        """Count fields."""
        self.fields += fields
        if self.fields > MAX_FIELDS:
            raise LimitExceeded(self.source.path, f"more than {MAX_FIELDS:,} fields", expected="less")

    def keep(self, nbytes: int) -> None:
        """Count what stays in memory."""
        self.text += nbytes
        if self.text > MAX_TEXT:
            found = f"names of more than {MAX_TEXT:,} bytes together"
            raise LimitExceeded(self.source.path, found, expected="less")

    def read(self, at: int, nbytes: int) -> bytes:
        """Return bytes of the file."""
        here = at - self.base
        if here >= 0 and here + nbytes <= len(self.data):
            return self.data[here : here + nbytes]
        return self.source.read(at, nbytes)


class Message(NamedTuple):
    """A message, or a string, in a file: from ``start`` up to ``end``."""

    window: Window
    start: int
    end: int
    depth: int = 0

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    def parts(self) -> Iterator[tuple[int, Message]]:
        """Yield number and content of the fields that are messages or strings.

        A field of another wire type than its message declares is none of it: Protocol Buffers skips it.
        """
        for key, _, part in self._walk():
            if key & 7 == BYTES:
                yield key >> 3, part

    def numbers(self) -> Iterator[tuple[int, int]]:
        """Yield number and value of the fields that are varints."""
        for key, value, _ in self._walk():
            if key & 7 == VARINT:
                yield key >> 3, value

    def fields(self) -> Iterator[tuple[int, int | None, Message | None]]:
        """Yield each field's number, varint value and length-delimited content; the other is None."""
        for key, value, part in self._walk():
            kind = key & 7
            yield key >> 3, value if kind == VARINT else None, part if kind == BYTES else None

    def _walk(self) -> Iterator[tuple[int, int, Message]]:
        """Yield of each field its key, its value where that is a varint (else 0), and where it lies."""
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
            path, reason = window.source.path, f"no message: {failure}"
            raise DamagedCheckpoint(path, reason, code="protobuf-damaged") from failure

    def short_parts(self) -> list[tuple[int, int, bytes]] | None:
        """Return of each field its number, where it begins and its bytes, or None where ``fields`` is needed.

        Graphs have a node for some hundred bytes, nearly all of short texts and messages: those are taken
        apart several times as fast."""
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
        """Return a field's key, its number, the size of its other content, and where that begins."""
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
        """Return the bytes as text; what is no UTF-8 is spelled out."""
        return self.data(MAX_NAME).decode("utf-8", "backslashreplace")

    def stable_text(self) -> str:
        """Return the bytes as text that stays in memory."""
        self.window.keep(self.nbytes)
        return self.text()

    def data(self, limit: int) -> bytes:
        """Return the bytes."""
        if self.nbytes > limit:
            found = f"{self.nbytes:,} bytes at byte {self.start:,}"
            raise LimitExceeded(self.window.source.path, found, expected=f"at most {limit:,}")
        return self.window.read(self.start, self.nbytes)


def signed(value: int) -> int:
    """Return a varint as int64 fields hold it, in two's complement."""
    return value - (1 << 64) if value >> 63 else value


def message_in(source: Readable) -> Message:
    """Return the message that a whole file is."""
    return Message(Window(source), 0, source.size)
