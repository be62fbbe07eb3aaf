"""Parser of ``saved_model.pb``: meta graphs with their nodes, functions, signatures, assets and objects.

All is found in one pass. The nodes are kept in a short form, because three questions are answered later:
what references exist (``body.py``), whether an op that opens files serves the saver or opens only the
model's own files (``saver.py``, ``file_names.py``), and what the model computes (``computation.py``).

Source: tensorflow/tensorflow ``core/protobuf/saved_model.proto``, ``meta_graph.proto``,
``core/framework/graph.proto``, ``function.proto``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpttool.core.errors import LimitExceeded
from ckpttool.formats.savedmodel.body import Attribute, AttributeBudget, Body, GraphNode, attribute_of
from ckpttool.formats.savedmodel.file_names import FILE_INPUTS, Call, FileNames, Origin
from ckpttool.formats.savedmodel.objects import ObjectGraph, read_shape, type_name
from ckpttool.formats.savedmodel.ops import HARMLESS_IF, known_ops, stateful_ops
from ckpttool.formats.savedmodel.saver import (
    RESTORING_OPS,
    SAVER_OPS,
    FileOp,
    Saver,
    functions_in,
    tensors_of,
)
from ckpttool.formats.savedmodel.walk import MAX_NAME, Message

MAX_GRAPHS = 1000
"""Limit on meta graphs: a hostile file makes one of two bytes; savers write one for each set of tags."""
MAX_OPS = 20_000
MAX_BROKEN = 20
"""Number of broken references that are reported."""
INIT_SIGNATURE = "__saved_model_init_op"
_ASSETS = "saved_model_assets"
"""Collection with the assets of a model from TensorFlow 1."""
_VARIABLES = frozenset({"variables", "local_variables"})
"""Collections with the variables of a graph and their initializers."""
_GROUPING = frozenset({"Identity", "NoOp"})
_INIT_COLLECTIONS = frozenset({"saved_model_main_op", "legacy_init_op"})
_CACHED, _CACHED_BYTES = 1 << 14, 256
"""Limits on the number of attributes that are cached by their bytes, and on the size of each."""
_UNNAMED = "without a name"
_ALIASES = 8
"""Field of MetaInfoDef with functions that ``LoadOptions`` can call under other names."""
_SUBSTITUTED = b"api_implements"
"""Attribute of functions that Grappler, TensorFlow's optimizer of graphs, may substitute for each other."""

Signature = Mapping[str, Any]


