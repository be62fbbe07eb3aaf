"""Checkpoints of DeepSpeed: a directory for one tag (``global_step500``) with the files of all ranks.

- ``mp_rank_<mp>_model_states.pt``, of each model-parallel rank: weights, settings and counters. At ZeRO stage
  3 each data-parallel rank has one, ``zero_pp_rank_<dp>_mp_rank_<mp>_model_states.pt``, with empty tensors as
  placeholders of the parameters.
- ``zero_pp_rank_<dp>_mp_rank_<mp>_optim_states.pt``, of each rank if ZeRO is on: its partition of the
  optimizer and, at stage 3, of the parameters (``deepspeed_zero.py``).
- ``layer_<layer>-model_<mp>-model_states.pt`` of a pipeline, and ``layer_<layer>_expert_<expert>_…`` of a
  mixture of experts: weights of a layer or an expert.
- Universal checkpoints have a directory ``zero`` instead of the optimizer states.

Tensors of the first model states keep their paths, layers' and experts' join the module, and those of any
other file are below its name. ``zero_to_fp32.py`` next to the directory is a program; it is neither run nor
judged.

Source: deepspeedai/DeepSpeed ``deepspeed/runtime/engine.py`` (``save_checkpoint``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

from ckpttool.core.checkpoint import Checkpoint, Producer, TrainingState
from ckpttool.core.report import Finding, error, warning
from ckpttool.core.tensor import Role, Tensor
from ckpttool.core.training import training_state
from ckpttool.formats.interface import Format, Probe
from ckpttool.formats.opening import MAX_RANKS, OpenedParts, file_entry
from ckpttool.formats.torch.deepspeed_zero import (
    STATES,
    ZERO,
    Ranks,
    UniversalStates,
    check_partitions,
    has_parameters,
    is_universal,
    rebuild_parameters,
    shapes_of,
    stage_of,
    unjoined_notes,
)
from ckpttool.formats.torch.deepspeed_zero import VARIANT as UNIVERSAL

MODEL_STATES = re.compile(r"(zero_pp_rank_(?P<dp>\d{1,9})_)?mp_rank_(?P<mp>\d{1,9})_model_states\.pt")
# The prefix is the precision of the training. Very old releases wrote ``mp_rank_00optim_states.pt``, without
# an underscore before ``optim_states``.
OPTIMIZER_STATES = re.compile(
    r"(bf16_|fp16_)?zero_pp_rank_(?P<dp>\d{1,9})_mp_rank_(?P<mp>\d{1,9})_?optim_states\.pt"
)
_LAYER = re.compile(r"layer_(?P<layer>\d{1,9})(-model_(?P<mp>\d{1,9}))?-model_states\.pt")
_EXPERT = re.compile(
    r"layer_(?P<layer>\d{1,9})_expert_(?P<expert>\d{1,9})_mp_rank_(?P<mp>\d{1,9})_model_states\.pt"
)
_LAYER_OF_PARAMETER = re.compile(r"(\d{1,9})\.")
_RANK_ENDING = re.compile(r"(-model_\d+)?-model_states")
KINDS = {"model": MODEL_STATES, "optimizer": OPTIMIZER_STATES, "layer": _LAYER, "expert": _EXPERT}
_OTHER = re.compile(r"(expp_rank_\d+_)?mp_rank_\d+_optim_states\.pt")
_LOADABLE = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".safetensors")
_JOB_SIZES = ("dp_world_size", "mp_world_size")
_INNER_STATES = ("base_optimizer_state", "optimizer_state_dict")
"""Keys of the optimizer's own state: at stages 1 and 2, and at stage 3."""


