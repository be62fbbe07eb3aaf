"""What a SavedModel says of itself: its meta graphs, what they can be asked, and which ops they run.

Source: tensorflow/tensorflow ``core/protobuf/saved_model.proto``, ``meta_graph.proto``,
``core/framework/graph.proto``, ``function.proto``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpttool.core.errors import LimitExceeded
from ckpttool.formats.savedmodel.computation import (
    Attribute,
    BodyWires,
    GraphComputation,
    GraphNode,
    UnreadConstants,
    attribute_of,
)
from ckpttool.formats.savedmodel.file_names import (
    FILE_INPUTS,
    Call,
    FileNames,
    Origin,
    bound_origins,
    fed_tensors,
)
from ckpttool.formats.savedmodel.objects import (
    BoundFunctions,
    SavedObject,
    read_bound_functions,
    read_objects,
    read_shape,
    type_name,
)
from ckpttool.formats.savedmodel.ops import (
    HARMLESS_IF,
    BodyLinks,
    NodeBody,
    function_body,
    graph_body,
    known_ops,
    stateful_ops,
)
from ckpttool.formats.savedmodel.saver import (
    RESTORING_OPS,
    SAVER_OPS,
    FileOp,
    Saver,
    functions_in,
    nodes_of,
    tensors_of,
)
from ckpttool.formats.savedmodel.walk import MAX_NAME, Message

MAX_GRAPHS = 1000
"""The most meta graphs; two bytes make one, and savers write one for each set of tags."""
MAX_OPS = 20_000
MAX_BROKEN = 20  # that are told
INIT_SIGNATURE = "__saved_model_init_op"
_ASSETS = "saved_model_assets"
"""The collection that has the assets where TensorFlow 1 wrote the model."""
_VARIABLES = frozenset({"variables", "local_variables"})
"""The collections that have the variables of a graph, with their initializers."""
_GROUPING = frozenset({"Identity", "NoOp"})
_INIT_COLLECTIONS = frozenset({"saved_model_main_op", "legacy_init_op"})
_REPEATED, _REPEATED_BYTES = 1 << 14, 256
"""How many attributes are remembered, and of how many bytes, so that their likes need not be taken apart."""
_UNNAMED = "without a name"
_ALIASES = 8
"""The field of functions that ``LoadOptions`` can ask for under other names."""
_EXCHANGED = b"api_implements"
"""The attribute of functions of which Grappler calls one in place of another."""


@dataclass(slots=True)
class MetaGraph:
    """One meta graph.

    Attributes:
        places: For each op where it stands first; those that savers need, and those that are judged by
            what they are given, stand twice: where that makes them harmless (True), and elsewhere.
        saver: What tells which of them serve the saver alone.
        links: What the nodes of the graph are called, and what they take.
        broken: Functions, ``""`` for the graph, with what their nodes take and isn't there.
        called: Functions that are referred to, with the function, ``""`` for the graph, that does so first.
        constant_bytes: Size of the values of constants, in the graph and in all functions.
        objects: The nodes of the object graph, which TensorFlow 1 doesn't write.
        bodies: The nodes of each function.
        initial: Nodes that initialise the model.
        fed: Nodes that assets are given to, with these.
        listed: The assets in the collection of TensorFlow 1, which count where no others are told.
        served: Tensors that signatures take and return; assets are not fed when these are asked for.
        files: The ops that are judged by the origins of the files that they open.
        stateful: Other unsafe ops that run with their function alone, by op and function.
        initializing: Ops that read a file for the initializer of a variable, and where they stand first.
        uncalled: Unsafe ops, with where they stand first, that no function has which anything calls.
        calls: The nodes that refer to each function.
        bound: Functions that objects call, with what is bound to their arguments.
        opaque: Functions that may stand in for others: gradients, those of a name that two have, and those
            that Grappler exchanges.
        unread: How many bytes of constants were not looked at.
        attributes: Short attributes of nodes that were met, by their bytes.
    """

    tags: list[str] = field(default_factory=list)
    version: str | None = None
    saver: Saver = field(default_factory=Saver)
    signatures: dict[str, dict[str, Any]] = field(default_factory=dict)
    assets: list[str] = field(default_factory=list)
    collections: list[str] = field(default_factory=list)
    has_init: bool = False
    nodes: int = 0
    functions: set[str] = field(default_factory=set)
    ops: Counter[str] = field(default_factory=Counter)
    places: dict[tuple[str, bool], str] = field(default_factory=dict)
    constant_bytes: int = 0
    links: BodyLinks | None = None
    broken: list[tuple[str, str]] = field(default_factory=list)
    called: dict[str, str] = field(default_factory=dict)
    objects: list[SavedObject] | None = None
    wires: BodyWires = field(default_factory=BodyWires)
    bodies: dict[str, BodyWires] = field(default_factory=dict)
    initial: list[str] = field(default_factory=list)
    fed: dict[str, str] = field(default_factory=dict)
    listed: list[Message] = field(default_factory=list)
    served: list[str] = field(default_factory=list)
    files: list[FileOp] = field(default_factory=list)
    stateful: dict[tuple[str, str], FileOp] = field(default_factory=dict)
    initializing: dict[str, str] = field(default_factory=dict)
    uncalled: dict[str, str] = field(default_factory=dict)
    calls: dict[str, list[Call]] = field(default_factory=dict)
    bound: BoundFunctions = field(default_factory=BoundFunctions)
    opaque: set[str] = field(default_factory=set)
    unread: UnreadConstants = field(default_factory=UnreadConstants)
    attributes: dict[bytes, Attribute] = field(default_factory=dict)

    def as_metadata(self) -> dict[str, object]:
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

    def computes(self) -> dict[str, object]:
        """Return what is computed, as checksums."""
        nodes, functions = self.saver.nodes_and_functions()
        computation = GraphComputation(self.wires, self.bodies, nodes, functions, self.fed, self.unread)
        return computation.describe(self.signatures, self.initial)


@dataclass(slots=True)
class SavedModel:
    """The message that a SavedModel is."""

    schema: int = 0
    graphs: list[MetaGraph] = field(default_factory=list)


def read_model(message: Message) -> SavedModel:
    """Return what a SavedModel message says."""
    model = SavedModel()
    for number, value, part in message.fields():
        if number == 1 and value is not None:
            model.schema = value
        elif number == 2 and part is not None:
            if len(model.graphs) == MAX_GRAPHS:
                found = f"more than {MAX_GRAPHS:,} meta graphs"
                raise LimitExceeded(message.window.source.path, found, expected="fewer")
            model.graphs.append(_meta_graph(part))
    return model


def _meta_graph(message: Message) -> MetaGraph:
    graph = MetaGraph()
    for number, part in message.parts():
        if number in _PARTS:
            _PARTS[number](graph, part)
    graph.attributes.clear()
    for part in () if graph.assets else graph.listed:
        _add_asset(graph, part)
    if graph.files or graph.stateful:
        _judge_ops(graph)
    return graph


def _judge_ops(graph: MetaGraph) -> None:
    """Note for each op whether anything calls its function, and if it opens files, whether these are own."""
    uncalled = graph.saver.uncalled_functions
    for op in graph.stateful.values():
        if op.function in uncalled:
            graph.uncalled.setdefault(op.op, _place(op.name, op.function))
        else:
            _note_place(graph, op.op, op.name, op.function, False)
    if graph.files:
        _judge_files(graph, uncalled)


def _judge_files(graph: MetaGraph, uncalled: Collection[str]) -> None:
    names = _file_names(graph, uncalled)
    uses = graph.saver.uses_of(graph.files)
    for op in graph.files:
        if op.function in uncalled and op.op in stateful_ops():
            graph.uncalled.setdefault(op.op, _place(op.name, op.function))
            continue
        is_harmless = names.are_own(op.op, op.name, op.function)
        if op.op in SAVER_OPS:
            is_savers, is_run = uses[op]
            is_harmless = is_savers and (is_harmless or not is_run)
            if not is_harmless and _is_for_initializers(graph, op):
                graph.initializing.setdefault(op.op, op.name)
                continue
        _note_place(graph, op.op, op.name, op.function, is_harmless)


def _is_for_initializers(graph: MetaGraph, op: FileOp) -> bool:
    """Return whether a node of the graph restores what initializers of variables assign, and nothing else."""
    if op.function or op.op not in RESTORING_OPS:
        return False
    users = graph.saver.initialized_by(op.name)
    nodes = [graph.wires.nodes.get(at) for at in users]
    return bool(nodes) and all(node is not None and node.op in _GROUPING for node in nodes)


def _file_names(graph: MetaGraph, uncalled: Collection[str]) -> FileNames:
    served = graph.saver.reachable_from(graph.served) if graph.fed else set()
    fed = {
        tensor: origin
        for tensor, origin in fed_tensors(graph.fed, graph.saver.prefix)
        if origin is not Origin.ASSET or hash(tensor[0]) not in served
    }
    bound = bound_origins(graph.bound.functions, graph.bound.offered, graph.bound.assets)
    calls = {name: [one for one in found if one.body not in uncalled] for name, found in graph.calls.items()}
    return FileNames({**graph.bodies, "": graph.wires}, calls, bound, graph.opaque, fed)


def _add_saver(graph: MetaGraph, message: Message) -> None:
    graph.saver.define(message)


def _add_meta_info(graph: MetaGraph, message: Message) -> None:
    for number, part in message.parts():
        if number == 4:
            graph.tags.append(part.stable_text())
        elif number == 5:
            graph.version = part.stable_text() or None
        elif number == _ALIASES:
            graph.saver.offered.add(signature_entry(part)[0])


def _add_collection(graph: MetaGraph, entry: Message) -> None:
    name, _ = signature_entry(entry)
    graph.collections.append(name)
    if name in _INIT_COLLECTIONS:
        graph.has_init = True
        for node in nodes_of(entry):
            graph.saver.ask(node)
            graph.initial.append(node)
    elif name in _VARIABLES:
        for variable in _nested_messages(entry, 2, 2, 1):
            for number, part in variable.parts():
                if number == 2:
                    graph.saver.initialize(part.text())
    elif name == _ASSETS:
        graph.listed += _nested_messages(entry, 2, 5, 1, 2)


def _nested_messages(message: Message, *numbers: int) -> Iterator[Message]:
    """Yield the messages under some fields, each inside the one before."""
    for number, part in message.parts():
        if number == numbers[0]:
            yield from _nested_messages(part, *numbers[1:]) if numbers[1:] else (part,)


def _add_asset(graph: MetaGraph, message: Message) -> None:
    parts = dict(message.parts())
    graph.assets.append(parts[2].stable_text() if 2 in parts else "")
    names = [part.stable_text() for number, part in parts[1].parts() if number == 1] if 1 in parts else []
    if names:
        graph.fed[names[-1]] = graph.assets[-1]


# Ops ------------------------------------------------------------------------------------------------


def _add_graph_def(graph: MetaGraph, message: Message) -> None:
    body, links = graph_body(message), BodyLinks(message, 1)
    for number, part in message.parts():
        if number == 1:
            graph.nodes += 1
            _add_node(graph, part, "", body, links, graph.wires)
        elif number == 2:
            _add_library(graph, part)
    graph.links = links
    _note_broken_link(graph, "", links)


def _add_library(graph: MetaGraph, message: Message) -> None:
    for number, part in message.parts():
        if number == 1:
            _add_function(graph, part)
        elif number in (2, 3):  # gradients, which name the function of one
            gradient = {2: 2, 3: 1}[number]
            called = {text.stable_text() for at, text in part.parts() if at == gradient}
            graph.saver.offered |= called
            graph.opaque |= called


def _add_function(graph: MetaGraph, message: Message) -> None:
    """Add a function; its name comes first where TensorFlow writes it, and anywhere in a hostile file."""
    name, nodes, is_exchanged = "", [], False
    body, links, wires = function_body(message), BodyLinks(message, 3), BodyWires()
    for number, part in message.parts():
        if number == 1:
            name = _function_name(graph, part, name)
            _add_arguments(part, links, wires)
        elif number == 4:
            texts = {at: text.text() for at, text in part.parts() if at in (1, 2)}
            result, reference = texts.get(1, ""), texts.get(2, "")
            links.take(reference)
            wires.results[result] = reference
        elif number == 5 and _EXCHANGED in (entry.data(MAX_NAME) for at, entry in part.parts() if at == 1):
            is_exchanged = True
        elif number == 3 and name:
            _add_node(graph, part, name, body, links, wires)
        elif number == 3:
            nodes.append(part)
    if not name:  # objects can name it all the same
        graph.saver.offered.add(_UNNAMED)
    for part in nodes:
        _add_node(graph, part, name or _UNNAMED, body, links, wires)
    if is_exchanged or name in graph.bodies:
        graph.saver.offered.add(name)
        graph.opaque.add(name)
    graph.bodies[name or _UNNAMED] = wires
    _note_broken_link(graph, name or _UNNAMED, links)


def _add_arguments(signature: Message, links: BodyLinks, wires: BodyWires) -> None:
    """Add what a function takes, and the order of what it gives."""
    for number, argument in signature.parts():
        for inner, text in argument.parts() if number in (2, 3) else ():
            if inner == 1 and number == 2:
                links.node(text.text(), "")
                wires.argument(text.text())
            elif inner == 1:
                wires.order.append(text.text())


def _function_name(graph: MetaGraph, signature: Message, before: str) -> str:
    """Return what a function is called; of several names, which only hostile files have, the last."""
    names = [part.stable_text() for number, part in signature.parts() if number == 1]
    name = names[-1] if names else before
    if name in graph.functions or (before or name) != name or len(names) > 1:
        graph.saver.offered.update((before, *names))
        graph.opaque.update((before, *names))
    graph.functions.add(name)
    graph.saver.functions[name]  # it may call none
    return name


def _note_broken_link(graph: MetaGraph, function: str, links: BodyLinks) -> None:
    reference = links.broken()
    if reference is not None and len(graph.broken) < MAX_BROKEN:
        graph.broken.append((function, reference))


def _add_node(
    graph: MetaGraph, message: Message, function: str, body: NodeBody, links: BodyLinks, wires: BodyWires
) -> None:
    name, op, inputs, attributes = _node_fields(graph, message)
    for reference in inputs:
        links.take(reference)
    links.node(name, op)
    graph.ops[op] += 1
    if op == "Const":
        graph.constant_bytes += sum(attribute.value_bytes for attribute in attributes)
    if len(graph.ops) > MAX_OPS:
        path = message.window.source.path
        raise LimitExceeded(path, f"more than {MAX_OPS:,} kinds of ops", expected="less")
    if not function:
        graph.saver.node(name, inputs)
    wires.nodes[hash(name)] = GraphNode(op or _UNNAMED, inputs, attributes)
    _add_calls(graph, message, name, op, function, attributes)
    if op in FILE_INPUTS:
        message.window.keep(len(name))
        graph.files.append(FileOp(op, name, function))
        return
    is_harmless = op in HARMLESS_IF and HARMLESS_IF[op](message, body)
    if function and op in stateful_ops() and not is_harmless:
        if (op, function) not in graph.stateful:
            message.window.keep(len(name) + len(function))
            graph.stateful[op, function] = FileOp(op, name, function)
    elif is_harmless or (op, False) not in graph.places:
        _note_place(graph, op, name, function, is_harmless)


def _node_fields(graph: MetaGraph, message: Message) -> tuple[str, str, list[str], list[Attribute]]:
    """Return a node's name, its op, what it takes, and its attributes."""
    texts: dict[int, str] = {}
    inputs, attributes = [], []
    parts = message.short_parts()
    for number, start, data in parts or ():
        if number == 3:
            inputs.append(data.decode("utf-8", "backslashreplace"))
        elif number == 5:
            attributes.append(_remembered_attribute(graph, message, start, data))
        elif number < 3:
            texts[number] = data.decode("utf-8", "backslashreplace")
    for number, part in message.parts() if parts is None else ():
        if number == 3:
            inputs.append(part.text())
        elif number == 5:
            attributes.append(attribute_of(part, functions_in(part), graph.unread))
        elif number < 3:
            texts[number] = part.text()
    return texts.get(1, ""), texts.get(2, ""), inputs, attributes