@dataclass(slots=True)
class MetaGraph:
    """Meta graph of a SavedModel; functions are named, and ``""`` is the graph itself.

    Attributes:
        saver: Dependencies of nodes and functions, which show those that serve the saver only.
        op_places: First place of each op, and whether it is harmless there; an op may have one of either.
        broken_references: Functions with a reference in them to a node or output that doesn't exist.
        first_callers: Functions that nodes refer to, each with the function that does so first.
        constant_bytes: Size of all constants in the graph and in functions.
        objects: The object graph; empty in TensorFlow 1.
        body: Nodes of the graph.
        bodies: Nodes of each function.
        init_nodes: References to the nodes that initialise the model.
        fed_assets: Tensors that assets are fed to, with the names of these.
        collected_assets: Assets in TensorFlow 1's collection; used only if ``assets`` is empty.
        served_tensors: Tensors that signatures take and return.
        file_ops: Ops that are judged by the origins of the files that they open.
        unsafe_stateful_ops: Other unsafe ops that run only if their function does, by op and function.
        initializer_ops: Ops that read a file for the initializer of a variable, with their first place.
        uncalled_ops: Unsafe ops in functions that nothing calls, with their first place.
        callers: Nodes that refer to each function.
        opaque_functions: Functions with unknown callers: gradients, functions whose name another has too,
            and those that Grappler may substitute.
        attribute_budget: Bytes of long attributes that were read and skipped.
        attribute_cache: Short attributes by their bytes, while the graph is parsed.
    """

    tags: list[str] = field(default_factory=list)
    version: str | None = None
    saver: Saver = field(default_factory=Saver)
    signatures: dict[str, Signature] = field(default_factory=dict)
    assets: list[str] = field(default_factory=list)
    has_init: bool = False
    nodes: int = 0
    functions: set[str] = field(default_factory=set)
    ops: Counter[str] = field(default_factory=Counter)
    op_places: dict[tuple[str, bool], str] = field(default_factory=dict)
    constant_bytes: int = 0
    broken_references: list[tuple[str, str]] = field(default_factory=list)
    first_callers: dict[str, str] = field(default_factory=dict)
    objects: ObjectGraph = field(default_factory=ObjectGraph)
    body: Body = field(default_factory=Body)
    bodies: dict[str, Body] = field(default_factory=dict)
    init_nodes: list[str] = field(default_factory=list)
    fed_assets: dict[str, str] = field(default_factory=dict)
    collected_assets: list[Message] = field(default_factory=list)
    served_tensors: list[str] = field(default_factory=list)
    file_ops: list[FileOp] = field(default_factory=list)
    unsafe_stateful_ops: dict[tuple[str, str], FileOp] = field(default_factory=dict)
    initializer_ops: dict[str, str] = field(default_factory=dict)
    uncalled_ops: dict[str, str] = field(default_factory=dict)
    callers: dict[str, list[Call]] = field(default_factory=dict)
    opaque_functions: set[str] = field(default_factory=set)
    attribute_budget: AttributeBudget = field(default_factory=AttributeBudget)
    attribute_cache: dict[bytes, Attribute] = field(default_factory=dict)

    def as_metadata(self) -> dict[str, object]:
        """Return the description of the graph, as plain data."""
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
    """Contents of a SavedModel message."""

    schema: int = 0
    graphs: list[MetaGraph] = field(default_factory=list)


def read_model(message: Message) -> SavedModel:
    """Parse a SavedModel message."""
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
    graph.attribute_cache.clear()
    graph.saver.exposed |= graph.objects.exposed
    _record_broken_reference(graph, "", graph.body)
    for part in () if graph.assets else graph.collected_assets:
        _add_asset(graph, part)
    # Whether an unsafe op is harmless is judged when all callers of its function are known.
    uncalled = graph.saver.uncalled_functions if graph.file_ops or graph.unsafe_stateful_ops else ()
    for op in graph.unsafe_stateful_ops.values():
        if op.function in uncalled:
            graph.uncalled_ops.setdefault(op.op, _place(op.name, op.function))
        else:
            _record_place(graph, op.op, op.name, op.function, False)
    if graph.file_ops:
        _judge_files(graph, uncalled)
    return graph


def _judge_files(graph: MetaGraph, uncalled: Collection[str]) -> None:
    """Record for each op that opens files whether these are the model's own."""
    # Two questions are independent: whether the op opens the model's own files, and whether the saver alone
    # uses it. A saver's op must pass both, unless nothing runs it, as in older savers; any other op must pass
    # the first.
    names = _file_names(graph, uncalled)
    uses = graph.saver.usage_of(graph.file_ops)
    for op in graph.file_ops:
        if op.function in uncalled and op.op in stateful_ops():
            graph.uncalled_ops.setdefault(op.op, _place(op.name, op.function))
            continue
        is_harmless = names.opens_model_files(op.op, op.name, op.function)
        if op.op in SAVER_OPS:
            is_savers, is_run = uses[op]
            is_harmless = is_savers and (is_harmless or not is_run)
            if not is_harmless and _is_for_initializers(graph, op):
                graph.initializer_ops.setdefault(op.op, op.name)
                continue
        _record_place(graph, op.op, op.name, op.function, is_harmless)