class DeepSpeed(Format):
    """A directory like ``global_step500`` that DeepSpeed wrote."""

    name: ClassVar[str] = "pytorch"

    def matches(self, probe: Probe) -> bool:
        return any(
            any(pattern.fullmatch(name) for pattern in (*KINDS.values(), _OTHER)) and entry.is_file()
            for name, entry in probe.entries.items()
        ) or has_parameters(probe)

    def open(self, probe: Probe) -> Checkpoint:
        with OpenedParts("part", allows_losses=probe.allows_losses) as parts:
            universal = UniversalStates(probe, parts) if is_universal(probe) else None
            files = _open_files(parts, probe, skipped=() if universal is None else (ZERO,))
            models = sorted(
                (file for file in files if file.kind == "model"), key=lambda file: (file.mp, file.dp or 0)
            )
            first = models[0].part if models else None
            metadata = dict(first.metadata) if first is not None else {}
            ranks = _ranks(parts, files, metadata, is_universal=universal is not None)
            tensors = [tensor for file in files for tensor in _tensors(file, ranks, first)]
            optimizers = [ranks.optimizer[rank] for rank in sorted(ranks.optimizer)]
            parts.findings += (
                *check_partitions(ranks),
                *_check_optimizers(optimizers),
                *unjoined_notes(ranks),
            )
            metadata |= {file.stem: dict(file.part.metadata) for file in files if file.part is not first}
            if universal is not None:
                tensors = universal.tensors({file.name: file.part for file in models}, tensors)
                metadata[ZERO] = dict(universal.metadata)
            paths = [entry.path for entry in probe.entries.values() if entry.is_file()]
            paths += () if universal is None else universal.paths
            version = metadata.get("ds_version")
            return parts.checkpoint(
                path=probe.path,
                format=self.name,
                variant="deepspeed" if universal is None else UNIVERSAL,
                tensors=tuple(tensors),
                files=tuple(map(file_entry, paths)),
                spans=parts.spans,
                metadata=lambda: metadata,
                training=lambda: _training_state(metadata, files, probe.name),
                producer=Producer("deepspeed", version if isinstance(version, str) else None),
            )


class _StateFile(NamedTuple):
    """A file with the numbers in its name: data- and model-parallel rank, layer, expert."""

    name: str
    kind: str  # model, optimizer, layer, expert, other
    part: Checkpoint
    dp: int | None = None
    mp: int = 0
    layer: int | None = None
    expert: int | None = None

    @property
    def stem(self) -> str:
        return os.path.splitext(self.name)[0]


def _open_files(parts: OpenedParts, probe: Probe, skipped: Sequence[str]) -> list[_StateFile]:
    """Open all files that a framework could load; ``skipped`` are directories that are read elsewhere."""
    files = []
    for name, entry in probe.entries.items():
        if entry.is_file() and name.endswith(_LOADABLE):
            part = parts.add_file(name, entry.path)
            if part is not None:
                kind, numbers = _parse_name(name)
                files.append(_StateFile(name, kind, part, **dict(numbers)))
        elif entry.is_dir(follow_symlinks=False) and name not in skipped:
            parts.findings.append(warning("part-not-checked", "a directory that was not checked", name))
    return sorted(files, key=lambda file: file.kind != "model")


def _parse_name(name: str) -> tuple[str, tuple[tuple[str, int], ...]]:
    """Return the kind of a file and the numbers in its name, without regard to leading zeros."""
    for kind, pattern in KINDS.items():
        match = pattern.fullmatch(name)
        if match:
            return kind, tuple((key, int(value)) for key, value in match.groupdict().items() if value)
    return "other", ()


# The ranks ------------------------------------------------------------------------------------------


def _ranks(
    parts: OpenedParts, files: list[_StateFile], metadata: Mapping[str, Any], *, is_universal: bool
) -> Ranks:
    """Return the states of all ranks, and add findings about missing files and those of another save."""
    # A universal checkpoint has none of the files that ZeRO writes, though its settings still have a stage.
    stage = stage_of(metadata, [file.part for file in files if file.kind == "optimizer"])
    stage = 0 if is_universal else stage
    world, models = _count(metadata.get("dp_world_size")), _count(metadata.get("mp_world_size")) or 1
    names = [file.name for file in files]
    if not any(file.kind == "model" for file in files):
        parts.fault("part-missing", "no file with the model's states", None)
    elif world is None:
        parts.findings.append(error("world-size", "no number of ranks (dp_world_size) in the model's states"))
    elif world * models > MAX_RANKS:
        parts.findings.append(error("world-size", f"implausible world size {world * models:,}"))
    else:
        expected = [*_expected_rank_files(files, stage, world, models)]
        if not is_universal:  # ds_to_universal copies the files of the ranks alone
            expected += _expected_layer_and_expert_files(files)
        present = {_parse_name(file.name) for file in files}
        parts.note_missing([name for name in expected if _parse_name(name) not in present])
        _note_other_ranks(parts, files, stage, world, models)
    parts.findings += _check_model_states({file.name: file.part for file in files if file.kind == "model"})
    by_kind = {
        kind: {file.dp or 0: file.part for file in files if file.kind == kind and file.mp == 0}
        for kind in ("model", "optimizer")
    }
    return Ranks(stage, world or 0, models, by_kind["model"], by_kind["optimizer"], metadata, tuple(names))


