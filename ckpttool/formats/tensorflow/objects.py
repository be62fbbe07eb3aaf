"""The names and roles of a TensorFlow checkpoint's tensors, from the graph of objects saved with them.

A tensor's key is the first path that TensorFlow found to it, which for a model's weights may lead through
the optimizer. People know it by its place in the model; all paths are looked at for that.

Source: tensorflow/tensorflow ``core/protobuf/trackable_object_graph.proto``.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ckpttool.dtypes import DType
from ckpttool.errors import DamagedCheckpoint, LimitExceeded
from ckpttool.roles import role_of
from ckpttool.tensor import Path, Role, Tensor
from ckpttool.wire.protobuf import fields

GRAPH_KEY = "_CHECKPOINTABLE_OBJECT_GRAPH"
MAX_NODES = 200_000
MAX_LINKS = 500_000
MAX_DEPTH = 64
"""Steps of a path; a model's layers nest less deep."""

VALUE = "VARIABLE_VALUE"
_UNNAMED = "Variable"

_MARK = "/.ATTRIBUTES/"
_SLOT = "/.OPTIMIZER_SLOT/"
_OPTIMIZER = re.compile(r"optim", re.IGNORECASE)
# What every optimizer of Keras counts and holds: since TensorFlow 2.11, and before.
_HYPER = (frozenset({"_iterations", "_learning_rate"}), frozenset({"iter", "learning_rate"}))
_OF_ALL = frozenset({"_variables", "_trainable_variables", "_all_variables", "_non_trainable_variables"})
_SLOT_NAME = re.compile(
    r"(?P<of>.+)/(?:Adam(?:_1)?|Momentum|RMSProp(?:_\d)?|Adagrad|Adadelta(?:_1)?|Ftrl(?:_1)?|AdaMax(?:_1)?)"
)
_BETA_POWER = re.compile(r"(?:.*/)?beta[12]_power(?:_\d+)?")
_METRICS = re.compile(r"(?:^|/)keras_api/metrics/")
_AVERAGE = re.compile(r".+/ExponentialMovingAverage")
_COUNTERS = frozenset({"save_counter", "step", "epoch", "global_step", "iteration", "iterations"})


class Cost(NamedTuple):
    """How unlike a path is to what people would say; the least is taken."""

    optimizers: int
    lists: int
    length: int


@dataclass(slots=True)
class _Node:
    children: list[tuple[str, int]] = field(default_factory=list)
    attributes: list[tuple[str, str, str]] = field(default_factory=list)
    slots: list[tuple[int, str, int]] = field(default_factory=list)

    @property
    def links(self) -> int:
        return len(self.children) + len(self.attributes) + len(self.slots)

    @property
    def is_optimizer(self) -> bool:
        """Tell by what an object holds, whatever it is called, whether it is an optimizer."""
        names = {name for name, _ in self.children}
        return bool(self.slots) or any(hyper <= names for hyper in _HYPER)


class Known(NamedTuple):
    """What the graph tells about a key; ``full_name`` is the variable's own, often none that says much."""

    path: Path
    is_optimizer: bool
    full_name: str


def read_graph(path: str, message: bytes) -> dict[str, Known]:
    """Return what an object graph tells about the keys in it.

    Raises:
        DamagedCheckpoint: It is no graph, or too large.
    """
    nodes: list[_Node] = []
    links = 0
    for part in fields(message, path, GRAPH_KEY):
        if part.number == 1:
            if len(nodes) == MAX_NODES:
                found = f"more than {MAX_NODES:,} objects"
                raise LimitExceeded(path, found, where=GRAPH_KEY)
            nodes.append(_node(path, part.data, MAX_LINKS - links))
            links += nodes[-1].links
    for node in nodes:
        if any(child >= len(nodes) for _, child in node.children):
            raise DamagedCheckpoint(path, "a child that isn't there", where=GRAPH_KEY, code="object-graph")
    return _names(nodes)


def _node(path: str, message: memoryview, allowed: int) -> _Node:
    node = _Node()
    for part in fields(message, path, GRAPH_KEY):
        if part.number not in (1, 2, 3):
            continue
        if node.links >= allowed:
            raise LimitExceeded(path, f"more than {MAX_LINKS:,} links between objects", where=GRAPH_KEY)
        told = {inner.number: inner for inner in fields(part.data, path, GRAPH_KEY) if inner.number <= 3}
        number = {key: inner.integer for key, inner in told.items()}
        text = {key: inner.text for key, inner in told.items()}
        if part.number == 1:
            node.children.append((text.get(2, ""), number.get(1, 0)))
        elif part.number == 2:
            node.attributes.append((text.get(1, ""), text.get(2, ""), text.get(3, "")))
        else:
            node.slots.append((number.get(1, 0), text.get(2, ""), number.get(3, 0)))
    return node


