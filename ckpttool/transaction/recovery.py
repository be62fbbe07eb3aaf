"""Interrupted commands: their journals, the checkpoints that they hide, and recovery.

A checkpoint that a pending journal moves may be incomplete under its old and its new name. It is hidden until
the next command that changes its directory recovers the journal.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import NamedTuple

from ckpttool.core.errors import AccessDenied
from ckpttool.formats.discovery import Walk, discover
from ckpttool.formats.interface import Unit
from ckpttool.storage import fs
from ckpttool.transaction.engines import engine_of
from ckpttool.transaction.journal import Recovery
from ckpttool.transaction.paths import shown
from ckpttool.transaction.settling import Settled
from ckpttool.transaction.staged_output import error_text
from ckpttool.transaction.stages import JOURNAL
from ckpttool.transaction.state_dir import state_dir_of_stage


def recover_directory(directory: str) -> Recovery:
    """Recover all interrupted commands in a directory."""
    engine, recovery = engine_of(directory), Recovery()
    for path in engine.leftovers():
        try:
            settled = engine.settle(path)
        except OSError as error:
            reason = f"can't recover the interrupted command: {error_text(error)}"
            raise AccessDenied(path, reason) from error
        if settled is not None:
            _report(directory, path, settled, recovery)
    return recovery


_DOING = {
    "trash": "prune to the trash",
    "slim": "slimming",
    "restore": "undo",
    "rename": "rename",
}


def _report(directory: str, path: str, settled: Settled, recovery: Recovery) -> None:
    """Add the result for each checkpoint of a command."""
    listed = settled.listed
    paths = [shown(os.path.join(directory, os.path.basename(group.path))) for group in listed.groups]
    if listed.kind == "remove":
        recovery.finished += [paths[at] for at in settled.finished if at not in settled.failures]
        recovery.put_back += [paths[at] for at in settled.reverted if at not in settled.failures]
        recovery.failed |= {paths[number]: why for number, why in settled.failures.items()}
    else:
        _report_moves(directory, settled, paths, recovery)
    if settled.left is not None:
        recovery.failed[path] = settled.left
    if settled.is_complete:
        recovery.failed |= {paths[number]: why for number, why in settled.notes.items()}


def _report_moves(directory: str, settled: Settled, paths: Sequence[str], recovery: Recovery) -> None:
    """Add a sentence on each checkpoint of a command that doesn't remove."""
    doing = f"interrupted {_DOING[settled.listed.kind]}"
    for number, path in enumerate(paths):
        if number in settled.failures:
            why = settled.failures[number]
            recovery.failed[path] = f"{doing} can't be completed or reverted: {why}"
        elif number in settled.finished or number not in settled.notes:
            result = "completed" if number in settled.finished else "reverted"
            recovery.moved.append(f"{path}: {doing}: {result}")
    if not paths:
        result = "completed" if settled.listed.is_committed else "reverted"
        recovery.moved.append(f"{directory}: {doing}: {result}")


# Pending journals -----------------------------------------------------------------------------------


def directory_of_journal(path: str) -> str:
    """Return the directory that a journal is for."""
    place = os.path.dirname(path)
    is_staged = os.path.basename(path) == JOURNAL
    return state_dir_of_stage(place).directory if is_staged else place


def owner_of_journal(path: str) -> str | None:
    """Return the other user who owns a journal; None if it can be recovered."""
    return engine_of(directory_of_journal(path)).owner_of(path)


class UnaffectedUnits(NamedTuple):
    """Checkpoints that no pending journal moves, and the pending journals."""

    whole: tuple[Unit, ...]
    journals: tuple[str, ...] = ()


def unaffected_units(units: Sequence[Unit], directories: Iterable[str] = ()) -> UnaffectedUnits:
    """Return checkpoints without those that a pending journal moves.

    The journals returned are those of the checkpoints' directories, and of ``directories``.
    """
    paths = sorted({*directories, *map(_directory, units)})
    journals = tuple(journal for path in paths for journal in engine_of(path).journals())
    hidden = {
        fs.normpath(os.path.join(path, name))
        for path in (paths if journals else ())
        for name in engine_of(path).hidden_names()
    }
    return UnaffectedUnits(tuple(unit for unit in units if not _is_hidden(unit, hidden)), journals)


def _is_hidden(unit: Unit, hidden: Set[str]) -> bool:
    """Return whether a checkpoint has a part at or below one of some paths."""
    # A directory that a journal moves hides all checkpoints below it, too.
    if not hidden:
        return False
    directory = fs.normpath(_directory(unit))
    paths = (fs.normpath(os.path.join(directory, name)) for name in unit.members)
    return any(path in hidden for path in (*paths, *_directories_above(directory)))


def _directories_above(path: str) -> Iterator[str]:
    """Yield a directory and all its parents."""
    while True:
        yield path
        above = fs.dirname(path)
        if above in (path, ""):
            return
        path = above


def current_unit(unit: Unit) -> Unit | None:
    """Return the checkpoint that is at a path now; None if it is missing or left unfinished."""
    directory = _directory(unit)
    if not any(fs.lexists(os.path.join(directory, name)) for name in unit.members):
        return None
    if not unaffected_units([unit]).whole:
        return None
    path = fs.normpath(unit.path)
    units = discover(directory, Walk(recursive=False))
    return next((one for one in units if fs.normpath(one.path) == path), unit)


def _directory(unit: Unit) -> str:
    return os.path.dirname(unit.path) or os.curdir
