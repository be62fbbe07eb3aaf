"""TensorFlow's object graph: read for names and roles of tensors, built from names, and pruned.

The graph records the Python objects under ``tf.train.Checkpoint``: nodes with named children, and for each
variable its key in the bundle. A key is the shortest path from the root, and the shortest path to a model's
weight often leads through the optimizer (``optimizer/_variables/3``). The readable name is another path to
the same node, so all paths are ranked. The parts of a name are child names: ``fc.weight`` is the child
``weight`` of the child ``fc`` of the root.

Source: tensorflow/tensorflow ``core/protobuf/trackable_object_graph.proto``,
``python/checkpoint/trackable_view.py``.
"""

from __future__ import annotations

import heapq
import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ckpttool.containers.compressed import Budget
from ckpttool.containers.protobuf import BYTES, VARINT, Field, bytes_field, fields, number_field, text_field
from ckpttool.core.dtypes import DType
from ckpttool.core.errors import DamagedCheckpoint, LimitExceeded
from ckpttool.core.tensor import Path, Role, Tensor, role_of

GRAPH_KEY = "_CHECKPOINTABLE_OBJECT_GRAPH"
MAX_NODES = 200_000
MAX_LINKS = 500_000
MAX_DEPTH = 64
"""Limit on the length of a path; layers of real models nest less deep."""
_MARK = "/.ATTRIBUTES/"
VALUE = "VARIABLE_VALUE"
KEY_END = _MARK + VALUE
"""End of the key of a variable; other attributes have other names in place of ``VALUE``."""
SLOT_MARK = "/.OPTIMIZER_SLOT/"
_UNNAMED = "Variable"
_OPTIMIZER = re.compile(r"optim", re.IGNORECASE)
# Children that every Keras optimizer has: since TensorFlow 2.11, and before.
_OPTIMIZER_CHILDREN = (frozenset({"_iterations", "_learning_rate"}), frozenset({"iter", "learning_rate"}))
_VARIABLE_LISTS = frozenset(
    {"_variables", "_trainable_variables", "_all_variables", "_non_trainable_variables"}
)
_SLOT_NAME = re.compile(
    r"(?P<of>.+)/(?:Adam(?:_1)?|Momentum|RMSProp(?:_\d)?|Adagrad|Adadelta(?:_1)?|Ftrl(?:_1)?|AdaMax(?:_1)?)"
)
_BETA_POWER = re.compile(r"(?:.*/)?beta[12]_power(?:_\d+)?")
_METRICS = re.compile(r"(?:^|/)keras_api/metrics/")
_AVERAGE = re.compile(r".+/ExponentialMovingAverage")
_COUNTERS = frozenset({"save_counter", "step", "epoch", "global_step", "iteration", "iterations"})
_CHILD, _ATTRIBUTE, _SLOT, _HAS_VALUES = 1, 2, 3, 5  # fields of TrackableObject
_TRUE = number_field(1, 1)
_SAVE_COUNTER = "save_counter"


class GraphVariable(NamedTuple):
    """Variable under a key; ``full_name`` is the name given in Python, often just ``Variable``."""

    path: Path
    is_optimizer: bool
    full_name: str


def read_graph(path: str, message: bytes) -> dict[str, GraphVariable]:
    """Parse a TrackableObjectGraph into its variables by key."""
    nodes: list[_ObjectNode] = []
    links = 0
    for part in fields(message, path, GRAPH_KEY):
        if part.number == 1:
            if len(nodes) == MAX_NODES:
                found = f"more than {MAX_NODES:,} objects"
                raise LimitExceeded(path, found, where=GRAPH_KEY)
            nodes.append(_read_node(path, part.data, MAX_LINKS - links))
            links += nodes[-1].links
    for node in nodes:
        if any(child >= len(nodes) for _, child in node.children):
            raise DamagedCheckpoint(path, "a child that doesn't exist", where=GRAPH_KEY, code="object-graph")
    return _best_names(nodes, Budget(path, len(message), "names of variables"))


