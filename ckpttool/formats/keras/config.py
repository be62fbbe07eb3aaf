"""Findings for a Keras configuration: classes, functions and code at any depth, and unknown arguments.

Code is recognised by the field that a loader decodes, never by how it looks: the decoders are lenient. Texts
that are configurations are parsed. Nothing is imported or unmarshalled.

Keras resolves ``class_name`` in ``module``; if Keras 2 finds nothing, ``registered_name`` in the same module.
A function has its name in ``config``. A name is harmless if an exact list has it.

A configuration in HDF5 has no checksum. Its keys are names of arguments, and Keras refuses to build a model
with an unknown one, so unknown keys show damage. Only Keras's own classes are checked; a user's class may
take any argument.

Source: Keras ``src/saving/serialization_lib.py``, ``src/layers/layer.py``,
``src/layers/core/lambda_layer.py``, ``src/legacy/saving/serialization.py``; tf_keras the same.
"""

from __future__ import annotations

import builtins
import codecs
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

from ckpttool.containers.jsontext import DuplicateKeyObject, parse_json
from ckpttool.containers.pickle.pickle_detection import is_pickle
from ckpttool.containers.pickle.pickle_nodes import Trust, trust
from ckpttool.core.errors import DamagedCheckpoint, LimitExceeded
from ckpttool.core.readable import Readable
from ckpttool.core.report import Finding, error, not_scanned, warning
from ckpttool.formats.keras.names import (
    ARGUMENTS,
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
    PATTERNS,
    RAGGED_MAKERS,
    RUNNING,
    SIZES,
    TENSORFLOW,
    TORCH_OPTIMIZERS,
    TYPESPECS,
    VOCABULARIES,
    part_of_keras,
)

_FREE_VALUES = 1 << 20
"""Minimum limit for the size of one object, in values."""
_LITERAL = re.compile(r"[^\[\](){}*+?|]*(?:\.\*[^\[\](){}*+?|]*){0,2}")
"""Regular expressions that match in linear time: literal text with up to two ``.*``."""
ASSETS = "assets/"
"""Directory in a ``.keras`` with the files of layers."""
_VOCABULARY = "/vocabulary.txt"
MAX_CONFIG = 100_000_000
"""Maximum size of a configuration in bytes."""
MAX_ALIKE = 100
"""Maximum number of findings per code."""
_MAX_TEXTS = 8
"""Maximum nesting depth of JSON strings inside JSON."""
TEXT = "(text)"
"""Step to the parsed content of a JSON string."""
_KIND_OF_FUNCTION = "_type"
"""Suffix of the Keras 2 keys that give the serialization of a function in a sibling field."""
_RUNS_CODE = "loading it would run code that is stored in the config"
Node = Mapping[str, Any]
_ELSEWHERE = {
    "utils": frozenset({"Cross", "Feature", "FeatureSpace"}),
    "applications": frozenset({"CustomScaleLayer", "LayerScale", "StochasticDepth"}),
}
"""Safe classes in modules of Keras that also contain unsafe names."""
_REMOTE = ("http://", "https://", "ftp://", "gs://", "s3://", "hdfs://", "file://")
_CALLS = {
    "TFOpLambda": ("function", TENSORFLOW),
    "SlicingOpLambda": ("function", TENSORFLOW),
    "ClassMethod": ("method_name", RAGGED_MAKERS),
    "InstanceMethod": ("attr_name", ATTRIBUTES),
    "InstanceProperty": ("attr_name", ATTRIBUTES),
    "TensorFlowOpLayer": ("node_def", frozenset[str]()),
}
"""Keras 2 layers that call a function by name: the key of the name, and the names allowed."""


def read_config(path: str, text: bytes, what: str = "config") -> Any:
    """Parse a JSON configuration in any encoding that ``json.loads`` accepts."""
    # Keras parses the text with ``json.loads``, which detects UTF-16 and UTF-32. A configuration in one of
    # these would be loaded, so its classes have to be judged, too.
    encoding = json.detect_encoding(text)
    if encoding not in ("utf-8", "utf-8-sig"):
        text = text.decode(encoding, "replace").encode("utf-8", "replace")
    config = parse_json(path, text.removeprefix(codecs.BOM_UTF8), what, constants=True)
    if isinstance(config, DuplicateKeyObject):
        raise config.error(path, what)
    if not isinstance(config, dict):
        found = f"the {what} has type {type(config).__name__}"
        raise DamagedCheckpoint(path, found, expected="an object", code=f"{what}-not-object")
    return config


