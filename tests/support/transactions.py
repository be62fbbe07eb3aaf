"""Removals and moves as commands hand them to a transaction, and where a kill can end it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ckpttool.transaction import open_roots, operations, removal, transaction, unlinking
from ckpttool.transaction.engines import engine_of
from ckpttool.transaction.files import contents
from ckpttool.transaction.journal import Group, Location, Move, OperationList, Rewrite
from ckpttool.transaction.journal_documents import operations_document
from ckpttool.transaction.removal import move_to_trash
from ckpttool.transaction.stages import stages
from ckpttool.transaction.state_dir import StateDir, state_dir_beside
from ckpttool.transaction.transaction import Outcome
from tests.support.faults import Killed

IDENTITY = "20260102T030405.000006Z-0123abcd"
"""Of a command, unless a test says another."""

STEPS: dict[str, tuple[Any, str]] = {
    "do": (operations.Stage, "_do"),
    "write": (operations, "write_pointer"),
    "record": (operations, "add_step"),
    "commit": (operations.Stage, "_write_done"),
    "finish": (operations.Stage, "finish"),
    "unlink": (open_roots.OpenRoots, "unlink"),
    "drop_record": (operations, "drop_groups"),
    "close": (operations.Stage, "close"),
    "remove": (unlinking, "_unlink_file"),
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
        patch.setattr(transaction.Transaction, "__exit__", lambda *failure: None)
        act()


def before_unlinking(patch: pytest.MonkeyPatch, act: Callable[[Path], object]) -> None:
    """Do something once all that is removed is set aside in a stage; it is told where that is."""
    real = transaction.purge_groups

    def purge(stage: operations.Stage, *arguments: Any) -> Any:
        act(Path(stage.path))
        return real(stage, *arguments)

    patch.setattr(transaction, "purge_groups", purge)


# Moves ----------------------------------------------------------------------------------------------


class Moved(NamedTuple):
    """A checkpoint that moves, with its new names by the old ones."""

    group: Group
    names: dict[str, str]


def move(directory: Path, names: dict[str, str], path: str | os.PathLike[str] | None = None) -> Moved:
    """Return the move of a checkpoint, with its files as they are; it may be told of by another path."""
    shown = directory / next(iter(names)) if path is None else path
    return Moved(Group(os.fspath(shown), tuple(names), contents(str(directory), names)), names)


def moves(
    *moved: Moved,
    identity: str = IDENTITY,
    rewrites: Iterable[Sequence[Any]] = (),
    relinks: Iterable[Sequence[str]] = (),
) -> OperationList:
    """Return what renames checkpoints; of each pointer it is the name, and what it says before and after."""
    steps = [
        Move(number, Location("directory", old), Location("directory", new))
        for number, one in enumerate(moved)
        for old, new in reversed(one.names.items())
    ]
    pointers = sorted((Rewrite(*one) for one in rewrites), key=lambda one: one.after is None)
    links = (Rewrite(*one, is_link=True) for one in relinks)
    groups = tuple(one.group for one in moved)
    return OperationList("rename", groups, (*steps, *pointers, *links), identity)


def renaming(directory: Path, names: dict[str, str], **pointers: Any) -> OperationList:
    """Return what gives checkpoints of one file each other names."""
    return moves(*(move(directory, {old: new}) for old, new in names.items()), **pointers)


def make_moves(directory: Path, planned: OperationList) -> Outcome:
    """Make moves in a directory."""
    return transaction.apply(str(directory), planned)


# Removals -------------------------------------------------------------------------------------------


def removal_of(
    directory: Path, *members: str, path: str | os.PathLike[str] | None = None, survivors: Sequence[str] = ()
) -> Group:
    """Return the removal of a checkpoint, with its files as they are; it may be told of by another path."""
    shown = directory / members[0] if path is None else path
    return Group(os.fspath(shown), members, contents(str(directory), members), tuple(survivors))


def remove(directory: Path, *removals: Group) -> Outcome:
    """Remove checkpoints of a directory."""
    return removal.remove(str(directory), removals)


def put_in_trash(directory: Path, *removals: Group, identity: str = IDENTITY) -> Outcome:
    """Put checkpoints of a directory into its trash."""
    return move_to_trash(str(directory), removals, identity)


# What lies in a directory ---------------------------------------------------------------------------


def journal_of(directory: Path, *planned: OperationList | Group) -> bytes:
    """Return the journal of moves, or of removals."""
    removals = [one for one in planned if isinstance(one, Group)]
    (listed,) = [one for one in planned if isinstance(one, OperationList)] or [
        removal.removal_operations(removals)
    ]
    return json.dumps(operations_document(listed)).encode()


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
    return engine_of(str(directory)).hidden_names()
