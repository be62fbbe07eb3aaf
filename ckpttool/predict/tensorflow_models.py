"""TensorFlow's adapter: SavedModels through their signatures, and checkpoints into the user's model.

TensorFlow matches a checkpoint to objects by the graph of their attributes, and ignores values and objects
without a match. The same walk is done here first, to name them. The user's model imports Keras.

Only the child process imports this module.

Source: TensorFlow, python/checkpoint/checkpoint_view.py and core/protobuf/trackable_object_graph.proto.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf.meta_graph_pb2 import AssetFileDef
from tensorflow.core.protobuf.trackable_object_graph_pb2 import TrackableObjectGraph

from ckpttool.core.report import Finding, error
from ckpttool.core.text import counted
from ckpttool.predict.guard import build_from, wrong_kind
from ckpttool.predict.inputs import positional
from ckpttool.predict.interface import (
    Arrays,
    CannotTrain,
    Loaded,
    LoadFailed,
    findings_on_error,
    inference_only,
    misfit_findings,
    missing_finding,
    not_consumed_finding,
    require_none,
    shape_finding,
)
from ckpttool.predict.keras_models import (
    build,
    compile_with,
    count_moved_weights,
    keras_inputs,
    plain_outputs,
    run_keras,
    train_by_keras,
)
from ckpttool.predict.request import InputSpec, PredictionJob

_RATE = 1e-3
"""Learning rate of a module without an optimizer."""
_SPARSE = ("indices", "values", "dense_shape")
_NO_SIGNATURES = ("__saved_model_init_op", "__saved_model_train_op")
"""Keys of signatures that name an operation instead."""
_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"
_CONFIGURATION = "OBJECT_CONFIG_JSON"
"""Attribute with the configuration of a Keras layer; it is not restored."""
_COUNTER = "save_counter"
_ITERATIONS = frozenset(("_iterations", "iterations", "iter"))
"""Names of the counter in each optimizer of Keras, old or new."""


# SavedModels ----------------------------------------------------------------------------------------


def _load_savedmodel(job: PredictionJob) -> Loaded:
    """Load a SavedModel, to call one of its signatures."""
    with findings_on_error("load-failed"):
        model = _served_graph(job.path)
    name = _signature(model.signatures, job)
    signature = model.signatures[name]
    specs: Mapping[str, Any] = signature.structured_input_signature[1]

    def run(inputs: Arrays) -> Arrays:
        with findings_on_error("predict-failed"):
            given = {name: tf.convert_to_tensor(inputs[name], spec.dtype) for name, spec in specs.items()}
            return plain_outputs(model.signatures[name](**given))  # a signature doesn't keep its model alive

    return _loaded_signature(f": signature {name}", specs, signature.structured_outputs, run)


def _loaded_signature(
    title: str, specs: Mapping[str, Any], outputs: Mapping[str, Any], run: Callable[[Arrays], Arrays]
) -> Loaded:
    """Return a signature as a prediction runs it; ``specs`` has shape and dtype of each input."""
    takes, gives = counted(len(specs), "input"), counted(len(outputs), "output")
    return Loaded(
        detail=f"TensorFlow {tf.__version__}{title}, {takes}, {gives}",
        versions={"tensorflow": tf.__version__},
        run=run,
        inputs=lambda: tuple(_input_spec(name, spec) for name, spec in sorted(specs.items())),
        train=inference_only("a signature is for inference"),
    )


def _load_session(job: PredictionJob) -> Loaded:
    """Load a graph of TensorFlow 1 with reference variables into a session."""
    # ``tf.saved_model.load`` makes functions of the graph, which can't have reference variables.
    v1 = tf.compat.v1
    graph = tf.Graph()
    session = v1.Session(graph=graph, config=v1.ConfigProto(allow_soft_placement=True))
    with findings_on_error("load-failed"), graph.as_default():
        meta_graph = v1.saved_model.load(session, job.options["tags"], job.path)
        signatures = meta_graph.signature_def
        if not job.options["has_init"]:
            initializers = [v1.local_variables_initializer(), v1.tables_initializer()]
            session.run(initializers, _assets(meta_graph, job.path))
    name = _signature([name for name in signatures if name not in _NO_SIGNATURES], job)
    feeds = dict(_feeds(signatures[name].inputs, graph))
    find = v1.saved_model.get_tensor_from_tensor_info
    fetches = {key: find(info, graph) for key, info in sorted(signatures[name].outputs.items())}

    def run(inputs: Arrays) -> Arrays:
        with findings_on_error("predict-failed"):
            given = {
                tensor: np.asarray(inputs[name], tensor.dtype.base_dtype.as_numpy_dtype)
                for name, tensor in feeds.items()
            }
            return plain_outputs(session.run(fetches, given))

    return _loaded_signature(f", a session: signature {name}", feeds, fetches, run)


def _feeds(infos: Mapping[str, Any], graph: Any) -> Iterator[tuple[str, Any]]:
    """Yield the input tensors of a signature by name; parts of a sparse one as TensorFlow 2 names them."""
    for name, info in infos.items():
        tensor = tf.compat.v1.saved_model.get_tensor_from_tensor_info(info, graph)
        if hasattr(tensor, "dense_shape"):
            yield from ((f"{name}_{part}", getattr(tensor, part)) for part in _SPARSE)
        else:
            yield name, tensor


def _input_spec(name: str | None, spec: Any) -> InputSpec:
    """Return the specification of an input; one of unknown rank gets a number for each row."""
    shape = (None,) if spec.shape.rank is None else tuple(spec.shape)
    return InputSpec(name, shape, spec.dtype.base_dtype.name)


def _signature(signatures: Iterable[str], job: PredictionJob) -> str:
    """Return the name of the signature to call: the user's, the one to serve, or the only one."""
    names = sorted(signatures)
    name = job.request.signature or "serving_default"
    if name not in names and job.request.signature is None and len(names) == 1:
        return names[0]
    if name in names:
        return name
    others = f"choose one with --signature: {', '.join(names)}" if names else "it has none"
    raise LoadFailed(error("no-such-signature", f"no signature {name!r}; {others}"))


