"""A TensorFlow checkpoint's values into a model, with nothing on either side passed over in silence.

Only the child process imports this module. TensorFlow matches a checkpoint to objects by the graph of their
attributes, and leaves alone what has no match; the same walk is done here first, to name those.

Source: TensorFlow, python/checkpoint/checkpoint_view.py and core/protobuf/trackable_object_graph.proto.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

# A checkpoint's keys are in its object graph alone, and no public function gives them.
from tensorflow.core.protobuf.trackable_object_graph_pb2 import TrackableObjectGraph

from ckpttool.predict.failures import told
from ckpttool.predict.interface import LoadFailed
from ckpttool.predict.matching import at_most, missing, not_consumed, other_shape
from ckpttool.predict.request import Job
from ckpttool.report import Finding, counted, error

_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"
_CONFIGURATION = "OBJECT_CONFIG_JSON"
"""An attribute that holds how a Keras layer was made; nothing restores it."""
_COUNTER = "save_counter"
_ITERATIONS = frozenset(("_iterations", "iterations", "iter"))
"""What each optimizer of Keras has, old or new, whatever it hangs by."""


class _Names(NamedTuple):
    """What our own reading calls a checkpoint's variables: readable names by key, and whose they are."""

    readable: Mapping[str, str]
    roles: Mapping[str, str]

    def of(self, key: str) -> str:
        return self.readable.get(key, key.removesuffix(_VALUE))


class _Key(NamedTuple):
    """A stored key, whether it is an optimizer's, and the object that takes it, or None."""

    text: str
    is_optimizer: bool
    live: Any


class _Graph(NamedTuple):
    """A checkpoint's objects, by number; 0 is the root."""

    nodes: Any
    of_model: frozenset[int]

    def is_optimizer(self, at: int) -> bool:
        return _is_optimizer(self.nodes[at])

    def keys(self, matches: Mapping[int, Any]) -> list[_Key]:
        """Return what is stored, with what takes it by number."""
        matches = {**self._slots(matches), **matches}
        return [
            _Key(attribute.checkpoint_key, at not in self.of_model, matches.get(at))
            for at, node in enumerate(self.nodes)
            for attribute in node.attributes
            if attribute.name != _CONFIGURATION
        ]

    def _slots(self, matches: Mapping[int, Any]) -> Mapping[int, Any]:
        """Return the slots of old optimizers, which hang between a variable and the optimizer."""
        found = {}
        for at, node in enumerate(self.nodes):
            optimizer: Any = matches.get(at)
            for slot in node.slot_variables:
                variable = matches.get(slot.original_variable_node_id)
                if variable is None or slot.slot_name not in getattr(optimizer, "get_slot_names", list)():
                    continue
                found[slot.slot_variable_node_id] = optimizer.get_slot(variable, slot.slot_name)
        return found


def _graph(content: bytes) -> _Graph:
    """Return a checkpoint's objects; the model's are those that are reached without passing an optimizer."""
    nodes = TrackableObjectGraph.FromString(content).nodes
    reached, to_visit = {0}, [0]
    while to_visit:
        for child in nodes[to_visit.pop()].children:
            if child.node_id not in reached and not _is_optimizer(nodes[child.node_id]):
                reached.add(child.node_id)
                to_visit.append(child.node_id)
    return _Graph(nodes, frozenset(reached))


def _is_optimizer(node: Any) -> bool:
    return bool(node.slot_variables) or any(child.local_name in _ITERATIONS for child in node.children)


def restored(job: Job, made: Any, model: Any, optimizer: Any) -> str:
    """Restore a checkpoint into what a factory made, and return what was restored, in words.

    Raises:
        LoadFailed: One side has what the other hasn't, or in another shape.
    """
    names = _Names(*job.options["names"])
    with told("load-failed"):
        reader = tf.train.load_checkpoint(job.path)
        shapes = reader.get_variable_to_shape_map()
    if _GRAPH not in shapes:
        return _restored_by_name(reader, shapes, names, model, optimizer)
    graph = _graph(reader.get_tensor(_GRAPH))
    target, keys = _target(job, graph, made, model, optimizer)
    findings = [
        *_missing(_models(made, model), keys),
        *_not_consumed(keys, names, with_optimizer=optimizer is not None),
        *_unlike(keys, shapes, names),
        *_without_state(keys, optimizer),
    ]
    if findings:
        raise LoadFailed(*at_most(findings))
    with told("load-failed"):
        target.read(job.path).expect_partial()
    state = f"; {type(optimizer).__name__} with its state" if optimizer is not None else ""
    return f"{counted(sum(one.live is not None and not one.is_optimizer for one in keys), 'variable')}{state}"


def _target(job: Job, graph: _Graph, made: Any, model: Any, optimizer: Any) -> tuple[Any, list[_Key]]:
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
        return made, graph.keys(
            {**view.match(made), **(view.match(made.root) if hasattr(made, "root") else {})}
        )
    places = [n for n, at in children.items() if graph.nodes[at].children and n not in more]
    name = max(
        places, key=lambda n: _taken(graph, view.match(tf.train.Checkpoint(**{n: model}))), default=None
    )
    if name is None or _taken(graph, view.match(model)) >= _taken(
        graph, view.match(tf.train.Checkpoint(**{name: model}))
    ):
        return _at_root(graph, view, model, more)
    target = tf.train.Checkpoint(**{name: model}, **more)
    return target, graph.keys(view.match(target))


