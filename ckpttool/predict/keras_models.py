"""Keras's adapter, for versions 2 and 3: whole models with ``safe_mode`` on, and files of weights.

Only the child process imports this module, through ``keras3_models`` or ``tf_keras_models``: Keras 2 lives on
as ``tf_keras``, and is used for the files that it wrote. This module itself imports neither.
"""

from __future__ import annotations

import inspect
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from ckpttool.core.report import Finding, error, note, warning
from ckpttool.core.text import counted
from ckpttool.predict.guard import build_from, code_of_user, import_user_module, shown
from ckpttool.predict.inputs import make_inputs, positional, read_arrays, read_recording
from ckpttool.predict.interface import (
    Arrays,
    CannotTrain,
    Loaded,
    LoadFailed,
    findings_on_error,
    first_findings,
    missing_finding,
    not_consumed_finding,
    shape_finding,
)
from ckpttool.predict.request import InputSpec, PredictionJob, PredictionRequest

_SKIPPED = re.compile(
    r"Skipping variable loading for optimizer .* has (?P<own>\d+) var.* has (?P<saved>\d+) var"
)
_UNUSED = 2
"""Variables of an optimizer that never made a step: the iterations and the learning rate."""
_LOSSES = ("mse", "mae", "mape", "msle")
_ShapesByName = Mapping[str, tuple[int, ...]]


class KerasModel(Loaded):
    """A Keras model, of version 2 or 3."""

    def __init__(
        self, job: PredictionJob, model: Any, findings: Iterable[Finding] = (), optimizer: Any = None
    ) -> None:
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
        with findings_on_error("predict-failed"):
            return plain_outputs(call(self._model, inputs))

    def train(self, inputs: Arrays) -> str:
        return train_by_keras(self._model, inputs)


def _package(model: Any) -> str:
    """Return which Keras a model is of; one of the user's classes is of the Keras that it derives from."""
    names = {one.__module__.partition(".")[0] for one in type(model).__mro__}
    return "tf_keras" if "tf_keras" in names else "keras"


# Whole models ---------------------------------------------------------------------------------------


def _load_model(job: PredictionJob) -> Loaded:
    keras = import_module("tf_keras" if job.framework == "tf_keras" else "keras")
    request = job.request
    # Keras 3 writes the short names of losses into HDF5 files, and doesn't find them again itself.
    own = {
        **({name: keras.losses.get(name) for name in _LOSSES} if keras.__name__ == "keras" else {}),
        **(_own_classes(request.model) if request.model else {}),
    }
    load = partial(keras.models.load_model, job.path, custom_objects=own, safe_mode=not request.trust)
    with _collect_warnings() as caught:
        model, findings = _load_compiled(load)
    _require_all_used(job, model)
    optimizer = _checked_optimizer(job, model) if request.optimizer else None
    findings = [*findings, *_optimizer_warnings(caught), *_replace_empty_optimizer(job, model)]
    return KerasModel(job, model, findings, optimizer)


def _replace_empty_optimizer(job: PredictionJob, model: Any) -> list[Finding]:
    """Give a model a new optimizer where Keras made one for no variables, which can't make a step.

    Keras 3 does so for each HDF5 file of its own, and leaves the saved state out.
    """
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or job.options["optimizer_tensors"] <= _UNUSED:
        return []
    variables = optimizer.variables
    if len(list(variables() if callable(variables) else variables)) > _UNUSED:  # Keras 2 has a method
        return []
    compile_with(model, type(optimizer).from_config(optimizer.get_config()))
    make = warning if job.request.resume_step or job.request.optimizer else note
    return [
        make("optimizer-mismatch", "Keras loads this file without its optimizer's state; a new one stands in")
    ]


