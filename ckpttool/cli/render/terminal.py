"""Text on a terminal: styles, and how many columns it takes."""

from __future__ import annotations

from enum import IntEnum

from ckpttool.core.text import ELLIPSIS, fitting_prefix, without_middle


class Style(IntEnum):
    """How a text stands out: what a terminal calls it (ECMA-48, SGR)."""

    BOLD, DIM = 1, 2
    RED, GREEN, YELLOW, CYAN = 31, 32, 33, 36


def styled(text: str, style: Style, colour: bool) -> str:
    """Return the text in a style if colour is wanted."""
    return f"\x1b[{style.value}m{text}\x1b[0m" if colour and text else text


def fit(text: str, room: int) -> str:
    """Return a text without its end if it takes more columns than there is room."""
    if display_width(text) <= room:
        return text
    return fitting_prefix(text, room - 1, display_width) + ELLIPSIS


def shorten(name: str, room: int, start: int | None = None) -> str:
    """Return a name without its middle if it takes more columns than there is room.

    Args:
        name: The name.
        room: Columns that it may take.
        start: Columns of its beginning that stay; by default a third.
    """
    return without_middle(name, room, display_width, start)


def display_width(text: str) -> int:
    """Return how many columns of a terminal a text takes: a Chinese character takes two."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def pad(text: str, width: int) -> str:
    """Return a text with spaces behind it, up to a width in columns."""
    return text + " " * (width - display_width(text))
