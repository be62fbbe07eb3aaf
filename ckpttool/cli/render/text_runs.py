"""The table of runs above a list: their hyper-parameters side by side, what differs first."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

from ckpttool.cli.render.tables import aligned_numbers, hanging_lines, text_table
from ckpttool.cli.render.terminal import Style, fit, styled
from ckpttool.cli.render.text_list import (
    ANY_WIDTH,
    INDENT,
    ListStyle,
    age_words,
    left_out_lines,
    metric_cells,
    metric_of,
)
from ckpttool.core.text import counted, file_size, printable
from ckpttool.runs.listing import ListedRun, Listing, differing_parameters
from ckpttool.storage import fs

_WIDEST_VALUE = 24
_MOST_COMMON = 12
"""How many of the hyper-parameters are shown that all runs share."""


def runs_text(listing: Listing, style: ListStyle) -> str:
    """Return a line for each run; nothing where there is one, or nothing to tell them apart by."""
    runs = listing.runs
    if len(runs) < 2 or not (listing.best or any(run.hyper_parameters for run in runs)):
        return ""
    above = fs.commonpath([os.path.dirname(fs.normpath(run.path)) for run in runs])
    names = [os.path.relpath(run.path, above or os.curdir) for run in runs]
    differing = differing_parameters(runs)
    columns = [
        *((name, _values([run.hyper_parameters.get(name) for run in runs])) for name in differing),
        *_metric_column(runs, listing.best),
        ("checkpoints", [f"{len(run.checkpoints):,}" for run in runs]),
        ("size", [file_size(run.nbytes) for run in runs]),
        ("age", [age_words(style.now - run.modified_ns / 10**9) for run in runs]),
    ]
    headings = ["run", *(printable(heading) for heading, _ in columns)]
    cells = [list(row) for row in zip(map(printable, names), *(cells for _, cells in columns), strict=True)]
    width = ANY_WIDTH if style.width is None or not style.is_cut else style.width - len(INDENT)
    table, left_out = text_table(
        headings,
        cells,
        width=width,
        dispensable=["age", "size", "checkpoints", *headings[len(differing) : 1 : -1]]
        if style.is_cut
        else [],
        narrowest=_WIDEST_VALUE,
    )
    heading, *lines = [fit(line, width) for line in table]
    where = f" in {printable(above)}" if above else ""
    return "\n".join(
        [
            styled(f"{counted(len(runs), 'run')}{where}", Style.BOLD, style.colour),
            f"{INDENT}{styled(heading, Style.DIM, style.colour)}",
            *(INDENT + line for line in lines),
            *_common_lines(runs, differing, style),
            *left_out_lines(left_out, style),
        ]
    )


def _metric_column(runs: Sequence[ListedRun], metric: str | None) -> Iterator[tuple[str, list[str]]]:
    if metric is not None:
        values = [None if run.best is None else metric_of(run.best, metric) for run in runs]
        yield f"best {metric}", metric_cells(values)


def _common_lines(runs: Sequence[ListedRun], differing: Sequence[str], style: ListStyle) -> list[str]:
    """Return what all runs share, as far as it is worth a line or two."""
    first: Mapping[str, object] = runs[0].hyper_parameters
    common = [f"{name}={_value(value)}" for name, value in first.items() if name not in differing]
    common = [one for one in common if len(one) <= 2 * _WIDEST_VALUE]
    shown = common if not style.is_cut else common[:_MOST_COMMON]
    if left := len(common) - len(shown):
        shown.append(f"and {left:,} more")
    lines = (
        hanging_lines("same in all: ", printable(", ".join(shown)), style.width, len(INDENT)) if shown else []
    )
    return [styled(f"{INDENT}{line}", Style.DIM, style.colour) for line in lines]


def _values(values: Sequence[object]) -> list[str]:
    """Return a column of values; numbers have their decimal points below one another."""
    cells = [_value(value) for value in values]
    return aligned_numbers(cells) if all(isinstance(one, int | float | None) for one in values) else cells


def _value(value: object) -> str:
    return "" if value is None else fit(printable(str(value)), _WIDEST_VALUE)
