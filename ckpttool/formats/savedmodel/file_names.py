"""Data-flow analysis of the file names that TensorFlow ops open.

A name is followed backwards through the nodes that pass it on, and through the arguments of a function to
all that call it. The loader feeds assets while it initialises a model, and the prefix of the variables while
it restores them; an object graph binds assets to arguments. Any other source is ``ELSEWHERE``.

Source: tensorflow/tensorflow ``cc/saved_model/loader_util.cc``, ``python/saved_model/load.py``,
``python/training/saver.py``, ``python/checkpoint/functional_saver.py``, ``core/framework/function.cc``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from ckpttool.containers.protobuf import Field, fields
from ckpttool.core.errors import DamagedCheckpoint
from ckpttool.formats.savedmodel.body import Body, GraphNode
from ckpttool.formats.savedmodel.ops import known_ops

MAX_DEPTH = 100
"""Maximum number of nodes between a file name and the op; TensorFlow's savers have ten."""


class Origin(Enum):
    """Source of a string that names a file."""

    ASSET = auto()
    PREFIX = auto()
    """Checkpoint prefix, fed to the saver."""
    DERIVED = auto()
    """File name made of the checkpoint prefix and a suffix."""
    SUFFIX = auto()
    """Constant suffix that TensorFlow's savers append to the prefix."""
    ELSEWHERE = auto()


Origins = frozenset[Origin]
_ASSET, _PREFIX = frozenset({Origin.ASSET}), frozenset({Origin.PREFIX})
_WRITABLE, _ELSEWHERE = frozenset({Origin.PREFIX, Origin.DERIVED}), frozenset({Origin.ELSEWHERE})


class FileInput(NamedTuple):
    """Input of an op that is a file name, and its allowed origins."""

    position: int
    origins: Origins


FILE_INPUTS: Mapping[str, tuple[FileInput, ...]] = {
    "InitializeTableFromTextFile": (FileInput(1, _ASSET),),
    "InitializeTableFromTextFileV2": (FileInput(1, _ASSET),),
    "ReadFile": (FileInput(0, _ASSET),),
    "RestoreV2": (FileInput(0, _PREFIX),),
    "Restore": (FileInput(0, _PREFIX),),
    "RestoreSlice": (FileInput(0, _PREFIX),),
    "SaveV2": (FileInput(0, _WRITABLE),),
    "Save": (FileInput(0, _WRITABLE),),
    "SaveSlices": (FileInput(0, _WRITABLE),),
    "MergeV2Checkpoints": (FileInput(0, _WRITABLE), FileInput(1, _PREFIX)),
}
"""Ops that are safe if they open only files of the model."""


_SAME = {one: one for one in Origin}
_NUMBERED = {Origin.PREFIX: Origin.DERIVED, Origin.DERIVED: Origin.DERIVED}
_FORWARDING: Mapping[str, tuple[slice, Mapping[Origin, Origin]]] = {
    "Identity": (slice(0, 1), _SAME),
    "Pack": (slice(None), _SAME),
    "Select": (slice(1, 3), _SAME),
    "SelectV2": (slice(1, 3), _SAME),
    "ShardedFilename": (slice(0, 1), _NUMBERED),
}
"""Inputs that an op forwards, and the origin of the result for each origin of an input."""
_FIRST_ARGUMENT: Mapping[tuple[str, bytes], int] = {
    ("PartitionedCall", b"f"): 0,
    ("StatefulPartitionedCall", b"f"): 0,
    ("If", b"then_branch"): 1,
    ("If", b"else_branch"): 1,
    ("StatelessIf", b"then_branch"): 1,
    ("StatelessIf", b"else_branch"): 1,
}
"""Index of the input that becomes the first argument of the called function, by op and attribute."""
# Savers write to ``<prefix>_temp/part``, TensorFlow 1's to ``<prefix>_temp_<uuid>/part``, and to
# ``<prefix>.part`` in object stores; ``MergeV2Checkpoints`` moves the files when all are written. The suffix
# is a constant in the graph. It can't be used to leave the directory, because nothing else may be joined to
# the prefix.
_SUFFIX = re.compile(rb"\.part|_temp(_[0-9a-f]{1,64})?/part")
_HANDLE, _READ, _ASSIGN = "VarHandleOp", "ReadVariableOp", "AssignVariableOp"
_VARIABLE_OPS = frozenset({_READ, _ASSIGN, "VarIsInitializedOp"})


class Call(NamedTuple):
    """Node that refers to a function, and the function that contains it (``""`` for the graph)."""

    body: str
    node: int


