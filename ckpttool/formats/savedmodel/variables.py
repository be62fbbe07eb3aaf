"""The variables of a SavedModel: compared with its objects, named as people know them, and their layers.

Source: tensorflow/tensorflow ``core/protobuf/fingerprint.proto``; tf_keras
``src/protobuf/saved_metadata.proto``, ``src/saving/legacy/saved_model/load.py``.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpttool.containers.farmhash import fingerprint64
from ckpttool.containers.jsontext import parse_json
from ckpttool.core.errors import CheckpointError
from ckpttool.core.layers import UNWIRED, LayerKind
from ckpttool.core.report import Finding, error, note, warning
from ckpttool.core.tensor import Role, Tensor
from ckpttool.formats.savedmodel.graph import MetaGraph
from ckpttool.formats.savedmodel.layout import require_inside
from ckpttool.formats.savedmodel.objects import MAX_METADATA, SavedObject, SavedVariable
from ckpttool.formats.savedmodel.walk import message_in
from ckpttool.storage import fs

if TYPE_CHECKING:
    from ckpttool.formats.keras.layer_tree import Layer
    from ckpttool.formats.keras.model import KerasModel

FINGERPRINT, KERAS_METADATA = "fingerprint.pb", "keras_metadata.pb"
INDEX = os.path.join("variables", "variables.index")
VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"
_SLOT = "/.OPTIMIZER_SLOT/"
_ESCAPED = re.compile(r"\.([.S])")
_VARIABLE_OPS = frozenset({"VarHandleOp", "Variable", "VariableV2"})
_NUMBERED = re.compile(r"/\d+$|(^|/)layer(_with_weights)?-\d+/")
_UNNAMED = "Variable"
_MAX_HASHED = 1 << 23  # hashed in Python, at 5 MB/s
_SHOWN = 200
Fingerprint = Mapping[str, object]
_TUPLES = ("__tuple__", "TensorShape")


def needs_variables(graph: MetaGraph) -> bool:
    """Return whether a graph can't be loaded without values of variables."""
    if graph.objects:
        return any(item.variable for item in graph.objects)
    return not _VARIABLE_OPS.isdisjoint(graph.ops)


def raw_key(tensor: Tensor) -> str:
    """Return a variable's key in the bundle."""
    return tensor.key or "/".join(map(str, tensor.path))


def node_numbers_along(objects: Sequence[SavedObject], key: str) -> list[int]:
    """Return the numbers of the objects on the way that a key tells, from the root as far as it goes."""
    numbers = [0] if objects else []
    for part in key.removesuffix(VALUE).split("/") if numbers else ():
        name = _ESCAPED.sub(lambda match: "/" if match[1] == "S" else ".", part)
        child = objects[numbers[-1]].children.get(name)
        if child is None or child >= len(objects):
            return numbers
        numbers.append(child)
    return numbers


def _node_number(objects: Sequence[SavedObject], key: str) -> int | None:
    """Return the number of the object that a bundle's key leads to from the root; None if none is."""
    numbers = node_numbers_along(objects, key)
    return numbers[-1] if len(numbers) == key.removesuffix(VALUE).count("/") + 2 else None


# The bundle against the objects ---------------------------------------------------------------------


def compare_variables(tensors: Sequence[Tensor], objects: Sequence[SavedObject]) -> Iterator[Finding]:
    """Yield where the variables of the graph and the entries of the bundle are not the same."""
    lost = sum(child >= len(objects) for item in objects for child in (*item.children.values(), *item.slots))
    if lost:
        yield error("object-graph", f"{lost:,} references to objects that there are none of")
    reached = set()
    for tensor in tensors:
        key = raw_key(tensor)
        if not key.endswith(VALUE) or _SLOT in key:
            continue
        at = _node_number(objects, key)
        variable = None if at is None else objects[at].variable
        if at is None or variable is None:
            yield warning("variable-foreign", "the model's objects don't lead to it", tensor.name)
        else:
            reached.add(at)
            yield from _mismatches(tensor, variable)
    slots = {slot for item in objects for slot in item.slots}
    missing = [
        item.variable.name or f"object {at}"
        for at, item in enumerate(objects)
        if item.variable and not item.variable.is_composed and at not in reached and at not in slots
    ]
    if missing:
        message = f"the bundle lacks {len(missing):,} of the model's variables, like {missing[0][:_SHOWN]!r}"
        yield error("variable-missing", message, INDEX)


