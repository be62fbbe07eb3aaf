"""Moves checkpoints to other names, to the trash or out of it, so that a kill at any moment loses nothing.

A journal is written first; then all get their new names, pointers are made to say them, the old names go, and
a record is written from which it can be undone. At no moment is a checkpoint whole in no place. What a kill
left is done to its end by ``recovery``, or else taken back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from types import TracebackType

from ckpttool.errors import AccessDenied, CheckpointError, from_os_error
from ckpttool.series.changing.copies import inodes_of_moves, moves_here
from ckpttool.series.changing.history import forget, homes, note, read_record
from ckpttool.series.changing.home import Home, home_of
from ckpttool.series.changing.journal import JOURNAL, begin, clear, require_system
from ckpttool.series.changing.moves import Chain, Move, Moves, dumps, trash_at
from ckpttool.series.changing.owned import MAX_BYTES, opened_own
from ckpttool.series.changing.placing import (
    Ground,
    bring,
    check,
    has_vanished,
    is_at_source,
    is_at_target,
    leave,
    open_move_dirs,
    parts_at,
    restore,
    withdraw,
)
from ckpttool.series.changing.pointing import is_turned, point, point_back, require_pointers
from ckpttool.series.changing.stage import Changed
from ckpttool.series.changing.trash_places import make_room, require_own_trash, tidy
from ckpttool.wire.atomic import sync_directory, write_within


@dataclass(slots=True)
class MoveOutcome:
    """What became of moves, by the paths that the user knows.

    Attributes:
        moved: What goes by its new names now.
        failed: Why some are where they were. Where pointers go with them, the others are then, too.
        gone: What was removed by somebody else before.
    """

    moved: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)


def carry_out(directory: str, moves: Moves, home: Home | None = None) -> MoveOutcome:
    """Move checkpoints; one that has changed since the plan was made, or has something in its way, stays.

    Where pointers go with them, all are moved or none.

    Args:
        directory: The directory of the journal; it is locked.
        moves: What goes where.
        home: Where its trash lies, if that is not where one would be made now.
    """
    outcome = MoveOutcome()
    home = home_of(directory) if home is None else home
    fit = fitting(directory, moves, home, outcome)
    if not (fit.moves or fit.rewrites or fit.relinks):
        return outcome
    stage = begin(directory, home, dumps(fit, directory), "moved")
    try:
        _carry_out(Course(directory, home, stage, fit), outcome)
    except KeyboardInterrupt:
        from ckpttool.series.changing.recovery import settle

        settle(directory, stage)
        raise
    return outcome


def fitting(directory: str, moves: Moves, home: Home, outcome: MoveOutcome) -> Moves:
    """Return what of some moves can be made and undone; the outcome is told why the rest can't."""
    require_system(directory, "moved")
    if {moves.source, moves.target} - {directory, trash_at(home, moves.identity)}:
        raise ValueError(f"{moves.source} -> {moves.target}: neither {directory} nor its trash")
    fit = _fit(directory, moves, outcome)
    if fit.moves or fit.rewrites or fit.relinks:
        require_own_trash(home)
        read_record(directory, home, moves.identity)  # what can't be recorded isn't begun
    return fit


def why_not(directory: str, moves: Moves) -> Iterator[tuple[str, str]]:
    """Yield why some checkpoints can't be moved, by path; nothing is changed."""
    try:
        with open_move_dirs(directory, moves, is_planned=True) as ground:
            for move in moves.moves:
                try:
                    check(ground, move)
                except (Changed, OSError) as failure:
                    yield move.path, told(failure)
    except (FileNotFoundError, NotADirectoryError):  # the trash has gone, or a link stands in its place
        yield from ((move.path, "it has vanished") for move in moves.moves)


def _fit(directory: str, moves: Moves, outcome: MoveOutcome) -> Moves:
    """Return what of some moves can be made; where pointers go with them, all or nothing."""
    outcome.failed |= dict(why_not(directory, moves))
    if moves.kind == "trash" and outcome.failed:
        with open_move_dirs(directory, moves, is_planned=True) as ground:
            outcome.gone += [
                move.path
                for move in moves.moves
                if move.path in outcome.failed and has_vanished(ground, move)
            ]
        for path in outcome.gone:
            del outcome.failed[path]
    passed_over = {*outcome.failed, *outcome.gone}
    fit = tuple(move for move in moves.moves if move.path not in passed_over)
    if moves.is_bound:
        try:
            require_pointers(directory, moves)
        except (Changed, OSError) as failure:
            outcome.failed |= {move.path: told(failure) for move in fit}
            if not moves.moves:
                outcome.failed[directory] = told(failure)
        if outcome.failed:
            return replace(moves, moves=(), rewrites=(), relinks=())
    return replace(moves, moves=fit)


def _carry_out(course: Course, outcome: MoveOutcome) -> None:
    try:
        try:
            done = course.forward(outcome.failed)
        except (Changed, CheckpointError, OSError) as failure:
            course.back()
            outcome.failed |= blamed(course, outcome.failed, failure)
        else:
            outcome.moved += [move.path for move in done]
        clear(course.stage)
    except (Changed, CheckpointError, OSError) as failure:
        reason = f"{told(failure)}; the next command that changes it settles what was begun"
        raise AccessDenied(course.directory, reason) from failure


