"""The header of a NumPy array file: a magic number, and a Python dictionary literal.

The literal has a small parser here, for strings, integers, booleans, tuples, lists and dictionaries only:
Python's own parser can be made to take much memory, or crash, by nested literals.

Source: NumPy ``numpy/lib/_format_impl.py``.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import Any, NamedTuple

from ckpttool.core.errors import DamagedCheckpoint, Truncated, require_at_most
from ckpttool.core.readable import Readable

MAGIC = b"\x93NUMPY"
MAX_HEADER = 1 << 20
"""Limit in bytes on a header; NumPy's own default is 10,000."""
MAX_AXES = 64
MAX_DEPTH = 20
MAX_TOKENS = 100_000

_SHORT = 512
"""Limit in bytes on headers that are cached."""
_VERSIONS = {(1, 0): 2, (2, 0): 4, (3, 0): 4}
_MAX_DIGITS = 19  # of a 64-bit number
_TOKEN = re.compile(
    r"""[ \t\r\n\f]*(?:(?P<text>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|(?P<number>-?(?:[1-9]\d*|0+))L?"""
    r"""|(?P<word>True|False|None)|(?P<sign>[][(){},:]))"""
)
_ESCAPE = re.compile(r"""\\(?:[\\'"nrt]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8})""")
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_WORDS = {"True": True, "False": False, "None": None}
_SIMPLE = re.compile(r"(?P<order>[<>|=]?)(?P<kind>[?a-zA-Z])(?P<size>\d{0,9})(?P<unit>\[[\w/]*\])?")
_UNIT = re.compile(r"\[(?:\d{0,9}(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)|generic)\]")
_POINTER = 8
_WIDTHS = {"b": (1,), "i": (1, 2, 4, 8), "u": (1, 2, 4, 8), "f": (2, 4, 8, 16), "c": (8, 16, 32), "O": (4, 8)}
"""Sizes in bytes that types of a kind may have; objects take the size of a pointer, whatever is stated."""
_CHARACTERS = {
    **dict.fromkeys("?bBc", 1),
    **dict.fromkeys("ehH", 2),
    **dict.fromkeys("fiI", 4),
    **dict.fromkeys("dFlLqQnNpP", 8),
    **dict.fromkeys("gD", 16),
    "G": 32,
    "O": _POINTER,
}
"""Sizes in bytes of types of one character."""


class ArrayHeader(NamedTuple):
    """Header of an array.

    Attributes:
        descr: The type: a text like ``<f4``, or for structured elements a list of fields.
        data: Offset of the elements.
    """

    descr: Any
    fortran_order: bool
    shape: tuple[int, ...]
    data: int

    @property
    def has_objects(self) -> bool:
        """Return whether the elements are Python objects, in a pickle."""
        return _has_objects(self.descr)


class _Malformed(ValueError):
    """Text that isn't a literal, or not one that NumPy writes."""


def read_npy_header(source: Readable, start: int, end: int, where: str | None = None) -> ArrayHeader:
    """Return the header of the array that begins at ``start``."""
    path, found = source.path, f"an array of {end - start:,} bytes"
    if end - start < len(MAGIC) + 4:
        raise Truncated(path, found, expected="a header", where=where)
    head = source.read(start, len(MAGIC) + 2, where)
    width = _VERSIONS.get((head[6], head[7]))
    if not head.startswith(MAGIC) or width is None:
        raise _header_error(
            path, f"a header that starts with {head.hex(' ')}", where, "an array of version 1 to 3"
        )
    at = start + len(head)
    if at + width > end:
        raise Truncated(path, found, expected="a header", where=where)
    length = int.from_bytes(source.read(at, width, where), "little")
    require_at_most(path, MAX_HEADER, length, "a header of {:,} bytes", where)
    data = at + width + length
    if data > end:
        raise Truncated(path, found, expected=f"{data - start:,} for the header alone", where=where)
    raw = source.read(at + width, length, where)
    try:
        # Version 1 has a header of up to 64 KiB, version 2 of up to 4 GiB, version 3 names in UTF-8.
        text = raw.decode("utf-8" if head[6] == 3 else "latin-1")
        descr, fortran_order, shape = _repeated_fields(text) if length <= _SHORT else _fields(text)
    except ValueError as failure:
        raise _header_error(path, f"a header that can't be read: {failure}", where) from failure
    return ArrayHeader(descr, fortran_order, shape, data)


def _header_error(path: str, found: str, where: str | None, expected: str | None = None) -> DamagedCheckpoint:
    return DamagedCheckpoint(path, found, expected=expected, where=where, code="npy-header")


def _fields(text: str) -> tuple[Any, bool, tuple[int, ...]]:
    literal = _Parser(text).parse()
    if not isinstance(literal, dict) or set(literal) != {"descr", "fortran_order", "shape"}:
        raise _Malformed("not a dictionary of descr, fortran_order and shape")
    descr, fortran_order, shape = literal["descr"], literal["fortran_order"], literal["shape"]
    if not isinstance(fortran_order, bool):
        raise _Malformed("fortran_order is not a boolean")
    if not isinstance(shape, tuple) or len(shape) > MAX_AXES:
        raise _Malformed("the shape is not a tuple")
    if not all(type(length) is int and length >= 0 for length in shape):
        raise _Malformed("the shape has an invalid length")
    if not isinstance(descr, str | list | tuple):
        raise _Malformed("descr is not a type")
    return descr, fortran_order, shape


