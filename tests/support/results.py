"""Results made of what they say, for what shows them: no checkpoint is read for one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ckpttool import Checkpoint, Difference, Inspection, Role, Tensor
from ckpttool.core.checkpoint import FileEntry
from ckpttool.core.dtypes import BY_NAME
from ckpttool.core.naming import parse_name
from ckpttool.ops.difference import ABSENT, Change, SideSummary, TensorFacts, UnreadableTensor, ValueChange
from ckpttool.ops.drift import Drift, DriftPoint, DriftStep
from ckpttool.ops.inspect import ValueStatistics
from ckpttool.runs.listing import ListedCheckpoint, ListedSeries, Listing
from ckpttool.runs.undo import RestoredCheckpoint, Undone
from ckpttool.transaction.files import Contents
from ckpttool.weights.comparing.compare import Side
from ckpttool.weights.comparing.statistics import Statistics, Tolerance
from tests.support.directories import file_of, make_entry

NAN = float("nan")
MISSING = ABSENT
"""What a value is on the side that has none."""

NO_DISTANCE = dict.fromkeys(("max_abs", "mean_abs", "max_rel", "l2", "cosine", "norm_a", "norm_b"), NAN)
"""What is measured of strings."""


# What a checkpoint is -------------------------------------------------------------------------------


def inspection(
    *tensors: Tensor, statistics: Mapping[str, Sequence[Any]] | None = None, **known: Any
) -> Inspection:
    """Return what a checkpoint of one file is; ``statistics`` are those of its tensors, in their order."""
    usual: dict[str, Any] = {"path": "m.pth", "format": "pytorch", "variant": "zip"}
    usual |= {"files": (FileEntry("m.pth", 3953),), "spans": lambda: iter(())}
    measured = statistics and {name: ValueStatistics(*numbers) for name, numbers in statistics.items()}
    return Inspection(Checkpoint(**usual | {"tensors": tensors} | known), tensors, measured)


# How two differ -------------------------------------------------------------------------------------


def facts(
    name: str, shape: tuple[int, ...] = (10, 2), dtype: str = "float32", role: Role = Role.WEIGHTS
) -> TensorFacts:
    """Return what a tensor is on one side."""
    return TensorFacts(name, role, BY_NAME[dtype], shape, 80)


def statistics(**measured: Any) -> Statistics:
    """Return those of one element out of 1,000 that moved from 0.125 to 0.126."""
    usual: dict[str, Any] = {
        "size": 1000,
        "count": 1,
        "max_abs": 0.001,
        "mean_abs": 0.000001,
        "max_rel": 0.008,
        "l2": 0.001,
        "cosine": 0.9999999,
        "norm_a": 10.0,
        "norm_b": 10.0,
        "where": (3, 5),
        "at_a": 0.125,
        "at_b": 0.126,
    }
    return Statistics(**usual | measured)


def change(
    name: str,
    other: str | None = None,
    dtype: str = "float32",
    role: Role = Role.WEIGHTS,
    how: Any = "name",
    **measured: Any,
) -> Change:
    """Return a tensor whose values differ; ``other`` is its name on the second side."""
    a, b = (facts(one, dtype=dtype, role=role) for one in (name, other or name))
    return Change(a=a, b=b, kind="values", how=how, statistics=statistics(**measured))


def change_of_strings(name: str) -> Change:
    """Return a tensor of which two strings of four differ: they have no distance."""
    return change(name, dtype="string", **NO_DISTANCE, size=4, count=2, where=(1,), at_a="ab", at_b="c")


def reshaped(name: str, a: tuple[int, ...] = (2, 10), b: tuple[int, ...] = (10, 2)) -> Change:
    """Return a tensor that has another shape."""
    return Change(a=facts(name, a), b=facts(name, b), kind="shape")


def retyped(name: str, dtype: str = "bfloat16", **measured: Any) -> Change:
    """Return a tensor that is of another type, with the same values if nothing was measured."""
    found = statistics(**measured) if measured else None
    return Change(a=facts(name), b=facts(name, dtype=dtype), kind="dtype", statistics=found)


def side(path: str = "a.pth", **known: Any) -> SideSummary:
    """Return one side as a whole."""
    usual: dict[str, Any] = {"format": "pytorch", "variant": "zip", "producer": "pytorch"}
    usual |= {"nbytes": 1_000_000_000, "tensors": 258, "parameters": 1000}
    return SideSummary(path, **usual | known)


def difference(
    *changed: Change,
    compared: int = 258,
    added: Iterable[str | TensorFacts] = (),
    removed: Iterable[str | TensorFacts] = (),
    values: Iterable[tuple[str, object, object]] = (),
    reported: Iterable[tuple[str, object, object]] = (),
    broken: Iterable[tuple[str, str, str]] = (),
    tolerance: Mapping[str, Any] | None = None,
    **known: Any,
) -> Difference:
    """Return how two checkpoints differ.

    Values are a path and what it is on both sides; what is broken has a name, its side and why.
    """
    usual = {"a": side(), "b": side(), "compared": compared, "unchanged": compared - len(changed)}
    usual |= {"compared_nbytes": 980_000_000}
    return Difference(
        changed=changed,
        added=_facts(added),
        removed=_facts(removed),
        values=tuple(ValueChange(*one) for one in values),
        reported=tuple(ValueChange(*one) for one in reported),
        broken=tuple(UnreadableTensor(name, Side(where), why) for name, where, why in broken),
        tolerance=Tolerance(**tolerance or {}),
        **usual | known,
    )


def _facts(tensors: Iterable[str | TensorFacts]) -> tuple[TensorFacts, ...]:
    return tuple(facts(one) if isinstance(one, str) else one for one in tensors)


def step(
    difference: Difference,
    l2: float = 0.0,
    relative: float | None = 0.0,
    cosine: float | None = 1.0,
    max_abs: float = 0.0,
    largest: str | None = None,
) -> DriftStep:
    """Return what happened from one checkpoint of a series to the next."""
    return DriftStep(difference, l2, relative, cosine, max_abs, largest)


def drift(points: Iterable[tuple[Any, ...]], *steps: DriftStep) -> Drift:
    """Return a series; a point is a path, and its epoch, step, loss and norm as far as they are known."""
    return Drift(tuple(DriftPoint(*(one + (None,) * 4)[:5]) for one in points), steps)


# What lies in a directory ---------------------------------------------------------------------------


def row(
    name: str,
    *,
    kept: tuple[str, ...] | None = None,
    is_best: bool = False,
    is_empty: bool = False,
    **known: Any,
) -> ListedCheckpoint:
    """Return a checkpoint of ``run/`` in a list, of one file or of none, with the metrics of its name."""
    file = file_of(name, size=4_000, modified=10**18)
    usual: dict[str, Any] = {"contents": Contents(() if is_empty else (file,)), "group": "run/*"}
    usual |= {"metrics": parse_name(name).metrics}
    return ListedCheckpoint(make_entry(name, **usual | known), kept=kept, is_best=is_best)


def listing(*series: Sequence[ListedCheckpoint], best: str | None = None) -> Listing:
    """Return a list of series; ``best`` is the metric that was asked for."""
    listed = tuple(ListedSeries(f"run/{at}", tuple(rows)) for at, rows in enumerate(series))
    return Listing(tuple(one for rows in series for one in rows), series=listed, best=best)


def undone(kind: Any, restored: Mapping[str, str] | None = None, **known: Any) -> Undone:
    """Return what was taken back on 2 January 2026: paths, and where they had been until now."""
    back = tuple(RestoredCheckpoint(*one) for one in (restored or {}).items())
    return Undone("20260102T030405.000006Z-0123abcd", kind, back, **known)
