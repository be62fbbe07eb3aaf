"""The directories of a trash: made when something is put there, and gone once nothing is left in them."""

from __future__ import annotations

import os
from contextlib import suppress

from ckpttool.series.home import Home
from ckpttool.series.moves import Moves, trash_at
from ckpttool.wire.atomic import sync_directory


def make_room(directory: str, home: Home, moves: Moves) -> None:
    """Make the places in the trash that some moves leave or come to, as far as they are not there.

    Raises:
        OSError: One can't be made.
    """
    sides = [(0, moves.source), (1, moves.target)]
    for side, place in sides:
        if place == directory:
            continue
        numbers = {os.path.dirname(pair[side]) for move in moves.moves for pair in move.members}
        trash = os.path.dirname(place)
        made = [
            _made(path) for path in (trash, place, *(os.path.join(place, one) for one in sorted(numbers)))
        ]
        if any(made):
            for path in (home.path, trash, place):
                sync_directory(path)


def _made(path: str) -> bool:
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        return False
    return True


def tidy(home: Home, identity: str) -> None:
    """Remove the directories of a command from the trash, and the trash, as far as they are empty.

    One that can't be removed stays, and is removed when the trash is emptied.
    """
    place = trash_at(home, identity)
    with suppress(OSError):
        for name in os.listdir(place):
            if name.isdecimal():
                _remove(os.path.join(place, name))
    _remove(place)
    _remove(os.path.dirname(place))


def _remove(path: str) -> None:
    with suppress(OSError):  # it isn't empty, or isn't there
        os.rmdir(path)
