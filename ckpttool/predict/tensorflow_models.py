"""TensorFlow's adapter: SavedModels through their signatures, and checkpoints into a model of the user's.

TensorFlow matches a checkpoint to objects by the graph of their attributes, and ignores what has no match;
the same walk is done here first, to name those. Keras is not imported here: a user's model brings its own.

Only the child process imports this module.

Source: TensorFlow, python/checkpoint/checkpoint_view.py and core/protobuf/trackable_object_graph.proto.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf.meta_graph_pb2 import AssetFileDef
from tensorflow.core.protobuf.trackable_object_graph_pb2 import TrackableObjectGraph

from ckpttool.core.report import Finding, error
from ckpttool.core.text import counted
from ckpttool.predict.guard import build_from, shown
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
from ckpttool.predict.keras_models import (
    build,
    call,
    compile_with,
    keras_inputs,
    moved_weights_words,
    plain_outputs,
    train_by_keras,
)
from ckpttool.predict.request import InputSpec, PredictionJob

_RATE = 1e-3
"""Of the gradient that a module without an optimizer moves by."""
_SPARSE = ("indices", "values", "dense_shape")
_NO_SIGNATURES = ("__saved_model_init_op", "__saved_model_train_op")
"""What lies among the signatures, and names an operation."""
_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"
_CONFIGURATION = "OBJECT_CONFIG_JSON"
"""An attribute that holds how a Keras layer was made; nothing restores it."""
_COUNTER = "save_counter"
_ITERATIONS = frozenset(("_iterations", "iterations", "iter"))
"""What each optimizer of Keras has, old or new, whatever it hangs by."""


# SavedModels ----------------------------------------------------------------------------------------


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
        with findings_on_error("predict-failed"):
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
        with findings_on_error("predict-failed"):
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


def _load_savedmodel(job: PredictionJob) -> Loaded:
    with findings_on_error("load-failed"):
        model = _served_graph(job.path)
    return Signature(model, _signature(model.signatures, job))


def _signature(signatures: Iterable[str], job: PredictionJob) -> str:
    """Return the signature that is called: the user's, the one to serve, or the only one."""
    names = sorted(signatures)
    name = job.request.signature or "serving_default"
    if name not in names and job.request.signature is None and len(names) == 1:
        return names[0]
    if name in names:
        return name
    others = f"there is {', '.join(names)}: --signature says which" if names else "it has none at all"
    raise LoadFailed(error("no-such-signature", f"no signature {name!r}; {others}"))


def _load_session(job: PredictionJob) -> Loaded:
    """A graph with reference variables, which functions can't take or give."""
    v1 = tf.compat.v1
    graph = tf.Graph()
    session = v1.Session(graph=graph, config=v1.ConfigProto(allow_soft_placement=True))
    with findings_on_error("load-failed"), graph.as_default():
        meta_graph = v1.saved_model.load(session, job.options["tags"], job.path)
        signatures = meta_graph.signature_def
        if not job.options["has_init"]:
            initializers = [v1.local_variables_initializer(), v1.tables_initializer()]
            session.run(initializers, _assets(meta_graph, job.path))
    names = [name for name in signatures if name not in _NO_SIGNATURES]
    name = _signature(names, job)
    return SessionSignature(session, name, signatures[name])


def _assets(meta_graph: Any, path: str) -> dict[str, str]:
    """Return the model's own assets, by the tensors that they are fed to.

    The graph has the paths of the files that the assets were copied from, somewhere on another machine.
    """
    assets = list(meta_graph.asset_file_def)
    for packed in meta_graph.collection_def[tf.saved_model.ASSETS_KEY].any_list.value:
        assets.append(AssetFileDef())
        packed.Unpack(assets[-1])
    return {
        asset.tensor_info.name: os.path.join(path, tf.saved_model.ASSETS_DIRECTORY, asset.filename)
        for asset in assets
    }


def _served_graph(path: str) -> Any:
    """Return a SavedModel; where TensorFlow 1 wrote several graphs, the one to serve."""
    try:
        return tf.saved_model.load(path)
    except ValueError as failure:
        if "MetaGraph" not in str(failure) or "tags" not in str(failure):
            raise
    return tf.saved_model.load(path, tags=["serve"])


# Checkpoints into the user's model ------------------------------------------------------------------


class RestoredModel(Loaded):
    """A model of the user's, with a checkpoint's values in its variables."""

    def __init__(self, job: PredictionJob, model: Any, optimizer: Any, detail: str) -> None:
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
        with findings_on_error("predict-failed"):
            return plain_outputs(_call_model(self._model, inputs))

    def train(self, inputs: Arrays) -> str:
        if _is_keras(self._model):
            return train_by_keras(self._model, inputs)
        return _train_model(self._model, self._optimizer, inputs)


