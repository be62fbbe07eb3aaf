"""Names, roles and training state of what Keras stores in HDF5, in its three layouts.

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
from typing import Any

from ckpttool.checkpoint import TrainingState
from ckpttool.formats.content.scalars import lazy_scalar, shortest
from ckpttool.formats.hdf5.tensors import OpenedHdf5
from ckpttool.formats.interface import natural
from ckpttool.report import Finding, error
from ckpttool.tensor import Path, Role, Tensor
from ckpttool.training import training_state
from ckpttool.wire.hdf5 import Attributes

MODEL, WEIGHTS = "model", "weights"
TOP_LEVEL = "top_level_model_weights"

Groups = Mapping[tuple[str, ...], Attributes]
Called = Mapping[tuple[str, ...], str]
"""What layers are called, by their groups, where the file says it elsewhere than in the group."""

_ITERATION = ("iteration", "iter", "iterations")
_RATE = ("learning_rate", "lr", "current_learning_rate")
_LAYERS, _VARIABLES = "layers", "vars"
_SCALER = "loss_scale_optimizer"
_SEEDS = "seed_generator"
_MAX_NAME = 255
_WRAPPED = ("layer", "forward_layer", "backward_layer")
"""Where Keras's wrappers have the layers that they are around."""
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


def top_of(groups: Groups) -> tuple[str, ...] | None:
    """Return the group that lists layers, or None if there is none."""
    tops: tuple[tuple[str, ...], ...] = ("model_weights",), ()
    return next((top for top in tops if names_in(groups.get(top, {}), "layer_names") is not None), None)


def layers_of(opened: OpenedHdf5) -> dict[str, list[tuple[int, ...] | None]]:
    """Return the shapes of the weights that each listed layer lists; None if one is not there."""
    groups = opened.tree.groups
    top = top_of(groups)
    found: dict[str, list[tuple[int, ...] | None]] = {}
    if top is None:
        return found
    for layer in names_in(groups.get(top, {}), "layer_names") or ():
        group = (*top, *layer.split("/"))
        names = names_in(groups.get(group, {}), "weight_names") or ()
        paths = [(*group, *name.split("/")) for name in names if _SEEDS not in name]
        kept = [opened.tree.datasets.get(path) for path in paths]
        found[layer] = [None if one is None else one.shape for one in kept]
    return found


def _missing_groups(groups: Groups, top: tuple[str, ...]) -> Iterator[Finding]:
    """Yield an error for each listed layer that has no group: Keras makes one even without weights."""
    for layer in names_in(groups.get(top, {}), "layer_names") or ():
        if (*top, *layer.split("/")) not in groups:
            yield error(
                "weight-missing", "a layer is listed, and its group is not there", f"layer {layer!r:.100}"
            )


def tensors_with_names(opened: OpenedHdf5, called: Called = MappingProxyType({})) -> tuple[Tensor, ...]:
    """Return the tensors of a file with the names that Keras gives them, in its order."""
    groups = opened.tree.groups
    top = top_of(groups)
    tensors, findings = name_tensors(groups, opened.tensors, called)
    if top is not None and opened.complete:
        opened.findings += _missing_groups(groups, top)
        opened.findings += findings
    elif top is not None:
        opened.findings += (finding for finding in findings if finding.code != "weight-extra")
    return tensors


def name_tensors(
    groups: Groups, stored: Mapping[tuple[str, ...], Tensor], called: Called = MappingProxyType({})
) -> tuple[tuple[Tensor, ...], list[Finding]]:
    """Return tensors with the names that Keras gives them, and what its lists say of them that is wrong.

    Args:
        groups: The attributes of all groups.
        stored: The datasets by their path in the file, which becomes the ``key`` of what is named otherwise.
        called: What a configuration calls layers; where a group says it, that holds.
    """
    top = top_of(groups)
    listed = (
        [] if top is None else [*_listed_weights(groups, top), *(_listed_optimizer(groups) if top else ())]
    )
    tensors, findings, taken, used = [], [], set(), set()
    for raw, path, role in listed:
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
        findings += (error("weight-extra", message, "/" + "/".join(one)) for one in unlisted)
    rest.sort(key=lambda path: [natural(part) for part in path])
    known = _unambiguous({path: _known_path(groups, path, called) for path in rest}, used)
    for path in rest:
        renamed = replace(stored[path], path=known[path], role=role_of(path), key=_key(path, known[path]))
        tensors.append(renamed)
    return _renamed_ties(stored, tensors), findings


def _key(raw: tuple[str, ...], name: Path) -> str | None:
    return "/" + "/".join(raw) if name != raw else None


def _known_path(groups: Groups, path: Path, called: Called) -> Path:
    """Return the path under which people know a numbered variable: by the names of layers.

    Keras names the groups of a model's layers after their classes, and numbers them in the model's order;
    layers that nobody named have numbers in the order in which they were made.
    """
    parts = tuple(map(str, path))
    if parts[-2:-1] != (_VARIABLES,) or _LAYERS not in parts:
        return path
    found = []
    for at, part in enumerate(parts[:-2]):
        group = parts[: at + 1]
        if part != _LAYERS or (*group, _VARIABLES) in groups:
            is_layer = at > 0 and (parts[at - 1] == _LAYERS or part in _WRAPPED)
            found.append((called_in(groups, group) or called.get(group) or part) if is_layer else part)
    return (*found, parts[-1])


