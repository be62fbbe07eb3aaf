"""Text out of files made fit to be shown: what could move a cursor or hide something is spelled out."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable

ELLIPSIS = "…"
LONGEST = 4096
"""Characters of one name or sentence: the longest path that Linux opens. A file may hold longer names."""
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
# Control, format (bidirectional marks, zero-width), surrogate, private use, unassigned, line separators.
_UNFIT = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def printable(text: str) -> str:
    """Return the text with everything that could move a cursor or hide something spelled out."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(one if is_printable(one) else _escape(one) for one in text)


def _escape(character: str) -> str:
    if character in _SHORT:
        return _SHORT[character]
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def is_printable(character: str) -> bool:
    """Tell whether a character shows as itself, and moves nothing else."""
    return unicodedata.category(character) not in _UNFIT


def cut(text: str, room: int) -> str:
    """Return a text without its end if it has more characters than there is room."""
    return text if len(text) <= room else f"{text[: room - 1]}{ELLIPSIS}"


def without_middle(text: str, room: int, width: Callable[[str], int] = len, start: int | None = None) -> str:
    """Return a text without its middle if it is wider than the room.

    Args:
        text: The text.
        room: Width that it may take.
        width: Measures a text, in characters by default.
        start: Width of its beginning that stays; by default a third.
    """
    if width(text) <= room:
        return text
    end = (room - 1) * 2 // 3 if start is None else room - 1 - start
    first, last = fitting_prefix(text, room - 1 - end, width), fitting_prefix(text[::-1], end, width)
    return f"{first}{ELLIPSIS}{last[::-1]}"


def fitting_prefix(text: str, room: int, width: Callable[[str], int]) -> str:
    """Return the longest beginning of a text that fits into a width."""
    fits = text[:room]
    while width(fits) > room:
        fits = fits[:-1]
    return fits


def printable_cut(text: str, longest: int = LONGEST) -> str:
    """Return a text out of a file, spelled out where it isn't printable and cut where it is endless."""
    return cut(printable(text[: longest + 1]), longest)
