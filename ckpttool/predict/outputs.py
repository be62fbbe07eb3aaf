"""What the outputs of a model are judged by: finite, the same twice, as recorded, right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ckpttool.predict.interface import Arrays
from ckpttool.predict.request import Request
from ckpttool.report import Finding, error, warning

_TOLERANCES = {
    "bfloat16": (1e-2, 1e-3),
    "float16": (1e-3, 1e-4),
    "float32": (1e-5, 1e-6),
    "float64": (1e-8, 1e-10),
}
"""By dtype, what other processors and versions do to a sum, and not more: relative to each value, and to the
largest that was recorded, where that is less than 1 and not 0."""


def not_finite(outputs: Arrays) -> Iterator[Finding]:
    """Yield a finding for each output with NaN or infinities."""
    for name, array in ((name, _plain(array)) for name, array in outputs.items()):
        if array.dtype.kind in "fc":
            nan, infinite = int(np.isnan(array).sum()), int(np.isinf(array).sum())
            if nan or infinite:
                told = " and ".join(f"{n:,} {what}" for n, what in ((nan, "NaN"), (infinite, "Inf")) if n)
                yield error("output-not-finite", f"{told} in {array.size:,} values", name)


def _plain(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an array that NumPy itself calculates with: ml_dtypes' floats become float32 without loss."""
    return array.astype(np.float32) if array.dtype.kind == "V" and array.dtype.names is None else array


def unlike_again(outputs: Arrays, again: Arrays, request: Request) -> Iterator[Finding]:
    """Yield a finding for each output that a second run on the same inputs gave otherwise."""
    for name, array in outputs.items():
        if name not in again or array.shape != again[name].shape:
            yield warning("runs-differ", "a second run gave other outputs", name)
        elif difference := _difference(array, again[name], request):
            yield warning("runs-differ", f"a second run on the same inputs differs: {difference}", name)


def unlike_recorded(outputs: Arrays, recorded: Arrays, request: Request) -> Iterator[Finding]:
    """Yield a finding for each output that is not as recorded."""
    for name in sorted(recorded.keys() | outputs.keys()):
        if name not in outputs or name not in recorded:
            side = "is recorded, and this model gives none" if name in recorded else "is not in the recording"
            yield error("recording-mismatch", f"output {name!r} {side}", name)
        elif outputs[name].shape != recorded[name].shape:
            shapes = f"{outputs[name].shape} now, {recorded[name].shape} recorded"
            yield error("recording-mismatch", f"the shape is another: {shapes}", name)
        elif difference := _difference(outputs[name], recorded[name], request, "recorded"):
            yield error("outputs-changed", difference, name)


def tolerances(
    now: np.ndarray[Any, Any], recorded: np.ndarray[Any, Any], request: Request
) -> tuple[float, float]:
    """Return the relative and absolute tolerance of two arrays' values; exact for what is not a float."""
    coarser = now.dtype if now.dtype.itemsize <= recorded.dtype.itemsize else recorded.dtype
    name = {"complex64": "float32", "complex128": "float64"}.get(coarser.name, coarser.name)
    rtol, atol = _TOLERANCES.get(name, (0.0, 0.0))
    # Not more than 1: what masks logits, like -1e9, would hide all that is beside it.
    if atol:
        atol *= min(1.0, _largest(recorded)) or 1.0
    return (rtol if request.rtol is None else request.rtol, atol if request.atol is None else request.atol)


def _largest(array: np.ndarray[Any, Any]) -> float:
    """Return the largest finite magnitude in an array, 0 if it has none."""
    array = _plain(array)
    if array.dtype.kind not in "fciub":
        return 0.0
    with np.errstate(all="ignore"):
        sizes = np.abs(array.astype(np.complex128))
    return float(sizes.max(initial=0.0, where=np.isfinite(sizes)))


def _difference(
    now: np.ndarray[Any, Any], other: np.ndarray[Any, Any], request: Request, said: str = "before"
) -> str:
    """Return in words where two arrays of one shape differ; nothing where they don't."""
    rtol, atol = tolerances(now, other, request)
    now, other = _plain(now), _plain(other)
    if now.dtype.kind not in "fciub" or other.dtype.kind not in "fciub":
        differ = np.asarray(now.astype(str) != other.astype(str))
        return f"{int(differ.sum()):,} of {now.size:,} values differ" if differ.any() else ""
    differ = _far(now, other, rtol, atol)
    if not differ.any():
        return ""
    distance = np.where(differ, _distance(now, other), -1.0)
    at = np.unravel_index(int(np.argmax(np.nan_to_num(distance, nan=np.inf))), now.shape)
    place = f"[{', '.join(str(int(index)) for index in at)}]" if at else "the scalar"
    return (
        f"{int(differ.sum()):,} of {now.size:,} values differ, most at {place}: {_said(now[at])} now, "
        f"{_said(other[at])} {said} (rtol {rtol:.3g}, atol {atol:.3g})"
    )


