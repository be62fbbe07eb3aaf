"""Where each parameter lies in what the ranks of a job kept: some elements of each rank's flat groups.

Source: deepspeedai/DeepSpeed ``deepspeed/utils/zero_to_fp32.py``.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from ckpttool.errors import DamagedCheckpoint
from ckpttool.formats.torch.chunks import Joined
from ckpttool.formats.torch.deepspeed_zero import run_of
from ckpttool.ops.merging.ranks import Job, Rank, Stage
from ckpttool.tensor import Path, Role, Tensor

_EXPERT = re.compile(r"(.*deepspeed_experts\.)(\d{1,9})(\..*)", re.DOTALL)
"""The name of an expert's parameter, as the rank that has it numbers its own."""


_TIED = "tied_modules."
"""How the names begin of parameters that several stages of a pipeline have, alike in all of them."""


class Run(NamedTuple):
    """Elements that a rank has of a parameter: from where on in its groups, joined, and how many."""

    rank: Rank
    groups: tuple[int, ...]
    start: int
    size: int


class Cut(NamedTuple):
    """Where a parameter lies.

    Attributes:
        name: As the model names it.
        group: Of the optimizer.
        runs: Its elements, in C order.
    """

    name: str
    shape: tuple[int, ...]
    group: int
    runs: tuple[Run, ...]

    def weights(self, path: Path) -> Tensor | None:
        """Return the parameter in full precision; None where its elements do not lie in one piece each."""
        return self._taken(path, Role.WEIGHTS, [run.rank.masters for run in self.runs])

    def state(self, path: Path, key: str) -> Tensor | None:
        """Return what the optimizer keeps of each element; None where it does not keep all of it so."""
        places = []
        for run in self.runs:
            found = {at: state[key] for at, state in run.rank.states.items() if key in state}
            if not all(
                _is_flat(found.get(at), run.rank.masters.get(at), at == run.groups[-1]) for at in run.groups
            ):
                return None
            places.append(found)
        return self._taken(path, Role.OPTIMIZER, places)

    def _taken(self, path: Path, role: Role, places: Sequence[Mapping[int, Any]]) -> Tensor | None:
        pieces, storages, dtypes = [], [], set()
        for run, by_group in zip(self.runs, places, strict=True):
            tensors = [by_group[at] for at in run.groups if at in by_group]
            found = run_of(tensors, run.start, run.size)
            if found is None:
                return None
            pieces += found
            storages += [one.storage for one in tensors if one.storage is not None]
            dtypes |= {one.dtype for one in tensors}
        if len(dtypes) != 1:
            return None
        values = pieces[0] if len(pieces) == 1 else Joined(tuple(pieces), tuple(storages))
        return Tensor(path, dtypes.pop(), self.shape, role, values)


def _is_flat(state: object, masters: Tensor | None, is_last: bool) -> bool:
    """Tell whether a state has an element for each of a group; behind the last one there may be padding."""
    if masters is None or not isinstance(state, Tensor) or len(state.shape) != 1:
        return False
    return state.size == masters.size or (is_last and state.size > masters.size)


def cuts_of(job: Job) -> Iterator[Cut]:
    """Yield where each parameter lies.

    Raises:
        DamagedCheckpoint: The ranks do not have all of one, or have it in a way that can't be known.
    """
    seen: dict[str, str] = {}
    for stage in job.stages:
        for cut in _of_stage_3(job, stage) if job.zero == 3 else _of_groups(job, stage):
            path = stage.ranks[0].path
            first = seen.setdefault(cut.name, path)
            if first != path and cut.name.startswith(_TIED):
                continue
            if first != path:
                found = (
                    f"{first} has it, too: slices of a tensor-parallel model; how they were cut is not said"
                )
                raise DamagedCheckpoint(path, found, where=cut.name, code="tensor-twice")
            found_count = sum(run.size for run in cut.runs)
            if found_count != math.prod(cut.shape):
                found = f"the ranks have {found_count:,} of its {math.prod(cut.shape):,} elements"
                raise DamagedCheckpoint(path, found, where=cut.name, code="partition-sum")
            yield cut


