"""Which checkpoints lie at a path, and which format recognises it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ckpttool import Checkpoint, formats
from ckpttool.formats.discovery import Walk, discover, unit_at
from ckpttool.formats.interface import Format, Probe, Unit
from ckpttool.formats.opening import open_unit
from ckpttool.storage import source


def checkpoints_in(place: str | os.PathLike[str], **walk: Any) -> list[Unit]:
    """Return the checkpoints at a path or in the tree below it; ``walk`` says what is looked at."""
    return list(discover(place, Walk(**walk)))


def paths_in(place: str | os.PathLike[str], **walk: Any) -> list[Path]:
    """Return where the checkpoints at a path, or in the tree below it, lie."""
    return [Path(unit.path) for unit in checkpoints_in(place, **walk)]


def only_checkpoint(place: str | os.PathLike[str], **walk: Any) -> Unit:
    """Return the one checkpoint at a path, or in the tree below it."""
    (unit,) = checkpoints_in(place, **walk)
    return unit


def checkpoint_at(path: str | os.PathLike[str]) -> Unit | None:
    """Return the checkpoint that a path itself is, damaged or not; None if it is none."""
    return unit_at(os.fspath(path))


def format_class_of(path: str | os.PathLike[str]) -> str | None:
    """Return the name of the class that recognises a path, or None.

    Raises:
        AmbiguousFormat: Several do.
    """
    with Probe(path) as probe:
        format = formats.detect(probe)
    return None if format is None else type(format).__name__


def kinds_of(path: str | os.PathLike[str]) -> frozenset[str]:
    """Return the kinds of content that a path's first bytes allow, and for which formats are asked."""
    with Probe(path) as probe:
        return probe.kinds


def known_suffixes() -> set[str]:
    """Return how the names of checkpoints end, of whichever format."""
    return {suffix for format in formats.formats() for suffix in format.suffixes}


def offer_formats(patch: pytest.MonkeyPatch, *offered: Format) -> None:
    """Let an installed package bring formats of its own."""
    patch.setattr(formats, "third_party_formats", lambda: offered)


def hold_open(patch: pytest.MonkeyPatch, count: int) -> None:
    """Let only so many files be held open; those that are read again are opened again."""
    patch.setattr(source, "MAX_OPEN", count)


def open_found(unit: Unit) -> Checkpoint:
    """Open what was found in a directory, as the commands do."""
    assert unit.format is not None
    return open_unit(unit.format, unit)
