"""The configuration of a Keras 2 model as Keras 3 reads it: what Keras 3 has no name for is left out.

Only layers that both have, with settings that mean the same to both, and with weights in one order: anything
else is refused. Losses, metrics and optimizer are not among it, so that the model has to be compiled again.

Source: tf_keras ``src/layers``; Keras ``src/layers``, ``src/models/functional.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpttool.writing.keras_order import Unknown

_ANY = object()
_Gone = Mapping[str, object]
_POOLED = ("MaxPooling", "AveragePooling", "GlobalMaxPooling", "GlobalAveragePooling")
_UNCHANGED = (
    *("Dense", "EinsumDense", "Embedding", "Masking"),
    *("Activation", "ReLU", "LeakyReLU", "PReLU", "ELU", "Softmax"),
    *("Dropout", "GaussianNoise", "GaussianDropout", "AlphaDropout", "ActivityRegularization"),
    *("Flatten", "Reshape", "Permute", "RepeatVector", "Rescaling", "Resizing", "CenterCrop"),
    *("BatchNormalization", "LayerNormalization", "GroupNormalization", "UnitNormalization"),
    *("Add", "Subtract", "Multiply", "Average", "Maximum", "Minimum", "Concatenate", "Dot"),
    *(f"{kind}{axes}D" for kind in (*_POOLED, "Conv") for axes in (1, 2, 3)),
    *(f"{kind}{axes}D" for kind in ("UpSampling", "ZeroPadding", "Cropping") for axes in (1, 2, 3)),
    *("Bidirectional", "TimeDistributed"),
)
_NO_GROUPS: _Gone = {"groups": 1}
_SEPARATE: _Gone = {
    "groups": 1,
    "kernel_initializer": _ANY,
    "kernel_regularizer": None,
    "kernel_constraint": None,
}
_LAYERS: Mapping[str, _Gone] = {
    **{kind: {} for kind in _UNCHANGED},
    "InputLayer": {"sparse": False, "ragged": False},
    **{f"SpatialDropout{axes}D": {"noise_shape": None, "trainable": _ANY} for axes in (1, 2, 3)},
    **{f"Conv{axes}DTranspose": _NO_GROUPS for axes in (1, 2, 3)},
    **{f"{kind}Conv{axes}D": _SEPARATE for kind in ("Depthwise", "Separable") for axes in (1, 2)},
    **{kind: {"time_major": False, "implementation": _ANY} for kind in ("LSTM", "GRU", "SimpleRNN")},
}
"""What Keras 3 lacks of a layer's settings, with the values that it always has."""
_FUNCTIONS: frozenset[object] = frozenset(
    [
        *("elu", "exponential", "gelu", "linear", "relu", "selu", "sigmoid"),
        *("silu", "softmax", "softplus", "softsign", "swish", "tanh"),
    ]
)
_CHOICES: Mapping[str, frozenset[object]] = {
    "activation": _FUNCTIONS,  # not hard_sigmoid, which is steeper in Keras 2
    "recurrent_activation": _FUNCTIONS,
    "interpolation": frozenset({"bilinear", "nearest"}),
    "dtype": frozenset({"float16", "float32", "float64", "int32", "int64"}),
}
"""The values of settings that mean the same to both."""
_INNER = ("layer", "backward_layer")
_MODELS = {"Functional": "Functional", "Model": "Functional", "Sequential": "Sequential"}
"""What Keras 3 calls the kinds of models."""


