"""Settles what a command that was killed has left: finished where it must be, else undone."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace

from ckpttool.core.errors import AccessDenied, DamagedCheckpoint
from ckpttool.io import fs
from ckpttool.transaction.journal import Moves, Recovery, remove_places, remove_stage, stages
from ckpttool.transaction.move_transaction import recover_moves
from ckpttool.transaction.operations import open_stage
from ckpttool.transaction.paths import shown
from ckpttool.transaction.staged_output import error_text
from ckpttool.transaction.state_dir import (
    StateDir,
    may_keep_state_beside,
    open_own,
    require_own,
    state_dir_beside,
)
from ckpttool.transaction.stored_journals import read_journal


def recover_directory(directory: str) -> Recovery:
    """Settle all that was interrupted in a directory."""
    if fs.is_remote(directory):
        from ckpttool.transaction.store_removal import recover_store

        return recover_store(directory)
    total = Recovery()
    paths = stages(StateDir(directory))
    try:
        paths += stages(state_dir_beside(directory))
    except AccessDenied:  # nobody else needs to be able to list the directory around one
        if may_keep_state_beside(directory):
            raise
    for path in paths:
        recovery = recover_stage(directory, path)
        total.finished += recovery.finished
        total.put_back += recovery.put_back
        total.moved += recovery.moved
        total.failed |= recovery.failed
    return total


def recover_stage(directory: str, path: str) -> Recovery:
    """Settle what left a stage when it was interrupted. What it had not begun is left to the next plan."""
    recovery = Recovery()
    require_own(path, directory)
    try:
        journal = read_journal(path, directory)
        if isinstance(journal, Moves):
            moves = journal.with_each(lambda move: replace(move, path=_rebased(move.path, directory)))
            if not recover_moves(directory, path, moves, recovery):
                return recovery
        elif journal is not None:
            groups = tuple(one._replace(path=_rebased(one.path, directory)) for one in journal.groups)
            with open_stage(directory, path, journal._replace(groups=groups)) as stage:
                stage.recover(recovery)
        else:
            with open_own(directory, *os.path.split(path)) as inner, suppress(OSError):  # it is told below
                remove_places(inner)
        if not remove_stage(path) and not recovery.failed:
            expected = "move them where they belong"
            raise DamagedCheckpoint(path, "files that no journal tells of", expected=expected)
    except OSError as error:
        reason = f"what was interrupted can't be recovered: {error_text(error)}"
        raise AccessDenied(path, reason) from error
    return recovery


def _rebased(path: str, directory: str) -> str:
    """Return the path that a checkpoint has in a directory as that is called now."""
    return shown(os.path.join(directory, os.path.basename(path)))
