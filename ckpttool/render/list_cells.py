"""The cells of a list of checkpoints: which metrics say something, in which digits; who is protected."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from ckpttool.render.escape import printable
from ckpttool.render.text_numbers import file_size, number
from ckpttool.series.listing import Listed, known_metrics

METRICS_SHOWN = 3
"""Metrics that a table on a terminal has columns for; the user can ask for all."""
_DIGITS, _LONGEST = 4, 8
"""Digits of a metric that people read, and that a column of them has at most."""
_OF_PERCENT = 2
"""Decimals where 100 is the largest, and 91.25 may be another."""
FUTURE = "future"
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
"""What frameworks call the two pointers that everybody knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """How a list is shown.

    Attributes:
        now: The time that ages are counted from, in seconds since 1970.
        width: Columns of the terminal; None where it goes elsewhere, and nothing is shortened.
        long: Whether all that is known is shown.
        colour: Whether to write colour.
        wanted: Metrics that somebody asked for: their columns always stay.
    """

    now: float
    width: int | None = None
    long: bool = False
    colour: bool = False
    wanted: tuple[str, ...] = ()

    @property
    def is_cut(self) -> bool:
        """Tell whether what takes much room is left out or shortened."""
        return self.width is not None and not self.long


def age(seconds: float) -> str:
    """Return how long ago something was, in its largest unit; what is dated ahead lies in the future."""
    if seconds <= -_CLOCKS_APART:
        return FUTURE
    for length, unit in _AGES:
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return "now"


def age_of(listed: Listed, look: Look) -> str:
    """Return how long ago a checkpoint was changed."""
    return age(look.now - listed.entry.modified_ns / 10**9)


def moment(listed: Listed) -> str:
    """Return when a checkpoint was changed, in local time; nothing for a time that no calendar holds."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(listed.entry.modified_ns // 10**9))
    except (ValueError, OverflowError, OSError):
        return ""


def moment_utc(nanoseconds: int) -> str | None:
    """Return a time as ISO 8601 in UTC, to the second; None for one beyond what calendars hold."""
    try:
        when = datetime.fromtimestamp(nanoseconds // 10**9, timezone.utc)
    except (ValueError, OverflowError, OSError):
        return None
    return f"{when:%Y-%m-%dT%H:%M:%SZ}"


def count(value: float | None) -> str:
    """Return an epoch or a step, or nothing."""
    return "" if value is None else number(value)


def size(listed: Listed) -> str:
    """Return the size of a checkpoint."""
    return file_size(listed.entry.nbytes)


# Metrics --------------------------------------------------------------------------------------------


def metric_of(listed: Listed, name: str) -> float | None:
    """Return a metric as it is, NaN and infinities too."""
    entry = listed.entry
    return entry.metrics.get(name, entry.loss if name == "loss" else None)


def shown_metrics(rows: Sequence[Listed], look: Look) -> list[str]:
    """Return the metrics that say something, those that were asked for first.

    A loss that is another metric of each checkpoint, under its general name, says nothing new.
    """
    known = known_metrics(row.entry for row in rows)
    if "loss" in known and any(_is_same(rows, "loss", name) for name in known if name != "loss"):
        known.remove("loss")
    wanted = [name for name in dict.fromkeys(look.wanted) if name in known]
    ordered = [*wanted, *(name for name in known if name not in wanted)]
    return ordered[: max(METRICS_SHOWN, len(wanted))] if look.is_cut else ordered


def _is_same(rows: Sequence[Listed], one: str, other: str) -> bool:
    pairs = ((metric_of(row, one), metric_of(row, other)) for row in rows)
    return all(a is None or a == b for a, b in pairs)


def metric_cells(values: Sequence[float | None], series: Sequence[str] | None = None) -> list[str]:
    """Return a column of numbers, all of one width, their decimal points below one another.

    Those of one series have as many decimals each, as few as tell them apart, unless that makes some of them
    long.

    Args:
        values: The numbers; None where there is none.
        series: Which series each is of; without it all are of one.
    """
    keys = [""] * len(values) if series is None else series
    written = {
        key: iter(_written([value for value, own in zip(values, keys, strict=True) if own == key]))
        for key in dict.fromkeys(keys)
    }
    cells = [next(written[key]) for key in keys]
    before = max(map(_point, cells), default=0)
    aligned = [" " * (before - _point(cell)) + cell if cell else "" for cell in cells]
    width = max(map(len, aligned), default=0)
    return [cell.ljust(width) if cell else "" for cell in aligned]


def _written(values: Sequence[float | None]) -> list[str]:
    """Return numbers with as many decimals each."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    decimals = _decimals(known)
    cells = ["" if value is None else _told(value, decimals) for value in values]
    numbers = [cell for cell in cells if _is_number(cell)]
    while decimals and numbers and all(cell.endswith("0") for cell in numbers):
        decimals -= 1
        cells = [cell[:-1].rstrip(".") if _is_number(cell) else cell for cell in cells]
        numbers = [cell for cell in cells if _is_number(cell)]
    return cells