def _taken(graph: _Graph, matches: Mapping[int, Any]) -> int:
    return sum(one.live is not None for one in graph.keys(matches))


def _at_root(graph: _Graph, view: Any, model: Any, more: Mapping[str, Any]) -> tuple[Any, list[_Key]]:
    """Return a Checkpoint that stands for the model itself; the view of one doesn't look through it."""
    own = tf.train.TrackableView(model).children(model)
    more = {name: one for name, one in more.items() if name not in own}
    matches = {**view.match(tf.train.Checkpoint(**more)), **view.match(model)} if more else view.match(model)
    return tf.train.Checkpoint(root=model, **more), graph.keys(matches)


def _models(made: Any, model: Any) -> Mapping[str, Any]:
    """Return what must be restored whole, by name: all models of a Checkpoint, or the one model."""
    if not isinstance(made, tf.train.Checkpoint):
        return {"": model}
    children = tf.train.TrackableView(made).children(made)
    return {
        f"{name}.": one
        for name, one in children.items()
        if hasattr(one, "trainable_variables") and not hasattr(one, "apply_gradients")
    }


def _missing(models: Mapping[str, Any], keys: Iterable[_Key]) -> list[Finding]:
    """Return what the models have and the checkpoint has not, as ``assert_existing_objects_matched`` asks."""
    values = {id(one) for key in keys if key.live is not None for one in (key.live, _value(key.live))}
    return [
        missing(f"{place}{name}")
        for place, model in models.items()
        for name, one in _named(model)
        if id(one) not in values and id(_value(one)) not in values
    ]


def _value(variable: Any) -> Any:
    """Return TensorFlow's variable in one of Keras 3."""
    inner = getattr(variable, "value", None)
    return variable if inner is None or callable(inner) else inner


def _named(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield a model's variables by the attributes that lead to them; those of Keras 3 know a better name."""
    paths = {id(model): ""}
    to_visit = [model]
    for visited in to_visit:
        for name, child in tf.train.TrackableView(model).children(visited).items():
            if id(child) not in paths:
                paths[id(child)] = f"{paths[id(visited)]}.{name}".lstrip(".")
                to_visit.append(child)
    for name, one in _own(model):
        own = getattr(one, "path", None)
        yield own.replace("/", ".") if own else paths.get(id(one), name), one


def _own(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield a model's variables by name: of Keras its weights, since metrics and seeds need not be saved."""
    found: Any = getattr(model, "weights", None)
    found = getattr(model, "variables", ()) if found is None else found
    for one in found:
        yield getattr(one, "path", None) or str(one.name).partition(":")[0], one


def _not_consumed(keys: Iterable[_Key], names: _Names, *, with_optimizer: bool) -> list[Finding]:
    """Return what the checkpoint has and nothing took, as ``assert_consumed`` asks.

    An optimizer's state is of no interest where the user gave none.
    """
    left = (one for one in keys if one.live is None and (with_optimizer or not one.is_optimizer))
    return [not_consumed(names.of(one.text)) for one in left if _is_the_models(one.text, names)]


def _is_the_models(key: str, names: _Names) -> bool:
    """Tell whether a key is no bookkeeping: a step, an epoch, a metric."""
    return names.roles.get(key) != "training" and not key.startswith(f"{_COUNTER}/")


def _unlike(keys: Iterable[_Key], shapes: Mapping[str, Any], names: _Names) -> list[Finding]:
    """Return what has another shape in the checkpoint; variables alone have one."""
    return [
        other_shape(names.of(one.text), shapes[one.text], one.live.shape)
        for one in keys
        if one.text in shapes and one.text.endswith(_VALUE) and hasattr(one.live, "shape")
        if list(one.live.shape) != list(shapes[one.text])
    ]


def _without_state(keys: Iterable[_Key], optimizer: Any) -> list[Finding]:
    if optimizer is None or any(one.is_optimizer and one.live is not None for one in keys):
        return []
    return [
        error("optimizer-mismatch", f"the checkpoint holds no state that {type(optimizer).__name__} takes")
    ]


def _restored_by_name(
    reader: Any, shapes: Mapping[str, Any], names: _Names, model: Any, optimizer: Any
) -> str:
    """Restore what TensorFlow 1 saved, without objects: by the names of the variables.

    Raises:
        LoadFailed: One side has what the other hasn't, or in another shape; or an optimizer was asked for.
    """
    if optimizer is not None:
        raise LoadFailed(
            error("optimizer-mismatch", "a checkpoint of TensorFlow 1 tells its optimizer by name alone")
        )
    own = dict(_own(model))
    findings = [missing(name) for name in own if name not in shapes]
    findings += [
        not_consumed(key)
        for key in sorted(shapes)
        if key not in own and names.roles.get(key) not in ("optimizer", "training")
    ]
    shared = [name for name, one in own.items() if name in shapes and list(one.shape) != list(shapes[name])]
    findings += [other_shape(name, shapes[name], own[name].shape) for name in shared]
    if findings:
        raise LoadFailed(*at_most(findings))
    with told("load-failed"):
        for name, one in own.items():
            one.assign(reader.get_tensor(name))
    return f"{counted(len(own), 'variable')} by name"
