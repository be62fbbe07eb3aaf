"""Moves checkpoints to other names, to the trash or out of it, so that a kill at any moment loses nothing.

A journal is written first; then all get their new names, pointers are made to say them, the old names go, and
a record is written from which it can be undone. At no moment is a checkpoint whole in no place. What a kill
left is done to its end by ``recovery``, or else taken back.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from ckpttool.errors import AccessDenied, CheckpointError, from_os_error
from ckpttool.transaction.copies import inodes_of_moves, moves_with_inodes
from ckpttool.transaction.history import add_to_record, read_record, remove_from_record, state_dirs
from ckpttool.transaction.journal import JOURNAL, require_system
from ckpttool.transaction.move_steps import (
    MoveDirs,
    has_vanished,
    is_at_source,
    is_at_target,
    link_new,
    open_move_dirs,
    part_names,
    relink_old,
    require_movable,
    unlink_new,
    unlink_old,
)
from ckpttool.transaction.moves import Chain, Move, Moves, dumps, trash_path
from ckpttool.transaction.ownership import MAX_BYTES, open_own
from ckpttool.transaction.pointer_files import (
    are_pointers_rewritten,
    require_pointers,
    restore_pointers,
    rewrite_pointers,
)
from ckpttool.transaction.stage import StalePlan
from ckpttool.transaction.state_dir import StateDir
from ckpttool.transaction.trash_directories import make_room, require_own_trash, tidy
from ckpttool.wire.atomic import sync_directory, write_in


@dataclass(frozen=True, slots=True)
class MoveFailure:
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

    Where pointers go with them, that is all of them, or nothing.
    """
    require_system(directory, "moved")
    if {moves.source, moves.target} - {directory, trash_path(state_dir, moves.identity)}:
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
        if outcome.failures:
            feasible = replace(moves, moves=(), rewrites=(), relinks=())
    if feasible.moves or feasible.rewrites or feasible.relinks:
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
        before = () if self.moves.chain is None else self.moves.chain.before
        return f"{self.stage}.{len(before)}" if before else self.stage

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
            if self.moves.is_bound:
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


def partially_moved_names(directory: str, moves: Moves) -> set[str]:
    """Return the names in a directory that belong to a checkpoint that is elsewhere, or whole nowhere."""
    names: set[str] = set()
    moves = moves_with_inodes(moves, inodes_of_moves(directory, moves))
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


# A journal to its end, or back ---------------------------------------------------------------------


def undo_chain(transaction: MoveTransaction) -> None:
    """Take back moves, and all that went before them; the journal says after each what is left to do."""
    while True:
        transaction.undo()
        before = () if transaction.moves.chain is None else transaction.moves.chain.before
        if not before:
            return
        transaction = replace(transaction, moves=replace(before[0], chain=Chain(before[1:], has_more=True)))
        rewrite_journal(transaction)


def rewrite_journal(transaction: MoveTransaction) -> None:
    """Have the journal say what is left to do."""
    text = dumps(transaction.moves, transaction.directory)
    if len(text) > MAX_BYTES:
        reason = f"its journal would have {len(text):,} bytes, and {MAX_BYTES:,} are the most"
        raise AccessDenied(transaction.directory, f"{reason}: try fewer at once")
    with open_own(transaction.directory, *os.path.split(transaction.stage)) as stage:
        write_in(stage, JOURNAL, text)


def finish_or_undo(transaction: MoveTransaction) -> tuple[bool, Mapping[str, MoveFailure]]:
    """Make the last moves of a row that was interrupted, or else take all of it back.

    Returns:
        Whether they were made, and if not, why, by path, as far as one of them is to blame.
    """
    failures: dict[str, MoveFailure] = {}
    if transaction.moves.chain is None or not transaction.moves.chain.has_more:
        try:
            transaction.apply(failures)
        except (StalePlan, CheckpointError, OSError) as failure:
            failures |= failures_by_path(transaction, failures, failure)
        if not failures:
            return True, failures
    undo_chain(transaction)
    return False, failures


def directory_changed_above(transaction: MoveTransaction) -> str | None:
    """Return the directory above, if the same command changed there what names checkpoints of this one."""
    above = os.path.dirname(os.path.realpath(transaction.directory))
    for state_dir in state_dirs(above):
        with suppress(CheckpointError):  # another's: nothing of ours is in it
            if read_record(above, state_dir, transaction.moves.identity) is not None:
                return above
    return None


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
    others = replace(failure, culprit=os.path.basename(culprit))
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
