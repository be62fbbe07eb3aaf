"""Digests of a SavedModel's computations: of each signature, of all functions, and of the graph.

TensorFlow numbers the names of nodes and functions anew in each save, so the digests leave names out: a node
is its op, its attributes and its inputs, a function is its nodes. Nodes that only the saver needs are left
out as well. Two saves of one model have the same digests.

Source: tensorflow/tensorflow ``core/framework/node_def.proto``, ``attr_value.proto``, ``function.proto``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple
from zlib import crc32

from ckpttool.core.text import counted
from ckpttool.formats.content.plain_data import digest
from ckpttool.formats.savedmodel.walk import MAX_NAME, Message

MAX_READ = 1 << 26
"""Limit on the bytes of long attributes, nearly all of them constants, that are read for digests."""

_LONG = 1 << 12
_CHUNK = 1 << 20
_SHARED, _VARIABLE = b"shared_name", "VarHandleOp"
"""Attribute with the name of a resource, which TensorFlow numbers, and the only op whose name is digested."""
_ABOUT_RUNNING = frozenset({_SHARED, b"debug_name", b"config_proto", b"container", b"executor_type"})
"""Attributes about names or execution, not computation; so are all that begin with ``_``."""
_VALUE = b"value"
_CYCLE, _UNKNOWN = b"in a cycle", b"unknown"

Digests = Mapping[str, bytes]
Signature = Mapping[str, Any]


class GraphNode(NamedTuple):
    """Node of a graph or function; an argument of a function has no op, and its index as input.

    Digests are computed on demand: ``inspect`` and ``verify`` don't need them, and they would take half of
    the time of either.
    """

    op: str
    inputs: Sequence[str] = ()
    attributes: Sequence[Attribute] = ()

    def calls(self) -> list[str]:
        """Return the functions that the node refers to, ordered by attribute."""
        calling = sorted((one for one in self.attributes if one.functions), key=lambda one: one.key)
        return [function for attribute in calling for function in attribute.functions]


@dataclass(slots=True)
class UnreadConstants:
    """Bytes of long attributes that were read, and that were skipped because of the limit."""

    read: int = 0
    skipped: int = 0

    def summarize(self, message: Message, key: bytes) -> bytes:
        """Return the bytes of a short attribute; of a long one its key, its size and a checksum."""
        if message.nbytes <= _LONG:
            return message.data(_LONG)
        if self.read + message.nbytes > MAX_READ:
            self.skipped += message.nbytes
            return key + b"%d" % message.nbytes
        self.read += message.nbytes
        crc = 0
        for at in range(message.start, message.end, _CHUNK):
            crc = crc32(message.window.source.read(at, min(_CHUNK, message.end - at)), crc)
        return key + b"%d %d" % (message.nbytes, crc)


@dataclass(slots=True)
class BodyWires:
    """Nodes of a graph or function, and the connections between them.

    Attributes:
        nodes: Nodes by the hash of their name; a graph may have half a million, and names are long.
        results: References to the tensors that a function returns, by name of the result.
        order: Names of a function's results in the order of its signature.
        arguments: Number of a function's arguments.
    """

    nodes: dict[int, GraphNode] = field(default_factory=dict)
    results: dict[str, str] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    arguments: int = 0

    def argument(self, name: str) -> None:
        """Add an argument of a function."""
        self.nodes[hash(name)] = GraphNode("", (str(self.arguments),))
        self.arguments += 1

    def calls(self) -> list[str]:
        """Return the functions that nodes refer to, in the order of the nodes."""
        return [name for node in self.nodes.values() for name in node.calls()]

    def body_digest(self) -> bytes:
        """Return the digest of a function, without the functions that it calls."""
        nodes = self.digests({}, {})
        rank = {name: index for index, name in enumerate(self.order)}
        results = sorted(
            (rank.get(name, len(rank)), _output_digest(nodes, reference))
            for name, reference in self.results.items()
        )
        return _digest(*sorted(nodes.values()), *(result for _, result in results))

    def digests(self, functions: Digests, known: Mapping[int, bytes]) -> dict[int, bytes]:
        """Return the digest of each node, which covers all nodes that it depends on.

        Args:
            functions: Digests of functions.
            known: Given digests of nodes, for example inputs of a signature.
        """
        # A depth-first walk with a stack of its own: graphs are deeper than Python's limit on recursion. A
        # node remains on the stack until all its inputs have digests. One that is met again while its inputs
        # are pending is in a cycle, as loops of TensorFlow 1 are, and its input counts as ``_CYCLE``.
        digests = dict(known)
        own = self._own_digests()
        pending = [*reversed(self.nodes)]  # a node usually comes after its inputs
        entered: set[int] = set()
        while pending:
            at = pending[-1]
            if at in digests or at not in own:
                pending.pop()
                digests.setdefault(at, _UNKNOWN)
                continue
            local, inputs, calls = own[at]
            missing = [node for node, _ in inputs if node not in digests and node not in entered]
            if missing and at not in entered:
                entered.add(at)
                pending += missing
                continue
            pending.pop()
            taken = [digests.get(node, _CYCLE) + output for node, output in inputs]
            called = [functions.get(name, _UNKNOWN) for name in calls]
            digests[at] = _digest(local, *taken, *called)
        return digests

    def _own_digests(self) -> dict[int, tuple[bytes, list[tuple[int, bytes]], list[str]]]:
        """Return for each node a digest of op and attributes, its inputs, and the functions it refers to."""
        own: dict[int, tuple[bytes, list[tuple[int, bytes]], list[str]]] = {}
        shared: Counter[str] = Counter()
        for at, node in self.nodes.items():
            if not node.op:
                own[at] = _digest(b"argument", *map(str.encode, node.inputs)), [], []
                continue
            contents = sorted([one.content for one in node.attributes if not one.is_about_running])
            for name in [one.content for one in node.attributes if one.key == _SHARED][:1]:
                shared[node.op] += 1
                contents.append(name if node.op == _VARIABLE else b"%d" % shared[node.op])
            own[at] = _digest(node.op.encode(), *contents), [*map(_reference, node.inputs)], node.calls()
        return own


class Attribute(NamedTuple):
    """Attribute of a node.

    Attributes:
        key: Its name.
        functions: Names of functions in its value.
        is_about_running: Whether it is about names or execution, not computation.
        value_bytes: Size of the value if it is that of a constant, else 0.
        content: The map entry's bytes, or a summary of long ones; the key alone if it isn't digested.
    """

    key: bytes
    functions: tuple[str, ...]
    is_about_running: bool
    value_bytes: int
    content: bytes


def attribute_of(message: Message, functions: Iterable[str], unread: UnreadConstants) -> Attribute:
    """Parse an entry of the map ``NodeDef.attr``."""
    parts = list(message.parts())
    last = dict(parts)
    key = last[1].data(MAX_NAME) if 1 in last else b""
    is_value = 1 in last and last[1].nbytes == len(_VALUE) and last[1].data(MAX_NAME) == _VALUE
    value_bytes = last[2].nbytes if is_value and 2 in last else 0
    is_about_running = key in _ABOUT_RUNNING or key.startswith(b"_")
    called = tuple(functions)
    is_left_out = called or (is_about_running and key != _SHARED)
    content = key if is_left_out else unread.summarize(message, key)
    return Attribute(key, called, is_about_running, value_bytes, content)


def function_digests(bodies: Mapping[str, tuple[bytes, Sequence[str]]]) -> dict[str, bytes]:
    """Return the digest of each function, which covers all functions that it calls.

    Args:
        bodies: For each function the digest of its body, and the functions that it calls.
    """
    digests: dict[str, bytes] = {}
    entered: set[str] = set()
    pending = sorted(bodies, key=lambda name: bodies[name][0])
    while pending:
        name = pending[-1]
        body, calls = bodies[name]
        missing = [
            called for called in calls if called in bodies and called not in digests and called not in entered
        ]
        if name not in digests and missing:
            entered.add(name)
            pending += missing
            continue
        pending.pop()
        if name not in digests:
            digests[name] = _digest(body, *(digests.get(called, _UNKNOWN) for called in calls))
    return digests


class GraphComputation(NamedTuple):
    """Nodes and functions of a meta graph, for their digests.

    Attributes:
        wires: Nodes of the graph.
        bodies: Nodes of each function.
        saver_nodes: Hashed names of the nodes that serve the saver only.
        saver_functions: Functions that serve the saver only.
        assets: Names of files, by the nodes that they are fed to.
        unread: Bytes of long attributes that were read and skipped.
    """

    wires: BodyWires
    bodies: Mapping[str, BodyWires]
    saver_nodes: Collection[int]
    saver_functions: Collection[str]
    assets: Mapping[str, str]
    unread: UnreadConstants

    def describe(self, signatures: Mapping[str, Signature], initial: Iterable[str]) -> dict[str, object]:
        """Return the digests of signatures, functions, graph and initialisation, as plain data.

        Args:
            signatures: Signatures by name.
            initial: References to the nodes that initialise the model.
        """
        functions = function_digests(
            {name: (body.body_digest(), body.calls()) for name, body in self.bodies.items()}
        )
        assets = {_reference(node)[0]: _digest(b"asset", name.encode()) for node, name in self.assets.items()}
        graph = self.wires.digests(functions, assets)
        computation: dict[str, object] = {
            "signatures": {
                name: self._describe_signature(signature, functions, assets)
                for name, signature in sorted(signatures.items())
            },
            "init_op": _describe_digests("node", [_output_digest(graph, node) for node in initial]),
            "functions": _describe_digests(
                "function",
                [body for name, body in functions.items() if name not in self.saver_functions],
            ),
            "nodes": _describe_digests(
                "node", [node for at, node in graph.items() if at not in self.saver_nodes]
            ),
        }
        if self.unread.skipped:
            computation["constants"] = f"<{self.unread.skipped:,} bytes of constants that were not read>"
        return computation

    def _describe_signature(
        self, signature: Signature, functions: Digests, assets: Mapping[int, bytes]
    ) -> str:
        """Return the digest of a signature's outputs, with the names that callers use for them and inputs."""
        inputs, outputs = (
            {key: one["name"] for key, one in signature.get(side, {}).items() if "name" in one}
            for side in ("inputs", "outputs")
        )
        given = {_reference(name)[0]: _digest(b"input", key.encode()) for key, name in inputs.items()}
        nodes = self.wires.digests(functions, {**assets, **given})
        return _describe_digests(
            "output", [_digest(key.encode(), _output_digest(nodes, name)) for key, name in outputs.items()]
        )


def _describe_digests(what: str, digests: Iterable[bytes]) -> str:
    """Return a text with the number of digests and a checksum of them; their order doesn't matter."""
    ordered = sorted(digests)
    return f"<{counted(len(ordered), what)}, CRC-32 {digest(ordered):08x}>"


def _reference(text: str) -> tuple[int, bytes]:
    """Return the hashed name of a referenced node, and its output; ``^`` for a control dependency."""
    if text.startswith("^"):
        return hash(text[1:]), b"^"
    name, _, output = text.partition(":")
    return hash(name), (b"" if output == "0" else output.encode())


def _output_digest(digests: Mapping[int, bytes], text: str) -> bytes:
    at, output = _reference(text)
    return digests.get(at, _UNKNOWN) + output


def _digest(*parts: bytes) -> bytes:
    stream = b"".join([len(part).to_bytes(4, "little") + part for part in parts])
    return blake2b(stream, digest_size=12).digest()
