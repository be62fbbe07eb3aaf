"""The objects of a SavedModel: a graph of what was tracked when it was saved, variables among them.

Source: tensorflow/tensorflow ``core/protobuf/saved_object_graph.proto``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ckpttool.errors import LimitExceeded
from ckpttool.formats.savedmodel.types import Shape, read_shape, type_name
from ckpttool.formats.savedmodel.walk import Message

MAX_OBJECTS = 1_000_000
MAX_METADATA = 1 << 24


class Variable(NamedTuple):
    """What the object graph says of a variable."""

    dtype: str
    shape: Shape
    name: str
    is_composed: bool


@dataclass(slots=True)
class Object:
    """A node of the object graph: children by local name, and the variable that it is, if it is one."""

    children: dict[str, int] = field(default_factory=dict)
    slots: list[int] = field(default_factory=list)
    variable: Variable | None = None
    keras: bytes = b""


def read_objects(message: Message) -> list[Object]:
    """Return the nodes of an object graph; the first is the root.

    Raises:
        DamagedCheckpoint: It is no message.
        LimitExceeded: There are too many.
    """
    objects: list[Object] = []
    for number, _, part in message.fields():
        if number == 1:
            objects.append(_object(part))
            if len(objects) > MAX_OBJECTS:
                path = message.window.source.path
                raise LimitExceeded(path, f"more than {MAX_OBJECTS:,} objects", expected="less")
    return objects


def _object(message: Message) -> Object:
    found = Object()
    described: dict[int, Message] = {}
    for number, _, part in message.fields():
        if number == 1:
            child, name = _reference(part)
            found.children[name] = child
        elif number == 3:
            found.slots += (value for at, value, _ in part.fields() if at == 3)
        elif number == 4:
            described |= {at: field for at, _, field in part.fields()}  # readers merge what stands twice
        elif number == 7:
            found.variable = _variable(part)
    found.keras = _keras(described)
    return found


def _reference(message: Message) -> tuple[int, str]:
    node, name = 0, ""
    for number, value, part in message.fields():
        if number == 1:
            node = value
        elif number == 2:
            name = part.kept()
    return node, name


def _keras(described: Mapping[int, Message]) -> bytes:
    """Return what Keras of TensorFlow up to 2.4 wrote of a layer, as JSON."""
    is_keras = 1 in described and described[1].text().startswith("_tf_keras")
    if not is_keras or 3 not in described:
        return b""
    described[3].window.keep(described[3].nbytes)
    return described[3].data(MAX_METADATA)


def _variable(message: Message) -> Variable:
    dtype, name, is_composed = 0, "", False
    shape: Shape = []
    for number, value, part in message.fields():
        if number == 1:
            dtype = value
        elif number == 2:
            shape = read_shape(part)
        elif number == 6:
            name = part.kept()
        elif number == 8:
            is_composed = True
    return Variable(type_name(dtype), shape, name, is_composed)
