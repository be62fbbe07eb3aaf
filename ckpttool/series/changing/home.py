"""Where what belongs to a directory's prune lies: in it, or beside it where its owner allows no other entry.

Paddle's loader splits the name of every entry of a Fluid root on ``_`` and dies of what is no
``checkpoint_<n>``. So the stage and the lock of such a directory lie in the directory around it, and carry
its name.

Source: PaddlePaddle/Paddle ``python/paddle/fluid/io.py`` of 2018, ``_get_dir_serial``.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from ckpttool.errors import CheckpointError
from ckpttool.formats.interface import Probe
from ckpttool.formats.paddle.fluid import Fluid
from ckpttool.formats.paddle.fluid_parts import MODEL, TABLES
from ckpttool.formats.paddle.fluid_siblings import SERIAL

OWNER = "@"
"""Stands in a name between what is ours and the name of the directory that it is for."""


class Home(NamedTuple):
    """A directory for what is ours, and what the names of it there end with."""

    path: str
    suffix: str = ""


def home_of(directory: str) -> Home:
    """Return where the stage and the lock of a directory go."""
    return beside(directory) if _is_strict(directory) else Home(directory)


def beside(directory: str) -> Home:
    """Return the place in the directory around another."""
    real = os.path.realpath(directory)
    return Home(os.path.dirname(real), OWNER + os.path.basename(real))


def owner_of(path: str) -> str:
    """Return the directory that a stage is for."""
    around, name = os.path.split(path)
    _, mark, owner = name.partition(OWNER)
    return os.path.join(around, owner) if mark else around or os.curdir


def home_around(path: str) -> Home:
    """Return the home that a stage lies in."""
    around, name = os.path.split(path)
    _, mark, owner = name.partition(OWNER)
    return Home(around or os.curdir, mark + owner)


def has_serials(directory: str) -> bool:
    """Tell from the names in a directory whether it could be a Fluid root."""
    try:
        with os.scandir(directory) as entries:
            return any(SERIAL.fullmatch(entry.name) for entry in entries)
    except OSError:  # what can't be read tells nothing
        return False


def serial_around(directory: str) -> str | None:
    """Return the Fluid serial that a directory is a part of: what lies in it are no checkpoints."""
    around, name = os.path.split(os.path.abspath(directory))
    return around if name in (MODEL, *TABLES) and _is_serial(around) else None


def _is_strict(directory: str) -> bool:
    """Tell whether a directory is a Fluid root: a serial lies in it."""
    if not has_serials(directory):
        return False
    names = sorted(name for name in os.listdir(directory) if SERIAL.fullmatch(name))
    return any(_is_serial(os.path.join(directory, name)) for name in names)


def _is_serial(path: str) -> bool:
    try:
        with Probe(path) as probe:
            return probe.is_directory and Fluid().matches(probe)
    except CheckpointError:
        return False
