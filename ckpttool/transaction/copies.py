"""Journals that were copied with their directory: the files here have other inodes than were noted.

Where they have the sizes and times that were noted, they are taken for those files. Where they have lost
their times, nothing tells which file is which, and nothing is done.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ckpttool.transaction.files import Contents, Fingerprint, fingerprint, opened
from ckpttool.transaction.journal import Removal
from ckpttool.transaction.move_steps import open_move_dirs
from ckpttool.transaction.moves import Chain, Moves, contents_at_target
from ckpttool.transaction.stage import status_of

COPIED = "it was copied; the files here have the sizes and times that were noted, and other inodes"
LOST_TIMES = "it was copied without the times of its files, which alone tell one from another of its size"

_SECOND = 10**9
"""In nanoseconds."""


# What was interrupted: each file lies in its old place, in its new one, or in both ---------------------


@dataclass(frozen=True, slots=True)
class InodeMap:
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


def inodes_of_moves(directory: str, moves: Moves) -> InodeMap:
    """Return which files some moves mean, that may have been made already, or not."""
    try:
        with open_move_dirs(directory, moves) as dirs:
            return _inode_map(
                [
                    (file, _fingerprints_at((dirs.source, file.path), (dirs.target, there.path)))
                    for move in moves.moves
                    for file, there in zip(move.contents.files, contents_at_target(move).files, strict=True)
                    if there.path not in dirs.rewritten
                ]
            )
    except OSError:  # whoever makes the moves is told the same
        return InodeMap(is_copy=False, now={})


def inodes_of_removal(removal: Removal, *places: int) -> InodeMap:
    """Return which files a removal means, in open directories in one of which each lies, or has lain."""
    return _inode_map(
        [
            (file, _fingerprints_at(*((place, file.path) for place in places)))
            for file in removal.contents.files
        ]
    )


def moves_with_inodes(moves: Moves, inodes: InodeMap) -> Moves:
    """Return moves of the files that are meant here."""
    chain = moves.chain
    if chain is not None:
        chain = Chain(tuple(moves_with_inodes(earlier, inodes) for earlier in chain.before), chain.has_more)
    meant = tuple(replace(move, contents=inodes.of(move.contents)) for move in moves.moves)
    return replace(moves, moves=meant, chain=chain)


def leftover_names(directory: str, moves: Moves, done: Iterable[str]) -> list[str]:
    """Return what has the new names of what hasn't moved."""
    made = set(done)
    names = [new for move in moves.moves if move.path not in made for _, new in move.members]
    names += [rewrite.name for rewrite in moves.rewrites if rewrite.before is None and not made]
    return [
        os.path.relpath(path, directory)
        for path in (os.path.join(moves.target, name) for name in names)
        if os.path.lexists(path)
    ]


def _fingerprints_at(*paths: tuple[int, str]) -> list[Fingerprint]:
    """Return what lies at some paths, each below an open directory."""
    result: list[Fingerprint] = []
    for place, path in paths:
        parent, name = os.path.split(path)
        try:
            with opened(parent, place) as directory:
                status = status_of(name, directory)
        except (FileNotFoundError, NotADirectoryError):
            continue
        if status is not None:
            result.append(fingerprint(path, status))
    return result


def _inode_map(known: Sequence[tuple[Fingerprint, Sequence[Fingerprint]]]) -> InodeMap:
    """Return which files are meant, from those that were noted, each with what lies where it may be."""
    pairs = [(file, here) for file, found in known for here in found]
    # One file that is still itself tells that nothing was copied.
    if not pairs or any(file.inode == here.inode for file, here in pairs):
        return InodeMap(is_copy=False, now={})
    if any((file.size, file.mtime_ns) != (here.size, here.mtime_ns) for file, here in pairs):
        return InodeMap(is_copy=True, now=None)
    return InodeMap(is_copy=True, now={file.inode: found[0].inode for file, found in known if found})


# What was done: each file lies where the record has it -------------------------------------------------


def moves_of_copy(directory: str, moves: Moves) -> Moves:
    """Return moves of files as they lie in a copy of the directory that the moves were made for.

    A copy is meant where every file that is there has the size and the time that were noted, and none of them
    is the file that was noted. Elsewhere the moves are returned as they are; what is missing stays as noted.
    """
    now = _current_files(directory, moves)
    for noted, here in now.items():
        # An archive may hold whole seconds alone.
        has_time = here.mtime_ns in (noted.mtime_ns, noted.mtime_ns // _SECOND * _SECOND)
        is_itself = (noted.device, noted.inode) == (here.device, here.inode)
        if noted.size != here.size or not has_time or is_itself:
            return moves
    copies = [
        replace(
            move,
            contents=replace(move.contents, files=tuple(now.get(file, file) for file in move.contents.files)),
        )
        for move in moves.moves
    ]
    return replace(moves, moves=tuple(copies))


def is_of_copy(moves: Moves, noted: Moves) -> bool:
    """Tell whether moves are of other files than those that were noted; see ``moves_of_copy``."""
    pairs = zip(moves.moves, noted.moves, strict=True)
    return any(
        here.inode != there.inode
        for now, before in pairs
        for here, there in zip(now.contents.files, before.contents.files, strict=True)
    )


def has_lost_times(directory: str, moves: Moves) -> bool:
    """Tell whether files have the sizes that were noted, and neither their inodes nor all of their times."""
    now = _current_files(directory, moves)
    return bool(now) and all(
        noted.size == here.size and noted.inode != here.inode for noted, here in now.items()
    )


def _current_files(directory: str, moves: Moves) -> dict[Fingerprint, Fingerprint]:
    """Return what lies where files were noted, by what was noted of them."""
    now: dict[Fingerprint, Fingerprint] = {}
    try:
        with open_move_dirs(directory, moves) as dirs:
            for file in (file for move in moves.moves for file in move.contents.files):
                parent, name = os.path.split(file.path)
                try:
                    with opened(parent, dirs.source) as place:
                        status = status_of(name, place)
                except FileNotFoundError:
                    continue
                if status is not None:
                    now[file] = fingerprint(file.path, status)
    except OSError:  # whoever makes the moves is told the same
        return {}
    return now
