"""Moves checkpoints to other names, to the trash or out of it, so that a kill at any moment loses nothing.

A journal is written first; then all get their new names, pointers are made to say them, the old names go, and
a record is written from which it can be undone. At no moment is a checkpoint whole in no place. What a kill
left is done to its end by ``recover_moves``, or else taken back, when ``recovery`` asks for it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import NamedTuple

from ckpttool.core.errors import AccessDenied, CheckpointError, from_os_error
from ckpttool.io import fs
from ckpttool.io.atomic import sync_directory
from ckpttool.transaction.copies import inodes_of_moves, leftover_names
from ckpttool.transaction.files import NameTaken, StalePlan
from ckpttool.transaction.history import (
    add_to_record,
    make_room,
    read_record,
    remove_from_record,
    require_own_trash,
    state_dirs,
    tidy,
)
from ckpttool.transaction.journal import (
    Chain,
    Move,
    Moves,
    Recovery,
    begin_journal,
    moves_document,
    remove_stage,
    require_system,
    rewrite_journal,
)
from ckpttool.transaction.move_steps import (
    MoveDirs,
    has_vanished,
    is_at_source,
    is_at_target,
    link_new,
    open_move_dirs,
    part_names,
    place_successors,
    relink_old,
    require_movable,
    unlink_new,
    unlink_old,
)
from ckpttool.transaction.pointer_files import (
    are_pointers_rewritten,
    require_pointers,
    restore_pointers,
    rewrite_pointers,
)
from ckpttool.transaction.state_dir import StateDir, state_dir_of, state_dir_of_stage
from ckpttool.transaction.stored_journals import read_journal


class MoveFailure(NamedTuple):
    """Why a checkpoint is where it was.

    Attributes:
        problem: What went wrong.
        since_plan: Whether something has changed since the plan was made.
        file: The name of the file that it went wrong at, if that is known.
        culprit: The name of the checkpoint that it went wrong with, if not with this one.
    """

    problem: str
    since_plan: bool = False
    file: str | None = None
    culprit: str | None = None

    def text(self, planned: str = "the plan was made") -> str:
        """Return it in words; ``planned`` is how the user knows the moment at which the plan was made."""
        text = f"{self.problem} since {planned}" if self.since_plan else self.problem
        if self.file is not None:
            text += f": {self.file}"
        return text if self.culprit is None else f"{self.culprit}: {text}; all of them are moved, or none"


@dataclass(slots=True)
class MoveOutcome:
    """What became of moves, by the paths that the user knows.

    Attributes:
        moved: What goes by its new names now.
        failures: Why some are where they were. Where pointers go with them, the others are then, too.
        gone: What was removed by somebody else before.
    """

    moved: list[str] = field(default_factory=list)
    failures: dict[str, MoveFailure] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)

    @property
    def failed(self) -> dict[str, str]:
        """Return the failures in words."""
        return {path: failure.text() for path, failure in self.failures.items()}


def feasible_moves(directory: str, moves: Moves, state_dir: StateDir, outcome: MoveOutcome) -> Moves:
    """Return what of some moves can be made and undone; the outcome is told why the rest can't.

    Of a renaming, and where pointers go with them, that is all of them, or nothing.
    """
    require_system(directory, "moved")
    if {moves.source, moves.target} - {directory, state_dir.trash_place(moves.identity)}:
        raise ValueError(f"{moves.source} -> {moves.target}: neither {directory} nor its trash")
    outcome.failures |= dict(move_obstacles(directory, moves))
    if moves.kind == "trash" and outcome.failures:
        with open_move_dirs(directory, moves, is_planned=True) as dirs:
            outcome.gone += [
                move.path
                for move in moves.moves
                if move.path in outcome.failures and has_vanished(dirs, move)
            ]
        for path in outcome.gone:
            del outcome.failures[path]
    stuck = {*outcome.failures, *outcome.gone}
    feasible = replace(moves, moves=tuple(move for move in moves.moves if move.path not in stuck))
    if moves.is_bound:
        try:
            require_pointers(directory, moves)
        except (StalePlan, OSError) as failure:
            outcome.failures |= {move.path: move_failure(failure) for move in feasible.moves}
            if not moves.moves:
                outcome.failures[directory] = move_failure(failure)
    if moves.is_indivisible and outcome.failures:
        feasible = replace(moves, moves=(), rewrites=(), relinks=())
    if not feasible.is_empty:
        require_own_trash(state_dir)
        read_record(directory, state_dir, moves.identity)  # what can't be recorded isn't begun
    return feasible


def move_obstacles(directory: str, moves: Moves) -> Iterator[tuple[str, MoveFailure]]:
    """Yield why some checkpoints can't be moved, by path; nothing is changed."""
    try:
        with open_move_dirs(directory, moves, is_planned=True) as dirs:
            for move in moves.moves:
                try:
                    require_movable(dirs, move)
                except (StalePlan, OSError) as failure:
                    yield move.path, move_failure(failure)
    except (FileNotFoundError, NotADirectoryError):  # the trash has gone, or a link stands in its place
        yield from ((move.path, MoveFailure("it has vanished")) for move in moves.moves)