def _is_for_initializers(graph: MetaGraph, op: FileOp) -> bool:
    """Return whether a node restores only values for the initializers of variables."""
    if op.function or op.op not in RESTORING_OPS:
        return False
    users = graph.saver.initialized_by(op.name)
    nodes = [graph.body.nodes.get(at) for at in users]
    return bool(nodes) and all(node is not None and node.op in _GROUPING for node in nodes)


def _file_names(graph: MetaGraph, uncalled: Collection[str]) -> FileNames:
    # The loader feeds assets only while it initialises the model: not to tensors that signatures depend on.
    served = graph.saver.reachable_from(graph.served_tensors) if graph.fed_assets else set()
    fed: dict[tuple[str, str], Origin] = {}
    for reference, origin in (
        *((one, Origin.ASSET) for one in graph.fed_assets),
        (graph.saver.prefix, Origin.PREFIX),
    ):
        name, _, output = reference.partition(":")
        if name and (origin is Origin.PREFIX or hash(name) not in served):
            fed[name, output or "0"] = origin
    captured: dict[str, list[Sequence[Origin]]] = {}
    for name, numbers in graph.objects.functions:
        origins = [Origin.ASSET if at in graph.objects.assets else Origin.ELSEWHERE for at in numbers]
        captured.setdefault(name, []).append(origins)
    for name in graph.objects.exposed:
        captured.setdefault(name, [()])
    calls = {
        name: [one for one in found if one.body not in uncalled] for name, found in graph.callers.items()
    }
    return FileNames({**graph.bodies, "": graph.body}, calls, captured, graph.opaque_functions, fed)


def _add_meta_info(graph: MetaGraph, message: Message) -> None:
    for number, part in message.parts():
        if number == 4:
            graph.tags.append(part.stable_text())
        elif number == 5:
            graph.version = part.stable_text() or None
        elif number == _ALIASES:
            graph.saver.exposed.add(signature_entry(part)[0])


def _add_collection(graph: MetaGraph, entry: Message) -> None:
    # A CollectionDef has names of nodes in field 1, serialized messages in 2 (of variables a VariableDef,
    # with the name of the initializer in its field 2), and messages wrapped in ``Any`` in 5.
    name, _ = signature_entry(entry)
    if name in _INIT_COLLECTIONS:
        graph.has_init = True
        for node in _nested_messages(entry, 2, 1, 1):
            graph.saver.add_entry_point(node.text())
            graph.init_nodes.append(node.text())
    elif name in _VARIABLES:
        for variable in _nested_messages(entry, 2, 2, 1):
            for number, part in variable.parts():
                if number == 2:
                    graph.saver.add_initializer(part.text())
    elif name == _ASSETS:
        graph.collected_assets += _nested_messages(entry, 2, 5, 1, 2)


def _nested_messages(message: Message, *numbers: int) -> Iterator[Message]:
    """Yield the messages at a path of field numbers."""
    for number, part in message.parts():
        if number == numbers[0]:
            yield from _nested_messages(part, *numbers[1:]) if numbers[1:] else (part,)


def _add_asset(graph: MetaGraph, message: Message) -> None:
    parts = dict(message.parts())
    graph.assets.append(parts[2].stable_text() if 2 in parts else "")
    names = [part.stable_text() for number, part in parts[1].parts() if number == 1] if 1 in parts else []
    if names:
        graph.fed_assets[names[-1]] = graph.assets[-1]


# Ops ------------------------------------------------------------------------------------------------


def _add_graph_def(graph: MetaGraph, message: Message) -> None:
    graph.body.add_message(message)
    for number, part in message.parts():
        if number == 1:
            graph.nodes += 1
            _add_node(graph, part, "", graph.body)
        elif number == 2:
            _add_library(graph, part)


