"""Partitions of weights and optimizer state that each rank of a DeepSpeed job with ZeRO wrote.

``ckpttool.formats.torch.deepspeed_zero`` describes how each stage of ZeRO cuts them.
"""

from __future__ import annotations

import math
import os
import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import DamagedCheckpoint
from ckpttool.core.tensor import Path, Role, Tensor
from ckpttool.core.values import Concatenated
from ckpttool.formats.content.boxes import Run, join_runs
from ckpttool.formats.torch.deepspeed import MODEL_STATES, OPTIMIZER_STATES
from ckpttool.formats.torch.deepspeed_zero import STATES, shapes_of, stage_in_states

BASE, INNER = "base_optimizer_state", "optimizer_state_dict"
"""Keys of the wrapped optimizer's state in the optimizer states: of stages 1 and 2, and of stage 3."""
MASTERS, FLAT = "single_partition_of_fp32_groups", "fp32_flat_groups"
"""Keys of the master weights: of stages 1 and 2, and of stage 3."""

_DIGITS = 10
"""Limit on the digits of a group's number, exclusive; ``int`` of very long digits would be slow."""

Shapes = list[dict[str, tuple[int, ...]]]
_EXPERT = re.compile(r"(.*deepspeed_experts\.)(\d{1,9})(\..*)", re.DOTALL)
"""Name of an expert's parameter; the number counts the experts of its rank."""
_TIED = "tied_modules."
"""Prefix of parameters that several pipeline stages have equal copies of."""


@dataclass(slots=True, eq=False)
class Rank:
    """Optimizer states of one rank.

    Attributes:
        number: Data-parallel rank.
        path: Path of the file.
        metadata: Content of the file without tensors.
        masters: Master weights, one flat tensor by group.
        states: Optimizer state by group and key: tensors, usually flat like the masters, and plain values.
    """

    number: int
    path: str
    metadata: Mapping[str, Any]
    masters: dict[int, Tensor] = field(default_factory=dict)
    states: dict[int, dict[str, object]] = field(default_factory=lambda: defaultdict(dict))

    def optimizer_entry(self, key: str) -> Any:
        """Return an entry of the optimizer states without its tensors; None if there is none."""
        states = self.metadata.get(STATES)
        return states.get(key) if isinstance(states, Mapping) else None


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """The data-parallel ranks of one model-parallel rank, and its parameters' shapes by group and name."""

    shapes: Shapes
    ranks: list[Rank]


@dataclass(frozen=True, slots=True)
class ZeroJob:
    """All files of a job.

    Attributes:
        zero: Stage of ZeRO; 0 without ZeRO.
        world: Number of data-parallel ranks; 0 if unknown.
        stages: One for each model-parallel rank, such as each stage of a pipeline.
        first: Path of the first model states.
        others: Paths of the other model states.
        stems: File names without suffix that prefix the content of all files but the first.
    """

    zero: int
    world: int
    stages: list[PipelineStage]
    first: str
    others: list[str]
    stems: frozenset[str]


def job_of(checkpoint: Checkpoint) -> ZeroJob:
    """Return the ranks and partitions of an intact DeepSpeed checkpoint."""
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
    stages: dict[int, PipelineStage] = {}
    for mp, dp in sorted(models):
        path = models[mp, dp]
        metadata = checkpoint.metadata if path == first else rank_metadata(checkpoint, path)
        stages.setdefault(mp, PipelineStage(shapes_of(metadata.get("param_shapes")), []))
    for (mp, dp), path in sorted(optimizers.items()):
        if mp in stages:
            stages[mp].ranks.append(_rank_of(dp, path, rank_metadata(checkpoint, path), below[stem(path)]))
    ranks = [rank for stage in stages.values() for rank in stage.ranks]
    zero = next((stage_in_states(rank.metadata) for rank in ranks), None)
    world = checkpoint.metadata.get("dp_world_size")
    return ZeroJob(
        # Without ZeRO, BF16_Optimizer still has partitioned master weights, cut as stage 1 cuts them.
        zero or int(any(rank.masters for rank in ranks)),
        world if isinstance(world, int) else 0,
        [stages[mp] for mp in sorted(stages)],
        first,
        [path for _, path in sorted(models.items()) if path != first],
        frozenset(stems),
    )


def stem(path: str) -> str:
    """Return the prefix of a file's content in the checkpoint: its name without suffix."""
    return os.path.splitext(os.path.basename(path))[0]


def rank_metadata(checkpoint: Checkpoint, path: str) -> Mapping[str, Any]:
    """Return the metadata of a file; that of the first model states is the checkpoint's own instead."""
    metadata = checkpoint.metadata.get(stem(path))
    return metadata if isinstance(metadata, Mapping) else {}


