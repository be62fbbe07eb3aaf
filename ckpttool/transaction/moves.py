"""Applies lists of operations that rename or restore checkpoints, or replace files of them.

See ``operations``. A list is checked before its journal is written: what can't be done is left out of it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple

from ckpttool.core.errors import AccessDenied, CheckpointError, from_os_error
from ckpttool.transaction.files import StalePlan
from ckpttool.transaction.history import read_record, require_own_trash
from ckpttool.transaction.journal import OperationList
from ckpttool.transaction.open_roots import open_roots
from ckpttool.transaction.operations import Stage, UnknownCommit, begin_stage
from ckpttool.transaction.pointer_files import require_pointers
from ckpttool.transaction.settling import settle_now
from ckpttool.transaction.stages import remove_stage, require_system
from ckpttool.transaction.state_dir import StateDir, state_dir_of
from ckpttool.transaction.unlinking import StrandedCheckpoint


class MoveFailure(NamedTuple):
    """Why a checkpoint was not moved.

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
        """Return the message; ``planned`` names the moment of the plan in the user's terms."""
        text = f"{self.problem} since {planned}" if self.since_plan else self.problem
        if self.file is not None:
            text += f": {self.file}"
        return text if self.culprit is None else f"{self.culprit}: {text}; all of them are moved, or none"


@dataclass(slots=True)
class MoveOutcome:
    """Result of moves, by the checkpoints' paths.

    Attributes:
        moved: Checkpoints that have their new names.
        failures: Why checkpoints were not moved; in an indivisible list, one failure means that none was.
    """

    moved: list[str] = field(default_factory=list)
    failures: dict[str, MoveFailure] = field(default_factory=dict)

    @property
    def failed(self) -> dict[str, str]:
        """Return the failures in words."""
        return {path: failure.text() for path, failure in self.failures.items()}


def obstacles(
    directory: str, listed: OperationList, state_dir: StateDir
) -> Iterator[tuple[int, MoveFailure]]:
    """Yield the groups that can't be moved, by number, with the reason; changes nothing."""
    try:
        with open_roots(directory, listed, state_dir) as roots:
            for number in range(len(listed.groups)):
                try:
                    roots.require_ready(number)
                    roots.require_free(number)
                except (StalePlan, OSError) as failure:
                    yield number, move_failure(failure)
    except (FileNotFoundError, NotADirectoryError):  # the trash has gone, or a link stands in its place
        yield from ((number, MoveFailure("it has vanished")) for number in range(len(listed.groups)))


def apply(directory: str, listed: OperationList, state_dir: StateDir | None = None) -> MoveOutcome:
    """Move checkpoints; those that have changed since the plan or are blocked are skipped.

    Of a renaming, and where pointers go with them, all are moved or none.

    Args:
        directory: The directory, which is locked.
        listed: The operations.
        state_dir: Where stage and trash lie, if that is not where they would be made now.
    """
    with Moves(directory, listed, state_dir) as moves:
        moves.commit()
    return moves.outcome


