"""Text on a terminal: styles, widths, and tables with fewer columns on a narrow one."""

from __future__ import annotations

import math
import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

from ckpttool.core.text import ELLIPSIS, fitting_prefix, without_middle


class Style(IntEnum):
    """Style of a text, by its number in ECMA-48 (SGR)."""

    BOLD, DIM = 1, 2
    RED, GREEN, YELLOW, CYAN = 31, 32, 33, 36


def styled(text: str, style: Style, colour: bool) -> str:
    """Return the text in a style if colour is wanted."""
    return f"\x1b[{style.value}m{text}\x1b[0m" if colour and text else text


def fit(text: str, room: int) -> str:
    """Return a text, cut at its end if it takes more than ``room`` columns."""
    if display_width(text) <= room:
        return text
    return fitting_prefix(text, room - 1, display_width) + ELLIPSIS


def shorten(name: str, room: int, start: int | None = None) -> str:
    """Return a name, cut in the middle if it takes more than ``room`` columns.

    Args:
        name: The name.
        room: Columns that it may take.
        start: Columns of its beginning to keep; by default a third.
    """
    return without_middle(name, room, display_width, start)


def display_width(text: str) -> int:
    """Return the columns of a text on a terminal: a Chinese character has two."""
    # Rich has a table of the widths of Unicode, and takes long to import, so ASCII is counted without it.
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def pad(text: str, width: int) -> str:
    """Return a text padded with spaces to a width in columns."""
    return text + " " * (width - display_width(text))


# Tables ---------------------------------------------------------------------------------------------


GAP = 2
_NARROWEST_NAME = 40
"""Columns down to which names are shortened before columns of the table are hidden."""
NARROWEST_TEXT = 24
"""Least columns of a name or text; below that, lines are wider than the terminal."""


class TextTable(NamedTuple):
    """A table: its lines, heading first, and the headings of hidden columns."""

    lines: list[str]
    left_out: list[str]

    def indented(self, colour: bool) -> list[str]:
        """Return the lines indented below a sentence, and the hidden headings."""
        heading, *rows = self.lines
        lines = [f"  {styled(heading, Style.DIM, colour)}", *(f"  {row}" for row in rows)]
        if self.left_out:
            lines.append(styled(f"  hidden for lack of width: {', '.join(self.left_out)}", Style.DIM, colour))
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

    Columns whose cells are all empty are left out; names, in the first column, are shortened in the middle.

    Args:
        headings: One for each column.
        rows: Cells of each row, one for each column.
        width: Columns of the terminal.
        left: Headings of columns aligned on the left; the first column always is.
        dispensable: Headings of columns that a narrow table hides, in this order.
        narrowest: Columns down to which names are shortened before columns are hidden.
    """
    # Names are shortened to ``narrowest`` before columns are hidden. Then they get all the room that the
    # remaining columns leave: without a wide column, they may be whole again.
    widths = [max(display_width(line[at]) for line in (headings, *rows)) for at in range(len(headings))]
    shown = [at for at in range(1, len(headings)) if any(row[at] for row in rows)]
    names = [headings[0], *(row[0] for row in rows)]
    room = width - max(map(display_width, shorten_names(names, narrowest)))
    shown, left_out = columns_that_fit(room, shown, headings, widths, dispensable)
    room = max(min(narrowest, NARROWEST_TEXT), width - sum(widths[at] + GAP for at in shown))
    names = shorten_names(names, room)
    widths[0] = max(map(display_width, names))
    lines = []
    for name, row in zip(names, (headings, *rows), strict=True):
        cells = [pad(name, widths[0])]
        cells += [
            pad(row[at], widths[at]) if headings[at] in left else row[at].rjust(widths[at]) for at in shown
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
    """Return the columns that fit, with a gap before each, and the headings of the others, in order."""
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
    """Return an indented line for each pair; the second texts are aligned."""
    width = max((display_width(first) for first, _ in pairs), default=0)
    return [f"  {pad(first, width)}{between}{second}" for first, second in pairs]


def aligned_numbers(cells: Sequence[str]) -> list[str]:
    """Return numbers padded to one width with aligned decimal points; empty cells are kept."""
    before = max(map(_decimal_point, cells), default=0)
    aligned = [" " * (before - _decimal_point(cell)) + cell if cell else "" for cell in cells]
    width = max(map(len, aligned), default=0)
    return [cell.ljust(width) if cell else "" for cell in aligned]


def _decimal_point(cell: str) -> int:
    """Return the position of a number's decimal point, or its length without one."""
    if not is_number(cell):
        return len(cell)
    ends = [at for mark in ".e" if (at := cell.find(mark)) >= 0]
    return min(ends, default=len(cell))


def is_number(cell: str) -> bool:
    """Return whether a cell is a number with digits: neither NaN nor inf."""
    return cell.lstrip("-")[:1].isdigit()


_DIGITS, _MOST_DIGITS = 4, 8
"""Usual digits of a number in a column, and the limit."""
_PERCENT_DECIMALS = 2
"""Decimals if the largest number has three digits before the point, such as percentages: 100.00, 91.25."""


def number_cells(values: Sequence[float | None], series: Sequence[str] | None = None) -> list[str]:
    """Return a column of numbers of one width, with aligned decimal points.

    The numbers of a series have the same number of decimals: as few as distinguish them, unless some would
    be too long.

    Args:
        values: The numbers; None for missing ones.
        series: The series of each; None if all are of one.
    """
    keys = [""] * len(values) if series is None else series
    written = {
        key: iter(_with_decimals([value for value, other in zip(values, keys, strict=True) if other == key]))
        for key in dict.fromkeys(keys)
    }
    return aligned_numbers([next(written[key]) for key in keys])


