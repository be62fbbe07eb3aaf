"""Merges a DeepSpeed checkpoint into one model in full precision, with the optimizer's state by parameter.

With ZeRO each rank has a partition of the master weights (float32, which the optimizer updates) and of the
optimizer's state. The partitions of all ranks are cut into parameters here; the bfloat16 or float16 copies
that the model computes with are left out.

Source: deepspeedai/DeepSpeed ``deepspeed/utils/zero_to_fp32.py``, ``deepspeed/runtime/bf16_optimizer.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpttool.containers.pickle.pickle_nodes import Call, Global
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import DamagedCheckpoint
from ckpttool.core.report import Problem
from ckpttool.core.tensor import Path, Role, Tensor
from ckpttool.core.text import counted
from ckpttool.formats.content.tree import replace_tensors, tensors_in
from ckpttool.formats.opening import open_file
from ckpttool.formats.torch.deepspeed_zero import STATES
from ckpttool.ops.merging.merged_checkpoint import (
    OPTIMIZER_KEYS,
    PARTITION_KEYS,
    MergedCheckpoint,
    discarded_rank_state,
    with_contents,
)
from ckpttool.ops.merging.zero_partitions import (
    BASE,
    INNER,
    ParameterCut,
    Rank,
    ZeroJob,
    cuts_of,
    job_of,
    param_groups_of,
)

MODULE, OPTIMIZER = "module", "optimizer"


def full_precision(checkpoint: Checkpoint, sources: tuple[str, ...]) -> MergedCheckpoint:
    """Return a DeepSpeed checkpoint in full precision, with the optimizer's state by parameter.

    A checkpoint without ZeRO has no partitions: it keeps its tensors.
    """
    job = job_of(checkpoint)
    if not job.zero or not all(stage.ranks for stage in job.stages):
        return MergedCheckpoint(checkpoint=_with_nested_content(checkpoint, job), sources=sources)
    cuts = {cut.name: cut for cut in cuts_of(job)}
    if not cuts:
        found = "the files don't record the shapes of parameters (param_shapes)"
        raise DamagedCheckpoint(job.first, found, code="partition-sum")
    module = _module(checkpoint, cuts)
    states, dropped = _optimizer_states(cuts)
    content, optimizer = _shared_content(checkpoint, job)
    dropped += discarded_rank_state(checkpoint, job)
    groups, settings = _param_groups(job, cuts, optimizer)
    tree = {
        MODULE: {tensor.path[1]: tensor for tensor in module},
        OPTIMIZER: {"state": states, "param_groups": groups, **settings},
        **content,
    }
    whole = with_contents(
        checkpoint,
        tensors=tuple(dict.fromkeys((*module, *tensors_in(tree)))),
        metadata=checkpoint.metadata,
        tree=tree,
        native=checkpoint.native,
    )
    ranks = counted(sum(len(stage.ranks) for stage in job.stages), "rank")
    note = f"{counted(len(cuts), 'parameter')} in full precision, from {ranks} of ZeRO {job.zero}"
    return MergedCheckpoint(checkpoint=whole, sources=sources, dropped=tuple(dropped), notes=(note,))


def _with_nested_content(checkpoint: Checkpoint, job: ZeroJob) -> Checkpoint:
    """Return a checkpoint without ZeRO, with nested content if the first model states have all tensors."""
    tree = _tree(job.first)
    by_path = {tensor.path: tensor for tensor in checkpoint.tensors}
    inside = {} if tree is None else {one.path: id(one) for one in tensors_in(tree)}
    if tree is None or inside.keys() != by_path.keys():
        return checkpoint
    return with_contents(
        checkpoint,
        tensors=checkpoint.tensors,
        metadata=checkpoint.metadata,
        tree=replace_tensors(tree, {inside[path]: tensor for path, tensor in by_path.items()}),
        native=checkpoint.native,
    )


# The model ------------------------------------------------------------------------------------------------


def _module(checkpoint: Checkpoint, cuts: Mapping[str, ParameterCut]) -> list[Tensor]:
    """Return the model's tensors in full precision in the order of the model states, tied ones last."""
    # Stage 3 leaves empty placeholders in the model states, whose parameters come after the others. A tied
    # weight has no partition. Its owner is in ``shared_params``; versions of DeepSpeed without that still
    # save both names as views of one storage. Ties come last, because an owner is to be before its ties.
    stated = checkpoint.metadata.get("shared_params")
    owners = stated if isinstance(stated, Mapping) else {}
    tensors: dict[str, Tensor] = {}
    for tensor in checkpoint.tensors:
        if tensor.path[0] == MODULE and len(tensor.path) == 2:
            name = str(tensor.path[1])
            tensors[name] = _full_weights(cuts[name]) if name in cuts and tensor.size else tensor
    for name, cut in cuts.items():
        if name not in tensors:
            tensors[name] = _full_weights(cut)
    ties = {}
    for name, tensor in tensors.items():
        if name in cuts:
            continue
        owner = owners.get(name)
        if not isinstance(owner, str) or owner not in tensors or owner == name:
            owner = None if tensor.shares_with is None else tensor.shares_with.removeprefix(f"{MODULE}.")
        if owner is not None and owner in tensors:
            whole = tensors[owner]
            ties[name] = replace(whole, path=(MODULE, name), shares_with=whole.name)
    return [tensor for name, tensor in tensors.items() if name not in ties] + [*ties.values()]


