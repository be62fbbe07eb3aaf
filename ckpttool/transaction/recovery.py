"""Completes or reverts what a killed command left in a directory."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ckpttool.core.errors import AccessDenied, DamagedCheckpoint
from ckpttool.storage import fs
from ckpttool.transaction.journal import OperationList, Recovery
from ckpttool.transaction.paths import shown
from ckpttool.transaction.settling import Settled, settle_stage
from ckpttool.transaction.staged_output import error_text
from ckpttool.transaction.stages import remove_stage, stages
from ckpttool.transaction.state_dir import StateDir, may_keep_state_beside, require_own, state_dir_beside


def recover_directory(directory: str) -> Recovery:
    """Recover all interrupted commands in a directory."""
    if fs.is_remote(directory):
        from ckpttool.transaction.store_directory import journals_in

        paths, recover = journals_in(directory), _recover_in_store
    else:
        paths, recover = stages(StateDir(directory)), _recover_stage
        try:
            paths += stages(state_dir_beside(directory))
        except AccessDenied:  # nobody else needs to be able to list the directory around one
            if may_keep_state_beside(directory):
                raise
    recovery = Recovery()
    for path in paths:
        try:
            recover(directory, path, recovery)
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


def _recover_stage(directory: str, path: str, recovery: Recovery) -> None:
    """Recover the interrupted command of a stage."""
    require_own(path, directory)
    found = settle_stage(directory, path)
    if found is not None and not _tell(directory, path, *found, recovery):
        return  # what is left is settled once that is out of the way
    if not remove_stage(path) and not (found is not None and found[1].notes):
        expected = "move them where they belong"
        raise DamagedCheckpoint(path, "files not listed in the journal", expected=expected)


def _recover_in_store(directory: str, path: str, recovery: Recovery) -> None:
    """Recover the interrupted command of a journal in a store."""
    from ckpttool.transaction.store_operations import settle_in_store

    found = settle_in_store(directory, os.path.basename(path))
    if found is not None:
        _tell(directory, path, *found, recovery)


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