def _is_keras(model: Any) -> bool:
    return hasattr(model, "train_on_batch")


def _call_model(model: Any, inputs: Arrays) -> Any:
    """Return what a Keras model or a ``tf.Module`` gives."""
    if _is_keras(model):
        return call(model, inputs)
    by_place = [tf.convert_to_tensor(inputs[name]) for name in sorted(filter(str.isdecimal, inputs), key=int)]
    by_name = {name: tf.convert_to_tensor(one) for name, one in inputs.items() if not name.isdecimal()}
    return model(*by_place, **by_name)


def _train_model(model: Any, optimizer: Any, inputs: Arrays) -> str:
    """Make one step of a ``tf.Module`` with the mean square of its floating outputs as the loss."""
    variables = list(getattr(model, "trainable_variables", ()))
    if not variables:
        raise CannotTrain("the model has no trainable variables")
    with findings_on_error("training-step-failed"), tf.GradientTape() as tape:
        outputs = [one for one in tf.nest.flatten(_call_model(model, inputs)) if one.dtype.is_floating]
        loss = tf.add_n([tf.reduce_mean(tf.square(tf.cast(one, tf.float32))) for one in outputs] or [0.0])
    gradients = tape.gradient(loss, variables)
    pairs = [
        (gradient, one) for gradient, one in zip(gradients, variables, strict=True) if gradient is not None
    ]
    if not pairs:
        raise CannotTrain("no output has a gradient")
    before = [one.numpy() for one in variables]
    with findings_on_error("training-step-failed"):
        if optimizer is not None:
            optimizer.apply_gradients(pairs)
        else:
            for gradient, one in pairs:
                one.assign_sub(tf.convert_to_tensor(gradient) * tf.cast(_RATE, one.dtype))
    value = float(np.asarray(loss))
    moved = moved_weights_words(before, [one.numpy() for one in variables], value)
    return f"one step of {type(optimizer).__name__ if optimizer else 'SGD'} moved {moved}, loss {value:.4g}"


def _load_variables(job: PredictionJob) -> Loaded:
    request = job.request
    whole = build_from(request.model or "", **request.model_args)
    if not hasattr(tf.train.TrackableView, "children") or not hasattr(whole, "_trackable_children"):
        raise LoadFailed(
            error(
                "no-such-model",
                f"{shown(request.model)} gave a {type(whole).__name__}, nothing to restore",
            )
        )
    model = _runnable_model(whole)
    if _is_keras(model):
        build(model, request)
    optimizer = build_from(request.optimizer, **request.optimizer_args) if request.optimizer else None
    if optimizer is not None and _is_keras(model):
        compile_with(model, optimizer)
    elif optimizer is not None and hasattr(optimizer, "build"):
        optimizer.build(list(model.trainable_variables))
    detail = restore(job, whole, model, optimizer)
    return RestoredModel(job, model, optimizer, detail)


def _runnable_model(made: Any) -> Any:
    """Return what is run of what a factory made: of a ``tf.train.Checkpoint``, the model in it."""
    if not isinstance(made, tf.train.Checkpoint):
        models = {"": made} if callable(made) else {}
    else:
        children = tf.train.TrackableView(made).children(made)
        models = {
            name: one for name, one in children.items() if callable(one) and not isinstance(one, tf.Variable)
        }
        models = {"model": models["model"]} if "model" in models else models
        if not models and callable(getattr(made, "root", None)):
            models = {"root": made.root}
    if len(models) != 1:
        names = f"several models: {', '.join(models)} (call one 'model')"
        problem = names if models else "nothing that can be called"
        raise LoadFailed(error("no-such-model", f"the {type(made).__name__} has {problem}"))
    return next(iter(models.values()))


# Restoring ------------------------------------------------------------------------------------------


