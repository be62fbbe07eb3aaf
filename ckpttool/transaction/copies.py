"""Journals that were copied with their directory: the files here have other inodes than were noted.

Where they have the sizes and times that were noted, they are taken for those files. Where they have lost
their times, nothing tells which file is which, and nothing is done.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from ckpttool.io import fs
from ckpttool.transaction.files import Contents, Fingerprint, fingerprint_at, opened
from ckpttool.transaction.journal import Moves, Successor, contents_at_target
from ckpttool.transaction.move_steps import is_replaced, open_move_dirs

COPIED = "it was copied; the files here have the sizes and times that were noted, and other inodes"
LOST_TIMES = "it was copied without the times of its files, which alone tell one from another of its size"

_SECOND = 10**9
"""In nanoseconds."""


# What was interrupted: each file lies in its old place, in its new one, or in both ---------------------


class InodeMap(NamedTuple):
    """Which files are meant here.

    Attributes:
        is_copy: Whether they are others than those that were noted.
        now: Their inodes, by those that were noted; None where nothing tells.
    """

    is_copy: bool
    now: dict[int, int] | None

    def of(self, contents: Contents) -> Contents:
        """Return noted contents as they are here."""
        now = self.now or {}
        return replace(
            contents,
            files=tuple(replace(file, inode=now.get(file.inode, file.inode)) for file in contents.files),
        )

    def of_moves(self, moves: Moves) -> Moves:
        """Return moves of the files that are meant here."""
        return moves.with_each(lambda move: replace(move, contents=self.of(move.contents)))


def inodes_of_moves(directory: str, moves: Moves) -> InodeMap:
    """Return which files some moves mean, that may have been made already, or not."""
    try:
        with open_move_dirs(directory, moves) as dirs:
            return _inode_map(
                [
                    (
                        file,
                        [
                            None
                            if is_replaced(dirs, move, file.path)
                            else fingerprint_at(file.path, dirs.source),
                            fingerprint_at(there.path, dirs.target),
                        ],
                    )
                    for move in moves.moves
                    for file, there in zip(move.contents.files, contents_at_target(move).files, strict=True)
                    if there.path not in dirs.rewritten
                ]
            )
    except OSError:  # whoever makes the moves is told the same
        return InodeMap(is_copy=False, now={})


def leftover_names(directory: str, moves: Moves, done: Iterable[str]) -> list[str]:
    """Return what has the new names of what hasn't moved."""
    made = set(done)
    names = [new for move in moves.moves if move.path not in made for _, new in move.members]
    names += [rewrite.name for rewrite in moves.rewrites if rewrite.before is None and not made]
    return [
        os.path.relpath(path, directory)
        for path in (os.path.join(moves.target, name) for name in names)
        if fs.lexists(path)
    ]


def _inode_map(candidates: Sequence[tuple[Fingerprint, Sequence[Fingerprint | None]]]) -> InodeMap:
    """Return which files are meant, from those that were noted, each with what lies where it may be."""
    pairs = [(file, here) for file, places in candidates for here in places if here is not None]
    # One file that is still itself tells that nothing was copied.
    if not pairs or any(file.inode == here.inode for file, here in pairs):
        return InodeMap(is_copy=False, now={})
    if any((file.size, file.mtime_ns) != (here.size, here.mtime_ns) for file, here in pairs):
        return InodeMap(is_copy=True, now=None)
    now = {file.inode: here.inode for file, places in candidates for here in places[::-1] if here is not None}
    return InodeMap(is_copy=True, now=now)


# What was done: each file lies where the record has it -------------------------------------------------


def moves_of_copy(directory: str, moves: Moves) -> tuple[Moves, str | None]:
    """Return moves of files as they lie in a copy of the directory that the moves were made for.

    A copy is meant where every file that is there has the size and the time that were noted, and none of them
    is the file that was noted. Elsewhere the moves are returned as they are; what is missing stays as noted.
    Beside them, a copy is told of in words, and one that has lost its times.
    """
    now = _current_files(directory, moves)
    if all(_is_copied(noted, here) for noted, here in now.items()):
        copies = tuple(
            replace(
                move,
                successors=tuple(_successor_here(directory, one) for one in move.successors),
                contents=replace(
                    move.contents, files=tuple(now.get(file, file) for file in move.contents.files)
                ),
            )
            for move in moves.moves
        )
        has_other_inodes = any(noted.inode != here.inode for noted, here in now.items())
        return replace(moves, moves=copies), COPIED if has_other_inodes else None
    has_lost_times = all(noted.size == here.size and noted.inode != here.inode for noted, here in now.items())
    return moves, LOST_TIMES if has_lost_times else None


def _successor_here(directory: str, successor: Successor) -> Successor:
    """Return a successor as it lies in a copy; as it was noted if it doesn't lie there."""
    try:
        with opened(directory) as place:
            here = fingerprint_at(successor.file.path, place)
    except OSError:  # whoever makes the moves is told the same
        return successor
    is_there = here is not None and _is_copied(successor.file, here)
    return successor._replace(file=here) if here is not None and is_there else successor


def _is_copied(noted: Fingerprint, here: Fingerprint) -> bool:
    # An archive may hold whole seconds alone.
    has_time = here.mtime_ns in (noted.mtime_ns, noted.mtime_ns // _SECOND * _SECOND)
    is_itself = (noted.device, noted.inode) == (here.device, here.inode)
    return noted.size == here.size and has_time and not is_itself


def _current_files(directory: str, moves: Moves) -> dict[Fingerprint, Fingerprint]:
    """Return what lies where files were noted, by what was noted of them."""
    try:
        with open_move_dirs(directory, moves) as dirs:
            files = [file for move in moves.moves for file in move.contents.files]
            now = {file: fingerprint_at(file.path, dirs.source) for file in files}
    except OSError:  # whoever makes the moves is told the same
        return {}
    return {noted: here for noted, here in now.items() if here is not None}
