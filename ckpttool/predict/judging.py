"""One prediction, from its inputs to the verdict."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from ckpttool.predict.failures import first_line
from ckpttool.predict.golden import Recording, is_recording, read_recording, write_recording
from ckpttool.predict.inputs import fitted, made_up, other_values, read_arrays, sized
from ckpttool.predict.interface import Arrays, CannotTrain, Loaded, LoadFailed
from ckpttool.predict.matching import shape_text
from ckpttool.predict.outputs import (
    insensitive,
    judged_by_labels,
    largest_difference,
    not_finite,
    unlike_again,
    unlike_recorded,
)
from ckpttool.predict.request import InputSpec, Job, Request
from ckpttool.report import Finding, counted, error, has_errors, note

Reload: TypeAlias = Callable[[], Loaded]
"""Loads the model once more, as it was loaded first; only what it draws at random is drawn otherwise."""
_KEEPS_STATE = "it keeps state: a second run on the same input differs, one of a fresh instance doesn't"


class NoInputs(Exception):
    """Nothing says what the model is to be run on; the text says what would."""


@dataclass(frozen=True, slots=True)
class _Inputs:
    arrays: Arrays
    origin: str
    is_recorded: bool = False


def predicted(loaded: Loaded, job: Job, load_again: Reload) -> tuple[str, Sequence[Finding]]:
    """Run a model twice and return what was seen, in words, with what is wrong.

    Raises:
        NoInputs: Nothing says what to run it on.
    """
    request = job.request
    try:
        recording = read_recording(request.expect) if request.expect else None
        inputs, outputs = _first_run(loaded, request, recording)
        again = _run(loaded, inputs)
    except LoadFailed as failure:
        return failure.findings[0].message, failure.findings
    findings = list(not_finite(outputs))
    unlike = list(unlike_again(outputs, again, request))
    keeps_state = bool(unlike) and _is_same_afresh(load_again, inputs, outputs, request)
    findings += [note("keeps-state", _KEEPS_STATE)] if keeps_state else unlike
    told = [f"{_shapes(outputs)} from {inputs.origin}", *_empty(outputs)]
    if recording is not None:
        unlike = list(unlike_recorded(outputs, recording.outputs, request))
        findings += unlike
        told += [] if unlike else [_as_recorded(largest_difference(outputs, recording.outputs))]
    if request.record:
        again = _elsewhere(load_again if keeps_state else lambda: loaded, inputs, request)
        findings += insensitive(outputs, again, request)
    for more, found in (_labelled(outputs, request), _trained(loaded, inputs.arrays, request)):
        told += [more] if more else []
        findings += found
    if request.record and not has_errors(findings):
        found = _recorded(request.record, Recording(inputs.arrays, outputs, _about(loaded, job)), findings)
        findings += found
        told += [] if found else [f"recorded in {os.path.basename(request.record)}"]
    return "; ".join(told), findings


def _first_run(loaded: Loaded, request: Request, recording: Recording | None) -> tuple[_Inputs, Arrays]:
    """Return the first inputs that a model takes, and what it gives for them.

    Raises:
        NoInputs: Nothing says what to run it on.
        LoadFailed: It takes none.
    """
    first: Exception | None = None
    for inputs in _inputs(loaded, request, recording):
        try:
            return inputs, _run(loaded, inputs)
        except MemoryError:
            raise
        except Exception as failure:  # noqa: BLE001 - other people's code may raise anything
            first = first or failure
    if first is None:
        raise NoInputs("nothing says what the model takes: --input FILE or --input-shape 1,3,224,224:float32")
    raise first


def _is_same_afresh(load_again: Reload, inputs: _Inputs, outputs: Arrays, request: Request) -> bool:
    """Tell whether a model that was just loaded gives what it gave at first: it only keeps state."""
    try:
        return not any(unlike_again(outputs, _run(load_again(), inputs), request))
    except Exception:  # noqa: BLE001 - other people's code may raise anything; that the runs differ is told
        return False


def _elsewhere(load: Reload, inputs: _Inputs, request: Request) -> Arrays:
    """Return what a model gives on other inputs of the same kind; nothing where it takes none."""
    if not inputs.arrays:
        return {}
    try:
        return _run(load(), _Inputs(other_values(inputs.arrays, request.seed + 1), "other values"))
    except Exception:  # noqa: BLE001 - other people's code may raise anything at values that nobody chose
        return {}


def _as_recorded(difference: float) -> str:
    return f"as recorded, within {difference:.2g}" if difference else "exactly as recorded"


def _about(loaded: Loaded, job: Job) -> dict[str, Any]:
    from importlib.metadata import version

    versions = {"ckpttool": version("ckpttool"), **loaded.versions}
    return {"checkpoint": os.path.basename(job.path), "versions": versions, "seed": job.request.seed}


def _inputs(loaded: Loaded, request: Request, recording: Recording | None) -> Iterator[_Inputs]:
    """Yield what to run on, the user's first, then what is recorded, then the model's own.

    There are several where sizes are unknown, and none where nothing says what to run on.

    Raises:
        LoadFailed: They don't fit the model.
    """
    specs = loaded.inputs()
    examples = loaded.examples()
    found: Iterable[_Inputs] = ()
    if request.input:
        found = (_given(request.input),)
    elif recording and recording.inputs:
        found = (_Inputs(recording.inputs, "the recorded input", is_recorded=True),)
    elif request.input_shapes:
        found = (_made_up(request.input_shapes, request.seed),)
    elif examples:
        found = (_Inputs(examples, "the checkpoint's example input"),)
    elif specs:
        found = (
            _made_up(one, request.seed, are_known=one == specs) for one in sized(specs, request.batch_size)
        )
    for inputs in found:
        yield replace(inputs, arrays=fitted(inputs.arrays, specs, inputs.origin))


def _made_up(specs: Sequence[InputSpec], seed: int, *, are_known: bool = True) -> _Inputs:
    arrays = made_up(specs, seed)
    sizes = _shapes(arrays, "input") if len(arrays) > 1 else shape_text(next(iter(arrays.values())).shape)
    return _Inputs(arrays, f"made-up input{'' if are_known else f' ({sizes})'}, seed {seed}")


def _given(path: str) -> _Inputs:
    """Return the inputs in the user's file; a recording's, if it is one."""
    arrays, name = read_arrays(path, "input-unreadable"), os.path.basename(path)
    if not is_recording(arrays):
        return _Inputs(arrays, name)
    return _Inputs(read_recording(path).inputs, f"the input recorded in {name}", is_recorded=True)


def _run(loaded: Loaded, inputs: _Inputs) -> Arrays:
    with _of_recording() if inputs.is_recorded else nullcontext():
        given = loaded.run(inputs.arrays)
    outputs = {name: np.asarray(array) for name, array in given.items()}
    if not outputs:
        raise LoadFailed(error("no-output", "the model gives no tensor"))
    if not any(array.size for array in outputs.values()):
        raise LoadFailed(error("no-output", f"there is no value in what the model gives: {_shapes(outputs)}"))
    return outputs


@contextmanager
def _of_recording() -> Iterator[None]:
    """Say of whatever is raised inside that the recording may be another model's.

    Raises:
        LoadFailed: Something was raised.
    """
    said = "the recorded input doesn't run on this model"
    try:
        yield
    except MemoryError:
        raise
    except LoadFailed as failure:
        first = failure.findings[0]
        if first.code == "no-output":
            raise
        raise LoadFailed(error("recording-mismatch", f"{said}: {first.message}", first.where)) from failure
    except Exception as failure:  # a framework runs other people's code, which may raise anything
        raise LoadFailed(error("recording-mismatch", f"{said}: {first_line(failure)}")) from failure


def _empty(outputs: Arrays) -> list[str]:
    """Return in words which outputs have no value that could be judged."""
    names = [name for name, array in outputs.items() if not array.size]
    return [f"no value in {', '.join(names[:3])}{', …' if len(names) > 3 else ''}"] if names else []


def _shapes(arrays: Arrays, noun: str = "output") -> str:
    if len(arrays) > 3:
        return counted(len(arrays), noun)
    return ", ".join(f"{name} {shape_text(array.shape)}" for name, array in arrays.items())


def _labelled(outputs: Arrays, request: Request) -> tuple[str, list[Finding]]:
    if request.labels is None:
        return "", []
    try:
        labels = next(iter(read_arrays(request.labels, "labels-unreadable").values()))
    except LoadFailed as failure:
        return "", list(failure.findings)
    return judged_by_labels(next(iter(outputs.values())), labels, request)


def _trained(loaded: Loaded, inputs: Arrays, request: Request) -> tuple[str, list[Finding]]:
    if not request.resume_step:
        return "", []
    try:
        return loaded.train(inputs), []
    except CannotTrain as failure:
        return "", [error("cannot-train", f"no training step: {failure}")]
    except LoadFailed as failure:
        return "", list(failure.findings)


def _recorded(path: str, recording: Recording, findings: Sequence[Finding]) -> list[Finding]:
    if any(finding.code == "runs-differ" for finding in findings):
        told = "two runs on one input differ: no later run could be as recorded"
        return [error("recording-not-written", told, path)]
    try:
        write_recording(path, recording)
    except OSError as failure:
        return [error("recording-not-written", f"it can't be written: {failure.strerror}", path)]
    return []
