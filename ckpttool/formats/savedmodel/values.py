"""Ops of TensorFlow that compute or touch files depending on what they are given.

A cache of a data set lies in memory where the name of its file is empty; printing goes to a terminal, the log
or a file. Only what is told by a constant, in the same body, is believed.

Source: tensorflow/tensorflow ``core/kernels/data/cache_dataset_ops.cc``, ``core/kernels/logging_ops.cc``,
``core/kernels/range_sampler.cc``, ``core/util/proto/descriptors.cc``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from ckpttool.formats.savedmodel.walk import MAX_NAME, Message

_TEXT, _TENSOR = 2, 8  # fields of AttrValue
_STRING = 7  # the number of the type of strings
_IN_GRAPH, _IN_FUNCTION = 1, 3  # the fields of GraphDef and FunctionDef that hold nodes
_VALUE = "value"
_TERMINALS = frozenset({b"", b"stderr", b"stdout", b"log(info)", b"log(warning)", b"log(error)"})
_IN_MEMORY = re.compile(rb"$|local://$|bytes://", re.DOTALL)


@dataclass(slots=True)
class Body:
    """The graph or the function that a node stands in.

    Attributes:
        message: It, as a message.
        kind: The number of the field that holds its nodes.
    """

    message: Message
    kind: int
    _texts: dict[str, bytes | None] | None = field(default=None, init=False)

    def text(self, name: str) -> bytes | None:
        """Return the string that the constant of a name is; None where there is none, or several."""
        if self._texts is None:
            self._texts = {}
            for node in self._nodes():
                at, value = _constant(node)
                if value is not None or at in self._texts:
                    self._texts[at] = None if at in self._texts else value
        return self._texts.get(name)

    def _nodes(self) -> Iterator[Message]:
        return (part for number, _, part in self.message.fields() if number == self.kind)


def _constant(node: Message) -> tuple[str, bytes | None]:
    """Return a node's name, and the string that it is where it is the constant of one."""
    name, op = "", ""
    for number, _, part in node.fields():
        if number == 1:
            name = part.text()
        elif number == 2:
            op = part.text()
    values = _attribute(node, _VALUE) if op == "Const" else []
    told = list(values[0].fields()) if len(values) == 1 else []
    return name, _text(told[0][2]) if len(told) == 1 and told[0][0] == _TENSOR else None


def _text(tensor: Message) -> bytes | None:
    dtype, texts = 0, []
    for number, value, part in tensor.fields():
        if number == 1:
            dtype = value
        elif number == 8:
            texts.append(part)
        elif number == 4 and part.nbytes:
            return None
    if dtype != _STRING or len(texts) > 1 or any(text.nbytes > MAX_NAME for text in texts):
        return None
    return texts[0].data(MAX_NAME) if texts else b""


def _attribute(node: Message, name: str) -> list[Message]:
    """Return all values that an attribute of a node is given; more than one only in a hostile file."""
    found = []
    for number, _, entry in node.fields():
        parts = list(entry.fields()) if number == 5 else []
        if any(at == 1 and part.nbytes == len(name) and part.text() == name for at, _, part in parts):
            found += [part for at, _, part in parts if at == 2]
    return found


def _own_text(node: Message, name: str) -> bytes | None:
    """Return an attribute that is a string, ``b""`` where there is none; None where it is not told here."""
    values = _attribute(node, name)
    if not values:
        return b""
    told = list(values[0].fields())
    is_text = len(values) == len(told) == 1 and told[0][0] == _TEXT and told[0][2].nbytes <= MAX_NAME
    return told[0][2].data(MAX_NAME) if is_text else None


def _input_text(node: Message, body: Body, at: int) -> bytes | None:
    """Return the constant string that an input is; None where it is none."""
    inputs = [part for number, _, part in node.fields() if number == 3]
    return body.text(inputs[at].text().partition(":")[0]) if at < len(inputs) else None


def _is_cached_in_memory(node: Message, body: Body) -> bool:
    return _input_text(node, body, 1) == b""


def _is_without_vocabulary(node: Message, body: Body) -> bool:
    return _own_text(node, "vocab_file") == b""


def _is_described_in_memory(node: Message, body: Body) -> bool:
    source = _own_text(node, "descriptor_source")
    return source is not None and _IN_MEMORY.match(source) is not None


def _is_to_terminal(node: Message, body: Body) -> bool:
    return _own_text(node, "output_stream") in _TERMINALS


def _is_from_argument(node: Message, body: Body) -> bool:
    """Tell whether the second input may be an asset: in a function an argument, never ``NODE:OUTPUT:0``."""
    inputs = [part for number, _, part in node.fields() if number == 3]
    is_argument = len(inputs) > 1 and ":" not in (name := inputs[1].text()) and body.text(name) is None
    return body.kind == _IN_FUNCTION and is_argument


def graph_body(message: Message) -> Body:
    """Return a GraphDef as what its nodes stand in."""
    return Body(message, _IN_GRAPH)


def function_body(message: Message) -> Body:
    """Return a FunctionDef as what its nodes stand in."""
    return Body(message, _IN_FUNCTION)


HARMLESS: Mapping[str, Callable[[Message, Body], bool]] = {
    "CacheDataset": _is_cached_in_memory,
    "CacheDatasetV2": _is_cached_in_memory,
    "FixedUnigramCandidateSampler": _is_without_vocabulary,
    "DecodeProtoV2": _is_described_in_memory,
    "EncodeProto": _is_described_in_memory,
    "PrintV2": _is_to_terminal,
    "InitializeTableFromTextFile": _is_from_argument,
    "InitializeTableFromTextFileV2": _is_from_argument,
}
"""For each op that is judged by what it is given: whether a node, in its body, touches no file."""