@dataclass(slots=True)
class FileNames:
    """Origins of file names in one meta graph.

    Attributes:
        bodies: Nodes by function; ``""`` is the graph.
        calls: Nodes that refer to each function.
        captured: Origins of the captured inputs of each function, one entry per object.
        opaque: Functions with callers outside this graph.
        fed: Origins of fed tensors, by node and output.
    """

    bodies: Mapping[str, Body]
    calls: Mapping[str, Collection[Call]]
    captured: Mapping[str, Collection[Sequence[Origin]]]
    opaque: Collection[str]
    fed: Mapping[tuple[str, str], Origin]
    _known: dict[tuple[str, str], Origins] = field(default_factory=dict)
    _handles: dict[str, list[GraphNode]] | None = None

    def opens_model_files(self, op: str, name: str, function: str) -> bool:
        """Return whether a node opens only files of the model."""
        node = self.bodies[function].nodes.get(hash(name)) if function in self.bodies else None
        # Of several nodes with one name, which only a hostile file has, ``nodes`` keeps the last.
        if node is None or node.op != op or op in self.bodies:
            return False
        return all(
            self._origins_of_inputs(function, node, slice(one.position, one.position + 1), 0) <= one.origins
            for one in FILE_INPUTS[op]
        )

    def _origins_of_inputs(self, body: str, node: GraphNode, positions: slice, depth: int) -> Origins:
        references = _data_inputs(node)[positions]
        if not references:
            return _ELSEWHERE
        return frozenset().union(*(self._origins(body, one, depth + 1) for one in references))

    def _origins(self, body: str, reference: str, depth: int) -> Origins:
        """Return the origins of a tensor."""
        # The entry is made before the search: a cycle finds it, and counts as ``ELSEWHERE``.
        key = body, reference
        if key not in self._known:
            self._known[key] = _ELSEWHERE
            if depth < MAX_DEPTH:
                self._known[key] = self._find_origins(body, reference, depth)
        return self._known[key]

    def _find_origins(self, body: str, reference: str, depth: int) -> Origins:
        name, _, output = reference.partition(":")
        if not body and (name, output or "0") in self.fed:
            return frozenset({self.fed[name, output or "0"]})
        node = self.bodies[body].nodes.get(hash(name))
        if node is not None and not node.op:
            return _ELSEWHERE if output else self._origins_of_argument(body, int(node.inputs[0]), depth)
        if node is None or node.op in self.bodies:  # a function is called in place of an op of its name
            return _ELSEWHERE
        if node.op == "Const":
            text = _constant_text(node)
            return frozenset({Origin.SUFFIX}) if text and _SUFFIX.fullmatch(text) else _ELSEWHERE
        if node.op == "StringJoin":
            return self._origins_of_joined(body, node, depth)
        if node.op == _READ and not body:
            return self._origins_of_variable(node, depth)
        if node.op not in _FORWARDING:
            return _ELSEWHERE
        inputs, becomes = _FORWARDING[node.op]
        found = self._origins_of_inputs(body, node, inputs, depth)
        return frozenset(becomes.get(one, Origin.ELSEWHERE) for one in found)

    def _origins_of_joined(self, body: str, node: GraphNode, depth: int) -> Origins:
        """Return the origins of joined strings; the prefix with suffixes has the origin ``DERIVED``."""
        first = self._origins_of_inputs(body, node, slice(0, 1), depth)
        rest = self._origins_of_inputs(body, node, slice(1, None), depth)
        is_derived = first <= _PREFIX and rest <= {Origin.SUFFIX} and not _attribute_text(node, b"separator")
        return frozenset({Origin.DERIVED}) if is_derived else _ELSEWHERE

    # Functions --------------------------------------------------------------------------------------

    def _origins_of_argument(self, function: str, position: int, depth: int) -> Origins:
        """Return the origins of an argument over all calls; empty if nothing calls the function."""
        if function in self.opaque or function in known_ops():
            return _ELSEWHERE
        found: set[Origin] = set()
        for call in self.calls.get(function, ()):
            node = self.bodies[call.body].nodes.get(call.node)
            first = None if node is None else _first_argument(node, function)
            if node is None or first is None or (node.op != function and node.op in self.bodies):
                return _ELSEWHERE
            at = first + position
            found |= self._origins_of_inputs(call.body, node, slice(at, at + 1), depth)
        # Objects call a function with captured inputs as its last arguments; the others come from outside.
        for captured in self.captured.get(function, ()):
            at = position - (self.bodies[function].arguments - len(captured))
            found.add(captured[at] if 0 <= at < len(captured) else Origin.ELSEWHERE)
        return frozenset(found)

    # Variables: TensorFlow 2 keeps the path of an asset in one ---------------------------------------

    def _origins_of_variable(self, node: GraphNode, depth: int) -> Origins:
        """Return the origins of the values assigned to a variable private to this graph."""
        # The variable counts only if all its users are known: no other handle shares its resource, and no op
        # takes its handle but those that read, assign or test it.
        names = [one.partition(":")[0] for one in _data_inputs(node)]
        handle = self.bodies[""].nodes.get(hash(names[0])) if names else None
        if handle is None or handle.op != _HANDLE or not self._is_private(handle):
            return _ELSEWHERE
        if self._handles is None:
            self._handles = self._users_of_handles()
        users = self._handles.get(names[0], [])
        if any(user.op not in _VARIABLE_OPS or user.op in self.bodies for user in users):
            return _ELSEWHERE
        values = [
            self._origins_of_inputs("", user, slice(1, 2), depth) for user in users if user.op == _ASSIGN
        ]
        return frozenset().union(*values) if values else _ELSEWHERE

    def _users_of_handles(self) -> dict[str, list[GraphNode]]:
        """Return the nodes that take a variable handle, by the name of the handle."""
        handles = {at for at, node in self.bodies[""].nodes.items() if node.op == _HANDLE}
        users: dict[str, list[GraphNode]] = {}
        for node in self.bodies[""].nodes.values():
            for name in (reference.partition(":")[0] for reference in _data_inputs(node)):
                if hash(name) in handles:
                    users.setdefault(name, []).append(node)
        return users

    def _is_private(self, handle: GraphNode) -> bool:
        """Return whether a handle is the only reference to its resource."""
        own = _attribute_text(handle, b"shared_name")
        nodes = (node for body in self.bodies.values() for node in body.nodes.values() if node.op == _HANDLE)
        same = [node for node in nodes if _attribute_text(node, b"shared_name") in (own, None)]
        return bool(own) and len(same) == 1