@dataclass(frozen=True, slots=True)
class MoveTransaction:
    """One journal of moves, on its way forward or back; both may be begun anywhere in between.

    Attributes:
        directory: The directory of the journal.
        state_dir: Where its stage and its trash lie.
        stage: The path of the directory that holds the journal.
        moves: What it says.
        is_late: Whether it was interrupted: others may have changed pointers meanwhile.
    """

    directory: str
    state_dir: StateDir
    stage: str
    moves: Moves
    is_late: bool = False

    @property
    def _step(self) -> str:
        """Return the name that the record has for what these moves are undone by."""
        earlier = self.moves.earlier
        return f"{self.stage}.{len(earlier)}" if earlier else self.stage

    def apply(self, failures: dict[str, MoveFailure]) -> list[Move]:
        """Make the moves, and note how they are undone; return those that were made.

        Args:
            failures: Gets why others were not; where pointers go with them, the first failure is raised.
        """
        moves = self.moves
        make_room(self.directory, self.state_dir, moves)
        with open_move_dirs(self.directory, moves) as dirs:
            come = [move for move in moves.moves if self._try_step(link_new, dirs, move, failures)]
            self._sync()  # the new names are on the disk before anything says them
            come = [move for move in come if self._try_step(place_successors, dirs, move, failures)]
            rewrite_pointers(self.directory, moves, self.stage, is_late=self.is_late)
            done = [move for move in come if self._try_step(unlink_old, dirs, move, failures)]
            self._sync()
            # Recorded last: a kill before it leaves the journal, from which recovery records it.
            made = replace(moves, moves=tuple(done), chain=None)
            add_to_record(self.directory, self.state_dir, made, self._step, dirs.target)
        tidy(self.state_dir, moves.identity)
        return done

    def _try_step(
        self,
        step: Callable[[MoveDirs, Move], None],
        dirs: MoveDirs,
        move: Move,
        failures: dict[str, MoveFailure],
    ) -> bool:
        """Do a step; if it can't be done, either all moves fail, or this one is taken back."""
        try:
            step(dirs, move)
        except (StalePlan, OSError) as failure:
            if self.moves.is_indivisible:
                failures[move.path] = move_failure(failure, names_file=True)
                raise
            relink_old(dirs, move)
            unlink_new(dirs, move)
            failures[move.path] = move_failure(failure)
            return False
        return True

    def undo(self) -> None:
        """Take the moves back, as far as they were made."""
        make_room(self.directory, self.state_dir, self.moves)
        with open_move_dirs(self.directory, self.moves) as dirs:
            for move in self.moves.moves:
                relink_old(dirs, move)
            self._sync()
            restore_pointers(self.directory, self.moves, self.stage)
            for move in self.moves.moves:
                unlink_new(dirs, move)
            self._sync()
            remove_from_record(
                self.directory, self.state_dir, replace(self.moves, chain=None), self._step, dirs.source
            )
        tidy(self.state_dir, self.moves.identity)

    def _sync(self) -> None:
        places = {
            os.path.dirname(os.path.join(place, name)) or os.curdir
            for move in self.moves.moves
            for names in move.members
            for place, name in zip((self.moves.source, self.moves.target), names, strict=True)
        }
        for place in sorted(places):
            sync_directory(place)


