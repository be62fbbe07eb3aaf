"""Settles what a command that was killed has left: finished where it must be, else undone."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import partial

from ckpttool.errors import AccessDenied, CheckpointError, DamagedCheckpoint
from ckpttool.series.changing.copies import (
    inodes_of_moves,
    inodes_of_removal,
    leftover_names,
    moves_with_inodes,
    with_current_paths,
)
from ckpttool.series.changing.journal import (
    JOURNAL,
    Journal,
    Removal,
    read_journal,
    remove_stage,
    stages,
    stages_beside,
)
from ckpttool.series.changing.move_transaction import (
    MoveFailure,
    MoveTransaction,
    directory_changed_above,
    failure_text,
    finish_or_undo,
)
from ckpttool.series.changing.moves import Chain, Moves
from ckpttool.series.changing.ownership import open_own, require_own
from ckpttool.series.changing.stage import (
    RemovalStage,
    StalePlan,
    place_numbers,
    remove_directories,
    retry_while_busy,
    status_of,
    unlink_file,
)
from ckpttool.series.changing.state_dir import may_keep_state_beside, state_dir_of_stage
from ckpttool.series.files import Fingerprint, fingerprint, opened

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
    within = [os.path.join(directory, name) for name in stages(directory)]
    for stage in within + _stages_beside(directory):
        one = recover_stage(directory, stage)
        total.finished += one.finished
        total.put_back += one.put_back
        total.moved += one.moved
        total.failed |= one.failed
    return total


def _stages_beside(directory: str) -> list[str]:
    """Return the stages in the directory around one, which nobody else needs to be able to list."""
    try:
        return stages_beside(directory)
    except AccessDenied:
        if may_keep_state_beside(directory):
            raise
        return []


def recover_stage(directory: str, path: str) -> Recovery:
    """Settle what left a stage when it was interrupted. What it had not begun is left to the next plan."""
    settled = Recovery()
    journal_path = os.path.join(path, JOURNAL)
    require_own(path, directory)
    try:
        found = read_journal(journal_path, directory) if os.path.lexists(journal_path) else Journal(())
        found = with_current_paths(directory, found)
        if isinstance(found, Moves):
            if not _recover_moves(directory, path, found, settled):
                return settled
        else:
            _recover_removals(path, directory, found, settled)
        if not remove_stage(path) and not settled.failed:
            expected = "move them where they belong"
            raise DamagedCheckpoint(path, "files that no journal tells of", expected=expected)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise AccessDenied(path, f"what was interrupted can't be settled: {reason}") from error
    return settled


def _recover_moves(directory: str, path: str, moves: Moves, settled: Recovery) -> bool:
    """Make moves that were interrupted, or else take them back; tell whether their journal may go."""
    inodes = inodes_of_moves(directory, moves)
    moves = moves_with_inodes(moves, inodes)
    transaction = MoveTransaction(directory, state_dir_of_stage(path), path, moves, is_late=True)
    doing = f"a command had begun {_DOING[moves.kind]} when it was interrupted"
    if inodes.is_copy:
        doing += ", and the directory was copied as it was then"
    if inodes.now is None:
        _report_copy(directory, moves, doing, settled)
        return True
    if moves.chain is not None:
        return _recover_chain(transaction, moves.chain, doing, settled)
    try:
        failures: dict[str, MoveFailure] = {}
        try:
            done = {move.path for move in transaction.apply(failures)}
            why = ""
        except (StalePlan, CheckpointError, OSError) as failure:
            transaction.undo()
            done, why = set(), f" ({failure_text(failure)})"
            if not moves.moves:
                settled.moved.append(f"{directory}: {doing}; nothing was changed{why}")
    except (StalePlan, CheckpointError, OSError) as failure:
        reason = (
            f"{doing}, and it can be neither finished nor taken back: {failure_text(failure)}; see {path}"
        )
        settled.failed |= {move.path: reason for move in moves.moves} or {directory: reason}
        return False
    for move in moves.moves:
        reason = f" ({failures[move.path].text()})" if move.path in failures else why
        what = "that is finished now" if move.path in done else f"it is where it was{reason}"
        settled.moved.append(f"{move.path}: {doing}; {what}")
    if inodes.is_copy:
        _report_leftovers(directory, moves, done, doing, settled)
    return True


def _report_copy(directory: str, moves: Moves, doing: str, settled: Recovery) -> None:
    """Tell of a copy without the times of its files, in which nothing tells what is to be done."""
    before = len(settled.failed)
    for one in (moves, *(moves.chain.before if moves.chain is not None else ())):
        _report_leftovers(directory, one, (), doing, settled)
    if len(settled.failed) == before:
        settled.moved.append(f"{directory}: {doing}; nothing was changed here")


def _report_leftovers(
    directory: str, moves: Moves, done: Collection[str], doing: str, settled: Recovery
) -> None:
    """Tell what is under new names in a copy beside what hasn't moved: a part, or all of it once more."""
    for move in moves.moves:
        names = leftover_names(directory, replace(moves, moves=(move,)), done)
        if names:
            more = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
            why = f"{doing}; {names[0]}{more} stayed beside it: remove by hand what is there twice"
            settled.failed.setdefault(move.path, why)


