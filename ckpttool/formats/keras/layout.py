"""Names, roles and training state of Keras's variables in HDF5, in its three layouts.

Whole models and old weights list layers and weights in attributes; ``.weights.h5`` has groups of numbered
variables, in the order in which the layer made them.

Source: Keras ``src/legacy/saving/legacy_h5_format.py``, ``src/saving/saving_lib.py``.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ckpttool.containers.hdf5 import Attributes
from ckpttool.core.checkpoint import TrainingState
from ckpttool.core.report import Finding, error
from ckpttool.core.tensor import Path, Role, Tensor
from ckpttool.core.training import training_state
from ckpttool.formats.content.plain_data import lazy_scalar, shortest_decimal
from ckpttool.formats.hdf5.tensors import OpenedHdf5
from ckpttool.formats.interface import natural

if TYPE_CHECKING:
    from ckpttool.formats.keras.layer_tree import Steps

MODEL, WEIGHTS = "model", "weights"
TOP_LEVEL = "top_level_model_weights"

Groups = Mapping[tuple[str, ...], Attributes]
Called = Mapping[tuple[str, ...], str]
"""Names of layers by their groups, from outside of the groups."""

_ITERATION = ("iteration", "iter", "iterations")
_RATE = ("learning_rate", "lr", "current_learning_rate")
_LAYERS, _VARIABLES = "layers", "vars"
_SCALER = "loss_scale_optimizer"
SEEDS = "seed_generator"
"""In the names of variables that hold the state of random numbers."""
_MAX_NAME = 255
_WRAPPED = ("layer", "forward_layer", "backward_layer")
"""Groups of the layers inside Keras's wrappers."""
_TOP = ("layers", "optimizer", "vars", "_layer_checkpoint_dependencies", "metrics")


def kind_of_file(opened: OpenedHdf5) -> str | None:
    """Return which kind of Keras file it is: a whole model, weights, or None for neither."""
    groups, root = opened.tree.groups, opened.tree.groups.get((), {})
    if "model_config" in root or "layer_names" in groups.get(("model_weights",), {}):
        return MODEL
    if names_in(root, "layer_names") is not None:
        return WEIGHTS
    has_variables = any(path[-1:] == ("vars",) and path[0].partition("\\")[0] in _TOP for path in groups)
    return WEIGHTS if has_variables else None


def names_in(attributes: Attributes, key: str) -> list[str] | None:
    """Return the list of names in an attribute, which is split in several where it is long; or None."""
    parts = []
    if key in attributes:
        parts = [attributes[key]]
    else:
        at = 0
        while f"{key}{at}" in attributes:
            parts.append(attributes[f"{key}{at}"])
            at += 1
    if not parts:
        return None
    return [name for part in parts if isinstance(part, list) for name in part if isinstance(name, str)]


def top_of(groups: Groups) -> Steps | None:
    """Return the group that lists layers, or None if there is none."""
    tops: tuple[Steps, ...] = ("model_weights",), ()
    return next((top for top in tops if names_in(groups.get(top, {}), "layer_names") is not None), None)


def layers_of(opened: OpenedHdf5) -> dict[str, list[tuple[int, ...] | None]]:
    """Return the shapes of the weights that each listed layer lists; None if one is not there."""
    groups = opened.tree.groups
    top = top_of(groups)
    shapes: dict[str, list[tuple[int, ...] | None]] = {}
    if top is None:
        return shapes
    for layer in names_in(groups.get(top, {}), "layer_names") or ():
        group = (*top, *layer.split("/"))
        names = names_in(groups.get(group, {}), "weight_names") or ()
        paths = [(*group, *name.split("/")) for name in names if SEEDS not in name]
        datasets = [opened.tree.datasets.get(path) for path in paths]
        shapes[layer] = [None if dataset is None else dataset.shape for dataset in datasets]
    return shapes


def tensors_with_names(opened: OpenedHdf5, called: Called = MappingProxyType({})) -> tuple[Tensor, ...]:
    """Return the tensors of a file with the names that Keras gives them, in its order."""
    groups = opened.tree.groups
    top = top_of(groups)
    tensors, findings = name_tensors(groups, opened.tensors, called)
    if top is not None and opened.complete:
        for layer in names_in(groups.get(top, {}), "layer_names") or ():
            if (*top, *layer.split("/")) not in groups:  # Keras makes one even without weights
                message = "a layer is listed, and its group is not there"
                opened.findings.append(error("weight-missing", message, f"layer {layer!r:.100}"))
        opened.findings += findings
    elif top is not None:
        opened.findings += (finding for finding in findings if finding.code != "weight-extra")
    return tensors


