"""Removals and moves as commands hand them to a transaction, and where a kill can end it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ckpttool.transaction import move_transaction, operations, removal
from ckpttool.transaction.files import contents
from ckpttool.transaction.journal import (
    Move,
    Moves,
    Relink,
    Removal,
    Rewrite,
    moves_document,
    operations_document,
    stages,
)
from ckpttool.transaction.move_transaction import MoveOutcome
from ckpttool.transaction.pending_journals import incomplete_names
from ckpttool.transaction.removal import RemovalOutcome
from ckpttool.transaction.state_dir import StateDir, state_dir_beside
from ckpttool.transaction.trash import put_aside
from tests.support.faults import Killed

IDENTITY = "20260102T030405.000006Z-0123abcd"
"""Of a command, unless a test says another."""

STEPS: dict[str, tuple[Any, str]] = {
    "link_new": (move_transaction, "link_new"),
    "unlink_old": (move_transaction, "unlink_old"),
    "rewrite_pointers": (move_transaction, "rewrite_pointers"),
    "add_to_record": (move_transaction, "add_to_record"),
    "next_moves": (move_transaction.ChainedMoves, "make"),
    "next_moves_in_journal": (move_transaction, "rewrite_journal"),
    "write": (operations.Stage, "write_pointers"),
    "commit": (operations.Stage, "commit"),
    "remove": (operations, "_unlink_file"),
}
"""Where a transaction can be killed, each by the function that does it."""


def kill_before(step: str, act: Callable[[], object], number: int = 1) -> None:
    """Do something that ends, as if killed, before a step is taken for the ``number``-th time."""
    place, name = STEPS[step]
    real, taken = getattr(place, name), 0

    def take(*arguments: Any, **options: Any) -> Any:
        nonlocal taken
        taken += 1
        if taken == number:
            raise Killed
        return real(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(place, name, take)
        patch.setattr(move_transaction.ChainedMoves, "__exit__", lambda *failure: None)
        act()


def before_unlinking(patch: pytest.MonkeyPatch, act: Callable[[Path], object]) -> None:
    """Do something once all that is removed is set aside in a stage; it is told where that is."""
    real = removal._purge

    def purge(stage: operations.Stage, *arguments: Any) -> None:
        act(Path(stage.path))
        real(stage, *arguments)

    patch.setattr(removal, "_purge", purge)


# Moves ----------------------------------------------------------------------------------------------


def move(directory: Path, names: dict[str, str], path: str | os.PathLike[str] | None = None) -> Move:
    """Return the move of a checkpoint, with its files as they are; it may be told of by another path."""
    shown = directory / next(iter(names)) if path is None else path
    return Move(os.fspath(shown), tuple(names.items()), contents(str(directory), names))


def moves(
    directory: Path,
    *moved: Move,
    identity: str = IDENTITY,
    rewrites: Iterable[Sequence[Any]] = (),
    relinks: Iterable[Sequence[str]] = (),
    to_trash: bool = False,
) -> Moves:
    """Return what one journal does; of each pointer it is the name, and what it says before and after."""
    place = str(directory)
    return Moves(
        kind="trash" if to_trash else "rename",
        identity=identity,
        moves=moved,
        rewrites=tuple(Rewrite(*rewrite) for rewrite in rewrites),
        relinks=tuple(Relink(*relink) for relink in relinks),
        source=place,
        target=StateDir(place).trash_place(identity) if to_trash else place,
    )


def renaming(directory: Path, names: dict[str, str], **pointers: Any) -> Moves:
    """Return moves that give checkpoints of one file each other names."""
    return moves(directory, *(move(directory, {old: new}) for old, new in names.items()), **pointers)


def make_moves(directory: Path, planned: Moves) -> MoveOutcome:
    """Make moves in a directory."""
    return move_transaction.apply_moves(str(directory), planned)


def make_moves_in_turn(directory: Path, *planned: Callable[[], Moves]) -> MoveOutcome:
    """Make moves that follow each other, each planned when it is its turn, until some fail."""
    with move_transaction.ChainedMoves(str(directory)) as chain:
        for number, plan in enumerate(planned, 1):
            outcome = chain.make(plan(), has_more=number < len(planned))
            if outcome.failed:
                break
    return outcome


# Removals -------------------------------------------------------------------------------------------


def removal_of(
    directory: Path, *members: str, path: str | os.PathLike[str] | None = None, survivors: Sequence[str] = ()
) -> Removal:
    """Return the removal of a checkpoint, with its files as they are; it may be told of by another path."""
    shown = directory / members[0] if path is None else path
    return Removal(os.fspath(shown), members, contents(str(directory), members), tuple(survivors))


def remove(directory: Path, *removals: Removal) -> RemovalOutcome:
    """Remove checkpoints of a directory."""
    return removal.remove(str(directory), removals)


def put_in_trash(directory: Path, *removals: Removal, identity: str = IDENTITY) -> RemovalOutcome:
    """Put checkpoints of a directory into its trash."""
    return put_aside(str(directory), removals, identity)


# What lies in a directory ---------------------------------------------------------------------------


def journal_of(directory: Path, *planned: Moves | Removal) -> bytes:
    """Return the journal of moves, or of removals."""
    if isinstance(planned[0], Moves):
        return json.dumps(moves_document(planned[0], str(directory))).encode()
    removals = [one for one in planned if isinstance(one, Removal)]
    return json.dumps(operations_document(operations.removal_operations(removals))).encode()


def plant_journal(directory: Path, journal: bytes, done: Sequence[int] | None = None) -> Path:
    """Leave a journal in a directory, as a command does that is killed; return its stage.

    Args:
        directory: The directory.
        journal: The journal.
        done: Groups that stand; None if the command was killed before its point of no return.
    """
    stage = directory / ".ckpttool-0123abcd"
    stage.mkdir(mode=0o700)
    (stage / "journal.json").write_bytes(journal)
    if done is not None:
        (stage / "done.json").write_text(json.dumps(done))
    return stage


def stages_of(directory: Path) -> list[Path]:
    """Return the stages in which something of a directory's was interrupted."""
    places = (StateDir(str(directory)), state_dir_beside(str(directory)))
    return [Path(stage) for place in places for stage in stages(place)]


def hidden_names(directory: Path) -> frozenset[str]:
    """Return the names that are passed over, as a part of their checkpoint is gone, or on its way."""
    return incomplete_names(str(directory))