def _assets(meta_graph: Any, path: str) -> dict[str, str]:
    """Return the paths of the model's assets by the names of the tensors for them."""
    # The graph has the paths on the machine where it was made, so these are fed instead. Older SavedModels
    # have the list of assets in a collection.
    assets = list(meta_graph.asset_file_def)
    for packed in meta_graph.collection_def[tf.saved_model.ASSETS_KEY].any_list.value:
        assets.append(AssetFileDef())
        packed.Unpack(assets[-1])
    return {
        asset.tensor_info.name: os.path.join(path, tf.saved_model.ASSETS_DIRECTORY, asset.filename)
        for asset in assets
    }


def _served_graph(path: str) -> Any:
    """Return a SavedModel; of several graphs of TensorFlow 1, the one to serve."""
    try:
        return tf.saved_model.load(path)
    except ValueError as failure:
        if "MetaGraph" not in str(failure) or "tags" not in str(failure):
            raise
    return tf.saved_model.load(path, tags=["serve"])


# Checkpoints into the user's model ------------------------------------------------------------------


def _load_variables(job: PredictionJob) -> Loaded:
    """Restore a checkpoint into the user's model."""
    request = job.request
    whole = build_from(request.model, **request.model_args)
    if not hasattr(tf.train.TrackableView, "children") or not hasattr(whole, "_trackable_children"):
        raise wrong_kind(request.model, whole, "which has nothing to restore")
    model = _runnable_model(whole)
    is_keras = hasattr(model, "train_on_batch")
    if is_keras:
        build(model, request)
    optimizer = build_from(request.optimizer, **request.optimizer_args) if request.optimizer else None
    if optimizer is not None and is_keras:
        compile_with(model, optimizer)
    elif optimizer is not None and hasattr(optimizer, "build"):
        optimizer.build(list(model.trainable_variables))
    detail = restore(job, whole, model, optimizer)
    return Loaded(
        detail=f"TensorFlow {tf.__version__}: {type(model).__name__}, {detail}",
        versions={"tensorflow": tf.__version__},
        run=partial(run_keras if is_keras else _run_module, model),
        inputs=partial(keras_inputs if is_keras else _module_inputs, model),
        train=partial(train_by_keras, model) if is_keras else partial(_train_module, model, optimizer),
    )


