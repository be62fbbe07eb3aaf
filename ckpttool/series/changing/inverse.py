"""What takes moves back, of files as they are once those were made."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace

from ckpttool.series.changing.moves import Move, Moves, Relink, Rewrite, arrived, old_name, reversed_move
from ckpttool.series.files import Contents, Fingerprint, contents


def as_they_are(done: Moves, target: int) -> dict[str, Fingerprint]:
    """Return the files of what has moved, and those that were written anew, as they are now, by path."""
    if done.target != done.source:  # in a trash, no name is one of two files
        return {}
    found = {file.path: file for move in done.moves for file in arrived(move).files}
    for one in done.rewrites:
        with suppress(OSError):  # it has gone since, and who needs it is told
            found |= {file.path: file for file in contents(target, [one.name]).files}
    return found


def with_files(move: Move, now: Mapping[str, Fingerprint]) -> Move:
    """Return a move of files as they are now, as far as that is told."""
    files = tuple(now.get(file.path, file) for file in move.contents.files)
    return replace(move, contents=replace(move.contents, files=files))


def undoing_of(done: Moves, target: int) -> Moves:
    """Return what takes moves back that were made."""
    rewritten = {one.name for one in done.rewrites}
    return Moves(
        kind="restore",
        identity=done.identity,
        moves=tuple(reversed_move(one, _there(one, rewritten, target)) for one in done.moves),
        rewrites=tuple(Rewrite(old_name(done, one.name), one.after, one.before) for one in done.rewrites),
        relinks=tuple(Relink(old_name(done, one.name), one.after, one.before) for one in done.relinks),
        source=done.target,
        target=done.source,
    )


def _there(move: Move, rewritten: Collection[str], target: int) -> Contents:
    """Return the contents of what has moved, as they are now where a pointer in it was rewritten."""
    found = arrived(move)
    if any(file.path in rewritten for file in found.files):
        return contents(target, [new for _, new in move.members])
    return found


def measured(move: Move, rewritten: Collection[str], place: int) -> Move:
    """Return a move with its files as they are in an open directory, if one of them was written anew."""
    if not any(file.path in rewritten for file in move.contents.files):
        return move
    return replace(move, contents=contents(place, [old for old, _ in move.members]))