def _add_library(graph: MetaGraph, message: Message) -> None:
    for number, part in message.parts():
        if number == 1:
            _add_function(graph, part)
        elif number in (2, 3):  # gradients, which name the function of one
            gradient = {2: 2, 3: 1}[number]
            called = {text.stable_text() for at, text in part.parts() if at == gradient}
            graph.saver.exposed |= called
            graph.opaque_functions |= called


def _add_function(graph: MetaGraph, message: Message) -> None:
    """Add a function of the library."""
    # TensorFlow writes the signature, which has the name, before the nodes. A hostile file may put nodes
    # first: these wait until the name is known.
    name, nodes, is_substituted = "", [], False
    body = Body(is_function=True, messages=[message])
    for number, part in message.parts():
        if number == 1:
            name = _function_name(graph, part, name)
            _add_arguments(part, body)
        elif number == 4:
            texts = {at: text.text() for at, text in part.parts() if at in (1, 2)}
            body.add_result(texts.get(1, ""), texts.get(2, ""))
        elif number == 5 and _SUBSTITUTED in (entry.data(MAX_NAME) for at, entry in part.parts() if at == 1):
            is_substituted = True
        elif number == 3 and name:
            _add_node(graph, part, name, body)
        elif number == 3:
            nodes.append(part)
    if not name:  # objects can name it all the same
        graph.saver.exposed.add(_UNNAMED)
    for part in nodes:
        _add_node(graph, part, name or _UNNAMED, body)
    if is_substituted or name in graph.bodies:
        graph.saver.exposed.add(name)
        graph.opaque_functions.add(name)
    graph.bodies[name or _UNNAMED] = body
    _record_broken_reference(graph, name or _UNNAMED, body)


def _add_arguments(signature: Message, body: Body) -> None:
    """Add the arguments of a function, and the names of its results."""
    for number, argument in signature.parts():
        for inner, text in argument.parts() if number in (2, 3) else ():
            if inner == 1 and number == 2:
                body.add_argument(text.text())
            elif inner == 1:
                body.order.append(text.text())


def _function_name(graph: MetaGraph, signature: Message, before: str) -> str:
    """Return the name in a function's signature."""
    # Only hostile files have several names, or several functions of one name. Which of them a loader calls
    # isn't known, so all of them count as called from outside.
    names = [part.stable_text() for number, part in signature.parts() if number == 1]
    name = names[-1] if names else before
    if name in graph.functions or (before or name) != name or len(names) > 1:
        graph.saver.exposed.update((before, *names))
        graph.opaque_functions.update((before, *names))
    graph.functions.add(name)
    graph.saver.functions[name]  # it may call none
    return name


def _record_broken_reference(graph: MetaGraph, function: str, body: Body) -> None:
    reference = body.broken_reference(known_ops())
    if reference is not None and len(graph.broken_references) < MAX_BROKEN:
        graph.broken_references.append((function, reference))


def _add_node(graph: MetaGraph, message: Message, function: str, body: Body) -> None:
    name, op, inputs, attributes = _node_fields(graph, message)
    body.add_node(name, GraphNode(op or _UNNAMED, inputs, attributes))
    graph.ops[op] += 1
    if op == "Const":
        graph.constant_bytes += sum(attribute.value_bytes for attribute in attributes)
    if len(graph.ops) > MAX_OPS:
        path = message.window.source.path
        raise LimitExceeded(path, f"more than {MAX_OPS:,} kinds of ops", expected="less")
    if not function:
        graph.saver.add_node(name, inputs)
    _add_calls(graph, message, name, op, function, attributes)
    # Whether an op is harmless may depend on the rest of the graph: on the origin of its file name, or on
    # calls of its function. Such ops are kept until the graph is complete. Others are judged here, and of
    # each op only the first place is kept; a large graph has many of each.
    if op in FILE_INPUTS:
        message.window.keep(len(name))
        graph.file_ops.append(FileOp(op, name, function))
        return
    is_harmless = op in HARMLESS_IF and HARMLESS_IF[op](message, body)
    if function and op in stateful_ops() and not is_harmless:
        if (op, function) not in graph.unsafe_stateful_ops:
            message.window.keep(len(name) + len(function))
            graph.unsafe_stateful_ops[op, function] = FileOp(op, name, function)
    elif is_harmless or (op, False) not in graph.op_places:
        _record_place(graph, op, name, function, is_harmless)


