"""What DeepSpeed writes under one tag: a directory with files of each rank, as one checkpoint.

``zero_to_fp32.py``, which lies beside, is a program; it is neither run nor judged.

Source: deepspeedai/DeepSpeed ``deepspeed/runtime/engine.py`` (``save_checkpoint``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

from ckpttool.checkpoint import Checkpoint, Producer, TrainingState
from ckpttool.formats.interface import Format, Probe
from ckpttool.formats.parts import Gathered, file_entry, open_file
from ckpttool.formats.torch.deepspeed_zero import (
    STATES,
    Ranks,
    apart_notes,
    check_partitions,
    rebuild_parameters,
    shapes_of,
    stage_of,
)
from ckpttool.report import Finding, error, warning
from ckpttool.tensor import Role, Tensor
from ckpttool.training import training_state

MODEL_STATES = re.compile(r"(zero_pp_rank_(?P<dp>\d{1,9})_)?mp_rank_(?P<mp>\d{1,9})_model_states\.pt")
OPTIMIZER_STATES = re.compile(
    r"(bf16_|fp16_)?zero_pp_rank_(?P<dp>\d{1,9})_mp_rank_(?P<mp>\d{1,9})_?optim_states\.pt"
)
_LAYER = re.compile(r"layer_(?P<layer>\d{1,9})(-model_(?P<mp>\d{1,9}))?-model_states\.pt")
_EXPERT = re.compile(
    r"layer_(?P<layer>\d{1,9})_expert_(?P<expert>\d{1,9})_mp_rank_(?P<mp>\d{1,9})_model_states\.pt"
)
_OF_A_LAYER = re.compile(r"(\d{1,9})\.")
_OF_A_RANK = re.compile(r"(-model_\d+)?-model_states")
KINDS = {"model": MODEL_STATES, "optimizer": OPTIMIZER_STATES, "layer": _LAYER, "expert": _EXPERT}
_OTHER = re.compile(r"(expp_rank_\d+_)?mp_rank_\d+_optim_states\.pt")
_LOADABLE = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".safetensors")
MAX_RANKS = 100_000
"""The most ranks, and experts of a layer, that are counted; no job has had more."""
_MAX_TOLD = 10
"""How many missing files are told by name."""
_NUMBERS = ("dp", "mp", "layer", "expert")
_OF_A_JOB = ("dp_world_size", "mp_world_size")
_INNER = ("base_optimizer_state", "optimizer_state_dict")
"""Where the optimizer's own state lies: in stages 1 and 2, and in stage 3."""


class DeepSpeed(Format):
    """A directory like ``global_step500`` that DeepSpeed wrote."""

    name: ClassVar[str] = "pytorch"

    def matches(self, probe: Probe) -> bool:
        return any(
            any(pattern.fullmatch(name) for pattern in (*KINDS.values(), _OTHER)) and entry.is_file()
            for name, entry in probe.entries.items()
        )

    def open(self, probe: Probe) -> Checkpoint:
        with Gathered("part") as parts:
            files = _read(parts, probe)
            first = _first(files)
            told = dict(first.metadata) if first is not None else {}
            ranks = _ranks(parts, files, told)
            tensors = [tensor for file in files for tensor in _tensors(file, ranks, first)]
            optimizers = [ranks.optimizer[rank] for rank in sorted(ranks.optimizer)]
            parts.findings += (*check_partitions(ranks), *check_optimizers(optimizers), *apart_notes(ranks))
            told |= {file.stem: dict(file.part.metadata) for file in files if file.part is not first}
            return Checkpoint(
                path=probe.path,
                format=self.name,
                variant="deepspeed",
                tensors=tuple(tensors),
                files=tuple(file_entry(entry.path) for entry in probe.entries.values() if entry.is_file()),
                spans=parts.spans,
                metadata=lambda: told,
                training=lambda: _training(told, files, probe.name),
                producer=Producer("deepspeed", _text(told.get("ds_version"))),
                findings=tuple(parts.findings),
                safety=tuple(parts.safety),
                judged=frozenset(parts.judged),
                complete=parts.complete,
                close=parts.keep(),
            )


