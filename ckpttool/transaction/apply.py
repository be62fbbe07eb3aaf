"""Applies moves: each that can be made, or several that follow each other in one journal, all or none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType

from ckpttool.errors import AccessDenied, CheckpointError
from ckpttool.transaction.journal import begin_journal, remove_stage
from ckpttool.transaction.move_transaction import (
    MoveFailure,
    MoveOutcome,
    MoveTransaction,
    failure_text,
    failures_by_path,
    feasible_moves,
    rewrite_journal,
    undo_chain,
)
from ckpttool.transaction.moves import Chain, Moves, dumps
from ckpttool.transaction.recovery import recover_stage
from ckpttool.transaction.stage import StalePlan
from ckpttool.transaction.state_dir import StateDir, state_dir_of


def apply_moves(directory: str, moves: Moves, state_dir: StateDir | None = None) -> MoveOutcome:
    """Move checkpoints; one that has changed since the plan was made, or has something in its way, stays.

    Where pointers go with them, all are moved or none.

    Args:
        directory: The directory of the journal; it is locked.
        moves: What goes where.
        state_dir: Where its trash lies, if that is not where one would be made now.
    """
    outcome = MoveOutcome()
    state_dir = state_dir_of(directory) if state_dir is None else state_dir
    feasible = feasible_moves(directory, moves, state_dir, outcome)
    if not (feasible.moves or feasible.rewrites or feasible.relinks):
        return outcome
    stage = begin_journal(directory, state_dir, dumps(feasible, directory), "moved")
    try:
        _apply_or_undo(MoveTransaction(directory, state_dir, stage, feasible), outcome)
    except KeyboardInterrupt:
        recover_stage(directory, stage)
        raise
    return outcome


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
        reason = f"{failure_text(failure)}; the next command that changes it settles what was begun"
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
        if self._stage is not None and os.path.lexists(self._stage):
            recover_stage(self._directory, self._stage)

    @property
    def is_begun(self) -> bool:
        """Tell whether moves were made, and others are to follow."""
        return self._stage is not None

    def make(self, moves: Moves, *, has_more: bool) -> MoveOutcome:
        """Make the next moves; where one can't be made, take back all that were made before.

        The only ones are made as far as they can be, as ``apply_moves`` does.

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
            self._end()
        return outcome

    def _make(self, moves: Moves, has_more: bool, outcome: MoveOutcome) -> None:
        feasible = feasible_moves(self._directory, moves, self._state_dir, outcome)
        if outcome.failures or not (feasible.moves or feasible.rewrites or feasible.relinks):
            return
        now = replace(feasible, chain=Chain(self._made, has_more))
        if self._stage is None:
            self._stage = begin_journal(
                self._directory, self._state_dir, dumps(now, self._directory), "moved"
            )
        transaction = MoveTransaction(self._directory, self._state_dir, self._stage, now)
        try:
            if self._made:
                rewrite_journal(transaction)
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
        self._end()

    def _end(self) -> None:
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
            reason = f"{failure_text(failure)}; the next command that changes it settles what was begun"
            raise AccessDenied(self._directory, reason) from failure
