"""The changed tensors as a table, one by one or by module: what matters most comes first."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckpttool.comparing.statistics import Statistics
from ckpttool.ops.difference import Change
from ckpttool.render.aligned import Aligned, aligned
from ckpttool.render.amounts import amount, index_text, shape_text, share, two_values
from ckpttool.render.escape import printable
from ckpttool.tensor import Role

_KINDS = ("shape", "dtype", "values")
_HEADINGS = ("tensor", "change", "differ", "max |Δ|", "at", "values", "mean |Δ|", "relative", "L2", "cosine")
_LEFT = ("change", "at", "values")
_DISPENSABLE = ("mean |Δ|", "cosine", "L2", "at", "values", "differ", "change")
_MODULE_HEADINGS = ("module", "changed", "differ", "max |Δ|", "relative")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A component of a name that is a number: one layer of many."""


def sorted_changes(changed: Iterable[Change]) -> list[Change]:
    """Return changes with other shapes first, then other types; weights first, and what moved farthest."""
    return sorted(changed, key=_rank)


def _rank(change: Change) -> tuple[int, bool, float]:
    return _KINDS.index(change.kind), change.a.role is not Role.WEIGHTS, -_weight(distances(change))


def _weight(statistics: Statistics | None) -> float:
    if statistics is None:
        return 0.0
    relative = relative_change(statistics)
    return math.inf if statistics.non_finite or relative != relative else relative


def distances(change: Change) -> Statistics | None:
    """Return how far values lie apart; None where there is no distance, as between strings."""
    found = change.statistics
    return None if found is None or isinstance(found.at_a, str) else found


def relative_change(statistics: Statistics) -> float:
    """Return the norm of the change as a part of the first side's norm."""
    return _ratio(statistics.l2, statistics.norm_a)


def _ratio(part: float, whole: float) -> float:
    if whole == 0:
        return math.inf if part else 0.0
    return part / whole


def change_table(changes: Sequence[Change], width: int) -> Aligned:
    """Return a row for each change, in the order given."""
    rows = [_row(one) for one in changes]
    return aligned(_HEADINGS, rows, width=width, left=_LEFT, dispensable=_DISPENSABLE)


def change_cells(changed: Iterable[Change]) -> tuple[Sequence[str], list[tuple[str, ...]]]:
    """Return the headings, and the cells of every change: what matters most comes first."""
    return _HEADINGS, [_row(one) for one in sorted_changes(changed)]


def _row(change: Change) -> tuple[str, ...]:
    name = printable(both_names(change.a.name, change.b.name))
    found = change.statistics
    if found is None:
        return (name, kind_words(change), *("",) * (len(_HEADINGS) - 2))
    is_far = distances(change) is not None
    return (
        name,
        kind_words(change),
        f"{found.count:,} of {found.size:,} ({share(found.count, found.size)})",
        amount(found.max_abs) if is_far else "",
        index_text(found.where),
        two_values(found.at_a, found.at_b),
        amount(found.mean_abs) if is_far else "",
        amount(relative_change(found)) if is_far else "",
        amount(found.l2) if is_far else "",
        "" if found.cosine != found.cosine else f"{found.cosine:.6f}",  # of what has no length
    )


def both_names(a: str, b: str) -> str:
    """Return a tensor's name, or its names on both sides where they differ."""
    return a if a == b else f"{a} → {b}"


def kind_words(change: Change) -> str:
    """Return what changed besides values, in words; nothing where nothing else did."""
    words = []
    if change.a.shape != change.b.shape:
        words.append(f"shape {shape_text(change.b.shape)}, was {shape_text(change.a.shape)}")
    if change.a.dtype != change.b.dtype:
        same = ": same values" if change.kind == "dtype" and change.statistics is None else ""
        words.append(f"{change.b.dtype}, was {change.a.dtype}{same}")
    if change.statistics is not None and change.statistics.non_finite:
        words.append(f"{change.statistics.non_finite:,} NaN or infinite")
    return "; ".join(words)


# By module ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Module:
    """What the changes in one module come to."""

    tensors: int = 0
    measured: int = 0
    count: int = 0
    size: int = 0
    max_abs: float = 0.0
    squares: float = 0.0
    squares_a: float = 0.0

    def add(self, change: Change) -> None:
        self.tensors += 1
        if change.statistics is not None:
            self.count += change.statistics.count
            self.size += change.statistics.size
        if (found := distances(change)) is not None:
            self.measured += 1
            self.max_abs = max(self.max_abs, found.max_abs)  # in this order NaN loses
            self.squares += found.l2**2
            self.squares_a += found.norm_a**2

    def cells(self) -> tuple[str, ...]:
        if not self.size:
            return (f"{self.tensors:,}", "", "", "")
        told = f"{self.count:,} of {self.size:,} ({share(self.count, self.size)})"
        if not self.measured:
            return (f"{self.tensors:,}", told, "", "")
        relative = _ratio(math.sqrt(self.squares), math.sqrt(self.squares_a))
        return f"{self.tensors:,}", told, amount(self.max_abs), amount(relative)


def module_table(changed: Iterable[Change], width: int, limit: int | None) -> tuple[Aligned, int]:
    """Return a row for each module with changes, and how many more than ``limit`` there are.

    Where there are more, modules that differ in numbers alone are one: ``layers.*.attn``.
    """
    changes = [*changed]
    modules = _by_module(changes, folded=False)
    if limit is not None and len(modules) > limit:
        modules = _by_module(changes, folded=True)
    rows = [(printable(name), *module.cells()) for name, module in [*modules.items()][:limit]]
    table = aligned(_MODULE_HEADINGS, rows, width=width, dispensable=("differ",))
    return table, len(modules) - len(rows)


def _by_module(changes: Iterable[Change], *, folded: bool) -> dict[str, _Module]:
    modules: dict[str, _Module] = {}
    for one in changes:
        name = one.name.rpartition(".")[0] or one.name
        modules.setdefault(_NUMBER.sub("*", name) if folded else name, _Module()).add(one)
    return modules