@dataclass(slots=True)
class _ObjectNode:
    children: list[tuple[str, int]] = field(default_factory=list)
    attributes: list[tuple[str, str, str]] = field(default_factory=list)
    slots: list[tuple[int, str, int]] = field(default_factory=list)

    @property
    def links(self) -> int:
        return len(self.children) + len(self.attributes) + len(self.slots)

    @property
    def is_optimizer(self) -> bool:
        """Return whether the object is an optimizer, judged by its children and slots, not by its name."""
        names = {name for name, _ in self.children}
        return bool(self.slots) or any(children <= names for children in _OPTIMIZER_CHILDREN)


def _read_node(path: str, message: memoryview, allowed: int) -> _ObjectNode:
    # The limit is on all links of the graph. It is passed on to each node, because a single one could have
    # millions.
    node = _ObjectNode()
    for part in fields(message, path, GRAPH_KEY):
        if part.number not in (1, 2, 3):
            continue
        if node.links >= allowed:
            raise LimitExceeded(path, f"more than {MAX_LINKS:,} links between objects", where=GRAPH_KEY)
        link = {inner.number: inner for inner in fields(part.data, path, GRAPH_KEY) if inner.number <= 3}
        number = {key: inner.integer for key, inner in link.items()}
        text = {key: inner.text for key, inner in link.items()}
        if part.number == 1:
            node.children.append((text.get(2, ""), number.get(1, 0)))
        elif part.number == 2:
            node.attributes.append((text.get(1, ""), text.get(2, ""), text.get(3, "")))
        else:
            node.slots.append((number.get(1, 0), text.get(2, ""), number.get(3, 0)))
    return node


def _best_names(nodes: list[_ObjectNode], budget: Budget) -> dict[str, GraphVariable]:
    """Return the variable of each key, with the best path to it."""
    reached = _best_paths(nodes)
    # A slot variable (one of Adam's moments, say) isn't a child of any node. It gets the path of its
    # optimizer, the name of the slot, and the path of the variable that it belongs to.
    for at, node in enumerate(nodes):
        for original, slot, variable in node.slots:
            if at in reached and original in reached and variable < len(nodes) and variable not in reached:
                cost, optimizer = reached[at]
                reached[variable] = (cost, (*optimizer, slot, *reached[original][1]))
    variables = {}
    for at, (cost, path) in reached.items():
        for attribute, name, key in nodes[at].attributes:
            full = path if attribute == VALUE else (*path, attribute)
            # Our writer gives variables their path as full name. It wins over another path to a tied
            # variable.
            if attribute == VALUE and key == key_along(steps_of_name(name)):
                full = steps_of_name(name)
            budget.charge(sum(map(len, full)), GRAPH_KEY)
            variables[key] = GraphVariable(full or (key,), cost.optimizers > 0, name)
    return variables


class PathCost(NamedTuple):
    """Rank of a path among all paths to a node; the smallest wins.

    Attributes:
        optimizers: 1 if the path leads through an optimizer, else 0.
        lists: Number of steps into lists of all variables, which Keras keeps next to the layers.
        length: Number of steps.
    """

    optimizers: int
    lists: int
    length: int


def _best_paths(nodes: list[_ObjectNode]) -> dict[int, tuple[PathCost, tuple[str, ...]]]:
    """Return the cheapest path from the root to each object (Dijkstra)."""
    # Costs are compared field by field: a path without optimizers wins over any path with one, however short.
    # No field becomes smaller along a path, so the first cost of an object that leaves the heap is its best.
    # Of equal costs the path that sorts first is taken, so names don't depend on the order in the file.
    best: dict[int, tuple[PathCost, tuple[str, ...]]] = {}
    waiting: list[tuple[PathCost, tuple[str, ...], int]] = [(PathCost(0, 0, 0), (), 0)] if nodes else []
    while waiting:
        cost, path, at = heapq.heappop(waiting)
        if at in best:
            continue
        best[at] = (cost, path)
        if len(path) >= MAX_DEPTH:
            continue
        for name, child in nodes[at].children:
            if child not in best:
                is_optimizer = nodes[child].is_optimizer or _OPTIMIZER.search(name) is not None
                is_list = name in _VARIABLE_LISTS or name.startswith("keras_api")
                beyond = PathCost(int(cost.optimizers or is_optimizer), cost.lists + is_list, cost.length + 1)
                heapq.heappush(waiting, (beyond, (*path, name), child))
    return best


