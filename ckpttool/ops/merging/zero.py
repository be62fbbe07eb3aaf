"""DeepSpeed's checkpoints as one model in full precision, with the optimizer's state by parameter.

With ZeRO each rank keeps a part of the weights in float32, which the optimizer works on, and of the state of
the optimizer. What the ranks hold together is cut into parameters here; the rounded copies that the model
calculates with are left out.

Source: deepspeedai/DeepSpeed ``deepspeed/utils/zero_to_fp32.py``, ``deepspeed/runtime/bf16_optimizer.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import DamagedCheckpoint
from ckpttool.formats.content.tree import replace_tensors, tensors_in
from ckpttool.formats.parts import open_file
from ckpttool.formats.torch.deepspeed_zero import STATES
from ckpttool.ops.conversion import Dropped
from ckpttool.ops.merging.discarded_rank_state import OF_OPTIMIZER, OF_PARTITIONS, discarded_rank_state
from ckpttool.ops.merging.merged_checkpoint import MergedCheckpoint, with_contents
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
from ckpttool.report import counted
from ckpttool.tensor import Path, Role, Tensor
from ckpttool.wire.pickle_nodes import Call, Global

MODULE, OPTIMIZER = "module", "optimizer"


def full_precision(checkpoint: Checkpoint, sources: tuple[str, ...]) -> MergedCheckpoint:
    """Return a DeepSpeed checkpoint in full precision, with the optimizer's state by parameter.

    Without ZeRO it is whole as it is.
    """
    job = job_of(checkpoint)
    if not job.zero or not all(stage.ranks for stage in job.stages):
        return MergedCheckpoint(checkpoint=_with_tree(checkpoint, job), sources=sources)
    cuts = {cut.name: cut for cut in cuts_of(job)}
    if not cuts:
        found = "which parameters the ranks hold together is not said (param_shapes)"
        raise DamagedCheckpoint(job.first, found, code="partition-sum")
    module = _module(checkpoint, cuts)
    states, dropped = _optimizer_states(cuts)
    content = _content(checkpoint, job)
    dropped += discarded_rank_state(checkpoint, job)
    groups = _param_groups(job, cuts, content.pop(STATES, {}))
    tree = {
        MODULE: {tensor.path[1]: tensor for tensor in module},
        OPTIMIZER: {"state": states, "param_groups": groups[0], **groups[1]},
        **content,
    }
    whole = with_contents(
        checkpoint,
        tensors=tuple(dict.fromkeys((*module, *tensors_in(tree)))),
        metadata=checkpoint.metadata,
        tree=tree,
        native=checkpoint.native,
    )
    ranks = sum(len(stage.ranks) for stage in job.stages)
    told = f"{counted(len(cuts), 'parameter')} in full precision"
    note = f"{told}, from {counted(ranks, 'rank')} of ZeRO {job.zero}"
    return MergedCheckpoint(checkpoint=whole, sources=sources, dropped=tuple(dropped), notes=(note,))


def _with_tree(checkpoint: Checkpoint, job: ZeroJob) -> Checkpoint:
    """Return a checkpoint without ZeRO with its nested content, where one file holds all of it."""
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
    """Return the model's tensors in their order, those that are tied to others last."""
    shared = checkpoint.metadata.get("shared_params")
    owners = shared if isinstance(shared, Mapping) else {}
    found: dict[str, Tensor] = {}
    for tensor in checkpoint.tensors:
        if tensor.path[0] == MODULE and len(tensor.path) == 2:
            name = str(tensor.path[1])
            found[name] = _full_weights(cuts[name]) if name in cuts and tensor.size else tensor
    for name, cut in cuts.items():
        if name not in found:
            found[name] = _full_weights(cut)
    ties = {}
    for name, tensor in found.items():
        owner = _owner(name, tensor, owners, found) if name not in cuts else None
        if owner is not None:
            whole = found[owner]
            ties[name] = replace(whole, path=(MODULE, name), shares_with=whole.name)
    return [tensor for name, tensor in found.items() if name not in ties] + [*ties.values()]


def _owner(name: str, tensor: Tensor, owners: Mapping[str, Any], found: Mapping[str, Tensor]) -> str | None:
    """Return the name of the parameter that another name is one for, too."""
    told = owners.get(name)
    if isinstance(told, str) and told in found and told != name:
        return told
    shares = None if tensor.shares_with is None else tensor.shares_with.removeprefix(f"{MODULE}.")
    return shares if shares in found else None