def restore(job: PredictionJob, made: Any, model: Any, optimizer: Any) -> str:
    """Restore a checkpoint into what a factory made, and return what was restored, in words."""
    names, roles = job.options["names"]
    with findings_on_error("load-failed"):
        reader = tf.train.load_checkpoint(job.path)
        shapes = reader.get_variable_to_shape_map()
    if _GRAPH not in shapes:
        return _restore_by_name(reader, shapes, roles, model, optimizer)
    graph = _ObjectGraph.parse(reader.get_tensor(_GRAPH))
    target, keys = _target(job, graph, made, model, optimizer)
    findings = [
        *_missing_findings(_model_parts(made, model), keys),
        *_unused_findings(keys, names, roles, with_optimizer=optimizer is not None),
        *[
            shape_finding(_readable(one.text, names), shapes[one.text], one.live.shape)
            for one in keys
            if one.text in shapes and one.text.endswith(_VALUE) and hasattr(one.live, "shape")
            if list(one.live.shape) != list(shapes[one.text])
        ],
    ]
    if optimizer is not None and not any(one.is_optimizer and one.live is not None for one in keys):
        problem = f"the checkpoint holds no state that {type(optimizer).__name__} takes"
        findings.append(error("optimizer-mismatch", problem))
    if findings:
        raise LoadFailed(*first_findings(findings))
    with findings_on_error("load-failed"):
        target.read(job.path).expect_partial()
    state = f"; {type(optimizer).__name__} with its state" if optimizer is not None else ""
    return f"{counted(sum(one.live is not None and not one.is_optimizer for one in keys), 'variable')}{state}"


def _target(
    job: PredictionJob, graph: _ObjectGraph, made: Any, model: Any, optimizer: Any
) -> tuple[Any, list[_VariableKey]]:
    """Return the ``tf.train.Checkpoint`` that stands where the saved one stood, with what is stored.

    Saved was either the model itself, or a Checkpoint that has it under some name: the one that matches most.
    """
    view = tf.train.CheckpointView(job.path)
    children = view.children(0)
    more = {} if optimizer is None else {n: optimizer for n, at in children.items() if graph.is_optimizer(at)}
    if isinstance(made, tf.train.Checkpoint):
        for name, one in more.items():
            if not hasattr(made, name):
                setattr(made, name, one)
        root = view.match(made.root) if hasattr(made, "root") else {}
        return made, graph.keys({**view.match(made), **root})

    def match_count(target: Any) -> int:
        return sum(one.live is not None for one in graph.keys(view.match(target)))

    names = [n for n, at in children.items() if graph.nodes[at].children and n not in more]
    counts = {name: match_count(tf.train.Checkpoint(**{name: model})) for name in names}
    name = max(names, key=lambda name: counts[name], default=None)
    if name is not None and match_count(model) < counts[name]:
        target = tf.train.Checkpoint(**{name: model}, **more)
        return target, graph.keys(view.match(target))
    # The model itself was saved. The view of a Checkpoint doesn't look through one that stands for it.
    own = tf.train.TrackableView(model).children(model)
    more = {name: one for name, one in more.items() if name not in own}
    matches = {**view.match(tf.train.Checkpoint(**more)), **view.match(model)} if more else view.match(model)
    return tf.train.Checkpoint(root=model, **more), graph.keys(matches)


def _model_parts(made: Any, model: Any) -> Mapping[str, Any]:
    """Return what must be restored whole, by name: all models of a Checkpoint, or the one model."""
    if not isinstance(made, tf.train.Checkpoint):
        return {"": model}
    children = tf.train.TrackableView(made).children(made)
    return {
        f"{name}.": one
        for name, one in children.items()
        if hasattr(one, "trainable_variables") and not hasattr(one, "apply_gradients")
    }


def _missing_findings(models: Mapping[str, Any], keys: Iterable[_VariableKey]) -> list[Finding]:
    """Return what the models have and the checkpoint has not, as ``assert_existing_objects_matched`` asks."""
    values = {
        id(one) for key in keys if key.live is not None for one in (key.live, _variable_value(key.live))
    }
    return [
        missing_finding(f"{place}{name}")
        for place, model in models.items()
        for name, one in _named_variables(model)
        if id(one) not in values and id(_variable_value(one)) not in values
    ]


def _variable_value(variable: Any) -> Any:
    """Return TensorFlow's variable in one of Keras 3."""
    inner = getattr(variable, "value", None)
    return variable if inner is None or callable(inner) else inner