def insensitive(outputs: Arrays, elsewhere: Arrays, request: Request) -> Iterator[Finding]:
    """Yield a finding for each output that could not show a change: it would be as recorded all the same.

    Whole numbers and texts are looked at only where there is nothing else: classes need not change.

    Args:
        outputs: What is recorded.
        elsewhere: What other inputs gave; nothing where that is not known.
        request: Which tolerance there will be.
    """
    judged = {name: one for name, one in outputs.items() if one.size}
    floats = {name: one for name, one in judged.items() if _plain(one).dtype.kind in "fc"}
    for name, array in (floats or judged).items():
        rtol, atol = tolerances(array, array, request)
        if name in floats and _largest(array) <= atol:
            told = f"no value is further from 0 than the tolerance, {atol:.3g}"
        elif name in floats and (ends := _saturated(_plain(array), rtol, atol)):
            told = f"saturated, every value is {ends}"
        elif name in elsewhere and _is_same(elsewhere[name], array, request):
            told = "constant, other input gives the same"
        else:
            continue
        yield warning("recording-insensitive", f"{told}: a change of the weights may not show in it", name)


def _saturated(array: np.ndarray[Any, Any], rtol: float, atol: float) -> str:
    """Return the ends of a sigmoid's or a tanh's range, if all values lie there."""
    for low, high in ((0, 1), (-1, 1)):
        if (np.isclose(array, low, rtol, atol) | np.isclose(array, high, rtol, atol)).all():
            return f"{low} or {high}"
    return ""


def _is_same(now: np.ndarray[Any, Any], other: np.ndarray[Any, Any], request: Request) -> bool:
    return now.shape == other.shape and not _difference(now, other, request)


def _far(
    now: np.ndarray[Any, Any], other: np.ndarray[Any, Any], rtol: float, atol: float
) -> np.ndarray[Any, Any]:
    if not rtol and not atol:  # a float doesn't hold every whole number
        return np.asarray((now != other) & ~((now != now) & (other != other)))
    with np.errstate(all="ignore"):
        wide = np.complex128 if "c" in (now.dtype.kind, other.dtype.kind) else np.float64
        return np.asarray(~np.isclose(now.astype(wide), other.astype(wide), rtol, atol, equal_nan=True))


def _distance(now: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    with np.errstate(all="ignore"):
        return np.asarray(np.abs(now.astype(np.complex128) - other.astype(np.complex128)))


def _said(value: Any) -> str:
    return f"{value:.6g}" if value.dtype.kind in "fc" else str(value)


def largest_difference(outputs: Arrays, recorded: Arrays) -> float:
    """Return the largest absolute difference between two sets of outputs with the same names and shapes."""
    pairs = [(_plain(outputs[name]), _plain(recorded[name])) for name in outputs if outputs[name].size]
    numbers = [(now, then) for now, then in pairs if now.dtype.kind in "fciub" and then.dtype.kind in "fciub"]
    return max((float(np.nan_to_num(_distance(*pair), nan=0.0).max()) for pair in numbers), default=0.0)


def judged_by_labels(
    output: np.ndarray[Any, Any], labels: np.ndarray[Any, Any], request: Request
) -> tuple[str, list[Finding]]:
    """Return how right an output is, in words, with what falls short.

    Classes are the largest of the last axis; where output and labels have one shape, whole-number labels are
    compared with the output rounded, and one-hot ones by their classes.
    """
    output = _plain(output)
    if not labels.size or labels.dtype.kind not in "fiub" or output.dtype.kind not in "fiub":
        return "", [_unlike(output, labels)]
    told, findings = [], []
    if request.min_accuracy is not None:
        right = _right(output, labels)
        if right is None:
            return "", [_unlike(output, labels)]
        told.append(f"accuracy {right.mean():.4g} on {right.size:,}")
        if not right.mean() >= request.min_accuracy:
            message = f"{right.mean():.4g} on {right.size:,} labels ({request.min_accuracy:g} or more)"
            findings.append(error("accuracy-too-low", message))
    if request.max_error is not None:
        if np.squeeze(output).shape != np.squeeze(labels).shape:
            return "", [_unlike(output, labels)]
        mean = float(np.abs(np.squeeze(output).astype(float) - np.squeeze(labels)).mean())
        told.append(f"mean error {mean:.4g}")
        if not mean <= request.max_error:
            message = f"the mean absolute error is {mean:.4g} ({request.max_error:g} or less)"
            findings.append(error("error-too-large", message))
    return ", ".join(told), findings


def _right(output: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    """Return which answers are right, or None where output and labels don't fit."""
    if output.shape == labels.shape and _is_one_hot(labels):
        return np.asarray(output.argmax(-1) == labels.argmax(-1))
    if output.shape == labels.shape:
        return np.asarray(np.rint(output) == labels if output.dtype.kind == "f" else output == labels)
    if output.ndim and output.shape[:-1] == labels.shape and output.shape[-1] > 1:
        return np.asarray(output.argmax(-1) == labels)
    if np.squeeze(output).shape == np.squeeze(labels).shape:
        return _right(output.reshape(labels.shape), labels)
    return None


def _is_one_hot(labels: np.ndarray[Any, Any]) -> bool:
    """Tell whether each row has one 1 for its class; else nearly every 0 would count as a right answer."""
    if labels.ndim < 2 or labels.shape[-1] < 2:
        return False
    return bool(np.isin(labels, (0, 1)).all() and (labels.sum(-1) == 1).all())


def _unlike(output: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> Finding:
    return error(
        "labels-mismatch", f"labels of shape {labels.shape} don't fit an output of shape {output.shape}"
    )