class _RankFile(NamedTuple):
    """A file of the checkpoint: what it is for, whose it is, and what it holds."""

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


def _read(parts: Gathered, probe: Probe) -> list[_RankFile]:
    """Open all files that a framework could load."""
    found = []
    for name, entry in probe.entries.items():
        if entry.is_file() and name.endswith(_LOADABLE):
            part = parts.add(name, partial(open_file, entry.path))
            if part is not None:
                found.append(_parse_name(name, part))
        elif entry.is_dir(follow_symlinks=False):
            parts.findings.append(warning("part-not-checked", "a directory that was not looked into", name))
    return sorted(found, key=lambda file: file.kind != "model")


def _parse_name(name: str, part: Checkpoint) -> _RankFile:
    for kind, pattern in KINDS.items():
        match = pattern.fullmatch(name)
        if match:
            numbers = {
                key: int(value) for key, value in match.groupdict().items() if value and key in _NUMBERS
            }
            return _RankFile(name, kind, part, **numbers)
    return _RankFile(name, "other", part)


def _first(files: list[_RankFile]) -> Checkpoint | None:
    """Return the model states of the first rank that is here."""
    models = [file for file in files if file.kind == "model"]
    return min(models, key=lambda file: (file.mp, file.dp or 0)).part if models else None


# The ranks ------------------------------------------------------------------------------------------


def _ranks(parts: Gathered, files: list[_RankFile], told: Mapping[str, Any]) -> Ranks:
    """Return the states of all ranks, and note those that are missing or of another save."""
    stage = stage_of(told, [file.part for file in files if file.kind == "optimizer"])
    world, models = _count(told.get("dp_world_size")), _count(told.get("mp_world_size")) or 1
    names = [file.name for file in files]
    if not any(file.kind == "model" for file in files):
        parts.fault("missing", "no file with the model's states", None)
    elif world is None:
        parts.findings.append(error("world-size", "no number of ranks (dp_world_size) in the model's states"))
    elif world * models > MAX_RANKS:
        parts.findings.append(error("world-size", f"{world * models:,} ranks are not to be believed"))
    else:
        _note_missing(parts, files, _expected_files(files, stage, world, models))
        _note_unknown(parts, files, stage, world, models)
    parts.findings += check_model_states({file.name: file.part for file in files if file.kind == "model"})
    own = {
        kind: {file.dp or 0: file.part for file in files if file.kind == kind and file.mp == 0}
        for kind in ("model", "optimizer")
    }
    return Ranks(stage, world or 0, models, own["model"], own["optimizer"], told, tuple(names))


def _expected_files(files: list[_RankFile], stage: int | None, world: int, models: int) -> Iterator[str]:
    """Yield the names of the files that such a job writes, as far as its own words tell."""
    for mp in range(models):
        for dp in range(world):
            if stage == 3:
                yield f"zero_pp_rank_{dp}_mp_rank_{mp:02d}_model_states.pt"
            elif dp == 0:
                yield f"mp_rank_{mp:02d}_model_states.pt"
            if stage:
                yield f"{_prefix(files)}zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt"
    told = [file.part.metadata for file in files if file.kind == "model"]
    yield from _expected_layer_files(files, told)
    for layer, count in enumerate(_counts(told[0].get("num_experts"))):
        yield from (f"layer_{layer}_expert_{at}_mp_rank_00_model_states.pt" for at in range(count))


def _prefix(files: list[_RankFile]) -> str:
    """Return how the names of optimizer states begin, which tells their precision."""
    found = (match[1] for file in files if (match := OPTIMIZER_STATES.fullmatch(file.name)))
    return next(found, None) or ""


