"""What is drawn of results: which tensors moved and how far, and runs with what a policy keeps of them."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ckpttool.cli.render.plot import Bars, Drawing, Heat, Lines, Numbers, label, picture
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
from ckpttool.core.numbers import file_size, number
from ckpttool.core.report import counted
from ckpttool.core.tensor import Role
from ckpttool.ops.difference import Change, Difference
from ckpttool.ops.drift import Drift
from ckpttool.runs.listing import ListedCheckpoint, ListedSeries, Listing, total_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# diff -----------------------------------------------------------------------------------------------

_MOST_ROWS = 60
_MOST_KINDS = 8
_OTHERS = "others"
Key = TypeVar("Key", bound=Hashable)
_TITLE = "relative change |Δ| / |a|"


def difference_picture(kind: str, difference: Difference) -> bytes:
    """Return how far tensors moved: a row a module, a column for weights, biases and each other kind."""
    moved = _relative_changes(difference.changed)
    drawing = _module_map(moved) if moved else Bars(_TITLE, ["no values changed"], [None])
    headings, rows = change_cells(difference.changed)
    return picture(kind, summary_line(difference), [drawing], Numbers(headings, rows))


def drift_picture(kind: str, drift: Drift) -> bytes:
    """Return how far each module moved in each step, and losses, norms and changes, over one axis."""
    moved = [_relative_changes(step.difference.changed) for step in drift.steps]
    row_of = _rows_of([name for one in moved for name in one])
    rows = [*dict.fromkeys(row_of.values())]
    axis, names = _axis_of(drift)
    drawings: list[Drawing] = []
    if rows:
        columns = [_largest((row_of[name], value) for name, value in one.items()) for one in moved]
        values = [[column.get(row) for column in columns] for row in rows]
        drawings.append(Heat(_TITLE, rows, names[1:], values, is_logarithmic=True, first_column=1))
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
    return picture(kind, f"{paths[0]} → {paths[-1]}", drawings, Numbers(DRIFT_HEADINGS, drift_cells(drift)))


def _relative_changes(changed: Sequence[Change]) -> dict[str, float]:
    """Return the relative change of each weight, or of each tensor if no weight changed."""
    weights = [one for one in changed if one.a.role is Role.WEIGHTS]
    return {
        one.name: measured.relative for one in weights or changed if (measured := one.distance) is not None
    }


def _module_map(moved: Mapping[str, float]) -> Heat:
    """Return a map of modules and kinds; rare kinds share a column."""
    kinds = Counter(_kind_of(name) for name in moved)
    columns = [one for one, _ in kinds.most_common(_MOST_KINDS)]
    column_of = {one: one if one in columns else _OTHERS for one in kinds}
    row_of = _rows_of([*moved])
    fields = _largest(((row_of[name], column_of[_kind_of(name)]), value) for name, value in moved.items())
    rows = [*dict.fromkeys(row_of.values())]
    columns += [_OTHERS] if len(kinds) > _MOST_KINDS else []
    values = [[fields.get((row, column)) for column in columns] for row in rows]
    return Heat(_TITLE, rows, columns, values, is_logarithmic=True)


def _kind_of(name: str) -> str:
    return name.rpartition(".")[2]


def _rows_of(names: Sequence[str]) -> dict[str, str]:
    """Return the module of each tensor; of many, those that differ in their numbers alone are one."""
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
    """Return by what the points of a series are named: epochs or steps if each has its own, or files."""
    for axis in ("epoch", "step"):
        values = [getattr(point, axis) for point in drift.points]
        if None not in values and len({*values}) == len(values):
            return axis, [number(value) for value in values]
    return "checkpoint", short_names(drift)


# list -----------------------------------------------------------------------------------------------

MOST_RUNS = 24
"""More lines than that nobody tells apart."""
_HEIGHT = 4.2  # inches
_COLOURS = ("#3465a4", "#c17d11", "#75507b", "#4e9a06", "#a40000", "#06989a")
_BAD = "#cc0000"
_LOGARITHMIC_FROM = 20.0
"""A metric whose largest value is that many times its smallest has a logarithmic scale."""
_LABEL_LENGTH = 32
_LABEL_ROOM = 0.045
"""How far the names at the lines stay apart, as a part of the height."""


@dataclass(frozen=True, slots=True)
class Run:
    """A line of a picture: one series, in the order of the axis.

    Attributes:
        name: What stands at its end.
        points: Position, value and checkpoint of each that has both.
        faults: Positions of those that are damaged or incomplete.
    """

    name: str
    points: Sequence[tuple[float, float, ListedCheckpoint]]
    faults: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class RunsPanel(Drawing):
    """A metric of all runs, with their names at the lines; what a policy would remove is hollow."""

    title: str
    axis: str
    runs: Sequence[Run]
    height: float = _HEIGHT

    def draw(self, axes: Axes) -> None:
        """Draw a line a run, a mark a checkpoint, and what the marks mean if they differ."""
        values = [y for run in self.runs for _, y, _ in run.points]
        if min(values) > 0 and max(values) > _LOGARITHMIC_FROM * min(values):
            axes.set_yscale("log")
        for at, run in enumerate(self.runs):
            self._draw_run(axes, run, _COLOURS[at % len(_COLOURS)])
        axes.set_xlabel(self.axis)
        axes.grid(alpha=0.3)
        axes.margins(x=0.02)
        handles, names = axes.get_legend_handles_labels()
        if names:
            axes.legend(handles, names, loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False)
            axes.set_title("")
            axes.set_ylabel(label(self.title))
        self._name_runs(axes)

    def _draw_run(self, axes: Axes, run: Run, colour: str) -> None:
        axes.plot([x for x, _, _ in run.points], [y for _, y, _ in run.points], color=colour, linewidth=1.2)
        has_policy = any(row.kept is not None for _, _, row in run.points)
        known = {*axes.get_legend_handles_labels()[1]}
        marks = {
            "keep": ([one for one in run.points if one[2].kept != ()], "o", colour, colour, 4),
            "remove": ([one for one in run.points if one[2].kept == ()], "o", "white", colour, 4),
            "best": ([one for one in run.points if one[2].is_best], "*", "#f5c211", "black", 12),
        }
        for name, (points, marker, face, edge, size) in marks.items():
            is_said = (name != "keep" or has_policy) and name not in known
            if points:
                axes.plot(
                    [x for x, _, _ in points],
                    [y for _, y, _ in points],
                    marker,
                    markerfacecolor=face,
                    markeredgecolor=edge,
                    markeredgewidth=0.8,
                    markersize=size,
                    label=name if is_said else None,
                )
        if run.faults:  # at the foot, where each has a position
            foot = axes.get_xaxis_transform()
            said = None if "damaged or incomplete" in known else "damaged or incomplete"
            axes.plot(
                run.faults,
                [0.0] * len(run.faults),
                "x",
                color=_BAD,
                transform=foot,
                clip_on=False,
                label=said,
            )

    def _name_runs(self, axes: Axes) -> None:
        """Write the name of each run at the end of its line, below one another where lines end together."""
        axes.autoscale_view()
        inside = axes.transScale + axes.transLimits  # from values to parts of the panel
        ends = [(inside.transform(run.points[-1][:2])[1], place) for place, run in enumerate(self.runs)]
        lowest = -math.inf
        for height, at in sorted(ends):
            lowest = max(height, lowest + _LABEL_ROOM)
            axes.text(
                1.01,
                lowest,
                label(self.runs[at].name, _LABEL_LENGTH),
                transform=axes.transAxes,
                va="center",
                color=_COLOURS[at % len(_COLOURS)],
            )


def series_picture(kind: str, title: str, listing: Listing) -> bytes:
    """Return a metric of all runs in one panel; without any metric, how much each run takes.

    Args:
        kind: ``svg`` or ``png``.
        title: What was looked at.
        listing: With what a policy would keep, if that is to be marked.
    """
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
    names = _names_of([one.key for one in series])
    axis = next(
        (axis for axis in ("step", "epoch") if all(_counts(one, axis) for one in series)), "checkpoint"
    )
    metric = _metric_to_draw(series, best)
    runs = [_run(name, one, axis, metric) for name, one in zip(names, series, strict=True)] if metric else []
    runs = [run for run in runs if run.points]
    if metric is None or not runs:
        return Bars("size in bytes", names, [float(one.nbytes) for one in series])
    return RunsPanel(metric, axis, runs)


def _names_of(keys: Sequence[str]) -> list[str]:
    """Return what tells runs apart: their keys without the directories that all share."""
    shared = os.path.commonpath([os.path.dirname(key) for key in keys]) if len(keys) > 1 else ""
    return [os.path.relpath(key, shared) if shared else key for key in keys]


def _metric_to_draw(series: Sequence[ListedSeries], best: str | None) -> str | None:
    """Return the metric that was asked for, or the first that most checkpoints have."""
    rows = [row for one in series for row in one.checkpoints]
    known = shown_metrics(rows, ListStyle(now=0.0, wanted=() if best is None else (best,)))
    counts = {name: sum(_finite(metric_of(row, name)) is not None for row in rows) for name in known}
    if best is not None and counts.get(best):
        return best
    return max(counts, key=counts.__getitem__) if any(counts.values()) else None


def _run(name: str, series: ListedSeries, axis: str, metric: str) -> Run:
    positions = _counts(series, axis) or [float(at) for at in range(1, len(series.checkpoints) + 1)]
    placed = sorted(zip(positions, series.checkpoints, strict=True), key=lambda one: one[0])
    points = [(x, y, row) for x, row in placed if (y := _finite(metric_of(row, metric))) is not None]
    return Run(name, points, [x for x, row in placed if row.entry.fault is not None])


def _counts(series: ListedSeries, axis: str) -> list[float] | None:
    """Return the steps or epochs of a series; None if one has none, or two have the same."""
    values = [getattr(row.entry, axis, None) for row in series.checkpoints]
    known = [float(value) for value in values if value is not None]
    return known if len({*known}) == len(values) else None


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
