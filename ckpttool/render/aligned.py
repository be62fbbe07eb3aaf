"""Tables of plain text that do without some columns where the terminal is narrow."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

GAP = 2
_NARROWEST_NAME = 40
"""Names are shortened no further while there are columns that can go."""


class Aligned(NamedTuple):
    """A table: its lines, heading first, and the headings of columns for which it is too narrow."""

    lines: list[str]
    left_out: list[str]


def aligned(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    width: int,
    left: Collection[str] = (),
    dispensable: Sequence[str] = (),
    narrowest: int = _NARROWEST_NAME,
) -> Aligned:
    """Return rows below their headings, within ``width`` columns where that is possible.

    Columns in which no row says anything are left out silently; names, in the first column, lose their
    middle.

    Args:
        headings: One for each column.
        rows: As many cells each.
        width: Columns of the terminal.
        left: Headings of what is aligned on the left; the first column always is.
        dispensable: Headings of what a narrow table does without, in this order.
        narrowest: Characters of a name that stay where nothing else can go any more.
    """
    shown = [at for at in range(len(headings)) if at == 0 or any(row[at] for row in rows)]
    widths = [max(columns(line[at]) for line in (headings, *rows)) for at in range(len(headings))]
    left_out = []
    for heading in dispensable:
        if min(widths[0], _NARROWEST_NAME) + sum(widths[at] + GAP for at in shown[1:]) <= width:
            break
        at = headings.index(heading)
        if at in shown:
            shown.remove(at)
            left_out.append(heading)
    room = max(narrowest, width - sum(widths[at] + GAP for at in shown[1:]))
    widths[0] = min(widths[0], room)
    lines = []
    for row in (headings, *rows):
        cells = [padded(shortened(row[0], room), widths[0])]
        cells += [
            padded(row[at], widths[at]) if headings[at] in left else row[at].rjust(widths[at])
            for at in shown[1:]
        ]
        lines.append((" " * GAP).join(cells).rstrip())
    return Aligned(lines, left_out)


def shortened(name: str, room: int) -> str:
    """Return a name without its middle, where it takes more columns than there is room."""
    if columns(name) <= room:
        return name
    end = (room - 1) * 2 // 3
    return f"{_begin(name, room - 1 - end)}…{_begin(name[::-1], end)[::-1]}"


def columns(text: str) -> int:
    """Return how many columns of a terminal a text takes: a Chinese character takes two."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def padded(text: str, width: int) -> str:
    """Return a text with spaces behind it, up to a width in columns."""
    return text + " " * (width - columns(text))


def _begin(text: str, width: int) -> str:
    """Return as much of the beginning of a text as fits into a width in columns."""
    fits = text[:width]
    while columns(fits) > width:
        fits = fits[:-1]
    return fits
