"""Object graph of a SavedModel: the Python objects that were saved, with variables, assets and functions.

Source: tensorflow/tensorflow ``core/protobuf/saved_object_graph.proto``, ``core/framework/types.proto``,
``core/framework/tensor_shape.proto``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ckpttool.containers.protobuf import varint
from ckpttool.core.errors import DamagedCheckpoint, LimitExceeded
from ckpttool.formats.savedmodel.walk import Message, signed
from ckpttool.formats.tensorflow.bundle import DTYPE_NAMES, REFERENCE

MAX_OBJECTS = 1_000_000
MAX_METADATA = 1 << 24


class SavedVariable(NamedTuple):
    """Variable in the object graph.

    Attributes:
        shape: None if the rank is unknown; None for a length that is unknown.
        name: Name given in Python; may be empty.
        is_composed: Whether a distribution strategy split it into components, which are saved in its place.
    """

    dtype: str
    shape: Shape
    name: str
    is_composed: bool


@dataclass(slots=True)
class SavedObject:
    """Node of the object graph.

    Attributes:
        children: Numbers of the child objects, by local name.
        slots: Numbers of an optimizer's slot variables.
        variable: The variable, if the object is one.
        keras: Keras's JSON description of a layer; empty if there is none.
    """

    children: dict[str, int] = field(default_factory=dict)
    slots: list[int] = field(default_factory=list)
    variable: SavedVariable | None = None
    keras: bytes = b""


def _read_child(message: Message) -> tuple[str, int]:
    name, child = "", 0
    for number, value, text in message.fields():
        if number == 1 and value is not None:
            child = value
        elif number == 2 and text is not None:
            name = text.stable_text()
    return name, child


def _read_variable(message: Message) -> SavedVariable:
    dtype, name, is_composed = 0, "", False
    shape: Shape = []
    for number, value, part in message.fields():
        if number == 1 and value is not None:
            dtype = value
        elif part is None:
            continue
        elif number == 2:
            shape = read_shape(part)
        elif number == 6:
            name = part.stable_text()
        elif number == 8:
            is_composed = True
    return SavedVariable(type_name(dtype), shape, name, is_composed)


# The object graph ------------------------------------------------------------------------------------

_ASSET = 5
_KINDS = frozenset({4, _ASSET, 6, 7, 8, 9, 10, 12})
"""Fields of SavedObject in its ``oneof kind``; of several, the last counts."""


@dataclass(slots=True)
class ObjectGraph:
    """Object graph, and the functions that its objects call.

    Attributes:
        nodes: The objects; the first is the root.
        functions: Names of functions, with the numbers of the objects that are captured as last arguments.
        exposed: Names of all functions that objects refer to, with or without captured inputs.
        assets: Numbers of the objects that are assets.
    """

    nodes: list[SavedObject] = field(default_factory=list)
    functions: list[tuple[str, list[int]]] = field(default_factory=list)
    exposed: set[str] = field(default_factory=set)
    assets: set[int] = field(default_factory=set)

    def add(self, message: Message) -> None:
        """Add a SavedObjectGraph; a second one continues the first, as Protocol Buffers merges messages."""
        for number, part in message.parts():
            if number == 1:
                self._add_object(part)
            elif number == 2:
                self._add_function(part)

    def _add_object(self, message: Message) -> None:
        if len(self.nodes) == MAX_OBJECTS:
            path = message.window.source.path
            raise LimitExceeded(path, f"more than {MAX_OBJECTS:,} objects", expected="less")
        item, kind = SavedObject(), 0
        described: dict[int, Message] = {}
        for number, part in message.parts():
            kind = number if number in _KINDS else kind
            if number == 1:
                name, child = _read_child(part)
                item.children[name] = child
            elif number == 3:
                item.slots += (value for at, value in part.numbers() if at == 3)
            elif number == 4:
                described |= {at: field for at, field in part.parts()}  # a repeated message is merged
            elif number in (6, 8):  # function, bare_concrete_function
                self.exposed |= {name.stable_text() for at, name in part.parts() if at == 1}
            elif number == 7:
                item.variable = _read_variable(part)
        # Keras up to TensorFlow 2.4 stored its JSON description of a layer here, not in keras_metadata.pb.
        if 1 in described and described[1].text().startswith("_tf_keras") and 3 in described:
            described[3].window.keep(described[3].nbytes)
            item.keras = described[3].data(MAX_METADATA)
        if kind == _ASSET:
            self.assets.add(len(self.nodes))
        self.nodes.append(item)

    def _add_function(self, entry: Message) -> None:
        name, captured = "", []
        for number, part in entry.parts():
            if number == 1:
                name = part.stable_text()
            for at, value, packed in part.fields() if number == 2 else ():
                if at == 2 and packed is not None:
                    captured += _read_packed(packed)
                elif at == 2 and value is not None:
                    captured.append(value)
        self.functions.append((name, captured))
        self.exposed.add(name)


def _read_packed(message: Message) -> list[int]:
    # Repeated numbers are written packed, as varints one after another in one field. A reader has to accept
    # one field a number as well.
    data, at, numbers = message.data(MAX_METADATA), 0, []
    while at < len(data):
        try:
            number, at = varint(data, at)
        except ValueError as failure:
            path = message.window.source.path
            raise DamagedCheckpoint(
                path, f"not a list of numbers: {failure}", code="protobuf-damaged"
            ) from failure
        numbers.append(number)
    message.window.count(len(numbers))
    return numbers


# Element types and shapes, as graphs spell them -----------------------------------------------------


Shape = list[int | None] | None


def type_name(number: int) -> str:
    """Return the name of a ``DataType`` number; ``DT_<number>`` if unknown."""
    is_reference, bare = number > REFERENCE, number % REFERENCE if number < 2 * REFERENCE else number
    name = DTYPE_NAMES[bare] if bare < len(DTYPE_NAMES) else f"DT_{number}"
    return f"{name}_ref" if is_reference and bare < len(DTYPE_NAMES) else name


def read_shape(message: Message) -> Shape:
    """Parse a TensorShapeProto; None if the rank is unknown, None for an unknown length."""
    shape: list[int | None] = []
    for number, value, part in message.fields():
        if number == 2 and part is not None:
            size = next((signed(length) for at, length in part.numbers() if at == 1), 0)
            shape.append(None if size < 0 else size)
        elif number == 3 and value:
            return None
    return shape
