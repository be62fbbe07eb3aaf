"""Completes or reverts what a killed command left in a directory."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ckpttool.core.errors import AccessDenied
from ckpttool.transaction.engines import engine_of
from ckpttool.transaction.journal import OperationList, Recovery
from ckpttool.transaction.paths import shown
from ckpttool.transaction.settling import Settled
from ckpttool.transaction.staged_output import error_text


def recover_directory(directory: str) -> Recovery:
    """Recover all interrupted commands in a directory."""
    engine, recovery = engine_of(directory), Recovery()
    for path in engine.leftovers():
        try:
            found = engine.settle(path)
            # What can't be settled yet is left for the next command.
            if found is None or _tell(directory, path, *found, recovery):
                engine.discard(path, None if found is None else found[1])
        except OSError as error:
            reason = f"what was interrupted can't be recovered: {error_text(error)}"
            raise AccessDenied(path, reason) from error
    return recovery


_DOING = {
    "trash": "prune to the trash",
    "slim": "slimming",
    "restore": "undo",
    "rename": "rename",
}


def _tell(directory: str, path: str, listed: OperationList, settled: Settled, recovery: Recovery) -> bool:
    """Add what became of each checkpoint of a command; return whether all is settled."""
    paths = [shown(os.path.join(directory, os.path.basename(group.path))) for group in listed.groups]
    if listed.kind == "remove":
        recovery.finished += [paths[at] for at in settled.finished if at not in settled.failures]
        recovery.put_back += [paths[at] for at in settled.put_back if at not in settled.failures]
        recovery.failed |= {paths[number]: why for number, why in settled.failures.items()}
    else:
        _tell_moves(directory, listed, settled, paths, recovery)
    if settled.left is not None:
        recovery.failed[path] = settled.left
    if settled.failures or settled.left is not None:
        return False
    recovery.failed |= {paths[number]: why for number, why in settled.notes.items()}
    return True


def _tell_moves(
    directory: str, listed: OperationList, settled: Settled, paths: Sequence[str], recovery: Recovery
) -> None:
    """Add a sentence on each checkpoint of a command that doesn't remove."""
    doing = f"interrupted {_DOING[listed.kind]}"
    for number, path in enumerate(paths):
        if number in settled.failures:
            why = settled.failures[number]
            recovery.failed[path] = f"{doing}, which can be neither completed nor reverted: {why}"
        elif number in settled.finished or number not in settled.notes:
            result = "completed" if number in settled.finished else "reverted"
            recovery.moved.append(f"{path}: {doing}: {result}")
    if not paths:
        result = "completed" if listed.is_committed else "reverted"
        recovery.moved.append(f"{directory}: {doing}: {result}")
