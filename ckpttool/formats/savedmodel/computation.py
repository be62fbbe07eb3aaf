"""What a SavedModel computes, as checksums: of what each signature gives, of all functions, and of the graph.

Names that TensorFlow counts up are left out: a node is known by its op, its attributes and what it takes, a
function by its nodes. What serves the saver alone is left out as well. Two saves of one model say the same.

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
"""The most bytes of long attributes, nearly all of them constants, of which a checksum is made."""

_LONG = 1 << 12
_CHUNK = 1 << 20
_SHARED, _VARIABLE = b"shared_name", "VarHandleOp"
"""The name of a resource, which is counted up, and the op for which it counts."""
_ABOUT_RUNNING = frozenset({_SHARED, b"debug_name", b"config_proto", b"container", b"executor_type"})
"""Attributes that say how something is called or run; so do all that begin with ``_``."""
_VALUE = b"value"
_CYCLE, _UNKNOWN = b"in a cycle", b"unknown"

Digests = Mapping[str, bytes]
Signature = Mapping[str, Any]


class GraphNode(NamedTuple):
    """A node of a body, as it was met; an argument of a function has no op.

    It is digested when somebody asks what the model computes: neither ``inspect`` nor ``verify`` does,
    and the digests would take half of their time.
    """

    op: str
    inputs: Sequence[str] = ()
    attributes: Sequence[Attribute] = ()

    def calls(self) -> list[str]:
        """Return the functions that it calls."""
        calling = sorted((one for one in self.attributes if one.functions), key=lambda one: one.key)
        return [function for attribute in calling for function in attribute.functions]


@dataclass(slots=True)
class UnreadConstants:
    """How many bytes of long attributes were read, and how many were not."""

    read: int = 0
    skipped: int = 0

    def summarize(self, message: Message, key: bytes) -> bytes:
        """Return an attribute's bytes where they are few, else its name, its size and a checksum."""
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
    """The nodes of one body, by the hashes of their names, and what it gives."""

    nodes: dict[int, GraphNode] = field(default_factory=dict)
    results: dict[str, str] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    arguments: int = 0

    def argument(self, name: str) -> None:
        """Add an argument of a function."""
        self.nodes[hash(name)] = GraphNode("", (str(self.arguments),))
        self.arguments += 1

    def calls(self) -> list[str]:
        """Return the functions that are called, in the order of the nodes."""
        return [name for node in self.nodes.values() for name in node.calls()]

    def body_digest(self) -> bytes:
        """Return a digest of a function, without that of the functions that it calls."""
        nodes = self.digests({}, {})
        rank = {name: index for index, name in enumerate(self.order)}
        results = sorted(
            (rank.get(name, len(rank)), _output_digest(nodes, reference))
            for name, reference in self.results.items()
        )
        return _digest(*sorted(nodes.values()), *(result for _, result in results))

    def digests(self, functions: Digests, known: Mapping[int, bytes]) -> dict[int, bytes]:
        """Return a digest of each node with all that leads to it.

        Args:
            functions: Digests of functions.
            known: Digests of nodes for which something else stands.
        """
        digests = dict(known)
        own = self._own_digests()
        pending = [*reversed(self.nodes)]  # what a node takes lies before it, as a rule
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
        """Return of each node a digest of its op and attributes, what it takes, and what it calls."""
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
    """An attribute of a node.

    Attributes:
        key: Its name.
        functions: Those that its value refers to.
        is_about_running: Whether it says how something is called or run, and not what is computed.
        value_bytes: The size of its value, where it is the value of a constant.
        content: Its bytes, or a summary of them; its functions left out.
    """

    key: bytes
    functions: tuple[str, ...]
    is_about_running: bool
    value_bytes: int
    content: bytes


def attribute_of(message: Message, functions: Iterable[str], unread: UnreadConstants) -> Attribute:
    """Return an attribute, an entry of a map."""
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
    """Return digests of functions with all that they call.

    Args:
        bodies: Of each function the digest of its body, and the functions that it calls.
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
    """All that a meta graph computes.

    Attributes:
        wires: The nodes of the graph.
        bodies: The nodes of each function.
        saver_nodes: The nodes that serve the saver alone, as the hashes of their names.
        saver_functions: The functions that serve the saver alone.
        assets: Names of files, by the nodes that they are given to.
        unread: How many bytes of constants were not looked at.
    """

    wires: BodyWires
    bodies: Mapping[str, BodyWires]
    saver_nodes: Collection[int]
    saver_functions: Collection[str]
    assets: Mapping[str, str]
    unread: UnreadConstants

    def describe(self, signatures: Mapping[str, Signature], initial: Iterable[str]) -> dict[str, object]:
        """Return what each signature, all functions and the whole graph compute, and how it is initialised.

        Args:
            signatures: By their names.
            initial: The nodes that initialise it.
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
        """Return what tells the outputs, each with the name that callers know, and what leads to them."""
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
    """Return how many there are, and a checksum of them in any order."""
    ordered = sorted(digests)
    return f"<{counted(len(ordered), what)}, CRC-32 {digest(ordered):08x}>"


def _reference(text: str) -> tuple[int, bytes]:
    """Return the hash of the node that a reference names, and the output, or ``^`` where it only waits."""
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
