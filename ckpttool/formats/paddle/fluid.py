"""Paddle Fluid's directories: one serial of a training run, or the variables of an inference model.

A serial is one checkpoint of a run, in one of three generations::

    checkpoint_<n>/<variable>, _SUCCESS                  the first: variables in the serial itself
    checkpoint_<n>/__model__/<variable>, _SUCCESS        the second: variables in a directory,
                   trainer_<id>/epoch_id, step_id, ...     and the progress of each trainer
                   __lookup_table__/<table>_<server>     the third: with the rows of each parameter server

The marker ``_SUCCESS`` is written after the variables. It is all that Paddle's own loader asks for; tables
are written later, and may be missing in a serial with a marker.

An inference model has a program in the file ``__model__``, and its variables next to it, in a file each or in
one combined file. A directory of variables alone is read as well.

Source: PaddlePaddle/Paddle ``python/paddle/fluid/io.py`` and ``contrib/trainer.py`` of 2018.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache
from itertools import islice
from typing import ClassVar

from ckpttool.containers.lodtensor import read_all
from ckpttool.core.checkpoint import Checkpoint, Producer, TrainingState
from ckpttool.core.errors import CheckpointError, DamagedCheckpoint
from ckpttool.core.report import note, warning
from ckpttool.core.tensor import Tensor
from ckpttool.core.text import counted
from ckpttool.formats.content.plain_data import lazy_scalar
from ckpttool.formats.interface import MANIFEST_SUFFIXES, Format, Probe, scan
from ckpttool.formats.paddle.fluid_serial import (
    SERIAL,
    add_tables,
    add_trainer,
    check_against_neighbour,
    check_trainers,
    siblings_have_marker,
)
from ckpttool.formats.paddle.operators import layers_of
from ckpttool.formats.paddle.parts import (
    COUNTERS,
    MARKER,
    MODEL,
    TABLES,
    TRAINER,
    Entries,
    PaddleParts,
    add_combined,
    add_variables,
    check_program,
    files_by_variable,
    is_stream_file,
    native_of,
    spans_in_order,
)
from ckpttool.formats.paddle.program import looks_like_program, read_program
from ckpttool.formats.readings import add_part_name
from ckpttool.formats.sidecar import ENTRY, MAX_DOCUMENT, apply_sidecar
from ckpttool.storage import fs

_COMBINED = "__params__"
_RATE = "learning_rate_0"


class Fluid(Format):
    """One directory of Paddle Fluid: a serial, an inference model, or variables alone."""

    name: ClassVar[str] = "fluid"

    def matches(self, probe: Probe) -> bool:
        return probe.is_directory and _variant_of(probe.path, probe.entries) is not None

    def open(self, probe: Probe) -> Checkpoint:
        variant = _variant_of(probe.path, probe.entries)
        with PaddleParts(probe.path, probe.other_entries) as parts:
            if variant == "checkpoint":
                _add_serial(parts, probe.entries)
            elif variant == "inference":
                _add_inference(parts, probe.entries)
            else:
                _add_variables_alone(parts, probe.entries)
            if variant is not None and not parts.files:
                raise DamagedCheckpoint(probe.path, "no files", expected="variables or a trainer's")
            return _checkpoint(probe, variant, parts)


def _variant_of(path: str, entries: Entries) -> str | None:
    """Return the variant of a directory: ``checkpoint``, ``inference``, ``variables``, or None for no Fluid.

    None is also the answer for the directories in a serial, which are a part of it.
    """
    name = os.path.basename(fs.abspath(path))
    if name == MODEL or name in TABLES:
        return None
    model = entries.get(MODEL)
    if model is not None and fs.isfile(model.path):
        try:
            with fs.open_source(model.path) as source:
                head = source.read(0, min(64, source.size))
        except CheckpointError:
            return None
        return "inference" if looks_like_program(head) else None
    if is_serial(entries, name):
        return "checkpoint"
    files = [entry for key, entry in entries.items() if key != MARKER and not key.startswith(".")]
    if not files or not all(fs.isfile(entry.path) for entry in files):
        return None
    # A stream begins with a version of 0 and has no other magic number. So a directory of variables needs one
    # file that parses as a stream, and no file that can't be one; links and files too short to tell are
    # neither (``is_stream_file`` returns None). Programs and parameters of later releases are other formats.
    has_stream = False
    for entry in files:
        is_program = entry.name.lower().endswith((".pdiparams", ".pdmodel"))
        is_stream = False if is_program else is_stream_file(entry)
        if is_stream is False:
            return None
        has_stream |= is_stream is True
    if not has_stream:
        return None
    return "checkpoint" if MARKER in entries or SERIAL.fullmatch(name) else "variables"


def is_serial(entries: Entries, name: str) -> bool:
    """Return whether a directory of this name has the directories of a serial."""
    # Lookup tables prove a serial unless serials are next to them: the loader of 2018 looked for tables in
    # the directory of serials. Trainers' directories alone are all that a trainer without a shared file
    # system writes; ``trainer_0`` is a common name, so they need counters, or a serial's name around them.
    inner = {key: entry for key, entry in entries.items() if entry.is_dir(follow_symlinks=False)}
    if MODEL in inner or (any(table in inner for table in TABLES) and not any(map(SERIAL.fullmatch, inner))):
        return True
    trainers = [entry.path for key, entry in inner.items() if TRAINER.fullmatch(key)]
    if SERIAL.fullmatch(name):
        return bool(trainers)
    return any(fs.isfile(os.path.join(path, counter)) for path in trainers for counter in COUNTERS)


def has_marker(entries: Entries) -> bool:
    """Return whether a serial has the marker of complete variables where Paddle's loader looks for it."""
    model = entries.get(MODEL)
    if model is not None and fs.isdir(model.path):
        return fs.isfile(os.path.join(model.path, MARKER))
    return MARKER in entries and fs.isfile(entries[MARKER].path)


