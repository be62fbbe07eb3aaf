"""Files that were copied with their directory: they have the same sizes and times, and other inodes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from ckpttool.series.changing.moves import Moves
from ckpttool.series.changing.moving import ground_of
from ckpttool.series.changing.stage import status_of
from ckpttool.series.files import Contents, Fingerprint, fingerprint, opened

COPIED = "it was copied; the files here have the sizes and times that were noted, and other inodes"
LOST_TIMES = "it was copied without the times of its files, which alone tell one from another of its size"


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
    is_alike = (noted.size, noted.mtime_ns) == (found.size, found.mtime_ns)
    return is_alike and (noted.device, noted.inode) != (found.device, found.inode)


def _with(noted: Contents, now: Mapping[Fingerprint, Fingerprint]) -> Contents:
    return replace(noted, files=tuple(now.get(file, file) for file in noted.files))