def _rank_of(number: int, path: str, metadata: Mapping[str, Any], tensors: Mapping[Path, Tensor]) -> Rank:
    """Return the content of a rank's file by groups of parameters."""
    # Paths of tensors below ``optimizer_state_dict``:
    #     single_partition_of_fp32_groups.<group>             base_optimizer_state.state.<group>.<key>
    #     fp32_flat_groups.<group>                            optimizer_state_dict.state.<group>.<key>
    #     base_optimizer_state.<group>.<key>    (elastic checkpoints: a list of groups)
    rank = Rank(number, path, metadata)
    for place, tensor in tensors.items():
        if len(place) == 3 and place[:1] == (STATES,) and place[1] in (MASTERS, FLAT):
            if (group := _number(place[2])) is not None:
                rank.masters[group] = tensor
            continue
        group = None
        if len(place) == 5 and place[0] == STATES and place[1] in (BASE, INNER) and place[2] == "state":
            group = _number(place[3])
        elif len(place) == 4 and place[:2] == (STATES, BASE):
            group = _number(place[2])
        if group is not None:
            rank.states[group][str(place[-1])] = tensor
    for at, key, value in _plain_states(rank):
        rank.states[at].setdefault(key, value)
    return rank


def _number(key: object) -> int | None:
    """Return the number of a group from its key, an int or digits; None for another key."""
    is_one = type(key) is int or (
        isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < _DIGITS
    )
    return int(str(key)) if is_one else None


def _plain_states(rank: Rank) -> Iterator[tuple[int, str, object]]:
    """Yield group, key and value of the optimizer state that isn't tensors."""
    for name in (BASE, INNER):
        inner = rank.optimizer_entry(name)
        states = inner.get("state") if isinstance(inner, Mapping) else inner
        states = dict(enumerate(states)) if isinstance(states, list) else states
        for group, state in states.items() if isinstance(states, Mapping) else ():
            if isinstance(state, Mapping) and (number := _number(group)) is not None:
                yield from ((number, str(key), value) for key, value in state.items())


def param_groups_of(rank: Rank) -> list[Mapping[str, Any]]:
    """Return the settings of each group of parameters (``param_groups``) in a rank's file."""
    for name in (BASE, INNER):
        inner = rank.optimizer_entry(name)
        groups = inner.get("param_groups") if isinstance(inner, Mapping) else None
        if isinstance(groups, list):
            return [group if isinstance(group, Mapping) else {} for group in groups]
    return []


class ParameterRun(NamedTuple):
    """Consecutive elements of a parameter in one rank.

    Attributes:
        rank: The rank.
        groups: The groups whose partitions, joined, have the elements.
        start: Offset in the joined partitions, in elements.
        size: Number of elements.
    """

    rank: Rank
    groups: tuple[int, ...]
    start: int
    size: int


class ParameterCut(NamedTuple):
    """A parameter, and its elements in the ranks' partitions.

    Attributes:
        name: Its name in the whole model.
        shape: Its whole shape.
        group: Its group in the optimizer.
        runs: Its elements in C order, run by run.
    """

    name: str
    shape: tuple[int, ...]
    group: int
    runs: tuple[ParameterRun, ...]

    def weights(self, path: Path) -> Tensor | None:
        """Return the parameter in full precision; None if a partition isn't contiguous in its file."""
        return self._join(path, Role.WEIGHTS, [run.rank.masters for run in self.runs])

    def state(self, path: Path, key: str) -> Tensor | None:
        """Return a state with one value for each element; None if the partitions of any rank aren't such."""
        by_run = []
        for run in self.runs:
            by_group = {at: state[key] for at, state in run.rank.states.items() if key in state}
            for at in run.groups:
                state, masters = by_group.get(at), run.rank.masters.get(at)
                if masters is None or not isinstance(state, Tensor) or len(state.shape) != 1:
                    return None
                # A state of the same size as the master weights has one value for each element. Padding is
                # harmless only after the last group: elsewhere it would shift the elements of the next one.
                is_padded = at == run.groups[-1] and state.size > masters.size
                if state.size != masters.size and not is_padded:
                    return None
            by_run.append(by_group)
        return self._join(path, Role.OPTIMIZER, by_run)

    def _join(self, path: Path, role: Role, by_run: Sequence[Mapping[int, Any]]) -> Tensor | None:
        runs = [
            Run([by_group[at] for at in run.groups if at in by_group], run.start, run.size)
            for run, by_group in zip(self.runs, by_run, strict=True)
        ]
        joined = join_runs(path, self.shape, role, runs)
        if joined is not None and isinstance(joined.values, Concatenated) and len(joined.values.parts) == 1:
            return replace(joined, values=joined.values.parts[0])
        return joined