def _remembered_attribute(graph: MetaGraph, node: Message, start: int, data: bytes) -> Attribute:
    """Return an attribute; a graph says few different things of its many nodes."""
    known = graph.attributes.get(data)
    if known is not None:
        return known
    message = Message(node.window, start, start + len(data), node.depth + 1)
    attribute = attribute_of(message, functions_in(message), graph.unread)
    if len(data) <= _REPEATED_BYTES and len(graph.attributes) < _REPEATED:
        graph.attributes[data] = attribute
    return attribute


def _add_calls(
    graph: MetaGraph, message: Message, name: str, op: str, function: str, attributes: list[Attribute]
) -> None:
    """Add the functions that a node refers to; what no list knows as an op may be one, too."""
    names = {called for attribute in attributes if attribute.functions for called in attribute.functions}
    if not names and op in known_ops():
        return
    for called in names - graph.called.keys():
        message.window.keep(len(called))
        graph.called[called] = function
    for called in names if op in known_ops() else names | {op}:
        graph.saver.call(name, function, called)
        graph.calls.setdefault(called, []).append(Call(function, hash(name)))


def _note_place(graph: MetaGraph, op: str, name: str, function: str, is_harmless: bool) -> None:
    """Remember where an op stands first, where that is harmless and elsewhere."""
    graph.places.setdefault((op, is_harmless), _place(name, function))


