"""What people read of ``diff`` for a series: a row a checkpoint, and what moved since the one before."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ckpttool.core.report import counted
from ckpttool.ops.difference import Difference
from ckpttool.ops.drift import Drift, DriftStep
from ckpttool.render.diff_summary import tensors_line, tolerance_words
from ckpttool.render.numbers import amount, number
from ckpttool.render.tables import TextTable, text_table
from ckpttool.render.terminal import printable

HEADINGS = (
    "checkpoint",
    "epoch",
    "step",
    "loss",
    "norm",
    "changed",
    "L2",
    "relative",
    "max |Δ|",
    "in",
    "cosine",
)
_DISPENSABLE = ("in", "cosine", "L2", "norm")


def drift_text(drift: Drift, *, colour: bool = False, width: int = 100) -> str:
    """Return the answer in one line, then a row for each checkpoint in the order given.

    Each row says what changed since the one above; the first one has nothing above it.
    """
    bold, end, dim = ("\x1b[1m", "\x1b[0m", "\x1b[2m") if colour else ("", "", "")
    table = drift_table(drift, width - 2)
    lines = [f"{bold}{_summary(drift)}{end}", "", f"  {dim}{table.lines[0]}{end}"]
    lines += [f"  {line}" for line in table.lines[1:]]
    if table.left_out:
        lines.append(f"{dim}  too narrow for: {', '.join(table.left_out)}{end}")
    with_more = [step.difference for step in drift.steps if _has_more(step.difference)]
    if with_more:
        lines.append("")
        names = dict(zip((point.path for point in drift.points), short_names(drift), strict=True))
        lines += [f"  {printable(names[one.b.path])}: {tensors_line(one)}" for one in with_more]
    return "\n".join(lines)


def _summary(drift: Drift) -> str:
    count = counted(len(drift.points), "checkpoint")
    if drift.equal:
        return (
            f"all equal{tolerance_words(drift.steps[0].difference.tolerance)}: {count}"
            if drift.steps
            else count
        )
    moved = sum(not step.difference.equal for step in drift.steps)
    largest = max(drift.steps, key=lambda step: step.relative or 0.0)
    summary = f"{count}: {moved:,} of {counted(len(drift.steps), 'step')} changed something"
    if not largest.relative:
        return summary
    path = printable(short_names(drift)[drift.steps.index(largest) + 1])
    return f"{summary}, most of all the one to {path} (relative {amount(largest.relative)})"


def _has_more(step: Difference) -> bool:
    """Tell whether there is more to say of a step than its row says."""
    unpaired = step.added or step.removed or step.renamed
    unsure = step.broken or step.not_compared or step.undecided
    return bool(unpaired or unsure or any(one.kind != "values" for one in step.changed))


def drift_table(drift: Drift, width: int) -> TextTable:
    """Return a row for each checkpoint."""
    return text_table(HEADINGS, drift_cells(drift), width=width, left=("in",), dispensable=_DISPENSABLE)


def drift_cells(drift: Drift) -> list[tuple[str, ...]]:
    """Return the cells of each row."""
    steps: Sequence[DriftStep | None] = [None, *drift.steps]
    rows = []
    for name, point, step in zip(short_names(drift), drift.points, steps, strict=True):
        counts = ["" if value is None else number(value) for value in (point.epoch, point.step, point.loss)]
        norm = "" if point.norm is None else f"{point.norm:.6g}"
        rows.append((printable(name), *counts, norm, *(("",) * 6 if step is None else _step_cells(step))))
    return rows


def short_names(drift: Drift) -> list[str]:
    """Return the paths; without their directory where that is the same for all."""
    paths = [point.path for point in drift.points]
    if len({os.path.dirname(path) for path in paths}) > 1:
        return paths
    return [os.path.basename(path) or path for path in paths]


def _step_cells(step: DriftStep) -> tuple[str, ...]:
    changed = step.difference.changed
    count = f"{len(changed):,} of {step.difference.compared:,}"
    if all(one.statistics is None for one in changed):
        return (count, "", "", "", "", "")
    return (
        count,
        amount(step.l2),
        "" if step.relative is None else amount(step.relative),
        amount(step.max_abs),
        printable(step.largest or ""),
        "" if step.cosine is None else f"{step.cosine:.6f}",
    )