def _note_other_ranks(
    parts: OpenedParts, files: list[_StateFile], stage: int | None, world: int, models: int
) -> None:
    """Add an error for each file of a rank beyond the job's size."""
    for file in files:
        # The optimizer is partitioned over the data-parallel ranks at every stage, the model at stage 3 only.
        # At other stages one rank writes the model states, under a name without a data-parallel rank.
        is_cut = file.kind == "optimizer" or stage == 3
        numbers = range(world) if is_cut else (None,)
        if file.kind in ("model", "optimizer") and (file.dp not in numbers or file.mp >= models):
            message = f"a rank beyond the {world:,} of the job"
            parts.findings.append(error("part-extra", message, file.name))


def _expected_rank_files(
    files: list[_StateFile], stage: int | None, world: int, models: int
) -> Iterator[str]:
    """Yield the model and optimizer files that the ranks of a job write."""
    # The names of optimizer states begin with their precision.
    prefixes = (match[1] for file in files if (match := OPTIMIZER_STATES.fullmatch(file.name)))
    prefix = next(prefixes, None) or ""
    for mp in range(models):
        for dp in range(world):
            if stage == 3:
                yield f"zero_pp_rank_{dp}_mp_rank_{mp:02d}_model_states.pt"
            elif dp == 0:
                yield f"mp_rank_{mp:02d}_model_states.pt"
            if stage:
                yield f"{prefix}zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt"


def _expected_layer_and_expert_files(files: list[_StateFile]) -> Iterator[str]:
    """Yield the layer and expert files that the model states imply."""
    states = [file.part.metadata for file in files if file.kind == "model"]
    yield from _expected_layer_files(files, states)
    counts = states[0].get("num_experts")  # of each layer with experts
    if not isinstance(counts, list) or not all(
        type(count) is int and 0 <= count <= MAX_RANKS for count in counts
    ):
        return
    for layer, count in enumerate(counts if sum(counts) <= MAX_RANKS else ()):
        yield from (f"layer_{layer}_expert_{index}_mp_rank_00_model_states.pt" for index in range(count))


