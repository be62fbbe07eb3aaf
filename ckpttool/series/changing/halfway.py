"""What a reader is to see of moves that a kill has interrupted: each checkpoint once, where it is whole."""

from __future__ import annotations

from ckpttool.series.changing.copies import inodes_of_moves, moves_here
from ckpttool.series.changing.moves import Moves
from ckpttool.series.changing.moving import ground_of
from ckpttool.series.changing.placing import is_at_source, is_at_target, parts_at
from ckpttool.series.changing.pointing import is_turned


def hidden(directory: str, moves: Moves) -> set[str]:
    """Return the names in a directory that belong to a checkpoint that is elsewhere, or whole nowhere."""
    names: set[str] = set()
    moves = moves_here(moves, inodes_of_moves(directory, moves))
    try:
        with ground_of(directory, moves) as ground:
            turned = is_turned(directory, moves)
            for move in moves.moves:
                here, there = is_at_source(ground, move), is_at_target(ground, move)
                is_new = there and (turned or not here)
                if moves.source == directory and (is_new or not here):
                    names |= parts_at(ground.source, move, 0)
                if moves.target == directory and not is_new:
                    names |= parts_at(ground.target, move, 1)
            for one in moves.rewrites:
                if (one.after if turned else one.before) is None:
                    names.add(one.name)
    except OSError:  # the trash that it was for is not there yet, or not any more
        return names
    return names
