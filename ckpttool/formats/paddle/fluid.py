"""Paddle Fluid's directories: one serial of a training run, or the variables of an inference model.

A serial is one directory ``checkpoint_<n>``, in one of three generations: variables directly in it; in
``__model__``, with ``trainer_<k>`` beside; and with ``__lookup_table__`` as well. It is whole once its
``_SUCCESS`` is there, which Paddle's own loader asks for, and nothing else.

Source: PaddlePaddle/Paddle ``python/paddle/fluid/io.py`` and ``contrib/trainer.py`` of 2018.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import ClassVar

from ckpttool.checkpoint import Checkpoint, Producer, TrainingState
from ckpttool.errors import CheckpointError, DamagedCheckpoint
from ckpttool.formats.content.scalars import lazy_scalar
from ckpttool.formats.content.sidecar import ENTRY, MAX_DOCUMENT, apply_sidecar
from ckpttool.formats.interface import SIDECARS, Format, Probe, scan
from ckpttool.formats.paddle.fluid_parts import (
    COUNTERS,
    MARKER,
    MODEL,
    TABLES,
    TRAINER,
    Entries,
    FluidParts,
    add_variables,
    is_stream_file,
    native_of,
    spans_in_order,
)
from ckpttool.formats.paddle.fluid_programs import add_inference, add_loose
from ckpttool.formats.paddle.fluid_serial import (
    SERIAL,
    add_tables,
    add_trainer,
    check_neighbour,
    check_trainers,
    siblings_have_marker,
)
from ckpttool.formats.paddle.operators import layers_of
from ckpttool.formats.paddle.program import looks_like_program
from ckpttool.report import note, warning
from ckpttool.tensor import Tensor
from ckpttool.wire.source import Source

_RATE = "learning_rate_0"


class Fluid(Format):
    """A directory that Paddle Fluid wrote."""

    name: ClassVar[str] = "fluid"

    def matches(self, probe: Probe) -> bool:
        return probe.is_directory and kind_of(probe.path, probe.entries) is not None

    def open(self, probe: Probe) -> Checkpoint:
        kind = kind_of(probe.path, probe.entries)
        parts = FluidParts(probe.path, probe.also)
        with parts.opened:
            producer = Producer("paddle")
            if kind == "checkpoint":
                _add_serial(parts, probe.entries)
            elif kind == "inference":
                producer = add_inference(parts, probe.entries)
            else:
                add_loose(parts, probe.entries)
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
    """Return whether a directory of this name has the directories of a serial.

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
    """Return whether files are variables: one of them surely, and none of them surely not."""
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
    """Return whether a serial's variables were all written, as Paddle's loader asks it."""
    model = entries.get(MODEL)
    if model is not None and os.path.isdir(model.path):
        return os.path.isfile(os.path.join(model.path, MARKER))
    return MARKER in entries and os.path.isfile(entries[MARKER].path)


def _add_serial(parts: FluidParts, entries: Entries) -> None:
    """Read all of one serial."""
    named = is_serial(entries, os.path.basename(os.path.abspath(parts.root)))
    model = entries.get(MODEL)
    if model is not None:
        add_directory_of_variables(parts, model)
    elif not named:
        own = _manifest_names(parts.root)
        add_variables(parts, entries, lambda name: name in own)
        parts.add_marker(entries)
    has_variables = model is not None or not named
    _check_marker(parts, entries, has_variables=has_variables)
    is_marked = has_variables and has_marker(entries)
    if named:
        _add_trainers_and_tables(parts, entries, is_marked=is_marked)
    if has_variables:
        check_neighbour(parts, entries, is_marked=is_marked)
        if not any(tensor.path[0] not in TABLES for tensor in parts.tensors) and parts.complete:
            parts.fault("no-variables", "no variable in it", MODEL if model is not None else None)


