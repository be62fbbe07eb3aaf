"""Keys and types in a Keras configuration that Keras doesn't know, so that it refuses to build the model.

A configuration has no checksum in HDF5, and its keys are names of arguments. Only classes of Keras itself are
looked at; a class of one's own may take anything.

Source: Keras ``src/saving/serialization_lib.py``, ``src/layers/layer.py``; tf_keras the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from ckpttool.core.report import Finding, warning
from ckpttool.formats.keras.names import ARGUMENTS, CLASSES, OPERATIONS, part_of_keras

_WRAPPER = frozenset({"class_name", "config", "module", "registered_name"})
_BESIDE = _WRAPPER | {"build_config", "compile_config", "shared_object_id"}
"""What Keras 3 writes of an object."""
_OF_KERAS_2 = frozenset({"name", "inbound_nodes", "keras_version", "backend", "dtype", "batch_input_shape"})
_TYPES = frozenset({f"{kind}{bits}" for kind in ("int", "uint") for bits in (4, 8, 16, 32, 64)}) | {
    *("bool", "string", "float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("complex64", "complex128", "mixed_float16", "mixed_bfloat16", "infer", "_infer"),
}
_OF_COMPILE = frozenset(
    {"optimizer", "loss", "loss_weights", "metrics", "weighted_metrics", "run_eagerly", "jit_compile"}
    | {"steps_per_execution", "auto_scale_loss", "sample_weight_mode", "is_compiled", "cloning"}
)
"""What ``compile`` of Keras's own models takes."""
_POLICIES = frozenset({"DTypePolicy", "Policy"})
_QUANTIZED = "_from_"
"""What stands before the type from which a quantized layer was made: ``int8_from_float32``."""
_PARTS = frozenset(
    {"", "constraints", "dtype_policies", "initializers", "layers", "losses", "metrics", "models"}
    | {"optimizers", "quantizers", "regularizers"}
)
"""The parts of Keras whose classes have their arguments in the list."""
_MAX_FINDINGS = 100
Node = Mapping[str, Any]


def unknown_arguments(config: object, where: str) -> Iterator[Finding]:
    """Yield a warning for each key that Keras wouldn't know, at most 100."""
    yield from islice(
        (warning("keras-argument", message, where) for message in _doubts(config)), _MAX_FINDINGS
    )


def _doubts(config: object) -> Iterator[str]:
    pending = [config]
    while pending:
        node = pending.pop()
        if isinstance(node, list):
            pending += node
        elif isinstance(node, dict) and (not isinstance(node.get("class_name"), str) or _is_known(node)):
            pending += node.values()
            yield from _doubts_of_object(node)


def _doubts_of_object(node: Node) -> Iterator[str]:
    kind = node.get("class_name")
    if kind is None and len(_WRAPPER & node.keys()) == len(_WRAPPER) - 1:
        yield f"an object with {', '.join(map(repr, list(node)[:6]))}, and no class_name"
    if not isinstance(kind, str):
        return
    for key in sorted(node.keys() - _BESIDE - _OF_KERAS_2):
        yield f"{kind} has {key!r:.100} beside its config, which Keras doesn't know"
    if "config" not in node:
        yield f"{kind} has no config"
    config, compiled = node.get("config"), node.get("compile_config")
    if isinstance(compiled, dict):
        for key in sorted(compiled.keys() - _OF_COMPILE):
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


def _is_known(node: Node) -> bool:
    """Tell whether an object is of a class of Keras itself; Keras 2 doesn't say where its classes are."""
    kind = node["class_name"]
    if kind not in CLASSES or node.get("registered_name", kind) not in (None, kind):
        return False
    if "module" not in node:
        return kind not in OPERATIONS
    module = node["module"]
    return isinstance(module, str) and part_of_keras(module) in _PARTS
