"""Names, roles and training state of Keras's variables in HDF5, listed or numbered.

Whole models (below ``model_weights``) and old weights (at the root) list layers and weights in attributes;
``.weights.h5`` has groups of numbered variables, in the order in which the layer made them.

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
from ckpttool.formats.interface import natural

if TYPE_CHECKING:
    from ckpttool.formats.hdf5.tensors import OpenedHdf5
    from ckpttool.formats.keras.layer_tree import Steps

MODEL, WEIGHTS = "model", "weights"
TOP_LEVEL = "top_level_model_weights"

Groups = Mapping[tuple[str, ...], Attributes]
LayerNames = Mapping[tuple[str, ...], str]
"""Names of layers in a configuration, by their groups."""

_ITERATION = ("iteration", "iter", "iterations")
_RATE = ("learning_rate", "lr", "current_learning_rate")
_LAYERS, _VARIABLES = "layers", "vars"
_SCALER = "loss_scale_optimizer"
SEEDS = "seed_generator"
"""Part of the names of variables that hold the state of a random number generator."""
_MAX_NAME = 255
"""Maximum length of a layer's name in characters; a longer one is taken for damage."""
_WRAPPED = ("layer", "forward_layer", "backward_layer")
"""Groups of the layers inside Keras's wrappers."""
OLD_LAYERS = "_layer_checkpoint_dependencies"
"""Beginning of the names of the layers' groups in ``.weights.h5`` of Keras 2.12 and before."""
TOP_GROUPS = (_LAYERS, "optimizer", _VARIABLES, OLD_LAYERS, "metrics")
"""Groups at the root of a ``.weights.h5``."""


def kind_of_file(opened: OpenedHdf5) -> str | None:
    """Return the variant of a Keras file, or None if it is not one."""
    # The groups of ``.weights.h5`` have no attribute of their own that says Keras, so it takes both a group
    # ``vars`` and one of Keras's names at the top. Keras 2.12 wrote ``_layer_checkpoint_dependencies\dense``.
    groups, root = opened.tree.groups, opened.tree.groups.get((), {})
    if "model_config" in root or "layer_names" in groups.get(("model_weights",), {}):
        return MODEL
    if names_in(root, "layer_names") is not None:
        return WEIGHTS
    has_variables = any(
        path[-1:] == (_VARIABLES,) and path[0].partition("\\")[0] in TOP_GROUPS for path in groups
    )
    return WEIGHTS if has_variables else None


def names_in(attributes: Attributes, key: str) -> list[str] | None:
    """Return the list of names in an attribute, or None if there is none."""
    # HDF5 limits an attribute to 64 KiB. Keras splits longer lists: ``layer_names0``, ``layer_names1`` …
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


def listed_shapes(opened: OpenedHdf5) -> dict[str, list[tuple[int, ...] | None]]:
    """Return the shapes of the weights in the list of each layer; None for a missing weight."""
    groups = opened.tree.groups
    top = top_of(groups)
    shapes: dict[str, list[tuple[int, ...] | None]] = {}
    if top is None:
        return shapes
    for layer in names_in(groups.get(top, {}), "layer_names") or ():
        group = (*top, *layer.split("/"))
        # The state of a seed generator is listed with the weights, but doesn't follow from the configuration
        # with which these shapes are compared.
        names = names_in(groups.get(group, {}), "weight_names") or ()
        paths = [(*group, *name.split("/")) for name in names if SEEDS not in name]
        datasets = [opened.tree.datasets.get(path) for path in paths]
        shapes[layer] = [None if dataset is None else dataset.shape for dataset in datasets]
    return shapes


def tensors_with_names(
    opened: OpenedHdf5, layer_names: LayerNames = MappingProxyType({})
) -> tuple[Tensor, ...]:
    """Return the tensors of a file with the names that Keras gives them, in its order."""
    groups = opened.tree.groups
    top = top_of(groups)
    tensors, findings = name_tensors(groups, opened.tensors, layer_names)
    if top is not None and opened.complete:
        for layer in names_in(groups.get(top, {}), "layer_names") or ():
            if (*top, *layer.split("/")) not in groups:  # Keras makes one even without weights
                message = "a listed layer has no group"
                opened.findings.append(error("weight-missing", message, f"layer {layer!r:.100}"))
        opened.findings += findings
    elif top is not None:
        opened.findings += (finding for finding in findings if finding.code != "weight-extra")
    return tensors


