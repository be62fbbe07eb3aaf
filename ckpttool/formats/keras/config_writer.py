"""Converts a model's configuration between ``.keras`` and ``.h5``, and from Keras 2 to Keras 3.

``.keras`` has one text, in which each object has its module. ``.h5`` has the model in ``model_config``, and
the losses, metrics and the optimizer in ``training_config``, in which only some objects have it. The text of
a file of the same kind is written again byte for byte.

From Keras 2 only layers are translated that both versions have, with settings that mean the same in both, and
with weights in one order; anything else is refused. Losses, metrics and the optimizer are left out, so that
the model has to be compiled again.

Source: Keras ``src/saving/serialization_lib.py``, ``src/legacy/saving/saving_utils.py``, ``src/layers``,
``src/models/functional.py``; tf_keras ``src/layers``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ckpttool.containers.hdf5_writer import attribute_fault
from ckpttool.formats.keras.layer_tree import KerasRefusal, Layer, layer_of
from ckpttool.formats.keras.layers import ANY, LAYERS, UNKNOWN
from ckpttool.formats.keras.native import CONFIG, METADATA, TRAINING_CONFIG, object_of

_MODELS = {"Functional": "keras.src.models.functional", "Sequential": "keras", "Model": "keras"}
_MODULES = {"loss": "keras.losses", "metrics": "keras.metrics", "weighted_metrics": "keras.metrics"}
_OF_KERAS_3 = b'{"keras_version": "3.0.0", "backend": "tensorflow"}'
"""Metadata of a configuration that is translated from Keras 2: the first release that reads it."""
_COMPILE, _OPTIMIZER = "compile_config", "optimizer_config"
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
"""Values of settings that mean the same in Keras 2 and 3."""
_INNER = ("layer", "backward_layer")
"""Settings of wrappers that hold a layer."""
_KERAS_3_MODELS = {"Functional": "Functional", "Model": "Functional", "Sequential": "Sequential"}
"""Classes of models in Keras 3, by those in Keras 2."""


def has_model(native: Mapping[str, bytes]) -> bool:
    """Return whether the architecture of a model is known."""
    return "class_name" in object_of(native.get(CONFIG, b""))


def model_of(native: Mapping[str, bytes]) -> Layer | None:
    """Return the model in the config, or None without one."""
    return layer_of(object_of(native.get(CONFIG, b"")))


def is_keras2(native: Mapping[str, bytes]) -> bool:
    """Return whether Keras 1 or 2 wrote the source."""
    version = object_of(native.get(METADATA, b"")).get("keras_version")
    return isinstance(version, str) and version.startswith(("1.", "2."))


# As .keras has it -----------------------------------------------------------------------------------


def archive_config(native: Mapping[str, bytes]) -> bytes:
    """Return ``config.json``; ``has_model`` is true."""
    text = native[CONFIG]
    model = object_of(text)
    if _is_of_archive(model):
        return text
    if is_from_2 := is_keras2(native):
        model = as_keras_3(model)
    name = model["class_name"]
    module = _MODELS.get(name)
    config: dict[str, Any] = {"module": module, "class_name": name, "config": model.get("config")}
    config["registered_name"] = name if module != "keras" else None
    training = object_of(native.get(TRAINING_CONFIG, b""))
    if training and not is_from_2:
        compiled = {"optimizer": _add_modules(training.get(_OPTIMIZER), "keras.optimizers")}
        for key, value in training.items():
            if key != _OPTIMIZER:
                compiled[key] = _add_modules(value, _MODULES.get(key))
        config[_COMPILE] = compiled
    return json.dumps(config).encode()


def archive_metadata(native: Mapping[str, bytes]) -> bytes:
    """Return ``metadata.json``."""
    text = native.get(METADATA)
    if is_keras2(native) and not _is_of_archive(object_of(native[CONFIG])):
        return _OF_KERAS_3
    return text if text is not None else b"{}"


def _is_of_archive(model: Mapping[str, Any]) -> bool:
    return "module" in model or "registered_name" in model


def _add_modules(value: Any, module: str | None) -> Any:
    """Return a configuration of objects with the module of each class."""
    # Keras registers a user's class as ``package>Name``, and looks it up without a module.
    if module is None:
        return value
    if isinstance(value, list):
        return [_add_modules(item, module) for item in value]
    if not isinstance(value, dict):
        return value
    if isinstance(value.get("class_name"), str) and "module" not in value:
        if ">" in value["class_name"]:
            return {**value, "module": None, "registered_name": value["class_name"]}
        return {**value, "module": module, "registered_name": None}
    if "class_name" in value:
        return value
    return {key: _add_modules(item, module) for key, item in value.items()}


# As .h5 has it --------------------------------------------------------------------------------------


def attribute_configs(native: Mapping[str, bytes]) -> dict[str, str]:
    """Return the attributes of an ``.h5`` that describe the model; ``has_model`` is true."""
    text = native[CONFIG]
    model = object_of(text)
    attributes = {"model_config": text.decode("utf-8", "surrogateescape")}
    training = native.get(TRAINING_CONFIG)
    if training is not None and object_of(training):
        attributes["training_config"] = training.decode("utf-8", "surrogateescape")
    if _is_of_archive(model):
        # In ``.keras`` a class has a module, and a registered name if it is a user's. ``.h5`` has one name
        # for either, and the optimizer next to the other arguments of ``compile``, under a key of its own.
        kind = model.get("registered_name") or model["class_name"]
        attributes["model_config"] = json.dumps({"class_name": kind, "config": model.get("config")})
        compiled = model.get(_COMPILE)
        optimizer = compiled.get("optimizer") if isinstance(compiled, dict) else None
        if training is None and isinstance(compiled, dict) and isinstance(optimizer, dict):
            kind = optimizer.get("registered_name") or optimizer.get("class_name")
            training_config = {key: value for key, value in compiled.items() if key != "optimizer"}
            training_config[_OPTIMIZER] = {"class_name": kind, "config": optimizer.get("config")}
            attributes["training_config"] = json.dumps(training_config)
    return attributes


def attribute_metadata(native: Mapping[str, bytes]) -> dict[str, str]:
    """Return the attributes of an ``.h5`` with the version of Keras and its backend."""
    metadata = object_of(native.get(METADATA, b""))
    texts = {key: metadata[key] for key in ("keras_version", "backend") if isinstance(metadata.get(key), str)}
    return {key: value for key, value in texts.items() if attribute_fault(key, value) is None}


# Keras 2 as Keras 3 reads it ------------------------------------------------------------------------


def as_keras_3(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return a Keras 2 model's configuration as Keras 3 reads it from an ``.h5``.

    Raises:
        KerasRefusal: Keras 3 would misread it.
    """
    config = model.get("config")
    layers = config.get("layers") if isinstance(config, Mapping) else None
    kind = _KERAS_3_MODELS.get(str(model.get("class_name")))
    if kind is None or not isinstance(config, Mapping) or not isinstance(layers, list):
        raise KerasRefusal("its layers are not listed as Keras 3 lists them")
    translated = {**config, "layers": [_keras_3_layer(node) for node in layers]}
    chains = [node for node in translated["layers"] if node["class_name"] == "Sequential"]
    inner = {name for node in chains if isinstance(name := _layer_name(node), str)}
    for side in ("input_layers", "output_layers"):
        if isinstance(calls := config.get(side), list):
            is_one = bool(calls) and isinstance(calls[0], str)
            translated[side] = _renumber([calls], inner)[0] if is_one else _renumber(calls, inner)
    for node in translated["layers"]:
        if "inbound_nodes" in node:
            node["inbound_nodes"] = [_renumber(call, inner) for call in node["inbound_nodes"]]
    return {"class_name": kind, "config": translated}


