"""Paddle Fluid's directories: one serial of a training run, or the variables of an inference model.

A serial is one directory ``checkpoint_<n>``, in one of three generations: variables directly in it; in
``__model__``, with ``trainer_<k>`` beside; and with ``__lookup_table__`` as well. It is whole once its
``_SUCCESS`` is there, which Paddle's own loader asks for, and nothing else.

Source: PaddlePaddle/Paddle ``python/paddle/fluid/io.py`` and ``contrib/trainer.py`` of 2018.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from ckpttool.checkpoint import Checkpoint, Producer, Tensor, TrainingState
from ckpttool.errors import CheckpointError, DamagedCheckpoint
from ckpttool.formats.assembly import lazy_scalar
from ckpttool.formats.fluid_parts import (
    COUNTERS,
    MARKER,
    TABLES,
    TRAINER,
    Entries,
    Parts,
    add_tables,
    add_trainer,
    add_variables,
    check_accumulators,
    in_order,
    is_stream_file,
    role_of,
)
from ckpttool.formats.interface import Format, Probe, scan
from ckpttool.formats.paddle_program import Program, looks_like_program, read_program
from ckpttool.formats.parts import placed
from ckpttool.report import note, warning
from ckpttool.wire.lodtensor import Stream, lod_fault, read_all
from ckpttool.wire.source import Source

MODEL = "__model__"
COMBINED = "__params__"
SERIAL = re.compile(r"checkpoint_([0-9]{1,18})")

_RATE = "learning_rate_0"


class Fluid(Format):
    """A directory that Paddle Fluid wrote."""

    name: ClassVar[str] = "fluid"

    def matches(self, probe: Probe) -> bool:
        return probe.is_directory and kind_of(probe.path, probe.entries) is not None

    def open(self, probe: Probe) -> Checkpoint:
        kind = kind_of(probe.path, probe.entries)
        parts = Parts(probe.path)
        with parts.opened:
            producer = Producer("paddle")
            if kind == "checkpoint":
                _add_serial(parts, probe.entries)
            elif kind == "inference":
                producer = _add_inference(parts, probe.entries)
            else:
                add_variables(parts, probe.entries, lambda name: False)
            if kind is not None and not parts.files:
                raise DamagedCheckpoint(probe.path, "no file in it", expected="variables or a trainer's")
            return _checkpoint(probe, kind, parts, producer)


def kind_of(path: str, entries: Entries) -> str | None:
    """Return what a directory is: ``checkpoint``, ``inference``, ``variables``, or None.

    The directories of a serial are none of these: they belong to what is around them.
    """
    name = os.path.basename(os.path.abspath(path))
    if name == MODEL or name in TABLES:
        return None
    model = entries.get(MODEL)
    if model is not None and os.path.isfile(model.path):
        return "inference" if looks_like_program(_head(model.path)) else None
    if is_serial(entries, name):
        return "checkpoint"
    files = [entry for key, entry in entries.items() if key != MARKER and not key.startswith(".")]
    if not files or not all(os.path.isfile(entry.path) for entry in files) or not _are_streams(files):
        return None
    return "checkpoint" if MARKER in entries or SERIAL.fullmatch(name) else "variables"


def is_serial(entries: Entries, name: str) -> bool:
    """Tell whether a directory of this name has the directories of a serial.

    Lookup tables may lie in a root as well, since the loader of 2018 looked for them there.
    Where there are trainers' alone, they hold counters, or the name speaks for itself.
    """
    inner = {key: entry for key, entry in entries.items() if entry.is_dir(follow_symlinks=False)}
    if MODEL in inner or (any(table in inner for table in TABLES) and not any(map(SERIAL.fullmatch, inner))):
        return True
    trainers = [entry.path for key, entry in inner.items() if TRAINER.fullmatch(key)]
    if SERIAL.fullmatch(name):
        return bool(trainers)
    return any(os.path.isfile(os.path.join(path, counter)) for path in trainers for counter in COUNTERS)


def _head(path: str) -> bytes:
    try:
        with Source(path) as source:
            return source.read(0, min(64, source.size))
    except CheckpointError:
        return b""


def _are_streams(files: list[os.DirEntry[str]]) -> bool:
    """Tell whether files are variables: one of them surely, and none of them surely not."""
    surely = False
    for entry in files:
        if entry.name.lower().endswith((".pdiparams", ".pdmodel")):
            return False
        found = is_stream_file(entry)
        if found is False:
            return False
        surely |= found is True
    return surely


def has_marker(entries: Entries) -> bool:
    """Tell whether a serial's variables were all written, as Paddle's loader asks it."""
    model = entries.get(MODEL)
    if model is not None and os.path.isdir(model.path):
        return os.path.isfile(os.path.join(model.path, MARKER))
    return MARKER in entries and os.path.isfile(entries[MARKER].path)


def _siblings_have_marker(path: str) -> bool:
    """Tell whether another serial beside one has the marker."""
    own = os.path.realpath(path)
    try:
        beside = scan(os.path.dirname(own))
    except CheckpointError:  # what can't be looked at tells nothing
        return False
    for name, entry in beside.items():
        is_other = SERIAL.fullmatch(name) and entry.is_dir(follow_symlinks=False) and entry.path != own
        if is_other and any(os.path.isfile(os.path.join(entry.path, *at, MARKER)) for at in ((), (MODEL,))):
            return True
    return False


def _add_serial(parts: Parts, entries: Entries) -> None:
    """Read all of one serial."""
    named = is_serial(entries, os.path.basename(os.path.abspath(parts.root)))
    model = entries.get(MODEL)
    if model is not None:
        add_directory_of_variables(parts, model)
    elif not named:
        add_variables(parts, entries, lambda name: False)
        parts.add_marker(entries)
    _check_marker(parts, entries, has_variables=model is not None or not named)
    for name, entry in entries.items() if named else ():
        match = TRAINER.fullmatch(name)
        if name in (MODEL, MARKER):
            continue
        if (match or name in TABLES) and entry.is_dir(follow_symlinks=False):
            inner = scan(entry.path)
            add_trainer(parts, str(int(match[1])), inner) if match else add_tables(parts, inner)
        elif parts.is_inside(entry):
            parts.findings.append(note("not-part", "no part of a serial; it was not looked at", name))
    if all(name in entries for name in TABLES):
        parts.findings.append(note("tables-twice", "lookup tables under both spellings", TABLES[1]))


def add_directory_of_variables(parts: Parts, model: os.DirEntry[str]) -> None:
    """Read ``__model__``."""
    if not parts.is_inside(model):
        return
    inner = scan(model.path)
    add_variables(parts, inner, lambda name: False)
    parts.add_marker(inner)


def _check_marker(parts: Parts, entries: Entries, *, has_variables: bool) -> None:
    if not has_variables:
        message = f"no {MODEL}: only the trainer that wrote it holds the variables"
        parts.fault("no-model", message)
    elif not has_marker(entries):
        if _siblings_have_marker(parts.root):
            parts.fault("no-marker", f"no {MARKER}: its save did not finish, and Paddle does not load it")
        else:
            message = f"no {MARKER}, nor in any serial beside it: judged by its content alone"
            parts.findings.append(note("no-marker-anywhere", message))


def _add_inference(parts: Parts, entries: Entries) -> Producer:
    """Read a program and the variables that it names."""
    source = parts.source(entries[MODEL])
    program = read_program(source, MODEL)
    parts.safety += (placed(finding, MODEL) for finding in program.safety)
    combined = entries.get(COMBINED)
    if combined is not None and parts.is_inside(combined):
        add_combined(parts, combined, program)
    else:
        add_variables(parts, entries, lambda name: name == MODEL)
        found = {tensor.path[0] for tensor in parts.tensors}
        lacking = [one.name for one in program.stored if one.name not in found]
        if lacking:
            message = f"{len(lacking):,} variables of the program have no file, like {lacking[0]!r}"
            parts.fault("variable-missing", message)
    check_program(parts, program)
    return Producer("paddle", program.release)


def add_combined(parts: Parts, entry: os.DirEntry[str], program: Program | None) -> None:
    """Read a file of several tensors; the program, where there is one, tells their names."""
    source, where = parts.source(entry), parts.name_of(entry.path)
    found: list[Stream] = []
    try:
        found.extend(read_all(source))
    except DamagedCheckpoint as failure:
        # Those before the damage are kept.
        place = "" if failure.where is None else f"{failure.where}: "
        parts.fault(failure.code, f"{place}{failure.reason}", where)
    names = [one.name for one in program.stored] if program is not None else []
    if program is not None and parts.complete and len(names) != len(found):
        message = f"{len(found):,} tensors, and the program has {len(names):,} variables"
        parts.fault("program-mismatch", message, where)
        names = []
    for number, stream in enumerate(found):
        name = names[number] if number < len(names) else f"#{number}"
        if (fault := lod_fault(source, stream)) is not None:
            parts.findings.append(warning("lod-inconsistent", fault, name))
        parts.add((name,), role_of(name), source, stream)
    check_accumulators(parts)


def check_program(parts: Parts, program: Program) -> None:
    """Compare each tensor with what the program declares; an axis of -1 has any length."""
    for tensor in parts.tensors:
        told = program.variables.get(str(tensor.path[0]))
        if told is None or told.shape is None or len(tensor.path) > 1:
            continue
        fits = len(told.shape) == len(tensor.shape) and all(
            want in (-1, have) for want, have in zip(told.shape, tensor.shape, strict=True)
        )
        if not fits or told.dtype not in (None, tensor.dtype):
            have = f"{tensor.dtype.name} {list(tensor.shape)}"
            want = f"{told.dtype.name if told.dtype else '?'} {list(told.shape)}"
            parts.fault("program-mismatch", f"{have}, and the program declares {want}", tensor.name)


def _checkpoint(probe: Probe, kind: str | None, parts: Parts, producer: Producer) -> Checkpoint:
    tensors = tuple(parts.tensors)
    match = SERIAL.fullmatch(os.path.basename(os.path.abspath(probe.path)))
    metadata: dict[str, object] = {"serial": int(match[1])} if match and kind == "checkpoint" else {}
    if parts.trainers:
        metadata["trainers"] = parts.trainers
    return Checkpoint(
        path=probe.path,
        format=Fluid.name,
        variant=kind,
        tensors=tensors,
        files=tuple(parts.files),
        spans=lambda: in_order(parts.spans),
        metadata=lambda: metadata,
        training=lambda: _training(parts.trainers, tensors),
        producer=producer,
        findings=tuple(parts.findings),
        safety=tuple(parts.safety),
        complete=parts.complete,
        close=parts.opened.pop_all().close,
    )


def _training(trainers: Mapping[str, Mapping[str, object]], tensors: tuple[Tensor, ...]) -> TrainingState:
    """Return epoch and step of the first trainer, and the learning rate among the variables."""
    state, origin = TrainingState(), {}
    if trainers:
        first = min(trainers, key=int)
        epoch, step = (trainers[first].get(name) for name in ("epoch_id", "step_id"))
        if isinstance(epoch, int):
            state, origin["epoch"] = replace(state, epoch=epoch), f"file trainer_{first}/epoch_id"
        if isinstance(step, int):
            state, origin["step"] = replace(state, step=step), f"file trainer_{first}/step_id"
    rate = next((one for one in tensors if one.name == _RATE and one.size == 1), None)
    if rate is not None:
        state = replace(state, learning_rate=lazy_scalar(rate)())
        origin["learning_rate"] = f"tensor {_RATE}"
    return replace(state, origin=origin)