def _load_compiled(load: Callable[..., Any]) -> tuple[Any, list[Finding]]:
    """Return a model as it was compiled; as it is if a loss or metric of the user's can't be found again."""
    try:
        with findings_on_error("load-failed"):
            return load(), []
    except LoadFailed as failure:
        finding = failure.findings[0]
        text = finding.message
        if not re.search(r"keras\.(metrics|losses)\.|metric|loss function", text):
            if "Could not locate" in text or "Unknown layer" in text:
                hint = "(--model FILE.py or PACKAGE.MODULE imports its module first)"
                finding = finding._replace(message=f"{text.rstrip('.')} {hint}")
            raise LoadFailed(finding) from failure
        with findings_on_error("load-failed"):
            model = load(compile=False)
        return model, [warning("not-compiled", f"it was loaded without its optimizer and loss: {text}")]


def _own_classes(reference: str) -> dict[str, Any]:
    """Import the user's module, which registers its classes with Keras, and return its classes and functions.

    Those that are registered are found without; old files name theirs without a package.
    """
    place, _, name = reference.rpartition(":")
    module = import_user_module(place or name)
    return {
        key: value
        for key, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__
        and (inspect.isclass(value) or inspect.isfunction(value))
    }


def _checked_optimizer(job: PredictionJob, model: Any) -> Any:
    """Return a model's own optimizer, which must be what the user says; one that has none gets the user's."""
    new = build_from(job.request.optimizer or "", **job.request.optimizer_args)
    own = getattr(model, "optimizer", None)
    if own is None:
        compile_with(model, new)
        return None
    if type(own).__name__ != type(new).__name__:
        text = f"the checkpoint's is {type(own).__name__}, --optimizer says {type(new).__name__}"
        raise LoadFailed(error("optimizer-mismatch", text))
    return own


