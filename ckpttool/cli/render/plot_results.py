"""Pictures of results: how far tensors moved, and runs with the checkpoints that a policy keeps."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from ckpttool.cli.render.text_diff import (
    DRIFT_HEADINGS,
    change_cells,
    drift_cells,
    fold_numbers,
    module_of,
    short_names,
    summary_line,
)
from ckpttool.cli.render.text_list import ListStyle, metric_of, shown_metrics
from ckpttool.core.tensor import Role
from ckpttool.core.text import counted, file_size, number
from ckpttool.integrations.matplotlib import (
    Bars,
    Drawing,
    HeatMap,
    Lines,
    RunLine,
    RunsPanel,
    picture,
)
from ckpttool.ops.difference import Change, Difference
from ckpttool.ops.drift import Drift
from ckpttool.runs.listing import ListedSeries, Listing, total_bytes

# diff -----------------------------------------------------------------------------------------------

_MOST_ROWS = 60
_MOST_KINDS = 8
_OTHERS = "others"
Key = TypeVar("Key", bound=Hashable)
_TITLE = "relative change |Δ| / |a|"


def difference_picture(kind: str, difference: Difference) -> bytes:
    """Return a map of relative changes: a row per module, a column per kind such as weight and bias."""
    moved = _relative_changes(difference.changed)
    drawing = _module_map(moved) if moved else Bars(_TITLE, ["no values changed"], [None])
    headings, rows = change_cells(difference.changed)
    return picture(kind, summary_line(difference), [drawing], [headings, *rows])


def drift_picture(kind: str, drift: Drift) -> bytes:
    """Return a map of each module's relative change in each step, and curves of losses, norms and changes."""
    moved = [_relative_changes(step.difference.changed) for step in drift.steps]
    row_of = _rows_of([name for one in moved for name in one])
    rows = [*dict.fromkeys(row_of.values())]
    axis, names = _axis_of(drift)
    drawings: list[Drawing] = []
    if rows:
        columns = [_largest((row_of[name], value) for name, value in one.items()) for one in moved]
        values = [[column.get(row) for column in columns] for row in rows]
        drawings.append(HeatMap(_TITLE, rows, names[1:], values, is_logarithmic=True, first_column=1))
    series: dict[str, Sequence[float | None]] = {
        "loss": [point.loss for point in drift.points],
        "norm of the weights": [point.norm for point in drift.points],
        "L2 of the change": [None, *(step.l2 for step in drift.steps)],
    }
    drawings += [
        Lines(title, names, {title: values}, axis)
        for title, values in series.items()
        if set(values) != {None}
    ]
    paths = short_names(drift)
    return picture(kind, f"{paths[0]} → {paths[-1]}", drawings, [DRIFT_HEADINGS, *drift_cells(drift)])


def _relative_changes(changed: Sequence[Change]) -> dict[str, float]:
    """Return the relative change of each weight, or of each tensor if no weight changed."""
    weights = [one for one in changed if one.a.role is Role.WEIGHTS]
    return {
        one.name: measured.relative for one in weights or changed if (measured := one.distance) is not None
    }


def _module_map(moved: Mapping[str, float]) -> HeatMap:
    """Return a map of modules and kinds; rare kinds share a column."""
    kinds = Counter(_kind_of(name) for name in moved)
    columns = [one for one, _ in kinds.most_common(_MOST_KINDS)]
    column_of = {one: one if one in columns else _OTHERS for one in kinds}
    row_of = _rows_of([*moved])
    fields = _largest(((row_of[name], column_of[_kind_of(name)]), value) for name, value in moved.items())
    rows = [*dict.fromkeys(row_of.values())]
    columns += [_OTHERS] if len(kinds) > _MOST_KINDS else []
    values = [[fields.get((row, column)) for column in columns] for row in rows]
    return HeatMap(_TITLE, rows, columns, values, is_logarithmic=True)


def _kind_of(name: str) -> str:
    return name.rpartition(".")[2]


def _rows_of(names: Sequence[str]) -> dict[str, str]:
    """Return the module of each tensor; many modules are combined if they differ only in numbers."""
    modules = {name: module_of(name) for name in names}
    if len(set(modules.values())) <= _MOST_ROWS:
        return modules
    return {name: fold_numbers(module) for name, module in modules.items()}


