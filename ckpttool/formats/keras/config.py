"""What loading a Keras config could run: it names classes and functions at any depth, and may hold code.

Texts in it that are configurations, or code, are looked into. Nothing is imported or unmarshalled.

Keras resolves ``module`` and ``class_name``; where Keras 2 finds nothing there, ``registered_name`` in the
same module. A function has its name in ``config``. A name is harmless if an exact list has it.

Source: Keras ``src/saving/serialization_lib.py``, ``src/layers/core/lambda_layer.py``,
``src/legacy/saving/serialization.py``; tf_keras the same.
"""

from __future__ import annotations

import binascii
import builtins
from collections.abc import Iterator, Mapping
from typing import Any

from ckpttool.core.errors import DamagedCheckpoint, LimitExceeded
from ckpttool.core.report import Finding, error, warning
from ckpttool.formats.keras.names import (
    ATTRIBUTES,
    BY_NAME,
    CLASSES,
    DATA,
    FILES,
    FUNCTION_PARTS,
    FUNCTIONS,
    LOOKED_UP,
    LOOKED_UP_ENDS,
    LOOKUPS,
    OPERATIONS,
    OPS,
    PARTS,
    RAGGED_MAKERS,
    RUNNING,
    TENSORFLOW,
    TORCH_OPTIMIZERS,
    TYPESPECS,
    VOCABULARIES,
    part_of_keras,
)
from ckpttool.io.jsontext import Doubled, parse_json
from ckpttool.io.trust import Trust, trust

ASSETS = "assets/"
_VOCABULARY = "/vocabulary.txt"
MAX_CONFIG = 100_000_000
"""The longest config in bytes."""
MAX_ALIKE = 100
"""The most findings of one code that are told of a config."""
_MAX_TEXTS = 8
"""How deep texts that are configurations may stand in each other."""
_CODE = ("4w", "Yw")
"""How code begins that Python marshalled, in Base64: the type, with and without a flag."""
_CODE_HEAD = 24
Node = Mapping[str, Any]
_ELSEWHERE = {
    "utils": frozenset({"Cross", "Feature", "FeatureSpace"}),
    "applications": frozenset({"CustomScaleLayer", "LayerScale", "StochasticDepth"}),
}
"""Classes in the parts of Keras that hold other things, too."""
_REMOTE = ("http://", "https://", "ftp://", "gs://", "s3://", "hdfs://", "file://")
_CALLS = {
    "TFOpLambda": ("function", TENSORFLOW),
    "SlicingOpLambda": ("function", TENSORFLOW),
    "ClassMethod": ("method_name", RAGGED_MAKERS),
    "InstanceMethod": ("attr_name", ATTRIBUTES),
    "InstanceProperty": ("attr_name", ATTRIBUTES),
    "TensorFlowOpLayer": ("node_def", frozenset[str]()),
}
"""Layers of Keras 2 that call something by its name: where they have it, and what it may be."""


def read_config(path: str, text: bytes, what: str = "config") -> Any:
    """Return the object that a config in JSON holds."""
    config = parse_json(path, text, what, constants=True)
    if isinstance(config, Doubled):
        raise DamagedCheckpoint(path, f"{config.key!r} stands twice", where=what, code="duplicate-key")
    if not isinstance(config, dict):
        found = f"the {what} has type {type(config).__name__}"
        raise DamagedCheckpoint(path, found, expected="an object", code=f"{what}-not-object")
    return config


def judge(config: object, where: str) -> tuple[Finding, ...]:
    """Return an error for all that is known to be dangerous, a warning for what nobody knows."""
    by_code: dict[str, dict[Finding, None]] = {}
    for finding in _findings_in(config, where):
        alike = by_code.setdefault(finding.code, {})
        if len(alike) < MAX_ALIKE:
            alike[finding] = None
    return tuple(finding for alike in by_code.values() for finding in alike)


def _findings_in(config: object, where: str) -> Iterator[Finding]:
    """Yield what is to be said of every object and text at any depth."""
    pending = [(where, config, 0)]
    while pending:
        place, node, texts = pending.pop()
        if isinstance(node, dict):
            yield from _judge_object(node, place)
            pending.extend((f"{place}.{key:.40}", value, texts) for key, value in reversed(node.items()))
        elif isinstance(node, list):
            pending.extend((f"{place}[{at}]", node[at], texts) for at in reversed(range(len(node))))
        elif isinstance(node, str) and _is_code(node):
            yield error("keras-lambda", "Python code, marshalled", place)
        elif isinstance(node, str) and node.lstrip()[:1] in ("{", "["):
            try:
                pending.append((f"{place}(text)", _tree_in_text(node, texts), texts + 1))
            except LimitExceeded as failure:
                yield warning("not-scanned", f"a text in it was not looked into: {failure.reason}", place)