# Applying moves -----------------------------------------------------------------------------------


def apply_moves(directory: str, moves: Moves, state_dir: StateDir | None = None) -> MoveOutcome:
    """Move checkpoints; one that has changed since the plan was made, or has something in its way, stays.

    Of a renaming, and where pointers go with them, all are moved or none.

    Args:
        directory: The directory of the journal; it is locked.
        moves: What goes where.
        state_dir: Where its trash lies, if that is not where one would be made now.
    """
    outcome = MoveOutcome()
    state_dir = state_dir_of(directory) if state_dir is None else state_dir
    feasible = feasible_moves(directory, moves, state_dir, outcome)
    if feasible.is_empty:
        return outcome
    stage = begin_journal(directory, state_dir, moves_document(feasible, directory), "moved")
    try:
        _apply_or_undo(MoveTransaction(directory, state_dir, stage, feasible), outcome)
    except KeyboardInterrupt:
        _settle(directory, stage)
        raise
    return outcome


def _settle(directory: str, stage: str) -> None:
    """Make moves that were interrupted, or take them back, as recovery does later."""
    moves = read_journal(stage, directory)
    try:
        if isinstance(moves, Moves) and recover_moves(directory, stage, moves, Recovery()):
            remove_stage(stage)
    except OSError as error:
        raise from_os_error(error, stage) from error


def _apply_or_undo(transaction: MoveTransaction, outcome: MoveOutcome) -> None:
    try:
        try:
            done = transaction.apply(outcome.failures)
        except (StalePlan, CheckpointError, OSError) as failure:
            transaction.undo()
            outcome.failures |= failures_by_path(transaction, outcome.failures, failure)
        else:
            outcome.moved += [move.path for move in done]
        remove_stage(transaction.stage)
    except (StalePlan, CheckpointError, OSError) as failure:
        reason = f"{failure_text(failure)}; the next command that changes it recovers"
        raise AccessDenied(transaction.directory, reason) from failure


class ChainedMoves:
    """Moves that follow each other in a directory, which is locked; used as a context.

    Whoever leaves it before the last of them were made has all of them taken back.
    """

    def __init__(self, directory: str, state_dir: StateDir | None = None) -> None:
        """Begin nothing yet.

        Args:
            directory: The directory of the journal.
            state_dir: Where its trash lies, if that is not where one would be made now.
        """
        self._directory = directory
        self._state_dir = state_dir_of(directory) if state_dir is None else state_dir
        self._stage: str | None = None
        self._made: tuple[Moves, ...] = ()

    def __enter__(self) -> ChainedMoves:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stage is not None and fs.lexists(self._stage):
            _settle(self._directory, self._stage)

    @property
    def is_begun(self) -> bool:
        """Tell whether moves were made, and others are to follow."""
        return self._stage is not None

    def make(self, moves: Moves, *, has_more: bool) -> MoveOutcome:
        """Make the next moves; where one can't be made, take back all that were made before.

        The only ones are made as ``apply_moves`` does.

        Args:
            moves: What goes where.
            has_more: Whether others are to follow.
        """
        if self._stage is None and not has_more:
            return apply_moves(self._directory, moves, self._state_dir)
        outcome = MoveOutcome()
        try:
            self._make(moves, has_more, outcome)
        except CheckpointError as failure:
            if self._stage is None:  # nothing was begun
                raise
            paths = [move.path for move in moves.moves] or [self._directory]
            outcome.failures |= dict.fromkeys(paths, MoveFailure(failure.reason))
        if outcome.failures:
            self.undo()
        elif not has_more:
            self.end()
        return outcome

    def _make(self, moves: Moves, has_more: bool, outcome: MoveOutcome) -> None:
        feasible = feasible_moves(self._directory, moves, self._state_dir, outcome)
        if outcome.failures or feasible.is_empty:
            return
        now = replace(feasible, chain=Chain(self._made, has_more))
        if self._stage is None:
            document = moves_document(now, self._directory)
            self._stage = begin_journal(self._directory, self._state_dir, document, "moved")
        transaction = MoveTransaction(self._directory, self._state_dir, self._stage, now)
        try:
            if self._made:
                rewrite_journal(self._directory, self._stage, moves_document(now, self._directory))
            done = transaction.apply(outcome.failures)
        except (StalePlan, CheckpointError, OSError) as failure:
            outcome.failures |= failures_by_path(transaction, outcome.failures, failure)
        else:
            outcome.moved += [move.path for move in done]
        self._made = (replace(now, chain=None), *self._made)

    def undo(self) -> None:
        """Take back all that was made."""
        if self._stage is not None and self._made:
            now = replace(self._made[0], chain=Chain(self._made[1:], has_more=True))
            transaction = MoveTransaction(self._directory, self._state_dir, self._stage, now)
            with self._left_to_recovery():
                undo_chain(transaction)
        self.end()

    def end(self) -> None:
        """Let all that was made stay."""
        if self._stage is not None:
            with self._left_to_recovery():
                remove_stage(self._stage)
        self._stage, self._made = None, ()

    @contextmanager
    def _left_to_recovery(self) -> Iterator[None]:
        try:
            yield
        except (StalePlan, CheckpointError, OSError) as failure:
            self._stage = None
            reason = f"{failure_text(failure)}; the next command that changes it recovers"
            raise AccessDenied(self._directory, reason) from failure


