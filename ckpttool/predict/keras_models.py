"""Keras's adapter, for versions 2 and 3: whole models with ``safe_mode`` on, and files of weights.

Only the child process imports this module, and one of the packages: Keras 2 lives on as ``tf_keras``, and is
used for the files that it wrote.
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
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from ckpttool.core.report import Finding, error, note, warning
from ckpttool.core.text import counted
from ckpttool.predict.guard import build_from, code_of_user, import_user_module, wrong_kind
from ckpttool.predict.inputs import make_inputs, positional, read_arrays, read_recording
from ckpttool.predict.interface import (
    Arrays,
    CannotTrain,
    Loaded,
    LoadFailed,
    Members,
    findings_on_error,
    first_findings,
    leaves,
    members,
    misfit_findings,
    not_consumed_finding,
    require_none,
)
from ckpttool.predict.request import InputSpec, PredictionJob, PredictionRequest

if "KERAS_BACKEND" not in os.environ and find_spec("tensorflow") is None and find_spec("torch") is not None:
    os.environ["KERAS_BACKEND"] = "torch"  # the default is TensorFlow; Keras reads it when it is imported

_SKIPPED = re.compile(
    r"Skipping variable loading for optimizer .* has (?P<own>\d+) var.* has (?P<saved>\d+) var"
)
_UNTRAINED = 2
"""Variables of an optimizer that never made a step: the iterations and the learning rate."""
_LOSSES = ("mse", "mae", "mape", "msle")
_ShapesByName = Mapping[str, tuple[int, ...]]


def _loaded(model: Any, findings: Iterable[Finding] = (), optimizer: Any = None) -> Loaded:
    """Return a Keras model as a prediction runs it."""
    keras = import_module(_package(model))
    backend = sys.modules[keras.config.backend() if hasattr(keras, "config") else "tensorflow"]
    parameters = counted(int(model.count_params()), "parameter") if model.built else "not built yet"
    more = f"; {type(optimizer).__name__} with its state" if optimizer is not None else ""
    return Loaded(
        detail=f"Keras {keras.__version__}: {type(model).__name__} {model.name}, {parameters}{more}",
        versions={keras.__name__: keras.__version__, backend.__name__: backend.__version__},
        run=partial(run_keras, model),
        inputs=partial(keras_inputs, model),
        train=partial(train_by_keras, model),
        findings=tuple(findings),
    )


def run_keras(model: Any, inputs: Arrays) -> Arrays:
    """Return the outputs of a Keras model."""
    with findings_on_error("predict-failed"):
        return plain_outputs(call(model, inputs))


def _package(model: Any) -> str:
    """Return the Keras package of a model's class or of its base classes."""
    names = {one.__module__.partition(".")[0] for one in type(model).__mro__}
    return "tf_keras" if "tf_keras" in names else "keras"


# Whole models ---------------------------------------------------------------------------------------


def _load_model(job: PredictionJob) -> Loaded:
    """Load a whole model, with its optimizer and loss."""
    keras = import_module(job.framework)
    request = job.request
    # Keras 3 writes the short names of losses into HDF5 files, but doesn't find them.
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
    return _loaded(model, findings, optimizer)


def _replace_empty_optimizer(job: PredictionJob, model: Any) -> list[Finding]:
    """Replace an optimizer that Keras made for no variables, and that can't make a step."""
    # Keras 3 makes one from each HDF5 file of its own, and ignores the saved state. It is compiled again with
    # the same configuration, now with variables for the model's weights.
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or job.options["optimizer_tensors"] <= _UNTRAINED:
        return []
    variables = optimizer.variables
    if len(list(variables() if callable(variables) else variables)) > _UNTRAINED:  # Keras 2 has a method
        return []
    compile_with(model, type(optimizer).from_config(optimizer.get_config()))
    make = warning if job.request.resume_step or job.request.optimizer else note
    return [
        make(
            "optimizer-mismatch", "Keras loads this file without its optimizer's state; a new one replaces it"
        )
    ]


def _load_compiled(load: Callable[..., Any]) -> tuple[Any, list[Finding]]:
    """Load a model as it was compiled, or without its optimizer if it needs an unknown loss or metric."""
    # Keras refuses the whole model if it doesn't find a loss or a metric, such as the user's own function. A
    # prediction needs neither, so the model is loaded once more without them.
    try:
        with findings_on_error("load-failed"):
            return load(), []
    except LoadFailed as failure:
        finding, text = failure.findings[0], failure.words
        if not re.search(r"keras\.(metrics|losses)\.|metric|loss function", text):
            if "Could not locate" in text or "Unknown layer" in text:
                hint = "(--model FILE.py or PACKAGE.MODULE imports its module first)"
                finding = error(finding.code, f"{text.rstrip('.')} {hint}", finding.where)
            raise LoadFailed(finding) from failure
        with findings_on_error("load-failed"):
            model = load(compile=False)
        return model, [warning("not-compiled", f"it was loaded without its optimizer and loss: {text}")]