def _add_trainers_and_tables(parts: FluidParts, entries: Entries, *, is_marked: bool) -> None:
    """Read the trainers and lookup tables of a serial, and tell what is neither."""
    own = _manifest_names(parts.root)
    for name, entry in entries.items():
        match = TRAINER.fullmatch(name)
        if name in (MODEL, MARKER) or name in own:
            continue
        if name == ENTRY and entry.is_file(follow_symlinks=False):
            _add_entry(parts, entry)
            continue
        if match and entry.is_dir(follow_symlinks=False):
            add_trainer(parts, str(int(match[1])), scan(entry.path), is_marked=is_marked)
        elif name in TABLES and entry.is_dir(follow_symlinks=False):
            add_tables(parts, parts.shards(name, entry))
        elif parts.is_inside(entry):
            parts.findings.append(note("not-part", "no part of a serial; it was not looked at", name))
    check_trainers(parts)
    if all(name in entries for name in TABLES):
        parts.findings.append(note("tables-twice", "lookup tables under both spellings", TABLES[1]))


def _add_entry(parts: FluidParts, entry: os.DirEntry[str]) -> None:
    """Read what the files of a serial have no place for."""
    source = parts.source(entry)
    if source.size > MAX_DOCUMENT:
        message = f"{source.size:,} bytes, and at most {MAX_DOCUMENT:,} are read"
        parts.findings.append(warning("content-entry", message, ENTRY))
    else:
        parts.entry = source.read(0, source.size)


def _manifest_names(root: str) -> frozenset[str]:
    """Return the names that the manifests of a serial have, which lie hidden inside it."""
    name = os.path.basename(os.path.abspath(root))
    return frozenset(f".{name}{ending}" for ending in SIDECARS)


def add_directory_of_variables(parts: FluidParts, model: os.DirEntry[str]) -> None:
    """Read ``__model__``."""
    if not parts.is_inside(model):
        return
    inner = scan(model.path)
    add_variables(parts, inner, lambda name: False)
    parts.add_marker(inner)


def _check_marker(parts: FluidParts, entries: Entries, *, has_variables: bool) -> None:
    if not has_variables:
        message = f"no {MODEL}: only the trainer that wrote it holds the variables"
        parts.fault("no-model", message)
    elif not has_marker(entries):
        marker = f"{MODEL}/{MARKER}" if MODEL in entries else MARKER
        if siblings_have_marker(parts.root):
            parts.fault("no-marker", f"no {marker}: its save did not finish, and Paddle does not load it")
        else:
            message = f"no {marker}, nor in any serial beside it: judged by its content alone"
            parts.findings.append(note("no-marker-anywhere", message))


def _checkpoint(probe: Probe, kind: str | None, parts: FluidParts, producer: Producer) -> Checkpoint:
    tensors = tuple(parts.tensors)
    match = SERIAL.fullmatch(os.path.basename(os.path.abspath(probe.path)))
    serial = int(match[1]) if match and kind == "checkpoint" else None
    checkpoint = Checkpoint(
        path=probe.path,
        format=Fluid.name,
        variant=kind,
        tensors=tensors,
        files=tuple(parts.files),
        spans=lambda: spans_in_order(parts.spans),
        metadata=cache(lambda: _metadata(parts, serial)),
        training=lambda: _training(parts.trainers, tensors),
        layers=lambda: layers_of(tensors, parts.kinds()),
        native=lambda: native_of(parts),
        producer=producer,
        findings=tuple(parts.findings),
        safety=tuple(parts.safety),
        complete=parts.complete,
        close=parts.opened.pop_all().close,
    )
    return checkpoint if parts.entry is None else apply_sidecar(checkpoint, parts.entry, ENTRY)


def _metadata(parts: FluidParts, serial: int | None) -> dict[str, object]:
    told = {
        "serial": serial,
        "trainers": parts.trainers or None,
        "lookup_tables": parts.tables or None,
        "program": parts.program(),
    }
    return {key: value for key, value in told.items() if value is not None}


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
