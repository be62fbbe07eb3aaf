"""What TensorFlow loads: SavedModels through their signatures, and checkpoints into a model of the user's.

Only the child process imports this module. Nothing here imports Keras: a model of the user's brings its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from ckpttool.predict.failures import told
from ckpttool.predict.interface import Arrays, CannotTrain, Loaded, LoadFailed
from ckpttool.predict.keras_calls import (
    build,
    call,
    compile_with,
    keras_inputs,
    moved_weights,
    plain_outputs,
    trained_by_keras,
)
from ckpttool.predict.models import made
from ckpttool.predict.request import InputSpec, Job
from ckpttool.predict.tensorflow_restore import restored
from ckpttool.report import counted, error

_RATE = 1e-3
"""Of the gradient that a module without an optimizer moves by."""


class Signature(Loaded):
    """One signature of a SavedModel."""

    def __init__(self, job: Job, model: Any, name: str) -> None:
        self._model = model  # a signature doesn't keep its model alive
        self._signature = model.signatures[name]
        self._specs: Mapping[str, Any] = self._signature.structured_input_signature[1]
        self._batch_size = job.request.batch_size
        self.versions = {"tensorflow": tf.__version__}
        takes = counted(len(self._specs), "input")
        gives = counted(len(self._signature.structured_outputs), "output")
        self.detail = f"TensorFlow {tf.__version__}: signature {name}, {takes}, {gives}"

    def inputs(self) -> tuple[InputSpec, ...]:
        return tuple(_input_spec(name, spec, self._batch_size) for name, spec in sorted(self._specs.items()))

    def run(self, inputs: Arrays) -> Arrays:
        with told("predict-failed"):
            given = {
                name: tf.convert_to_tensor(inputs[name], spec.dtype) for name, spec in self._specs.items()
            }
            return plain_outputs(self._signature(**given))

    def train(self, inputs: Arrays) -> str:
        raise CannotTrain("a signature is for inference")


def _input_spec(name: str | None, spec: Any, batch_size: int) -> InputSpec:
    """Return an input; of one whose rank is unknown, a single row."""
    shape = (
        (batch_size,)
        if spec.shape.rank is None
        else (batch_size if s is None else int(s) for s in spec.shape)
    )
    return InputSpec(name, tuple(shape), spec.dtype.name)


def _savedmodel(job: Job) -> Loaded:
    with told("load-failed"):
        model = _served(job.path)
    names = sorted(model.signatures)
    wanted = job.request.signature or "serving_default"
    if wanted not in names and job.request.signature is None and len(names) == 1:
        wanted = names[0]
    if wanted in names:
        return Signature(job, model, wanted)
    there = f"there is {', '.join(names)}: --signature says which" if names else "it has none at all"
    raise LoadFailed(error("no-such-signature", f"no signature {wanted!r}; {there}"))


def _served(path: str) -> Any:
    """Return a SavedModel; where TensorFlow 1 wrote several graphs, the one to serve."""
    try:
        return tf.saved_model.load(path)
    except ValueError as failure:
        if "MetaGraph" not in str(failure) or "tags" not in str(failure):
            raise
    return tf.saved_model.load(path, tags=["serve"])


class Restored(Loaded):
    """A model of the user's, with a checkpoint's values in its variables."""

    def __init__(self, job: Job, model: Any, optimizer: Any, detail: str) -> None:
        self._model = model
        self._optimizer = optimizer
        self._batch_size = job.request.batch_size
        self.versions = {"tensorflow": tf.__version__}
        self.detail = f"TensorFlow {tf.__version__}: {type(model).__name__}, {detail}"

    def inputs(self) -> tuple[InputSpec, ...]:
        if _is_keras(self._model):
            return keras_inputs(self._model, self._batch_size)
        specs = getattr(type(self._model).__call__, "input_signature", None) or ()
        return tuple(_input_spec(None, spec, self._batch_size) for spec in specs)

    def run(self, inputs: Arrays) -> Arrays:
        with told("predict-failed"):
            return plain_outputs(_called(self._model, inputs))

    def train(self, inputs: Arrays) -> str:
        if _is_keras(self._model):
            return trained_by_keras(self._model, inputs)
        return _trained(self._model, self._optimizer, inputs)


def _is_keras(model: Any) -> bool:
    return hasattr(model, "train_on_batch")


def _called(model: Any, inputs: Arrays) -> Any:
    """Return what a Keras model or a ``tf.Module`` gives."""
    if _is_keras(model):
        return call(model, inputs)
    by_place = [tf.convert_to_tensor(inputs[name]) for name in sorted(filter(str.isdecimal, inputs), key=int)]
    by_name = {name: tf.convert_to_tensor(one) for name, one in inputs.items() if not name.isdecimal()}
    return model(*by_place, **by_name)


def _trained(model: Any, optimizer: Any, inputs: Arrays) -> str:
    """Make one step of a ``tf.Module`` with the mean square of its floating outputs as the loss.

    Raises:
        CannotTrain: It has no trainable variables, or none has a gradient.
        LoadFailed: The loss or a variable is not finite, or nothing moved.
    """
    variables = list(getattr(model, "trainable_variables", ()))
    if not variables:
        raise CannotTrain("the model has no trainable variables")
    with told("training-step-failed"), tf.GradientTape() as tape:
        outputs = [one for one in tf.nest.flatten(_called(model, inputs)) if one.dtype.is_floating]
        loss = tf.add_n([tf.reduce_mean(tf.square(tf.cast(one, tf.float32))) for one in outputs] or [0.0])
    gradients = tape.gradient(loss, variables)
    pairs = [
        (gradient, one) for gradient, one in zip(gradients, variables, strict=True) if gradient is not None
    ]
    if not pairs:
        raise CannotTrain("no output has a gradient")
    before = [one.numpy() for one in variables]
    with told("training-step-failed"):
        if optimizer is not None:
            optimizer.apply_gradients(pairs)
        else:
            for gradient, one in pairs:
                one.assign_sub(tf.convert_to_tensor(gradient) * tf.cast(_RATE, one.dtype))
    value = float(np.asarray(loss))
    moved = moved_weights(before, [one.numpy() for one in variables], f"the loss is {value:.4g}")
    return f"one step of {type(optimizer).__name__ if optimizer else 'SGD'} moved {moved}, loss {value:.4g}"


def _variables(job: Job) -> Loaded:
    request = job.request
    whole = made(request.model or "", **request.model_args)
    if not hasattr(tf.train.TrackableView, "children") or not hasattr(whole, "_trackable_children"):
        raise LoadFailed(
            error("no-such-model", f"{request.model} gave a {type(whole).__name__}, nothing to restore")
        )
    model = _runs(whole)
    if _is_keras(model):
        build(model, request)
    optimizer = made(request.optimizer, **request.optimizer_args) if request.optimizer else None
    if optimizer is not None and _is_keras(model):
        compile_with(model, optimizer)
    elif optimizer is not None and hasattr(optimizer, "build"):
        optimizer.build(list(model.trainable_variables))
    detail = restored(job, whole, model, optimizer)
    return Restored(job, model, optimizer, detail)


def _runs(made: Any) -> Any:
    """Return what is run of what a factory made: of a ``tf.train.Checkpoint``, the model in it.

    Raises:
        LoadFailed: There is none, or several.
    """
    if not isinstance(made, tf.train.Checkpoint):
        found = {"": made} if callable(made) else {}
    else:
        children = tf.train.TrackableView(made).children(made)
        found = {
            name: one for name, one in children.items() if callable(one) and not isinstance(one, tf.Variable)
        }
        found = {"model": found["model"]} if "model" in found else found
        if not found and callable(getattr(made, "root", None)):
            found = {"root": made.root}
    if len(found) != 1:
        what = (
            f"several models: {', '.join(found)} (call one 'model')"
            if found
            else "nothing that can be called"
        )
        raise LoadFailed(error("no-such-model", f"the {type(made).__name__} has {what}"))
    return next(iter(found.values()))


LOADERS: Mapping[str, Callable[[Job], Loaded]] = {"savedmodel": _savedmodel, "variables": _variables}
