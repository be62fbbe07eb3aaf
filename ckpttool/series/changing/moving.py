"""Moves checkpoints to other names, to the trash or out of it, so that a kill at any moment loses nothing.

A journal is written first; then all get their new names, pointers are made to say them, the old names go, and
a record is written from which it can be undone. At no moment is a checkpoint whole in no place. What a kill
left is done to its end by ``recovery``, or else taken back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from ckpttool.errors import AccessDenied, CheckpointError, from_os_error
from ckpttool.series.changing.history import forget, note, read_record
from ckpttool.series.changing.home import Home, home_of
from ckpttool.series.changing.moves import Move, Moves, dumps, old_name, trash_at
from ckpttool.series.changing.owned import require_own_status
from ckpttool.series.changing.placing import Ground, bring, check, has_vanished, leave, restore, withdraw
from ckpttool.series.changing.pointing import point, point_back, require_pointers
from ckpttool.series.changing.removal import begin, clear, require_system
from ckpttool.series.changing.stage import Changed
from ckpttool.series.changing.trash_places import make_room, require_own_trash, tidy
from ckpttool.series.files import opened
from ckpttool.wire.atomic import sync_directory


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

    Raises:
        AccessDenied: The directory can't be changed; nothing was, or the next command settles it.
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
    """Return what of some moves can be made and undone; the outcome is told why the rest can't.

    Raises:
        CheckpointError: None of them can be.
    """
    require_system(directory, "moved")
    if {moves.source, moves.target} - {directory, trash_at(home, moves.identity)}:
        raise ValueError(f"{moves.source} -> {moves.target}: neither {directory} nor its trash")
    fit = _fit(directory, moves, outcome)
    if fit.moves or fit.rewrites or fit.relinks:
        require_own_trash(home)
        read_record(directory, home, moves.identity)  # what can't be recorded isn't begun
    return fit


def why_not(directory: str, moves: Moves) -> Iterator[tuple[str, str]]:
    """Yield why some checkpoints can't be moved, by path; nothing is changed.

    Raises:
        OSError: The directory, or its trash, can't be opened.
    """
    try:
        with ground_of(directory, moves, is_planned=True) as ground:
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
        with ground_of(directory, moves, is_planned=True) as ground:
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

        Raises:
            Changed, OSError: They can't be made.
        """
        moves = self.moves
        make_room(self.directory, self.home, moves)
        with ground_of(self.directory, moves) as ground:
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
        """Take the moves back, as far as they were made.

        Raises:
            Changed, OSError: They can't be.
        """
        make_room(self.directory, self.home, self.moves)
        with ground_of(self.directory, self.moves) as ground:
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


@contextmanager
def ground_of(directory: str, moves: Moves, *, is_planned: bool = False) -> Iterator[Ground]:
    """Open the directories that checkpoints leave and come to; a trash is opened below its home."""
    is_within = moves.source == moves.target
    rewritten = frozenset(one.name for one in moves.rewrites if is_within)
    was_at = frozenset(old_name(moves, name) for name in rewritten)
    with _place(directory, moves.source) as source:
        if is_planned and moves.kind == "trash":
            yield Ground(source, -1, rewritten, was_at)
            return
        with _place(directory, moves.target) as target:
            yield Ground(source, target, rewritten, was_at)


@contextmanager
def _place(directory: str, place: str) -> Iterator[int]:
    if place == directory:
        with opened(directory) as found:
            yield found
        return
    trash, identity = os.path.split(place)
    around, name = os.path.split(trash)
    with opened(around or os.curdir) as home, opened(name, home) as root, opened(identity, root) as found:
        require_own_status(place, os.fstat(found), os.stat(directory))
        yield found


def told(failure: Exception) -> str:
    """Return why something could not be moved, in a few words."""
    if isinstance(failure, OSError):
        import errno

        if failure.errno == errno.EXDEV:
            return "its new place is on another file system"
        return from_os_error(failure, "").reason
    return failure.reason if isinstance(failure, CheckpointError) else str(failure)