@contextmanager
def _collect_warnings() -> Iterator[list[warnings.WarningMessage]]:
    """Collect warnings: Keras only warns of an optimizer whose state doesn't fit."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def _optimizer_warnings(
    caught: Iterable[warnings.WarningMessage], make: Callable[..., Finding] = warning
) -> list[Finding]:
    """Return what Keras says of an optimizer whose state it left out; one that never made a step had none."""
    findings = []
    for text in dict.fromkeys(" ".join(str(one.message).split()) for one in caught):
        skipped = _SKIPPED.match(text)
        if skipped and int(skipped["saved"]) > _UNUSED:
            own, saved = skipped["own"], skipped["saved"]
            counts = f"its state has {saved} variables, the model's optimizer {own}"
            findings.append(make("optimizer-mismatch", counts))
    return findings


# Files of weights -----------------------------------------------------------------------------------


def _load_weights(job: PredictionJob) -> Loaded:
    request = job.request
    model = build_from(request.model or "", **request.model_args)
    if not hasattr(model, "load_weights"):
        raise LoadFailed(
            error("no-such-model", f"{shown(request.model)} gave a {type(model).__name__}, no Keras model")
        )
    build(model, request)
    optimizer = None
    if request.optimizer:  # in the model's hands, so that its state is loaded with the weights
        if not job.options["optimizer_tensors"]:
            raise LoadFailed(error("optimizer-mismatch", "the checkpoint holds no optimizer state"))
        optimizer = build_from(request.optimizer, **request.optimizer_args)
        compile_with(model, optimizer)
    try:
        with findings_on_error("load-failed"), _collect_warnings() as caught:
            model.load_weights(job.path)
    except LoadFailed as failure:
        raise LoadFailed(*first_findings(_weight_differences(job, model)) or failure.findings) from failure
    _require_all_used(job, model)
    if optimizer is not None and (findings := _optimizer_warnings(caught, error)):
        raise LoadFailed(*findings)
    return KerasModel(job, model, optimizer=optimizer)


def _require_all_used(job: PredictionJob, model: Any) -> None:
    """Require that each weight in the file went into the model: Keras says nothing of the others.

    Only files with more weights than the model are compared by name, since that costs a file.
    """
    if not model.built or job.options["weights"] <= len(model.weights):
        return
    saved, own = _saved_shapes(job.path), _own_shapes(model, job)
    surplus = _surplus_weights(saved, own)
    if surplus and own.keys() <= saved.keys():  # otherwise they are named as another version names them
        raise LoadFailed(*first_findings(surplus))


def _surplus_weights(saved: _ShapesByName, own: _ShapesByName) -> list[Finding]:
    return [not_consumed_finding(name) for name in saved if name not in own]


def _weight_differences(job: PredictionJob, model: Any) -> list[Finding]:
    """Return how a file and a model that it didn't load into differ, by name; none where names don't tell."""
    saved, own = _saved_shapes(job.path), _own_shapes(model, job)
    if saved.keys().isdisjoint(own) and sorted(saved.values()) == sorted(own.values()):
        return []  # two ways to name the same
    shared = [name for name in own if name in saved and saved[name] != own[name]]
    return [
        *(missing_finding(name) for name in own if name not in saved),
        *_surplus_weights(saved, own),
        *(shape_finding(name, saved[name], own[name]) for name in shared),
    ]


def _own_shapes(model: Any, job: PredictionJob) -> _ShapesByName:
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
        with findings_on_error("load-failed"):
            (model.save if is_model else model.save_weights)(path)
        return _saved_shapes(path)


def _saved_shapes(path: str) -> _ShapesByName:
    from ckpttool.core.tensor import Role
    from ckpttool.formats import open_checkpoint

    with open_checkpoint(path) as checkpoint:
        return {one.name: one.shape for one in checkpoint.tensors if one.role is Role.WEIGHTS}


# Inputs and outputs ---------------------------------------------------------------------------------


def keras_inputs(model: Any) -> tuple[InputSpec, ...]:
    """Return what a model takes, where it knows."""
    leaves = list(_leaves(_input_structure(model)))
    if not leaves:
        return _specs_built_on(model)
    if len(leaves) == 1 and not leaves[0][0]:
        return (_spec(None, leaves[0][1].shape, leaves[0][1].dtype),)
    return tuple(
        _spec(name if not name.isdecimal() else _tensor_name(one), one.shape, one.dtype)
        for name, one in leaves
    )


def _input_structure(model: Any) -> Any:
    """Return a model's symbolic inputs as it was made with them, or None; Keras raises instead."""
    for name in ("input", "inputs"):
        try:
            structure = getattr(model, name, None)
        except (AttributeError, ValueError, RuntimeError):
            continue
        if structure is not None:
            return structure[0] if name == "inputs" and len(structure) == 1 else structure
    return None


