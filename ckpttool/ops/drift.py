"""Drift of a model over a series of checkpoints: differences of neighbours, losses and norms."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.dtypes import numpy_dtype
from ckpttool.core.result import document_of
from ckpttool.core.tensor import Role, Tensor
from ckpttool.core.values import stored_once
from ckpttool.formats import open_checkpoint
from ckpttool.ops.diff import diff_checkpoints
from ckpttool.ops.difference import SCHEMA, Change, Difference, DiffOptions
from ckpttool.storage.work import Advance, no_advance

if TYPE_CHECKING:
    import numpy as np

_BLOCK_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class DriftPoint:
    """One checkpoint of the series.

    Attributes:
        path: Path as given.
        epoch: From the checkpoint or its name; None if unknown.
        step: From the checkpoint or its name; None if unknown.
        loss: From the checkpoint or its name; None if unknown.
        norm: L2 norm of all finite floating weights, tied ones once; None without any.
    """

    path: str
    epoch: int | float | None
    step: int | None
    loss: float | None
    norm: float | None


@dataclass(frozen=True, slots=True)
class DriftStep:
    """Change from one checkpoint to the next.

    Attributes:
        difference: All differences.
        l2: L2 norm of the change of weights. None, as are ``relative``, ``cosine`` and ``max_abs``, if no
            weight was compared, or only weights without a distance differ, such as integers.
        relative: ``l2`` as a fraction of the norm of the common weights before; None if that is unknown.
        cosine: Cosine between the common weights before and after; None if unknown.
        max_abs: Largest change of a weight.
        largest: Name of the tensor with that change.
    """

    difference: Difference
    l2: float | None
    relative: float | None
    cosine: float | None
    max_abs: float | None
    largest: str | None

    def document(self) -> dict[str, Any]:
        numbers = document_of(self, "l2", "relative", "max_abs", "largest", "cosine")
        return {**numbers, **self.difference.row()}


@dataclass(frozen=True, slots=True)
class Drift:
    """Checkpoints in the order given, and the changes between neighbours; true if all are equal."""

    points: tuple[DriftPoint, ...]
    steps: tuple[DriftStep, ...]

    def __bool__(self) -> bool:
        return self.equal

    @property
    def equal(self) -> bool:
        """Return whether all checkpoints are equal."""
        return all(step.difference.equal for step in self.steps)

    def document(self) -> dict[str, Any]:
        points = {"checkpoints": "points"}
        return {"schema": SCHEMA, **document_of(self, "equal", "checkpoints", "steps", names=points)}


def drift(paths: Sequence[str], options: DiffOptions, *, advance: Advance = no_advance) -> Drift:
    """Return the differences of checkpoints, each from the one before, in the order given.

    Every byte is read once for each neighbour, and weights once more for their norms, in constant memory. At
    most two checkpoints are open at a time.

    Args:
        paths: Paths of at least two checkpoints.
        options: Options of each comparison.
        advance: Called with the bytes done, from any thread.
    """
    points: list[DriftPoint] = []
    steps: list[DriftStep] = []
    with ExitStack() as stack:
        before: tuple[Checkpoint, Mapping[str, float]] | None = None
        for path in paths:
            current = stack.enter_context(open_checkpoint(path))
            squares = _squares(current)
            advance(current.nbytes)
            state, total = current.training, math.fsum(squares.values())
            norm = math.sqrt(total) if squares else None
            points.append(DriftPoint(current.path, state.epoch, state.step, state.loss, norm))
            if before is not None:
                steps.append(_step(diff_checkpoints(before[0], current, options, advance=advance), *before))
                before[0].close()
            before = current, squares
    return Drift(tuple(points), tuple(steps))


def _step(difference: Difference, before: Checkpoint, squares: Mapping[str, float]) -> DriftStep:
    """Return the changes between two checkpoints."""
    # Tied weights count once, in sums of squares and in changes. Of a checkpoint without weights, such as an
    # optimizer's, all tensors count.
    tied = {tensor.name for tensor in before.tensors if tensor.shares_with is not None}
    changed = [
        change
        for change in difference.changed
        if change.a.name not in tied and (change.a.role is Role.WEIGHTS or not squares)
    ]
    moved = [change for change in changed if change.statistics is None or change.distance is not None]
    has_distance = any(one.kind == "dtype" or one.statistics is not None for one in moved)
    if not difference.compared or (changed and not has_distance):
        return DriftStep(difference, l2=None, relative=None, cosine=None, max_abs=None, largest=None)
    l2 = math.sqrt(math.fsum(one.statistics.l2**2 for one in moved if one.statistics is not None))
    largest = max(moved, key=_max_abs, default=None)
    max_abs = _max_abs(largest) if largest is not None else 0.0
    relative = cosine = None
    if products := _products(difference, moved, squares):
        aa, bb, ab = products
        relative = l2 / math.sqrt(aa) if aa else math.inf if l2 else 0.0
        cosine = max(-1.0, min(1.0, ab / math.sqrt(aa) / math.sqrt(bb))) if aa and bb else None
    name = largest.name if largest is not None and max_abs > 0 else None
    return DriftStep(difference, l2, relative, cosine, max_abs, name)


def _products(
    difference: Difference, moved: Sequence[Change], squares: Mapping[str, float]
) -> tuple[float, float, float] | None:
    """Return a², b² and a·b over the weights that both have in one shape; None if unknown."""
    # The products follow from the statistics of the comparison and from the squares of each side, by name.
    # These don't match if tensors were renamed, unreadable, or converted to another layout.
    gone = {one.name for one in difference.removed} | {one.a.name for one in difference.changed}
    is_renamed = any(one.a.name not in squares for one in moved)
    if is_renamed or difference.renamed or difference.broken or difference.rules:
        return None
    same = math.fsum(square for name, square in squares.items() if name not in gone)
    measured = [one.statistics for one in moved if one.statistics is not None]
    retyped = (one for one in moved if one.kind == "dtype" and one.statistics is None)
    same += math.fsum(squares[one.a.name] for one in retyped)
    dots = (one.cosine * one.norm_a * one.norm_b for one in measured if one.norm_a and one.norm_b)
    return (
        same + math.fsum(one.norm_a**2 for one in measured),
        same + math.fsum(one.norm_b**2 for one in measured),
        same + math.fsum(dots),
    )


def _max_abs(change: Change) -> float:
    statistics = change.statistics  # NaN if no pair is finite
    return statistics.max_abs if statistics is not None and not math.isnan(statistics.max_abs) else 0.0


# Norms ----------------------------------------------------------------------------------------------


def _squares(checkpoint: Checkpoint) -> dict[str, float]:
    """Return the sum of squares of each weight, tied ones once."""
    kinds = ("float", "complex")
    return {
        tensor.name: _sum_of_squares(tensor)
        for tensor in checkpoint.tensors
        if tensor.role is Role.WEIGHTS
        and tensor.shares_with is None
        and tensor.values is not None
        and tensor.dtype.numpy is not None
        and tensor.dtype.kind in kinds
    }


def _sum_of_squares(tensor: Tensor) -> float:
    """Return the sum over all elements that are finite; an expanded tensor repeats the stored ones."""
    import numpy as np

    sums, stored = [], 0
    for values in _stored_values(tensor):
        stored += values.size
        parts = values.view(values.real.dtype) if values.dtype.kind == "c" else values
        with np.errstate(invalid="ignore", over="ignore"):
            squares = parts.astype(np.float64)
            np.square(squares, out=squares)  # a dot product would start threads
            total = float(np.sum(squares))
            if not math.isfinite(total):
                total = float(np.sum(squares[np.isfinite(squares)]))
        sums.append(total)
    return math.fsum(sums) * (tensor.size // stored) if stored else 0.0


def _stored_values(tensor: Tensor) -> Iterator[np.ndarray[Any, Any]]:
    import numpy as np

    if tensor.dtype.bits < 8:
        yield tensor.array().reshape(-1)
        return
    assert tensor.values is not None  # the caller asked
    dtype = numpy_dtype(tensor.dtype).newbyteorder("<")
    for block in stored_once(tensor.values).blocks(_BLOCK_BYTES):
        yield np.frombuffer(block, dtype)
