"""Tables of plain text: columns that line up, and fewer of them on a narrow terminal."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from ckpttool.cli.render.terminal import ELLIPSIS, Style, display_width, pad, shorten, styled

GAP = 2
_NARROWEST_NAME = 40
"""Names are shortened no further while there are columns that can go."""
NARROWEST_TEXT = 24
"""Columns that names and texts have where there is not enough room for both."""


class TextTable(NamedTuple):
    """A table: its lines, heading first, and the headings of columns for which it is too narrow."""

    lines: list[str]
    left_out: list[str]

    def indented(self, colour: bool) -> list[str]:
        """Return the lines as they stand below a sentence, and at last what did not fit."""
        heading, *rows = self.lines
        lines = [f"  {styled(heading, Style.DIM, colour)}", *(f"  {row}" for row in rows)]
        if self.left_out:
            lines.append(styled(f"  too narrow for: {', '.join(self.left_out)}", Style.DIM, colour))
        return lines


def text_table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    width: int,
    left: Collection[str] = (),
    dispensable: Sequence[str] = (),
    narrowest: int = _NARROWEST_NAME,
) -> TextTable:
    """Return rows below their headings, within ``width`` columns if that is possible.

    Columns in which no row says anything are left out silently; names, in the first column, lose their
    middle.

    Args:
        headings: One for each column.
        rows: As many cells each.
        width: Columns of the terminal.
        left: Headings of what is aligned on the left; the first column always is.
        dispensable: Headings of columns that a narrow table leaves out, in this order.
        narrowest: Characters of a name that stay if no column is left to leave out.
    """
    widths = [max(display_width(line[at]) for line in (headings, *rows)) for at in range(len(headings))]
    behind = [at for at in range(1, len(headings)) if any(row[at] for row in rows)]
    room = width - min(widths[0], _NARROWEST_NAME)
    behind, left_out = columns_that_fit(room, behind, headings, widths, dispensable)
    room = max(narrowest, width - sum(widths[at] + GAP for at in behind))
    widths[0] = min(widths[0], room)
    lines = []
    for row in (headings, *rows):
        cells = [pad(shorten(row[0], room), widths[0])]
        cells += [
            pad(row[at], widths[at]) if headings[at] in left else row[at].rjust(widths[at]) for at in behind
        ]
        lines.append((" " * GAP).join(cells).rstrip())
    return TextTable(lines, left_out)


def columns_that_fit(
    room: int,
    columns: Iterable[int],
    headings: Sequence[str],
    widths: Sequence[int],
    dispensable: Iterable[str],
) -> tuple[list[int], list[str]]:
    """Return the columns that stay, with a gap before each, and the headings of those left out, in order."""
    shown, left_out = list(columns), []
    for heading in dispensable:
        if sum(GAP + widths[at] for at in shown) <= room:
            break
        at = headings.index(heading)
        if at in shown:
            shown.remove(at)
            left_out.append(heading)
    return shown, left_out


def aligned_pairs(pairs: Sequence[tuple[str, str]], between: str = "  ") -> list[str]:
    """Return a line for each pair, indented, the second ones below one another."""
    width = max((display_width(first) for first, _ in pairs), default=0)
    return [f"  {pad(first, width)}{between}{second}" for first, second in pairs]


def aligned_numbers(cells: Sequence[str]) -> list[str]:
    """Return a column of numbers of one width, their decimal points below one another; empty cells stay."""
    before = max(map(_decimal_point, cells), default=0)
    aligned = [" " * (before - _decimal_point(cell)) + cell if cell else "" for cell in cells]
    width = max(map(len, aligned), default=0)
    return [cell.ljust(width) if cell else "" for cell in aligned]


def _decimal_point(cell: str) -> int:
    """Return where a number's decimal point is, or would be."""
    if not is_number(cell):
        return len(cell)
    ends = [at for mark in ".e" if (at := cell.find(mark)) >= 0]
    return min(ends, default=len(cell))


def is_number(cell: str) -> bool:
    """Tell whether a cell is a number with digits: neither NaN nor inf."""
    return cell.lstrip("-")[:1].isdigit()


def shorten_names(names: Sequence[str], room: int) -> list[str]:
    """Return names as far as there is room: what all of them begin with goes first."""
    excess = max(map(display_width, names), default=0) - room
    shared = os.path.commonprefix(list(names))  # noqa: RUF071 - characters are meant, not components
    if 0 < excess < len(shared):
        names = [ELLIPSIS + name[excess + 1 :] for name in names]
    return [shorten(name, room) for name in names]


def hanging_lines(head: str, text: str, width: int | None, indent: int) -> list[str]:
    """Return a text behind a head, its further lines below its first; below the head if that is long.

    Args:
        head: Stands before it.
        text: Is wrapped between words.
        width: Columns of the terminal; None leaves the line whole.
        indent: Columns before a text below its head.
    """
    start = display_width(head)
    if width is None or start + display_width(text) <= width:
        return [f"{head}{text}".rstrip()]
    is_below = width - start < NARROWEST_TEXT
    before = " " * (indent if is_below else start)
    lines = textwrap.wrap(text, width, initial_indent=before, subsequent_indent=before)
    return [head.rstrip(), *lines] if is_below else [head + lines[0][start:], *lines[1:]]


def more_line(count: int, colour: bool) -> str:
    """Return the line below a table that not all rows are in."""
    return styled(f"  … and {count:,} more (--all shows them)", Style.DIM, colour)
