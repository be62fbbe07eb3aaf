"""Where what belongs to a directory's prune lies: in it, or beside it where its owner allows no other entry.

Paddle's loader splits the name of every entry of a Fluid root on ``_`` and dies of what is no
``checkpoint_<n>``. Accelerate, where it names checkpoints itself, sorts every entry of ``checkpoints/`` by
the number in its name, dies of what has none, and may delete what has a small one. So the stage, the lock,
the trash and the pins of such a directory lie in the directory around it, and carry its name.

Sources: PaddlePaddle/Paddle ``python/paddle/fluid/io.py`` of 2018, ``_get_dir_serial``;
huggingface/accelerate ``accelerator.py``, ``save_state`` and ``load_state``, and ``checkpointing.py``,
``save_accelerator_state``.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from ckpttool.errors import CheckpointError
from ckpttool.formats.interface import Probe
from ckpttool.formats.paddle.fluid import Fluid
from ckpttool.formats.paddle.fluid_parts import MODEL, TABLES
from ckpttool.formats.paddle.fluid_serial import SERIAL
from ckpttool.transaction.mounts import mount_points

ACCELERATES = "checkpoints"
"""Where Accelerate saves to, below its project's directory, where it names checkpoints itself."""
_RANDOM_STATES = re.compile(r"random_states_[0-9]+\.pkl")
"""What each process writes into each of them."""
OWNER = "@"
"""Stands in a name between what is ours and the name of the directory that it is for."""


class StateDir(NamedTuple):
    """A directory for what is ours, and what the names of it there end with."""

    path: str
    suffix: str = ""


def state_dir_of(directory: str) -> StateDir:
    """Return where the stage, the lock and the trash of a directory go."""
    if _is_scanned_by_accelerate(directory):
        real = os.path.realpath(directory)
        is_mount_point = os.path.ismount(real) or real in (mount_points(below=real) or ())
        # Nothing could be renamed from a mount point to the directory around it.
        return StateDir(directory) if is_mount_point else state_dir_beside(directory)
    if _has_serials(directory):
        names = sorted(name for name in os.listdir(directory) if SERIAL.fullmatch(name))
        if any(_is_serial(os.path.join(directory, name)) for name in names):
            return state_dir_beside(directory)
    return StateDir(directory)


def state_dir_beside(directory: str) -> StateDir:
    """Return the place in the directory around another."""
    real = os.path.realpath(directory)
    return StateDir(os.path.dirname(real), OWNER + os.path.basename(real))


def may_keep_state_beside(directory: str) -> bool:
    """Tell from names alone whether what is ours may lie beside a directory."""
    return _is_named_as_accelerates(directory) or _has_serials(directory)


def owner_of_stage(path: str) -> str:
    """Return the directory that a stage is for."""
    around, name = os.path.split(path)
    _, mark, owner = name.partition(OWNER)
    return os.path.join(around, owner) if mark else around or os.curdir


def state_dir_of_stage(path: str) -> StateDir:
    """Return the state directory that a stage lies in."""
    around, name = os.path.split(path)
    _, mark, owner = name.partition(OWNER)
    return StateDir(around or os.curdir, mark + owner)


def enclosing_serial(directory: str) -> str | None:
    """Return the Fluid serial that a directory is a part of: what lies in it are no checkpoints."""
    around, name = os.path.split(os.path.abspath(directory))
    return around if name in (MODEL, *TABLES) and _is_serial(around) else None


def _is_scanned_by_accelerate(directory: str) -> bool:
    """Tell whether Accelerate scans a directory: it wrote an entry that it named, or that has been renamed.

    A directory of another name may be what its own is a link to.
    """
    is_called_so = _is_named_as_accelerates(directory)
    try:
        with os.scandir(directory) as entries:
            named = [entry for entry in entries if is_called_so or SERIAL.fullmatch(entry.name)]
    except OSError:  # what can't be read tells nothing
        return False
    return any(map(_holds_random_states, named))


def _is_named_as_accelerates(directory: str) -> bool:
    return os.path.basename(os.path.realpath(directory)) == ACCELERATES


def _holds_random_states(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir() and any(map(_RANDOM_STATES.fullmatch, os.listdir(entry.path)))
    except OSError:  # it has gone, or can't be read
        return False


def _has_serials(directory: str) -> bool:
    try:
        with os.scandir(directory) as entries:
            return any(SERIAL.fullmatch(entry.name) for entry in entries)
    except OSError:  # what can't be read tells nothing
        return False


def _is_serial(path: str) -> bool:
    try:
        with Probe(path) as probe:
            return probe.is_directory and Fluid().matches(probe)
    except CheckpointError:
        return False