# Inference models and variables alone ------------------------------------------------------------------


def _add_inference(parts: PaddleParts, entries: Entries) -> None:
    """Add a program and its variables."""
    program = parts.program = read_program(parts.open_source(entries[MODEL]), MODEL)
    found = (*program.safety, *program.paths_outside())
    parts.safety += (add_part_name(finding, MODEL) for finding in found)
    stored = [variable.name for variable in program.stored]
    combined = _combined_file(entries, frozenset(stored))
    if combined is None:
        # Strays are neither variables of the program nor streams; ``add_variables`` notes hidden files.
        known = {*stored, MODEL}
        strays = {
            name: entry
            for name, entry in files_by_variable(entries)
            if name not in known and not entry.name.startswith(".") and not is_stream_file(entry)
        }
        add_variables(parts, entries, lambda name: name == MODEL or name in strays)
        names = {tensor.path[0] for tensor in parts.tensors}
        if missing := [name for name in stored if name not in names]:
            message = f"no file for {counted(len(missing), 'variable')} of the program, like {missing[0]!r}"
            parts.fault("variable-missing", message)
    else:
        strays = {key: entry for key, entry in entries.items() if key not in (MODEL, combined.name)}
        if parts.is_inside(combined):
            add_combined(parts, combined)
    for name in strays:
        parts.findings.append(note("not-part", "not a variable of the program; not checked", name))
    check_program(parts, program)


def _add_variables_alone(parts: PaddleParts, entries: Entries) -> None:
    """Add variables of a directory without a program: a file each, or one combined file."""
    combined = _combined_file(entries)
    if combined is None:
        add_variables(parts, entries, lambda name: False)
    elif parts.is_inside(combined):
        add_combined(parts, combined)
        message = "no program names the tensors, so missing ones can't be noticed"
        parts.findings.append(warning("no-program", message, combined.name))


def _combined_file(entries: Entries, names: Collection[str] = ()) -> os.DirEntry[str] | None:
    """Return the combined file of a directory, or None if its variables are in files of their own.

    Args:
        entries: The directory's.
        names: Names of the program's variables, if there is a program.
    """
    # ``save_inference_model`` lets the user name the combined file, so the only file of variables counts as
    # one, too. If it has the name of a variable, or if no program says how many there should be, it may as
    # well be the one variable of the directory: then it must hold two streams at least.
    if _COMBINED in entries:
        return entries[_COMBINED]
    others = [entry for name, entry in entries.items() if name != MODEL and not name.startswith(".")]
    if names:
        others = [entry for entry in others if entry.name in names or is_stream_file(entry)]
    if len(others) != 1 or others[0].is_symlink() or not others[0].is_file():
        return None
    if names and others[0].name not in names:
        return others[0]
    try:
        with fs.open_source(others[0].path) as source:
            holds_several = len(list(islice(read_all(source), 2))) > 1
    except DamagedCheckpoint:
        return None
    return others[0] if holds_several else None


# Serials ----------------------------------------------------------------------------------------------