def _leaves(structure: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a structure with the keys that lead to them, joined by dots."""
    if isinstance(structure, Mapping):
        for key, one in structure.items():
            yield from _leaves(one, _output_name(name, key))
    elif isinstance(structure, (list, tuple)):
        for at, one in enumerate(structure):
            yield from _leaves(one, _output_name(name, at))
    elif structure is not None:
        yield name, structure


def _tensor_name(tensor: Any) -> str:
    return str(tensor.name).partition(":")[0]


def _spec(name: str | None, shape: Iterable[Any], dtype: Any) -> InputSpec:
    sizes = tuple(None if size is None else int(size) for size in shape)
    return InputSpec(name, sizes, str(getattr(dtype, "name", dtype)))


def _specs_built_on(model: Any) -> tuple[InputSpec, ...]:
    """Return the shapes that a model of a class of the user's was built on, as it recorded them."""
    config: Mapping[str, Any] = (getattr(model, "get_build_config", None) or dict)() or {}
    dtype = getattr(model, "input_dtype", None) or "float32"
    shape = config.get("input_shape")
    if shape is not None and _is_shape(shape):
        return (_spec(None, shape, dtype),)
    shapes = config.get("shapes_dict") or {}
    if not shapes or not all(map(_is_shape, shapes.values())):
        return ()
    return tuple(_spec(key.removesuffix("_shape"), one, dtype) for key, one in shapes.items())


def _is_shape(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(size is None or isinstance(size, int) for size in value)


def inputs_to_build(request: PredictionRequest) -> Arrays:
    """Return what a model can be called on before its weights are loaded: the user's input, or made up."""
    if request.input_shapes:
        return make_inputs(request.input_shapes, request.seed)
    if request.input:
        return read_arrays(request.input, "input-unreadable")
    return read_recording(request.expect).inputs if request.expect else {}


def build(model: Any, request: PredictionRequest) -> None:
    """Run a model once that makes its weights only then, so that they can be loaded."""
    if getattr(model, "built", True):
        return
    given = inputs_to_build(request)
    if not given:
        text = "the model makes its weights when it first runs: --input-shape 1,224,224,3 says on what"
        raise LoadFailed(error("model-not-built", text))
    with findings_on_error("load-failed"), code_of_user():
        call(model, given)


def call(model: Any, inputs: Arrays, *, training: bool = False) -> Any:
    """Return what a Keras model gives."""
    args, named = arguments(model, inputs)
    return model(*args, **named, training=training)


def arguments(model: Any, inputs: Arrays) -> tuple[list[Any], dict[str, Any]]:
    """Return inputs as a model takes them: in a structure like that of its own, or by its parameters."""
    given = {name: _text_tensor(array) for name, array in inputs.items()}
    structure = _input_structure(model)
    if structure is None:
        return _inputs_by_parameter(model, given)
    leaves = list(_leaves(structure))
    if len(leaves) != len(given):
        takes = f"the model takes {counted(len(leaves), 'input')}, not {len(given)}"
        raise LoadFailed(error("input-mismatch", takes))
    ordered = list(given.values())
    if len(leaves) > 1:
        ordered = []
        for at, (name, tensor) in enumerate(leaves):
            known = [key for key in (name, _tensor_name(tensor), str(at)) if key in given]
            if not known:
                missing = f"no input {_tensor_name(tensor)!r} is given"
                raise LoadFailed(error("input-missing", missing))
            ordered.append(given[known[0]])
    return [_fill_structure(structure, iter(ordered))], {}


def _fill_structure(structure: Any, values: Iterator[Any]) -> Any:
    """Return a structure with other leaves."""
    if isinstance(structure, Mapping):
        return {key: _fill_structure(one, values) for key, one in structure.items()}
    if isinstance(structure, (list, tuple)):
        return [_fill_structure(one, values) for one in structure]
    return next(values)


def _inputs_by_parameter(model: Any, given: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return inputs for a model whose class defines ``call``: by its parameters where the names fit."""
    by_place, by_name = positional(given)
    parameters = inspect.signature(model.call).parameters
    takes = [name for name in parameters if name not in ("training", "mask")]
    if by_name and by_name.keys() <= set(takes):
        return by_place, dict(by_name)
    if by_name:
        return [dict(given) if len(given) > 1 else next(iter(given.values()))], {}
    return (by_place, {}) if len(by_place) <= 1 or len(takes) >= len(by_place) else ([by_place], {})


def _text_tensor(array: np.ndarray[Any, Any]) -> Any:
    """Return texts as TensorFlow's, which alone has them; what else there is, Keras takes as it is."""
    if array.dtype.kind not in "USO":
        return array
    import tensorflow as tf

    return tf.constant(array)


def plain_outputs(output: Any, name: str = "") -> dict[str, np.ndarray[Any, Any]]:
    """Return the tensors in what a model gave, under the keys that lead to them."""
    if output is None:
        return {}
    if isinstance(output, Mapping):
        return {
            k: v
            for key, one in output.items()
            for k, v in plain_outputs(one, _output_name(name, key)).items()
        }
    if hasattr(output, "row_splits"):  # ragged
        return plain_outputs({"values": output.values, "row_splits": output.row_splits}, name)
    if hasattr(output, "dense_shape"):  # sparse; a session gives it as a NamedTuple
        return plain_outputs({"indices": output.indices, "values": output.values}, name)
    if hasattr(output, "_fields"):  # a NamedTuple
        return plain_outputs(output._asdict(), name)
    if isinstance(output, (list, tuple)):
        return {
            k: v
            for at, one in enumerate(output)
            for k, v in plain_outputs(one, _output_name(name, at)).items()
        }
    return {name or "output": _plain(output)}


def _plain(output: Any) -> np.ndarray[Any, Any]:
    if hasattr(output, "detach"):
        output = output.detach().cpu()  # a tensor of Keras on PyTorch, with a gradient
    array = np.asarray(output.numpy() if hasattr(output, "numpy") else output)
    if array.dtype == object:
        return array.astype("S")
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def _output_name(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


# Training -------------------------------------------------------------------------------------------


def compile_with(model: Any, optimizer: Any) -> None:
    """Give a model an optimizer with all its variables, and a loss where it has none."""
    model.compile(optimizer=optimizer, loss=getattr(model, "loss", None) or "mse")
    make = getattr(optimizer, "build", None) or getattr(
        optimizer, "_create_all_weights", None
    )  # Keras 2's old ones
    if make is not None:
        make(model.trainable_variables)


def train_by_keras(model: Any, inputs: Arrays) -> str:
    """Make one step with the model's own optimizer and loss, towards what it predicts, a little off."""
    if getattr(model, "optimizer", None) is None:
        raise CannotTrain(
            "the model was not compiled, so it has no optimizer: --optimizer keras.optimizers:Adam"
        )
    if not getattr(model, "loss", None) and not getattr(model, "losses", None):
        own = (one for one in type(model).__mro__ if not one.__module__.startswith(("keras.", "tf_keras.")))
        if not any("train_step" in vars(one) for one in own):
            raise CannotTrain("the model was compiled without a loss")
    with findings_on_error("training-step-failed"):
        targets = _zero_targets(call(model, inputs), model.loss)
        before = [_plain(one).copy() for one in model.trainable_weights]
        args, named = arguments(model, inputs)
        loss = model.train_on_batch(args[0] if args else named, targets)
    value = float(np.ravel(loss[0] if isinstance(loss, (list, tuple)) else loss)[0])
    after = [_plain(one) for one in model.trainable_weights]
    moved = moved_weights_words(before, after, value)
    return f"one step of {type(model.optimizer).__name__} moved {moved}, loss {value:.4g}"


def moved_weights_words(before: Sequence[Any], after: Sequence[Any], loss: float) -> str:
    """Return how many weights a step moved, in words; that none did, or one is not finite, is a finding."""
    if not math.isfinite(loss) or not all(np.isfinite(one).all() for one in after):
        problem = f"the loss is {loss:.4g}, or a weight is not finite, after a training step"
        raise LoadFailed(error("training-step-failed", problem))
    moved = sum(not np.array_equal(old, new) for old, new in zip(before, after, strict=True))
    if not moved:
        raise LoadFailed(error("training-step-failed", "the training step moved no weight"))
    return f"{moved} of {counted(len(after), 'weight')}"


def _zero_targets(output: Any, loss: Any, name: object = "", at: int = 0) -> Any:
    """Return targets a little off an output, in its structure; numbers of classes where it wants those."""
    if isinstance(output, Mapping):
        return {key: _zero_targets(one, loss, key, at) for at, (key, one) in enumerate(output.items())}
    if isinstance(output, (list, tuple)):
        return [_zero_targets(one, loss, at, at) for at, one in enumerate(output)]
    if isinstance(loss, Mapping):
        loss = loss.get(name, next(iter(loss.values()), None))
    elif isinstance(loss, (list, tuple)):
        loss = loss[at] if at < len(loss) else None
    kind = str(loss if isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__)).lower()
    values = _plain(output)
    return values.argmin(-1) if "sparse" in kind else values * 0.9


LOADERS: Mapping[str, Callable[[PredictionJob], Loaded]] = {"model": _load_model, "weights": _load_weights}