def _place(name: str, function: str) -> str:
    return f"function {function}: {name}" if function else name


# Signatures and objects -----------------------------------------------------------------------------


def _add_signature(graph: MetaGraph, entry: Message) -> None:
    name, signature = signature_entry(entry)
    for reference in tensors_of(entry):
        graph.saver.ask(reference)
    if name == INIT_SIGNATURE:
        graph.has_init = True
        graph.initial += tensors_of(entry)
    else:
        graph.signatures[name] = signature_of(signature) if signature else {}
        graph.served += tensors_of(entry)


def signature_entry(message: Message) -> tuple[str, Message | None]:
    """Return key and value of an entry of a map."""
    name, value = "", None
    for number, part in message.parts():
        if number == 1:
            name = part.stable_text()
        elif number == 2:
            value = part
    return name, value


def signature_of(message: Message) -> dict[str, Any]:
    sides: dict[int, dict[str, Any]] = {1: {}, 2: {}}
    method = ""
    for number, part in message.parts():
        if number in sides:
            name, info = signature_entry(part)
            sides[number][name] = _read_tensor_info(info) if info else {}
        elif number == 3:
            method = part.stable_text()
    inputs, outputs = (dict(sorted(sides[number].items())) for number in (1, 2))
    return {"inputs": inputs, "outputs": outputs, "method_name": method}


def _read_tensor_info(message: Message) -> dict[str, object]:
    info: dict[str, object] = {"name": "", "dtype": "unknown", "shape": []}
    for number, value, part in message.fields():
        if number == 2 and value is not None:
            info["dtype"] = type_name(value)
        elif part is None:
            continue
        elif number == 1:
            info["name"] = part.stable_text()
        elif number == 3:
            info["shape"] = read_shape(part)
        elif number in (4, 5):
            info["encoding"] = "sparse" if number == 4 else "composite"
    return info


def _add_objects(graph: MetaGraph, message: Message) -> None:
    bound = read_bound_functions(message, len(graph.objects or ()))
    graph.saver.offered |= bound.offered
    graph.bound.add(bound)
    graph.objects = [*(graph.objects or ()), *read_objects(message)]


_PARTS: Mapping[int, Callable[[MetaGraph, Message], None]] = {
    1: _add_meta_info,
    2: _add_graph_def,
    3: _add_saver,
    4: _add_collection,
    5: _add_signature,
    6: _add_asset,
    7: _add_objects,
}
