"""What is drawn of results: how far tensors moved, and series with what a policy keeps of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from ckpttool.cli.render.numbers import file_size, number, utc_time
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
from ckpttool.cli.render.text_list import (
    ListStyle,
    count_cell,
    metric_of,
    notes_cell,
    policy_cell,
    shown_metrics,
)
from ckpttool.core.report import counted
from ckpttool.core.tensor import Role
from ckpttool.ops.difference import Change, Difference, distances
from ckpttool.ops.drift import Drift
from ckpttool.runs.listing import ListedCheckpoint, ListedSeries, Listing
from ckpttool.weights.comparing.statistics import relative_change

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

# diff -----------------------------------------------------------------------------------------------


_MOST_ROWS = 120
_TITLE = "relative change |Δ| / |a|"


def difference_picture(kind: str, difference: Difference) -> bytes:
    """Return how far each layer moved, as bars."""
    moved = _relative_changes(difference.changed)
    bars = Bars(_TITLE, [*moved] or ["no values changed"], [*moved.values()] or [None])
    headings, rows = change_cells(difference.changed)
    return picture(kind, summary_line(difference), [bars], Numbers(headings, rows))


def drift_picture(kind: str, drift: Drift) -> bytes:
    """Return how far each layer moved in each step, and the series of losses, norms and changes."""
    moved = [_relative_changes(step.difference.changed) for step in drift.steps]
    layers = [*dict.fromkeys(name for one in moved for name in one)]
    names = short_names(drift)
    drawings: list[Drawing] = []
    if layers:
        values = [[one.get(layer) for one in moved] for layer in layers]
        drawings.append(Heat(_TITLE, layers, names[1:], values, is_logarithmic=True))
    series: dict[str, Sequence[float | None]] = {
        "loss": [point.loss for point in drift.points],
        "norm of the weights": [point.norm for point in drift.points],
        "L2 of the change": [None, *(step.l2 for step in drift.steps)],
    }
    drawings += [
        Lines(title, names, {title: values}) for title, values in series.items() if set(values) != {None}
    ]
    title = f"{names[0]} → {names[-1]}"
    return picture(kind, title, drawings, Numbers(DRIFT_HEADINGS, drift_cells(drift)))


def _relative_changes(changed: Sequence[Change]) -> Mapping[str, float]:
    """Return the relative change of each weight, or of each tensor if no weight changed.

    If there are many, a module has the largest one in it, and layers that differ in their number alone have
    the largest one of all.
    """
    weights = [one for one in changed if one.a.role is Role.WEIGHTS]
    largest = {
        one.name: relative_change(measured)
        for one in weights or changed
        if (measured := distances(one)) is not None
    }
    for fold in (module_of, fold_numbers):
        if len(largest) <= _MOST_ROWS:
            break
        folded: dict[str, float] = {}
        for name, value in largest.items():
            folded[fold(name)] = max(value, folded.get(fold(name), 0.0))
        largest = folded
    return largest


# list -----------------------------------------------------------------------------------------------


MOST_PANELS = 24
"""More than that nobody looks at, and a PNG can't be taller."""
_MOST_TOGETHER = 4
"""Metrics of one kind in one panel."""
_MOST_TICKS = 12
_HEIGHT = 2.6  # inches
_LINES = ("#3465a4", "#c17d11", "#75507b", "#4e9a06")
_SIZE, _GONE_SIZE, _GONE, _BAD, _BEST = "#babdb6", "#eeeeec", "#888a85", "#cc0000", "#f5c211"
_SIZES_BELOW = 4.0
"""Bars of sizes take the lower quarter of a panel, so that the lines stay readable."""
_EVERYTHING = ListStyle(now=0.0)

_AXES: Mapping[str, Callable[[ListedCheckpoint], float | None]] = {
    "step": lambda row: row.entry.step,
    "epoch": lambda row: row.entry.epoch,
}