def _mismatches(tensor: Tensor, variable: SavedVariable) -> Iterator[Finding]:
    known = variable.shape
    fits = known is None or (
        len(known) == len(tensor.shape)
        and all(want in (None, length) for want, length in zip(known, tensor.shape, strict=True))
    )
    if not fits or variable.dtype != tensor.dtype.name:
        stored = f"{tensor.dtype.name} {list(tensor.shape)}"
        message = f"{stored} in the bundle, and {variable.dtype} {known} in the graph"
        yield error("variable-mismatch", message, tensor.name)


# Names ----------------------------------------------------------------------------------------------


def name_variables(tensors: Sequence[Tensor], objects: Sequence[SavedObject]) -> tuple[Tensor, ...]:
    """Return the variables; those that are items of a list, or in a numbered layer, by their own names.

    Keras exports a list of all variables and a second, private one, whose items are copies.
    """
    stated = {raw_key(tensor): _stated_name(tensor, objects) for tensor in tensors}
    public = Counter(name for key, name in stated.items() if name and not _is_private(key))
    taken = {tensor.name for tensor in tensors if stated[raw_key(tensor)] is None}
    return tuple(_with_stated_name(tensor, stated[raw_key(tensor)], public, taken) for tensor in tensors)


def _is_private(key: str) -> bool:
    return key.startswith("_")


def _with_stated_name(
    tensor: Tensor, name: str | None, public: Mapping[str, int], taken: Container[str]
) -> Tensor:
    """Return a variable under its own name, unless another has it, too."""
    key = raw_key(tensor)
    if name is None or name == tensor.name:
        return tensor
    if _is_private(key):
        return replace(tensor, role=Role.OTHER) if name in public else tensor
    if public[name] > 1 or name.replace("/", ".") in taken:
        return tensor
    return replace(tensor, path=tuple(name.split("/")), key=key)


def _stated_name(tensor: Tensor, objects: Sequence[SavedObject]) -> str | None:
    """Return the name that a variable was given, where the path to it only says which one it is."""
    key = raw_key(tensor)
    if _SLOT in key or not _NUMBERED.search(key.removesuffix(VALUE)):
        return None
    at = _node_number(objects, key)
    variable = None if at is None else objects[at].variable
    return variable.name if variable and variable.name not in ("", _UNNAMED) else None


# Layers, as Keras 2 describes its objects -----------------------------------------------------------


def layers_of_variables(
    directory: str, objects: Sequence[SavedObject], tensors: Sequence[Tensor]
) -> Mapping[str, LayerKind]:
    """Return the layers of weights, without those that are not described or can't be read.

    Keras 2 describes its objects in a file of their own; old releases do so in the graph.
    """
    from ckpttool.formats.keras.model import kind_for_weight

    described = {at: item.keras for at, item in enumerate(objects) if item.keras}
    path = os.path.join(directory, KERAS_METADATA)
    if fs.lexists(path):
        described |= _read_descriptions(path, directory)
    layers = {
        at: layer for at, text in described.items() if (layer := _layer_of_text(path, text)) is not None
    }
    kinds = {}
    models: dict[int, KerasModel] = {}
    for tensor in tensors if layers else ():
        if tensor.role is Role.WEIGHTS:
            along = node_numbers_along(objects, raw_key(tensor))
            kind = _outermost_kind((layers[at] for at in along if at in layers), models)
            if kind is not None:
                kinds[tensor.name] = kind_for_weight(kind, tensor)
    return kinds


