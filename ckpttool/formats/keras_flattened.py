"""Which layers of a Keras model take what a Flatten gives, and the shape of what it flattens.

Source: Keras ``src/models/functional.py``, ``src/layers/reshaping/flatten.py``; tf_keras
``src/engine/functional.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckpttool.formats.keras_layers import Layer, listed
from ckpttool.wire.jsontext import objects

_FLATTEN, _SEQUENTIAL = "Flatten", "Sequential"
_SPATIAL = 3
"""The axes of an image, without the batch: rows, columns, channels. Fewer are a sequence, maybe."""

_AS_THEY_ARE = frozenset(
    (
        *("Activation", "ActivityRegularization", "AlphaDropout", "Dropout", "ELU", "GaussianDropout"),
        *("GaussianNoise", "Identity", "LeakyReLU", "ReLU"),
    )
)
"""Layers behind which each element is where it was."""
_SAME_CHANNELS = _AS_THEY_ARE | {
    "BatchNormalization",
    "PReLU",
    *(
        f"{kind}{axes}D"
        for kind in (
            "MaxPooling",
            "AveragePooling",
            "SpatialDropout",
            "ZeroPadding",
            "Cropping",
            "UpSampling",
        )
        for axes in (2, 3)
    ),
}
"""Layers behind which an image has as many channels as before."""
_IMAGES = frozenset(f"{kind}{axes}D" for kind in ("Conv", "SeparableConv") for axes in (2, 3)) | {
    "Conv2DTranspose",
    "Conv3DTranspose",
}
"""Layers that make an image with as many channels as they have filters."""


def flattened(model: Layer) -> dict[str, str]:
    """Return for each layer that takes flattened images their shape as text, "" where it is not told.

    Where only the channels of a shape are told, it is ``(*, 8)``.
    """
    layers = {layer.name: layer for layer in listed(model)}
    origins = _chained(model) if model.kind == _SEQUENTIAL else _connected(model)
    found = {}
    for name in layers:
        at, seen = origins.get(name), {name}
        while at in layers and at not in seen and layers[at].kind in _AS_THEY_ARE:
            seen.add(at)
            at = origins.get(at)
        source = layers.get(at or "")
        if source is not None and source.kind == _FLATTEN and (shape := _flattens(source)) is not None:
            found[name] = shape or _channels(source.name, layers, origins)
    return found


def _channels(name: str, layers: Mapping[str, Layer], origins: Mapping[str, str]) -> str:
    """Return the channels that a Flatten takes as text, from the layer that makes them; "" if none tells."""
    at, seen = origins.get(name, ""), {name}
    while at in layers and at not in seen and _keeps_channels(layers[at]):
        seen.add(at)
        at = origins.get(at, "")
    source = layers.get(at)
    if source is None or source.kind not in _IMAGES or not _is_channels_last(source):
        return ""
    filters = source.config.get("filters")
    return f"(*, {filters})" if type(filters) is int and filters > 0 else ""


def _keeps_channels(layer: Layer) -> bool:
    return layer.is_known and layer.kind in _SAME_CHANNELS and _is_channels_last(layer)


def _is_channels_last(layer: Layer) -> bool:
    return layer.is_known and layer.config.get("data_format") in (None, "channels_last")


def _flattens(layer: Layer) -> str | None:
    """Return the shape that a Flatten takes, without the batch; "" for an unknown one, None for no image."""
    if layer.config.get("data_format") == "channels_first":
        return None
    built = layer.node.get("build_config")
    shape = built.get("input_shape") if isinstance(built, Mapping) else None
    if not isinstance(shape, list):
        return ""
    lengths = shape[1:]
    if len(lengths) < _SPATIAL:
        return None
    is_known = all(type(length) is int and length > 0 for length in lengths)
    return f"({', '.join(map(str, lengths))})" if is_known else ""


def _chained(model: Layer) -> dict[str, str]:
    names = [layer.name for layer in listed(model)]
    return dict(zip(names[1:], names, strict=False))


def _connected(model: Layer) -> dict[str, str]:
    """Return for each layer that takes what one other gives the name of that one."""
    found = {}
    for layer in listed(model):
        origins = set(_origins(layer.node.get("inbound_nodes")))
        if len(origins) == 1:
            found[layer.name] = origins.pop()
    return found


def _origins(inbound: object) -> Iterator[str]:
    """Yield the names of the layers that a layer takes something from."""
    for one in objects(inbound):
        history = one.get("keras_history")
        if isinstance(history, list) and history and isinstance(history[0], str):
            yield history[0]
    pending = [inbound]
    while pending:  # Keras 2: [[["flatten", 0, 0, {}]]]
        node = pending.pop()
        if isinstance(node, list) and len(node) in (3, 4) and isinstance(node[0], str):
            yield node[0]
        elif isinstance(node, list):
            pending += node