def _node_fields(graph: MetaGraph, message: Message) -> tuple[str, str, list[str], list[Attribute]]:
    """Return a node's name, op, inputs and attributes."""
    # Nearly all nodes have short fields only, and ``short_parts`` parses them at once; others are walked.
    texts: dict[int, str] = {}
    inputs, attributes = [], []
    parts = message.short_parts()
    for number, start, data in parts or ():
        if number == 3:
            inputs.append(data.decode("utf-8", "backslashreplace"))
        elif number == 5:
            attributes.append(_cached_attribute(graph, message, start, data))
        elif number < 3:
            texts[number] = data.decode("utf-8", "backslashreplace")
    for number, part in message.parts() if parts is None else ():
        if number == 3:
            inputs.append(part.text())
        elif number == 5:
            attributes.append(attribute_of(part, functions_in(part), graph.attribute_budget))
        elif number < 3:
            texts[number] = part.text()
    return texts.get(1, ""), texts.get(2, ""), inputs, attributes


def _cached_attribute(graph: MetaGraph, node: Message, start: int, data: bytes) -> Attribute:
    """Return an attribute of a node."""
    # Most attributes of a large graph are equal (``T: DT_FLOAT``), so parsed ones are cached by their bytes.
    known = graph.attribute_cache.get(data)
    if known is not None:
        return known
    message = Message(node.window, start, start + len(data), node.depth + 1)
    attribute = attribute_of(message, functions_in(message), graph.attribute_budget)
    if len(data) <= _CACHED_BYTES and len(graph.attribute_cache) < _CACHED:
        graph.attribute_cache[data] = attribute
    return attribute


def _add_calls(
    graph: MetaGraph, message: Message, name: str, op: str, function: str, attributes: list[Attribute]
) -> None:
    """Add the functions that a node refers to; an unknown op may be the name of a function as well."""
    names = {called for attribute in attributes if attribute.functions for called in attribute.functions}
    if not names and op in known_ops():
        return
    for called in names - graph.first_callers.keys():
        message.window.keep(len(called))
        graph.first_callers[called] = function
    for called in names if op in known_ops() else names | {op}:
        graph.saver.add_call(name, function, called)
        graph.callers.setdefault(called, []).append(Call(function, hash(name)))


def _record_place(graph: MetaGraph, op: str, name: str, function: str, is_harmless: bool) -> None:
    """Record the first place of an op, separately where it is harmless."""
    graph.op_places.setdefault((op, is_harmless), _place(name, function))


def _place(name: str, function: str) -> str:
    return f"function {function}: {name}" if function else name


# Signatures and objects -----------------------------------------------------------------------------


def _add_signature(graph: MetaGraph, entry: Message) -> None:
    name, signature = signature_entry(entry)
    for reference in tensors_of(entry):
        graph.saver.add_entry_point(reference)
    if name == INIT_SIGNATURE:
        graph.has_init = True
        graph.init_nodes += tensors_of(entry)
    else:
        graph.signatures[name] = signature_of(signature) if signature else {}
        graph.served_tensors += tensors_of(entry)


def signature_entry(message: Message) -> tuple[str, Message | None]:
    """Return key and value of a map entry."""
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


_PARTS: Mapping[int, Callable[[MetaGraph, Message], None]] = {
    1: _add_meta_info,
    2: _add_graph_def,
    3: lambda graph, message: graph.saver.add_saver_def(message),
    4: _add_collection,
    5: _add_signature,
    6: _add_asset,
    7: lambda graph, message: graph.objects.add(message),
}
