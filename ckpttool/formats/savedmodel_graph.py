"""What a SavedModel says of itself: its meta graphs, what they can be asked, and which ops they run.

Source: tensorflow/tensorflow ``core/protobuf/saved_model.proto``, ``meta_graph.proto``,
``core/framework/graph.proto``, ``function.proto``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpttool.errors import LimitExceeded
from ckpttool.formats.savedmodel_objects import Object, read_objects
from ckpttool.formats.savedmodel_types import read_shape, type_name
from ckpttool.formats.savedmodel_walk import Message

MAX_OPS = 20_000
INIT_SIGNATURE = "__saved_model_init_op"

SAVER_OPS = frozenset(
    {"SaveV2", "RestoreV2", "MergeV2Checkpoints", "Save", "SaveSlices", "Restore", "RestoreSlice"}
)
_SAVER_FUNCTION = re.compile(r"__inference__traced_(save|restore)_\d+$")
_SAVER_SCOPE = re.compile(r"save(_\d+)?/")
_INIT_COLLECTIONS = frozenset({"saved_model_main_op", "legacy_init_op"})
_VALUE = "value"


@dataclass(slots=True)
class MetaGraph:
    """One meta graph.

    Attributes:
        places: For each op where it stands first; those that savers need stand twice: in a saver (True),
            and outside of it.
        constant_bytes: Size of the values of constants, in the graph and in all functions.
        objects: The nodes of the object graph, which TensorFlow 1 doesn't write.
    """

    tags: list[str] = field(default_factory=list)
    version: str | None = None
    signatures: dict[str, dict[str, Any]] = field(default_factory=dict)
    assets: list[str] = field(default_factory=list)
    collections: list[str] = field(default_factory=list)
    has_init: bool = False
    nodes: int = 0
    functions: set[str] = field(default_factory=set)
    ops: Counter[str] = field(default_factory=Counter)
    places: dict[tuple[str, bool], str] = field(default_factory=dict)
    constant_bytes: int = 0
    objects: list[Object] | None = None

    def as_json(self) -> dict[str, object]:
        """Return it as plain data."""
        return {
            "tags": sorted(self.tags),
            "tensorflow_version": self.version,
            "signatures": dict(sorted(self.signatures.items())),
            "assets": self.assets,
            "init_op": self.has_init,
            "nodes": self.nodes,
            "functions": len(self.functions),
            "ops": dict(sorted(self.ops.items())),
        }


@dataclass(slots=True)
class SavedModel:
    """The message that a SavedModel is."""

    schema: int = 0
    graphs: list[MetaGraph] = field(default_factory=list)


def read_model(message: Message) -> SavedModel:
    """Return what a SavedModel message says.

    Raises:
        DamagedCheckpoint: It is no message.
        LimitExceeded: It is too large for what it says.
    """
    model = SavedModel()
    for number, value, part in message.fields():
        if number == 1:
            model.schema = value
        elif number == 2:
            model.graphs.append(_meta_graph(part))
    return model


def _meta_graph(message: Message) -> MetaGraph:
    graph = MetaGraph()
    for number, _, part in message.fields():
        if number in _PARTS:
            _PARTS[number](graph, part)
    return graph


def _meta_info(graph: MetaGraph, message: Message) -> None:
    for number, _, part in message.fields():
        if number == 4:
            graph.tags.append(part.kept())
        elif number == 5:
            graph.version = part.kept() or None


def _collection(graph: MetaGraph, entry: Message) -> None:
    for number, _, part in entry.fields():
        if number == 1:
            graph.collections.append(part.kept())
    graph.has_init |= not _INIT_COLLECTIONS.isdisjoint(graph.collections[-1:])


def _asset(graph: MetaGraph, message: Message) -> None:
    names = [part.kept() for number, _, part in message.fields() if number == 2]
    graph.assets.append(names[-1] if names else "")


# Ops ------------------------------------------------------------------------------------------------


def _graph_def(graph: MetaGraph, message: Message) -> None:
    for number, _, part in message.fields():
        if number == 1:
            graph.nodes += 1
            _node(graph, part, "")
        elif number == 2:
            for inner, _, function in part.fields():
                if inner == 1:
                    _function(graph, function)


def _function(graph: MetaGraph, message: Message) -> None:
    """Take in a function; its name comes first where TensorFlow writes it, and anywhere in a hostile file."""
    name, bodies = "", []
    for number, _, part in message.fields():
        if number == 1:
            name = next((inner.kept() for at, _, inner in part.fields() if at == 1), "")
            graph.functions.add(name)
        elif number == 3 and name:
            _node(graph, part, name)
        elif number == 3:
            bodies.append(part)
    for part in bodies:
        _node(graph, part, name)


def _node(graph: MetaGraph, message: Message, function: str) -> None:
    name, op = None, ""
    attributes = []
    for number, _, part in message.fields():
        if number == 1:
            name = part
        elif number == 2:
            op = part.text()
        elif number == 5:
            attributes.append(part)
    graph.ops[op] += 1
    if op == "Const":
        graph.constant_bytes += sum(map(_value_bytes, attributes))
    if len(graph.ops) > MAX_OPS:
        path = message.window.source.path
        raise LimitExceeded(path, f"more than {MAX_OPS:,} kinds of ops", expected="less")
    if op in SAVER_OPS or (op, False) not in graph.places:
        _place(graph, op, name.text() if name else "", function)


def _value_bytes(attribute: Message) -> int:
    """Return the size of a constant's value, in bytes; none of its other attributes."""
    parts = {number: part for number, _, part in attribute.fields()}
    is_value = 1 in parts and parts[1].nbytes == len(_VALUE) and parts[1].text() == _VALUE
    return parts[2].nbytes if is_value and 2 in parts else 0


