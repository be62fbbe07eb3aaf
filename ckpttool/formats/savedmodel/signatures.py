"""What a SavedModel's signatures say: which tensors they take and give.

Source: tensorflow/tensorflow ``core/protobuf/meta_graph.proto``.
"""

from __future__ import annotations

from typing import Any

from ckpttool.formats.savedmodel.types import read_shape, type_name
from ckpttool.formats.savedmodel.walk import Message


def signature_of(message: Message) -> dict[str, Any]:
    sides: dict[int, dict[str, Any]] = {1: {}, 2: {}}
    method = ""
    for number, _, part in message.fields():
        if number in sides:
            name, told = entry_of(part)
            sides[number][name] = _tensor_info(told) if told else {}
        elif number == 3:
            method = part.kept()
    inputs, outputs = (dict(sorted(sides[number].items())) for number in (1, 2))
    return {"inputs": inputs, "outputs": outputs, "method_name": method}


def entry_of(message: Message) -> tuple[str, Message | None]:
    """Return key and value of an entry of a map."""
    name, told = "", None
    for number, _, part in message.fields():
        if number == 1:
            name = part.kept()
        elif number == 2:
            told = part
    return name, told


def _tensor_info(message: Message) -> dict[str, object]:
    told: dict[str, object] = {"name": "", "dtype": "unknown", "shape": []}
    for number, value, part in message.fields():
        if number == 1:
            told["name"] = part.kept()
        elif number == 2:
            told["dtype"] = type_name(value)
        elif number == 3:
            told["shape"] = read_shape(part)
        elif number in (4, 5):
            told["encoding"] = "sparse" if number == 4 else "composite"
    return told