def _of_stage_3(job: Job, stage: Stage) -> Iterator[Cut]:
    """Yield parameters of which each rank has an equal part, one behind the other."""
    if len(job.stages) > 1:
        found = "ZeRO 3 of a tensor-parallel model, of which no file says how it was cut"
        raise DamagedCheckpoint(stage.ranks[0].path, found, code="tensor-twice")
    offset = 0
    ends = [[*accumulate(rank.masters[at].size for at in sorted(rank.masters))] for rank in stage.ranks]
    for group, shapes in enumerate(stage.shapes):
        for name, shape in shapes.items():
            count = math.prod(shape)
            part = -(-count // len(stage.ranks))
            runs = []
            for at, rank in enumerate(stage.ranks):
                take = min(part, count - at * part)
                if take > 0:
                    runs.append(_run(rank, ends[at], offset, take))
            yield Cut(name, shape, group, tuple(runs))
            offset += part


def _run(rank: Rank, ends: Sequence[int], offset: int, size: int) -> Run:
    """Return a range of all that a rank keeps, in the groups where it lies, which end at ``ends``."""
    first, last = bisect_right(ends, offset), bisect_left(ends, offset + size)
    groups = sorted(rank.masters)[first : last + 1]
    return Run(rank, tuple(groups), offset - (ends[first - 1] if first else 0), size)


def _of_groups(job: Job, stage: Stage) -> Iterator[Cut]:
    """Yield the parameters of stages 1 and 2, whose groups are cut into one partition a rank."""
    for group, shapes in enumerate(stage.shapes):
        for number, ranks in enumerate(_teams(job, stage, group)):
            local = _local_experts(shapes)
            for name, shape in shapes.items():
                runs = _mapped(ranks, group, name) or _counted(ranks, group, shapes, name)
                yield Cut(_named(name, number, local), shape, group, tuple(runs))


def _teams(job: Job, stage: Stage, group: int) -> list[list[Rank]]:
    """Return the ranks that share a group; those that have other experts share another one."""
    told = stage.ranks[0].of_optimizer("partition_count")
    count = told[group] if isinstance(told, list) and group < len(told) else job.world
    teams = len(stage.ranks) // count if type(count) is int and 0 < count <= len(stage.ranks) else 1
    return [stage.ranks[at::teams] for at in range(teams)]


def _local_experts(shapes: Mapping[str, object]) -> int:
    """Return how many experts of a layer a rank has."""
    return len({match[2] for name in shapes if (match := _EXPERT.fullmatch(name))})


def _named(name: str, team: int, local: int) -> str:
    """Return a parameter's name in the whole model, where the experts are numbered through all ranks."""
    match = _EXPERT.fullmatch(name)
    return name if match is None else f"{match[1]}{int(match[2]) + team * local}{match[3]}"


def _mapped(ranks: Sequence[Rank], group: int, name: str) -> list[Run]:
    """Return where the ranks themselves say that a parameter lies; nothing where they don't."""
    runs = []
    for rank in ranks:
        told = rank.of_optimizer("param_slice_mappings")
        own = told[group] if isinstance(told, list) and group < len(told) else None
        place = own.get(name) if isinstance(own, Mapping) else None
        start, count = (
            (place.get(key) for key in ("start", "numel")) if isinstance(place, Mapping) else (0, 0)
        )
        if type(start) is int and type(count) is int and start >= 0 and count > 0 and group in rank.masters:
            runs.append(Run(rank, (group,), start, count))
    return runs


def _counted(
    ranks: Sequence[Rank], group: int, shapes: Mapping[str, tuple[int, ...]], name: str
) -> list[Run]:
    """Return where a parameter lies when all of a group lie one behind the other, from rank to rank."""
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
            runs.append(Run(rank, (group,), low - base, high - low))
        base += size
    return runs
