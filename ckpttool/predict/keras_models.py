"""What Keras loads: whole models, with ``safe_mode`` on, and files of weights into a model of the user's.

Only the child process imports this module, through ``keras3_models`` or ``tf_keras_models``: Keras 2 lives on
as ``tf_keras``, and is asked where it wrote the file.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from tempfile import TemporaryDirectory
from typing import Any

from ckpttool.predict.failures import told
from ckpttool.predict.interface import Arrays, Loaded, LoadFailed
from ckpttool.predict.keras_calls import (
    build,
    call,
    compile_with,
    keras_inputs,
    plain_outputs,
    trained_by_keras,
)
from ckpttool.predict.matching import at_most, missing, not_consumed, other_shape
from ckpttool.predict.models import imported, made
from ckpttool.predict.request import InputSpec, Job
from ckpttool.report import Finding, counted, error, note, warning

_SKIPPED = re.compile(
    r"Skipping variable loading for optimizer .* has (?P<own>\d+) var.* has (?P<saved>\d+) var"
)
_UNUSED = 2
"""Variables of an optimizer that never made a step: the iterations and the learning rate."""
_LOSSES = ("mse", "mae", "mape", "msle")
_Shapes = Mapping[str, tuple[int, ...]]


class KerasModel(Loaded):
    """A Keras model, of version 2 or 3."""

    def __init__(self, job: Job, model: Any, findings: Iterable[Finding] = (), optimizer: Any = None) -> None:
        self._job = job
        self._model = model
        keras = import_module(_package(model))
        backend = sys.modules[keras.config.backend() if hasattr(keras, "config") else "tensorflow"]
        self.versions = {keras.__name__: keras.__version__, backend.__name__: backend.__version__}
        parameters = counted(int(model.count_params()), "parameter") if model.built else "not built yet"
        more = f"; {type(optimizer).__name__} with its state" if optimizer is not None else ""
        self.detail = f"Keras {keras.__version__}: {type(model).__name__} {model.name}, {parameters}{more}"
        self.findings = tuple(findings)

    def inputs(self) -> tuple[InputSpec, ...]:
        return keras_inputs(self._model)

    def run(self, inputs: Arrays) -> Arrays:
        with told("predict-failed"):
            return plain_outputs(call(self._model, inputs))

    def train(self, inputs: Arrays) -> str:
        return trained_by_keras(self._model, inputs)


def _package(model: Any) -> str:
    """Return which Keras a model is of; one of the user's classes is of the Keras that it derives from."""
    names = {one.__module__.partition(".")[0] for one in type(model).__mro__}
    return "tf_keras" if "tf_keras" in names else "keras"


# Whole models ---------------------------------------------------------------------------------------


def _model(job: Job) -> Loaded:
    keras = import_module("tf_keras" if job.framework == "tf_keras" else "keras")
    request = job.request
    own = {**_short_names(keras), **(_own_classes(request.model) if request.model else {})}
    load = partial(keras.models.load_model, job.path, custom_objects=own, safe_mode=not request.trust)
    with _warned() as said:
        model, findings = _compiled(load)
    _require_all_taken(job, model)
    optimizer = _checked_optimizer(job, model) if request.optimizer else None
    findings = [*findings, *_not_restored(said), *_started_afresh(job, model)]
    return KerasModel(job, model, findings, optimizer)


def _started_afresh(job: Job, model: Any) -> list[Finding]:
    """Give a model a new optimizer where Keras made one for no variables, which can't make a step.

    Keras 3 does so for each HDF5 file of its own, and leaves the saved state out.
    """
    optimizer = getattr(model, "optimizer", None)
    if (
        optimizer is None
        or job.options["optimizer_tensors"] <= _UNUSED
        or len(_variables_of(optimizer)) > _UNUSED
    ):
        return []
    compile_with(model, type(optimizer).from_config(optimizer.get_config()))
    make = warning if job.request.resume_step or job.request.optimizer else note
    return [
        make("optimizer-mismatch", "Keras loads this file without its optimizer's state; a new one stands in")
    ]


def _variables_of(optimizer: Any) -> Sequence[Any]:
    found = optimizer.variables
    return list(found() if callable(found) else found)  # Keras 2's old ones have a method


def _compiled(load: Callable[..., Any]) -> tuple[Any, list[Finding]]:
    """Return a model as it was compiled; as it is, where a loss or metric of the user's can't be found again.

    Raises:
        LoadFailed: It can't be loaded at all.
    """
    try:
        with told("load-failed"):
            return load(), []
    except LoadFailed as failure:
        text = failure.findings[0].message
        if not re.search(r"keras\.(metrics|losses)\.|metric|loss function", text):
            raise LoadFailed(_with_hint(failure.findings[0])) from failure
        with told("load-failed"):
            model = load(compile=False)
        return model, [warning("not-compiled", f"it was loaded without its optimizer and loss: {text}")]


def _with_hint(finding: Finding) -> Finding:
    if "Could not locate" not in finding.message and "Unknown layer" not in finding.message:
        return finding
    return replace(
        finding,
        message=f"{finding.message.rstrip('.')} (--model FILE.py or PACKAGE.MODULE imports its module first)",
    )


def _short_names(keras: Any) -> dict[str, Any]:
    """Return losses by the short names that Keras 3 writes into HDF5 files, and doesn't find again itself."""
    return {name: keras.losses.get(name) for name in _LOSSES} if keras.__name__ == "keras" else {}


