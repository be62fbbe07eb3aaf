"""The journals that wait in a directory, and which checkpoints they have on their way.

Those are whole elsewhere, or nowhere until the next command that changes the directory settles the journals.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import NamedTuple

from ckpttool.core.errors import CheckpointError
from ckpttool.formats.discovery import Walk, discover
from ckpttool.formats.interface import Unit
from ckpttool.storage import fs
from ckpttool.transaction.files import contents
from ckpttool.transaction.journal import Group, Location, Move, OperationList, Rewrite
from ckpttool.transaction.open_roots import OpenRoots, open_roots
from ckpttool.transaction.stages import JOURNAL, stages
from ckpttool.transaction.state_dir import (
    StateDir,
    may_keep_state_beside,
    open_own,
    state_dir_beside,
    state_dir_of_stage,
    user_name,
)
from ckpttool.transaction.stored_journals import read_journal


def pending_journals(directory: str) -> list[str]:
    """Return the paths of the journals of a directory that the next command has to settle."""
    if fs.is_remote(directory):
        from ckpttool.transaction.store_directory import journals_in

        return journals_in(directory)
    try:
        paths = stages(StateDir(directory))
        if may_keep_state_beside(directory):
            paths += stages(state_dir_beside(directory))
    except CheckpointError:  # what can't be read holds nothing that we could settle
        return []
    pending: list[str] = []
    for path in (os.path.join(stage, JOURNAL) for stage in paths):
        try:
            fs.lstat(path)
        except PermissionError:
            pass  # in another user's stage, where nobody else can tell: it may be there
        except OSError:
            continue
        pending.append(path)
    return pending


def directory_of_journal(path: str) -> str:
    """Return the directory that a journal is for."""
    place = os.path.dirname(path)
    return place if fs.is_remote(path) else state_dir_of_stage(place).directory


def owner_of_journal(path: str) -> str | None:
    """Return which other user a journal is of, so that this one can't settle it; None where it is his."""
    if fs.is_remote(path):
        return None
    stage = os.path.dirname(path)
    try:
        user, owner = fs.lstat(stage).st_uid, fs.stat(state_dir_of_stage(stage).directory).st_uid
    except OSError:  # it has just gone
        return None
    is_ours = not hasattr(os, "geteuid") or user in (os.geteuid(), owner)
    return None if is_ours else user_name(user)


def incomplete_names(directory: str) -> frozenset[str]:
    """Return the names that belong to no whole checkpoint: some part is gone already, or on its way."""
    if fs.is_remote(directory):
        from ckpttool.transaction.store_operations import incomplete_in_store

        return incomplete_in_store(directory)
    names: set[str] = set()
    for path in pending_journals(directory):
        try:
            journal = read_journal(os.path.dirname(path), directory)
        except CheckpointError:  # the next command that changes something refuses to go on
            continue
        if journal is not None:
            names |= _hidden_names(directory, os.path.dirname(path), journal)
    return frozenset(names)


def _hidden_names(directory: str, stage: str, listed: OperationList) -> set[str]:
    """Return the names in a directory under which checkpoints that a journal moves don't count."""
    names = {
        one.name
        for one in listed.pointers
        if isinstance(one, Rewrite) and (one.after if listed.is_committed else one.before) is None
    }
    try:
        with (
            open_own(directory, *os.path.split(stage)) as inner,
            open_roots(directory, listed, state_dir_of_stage(stage), inner.descriptor) as roots,
        ):
            for number, group in enumerate(listed.groups):
                is_done = listed.done is not None and number in listed.done
                names.update(_hidden_names_of(directory, roots, number, group, is_done=is_done))
    except (CheckpointError, OSError):  # the next command that changes something refuses to go on
        return names
    return names


def _hidden_names_of(
    directory: str, roots: OpenRoots, number: int, group: Group, *, is_done: bool
) -> Iterator[str]:
    moves = [one for one in roots.listed.of_groups[number] if isinstance(one, Move)]
    come = [one for one in moves if not one.target.is_private]
    moved = [one for one in moves if roots.has_moved(one)]
    if come and not is_done:
        # Under new names it doesn't count yet, unless it was renamed: a directory never has both.
        is_home = all(roots.status(Location(roots.listed.home(number), name)) for name in group.members)
        if is_home or len(come) > len([one for one in come if one in moved]):
            yield from (one.target.path for one in come if one in moved)
        if roots.listed.home(number) == "directory" and not is_home:
            yield from _names_left(directory, group)
    elif roots.listed.home(number) == "directory" and moved and (come or not group.is_single):
        yield from _names_left(directory, group)


def _names_left(directory: str, group: Group) -> Iterator[str]:
    """Yield members of a partly moved checkpoint that have not been saved again since."""
    for name in group.members:
        noted = [file for file in group.contents.files if file.path.split(os.sep)[0] == name]
        try:
            now = contents(directory, [name]).files
        except OSError:  # gone, or unreadable: then it is hidden, too
            now = ()
        # In a copy of the directory, inodes are others.
        kept = {(file.path, file.size, file.mtime_ns) for file in noted}
        if not now or any((file.path, file.size, file.mtime_ns) in kept for file in now):
            yield name


class UnaffectedUnits(NamedTuple):
    """What was found: the checkpoints that are whole, as far as journals tell, and the journals that wait."""

    whole: tuple[Unit, ...]
    journals: tuple[str, ...] = ()


def unaffected_units(units: Sequence[Unit], directories: Iterable[str] = ()) -> UnaffectedUnits:
    """Return checkpoints without those that a journal has on their way.

    The journals returned are those of the directories that they lie in, and of ``directories``.
    """
    paths = sorted({*directories, *map(_directory, units)})
    journals = tuple(journal for path in paths for journal in pending_journals(path))
    hidden = {
        fs.normpath(os.path.join(path, name))
        for path in (paths if journals else ())
        for name in incomplete_names(path)
    }
    return UnaffectedUnits(tuple(unit for unit in units if not _is_hidden(unit, hidden)), journals)


def _is_hidden(unit: Unit, hidden: Set[str]) -> bool:
    """Tell whether a checkpoint has a part at or below one of some paths."""
    if not hidden:
        return False
    directory = fs.normpath(_directory(unit))
    paths = (fs.normpath(os.path.join(directory, name)) for name in unit.members)
    return any(path in hidden for path in (*paths, *_directories_above(directory)))


def _directories_above(path: str) -> Iterator[str]:
    """Yield a directory and those that it lies in."""
    while True:
        yield path
        above = fs.dirname(path)
        if above in (path, ""):
            return
        path = above


def current_unit(unit: Unit) -> Unit | None:
    """Return a checkpoint as it is found at its path now; None where it has gone, or is on its way."""
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