def _place(graph: MetaGraph, op: str, name: str, function: str) -> None:
    """Remember where an op stands first, within a saver and elsewhere."""
    in_saver = bool(_SAVER_FUNCTION.match(function) if function else _SAVER_SCOPE.match(name))
    place = f"function {function}: {name}" if function else name
    graph.places.setdefault((op, op in SAVER_OPS and in_saver), place)


# Signatures -----------------------------------------------------------------------------------------


def _signature(graph: MetaGraph, entry: Message) -> None:
    name, told = "", None
    for number, _, part in entry.fields():
        if number == 1:
            name = part.kept()
        elif number == 2:
            told = part
    if name == INIT_SIGNATURE:
        graph.has_init = True
    else:
        graph.signatures[name] = _signature_def(told) if told else {}


def _signature_def(message: Message) -> dict[str, Any]:
    sides: dict[int, dict[str, Any]] = {1: {}, 2: {}}
    method = ""
    for number, _, part in message.fields():
        if number in sides:
            name, told = _entry(part)
            sides[number][name] = _tensor_info(told) if told else {}
        elif number == 3:
            method = part.kept()
    inputs, outputs = (dict(sorted(sides[number].items())) for number in (1, 2))
    return {"inputs": inputs, "outputs": outputs, "method_name": method}


def _entry(message: Message) -> tuple[str, Message | None]:
    """Return key and value of an entry of a map."""
    name, told = "", None
    for number, _, part in message.fields():
        if number == 1:
            name = part.kept()
        elif number == 2:
            told = part
    return name, told


def _tensor_info(message: Message) -> dict[str, object]:
    told: dict[str, object] = {"name": "", "dtype": "unknown", "shape": []}
    for number, value, part in message.fields():
        if number == 1:
            told["name"] = part.kept()
        elif number == 2:
            told["dtype"] = type_name(value)
        elif number == 3:
            told["shape"] = read_shape(part)
        elif number in (4, 5):
            told["encoding"] = "sparse" if number == 4 else "composite"
    return told


def _object_graph(graph: MetaGraph, message: Message) -> None:
    graph.objects = [*(graph.objects or ()), *read_objects(message)]


_PARTS: Mapping[int, Callable[[MetaGraph, Message], None]] = {
    1: _meta_info,
    2: _graph_def,
    4: _collection,
    5: _signature,
    6: _asset,
    7: _object_graph,
}
