"""TOML documents: reading, and changing a list of strings in place, with every other byte preserved."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

_STRING = re.compile(r'"""(?:\\.|[^\\])*?"{3,5}|\'\'\'.*?\'{3,5}|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'', re.DOTALL)
_COMMENT = re.compile(r"#[^\n]*")
_ASSIGNED = re.compile(r"""(?P<key>(?:"(?:\\.|[^"\\\n])*"|'[^'\n]*'|[^\n"'=#])+)=[ \t]*""")
_INDENT = "  "
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)
_TOKEN = re.compile(r"""\"(?:\\.|[^"\\])*"?|'[^']*'?|#.*|[\w-]+|\S""")
_MOST_DOTS = 128
"""Limit on dots in a key: the parser's memory grows with their square, to gigabytes for a key of 64 KiB."""


def parse_toml(text: str) -> dict[str, Any]:
    """Return a document's tables.

    Raises:
        ValueError: The text isn't TOML, or is nested too deeply, or a key has too many dots.
    """
    # tomli has the same interface as the standard library's module since Python 3.11.
    loads = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli").loads
    if any(line.count(".") > _MOST_DOTS and _dots_in_key(line) > _MOST_DOTS for line in text.split("\n")):
        raise ValueError(f"a key has more than {_MOST_DOTS} dots")
    try:
        tables: dict[str, Any] = loads(text)
        repr(tables)  # raises for integers of thousands of digits, which no later message could show
    except RecursionError as failure:
        raise ValueError("it is nested too deeply") from failure
    return tables


def _dots_in_key(line: str) -> int:
    """Return the most dots that a key on a line may have; all if a multi-line string may be on it."""
    # Dots in strings and comments are no part of a key, so the line is split into tokens. With a
    # multi-line string it is unknown which part of the line is a string, and all dots count.
    if '"""' in line or "'''" in line:
        return line.count(".")
    most = dots = 0
    previous = ""
    for token in _TOKEN.findall(line):
        dots = dots + 1 if token == "." else dots if previous == "." else 0
        most, previous = max(most, dots), token
    return most


@dataclass(frozen=True, slots=True)
class _Array:
    """Positions in a document of an array, from ``[`` to after ``]``, of its strings, and of its commas."""

    start: int
    end: int
    strings: tuple[tuple[int, int], ...]
    commas: tuple[int, ...]

    def comma_after(self, index: int) -> int | None:
        """Return the position of the comma after a string, or None."""
        (_, end), following = self.strings[index], self.strings[index + 1 : index + 2]
        limit = following[0][0] if following else self.end
        return next((at for at in self.commas if end <= at < limit), None)


def change_strings(
    text: str, key: str, *, renamed: Mapping[str, str | None] | None = None, added: Sequence[str] = ()
) -> str:
    """Return a document with changes to a list of strings under a top-level key.

    Args:
        text: The document.
        key: A bare key; if it is missing, it is added before the first table.
        renamed: New strings by their old ones; None removes a string.
        added: Strings to append.

    Raises:
        ValueError: The key isn't a list of strings, or can't be edited in place.
    """
    tables = parse_toml(text)
    old = tables.get(key, [])
    if not isinstance(old, list) or not all(isinstance(name, str) for name in old):
        raise ValueError(f"{key} is not a list of strings")
    new = [kept for name in old if (kept := (renamed or {}).get(name, name)) is not None] + [*added]
    if new == old:
        return text
    if key not in tables:
        text = _add_key(text, key)
    array = _find_array(text, key)
    # From the last to the first, so that positions of earlier strings remain valid.
    for index in reversed(range(len(array.strings))):
        start, end = _scan_array(text, array.start).strings[index]
        name = _unquote(text[start:end])
        other = (renamed or {}).get(name, name)
        if other is None:
            text = _remove_string(text, _scan_array(text, array.start), index)
        elif other != name:
            text = text[:start] + quote(other) + text[end:]
    for name in added:
        text = _add_string(text, _scan_array(text, array.start), quote(name))
    # The edits above rest on regular expressions: so the result is parsed, and must differ in this list only.
    if parse_toml(text) != tables | {key: new}:
        raise ValueError(f"{key} can't be edited in place")
    return text