def _recover_chain(transaction: MoveTransaction, chain: Chain, doing: str, settled: Recovery) -> bool:
    """Finish moves that follow each other, or take all of them back; tell whether their journal may go."""
    directory = transaction.directory
    paths = {move.path for one in (transaction.moves, *chain.before) for move in one.moves} or {directory}
    try:
        is_done, failures = finish_or_undo(transaction)
    except (StalePlan, CheckpointError, OSError) as failure:
        why = failure_text(failure)
        reason = f"{doing}, and it can be neither finished nor taken back: {why}; see {transaction.stage}"
        settled.failed |= dict.fromkeys(sorted(paths), reason)
        return False
    for path in sorted(paths):
        reason = f" ({failures[path].text()})" if path in failures else ""
        what = "that is finished now" if is_done else f"it is where it was{reason}"
        settled.moved.append(f"{path}: {doing}; {what}")
    above = None if is_done else directory_changed_above(transaction)
    if above is not None:
        why = f"a command was interrupted that changed names in {directory}, and is taken back there"
        settled.failed[above] = f"{why}; what names them here may have other names (undo {above})"
    return True


def _recover_removals(path: str, directory: str, journal: Journal, settled: Recovery) -> None:
    if not journal.removals:
        return
    with opened(directory) as home, open_own(directory, *os.path.split(path)) as inner:
        assert inner.descriptor is not None  # else nothing was begun
        stage = RemovalStage(path, home, inner.descriptor)
        shared = place_numbers(journal.removals)
        for number, removal in enumerate(journal.removals):
            # A directory of its own is what ckpttool gave single files, too, before they shared one.
            has_own = status_of(str(number), stage.inner) is not None
            _recover_removal(stage, number if has_own else shared[number], removal, settled)
        singles = [number for number, removal in enumerate(journal.removals) if removal.is_single]
        for number in singles:
            _clear_shared(stage, number, settled)


def _recover_removal(stage: RemovalStage, number: int, removal: Removal, settled: Recovery) -> None:
    if status_of(str(number), stage.inner) is None:
        return
    try:
        with opened(str(number), stage.inner) as place:
            if removal.is_single and status_of(removal.members[0], place) is None:
                return  # it wasn't put there yet, or has gone already
            inodes = inodes_of_removal(removal, place, stage.home)
            removal = replace(removal, contents=inodes.of(removal.contents))
            try:
                is_finished = _finish_if_begun(stage, place, removal)
            except StalePlan as change:
                raise StalePlan(_COPIED if inodes.now is None else str(change)) from change
        if not is_finished:
            stage.put_back(number, removal)
        elif not removal.is_single:
            retry_while_busy(partial(os.rmdir, str(number), dir_fd=stage.inner))
        (settled.finished if is_finished else settled.put_back).append(removal.path)
    except StalePlan as change:
        settled.failed[removal.path] = f"{change}; what is left of it lies in {stage.path}"
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        settled.failed[removal.path] = f"{reason}; what is left of it lies in {stage.path}"


def _clear_shared(stage: RemovalStage, number: int, settled: Recovery) -> None:
    """Remove a directory that single files were put in."""
    try:
        retry_while_busy(partial(os.rmdir, str(number), dir_fd=stage.inner))
    except FileNotFoundError:
        return
    except OSError as error:
        if not settled.failed:
            settled.failed[stage.path] = (error.strerror or str(error)).lower()


def _finish_if_begun(stage: RemovalStage, place: int, removal: Removal) -> bool:
    """Finish a removal that lost a part in its stage already, or is whole and still wanted.

    What is lost while nothing lies in the stage was never removed by us, and says nothing of the rest.

    Returns:
        Whether it is finished.
    """
    states = [_states(file, place, stage.home) for file in removal.contents.files]
    has_begun = any(status_of(name, place) is not None for name in removal.members)
    is_lost = not any(states) or (has_begun and not all(states))
    is_whole = all(True in found for found in states)
    is_wanted = has_begun and all(status_of(name, stage.home) for name in removal.survivors)
    if not is_lost and not (is_whole and is_wanted):
        return False
    _finish(stage, place, removal)
    return True


def _states(file: Fingerprint, *directories: int) -> list[bool]:
    """Return for each directory that has a file of that name whether it is the one that is meant."""
    return [is_same for one in directories if (is_same := _is_there(file, one)) is not None]


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
        if files and all(_is_there(file, stage.home) for file in files):
            if status_of(name, place) is not None:
                os.unlink(name, dir_fd=place)  # put back already, but for this second name
            retry_while_busy(partial(os.rename, name, name, src_dir_fd=stage.home, dst_dir_fd=place))
    for file in removal.contents.files:
        try:
            unlink_file(place, file)
        except FileNotFoundError:  # its directory went before
            continue
    remove_directories(place, removal.contents)