def _own_classes(reference: str) -> dict[str, Any]:
    """Import the user's module, which registers its classes with Keras, and return its classes and functions.

    Those that are registered are found without; old files name theirs without a package.
    """
    place, _, name = reference.rpartition(":")
    module = imported(place or name)
    return {
        key: value
        for key, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__
        and (inspect.isclass(value) or inspect.isfunction(value))
    }


def _checked_optimizer(job: Job, model: Any) -> Any:
    """Return a model's own optimizer, which must be what the user says; one that has none gets the user's.

    Raises:
        LoadFailed: It is another.
    """
    new = made(job.request.optimizer or "", **job.request.optimizer_args)
    own = getattr(model, "optimizer", None)
    if own is None:
        compile_with(model, new)
        return None
    if type(own).__name__ != type(new).__name__:
        text = f"the checkpoint's is {type(own).__name__}, --optimizer says {type(new).__name__}"
        raise LoadFailed(error("optimizer-mismatch", text))
    return own


@contextmanager
def _warned() -> Iterator[list[warnings.WarningMessage]]:
    """Collect warnings: Keras only warns of an optimizer whose state doesn't fit."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        yield said


def _not_restored(
    said: Iterable[warnings.WarningMessage], make: Callable[..., Finding] = warning
) -> list[Finding]:
    """Return what Keras says of an optimizer whose state it left out; one that never made a step had none."""
    found = []
    for text in dict.fromkeys(" ".join(str(one.message).split()) for one in said):
        skipped = _SKIPPED.match(text)
        if skipped and int(skipped["saved"]) > _UNUSED:
            own, saved = skipped["own"], skipped["saved"]
            found.append(
                make("optimizer-mismatch", f"its state has {saved} variables, the model's optimizer {own}")
            )
    return found


# Weights --------------------------------------------------------------------------------------------


def _weights(job: Job) -> Loaded:
    request = job.request
    model = made(request.model or "", **request.model_args)
    if not hasattr(model, "load_weights"):
        raise LoadFailed(
            error("no-such-model", f"{request.model} gave a {type(model).__name__}, no Keras model")
        )
    build(model, request)
    optimizer = _optimizer(job, model) if request.optimizer else None
    try:
        with told("load-failed"), _warned() as said:
            model.load_weights(job.path)
    except LoadFailed as failure:
        raise LoadFailed(*at_most(_differences(job, model)) or failure.findings) from failure
    _require_all_taken(job, model)
    if optimizer is not None and (findings := _not_restored(said, error)):
        raise LoadFailed(*findings)
    return KerasModel(job, model, optimizer=optimizer)


def _optimizer(job: Job, model: Any) -> Any:
    """Return the user's optimizer in the model's hands, so that its state is loaded with the weights.

    Raises:
        LoadFailed: The file holds no state of one.
    """
    if not job.options["optimizer_tensors"]:
        raise LoadFailed(error("optimizer-mismatch", "the checkpoint holds no optimizer state"))
    new = made(job.request.optimizer or "", **job.request.optimizer_args)
    compile_with(model, new)
    return new


def _require_all_taken(job: Job, model: Any) -> None:
    """Require that each weight in the file went into the model: Keras says nothing of the others.

    Only files with more weights than the model are compared by name, since that costs a file.

    Raises:
        LoadFailed: Some did not.
    """
    if not model.built or job.options["weights"] <= len(model.weights):
        return
    saved, own = _shapes(job.path), _shapes_of(model, job)
    if own.keys() <= saved.keys():  # otherwise they are named as another version names them
        left = _not_taken(saved, own)
        if left:
            raise LoadFailed(*at_most(left))


def _not_taken(saved: _Shapes, own: _Shapes) -> list[Finding]:
    return [not_consumed(name) for name in saved if name not in own]


def _differences(job: Job, model: Any) -> list[Finding]:
    """Return how a file and a model that it didn't load into differ, by name; none where names don't tell."""
    saved, own = _shapes(job.path), _shapes_of(model, job)
    if saved.keys().isdisjoint(own) and sorted(saved.values()) == sorted(own.values()):
        return []  # two ways to name the same
    shared = [name for name in own if name in saved and saved[name] != own[name]]
    return [
        *(missing(name) for name in own if name not in saved),
        *_not_taken(saved, own),
        *(other_shape(name, saved[name], own[name]) for name in shared),
    ]


def _shapes_of(model: Any, job: Job) -> _Shapes:
    """Return the names and shapes that a model's own weights have in a file of the same kind.

    Keras has no other way to say them than to write it.
    """
    is_old = not job.path.endswith((".keras", ".weights.h5", ".json"))
    if is_old and _package(model) == "keras":  # which reads the old layout, and writes it no more
        layers = [(layer.name, one) for layer in model.layers for one in layer.weights]
        return {f"{name}.{one.name}": tuple(one.shape) for name, one in layers}
    with TemporaryDirectory() as directory:
        is_model = job.path.endswith(".keras")
        path = os.path.join(directory, f"own{'.keras' if is_model else '.h5' if is_old else '.weights.h5'}")
        with told("load-failed"):
            (model.save if is_model else model.save_weights)(path)
        return _shapes(path)


def _shapes(path: str) -> _Shapes:
    from ckpttool.formats import open_checkpoint
    from ckpttool.tensor import Role

    with open_checkpoint(path) as checkpoint:
        return {one.name: one.shape for one in checkpoint.tensors if one.role is Role.WEIGHTS}


LOADERS: Mapping[str, Callable[[Job], Loaded]] = {"model": _model, "weights": _weights}
