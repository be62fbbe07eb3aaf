"""Settles what a command that was killed has left: finished where it must be, else undone."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from ckpttool.errors import AccessDenied, CheckpointError, DamagedCheckpoint
from ckpttool.transaction.copies import inodes_of_moves, inodes_of_removal, leftover_names, moves_with_inodes
from ckpttool.transaction.files import Fingerprint, fingerprint, opened
from ckpttool.transaction.journal import (
    JOURNAL,
    Journal,
    Removal,
    read_journal,
    remove_stage,
    stages,
    stages_beside,
)
from ckpttool.transaction.move_transaction import (
    MoveFailure,
    MoveTransaction,
    directory_changed_above,
    failure_text,
    finish_or_undo,
)
from ckpttool.transaction.moves import Chain, Moves
from ckpttool.transaction.ownership import open_own, require_own
from ckpttool.transaction.paths import shown
from ckpttool.transaction.stage import (
    RemovalStage,
    StalePlan,
    error_text,
    place_numbers,
    remove_directories,
    status_of,
    unlink_file,
)
from ckpttool.transaction.state_dir import may_keep_state_beside, state_dir_of_stage
from ckpttool.wire.directories import retry_while_busy

_DOING = {
    "trash": "to put it into the trash",
    "restore": "to put it back",
    "rename": "to rename it",
}

_COPIED = (
    "a prune was interrupted while it removed it, and the directory was copied as it was then, "
    "without the times of its files"
)


@dataclass(slots=True)
class Recovery:
    """What became of what was interrupted, by path.

    Attributes:
        finished: What was removed.
        put_back: What was to be removed, and is back.
        moved: What became of what was on its way elsewhere, each in a sentence.
        failed: What could neither be finished nor put back, with the reason.
    """

    finished: list[str] = field(default_factory=list)
    put_back: list[str] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


def recover_directory(directory: str) -> Recovery:
    """Settle all that was interrupted in a directory."""
    total = Recovery()
    paths = [os.path.join(directory, name) for name in stages(directory)]
    try:
        paths += stages_beside(directory)
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
    journal_path = os.path.join(path, JOURNAL)
    require_own(path, directory)
    try:
        journal = read_journal(journal_path, directory) if os.path.lexists(journal_path) else Journal(())
        if isinstance(journal, Moves):
            if not _recover_moves(directory, path, _rebased_moves(journal, directory), recovery):
                return recovery
        else:
            removals = [
                replace(removal, path=_rebased(removal.path, directory)) for removal in journal.removals
            ]
            if removals:
                _recover_removals(path, directory, removals, recovery)
        if not remove_stage(path) and not recovery.failed:
            expected = "move them where they belong"
            raise DamagedCheckpoint(path, "files that no journal tells of", expected=expected)
    except OSError as error:
        reason = f"what was interrupted can't be settled: {error_text(error)}"
        raise AccessDenied(path, reason) from error
    return recovery


def _rebased(path: str, directory: str) -> str:
    """Return the path that a checkpoint has in a directory as that is called now."""
    return shown(os.path.join(directory, os.path.basename(path)))


def _rebased_moves(moves: Moves, directory: str) -> Moves:
    chain = moves.chain
    if chain is not None:
        chain = Chain(tuple(_rebased_moves(earlier, directory) for earlier in chain.before), chain.has_more)
    rebased = tuple(replace(move, path=_rebased(move.path, directory)) for move in moves.moves)
    return replace(moves, moves=rebased, chain=chain)


# Moves ---------------------------------------------------------------------------------------------


def _recover_moves(directory: str, path: str, moves: Moves, recovery: Recovery) -> bool:
    """Make moves that were interrupted, or else take them back; tell whether their journal may go."""
    inodes = inodes_of_moves(directory, moves)
    moves = moves_with_inodes(moves, inodes)
    transaction = MoveTransaction(directory, state_dir_of_stage(path), path, moves, is_late=True)
    doing = f"a command had begun {_DOING[moves.kind]} when it was interrupted"
    if inodes.is_copy:
        doing += ", and the directory was copied as it was then"
    if inodes.now is None:  # nothing tells which file is which, and so what is to be done
        before = len(recovery.failed)
        for one in (moves, *(moves.chain.before if moves.chain is not None else ())):
            _report_leftovers(directory, one, (), doing, recovery)
        if len(recovery.failed) == before:
            recovery.moved.append(f"{directory}: {doing}; nothing was changed here")
        return True
    if moves.chain is not None:
        return _recover_chain(transaction, moves.chain, doing, recovery)
    try:
        failures: dict[str, MoveFailure] = {}
        try:
            done = {move.path for move in transaction.apply(failures)}
            why = ""
        except (StalePlan, CheckpointError, OSError) as failure:
            transaction.undo()
            done, why = set(), f" ({failure_text(failure)})"
            if not moves.moves:
                recovery.moved.append(f"{directory}: {doing}; nothing was changed{why}")
    except (StalePlan, CheckpointError, OSError) as failure:
        reason = (
            f"{doing}, and it can be neither finished nor taken back: {failure_text(failure)}; see {path}"
        )
        recovery.failed |= {move.path: reason for move in moves.moves} or {directory: reason}
        return False
    for move in moves.moves:
        reason = f" ({failures[move.path].text()})" if move.path in failures else why
        result = "that is finished now" if move.path in done else f"it is where it was{reason}"
        recovery.moved.append(f"{move.path}: {doing}; {result}")
    if inodes.is_copy:
        _report_leftovers(directory, moves, done, doing, recovery)
    return True


def _report_leftovers(
    directory: str, moves: Moves, done: Collection[str], doing: str, recovery: Recovery
) -> None:
    """Tell what is under new names in a copy beside what hasn't moved: a part, or all of it once more."""
    for move in moves.moves:
        names = leftover_names(directory, replace(moves, moves=(move,)), done)
        if names:
            more = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
            why = f"{doing}; {names[0]}{more} stayed beside it: remove by hand what is there twice"
            recovery.failed.setdefault(move.path, why)