class Place(NamedTuple):
    """Path of a node, linked to its parent; formatted only for findings.

    Attributes:
        step: Key, list index, or ``TEXT`` for the parsed content of a JSON string.
    """

    above: Place | None
    step: str | int

    def __str__(self) -> str:
        steps: list[str] = []
        place: Place | None = self
        while place is not None:
            step = place.step
            steps.append(f"[{step}]" if isinstance(step, int) else step if step is TEXT else f".{step:.40}")
            place = place.above
        return "".join(reversed(steps))


class _Level(NamedTuple):
    """Unvisited children of an object or list.

    Attributes:
        texts: Number of enclosing JSON strings.
        is_looked_up: Whether Keras resolves strings at this level as names.
    """

    place: Place | None
    children: Iterator[tuple[str | int, object]]
    texts: int
    is_looked_up: bool


def judge(config: object, where: str, nbytes: int) -> tuple[Finding, ...]:
    """Return findings on code, files and memory that loading a configuration could run, read or allocate.

    Args:
        config: Parsed configuration.
        where: Name of the configuration in the file.
        nbytes: Size of the file with its weights, which limits the values that an object may allocate.
    """
    by_code: dict[str, dict[Finding, None]] = {}
    for place, finding in _findings_in(config, nbytes):
        alike = by_code.setdefault(finding.code, {})
        if len(alike) < MAX_ALIKE:
            alike[finding._replace(where=where if place is None else f"{where}{place}")] = None
    return tuple(finding for alike in by_code.values() for finding in alike)


def _findings_in(config: object, nbytes: int) -> Iterator[tuple[Place | None, Finding]]:
    """Yield the findings for every object and string, with its place."""
    # A depth-first walk with a stack of iterators: memory grows with the depth of the tree and not with its
    # number of nodes. Strings that hold JSON are walked as well, since some layers store a configuration as
    # a text (a nested level counts in ``texts``).
    levels = [_Level(None, _nested([("", config)]), 0, False)]
    while levels:
        above, children, texts, is_looked_up = levels[-1]
        child = next(children, None)
        if child is None:
            levels.pop()
            continue
        step, node = child
        place = None if len(levels) == 1 else Place(above, step)
        is_looked_up |= isinstance(step, str) and (step in LOOKED_UP or step.endswith(LOOKED_UP_ENDS))
        if isinstance(node, dict):
            for finding in (*_judge_object(node), *_judge_cost(node, nbytes)):
                yield place, finding
            is_looked_up &= "class_name" not in node
            levels.append(_Level(place, _nested(node.items()), texts, is_looked_up))
        elif isinstance(node, list):
            levels.append(_Level(place, _nested(enumerate(node)), texts, is_looked_up))
        elif isinstance(node, str):
            if is_looked_up and node in LOOKUPS:
                yield place, _gadget(node)
            elif is_looked_up and node not in BY_NAME:
                yield place, _unknown(node)
            if node.lstrip()[:1] in ("{", "["):
                try:
                    tree = _tree_in_text(node, texts)
                    levels.append(_Level(place, _nested([(TEXT, tree)]), texts + 1, False))
                except LimitExceeded as failure:
                    yield place, not_scanned(None, f"a text in it was not checked: {failure.reason}")


def _nested(children: Iterable[tuple[str | int, object]]) -> Iterator[tuple[str | int, object]]:
    """Yield the objects, lists and strings among the children, with their keys or indexes."""
    return ((step, node) for step, node in children if isinstance(node, dict | list | str))


def _tree_in_text(text: str, texts: int) -> object:
    """Return the JSON value of a string, or None if it is not JSON."""
    # A text beyond the parser's limits may still be JSON to Keras, so it must not pass for one that isn't
    # JSON.
    try:
        tree = parse_json("", text.encode("utf-8", "replace"), "text", constants=True, surrogates=True)
    except LimitExceeded:
        raise
    except DamagedCheckpoint:
        return None
    if texts >= _MAX_TEXTS and isinstance(tree, dict | list):
        raise LimitExceeded("", f"JSON texts nested more than {_MAX_TEXTS} deep", expected="less")
    return tree