def as_keras_3(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return what describes a model, as Keras 3 reads it out of an ``.h5``.

    Raises:
        Unknown: Keras 3 would not read it, or as another model; the sentence says which layer.
    """
    config = model.get("config")
    layers = config.get("layers") if isinstance(config, Mapping) else None
    kind = _MODELS.get(str(model.get("class_name")))
    if kind is None or not isinstance(config, Mapping) or not isinstance(layers, list):
        raise Unknown("its layers are not listed as Keras 3 lists them")
    found = {**config, "layers": [_layer(node) for node in layers]}
    inner = {_name(node) for node in found["layers"] if node["class_name"] == "Sequential"}
    for side in ("input_layers", "output_layers"):
        if isinstance(calls := config.get(side), list):
            is_one = bool(calls) and isinstance(calls[0], str)
            found[side] = _recounted([calls], inner)[0] if is_one else _recounted(calls, inner)
    for node in found["layers"]:
        if "inbound_nodes" in node:
            node["inbound_nodes"] = [_recounted(call, inner) for call in node["inbound_nodes"]]
    return {"class_name": kind, "config": found}


def _name(node: Mapping[str, Any]) -> object:
    return node.get("name") or node["config"].get("name")


def _recounted(calls: list[Any], inner: set[object]) -> list[Any]:
    """Return references to calls of layers, where those of a Sequential count from 1 in Keras 2.

    Raises:
        Unknown: One counts from 0.
    """
    found = []
    for one in calls:
        if isinstance(one, list) and one and isinstance(one[0], str) and one[0] in inner:
            if not isinstance(one[1], int) or one[1] < 1:
                raise Unknown(f"layer {one[0]!r} (Sequential) was called before it was built")
            one = [one[0], one[1] - 1, *one[2:]]
        found.append(one)
    return found


def _layer(node: Any) -> dict[str, Any]:
    if not isinstance(node, Mapping) or not isinstance(config := node.get("config"), Mapping):
        raise Unknown("a layer is not described")
    kind = str(node.get("class_name"))
    beside = {key: node[key] for key in ("name", "inbound_nodes") if key in node}
    if not all(map(_is_plain_call, beside.get("inbound_nodes") or ())):
        raise Unknown(f"layer {_name(node)!r} ({kind}) is called with more than its inputs")
    if kind in _MODELS:
        return {**as_keras_3(node), **beside}
    return {"class_name": kind, "config": _settings(kind, config), **beside}


def _is_plain_call(node: object) -> bool:
    """Tell whether a layer is called with layers' outputs alone, and plain settings."""
    return isinstance(node, list) and all(
        isinstance(one, list)
        and len(one) in (3, 4)
        and all(isinstance(value, (bool, type(None))) for value in (one[3] if one[3:] else {}).values())
        for one in node
    )


def _settings(kind: str, config: Mapping[str, Any]) -> dict[str, Any]:
    named = f"layer {config.get('name')!r} ({kind})"
    if kind not in _LAYERS:
        raise Unknown(f"{named} is none that Keras 3 is known to read as Keras 2 wrote it")
    gone = _LAYERS[kind]
    for key, value in config.items():
        is_other = gone.get(key, _ANY) is not _ANY and value != gone[key]
        if is_other or (key in _CHOICES and (not isinstance(value, str) or value not in _CHOICES[key])):
            raise Unknown(f"{named} has {key}={value!r:.60}, which Keras 3 lacks or takes for something else")
        if isinstance(value, Mapping) and key not in _INNER and not _is_kerass(value):
            raise Unknown(f"the {key} of {named} is not one of Keras's own")
    found = {key: value for key, value in config.items() if key not in gone}
    axis = found.get("axis")
    if kind == "BatchNormalization" and isinstance(axis, list) and len(axis) == 1:
        found["axis"] = axis[0]
    for key in _INNER:
        if isinstance(inner := found.get(key), Mapping):
            found[key] = _wrapped(named, inner)
    return found


def _is_kerass(node: Mapping[str, Any]) -> bool:
    """Tell whether an initializer and the like is of Keras."""
    return node.get("registered_name") is None and ">" not in str(node.get("class_name"))


def _wrapped(named: str, node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layer that a wrapper has, which says of which module it is."""
    if node.get("class_name") in _MODELS:
        raise Unknown(f"{named} wraps a model")
    return {"module": "keras.layers", **_layer(node), "registered_name": None}