def _tree_in_text(text: str, texts: int) -> object:
    """Return the JSON that a text is, None if it is just a text."""
    try:
        tree = parse_json("", text.encode("utf-8", "replace"), "text", constants=True, surrogates=True)
    except LimitExceeded:
        raise
    except DamagedCheckpoint:
        return None
    if texts >= _MAX_TEXTS and isinstance(tree, dict | list):
        raise LimitExceeded("", f"texts in texts, over {_MAX_TEXTS} deep", expected="less")
    return tree


def _judge_object(node: Mapping[str, Any], place: str) -> Iterator[Finding]:
    """Yield what is to be said of an object, and of the names in it that a loader resolves."""
    if isinstance(node, Doubled):
        yield error("duplicate-key", f"{node.key!r} stands twice; readers take different ones", place)
    is_lambda = "class_name" not in node and isinstance(node.get("code"), str) and "closure" in node
    if is_lambda or "lambda" in (node.get("function_type"), node.get("output_shape_type")):
        yield error("keras-lambda", "loading it would run code that is stored in the config", place)
    texts = {key: node.get(key) for key in ("class_name", "module", "registered_name")}
    strange = [key for key, value in texts.items() if not isinstance(value, str | None)]
    for key in strange:
        yield error("keras-class", f"a {key} of type {type(texts[key]).__name__}", place)
    if not strange and texts["class_name"] is not None:
        yield from _judge_class(node["class_name"], node, place)
    for key, value in node.items():
        if key in LOOKED_UP or key.endswith(LOOKED_UP_ENDS):
            yield from _judge_lookups(value, f"{place}.{key:.40}")


def _is_code(text: str) -> bool:
    """Return whether a text is Base64 of a code object: small numbers of arguments stand at its head."""
    head = "".join(text[: 2 * _CODE_HEAD].split())[:_CODE_HEAD]
    if not head.startswith(_CODE) or len(head) < _CODE_HEAD:
        return False
    try:
        data = binascii.a2b_base64(head)
    except ValueError:
        return False
    return all(data[at : at + 2] == b"\0\0" for at in (3, 7, 11))


# Names that a loader resolves -----------------------------------------------------------------------
def _gadget(name: str, place: str, why: str = "which is no part of a model") -> Finding:
    return error("keras-gadget", f"it names {name:.100}, {why}", place)


def _unknown(name: str, place: str) -> Finding:
    return warning("unknown-class", f"it names {name!r:.100}, which is not known to be harmless", place)


def _judge_class(name: str, node: Node, place: str) -> Iterator[Finding]:
    config, module, registered = node.get("config"), node.get("module"), node.get("registered_name")
    settings = config if isinstance(config, dict) else {}
    last = {full.rpartition(">")[2].rpartition(".")[2] for full in (name, registered) if full}
    if name == "__lambda__":
        yield error("keras-lambda", "loading it would run code that is stored in the config", place)
    elif "Lambda" in last:
        yield error("keras-lambda", "a Lambda layer, which runs a function that the config gives", place)
    elif running := last & RUNNING.keys():
        yield from (error("keras-unsafe-layer", f"{kind}, which {RUNNING[kind]}", place) for kind in running)
    elif name in _CALLS:
        yield from _judge_call(name, settings, place)
        yield from _judge_module(module, name, registered, place, is_listed=True)
    elif name == "function":
        yield from _judge_function(config, module, registered, place)
    elif name in ("__typespec__", "TypeSpec"):
        yield from _judge_typespec(node, place)
    else:
        yield from _judge_module(module, name, registered, place)
        for key in sorted(FILES | ({"vocabulary"} if last & VOCABULARIES else set())):
            if isinstance(file := settings.get(key), str):
                verb = "fetch" if file.startswith(_REMOTE) else "read"
                yield error("keras-reads-file", f"loading it would {verb} {file!r:.100}", place)


# Classes --------------------------------------------------------------------------------------------


def _judge_module(
    module: str | None, name: str, registered: str | None, place: str, *, is_listed: bool = False
) -> Iterator[Finding]:
    part = None if module is None else part_of_keras(module)
    other = registered if registered != name else None
    if module is None:
        yield from _judge_class_without_module(name, other, place, is_listed)
    elif part is not None:
        if other is not None and other not in CLASSES:
            yield _unknown(other, place) if ">" in other else _gadget(f"{module}.{other}", place)
        if name in CLASSES:
            is_elsewhere = name in _ELSEWHERE.get(part, ()) or f"{module}.{name}" in TORCH_OPTIMIZERS
            is_of_keras = part in PARTS or part == "" or is_elsewhere
        else:
            is_of_keras = part == "ops" and name in OPERATIONS
        if not is_listed and not is_of_keras:
            is_class = part in PARTS and name.isidentifier() and name[:1].isupper()
            yield _unknown(f"{module}.{name}", place) if is_class else _gadget(f"{module}.{name}", place)
    elif module != "builtins" or name not in DATA or other is not None:
        yield _judge_import(module, name, place)
        if other is not None and ">" not in other:
            yield _judge_import(module, other, place)


