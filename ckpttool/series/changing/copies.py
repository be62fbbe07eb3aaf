"""Journals that were copied with their directory: the files here have other inodes than were noted.

Where they have the sizes and times that were noted, they are taken for those files. Where they have lost
their times, nothing tells which file is which, and nothing is done.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ckpttool.series.changing.journal import Journal, Removal
from ckpttool.series.changing.move_steps import open_move_dirs
from ckpttool.series.changing.moves import Chain, Move, Moves, contents_at_target
from ckpttool.series.changing.stage import status_of
from ckpttool.series.files import Contents, Fingerprint, fingerprint, opened
from ckpttool.series.paths import shown

_Known = Sequence[tuple[Fingerprint, Sequence[Fingerprint]]]
"""Files as they were noted, each with what lies where it may be."""


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
            pairs = (
                (file, there)
                for move in moves.moves
                for file, there in zip(move.contents.files, contents_at_target(move).files, strict=True)
                if there.path not in dirs.rewritten
            )
            return _inode_map(
                [
                    (file, _fingerprints_at((dirs.source, file.path), (dirs.target, there.path)))
                    for file, there in pairs
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
        chain = Chain(tuple(moves_with_inodes(one, inodes) for one in chain.before), chain.has_more)
    made = tuple(replace(move, contents=inodes.of(move.contents)) for move in moves.moves)
    return replace(moves, moves=made, chain=chain)


def leftover_names(directory: str, moves: Moves, done: Iterable[str]) -> list[str]:
    """Return what has the new names of what hasn't moved."""
    made = set(done)
    names = [new for move in moves.moves if move.path not in made for _, new in move.members]
    names += [one.name for one in moves.rewrites if one.before is None and not made]
    return [
        os.path.relpath(path, directory)
        for path in (os.path.join(moves.target, name) for name in names)
        if os.path.lexists(path)
    ]


def with_current_paths(directory: str, found: Journal | Moves) -> Journal | Moves:
    """Return a journal with the paths that its checkpoints have in the directory as it is called now."""

    def path(one: Move | Removal) -> str:
        return shown(os.path.join(directory, os.path.basename(one.path)))

    if isinstance(found, Journal):
        return replace(found, removals=tuple(replace(one, path=path(one)) for one in found.removals))
    chain = found.chain
    if chain is not None:
        before = (with_current_paths(directory, one) for one in chain.before)
        chain = Chain(tuple(one for one in before if isinstance(one, Moves)), chain.has_more)
    return replace(found, moves=tuple(replace(one, path=path(one)) for one in found.moves), chain=chain)


def fingerprint_at(place: int, path: str) -> Fingerprint | None:
    """Return what lies at a path below an open directory, or None."""
    above, name = os.path.split(path)
    try:
        with opened(above, place) as directory:
            status = status_of(name, directory)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return None if status is None else fingerprint(path, status)


def _fingerprints_at(*where: tuple[int, str]) -> list[Fingerprint]:
    return [found for place, path in where if (found := fingerprint_at(place, path)) is not None]


def _inode_map(known: _Known) -> InodeMap:
    pairs = [(file, found) for file, there in known for found in there]
    if not pairs or any(file.inode == found.inode for file, found in pairs):
        return InodeMap(is_copy=False, now={})
    if any((file.size, file.mtime_ns) != (found.size, found.mtime_ns) for file, found in pairs):
        return InodeMap(is_copy=True, now=None)
    return InodeMap(is_copy=True, now={file.inode: there[0].inode for file, there in known if there})


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


def moves_of_copy(directory: str, moves: Moves) -> Moves:
    """Return moves of files as they lie in a copy of the directory that the moves were made for.

    A copy is meant where every file that is there has the size and the time that were noted, and none of them
    is the file that was noted. Elsewhere the moves are returned as they are; what is missing stays as noted.
    """
    now = _current_files(directory, moves)
    if not now or not all(_is_copy(file, found) for file, found in now.items()):
        return moves
    copies = (replace(move, contents=_with_current_files(move.contents, now)) for move in moves.moves)
    return replace(moves, moves=tuple(copies))


def has_lost_times(directory: str, moves: Moves) -> bool:
    """Tell whether files have the sizes that were noted, and neither their inodes nor all of their times."""
    now = _current_files(directory, moves)
    return bool(now) and all(
        file.size == found.size and file.inode != found.inode for file, found in now.items()
    )


def _current_files(directory: str, moves: Moves) -> dict[Fingerprint, Fingerprint]:
    """Return what lies where files were noted, by what was noted of them."""
    try:
        with open_move_dirs(directory, moves) as dirs:
            return {
                file: found
                for move in moves.moves
                for file in move.contents.files
                if (found := _fingerprint_below(dirs.source, file)) is not None
            }
    except OSError:  # whoever makes the moves is told the same
        return {}


def _fingerprint_below(place: int, file: Fingerprint) -> Fingerprint | None:
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


def _with_current_files(noted: Contents, now: Mapping[Fingerprint, Fingerprint]) -> Contents:
    return replace(noted, files=tuple(now.get(file, file) for file in noted.files))