def name_tensors(
    groups: Groups, stored: Mapping[Steps, Tensor], called: Called = MappingProxyType({})
) -> tuple[tuple[Tensor, ...], list[Finding]]:
    """Return tensors with the names that Keras gives them, and findings for its lists.

    Args:
        groups: The attributes of all groups.
        stored: The datasets by their path in the file, which becomes the ``key`` of what is named otherwise.
        called: Names of layers in a configuration; a name in the group itself comes first.
    """
    top = top_of(groups)
    tensors, findings, taken, used = [], [], set(), set()
    for raw, path, role in () if top is None else _listed_variables(groups, top):
        tensor = stored.get(raw)
        if tensor is None or raw in taken:
            if tensor is None:
                findings.append(error("weight-missing", "it is listed, and not there", "/" + "/".join(raw)))
            continue
        taken.add(raw)
        name = raw if path in used else path
        used.add(name)
        tensors.append(replace(tensor, path=name, role=role, key=_key(raw, name)))
    rest = [path for path in stored if path not in taken]
    if top is not None:
        unlisted = (path for path in rest if path[: len(top)] == top and stored[path].shares_with is None)
        message = "its layer does not list it, so that Keras would not read it"
        findings += (error("weight-extra", message, "/" + "/".join(path)) for path in unlisted)
    rest.sort(key=lambda path: [natural(part) for part in path])
    names = _unambiguous({path: _known_path(groups, path, called) for path in rest}, used)
    for path in rest:
        name = names[path]
        tensors.append(replace(stored[path], path=name, role=role_of(path), key=_key(path, name)))
    return _rename_ties(stored, tensors), findings


def _key(raw: Steps, name: Path) -> str | None:
    return "/" + "/".join(raw) if name != raw else None


def _known_path(groups: Groups, path: Path, called: Called) -> Path:
    """Return the path under which people know a numbered variable: by the names of layers.

    Keras names the groups of a model's layers after their classes, and numbers them in the model's order;
    layers that nobody named have numbers in the order in which they were made.
    """
    parts = tuple(map(str, path))
    if parts[-2:-1] != (_VARIABLES,) or _LAYERS not in parts:
        return path
    names = []
    for at, part in enumerate(parts[:-2]):
        group = parts[: at + 1]
        if part != _LAYERS or (*group, _VARIABLES) in groups:
            is_layer = at > 0 and (parts[at - 1] == _LAYERS or part in _WRAPPED)
            names.append((called_in(groups, group) or called.get(group) or part) if is_layer else part)
    return (*names, parts[-1])


def called_in(groups: Groups, group: Steps) -> str | None:
    """Return the name of its layer that a group states, None without a plausible one."""
    name = groups.get((*group, _VARIABLES), {}).get("name")
    return name if isinstance(name, str) and 0 < len(name) <= _MAX_NAME else None


def _unambiguous(known: Mapping[Path, Path], used: set[Path]) -> dict[Path, Path]:
    """Return the names that no two variables would share; the others stay as they are in the file."""
    counts = Counter(".".join(map(str, path)) for path in (*known.values(), *used, *known))
    return {
        path: name if name != path and counts[".".join(map(str, name))] == 1 else path
        for path, name in known.items()
    }


def _rename_ties(stored: Mapping[Steps, Tensor], tensors: list[Tensor]) -> tuple[Tensor, ...]:
    names = {tensor.key: tensor.name for tensor in tensors if tensor.key}
    keys = {tensor.name: "/" + "/".join(path) for path, tensor in stored.items()}
    return tuple(
        replace(tensor, shares_with=names.get(keys.get(tensor.shares_with, ""), tensor.shares_with))
        if tensor.shares_with
        else tensor
        for tensor in tensors
    )