def _names(nodes: list[_Node]) -> dict[str, Known]:
    """Return the best path to each key; what is reached through an optimizer alone belongs to it.

    A variable that is called as its key spells the way to it is known by that: it may have other names, too.
    """
    reached = _best_paths(nodes)
    for at, node in enumerate(nodes):
        for original, slot, variable in node.slots:
            if at in reached and original in reached and variable < len(nodes) and variable not in reached:
                cost, optimizer = reached[at]
                reached[variable] = (cost, (*optimizer, slot, *reached[original][1]))
    found = {}
    for at, (cost, path) in reached.items():
        for attribute, name, key in nodes[at].attributes:
            full = path if attribute == VALUE else (*path, attribute)
            if attribute == VALUE and key == key_along(steps_of(name)):
                full = steps_of(name)
            found[key] = Known(full or (key,), cost.optimizers > 0, name)
    return found


def steps_of(name: str) -> tuple[str, ...]:
    """Return the objects' local names on the way to a tensor; what lies very deep keeps its dots."""
    steps = name.split(".")
    if len(steps) <= MAX_DEPTH:
        return tuple(steps)
    return (*steps[: MAX_DEPTH - 1], ".".join(steps[MAX_DEPTH - 1 :]))


def key_along(steps: Iterable[str]) -> str:
    """Return the key of the value that steps from object to object lead to."""
    return "/".join(step.replace(".", "..").replace("/", ".S") for step in steps) + _MARK + VALUE


def _best_paths(nodes: list[_Node]) -> dict[int, tuple[Cost, tuple[str, ...]]]:
    """Return the cheapest path from the root to each object (Dijkstra)."""
    best: dict[int, tuple[Cost, tuple[str, ...]]] = {}
    waiting: list[tuple[Cost, tuple[str, ...], int]] = [(Cost(0, 0, 0), (), 0)] if nodes else []
    while waiting:
        cost, path, at = heapq.heappop(waiting)
        if at in best:
            continue
        best[at] = (cost, path)
        if len(path) >= MAX_DEPTH:
            continue
        for name, child in nodes[at].children:
            if child not in best:
                beyond = _and(cost, name, nodes[child])
                heapq.heappush(waiting, (beyond, (*path, name), child))
    return best


def _and(cost: Cost, name: str, child: _Node) -> Cost:
    return Cost(
        int(cost.optimizers or child.is_optimizer or _OPTIMIZER.search(name) is not None),
        cost.lists + (name in _OF_ALL or name.startswith("keras_api")),
        cost.length + 1,
    )


def name_of(key: str, graph: Mapping[str, Known]) -> Path:
    """Return the path that people know a key by."""
    if key in graph:
        return graph[key].path
    table = graph.get(key.rpartition("-")[0])
    if table is not None:  # whose keys and values are tensors of their own, and no attributes
        return (*table.path[:-1], key.rpartition("/")[2])
    return (key,)


def own_names(tensors: Iterable[Tensor], graph: Mapping[str, Known]) -> dict[str, str]:
    """Return the variables' own names by those of their tensors, where they have any."""
    known = ((tensor.name, graph.get(tensor.key or tensor.name)) for tensor in tensors)
    return {name: told.full_name for name, told in known if told is not None and told.full_name != _UNNAMED}


def role_of_key(key: str, dtype: DType, shape: tuple[int, ...], graph: Mapping[str, Known]) -> Role:
    """Return what a tensor serves."""
    known = graph.get(key)
    if known is not None and (known.is_optimizer or _SLOT in key):
        return Role.OPTIMIZER
    if known is None and _is_old_slot(key):
        return Role.OPTIMIZER
    last = key.partition(_MARK)[0].rpartition("/")[2]
    if last in _COUNTERS and not shape:
        return Role.TRAINING
    is_attribute = _MARK in key and not key.endswith(_MARK + VALUE)
    if dtype.kind == "string" or _AVERAGE.fullmatch(key) or is_attribute or _METRICS.search(key):
        return Role.OTHER
    path = known.path if known else tuple(key.split("/"))
    if len(path) == 1 and role_of(path, shape) is Role.TRAINING and not shape:
        return Role.TRAINING
    if any("seed_generator" in str(step) for step in (*path, known.full_name if known else "")):
        return Role.OTHER
    return Role.WEIGHTS


def _is_old_slot(key: str) -> bool:
    return _SLOT_NAME.fullmatch(key) is not None or _BETA_POWER.fullmatch(key) is not None
