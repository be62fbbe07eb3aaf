"""Which checkpoint a path means: a file of a set, an index, a prefix, a link, or a part of a directory."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from itertools import islice

from ckpttool.errors import AccessDenied, CheckpointError, NotACheckpoint
from ckpttool.formats import formats
from ckpttool.formats.discovery import Walk, discover, unit_at
from ckpttool.formats.interface import SetFormat, Unit, scan
from ckpttool.formats.step_directory import StepDirectory
from ckpttool.formats.tensorflow import state as tf_state
from ckpttool.formats.tensorflow.prefix import INDEX
from ckpttool.report import counted
from ckpttool.series.paths import bare, shown

_MOST_LEVELS = 4
"""How deep a part of a checkpoint may lie in its directory: ``checkpoint-4/global_step4/…``."""

_ENOUGH = 100
"""Checkpoints in a directory that are counted."""

_WITH_DIRECTORIES = frozenset({"savedmodel", "fluid"})
"""Formats whose own parts lie in directories, and look like checkpoints there."""


@dataclass(frozen=True, slots=True)
class CheckpointPlace:
    """Where a checkpoint is: the directory that it lies in, its name there, and all its names."""

    directory: str
    name: str
    names: frozenset[str] = frozenset()

    @property
    def path(self) -> str:
        """Return its path as people write it."""
        return shown(os.path.join(self.directory, self.name))


def resolve_checkpoint(path: str) -> CheckpointPlace:
    """Return the checkpoint that a path means; a link means what it leads to.

    A file that belongs to a checkpoint of several means all of it.
    """
    unit = _unit_at_path(_follow_link(bare(path)))
    directory = os.path.dirname(unit.path) or os.curdir
    return CheckpointPlace(directory, os.path.basename(unit.path), frozenset(unit.members))


def place_of(path: str) -> CheckpointPlace:
    """Return where a path is, whatever is there."""
    directory, name = os.path.split(path)
    return CheckpointPlace(directory or os.curdir, name, frozenset({name}))


def _follow_link(path: str) -> str:
    """Return where a path leads, where its last part is a link."""
    if os.path.islink(path):
        return _real(path)
    if not os.path.lexists(path) and os.path.islink(path + INDEX):
        return _real(path + INDEX)
    return path if os.path.basename(path) not in (os.curdir, os.pardir) else os.path.realpath(path)


def _real(path: str) -> str:
    real = os.path.realpath(path)
    return real if os.path.isabs(path) else os.path.relpath(real)


def _unit_at_path(path: str) -> Unit:
    unit = _set_containing(path) or unit_at(path)
    if unit is not None:
        return _enclosing_checkpoint(unit)
    whole = _enclosing_checkpoint(Unit(path, (os.path.basename(path),), None))
    if whole.path == path or not os.path.lexists(path):
        raise _no_checkpoint_error(path)
    return whole


def _no_checkpoint_error(path: str) -> CheckpointError:
    count = sum(1 for _ in islice(discover(path, Walk(recursive=False)), _ENOUGH))
    if count:
        told = f"{count} or more checkpoints" if count == _ENOUGH else counted(count, "checkpoint")
        return NotACheckpoint(path, f"holds {told}, and is none itself", expected="name one of them")
    if os.path.basename(path) == tf_state.NAME and os.path.isfile(path):
        return NotACheckpoint(path, "only names checkpoints", expected="name one of them")
    return NotACheckpoint(path, "no checkpoint, and no part of one")


def _set_containing(path: str) -> Unit | None:
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
    at = os.path.abspath(unit.path)
    for level in range(_MOST_LEVELS):
        at = os.path.dirname(at)
        try:
            around = unit_at(at) if os.path.dirname(at) != at else None
        except AccessDenied:
            if level == 0:
                raise
            break  # what nobody may list is no checkpoint of his
        if around is None or around.format is None:
            continue
        is_beside = level == 0 and not os.path.isdir(unit.path)
        is_whole = isinstance(around.format, StepDirectory) or around.format.name in _WITH_DIRECTORIES
        if unit.format is None and not (is_beside or is_whole):
            continue  # a directory in a run's own is none of its parts
        if is_beside or around.format.takes_in or is_whole:
            path = at if os.path.isabs(unit.path) else os.path.relpath(at)
            unit = replace(around, path=path)
    return unit
