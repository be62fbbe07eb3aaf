"""Protocol buffers as text, brought into their binary form as far as a schema knows the fields.

Fields that the schema doesn't name are checked to be well formed, and left out.

Source: Protocol Buffers documentation, "Text Format Language Specification".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ckpttool.errors import DamagedCheckpoint, LimitExceeded
from ckpttool.formats.savedmodel.walk import MAX_DEPTH, MAX_FIELDS

Schema = Mapping[str, Mapping[str, tuple[int, str]]]
"""For each message its fields: number and type, which is a message's name or a scalar's:
``string``, ``integer``, ``type`` (an enum whose names the caller knows), ``skipped``."""

MAX_TEXT = 1 << 26
"""The most bytes of text; larger models are written in the binary form."""

_TOKEN = re.compile(
    rb"""\s+ | \#[^\n]* |
    (?P<name>[A-Za-z_][\w./-]*) | (?P<number>-?(?:\.\d|\d)[\w.+-]*|-\s*inf(?:inity)?|-\s*nan) |
    (?P<text>"(?:[^"\\\n]|\\.)*" | '(?:[^'\\\n]|\\.)*') | (?P<mark>[{}<>\[\]:,;])""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(
    rb"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL
)
_PLAIN_ESCAPES = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"a": b"\a", b"b": b"\b", b"f": b"\f", b"v": b"\v"}
_UNKNOWN = (0, "skipped")
_CLOSING = {b"{": b"}", b"<": b">"}


class _Token(NamedTuple):
    kind: str
    text: bytes
    at: int


class _Open(NamedTuple):
    """A message or a list that is being read.

    Attributes:
        fields: What the schema knows of the message.
        number: Its number in the message around it; 0 where it is left out.
        closing: What ends it.
        out: Its binary form so far; a list writes into that of its message.
        item: Number and type of the items of a list.
    """

    fields: Mapping[str, tuple[int, str]]
    number: int
    closing: bytes
    out: bytearray
    item: tuple[int, str] | None = None


def encode(path: str, text: bytes, schema: Schema, root: str, enum: Mapping[str, int]) -> bytes:
    """Return a message in binary form, with the fields that the schema names.

    Args:
        path: The file, for errors.
        text: The message as text.
        schema: What is known of the messages.
        root: Name of the outermost message.
        enum: Numbers of the names that values of type ``type`` may have.

    Raises:
        DamagedCheckpoint: It is not the text of a message.
        LimitExceeded: It is too large, or nested too deep.
    """
    if len(text) > MAX_TEXT:
        raise LimitExceeded(path, f"{len(text):,} bytes of text", expected=f"at most {MAX_TEXT:,}")
    return _Encoder(path, text, schema, enum).run(root)


