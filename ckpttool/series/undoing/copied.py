"""Files that were copied with their directory: they have the same sizes and times, and other inodes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from ckpttool.series.changing.history import Record
from ckpttool.series.changing.moves import Moves
from ckpttool.series.changing.moving import ground_of
from ckpttool.series.changing.roots import is_elsewhere, now_called
from ckpttool.series.changing.stage import status_of
from ckpttool.series.files import Contents, Fingerprint, fingerprint, opened
from ckpttool.series.paths import shown
from ckpttool.series.reasons import Problem

COPIED = "it was copied; the files here have the sizes and times that were noted, and other inodes"
LOST_TIMES = "it was copied without the times of its files, which alone tell one from another of its size"

_SECOND = 10**9
"""In nanoseconds."""


def is_of_copy(moves: Moves, noted: Moves) -> bool:
    """Tell whether moves are of other files than those that were noted; see ``as_copied``."""
    pairs = zip(moves.moves, noted.moves, strict=True)
    return any(
        here.inode != there.inode
        for now, before in pairs
        for here, there in zip(now.contents.files, before.contents.files, strict=True)
    )


def as_copied(directory: str, moves: Moves) -> Moves:
    """Return moves of files as they lie in a copy of the directory that the moves were made for.

    A copy is meant where every file that is there has the size and the time that were noted, and none of them
    is the file that was noted. Elsewhere the moves are returned as they are; what is missing stays as noted.
    """
    now = _now(directory, moves)
    if not now or not all(_is_copy(file, found) for file, found in now.items()):
        return moves
    copies = (replace(move, contents=_with(move.contents, now)) for move in moves.moves)
    return replace(moves, moves=tuple(copies))


def is_anothers(record: Record) -> bool:
    """Tell whether a record beside a directory was made for another one of its name, and not in a copy."""
    return is_elsewhere(record) and not any(
        is_of_copy(as_copied(record.directory, step.undoing), step.undoing)
        or has_lost_times(record.directory, step.undoing)
        for step in record.steps
    )


def left_to_another(record: Record) -> Problem:
    """Return what is to be told of a record that was made for another directory; see ``is_anothers``."""
    name = shown(record.directory)
    told = f"it belongs to a directory that was {name} before, and is left as it is"
    place = shown(as_given(record.directory, record.place))
    now = now_called(record)
    if now is None:
        return Problem(place, f"{told}; take out of it by hand what you need, or remove it")
    other = shown(as_given(record.directory, now))
    return Problem(place, f"{told}: that is {other} now (undo {other})")


def as_given(directory: str, path: str) -> str:
    """Return the path of what lies beside a directory in the words in which that was given."""
    above = os.path.dirname(directory) or os.curdir
    real = os.path.dirname(os.path.realpath(directory))
    is_above = os.path.isdir(above) and os.path.samefile(above, real)
    return os.path.join(above, os.path.relpath(path, real)) if is_above else path


def has_lost_times(directory: str, moves: Moves) -> bool:
    """Tell whether files have the sizes that were noted, and neither their inodes nor all of their times."""
    now = _now(directory, moves)
    return bool(now) and all(
        file.size == found.size and file.inode != found.inode for file, found in now.items()
    )


def _now(directory: str, moves: Moves) -> dict[Fingerprint, Fingerprint]:
    """Return what lies where files were noted, by what was noted of them."""
    try:
        with ground_of(directory, moves) as ground:
            return {
                file: found
                for move in moves.moves
                for file in move.contents.files
                if (found := _found(ground.source, file)) is not None
            }
    except OSError:  # whoever makes the moves is told the same
        return {}


def _found(place: int, file: Fingerprint) -> Fingerprint | None:
    parent, name = os.path.split(file.path)
    try:
        with opened(parent, place) as directory:
            status = status_of(name, directory)
    except FileNotFoundError:
        return None
    return None if status is None else fingerprint(file.path, status)


def _is_copy(noted: Fingerprint, found: Fingerprint) -> bool:
    times = {noted.mtime_ns, noted.mtime_ns // _SECOND * _SECOND}  # an archive may hold whole seconds alone
    is_alike = noted.size == found.size and found.mtime_ns in times
    return is_alike and (noted.device, noted.inode) != (found.device, found.inode)


def _with(noted: Contents, now: Mapping[Fingerprint, Fingerprint]) -> Contents:
    return replace(noted, files=tuple(now.get(file, file) for file in noted.files))
