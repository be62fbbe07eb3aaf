"""ZeRO's partitions: which elements of which parameter each rank holds.

Source: deepspeedai/DeepSpeed ``deepspeed/utils/zero_to_fp32.py``.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.report import Finding, error, note
from ckpttool.core.tensor import Role, Tensor
from ckpttool.core.values import Concatenated, Contiguous
from ckpttool.formats.torch.objects import MAX_AXES

STATES = "optimizer_state_dict"
_STAGE = re.compile(r"ZeroStageEnum\((\d)\)")
_MAX_INT64 = (1 << 63) - 1


class Ranks(NamedTuple):
    """The states of all ranks.

    Attributes:
        stage: What ZeRO cuts: 1 the optimizer, 2 the gradients too, 3 the parameters too.
        world: Number of data-parallel ranks; 0 where it is not known.
        models: Number of model-parallel ranks.
        model: Model states of the first model-parallel rank, by data-parallel rank.
        optimizer: Optimizer states, likewise.
        metadata: What the first model states say.
        names: Names of all files.
    """

    stage: int | None
    world: int
    models: int
    model: Mapping[int, Checkpoint]
    optimizer: Mapping[int, Checkpoint]
    metadata: Mapping[str, Any]
    names: tuple[str, ...]

    @property
    def shapes(self) -> list[dict[str, tuple[int, ...]]]:
        """Return the shapes of the parameters by name, group by group, as far as they are told."""
        return shapes_of(self.metadata.get("param_shapes"))

    @property
    def has_experts(self) -> bool:
        """Tell whether there are layers of which each rank has some experts only."""
        return bool(self.metadata.get("num_experts"))

    @property
    def is_whole(self) -> bool:
        """Tell whether the optimizer states of all ranks are here."""
        return self.world > 0 and set(self.optimizer) == set(range(self.world))


def stage_of(metadata: Mapping[str, Any], optimizers: Iterable[Checkpoint]) -> int | None:
    """Return the stage of ZeRO, from the optimizer states or the configuration."""
    for part in optimizers:
        if (stage := stage_in_states(part.metadata)) is not None:
            return stage
    zero = _inner(metadata, "ds_config", "zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else 0
    return stage if type(stage) is int else None


def stage_in_states(states: Mapping[str, Any]) -> int | None:
    """Return the stage of ZeRO that the optimizer states of a rank tell."""
    stage = _inner(states, STATES, "zero_stage")
    if isinstance(stage, Mapping):
        stage = stage.get("<class>")
    match = _STAGE.search(stage) if isinstance(stage, str) else None
    if match:
        return int(match[1])
    return stage if type(stage) is int else None


def _inner(tree: object, *keys: str) -> Any:
    for key in keys:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


def shapes_of(node: object) -> list[dict[str, tuple[int, ...]]]:
    """Return shapes by name, group by group; what is none is left out."""
    groups = node if isinstance(node, list) else [node] if isinstance(node, Mapping) else []
    return [
        {name: tuple(shape) for name, shape in group.items() if _is_shape(shape)}
        for group in groups
        if isinstance(group, Mapping)
    ]


def _is_shape(shape: object) -> bool:
    if not isinstance(shape, list) or len(shape) > MAX_AXES:
        return False
    if not all(type(length) is int and length >= 0 for length in shape):
        return False
    return math.prod(shape) <= _MAX_INT64


# Checks ---------------------------------------------------------------------------------------------


def check_partitions(ranks: Ranks) -> Iterator[Finding]:
    """Yield where the partitions of the ranks contradict each other or the parameters' shapes."""
    for part in ranks.optimizer.values():
        yield from _check_rank(ranks, part)
    if not ranks.is_whole or ranks.models != 1:
        return
    if ranks.stage in (1, 2):
        yield from _check_groups(ranks)
    elif ranks.stage == 3:
        for rank in range(ranks.world):
            expected = sum(
                -(-math.prod(shape) // ranks.world) for group in ranks.shapes for shape in group.values()
            )
            size = sum(tensor.size for tensor in flat_of(ranks, rank))
            if size != expected:
                message = f"rank {rank} holds {size:,} elements, and the parameters need {expected:,} of each"
                yield error("partition-sum", message, os.path.basename(ranks.optimizer[rank].path))


def _check_rank(ranks: Ranks, part: Checkpoint) -> Iterator[Finding]:
    stage = stage_in_states(part.metadata)
    # The optimizer for bfloat16 cuts as stage 1 does, and names no stage: none of its ranks does.
    has_stages = any(stage_in_states(other.metadata) is not None for other in ranks.optimizer.values())
    if stage != ranks.stage and has_stages:
        message = f"ZeRO stage {stage}, and others have {ranks.stage}"
        yield error("stage-disagrees", message, os.path.basename(part.path))
    for count in _partition_counts(part) if ranks.world else ():
        if count != ranks.world and not (ranks.has_experts and ranks.world % count == 0):
            message = f"it speaks of {count:,} partitions, and the model's states of {ranks.world:,} ranks"
            yield error("partition-count", message, os.path.basename(part.path))
            return


def _partition_counts(part: Checkpoint) -> list[int]:
    """Return in how many partitions each group lies; experts' groups in fewer, as not all ranks have each."""
    counts = _inner(part.metadata, STATES, "partition_count")
    counts = counts if isinstance(counts, list) else [counts]
    return [count for count in counts if type(count) is int and count > 0]


def _check_groups(ranks: Ranks) -> Iterator[Finding]:
    """Compare the partitions of each group with the shapes; a little is added so that all are alike."""
    for index, group in enumerate(ranks.shapes):
        path = (STATES, "single_partition_of_fp32_groups", index)
        sizes = [t.size for part in ranks.optimizer.values() for t in part.tensors if t.path == path]
        # Partitions end at multiples of twice the number of ranks, whatever was added for that.
        counts = _partition_counts(ranks.optimizer[0])
        count = counts[index] if index < len(counts) and ranks.has_experts else ranks.world
        copies = max(1, ranks.world // count)
        expected = sum(map(math.prod, group.values())) * copies
        if sizes and not expected <= sum(sizes) < expected + 2 * ranks.world:
            message = f"group {index} has {sum(sizes):,} elements in all, and its parameters {expected:,}"
            yield error("partition-sum", message, None)


# Stage 3 --------------------------------------------------------------------------------------------


def flat_of(ranks: Ranks, rank: int) -> list[Tensor]:
    """Return the flat groups of a rank, in order."""
    path = (STATES, "fp32_flat_groups")
    return [tensor for tensor in ranks.optimizer[rank].tensors if tensor.path[:2] == path]


def rebuild_parameters(ranks: Ranks, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield a model's tensors, each placeholder replaced by the parameter that the ranks hold together.

    Where a rank is missing, the parameter is a tensor without values.
    """
    shapes = {name: shape for group in ranks.shapes for name, shape in group.items()}
    shapes |= _frozen_shapes(ranks)
    parameters = dict(_parameters(ranks)) if ranks.models == 1 else {}
    shared = ranks.metadata.get("shared_params")
    shared = shared if isinstance(shared, Mapping) else {}
    for tensor in tensors:
        name = tensor.path[-1]
        if tensor.path[:1] == ("frozen_param_fragments",):
            continue
        if len(tensor.path) != 2 or tensor.path[0] != "module" or tensor.nbytes:
            yield tensor
            continue
        owner = shared.get(name, name)
        if owner not in shapes or tensor.shape != (0,):
            yield tensor
            continue
        tie = f"module.{owner}" if owner != name else None
        parameter = parameters.get(owner)
        if parameter is None:
            parameter = replace(tensor, shape=shapes[owner], values=None, extent=None, storage=None)
        yield replace(parameter, path=tensor.path, shares_with=tie)


def _parameters(ranks: Ranks) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters by name; each rank has an equal part of each, the last one padded."""
    if ranks.is_whole:
        flat = [flat_of(ranks, rank) for rank in range(ranks.world)]
        offset = 0
        for group in ranks.shapes:
            for name, shape in group.items():
                part = -(-math.prod(shape) // ranks.world)
                yield from _parameter_of_ranks(name, shape, flat, offset, part)
                offset += part
    for name, shape in _frozen_shapes(ranks).items():
        path = ("frozen_param_fragments", name)
        parts = [
            [tensor for tensor in ranks.model[rank].tensors if tensor.path == path]
            for rank in range(ranks.world)
            if rank in ranks.model
        ]
        if len(parts) == ranks.world and all(parts):
            yield from _parameter_of_ranks(name, shape, parts, 0, parts[0][0].size)


def _frozen_shapes(ranks: Ranks) -> dict[str, tuple[int, ...]]:
    return next(iter(shapes_of(ranks.metadata.get("frozen_param_shapes"))), {})


def run_of(tensors: list[Tensor], offset: int, count: int) -> list[Contiguous] | None:
    """Return a range of the elements of several tensors, joined; None where they have no such range."""
    runs = []
    for tensor in tensors:
        values, width = tensor.values, tensor.dtype.itemsize
        take = min(count, tensor.size - offset)
        if take > 0:
            if not isinstance(values, Contiguous):
                return None
            runs.append(values._replace(offset=values.offset + offset * width, nbytes=take * width))
            count -= take
        offset = max(0, offset - tensor.size)
    return runs if count == 0 else None


def _parameter_of_ranks(
    name: str, shape: tuple[int, ...], ranks: list[list[Tensor]], offset: int, count: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield a parameter by its name, where all ranks have their part of it; padding at the end is cut off."""
    if not ranks[0]:
        return
    dtype, joined = ranks[0][0].dtype, []
    missing = dtype.nbytes(math.prod(shape))
    for tensors in ranks:
        runs = run_of(tensors, offset, count)
        if runs is None:
            return
        for run in runs:
            joined.append(run._replace(nbytes=min(missing, run.nbytes)))
            missing -= joined[-1].nbytes
    if missing == 0:
        storages = tuple(tensor.storage for tensors in ranks for tensor in tensors if tensor.storage)
        yield (
            name,
            Tensor(("module", name), dtype, shape, Role.WEIGHTS, Concatenated(tuple(joined), storages)),
        )


def apart_notes(ranks: Ranks) -> Iterator[Finding]:
    """Yield why a model's tensors have no values, where they have none."""
    if ranks.stage == 3 and ranks.models > 1:
        message = "ZeRO-3 parameters of several model-parallel ranks are shown in their parts only"
        yield note("partitions-apart", message)