def _own_classes(reference: str) -> dict[str, Any]:
    """Import the user's module, and return its classes and functions.

    The import registers classes with Keras; old files name classes that aren't registered.
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
    """Return a model's own optimizer, which must be of the user's class; if it has none, set the user's."""
    new = build_from(job.request.optimizer, **job.request.optimizer_args)
    own = getattr(model, "optimizer", None)
    if own is None:
        compile_with(model, new)
        return None
    if type(own).__name__ != type(new).__name__:
        text = f"the checkpoint has {type(own).__name__}, --optimizer is {type(new).__name__}"
        raise LoadFailed(error("optimizer-mismatch", text))
    return own


@contextmanager
def _collect_warnings() -> Iterator[list[warnings.WarningMessage]]:
    """Collect warnings: Keras only warns if the state of an optimizer doesn't fit."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def _optimizer_warnings(
    caught: Iterable[warnings.WarningMessage], make: Callable[..., Finding] = warning
) -> list[Finding]:
    """Return a finding for each warning that Keras skipped an optimizer's state, if it was ever trained."""
    findings = []
    for text in dict.fromkeys(" ".join(str(one.message).split()) for one in caught):
        skipped = _SKIPPED.match(text)
        if skipped and int(skipped["saved"]) > _UNTRAINED:
            own, saved = skipped["own"], skipped["saved"]
            counts = f"its state has {saved} variables, the model's optimizer {own}"
            findings.append(make("optimizer-mismatch", counts))
    return findings


# Files of weights -----------------------------------------------------------------------------------


def _load_weights(job: PredictionJob) -> Loaded:
    """Load a file of weights into the user's model."""
    request = job.request
    model = build_from(request.model, **request.model_args)
    if not hasattr(model, "load_weights"):
        raise wrong_kind(request.model, model, "not a Keras model")
    build(model, request)
    optimizer = None
    if request.optimizer:  # set before loading, so that its state is loaded with the weights
        if not job.options["optimizer_tensors"]:
            raise LoadFailed(error("optimizer-mismatch", "the checkpoint has no optimizer state"))
        optimizer = build_from(request.optimizer, **request.optimizer_args)
        compile_with(model, optimizer)
    try:
        with findings_on_error("load-failed"), _collect_warnings() as caught:
            model.load_weights(job.path)
    except LoadFailed as failure:
        raise LoadFailed(*first_findings(_weight_differences(job, model)) or failure.findings) from failure
    _require_all_used(job, model)
    if optimizer is not None:
        require_none(_optimizer_warnings(caught, error))
    return _loaded(model, optimizer=optimizer)


def _require_all_used(job: PredictionJob, model: Any) -> None:
    """Require that the model took each weight in the file, since Keras ignores the others."""
    # To compare by name, Keras has to write a file of the model. That is only done if the file has more
    # weights than the model, so that it can't have taken all of them.
    if not model.built or job.options["weights"] <= len(model.weights):
        return
    saved, own = _saved_shapes(job.path), _own_shapes(model, job)
    if own.keys() <= saved.keys():  # otherwise they have the names of another version
        require_none(not_consumed_finding(name) for name in saved if name not in own)


def _weight_differences(job: PredictionJob, model: Any) -> list[Finding]:
    """Return the differences by name of a file and a model that it didn't load into."""
    saved, own = _saved_shapes(job.path), _own_shapes(model, job)
    if saved.keys().isdisjoint(own) and sorted(saved.values()) == sorted(own.values()):
        return []  # the same weights, with the names of another version
    return list(misfit_findings(saved, own, not_consumed_finding))


def _own_shapes(model: Any, job: PredictionJob) -> _ShapesByName:
    """Return the names and shapes of a model's own weights in a file of the same kind."""
    # The names in a file depend on its kind and on the version of Keras. So Keras writes the model to a file
    # of the same kind, which is then read like the checkpoint.
    is_old = not job.path.endswith((".keras", ".weights.h5", ".json"))
    if is_old and _package(model) == "keras":  # Keras 3 reads the old layout, but doesn't write it
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
    """Return the inputs of a model, or the shapes that it was built on; empty if neither is known."""
    symbols = _input_symbols(_input_structure(model))
    if not symbols:
        return _specs_built_on(model)
    if len(symbols) == 1 and not symbols[0][0]:
        return (_spec(None, symbols[0][1].shape, symbols[0][1].dtype),)
    return tuple(
        _spec(name if not name.isdecimal() else _tensor_name(one), one.shape, one.dtype)
        for name, one in symbols
    )