@dataclass(frozen=True)
class SeriesPanel(Drawing):
    """A series: lines of metrics, and behind them a bar for each size.

    Attributes:
        title: Its key.
        rows: Its checkpoints, in the order of ``positions``.
        axis: What the positions are: ``step``, ``epoch`` or ``checkpoint``.
        positions: Where each stands on the axis.
        metrics: Names of what is drawn as lines.
        best: The metric whose best is marked.
        height: In inches.
    """

    title: str
    rows: Sequence[ListedCheckpoint]
    axis: str
    positions: Sequence[float]
    metrics: Sequence[str]
    best: str | None = None
    height: float = _HEIGHT

    def draw(self, axes: Axes) -> None:
        """Draw sizes behind the metrics, and the marks of a policy on the first of these."""
        from matplotlib.ticker import FuncFormatter, MaxNLocator

        sizes = axes.twinx() if self.metrics else axes
        self._sizes(sizes)
        if self.metrics:
            axes.set_zorder(sizes.get_zorder() + 1)
            axes.patch.set_visible(False)
        for at, name in enumerate(self.metrics):
            self._line(axes, name, _LINES[at % len(_LINES)], is_first=at == 0)
        if self.metrics:  # lift the lines above the bars, and name no values there
            low, high = axes.get_ylim()
            ticks = [tick for tick in axes.get_yticks() if low <= tick <= high]
            axes.set_ylim(low - (high - low) / (_SIZES_BELOW - 1), high)
            axes.set_yticks(ticks)
        # Damaged and incomplete ones are marked at the foot, where every one has a position.
        bad = [x for x, row in zip(self.positions, self.rows, strict=True) if row.entry.fault is not None]
        if bad:
            sizes.plot(bad, [0] * len(bad), "x", color=_BAD, clip_on=False, zorder=5, label="not sound")
        axes.set_xlabel(self.axis)
        axes.grid(alpha=0.3)
        if len(self.positions) <= _MOST_TICKS:
            axes.set_xticks(self.positions)
        else:
            axes.xaxis.set_major_locator(MaxNLocator(_MOST_TICKS, integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, position: _position_text(value)))
        self._legend(axes, sizes)

    def _sizes(self, axes: Axes) -> None:
        """Draw a bar for each size; those of what goes are pale."""
        from matplotlib.collections import PolyCollection
        from matplotlib.ticker import FuncFormatter

        half = 0.3 * _closest(self.positions)
        for is_gone, colour in ((False, _SIZE), (True, _GONE_SIZE)):
            bars = [
                [(x - half, 0), (x - half, row.entry.nbytes), (x + half, row.entry.nbytes), (x + half, 0)]
                for x, row in zip(self.positions, self.rows, strict=True)
                if (row.kept == ()) is is_gone
            ]
            if bars:
                name = "size (remove)" if is_gone else "size"
                axes.add_collection(PolyCollection(bars, facecolor=colour, linewidth=0, label=name))
        largest = max((row.entry.nbytes for row in self.rows), default=0)
        axes.set_xlim(min(self.positions) - 1.5 * half, max(self.positions) + 1.5 * half)
        axes.set_ylim(0, max(largest, 1) * (_SIZES_BELOW if self.metrics else 1.15))
        axes.set_yticks([0, largest])
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, position: file_size(round(value))))

    def _line(self, axes: Axes, name: str, colour: str, *, is_first: bool) -> None:
        marks = [
            (x, y, row)
            for x, row in zip(self.positions, self.rows, strict=True)
            if (y := _finite(metric_of(row, name))) is not None
        ]
        axes.plot(*_split([(x, y) for x, y, _ in marks]), color=colour, linewidth=1.2, label=label(name))
        kept = [(x, y) for x, y, row in marks if row.kept != ()]
        gone = [(x, y) for x, y, row in marks if row.kept == ()]
        has_policy = any(row.kept is not None for row in self.rows)
        axes.plot(
            *_split(kept), "o", color=colour, markersize=4, label="keep" if has_policy and is_first else None
        )
        if gone:
            axes.plot(
                *_split(gone),
                "o",
                markerfacecolor="white",
                markeredgecolor=_GONE,
                markersize=4,
                label="remove" if is_first else None,
            )
        best = [(x, y) for x, y, row in marks if row.is_best] if name == self.best else []
        if best:
            axes.plot(
                *_split(best),
                "*",
                color=_BEST,
                markeredgecolor="black",
                markeredgewidth=0.6,
                markersize=12,
                label="best",
            )

    def _legend(self, axes: Axes, sizes: Axes) -> None:
        shown: dict[str, Artist] = {}
        for one in dict.fromkeys((axes, sizes)):
            for handle, name in zip(*one.get_legend_handles_labels(), strict=True):
                shown.setdefault(name, handle)
        axes.legend(
            shown.values(), shown.keys(), loc="upper left", bbox_to_anchor=(1.09, 1.02), frameon=False
        )


