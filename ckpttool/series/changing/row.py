"""Moves in one directory that follow each other: all of them are made, or none.

Where checkpoints exchange their names, some go by names of ours in between. One journal tells of all that was
made, and is written anew before each. What a kill left of the last moves is finished; before that, all is
taken back.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import TracebackType

from ckpttool.errors import AccessDenied, CheckpointError
from ckpttool.series.changing.history import homes, read_record
from ckpttool.series.changing.home import Home, home_of
from ckpttool.series.changing.journal import JOURNAL
from ckpttool.series.changing.moves import Chain, Moves, dumps
from ckpttool.series.changing.moving import Course, MoveOutcome, blamed, carry_out, fitting, told
from ckpttool.series.changing.owned import MAX_BYTES, opened_own
from ckpttool.series.changing.removal import begin, clear
from ckpttool.series.changing.stage import Changed
from ckpttool.wire.atomic import write_within


class Row:
    """Moves that follow each other in a directory, which is locked; used as a context.

    Whoever leaves it before the last of them were made has all of them taken back.
    """

    def __init__(self, directory: str, home: Home | None = None) -> None:
        """Begin nothing yet.

        Args:
            directory: The directory of the journal.
            home: Where its trash lies, if that is not where one would be made now.
        """
        self._directory = directory
        self._home = home_of(directory) if home is None else home
        self._stage: str | None = None
        self._made: tuple[Moves, ...] = ()

    def __enter__(self) -> Row:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stage is not None and os.path.lexists(self._stage):
            from ckpttool.series.changing.recovery import settle

            settle(self._directory, self._stage)

    @property
    def is_begun(self) -> bool:
        """Tell whether moves were made, and others are to follow."""
        return self._stage is not None

    def make(self, moves: Moves, *, has_more: bool) -> MoveOutcome:
        """Make the next moves; where one can't be made, take back all that were made before.

        The only ones are made as far as they can be, as ``carry_out`` does.

        Args:
            moves: What goes where.
            has_more: Whether others are to follow.

        Raises:
            AccessDenied: The directory can't be changed; nothing was, or the next command settles it.
        """
        if self._stage is None and not has_more:
            return carry_out(self._directory, moves, self._home)
        outcome = MoveOutcome()
        try:
            self._make(moves, has_more, outcome)
        except CheckpointError as failure:
            if self._stage is None:  # nothing was begun
                raise
            outcome.failed |= {move.path: failure.reason for move in moves.moves} or {
                self._directory: failure.reason
            }
        if outcome.failed:
            self.take_back()
        elif not has_more:
            self._over()
        return outcome

    def _make(self, moves: Moves, has_more: bool, outcome: MoveOutcome) -> None:
        fit = fitting(self._directory, moves, self._home, outcome)
        if outcome.failed or not (fit.moves or fit.rewrites or fit.relinks):
            return
        now = replace(fit, chain=Chain(self._made, has_more))
        if self._stage is None:
            self._stage = begin(self._directory, self._home, dumps(now, self._directory), "moved")
        course = Course(self._directory, self._home, self._stage, now)
        try:
            if self._made:
                _rewrite_journal(course)
            done = course.forward(outcome.failed)
        except (Changed, CheckpointError, OSError) as failure:
            outcome.failed |= blamed(course, outcome.failed, failure)
        else:
            outcome.moved += [move.path for move in done]
        self._made = (replace(now, chain=None), *self._made)

    def take_back(self) -> None:
        """Take back all that was made.

        Raises:
            AccessDenied: It can't be; the next command settles it.
        """
        if self._stage is not None and self._made:
            now = replace(self._made[0], chain=Chain(self._made[1:], has_more=True))
            course = Course(self._directory, self._home, self._stage, now)
            with self._settled_later():
                take_back(course)
        self._over()

    def _over(self) -> None:
        if self._stage is not None:
            with self._settled_later():
                clear(self._stage)
        self._stage, self._made = None, ()

    @contextmanager
    def _settled_later(self) -> Iterator[None]:
        try:
            yield
        except (Changed, CheckpointError, OSError) as failure:
            self._stage = None
            reason = f"{told(failure)}; the next command that changes it settles what was begun"
            raise AccessDenied(self._directory, reason) from failure


def settled(course: Course) -> tuple[bool, Mapping[str, str]]:
    """Make the last moves of a row that was interrupted, or else take all of it back.

    Returns:
        Whether they were made, and if not, why, by path, as far as one of them is to blame.

    Raises:
        Changed, CheckpointError, OSError: It can be neither finished nor taken back.
    """
    failed: dict[str, str] = {}
    if course.moves.chain is None or not course.moves.chain.has_more:
        try:
            course.forward(failed)
        except (Changed, CheckpointError, OSError) as failure:
            failed |= blamed(course, failed, failure)
        if not failed:
            return True, failed
    take_back(course)
    return False, failed


def changed_above(course: Course) -> str | None:
    """Return the directory above, if the same command changed there what names checkpoints of this one."""
    above = os.path.dirname(os.path.realpath(course.directory))
    for home in homes(above):
        with suppress(CheckpointError):  # another's: nothing of ours is in it
            if read_record(above, home, course.moves.identity) is not None:
                return above
    return None


def take_back(course: Course) -> None:
    """Take back moves, and all that went before them; the journal says after each what is left to do.

    Raises:
        Changed, CheckpointError, OSError: They can't be.
    """
    while True:
        course.back()
        before = () if course.moves.chain is None else course.moves.chain.before
        if not before:
            return
        course = replace(course, moves=replace(before[0], chain=Chain(before[1:], has_more=True)))
        _rewrite_journal(course)


def _rewrite_journal(course: Course) -> None:
    text = dumps(course.moves, course.directory)
    if len(text) > MAX_BYTES:
        reason = f"its journal would have {len(text):,} bytes, and {MAX_BYTES:,} are the most"
        raise AccessDenied(course.directory, f"{reason}: try fewer at once")
    with opened_own(course.directory, *os.path.split(course.stage)) as stage:
        write_within(stage, JOURNAL, text)
