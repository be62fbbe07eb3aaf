"""What is drawn of a difference, and of a series of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckpttool.core.tensor import Role
from ckpttool.ops.difference import Change, Difference, distances
from ckpttool.ops.drift import Drift
from ckpttool.render.plot import Bars, Drawing, Heat, Lines, Numbers, picture
from ckpttool.render.text_diff import (
    DRIFT_HEADINGS,
    change_cells,
    drift_cells,
    fold_numbers,
    module_of,
    short_names,
    summary_line,
)
from ckpttool.weights.comparing.statistics import relative_change

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