_repeated_fields = lru_cache(128)(_fields)
"""``_fields`` with a cache: many arrays have the same type and shape, and so the same header."""


class _Parser:
    """Parser of one literal, after which only white space may follow."""

    def __init__(self, text: str) -> None:
        self._text, self._at, self._tokens = text, 0, 0

    def parse(self) -> Any:
        literal = self._parse_value(*self._next_token(), 0)
        if self._text[self._at :].strip(" \n"):
            raise _Malformed("data after the dictionary")
        return literal

    def _next_token(self) -> tuple[str, str]:
        match = _TOKEN.match(self._text, self._at)
        self._tokens += 1
        if match is None or match.lastgroup is None or self._tokens > MAX_TOKENS:
            raise _Malformed(f"invalid literal at character {self._at}")
        self._at = match.end()
        return match.lastgroup, match[match.lastgroup]

    def _parse_value(self, kind: str, token: str, depth: int) -> Any:
        if kind == "text":
            return _unescape(token[1:-1])
        if kind == "number":
            if len(token) > _MAX_DIGITS:
                raise _Malformed("a number of more than 64 bits")
            return int(token)
        if kind == "word":
            return _WORDS[token]
        if token not in _CLOSING or depth >= MAX_DEPTH:
            raise _Malformed(f"unexpected {token!r} at character {self._at}")
        return self._parse_dictionary(depth) if token == "{" else self._parse_sequence(token, depth)

    def _parse_dictionary(self, depth: int) -> dict[str, Any]:
        members: dict[str, Any] = {}
        kind, token = self._next_token()
        while token != "}" or kind != "sign":
            key = self._parse_value(kind, token, depth + 1)
            if not isinstance(key, str) or key in members or self._next_token() != ("sign", ":"):
                raise _Malformed("invalid or duplicate key")
            members[key] = self._parse_value(*self._next_token(), depth + 1)
            kind, token = self._token_after_comma("}")
        return members

    def _parse_sequence(self, opening: str, depth: int) -> Any:
        closing, items, is_after_comma = _CLOSING[opening], [], False
        kind, token = self._next_token()
        while token != closing or kind != "sign":
            items.append(self._parse_value(kind, token, depth + 1))
            end = self._at
            kind, token = self._token_after_comma(closing)
            is_after_comma = "," in self._text[end : self._at]
        if opening == "[":
            return items
        return tuple(items) if len(items) != 1 or is_after_comma else items[0]  # (2) is a number

    def _token_after_comma(self, closing: str) -> tuple[str, str]:
        """Return the token after a comma, or the closing one."""
        kind, token = self._next_token()
        if kind != "sign" or token not in (",", closing):
            raise _Malformed(f"missing comma at character {self._at}")
        return self._next_token() if token == "," else (kind, token)


def _unescape(text: str) -> str:
    if "\\" not in text:
        return text
    if "\\" in _ESCAPE.sub("", text):
        raise _Malformed("an escape that NumPy doesn't write")
    return text.encode("latin-1", "backslashreplace").decode("unicode_escape")


# Element types ---------------------------------------------------------------------------------------


def itemsize(descr: Any, depth: int = 0) -> int:
    """Return the size of an element in bytes."""
    if isinstance(descr, str):
        match = _SIMPLE.fullmatch(descr)
        if match is None:
            raise _Malformed(f"unknown type {descr[:40]!r}")
        return _bytes_of_type(match["kind"], match["size"], match["unit"])
    if depth > MAX_DEPTH or not isinstance(descr, list | tuple):
        raise _Malformed("a type that is invalid or nested too deeply")
    if isinstance(descr, tuple) and len(descr) == 2 and isinstance(descr[1], tuple):
        return _field_bytes(descr[0], descr[1], depth)
    if not all(isinstance(field, tuple) and len(field) in (2, 3) for field in descr):
        raise _Malformed("an invalid field")
    return sum(_field_bytes(field[1], field[2] if len(field) == 3 else (), depth) for field in descr)


def _bytes_of_type(kind: str, size: str, unit: str | None) -> int:
    """Return the size of an element in bytes; raise if NumPy doesn't know the type."""
    if kind in "Mm":
        if (size == "8" and (unit is None or _UNIT.fullmatch(unit))) or not size + (unit or ""):
            return 8
    elif unit is None:
        if kind in "SUV":
            return int(size or 0) * (4 if kind == "U" else 1)
        if not size and kind in _CHARACTERS:
            return _CHARACTERS[kind]
        if size and int(size) in _WIDTHS.get(kind, ()):
            return _POINTER if kind == "O" else int(size)
    raise _Malformed(f"a type {kind}{size}{unit or ''}, which NumPy doesn't know")


def _field_bytes(descr: Any, shape: Any, depth: int) -> int:
    shape = (shape,) if type(shape) is int else shape
    if not isinstance(shape, tuple) or not all(type(length) is int and length >= 0 for length in shape):
        raise _Malformed("an invalid field shape")
    return itemsize(descr, depth + 1) * math.prod(shape)


def _has_objects(descr: Any) -> bool:
    if isinstance(descr, str):
        return descr.lstrip("<>|=").startswith("O")
    if not isinstance(descr, list | tuple):
        return False
    return any(_has_objects(part[1]) for part in descr if isinstance(part, tuple) and len(part) in (2, 3))