def _with_decimals(values: Sequence[float | None]) -> list[str]:
    """Return numbers with the same number of decimals."""
    decimals = _decimals([value for value in values if value is not None and math.isfinite(value)])
    cells = []
    for value in values:
        if value is None or math.isnan(value):
            cells.append("" if value is None else "NaN")
        elif decimals is None or math.isinf(value):
            cells.append(f"{value:.{_DIGITS}g}")
        else:
            cells.append(f"{value:.{decimals}f}")
    # Zeros that all numbers end with are removed, one column of decimals at a time: 0.500, 0.250 become 0.50,
    # 0.25, and 10.0, 20.0 become 10, 20.
    numbers = [cell for cell in cells if is_number(cell)]
    while decimals and numbers and all(cell.endswith("0") for cell in numbers):
        decimals -= 1
        cells = [cell[:-1].rstrip(".") if is_number(cell) else cell for cell in cells]
        numbers = [cell for cell in cells if is_number(cell)]
    return cells


def _decimals(known: Sequence[float]) -> int | None:
    """Return the number of decimals that numbers need; None if some of them would be long."""
    # Enough for four digits of the largest number and two of the smallest one, and then more until different
    # numbers look different; but no number gets more than eight digits.
    sizes = [abs(value) for value in known if value]
    if not sizes:
        return 0
    largest = math.floor(math.log10(max(sizes)))
    usual = _DIGITS - 1 - largest if largest != 2 else _PERCENT_DECIMALS
    fewest = max(0, usual, 1 - math.floor(math.log10(min(sizes))))
    if fewest + max(largest, 0) + 1 > _MOST_DIGITS:
        return None
    different = set(known)
    for decimals in range(fewest, _MOST_DIGITS - max(largest, 0)):
        if len({f"{value:.{decimals}f}" for value in different}) == len(different):
            return decimals
    return fewest


def shorten_names(names: Sequence[str], room: int) -> list[str]:
    """Return names shortened to a number of columns; kept distinct if possible."""
    # Shared directories become an ellipsis first. Names that are still too long lose their middle; of all
    # positions of the cut, the one closest to a third that keeps the names distinct is used. Names that no
    # cut distinguishes lose their shared beginning.
    short = {name: name for name in names if display_width(name) <= room}
    if len(short) == len(set(names)):
        return [*names]
    waiting = {name: path for name, path in _brief_paths(names).items() if name not in short}
    short |= {name: path for name, path in waiting.items() if display_width(path) <= room}
    waiting = {name: path for name, path in waiting.items() if name not in short}
    for start in _cut_positions([*waiting.values()], room):
        cuts = {name: shorten(path, room, start) for name, path in waiting.items()}
        counts = Counter([*short.values(), *cuts.values()])
        short |= {name: cut for name, cut in cuts.items() if counts[cut] == 1}
        waiting = {name: path for name, path in waiting.items() if name not in short}
        if not waiting:
            break
    begin = max(0, len(_shared_beginning([*waiting.values()])) - room // 3)
    short |= {name: ELLIPSIS + fit(path[begin:], room - 1) for name, path in waiting.items()}
    return [short[name] for name in names]


def _shared_beginning(names: Sequence[str]) -> str:
    return os.path.commonprefix(list(names))  # noqa: RUF071 - characters are meant, not components


def _brief_paths(names: Iterable[str]) -> dict[str, str]:
    """Return paths with an ellipsis for the directories that have no sibling among them."""
    # a/x/model.pt and a/y/model.pt differ in their second directory alone: …/x/model.pt, …/y/model.pt.
    # Several such directories in a row share an ellipsis.
    siblings: dict[str, set[str]] = defaultdict(set)
    for name in names:
        directory = name
        while directory:
            directory, _, part = directory.rpartition(os.sep)
            siblings[directory].add(part)
    brief = {}
    for name in names:
        parts, directory = list[str](), ""
        *directories, last = name.split(os.sep)
        for part in directories:
            has_siblings = len(siblings[directory]) > 1
            if has_siblings or parts[-1:] != [ELLIPSIS]:
                parts.append(part if has_siblings else ELLIPSIS)
            directory = f"{directory}{os.sep}{part}" if directory else part
        brief[name] = os.sep.join([*parts, last])
    return brief


def _cut_positions(names: Sequence[str], room: int) -> Iterator[int]:
    """Yield the columns to keep of the beginning of names, the best first."""
    # Nothing of the beginning is kept if the cut then removes only a part that all names share.
    if max(map(display_width, names), default=0) - room < display_width(_shared_beginning(names)):
        yield 0
    usual = (room - 1) // 3
    yield from sorted(range(room), key=lambda start: abs(start - usual))


def hanging_lines(head: str, text: str, width: int | None, indent: int) -> list[str]:
    """Return a head and a wrapped text with a hanging indent; the text begins below a long head.

    Args:
        head: Text before it.
        text: Text to wrap between words.
        width: Columns of the terminal; None leaves the line whole.
        indent: Columns before a text below its head.
    """
    start = display_width(head)
    if width is None or start + display_width(text) <= width:
        return [f"{head}{text}".rstrip()]
    import textwrap

    is_below = width - start < NARROWEST_TEXT
    before = " " * (indent if is_below else start)
    lines = textwrap.wrap(
        text, width, initial_indent=before, subsequent_indent=before, break_on_hyphens=False
    )
    return [head.rstrip(), *lines] if is_below else [head + lines[0][start:], *lines[1:]]


def more_line(count: int, colour: bool) -> str:
    """Return the line below a table that has the number of hidden rows."""
    return styled(f"  … and {count:,} more (--all shows them)", Style.DIM, colour)