def _judge_object(node: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield the findings for one object and the names that Keras resolves in it."""
    # An object with ``code`` and ``closure`` is a marshalled function; Keras decodes it without a class, too.
    if isinstance(node, DuplicateKeyObject):
        yield error("duplicate-key", f"{node.problem}; readers take different ones")
    if "class_name" not in node and isinstance(node.get("code"), str) and "closure" in node:
        yield error("keras-lambda", _RUNS_CODE)
    for key, value in node.items():
        if key.endswith(_KIND_OF_FUNCTION) and isinstance(value, str):
            yield from _judge_kind_of_function(key, value, node)
    texts = {key: node.get(key) for key in ("class_name", "module", "registered_name")}
    strange = [key for key, value in texts.items() if not isinstance(value, str | None)]
    for key in strange:
        yield error("keras-class", f"a {key} of type {type(texts[key]).__name__}")
    if not strange and texts["class_name"] is not None:
        yield from _judge_class(node["class_name"], node)


def _judge_kind_of_function(key: str, kind: str, node: Mapping[str, Any]) -> Iterator[Finding]:
    """Judge a field such as ``residual_fn_type``, which selects how Keras 2 decodes ``residual_fn``."""
    if kind == "lambda":
        yield error("keras-lambda", _RUNS_CODE)
    elif kind == "function" and isinstance(name := node.get(key.removesuffix(_KIND_OF_FUNCTION)), str):
        yield _unknown(f"the function {name}")


# Cost ------------------------------------------------------------------------------------------------


def _judge_cost(node: Mapping[str, Any], nbytes: int) -> Iterator[Finding]:
    """Yield warnings for sizes above the limit of the file, and for slow regular expressions."""
    # Building a layer allocates its weights before any are loaded. Honest weights are in the file, so a
    # layer has no more of them than the file has bytes.
    for key, power in SIZES.items():
        size = node.get(key)
        limit = max(_FREE_VALUES, nbytes) ** (1 / power)
        if isinstance(size, int | float) and size > limit:
            yield warning("keras-work", f"its {key} allocates more values than the file has bytes")
    if node.get("unroll"):
        yield warning("keras-work", "its loop is unrolled on loading, however long it is")
    for key in PATTERNS & node.keys():
        patterns = node[key] if isinstance(node[key], dict | list) else [node[key]]
        if any(isinstance(one, str) and not _LITERAL.fullmatch(one) for one in patterns):
            yield warning("keras-work", f"{key} has a pattern that may take very long to match")


# Names that a loader resolves -----------------------------------------------------------------------
def _gadget(name: str, why: str = "which is not part of a model") -> Finding:
    return error("keras-gadget", f"it names {name:.100}, {why}")


def _unknown(name: str) -> Finding:
    return warning("unknown-class", f"it names {name!r:.100}, which is not known to be harmless")


def _judge_class(name: str, node: Node) -> Iterator[Finding]:
    config, module, registered = node.get("config"), node.get("module"), node.get("registered_name")
    settings = config if isinstance(config, dict) else {}
    last = {full.rpartition(">")[2].rpartition(".")[2] for full in (name, registered) if full}
    if name == "__lambda__":
        yield error("keras-lambda", _RUNS_CODE)
    elif "Lambda" in last:
        yield error("keras-lambda", "a Lambda layer, which runs a function that the config gives")
    elif running := last & RUNNING.keys():
        yield from (error("keras-unsafe-layer", f"{kind}, which {RUNNING[kind]}") for kind in running)
    elif name in _CALLS:
        yield from _judge_call(name, settings)
        yield from _judge_module(module, name, registered, is_listed=True)
    elif name == "function":
        yield from _judge_function(config, module, registered)
    elif name in ("__typespec__", "TypeSpec"):
        yield from _judge_typespec(node)
    else:
        yield from _judge_module(module, name, registered)
        for key in sorted(FILES | ({"vocabulary"} if last & VOCABULARIES else set())):
            if isinstance(file := settings.get(key), str):
                verb = "fetch" if file.startswith(_REMOTE) else "read"
                yield error("keras-reads-file", f"loading it would {verb} {file!r:.100}")


# Classes --------------------------------------------------------------------------------------------


def _judge_module(
    module: str | None, name: str, registered: str | None, *, is_listed: bool = False
) -> Iterator[Finding]:
    # Without a module, Keras looks the name up among its classes and the registered ones. In a module of
    # Keras, only listed classes of the parts with classes are harmless: others have functions that read
    # files and load code. Any other module would be imported. ``package>Name`` is a registered class.
    part = None if module is None else part_of_keras(module)
    other = registered if registered != name else None
    if module is None:
        yield from _judge_class_without_module(name, other, is_listed)
    elif part is not None:
        if other is not None and other not in CLASSES:
            yield _unknown(other) if ">" in other else _gadget(f"{module}.{other}")
        if name in CLASSES:
            is_elsewhere = name in _ELSEWHERE.get(part, ()) or f"{module}.{name}" in TORCH_OPTIMIZERS
            is_of_keras = part in PARTS or part == "" or is_elsewhere
        else:
            is_of_keras = part == "ops" and name in OPERATIONS
        if not is_listed and not is_of_keras:
            is_class = part in PARTS and name.isidentifier() and name[:1].isupper()
            yield _unknown(f"{module}.{name}") if is_class else _gadget(f"{module}.{name}")
    elif module != "builtins" or name not in DATA or other is not None:
        yield _judge_import(module, name)
        if other is not None and ">" not in other:
            yield _judge_import(module, other)


def _judge_class_without_module(name: str, other: str | None, is_listed: bool) -> Iterator[Finding]:
    """Judge a class without a module, which Keras looks up among its classes and custom objects."""
    for found_by_name in (name, other):
        if found_by_name in LOOKUPS:
            yield _gadget(found_by_name)
    known = is_listed or name in CLASSES | OPERATIONS | DATA | FUNCTIONS
    if not known and name not in LOOKUPS:
        yield _unknown(other or name)
    elif other is not None and other not in CLASSES | LOOKUPS:
        yield _unknown(other)


def _judge_import(module: str, name: str) -> Finding:
    """Return the finding for a name imported from a module outside Keras."""
    # A class of a user's module is unknown, and is a warning. It is an error if the name is known to be
    # something else: Python's, a library's, or a path through attributes, which no class of a layer has.
    parts = [*module.split("."), *name.split(".")]
    is_dunder = any(part.startswith("__") and part != "__main__" for part in parts)
    is_python = module == "builtins" and hasattr(builtins, name)
    is_known = module != "builtins" and trust(module, name) is not Trust.UNKNOWN
    if "." in name or is_dunder or is_python or is_known:
        return error("keras-gadget", f"loading it would import {f'{module}.{name}':.100}")
    return _unknown(f"{module}.{name}")


# Functions ------------------------------------------------------------------------------------------


def _judge_function(function: object, module: str | None, registered: str | None) -> Iterator[Finding]:
    if not isinstance(function, str):
        yield error("keras-class", f"a function whose name has type {type(function).__name__}")
        return
    names = [function] if registered in (None, "function", function) else [function, registered]
    part = None if module is None else part_of_keras(module)
    for name in names:
        is_harmless = name in FUNCTIONS | CLASSES
        if part is not None:
            if not (is_harmless and part in FUNCTION_PARTS) and not (part == "ops" and name in OPS):
                yield _gadget(f"{module}.{name}")
        elif module not in (None, "builtins"):
            yield _judge_import(module, name)
        elif "." in name or name in LOOKUPS or (hasattr(builtins, name) and not is_harmless):
            yield _gadget(name)
        elif not is_harmless:
            yield _unknown(f"the function {name}")


# TensorFlow -----------------------------------------------------------------------------------------


def _judge_call(name: str, config: Node) -> Iterator[Finding]:
    key, harmless = _CALLS[name]
    called = config.get(key)
    if name == "TensorFlowOpLayer":
        from ckpttool.formats.savedmodel.ops import known_ops, severity_of

        op = called.get("op") if isinstance(called, dict) else None
        if not isinstance(op, str) or severity_of(op) is not None:
            yield error("keras-gadget", f"a layer that runs TensorFlow's op {op!r:.100}")
        elif op not in known_ops():
            yield _unknown(f"the op {op}")
    elif not isinstance(called, str):
        yield error("keras-gadget", f"{name} without a function")
    elif called not in harmless or (name == "ClassMethod" and config.get("cls_symbol") != "RaggedTensor"):
        symbol = f"{config['cls_symbol']}.{called}" if "cls_symbol" in config else called
        yield error("keras-gadget", f"loading it would call tf.{symbol:.100}")


def _judge_typespec(node: Node) -> Iterator[Finding]:
    """Judge a type specification, whose class Keras 2 imports and calls."""
    if node["class_name"] == "TypeSpec":
        if node.get("type_spec") not in TYPESPECS:
            yield _unknown(f"the type {node.get('type_spec')}")
        return
    module, name, registered = (node.get(key) for key in ("module", "spec_name", "registered_name"))
    if f"{module} {name}" in TYPESPECS and registered in (None, name):
        return
    if isinstance(module, str) and isinstance(name, str) and part_of_keras(module) is None:
        for imported in {name, registered or name}:
            yield _judge_import(module, imported)
    else:
        yield _gadget(f"{module}.{name}")


# Records ----------------------------------------------------------------------------------------------


def judge_record(name: str, content: Readable, start: int, end: int, where: str) -> tuple[Finding, ...]:
    """Return the safety findings for a record of a ``.keras`` that is no part of the model itself.

    Args:
        name: Name of the record in the archive.
        content: Source of its content.
        start: Offset of its first byte in the source.
        end: Offset after its last byte.
        where: Place for the findings.
    """
    if is_pickle(content, start, end):
        from ckpttool.containers.pickle.pickle_safety import read_pickles

        return tuple(read_pickles(content, start, end, where).safety)
    if name.startswith(ASSETS) and name.endswith(_VOCABULARY):
        return ()
    message = "a record that Keras does not write; its purpose is unknown"
    return (not_scanned(where, message),)


# Unknown arguments ----------------------------------------------------------------------------------


_WRAPPER = frozenset({"class_name", "config", "module", "registered_name"})
_OBJECT_KEYS = _WRAPPER | {"build_config", "compile_config", "shared_object_id"}
"""Keys of an object in Keras 3."""
_KERAS_2_KEYS = frozenset({"name", "inbound_nodes", "keras_version", "backend", "dtype", "batch_input_shape"})
_TYPES = frozenset({f"{kind}{bits}" for kind in ("int", "uint") for bits in (4, 8, 16, 32, 64)}) | {
    *("bool", "string", "float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("complex64", "complex128", "mixed_float16", "mixed_bfloat16", "infer", "_infer"),
}
_COMPILE_ARGUMENTS = frozenset(
    {"optimizer", "loss", "loss_weights", "metrics", "weighted_metrics", "run_eagerly", "jit_compile"}
    | {"steps_per_execution", "auto_scale_loss", "sample_weight_mode", "is_compiled", "cloning"}
)
"""Arguments of ``compile`` of Keras's own models."""
_POLICIES = frozenset({"DTypePolicy", "Policy"})
_QUANTIZED = "_from_"
"""Separator before the original type of a quantized layer: ``int8_from_float32``."""
_PARTS = frozenset(
    {"", "constraints", "dtype_policies", "initializers", "layers", "losses", "metrics", "models"}
    | {"optimizers", "quantizers", "regularizers"}
)
"""Parts of Keras whose classes have their arguments in ``ARGUMENTS``."""


def unknown_arguments(config: object, where: str) -> Iterator[Finding]:
    """Yield a warning for each key that Keras doesn't know, up to ``MAX_ALIKE``."""
    yield from islice(
        (warning("keras-argument", message, where) for message in _unknown_parts(config)), MAX_ALIKE
    )


def _unknown_parts(config: object) -> Iterator[str]:
    pending = [config]
    while pending:
        node = pending.pop()
        if isinstance(node, list):
            pending += node
        elif isinstance(node, dict) and (not isinstance(node.get("class_name"), str) or _is_of_keras(node)):
            pending += node.values()
            yield from _unknown_parts_of(node)


def _unknown_parts_of(node: Node) -> Iterator[str]:
    kind = node.get("class_name")
    if kind is None and len(_WRAPPER & node.keys()) == len(_WRAPPER) - 1:
        yield f"an object with {', '.join(map(repr, list(node)[:6]))}, but no class_name"
    if not isinstance(kind, str):
        return
    for key in sorted(node.keys() - _OBJECT_KEYS - _KERAS_2_KEYS):
        yield f"{kind} has an unknown key {key!r:.100} next to its config"
    if "config" not in node:
        yield f"{kind} has no config"
    config, compiled = node.get("config"), node.get("compile_config")
    if isinstance(compiled, dict):
        for key in sorted(compiled.keys() - _COMPILE_ARGUMENTS):
            yield f"{kind} is compiled with {key!r:.100}, which Keras doesn't know"
    if isinstance(config, dict):
        layers = config.get("layers")
        for layer in layers if isinstance(layers, list) else ():
            if isinstance(layer, dict) and "class_name" not in layer:
                yield f"{kind} has a layer without class_name"
        for key in sorted(config.keys() - ARGUMENTS):
            yield f"{kind}: unknown argument {key!r:.100}"
        dtype = config.get("name" if kind in _POLICIES else "dtype")
        if isinstance(dtype, str) and dtype.rpartition(_QUANTIZED)[2] not in _TYPES:
            yield f"{kind} has the type {dtype!r:.100}, which Keras doesn't know"


def _is_of_keras(node: Node) -> bool:
    """Return whether an object is of Keras's own class; Keras 2 doesn't write the module."""
    kind = node["class_name"]
    if kind not in CLASSES or node.get("registered_name", kind) not in (None, kind):
        return False
    if "module" not in node:
        return kind not in OPERATIONS
    module = node["module"]
    return isinstance(module, str) and part_of_keras(module) in _PARTS