def _expected_layer_files(files: list[_StateFile], states: list[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the names of a pipeline's layer files, by the layers in the names of the parameters."""
    # A pipeline names parameters by layer (``3.weight``), and its model states have no module. Layers without
    # parameters have no file. Each model-parallel rank has a file of a layer, so the endings of those that
    # exist (``-model_00``) give the names of the others.
    layer_files = [file for file in files if file.kind == "layer"]
    if not layer_files and not all(state.get("module", state) is None for state in states):
        return
    names = (name for state in states for group in shapes_of(state.get("param_shapes")) for name in group)
    layers = {int(match[1]) for name in names if (match := _LAYER_OF_PARAMETER.match(str(name)))}
    endings = {match[1] or "" for file in layer_files if (match := _RANK_ENDING.search(file.name))}
    for ending in sorted(endings or {""}):
        yield from (f"layer_{layer:02d}{ending}-model_states.pt" for layer in sorted(layers))
    if not layer_files and not layers:
        yield "layer_00-model_states.pt"


def _count(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None


# Their content --------------------------------------------------------------------------------------


def _tensors(file: _StateFile, ranks: Ranks, first: Checkpoint | None) -> Iterator[Tensor]:
    """Yield the tensors of a file with their paths in the checkpoint."""
    if file.part is first:
        if ranks.stage == 3:
            yield from rebuild_parameters(ranks, file.part.tensors)
        else:
            yield from file.part.tensors
    elif file.kind in ("layer", "expert") and file.mp == 0:
        # Names in a layer's file are relative to the layer, names in an expert's file to the module.
        prefix = f"{file.layer}." if file.kind == "layer" else ""
        for tensor in file.part.tensors:
            owner = None if tensor.shares_with is None else f"module.{prefix}{tensor.shares_with}"
            path = ("module", prefix + tensor.name)
            yield replace(tensor, path=path, role=Role.WEIGHTS, shares_with=owner)
    else:
        for tensor in file.part.tensors:
            is_of_module = not tensor.nbytes or tensor.path[0] == "module"
            if file.kind == "model" and ranks.stage == 3 and is_of_module:
                continue  # placeholders of the parameters, as in the first rank's model states
            role = Role.OPTIMIZER if file.kind == "optimizer" else tensor.role
            owner = None if tensor.shares_with is None else f"{file.stem}.{tensor.shares_with}"
            yield replace(tensor, path=(file.stem, *tensor.path), role=role, shares_with=owner)


def _training_state(metadata: Mapping[str, Any], files: list[_StateFile], name: str) -> TrainingState:
    """Return the training state; the learning rate may be in a rank's optimizer states."""
    values = dict(metadata)
    for file in files:
        if file.kind == "optimizer" and not values.get("optimizer"):
            states = file.part.metadata.get(STATES)
            inner = states if isinstance(states, Mapping) else {}
            for key in _INNER_STATES:
                if isinstance(inner.get(key), Mapping):
                    values["optimizer"] = inner[key]
    return training_state(values, {}, name)


def _check_model_states(parts: Mapping[str, Checkpoint]) -> Iterator[Finding]:
    """Yield an error for each model state (by file name) of another step or job than the first one."""
    if not parts:
        return
    first = next(iter(parts.values())).metadata
    for name, part in parts.items():
        step, first_step = part.metadata.get("global_steps"), first.get("global_steps")
        if step != first_step:
            message = f"saved at step {step!r:.20}, but the first rank's at {first_step!r:.20}"
            yield error("part-stale", message, name)
        for key in _JOB_SIZES:
            size, first_size = part.metadata.get(key), first.get(key)
            if size != first_size:
                message = f"{key} is {size!r:.20}, but the first rank's is {first_size!r:.20}"
                yield error("part-stale", message, name)


def _check_optimizers(parts: Sequence[Checkpoint]) -> Iterator[Finding]:
    """Yield an error for each rank whose optimizer has another number of steps than the first rank's.

    A step that is a tensor isn't read, but compared by its checksum in the file.
    """
    if len(parts) < 2:
        return
    first, *others = parts
    steps, checksums = _steps(first), _step_checksums(first)
    for part in others:
        name = os.path.basename(part.path)
        for key, step in _steps(part).items():
            if steps.get(key, step) != step:
                message = f"{key} is {step!r:.20}, but the first rank's {steps[key]!r:.20}"
                yield error("part-stale", message, name)
                break
        else:
            if any(checksums.get(path, crc) != crc for path, crc in _step_checksums(part).items()):
                message = "its optimizer has made a different number of steps than the first rank's"
                yield error("part-stale", message, name)


def _steps(part: Checkpoint) -> dict[str, object]:
    """Return an optimizer's plain numbers: steps, learning rates, the loss scaler's iteration."""
    states = part.metadata.get(STATES)
    outer = states if isinstance(states, Mapping) else {}
    inner: Mapping[str, object] = next(
        (outer[key] for key in _INNER_STATES if isinstance(outer.get(key), Mapping)), {}
    )
    numbers: dict[str, object] = {}
    params, groups = inner.get("state"), inner.get("param_groups")
    for key, state in params.items() if isinstance(params, Mapping) else ():
        _add_number(numbers, f"state {key}'s step", state, "step")
    for index, group in enumerate(groups if isinstance(groups, list) else ()):
        _add_number(numbers, f"group {index}'s step", group, "step")
        _add_number(numbers, f"group {index}'s learning rate", group, "lr")
    _add_number(numbers, "the loss scaler's iteration", outer.get("loss_scaler"), "cur_iter")
    return numbers


def _add_number(numbers: dict[str, object], name: str, tree: object, key: str) -> None:
    value = tree.get(key) if isinstance(tree, Mapping) else None
    if type(value) in (int, float):
        numbers[name] = value


def _step_checksums(part: Checkpoint) -> dict[tuple[object, ...], int]:
    """Return the checksums of steps that are tensors of one element, by path."""
    steps = [
        tensor
        for tensor in part.tensors
        if tensor.path[-1] == "step" and tensor.size == 1 and tensor.path[0] == STATES
    ]
    if not steps:
        return {}
    stated = {(span.extent.offset, span.extent.nbytes): span.crc32 for span in part.spans()}
    extents = {tensor.path: tensor.storage or tensor.extent for tensor in steps}
    return {
        path: checksum
        for path, extent in extents.items()
        if extent is not None and (checksum := stated.get((extent.offset, extent.nbytes))) is not None
    }
