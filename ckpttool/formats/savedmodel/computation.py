"""Digests of a SavedModel's computations: of each signature, of all functions, and of the graph.

TensorFlow numbers the names of nodes and functions anew in each save, so the digests leave names out: a node
is its op, its attributes and its inputs, a function is its nodes. Nodes that only the saver needs are left
out as well. Two saves of one model have the same digests.

They are computed on demand: ``inspect`` and ``verify`` don't need them, and they would take half of the time
of either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b

from ckpttool.core.text import counted
from ckpttool.formats.content.plain_data import digest
from ckpttool.formats.savedmodel.body import SHARED_NAME, Body
from ckpttool.formats.savedmodel.graph import MetaGraph, Signature

_VARIABLE = "VarHandleOp"
"""The only op whose ``shared_name`` is digested: TensorFlow numbers the names of other resources."""
_CYCLE, _UNKNOWN = b"in a cycle", b"unknown"

Digests = Mapping[str, bytes]


def describe_computation(graph: MetaGraph) -> dict[str, object]:
    """Return the digests of a meta graph's signatures, functions and nodes, as plain data."""
    functions = function_digests(
        {name: (_body_digest(body), body.calls()) for name, body in graph.bodies.items()}
    )
    assets = {
        _reference(node)[0]: _digest(b"asset", name.encode()) for node, name in graph.fed_assets.items()
    }
    nodes = node_digests(graph.body, functions, assets)
    saver_nodes, saver_functions = graph.saver.nodes_and_functions()
    computation: dict[str, object] = {
        "signatures": {
            name: _describe_signature(graph.body, signature, functions, assets)
            for name, signature in sorted(graph.signatures.items())
        },
        "init_op": _describe_digests("node", [_output_digest(nodes, node) for node in graph.init_nodes]),
        "functions": _describe_digests(
            "function", [function for name, function in functions.items() if name not in saver_functions]
        ),
        "nodes": _describe_digests("node", [node for at, node in nodes.items() if at not in saver_nodes]),
    }
    if graph.attribute_budget.skipped:
        computation["constants"] = (
            f"<{graph.attribute_budget.skipped:,} bytes of constants that were not read>"
        )
    return computation


def _describe_signature(
    body: Body, signature: Signature, functions: Digests, assets: Mapping[int, bytes]
) -> str:
    """Return the digest of a signature's outputs, with the names that callers use for them and inputs."""
    inputs, outputs = (
        {key: one["name"] for key, one in signature.get(side, {}).items() if "name" in one}
        for side in ("inputs", "outputs")
    )
    given = {_reference(name)[0]: _digest(b"input", key.encode()) for key, name in inputs.items()}
    nodes = node_digests(body, functions, {**assets, **given})
    return _describe_digests(
        "output", [_digest(key.encode(), _output_digest(nodes, name)) for key, name in outputs.items()]
    )


def _describe_digests(what: str, digests: Iterable[bytes]) -> str:
    """Return a text with the number of digests and a checksum of them; their order doesn't matter."""
    ordered = sorted(digests)
    return f"<{counted(len(ordered), what)}, CRC-32 {digest(ordered):08x}>"


def node_digests(body: Body, functions: Digests, known: Mapping[int, bytes]) -> dict[int, bytes]:
    """Return the digest of each node, which covers all nodes that it depends on.

    Args:
        functions: Digests of functions.
        known: Given digests of nodes, for example inputs of a signature.
    """
    # A depth-first walk with a stack of its own: graphs are deeper than Python's limit on recursion. A
    # node remains on the stack until all its inputs have digests. One that is met again while its inputs
    # are pending is in a cycle, as loops of TensorFlow 1 are, and its input counts as ``_CYCLE``.
    digests = dict(known)
    own = _own_digests(body)
    pending = [*reversed(body.nodes)]  # a node usually comes after its inputs
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


def _own_digests(body: Body) -> dict[int, tuple[bytes, list[tuple[int, bytes]], list[str]]]:
    """Return for each node a digest of op and attributes, its inputs, and the functions it refers to."""
    own: dict[int, tuple[bytes, list[tuple[int, bytes]], list[str]]] = {}
    # Variables have lasting names. The names of other resources (tables, iterators) are numbered anew in each
    # save; they are replaced by their position among the nodes of the same op, to tell one from another.
    shared: Counter[str] = Counter()
    for at, node in body.nodes.items():
        if not node.op:
            own[at] = _digest(b"argument", *map(str.encode, node.inputs)), [], []
            continue
        contents = sorted([one.content for one in node.attributes if not one.is_execution_only])
        for name in [one.content for one in node.attributes if one.key == SHARED_NAME][:1]:
            shared[node.op] += 1
            contents.append(name if node.op == _VARIABLE else b"%d" % shared[node.op])
        own[at] = _digest(node.op.encode(), *contents), [*map(_reference, node.inputs)], node.calls()
    return own


def _body_digest(body: Body) -> bytes:
    """Return the digest of a function, without the functions that it calls."""
    nodes = node_digests(body, {}, {})
    rank = {name: index for index, name in enumerate(body.order)}
    results = sorted(
        (rank.get(name, len(rank)), _output_digest(nodes, reference))
        for name, reference in body.results.items()
    )
    return _digest(*sorted(nodes.values()), *(result for _, result in results))


def function_digests(bodies: Mapping[str, tuple[bytes, Sequence[str]]]) -> dict[str, bytes]:
    """Return the digest of each function, which covers all functions that it calls.

    Args:
        bodies: For each function the digest of its body, and the functions that it calls.
    """
    # A function stays on the stack until those that it calls have digests. One that is entered again, in a
    # cycle, counts as unknown. The walk begins in the order of the bodies' digests, since TensorFlow numbers
    # the names of functions anew in each save.
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
