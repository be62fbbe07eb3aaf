"""Which checkpoint a path means: a file of a set, an index, a prefix, a link, or a part of a directory."""

from __future__ import annotations

import os
from itertools import islice
from typing import NamedTuple

from ckpttool.core.errors import AccessDenied, CheckpointError, NotACheckpoint
from ckpttool.core.text import counted
from ckpttool.formats import formats
from ckpttool.formats.discovery import Walk, discover, unit_at
from ckpttool.formats.interface import SetFormat, Unit, scan
from ckpttool.formats.step_directory import StepDirectory
from ckpttool.formats.tensorflow import state as tf_state
from ckpttool.formats.tensorflow.prefix import INDEX
from ckpttool.formats.traits import traits_of
from ckpttool.storage import fs
from ckpttool.transaction.paths import bare, shown

_MOST_LEVELS = 4
"""How deep a part of a checkpoint may lie in its directory: ``checkpoint-4/global_step4/…``."""

_ENOUGH = 100
"""Checkpoints in a directory that are counted."""


class CheckpointPlace(NamedTuple):
    """Where a checkpoint is: the directory that it lies in, its name there, and all its names."""

    directory: str
    name: str
    names: frozenset[str] = frozenset()

    @property
    def path(self) -> str:
        """Return its path as people write it."""
        return shown(os.path.join(self.directory, self.name))


def place_of(path: str) -> CheckpointPlace:
    """Return where a path is, whatever is there."""
    directory, name = os.path.split(path)
    return CheckpointPlace(directory or os.curdir, name, frozenset({name}))


def resolve_checkpoint(path: str) -> CheckpointPlace:
    """Return the checkpoint that a path means; a link means what it leads to.

    A file that belongs to a checkpoint of several means all of it.
    """
    path = bare(path)
    if fs.islink(path):
        path = _real(path)
    elif not fs.lexists(path) and fs.islink(path + INDEX):
        path = _real(path + INDEX)
    elif os.path.basename(path) in (os.curdir, os.pardir):
        path = fs.realpath(path)
    unit = _set_with(path) or unit_at(path)
    if unit is not None:
        unit = _enclosing_checkpoint(unit)
    else:
        unit = _enclosing_checkpoint(Unit(path, (os.path.basename(path),), None))
        if unit.path == path or not fs.lexists(path):
            raise _no_checkpoint_error(path)
    directory = os.path.dirname(unit.path) or os.curdir
    return CheckpointPlace(directory, os.path.basename(unit.path), frozenset(unit.members))


def _real(path: str) -> str:
    real = fs.realpath(path)
    return real if os.path.isabs(path) else os.path.relpath(real)


def _set_with(path: str) -> Unit | None:
    """Return the set of files in a directory that one of them belongs to."""
    directory, name = os.path.split(path)
    try:
        entries = scan(directory or os.curdir)
    except CheckpointError:
        return None
    if name not in entries:
        return None
    for format in formats():
        if isinstance(format, SetFormat):
            for unit in format.units(directory or os.curdir, entries):
                if name in unit.members:
                    return unit
    return None


def _enclosing_checkpoint(unit: Unit) -> Unit:
    """Return the checkpoint that another is a part of, as a Trainer's directory is around its weights."""
    directory = fs.abspath(unit.path)
    for level in range(_MOST_LEVELS):
        directory = fs.dirname(directory)
        try:
            enclosing = unit_at(directory) if fs.dirname(directory) != directory else None
        except AccessDenied:
            if level == 0:
                raise
            break  # what nobody may list is no checkpoint of his
        if enclosing is None or enclosing.format is None:
            continue
        is_beside = level == 0 and not fs.isdir(unit.path)
        is_whole = (
            isinstance(enclosing.format, StepDirectory) or traits_of(enclosing.format.name).has_directories
        )
        if unit.format is None and not (is_beside or is_whole):
            continue  # a directory in a run's own is none of its parts
        if is_beside or enclosing.format.takes_in or is_whole:
            path = directory if fs.isabs(unit.path) else os.path.relpath(directory)
            unit = enclosing._replace(path=path)
    return unit


def _no_checkpoint_error(path: str) -> CheckpointError:
    count = sum(1 for _ in islice(discover(path, Walk(recursive=False)), _ENOUGH))
    if count:
        checkpoints = f"{count} or more checkpoints" if count == _ENOUGH else counted(count, "checkpoint")
        return NotACheckpoint(path, f"holds {checkpoints}, and is none itself", expected="name one of them")
    if os.path.basename(path) == tf_state.NAME and fs.isfile(path):
        return NotACheckpoint(path, "only names checkpoints", expected="name one of them")
    return NotACheckpoint(path, "no checkpoint, and no part of one")
