"""Directories that change: pruned into the trash, settled after a kill, and compared afterwards."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from ckpttool import Policy, PruneRequest, prune
from ckpttool.containers.toml import parse_toml
from ckpttool.runs.pointers import pins
from ckpttool.runs.pruning.prune import Pruned
from ckpttool.runs.renaming import names as renaming_names
from ckpttool.transaction import operations, removal, state_dir
from ckpttool.transaction.engines import engine_of
from ckpttool.transaction.files import contents
from ckpttool.transaction.journal import Group, Recovery
from ckpttool.transaction.lock import lock_directory
from ckpttool.transaction.recovery import owner_of_journal, recover_directory
from ckpttool.transaction.state_dir import state_dir_of, state_dir_of_stage
from ckpttool.transaction.trash import EmptiedTrash, empty


def prune_to_trash(directory: Path, keep: int = 2, **options: Any) -> Pruned:
    """Put all but the newest few into the trash."""
    request = PruneRequest(directory=str(directory), policy=Policy(keep_last=keep), depth="quick", **options)
    return prune(request, trash=True)


def empty_trash(directory: Path, **options: Any) -> EmptiedTrash:
    """Remove for good what lies in the trash of a directory."""
    return empty(str(directory), **options)


def begin_removal(directory: Path, *names: str) -> str:
    """Let a prune begin to remove a checkpoint of some files, and stop; return the path of its journal."""
    place, names = str(directory), tuple(sorted(names))
    group = Group(os.path.join(place, names[0]), names, contents(place, names))
    with operations.begin_stage(place, removal.removal_operations([group])) as begun:
        stage = Path(begun.path)
    (directory / names[0]).rename(stage / "0" / names[0])
    return str(stage / "journal.json")


def held_by_another(directory: Path) -> AbstractContextManager[None]:
    """Hold a directory, as another command does while it changes it."""
    return lock_directory(str(directory))


def wait_for_the_lock(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let a pin wait so long while another command changes the directory."""
    patch.setattr(pins, "LOCK_TIMEOUT", seconds)


def recover(directory: Path) -> Recovery:
    """Settle what was interrupted in a directory, as the next command that changes it does."""
    with lock_directory(str(directory)):
        return recover_directory(str(directory))


def overlook_accelerate(patch: pytest.MonkeyPatch) -> None:
    """Let nobody see that Accelerate names the checkpoints of a directory, as before that was known."""
    patch.setattr(state_dir, "_holds_random_states", lambda entry: False)
    patch.setattr(renaming_names, "_is_written_by_accelerate", lambda entry: False)


def pinned_in(directory: Path) -> list[str]:
    """Return the names that the list of pins in a directory has."""
    return list(parse_toml((directory / ".ckpttool-pins.toml").read_text())["pinned"])


def file_bytes(directory: Path) -> dict[str, bytes]:
    """Return what all files of a tree hold, by their paths in it."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def observed(real: Callable[..., Any], observe: Callable[[], object]) -> Callable[..., Any]:
    """Return a function after each call of which something is looked at."""

    def call(*arguments: Any, **options: Any) -> Any:
        result = real(*arguments, **options)
        observe()
        return result

    return call


def journals_of(directory: str | os.PathLike[str]) -> list[str]:
    """Return the journals of a directory that the next command has to settle."""
    return engine_of(os.fspath(directory)).journals()


def state_place(directory: str | os.PathLike[str]) -> tuple[str, str]:
    """Return where the stage, the lock and the trash of a directory go, and what their names end with."""
    return state_dir_of(os.fspath(directory))


def directory_of(journal: str) -> str:
    """Return the directory that a journal is for."""
    return state_dir_of_stage(os.path.dirname(journal)).directory


def other_owner_of(journal: str) -> str | None:
    """Return which other user a journal is of; None where it is this user's."""
    return owner_of_journal(journal)
