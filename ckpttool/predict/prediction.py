"""One prediction: its inputs, two runs of the model, and the checks of the outputs.

Outputs must be finite, equal in both runs, as recorded, and correct by the user's labels.

Only the child process imports this module.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from ckpttool.core.report import Finding, error, has_errors, note, warning
from ckpttool.core.text import counted
from ckpttool.predict.inputs import (
    Recording,
    is_recording,
    make_inputs,
    name_inputs,
    other_values,
    read_arrays,
    read_recording,
    sized_specs,
    write_recording,
)
from ckpttool.predict.interface import Arrays, CannotTrain, Loaded, LoadFailed, first_line, shape_text
from ckpttool.predict.request import InputSpec, PredictionJob, PredictionRequest

Reload: TypeAlias = Callable[[], Loaded]
"""Loads the model again, with another seed for random values."""
_KEEPS_STATE = "it keeps state: a second run on the same input differs, one by a fresh instance doesn't"
_TOLERANCES = {
    "bfloat16": (1e-2, 1e-3),
    "float16": (1e-3, 1e-4),
    "float32": (1e-5, 1e-6),
    "float64": (1e-8, 1e-10),
}
"""Relative and absolute tolerance by dtype: the differences between processors and versions in a sum. The
absolute one is multiplied by the largest recorded magnitude, if that is below 1 and not 0."""


class NoInputs(Exception):
    """The shape of the inputs is unknown; the text names the options for it."""


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Inputs of a run.

    Attributes:
        arrays: Arrays by the names of the inputs.
        origin: Source of the values, for the summary.
        is_recorded: Whether they are from a recording.
        is_given: Whether the user gave the values or the shapes.
    """

    arrays: Arrays
    origin: str
    is_recorded: bool = False
    is_given: bool = False


# One prediction -------------------------------------------------------------------------------------


def predict(loaded: Loaded, job: PredictionJob, load_again: Reload) -> tuple[str, Sequence[Finding]]:
    """Run a model twice, and return a summary with the findings."""
    request = job.request
    try:
        recording = read_recording(request.expect) if request.expect else None
        inputs, outputs = _first_run(loaded, request, recording)
        again = _run(loaded, inputs)
    except LoadFailed as failure:
        return str(failure.findings[0].message), failure.findings
    findings = list(non_finite_findings(outputs))
    # A second run differs if the model draws random numbers, or if it keeps state (a stateful RNN, a cache, a
    # counter). A fresh instance, loaded with another seed, tells them apart: if it repeats the outputs of the
    # first run, nothing was random, and the difference is only a remark.
    rerun = list(rerun_findings(outputs, again, request))
    keeps_state = bool(rerun) and _repeats_when_reloaded(load_again, inputs, outputs, request)
    findings += [note("keeps-state", _KEEPS_STATE)] if keeps_state else rerun
    summary = [f"{_shapes(outputs)} from {inputs.origin}"]
    if empty := [name for name, array in outputs.items() if not array.size]:
        summary.append(f"no value in {', '.join(empty[:3])}{', …' if len(empty) > 3 else ''}")
    if recording is not None:
        changes = list(recording_findings(outputs, recording.outputs, request))
        findings += changes
        if not changes:
            difference = largest_difference(outputs, recording.outputs)
            summary.append(f"as recorded, within {difference:.2g}" if difference else "exactly as recorded")
    if request.record:
        other_outputs = _run_on_other_values(load_again if keeps_state else lambda: loaded, inputs, request)
        findings += insensitive_findings(outputs, other_outputs, request)
    for verdict, more in (_judge_labels(outputs, request), _training_step(loaded, inputs.arrays, request)):
        summary += [verdict] if verdict else []
        findings += more
    if request.record and not has_errors(findings):
        from importlib.metadata import version

        versions = {"ckpttool": version("ckpttool"), **loaded.versions}
        about = {"checkpoint": os.path.basename(job.path), "versions": versions, "seed": request.seed}
        problems = _write_recording(request.record, Recording(inputs.arrays, outputs, about), findings)
        findings += problems
        summary += [] if problems else [f"recorded in {os.path.basename(request.record)}"]
    return "; ".join(summary), findings