def _add_serial(parts: PaddleParts, entries: Entries) -> None:
    """Add the variables of a serial of any of the three generations, then its trainers and lookup tables."""
    # The first generation has its variables and the marker in the serial itself. Later ones have directories;
    # without ``__model__`` among them, the serial is that of a trainer that doesn't share a file system with
    # trainer 0, which alone writes the variables.
    name = os.path.basename(fs.abspath(parts.root))
    has_directories = is_serial(entries, name)
    model = entries.get(MODEL)
    if model is not None:
        if parts.is_inside(model):
            inner = scan(model.path)
            add_variables(parts, inner, lambda name: False)
            parts.add_marker(inner)
    elif not has_directories:
        manifests = _manifest_names(parts.root)
        add_variables(parts, entries, lambda name: name in manifests)
        parts.add_marker(entries)
    has_variables = model is not None or not has_directories
    is_marked = has_variables and has_marker(entries)
    if not has_variables:
        parts.fault("no-model", f"no {MODEL}: only the trainer that wrote it holds the variables")
    elif not is_marked:
        marker = "/".join([name, *([MODEL] if model is not None else []), MARKER])
        if siblings_have_marker(parts.root):
            parts.fault("no-marker", f"no {marker}: its save did not finish, so Paddle does not load it")
        else:
            message = f"no {marker}, here or in a neighbouring serial: judged by its content alone"
            parts.findings.append(note("no-marker-anywhere", message))
    if has_directories:
        _add_trainers_and_tables(parts, entries, is_marked=is_marked)
    if has_variables:
        check_against_neighbour(parts, entries, is_marked=is_marked)
        if not any(tensor.path[0] not in TABLES for tensor in parts.tensors) and parts.complete:
            parts.fault("no-variables", "no variables", MODEL if model is not None else None)


def _add_trainers_and_tables(parts: PaddleParts, entries: Entries, *, is_marked: bool) -> None:
    """Add the trainers and lookup tables of a serial, and notes on files that are no part of it."""
    manifests = _manifest_names(parts.root)
    for name, entry in entries.items():
        match = TRAINER.fullmatch(name)
        if name in (MODEL, MARKER) or name in manifests:
            continue
        if name == ENTRY and entry.is_file(follow_symlinks=False):
            source = parts.open_source(entry)
            if source.size <= MAX_DOCUMENT:
                parts.sidecar = source.read(0, source.size)
            else:
                message = f"{source.size:,} bytes; at most {MAX_DOCUMENT:,} are read"
                parts.findings.append(warning("content-entry", message, ENTRY))
        elif match and entry.is_dir(follow_symlinks=False):
            add_trainer(parts, str(int(match[1])), scan(entry.path), is_marked=is_marked)
        elif name in TABLES and entry.is_dir(follow_symlinks=False):
            add_tables(parts, parts.table_shards(name, entry))
        elif parts.is_inside(entry):
            parts.findings.append(note("not-part", "not part of a serial; not checked", name))
    check_trainers(parts)
    if all(name in entries for name in TABLES):
        parts.findings.append(note("tables-twice", "lookup tables under both spellings", TABLES[1]))


def _manifest_names(root: str) -> frozenset[str]:
    """Return the names of manifests of a serial, hidden files in it."""
    name = os.path.basename(fs.abspath(root))
    return frozenset(f".{name}{ending}" for ending in MANIFEST_SUFFIXES)


def _checkpoint(probe: Probe, variant: str | None, parts: PaddleParts) -> Checkpoint:
    tensors, program = tuple(parts.tensors), parts.program
    match = SERIAL.fullmatch(os.path.basename(fs.abspath(probe.path)))
    serial = int(match[1]) if match and variant == "checkpoint" else None

    @cache
    def metadata() -> dict[str, object]:
        known = {
            "serial": serial,
            "trainers": parts.trainers or None,
            "lookup_tables": parts.tables or None,
            "program": None if program is None else program.computation(),
        }
        return {key: value for key, value in known.items() if value is not None}

    checkpoint = parts.checkpoint(
        path=probe.path,
        format=Fluid.name,
        variant=variant,
        tensors=tensors,
        files=tuple(parts.files),
        spans=lambda: spans_in_order(parts.spans),
        metadata=metadata,
        training=lambda: _training_of(parts.trainers, tensors),
        layers=lambda: layers_of(tensors, {} if program is None else program.kinds()),
        native=lambda: native_of(parts),
        producer=Producer("paddle", None if program is None else program.release),
    )
    return checkpoint if parts.sidecar is None else apply_sidecar(checkpoint, parts.sidecar, ENTRY)


def _training_of(trainers: Mapping[str, Mapping[str, object]], tensors: tuple[Tensor, ...]) -> TrainingState:
    """Return epoch and step of the trainer with the lowest id, and the learning rate among the variables."""
    state, origin = TrainingState(), {}
    if trainers:
        first = min(trainers, key=int)
        epoch, step = (trainers[first].get(name) for name in ("epoch_id", "step_id"))
        if isinstance(epoch, int):
            state, origin["epoch"] = replace(state, epoch=epoch), f"file trainer_{first}/epoch_id"
        if isinstance(step, int):
            state, origin["step"] = replace(state, step=step), f"file trainer_{first}/step_id"
    rate = next((tensor for tensor in tensors if tensor.name == _RATE and tensor.size == 1), None)
    if rate is not None:
        state = replace(state, learning_rate=lazy_scalar(rate)())
        origin["learning_rate"] = f"tensor {_RATE}"
    return replace(state, origin=origin)
