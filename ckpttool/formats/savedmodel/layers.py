"""Which layer of Keras each variable of a SavedModel belongs to, as Keras 2 describes its objects.

Source: tf_keras ``src/protobuf/saved_metadata.proto``, ``src/saving/legacy/saved_model/load.py``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckpttool.errors import CheckpointError
from ckpttool.formats.keras.kinds import Orders, kind_along, plain
from ckpttool.formats.keras.layers import Layer, layer_of
from ckpttool.formats.savedmodel.objects import MAX_METADATA, Object
from ckpttool.formats.savedmodel.paths import require_inside
from ckpttool.formats.savedmodel.variables import nodes_along, raw_key
from ckpttool.formats.savedmodel.walk import message_in
from ckpttool.tensor import Role, Tensor
from ckpttool.wire.jsontext import parse_json
from ckpttool.wire.source import Source

_TUPLES = ("__tuple__", "TensorShape")


def layers_in(
    directory: str, metadata: str, objects: Sequence[Object], tensors: Sequence[Tensor]
) -> Mapping[str, str]:
    """Return what the layers of weights are; what is not described, or can't be read, is not told.

    Args:
        directory: The SavedModel.
        metadata: Name of the file in which Keras describes its objects; old releases do so in the graph.
        objects: The objects of the graph.
        tensors: The variables.
    """
    described = {at: item.keras for at, item in enumerate(objects) if item.keras}
    path = os.path.join(directory, metadata)
    if os.path.lexists(path):
        described |= _read(path, directory)
    layers = {at: layer for at, text in described.items() if (layer := _layer(path, text)) is not None}
    found = {}
    orders: dict[int, Orders] = {}
    for tensor in tensors if layers else ():
        if tensor.role is Role.WEIGHTS:
            along = nodes_along(objects, raw_key(tensor))
            kind = kind_along((layers[at] for at in along if at in layers), orders)
            if kind is not None:
                found[tensor.name] = kind if len(tensor.shape) > 1 else plain(kind)
    return found


def _read(path: str, directory: str) -> dict[int, bytes]:
    try:
        require_inside(path, directory)
        with Source(path) as source:
            return dict(_described(source))
    except CheckpointError:  # opening the model told of it
        return {}


def _described(source: Source) -> Iterator[tuple[int, bytes]]:
    for number, _, node in message_in(source).fields():
        told = {at: (value, part) for at, value, part in node.fields()} if number == 1 else {}
        if 5 in told:
            yield told[2][0] if 2 in told else 0, told[5][1].data(MAX_METADATA)


def _layer(path: str, text: bytes) -> Layer | None:
    try:
        told = _plain(parse_json(path, text, "keras-metadata", constants=True))
    except CheckpointError:  # opening the model told of it
        return None
    if isinstance(told, dict) and isinstance(shape := told.get("build_input_shape"), list):
        told.setdefault("build_config", {"input_shape": shape})
    return layer_of(told)


def _plain(tree: Any) -> Any:
    """Return a configuration with lists where Keras 2 wraps tuples and shapes."""
    if isinstance(tree, list):
        return [_plain(one) for one in tree]
    if not isinstance(tree, dict):
        return tree
    if tree.get("class_name") in _TUPLES and isinstance(tree.get("items"), list):
        return [_plain(one) for one in tree["items"]]
    return {key: _plain(one) for key, one in tree.items()}
