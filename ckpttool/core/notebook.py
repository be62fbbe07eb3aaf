"""Results as HTML for notebooks: small tables without style and script, of escaped text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import islice

from ckpttool.core.text import number, printable_cut

_SHOWN_ROWS = 40
_LONGEST_CELL = 200


def html_table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[object]], count: int) -> str:
    """Return a table of the first rows below a caption; ``count`` is the number of all rows.

    None is an empty cell. Names come from files that may be hostile: each text is escaped, for HTML and for
    a terminal.
    """
    shown = [*islice(rows, _SHOWN_ROWS)]
    more = f"<p>… and {count - len(shown):,} more</p>" if count > len(shown) else ""
    lines = [_line("th", columns), *(_line("td", row) for row in shown)]
    return f"<p>{escape(printable_cut(caption))}</p>" + (
        f"<table>{''.join(lines)}</table>{more}" * bool(shown)
    )


def _line(tag: str, cells: Iterable[object]) -> str:
    return f"<tr>{''.join(f'<{tag}>{_cell(one)}</{tag}>' for one in cells)}</tr>"


def _cell(value: object) -> str:
    text = "" if value is None else number(value) if isinstance(value, int | float) else str(value)
    return escape(printable_cut(text, _LONGEST_CELL))