class Moves:
    """Moves of one directory up to their commit; leaving the context reverts uncommitted moves.

    Attributes:
        outcome: What became of them so far.
        is_committed: Whether they are committed; None if that is unknown, since the disk has failed.
    """

    def __init__(self, directory: str, listed: OperationList, state_dir: StateDir | None = None) -> None:
        """Take moves, of which nothing is done yet; see ``apply``."""
        self.outcome = MoveOutcome()
        self.is_committed: bool | None = False
        self._directory = directory
        self._state_dir = state_dir_of(directory) if state_dir is None else state_dir
        self._listed = listed
        self._stack = ExitStack()
        self._stage: Stage | None = None
        self._standing: list[int] = []
        self._has_stranded = False

    def __enter__(self) -> Moves:
        listed = self._listed = self._feasible(self._listed)
        if not listed.operations:
            return self
        with ExitStack() as stack, self._settled_on_interrupt():
            self._stage = stack.enter_context(begin_stage(self._directory, listed, self._state_dir))
            self._forward(self._stage)
            self._stack = stack.pop_all()
        return self

    def _feasible(self, listed: OperationList) -> OperationList:
        """Return the operations that can be done and undone; adds failures for the others."""
        require_system(self._directory, "moved")
        stuck = dict(obstacles(self._directory, listed, self._state_dir))
        failures = self.outcome.failures
        failures |= {listed.groups[number].path: failure for number, failure in stuck.items()}
        fit = [number for number in range(len(listed.groups)) if number not in stuck]
        try:
            require_pointers(self._directory, listed)
        except (StalePlan, OSError) as failure:
            paths = [listed.groups[number].path for number in fit]
            failures |= dict.fromkeys(paths if listed.groups else [self._directory], move_failure(failure))
        feasible = listed.only([] if listed.is_indivisible and failures else fit)
        if failures and not feasible.groups:
            feasible = feasible.with_pointers([])
        if listed.identity is not None and feasible.operations:
            require_own_trash(self._state_dir)
            read_record(
                self._directory, self._state_dir, listed.identity
            )  # what can't be recorded isn't begun
        return feasible

    def _forward(self, stage: Stage) -> None:
        numbers = range(len(stage.listed.groups))
        try:
            failed = stage.forward()
            standing = [number for number in numbers if number not in failed]
            while (standing or not numbers) and not (failed and stage.listed.is_indivisible):
                changed = stage.prepare(standing)
                if not changed:
                    break
                failed |= changed
                if not stage.listed.is_indivisible:
                    failed |= stage.back([*changed])
                    standing = [number for number in standing if number not in changed]
        except (StalePlan, CheckpointError, OSError) as failure:
            self._fail_all(failure)
            self._revert(stage)
            return
        self._fail(failed)
        self._has_stranded = any(isinstance(failure, StrandedCheckpoint) for failure in failed.values())
        self._standing = standing
        if failed and (stage.listed.is_indivisible or not standing):
            self._revert(stage)

    def commit(self) -> None:
        """Commit all that was done, unlink old names, and close the journal.

        Raises:
            AccessDenied: It is committed, but can't be completed; the next command does that.
        """
        stage = self._stage
        if stage is None:
            return
        with self._settled_on_interrupt():
            try:
                self.is_committed = None
                stage.commit(self._standing)
                self.is_committed = True
            except UnknownCommit:
                self._stage = None
                raise
            except OSError as failure:
                self._revert_or_leave(stage, failure)
                return
            self._finish(stage)

    def _finish(self, stage: Stage) -> None:
        try:
            both = stage.finish(self._standing)
            stage.drop_record([number for number in self._standing if number not in both])
        except (CheckpointError, OSError) as failure:
            self._revert_or_leave(stage, failure)
            return
        groups = stage.listed.groups
        self.outcome.moved += [groups[number].path for number in self._standing]
        self.outcome.failures |= {groups[number].path: MoveFailure(why) for number, why in both.items()}
        with self._left_to_recovery():
            self._close(stage)

    def _revert_or_leave(self, stage: Stage, failure: Exception) -> None:
        """Revert a commit that can't be completed, or leave it to recovery if that can't be reverted."""
        if stage.listed.is_revertible and stage.listed.leader is None:
            self._fail_all(failure)
            self._revert(stage)
            return
        self._stage = None
        reason = f"{failure_text(failure)}; the next command completes it"
        raise AccessDenied(self._directory, reason) from failure

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._stage is not None and self._listed.leader is not None:
                # Ctrl-C may have come once that was committed.
                path, self._stage = self._stage.path, None
                settle_now(self._directory, path)
            self.revert()
        finally:
            self._stack.close()

    def leave(self) -> None:
        """Leave uncommitted moves to recovery."""
        self._stage = None

    def revert(self) -> None:
        """Revert uncommitted moves."""
        if self._stage is not None:
            self._revert(self._stage)

    def _revert(self, stage: Stage) -> None:
        if self.is_committed:
            self.is_committed = None
        with self._left_to_recovery():
            stage.withdraw(stage.done or ())
            self.is_committed = False
            for failure in stage.back_all().values():
                raise failure
            self._close(stage)

    def _close(self, stage: Stage) -> None:
        self._stage = None
        stage.close()
        if not self._has_stranded:  # else the journal is kept: recovery puts back what it can
            remove_stage(stage.path)

    @contextmanager
    def _left_to_recovery(self) -> Iterator[None]:
        try:
            yield
        except (StalePlan, StrandedCheckpoint, CheckpointError, OSError) as failure:
            self._stage = None
            reason = f"{failure_text(failure)}; the next command that changes it recovers"
            raise AccessDenied(self._directory, reason) from failure

    @contextmanager
    def _settled_on_interrupt(self) -> Iterator[None]:
        """Settle the journal on Ctrl-C, as recovery would."""
        try:
            yield
        except KeyboardInterrupt:
            stage, self._stage = self._stage, None
            if stage is not None:
                settle_now(self._directory, stage.path)
            raise

    def _fail_all(self, failure: Exception) -> None:
        """Add one failure for all groups, or for the directory if there are only pointers."""
        paths = [group.path for group in self._listed.groups] or [self._directory]
        self.outcome.failures |= dict.fromkeys(paths, move_failure(failure, names_file=True))

    def _fail(self, failed: Mapping[int, Exception]) -> None:
        """Add failures by group; in an indivisible list, a single failure applies to all groups."""
        groups, is_indivisible = self._listed.groups, self._listed.is_indivisible
        failures = {
            groups[number].path: move_failure(failure, names_file=is_indivisible)
            for number, failure in failed.items()
        }
        if is_indivisible and len(failures) == 1:
            [(culprit, failure)] = failures.items()
            others = failure._replace(culprit=os.path.basename(culprit))
            failures |= {group.path: others for group in groups if group.path != culprit}
        self.outcome.failures |= failures


# Why something was not moved ----------------------------------------------------------------------


def move_failure(error: Exception, *, names_file: bool = False) -> MoveFailure:
    """Convert an error to a failure, with the name of the file if asked for."""
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
    """Return the message of an error, without a path."""
    return move_failure(error).text()
