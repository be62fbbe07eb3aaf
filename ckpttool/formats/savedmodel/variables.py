"""Variables of a SavedModel: compared with the object graph, given readable names, and Keras's layers.

Source: tensorflow/tensorflow ``core/protobuf/fingerprint.proto``; tf_keras
``src/protobuf/saved_metadata.proto``, ``src/saving/legacy/saved_model/load.py``.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from ckpttool.formats.tensorflow.object_graph import KEY_END, SLOT_MARK
from ckpttool.storage import fs

if TYPE_CHECKING:
    from ckpttool.formats.keras.layer_tree import Layer
    from ckpttool.formats.keras.model import KerasModel

FINGERPRINT, KERAS_METADATA = "fingerprint.pb", "keras_metadata.pb"
INDEX = os.path.join("variables", "variables.index")
_PRIVATE = "_"
_ESCAPED = re.compile(r"\.([.S])")
_VARIABLE_OPS = frozenset({"VarHandleOp", "Variable", "VariableV2"})
_NUMBERED = re.compile(r"/\d+$|(^|/)layer(_with_weights)?-\d+/")
_UNNAMED = "Variable"
_MAX_HASHED = 1 << 23
"""Limit on the bytes of an index that are hashed, in Python at 5 MB/s."""
_SHOWN = 200
Fingerprint = Mapping[str, object]
_TUPLES = ("__tuple__", "TensorShape")


def needs_variables(graph: MetaGraph) -> bool:
    """Return whether a graph has variables, so that it can't be loaded without a bundle."""
    if graph.objects.nodes:
        return any(item.variable for item in graph.objects.nodes)
    return not _VARIABLE_OPS.isdisjoint(graph.ops)


def bundle_key(tensor: Tensor) -> str:
    """Return a variable's key in the bundle."""
    return tensor.key or "/".join(map(str, tensor.path))


def object_numbers_along(objects: Sequence[SavedObject], key: str) -> list[int]:
    """Return the numbers of the objects along a key's path, from the root to the last that exists."""
    numbers = [0] if objects else []
    for part in key.removesuffix(KEY_END).split("/") if numbers else ():
        # In a key, ``..`` is a dot of a child's name, and ``.S`` a slash.
        name = _ESCAPED.sub(lambda match: "/" if match[1] == "S" else ".", part)
        child = objects[numbers[-1]].children.get(name)
        if child is None or child >= len(objects):
            return numbers
        numbers.append(child)
    return numbers


def _object_number(objects: Sequence[SavedObject], key: str) -> int | None:
    """Return the number of the object at the end of a key's path; None if there is none."""
    numbers = object_numbers_along(objects, key)
    return numbers[-1] if len(numbers) == key.removesuffix(KEY_END).count("/") + 2 else None


# Comparison with the object graph -------------------------------------------------------------------


def compare_variables(tensors: Sequence[Tensor], objects: Sequence[SavedObject]) -> Iterator[Finding]:
    """Yield findings about differences between the bundle's entries and the object graph's variables."""
    lost = sum(child >= len(objects) for item in objects for child in (*item.children.values(), *item.slots))
    if lost:
        yield error("object-graph", f"{lost:,} references to unknown objects")
    reached = set()
    for tensor in tensors:
        key = bundle_key(tensor)
        if not key.endswith(KEY_END) or SLOT_MARK in key:
            continue
        at = _object_number(objects, key)
        variable = None if at is None else objects[at].variable
        if at is None or variable is None:
            yield warning("variable-foreign", "not reachable from the model's objects", tensor.name)
        else:
            reached.add(at)
            yield from _mismatches(tensor, variable)
    # A variable may lack an entry that its object would lead to. A slot of an optimizer is no child of any
    # object, and a variable that was split into components is saved as these.
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
        message = f"{stored} in the bundle, but {variable.dtype} {known} in the graph"
        yield error("variable-mismatch", message, tensor.name)


# Names ----------------------------------------------------------------------------------------------


def name_variables(tensors: Sequence[Tensor], objects: Sequence[SavedObject]) -> tuple[Tensor, ...]:
    """Return the variables, with their names in Python where their keys have numbers instead of names."""
    # Keras exports ``variables/3`` and, in a private list, ``_all_variables/3``, a copy of the same
    # variable. The public one gets the name; the copy keeps its key and gets the role ``OTHER``.
    stated = {bundle_key(tensor): _python_name(tensor, objects) for tensor in tensors}
    public = Counter(name for key, name in stated.items() if name and not key.startswith(_PRIVATE))
    taken = {tensor.name for tensor in tensors if stated[bundle_key(tensor)] is None}
    named = []
    for tensor in tensors:
        key = bundle_key(tensor)
        name = stated[key]
        if name is None or name == tensor.name:
            named.append(tensor)
        elif key.startswith(_PRIVATE):
            named.append(replace(tensor, role=Role.OTHER) if name in public else tensor)
        elif public[name] > 1 or name.replace("/", ".") in taken:
            named.append(tensor)
        else:
            named.append(replace(tensor, path=tuple(name.split("/")), key=key))
    return tuple(named)