class _Encoder:
    """Reads a text token by token, without recursion."""

    def __init__(self, path: str, text: bytes, schema: Schema, enum: Mapping[str, int]) -> None:
        self._path = path
        self._schema = schema
        self._enum = enum
        self._tokens = self._scan(text)
        self._next: _Token | None = next(self._tokens, None)
        self._end = len(text)
        self._stack: list[_Open] = []
        self._fields = 0

    def run(self, root: str) -> bytes:
        """Return the whole message."""
        outermost = _Open(self._schema[root], 0, b"", bytearray())
        self._stack.append(outermost)
        while self._next is not None:
            token, top = self._take(), self._stack[-1]
            if token.text == top.closing:
                self._close()
            elif top.item is not None and token.text != b",":
                self._value(*top.item, token)
            elif token.kind == "name" or token.text == b"[":
                self._field(self._named(token))
            elif token.text not in (b",", b";"):
                raise self._damaged(f"{token.text[:20]!r} where a field should be", token.at)
        if len(self._stack) > 1:
            raise self._damaged(f"{len(self._stack) - 1} messages that don't end", self._end)
        return bytes(outermost.out)

    def _scan(self, text: bytes) -> Iterator[_Token]:
        at = 0
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None:
                raise self._damaged(f"{text[at : at + 1]!r} is no text of a message", at)
            if match.lastgroup is not None:
                yield _Token(match.lastgroup, match[match.lastgroup], at)
            at = match.end()

    def _take(self) -> _Token:
        token = self._next
        if token is None:
            raise self._damaged("the text ends within a field", self._end)
        self._next = next(self._tokens, None)
        return token

    def _named(self, token: _Token) -> str:
        """Return the name of a field; one in brackets is an extension, which no schema knows."""
        if token.kind == "name":
            return token.text.decode()
        while self._take().text != b"]":
            pass
        return "[]"

    def _field(self, name: str) -> None:
        self._fields += 1
        if self._fields > MAX_FIELDS:
            raise LimitExceeded(self._path, f"more than {MAX_FIELDS:,} fields", expected="less")
        number, kind = self._stack[-1].fields.get(name, _UNKNOWN)
        if self._next is not None and self._next.text == b":":
            self._take()
        token = self._take()
        if token.text == b"[":
            self._push(_Open({}, 0, b"]", self._stack[-1].out, (number, kind)))
        else:
            self._value(number, kind, token)

    def _value(self, number: int, kind: str, token: _Token) -> None:
        if token.text in _CLOSING:
            known = number if kind in self._schema else 0
            self._push(_Open(self._schema.get(kind, {}), known, _CLOSING[token.text], bytearray()))
        else:
            self._scalar(number, kind, token)

    def _push(self, opened: _Open) -> None:
        if len(self._stack) > MAX_DEPTH:
            found = f"messages nested more than {MAX_DEPTH} deep"
            raise LimitExceeded(self._path, found, expected="less")
        self._stack.append(opened)

    def _close(self) -> None:
        done = self._stack.pop()
        if done.number:
            self._stack[-1].out.extend(_delimited(done.number, done.out))

    def _scalar(self, number: int, kind: str, token: _Token) -> None:
        if token.kind == "mark":
            raise self._damaged(f"{token.text!r} where a value should be", token.at)
        text = self._joined(token) if token.kind == "text" else token.text
        out = self._stack[-1].out
        if kind == "string" and token.kind == "text":
            out.extend(_delimited(number, text))
        elif kind in ("integer", "type"):
            out.extend(_varint(number << 3) + _varint(self._integer(token)))
        elif number and kind != "skipped":
            raise self._damaged(f"{token.text[:20]!r} where a {kind} should be", token.at)

    def _joined(self, token: _Token) -> bytes:
        """Return the bytes that strings, one after the other, stand for."""
        parts = [_unescaped(token.text[1:-1])]
        while self._next is not None and self._next.kind == "text":
            parts.append(_unescaped(self._take().text[1:-1]))
        return b"".join(parts)

    def _integer(self, token: _Token) -> int:
        text = token.text.decode("ascii", "replace")
        if text in self._enum or text in ("true", "false"):
            return self._enum.get(text, int(text == "true"))
        try:
            value = int(text, 8) if re.fullmatch(r"-?0[0-7]+", text) else int(text[:40], 0)
        except ValueError as failure:
            raise self._damaged(f"{text[:20]!r} where a number should be", token.at) from failure
        if not -(1 << 63) <= value < 1 << 64:
            raise self._damaged(f"a number of more than 64 bits: {text[:20]}", token.at)
        return value & (1 << 64) - 1

    def _damaged(self, why: str, at: int) -> DamagedCheckpoint:
        return DamagedCheckpoint(self._path, f"{why} (byte {at:,})", code="pbtxt-damaged")


def _varint(number: int) -> bytes:
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _delimited(number: int, data: bytes | bytearray) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + bytes(data)


def _unescaped(text: bytes) -> bytes:
    return _ESCAPE.sub(_character, text) if b"\\" in text else text


def _character(match: re.Match[bytes]) -> bytes:
    octal, hexadecimal, short, long, plain = match.groups()
    if octal:
        return bytes([int(octal, 8) & 0xFF])
    if hexadecimal:
        return bytes([int(hexadecimal, 16)])
    if short or long:
        return chr(min(int(short or long, 16), 0x10FFFF)).encode("utf-8", "replace")
    return _PLAIN_ESCAPES.get(plain, plain)
