"""ZeRO's partitions of parameters over ranks, and DeepSpeed's universal checkpoints, which have none.

ZeRO keeps groups of parameters as flat tensors, of which each data-parallel rank has a partition:

- Stages 1 and 2: the parameters of a group, one after another, are cut into one partition for each rank
  (``single_partition_of_fp32_groups``), so a parameter may span ranks. The model states have all weights.
- Stage 3: each parameter is cut into equal parts, the last one padded, and a rank's partition has its part of
  each parameter, one after another (``fp32_flat_groups``). No file has a whole weight.

``param_shapes`` in the model states has the order and shapes of the parameters of each group.

``ds_to_universal`` writes ``zero/<parameter>/fp32.pt`` and a file for each state of the optimizer, next to
copies of the model states. Those copies hold rounded weights, and still describe the job that wrote them.

Source: deepspeedai/DeepSpeed ``deepspeed/utils/zero_to_fp32.py``,
``deepspeed/checkpoint/ds_to_universal.py``, ``universal_checkpoint.py``, ``constants.py``.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.dtypes import BY_NAME
from ckpttool.core.report import Finding, error, note, warning
from ckpttool.core.tensor import Role, Tensor
from ckpttool.core.values import storages_of
from ckpttool.formats.content.boxes import Run, join_runs
from ckpttool.formats.interface import Probe
from ckpttool.formats.opening import OpenedParts
from ckpttool.formats.torch.objects import MAX_AXES
from ckpttool.storage import fs

STATES = "optimizer_state_dict"
_STAGE = re.compile(r"ZeroStageEnum\((\d)\)")
_MAX_INT64 = (1 << 63) - 1


class Ranks(NamedTuple):
    """The states of all ranks.

    Attributes:
        stage: ZeRO partitions the optimizer (1), the gradients too (2), the parameters too (3).
        world: Number of data-parallel ranks; 0 if unknown.
        models: Number of model-parallel ranks.
        model: Model states of the first model-parallel rank, by data-parallel rank.
        optimizer: Optimizer states of the first model-parallel rank, by data-parallel rank.
        metadata: Of the first model states.
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
        """Return the shapes of the parameters by name for each group; empty if the model states lack them."""
        return shapes_of(self.metadata.get("param_shapes"))

    @property
    def has_experts(self) -> bool:
        """Return whether the model is a mixture of experts, which are spread over the ranks."""
        return bool(self.metadata.get("num_experts"))

    @property
    def is_whole(self) -> bool:
        """Return whether the optimizer states of all ranks exist."""
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
    """Return the stage of ZeRO in the optimizer states of a rank, None if they have none."""
    # The stage is a number or DeepSpeed's ``ZeroStageEnum``, a class that isn't imported here. In the plain
    # data it is a text (``ZeroStageEnum(3)``), or an object with that text under ``<class>``.
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
    """Return the shapes by name for each group; values that are no shapes are left out."""
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
    """Yield an error for each partition that contradicts the others or the parameters' shapes."""
    for part in ranks.optimizer.values():
        yield from _check_rank(ranks, part)
    if not ranks.is_whole or ranks.models != 1:
        return
    if ranks.stage in (1, 2):
        yield from _check_groups(ranks)
    elif ranks.stage == 3:
        # A rank's part of a parameter is its size divided by the number of ranks, rounded up, and the padding
        # of the last part is stored as well. So the flat tensors of all ranks have one size, the sum of those
        # parts. Frozen parameters aren't in them.
        for rank in range(ranks.world):
            expected = sum(
                -(-math.prod(shape) // ranks.world) for group in ranks.shapes for shape in group.values()
            )
            size = sum(tensor.size for tensor in flat_of(ranks, rank))
            if size != expected:
                message = f"rank {rank} holds {size:,} elements, but the parameters need {expected:,} of each"
                yield error("partition-sum", message, os.path.basename(ranks.optimizer[rank].path))


def _check_rank(ranks: Ranks, part: Checkpoint) -> Iterator[Finding]:
    stage = stage_in_states(part.metadata)
    # DeepSpeed's bfloat16 optimizer partitions as stage 1 does, but its states have no stage on any rank.
    has_stages = any(stage_in_states(other.metadata) is not None for other in ranks.optimizer.values())
    if stage != ranks.stage and has_stages:
        message = f"ZeRO stage {stage}, but others have {ranks.stage}"
        yield error("stage-disagrees", message, os.path.basename(part.path))
    for count in _partition_counts(part) if ranks.world else ():
        if count != ranks.world and not (ranks.has_experts and ranks.world % count == 0):
            message = f"it names {count:,} partitions, but the model's states {ranks.world:,} ranks"
            yield error("partition-count", message, os.path.basename(part.path))
            return


def _partition_counts(part: Checkpoint) -> list[int]:
    """Return the number of partitions of each group; a group of experts may have fewer than the ranks."""
    counts = _inner(part.metadata, STATES, "partition_count")
    counts = counts if isinstance(counts, list) else [counts]
    return [count for count in counts if type(count) is int and count > 0]


def _check_groups(ranks: Ranks) -> Iterator[Finding]:
    """Compare the total size of each group's partitions with its parameters."""
    for index, group in enumerate(ranks.shapes):
        path = (STATES, "single_partition_of_fp32_groups", index)
        sizes = [t.size for part in ranks.optimizer.values() for t in part.tensors if t.path == path]
        # Versions of DeepSpeed pad a group to a multiple of twice the number of ranks, or not at all. A group
        # of experts is in ``count`` partitions for each of ``copies`` sets of ranks.
        counts = _partition_counts(ranks.optimizer[0])
        count = counts[index] if index < len(counts) and ranks.has_experts else ranks.world
        copies = max(1, ranks.world // count)
        expected = sum(map(math.prod, group.values())) * copies
        if sizes and not expected <= sum(sizes) < expected + 2 * ranks.world:
            message = f"group {index} has {sum(sizes):,} elements in all, but its parameters {expected:,}"
            yield error("partition-sum", message, None)


# Stage 3 --------------------------------------------------------------------------------------------


def flat_of(ranks: Ranks, rank: int) -> list[Tensor]:
    """Return a rank's flat tensors, in the order of the groups."""
    path = (STATES, "fp32_flat_groups")
    return [tensor for tensor in ranks.optimizer[rank].tensors if tensor.path[:2] == path]


def rebuild_parameters(ranks: Ranks, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield a model's tensors, each placeholder replaced by the parameter joined from the ranks.

    If a rank is missing, the parameter has no values.
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
        # At stage 3 the model states have an empty tensor of shape (0,) in place of each parameter; buffers,
        # which have bytes, are whole. A tied parameter is empty under each of its names: ``shared_params``
        # maps them to the one that ``param_shapes`` and the flat tensors have.
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
    """Yield the parameters by name, joined from the ranks' parts."""
    # Every rank has a part of the same size, rounded up, of each parameter at the same offset of its flat
    # tensor; the padding of the last part is beyond the parameter's shape. Frozen parameters aren't in the
    # optimizer: each rank's model states have its part under ``frozen_param_fragments``.
    if ranks.is_whole:
        flat = [flat_of(ranks, rank) for rank in range(ranks.world)]
        offset = 0
        for group in ranks.shapes:
            for name, shape in group.items():
                part = -(-math.prod(shape) // ranks.world)
                runs = [Run(tensors, offset, part) for tensors in flat]
                if (parameter := join_runs((MODULE, name), shape, Role.WEIGHTS, runs)) is not None:
                    yield name, parameter
                offset += part
    for name, shape in _frozen_shapes(ranks).items():
        path = ("frozen_param_fragments", name)
        parts = [
            [tensor for tensor in ranks.model[rank].tensors if tensor.path == path]
            for rank in range(ranks.world)
            if rank in ranks.model
        ]
        if len(parts) == ranks.world and all(parts):
            runs = [Run(tensors, 0, parts[0][0].size) for tensors in parts]
            if (parameter := join_runs((MODULE, name), shape, Role.WEIGHTS, runs)) is not None:
                yield name, parameter


def _frozen_shapes(ranks: Ranks) -> dict[str, tuple[int, ...]]:
    return next(iter(shapes_of(ranks.metadata.get("frozen_param_shapes"))), {})


def unjoined_notes(ranks: Ranks) -> Iterator[Finding]:
    """Yield a note if stage 3 parameters aren't joined, as they are of several model-parallel ranks."""
    if ranks.stage == 3 and ranks.models > 1:
        message = "ZeRO-3 parameters of several model-parallel ranks are shown in their parts only"
        yield note("partitions-apart", message)


# Universal checkpoints ------------------------------------------------------------------------------

VARIANT = "deepspeed-universal"
ZERO, FP32, MODULE = "zero", "fp32", "module"
_VALUE = "param"
"""Key of the tensor in a file; a file converted from stage 3 holds the flat tensor without a key."""
_STEP = "step"
_REQUIRED_STATES = frozenset({"exp_avg", "exp_avg_sq"})
"""States that ``ds_to_universal`` writes for every parameter, whatever the optimizer."""
_SUFFIX = ".pt"
_SHARED_STATES_FILE = "optimizer_state.pt"
_OPTIMIZER_ENDING = "optim_states.pt"
_MAX_NAMED = 10
_HALF_MASTERS = (
    ("fp16", "fp16_master_weights_and_grads", "float16"),
    ("bf16", "bf16_master_weights_and_grads", "bfloat16"),
    ("bfloat16", "bf16_master_weights_and_grads", "bfloat16"),
)
"""Sections and settings of ``ds_config`` with which the optimizer keeps weights in half precision.

Source: deepspeedai/DeepSpeed ``deepspeed/runtime/precision_config.py``.
"""
Shape = tuple[int, ...]


class _Model(NamedTuple):
    """The parameters according to the model states of all ranks.

    Attributes:
        slices: Shapes of each parameter's slices, one for each model-parallel rank; empty if unknown.
        names: All weights by name, of any rank.
        untrained: Names of weights that the optimizer doesn't have: buffers, frozen and tied ones.
        masters: Possible types of the optimizer's copies of the weights.
        rows: Rows of the vocabulary without padding, None if unknown.
    """

    slices: Mapping[str, tuple[Shape, ...]]
    names: Mapping[str, Tensor]
    untrained: frozenset[str]
    masters: frozenset[str]
    rows: int | None


class UniversalStates:
    """The parameters and optimizer states of a universal checkpoint, from the files below ``zero``.

    Attributes:
        metadata: Plain values of ``optimizer_state.pt``, the states of the whole optimizer.
        paths: All files below ``zero``.
        _states: For each parameter and state, the tensor of its file, None if damaged, and its metadata.
    """

    def __init__(self, probe: Probe, parts: OpenedParts) -> None:
        self.metadata: Mapping[str, Any] = {}
        self.paths: list[str] = []
        self._parts = parts
        self._states: dict[str, dict[str, tuple[Tensor | None, Mapping[str, Any]]]] = {}
        self._shared: list[Tensor] = []
        self._has_directory = ZERO in probe.entries
        if not self._has_directory:
            parts.fault("part-missing", "no such directory", ZERO)
            return
        for entry in sorted(fs.entries(probe.entries[ZERO].path), key=lambda one: one.name):
            if entry.is_dir(follow_symlinks=False):
                self._add_parameter(entry)
            else:
                self._add_shared(entry)

    def tensors(self, models: Mapping[str, Checkpoint], tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return all tensors of the checkpoint; missing and contradicting ones become findings.

        The weights in full precision take the names of the first rank's rounded copies. The copies of all
        ranks are below the names of their files, and aren't weights. A lost weight has no values.

        Args:
            models: Model states of all ranks by file name, the first rank's first.
            tensors: Those of the files next to ``zero``, with the first rank's at the root.
        """
        model = _model_of(models)
        expected = self._check_names(model)
        self._check_states()
        weights, states = dict.fromkeys((*expected, *self._states)), []
        found: dict[str, Tensor] = {}
        for name in weights:
            for state, (stored, metadata) in self._states.get(name, {}).items():
                tensor = self._checked(stored, metadata, model) if stored is not None else None
                if tensor is not None and state == FP32:
                    found[name] = replace(tensor, path=(MODULE, name), role=Role.WEIGHTS)
                elif stored is not None:
                    states.append(tensor or replace(stored, role=Role.OTHER))
            if name not in found and (lost := _lost_weight(name, model)) is not None:
                found[name] = lost
        # The directories below ``zero`` are sorted by name. The tensors get the order of the model states;
        # weights that these don't name follow.
        ordered = {name: found[name] for name in (*model.names, *found) if name in found}
        return [*ordered.values(), *_other_tensors(tensors, ordered, models), *states, *self._shared]

    def _check_names(self, model: _Model) -> Iterable[str]:
        """Return the names of the trained parameters; missing and unknown directories become findings."""
        if not self._has_directory:
            return model.slices or model.names
        if model.names and not model.slices:
            message = "the model states have no param_shapes: no shape could be checked"
            self._parts.findings.append(warning("part-not-checked", message))
        expected = model.slices or [name for name in model.names if name not in model.untrained]
        missing = [
            name
            for name in dict.fromkeys((*expected, *self._states))
            if FP32 not in self._states.get(name, ())
        ]
        self._parts.note_missing([f"{ZERO}/{name}/{FP32}{_SUFFIX}" for name in missing])
        known = model.slices.keys() | model.names.keys()
        for name in [one for one in self._states if known and one not in known][:_MAX_NAMED]:
            message = "no such parameter in the model states"
            self._parts.findings.append(error("part-extra", message, f"{ZERO}/{name}"))
        return expected

    def _check_states(self) -> None:
        """Add findings about lost optimizer states; a parameter may have no step."""
        states = set().union(*self._states.values()) - {FP32}
        if not states:
            if self._states:
                message = "no optimizer state, only weights"
                self._parts.findings.append(warning("part-missing", message, ZERO))
            return
        # Further states depend on the optimizer, and no file lists them. Only the other parameters show that
        # one is lost, so it is a warning, while a state that is always written is an error.
        missing = [
            f"{ZERO}/{name}/{state}{_SUFFIX}"
            for name, held in self._states.items()
            for state in sorted(_REQUIRED_STATES - held.keys())
        ]
        self._parts.note_missing(missing)
        for name, held in self._states.items():
            for state in sorted(states - held.keys() - _REQUIRED_STATES):
                message = "missing optimizer state; other parameters have it"
                where = f"{ZERO}/{name}/{state}{_SUFFIX}"
                self._parts.findings.append(warning("part-missing", message, where))

    def _checked(self, tensor: Tensor, metadata: Mapping[str, Any], model: _Model) -> Tensor | None:
        """Return a tensor in its parameter's shape; None, and a finding, if its type or shape doesn't fit."""
        _, name, state = map(str, tensor.path)
        place = f"{ZERO}/{name}/{state}{_SUFFIX}"
        # The optimizer's copies are float32 unless the configuration allows half precision. A smaller type is
        # otherwise a rounded weight, like those in the model states, in place of the full one.
        if state == FP32 and tensor.dtype.name not in model.masters:
            message = f"type {tensor.dtype.name}, expected {' or '.join(sorted(model.masters))}"
            self._parts.fault("part-damaged", message, place)
            return None
        slices = model.slices.get(name, ())
        if state == _STEP or not slices:
            return tensor
        shape = _fitting_shape(tensor.shape, metadata, slices, model.rows)
        if shape is not None:
            return replace(tensor, shape=shape)
        expected = ", ".join(dict.fromkeys(str(list(one)) for one in slices[:_MAX_NAMED]))
        whose = "the model states say" if len(slices) == 1 else f"the slices of {len(slices):,} ranks have"
        self._parts.fault("part-damaged", f"shape {list(tensor.shape)}, but {whose} {expected}", place)
        return None

    def _add_parameter(self, directory: os.DirEntry[str]) -> None:
        states = self._states.setdefault(directory.name, {})
        for entry in sorted(fs.entries(directory.path), key=lambda one: (one.name != f"{FP32}.pt", one.name)):
            place = f"{ZERO}/{directory.name}/{entry.name}"
            if not entry.is_file() or not entry.name.endswith(_SUFFIX):
                self._parts.findings.append(warning("part-not-checked", "it was not checked", place))
                continue
            state = entry.name.removesuffix(_SUFFIX)
            self.paths.append(entry.path)
            part = self._parts.add_file(place, entry.path)
            states[state] = None, {}
            if part is not None:
                tensor = self._only_tensor(part, (ZERO, directory.name, state), place)
                states[state] = tensor, part.metadata

    def _only_tensor(self, part: Checkpoint, path: tuple[str, str, str], place: str) -> Tensor | None:
        """Return the one tensor of a file; None without a finding for a step that is a number."""
        values = [one for one in part.tensors if one.path in ((_VALUE,), ("tensor",))]
        if len(values) == 1:
            return replace(values[0], path=path, role=Role.OPTIMIZER, shares_with=None)
        if values or path[-1] != _STEP:
            found = f"{len(values)} tensors under {_VALUE!r}, expected one"
            self._parts.fault("part-damaged", found, place)
        return None

    def _add_shared(self, entry: os.DirEntry[str]) -> None:
        place = f"{ZERO}/{entry.name}"
        if entry.name != _SHARED_STATES_FILE or not entry.is_file():
            self._parts.findings.append(warning("part-not-checked", "it was not checked", place))
            return
        self.paths.append(entry.path)
        part = self._parts.add_file(place, entry.path)
        if part is not None:
            self.metadata = part.metadata
            self._shared = [
                replace(one, path=(ZERO, "optimizer_state", *one.path), role=Role.OPTIMIZER, shares_with=None)
                for one in part.tensors
            ]


def is_universal(probe: Probe) -> bool:
    """Return whether a directory is a universal checkpoint, even if ``zero`` is lost."""
    entry = probe.entries.get(ZERO)
    if entry is not None:
        return entry.is_dir(follow_symlinks=False)
    return probe.name.endswith("_universal") and not any(
        name.endswith(_OPTIMIZER_ENDING) for name in probe.entries
    )


def has_parameters(probe: Probe) -> bool:
    """Return whether ``zero`` has directories of parameters, which remain if the model states are lost."""
    entry = probe.entries.get(ZERO)
    if entry is None or not entry.is_dir(follow_symlinks=False):
        return False
    return any(
        one.is_dir(follow_symlinks=False) and fs.isfile(os.path.join(one.path, FP32 + _SUFFIX))
        for one in fs.entries(entry.path)
    )


def is_full_precision(tensor: Tensor) -> bool:
    """Return whether a weight is from a file ``fp32.pt``, not from the model states."""
    return any(os.path.basename(one.file) == FP32 + _SUFFIX for one in storages_of(tensor))


# The model states -----------------------------------------------------------------------------------


def _model_of(models: Mapping[str, Checkpoint]) -> _Model:
    slices: dict[str, dict[str, Shape]] = {}
    names: dict[str, Tensor] = {}
    untrained: set[str] = set()
    masters = {"float32"}
    rows = None
    for file, part in models.items():
        rank = file.rpartition("mp_rank_")[2]  # the files of data-parallel ranks say the same
        for group in shapes_of(part.metadata.get("param_shapes")):
            for name, shape in group.items():
                slices.setdefault(name, {})[rank] = shape
        for tensor in part.tensors:
            if tensor.role is Role.WEIGHTS and (weight := _name_in_module(tensor)) is not None:
                names.setdefault(weight, tensor)
                untrained |= {weight} if tensor.shares_with is not None else set()
        untrained |= _untrained(part.metadata)
        masters.update(_half_masters(part.metadata.get("ds_config")))
        info = part.metadata.get("universal_checkpoint_info")
        original_rows = info.get("original_vocab_size") if isinstance(info, Mapping) else None
        rows = original_rows if type(original_rows) is int else rows
    shapes = {name: tuple(of_ranks.values()) for name, of_ranks in slices.items()}
    return _Model(shapes, names, frozenset(untrained), frozenset(masters), rows)


def _name_in_module(tensor: Tensor) -> str | None:
    """Return the name in the model of a tensor of the model states; None for any other tensor."""
    if len(tensor.path) < 2 or tensor.path[0] != MODULE:
        return None
    return ".".join(map(str, tensor.path[1:]))


def _untrained(metadata: Mapping[str, Any]) -> set[str]:
    buffers, shared = metadata.get("buffer_names"), metadata.get("shared_params")
    names = set(map(str, buffers)) if isinstance(buffers, list) else set()
    names |= set(map(str, shared)) if isinstance(shared, Mapping) else set()
    return names.union(*shapes_of(metadata.get("frozen_param_shapes")))


def _half_masters(config: object) -> Iterator[str]:
    for section, setting, name in _HALF_MASTERS:
        settings = config.get(section) if isinstance(config, Mapping) else None
        if isinstance(settings, Mapping) and settings.get(setting) is True:
            yield name


def _fitting_shape(
    shape: Shape, metadata: Mapping[str, Any], slices: Sequence[Shape], rows: int | None
) -> Shape | None:
    """Return a file's shape if it fits the model-parallel ranks' slices, unflattened; None if it doesn't."""
    # ``ds_to_universal`` writes next to each tensor how it joined the slices: experts, which each rank has a
    # few of, along the first axis; parameters of several parts, such as fused queries, keys and values, with
    # an axis for the parts; a vocabulary without the rows that padded it. Tensors of stage 3 stay flat.
    experts = metadata.get("ep_num_experts")
    if metadata.get("is_expert_param") is True and type(experts) is int:
        slices = [(experts, *one[1:]) for one in slices]
    wholes = _joined_shapes(slices)
    if shape in wholes:
        return shape
    if "sub_param_shape" in metadata:
        return shape if math.prod(shape) in map(math.prod, wholes) else None
    if metadata.get("vocab_tensor") is True and shape[:1] > (0,):
        padded = (one[0] for one in wholes if one[1:] == shape[1:])
        return shape if any(shape[0] == min(rows or shape[0], length) for length in padded) else None
    flat = (one for one in wholes if shape == (math.prod(one),))
    return next(flat, None)


def _joined_shapes(slices: Sequence[Shape]) -> list[Shape]:
    """Return the possible shapes of a parameter whose ranks have these slices."""
    # The model states don't have the axis along which a parameter was cut, nor whether ranks have slices or
    # copies of it: all ranks have a copy of a parameter that isn't cut (a layer norm), and two stages of a
    # pipeline a copy of a tied one. So each axis, and each number of copies that divides the ranks, is tried.
    counts = Counter(slices)
    most = math.gcd(*counts.values())
    shapes = []
    for copies in (number for number in range(1, most + 1) if most % number == 0):
        for axis in range(max(1, len(slices[0]))):
            apart = {(*one[:axis], *one[axis + 1 :]) for one in slices}
            if len(counts) == 1 and copies == len(slices):
                shapes.append(slices[0])
            elif len(apart) == 1 and all(len(one) > axis for one in slices):
                length = sum(one[axis] for one in slices) // copies
                shapes.append((*slices[0][:axis], length, *slices[0][axis + 1 :]))
    return shapes


# All tensors ----------------------------------------------------------------------------------------


def _lost_weight(name: str, model: _Model) -> Tensor | None:
    """Return a weight without values, None if its shape is unknown."""
    copy = model.names.get(name)
    if name not in model.slices and copy is None:
        return None
    shape = model.slices[name][0] if name in model.slices else copy.shape if copy is not None else ()
    return Tensor((MODULE, name), BY_NAME["float32"], shape, Role.WEIGHTS)


def _other_tensors(
    tensors: Iterable[Tensor], weights: Mapping[str, Tensor], models: Mapping[str, Checkpoint]
) -> Iterator[Tensor]:
    """Yield the tensors next to ``zero``: rounded copies of weights, and tied names of weights."""
    stems = [os.path.splitext(file)[0] for file in models]
    first = next(iter(models.values()), None)
    owners = _tied_names(first, weights) if first is not None else {}
    for tensor in tensors:
        is_of_first = tensor.path[0] not in stems
        name = _name_in_module(tensor if is_of_first else replace(tensor, path=tensor.path[1:]))
        if name is None or not (name in weights or name in owners):
            yield tensor
        elif name in owners and is_of_first:
            yield replace(weights[owners[name]], path=tensor.path, shares_with=f"{MODULE}.{owners[name]}")
        elif tensor.nbytes or weights.get(name, tensor).nbytes == 0:  # ZeRO 3 leaves placeholders
            copy = replace(tensor, path=(stems[0], *tensor.path), shares_with=None) if is_of_first else tensor
            yield replace(copy, role=Role.OTHER)


def _tied_names(first: Checkpoint, weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the optimizer's name of each tied weight, by the names that the optimizer doesn't have."""
    stated = first.metadata.get("shared_params")
    owners = {str(name): str(owner) for name, owner in stated.items()} if isinstance(stated, Mapping) else {}
    # ``shared_params`` has the ties that DeepSpeed recorded. Others are found as views of the same bytes in
    # the model states. Empty placeholders (stage 3) are left out, because all of them would look tied.
    named = {name: one for one in first.tensors if one.nbytes and (name := _name_in_module(one)) is not None}
    by_view: dict[str, str] = {}
    for name, tensor in named.items():
        if name in weights:
            by_view.setdefault(tensor.shares_with or tensor.name, name)
    for name, tensor in named.items():
        owners.setdefault(name, by_view.get(tensor.shares_with or tensor.name, name))
    return {name: owner for name, owner in owners.items() if name not in weights and owner in weights}
