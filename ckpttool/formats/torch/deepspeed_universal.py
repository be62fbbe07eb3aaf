"""DeepSpeed's universal checkpoints: a directory for each parameter, whatever ranks wrote them.

``ds_to_universal`` puts ``zero/<parameter>/fp32.pt`` and a file for each state of the optimizer beside copies
of the model states. Those hold rounded weights, and still describe the job whose files they were.

Source: deepspeedai/DeepSpeed ``deepspeed/checkpoint/ds_to_universal.py``, ``universal_checkpoint.py``,
``constants.py``.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.dtypes import BY_NAME
from ckpttool.core.report import error, warning
from ckpttool.core.tensor import Role, Tensor
from ckpttool.core.values import storages_of
from ckpttool.formats.interface import Probe
from ckpttool.formats.parts import OpenedParts, open_file
from ckpttool.formats.torch.deepspeed_zero import shapes_of
from ckpttool.storage import fs

VARIANT = "deepspeed-universal"
ZERO, FP32, MODULE = "zero", "fp32", "module"
_VALUE = "param"
"""The key under which a file has its tensor; of stage 3 it has the tensor alone, flat."""
_STEP = "step"
_ALWAYS = frozenset({"exp_avg", "exp_avg_sq"})
"""The states of the optimizer that ``ds_to_universal`` writes of every parameter, whatever the optimizer."""
_SUFFIX = ".pt"
_OF_ALL = "optimizer_state.pt"
_RANKS_OPTIMIZER = "optim_states.pt"
_MAX_NAMED = 10
_HALF_MASTERS = (
    ("fp16", "fp16_master_weights_and_grads", "float16"),
    ("bf16", "bf16_master_weights_and_grads", "bfloat16"),
    ("bfloat16", "bf16_master_weights_and_grads", "bfloat16"),
)
"""Settings with which the optimizer keeps its weights in less than float32.

