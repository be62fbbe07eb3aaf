"""What DeepSpeed writes under one tag: a directory with files of each rank, as one checkpoint.

``zero_to_fp32.py``, which lies beside, is a program; it is neither run nor judged.

Source: deepspeedai/DeepSpeed ``deepspeed/runtime/engine.py`` (``save_checkpoint``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

from ckpttool.checkpoint import Checkpoint, Producer, Role, Tensor, TrainingState
from ckpttool.formats.deepspeed_zero import Ranks, check_partitions, explained, rebuilt, stage_of
from ckpttool.formats.interface import Format, Probe
from ckpttool.formats.parts import Gathered, file_entry, open_file
from ckpttool.report import error, warning
from ckpttool.training import training_state

_MODEL = re.compile(r"(zero_pp_rank_(?P<dp>\d{1,9})_)?mp_rank_(?P<mp>\d{1,9})_model_states\.pt")
_OPTIMIZER = re.compile(
    r"(bf16_|fp16_)?zero_pp_rank_(?P<dp>\d{1,9})_mp_rank_(?P<mp>\d{1,9})_?optim_states\.pt"
)
_OTHER = re.compile(
    r"layer_\d+-model_\d+-model_states\.pt|layer_\d+_expert_\d+_mp_rank_\d+_model_states\.pt|"
    r"(expp_rank_\d+_)?mp_rank_\d+_optim_states\.pt"
)
_LOADABLE = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".safetensors")
MAX_RANKS = 100_000
"""The most ranks that are counted; no job has had more."""


class DeepSpeed(Format):
    """A directory like ``global_step500`` that DeepSpeed wrote."""

    name: ClassVar[str] = "pytorch"

    def matches(self, probe: Probe) -> bool:
        return any(
            (_MODEL.fullmatch(name) or _OPTIMIZER.fullmatch(name) or _OTHER.fullmatch(name))
            and entry.is_file()
            for name, entry in probe.entries.items()
        )

    def open(self, probe: Probe) -> Checkpoint:
        with Gathered("part") as parts:
            files = _read(parts, probe)
            first = _first(files)
            told = dict(first.metadata) if first else {}
            ranks = _ranks(parts, files, told)
            tensors = [tensor for file in files for tensor in _tensors(file, ranks, first)]
            parts.findings += (*check_partitions(ranks), *explained(ranks))
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
                complete=parts.complete,
                close=parts.keep(),
            )


class _File(NamedTuple):
    """A file of the checkpoint: what it is for, whose it is, and what it holds."""

    name: str
    kind: str  # model, optimizer, other
    dp: int | None
    mp: int | None
    part: Checkpoint

    @property
    def stem(self) -> str:
        return os.path.splitext(self.name)[0]


def _read(parts: Gathered, probe: Probe) -> list[_File]:
    """Open all files that a framework could load."""
    found = []
    for name, entry in probe.entries.items():
        if entry.is_file() and name.endswith(_LOADABLE):
            part = parts.add(name, partial(open_file, entry.path))
            if part is not None:
                found.append(_placed(name, part))
        elif entry.is_dir(follow_symlinks=False):
            parts.findings.append(warning("part-not-checked", "a directory that was not looked into", name))
    return sorted(found, key=lambda file: file.kind != "model")


def _placed(name: str, part: Checkpoint) -> _File:
    for kind, pattern in (("model", _MODEL), ("optimizer", _OPTIMIZER)):
        match = pattern.fullmatch(name)
        if match:
            dp = None if match["dp"] is None else int(match["dp"])
            return _File(name, kind, dp, int(match["mp"]), part)
    return _File(name, "other", None, None, part)


def _first(files: list[_File]) -> Checkpoint | None:
    """Return the model states of the first rank that is here."""
    models = [file for file in files if file.kind == "model"]
    return min(models, key=lambda file: (file.mp or 0, file.dp or 0)).part if models else None


# The ranks ------------------------------------------------------------------------------------------


def _ranks(parts: Gathered, files: list[_File], told: Mapping[str, Any]) -> Ranks:
    """Return the states of all ranks, and note those that are missing or of another save."""
    stage = stage_of(told, [file.part for file in files if file.kind == "optimizer"])
    world, models = _count(told.get("dp_world_size")), _count(told.get("mp_world_size")) or 1
    names = [file.name for file in files]
    if not any(file.kind == "model" for file in files):
        if not any(file.kind == "other" for file in files):
            parts.fault("missing", "no file with the model's states", None)
    elif world is None:
        parts.findings.append(error("world-size", "no number of ranks (dp_world_size) in the model's states"))
    elif world * models > MAX_RANKS:
        parts.findings.append(error("world-size", f"{world * models:,} ranks are not to be believed"))
    else:
        _note_missing(parts, files, stage, world, models)
    _compare_saves(parts, files)
    own = {
        kind: {file.dp or 0: file.part for file in files if file.kind == kind and file.mp == 0}
        for kind in ("model", "optimizer")
    }
    return Ranks(stage, world or 0, models, own["model"], own["optimizer"], told, tuple(names))


def _note_missing(parts: Gathered, files: list[_File], stage: int | None, world: int, models: int) -> None:
    wanted = {"model": {(dp if stage == 3 else None, mp) for dp in range(world) for mp in range(models)}}
    if stage:
        wanted["optimizer"] = {(dp, mp) for dp in range(world) for mp in range(models)}
    for kind, ranks in wanted.items():
        here = {(file.dp, file.mp) for file in files if file.kind == kind}
        lacking = sorted(ranks - here, key=str)
        if lacking:
            dp, mp = lacking[0]
            rank = f"mp_rank {mp}" if dp is None else f"zero_pp_rank {dp}, mp_rank {mp}"
            message = f"{len(lacking):,} of {len(ranks):,} files of {kind} states, the first of {rank}"
            parts.fault("missing", message, None)
        for file in files:
            if file.kind == kind and (file.dp, file.mp) not in ranks:
                message = f"a rank that a job of {world:,} ranks does not have"
                parts.findings.append(error("part-extra", message, file.name))


def _compare_saves(parts: Gathered, files: list[_File]) -> None:
    """Require that all model states were saved at the same step."""
    steps = {file.name: file.part.metadata.get("global_steps") for file in files if file.kind == "model"}
    if steps:
        first = next(iter(steps.values()))
        for name, step in steps.items():
            if step != first:
                message = f"saved at step {step!r:.20}, and the first rank's at {first!r:.20}"
                parts.findings.append(error("part-stale", message, name))


def _count(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


# What they hold -------------------------------------------------------------------------------------


def _tensors(file: _File, ranks: Ranks, first: Checkpoint | None) -> Iterator[Tensor]:
    """Yield the tensors of a file: those of the first model states as they are, others below its name."""
    if file.part is first:
        if ranks.stage == 3:
            yield from rebuilt(ranks, file.part.tensors)
        else:
            yield from file.part.tensors
    elif file.kind == "model" and ranks.stage == 3:
        yield from (_below(file, one) for one in file.part.tensors if one.nbytes and one.path[0] != "module")
    else:
        yield from (_below(file, tensor) for tensor in file.part.tensors)


def _below(file: _File, tensor: Tensor) -> Tensor:
    role = Role.OPTIMIZER if file.kind == "optimizer" else tensor.role
    owner = None if tensor.shares_with is None else f"{file.stem}.{tensor.shares_with}"
    return replace(tensor, path=(file.stem, *tensor.path), role=role, shares_with=owner)


def _training(told: Mapping[str, Any], files: list[_File], name: str) -> TrainingState:
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