def cuts_of(job: ZeroJob) -> Iterator[ParameterCut]:
    """Yield each parameter once; raise DamagedCheckpoint if it has slices (tensor parallelism) or gaps."""
    # Model-parallel ranks are pipeline stages with different parameters, or have slices of the same ones
    # (tensor parallelism). No file records which; a name in two of them shows the second kind, except for
    # tied modules, which pipeline stages hold copies of.
    seen: dict[str, str] = {}
    for stage in job.stages:
        for cut in _cuts_of_stage_3(job, stage) if job.zero == 3 else _cuts_of_groups(job, stage):
            path = stage.ranks[0].path
            first = seen.setdefault(cut.name, path)
            if first != path and cut.name.startswith(_TIED):
                continue
            if first != path:
                found = f"{first} holds it too: slices of a tensor-parallel model, of unknown sharding"
                raise DamagedCheckpoint(path, found, where=cut.name, code="tensor-twice")
            count, size = sum(run.size for run in cut.runs), math.prod(cut.shape)
            if count != size:
                found = f"the ranks have {count:,} of its {size:,} elements"
                raise DamagedCheckpoint(path, found, where=cut.name, code="partition-sum")
            yield cut


def _cuts_of_stage_3(job: ZeroJob, stage: PipelineStage) -> Iterator[ParameterCut]:
    """Yield the parameters of stage 3, each cut into equal parts, one for each rank."""
    # A part has ceil(count / ranks) elements, of which the last ranks' may be partly or wholly padding, so a
    # parameter begins at the same offset in each rank. A rank's flat groups are read as one sequence: a part
    # may span several of them, which the search in their cumulated ends finds.
    if len(job.stages) > 1:
        found = "ZeRO 3 of a tensor-parallel model, and the files don't record the sharding"
        raise DamagedCheckpoint(stage.ranks[0].path, found, code="tensor-twice")
    offset = 0
    ends = [[*accumulate(rank.masters[at].size for at in sorted(rank.masters))] for rank in stage.ranks]
    for group, shapes in enumerate(stage.shapes):
        for name, shape in shapes.items():
            count = math.prod(shape)
            part = -(-count // len(stage.ranks))
            runs = []
            for at, rank in enumerate(stage.ranks):
                size = min(part, count - at * part)
                if size > 0:
                    first, last = bisect_right(ends[at], offset), bisect_left(ends[at], offset + size)
                    groups = sorted(rank.masters)[first : last + 1]
                    start = offset - (ends[at][first - 1] if first else 0)
                    runs.append(ParameterRun(rank, tuple(groups), start, size))
            yield ParameterCut(name, shape, group, tuple(runs))
            offset += part


def _cuts_of_groups(job: ZeroJob, stage: PipelineStage) -> Iterator[ParameterCut]:
    """Yield the parameters of stages 1 and 2, whose groups are cut into one partition a rank."""
    # With a mixture of experts, a group of experts is partitioned over fewer ranks (``partition_count``), and
    # the ranks form teams with different experts: rank r is in team r % teams. Each team numbers its experts
    # from 0; in the whole model, those of team t begin at t * experts.
    for group, shapes in enumerate(stage.shapes):
        stated = stage.ranks[0].optimizer_entry("partition_count")
        count = stated[group] if isinstance(stated, list) and group < len(stated) else job.world
        teams = len(stage.ranks) // count if type(count) is int and 0 < count <= len(stage.ranks) else 1
        experts = {match[2] for name in shapes if (match := _EXPERT.fullmatch(name))}
        for team in range(teams):
            ranks = stage.ranks[team::teams]
            for name, shape in shapes.items():
                runs = _mapped_runs(ranks, group, name) or _counted_runs(ranks, group, shapes, name)
                whole_name = name
                if match := _EXPERT.fullmatch(name):
                    whole_name = f"{match[1]}{int(match[2]) + team * len(experts)}{match[3]}"
                yield ParameterCut(whole_name, shape, group, tuple(runs))


def _mapped_runs(ranks: Sequence[Rank], group: int, name: str) -> list[ParameterRun]:
    """Return a parameter's runs from ``param_slice_mappings``, which older versions don't write."""
    runs = []
    for rank in ranks:
        mappings = rank.optimizer_entry("param_slice_mappings")
        mapping = mappings[group] if isinstance(mappings, list) and group < len(mappings) else None
        place = mapping.get(name) if isinstance(mapping, Mapping) else None
        start, count = (place.get("start"), place.get("numel")) if isinstance(place, Mapping) else (0, 0)
        if type(start) is int and type(count) is int and start >= 0 and count > 0 and group in rank.masters:
            runs.append(ParameterRun(rank, (group,), start, count))
    return runs


def _counted_runs(
    ranks: Sequence[Rank], group: int, shapes: Mapping[str, tuple[int, ...]], name: str
) -> list[ParameterRun]:
    """Return a parameter's runs, if the ranks' partitions joined are the group's parameters in order."""
    # A group is one flat tensor of all its parameters in the order of ``param_shapes``, cut into a partition
    # for each rank. A parameter may cross the border of two partitions; what follows the last one is padding.
    before = 0
    for other, shape in shapes.items():
        if other == name:
            break
        before += math.prod(shape)
    start, end = before, before + math.prod(shapes[name])
    runs, base = [], 0
    for rank in ranks:
        size = rank.masters[group].size if group in rank.masters else 0
        low, high = max(start, base), min(end, base + size)
        if low < high:
            runs.append(ParameterRun(rank, (group,), low - base, high - low))
        base += size
    return runs