def _first_run(
    loaded: Loaded, request: PredictionRequest, recording: Recording | None
) -> tuple[_Inputs, Arrays]:
    """Return the first inputs that a model accepts, and its outputs for them."""
    first: Exception | None = None
    for inputs in _inputs(loaded, request, recording):
        try:
            return inputs, _run(loaded, inputs)
        except MemoryError:
            raise
        except Exception as failure:  # noqa: BLE001 - other people's code may raise anything
            first = first or failure
    if first is None:
        raise NoInputs("the input's shape is unknown; give --input FILE or --input-shape 1,3,224,224:float32")
    raise first


def _run(loaded: Loaded, inputs: _Inputs) -> Arrays:
    """Return the outputs of a model; at least one must have values."""
    try:
        given = loaded.run(inputs.arrays)
    except MemoryError:
        raise
    except Exception as failure:  # a framework runs other people's code, which may raise anything
        blame = _input_finding(inputs, failure)
        if blame is None:
            raise
        raise LoadFailed(blame) from failure
    outputs = {name: np.asarray(array) for name, array in given.items()}
    if not outputs:
        raise LoadFailed(error("no-output", "the model returned no tensor"))
    if not any(array.size for array in outputs.values()):
        raise LoadFailed(error("no-output", f"the model returned no values: {_shapes(outputs)}"))
    return outputs


_SHAPE_ERROR = re.compile(r"shape|size|dimension|channels|mat1|broadcast", re.IGNORECASE)
"""Words in the errors of frameworks if an input has the wrong shape."""


def _input_finding(inputs: _Inputs, failure: Exception) -> Finding | None:
    """Return a finding if the input may be for another model; None for any other error."""
    if not inputs.is_recorded and not inputs.is_given:
        return None
    if isinstance(failure, LoadFailed):
        first = failure.findings[0]
        if first.code == "no-output" or first.code.startswith("input-"):
            return None
        text, message, where = failure.words, str(first.message), first.where
    else:
        text, message, where = str(failure), first_line(failure), None
    if inputs.is_recorded:
        problem = f"the recorded input doesn't run on this model: {message}"
        return error("recording-mismatch", problem, where)
    if not _SHAPE_ERROR.search(text):
        return None
    shapes = ", ".join(f"{shape_text(one.shape)} {one.dtype}" for one in inputs.arrays.values())
    return error("input-rejected", f"the model rejects the input {shapes}: {message}", where)


def _repeats_when_reloaded(
    load_again: Reload, inputs: _Inputs, outputs: Arrays, request: PredictionRequest
) -> bool:
    """Return whether a fresh instance gives the outputs of the first run, so it only keeps state."""
    try:
        return not any(rerun_findings(outputs, _run(load_again(), inputs), request))
    except Exception:  # noqa: BLE001 - other people's code may raise anything; the difference is reported
        return False


def _run_on_other_values(load: Reload, inputs: _Inputs, request: PredictionRequest) -> Arrays:
    """Return the outputs for other inputs of the same kind; none if the model takes no input."""
    if not inputs.arrays:
        return {}
    try:
        return _run(load(), _Inputs(other_values(inputs.arrays, request.seed + 1), "other values"))
    except Exception:  # noqa: BLE001 - other people's code may raise anything for random values
        return {}


def _shapes(arrays: Arrays, noun: str = "output") -> str:
    if len(arrays) > 3:
        return counted(len(arrays), noun)
    return ", ".join(f"{name} {shape_text(array.shape)}" for name, array in arrays.items())


def _judge_labels(outputs: Arrays, request: PredictionRequest) -> tuple[str, list[Finding]]:
    if request.labels is None:
        return "", []
    try:
        labels = next(iter(read_arrays(request.labels, "labels-unreadable").values()))
    except LoadFailed as failure:
        return "", list(failure.findings)
    return judge_by_labels(next(iter(outputs.values())), labels, request)