def _largest(pairs: Iterable[tuple[Key, float]]) -> dict[Key, float]:
    """Return the largest value of each key."""
    largest: dict[Key, float] = {}
    for key, value in pairs:
        largest[key] = max(value, largest.get(key, 0.0))
    return largest


def _axis_of(drift: Drift) -> tuple[str, list[str]]:
    """Return the labels of a series' points: epochs or steps if they are unique, or files."""
    for axis in ("epoch", "step"):
        values = [getattr(point, axis) for point in drift.points]
        if None not in values and len({*values}) == len(values):
            return axis, [number(value) for value in values]
    return "checkpoint", short_names(drift)


# list -----------------------------------------------------------------------------------------------

MOST_RUNS = 24
"""Limit on lines that can be distinguished."""


def series_picture(kind: str, title: str, listing: Listing) -> bytes:
    """Return a metric of all runs in one panel; without any metric, the size of each run.

    Args:
        kind: ``svg`` or ``png``.
        title: Directories of the listing.
        listing: Checkpoints, with the plan of a policy if it is to be marked.
    """
    # A series of one checkpoint has no curve, so it is drawn only if there are no others.
    several = [one for one in listing.series if len(one.checkpoints) > 1] or list(listing.series)
    largest = sorted(several, key=lambda one: -len(one.checkpoints))[:MOST_RUNS]
    drawn = [one for one in several if one in largest]
    title += f": {counted(len(listing.checkpoints), 'checkpoint')} in {counted(len(listing.series), 'run')}"
    if len(drawn) < len(listing.series):
        title += f" ({len(drawn):,} drawn)"
    removed = [row.entry for row in listing.checkpoints if row.kept == ()]
    if removed:
        title += f", {file_size(total_bytes(removed))} to free"
    return picture(kind, title, [_runs_panel(drawn, listing.best)])


def _runs_panel(series: Sequence[ListedSeries], best: str | None) -> Drawing:
    keys = [one.key for one in series]
    shared = os.path.commonpath([os.path.dirname(key) for key in keys]) if len(keys) > 1 else ""
    names = [os.path.relpath(key, shared) if shared else key for key in keys]
    axis = next(
        (axis for axis in ("step", "epoch") if all(_counts(one, axis) for one in series)), "checkpoint"
    )
    metric = _metric_to_draw(series, best)
    runs = [_run(name, one, axis, metric) for name, one in zip(names, series, strict=True)] if metric else []
    runs = [run for run in runs if run.points]
    if metric is None or not runs:
        return Bars("size in bytes", names, [float(one.nbytes) for one in series])
    return RunsPanel(metric, axis, runs)


def _metric_to_draw(series: Sequence[ListedSeries], best: str | None) -> str | None:
    """Return the metric that was asked for, or the first that most checkpoints have."""
    rows = [row for one in series for row in one.checkpoints]
    known = shown_metrics(rows, ListStyle(now=0.0, wanted=() if best is None else (best,)))
    counts = {name: sum(_finite(metric_of(row, name)) is not None for row in rows) for name in known}
    if best is not None and counts.get(best):
        return best
    return max(counts, key=counts.__getitem__) if any(counts.values()) else None


def _run(name: str, series: ListedSeries, axis: str, metric: str) -> RunLine:
    positions = _counts(series, axis) or [float(at) for at in range(1, len(series.checkpoints) + 1)]
    placed = sorted(zip(positions, series.checkpoints, strict=True), key=lambda one: one[0])
    points = [(x, y, row) for x, row in placed if (y := _finite(metric_of(row, metric))) is not None]
    return RunLine(name, points, [x for x, row in placed if row.entry.fault is not None])


def _counts(series: ListedSeries, axis: str) -> list[float] | None:
    """Return the steps or epochs of a series; None if one has none, or two have the same."""
    values = [getattr(row.entry, axis, None) for row in series.checkpoints]
    known = [float(value) for value in values if value is not None]
    return known if len({*known}) == len(values) else None


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