def _listed_variables(groups: Groups, top: Steps) -> Iterator[tuple[Steps, Path, Role]]:
    """Yield the dataset of each variable that a layer or the optimizer lists, with its name and role."""
    for layer in [*(names_in(groups.get(top, {}), "layer_names") or ()), TOP_LEVEL]:
        group = (*top, *layer.split("/"))
        for weight in names_in(groups.get(group, {}), "weight_names") or ():
            parts = weight.split("/")
            name = [*parts[:-1], parts[-1].partition(":")[0]]
            if layer in name:
                name = name[name.index(layer) + 1 :]
            prefix = () if layer == TOP_LEVEL else (layer,)
            role = Role.OTHER if SEEDS in weight else Role.WEIGHTS
            yield (*group, *parts), (*prefix, *name), role
    if top:  # a whole model, which may have an optimizer
        group = ("optimizer_weights",)
        for weight in names_in(groups.get(group, {}), "weight_names") or ():
            parts = weight.split("/")
            name = ["optimizer", *parts[:-1], parts[-1].partition(":")[0]]
            yield (*group, *parts), tuple(name), Role.OPTIMIZER


def role_of(path: Path) -> Role:
    """Return the role of a variable, by the groups in its path."""
    if path[0] in ("optimizer", "optimizer_weights") or "optimizer" in path[:-2]:
        return Role.OPTIMIZER
    if path[0] == "metrics" or any("metric" in str(part) for part in path[:2]):
        return Role.TRAINING
    return Role.OTHER if any(SEEDS in str(part) for part in path) else Role.WEIGHTS


def training_of(metadata: Mapping[str, Any], tensors: tuple[Tensor, ...], name: str) -> TrainingState:
    """Return the training state: the optimizer's counter and rate, the config's, and the file's name."""
    date = metadata.get("date_saved")
    state = training_state({"date_saved": date.replace("@", "T")} if isinstance(date, str) else {}, {}, name)
    values: dict[str, Any] = {}
    origin = dict(state.origin)
    for field, tensor in (("step", _counter(tensors)), ("learning_rate", _rate(tensors))):
        if tensor is not None:
            values[field] = lazy_scalar(tensor)()
            origin[field] = f"tensor {tensor.name}"
    rate = configured_rate(metadata)
    if values.get("learning_rate") is None and rate is not None:
        values["learning_rate"], origin["learning_rate"] = rate, "the optimizer's config"
    return replace(state, **{key: value for key, value in values.items() if value is not None}, origin=origin)


def _optimizer_scalars(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the scalars of the optimizer; those of the one that trains come first.

    An optimizer around another one, which scales the loss, never counts its own steps.
    """
    scalars = [
        tensor
        for tensor in tensors
        if tensor.role is Role.OPTIMIZER and tensor.size == 1 and tensor.values is not None
    ]
    return sorted(scalars, key=lambda one: len(one.path) > 1 and str(one.path[-2]).startswith(_SCALER))


def _counter(tensors: tuple[Tensor, ...]) -> Tensor | None:
    for tensor in _optimizer_scalars(tensors):
        is_counter = tensor.path[-1] in _ITERATION or tensor.path[-2:] == (_VARIABLES, "0")
        if tensor.dtype.kind == "integer" and is_counter:
            return tensor
    return None


def _rate(tensors: tuple[Tensor, ...]) -> Tensor | None:
    counter = _counter(tensors)
    for tensor in _optimizer_scalars(tensors):
        is_behind_counter = (
            counter and tensor.path == (*counter.path[:-1], "1") and tensor.path[-2] == _VARIABLES
        )
        is_rate = tensor.path[-1] in _RATE or is_behind_counter
        if tensor.dtype.kind == "float" and not tensor.shape and is_rate:
            return tensor
    return None


def configured_rate(metadata: Mapping[str, Any]) -> float | None:
    """Return the learning rate that the model was compiled with, where the config has a plain one.

    It has the digits that 32 bits have, where it has no more.
    """
    for keys in (
        ("model_config", "compile_config", "optimizer", "config", "learning_rate"),
        ("training_config", "optimizer_config", "config", "learning_rate"),
    ):
        node: Any = metadata
        for key in keys:
            node = node.get(key) if isinstance(node, Mapping) else None
        if isinstance(node, float | int) and not isinstance(node, bool):
            try:
                (single,) = struct.unpack("<f", struct.pack("<f", node))
            except OverflowError:
                return node
            return shortest_decimal(single) if single == node else node
    return None