def _python_name(tensor: Tensor, objects: Sequence[SavedObject]) -> str | None:
    """Return the name in Python of a variable whose key has numbers instead of names; else None."""
    key = bundle_key(tensor)
    if SLOT_MARK in key or not _NUMBERED.search(key.removesuffix(KEY_END)):
        return None
    at = _object_number(objects, key)
    variable = None if at is None else objects[at].variable
    return variable.name if variable and variable.name not in ("", _UNNAMED) else None


# Layers, from Keras 2's descriptions of objects -----------------------------------------------------


def layers_of_variables(
    directory: str, objects: Sequence[SavedObject], tensors: Sequence[Tensor]
) -> Mapping[str, LayerKind]:
    """Return the layers of weights by tensor name; weights without a readable description are left out."""
    # Keras 2 describes its layers in keras_metadata.pb, by the number of the object; up to TensorFlow 2.4 it
    # did so in the object graph.
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
            along = object_numbers_along(objects, bundle_key(tensor))
            kind = _outermost_kind((layers[at] for at in along if at in layers), models)
            if kind is not None:
                kinds[tensor.name] = kind_for_weight(kind, tensor)
    return kinds


def _outermost_kind(layers: Iterable[Layer], known: dict[int, KerasModel]) -> LayerKind | None:
    """Return the kind of the outermost layer that has a known kind.

    Args:
        layers: Layers along the path to a weight, from the outside in, each parsed alone.
        known: Cache of outermost models, by the ``id`` of their layer.
    """
    from ckpttool.formats.keras.model import KerasModel

    # The layout of a Dense layer's kernel depends on the layers before it (a Flatten, say), which only a
    # model knows. So the kind is the one that the outermost model gives, by the names of the layers below
    # it; without a model, it is in doubt.
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
    """Return the JSON descriptions in ``keras_metadata.pb``, by the number of the object."""
    described = {}
    try:
        require_inside(path, directory)
        with fs.open_source(path) as source:
            for number, node in message_in(source).parts():
                parts = dict(node.parts()) if number == 1 else {}
                if 5 in parts:
                    described[dict(node.numbers()).get(2, 0)] = parts[5].data(MAX_METADATA)
    except CheckpointError:  # reported when the model was opened
        return {}
    return described


def _layer_of_text(path: str, text: bytes) -> Layer | None:
    from ckpttool.formats.keras.layer_tree import layer_of

    try:
        node = _unwrap_tuples(parse_json(path, text, "keras-metadata", constants=True))
    except CheckpointError:  # reported when the model was opened
        return None
    if isinstance(node, dict) and isinstance(shape := node.get("build_input_shape"), list):
        node.setdefault("build_config", {"input_shape": shape})
    return layer_of(node)


def _unwrap_tuples(tree: Any) -> Any:
    """Return a configuration with lists in place of Keras 2's wrapped tuples and shapes."""
    if isinstance(tree, list):
        return [_unwrap_tuples(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if tree.get("class_name") in _TUPLES and isinstance(tree.get("items"), list):
        return [_unwrap_tuples(item) for item in tree["items"]]
    return {key: _unwrap_tuples(item) for key, item in tree.items()}


# The fingerprint ------------------------------------------------------------------------------------


def read_fingerprint(directory: str) -> tuple[Fingerprint | None, list[Finding]]:
    """Return the UUID and the index's hash in ``fingerprint.pb``, None if absent or damaged; and findings."""
    path = os.path.join(directory, FINGERPRINT)
    if not fs.lexists(path):
        return None, []
    # Of all hashes in it only that of the variables' index (field 5) is known to be one of a file's bytes, by
    # FarmHash's Fingerprint64. The hash of the model isn't that of ``saved_model.pb``, so nothing can be
    # compared with it here.
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
    """Yield an error if the index of the variables isn't the one that was saved with the graph."""
    # ``checkpoint_hash`` is FarmHash's Fingerprint64 of the index file. The other hashes in the fingerprint
    # aren't those of a file's bytes, and are ignored.
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