def _named_variables(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield a model's variables by the attributes that lead to them; those of Keras 3 know a better name."""
    paths = {id(model): ""}
    to_visit = [model]
    for visited in to_visit:
        for name, child in tf.train.TrackableView(model).children(visited).items():
            if id(child) not in paths:
                paths[id(child)] = f"{paths[id(visited)]}.{name}".lstrip(".")
                to_visit.append(child)
    for name, one in _own_variables(model):
        own = getattr(one, "path", None)
        yield own.replace("/", ".") if own else paths.get(id(one), name), one


def _own_variables(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield a model's variables by name: of Keras its weights, since metrics and seeds need not be saved."""
    weights: Any = getattr(model, "weights", None)
    for one in getattr(model, "variables", ()) if weights is None else weights:
        yield getattr(one, "path", None) or str(one.name).partition(":")[0], one


def _unused_findings(
    keys: Iterable[_VariableKey], names: Mapping[str, str], roles: Mapping[str, str], *, with_optimizer: bool
) -> list[Finding]:
    """Return a finding for each stored key that nothing took, as ``assert_consumed`` does.

    An optimizer's state counts only if the user gave an optimizer. ``names`` and ``roles`` are by key.
    """
    unused = (one for one in keys if one.live is None and (with_optimizer or not one.is_optimizer))
    return [
        not_consumed_finding(_readable(one.text, names))
        for one in unused
        # Steps, epochs and metrics are bookkeeping.
        if roles.get(one.text) != "training" and not one.text.startswith(f"{_COUNTER}/")
    ]


def _readable(key: str, names: Mapping[str, str]) -> str:
    """Return the readable name of a stored key."""
    return names.get(key, key.removesuffix(_VALUE))


def _restore_by_name(
    reader: Any, shapes: Mapping[str, Any], roles: Mapping[str, str], model: Any, optimizer: Any
) -> str:
    """Restore what TensorFlow 1 saved, without objects: by the names of the variables."""
    if optimizer is not None:
        raise LoadFailed(
            error("optimizer-mismatch", "a checkpoint of TensorFlow 1 tells its optimizer by name alone")
        )
    own = dict(_own_variables(model))
    findings = [missing_finding(name) for name in own if name not in shapes]
    findings += [
        not_consumed_finding(key)
        for key in sorted(shapes)
        if key not in own and roles.get(key) not in ("optimizer", "training")
    ]
    shared = [name for name, one in own.items() if name in shapes and list(one.shape) != list(shapes[name])]
    findings += [shape_finding(name, shapes[name], own[name].shape) for name in shared]
    if findings:
        raise LoadFailed(*first_findings(findings))
    with findings_on_error("load-failed"):
        for name, one in own.items():
            one.assign(reader.get_tensor(name))
    return f"{counted(len(own), 'variable')} by name"


# The object graph of a checkpoint -------------------------------------------------------------------


class _VariableKey(NamedTuple):
    """A stored key, whether it is an optimizer's, and the object that takes it, or None."""

    text: str
    is_optimizer: bool
    live: Any


class _ObjectGraph(NamedTuple):
    """A checkpoint's objects, by number; 0 is the root."""

    nodes: Any
    of_model: frozenset[int]

    @classmethod
    def parse(cls, content: bytes) -> _ObjectGraph:
        """Return the objects; the model's are those that are reached without passing an optimizer."""
        nodes = TrackableObjectGraph.FromString(content).nodes
        reached, to_visit = {0}, [0]
        while to_visit:
            for child in nodes[to_visit.pop()].children:
                if child.node_id not in reached and not _is_optimizer(nodes[child.node_id]):
                    reached.add(child.node_id)
                    to_visit.append(child.node_id)
        return cls(nodes, frozenset(reached))

    def is_optimizer(self, at: int) -> bool:
        return _is_optimizer(self.nodes[at])

    def keys(self, matches: Mapping[int, Any]) -> list[_VariableKey]:
        """Return what is stored, with what takes it by number."""
        matches = {**self._slots(matches), **matches}
        return [
            _VariableKey(attribute.checkpoint_key, at not in self.of_model, matches.get(at))
            for at, node in enumerate(self.nodes)
            for attribute in node.attributes
            if attribute.name != _CONFIGURATION
        ]

    def _slots(self, matches: Mapping[int, Any]) -> Mapping[int, Any]:
        """Return the slots of old optimizers, which hang between a variable and the optimizer."""
        slots = {}
        for at, node in enumerate(self.nodes):
            optimizer: Any = matches.get(at)
            for slot in node.slot_variables:
                variable = matches.get(slot.original_variable_node_id)
                if variable is None or slot.slot_name not in getattr(optimizer, "get_slot_names", list)():
                    continue
                slots[slot.slot_variable_node_id] = optimizer.get_slot(variable, slot.slot_name)
        return slots


def _is_optimizer(node: Any) -> bool:
    return bool(node.slot_variables) or any(child.local_name in _ITERATIONS for child in node.children)


LOADERS: Mapping[str, Callable[[PredictionJob], Loaded]] = {
    "savedmodel": _load_savedmodel,
    "session": _load_session,
    "variables": _load_variables,
}
