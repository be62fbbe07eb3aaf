"""What people read of ``list``: aligned text, quick to start. Series below headings, or one table of all."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from ckpttool.render.aligned import aligned, shortened
from ckpttool.render.escape import printable
from ckpttool.render.list_cells import (
    FUTURE,
    Look,
    age_of,
    count,
    fate,
    metric_cells,
    metric_of,
    moment,
    notes,
    shown_metrics,
    size,
)
from ckpttool.render.text_findings import styled
from ckpttool.render.text_numbers import file_size, number
from ckpttool.report import counted
from ckpttool.series.listing import Listed, ListedSeries, Listing, total_bytes

_ANY_WIDTH = 1 << 30
_INDENT = "  "
_MOST_NOTES = 32
"""Characters of what is said behind a row on a terminal; a link may have any name."""
_NARROWEST_NAME = 24
_LEFT = ("format", "policy", "state", "holds", "changed", "notes")

Column = tuple[str, list[str]]


def list_text(listing: Listing, look: Look) -> str:
    """Return the series below their headings; what is a series of its own comes last, in one table."""
    alone = [one.checkpoints[0] for one in listing.series if len(one.checkpoints) == 1]
    several = [one for one in listing.series if len(one.checkpoints) > 1]
    if not several:
        return flat_text(listing, look)
    left_out: dict[str, None] = {}
    parts = []
    for one in several:
        table, narrow = _series_table(one, listing, look)
        parts.append("\n".join([*_heading(one, listing, look), table]))
        left_out |= dict.fromkeys(narrow)
    if alone:
        place = _place(alone)
        title = counted(len(alone), "single checkpoint") + (f" in {printable(place)}" if place else "")
        table, narrow = _table(alone, listing, look, place)
        parts.append(f"{_bold(_shortened(title, look), look)}\n{table}")
        left_out |= dict.fromkeys(narrow)
    return "\n\n".join([*parts, *_footer(listing, left_out, look)])


def flat_text(listing: Listing, look: Look) -> str:
    """Return one line a checkpoint, below a heading, with its whole path."""
    rows = listing.checkpoints
    columns = _columns(rows, listing, look, None)
    text, left_out = _drawn([printable(row.entry.path) for row in rows], columns, rows, look, "")
    return "\n\n".join([text, *_left_out(left_out)])


# Around the tables ----------------------------------------------------------------------------------


def _heading(series: ListedSeries, listing: Listing, look: Look) -> Iterator[str]:
    yield _bold(_shortened(printable(series.key), look), look)
    yield from _wrapped(list(_facts(series, listing, look)), look.width)


def _facts(series: ListedSeries, listing: Listing, look: Look) -> Iterator[str]:
    together, place = f"{len(series.checkpoints):,} checkpoints", _place(series.checkpoints)
    yield together if series.key.startswith(place) else f"{together} in {printable(place)}"
    if series.format:
        yield series.format
    yield file_size(series.nbytes)
    for name, span in (("epoch", series.epochs), ("step", series.steps)):
        if span is not None:
            first, last = (number(value) for value in span)
            yield f"{name} {first}" if first == last else f"{name}s {first}–{last}"
    if series.newest is not None:
        age = age_of(series.newest, look)
        yield {"now": "newest just now", FUTURE: "newest dated in the future"}.get(age, f"newest {age} ago")
    yield _states(series)
    if listing.best is not None:
        yield _best_fact(series, listing.best)
    if any(one.kept is not None for one in series.checkpoints):
        gone = [one.entry for one in series.checkpoints if one.kept == ()]
        yield f"{len(gone):,} to remove" + (f" ({file_size(total_bytes(gone))})" if gone else "")


def _states(series: ListedSeries) -> str:
    states = Counter(one.state for one in series.checkpoints)
    if len(states) == 1:
        return f"all {next(iter(states))}"
    return ", ".join(f"{many:,} {state}" for state, many in states.items())


def _best_fact(series: ListedSeries, metric: str) -> str:
    """Return the best of a series, and where it is."""
    best = series.best
    value = None if best is None else metric_of(best, metric)
    if best is None or value is None:
        return printable(f"no {metric}")
    place = next(
        (
            f" ({name} {number(at)})"
            for name, at in (("epoch", best.entry.epoch), ("step", best.entry.step))
            if at is not None
        ),
        "",
    )
    return printable(f"best {metric} {value:.6g}{place}")


def _wrapped(facts: Sequence[str], width: int | None) -> Iterator[str]:
    """Yield facts in lines that break between them alone."""
    line = ""
    for fact in facts:
        longer = f"{line}, {fact}" if line else fact
        if line and width is not None and len(_INDENT) + len(longer) + 1 > width:
            yield f"{_INDENT}{line},"
            longer = fact
        line = longer
    yield f"{_INDENT}{line}"


def _footer(listing: Listing, left_out: dict[str, None], look: Look) -> Iterator[str]:
    """Yield what all series come to, and what is not shown."""
    lines = []
    if len(listing.series) > 1:
        together = counted(len(listing.checkpoints), "checkpoint")
        nbytes = file_size(total_bytes(one.entry for one in listing.checkpoints))
        lines.append(f"{together} in {len(listing.series):,} series, {nbytes}")
    lines += _left_out(left_out)
    if lines:
        yield "\n".join(lines)


def _left_out(headings: Iterable[str]) -> list[str]:
    told = printable(", ".join(headings))
    return [f"not shown: {told} (-v shows all)"] if told else []


def _shortened(text: str, look: Look) -> str:
    return text if look.width is None else shortened(text, look.width)


# Tables ---------------------------------------------------------------------------------------------


def _series_table(series: ListedSeries, listing: Listing, look: Look) -> tuple[str, list[str]]:
    """Return the rows of one series, and what is left out of them."""
    rows = series.checkpoints
    place = _place(rows)
    columns = _columns(rows, listing, look, series)
    return _drawn([_below(row, place) for row in rows], columns, rows, look, _INDENT)


def _table(rows: Sequence[Listed], listing: Listing, look: Look, place: str) -> tuple[str, list[str]]:
    """Return checkpoints of any series below one directory, and what is left out of them."""
    columns = _columns(rows, listing, look, None)
    return _drawn([_below(row, place) for row in rows], columns, rows, look, _INDENT)


def _directory(row: Listed) -> str:
    """Return the directory that a checkpoint lies in; nothing for the current one."""
    directory = os.path.normpath(row.entry.directory)
    return "" if directory == os.curdir else directory


def _place(rows: Sequence[Listed]) -> str:
    """Return the directory that checkpoints lie below; nothing for the current one."""
    return os.path.commonpath([_directory(row) for row in rows])


def _below(row: Listed, place: str) -> str:
    """Return a checkpoint's path below a directory that it lies in."""
    return printable(os.path.join(_directory(row)[len(place) :].lstrip(os.sep), row.entry.name))


