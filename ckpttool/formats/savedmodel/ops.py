"""TensorFlow's ops: the lists of known and unsafe ones, and checks of single nodes.

Some ops touch files or not depending on their input: a data set is cached in memory if the file name is
empty; ``PrintV2`` writes to the terminal, the log or a file. Only attributes and constants in the same body
count as evidence.

Source: tensorflow/tensorflow ``core/framework/node_def.proto``, ``function.proto``,
``core/kernels/data/cache_dataset_ops.cc``, ``core/kernels/logging_ops.cc``,
``core/kernels/range_sampler.cc``, ``core/util/proto/descriptors.cc``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

from ckpttool.core.name_lists import lines_of
from ckpttool.core.report import Severity
from ckpttool.formats.savedmodel.walk import MAX_NAME, Message

_LISTS = Path(__file__).with_name("lists")
_TEXT, _TENSOR = 2, 8  # fields of AttrValue
_STRING = 7  # the number of the type of strings
_IN_GRAPH, _IN_FUNCTION = 1, 3  # the fields of GraphDef and FunctionDef that hold nodes
_VALUE = "value"
_TERMINALS = frozenset({b"", b"stderr", b"stdout", b"log(info)", b"log(warning)", b"log(error)"})
_IN_MEMORY = re.compile(rb"$|local://$|bytes://", re.DOTALL)


@cache
def known_ops() -> dict[str, frozenset[str]]:
    """Return the outputs' names of each op of TensorFlow; none for an op that was removed from it."""
    lines = (line.split() for line in lines_of(_LISTS / "tf_ops.txt"))
    return {op: frozenset(outputs) for op, *outputs in lines}


def severity_of(op: str) -> Severity | None:
    """Return the severity of an unsafe op; None for an op that only computes."""
    return next((severity for severity, glob in _unsafe() if fnmatchcase(op, glob)), None)


@cache
def _unsafe() -> tuple[tuple[Severity, str], ...]:
    pairs = (line.split() for line in lines_of(_LISTS / "tf_unsafe_ops.txt"))
    return tuple((Severity(severity), glob) for severity, glob in pairs)


@cache
def stateful_ops() -> frozenset[str]:
    """Return the unsafe ops that run only if their function is called.

    Source: tensorflow/tensorflow ``core/common_runtime/eval_const_tensor.cc``.
    """
    # TensorFlow infers the shapes in all functions while it loads a model, and may run stateless ops for
    # that, even in functions that nothing calls. It never runs stateful ones then.
    return frozenset(lines_of(_LISTS / "tf_stateful_ops.txt"))


# References between nodes ---------------------------------------------------------------------------


@dataclass(slots=True)
class BodyLinks:
    """References between the nodes of one graph or function.

    Names are kept as hashes, because a graph may have half a million nodes; the text of a broken reference is
    found in the message again.

    Attributes:
        message: The GraphDef or FunctionDef.
        kind: Field number of its nodes.
    """

    message: Message
    kind: int
    _ops: dict[int, str] = field(default_factory=dict)
    _taken: set[tuple[int, str]] = field(default_factory=set)

    def node(self, name: str, op: str) -> None:
        """Add a node; an argument of a function has no op."""
        self._ops[hash(name)] = op

    def take(self, reference: str) -> None:
        """Add a reference, from a node's inputs or a function's results."""
        self._taken.add(_split_reference(reference))

    def broken(self) -> str | None:
        """Return the first reference to a node or output that doesn't exist, or None."""
        lost = set()
        for node, output in self._taken:
            outputs = known_ops().get(self._ops[node]) if output and node in self._ops else None
            if node not in self._ops or (outputs and output not in outputs):
                lost.add((node, output))
        if not lost:
            return None
        return next((text for text in self._references() if _split_reference(text) in lost), None)

    def has(self, reference: str) -> bool:
        """Return whether the node of a reference exists."""
        return _split_reference(reference)[0] in self._ops

    def _references(self) -> Iterator[str]:
        for number, part in self.message.parts():
            wanted = {self.kind: 3, 4: 2}.get(number) if self.kind == 3 or number == self.kind else None
            for inner, text in part.parts() if wanted else ():
                if inner == wanted:
                    yield text.text()