def _full_weights(cut: ParameterCut) -> Tensor:
    whole = cut.weights((MODULE, cut.name))
    if whole is None:
        path = cut.runs[0].rank.path
        found = "its elements do not lie in the file as they are: they can't be put together"
        raise DamagedCheckpoint(path, found, where=cut.name, code="partitions-apart")
    return whole


# The optimizer --------------------------------------------------------------------------------------------


def _optimizer_states(cuts: Mapping[str, ParameterCut]) -> tuple[dict[str, dict[str, object]], list[Dropped]]:
    """Return what the optimizer keeps of each parameter, and what of it can't be told."""
    states: dict[str, dict[str, object]] = {}
    dropped = []
    for name, cut in cuts.items():
        own = states.setdefault(name, {})
        for key in _keys(cut):
            path: Path = (OPTIMIZER, "state", name, key)
            value = _shared_state(cut, key, path)
            value = cut.state(path, key) if value is None else value
            if value is None:
                why = "the ranks do not keep it element by element, or not alike"
                dropped.append(Dropped(".".join(map(str, path)), why))
            else:
                own[key] = value
    return states, dropped


def _keys(cut: ParameterCut) -> list[str]:
    found = (key for run in cut.runs for at in run.groups for key in run.rank.states.get(at, ()))
    return list(dict.fromkeys(found))


def _shared_state(cut: ParameterCut, key: str, path: Path) -> object:
    """Return what all ranks keep alike, once for a group, such as the step; None for anything else."""
    found = [run.rank.states.get(at, {}).get(key) for run in cut.runs for at in run.groups]
    first, *others = found
    if isinstance(first, Tensor):
        if first.shape != () or not all(_are_equal(first, other) for other in others):
            return None
        # A tie would be one tensor in memory, which each parameter's step would count up.
        return replace(first, path=path, role=Role.OPTIMIZER, shares_with=None, storage=None)
    return first if all(type(other) is type(first) and other == first for other in others) else None


def _are_equal(one: Tensor, other: object) -> bool:
    if not isinstance(other, Tensor) or (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return one.tobytes() == other.tobytes()


def _param_groups(
    job: ZeroJob, cuts: Mapping[str, ParameterCut], told: Mapping[str, Any]
) -> tuple[list[dict[str, object]], dict[str, object]]:
    """Return the groups of parameters, by their names, and what else the optimizer's states say."""
    inner: Mapping[str, Any] = next(
        (told[name] for name in (BASE, INNER) if isinstance(told.get(name), Mapping)), {}
    )
    own = inner.get("param_groups")
    groups: Sequence[Any] = own if isinstance(own, list) else param_groups_of(job.stages[0].ranks[0])
    count = max((cut.group for cut in cuts.values()), default=-1) + 1
    made = []
    for at in range(count):
        settings = groups[at] if at < len(groups) and isinstance(groups[at], Mapping) else {}
        made.append({**settings, "params": [cut.name for cut in cuts.values() if cut.group == at]})
    rest = {key: _plain_data(value) for key, value in told.items() if key not in OF_OPTIMIZER}
    return made, {key: value for key, value in rest.items() if not any(tensors_in(value))}


def _plain_data(value: object) -> object:
    """Return what an object of DeepSpeed's holds, such as the loss scaler; nobody else can make it."""
    if not isinstance(value, Call) or not isinstance(value.function, Global):
        return value
    is_own = value.function.module.startswith("deepspeed.")
    return dict(value.state) if is_own and isinstance(value.state, dict) else value


# All else -------------------------------------------------------------------------------------------------


def _content(checkpoint: Checkpoint, job: ZeroJob) -> dict[str, Any]:
    """Return what the first model states hold beside the model, and below ``STATES`` the optimizer's."""
    told = _tree(job.first) or {
        key: value for key, value in checkpoint.metadata.items() if key not in job.stems
    }
    by_path = {tensor.path: tensor for tensor in checkpoint.tensors}
    kept = {key: value for key, value in told.items() if key not in OF_PARTITIONS}
    inside = {id(one): by_path[one.path] for one in tensors_in(kept) if one.path in by_path}
    content = replace_tensors(kept, inside)
    rank: Rank = job.stages[0].ranks[0]
    states = (_tree(rank.path) or rank.told).get(STATES)
    made: dict[str, Any] = dict(content) if isinstance(content, dict) else {}
    return made | {STATES: states if isinstance(states, Mapping) else {}}


def _tree(path: str) -> dict[str, Any] | None:
    with open_file(path) as part:
        return dict(part.tree) if isinstance(part.tree, dict) else None