def _module_inputs(model: Any) -> tuple[InputSpec, ...]:
    """Return the inputs in the signature of a ``tf.Module``; empty if it has none."""
    specs = getattr(type(model).__call__, "input_signature", None) or ()
    return tuple(_input_spec(None, spec) for spec in specs)


def _run_module(model: Any, inputs: Arrays) -> Arrays:
    """Return the outputs of a ``tf.Module``."""
    with findings_on_error("predict-failed"):
        return plain_outputs(_call_module(model, inputs))


def _call_module(model: Any, inputs: Arrays) -> Any:
    by_place, by_name = positional({name: tf.convert_to_tensor(one) for name, one in inputs.items()})
    return model(*by_place, **by_name)


def _train_module(model: Any, optimizer: Any, inputs: Arrays) -> str:
    """Make one training step of a ``tf.Module``; the loss is the mean square of floating-point outputs."""
    variables = list(getattr(model, "trainable_variables", ()))
    if not variables:
        raise CannotTrain("the model has no trainable variables")
    with findings_on_error("training-step-failed"), tf.GradientTape() as tape:
        outputs = [one for one in tf.nest.flatten(_call_module(model, inputs)) if one.dtype.is_floating]
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
    moved = count_moved_weights(before, [one.numpy() for one in variables], value)
    return f"one step of {type(optimizer).__name__ if optimizer else 'SGD'} changed {moved}, loss {value:.4g}"


def _runnable_model(made: Any) -> Any:
    """Return the model to run: the factory's object itself, or the model in a ``tf.train.Checkpoint``."""
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
        names = f"several models: {', '.join(models)} (name one of them 'model')"
        problem = names if models else "no model that can be called"
        raise LoadFailed(error("no-such-model", f"the {type(made).__name__} has {problem}"))
    return next(iter(models.values()))


# Restoring ------------------------------------------------------------------------------------------


def restore(job: PredictionJob, made: Any, model: Any, optimizer: Any) -> str:
    """Restore a checkpoint into the object of the user's factory, and return a summary."""
    names, roles = job.options["names"]
    with findings_on_error("load-failed"):
        reader = tf.train.load_checkpoint(job.path)
        shapes = reader.get_variable_to_shape_map()
    if _GRAPH not in shapes:
        return _restore_by_name(reader, shapes, roles, model, optimizer)
    # TensorFlow restores what matches, and only warns about the rest. So the matches are judged here, before
    # anything is restored, and ``expect_partial`` silences its warnings.
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
        problem = f"the checkpoint has no state for {type(optimizer).__name__}"
        findings.append(error("optimizer-mismatch", problem))
    require_none(findings)
    with findings_on_error("load-failed"):
        target.read(job.path).expect_partial()
    state = f"; {type(optimizer).__name__} with its state" if optimizer is not None else ""
    return f"{counted(sum(one.live is not None and not one.is_optimizer for one in keys), 'variable')}{state}"


def _target(
    job: PredictionJob, graph: _ObjectGraph, made: Any, model: Any, optimizer: Any
) -> tuple[Any, list[_VariableKey]]:
    """Return a ``tf.train.Checkpoint`` like the saved one, with the stored keys."""
    # Either the model itself was saved, or a Checkpoint with the model as an attribute, whose name is
    # unknown. The name under which most of the stored keys match is taken, if it is better than the model
    # itself.
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
    # The model itself was saved. The view of a Checkpoint doesn't see the children of its ``root``.
    own = tf.train.TrackableView(model).children(model)
    more = {name: one for name, one in more.items() if name not in own}
    matches = {**view.match(tf.train.Checkpoint(**more)), **view.match(model)} if more else view.match(model)
    return tf.train.Checkpoint(root=model, **more), graph.keys(matches)


