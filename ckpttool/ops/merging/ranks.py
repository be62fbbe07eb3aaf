"""What each rank of a job with DeepSpeed's ZeRO kept of the weights and of the optimizer's state."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpttool.checkpoint import Checkpoint
from ckpttool.formats.torch.deepspeed import MODEL_STATES, OPTIMIZER_STATES
from ckpttool.formats.torch.deepspeed_zero import STATES, shapes_of, stage_told
from ckpttool.tensor import Path, Tensor

BASE, INNER = "base_optimizer_state", "optimizer_state_dict"
"""Where the optimizer's own state lies: in stages 1 and 2, and in stage 3."""
MASTERS, FLAT = "single_partition_of_fp32_groups", "fp32_flat_groups"
"""Where the weights in full precision lie, likewise."""

_DIGITS = 10
"""Fewer digits than these has every number of a group."""

Shapes = list[dict[str, tuple[int, ...]]]


@dataclass(slots=True, eq=False)
class Rank:
    """What one rank kept.

    Attributes:
        number: Among those that hold the same model together.
        path: The file.
        told: What is not a tensor in it.
        masters: Weights in full precision, flat, by group.
        states: What the optimizer keeps of each group, tensors and plain values by their keys.
    """

    number: int
    path: str
    told: Mapping[str, Any]
    masters: dict[int, Tensor] = field(default_factory=dict)
    states: dict[int, dict[str, object]] = field(default_factory=lambda: defaultdict(dict))

    def of_optimizer(self, key: str) -> Any:
        """Return what it tells of the optimizer under a key; None where it tells nothing."""
        told = self.told.get(STATES)
        return told.get(key) if isinstance(told, Mapping) else None


@dataclass(frozen=True, slots=True)
class Stage:
    """The ranks that hold one model, or one stage of a pipeline, together; and its parameters' shapes."""

    shapes: Shapes
    ranks: list[Rank]


@dataclass(frozen=True, slots=True)
class Job:
    """All that a job wrote.

    Attributes:
        zero: The stage of ZeRO; 0 where there was none.
        world: Number of ranks that hold a model together.
        stages: Of a pipeline; a single one elsewhere.
        first: The file with the first model states.
        others: Files with other model states.
        stems: Names of all files whose content lies below them, without suffixes.
    """

    zero: int
    world: int
    stages: list[Stage]
    first: str
    others: list[str]
    stems: frozenset[str]


def job_of(checkpoint: Checkpoint) -> Job:
    """Return what the ranks of a DeepSpeed checkpoint hold; it is whole."""
    models, optimizers, stems = {}, {}, set()
    for entry in checkpoint.files:
        name = os.path.basename(entry.path)
        stems.add(os.path.splitext(name)[0])
        if match := MODEL_STATES.fullmatch(name):
            models[int(match["mp"]), int(match["dp"] or 0)] = entry.path
        elif match := OPTIMIZER_STATES.fullmatch(name):
            optimizers[int(match["mp"]), int(match["dp"])] = entry.path
    first = models[min(models)]
    stems.discard(stem(first))
    below: dict[str, dict[Path, Tensor]] = defaultdict(dict)
    for tensor in checkpoint.tensors:
        if tensor.path[0] in stems:
            below[str(tensor.path[0])][tensor.path[1:]] = tensor
    stages: dict[int, Stage] = {}
    for mp, dp in sorted(models):
        told = checkpoint.metadata if models[mp, dp] == first else told_in(checkpoint, models[mp, dp])
        stages.setdefault(mp, Stage(shapes_of(told.get("param_shapes")), []))
    for (mp, dp), path in sorted(optimizers.items()):
        if mp in stages:
            stages[mp].ranks.append(_rank(dp, path, told_in(checkpoint, path), below[stem(path)]))
    ranks = [rank for stage in stages.values() for rank in stage.ranks]
    told_stage = next((stage_told(rank.told) for rank in ranks), None)
    world = checkpoint.metadata.get("dp_world_size")
    return Job(
        # An optimizer that keeps weights in full precision by itself cuts them as the first stage does.
        told_stage or int(any(rank.masters for rank in ranks)),
        world if isinstance(world, int) else 0,
        [stages[mp] for mp in sorted(stages)],
        first,
        [path for _, path in sorted(models.items()) if path != first],
        frozenset(stems),
    )


def stem(path: str) -> str:
    """Return the name below which the content of a file lies."""
    return os.path.splitext(os.path.basename(path))[0]


def told_in(checkpoint: Checkpoint, path: str) -> Mapping[str, Any]:
    """Return what a file says beside its tensors; the first model states say it at the root instead."""
    told = checkpoint.metadata.get(stem(path))
    return told if isinstance(told, Mapping) else {}


def _rank(number: int, path: str, told: Mapping[str, Any], tensors: Mapping[Path, Tensor]) -> Rank:
    rank = Rank(number, path, told)
    for place, tensor in tensors.items():
        if len(place) == 3 and place[:1] == (STATES,) and place[1] in (MASTERS, FLAT):
            if (group := _number(place[2])) is not None:
                rank.masters[group] = tensor
        elif (found := _of_a_group(place)) is not None:
            rank.states[found[0]][found[1]] = tensor
    for at, key, value in _plain_states(rank):
        rank.states[at].setdefault(key, value)
    return rank


def _of_a_group(place: Path) -> tuple[int, str] | None:
    """Return of which group of parameters the optimizer keeps what lies at a path, and as what."""
    number = None
    if len(place) == 5 and place[0] == STATES and place[1] in (BASE, INNER) and place[2] == "state":
        number = _number(place[3])
    # Where a job may go on with another number of ranks, the states of the groups are a list.
    elif len(place) == 4 and place[:2] == (STATES, BASE):
        number = _number(place[2])
    return None if number is None else (number, str(place[-1]))


def _number(key: object) -> int | None:
    """Return the number of a group."""
    is_one = type(key) is int or (
        isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < _DIGITS
    )
    return int(str(key)) if is_one else None


def _plain_states(rank: Rank) -> Iterator[tuple[int, str, object]]:
    for name in (BASE, INNER):
        inner = rank.of_optimizer(name)
        states = inner.get("state") if isinstance(inner, Mapping) else inner
        states = dict(enumerate(states)) if isinstance(states, list) else states
        for group, state in states.items() if isinstance(states, Mapping) else ():
            if isinstance(state, Mapping) and (number := _number(group)) is not None:
                yield from ((number, str(key), value) for key, value in state.items())


def groups_told(rank: Rank) -> list[Mapping[str, Any]]:
    """Return the optimizer's groups of parameters, as a rank tells them."""
    for name in (BASE, INNER):
        inner = rank.of_optimizer(name)
        groups = inner.get("param_groups") if isinstance(inner, Mapping) else None
        if isinstance(groups, list):
            return [group if isinstance(group, Mapping) else {} for group in groups]
    return []
