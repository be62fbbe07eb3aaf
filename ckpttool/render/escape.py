"""Names that come out of files, made fit for a terminal."""

from __future__ import annotations

import unicodedata

_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
# Control, format (bidirectional marks, zero-width), surrogate, private use, unassigned, line separators.
_UNFIT = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def printable(text: str) -> str:
    """Return the text with everything that could move a cursor or hide something spelled out."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_spelled, text))


def is_printable(character: str) -> bool:
    """Tell whether a character shows as itself, and moves nothing else."""
    return unicodedata.category(character) not in _UNFIT


def _spelled(character: str) -> str:
    if is_printable(character):
        return character
    if character in _SHORT:
        return _SHORT[character]
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