def _keras_3_layer(node: Any) -> dict[str, Any]:
    if not isinstance(node, Mapping) or not isinstance(config := node.get("config"), Mapping):
        raise KerasRefusal("a layer is not described")
    kind = str(node.get("class_name"))
    wiring = {key: node[key] for key in ("name", "inbound_nodes") if key in node}
    # The fourth element of a reference has the arguments of the call besides its tensors. Only flags and None
    # are known to mean the same to Keras 3; anything else is refused.
    for call in wiring.get("inbound_nodes") or ():
        is_plain = isinstance(call, list) and all(
            isinstance(one, list)
            and len(one) in (3, 4)
            and all(isinstance(value, (bool, type(None))) for value in (one[3] if one[3:] else {}).values())
            for one in call
        )
        if not is_plain:
            raise KerasRefusal(f"layer {_layer_name(node)!r} ({kind}) is called with further arguments")
    if kind in _KERAS_3_MODELS:
        return {**as_keras_3(node), **wiring}
    return {"class_name": kind, "config": _keras_3_settings(kind, config), **wiring}


def _keras_3_settings(kind: str, config: Mapping[str, Any]) -> dict[str, Any]:
    # Settings that Keras 3 lacks are left out if they have the value that it implies. A setting with a value
    # that means something else in Keras 3 is refused, and so is an initializer that is not Keras's own.
    layer = f"layer {config.get('name')!r} ({kind})"
    removed = LAYERS.get(kind, UNKNOWN).removed_settings
    if removed is None:
        raise KerasRefusal(f"{layer} is not known to load in Keras 3 as Keras 2 wrote it")
    for key, value in config.items():
        is_other = removed.get(key, ANY) is not ANY and value != removed[key]
        if is_other or (key in _CHOICES and (not isinstance(value, str) or value not in _CHOICES[key])):
            raise KerasRefusal(
                f"{layer} has {key}={value!r:.60}, which Keras 3 lacks or interprets differently"
            )
        is_object = isinstance(value, Mapping) and key not in _INNER  # an initializer and the like
        if is_object and (value.get("registered_name") is not None or ">" in str(value.get("class_name"))):
            raise KerasRefusal(f"the {key} of {layer} is not one of Keras's own")
    settings = {key: value for key, value in config.items() if key not in removed}
    axis = settings.get("axis")
    if kind == "BatchNormalization" and isinstance(axis, list) and len(axis) == 1:
        settings["axis"] = axis[0]
    for key in _INNER:
        if isinstance(inner := settings.get(key), Mapping):
            if str(inner.get("class_name")) in _KERAS_3_MODELS:
                raise KerasRefusal(f"{layer} wraps a model")
            settings[key] = {"module": "keras.layers", **_keras_3_layer(inner), "registered_name": None}
    return settings


def _renumber(calls: list[Any], inner: set[str]) -> list[Any]:
    """Return references to calls of layers, renumbered for Keras 3."""
    # ``["layer", call, output]``: Keras 2 counts the calls of a Sequential from 1, as it calls it once itself
    # when it builds it; Keras 3 counts from 0.
    renumbered = []
    for call in calls:
        if isinstance(call, list) and call and isinstance(call[0], str) and call[0] in inner:
            if not isinstance(call[1], int) or call[1] < 1:
                raise KerasRefusal(f"layer {call[0]!r} (Sequential) was called before it was built")
            call = [call[0], call[1] - 1, *call[2:]]
        renumbered.append(call)
    return renumbered


def _layer_name(node: Mapping[str, Any]) -> object:
    return node.get("name") or node["config"].get("name")
