"""Paddle's programs with their parameters, parameters alone, and files of one tensor.

``paddle.static.save_inference_model`` and ``paddle.jit.save`` write ``<x>.pdmodel`` (in Paddle 3
``<x>.json``) and ``<x>.pdiparams``; ``paddle.static.save`` writes pickles in place of the latter. The files
of one stem are one checkpoint, whichever of them is opened.

Source: PaddlePaddle/Paddle ``python/paddle/static/io.py``, ``python/paddle/framework/io.py``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import ClassVar

from ckpttool.containers.lodtensor import read_file, starts_like_stream
from ckpttool.containers.pickle.pickle_safety import read_pickles
from ckpttool.core.checkpoint import Checkpoint, Producer, TrainingState
from ckpttool.core.errors import CheckpointError, DamagedCheckpoint, error_of
from ckpttool.core.report import not_scanned, warning
from ckpttool.core.text import counted
from ckpttool.formats.interface import HEAD_BYTES, Format, Probe, SetFormat, Unit, scan
from ckpttool.formats.opening import open_with
from ckpttool.formats.paddle.operators import layers_of
from ckpttool.formats.paddle.parts import (
    PaddleParts,
    add_combined,
    check_program,
    role_of,
    spans_in_order,
)
from ckpttool.formats.paddle.pir import looks_like_pir, read_pir
from ckpttool.formats.paddle.program import looks_like_program, read_program
from ckpttool.formats.pickles import PaddlePickle, PlainPickle
from ckpttool.formats.readings import add_part_name
from ckpttool.storage import fs

PROGRAM, PIR_PROGRAM, PARAMETERS = ".pdmodel", ".json", ".pdiparams"
INFORMATION = ".pdiparams.info"
PICKLES = (".pdparams", ".pdopt")
"""Suffixes of the pickles that ``paddle.static.save`` writes instead of a parameters file."""


class PaddleFiles(SetFormat):
    """A program with its parameters, a file of parameters alone, or a file of one tensor."""

    name: ClassVar[str] = "paddle"
    suffixes = (PROGRAM, PARAMETERS)

    def matches(self, probe: Probe) -> bool:
        if probe.is_directory:
            return False
        return _begins_program(probe.head) or (
            probe.head.startswith(b"\0\0\0\0") and starts_like_stream(probe.source)
        )

    def open(self, probe: Probe) -> Checkpoint:
        directory, name = os.path.split(probe.path)
        is_program = _begins_program(probe.head)
        probe.close()  # the parts open this file again, as they open the others of its stem
        files = scan(directory or os.curdir)
        stem, program, parameters = _files_of_stem(files, name, is_program=is_program)
        json = files.get(stem + PIR_PROGRAM) if stem != name else None
        with PaddleParts(directory or os.curdir) as parts:
            if program is not None:
                _add_program(parts, program)
            if parameters is not None:
                _add_parameters(parts, parameters)
            elif pickled := [files[stem + end] for end in PICKLES if stem + end in files]:
                _add_pickles(parts, pickled)
            elif parts.program is not None and (stored := parts.program.stored):
                parts.fault("parameters-missing", f"the program has {len(stored):,} variables", name)
            if json is not None and json is not program:
                message = "Paddle 3 loads it as the program; it was not checked"
                parts.safety.append(not_scanned(json.name, message))
            if parts.program is not None:
                check_program(parts, parts.program)
                information = files.get(stem + INFORMATION)
                if information is not None and parts.is_inside(information):
                    _judge_information(parts, information)
            return _checkpoint_of(probe, parts)

    def units(self, directory: str, entries: Mapping[str, os.DirEntry[str]]) -> Iterable[Unit]:
        for name, entry in entries.items():
            stem = _stem(name)
            ends = (PARAMETERS, INFORMATION) if stem + PARAMETERS in entries else PICKLES
            members = [name, *(stem + end for end in ends if stem + end in entries)]
            if stem == name or (name.endswith(PIR_PROGRAM) and len(members) == 1) or not _is_program(entry):
                continue
            yield Unit(os.path.join(directory, name), tuple(members), self)


def _begins_program(head: bytes) -> bool:
    return looks_like_program(head) or looks_like_pir(head)


def _is_program(entry: os.DirEntry[str]) -> bool:
    if not fs.isfile(entry.path):
        return False
    try:
        with fs.open_source(entry.path) as source:
            return _begins_program(source.read(0, min(HEAD_BYTES, source.size)))
    except CheckpointError:
        return False


def _stem(name: str) -> str:
    return name.removesuffix(PROGRAM) if name.endswith(PROGRAM) else name.removesuffix(PIR_PROGRAM)


def _files_of_stem(
    files: Mapping[str, os.DirEntry[str]], name: str, *, is_program: bool
) -> tuple[str, os.DirEntry[str] | None, os.DirEntry[str] | None]:
    """Return the stem of the file ``name``, and the entries of its program and its parameters, if any."""
    # The stem joins the files of one save, whichever was opened. A file without one of the suffixes has no
    # partner: its name says nothing of another file.
    stem = _stem(name) if is_program else name.removesuffix(PARAMETERS)
    if stem == name:
        return (stem, files.get(name), None) if is_program else (stem, None, files.get(name))
    if is_program:
        return stem, files.get(name), files.get(stem + PARAMETERS)
    # A program of Paddle 3 is named ``<x>.json``, as any other JSON may be, so its content decides.
    json = files.get(stem + PIR_PROGRAM)
    program = files.get(stem + PROGRAM) or (json if json and _is_program(json) else None)
    return stem, program, files.get(name)


def _add_program(parts: PaddleParts, entry: os.DirEntry[str]) -> None:
    """Add a program, or an error if it can't be read; the parameters then have no names."""
    if not parts.is_inside(entry):
        return
    source = parts.open_source(entry)
    try:
        is_pir = looks_like_pir(source.read(0, min(HEAD_BYTES, source.size)))
        parts.program = read_pir(source) if is_pir else read_program(source)
    except DamagedCheckpoint as failure:
        parts.fault(failure.code, failure.placed_reason, entry.name)
        parts.safety.append(not_scanned(entry.name, "the effects of running it are unknown"))
        return
    parts.safety += (add_part_name(finding, entry.name) for finding in parts.program.safety)


