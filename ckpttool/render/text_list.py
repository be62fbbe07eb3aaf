"""What people read of ``list``: aligned text, quick to start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckpttool.render.escape import printable
from ckpttool.render.text_findings import styled
from ckpttool.render.text_numbers import file_size, number
from ckpttool.series.entry import Entry
from ckpttool.series.listing import Listed

_MAX_METRICS = 3
_HEADINGS = ("checkpoint", "format", "epoch", "step", "metrics", "size", "age", "state")
_RIGHT = frozenset({"epoch", "step", "size", "age"})
_AGES = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def list_text(checkpoints: Sequence[Listed], *, now: float, colour: bool = False) -> str:
    """Return one line a checkpoint, below a heading; columns that say nothing are left out.

    Args:
        checkpoints: What to show.
        now: The time, in seconds since 1970, that ages are counted from.
        colour: Whether to write colour.
    """
    rows = [_row(one, now) for one in checkpoints]
    shown = [column for column in range(len(_HEADINGS)) if any(row[column] for row in rows)]
    lines = _aligned([_HEADINGS, *rows], shown)
    faulty = [one.entry.fault is not None for one in checkpoints]
    told = [styled(line, "red", colour and bad) for line, bad in zip(lines[1:], faulty, strict=True)]
    return "\n".join([lines[0], *told])


def _row(listed: Listed, now: float) -> tuple[str, ...]:
    entry = listed.entry
    return (
        printable(entry.path),
        entry.format or "",
        "" if entry.epoch is None else number(entry.epoch),
        "" if entry.step is None else number(entry.step),
        printable(", ".join(_metrics(entry))),
        file_size(entry.nbytes),
        age(now - entry.modified_ns / 10**9),
        printable("; ".join([entry.fault or "readable", *listed.protected])),
    )


def _metrics(entry: Entry) -> Iterator[str]:
    told = {} if entry.loss is None else {"loss": entry.loss}
    for name, value in list({**told, **entry.metrics}.items())[:_MAX_METRICS]:
        yield f"{name} {value:.4g}"


def age(seconds: float) -> str:
    """Return how long ago something was, in its largest unit."""
    for length, unit in _AGES:
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return "now"


def _aligned(rows: Sequence[Sequence[str]], shown: Sequence[int]) -> list[str]:
    widths = {column: max(len(row[column]) for row in rows) for column in shown}
    lines = []
    for row in rows:
        cells = [
            row[column].rjust(widths[column])
            if _HEADINGS[column] in _RIGHT
            else row[column].ljust(widths[column])
            for column in shown
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