def _columns(
    rows: Sequence[Listed], listing: Listing, look: Look, series: ListedSeries | None
) -> list[Column]:
    """Return the columns behind the names; those of one series leave out what its heading says."""
    alone = {one.key for one in listing.series if len(one.checkpoints) == 1} if series is None else set()
    columns: list[Column] = []
    if series is None or series.format is None:
        columns.append(("format", [row.entry.format or "" for row in rows]))
    columns.append(("epoch", [count(row.entry.epoch) for row in rows]))
    columns.append(("step", [count(row.entry.step) for row in rows]))
    of_series = ["" if row.entry.group in alone else row.entry.group for row in rows]
    for name in shown_metrics(rows, look):
        columns.append((printable(name), metric_cells([metric_of(row, name) for row in rows], of_series)))
    columns.append(("size", [size(row) for row in rows]))
    if look.long:
        columns.append(("changed", [moment(row) for row in rows]))
        columns.append(("holds", [printable(row.entry.holds) for row in rows]))
    else:
        columns.append(("age", [age_of(row, look) for row in rows]))
    columns.append(("policy", [fate(row, look) for row in rows]))
    if series is None or look.long or len({row.state for row in rows}) > 1:
        columns.append(("state", [row.state for row in rows]))
    told = [notes(row, look, is_alone=row.entry.group in alone, best=listing.best) for row in rows]
    columns.append(("notes", [_cut(one, _MOST_NOTES) if look.is_cut else one for one in told]))
    return columns


def _drawn(
    names: Sequence[str], columns: Sequence[Column], rows: Sequence[Listed], look: Look, indent: str
) -> tuple[str, list[str]]:
    """Return lines below their headings, and the headings of what is left out."""
    headings = ["checkpoint", *(heading for heading, _ in columns)]
    cells = [list(row) for row in zip(names, *(column for _, column in columns), strict=True)]
    width = _ANY_WIDTH if not look.is_cut or look.width is None else look.width - len(indent)
    dispensable = _dispensable(columns, rows, look) if look.is_cut else []
    lines, left_out = aligned(
        headings, cells, width=width, left=_LEFT, dispensable=dispensable, narrowest=_NARROWEST_NAME
    )
    hidden = [] if not look.is_cut else [*_hidden_metrics(rows, look), *left_out]
    told = [f"{indent}{_dim(_cut(lines[0], width), look)}"]
    for line, row in zip(lines[1:], rows, strict=True):
        told.append(f"{indent}{_coloured(_cut(line, width), row, look)}")
    return "\n".join(told), hidden


def _hidden_metrics(rows: Sequence[Listed], look: Look) -> list[str]:
    shown = shown_metrics(rows, look)
    everything = Look(now=look.now, wanted=look.wanted)
    return [name for name in shown_metrics(rows, everything) if name not in shown]


def _dispensable(columns: Sequence[Column], rows: Sequence[Listed], look: Look) -> list[str]:
    """Return what a narrow table does without, in this order: metrics, the last first, then the rest."""
    metrics = [printable(name) for name in shown_metrics(rows, look) if name not in look.wanted]
    has_epochs = any(row.entry.epoch is not None for row in rows)
    others = [*(["step"] if has_epochs else []), "format", "age"]
    headings = {heading for heading, _ in columns}
    return [name for name in (*metrics[:0:-1], *others, *metrics[:1]) if name in headings]


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else f"{text[: room - 1]}…"


# Colour ---------------------------------------------------------------------------------------------


def _coloured(line: str, row: Listed, look: Look) -> str:
    if row.entry.fault is not None or row.entry.danger is not None:
        return styled(line, "red", look.colour)
    if row.kept == ():
        return styled(line, "yellow", look.colour)
    return styled(line, "green", look.colour and row.is_best)


def _bold(text: str, look: Look) -> str:
    import typer

    return typer.style(text, bold=True) if look.colour else text


def _dim(text: str, look: Look) -> str:
    import typer

    return typer.style(text, dim=True) if look.colour else text
