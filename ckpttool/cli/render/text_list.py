"""The text of ``list``: a table for each series, or one of all; a table of runs; intervals of saves."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpttool.cli.render.terminal import (
    Style,
    aligned_numbers,
    display_width,
    fit,
    hanging_lines,
    number_cells,
    shorten_names,
    styled,
    text_table,
)
from ckpttool.core.text import counted, file_size, number, printable
from ckpttool.runs.listing import (
    ListedCheckpoint,
    ListedRun,
    ListedSeries,
    Listing,
    differing_parameters,
    known_metrics,
    total_bytes,
)
from ckpttool.runs.reasons import Code, code_of, reason_text
from ckpttool.storage import fs

if TYPE_CHECKING:
    from ckpttool.runs.cadence import Cadence

METRICS_SHOWN = 3
"""Columns of metrics on a terminal, unless the user requests more."""
FUTURE = "future"
ANY_WIDTH = 1 << 30
INDENT = "  "
_MOST_NOTES, _SHARE_OF_NOTES = 32, 5
"""Columns of notes on a terminal: a limit, and for narrow ones the divisor of their width."""
_NARROWEST_NAME = 32
"""Columns down to which names are shortened before columns of the table are hidden."""
_LEFT = ("format", "policy", "state", "holds", "changed", "notes")
_CLOCKS_APART = 60
"""Seconds by which a file server's clock may be ahead of ours."""
_AGES = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))
_SHORT = {
    "best_model_checkpoint": "best",
    "best_model_path": "best",
    "named best": "best",
    "last_checkpoint": "latest",
    "latest_checkpointed_iteration.txt": "latest",
}
"""Short names of well-known pointers of frameworks."""
Column = tuple[str, list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListStyle:
    """How a list is shown.

    Attributes:
        now: The current time in seconds since 1970, for ages.
        width: Columns of the terminal; None without one: nothing is shortened then.
        long: Whether all details are shown.
        colour: Whether to write colour.
        wanted: Requested metrics, whose columns are always shown.
    """

    now: float
    width: int | None = None
    long: bool = False
    colour: bool = False
    wanted: tuple[str, ...] = ()

    @property
    def is_cut(self) -> bool:
        """Return whether long contents are shortened or hidden."""
        return self.width is not None and not self.long


def list_text(listing: Listing, style: ListStyle) -> str:
    """Return the series below their headings; series of one checkpoint are in one table at the end."""
    alone = [one.checkpoints[0] for one in listing.series if len(one.checkpoints) == 1]
    several = [one for one in listing.series if len(one.checkpoints) > 1]
    if not several:
        return flat_text(listing, style)
    left_out: dict[str, None] = {}
    parts = []
    keys = [printable(one.key) for one in several]
    titles = keys if style.width is None else shorten_names(keys, style.width)
    for series, title in zip(several, titles, strict=True):
        facts = [*_series_facts(series, style), _states(series.checkpoints), *_outcomes(series, listing)]
        table, narrow = _table_below(series.checkpoints, listing, style)
        heading = styled(title, Style.BOLD, style.colour)
        parts.append("\n".join([heading, *_wrap_facts(facts, style.width), table]))
        left_out |= dict.fromkeys(narrow)
    if alone:
        directory = _common_directory(alone)
        where = f" in {printable(directory)}" if directory else ""
        title = styled(f"{counted(len(alone), 'single checkpoint')}{where}", Style.BOLD, style.colour)
        size = file_size(total_bytes(one.entry for one in alone))
        facts = [*_only_format(alone), size, _states(alone)]
        table, narrow = _table_below(alone, listing, style)
        parts.append("\n".join([title, *_wrap_facts(facts, style.width), table]))
        left_out |= dict.fromkeys(narrow)
    footer = [_total_line(listing)] if len(listing.series) > 1 or listing.unread else []
    footer += left_out_lines(left_out, style)
    return "\n\n".join([*parts, *(["\n".join(footer)] if footer else [])])


def flat_text(listing: Listing, style: ListStyle) -> str:
    """Return one line per checkpoint, below a heading, with its whole path."""
    rows = listing.checkpoints
    names = [printable(row.entry.path) for row in rows]
    columns = _columns(rows, listing, style, is_summed_up=style.is_cut)
    text, left_out = _draw_table(names, columns, rows, style, "")
    facts = [_total_line(listing), *_only_format(rows), _states(rows)]
    is_summed_up = style.is_cut or listing.unread
    footer = list(_wrap_facts(facts, style.width, "")) if is_summed_up else []
    footer += left_out_lines(left_out, style)
    return "\n\n".join([text, *(["\n".join(footer)] if footer else [])])


def tab_separated_text(listing: Listing, now: float) -> str:
    """Return a line for each checkpoint for programs: fields between tabs, without a heading.

    They are the path, format, epoch, step, bytes, the time of its last change, the state, the action of a
    policy, notes, and all metrics as ``name=value``. Unknown fields are empty, and nothing is shortened.
    """
    # Scripts cut fields by their numbers, so ``printable`` escapes tabs and line breaks in names.
    style = ListStyle(now=now, long=True)
    alone = {one.key for one in listing.series if len(one.checkpoints) == 1}
    lines = []
    for row in listing.checkpoints:
        entry = row.entry
        metrics = {"loss": entry.loss, **entry.metrics}
        fields = [
            printable(entry.path),
            entry.format or "",
            *("" if value is None else repr(value) for value in (entry.epoch, entry.step)),
            str(entry.nbytes),
            local_time(row),
            row.state,
            policy_cell(row, style),
            notes_cell(row, style, is_alone=entry.group in alone, best=listing.best),
            " ".join(f"{printable(name)}={value!r}" for name, value in metrics.items() if value is not None),
        ]
        lines.append("\t".join(fields))
    return "\n".join(lines)


# Above and below the tables -------------------------------------------------------------------------


def _series_facts(series: ListedSeries, style: ListStyle) -> Iterator[str]:
    count, directory = f"{len(series.checkpoints):,} checkpoints", _common_directory(series.checkpoints)
    yield count if series.key.startswith(directory) else f"{count} in {printable(directory)}"
    parts = dict.fromkeys(
        os.path.relpath(os.path.join(part.directory, part.fields.blank), row.entry.directory)
        for row in series.checkpoints
        for part in row.entry.parts[1:]
    )
    if parts:
        more = f" and {len(parts) - 1:,} more" if len(parts) > 1 else ""
        yield printable(f"with {next(iter(parts))}{more}")
    yield from _only_format(series.checkpoints)
    yield file_size(series.nbytes)
    for name, span in (("epoch", series.epochs), ("step", series.steps)):
        if span is not None:
            first, last = (number(value) for value in span)
            yield f"{name} {first}" if first == last else f"{name}s {first}–{last}"
    if series.newest is not None:
        age = age_of(series.newest, style)
        yield {"now": "newest just now", FUTURE: "newest dated in the future"}.get(age, f"newest {age} ago")


def _only_format(rows: Sequence[ListedCheckpoint]) -> list[str]:
    """Return the format of all checkpoints, as far as known; an empty list if they differ."""
    formats = {row.entry.format for row in rows if row.entry.format is not None}
    return [*formats] if len(formats) == 1 else []


def _states(rows: Sequence[ListedCheckpoint]) -> str:
    states = Counter(row.state for row in rows)
    if len(states) == 1:
        return f"all {next(iter(states))}" if len(rows) > 1 else next(iter(states))
    return ", ".join(f"{count:,} {state}" for state, count in states.items())


def _outcomes(series: ListedSeries, listing: Listing) -> Iterator[str]:
    if listing.best is not None:
        yield _best_fact(series, listing.best)
    if any(one.kept is not None for one in series.checkpoints):
        removed = [one.entry for one in series.checkpoints if one.kept == ()]
        yield f"{len(removed):,} to remove" + (f" ({file_size(total_bytes(removed))})" if removed else "")
        if slim := sum(one.is_slimmed for one in series.checkpoints):
            yield f"{slim:,} to slim"


def _total_line(listing: Listing) -> str:
    count = counted(len(listing.checkpoints), "checkpoint")
    series = "" if len(listing.series) == 1 else f" in {len(listing.series):,} series"
    unread = f", {len(listing.unread):,} not read" if listing.unread else ""
    return f"{count}{series}, {file_size(total_bytes(one.entry for one in listing.checkpoints))}{unread}"


def _best_fact(series: ListedSeries, metric: str) -> str:
    """Return the best value of a series, and its epoch or step."""
    best = series.best
    value = None if best is None else metric_of(best, metric)
    if best is None or value is None:
        return printable(f"no {metric}")
    when = ""
    if best.entry.epoch is not None:
        when = f" (epoch {number(best.entry.epoch)})"
    elif best.entry.step is not None:
        when = f" (step {number(best.entry.step)})"
    return printable(f"best {metric} {value:.6g}{when}")


def _wrap_facts(facts: Sequence[str], width: int | None, indent: str = INDENT) -> Iterator[str]:
    """Yield facts in lines that are broken only between facts."""
    line = ""
    for fact in facts:
        longer = f"{line}, {fact}" if line else fact
        if line and width is not None and len(indent) + display_width(longer) + 1 > width:
            yield f"{indent}{line},"
            longer = fact
        line = longer
    yield f"{indent}{line}"


def left_out_lines(headings: Iterable[str], style: ListStyle) -> list[str]:
    """Return the line that names the hidden columns."""
    names = printable(", ".join(headings))
    if not names:
        return []
    lines = hanging_lines("not shown (use -v): ", names, style.width, len(INDENT))
    return [styled(line, Style.DIM, style.colour) for line in lines]


# Tables ---------------------------------------------------------------------------------------------


def _table_below(
    rows: Sequence[ListedCheckpoint], listing: Listing, style: ListStyle
) -> tuple[str, list[str]]:
    """Return rows with their paths below their common directory, and the headings of hidden columns."""
    directory = _common_directory(rows)
    names = [
        printable(os.path.join(_directory(row)[len(directory) :].lstrip(os.sep), row.entry.name))
        for row in rows
    ]
    return _draw_table(names, _columns(rows, listing, style, is_summed_up=True), rows, style, INDENT)


def _directory(row: ListedCheckpoint) -> str:
    """Return the directory of a checkpoint; an empty text for the current one."""
    directory = fs.normpath(row.entry.directory)
    return "" if directory == os.curdir else directory


def _common_directory(rows: Sequence[ListedCheckpoint]) -> str:
    """Return the common directory of checkpoints; an empty text for the current one."""
    return fs.commonpath([_directory(row) for row in rows])


def _columns(
    rows: Sequence[ListedCheckpoint], listing: Listing, style: ListStyle, *, is_summed_up: bool
) -> list[Column]:
    """Return the columns after the names, without those that a line above or below the table sums up."""
    alone = {one.key for one in listing.series if len(one.checkpoints) == 1}
    columns: list[Column] = []
    if not (is_summed_up and _only_format(rows)):
        columns.append(("format", [row.entry.format or "" for row in rows]))
    columns.append(("epoch", [count_cell(row.entry.epoch) for row in rows]))
    columns.append(("step", [count_cell(row.entry.step) for row in rows]))
    of_series = ["" if row.entry.group in alone else row.entry.group for row in rows]
    for name in shown_metrics(rows, style):
        columns.append((printable(name), number_cells([metric_of(row, name) for row in rows], of_series)))
    columns.append(("size", [file_size(row.entry.nbytes) for row in rows]))
    if style.long:
        columns.append(("changed", [local_time(row) for row in rows]))
        columns.append(("holds", [printable(row.entry.content_summary) for row in rows]))
    else:
        columns.append(("age", [age_of(row, style) for row in rows]))
    columns.append(("policy", [policy_cell(row, style) for row in rows]))
    if not is_summed_up or len({row.state for row in rows}) > 1:
        columns.append(("state", [row.state for row in rows]))
    notes = [notes_cell(row, style, is_alone=row.entry.group in alone, best=listing.best) for row in rows]
    if style.is_cut and style.width is not None:
        room = min(_MOST_NOTES, style.width // _SHARE_OF_NOTES)
        notes = [fit(one, room) for one in notes]
    columns.append(("notes", notes))
    return columns


def _draw_table(
    names: Sequence[str],
    columns: Sequence[Column],
    rows: Sequence[ListedCheckpoint],
    style: ListStyle,
    indent: str,
) -> tuple[str, list[str]]:
    """Return lines below their headings, and the headings of hidden columns."""
    # Lines wider than the terminal would be broken in the middle of a row. So columns are hidden, and if
    # names and notes are still too wide, the line is cut; ``-v`` shows all of it.
    headings = ["checkpoint", *(heading for heading, _ in columns)]
    cells = [list(row) for row in zip(names, *(column for _, column in columns), strict=True)]
    width = ANY_WIDTH if not style.is_cut or style.width is None else style.width - len(indent)
    dispensable = _dispensable(columns, rows, style) if style.is_cut else []
    lines, left_out = text_table(
        headings, cells, width=width, left=_LEFT, dispensable=dispensable, narrowest=_NARROWEST_NAME
    )
    heading, *lines = [fit(line, width) for line in lines]
    drawn = [styled(heading, Style.DIM, style.colour)]
    drawn += [_colour_row(line, row, style) for line, row in zip(lines, rows, strict=True)]
    hidden: list[str] = []
    if style.is_cut:
        shown = shown_metrics(rows, style)
        all_metrics = shown_metrics(rows, ListStyle(now=style.now, wanted=style.wanted))
        hidden = [*(name for name in all_metrics if name not in shown), *left_out]
    return "\n".join(f"{indent}{line}" for line in drawn), hidden


def _dispensable(columns: Sequence[Column], rows: Sequence[ListedCheckpoint], style: ListStyle) -> list[str]:
    """Return the headings that a narrow table hides, in this order: further metrics first, the first last."""
    metrics = [printable(name) for name in shown_metrics(rows, style) if name not in style.wanted]
    has_epochs = any(row.entry.epoch is not None for row in rows)
    others = ["format", "age", "size", *(["step"] if has_epochs else [])]
    headings = {heading for heading, _ in columns}
    return [name for name in (*metrics[:0:-1], *others, *metrics[:1]) if name in headings]


# Colour ---------------------------------------------------------------------------------------------


def _colour_row(line: str, row: ListedCheckpoint, style: ListStyle) -> str:
    if row.entry.fault is not None or row.entry.danger is not None:
        return styled(line, Style.RED, style.colour)
    if row.kept == ():
        return styled(line, Style.YELLOW, style.colour)
    return styled(line, Style.GREEN, style.colour and row.is_best)


# Cells: times and counts ----------------------------------------------------------------------------


def age_of(listed: ListedCheckpoint, style: ListStyle) -> str:
    """Return the age of a checkpoint's newest file."""
    return age_words(style.now - listed.entry.modified_ns / 10**9)


def age_words(seconds: float) -> str:
    """Return an age in its largest unit, or that a time is in the future."""
    # A time that is slightly in the future is "now": a file server's clock may be ahead of ours.
    if seconds <= -_CLOCKS_APART:
        return FUTURE
    for length, unit in _AGES:
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return "now"


def local_time(listed: ListedCheckpoint) -> str:
    """Return when a checkpoint was changed, as local time with its offset from UTC.

    Empty for a time outside of the calendar.
    """
    from datetime import datetime

    try:
        when = datetime.fromtimestamp(listed.entry.modified_ns // 10**9).astimezone()
        return when.isoformat(" ")
    except (ValueError, OverflowError, OSError):
        return ""


def count_cell(value: float | None) -> str:
    """Return an epoch or a step, or nothing."""
    return "" if value is None else number(value)


# Cells: metrics -------------------------------------------------------------------------------------


def metric_of(listed: ListedCheckpoint, name: str) -> float | None:
    """Return a recorded metric, which may be NaN or infinite."""
    entry = listed.entry
    return entry.metrics.get(name, entry.loss if name == "loss" else None)


def shown_metrics(rows: Sequence[ListedCheckpoint], style: ListStyle) -> list[str]:
    """Return the metrics for columns, the requested ones first.

    ``loss`` is omitted if it equals another metric of each checkpoint.
    """
    # Checkpoints often have the loss twice, as ``loss`` and as ``val_loss``, say. The column with the
    # specific name is shown then, and the other one, which is ckpttool's reading of it, isn't.
    known = known_metrics(row.entry for row in rows)
    losses = [(row, loss) for row in rows if (loss := metric_of(row, "loss")) is not None]
    others = [name for name in known if name != "loss"]
    if "loss" in known and any(all(metric_of(row, name) == loss for row, loss in losses) for name in others):
        known.remove("loss")
    wanted = [name for name in dict.fromkeys(style.wanted) if name in known]
    ordered = [*wanted, *(name for name in known if name not in wanted)]
    return ordered[: max(METRICS_SHOWN, len(wanted))] if style.is_cut else ordered


# Cells: notes ---------------------------------------------------------------------------------------


def notes_cell(listed: ListedCheckpoint, style: ListStyle, *, is_alone: bool, best: str | None = None) -> str:
    """Return the marks of a checkpoint, and its fault if there is room.

    Args:
        listed: The checkpoint.
        style: How much is shown.
        is_alone: Whether it is the only one of its series, so that "newest" is meaningless.
        best: The metric that ``is_best`` refers to.
    """
    return printable(", ".join(_note_words(listed, style, is_alone=is_alone, best=best)))


def _note_words(
    listed: ListedCheckpoint, style: ListStyle, *, is_alone: bool, best: str | None
) -> Iterator[str]:
    if listed.is_newest and not is_alone:
        yield "newest"
    if listed.is_best and best is not None:
        yield f"best {best}"
    short = {} if style.long else _SHORT
    reasons = sorted(listed.protected, key=lambda reason: code_of(reason) is Code.NAMED_IN)
    words = list(dict.fromkeys(short.get(one, reason_text(one)) for one in reasons))
    yield from words
    note = listed.remark.note
    if note is not None and not any(note in one for one in words):  # a pin's reason may have the note
        yield f"note: {' '.join(note.split())}"
    fault, danger = listed.entry.fault, listed.entry.danger
    if fault is not None and not style.is_cut:
        yield fault.partition(": ")[2] or fault
    if danger is not None and not style.is_cut:
        yield danger


def policy_cell(listed: ListedCheckpoint, style: ListStyle) -> str:
    """Return the action of a policy for a checkpoint, with the reason; an empty text without a policy."""
    if listed.kept is None:
        return ""
    if not listed.kept:
        return "remove"
    verb = "slim" if listed.is_slimmed else "keep"
    return f"{verb}: {printable(', '.join(map(reason_text, listed.kept)))}" if style.long else verb


# Runs -----------------------------------------------------------------------------------------------


_WIDEST_VALUE = 24
_MOST_COMMON = 12
"""Limit on shown hyper-parameters that all runs share."""


def runs_text(listing: Listing, style: ListStyle) -> str:
    """Return a line for each run; an empty text for a single run, or without differences to show."""
    runs = listing.runs
    if len(runs) < 2 or not (listing.best or any(run.hyper_parameters for run in runs)):
        return ""
    above = fs.commonpath([os.path.dirname(fs.normpath(run.path)) for run in runs])
    names = [os.path.relpath(run.path, above or os.curdir) for run in runs]
    differing = differing_parameters(runs)
    columns = [(name, _values([run.hyper_parameters.get(name) for run in runs])) for name in differing]
    if (metric := listing.best) is not None:
        values = [None if run.best is None else metric_of(run.best, metric) for run in runs]
        columns.append((f"best {metric}", number_cells(values)))
    columns += [
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


def _common_lines(runs: Sequence[ListedRun], differing: Sequence[str], style: ListStyle) -> list[str]:
    """Return the hyper-parameters that all runs share, in a line or two."""
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
    """Return a column of values; if all are numbers, their decimal points are aligned."""
    cells = [_value(value) for value in values]
    return aligned_numbers(cells) if all(isinstance(one, int | float | None) for one in values) else cells


def _value(value: object) -> str:
    return "" if value is None else fit(printable(str(value)), _WIDEST_VALUE)


# Cadence --------------------------------------------------------------------------------------------


_LABEL = 14
_UNITS = (
    (2 * 31_557_600, 31_557_600, "years"),
    (172_800, 86_400, "days"),
    (5_400, 3_600, "h"),
    (90, 60, "min"),
)


def cadence_text(
    cadences: Sequence[tuple[str, Cadence]],
    *,
    mtbf: float | None,
    width: int | None = None,
    colour: bool = False,
) -> str:
    """Return some lines for each series, by its key."""
    keys = [printable(key) for key, _ in cadences]
    titles = keys if width is None else shorten_names(keys, width)
    parts = []
    for title, (_, cadence) in zip(titles, cadences, strict=True):
        lines = [styled(title, Style.BOLD, colour)]
        for label, value in _facts(cadence, mtbf):
            lines += hanging_lines(f"  {label:<{_LABEL}} ", value, width, 4)
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _facts(cadence: Cadence, mtbf: float | None) -> Iterator[tuple[str, str]]:
    if cadence.interval is None:
        yield "saved every", f"unknown: {cadence.unknown_reason}"
    else:
        pauses = f" ({counted(cadence.pauses, 'pause')})" if cadence.pauses else ""
        yield "saved every", f"{_with_counts(cadence.interval, cadence.steps, cadence.epochs)}{pauses}"
    growth = "" if cadence.daily_bytes is None else f", {file_size(int(cadence.daily_bytes))} a day"
    yield "size", f"{file_size(int(cadence.nbytes))} each{growth}"
    if cadence.free_bytes is not None:
        full = cadence.seconds_until_full
        until = "" if full is None else f", full in {span(full)} if nothing is removed"
        yield "disk", f"{file_size(cadence.free_bytes)} free{until}"
    if cadence.save_time is None:
        yield "a save takes", "unknown (set --save-time)"
    else:
        share = cadence.share_of_time
        part = "" if share is None else f", {100 * share:.2g} % of the time"
        yield "a save takes", f"{span(cadence.save_time)}{part}"
    if mtbf is not None and cadence.best_interval is not None:
        best = _with_counts(cadence.best_interval, cadence.best_steps, cadence.best_epochs)
        yield "best", f"every {best}, for a failure every {span(mtbf)}"


def _with_counts(seconds: float, steps: float | None, epochs: float | None) -> str:
    """Return an interval in time, in steps and in epochs."""
    parts = [span(seconds)]
    if steps is not None:
        parts.append(counted(max(1, round(steps)), "step"))
    if epochs is not None:
        parts.append(f"{number(float(f'{epochs:.2g}'))} epoch{'' if epochs == 1 else 's'}")
    return ", ".join(parts)


def span(seconds: float) -> str:
    """Return a duration in two or three digits and its usual unit."""
    for least, unit, word in _UNITS:
        if seconds >= least:
            value = seconds / unit
            return f"{value:,.0f} {word}" if value >= 9.95 else f"{value:.1f} {word}"
    return f"{seconds:.0f} s" if seconds >= 9.95 else f"{seconds:.2g} s"
