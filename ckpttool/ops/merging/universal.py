"""Merges a DeepSpeed universal checkpoint into one model, with the optimizer's state by parameter."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import Unsupported
from ckpttool.core.tensor import Role, Tensor
from ckpttool.core.text import counted, first_names
from ckpttool.formats.content.tree import replace_tensors, tensors_in
from ckpttool.formats.opening import open_file
from ckpttool.formats.torch.deepspeed import MODEL_STATES
from ckpttool.formats.torch.deepspeed_zero import MODULE, ZERO, is_full_precision, shapes_of
from ckpttool.ops.merging.merged_checkpoint import PARTITION_KEYS, MergedCheckpoint, with_contents
from ckpttool.ops.merging.zero_partitions import BASE

OPTIMIZER = "optimizer"
_FROZEN = "frozen_param_shapes"


def universal_model(checkpoint: Checkpoint, sources: tuple[str, ...]) -> MergedCheckpoint:
    """Return a universal checkpoint as one model in full precision, without the rounded copies of weights."""
    module = {
        ".".join(map(str, tensor.path[1:])): tensor
        for tensor in checkpoint.tensors
        if tensor.path[0] == MODULE and len(tensor.path) > 1
    }
    weights = [name for name, one in module.items() if one.shares_with is None and is_full_precision(one)]
    rest = [name for name, one in module.items() if one.shares_with is None and not is_full_precision(one)]
    _require_whole(checkpoint, module, rest)
    for name, owner in _ties(module).items():
        module[name] = replace(module[owner], path=(MODULE, name), shares_with=module[owner].name)
    module = {name: replace(one, path=(MODULE, name)) for name, one in module.items()}
    tree = {
        MODULE: module,
        OPTIMIZER: {"state": _states(checkpoint), "param_groups": _param_groups(checkpoint, weights)},
        **_shared_content(checkpoint),
    }
    whole = with_contents(
        checkpoint,
        tensors=tuple(dict.fromkeys((*module.values(), *tensors_in(tree)))),
        metadata={key: one for key, one in checkpoint.metadata.items() if key != ZERO},
        tree=tree,
        native=checkpoint.native,
    )
    notes = [f"{counted(len(weights), 'parameter')} in full precision, from a universal checkpoint"]
    if rest:
        notes.append(f"{counted(len(rest), 'tensor')} that the optimizer doesn't have: {first_names(rest)}")
    return MergedCheckpoint(checkpoint=whole, sources=sources, notes=tuple(notes))


def _states(checkpoint: Checkpoint) -> dict[str, dict[str, Tensor]]:
    """Return the optimizer's tensors by parameter and key: the files ``zero/<parameter>/<key>.pt``."""
    states: dict[str, dict[str, Tensor]] = {}
    for tensor in checkpoint.tensors:
        if tensor.path[0] == ZERO and len(tensor.path) == 3 and tensor.path[1] != "optimizer_state":
            _, name, state = map(str, tensor.path)
            states.setdefault(name, {})[state] = replace(tensor, path=(OPTIMIZER, "state", name, state))
    return states


def _model_states(checkpoint: Checkpoint) -> list[str]:
    """Return the paths of the model states of all ranks, the first rank's first."""
    return sorted(
        entry.path for entry in checkpoint.files if MODEL_STATES.fullmatch(os.path.basename(entry.path))
    )


def _require_whole(checkpoint: Checkpoint, module: Mapping[str, Tensor], rest: Sequence[str]) -> None:
    """Raise Unsupported if a tensor without a directory below ``zero/`` may be split across ranks.

    Args:
        checkpoint: The universal checkpoint.
        module: The model's tensors by name.
        rest: Names of those that are only in the model states.
    """
    # ``ds_to_universal`` converts what the optimizer has. The rest (frozen weights, buffers) is in the model
    # states alone, where it is whole only if one rank wrote all of it:
    # - Stage 3 leaves a placeholder of a frozen weight; its shape isn't that of ``frozen_param_shapes``.
    # - With several model states (tensor parallelism), only buffers, by ``buffer_names``, are in all alike.
    # - A weight that another rank's model states have, and ``zero/`` hasn't, would be lost.
    frozen = {
        name: one for group in shapes_of(checkpoint.metadata.get(_FROZEN)) for name, one in group.items()
    }
    names = [name for name in rest if module[name].shape != frozen.get(name, module[name].shape)]
    if len(_model_states(checkpoint)) > 1:
        buffers = checkpoint.metadata.get("buffer_names")
        known = {*(buffers if isinstance(buffers, list) else ()), *names}
        names += [name for name in rest if name not in known]
        others = (
            one.path[2:] for one in checkpoint.tensors if one.role is Role.WEIGHTS and MODULE in one.path[1:2]
        )
        names += [name for path in others if (name := ".".join(map(str, path))) not in module]
    if names:
        reason = f"{first_names(names)} may be split across ranks; {ZERO}/ has no directory for it"
        raise Unsupported(checkpoint.path, reason, expected=f"all parameters below {ZERO}/")


def _shared_content(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the content of the first model states next to the model."""
    with open_file(_model_states(checkpoint)[0]) as part:
        tree = part.tree if isinstance(part.tree, dict) else {}
        kept = {key: value for key, value in tree.items() if key not in PARTITION_KEYS}
    by_path = {tensor.path: tensor for tensor in checkpoint.tensors}
    inside = {id(one): by_path[one.path] for one in tensors_in(kept) if one.path in by_path}
    content = replace_tensors(kept, inside)
    return dict(content) if isinstance(content, dict) else {}


def _ties(module: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the owner of each tied weight, both by their names in the model states."""
    names = {one.name: name for name, one in module.items()}
    shared = (
        (name, names.get(one.shares_with)) for name, one in module.items() if one.shares_with is not None
    )
    return {name: owner for name, owner in shared if owner is not None and owner != name}


def _param_groups(checkpoint: Checkpoint, weights: Sequence[str]) -> list[dict[str, Any]]:
    """Return the optimizer's param_groups; ``params`` is set only if there is one group.

    A universal checkpoint doesn't record which parameters are in which group.
    """
    zero = checkpoint.metadata.get(ZERO)
    outer = zero.get("optimizer_state_dict") if isinstance(zero, Mapping) else None
    base = outer.get(BASE) if isinstance(outer, Mapping) else None
    groups = base.get("param_groups") if isinstance(base, Mapping) else None
    found = [dict(one) for one in groups if isinstance(one, Mapping)] if isinstance(groups, list) else []
    if len(found) == 1:
        found[0]["params"] = list(weights)
    return found