def _training_step(loaded: Loaded, inputs: Arrays, request: PredictionRequest) -> tuple[str, list[Finding]]:
    if not request.resume_step:
        return "", []
    try:
        return loaded.train(inputs), []
    except CannotTrain as failure:
        return "", [error("cannot-train", f"no training step: {failure}")]
    except LoadFailed as failure:
        return "", list(failure.findings)


def _write_recording(path: str, recording: Recording, findings: Sequence[Finding]) -> list[Finding]:
    if any(finding.code == "runs-differ" for finding in findings):
        reason = "two runs on the same input differ, so no later run could match"
        return [error("recording-not-written", reason, path)]
    try:
        write_recording(path, recording)
    except OSError as failure:
        return [error("recording-not-written", f"it can't be written: {failure.strerror}", path)]
    return []


# Inputs ---------------------------------------------------------------------------------------------


def _inputs(loaded: Loaded, request: PredictionRequest, recording: Recording | None) -> Iterator[_Inputs]:
    """Yield inputs to try: the user's, or recorded ones, or the checkpoint's examples, or generated ones.

    Several if sizes are unknown; none if the shapes are.
    """
    specs, examples = loaded.inputs(), loaded.examples()
    candidates: Iterable[_Inputs] = ()
    if request.input:
        candidates = (_inputs_in_file(request.input),)
    elif recording and recording.inputs:
        candidates = (_Inputs(recording.inputs, "the recorded input", is_recorded=True),)
    elif request.input_shapes:
        candidates = (replace(_generated_inputs(request.input_shapes, request.seed), is_given=True),)
    elif examples:
        candidates = (_Inputs(examples, "the checkpoint's example input"),)
    elif specs:
        candidates = (
            _generated_inputs(one, request.seed, are_known=one == specs)
            for one in sized_specs(specs, request.batch_size)
        )
    for inputs in candidates:
        yield replace(inputs, arrays=name_inputs(inputs.arrays, specs, inputs.origin))


def _generated_inputs(specs: Sequence[InputSpec], seed: int, *, are_known: bool = True) -> _Inputs:
    arrays = make_inputs(specs, seed)
    sizes = _shapes(arrays, "input") if len(arrays) > 1 else shape_text(next(iter(arrays.values())).shape)
    return _Inputs(arrays, f"generated input{'' if are_known else f' ({sizes})'}, seed {seed}")


def _inputs_in_file(path: str) -> _Inputs:
    """Return the inputs in the user's file, which may be a recording."""
    arrays, name = read_arrays(path, "input-unreadable"), os.path.basename(path)
    if not is_recording(arrays):
        return _Inputs(arrays, name, is_given=True)
    return _Inputs(read_recording(path).inputs, f"the input recorded in {name}", is_recorded=True)


# Checks of the outputs ------------------------------------------------------------------------------


def non_finite_findings(outputs: Arrays) -> Iterator[Finding]:
    """Yield a finding for each output with NaN or infinities."""
    for name, array in ((name, _plain(array)) for name, array in outputs.items()):
        if array.dtype.kind in "fc":
            nan, infinite = int(np.isnan(array).sum()), int(np.isinf(array).sum())
            if nan or infinite:
                counts = " and ".join(f"{n:,} {what}" for n, what in ((nan, "NaN"), (infinite, "Inf")) if n)
                yield error("output-not-finite", f"{counts} in {array.size:,} values", name)