def _split_reference(reference: str) -> tuple[int, str]:
    """Return the hashed name of a referenced node, and the name of its output if given.

    References are ``^node``, ``node``, ``node:0``, and in functions ``node:output:0``.
    """
    node, _, rest = reference.removeprefix("^").partition(":")
    output, colon, _ = rest.partition(":")
    return hash(node), output if colon else ""


# Ops that touch files depending on what they are given ----------------------------------------------


@dataclass(slots=True)
class NodeBody:
    """String constants of one graph or function, read when the first is asked for.

    Attributes:
        message: The GraphDef or FunctionDef.
        kind: Field number of its nodes.
    """

    message: Message
    kind: int
    _texts: dict[str, bytes | None] | None = field(default=None, init=False)

    def text(self, name: str) -> bytes | None:
        """Return the value of a string constant by name; None if there is none, or several."""
        if self._texts is None:
            self._texts = {}
            for number, part in self.message.parts():
                if number == self.kind:
                    node, value = _string_constant(part)
                    if value is not None or node in self._texts:
                        self._texts[node] = None if node in self._texts else value
        return self._texts.get(name)


def graph_body(message: Message) -> NodeBody:
    """Return the body of a GraphDef."""
    return NodeBody(message, _IN_GRAPH)


def function_body(message: Message) -> NodeBody:
    """Return the body of a FunctionDef."""
    return NodeBody(message, _IN_FUNCTION)


def _string_constant(node: Message) -> tuple[str, bytes | None]:
    """Return a node's name, and its value if it is a constant scalar string."""
    name, op = "", ""
    for number, part in node.parts():
        if number == 1:
            name = part.text()
        elif number == 2:
            op = part.text()
    values = _attribute_values(node, _VALUE) if op == "Const" else []
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
    if dtype != _STRING or len(texts) > 1 or any(text.nbytes > MAX_NAME for text in texts):
        return None
    return texts[0].data(MAX_NAME) if texts else b""


def _attribute_values(node: Message, name: str) -> list[Message]:
    """Return all values of an attribute; more than one only in a hostile file."""
    values = []
    for number, entry in node.parts():
        parts = list(entry.parts()) if number == 5 else []
        if any(at == 1 and part.nbytes == len(name) and part.text() == name for at, part in parts):
            values += [part for at, part in parts if at == 2]
    return values


def _string_attribute(node: Message, name: str) -> bytes | None:
    """Return a string attribute, ``b""`` if absent; None if it isn't one string, or is too long."""
    values = _attribute_values(node, name)
    if not values:
        return b""
    fields = list(values[0].fields())
    (number, _, text), *_ = fields or [(0, None, None)]
    is_text = len(values) == len(fields) == 1 and number == _TEXT
    return text.data(MAX_NAME) if is_text and text is not None and text.nbytes <= MAX_NAME else None


def _is_cached_in_memory(node: Message, body: NodeBody) -> bool:
    inputs = [part for number, part in node.parts() if number == 3]
    return len(inputs) > 1 and body.text(inputs[1].text().partition(":")[0]) == b""


def _is_without_vocabulary(node: Message, body: NodeBody) -> bool:
    return _string_attribute(node, "vocab_file") == b""


def _is_described_in_memory(node: Message, body: NodeBody) -> bool:
    source = _string_attribute(node, "descriptor_source")
    return source is not None and _IN_MEMORY.match(source) is not None


def _is_to_terminal(node: Message, body: NodeBody) -> bool:
    return _string_attribute(node, "output_stream") in _TERMINALS


HARMLESS_IF: Mapping[str, Callable[[Message, NodeBody], bool]] = {
    "CacheDataset": _is_cached_in_memory,
    "CacheDatasetV2": _is_cached_in_memory,
    "FixedUnigramCandidateSampler": _is_without_vocabulary,
    "DecodeProtoV2": _is_described_in_memory,
    "EncodeProto": _is_described_in_memory,
    "PrintV2": _is_to_terminal,
}
"""Checks by op that return whether a node, in its body, touches no file."""