def _add_parameters(parts: PaddleParts, entry: os.DirEntry[str]) -> None:
    """Add the tensors of a file of parameters."""
    if not parts.is_inside(entry):
        return
    # The operator ``save`` writes one variable a file, which may be a SelectedRows; ``save_combine`` writes
    # LoDTensors only. Both begin with a version of 0, so a file without a program is tried as one variable.
    if parts.program is None:
        with fs.open_source(entry.path) as source:
            try:
                rows = read_file(source).rows
            except DamagedCheckpoint:
                rows = None
        if rows is not None and (stream := parts.read_variable(entry)) is not None:
            parts.add_rows(("rows",), *stream)
            parts.add(("values",), role_of("values"), *stream)
            return
    add_combined(parts, entry)
    if parts.program is None and (len(parts.tensors) != 1 or entry.name.endswith(PARAMETERS)):
        message = "no program names the tensors, so missing ones can't be noticed"
        parts.findings.append(warning("no-program", message, entry.name))


def _add_pickles(parts: PaddleParts, entries: Iterable[os.DirEntry[str]]) -> None:
    """Add the tensors of the state dicts of a program, and require all of its variables in them."""
    for entry in entries:
        if not parts.is_inside(entry):
            continue
        try:
            pickled = parts.opened.enter_context(open_pickle(entry.path))
        except DamagedCheckpoint as failure:
            parts.add_failure(failure, entry.name)
            parts.safety += (*failure.safety, not_scanned(entry.name))
            continue
        parts.tensors += pickled.tensors
        parts.files += pickled.files
        parts.spans += (span._replace(where=f"{entry.name}: {span.where}") for span in pickled.spans())
        parts.findings += (add_part_name(finding, entry.name) for finding in pickled.findings)
        parts.safety += (add_part_name(finding, entry.name) for finding in pickled.safety)
    names = {tensor.name for tensor in parts.tensors}
    stored = [variable.name for variable in parts.program.stored] if parts.program is not None else []
    missing = [name for name in stored if name not in names]
    if missing and parts.complete:
        message = f"{counted(len(missing), 'missing variable')} of the program, like {missing[0]!r}"
        parts.fault("variable-missing", message)


def _judge_information(parts: PaddleParts, entry: os.DirEntry[str]) -> None:
    """Add the safety findings of ``.pdiparams.info``, a pickle that ``paddle.jit.save`` writes."""
    source = parts.open_source(entry)
    try:
        parts.safety += read_pickles(source, 0, source.size, entry.name).safety
    except DamagedCheckpoint as failure:
        parts.safety += failure.safety
        parts.findings.append(error_of(failure, entry.name))
        parts.safety.append(not_scanned(entry.name))


def _checkpoint_of(probe: Probe, parts: PaddleParts) -> Checkpoint:
    program = parts.program
    is_single = program is None and len(parts.tensors) == 1
    tensors = tuple(
        replace(tensor, path=("tensor",)) if is_single and tensor.path == ("#0",) else tensor
        for tensor in parts.tensors
    )
    if any(file.path.endswith(PICKLES) for file in parts.files):
        variant = "training"
    else:
        variant = "tensors" if program is None else "inference"

    def training() -> TrainingState:
        from ckpttool.core.training import training_state

        # A file of one tensor is named like its variable, and a variable's name must not be searched for
        # metrics: the 0 of ``w_0_beta1_pow_acc_0`` is no accuracy.
        return training_state({}, {}, "" if is_single else probe.name)

    return parts.checkpoint(
        path=probe.path,
        format=PaddleFiles.name,
        variant=variant,
        tensors=tensors,
        files=tuple(parts.files),
        spans=lambda: spans_in_order(parts.spans),
        metadata=cache(lambda: {} if program is None else {"program": program.computation()}),
        training=training,
        layers=lambda: layers_of(tensors, {} if program is None else program.kinds()),
        producer=Producer("paddle", program.release if program is not None else None),
    )


def open_pickle(path: str) -> Checkpoint:
    """Open a file as a pickle of ``paddle.save``.

    Raises:
        DamagedCheckpoint: It is no pickle.
    """

    def format_of(probe: Probe) -> Format:
        if not PlainPickle().matches(probe):
            raise DamagedCheckpoint(probe.path, "no pickle", expected="one of paddle.save")
        return PaddlePickle()

    return open_with(path, format_of)