def blamed(course: Course, failed: Mapping[str, str], failure: Exception) -> dict[str, str]:
    """Return why no move was made, by path: first of what failed itself, then of what goes with it."""
    paths = [move.path for move in course.moves.moves]
    culprits = {path: failed[path] for path in paths if path in failed}
    if len(culprits) != 1:
        return dict.fromkeys(paths or [course.directory], _named(failure))
    [(culprit, why)] = culprits.items()
    others = f"{os.path.basename(culprit)}: {why}; all of them are moved, or none"
    return {culprit: why} | {path: others for path in paths if path != culprit}


def _named(failure: Exception) -> str:
    """Return why something failed, with the file that it failed at."""
    name = failure.filename if isinstance(failure, OSError) else None
    return f"{told(failure)}: {os.path.basename(name)}" if isinstance(name, str) and name else told(failure)


@dataclass(frozen=True, slots=True)
class Course:
    """One journal of moves, on its way forward or back; both may be begun anywhere in between.

    Attributes:
        directory: The directory of the journal.
        home: Where its stage and its trash lie.
        stage: The path of the directory that holds the journal.
        moves: What it says.
        is_late: Whether it was interrupted: others may have changed pointers meanwhile.
    """

    directory: str
    home: Home
    stage: str
    moves: Moves
    is_late: bool = False

    @property
    def _step(self) -> str:
        """Return the name that the record has for what these moves are undone by."""
        before = () if self.moves.chain is None else self.moves.chain.before
        return f"{self.stage}.{len(before)}" if before else self.stage

    def forward(self, failed: dict[str, str]) -> list[Move]:
        """Make the moves, and note how they are undone; return those that were made.

        Args:
            failed: Is told why others were not; where pointers go with them, the first failure is raised.
        """
        moves = self.moves
        make_room(self.directory, self.home, moves)
        with open_move_dirs(self.directory, moves) as ground:
            come = [move for move in moves.moves if self._tried(ground, move, bring, failed)]
            self._sync()
            point(self.directory, moves, self.stage, is_late=self.is_late)
            done = [move for move in come if self._tried(ground, move, leave, failed)]
            self._sync()
            made = replace(moves, moves=tuple(done), chain=None)
            note(self.directory, self.home, made, self._step, ground.target)
        tidy(self.home, moves.identity)
        return done

    def _tried(
        self, ground: Ground, move: Move, step: Callable[[Ground, Move], None], failed: dict[str, str]
    ) -> bool:
        try:
            step(ground, move)
        except (Changed, OSError) as failure:
            if self.moves.is_bound:
                failed[move.path] = _named(failure)
                raise
            _retreat(ground, move)
            failed[move.path] = told(failure)
            return False
        return True

    def back(self) -> None:
        """Take the moves back, as far as they were made."""
        make_room(self.directory, self.home, self.moves)
        with open_move_dirs(self.directory, self.moves) as ground:
            for move in self.moves.moves:
                restore(ground, move)
            self._sync()
            point_back(self.directory, self.moves, self.stage)
            for move in self.moves.moves:
                withdraw(ground, move)
            self._sync()
            forget(self.directory, self.home, replace(self.moves, chain=None), self._step, ground.source)
        tidy(self.home, self.moves.identity)

    def _sync(self) -> None:
        places = {
            os.path.dirname(os.path.join(place, name)) or os.curdir
            for move in self.moves.moves
            for names in move.members
            for place, name in zip((self.moves.source, self.moves.target), names, strict=True)
        }
        for place in sorted(places):
            sync_directory(place)


def _retreat(ground: Ground, move: Move) -> None:
    restore(ground, move)
    withdraw(ground, move)


def told(failure: Exception) -> str:
    """Return why something could not be moved, in a few words."""
    if isinstance(failure, OSError):
        import errno

        if failure.errno == errno.EXDEV:
            return "its new place is on another file system"
        return from_os_error(failure, "").reason
    return failure.reason if isinstance(failure, CheckpointError) else str(failure)


def partially_moved_names(directory: str, moves: Moves) -> set[str]:
    """Return the names in a directory that belong to a checkpoint that is elsewhere, or whole nowhere."""
    names: set[str] = set()
    moves = moves_here(moves, inodes_of_moves(directory, moves))
    try:
        with open_move_dirs(directory, moves) as ground:
            turned = is_turned(directory, moves)
            for move in moves.moves:
                here, there = is_at_source(ground, move), is_at_target(ground, move)
                is_new = there and (turned or not here)
                if moves.source == directory and (is_new or not here):
                    names |= parts_at(ground.source, move, 0)
                if moves.target == directory and not is_new:
                    names |= parts_at(ground.target, move, 1)
            for one in moves.rewrites:
                if (one.after if turned else one.before) is None:
                    names.add(one.name)
    except OSError:  # the trash that it was for is not there yet, or not any more
        return names
    return names


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
        """Take back all that was made."""
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
    """Take back moves, and all that went before them; the journal says after each what is left to do."""
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