def _full_weights(cut: ParameterCut) -> Tensor:
    whole = cut.weights((MODULE, cut.name))
    if whole is None:
        path = cut.runs[0].rank.path
        found = "its elements aren't stored contiguously, so its partitions can't be joined"
        raise DamagedCheckpoint(path, found, where=cut.name, code="partitions-apart")
    return whole


# The optimizer --------------------------------------------------------------------------------------------


def _optimizer_states(cuts: Mapping[str, ParameterCut]) -> tuple[dict[str, dict[str, object]], list[Problem]]:
    """Return the optimizer's state by parameter and key, and the states that can't be cut into parameters."""
    # A state with one value for a whole group (``step``) is given to each of its parameters. A state with a
    # value for each element (``exp_avg``) is cut like the master weights. Others can't be assigned to
    # parameters.
    states: dict[str, dict[str, object]] = {}
    dropped = []
    for name, cut in cuts.items():
        state = states.setdefault(name, {})
        keys = (key for run in cut.runs for at in run.groups for key in run.rank.states.get(at, ()))
        for key in dict.fromkeys(keys):
            path: Path = (OPTIMIZER, "state", name, key)
            value = _shared_state(cut, key, path)
            value = cut.state(path, key) if value is None else value
            if value is None:
                why = "the ranks don't store it per element, or store it differently"
                dropped.append(Problem(".".join(map(str, path)), why))
            else:
                state[key] = value
    return states, dropped


def _shared_state(cut: ParameterCut, key: str, path: Path) -> object:
    """Return a state that has one value for a whole group, equal in all ranks (``step``); None for others."""
    first, *others = (run.rank.states.get(at, {}).get(key) for run in cut.runs for at in run.groups)
    if not isinstance(first, Tensor):
        return first if all(type(other) is type(first) and other == first for other in others) else None
    if first.shape != ():
        return None
    for other in others:
        if not isinstance(other, Tensor) or (first.dtype, first.shape) != (other.dtype, other.shape):
            return None
        if first.tobytes() != other.tobytes():
            return None
    # Each parameter gets its own tensor. If they shared one in memory, each of the optimizer's updates
    # would increment the step once for each parameter.
    return replace(first, path=path, role=Role.OPTIMIZER, shares_with=None, storage=None)


def _param_groups(
    job: ZeroJob, cuts: Mapping[str, ParameterCut], optimizer: Mapping[str, Any]
) -> tuple[list[dict[str, object]], dict[str, object]]:
    """Return the optimizer's param_groups, by names of parameters, and its other entries without tensors."""
    inner: Mapping[str, Any] = next(
        (optimizer[name] for name in (BASE, INNER) if isinstance(optimizer.get(name), Mapping)), {}
    )
    stated = inner.get("param_groups")
    settings: Sequence[Any] = stated if isinstance(stated, list) else param_groups_of(job.stages[0].ranks[0])
    count = max((cut.group for cut in cuts.values()), default=-1) + 1
    groups = []
    for at in range(count):
        own = settings[at] if at < len(settings) and isinstance(settings[at], Mapping) else {}
        groups.append({**own, "params": [cut.name for cut in cuts.values() if cut.group == at]})
    rest = {}
    for key, value in optimizer.items():
        if key in OPTIMIZER_KEYS:
            continue
        # An object of DeepSpeed's, such as the loss scaler, is replaced by its attributes: without DeepSpeed
        # its class can't be imported.
        if isinstance(value, Call) and isinstance(value.function, Global) and isinstance(value.state, dict):
            value = dict(value.state) if value.function.module.startswith("deepspeed.") else value
        if not any(tensors_in(value)):
            rest[key] = value
    return groups, rest


# Other content --------------------------------------------------------------------------------------------


def _shared_content(checkpoint: Checkpoint, job: ZeroJob) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Return the first model states' content next to the model, and the first rank's optimizer states."""
    stated = _tree(job.first) or {
        key: value for key, value in checkpoint.metadata.items() if key not in job.stems
    }
    by_path = {tensor.path: tensor for tensor in checkpoint.tensors}
    kept = {key: value for key, value in stated.items() if key not in PARTITION_KEYS}
    inside = {id(one): by_path[one.path] for one in tensors_in(kept) if one.path in by_path}
    content = replace_tensors(kept, inside)
    rank: Rank = job.stages[0].ranks[0]
    states = (_tree(rank.path) or rank.metadata).get(STATES)
    shared: dict[str, Any] = dict(content) if isinstance(content, dict) else {}
    shared.pop(STATES, None)
    return shared, states if isinstance(states, Mapping) else {}


def _tree(path: str) -> dict[str, Any] | None:
    with open_file(path) as part:
        return dict(part.tree) if isinstance(part.tree, dict) else None