def _plain(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an array of a dtype of NumPy's own: ml_dtypes' floats become float32 without loss."""
    return array.astype(np.float32) if array.dtype.kind == "V" and array.dtype.names is None else array


def rerun_findings(outputs: Arrays, again: Arrays, request: PredictionRequest) -> Iterator[Finding]:
    """Yield a finding for each output that differs in a second run on the same inputs."""
    for name, array in outputs.items():
        if name not in again or array.shape != again[name].shape:
            yield warning("runs-differ", "a second run returned other outputs", name)
        elif difference := _difference(array, again[name], request):
            yield warning("runs-differ", f"a second run on the same inputs differs: {difference}", name)


def recording_findings(outputs: Arrays, recorded: Arrays, request: PredictionRequest) -> Iterator[Finding]:
    """Yield a finding for each output that differs from the recorded one."""
    for name in sorted(recorded.keys() | outputs.keys()):
        if name not in outputs or name not in recorded:
            side = (
                "is recorded, but not returned by this model"
                if name in recorded
                else "is not in the recording"
            )
            yield error("recording-mismatch", f"output {name!r} {side}", name)
        elif outputs[name].shape != recorded[name].shape:
            shapes = f"{outputs[name].shape} now, {recorded[name].shape} recorded"
            yield error("recording-mismatch", f"shape changed: {shapes}", name)
        elif difference := _difference(outputs[name], recorded[name], request, "recorded"):
            yield error("outputs-changed", difference, name)


def tolerances(
    now: np.ndarray[Any, Any], recorded: np.ndarray[Any, Any], request: PredictionRequest
) -> tuple[float, float]:
    """Return the relative and absolute tolerance for two arrays; 0 unless they hold floats."""
    # Two results can agree only as far as the coarser of their dtypes allows: a model may have been recorded
    # in float32, and run in bfloat16.
    coarser = now.dtype if now.dtype.itemsize <= recorded.dtype.itemsize else recorded.dtype
    name = {"complex64": "float32", "complex128": "float64"}.get(coarser.name, coarser.name)
    rtol, atol = _TOLERANCES.get(name, (0.0, 0.0))
    # At most 1: a mask of logits, like -1e9, would hide all other differences.
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
    now: np.ndarray[Any, Any], other: np.ndarray[Any, Any], request: PredictionRequest, when: str = "before"
) -> str:
    """Return the differences of two arrays of one shape as text; empty if they are close."""
    rtol, atol = tolerances(now, other, request)
    now, other = _plain(now), _plain(other)
    if now.dtype.kind not in "fciub" or other.dtype.kind not in "fciub":
        differ = np.asarray(now.astype(str) != other.astype(str))
        return f"{int(differ.sum()):,} of {now.size:,} values differ" if differ.any() else ""
    # Two NaN count as equal, although NaN differs from itself. Integers are compared as they are, since a
    # float doesn't hold every whole number.
    if not rtol and not atol:
        differ = np.asarray((now != other) & ~((now != now) & (other != other)))
    else:
        wide = np.complex128 if "c" in (now.dtype.kind, other.dtype.kind) else np.float64
        with np.errstate(all="ignore"):
            is_close = np.isclose(now.astype(wide), other.astype(wide), rtol, atol, equal_nan=True)
        differ = np.asarray(~is_close)
    if not differ.any():
        return ""
    distance = np.where(differ, _distance(now, other), -1.0)
    at = np.unravel_index(int(np.argmax(np.nan_to_num(distance, nan=np.inf))), now.shape)
    place = f"[{', '.join(str(int(index)) for index in at)}]" if at else "the scalar"
    return (
        f"{int(differ.sum()):,} of {now.size:,} values differ, most at {place}: {_value_text(now[at])} now, "
        f"{_value_text(other[at])} {when} (rtol {rtol:.3g}, atol {atol:.3g})"
    )


def insensitive_findings(
    outputs: Arrays, other_outputs: Arrays, request: PredictionRequest
) -> Iterator[Finding]:
    """Yield a finding for each output that may not show a change of the weights.

    Args:
        outputs: Recorded outputs.
        other_outputs: Outputs for other inputs; empty for a model without inputs.
        request: Options with the tolerances.
    """
    # A recording is to reveal changed weights. It can't if outputs are within the tolerance of 0, saturated,
    # or the same for other inputs. Integers and texts are checked only if there are no floats, since the
    # classes of a model may well be the same for other inputs.
    with_values = {name: one for name, one in outputs.items() if one.size}
    floats = {name: one for name, one in with_values.items() if _plain(one).dtype.kind in "fc"}
    for name, array in (floats or with_values).items():
        rtol, atol = tolerances(array, array, request)
        other = other_outputs.get(name)
        if name in floats and _largest(array) <= atol:
            doubt = f"no value is further from 0 than the tolerance, {atol:.3g}"
        elif name in floats and (ends := _saturated_ends(_plain(array), rtol, atol)):
            doubt = f"saturated, every value is {ends}"
        elif other is not None and other.shape == array.shape and not _difference(other, array, request):
            doubt = "constant, other inputs give the same"
        else:
            continue
        yield warning("recording-insensitive", f"{doubt}: it may not reveal a change of the weights", name)


def _saturated_ends(array: np.ndarray[Any, Any], rtol: float, atol: float) -> str:
    """Return the ends of the range of a sigmoid or a tanh, if every value is one of them."""
    for low, high in ((0, 1), (-1, 1)):
        if (np.isclose(array, low, rtol, atol) | np.isclose(array, high, rtol, atol)).all():
            return f"{low} or {high}"
    return ""


def _distance(now: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    with np.errstate(all="ignore"):
        return np.asarray(np.abs(now.astype(np.complex128) - other.astype(np.complex128)))


def _value_text(value: Any) -> str:
    return f"{value:.6g}" if value.dtype.kind in "fc" else str(value)


def largest_difference(outputs: Arrays, recorded: Arrays) -> float:
    """Return the largest absolute difference between two sets of outputs with the same names and shapes."""
    pairs = [(_plain(outputs[name]), _plain(recorded[name])) for name in outputs if outputs[name].size]
    numbers = [(now, then) for now, then in pairs if now.dtype.kind in "fciub" and then.dtype.kind in "fciub"]
    return max((float(np.nan_to_num(_distance(*pair), nan=0.0).max()) for pair in numbers), default=0.0)


def judge_by_labels(
    output: np.ndarray[Any, Any], labels: np.ndarray[Any, Any], request: PredictionRequest
) -> tuple[str, list[Finding]]:
    """Return the accuracy and the error of an output in words, with findings for the required ones.

    A class is the index of the largest value on the last axis. If output and labels have the same shape,
    integer labels are compared with the rounded output, and one-hot labels by their classes.
    """
    output = _plain(output)
    if not labels.size or labels.dtype.kind not in "fiub" or output.dtype.kind not in "fiub":
        return "", [_label_mismatch(output, labels)]
    summary, findings = [], []
    if request.min_accuracy is not None:
        right = _right_answers(output, labels)
        if right is None:
            return "", [_label_mismatch(output, labels)]
        summary.append(f"accuracy {right.mean():.4g} on {right.size:,}")
        if not right.mean() >= request.min_accuracy:
            message = f"{right.mean():.4g} on {right.size:,} labels ({request.min_accuracy:g} or more)"
            findings.append(error("accuracy-too-low", message))
    if request.max_error is not None:
        if np.squeeze(output).shape != np.squeeze(labels).shape:
            return "", [_label_mismatch(output, labels)]
        mean = float(np.abs(np.squeeze(output).astype(float) - np.squeeze(labels)).mean())
        summary.append(f"mean error {mean:.4g}")
        if not mean <= request.max_error:
            message = f"the mean absolute error is {mean:.4g} ({request.max_error:g} or less)"
            findings.append(error("error-too-large", message))
    return ", ".join(summary), findings


def _right_answers(output: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    """Return an array of booleans, true for correct answers; None if output and labels don't fit."""
    if output.shape == labels.shape:
        # Each row has one 1 for its class: else nearly every 0 would count as a right answer.
        has_rows = labels.ndim >= 2 and labels.shape[-1] >= 2
        if has_rows and np.isin(labels, (0, 1)).all() and (labels.sum(-1) == 1).all():
            return np.asarray(output.argmax(-1) == labels.argmax(-1))
        return np.asarray(np.rint(output) == labels if output.dtype.kind == "f" else output == labels)
    if output.ndim and output.shape[:-1] == labels.shape and output.shape[-1] > 1:
        return np.asarray(output.argmax(-1) == labels)
    if np.squeeze(output).shape == np.squeeze(labels).shape:
        return _right_answers(output.reshape(labels.shape), labels)
    return None


def _label_mismatch(output: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> Finding:
    return error(
        "labels-mismatch", f"labels of shape {labels.shape} don't fit an output of shape {output.shape}"
    )