def called_in(groups: Groups, group: tuple[str, ...]) -> str | None:
    """Return what a group says that its layer is called, None where it says nothing that could be a name."""
    name = groups.get((*group, _VARIABLES), {}).get("name")
    return name if isinstance(name, str) and 0 < len(name) <= _MAX_NAME else None


def _unambiguous(known: Mapping[Path, Path], used: set[Path]) -> dict[Path, Path]:
    """Return the names that no two variables would share; the others stay as they are in the file."""
    counts = Counter(".".join(map(str, path)) for path in (*known.values(), *used, *known))
    return {
        path: name if name != path and counts[".".join(map(str, name))] == 1 else path
        for path, name in known.items()
    }


def _renamed_ties(stored: Mapping[tuple[str, ...], Tensor], tensors: list[Tensor]) -> tuple[Tensor, ...]:
    names = {tensor.key: tensor.name for tensor in tensors if tensor.key}
    keys = {tensor.name: "/" + "/".join(path) for path, tensor in stored.items()}
    return tuple(
        replace(tensor, shares_with=names.get(keys.get(tensor.shares_with, ""), tensor.shares_with))
        if tensor.shares_with
        else tensor
        for tensor in tensors
    )


def _listed_weights(groups: Groups, top: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Path, Role]]:
    for layer in [*(names_in(groups.get(top, {}), "layer_names") or ()), TOP_LEVEL]:
        group = (*top, *layer.split("/"))
        for weight in names_in(groups.get(group, {}), "weight_names") or ():
            parts = weight.split("/")
            told = [*parts[:-1], parts[-1].partition(":")[0]]
            if layer in told:
                told = told[told.index(layer) + 1 :]
            prefix = () if layer == TOP_LEVEL else (layer,)
            role = Role.OTHER if _SEEDS in weight else Role.WEIGHTS
            yield (*group, *parts), (*prefix, *told), role


def _listed_optimizer(groups: Groups) -> Iterator[tuple[tuple[str, ...], Path, Role]]:
    group = ("optimizer_weights",)
    for weight in names_in(groups.get(group, {}), "weight_names") or ():
        parts = weight.split("/")
        yield (*group, *parts), ("optimizer", *parts[:-1], parts[-1].partition(":")[0]), Role.OPTIMIZER


def role_of(path: Path) -> Role:
    """Return what a variable serves, from the groups that it lies in."""
    if path[0] in ("optimizer", "optimizer_weights") or "optimizer" in path[:-2]:
        return Role.OPTIMIZER
    if path[0] == "metrics" or any("metric" in str(part) for part in path[:2]):
        return Role.TRAINING
    return Role.OTHER if any(_SEEDS in str(part) for part in path) else Role.WEIGHTS


def training_of(told: Mapping[str, Any], tensors: tuple[Tensor, ...], name: str) -> TrainingState:
    """Return the training state: the optimizer's counter and rate, the config's, and the file's name."""
    date = told.get("date_saved")
    found = {"date_saved": date.replace("@", "T")} if isinstance(date, str) else {}
    state = training_state(found, {}, name)
    values: dict[str, Any] = {}
    origin = dict(state.origin)
    for field, tensor in (("step", _counter(tensors)), ("learning_rate", _rate(tensors))):
        if tensor is not None:
            values[field] = lazy_scalar(tensor)()
            origin[field] = f"tensor {tensor.name}"
    rate = configured_rate(told)
    if values.get("learning_rate") is None and rate is not None:
        values["learning_rate"], origin["learning_rate"] = rate, "the optimizer's config"
    return replace(state, **{key: value for key, value in values.items() if value is not None}, origin=origin)


def _optimizers(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the scalars of the optimizer; of the one that trains before what scales its loss."""
    found = [
        one for one in tensors if one.role is Role.OPTIMIZER and one.size == 1 and one.values is not None
    ]
    return sorted(found, key=lambda one: _scales_loss(one.path))


def _scales_loss(path: Path) -> bool:
    """Return whether a variable is of an optimizer around another one, which never counts its own steps."""
    return str(path[-2:-1][0]).startswith(_SCALER) if len(path) > 1 else False


def _counter(tensors: tuple[Tensor, ...]) -> Tensor | None:
    return next(
        (
            one
            for one in _optimizers(tensors)
            if one.dtype.kind == "integer" and (one.path[-1] in _ITERATION or one.path[-2:] == ("vars", "0"))
        ),
        None,
    )


def _rate(tensors: tuple[Tensor, ...]) -> Tensor | None:
    counted = _counter(tensors)
    return next(
        (
            one
            for one in _optimizers(tensors)
            if one.dtype.kind == "float"
            and not one.shape
            and (
                one.path[-1] in _RATE
                or (counted and one.path == (*counted.path[:-1], "1") and one.path[-2] == "vars")
            )
        ),
        None,
    )


def configured_rate(told: Mapping[str, Any]) -> float | None:
    """Return the learning rate that the model was compiled with, where the config has a plain one."""
    for keys in (
        ("model_config", "compile_config", "optimizer", "config", "learning_rate"),
        ("training_config", "optimizer_config", "config", "learning_rate"),
    ):
        node: Any = told
        for key in keys:
            node = node.get(key) if isinstance(node, Mapping) else None
        if isinstance(node, float | int) and not isinstance(node, bool):
            return _written_rate(node)
    return None


def _written_rate(rate: float) -> float:
    """Return a rate with the digits that 32 bits have, where it has no more."""
    try:
        (single,) = struct.unpack("<f", struct.pack("<f", rate))
    except OverflowError:
        return rate
    return shortest(single) if single == rate else rate
