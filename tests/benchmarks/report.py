"""The table, for a terminal, for the documentation and for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from tests.benchmarks.rows import Row

_HEADINGS = ("job", "ckpttool, ms", "peer", "peer, ms", "ratio", "bar", "met", "wall, ms", "resident, MB")
_IS_NUMBER = (False, True, False, True, True, False, False, True, True)
_VERDICTS = {True: "yes", False: "NO", None: "–"}
_NOTHING = "–"
_TABLE_WIDTH = 170


def print_table(rows: Sequence[Row]) -> None:
    """Print the table to stdout; a narrow terminal scrolls or wraps whole lines."""
    console = Console()
    console.width = max(console.width, _TABLE_WIDTH)
    table = Table(title="processor time of whole processes, medians")
    for heading, is_number in zip(_HEADINGS, _IS_NUMBER, strict=True):
        table.add_column(heading, justify="right" if is_number else "left")
    for row in rows:
        style = {True: None, False: "bold red", None: "dim"}[row.is_met]
        table.add_row(*_cells(row), style=style)
    console.print(table)
    for row in rows:
        if row.note is not None:
            console.print(f"{row.job}: {row.note}", markup=False)


def markdown(rows: Sequence[Row]) -> str:
    """Return the table as docs/background/performance.md shows it."""
    rules = ["---:" if is_number else "---" for is_number in _IS_NUMBER]
    lines = [_HEADINGS, rules, *map(_cells, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def dumps(rows: Sequence[Row]) -> str:
    """Return the rows as a JSON document."""
    return json.dumps({"rows": [asdict(row) for row in rows]}, indent=2, ensure_ascii=False) + "\n"


def _cells(row: Row) -> list[str]:
    return [
        row.job,
        _number(row.ours),
        row.peer or _NOTHING,
        _number(row.theirs),
        _NOTHING if row.ratio is None else "{:.3g} ({:.3g}–{:.3g})".format(*row.ratio),
        ", ".join(row.bars) or _NOTHING,
        _VERDICTS[row.is_met],
        _number(row.wall),
        _number(row.resident),
    ]


def _number(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:,.0f}"
