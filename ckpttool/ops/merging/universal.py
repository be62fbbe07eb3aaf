"""DeepSpeed's universal checkpoints as one model in full precision, with the optimizer's state by name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import Unsupported
from ckpttool.core.report import counted, first_names
from ckpttool.core.tensor import Role, Tensor
from ckpttool.formats.content.tree import replace_tensors, tensors_in
from ckpttool.formats.parts import open_file
from ckpttool.formats.torch.deepspeed import MODEL_STATES
from ckpttool.formats.torch.deepspeed_universal import FP32, ZERO
from ckpttool.ops.merging.discarded_rank_state import OF_PARTITIONS
from ckpttool.ops.merging.merged_checkpoint import MergedCheckpoint, with_contents
from ckpttool.ops.merging.zero_partitions import BASE

MODULE, OPTIMIZER = "module", "optimizer"


def universal_model(checkpoint: Checkpoint, sources: tuple[str, ...]) -> MergedCheckpoint:
    """Return a universal checkpoint with its weights in full precision, for the rounded copies."""
    weights, states = _by_parameter(checkpoint)
    module: dict[str, Tensor] = {}
    for tensor in checkpoint.tensors:
        if tensor.path[0] == MODULE and len(tensor.path) == 2:
            name = str(tensor.path[1])
            module[name] = weights.get(name, tensor)
    module = {**module, **{name: one for name, one in weights.items() if name not in module}}
    _require_whole(checkpoint, module, weights)
    for name, owner in _ties(checkpoint, module).items():
        module[name] = replace(module[owner], path=(MODULE, name), shares_with=module[owner].name)
    groups = _param_groups(checkpoint, weights)
    tree = {
        MODULE: module,
        OPTIMIZER: {"state": states, "param_groups": groups},
        **_shared_content(checkpoint),
    }
    whole = with_contents(
        checkpoint,
        tensors=tuple(dict.fromkeys((*module.values(), *tensors_in(tree)))),
        metadata={key: one for key, one in checkpoint.metadata.items() if key != ZERO},
        tree=tree,
        native=checkpoint.native,
    )
    note = f"{counted(len(weights), 'parameter')} in full precision, from a universal checkpoint"
    return MergedCheckpoint(checkpoint=whole, sources=sources, notes=(note,))


def _by_parameter(checkpoint: Checkpoint) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Return the weights by parameter, and what the optimizer keeps of each."""
    weights: dict[str, Tensor] = {}
    states: dict[str, dict[str, Tensor]] = {}
    for tensor in checkpoint.tensors:
        if tensor.path[0] != ZERO or len(tensor.path) != 3 or tensor.path[1] == "optimizer_state":
            continue
        _, name, state = map(str, tensor.path)
        if state == FP32:
            weights[name] = replace(tensor, path=(MODULE, name), role=Role.WEIGHTS)
        else:
            path = (OPTIMIZER, "state", name, state)
            states.setdefault(name, {})[state] = replace(tensor, path=path)
    return weights, states


def _model_states(checkpoint: Checkpoint) -> list[str]:
    """Return the paths of the model states of all ranks, the first rank's first."""
    return sorted(
        entry.path for entry in checkpoint.files if MODEL_STATES.fullmatch(os.path.basename(entry.path))
    )


def _require_whole(
    checkpoint: Checkpoint, module: Mapping[str, Tensor], weights: Mapping[str, Tensor]
) -> None:
    """Require that nothing is taken from the model states of one rank that others may hold slices of."""
    if len(_model_states(checkpoint)) < 2:
        return
    buffers = checkpoint.metadata.get("buffer_names")
    known = {*weights, *(buffers if isinstance(buffers, list) else ())}
    names = [name for name, tensor in module.items() if tensor.shares_with is None and name not in known]
    if names:
        reason = f"each rank may have a slice of {first_names(names)}, which lies in no directory of its own"
        raise Unsupported(checkpoint.path, reason, expected=f"all parameters below {ZERO}/")


def _shared_content(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what the first model states hold beside the model."""
    with open_file(_model_states(checkpoint)[0]) as part:
        tree = part.tree if isinstance(part.tree, dict) else {}
        kept = {key: value for key, value in tree.items() if key not in OF_PARTITIONS}
    by_path = {tensor.path: tensor for tensor in checkpoint.tensors}
    inside = {id(one): by_path[one.path] for one in tensors_in(kept) if one.path in by_path}
    content = replace_tensors(kept, inside)
    return dict(content) if isinstance(content, dict) else {}


def _ties(checkpoint: Checkpoint, module: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the owner of each weight that shares its values, as the model states name them."""
    stated = checkpoint.metadata.get("shared_params")
    ties = dict(stated) if isinstance(stated, Mapping) else {}
    for name, tensor in module.items():
        if tensor.shares_with is not None:
            ties.setdefault(name, tensor.shares_with.removeprefix(f"{MODULE}."))
    return {name: owner for name, owner in ties.items() if owner in module and owner != name}


def _param_groups(checkpoint: Checkpoint, weights: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Return the optimizer's settings; which parameter is in which group is said only if there is one."""
    zero = checkpoint.metadata.get(ZERO)
    outer = zero.get("optimizer_state_dict") if isinstance(zero, Mapping) else None
    base = outer.get(BASE) if isinstance(outer, Mapping) else None
    groups = base.get("param_groups") if isinstance(base, Mapping) else None
    found = [dict(one) for one in groups if isinstance(one, Mapping)] if isinstance(groups, list) else []
    if len(found) == 1:
        found[0]["params"] = list(weights)
    return found