# What a kill left ------------------------------------------------------------------------------------

_DOING = {
    "trash": "to put it into the trash",
    "restore": "to put it back",
    "rename": "to rename it",
}


def partially_moved_names(directory: str, moves: Moves) -> set[str]:
    """Return the names in a directory that belong to a checkpoint that is elsewhere, or whole nowhere."""
    names: set[str] = set()
    moves = inodes_of_moves(directory, moves).of_moves(moves)
    try:
        with open_move_dirs(directory, moves) as dirs:
            # Between its two names a checkpoint has both: its pointers tell which of them counts.
            turned = are_pointers_rewritten(directory, moves)
            for move in moves.moves:
                here, there = is_at_source(dirs, move), is_at_target(dirs, move)
                is_new = there and (turned or not here)
                if moves.source == directory and (is_new or not here):
                    names |= part_names(dirs.source, move, 0)
                if moves.target == directory and not is_new:
                    names |= part_names(dirs.target, move, 1)
            for rewrite in moves.rewrites:
                if (rewrite.after if turned else rewrite.before) is None:
                    names.add(rewrite.name)
    except OSError:  # the trash that it was for is not there yet, or not any more
        return names
    return names


def undo_chain(transaction: MoveTransaction) -> None:
    """Take back moves, and all that went before them; the journal says after each what is left to do."""
    while True:
        transaction.undo()
        earlier = transaction.moves.earlier
        if not earlier:
            return
        moves = replace(earlier[0], chain=Chain(earlier[1:], has_more=True))
        rewrite_journal(
            transaction.directory, transaction.stage, moves_document(moves, transaction.directory)
        )
        transaction = replace(transaction, moves=moves)


def finish_or_undo(transaction: MoveTransaction) -> tuple[set[str] | None, Mapping[str, MoveFailure]]:
    """Make moves that were interrupted, or else take them back, with all of the row that they end.

    Returns:
        What was made, by path, None if all was taken back; and why the rest was not made, as far as known.
    """
    moves, failures = transaction.moves, dict[str, MoveFailure]()
    if moves.chain is None or not moves.chain.has_more:
        try:
            done = {move.path for move in transaction.apply(failures)}
        except (StalePlan, CheckpointError, OSError) as failure:
            failures |= failures_by_path(transaction, failures, failure)
        else:
            if moves.chain is None:
                return done, failures
            if not failures:
                return {move.path for one in (moves, *moves.earlier) for move in one.moves}, failures
    undo_chain(transaction)
    return None, failures