def _model_parts(made: Any, model: Any) -> Mapping[str, Any]:
    """Return the models that must be restored whole, by name: all in a Checkpoint, or the one model."""
    if not isinstance(made, tf.train.Checkpoint):
        return {"": model}
    children = tf.train.TrackableView(made).children(made)
    return {
        f"{name}.": one
        for name, one in children.items()
        if hasattr(one, "trainable_variables") and not hasattr(one, "apply_gradients")
    }


def _missing_findings(models: Mapping[str, Any], keys: Iterable[_VariableKey]) -> list[Finding]:
    """Return a finding for each variable that is not stored, as ``assert_existing_objects_matched`` does."""
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
    """Return TensorFlow's variable in a variable of Keras 3."""
    inner = getattr(variable, "value", None)
    return variable if inner is None or callable(inner) else inner


def _named_variables(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield a model's variables by their attributes, or by the path that Keras 3 gives them."""
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
    """Yield a model's variables by name; of Keras only weights, since metrics and seeds need not be saved."""
    weights: Any = getattr(model, "weights", None)
    for one in getattr(model, "variables", ()) if weights is None else weights:
        yield getattr(one, "path", None) or str(one.name).partition(":")[0], one


def _unused_findings(
    keys: Iterable[_VariableKey], names: Mapping[str, str], roles: Mapping[str, str], *, with_optimizer: bool
) -> list[Finding]:
    """Return a finding for each stored key that no object took, as ``assert_consumed`` does.

    An optimizer's state is ignored unless the user gave an optimizer. ``names`` and ``roles`` are by key.
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
    """Restore a checkpoint of TensorFlow 1 by the names of its variables; it has no objects."""
    if optimizer is not None:
        raise LoadFailed(
            error("optimizer-mismatch", "a TensorFlow 1 checkpoint identifies its optimizer only by name")
        )
    own = dict(_own_variables(model))
    saved = {
        key: shapes[key]
        for key in sorted(shapes)
        if key in own or roles.get(key) not in ("optimizer", "training")
    }
    require_none(misfit_findings(saved, {name: one.shape for name, one in own.items()}, not_consumed_finding))
    with findings_on_error("load-failed"):
        for name, one in own.items():
            one.assign(reader.get_tensor(name))
    return f"{counted(len(own), 'variable')} by name"


# The object graph of a checkpoint -------------------------------------------------------------------


class _VariableKey(NamedTuple):
    """A stored key, whether it is an optimizer's, and the object for it, or None."""

    text: str
    is_optimizer: bool
    live: Any


class _ObjectGraph(NamedTuple):
    """The objects of a checkpoint by number; 0 is the root."""

    nodes: Any
    of_model: frozenset[int]

    @classmethod
    def parse(cls, content: bytes) -> _ObjectGraph:
        """Parse the objects; the model's are reached without passing an optimizer."""
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
        """Return the stored keys; ``matches`` has the objects by number."""
        matches = {**self._slots(matches), **matches}
        return [
            _VariableKey(attribute.checkpoint_key, at not in self.of_model, matches.get(at))
            for at, node in enumerate(self.nodes)
            for attribute in node.attributes
            if attribute.name != _CONFIGURATION
        ]

    def _slots(self, matches: Mapping[int, Any]) -> Mapping[int, Any]:
        """Return the slots of old optimizers, which belong to a variable and an optimizer."""
        # They are no children of the optimizer, but in a table of each optimizer: the variable, the name of
        # the slot, and the node of the slot. ``CheckpointView.match`` doesn't follow it.
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