def _expected_layer_files(files: list[_RankFile], told: list[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the names of the files of those layers of a pipeline of which parameters are named."""
    own = [file for file in files if file.kind == "layer"]
    if not own and not all(one.get("module", one) is None for one in told):
        return
    names = (name for one in told for group in shapes_of(one.get("param_shapes")) for name in group)
    layers = {int(match[1]) for name in names if (match := _OF_A_LAYER.match(str(name)))}
    endings = {match[1] or "" for file in own if (match := _OF_A_RANK.search(file.name))}
    for ending in sorted(endings or {""}):
        yield from (f"layer_{layer:02d}{ending}-model_states.pt" for layer in sorted(layers))
    if not own and not layers:
        yield "layer_00-model_states.pt"


def _counts(told: object) -> list[int]:
    """Return how many experts each layer with experts has."""
    counts = told if isinstance(told, list) else []
    if not all(type(count) is int and 0 <= count <= MAX_RANKS for count in counts) or sum(counts) > MAX_RANKS:
        return []
    return counts


def _note_missing(parts: Gathered, files: list[_RankFile], wanted: Iterable[str]) -> None:
    here = {_numbers(file.name) for file in files}
    lacking = [name for name in wanted if _numbers(name) not in here]
    for name in lacking[:_MAX_TOLD]:
        parts.fault("missing", "there is no such file", name)
    if len(lacking) > _MAX_TOLD:
        parts.fault("missing", f"{len(lacking) - _MAX_TOLD:,} more files are not there", None)


def _numbers(name: str) -> object:
    """Return what a file is for, and whose, however its name is spelt; a name that says nothing is itself."""
    for kind, pattern in KINDS.items():
        match = pattern.fullmatch(name)
        if match:
            found = match.groupdict()
            return kind, *(
                None if found[key] is None else int(found[key]) for key in _NUMBERS if key in found
            )
    return name


def _note_unknown(
    parts: Gathered, files: list[_RankFile], stage: int | None, world: int, models: int
) -> None:
    """Note files of ranks that the job did not have."""
    for file in files:
        is_cut = file.kind == "optimizer" or stage == 3
        known = range(world) if is_cut else (None,)
        if file.kind in ("model", "optimizer") and (file.dp not in known or file.mp >= models):
            message = f"a rank that a job of {world:,} ranks does not have"
            parts.findings.append(error("part-extra", message, file.name))


def _count(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


# What they hold -------------------------------------------------------------------------------------


def _tensors(file: _RankFile, ranks: Ranks, first: Checkpoint | None) -> Iterator[Tensor]:
    """Yield the tensors of a file: those of the first model states as they are, others below its name."""
    if file.part is first:
        if ranks.stage == 3:
            yield from rebuild_parameters(ranks, file.part.tensors)
        else:
            yield from file.part.tensors
    elif file.kind in ("layer", "expert") and file.mp == 0:
        yield from (_in_module(file, tensor) for tensor in file.part.tensors)
    elif file.kind == "model" and ranks.stage == 3:
        yield from (_below(file, one) for one in file.part.tensors if one.nbytes and one.path[0] != "module")
    else:
        yield from (_below(file, tensor) for tensor in file.part.tensors)


def _in_module(file: _RankFile, tensor: Tensor) -> Tensor:
    """Return a tensor of a layer, or of an expert, as the whole module names it."""
    layer = f"{file.layer}." if file.kind == "layer" else ""
    owner = None if tensor.shares_with is None else f"module.{layer}{tensor.shares_with}"
    return replace(tensor, path=("module", layer + tensor.name), role=Role.WEIGHTS, shares_with=owner)


def _below(file: _RankFile, tensor: Tensor) -> Tensor:
    role = Role.OPTIMIZER if file.kind == "optimizer" else tensor.role
    owner = None if tensor.shares_with is None else f"{file.stem}.{tensor.shares_with}"
    return replace(tensor, path=(file.stem, *tensor.path), role=role, shares_with=owner)


def _training(told: Mapping[str, Any], files: list[_RankFile], name: str) -> TrainingState:
    """Return the training state; the learning rate may be in the optimizer states of a rank."""
    known = dict(told)
    for file in files:
        if file.kind == "optimizer" and not known.get("optimizer"):
            states = file.part.metadata.get("optimizer_state_dict")
            inner = states if isinstance(states, Mapping) else {}
            for key in ("base_optimizer_state", "optimizer_state_dict"):
                if isinstance(inner.get(key), Mapping):
                    known["optimizer"] = inner[key]
    return training_state(known, {}, name)


def check_model_states(parts: Mapping[str, Checkpoint]) -> Iterator[Finding]:
    """Yield where model states, by the names of their files, are of another step or job than the first."""
    if not parts:
        return
    first = next(iter(parts.values()))
    for name, part in parts.items():
        step, other = part.metadata.get("global_steps"), first.metadata.get("global_steps")
        if step != other:
            yield error(
                "part-stale", f"saved at step {step!r:.20}, and the first rank's at {other!r:.20}", name
            )
        for key in _OF_A_JOB:
            found, wanted = part.metadata.get(key), first.metadata.get(key)
            if found != wanted:
                message = f"{key} is {found!r:.20}, and the first rank's is {wanted!r:.20}"
                yield error("part-stale", message, name)


def check_optimizers(parts: Sequence[Checkpoint]) -> Iterator[Finding]:
    """Yield where a rank's optimizer has made another number of steps than the first rank's.

    A step that is a tensor isn't read: it is compared by the checksum that its file states of it.
    """
    if len(parts) < 2:
        return
    first, *others = parts
    steps, sums = _steps(first), _sums(first)
    for part in others:
        name = os.path.basename(part.path)
        for key, step in _steps(part).items():
            if steps.get(key, step) != step:
                yield error(
                    "part-stale", f"{key} is {step!r:.20}, and the first rank's {steps[key]!r:.20}", name
                )
                break
        else:
            if any(sums.get(path, found) != found for path, found in _sums(part).items()):
                message = "its optimizer has made another number of steps than the first rank's"
                yield error("part-stale", message, name)


def _steps(part: Checkpoint) -> dict[str, object]:
    """Return what is counted as plain numbers: steps of each group, learning rates, the loss scaler's."""
    told = part.metadata.get(STATES)
    outer = told if isinstance(told, Mapping) else {}
    inner: Mapping[str, object] = next(
        (outer[key] for key in _INNER if isinstance(outer.get(key), Mapping)), {}
    )
    found: dict[str, object] = {}
    states, groups = inner.get("state"), inner.get("param_groups")
    for key, state in states.items() if isinstance(states, Mapping) else ():
        _take(found, f"state {key}'s step", state, "step")
    for at, group in enumerate(groups if isinstance(groups, list) else ()):
        _take(found, f"group {at}'s step", group, "step")
        _take(found, f"group {at}'s learning rate", group, "lr")
    _take(found, "the loss scaler's iteration", outer.get("loss_scaler"), "cur_iter")
    return found


def _take(found: dict[str, object], name: str, tree: object, key: str) -> None:
    value = tree.get(key) if isinstance(tree, Mapping) else None
    if type(value) in (int, float):
        found[name] = value


def _sums(part: Checkpoint) -> dict[tuple[object, ...], int]:
    """Return the stated checksums of steps that are tensors of one element, by their paths."""
    steps = [
        one for one in part.tensors if one.path[-1] == "step" and one.size == 1 and one.path[0] == STATES
    ]
    if not steps:
        return {}
    stated = {(span.extent.offset, span.extent.nbytes): span.crc32 for span in part.spans()}
    places = {one.path: one.storage or one.extent for one in steps}
    return {
        path: found
        for path, place in places.items()
        if place is not None and (found := stated.get((place.offset, place.nbytes))) is not None
    }