def name_tensors(
    groups: Groups, stored: Mapping[Steps, Tensor], layer_names: LayerNames = MappingProxyType({})
) -> tuple[tuple[Tensor, ...], list[Finding]]:
    """Return tensors with the names that Keras gives them, and findings for its lists.

    Args:
        groups: The attributes of all groups.
        stored: The datasets by their path in the file, which becomes the ``key`` of a renamed tensor.
        layer_names: Names of layers in a configuration; a name in the group itself comes first.
    """
    # Listed variables come in the order of their lists, which is the order of the model. Two lists may name
    # one dataset, and two datasets may get one name: the first has it, the second has its path in the file.
    top = top_of(groups)
    tensors, findings, taken, used = [], [], set(), set()
    for raw, path, role in () if top is None else _listed_variables(groups, top):
        tensor = stored.get(raw)
        if tensor is None or raw in taken:
            if tensor is None:
                findings.append(error("weight-missing", "listed, but missing", "/" + "/".join(raw)))
            continue
        taken.add(raw)
        name = raw if path in used else path
        used.add(name)
        tensors.append(replace(tensor, path=name, role=role, key=_key(raw, name)))
    rest = [path for path in stored if path not in taken]
    if top is not None:
        unlisted = (path for path in rest if path[: len(top)] == top and stored[path].shares_with is None)
        message = "its layer does not list it, so Keras would not read it"
        findings += (error("weight-extra", message, "/" + "/".join(path)) for path in unlisted)
    rest.sort(key=lambda path: [natural(part) for part in path])
    names = _unambiguous({path: _path_by_layers(groups, path, layer_names) for path in rest}, used)
    for path in rest:
        name = names[path]
        tensors.append(replace(stored[path], path=name, role=role_of(path), key=_key(path, name)))
    return _rename_ties(stored, tensors), findings


def _key(raw: Steps, name: Path) -> str | None:
    return "/" + "/".join(raw) if name != raw else None


def stored_path(tensor: Tensor) -> Steps:
    """Return the path of a tensor in the file: groups, and name of the dataset."""
    return tuple(tensor.key[1:].split("/")) if tensor.key else tuple(map(str, tensor.path))


def _path_by_layers(groups: Groups, path: Path, layer_names: LayerNames) -> Path:
    """Return the path of a numbered variable, by the names of layers: ``fc2.0`` for the kernel of ``fc2``."""
    # ``layers/dense_1/vars/0``: the group is named after the class, and numbered in the order of the model.
    # The layer's own name, which users know, is the attribute ``name`` of ``vars`` in Keras 3; in Keras 2
    # only the configuration has it. Groups such as ``layers`` hold no variables and belong to no layer: they
    # are left out.
    parts = tuple(map(str, path))
    if parts[-2:-1] != (_VARIABLES,) or _LAYERS not in parts:
        return path
    names = []
    for at, part in enumerate(parts[:-2]):
        group = parts[: at + 1]
        if part != _LAYERS or (*group, _VARIABLES) in groups:
            is_layer = at > 0 and (parts[at - 1] == _LAYERS or part in _WRAPPED)
            names.append(
                (layer_name_in(groups, group) or layer_names.get(group) or part) if is_layer else part
            )
    return (*names, parts[-1])


def layer_name_in(groups: Groups, group: Steps) -> str | None:
    """Return the name of the layer in the attributes of its group, or None without a plausible one."""
    name = groups.get((*group, _VARIABLES), {}).get("name")
    return name if isinstance(name, str) and 0 < len(name) <= _MAX_NAME else None


def _unambiguous(known: Mapping[Path, Path], used: set[Path]) -> dict[Path, Path]:
    """Return the new names by path; variables that would share one keep their path in the file."""
    counts = Counter(".".join(map(str, path)) for path in (*known.values(), *used, *known))
    return {
        path: name if name != path and counts[".".join(map(str, name))] == 1 else path
        for path, name in known.items()
    }


def _rename_ties(stored: Mapping[Steps, Tensor], tensors: list[Tensor]) -> tuple[Tensor, ...]:
    # ``shares_with`` still has the name that the owner had by its path in the file.
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
            # ``fc/kernel:0`` (Keras 2) and ``sequential/fc/kernel`` (Keras 3) of the layer ``fc`` are both
            # ``fc.kernel``.
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
    """Return the scalars of the optimizer."""
    # A LossScaleOptimizer wraps the one that trains and never counts its own steps, so its scalars are last.
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
        # Numbered optimizers have the counter as variable 0, and the learning rate as 1.
        is_after_counter = (
            counter and tensor.path == (*counter.path[:-1], "1") and tensor.path[-2] == _VARIABLES
        )
        is_rate = tensor.path[-1] in _RATE or is_after_counter
        if tensor.dtype.kind == "float" and not tensor.shape and is_rate:
            return tensor
    return None


def configured_rate(metadata: Mapping[str, Any]) -> float | None:
    """Return the learning rate that the model was compiled with; None if the config has no plain number."""
    # The config has the float64 of a float32 variable: 0.0010000000474974513, which is returned as 0.001.
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