def _outermost_kind(layers: Iterable[Layer], known: dict[int, KerasModel]) -> LayerKind | None:
    """Return the kind of the outermost known layer, among those that lead to a weight from outside in.

    Args:
        layers: The layers, each parsed alone.
        known: The outermost models by the ``id`` of their layers; new ones are added.
    """
    from ckpttool.formats.keras.model import KerasModel

    models: list[Layer] = []
    for layer in layers:
        if layer.is_model:
            models.append(layer)
        elif (kind := layer.kind) is not None:
            if not models:
                return kind._replace(doubt=UNWIRED if kind.cls == "Dense" else None)
            outermost = known.setdefault(id(models[0]), KerasModel(models[0]))
            return outermost.kind_of(layer, (*(model.name for model in models[1:]), layer.name))
    return None


def _read_descriptions(path: str, directory: str) -> dict[int, bytes]:
    """Return the descriptions of objects, by their numbers."""
    described = {}
    try:
        require_inside(path, directory)
        with fs.open_source(path) as source:
            for number, node in message_in(source).parts():
                parts = dict(node.parts()) if number == 1 else {}
                if 5 in parts:
                    described[dict(node.numbers()).get(2, 0)] = parts[5].data(MAX_METADATA)
    except CheckpointError:  # opening the model told of it
        return {}
    return described


def _layer_of_text(path: str, text: bytes) -> Layer | None:
    from ckpttool.formats.keras.layer_tree import layer_of

    try:
        node = _unwrap_tuples(parse_json(path, text, "keras-metadata", constants=True))
    except CheckpointError:  # opening the model told of it
        return None
    if isinstance(node, dict) and isinstance(shape := node.get("build_input_shape"), list):
        node.setdefault("build_config", {"input_shape": shape})
    return layer_of(node)


def _unwrap_tuples(tree: Any) -> Any:
    """Return a configuration with lists where Keras 2 wraps tuples and shapes."""
    if isinstance(tree, list):
        return [_unwrap_tuples(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if tree.get("class_name") in _TUPLES and isinstance(tree.get("items"), list):
        return [_unwrap_tuples(item) for item in tree["items"]]
    return {key: _unwrap_tuples(item) for key, item in tree.items()}


# The fingerprint ------------------------------------------------------------------------------------


def read_fingerprint(directory: str) -> tuple[Fingerprint | None, list[Finding]]:
    """Return what a SavedModel's fingerprint says, if there is one, and what is wrong with it."""
    path = os.path.join(directory, FINGERPRINT)
    if not fs.lexists(path):
        return None, []
    fingerprint: dict[str, object] = {"uuid": None, "checkpoint_hash": None}
    try:
        require_inside(path, directory)
        with fs.open_source(path) as source:
            for number, value, part in message_in(source).fields():
                if number == 5 and value is not None:
                    fingerprint["checkpoint_hash"] = f"{value:016x}"
                elif number == 7 and part is not None:
                    fingerprint["uuid"] = part.text()
    except CheckpointError as failure:
        return None, [warning("fingerprint-damaged", failure.reason, FINGERPRINT)]
    return fingerprint, []


def fingerprint_findings(fingerprint: Fingerprint | None, index: str) -> Iterator[Finding]:
    """Yield an error where the index of the variables is not the one that was saved with the graph."""
    stated = fingerprint["checkpoint_hash"] if fingerprint else None
    if stated is None:
        return
    with fs.open_source(index) as source:
        if source.size > _MAX_HASHED:
            message = f"the fingerprint of {source.size:,} bytes was not computed; up to {_MAX_HASHED:,} are"
            yield note("fingerprint-skipped", message, INDEX)
            return
        found = f"{fingerprint64(source.read(0, source.size)):016x}"
    if found != stated:
        message = f"its fingerprint is {found} instead of {stated}: it was not saved with this graph"
        yield error("fingerprint-mismatch", message, INDEX)
