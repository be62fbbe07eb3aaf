"""The text of ``list --cadence``: how often each series is saved, what that costs, and what would be best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckpttool.cli.render.tables import hanging_lines, shorten_names
from ckpttool.cli.render.terminal import Style, styled
from ckpttool.core.text import counted, file_size, number, printable
from ckpttool.runs.cadence import Cadence

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
        yield "saved every", f"unknown: {cadence.unknown}"
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
        yield "a save takes", "unknown (--save-time says it)"
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
    """Return how long something takes, in two or three digits and its usual unit."""
    for least, unit, word in _UNITS:
        if seconds >= least:
            value = seconds / unit
            return f"{value:,.0f} {word}" if value >= 9.95 else f"{value:.1f} {word}"
    return f"{seconds:.0f} s" if seconds >= 9.95 else f"{seconds:.2g} s"
