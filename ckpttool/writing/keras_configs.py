"""A model's configuration as the other of Keras's two kinds of files has it.

``.keras`` has one text, in which each object says its module. ``.h5`` has the model in ``model_config``, and
the losses, metrics and the optimizer in ``training_config``, in which only some do. What a file of the same
kind had goes back byte for byte.

Source: Keras ``src/saving/serialization_lib.py``, ``src/legacy/saving/saving_utils.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ckpttool.formats.keras.native import CONFIG, METADATA, TRAINING_CONFIG, object_of
from ckpttool.wire.hdf5_writer import attribute_fault
from ckpttool.writing.keras2_config import as_keras_3
from ckpttool.writing.keras_places import is_keras2

_MODELS = {"Functional": "keras.src.models.functional", "Sequential": "keras", "Model": "keras"}
_MODULES = {"loss": "keras.losses", "metrics": "keras.metrics", "weighted_metrics": "keras.metrics"}
_OF_KERAS_3 = b'{"keras_version": "3.0.0", "backend": "tensorflow"}'
"""What a configuration is made for that Keras 2 wrote: the first that reads it."""
_COMPILE, _OPTIMIZER = "compile_config", "optimizer_config"


def has_model(native: Mapping[str, bytes]) -> bool:
    """Tell whether the architecture of a model is known."""
    return "class_name" in object_of(native.get(CONFIG, b""))


def archive_config(native: Mapping[str, bytes]) -> bytes:
    """Return ``config.json``; ``has_model`` is true."""
    text = native[CONFIG]
    told = object_of(text)
    if _is_of_archive(told):
        return text
    if is_from_2 := is_keras2(native):
        told = as_keras_3(told)
    name = told["class_name"]
    module = _MODELS.get(name)
    config: dict[str, Any] = {"module": module, "class_name": name, "config": told.get("config")}
    config["registered_name"] = name if module != "keras" else None
    training = object_of(native.get(TRAINING_CONFIG, b""))
    if training and not is_from_2:
        config[_COMPILE] = _compile_config(training)
    return json.dumps(config).encode()


def archive_metadata(native: Mapping[str, bytes]) -> bytes:
    """Return ``metadata.json``."""
    text = native.get(METADATA)
    if is_keras2(native) and not _is_of_archive(object_of(native[CONFIG])):
        return _OF_KERAS_3
    return text if text is not None else b"{}"


def attribute_configs(native: Mapping[str, bytes]) -> dict[str, str]:
    """Return the attributes of an ``.h5`` that describe the model; ``has_model`` is true."""
    text = native[CONFIG]
    told = object_of(text)
    found = {"model_config": text.decode("utf-8", "surrogateescape")}
    training = native.get(TRAINING_CONFIG)
    if training is not None and object_of(training):
        found["training_config"] = training.decode("utf-8", "surrogateescape")
    if _is_of_archive(told):
        model = {
            "class_name": told.get("registered_name") or told["class_name"],
            "config": told.get("config"),
        }
        found["model_config"] = json.dumps(model)
        compiled = told.get(_COMPILE)
        if training is None and isinstance(compiled, dict) and isinstance(compiled.get("optimizer"), dict):
            found["training_config"] = json.dumps(_training_config(compiled))
    return found


def attribute_metadata(native: Mapping[str, bytes]) -> dict[str, str]:
    """Return the attributes of an ``.h5`` that say what wrote the model."""
    told = object_of(native.get(METADATA, b""))
    known = {key: told[key] for key in ("keras_version", "backend") if isinstance(told.get(key), str)}
    return {key: value for key, value in known.items() if attribute_fault(key, value) is None}


def _is_of_archive(told: Mapping[str, Any]) -> bool:
    return "module" in told or "registered_name" in told


def _compile_config(training: Mapping[str, Any]) -> dict[str, Any]:
    told = {
        key: _with_module(value, _MODULES.get(key)) for key, value in training.items() if key != _OPTIMIZER
    }
    optimizer = training.get(_OPTIMIZER)
    return {"optimizer": _with_module(optimizer, "keras.optimizers"), **told}


def _with_module(value: Any, module: str | None) -> Any:
    """Return what describes objects by their classes, with the module that these are in."""
    if module is None:
        return value
    if isinstance(value, list):
        return [_with_module(one, module) for one in value]
    if not isinstance(value, dict):
        return value
    if isinstance(value.get("class_name"), str) and "module" not in value:
        is_own = ">" not in value["class_name"]
        found = {
            "module": module if is_own else None,
            "registered_name": None if is_own else value["class_name"],
        }
        return {**value, **found}
    if "class_name" in value:
        return value
    return {key: _with_module(one, module) for key, one in value.items()}


def _training_config(compiled: Mapping[str, Any]) -> dict[str, Any]:
    optimizer = compiled.get("optimizer")
    told = {key: value for key, value in compiled.items() if key != "optimizer"}
    if isinstance(optimizer, dict):
        kind = optimizer.get("registered_name") or optimizer.get("class_name")
        optimizer = {"class_name": kind, "config": optimizer.get("config")}
    return {**told, _OPTIMIZER: optimizer}