def _decimals(known: Sequence[float]) -> int | None:
    """Return how many decimals numbers need; None where some of them would be long."""
    sizes = [abs(value) for value in known if value]
    if not sizes:
        return 0
    largest = math.floor(math.log10(max(sizes)))
    usual = _DIGITS - 1 - largest if largest != 2 else _OF_PERCENT
    fewest = max(0, usual, 1 - math.floor(math.log10(min(sizes))))
    if fewest + max(largest, 0) + 1 > _LONGEST:
        return None
    different = set(known)
    for decimals in range(fewest, _LONGEST - max(largest, 0)):
        if len({f"{value:.{decimals}f}" for value in different}) == len(different):
            return decimals
    return fewest


def _told(value: float, decimals: int | None) -> str:
    if math.isnan(value):
        return "NaN"
    if decimals is None or math.isinf(value):
        return f"{value:.{_DIGITS}g}"
    return f"{value:.{decimals}f}"


def _is_number(cell: str) -> bool:
    return cell.lstrip("-")[:1].isdigit()  # neither NaN nor inf


def _point(cell: str) -> int:
    """Return where a number's decimal point is, or would be."""
    if not _is_number(cell):
        return len(cell)
    ends = [at for mark in ".e" if (at := cell.find(mark)) >= 0]
    return min(ends, default=len(cell))


# Words ----------------------------------------------------------------------------------------------


def notes(listed: Listed, look: Look, *, is_alone: bool, best: str | None = None) -> str:
    """Return what makes a checkpoint special, and what is wrong with it where there is room for it.

    Args:
        listed: The checkpoint.
        look: How much is told.
        is_alone: Whether it is a series of its own, of which to be the newest means nothing.
        best: The metric by which it is the best, if it is.
    """
    return printable(", ".join(_notes(listed, look, is_alone=is_alone, best=best)))


def _notes(listed: Listed, look: Look, *, is_alone: bool, best: str | None) -> Iterator[str]:
    if listed.is_newest and not is_alone:
        yield "newest"
    if listed.is_best and best is not None:
        yield f"best {best}"
    reasons = listed.protected if look.long else [_SHORT.get(one, one) for one in listed.protected]
    yield from dict.fromkeys(reasons)
    fault, danger = listed.entry.fault, listed.entry.danger
    if fault is not None and not look.is_cut:
        yield fault.partition(": ")[2] or fault
    if danger is not None and not look.is_cut:
        yield danger


def fate(listed: Listed, look: Look) -> str:
    """Return what a policy would do with a checkpoint, and why; nothing where none was asked for."""
    if listed.kept is None:
        return ""
    if not listed.kept:
        return "remove"
    return f"keep: {printable(', '.join(listed.kept))}" if look.long else "keep"
