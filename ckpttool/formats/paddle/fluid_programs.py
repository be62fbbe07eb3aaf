"""Paddle's variables in one file, or as a program names them.

Source: PaddlePaddle/Paddle ``python/paddle/fluid/io.py``, ``save_vars`` and ``save_inference_model``.
"""

from __future__ import annotations

import os
from itertools import islice

from ckpttool.checkpoint import Producer
from ckpttool.errors import DamagedCheckpoint
from ckpttool.formats.paddle.fluid_parts import (
    MODEL,
    Entries,
    Parts,
    add_variables,
    check_accumulators,
    role_of,
)
from ckpttool.formats.paddle.program import Program, read_program
from ckpttool.formats.parts import placed
from ckpttool.report import warning
from ckpttool.wire.lodtensor import Stream, lod_fault, read_all
from ckpttool.wire.source import Source

COMBINED = "__params__"


def add_inference(parts: Parts, entries: Entries) -> Producer:
    """Read a program and the variables that it names."""
    source = parts.source(entries[MODEL])
    program = read_program(source, MODEL)
    parts.safety += (placed(finding, MODEL) for finding in program.safety)
    combined = _combined(entries, is_one=len(program.stored) < 2)
    if combined is not None and parts.is_inside(combined):
        add_combined(parts, combined, program)
    elif combined is None:
        add_variables(parts, entries, lambda name: name == MODEL)
        found = {tensor.path[0] for tensor in parts.tensors}
        lacking = [one.name for one in program.stored if one.name not in found]
        if lacking:
            message = f"{len(lacking):,} variables of the program have no file, like {lacking[0]!r}"
            parts.fault("variable-missing", message)
    check_program(parts, program)
    parts.kinds, parts.program = program.kinds, program.told
    return Producer("paddle", program.release)


def add_loose(parts: Parts, entries: Entries) -> None:
    """Read variables that no program names: each from its own file, or all of them from one."""
    combined = _combined(entries, is_one=True)
    if combined is None:
        add_variables(parts, entries, lambda name: False)
    elif parts.is_inside(combined):
        add_combined(parts, combined, None)
        message = "no program that names the tensors: whether all of them are here is not known"
        parts.findings.append(warning("no-program", message, combined.name))


def _combined(entries: Entries, *, is_one: bool) -> os.DirEntry[str] | None:
    """Return the file that holds all variables: the usual name, or the only file beside a program.

    ``is_one``: whether the only file may as well be a variable's own; then it has to hold several.
    """
    if COMBINED in entries:
        return entries[COMBINED]
    others = [entry for name, entry in entries.items() if name != MODEL and not name.startswith(".")]
    if len(others) != 1 or others[0].is_symlink() or not others[0].is_file():
        return None
    return others[0] if not is_one or _holds_several(others[0]) else None


def _holds_several(entry: os.DirEntry[str]) -> bool:
    try:
        with Source(entry.path) as source:
            return len(list(islice(read_all(source), 2))) > 1
    except DamagedCheckpoint:
        return False


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