def _input_structure(model: Any) -> Any:
    """Return a model's symbolic inputs in their containers, or None if it has none."""
    for name in ("input", "inputs"):
        try:
            structure = getattr(model, name, None)
        except (AttributeError, ValueError, RuntimeError):
            continue
        if structure is not None:
            return structure[0] if name == "inputs" and len(structure) == 1 else structure
    return None


def _input_symbols(structure: Any) -> list[tuple[str, Any]]:
    """Return the symbolic tensors of a structure with their keys, joined by dots."""
    return [(name, one) for name, one in leaves(structure) if one is not None]


def _tensor_name(tensor: Any) -> str:
    return str(tensor.name).partition(":")[0]


def _spec(name: str | None, shape: Iterable[Any], dtype: Any) -> InputSpec:
    sizes = tuple(None if size is None else int(size) for size in shape)
    return InputSpec(name, sizes, str(getattr(dtype, "name", dtype)))


def _specs_built_on(model: Any) -> tuple[InputSpec, ...]:
    """Return the shapes that a model of the user's class recorded when it was built."""
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
    """Return inputs to call a model on before its weights are loaded: the user's, or generated ones."""
    if request.input_shapes:
        return make_inputs(request.input_shapes, request.seed)
    if request.input:
        return read_arrays(request.input, "input-unreadable")
    return read_recording(request.expect).inputs if request.expect else {}


def build(model: Any, request: PredictionRequest) -> None:
    """Run a model that creates its weights in the first run, so that they can be loaded."""
    if getattr(model, "built", True):
        return
    given = inputs_to_build(request)
    if not given:
        text = "the model creates its weights on its first run: give the input as --input-shape 1,224,224,3"
        raise LoadFailed(error("model-not-built", text))
    with findings_on_error("load-failed"), code_of_user():
        call(model, given)


def call(model: Any, inputs: Arrays, *, training: bool = False) -> Any:
    """Return the raw output of a Keras model."""
    args, named = arguments(model, inputs)
    return model(*args, **named, training=training)


def arguments(model: Any, inputs: Arrays) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a model for some inputs: in containers like its own, or by its parameters."""
    given = {name: _text_tensor(array) for name, array in inputs.items()}
    structure = _input_structure(model)
    if structure is None:
        return _inputs_by_parameter(model, given)
    symbols = _input_symbols(structure)
    if len(symbols) != len(given):
        takes = f"the model takes {counted(len(symbols), 'input')}, not {len(given)}"
        raise LoadFailed(error("input-mismatch", takes))
    ordered = list(given.values())
    if len(symbols) > 1:
        ordered = [_input_for(name, one, at, given) for at, (name, one) in enumerate(symbols)]
    return [_fill_structure(structure, iter(ordered))], {}


def _input_for(name: str, symbol: Any, at: int, given: Mapping[str, Any]) -> Any:
    """Return the input for a symbolic tensor, by its key, its own name or its position."""
    for key in (name, _tensor_name(symbol), str(at)):
        if key in given:
            return given[key]
    raise LoadFailed(error("input-missing", f"no input {_tensor_name(symbol)!r} is given"))


def _fill_structure(structure: Any, values: Iterator[Any]) -> Any:
    """Return containers like some others, with other leaves."""
    if isinstance(structure, Mapping):
        return {key: _fill_structure(one, values) for key, one in structure.items()}
    if isinstance(structure, (list, tuple)):
        return [_fill_structure(one, values) for one in structure]
    return next(values)


def _inputs_by_parameter(model: Any, given: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a model whose class defines ``call``, by its parameters if the names match."""
    by_place, by_name = positional(given)
    parameters = inspect.signature(model.call).parameters
    takes = [name for name in parameters if name not in ("training", "mask")]
    if by_name and by_name.keys() <= set(takes):
        return by_place, dict(by_name)
    if by_name:
        return [dict(given) if len(given) > 1 else next(iter(given.values()))], {}
    return (by_place, {}) if len(by_place) <= 1 or len(takes) >= len(by_place) else ([by_place], {})


def _text_tensor(array: np.ndarray[Any, Any]) -> Any:
    """Return texts as a tensor of TensorFlow, the only backend with texts; other arrays unchanged."""
    if array.dtype.kind not in "USO":
        return array
    import tensorflow as tf

    return tf.constant(array)