Source: deepspeedai/DeepSpeed ``deepspeed/runtime/precision_config.py``.
"""
Shape = tuple[int, ...]


class _Model(NamedTuple):
    """What the model states of all ranks say of the parameters.

    Attributes:
        slices: The shapes of each parameter's slices, one of each model-parallel rank; empty if not told.
        names: Names of all weights, whatever rank has them.
        untrained: Names of weights that the optimizer does not know: buffers, frozen ones, second names.
        masters: Types that the weights in full precision may have.
        rows: Rows of the vocabulary without padding, None if it is not told.
    """

    slices: Mapping[str, tuple[Shape, ...]]
    names: Mapping[str, Tensor]
    untrained: frozenset[str]
    masters: frozenset[str]
    rows: int | None


class UniversalStates:
    """The parameters of a universal checkpoint, and what its optimizer keeps of them.

    Attributes:
        metadata: Of the whole optimizer.
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
            parts.fault("part-missing", "there is no such directory", ZERO)
            return
        for entry in sorted(fs.entries(probe.entries[ZERO].path), key=lambda one: one.name):
            if entry.is_dir(follow_symlinks=False):
                self._add_parameter(entry)
            else:
                self._add_shared(entry)

    def tensors(self, models: Mapping[str, Checkpoint], tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return all tensors, and note what is missing or contradicts the model states.

        The weights in full precision have the names that the first rank's rounded copies had; those lie below
        the name of their file, as the other ranks' do, and are no weights of their own. A weight that is lost
        has no values.

        Args:
            models: The model states of all ranks by the names of their files, the first rank's first.
            tensors: What the files beside ``zero`` hold, the first rank's at the root.
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
            if name not in found and (lost := _lost(name, model)) is not None:
                found[name] = lost
        ordered = {name: found[name] for name in (*model.names, *found) if name in found}
        return [*ordered.values(), *_others(tensors, ordered, models), *states, *self._shared]

    def _check_names(self, model: _Model) -> Iterable[str]:
        """Return the names of the trained parameters, and note directories that are missing or unknown."""
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
        self._note_missing(f"{ZERO}/{name}/{FP32}{_SUFFIX}" for name in missing)
        known = model.slices.keys() | model.names.keys()
        for name in [one for one in self._states if known and one not in known][:_MAX_NAMED]:
            message = "the model states have no such parameter"
            self._parts.findings.append(error("part-extra", message, f"{ZERO}/{name}"))
        return expected

    def _note_missing(self, places: Iterable[str]) -> None:
        missing = list(places)
        for place in missing[:_MAX_NAMED]:
            self._parts.fault("part-missing", "there is no such file", place)
        if len(missing) > _MAX_NAMED:
            self._parts.fault("part-missing", f"{len(missing) - _MAX_NAMED:,} more files are not there", None)

    def _check_states(self) -> None:
        """Note states of the optimizer that are lost; whether a parameter has a step, is its own affair."""
        states = set().union(*self._states.values()) - {FP32}
        if not states:
            if self._states:
                message = "no parameter has a state of the optimizer: there are weights alone"
                self._parts.findings.append(warning("part-missing", message, ZERO))
            return
        self._note_missing(
            f"{ZERO}/{name}/{state}{_SUFFIX}"
            for name, held in self._states.items()
            for state in sorted(_ALWAYS - held.keys())
        )
        for name, held in self._states.items():
            for state in sorted(states - held.keys() - _ALWAYS):
                message = "missing optimizer state; other parameters have it"
                where = f"{ZERO}/{name}/{state}{_SUFFIX}"
                self._parts.findings.append(warning("part-missing", message, where))

    def _checked(self, tensor: Tensor, metadata: Mapping[str, Any], model: _Model) -> Tensor | None:
        """Return a tensor in its parameter's shape, None if it can't be it."""
        _, name, state = map(str, tensor.path)
        place = f"{ZERO}/{name}/{state}{_SUFFIX}"
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
        said = ", ".join(dict.fromkeys(str(list(one)) for one in slices[:_MAX_NAMED]))
        whose = "the model states say" if len(slices) == 1 else f"the slices of {len(slices):,} ranks have"
        self._parts.fault("part-damaged", f"shape {list(tensor.shape)}, and {whose} {said}", place)
        return None

    def _add_parameter(self, directory: os.DirEntry[str]) -> None:
        states = self._states.setdefault(directory.name, {})
        for entry in sorted(fs.entries(directory.path), key=lambda one: (one.name != f"{FP32}.pt", one.name)):
            place = f"{ZERO}/{directory.name}/{entry.name}"
            if not entry.is_file() or not entry.name.endswith(_SUFFIX):
                self._parts.findings.append(warning("part-not-checked", "it was not looked into", place))
                continue
            state = entry.name.removesuffix(_SUFFIX)
            self.paths.append(entry.path)
            part = self._parts.add(place, partial(open_file, entry.path))
            states[state] = None, {}
            if part is not None:
                tensor = self._only_tensor(part, (ZERO, directory.name, state), place)
                states[state] = tensor, part.metadata

    def _only_tensor(self, part: Checkpoint, path: tuple[str, str, str], place: str) -> Tensor | None:
        """Return the one tensor of a file; a step may be a number."""
        values = [one for one in part.tensors if one.path in ((_VALUE,), ("tensor",))]
        if len(values) == 1:
            return replace(values[0], path=path, role=Role.OPTIMIZER, shares_with=None)
        if values or path[-1] != _STEP:
            found = f"{len(values)} tensors under {_VALUE!r}, expected one"
            self._parts.fault("part-damaged", found, place)
        return None

    def _add_shared(self, entry: os.DirEntry[str]) -> None:
        place = f"{ZERO}/{entry.name}"
        if entry.name != _OF_ALL or not entry.is_file():
            self._parts.findings.append(warning("part-not-checked", "it was not looked into", place))
            return
        self.paths.append(entry.path)
        part = self._parts.add(place, partial(open_file, entry.path))
        if part is not None:
            self.metadata = part.metadata
            self._shared = [
                replace(one, path=(ZERO, "optimizer_state", *one.path), role=Role.OPTIMIZER, shares_with=None)
                for one in part.tensors
            ]


def is_universal(probe: Probe) -> bool:
    """Tell whether model states are of a universal checkpoint, even if what was below ``zero`` is lost."""
    entry = probe.entries.get(ZERO)
    if entry is not None:
        return entry.is_dir(follow_symlinks=False)
    return probe.name.endswith("_universal") and not any(
        name.endswith(_RANKS_OPTIMIZER) for name in probe.entries
    )


def has_parameters(probe: Probe) -> bool:
    """Tell whether there are directories of parameters below ``zero``, even if the model states are lost."""
    entry = probe.entries.get(ZERO)
    if entry is None or not entry.is_dir(follow_symlinks=False):
        return False
    return any(
        one.is_dir(follow_symlinks=False) and fs.isfile(os.path.join(one.path, FP32 + _SUFFIX))
        for one in fs.entries(entry.path)
    )


def is_full_precision(tensor: Tensor) -> bool:
    """Tell whether a weight is none of the model states."""
    return any(os.path.basename(one.file) == FP32 + _SUFFIX for one in storages_of(tensor))


# What the model states say --------------------------------------------------------------------------


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
        told = part.metadata.get("universal_checkpoint_info")
        told_rows = told.get("original_vocab_size") if isinstance(told, Mapping) else None
        rows = told_rows if type(told_rows) is int else rows
    shapes = {name: tuple(of_ranks.values()) for name, of_ranks in slices.items()}
    return _Model(shapes, names, frozenset(untrained), frozenset(masters), rows)


def _name_in_module(tensor: Tensor) -> str | None:
    """Return what a model calls a tensor of its state dict, however that is nested."""
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
    """Return the shape of a parameter that ranks had slices of, None if that of its file is another."""
    experts = metadata.get("ep_num_experts")
    if metadata.get("is_expert_param") is True and type(experts) is int:  # each rank has some of them only
        slices = [(experts, *one[1:]) for one in slices]
    wholes = _joined_shapes(slices)
    if shape in wholes:
        return shape
    if "sub_param_shape" in metadata:  # the sub-parameters may have an axis of their own
        return shape if math.prod(shape) in map(math.prod, wholes) else None
    if metadata.get("vocab_tensor") is True and shape[:1] > (0,):  # without the rows that padded it
        padded = (one[0] for one in wholes if one[1:] == shape[1:])
        return shape if any(shape[0] == min(rows or shape[0], length) for length in padded) else None
    flat = (one for one in wholes if shape == (math.prod(one),))
    return next(flat, None)


def _joined_shapes(slices: Sequence[Shape]) -> list[Shape]:
    """Return the shapes that slices may have together: joined along an axis, each kept once or repeatedly.

    All ranks have a parameter that isn't cut, and two stages of a pipeline one that is tied.
    """
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


def _lost(name: str, model: _Model) -> Tensor | None:
    """Return a weight without values."""
    copy = model.names.get(name)
    if name not in model.slices and copy is None:
        return None
    shape = model.slices[name][0] if name in model.slices else copy.shape if copy is not None else ()
    return Tensor((MODULE, name), BY_NAME["float32"], shape, Role.WEIGHTS)


def _others(
    tensors: Iterable[Tensor], weights: Mapping[str, Tensor], models: Mapping[str, Checkpoint]
) -> Iterator[Tensor]:
    """Yield the tensors beside ``zero``: copies of weights as such, and second names as names of weights."""
    stems = [os.path.splitext(file)[0] for file in models]
    first = next(iter(models.values()), None)
    owners = _owners(first, weights) if first is not None else {}
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


def _owners(first: Checkpoint, weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Return for second names of weights, by which the optimizer doesn't know them, the names that it has."""
    stated = first.metadata.get("shared_params")
    owners = {str(name): str(owner) for name, owner in stated.items()} if isinstance(stated, Mapping) else {}
    named = {name: one for one in first.tensors if one.nbytes and (name := _name_in_module(one)) is not None}
    by_view: dict[str, str] = {}
    for name, tensor in named.items():
        if name in weights:
            by_view.setdefault(tensor.shares_with or tensor.name, name)
    for name, tensor in named.items():
        owners.setdefault(name, by_view.get(tensor.shares_with or tensor.name, name))
    return {name: owner for name, owner in owners.items() if name not in weights and owner in weights}