# Names, keys and roles ------------------------------------------------------------------------------


def steps_of_name(name: str) -> tuple[str, ...]:
    """Return the child names along the path to a tensor; beyond ``MAX_DEPTH`` the rest is one step."""
    steps = name.split(".")
    if len(steps) <= MAX_DEPTH:
        return tuple(steps)
    return (*steps[: MAX_DEPTH - 1], ".".join(steps[MAX_DEPTH - 1 :]))


def key_along(steps: Iterable[str]) -> str:
    """Return the key of a variable, given the child names along its path; ``.`` and ``/`` are escaped."""
    return "/".join(step.replace(".", "..").replace("/", ".S") for step in steps) + KEY_END


def key_of(name: str) -> str:
    """Return the key for a tensor's name."""
    return key_along(steps_of_name(name))


def path_of_key(key: str, graph: Mapping[str, GraphVariable]) -> Path:
    """Return the readable path of a key: the best path in the graph, else the key itself."""
    if key in graph:
        return graph[key].path
    # A lookup table has one attribute, and two entries in the bundle: ``<key>-keys`` and ``<key>-values``.
    table = graph.get(key.rpartition("-")[0])
    if table is not None:
        return (*table.path[:-1], key.rpartition("/")[2])
    return (key,)


def own_names(tensors: Iterable[Tensor], graph: Mapping[str, GraphVariable]) -> dict[str, str]:
    """Return the names that variables were given in Python, by tensor name; unnamed ones are left out."""
    variables = {tensor.name: graph.get(tensor.key or tensor.name) for tensor in tensors}
    return {name: one.full_name for name, one in variables.items() if one and one.full_name != _UNNAMED}


def role_of_key(key: str, dtype: DType, shape: tuple[int, ...], graph: Mapping[str, GraphVariable]) -> Role:
    """Return the role of a tensor."""
    # Checkpoints of TensorFlow 1 have no graph: slots and beta powers are recognised by the names that its
    # optimizers give them.
    known = graph.get(key)
    if known is not None and (known.is_optimizer or SLOT_MARK in key):
        return Role.OPTIMIZER
    if known is None and (_SLOT_NAME.fullmatch(key) or _BETA_POWER.fullmatch(key)):
        return Role.OPTIMIZER
    last = key.partition(_MARK)[0].rpartition("/")[2]
    if last in _COUNTERS and not shape:
        return Role.TRAINING
    is_attribute = _MARK in key and not key.endswith(KEY_END)
    if dtype.kind == "string" or _AVERAGE.fullmatch(key) or is_attribute or _METRICS.search(key):
        return Role.OTHER
    path = known.path if known else tuple(key.split("/"))
    if len(path) == 1 and role_of(path, shape) is Role.TRAINING and not shape:
        return Role.TRAINING
    if any("seed_generator" in str(step) for step in (*path, known.full_name if known else "")):
        return Role.OTHER
    return Role.WEIGHTS


# Building a graph from names ------------------------------------------------------------------------


class ObjectTree:
    """Tree of numbered objects, each with its children by name; object 0 is the root."""

    def __init__(self) -> None:
        self.children: list[dict[str, int]] = [{}]

    def object_at(self, steps: Iterable[str]) -> int:
        """Return the number of the object at a path from the root; missing objects are added."""
        at = 0
        for step in steps:
            child = self.children[at].get(step)
            if child is None:
                child = self.children[at][step] = len(self.children)
                self.children.append({})
            at = child
        return at

    def tie(self, name: str, owner: int) -> int:
        """Make an object reachable under a second name; return the number of the object under that name.

        If the name exists already because it has children, it remains a separate object.
        """
        *above, last = steps_of_name(name)
        return self.children[self.object_at(above)].setdefault(last, owner)