def quote(text: str) -> str:
    """Return a text as a basic string of TOML."""
    import json

    text.encode()  # raises for surrogates, which TOML can't have
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def as_toml(value: Any) -> str:
    """Return plain data without None as a TOML value on one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, Mapping):
        items = ", ".join(f"{_as_key(key)} = {as_toml(one)}" for key, one in value.items())
        return f"{{{items}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(as_toml, value))}]"
    return repr(value)


def _as_key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else quote(key)


def _remove_string(text: str, array: _Array, index: int) -> str:
    """Return the text without a string and its comma, and without the line if nothing else is on it."""
    start, end = array.strings[index]
    comma = array.comma_after(index)
    if comma is not None:
        if text[end:comma].strip():  # a comment is between them
            text = text[:comma] + text[comma + 1 :]
        else:
            end = comma + 1
    elif index and not text[array.strings[index - 1][1] : start].strip(" \t,"):
        start = array.strings[index - 1][1]
    line_start, line_end = text.rfind("\n", 0, start) + 1, text.find("\n", end)
    if line_end >= 0 and not text[line_start:start].strip() and not text[end:line_end].strip():
        return text[:line_start] + text[line_end + 1 :]
    if text[end:].startswith(" ") and not text[end:].lstrip(" ").startswith(("#", "]")):
        end += 1
    return text[:start] + text[end:]


def _add_string(text: str, array: _Array, token: str) -> str:
    """Return the text with another string, on a separate line if the last one has a separate line."""
    if not array.strings:
        at = array.start + 1
        if text.startswith(("\n", "\r\n"), at):
            newline = "\r\n" if text[at] == "\r" else "\n"
            return f"{text[:at]}{newline}{_INDENT}{token},{text[at:]}"
        separator = "," if "#" in text[at : array.end] else ""
        return f"{text[:at]}{token}{separator}{text[at:]}"
    start, end = array.strings[-1]
    comma = array.comma_after(len(array.strings) - 1)
    line_start, line_end = text.rfind("\n", 0, start) + 1, text.find("\n", end, array.end)
    if line_end < 0 or text[line_start:start].strip() or (comma is not None and comma > line_end):
        place = end if comma is None else comma
        return f"{text[:place]}, {token}{text[place:]}"
    newline = "\r\n" if text[line_end - 1] == "\r" else "\n"
    tail = line_end + 1 - len(newline)
    line = f"{newline}{text[line_start:start]}{token},"
    separator = "" if comma is not None else ","
    return f"{text[:end]}{separator}{text[end:tail]}{line}{text[tail:]}"


def _add_key(text: str, key: str) -> str:
    """Return the text with an empty list, after the last key before the first table."""
    newline = "\r\n" if "\r\n" in text else "\n"
    line = f"{key} = [{newline}]{newline}"
    statements = list(_statements(text))
    tables = [start for start, name, _ in statements if name is None]
    ends = [end for _, name, end in statements if name is not None]
    if not ends and tables:
        return f"{line}{newline}{text}"
    place = ends[-1] if ends else len(text)
    at = text.find("\n", place) + 1
    if not at:
        return f"{text}{newline if text else ''}{line}" if text and not text.endswith("\n") else text + line
    return text[:at] + line + text[at:]


def _find_array(text: str, key: str) -> _Array:
    for start, name, _ in _statements(text):
        if name is None:
            break
        match = _ASSIGNED.match(text, start)
        if match is not None and _unquote(name) == key and text[match.end()] == "[":
            return _scan_array(text, match.end())
    raise ValueError(f"{key} is not a list of strings")


def _statements(text: str) -> Iterator[tuple[int, str | None, int]]:
    """Yield start, key and end of each statement before the first table, which comes last with key None."""
    at = 0
    while at < len(text):
        if text[at].isspace():
            at += 1
        elif text[at] == "#":
            at = _end_of_comment(text, at)
        elif text[at] == "[":
            yield at, None, at
            return
        else:
            match = _ASSIGNED.match(text, at)
            if match is None:
                return
            end = _end_of_value(text, match.end())
            yield at, match["key"].strip(), end
            at = end


def _end_of_comment(text: str, at: int) -> int:
    match = _COMMENT.match(text, at)
    return match.end() if match else at + 1


def _end_of_value(text: str, at: int) -> int:
    depth = 0
    while at < len(text):
        if match := _STRING.match(text, at):
            at = match.end()
            continue
        if text[at] == "#" or (text[at] == "\n" and not depth):
            if not depth:
                return at
            at = _end_of_comment(text, at)
            continue
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(text[at], 0)
        at += 1
    return at


def _scan_array(text: str, start: int) -> _Array:
    strings: list[tuple[int, int]] = []
    commas: list[int] = []
    at = start + 1
    while at < len(text) and text[at] != "]":
        if match := _STRING.match(text, at):
            strings.append(match.span())
            at = match.end()
        elif text[at] == "#":
            at = _end_of_comment(text, at)
        else:
            if text[at] == ",":
                commas.append(at)
            at += 1
    return _Array(start, at + 1, tuple(strings), tuple(commas))


def _unquote(token: str) -> str:
    """Return the text of a string token or a key."""
    if token[:1] not in "\"'":
        return token
    return str(parse_toml(f"value = {token}")["value"])