def directory_changed_above(transaction: MoveTransaction) -> str | None:
    """Return the directory above, if the same command changed there what names checkpoints of this one."""
    above = os.path.dirname(fs.realpath(transaction.directory))
    for state_dir in state_dirs(above):
        with suppress(CheckpointError):  # another's: nothing of ours is in it
            if read_record(above, state_dir, transaction.moves.identity) is not None:
                return above
    return None


def recover_moves(directory: str, path: str, moves: Moves, recovery: Recovery) -> bool:
    """Make moves that were interrupted, or else take them back; tell whether their journal may go."""
    inodes = inodes_of_moves(directory, moves)
    moves = inodes.of_moves(moves)
    doing = f"a command had begun {_DOING[moves.kind]} when it was interrupted"
    if inodes.is_copy:
        doing += ", and the directory was copied as it was then"
    if inodes.now is None:  # nothing tells which file is which, and so what is to be done
        before = len(recovery.failed)
        for one in (moves, *moves.earlier):
            _report_leftovers(directory, one, (), doing, recovery)
        if len(recovery.failed) == before:
            recovery.moved.append(f"{directory}: {doing}; nothing was changed here")
        return True
    transaction = MoveTransaction(directory, state_dir_of_stage(path), path, moves, is_late=True)
    paths = list(dict.fromkeys(move.path for one in (moves, *moves.earlier) for move in one.moves))
    try:
        done, failures = finish_or_undo(transaction)
    except (StalePlan, CheckpointError, OSError) as failure:
        way_out = (
            "; move it elsewhere and run this again" if isinstance(failure, NameTaken) else f"; see {path}"
        )
        reason = f"{doing}, and it can be neither finished nor taken back: {failure_text(failure)}{way_out}"
        recovery.failed |= dict.fromkeys(paths or [directory], reason)
        return False
    for moved in paths:
        why = f" ({failures[moved].text()})" if moved in failures else ""
        is_done = done is not None and moved in done
        result = "that is finished now" if is_done else f"it is where it was{why}"
        recovery.moved.append(f"{moved}: {doing}; {result}")
    if done is None and not paths:
        why = f" ({failures[directory].text()})" if directory in failures else ""
        recovery.moved.append(f"{directory}: {doing}; nothing was changed{why}")
    if moves.chain is None:
        if inodes.is_copy:
            _report_leftovers(directory, moves, done or (), doing, recovery)
    elif done is None and (above := directory_changed_above(transaction)) is not None:
        why = f"a command was interrupted that changed names in {directory}, and is taken back there"
        recovery.failed[above] = f"{why}; what names them here may have other names (undo {above})"
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


# Why something was not moved ----------------------------------------------------------------------


def failures_by_path(
    transaction: MoveTransaction, failures: Mapping[str, MoveFailure], error: Exception
) -> dict[str, MoveFailure]:
    """Return why no move was made, by path: first of what failed itself, then of what goes with it."""
    paths = [move.path for move in transaction.moves.moves]
    culprits = {path: failures[path] for path in paths if path in failures}
    if len(culprits) != 1:
        return dict.fromkeys(paths or [transaction.directory], move_failure(error, names_file=True))
    [(culprit, failure)] = culprits.items()
    others = failure._replace(culprit=os.path.basename(culprit))
    return {culprit: failure} | {path: others for path in paths if path != culprit}


def move_failure(error: Exception, *, names_file: bool = False) -> MoveFailure:
    """Return why something could not be moved, with the file that it failed at if that is asked for."""
    if isinstance(error, OSError):
        problem = from_os_error(error, "").reason
        if error.errno == errno.EXDEV:
            problem = "its new place is on another file system"
        has_name = names_file and isinstance(error.filename, str) and error.filename
        return MoveFailure(problem, file=os.path.basename(error.filename) if has_name else None)
    if isinstance(error, StalePlan):
        return MoveFailure(error.problem, error.since_plan)
    return MoveFailure(error.reason if isinstance(error, CheckpointError) else str(error))


def failure_text(error: Exception) -> str:
    """Return why something could not be moved, in a few words."""
    return move_failure(error).text()