def _first_argument(node: GraphNode, function: str) -> int | None:
    """Return the index of the input that becomes the first argument; None if unknown."""
    naming = [one for one in node.attributes if function in one.functions]
    if node.op == function:
        return None if naming else 0
    # An attribute with several functions hands some of them on to the function that it calls.
    firsts = {
        _FIRST_ARGUMENT.get((node.op, one.key)) if one.functions == (function,) else None for one in naming
    }
    return firsts.pop() if len(firsts) == 1 else None


def _data_inputs(node: GraphNode) -> list[str]:
    return [reference for reference in node.inputs if not reference.startswith("^")]


# Attributes -----------------------------------------------------------------------------------------

_TEXT, _TENSOR = 2, 8  # fields of AttrValue
_STRING = 7  # the number of the type of strings


def _attribute_text(node: GraphNode, key: bytes) -> bytes | None:
    """Return a string attribute, ``b""`` if absent; None if it is not one string."""
    entries = [one for one in node.attributes if one.key == key]
    if not entries:
        return b""
    value = _only_field(_value_of(entries[0].content)) if len(entries) == 1 else None
    return bytes(value.data) if value is not None and value.number == _TEXT else None


def _constant_text(node: GraphNode) -> bytes | None:
    """Return the value of a scalar string constant; None for any other constant."""
    # Only type, shape and one string are allowed. Another field, or a second value, could make TensorFlow
    # read another string than is judged here.
    entries = [one for one in node.attributes if one.key == b"value"]
    value = _only_field(_value_of(entries[0].content)) if len(entries) == 1 else None
    parts = _fields(value.data) if value is not None and value.number == _TENSOR else []
    texts = [bytes(one.data) for one in parts if one.number == 8]
    is_text = [one.integer for one in parts if one.number == 1] == [_STRING]
    is_plain = all(one.number in (1, 2, 8) for one in parts)
    return texts[0] if is_text and is_plain and len(texts) == 1 else None


def _value_of(entry: bytes) -> list[Field]:
    """Return the fields of the value of a map entry; empty unless there is exactly one value."""
    values = [one for one in _fields(entry) if one.number == 2]
    return _fields(values[0].data) if len(values) == 1 else []


def _only_field(parts: list[Field]) -> Field | None:
    return parts[0] if len(parts) == 1 else None


def _fields(message: bytes | memoryview) -> list[Field]:
    try:
        return [*fields(message, "")]
    except DamagedCheckpoint:  # a summary of a long attribute
        return []