def _judge_class_without_module(
    name: str, other: str | None, place: str, is_listed: bool
) -> Iterator[Finding]:
    """Judge a class without a module: it is looked up among those of Keras, and those of the user."""
    for found_by_name in (name, other):
        if found_by_name in LOOKUPS:
            yield _gadget(found_by_name, place)
    known = is_listed or name in CLASSES | OPERATIONS | DATA | FUNCTIONS
    if not known and name not in LOOKUPS:
        yield _unknown(other or name, place)
    elif other is not None and other not in CLASSES | LOOKUPS:
        yield _unknown(other, place)


def _judge_import(module: str, name: str, place: str) -> Finding:
    """Return what is to be said of a name in a module that isn't Keras's, and that is imported."""
    parts = [*module.split("."), *name.split(".")]
    is_dunder = any(part.startswith("__") and part != "__main__" for part in parts)
    is_python = module == "builtins" and hasattr(builtins, name)
    is_known = module != "builtins" and trust(module, name) is not Trust.UNKNOWN
    if "." in name or is_dunder or is_python or is_known:
        return error("keras-gadget", f"loading it would import {f'{module}.{name}':.100}", place)
    return _unknown(f"{module}.{name}", place)


# Functions ------------------------------------------------------------------------------------------


def _judge_function(
    function: object, module: str | None, registered: str | None, place: str
) -> Iterator[Finding]:
    if not isinstance(function, str):
        yield error("keras-class", f"a function whose name has type {type(function).__name__}", place)
        return
    names = [function] if registered in (None, "function", function) else [function, registered]
    part = None if module is None else part_of_keras(module)
    for name in names:
        is_harmless = name in FUNCTIONS | CLASSES
        if part is not None:
            if not (is_harmless and part in FUNCTION_PARTS) and not (part == "ops" and name in OPS):
                yield _gadget(f"{module}.{name}", place)
        elif module not in (None, "builtins"):
            yield _judge_import(module, name, place)
        elif "." in name or name in LOOKUPS or (hasattr(builtins, name) and not is_harmless):
            yield _gadget(name, place)
        elif not is_harmless:
            yield _unknown(f"the function {name}", place)


def _judge_lookups(value: object, place: str) -> Iterator[Finding]:
    """Judge texts that are names of activations, losses …, in lists and by outputs, too."""
    pending = [value]
    while pending:
        node = pending.pop()
        if isinstance(node, list):
            pending += node
        elif isinstance(node, dict) and "class_name" not in node:
            pending += node.values()
        elif isinstance(node, str) and node in LOOKUPS:
            yield _gadget(node, place)
        elif isinstance(node, str) and node not in BY_NAME:
            yield _unknown(node, place)


# TensorFlow -----------------------------------------------------------------------------------------


def _judge_call(name: str, config: Node, place: str) -> Iterator[Finding]:
    key, harmless = _CALLS[name]
    called = config.get(key)
    if name == "TensorFlowOpLayer":
        from ckpttool.formats.savedmodel.ops import known_ops, severity_of

        op = called.get("op") if isinstance(called, dict) else None
        if not isinstance(op, str) or severity_of(op) is not None:
            yield error("keras-gadget", f"a layer that runs TensorFlow's op {op!r:.100}", place)
        elif op not in known_ops():
            yield _unknown(f"the op {op}", place)
    elif not isinstance(called, str):
        yield error("keras-gadget", f"{name} of no function", place)
    elif called not in harmless or (name == "ClassMethod" and config.get("cls_symbol") != "RaggedTensor"):
        symbol = f"{config['cls_symbol']}.{called}" if "cls_symbol" in config else called
        yield error("keras-gadget", f"loading it would call tf.{symbol:.100}", place)


def _judge_typespec(node: Node, place: str) -> Iterator[Finding]:
    """Judge a type specification: Keras 2 imports its module, and calls what it finds there."""
    if node["class_name"] == "TypeSpec":
        if node.get("type_spec") not in TYPESPECS:
            yield _unknown(f"the type {node.get('type_spec')}", place)
        return
    module, name, registered = (node.get(key) for key in ("module", "spec_name", "registered_name"))
    if f"{module} {name}" in TYPESPECS and registered in (None, name):
        return
    if isinstance(module, str) and isinstance(name, str) and part_of_keras(module) is None:
        for imported in {name, registered or name}:
            yield _judge_import(module, imported, place)
    else:
        yield _gadget(f"{module}.{name}", place)


def is_own_asset(name: str) -> bool:
    """Return whether a record is a file beside a model that Keras's own layers write and read."""
    return name.startswith(ASSETS) and name.endswith(_VOCABULARY)
