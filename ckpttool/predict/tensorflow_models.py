"""What TensorFlow loads: SavedModels through their signatures, and checkpoints into a model of the user's.

Only the child process imports this module. Nothing here imports Keras: a model of the user's brings its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
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
_SPARSE = ("indices", "values", "dense_shape")
_NO_SIGNATURES = ("__saved_model_init_op", "__saved_model_train_op")
"""What lies among the signatures, and names an operation."""


class Signature(Loaded):
    """One signature of a SavedModel."""

    def __init__(self, model: Any, name: str) -> None:
        self._model = model  # a signature doesn't keep its model alive
        self._signature = model.signatures[name]
        self._specs: Mapping[str, Any] = self._signature.structured_input_signature[1]
        self.versions = {"tensorflow": tf.__version__}
        takes = counted(len(self._specs), "input")
        gives = counted(len(self._signature.structured_outputs), "output")
        self.detail = f"TensorFlow {tf.__version__}: signature {name}, {takes}, {gives}"

    def inputs(self) -> tuple[InputSpec, ...]:
        return tuple(_input_spec(name, spec) for name, spec in sorted(self._specs.items()))

    def run(self, inputs: Arrays) -> Arrays:
        with told("predict-failed"):
            given = {
                name: tf.convert_to_tensor(inputs[name], spec.dtype) for name, spec in self._specs.items()
            }
            return plain_outputs(self._signature(**given))

    def train(self, inputs: Arrays) -> str:
        raise CannotTrain("a signature is for inference")


class SessionSignature(Loaded):
    """One signature of a graph of TensorFlow 1, in a session."""

    def __init__(self, session: Any, name: str, signature: Any) -> None:
        self._session = session
        self._feeds = dict(_feeds(signature.inputs, session.graph))
        find = tf.compat.v1.saved_model.get_tensor_from_tensor_info
        self._fetches = {key: find(info, session.graph) for key, info in sorted(signature.outputs.items())}
        self.versions = {"tensorflow": tf.__version__}
        takes, gives = counted(len(self._feeds), "input"), counted(len(self._fetches), "output")
        self.detail = f"TensorFlow {tf.__version__}, a session: signature {name}, {takes}, {gives}"

    def inputs(self) -> tuple[InputSpec, ...]:
        return tuple(_input_spec(name, tensor) for name, tensor in sorted(self._feeds.items()))

    def run(self, inputs: Arrays) -> Arrays:
        with told("predict-failed"):
            given = {
                tensor: np.asarray(inputs[name], tensor.dtype.base_dtype.as_numpy_dtype)
                for name, tensor in self._feeds.items()
            }
            return plain_outputs(self._session.run(self._fetches, given))

    def train(self, inputs: Arrays) -> str:
        raise CannotTrain("a signature is for inference")


def _feeds(infos: Mapping[str, Any], graph: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors that a signature takes, by name; those of a sparse one as TensorFlow 2 calls them."""
    for name, info in infos.items():
        tensor = tf.compat.v1.saved_model.get_tensor_from_tensor_info(info, graph)
        if hasattr(tensor, "dense_shape"):
            yield from ((f"{name}_{part}", getattr(tensor, part)) for part in _SPARSE)
        else:
            yield name, tensor


def _input_spec(name: str | None, spec: Any) -> InputSpec:
    """Return an input; of one whose rank is unknown, a number for each row."""
    shape = (None,) if spec.shape.rank is None else tuple(spec.shape)
    return InputSpec(name, shape, spec.dtype.base_dtype.name)


def _savedmodel(job: Job) -> Loaded:
    with told("load-failed"):
        model = _served(job.path)
    return Signature(model, _signature(model.signatures, job))


def _signature(found: Iterable[str], job: Job) -> str:
    """Return the signature that is called: the user's, the one to serve, or the only one.

    Raises:
        LoadFailed: There is no such.
    """
    names = sorted(found)
    wanted = job.request.signature or "serving_default"
    if wanted not in names and job.request.signature is None and len(names) == 1:
        return names[0]
    if wanted in names:
        return wanted
    there = f"there is {', '.join(names)}: --signature says which" if names else "it has none at all"
    raise LoadFailed(error("no-such-signature", f"no signature {wanted!r}; {there}"))


def _session(job: Job) -> Loaded:
    """A graph with reference variables, which functions can't take or give."""
    v1 = tf.compat.v1
    graph = tf.Graph()
    session = v1.Session(graph=graph, config=v1.ConfigProto(allow_soft_placement=True))
    with told("load-failed"), graph.as_default():
        signatures = v1.saved_model.load(session, job.options["tags"], job.path).signature_def
        if not job.options["has_init"]:
            session.run([v1.local_variables_initializer(), v1.tables_initializer()])
    names = [name for name in signatures if name not in _NO_SIGNATURES]
    name = _signature(names, job)
    return SessionSignature(session, name, signatures[name])


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
        self.versions = {"tensorflow": tf.__version__}
        self.detail = f"TensorFlow {tf.__version__}: {type(model).__name__}, {detail}"

    def inputs(self) -> tuple[InputSpec, ...]:
        if _is_keras(self._model):
            return keras_inputs(self._model)
        specs = getattr(type(self._model).__call__, "input_signature", None) or ()
        return tuple(_input_spec(None, spec) for spec in specs)

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


LOADERS: Mapping[str, Callable[[Job], Loaded]] = {
    "savedmodel": _savedmodel,
    "session": _session,
    "variables": _variables,
}