def series_picture(kind: str, title: str, listing: Listing) -> bytes:
    """Return a panel for each series, and in HTML the numbers of every checkpoint.

    Args:
        kind: ``svg``, ``png`` or ``html``.
        title: What was looked at.
        listing: With what a policy would keep, where that is to be marked.
    """
    several = [one for one in listing.series if len(one.checkpoints) > 1] or list(listing.series)
    largest = sorted(several, key=lambda one: -len(one.checkpoints))[:MOST_PANELS]
    drawn = [one for one in several if one in largest]
    shared = next((name for name in _AXES if all(_counts(one.checkpoints, name) for one in drawn)), None)
    panels = [_panel(one, listing.best, [*_AXES] if shared is None else [shared]) for one in drawn]
    title += f": {counted(len(listing.checkpoints), 'checkpoint')} in {len(listing.series):,} series"
    if len(panels) < len(listing.series):
        title += f" ({len(panels):,} drawn)"
    return picture(kind, title, panels, _numbers(listing))


def _panel(series: ListedSeries, best: str | None, axes: Sequence[str]) -> SeriesPanel:
    """Return a panel over the first of some axes on which all checkpoints stand apart, or their order."""
    counts = ((axis, _counts(series.checkpoints, axis)) for axis in axes)
    order = [float(at) for at in range(1, len(series.checkpoints) + 1)]
    axis, positions = next(((axis, known) for axis, known in counts if known), ("checkpoint", order))
    ordered = sorted(zip(positions, range(len(positions)), series.checkpoints, strict=True))
    rows = [row for _, _, row in ordered]
    return SeriesPanel(series.key, rows, axis, [x for x, _, _ in ordered], _drawn_metrics(rows, best), best)


def _counts(rows: Sequence[ListedCheckpoint], axis: str) -> list[float] | None:
    """Return the steps or epochs of checkpoints; None where one has none, or two have the same."""
    known = [value for row in rows if (value := _AXES[axis](row)) is not None]
    return known if len(set(known)) == len(rows) else None


def _drawn_metrics(rows: Sequence[ListedCheckpoint], best: str | None) -> list[str]:
    """Return the metrics that are drawn: the best's, or else the first, and those of its kind."""
    style = ListStyle(now=0.0, wanted=(best,) if best is not None else ())
    known = [
        name
        for name in shown_metrics(rows, style)
        if any(_finite(metric_of(row, name)) is not None for row in rows)
    ]
    alike = [name for name in known if _kind(name) == _kind(known[0])]
    return alike[:_MOST_TOGETHER]


def _kind(metric: str) -> str:
    """Return the last word of a metric's name: ``val_loss`` and ``train/loss`` can share an axis."""
    return metric.replace("/", "_").rpartition("_")[2].lower()


def _position_text(value: float) -> str:
    return number(int(value) if value == int(value) else value)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _closest(positions: Sequence[float]) -> float:
    """Return how far the closest two stand apart."""
    return min((b - a for a, b in pairwise(positions) if b > a), default=1.0)


def _split(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


# The table ------------------------------------------------------------------------------------------


def _numbers(listing: Listing) -> Numbers:
    """Return all checkpoints, with times instead of ages: the same input is drawn in the same bytes."""
    metrics = shown_metrics(listing.checkpoints, _EVERYTHING)
    has_policy = any(row.kept is not None for row in listing.checkpoints)
    headings = ["checkpoint", "series", "epoch", "step", *metrics, "size", "changed (UTC)"]
    headings += [*(["policy"] if has_policy else []), "state", "notes"]
    return Numbers(headings, [list(_cells(row, metrics, listing, has_policy)) for row in listing.checkpoints])


def _cells(
    row: ListedCheckpoint, metrics: Sequence[str], listing: Listing, has_policy: bool
) -> Iterator[str]:
    entry = row.entry
    yield entry.path
    yield entry.group
    yield count_cell(entry.epoch)
    yield count_cell(entry.step)
    for name in metrics:
        value = metric_of(row, name)
        yield "" if value is None else f"{value:.6g}"
    yield file_size(entry.nbytes)
    yield utc_time(entry.modified_ns) or ""
    if has_policy:
        yield policy_cell(row, ListStyle(now=0.0, long=True))
    yield row.state
    yield notes_cell(row, _EVERYTHING, is_alone=False, best=listing.best)
