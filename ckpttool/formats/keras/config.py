"""What loading a Keras config could run: it names classes and functions at any depth, and may hold code.

Nothing is imported, and no code is unmarshalled.

Source: Keras ``src/saving/serialization_lib.py``, ``src/layers/core/lambda_layer.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckpttool.errors import DamagedCheckpoint
from ckpttool.formats.keras.names import (
    CLASSES,
    DATA,
    FUNCTIONS,
    HARMLESS_CALLS,
    HARMLESS_FUNCTIONS,
    MODULES,
    OPERATIONS,
    RUNNING,
    TENSORFLOW_CALLS,
    VOCABULARIES,
)
from ckpttool.report import Finding, error, warning
from ckpttool.wire.jsontext import Doubled, parse_json
from ckpttool.wire.trust import Trust, trust

_ROOTS = ("keras", "tf_keras", "tensorflow.keras", "tensorflow.python.keras")
_PLAIN_TEXT = ("function", "type")
_REMOTE = ("http://", "https://", "ftp://", "gs://", "s3://", "hdfs://", "file://")

MAX_ALIKE = 100
"""The most findings of one code that are told of a config."""


def read_config(path: str, text: bytes, what: str = "config") -> Any:
    """Return the object that a config in JSON holds.

    Raises:
        DamagedCheckpoint: It is no JSON, or no object.
        LimitExceeded: It is too large, or nested too deep.
    """
    told = parse_json(path, text, what, constants=True)
    if isinstance(told, Doubled):
        raise DamagedCheckpoint(path, f"{told.key!r} stands twice", where=what, code="duplicate-key")
    if not isinstance(told, dict):
        found = f"the {what} has type {type(told).__name__}"
        raise DamagedCheckpoint(path, found, expected="an object", code=f"{what}-not-object")
    return told


def judge(config: object, where: str) -> tuple[Finding, ...]:
    """Return an error for all that is known to be dangerous, a warning for what nobody knows."""
    found: dict[str, dict[Finding, None]] = {}
    for place, node in _objects(config, where):
        for finding in _judge_node(node, place):
            alike = found.setdefault(finding.code, {})
            if len(alike) < MAX_ALIKE:
                alike[finding] = None
    return tuple(finding for alike in found.values() for finding in alike)


def _objects(config: object, where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield every object at any depth, with the path to it."""
    pending = [(where, config)]
    while pending:
        place, node = pending.pop()
        if isinstance(node, dict):
            yield place, node
            pending.extend((f"{place}.{key:.40}", value) for key, value in reversed(node.items()))
        elif isinstance(node, list):
            pending.extend((f"{place}[{at}]", node[at]) for at in reversed(range(len(node))))


def _judge_node(node: Mapping[str, Any], place: str) -> Iterator[Finding]:
    if isinstance(node, Doubled):
        yield error("duplicate-key", f"{node.key!r} stands twice; readers take different ones", place)
    name = node.get("class_name")
    if isinstance(name, str):
        yield from _judge_class(name, node, place)
    elif name is not None:
        yield error("keras-class", f"a class_name of type {type(name).__name__}", place)
    if name is None and isinstance(node.get("code"), str) and "closure" in node:
        yield error("keras-lambda", "loading it would run code that is stored in the config", place)
    if node.get("function_type") == "lambda" or node.get("output_shape_type") == "lambda":
        yield error("keras-lambda", "loading it would run code that is stored in the config", place)


def _judge_class(name: str, node: Mapping[str, Any], place: str) -> Iterator[Finding]:
    config = node.get("config")
    module = node.get("module")
    if name == "__lambda__":
        yield error("keras-lambda", "loading it would run code that is stored in the config", place)
    elif name.rpartition(">")[2].rpartition(".")[2] == "Lambda":
        yield error("keras-lambda", "a Lambda layer, which runs a function that the config gives", place)
    elif name in RUNNING:
        yield error("keras-unsafe-layer", f"{name}, which {RUNNING[name]}", place)
    elif name in TENSORFLOW_CALLS and (module is None or part_of_keras(str(module)) is not None):
        yield from _judge_call(name, config, place)
    elif isinstance(module, str):
        yield from _judge_module(module, name, node, place)
    elif module is not None:
        yield error("keras-class", f"a module of type {type(module).__name__}", place)
    elif name not in CLASSES | OPERATIONS | DATA and not _is_old_optimizer(name, place):
        yield _unknown(str(node.get("registered_name") or name), place)
    registered = node.get("registered_name")
    if isinstance(registered, str) and ">" in registered and isinstance(module, str):
        yield _unknown(registered, place)
    if name.rpartition(">")[2] in VOCABULARIES and isinstance(config, dict):
        yield from _judge_vocabulary(config, place)


def _is_old_optimizer(name: str, place: str) -> bool:
    """Tell whether it is one of Keras 2's own optimizers, which it registers like a user's."""
    return name.removeprefix("Custom>") in CLASSES and place.endswith(("optimizer_config", "optimizer"))


def _unknown(name: str, place: str) -> Finding:
    return warning("unknown-class", f"it names {name!r:.100}, which is not known to be harmless", place)


def _judge_module(module: str, name: str, node: Mapping[str, Any], place: str) -> Iterator[Finding]:
    part = part_of_keras(module)
    if part is not None:
        if part not in MODULES and not (part == "" and name in CLASSES):
            yield error("keras-gadget", f"it names {module}.{name}, which is no part of a model", place)
        elif name not in CLASSES:
            is_operation = name in OPERATIONS and part == "ops"
            if not is_operation and not _is_function(name, node):
                yield _unknown(f"{module}.{name}", place)
        return
    if module == "builtins" and name in _PLAIN_TEXT:
        told = node.get("config")
        if not isinstance(told, str) or (name == "function" and told not in FUNCTIONS):
            yield _unknown(f"the function {told!r:.60}", place)
        return
    if name in DATA and module == "builtins":
        return
    if trust(module, name) is Trust.UNKNOWN:
        yield _unknown(f"{module}.{name}", place)
    else:
        yield error("keras-gadget", f"loading it would import {module}.{name}", place)


def _is_function(name: str, node: Mapping[str, Any]) -> bool:
    """Tell whether it is a function of Keras by its plain name: an activation, a loss."""
    told = node.get("config")
    return name == "function" and isinstance(told, str) and told.isidentifier()


def part_of_keras(module: str) -> str | None:
    """Return the part of Keras that a module belongs to, "" for the top, or None where it is none."""
    for root in _ROOTS:
        if module == root:
            return ""
        if module.startswith(f"{root}."):
            parts = [
                part
                for part in module[len(root) + 1 :].split(".")
                if part not in ("src", "api", "_v2", "keras")
            ]
            return parts[0] if parts else ""
    return None


def _judge_call(name: str, config: object, place: str) -> Iterator[Finding]:
    function = config.get("function") if isinstance(config, dict) else None
    if not isinstance(function, str):
        yield error("keras-gadget", f"{name} of no function", place)
    elif not function.startswith(HARMLESS_CALLS) and function not in HARMLESS_FUNCTIONS:
        yield error("keras-gadget", f"loading it would call tf.{function:.100}", place)


def _judge_vocabulary(config: Mapping[str, Any], place: str) -> Iterator[Finding]:
    vocabulary = config.get("vocabulary")
    if isinstance(vocabulary, str):
        is_remote = vocabulary.startswith(_REMOTE)
        told = "fetch" if is_remote else "read"
        yield error("keras-reads-file", f"loading it would {told} {vocabulary!r:.100}", place)