def plain_outputs(output: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Return the tensors in a model's output as arrays, by their keys, joined by dots."""
    found = leaves(output, members=_output_members)
    return {name or "output": _plain(one) for name, one in found if one is not None}


def _output_members(value: Any) -> Members:
    """Return the items of a container, or the parts of a tensor that consists of several."""
    if hasattr(value, "row_splits"):  # ragged
        return [("values", value.values), ("row_splits", value.row_splits)]
    if hasattr(value, "dense_shape"):  # sparse; a NamedTuple if it is from a session
        return [("indices", value.indices), ("values", value.values)]
    return value._asdict().items() if hasattr(value, "_asdict") else members(value)


def _plain(output: Any) -> np.ndarray[Any, Any]:
    if hasattr(output, "detach"):
        output = output.detach().cpu()  # a tensor of Keras on PyTorch, with a gradient
    array = np.asarray(output.numpy() if hasattr(output, "numpy") else output)
    if array.dtype == object:
        return array.astype("S")
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


# Training -------------------------------------------------------------------------------------------


def compile_with(model: Any, optimizer: Any) -> None:
    """Compile a model with an optimizer that has all its variables, and with a loss."""
    model.compile(optimizer=optimizer, loss=getattr(model, "loss", None) or "mse")
    make = getattr(optimizer, "build", None) or getattr(
        optimizer, "_create_all_weights", None
    )  # Keras 2's old ones
    if make is not None:
        make(model.trainable_variables)


def train_by_keras(model: Any, inputs: Arrays) -> str:
    """Make one training step with the model's own optimizer and loss; targets are near its predictions."""
    if getattr(model, "optimizer", None) is None:
        raise CannotTrain(
            "the model was not compiled, so it has no optimizer: --optimizer keras.optimizers:Adam"
        )
    if not getattr(model, "loss", None) and not getattr(model, "losses", None):
        own = (one for one in type(model).__mro__ if not one.__module__.startswith(("keras.", "tf_keras.")))
        if not any("train_step" in vars(one) for one in own):
            raise CannotTrain("the model was compiled without a loss")
    with findings_on_error("training-step-failed"):
        targets = _near_targets(call(model, inputs), model.loss)
        before = [_plain(one).copy() for one in model.trainable_weights]
        args, named = arguments(model, inputs)
        loss = model.train_on_batch(args[0] if args else named, targets)
    value = float(np.ravel(loss[0] if isinstance(loss, (list, tuple)) else loss)[0])
    after = [_plain(one) for one in model.trainable_weights]
    moved = count_moved_weights(before, after, value)
    return f"one step of {type(model.optimizer).__name__} changed {moved}, loss {value:.4g}"


def count_moved_weights(before: Sequence[Any], after: Sequence[Any], loss: float) -> str:
    """Return the number of changed weights in words.

    Raises:
        LoadFailed: None changed, or a value is not finite.
    """
    if not math.isfinite(loss) or not all(np.isfinite(one).all() for one in after):
        problem = f"the loss is {loss:.4g}, or a weight is not finite, after a training step"
        raise LoadFailed(error("training-step-failed", problem))
    moved = sum(not np.array_equal(old, new) for old, new in zip(before, after, strict=True))
    if not moved:
        raise LoadFailed(error("training-step-failed", "the training step changed no weight"))
    return f"{moved} of {counted(len(after), 'weight')}"


def _near_targets(output: Any, loss: Any, name: object = "", at: int = 0) -> Any:
    """Return targets near an output, in the same containers; numbers of classes if the loss needs them."""
    # With the outputs themselves as targets, losses such as the mean square would be 0, without a gradient. A
    # loss with "sparse" in its name needs classes: that with the smallest value gives a large loss.
    if isinstance(output, Mapping):
        return {key: _near_targets(one, loss, key, at) for at, (key, one) in enumerate(output.items())}
    if isinstance(output, (list, tuple)):
        return [_near_targets(one, loss, at, at) for at, one in enumerate(output)]
    if isinstance(loss, Mapping):
        loss = loss.get(name, next(iter(loss.values()), None))
    elif isinstance(loss, (list, tuple)):
        loss = loss[at] if at < len(loss) else None
    kind = str(loss if isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__)).lower()
    values = _plain(output)
    return values.argmin(-1) if "sparse" in kind else values * 0.9


LOADERS: Mapping[str, Callable[[PredictionJob], Loaded]] = {"model": _load_model, "weights": _load_weights}
