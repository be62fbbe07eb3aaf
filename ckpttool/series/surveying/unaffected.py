"""Which checkpoints of a directory no journal has on their way: the others are whole elsewhere, or go."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckpttool.formats.discovery import Walk, discover
from ckpttool.formats.interface import Unit
from ckpttool.series.changing.journal import incomplete_names, pending_journals


@dataclass(frozen=True, slots=True)
class UnaffectedUnits:
    """What was found: the checkpoints that are whole, as far as journals tell, and the journals that wait."""

    whole: tuple[Unit, ...]
    journals: tuple[str, ...] = ()


def unaffected_units(units: Sequence[Unit], directories: Iterable[str] = ()) -> UnaffectedUnits:
    """Return checkpoints without those that a journal has on their way: they are whole elsewhere, or go."""
    places = sorted({*directories, *map(_directory, units)})
    journals = tuple(path for place in places for path in pending_journals(place))
    gone = {place: incomplete_names(place) for place in places} if journals else {}
    whole = (one for one in units if gone.get(_directory(one), frozenset()).isdisjoint(one.members))
    return UnaffectedUnits(tuple(whole), journals)


def current_unit(unit: Unit) -> Unit | None:
    """Return a checkpoint as it is found at its path now; None where it has gone, or is on its way."""
    directory = _directory(unit)
    if not any(os.path.lexists(os.path.join(directory, name)) for name in unit.members):
        return None
    if not unaffected_units([unit]).whole:
        return None
    path = os.path.normpath(unit.path)
    units = discover(directory, Walk(recursive=False))
    return next((one for one in units if os.path.normpath(one.path) == path), unit)


def _directory(unit: Unit) -> str:
    return os.path.dirname(unit.path) or os.curdir
