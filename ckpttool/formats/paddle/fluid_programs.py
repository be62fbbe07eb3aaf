"""Inference models (a program and its variables), and variables without a program.

Variables are in a file each, or all in one: a combined file is a sequence of LoDTensors without names, sorted
by the names that the program has.

Source: PaddlePaddle/Paddle ``python/paddle/fluid/io.py``, ``save_vars`` and ``save_inference_model``.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from itertools import islice

from ckpttool.containers.lodtensor import Stream, lod_fault, read_all
from ckpttool.core.checkpoint import Producer
from ckpttool.core.errors import DamagedCheckpoint
from ckpttool.core.report import note, warning
from ckpttool.core.text import counted
from ckpttool.formats.paddle.fluid_parts import (
    MODEL,
    Entries,
    FluidParts,
    add_variables,
    check_accumulators,
    files_by_variable,
    is_stream_file,
    role_of,
)
from ckpttool.formats.paddle.program import Program, read_program
from ckpttool.formats.readings import add_part_name
from ckpttool.storage import fs

COMBINED = "__params__"


def add_inference(parts: FluidParts, entries: Entries) -> Producer:
    """Add a program and its variables, and return the release of Paddle that it records."""
    source = parts.source(entries[MODEL])
    program = read_program(source, MODEL)
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
        if lacking := [name for name in stored if name not in names]:
            message = f"no file of {counted(len(lacking), 'variable')} of the program, like {lacking[0]!r}"
            parts.fault("variable-missing", message)
    else:
        strays = {key: entry for key, entry in entries.items() if key not in (MODEL, combined.name)}
        if parts.is_inside(combined):
            add_combined(parts, combined, program)
    for name in strays:
        parts.findings.append(note("not-part", "no variable of the program; it was not looked at", name))
    check_program(parts, program)
    parts.kinds, parts.program = program.kinds, program.computation
    return Producer("paddle", program.release)


def add_loose(parts: FluidParts, entries: Entries) -> None:
    """Add variables of a directory without a program: a file each, or one combined file."""
    combined = _combined_file(entries)
    if combined is None:
        add_variables(parts, entries, lambda name: False)
    elif parts.is_inside(combined):
        add_combined(parts, combined, None)
        message = "no program that names the tensors: whether all of them are here is not known"
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
    if COMBINED in entries:
        return entries[COMBINED]
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


def add_combined(parts: FluidParts, entry: os.DirEntry[str], program: Program | None) -> None:
    """Add the tensors of a combined file, with names from the program, or ``#0``, ``#1`` … without one."""
    source, where = parts.source(entry), parts.name_of(entry.path)
    streams: list[Stream] = []
    try:
        streams.extend(read_all(source))
    except DamagedCheckpoint as failure:
        # Tensors before the damage are kept.
        place = "" if failure.where is None else f"{failure.where}: "
        parts.fault(failure.code, f"{place}{failure.reason}", where)
    names = [variable.name for variable in program.stored] if program is not None else []
    if program is not None and parts.complete and len(names) != len(streams):
        message = f"{len(streams):,} tensors, and the program has {len(names):,} variables"
        parts.fault("program-mismatch", message, where)
        names = []
    for number, stream in enumerate(streams):
        name = names[number] if number < len(names) else f"#{number}"
        if (fault := lod_fault(source, stream)) is not None:
            parts.findings.append(warning("lod-inconsistent", fault, name))
        parts.add((name,), role_of(name), source, stream)
    check_accumulators(parts)


def check_program(parts: FluidParts, program: Program) -> None:
    """Add an error for each tensor that differs from the program's declaration; its -1 is any length."""
    for tensor in parts.tensors:
        declared = program.variables.get(str(tensor.path[0]))
        if declared is None or declared.shape is None or len(tensor.path) > 1:
            continue
        fits = len(declared.shape) == len(tensor.shape) and all(
            want in (-1, have) for want, have in zip(declared.shape, tensor.shape, strict=True)
        )
        if not fits or declared.dtype not in (None, tensor.dtype):
            have = f"{tensor.dtype.name} {list(tensor.shape)}"
            want = f"{declared.dtype.name if declared.dtype else '?'} {list(declared.shape)}"
            parts.fault("program-mismatch", f"{have}, and the program declares {want}", tensor.name)
