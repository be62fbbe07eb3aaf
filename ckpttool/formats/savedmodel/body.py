"""Bodies of a meta graph, the graph itself or one of its functions: nodes, and references between them.

Nodes are kept in a short form while the message is parsed, for questions that only the whole graph answers:
do all references exist, which nodes depend on which, where do file names come from, what is computed.

Source: tensorflow/tensorflow ``core/framework/node_def.proto``, ``attr_value.proto``, ``function.proto``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from zlib import crc32

from ckpttool.formats.savedmodel.walk import MAX_NAME, Message

MAX_READ = 1 << 26
"""Limit on the bytes of long attributes, nearly all of them constants, that are read for digests."""

SHARED_NAME = b"shared_name"
"""Attribute with the name of a resource."""
_EXECUTION_ONLY = frozenset({SHARED_NAME, b"debug_name", b"config_proto", b"container", b"executor_type"})
"""Attributes about names or execution, not computation; so are all that begin with ``_``."""
_LONG = 1 << 12
_CHUNK = 1 << 20
_VALUE = b"value"
_IN_GRAPH, _IN_FUNCTION = 1, 3  # fields of GraphDef and FunctionDef that hold nodes
_RESULTS = 4  # field of FunctionDef
_TENSOR = 8  # field of AttrValue
_STRING = 7  # number of the type of strings


@dataclass(slots=True)
class AttributeBudget:
    """Bytes of long attributes that were read so far, and that were skipped because of ``MAX_READ``."""

    read: int = 0
    skipped: int = 0

    def summarize(self, message: Message, key: bytes) -> bytes:
        """Return the bytes of a short attribute; of a long one its key, its size and a checksum."""
        if message.nbytes <= _LONG:
            return message.data(_LONG)
        # Constants may make up most of a file. Beyond the budget a constant is represented by its size alone,
        # and two models that differ in its value alone look equal; ``skipped`` is reported for that reason.
        if self.read + message.nbytes > MAX_READ:
            self.skipped += message.nbytes
            return key + b"%d" % message.nbytes
        self.read += message.nbytes
        crc = 0
        for at in range(message.start, message.end, _CHUNK):
            crc = crc32(message.window.source.read(at, min(_CHUNK, message.end - at)), crc)
        return key + b"%d %d" % (message.nbytes, crc)


class Attribute(NamedTuple):
    """Attribute of a node.

    Attributes:
        key: Its name.
        functions: Names of functions in its value.
        is_execution_only: Whether it is about names or execution, not computation.
        value_bytes: Size of the value if it is that of a constant, else 0.
        content: The map entry's bytes, or a summary of long ones; the key alone if it isn't digested.
    """

    key: bytes
    functions: tuple[str, ...]
    is_execution_only: bool
    value_bytes: int
    content: bytes


def attribute_of(message: Message, functions: Iterable[str], budget: AttributeBudget) -> Attribute:
    """Parse an entry of the map ``NodeDef.attr``."""
    last = dict(message.parts())
    key = last[1].data(MAX_NAME) if 1 in last else b""
    value_bytes = last[2].nbytes if key == _VALUE and 2 in last else 0
    is_execution_only = key in _EXECUTION_ONLY or key.startswith(b"_")
    # The names of functions are numbered anew in each save. An attribute with such names is represented by
    # its key, and the digests of the functions are added to that of the node.
    called = tuple(functions)
    is_left_out = called or (is_execution_only and key != SHARED_NAME)
    content = key if is_left_out else budget.summarize(message, key)
    return Attribute(key, called, is_execution_only, value_bytes, content)


class GraphNode(NamedTuple):
    """Node of a graph or function; an argument of a function has no op, and its index as input."""

    op: str
    inputs: Sequence[str] = ()
    attributes: Sequence[Attribute] = ()

    def calls(self) -> list[str]:
        """Return the functions that the node refers to, ordered by attribute."""
        calling = sorted((one for one in self.attributes if one.functions), key=lambda one: one.key)
        return [function for attribute in calling for function in attribute.functions]


@dataclass(slots=True)
class Body:
    """Nodes of a graph or function, and the references between them.

    Names are kept as hashes, because a graph may have half a million nodes; the text of a broken reference is
    found in the message again.

    Attributes:
        is_function: Whether it is a function of the library.
        messages: The FunctionDef, or the GraphDef, which a hostile file may have in parts.
        nodes: Nodes by the hash of their name.
        results: References to the tensors that a function returns, by name of the result.
        order: Names of a function's results in the order of its signature.
        arguments: Number of a function's arguments.
    """

    is_function: bool = False
    messages: list[Message] = field(default_factory=list)
    nodes: dict[int, GraphNode] = field(default_factory=dict)
    results: dict[str, str] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    arguments: int = 0
    _references: set[tuple[int, str]] = field(default_factory=set)
    _constants: dict[str, bytes | None] | None = None

    def add_message(self, message: Message) -> None:
        """Add the message, or another part of it."""
        self.messages.append(message)
        self._constants = None

    def add_argument(self, name: str) -> None:
        """Add the next argument of a function."""
        self.nodes[hash(name)] = GraphNode("", (str(self.arguments),))
        self.arguments += 1

    def add_node(self, name: str, node: GraphNode) -> None:
        """Add a node with its inputs."""
        self.nodes[hash(name)] = node
        self._references.update(map(_split_reference, node.inputs))

    def add_result(self, name: str, reference: str) -> None:
        """Add a tensor that a function returns."""
        self.results[name] = reference
        self._references.add(_split_reference(reference))

    def calls(self) -> list[str]:
        """Return the functions that nodes refer to, in the order of the nodes."""
        return [name for node in self.nodes.values() for name in node.calls()]

    def has(self, reference: str) -> bool:
        """Return whether the node of a reference exists."""
        return _split_reference(reference)[0] in self.nodes

    def broken_reference(self, outputs: Mapping[str, frozenset[str]]) -> str | None:
        """Return the first reference to a node or output that doesn't exist, or None.

        Args:
            outputs: Names of the outputs of each known op.
        """
        lost = set()
        for node, output in self._references:
            known = outputs.get(self.nodes[node].op) if output and node in self.nodes else None
            if node not in self.nodes or (known and output not in known):
                lost.add((node, output))
        self._references.clear()  # memory: all that follows needs the nodes only
        if not lost:
            return None
        return next((text for text in self._texts_of_references() if _split_reference(text) in lost), None)

    def _texts_of_references(self) -> Iterator[str]:
        fields = {_IN_FUNCTION: 3, _RESULTS: 2} if self.is_function else {_IN_GRAPH: 3}
        for message in self.messages:
            for number, part in message.parts():
                for inner, text in part.parts() if number in fields else ():
                    if inner == fields[number]:
                        yield text.text()

    def string_constant(self, name: str) -> bytes | None:
        """Return the value of a string constant; None if there is none of this name, or several."""
        # Read from the messages when the first is asked for: nodes may come before the constants they take.
        if self._constants is None:
            self._constants = {}
            nodes = _IN_FUNCTION if self.is_function else _IN_GRAPH
            for number, part in (field for message in self.messages for field in message.parts()):
                if number == nodes:
                    node, value = _string_constant(part)
                    if value is not None or node in self._constants:
                        self._constants[node] = None if node in self._constants else value
        return self._constants.get(name)


def _split_reference(reference: str) -> tuple[int, str]:
    """Return the hashed name of a referenced node, and the name of its output if given.

    References are ``^node``, ``node``, ``node:0``, and in functions ``node:output:0``.
    """
    node, _, rest = reference.removeprefix("^").partition(":")
    output, colon, _ = rest.partition(":")
    return hash(node), output if colon else ""


# Attributes in messages -----------------------------------------------------------------------------


def attribute_values(node: Message, name: str) -> list[Message]:
    """Return all values of an attribute; more than one only in a hostile file."""
    values = []
    for number, entry in node.parts():
        parts = list(entry.parts()) if number == 5 else []
        if any(at == 1 and part.nbytes == len(name) and part.text() == name for at, part in parts):
            values += [part for at, part in parts if at == 2]
    return values


def _string_constant(node: Message) -> tuple[str, bytes | None]:
    """Return a node's name, and its value if it is a constant scalar string."""
    name, op = "", ""
    for number, part in node.parts():
        if number == 1:
            name = part.text()
        elif number == 2:
            op = part.text()
    values = attribute_values(node, "value") if op == "Const" else []
    fields = list(values[0].fields()) if len(values) == 1 else []
    (number, _, tensor), *_ = fields or [(0, None, None)]
    return name, _string_value(tensor) if len(fields) == 1 and number == _TENSOR and tensor else None


def _string_value(tensor: Message) -> bytes | None:
    dtype, texts = 0, []
    for number, value, part in tensor.fields():
        if number == 1 and value is not None:
            dtype = value
        elif number == 8 and part is not None:
            texts.append(part)
        elif number == 4 and part is not None and part.nbytes:
            return None
    # A scalar without ``string_val`` (field 8) is the empty string. Strings may also be encoded in
    # ``tensor_content`` (field 4), which isn't decoded here: such a constant is of unknown value.
    if dtype != _STRING or len(texts) > 1 or any(text.nbytes > MAX_NAME for text in texts):
        return None
    return texts[0].data(MAX_NAME) if texts else b""