def objects_of(names: Iterable[str]) -> tuple[ObjectTree, dict[str, int]]:
    """Return the tree of objects for tensor names, and the number of each tensor's object."""
    objects = ObjectTree()
    return objects, {name: objects.object_at(steps_of_name(name)) for name in sorted(names)}


def graph_of(owned: Iterable[str], ties: Mapping[str, str]) -> bytes:
    """Return a TrackableObjectGraph for the names of tensors.

    Args:
        owned: Names of tensors with values of their own.
        ties: Names of tied tensors, each with the name of the owner; both become names of one object.
    """
    # The save counter has no value (``b""``), but its node says that it has one: ``tf.train.Checkpoint``
    # creates the counter after it has restored the rest, and complains if the graph has no node for it.
    objects, places = objects_of(owned)
    values = {place: _attribute_message(name) for name, place in places.items()}
    for name in sorted(ties):
        values.setdefault(objects.tie(name, places[ties[name]]), _attribute_message(ties[name]))
    values.setdefault(objects.object_at((_SAVE_COUNTER,)), b"")
    nodes = []
    for number, children in enumerate(objects.children):
        node = [
            bytes_field(_CHILD, number_field(1, child) + text_field(2, name))
            for name, child in children.items()
        ]
        if number in values:
            node += values[number], bytes_field(_HAS_VALUES, _TRUE)
        nodes.append(bytes_field(1, b"".join(node)))
    return b"".join(nodes)


def _attribute_message(source: str) -> bytes:
    """Return the attribute of an object that has a variable's value; ``source`` is the tensor's name."""
    attribute = text_field(1, VALUE) + text_field(2, source) + text_field(3, key_of(source))
    return bytes_field(_ATTRIBUTE, attribute)


# Pruning a graph ------------------------------------------------------------------------------------


def prune_graph(path: str, message: bytes, kept: Collection[str], removed: Collection[str]) -> bytes:
    """Return a graph without the values of removed keys; unchanged if it has none of them.

    Args:
        path: File or part that it comes from, for errors.
        message: The graph.
        kept: Keys that are kept.
        removed: Keys that are removed.
    """
    # Nodes are kept, because others refer to them by number; only attributes and slots are removed.
    ordered_kept, ordered_removed = sorted(kept), sorted(removed)

    def is_removed(attribute: Field) -> bool:
        key = next((one.text for one in fields(attribute.data, path, GRAPH_KEY) if one.number == 3), "")
        if key in kept or key in removed:
            return key in removed
        # Tables and iterators have keys that begin with the one that the graph states.
        return _any_starts_with(ordered_removed, key) and not _any_starts_with(ordered_kept, key)

    nodes = [part.data for part in fields(message, path, GRAPH_KEY) if part.number == 1] if removed else []
    lost = {
        number
        for number, node in enumerate(nodes)
        for part in fields(node, path, GRAPH_KEY)
        if part.number == _ATTRIBUTE and is_removed(part)
    }
    if not lost:
        return message

    def is_kept(part: Field) -> bool:
        if part.number == _ATTRIBUTE:
            return not is_removed(part)
        if part.number != _SLOT:
            return True
        slots = (one.integer for one in fields(part.data, path, GRAPH_KEY) if one.number == 3)
        return next(slots, 0) not in lost

    pruned = []
    for node in nodes:
        parts = []
        for part in fields(node, path, GRAPH_KEY):
            if part.kind == BYTES and is_kept(part):
                parts.append(bytes_field(part.number, part.data))
            elif part.kind == VARINT and is_kept(part):
                parts.append(number_field(part.number, part.integer))
        pruned.append(bytes_field(1, b"".join(parts)))
    return b"".join(pruned)


def _any_starts_with(ordered: Sequence[str], beginning: str) -> bool:
    """Return whether one of the sorted texts starts with a prefix."""
    at = bisect_left(ordered, beginning)
    return at < len(ordered) and ordered[at].startswith(beginning)