def _recover_chain(transaction: MoveTransaction, chain: Chain, doing: str, recovery: Recovery) -> bool:
    """Finish moves that follow each other, or take all of them back; tell whether their journal may go."""
    directory = transaction.directory
    paths = {move.path for one in (transaction.moves, *chain.before) for move in one.moves} or {directory}
    try:
        is_done, failures = finish_or_undo(transaction)
    except (StalePlan, CheckpointError, OSError) as failure:
        why = failure_text(failure)
        reason = f"{doing}, and it can be neither finished nor taken back: {why}; see {transaction.stage}"
        recovery.failed |= dict.fromkeys(sorted(paths), reason)
        return False
    for path in sorted(paths):
        reason = f" ({failures[path].text()})" if path in failures else ""
        result = "that is finished now" if is_done else f"it is where it was{reason}"
        recovery.moved.append(f"{path}: {doing}; {result}")
    above = None if is_done else directory_changed_above(transaction)
    if above is not None:
        why = f"a command was interrupted that changed names in {directory}, and is taken back there"
        recovery.failed[above] = f"{why}; what names them here may have other names (undo {above})"
    return True


# Removals ------------------------------------------------------------------------------------------


def _recover_removals(path: str, directory: str, removals: Sequence[Removal], recovery: Recovery) -> None:
    with opened(directory) as place, open_own(directory, *os.path.split(path)) as inner:
        assert inner.descriptor is not None  # else nothing was begun
        stage = RemovalStage(path, place, inner.descriptor)
        shared = place_numbers(removals)
        for number, removal in enumerate(removals):
            # A directory of its own is what ckpttool gave single files, too, before they shared one.
            has_own = status_of(str(number), stage.inner) is not None
            _recover_removal(stage, number if has_own else shared[number], removal, recovery)
        for number, removal in enumerate(removals):
            if removal.is_single:
                try:
                    retry_while_busy(partial(os.rmdir, str(number), dir_fd=stage.inner))
                except FileNotFoundError:
                    continue
                except OSError as error:
                    if not recovery.failed:
                        recovery.failed[stage.path] = error_text(error)


def _recover_removal(stage: RemovalStage, number: int, removal: Removal, recovery: Recovery) -> None:
    if status_of(str(number), stage.inner) is None:
        return
    try:
        with opened(str(number), stage.inner) as place:
            if removal.is_single and status_of(removal.members[0], place) is None:
                return  # it wasn't put there yet, or has gone already
            inodes = inodes_of_removal(removal, place, stage.directory)
            removal = replace(removal, contents=inodes.of(removal.contents))
            try:
                is_finished = _is_to_finish(stage, place, removal)
                if is_finished:
                    _finish(stage, place, removal)
            except StalePlan as change:
                raise StalePlan(_COPIED if inodes.now is None else str(change)) from change
        if not is_finished:
            stage.put_back(number, removal)
        elif not removal.is_single:
            retry_while_busy(partial(os.rmdir, str(number), dir_fd=stage.inner))
        (recovery.finished if is_finished else recovery.put_back).append(removal.path)
    except StalePlan as change:
        recovery.failed[removal.path] = f"{change}; what is left of it lies in {stage.path}"
    except OSError as error:
        recovery.failed[removal.path] = f"{error_text(error)}; what is left of it lies in {stage.path}"


def _is_to_finish(stage: RemovalStage, place: int, removal: Removal) -> bool:
    """Tell whether a removal lost a part in its stage already, or is whole and still wanted.

    What is lost while nothing lies in the stage was never removed by us, and says nothing of the rest.
    """
    # For each file, of the stage and of its old place, those that have the name: whether it is this file.
    states = [
        [is_same for one in (place, stage.directory) if (is_same := _is_there(file, one)) is not None]
        for file in removal.contents.files
    ]
    has_begun = any(status_of(name, place) is not None for name in removal.members)
    is_lost = not any(states) or (has_begun and not all(states))
    is_whole = all(True in state for state in states)
    is_wanted = has_begun and all(status_of(name, stage.directory) for name in removal.survivors)
    return is_lost or (is_whole and is_wanted)


def _is_there(file: Fingerprint, directory: int) -> bool | None:
    """Tell whether a file is the one that is meant; None where there is no such name."""
    parent, name = os.path.split(file.path)
    try:
        with opened(parent, directory) as inner:
            status = status_of(name, inner)
    except OSError:  # the directory around it is gone
        return None
    return status and fingerprint(file.path, status).identity == file.identity


def _finish(stage: RemovalStage, place: int, removal: Removal) -> None:
    """Rename away what is still in its place, unless it is another file by now, and unlink all."""
    for name in removal.members:
        files = [file for file in removal.contents.files if file.path.split(os.sep)[0] == name]
        if files and all(_is_there(file, stage.directory) for file in files):
            if status_of(name, place) is not None:
                os.unlink(name, dir_fd=place)  # put back already, but for this second name
            retry_while_busy(partial(os.rename, name, name, src_dir_fd=stage.directory, dst_dir_fd=place))
    for file in removal.contents.files:
        try:
            unlink_file(place, file)
        except FileNotFoundError:  # its directory went before
            continue
    remove_directories(place, removal.contents)
