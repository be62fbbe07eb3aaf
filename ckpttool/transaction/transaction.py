"""Execution of one list of operations in one directory: journal, operations, commit and cleanup.

See ``operations``. A list is checked before its journal is written, and groups that can't be moved are left
out of it; removals are checked one by one, as they are done. A group that fails later is reverted, with the
whole list if that is indivisible. If reverting fails, the journal is kept for recovery.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import NamedTuple

from ckpttool.core.errors import AccessDenied, CheckpointError, from_os_error, system_text
from ckpttool.storage.work import in_order
from ckpttool.transaction.files import StalePlan
from ckpttool.transaction.history import read_record, require_own_trash
from ckpttool.transaction.journal import OperationList
from ckpttool.transaction.lock import DISK_FULL
from ckpttool.transaction.open_roots import AlreadyGone, open_roots
from ckpttool.transaction.operations import Stage, UnknownCommit, begin_stage
from ckpttool.transaction.pointer_files import require_pointers
from ckpttool.transaction.settling import settle_now
from ckpttool.transaction.stages import remove_stage, require_system
from ckpttool.transaction.state_dir import StateDir, state_dir_of
from ckpttool.transaction.stored_journals import commit_followers
from ckpttool.transaction.unlinking import StrandedCheckpoint

_MANY = 200
"""Number of checkpoints from which on a second thread pays off."""


class Failure(NamedTuple):
    """Reason why a checkpoint was not moved, removed or restored.

    Attributes:
        problem: The problem, in words.
        since_plan: Whether it is a change since the plan was made.
        file: Name of the file that has the problem, if known.
        culprit: Name of the checkpoint that has the problem; None if it is this one.
        is_disk_full: Whether the disk was full.
        is_stranded: Whether a part of the checkpoint is removed, or all of it is in the stage.
    """

    problem: str
    since_plan: bool = False
    file: str | None = None
    culprit: str | None = None
    is_disk_full: bool = False
    is_stranded: bool = False

    @classmethod
    def of(cls, error: Exception, *, names_file: bool = False) -> Failure:
        """Return the failure for an error; ``names_file`` adds the name of the file."""
        if isinstance(error, OSError):
            problem = from_os_error(error, "").reason
            if error.errno == errno.EXDEV:
                problem = "its new location is on another file system"
            has_name = names_file and isinstance(error.filename, str) and error.filename
            name = os.path.basename(error.filename) if has_name else None
            return cls(problem, file=name, is_disk_full=error.errno in DISK_FULL)
        if isinstance(error, StalePlan):
            return cls(error.problem, error.since_plan)
        reason = error.reason if isinstance(error, CheckpointError) else str(error)
        return cls(reason, is_stranded=isinstance(error, StrandedCheckpoint))

    def text(self, planned: str = "the plan was made") -> str:
        """Return the message; ``planned`` names the moment of the plan in the user's terms."""
        text = f"{self.problem} since {planned}" if self.since_plan else self.problem
        if self.file is not None:
            text += f": {self.file}"
        return text if self.culprit is None else f"{self.culprit}: {text}; all of them are moved, or none"


@dataclass(slots=True)
class Outcome:
    """Result of a list of operations, by the checkpoints' paths.

    Attributes:
        done: Checkpoints that are moved, removed or restored, or that others had removed already.
        failures: Reasons for the others; in an indivisible list, one failure means that none is done.
        freed: Bytes freed, or moved to the trash.
    """

    done: list[str] = field(default_factory=list)
    failures: dict[str, Failure] = field(default_factory=dict)
    freed: int = 0

    @property
    def failed(self) -> dict[str, str]:
        """Messages of the failures."""
        return {path: failure.text() for path, failure in self.failures.items()}

    @property
    def stranded(self) -> set[str]:
        """Checkpoints that are neither removed nor in their place."""
        return {path for path, failure in self.failures.items() if failure.is_stranded}

    def fail(self, path: str, error: Exception) -> None:
        """Add the error of a removal; a checkpoint that others have removed counts as removed."""
        if isinstance(error, AlreadyGone):
            self.done.append(path)
        else:
            self.failures[path] = Failure.of(error)

    def add(self, other: Outcome) -> None:
        """Add the result of another list."""
        self.done += other.done
        self.failures |= other.failures
        self.freed += other.freed


def blocked_groups(
    directory: str, listed: OperationList, state_dir: StateDir
) -> Iterator[tuple[int, Failure]]:
    """Yield the groups that can't be moved, by number, with the reason; changes nothing."""
    try:
        with open_roots(directory, listed, state_dir) as roots:
            for number in range(len(listed.groups)):
                try:
                    roots.require_ready(number)
                    roots.require_free(number)
                except (StalePlan, OSError) as failure:
                    yield number, Failure.of(failure)
    except (FileNotFoundError, NotADirectoryError):  # the trash is missing, or a symlink has its name
        yield from ((number, Failure("it has vanished")) for number in range(len(listed.groups)))


def apply(directory: str, listed: OperationList, state_dir: StateDir | None = None) -> Outcome:
    """Carry out a list; checkpoints that have changed since the plan or are blocked are skipped.

    Of an indivisible list, all are moved or none.

    Args:
        directory: The directory, which is locked.
        listed: The operations.
        state_dir: Location of stage and trash; None for the default of the directory.
    """
    with Transaction(directory, listed, state_dir) as transaction:
        transaction.commit()
        transaction.close()
    return transaction.outcome


class Transaction:
    """One list of operations in one directory; leaving the context reverts it unless it is committed.

    Attributes:
        outcome: The results so far, by checkpoint.
        is_committed: Whether the list is committed; None if that is unknown, since the disk has failed.
    """

    def __init__(self, directory: str, listed: OperationList, state_dir: StateDir | None = None) -> None:
        """Prepare a list, see ``apply``; operations are executed when the context is entered."""
        self.outcome = Outcome()
        self.is_committed: bool | None = False
        self._directory = directory
        self._state_dir = state_dir_of(directory) if state_dir is None else state_dir
        self._listed = listed
        self._stack = ExitStack()
        self._stage: Stage | None = None
        self._pending_groups: list[int] = []
        self._is_finished = False

    def __enter__(self) -> Transaction:
        listed = self._listed = self._feasible()
        # The roots of the stage stay open until the end of this context: ``pop_all`` hands them over only if
        # all went well up to here.
        if listed.operations:
            with ExitStack() as stack, self._settled_on_interrupt():
                self._stage = stack.enter_context(begin_stage(self._directory, listed, self._state_dir))
                self._forward(self._stage)
                self._stack = stack.pop_all()
        return self

    def _feasible(self) -> OperationList:
        """Return the operations that can be done and undone; adds failures for the others."""
        listed = self._listed
        require_system(self._directory, "removed" if listed.kind == "remove" else "moved")
        # A removal checks each checkpoint as it moves it, and is repeated without those that fail. That costs
        # less than to look at all of them before.
        feasible = listed if listed.is_removal else self._without_obstacles()
        if listed.identity is not None and feasible.operations:
            require_own_trash(self._state_dir)
            # An unreadable record raises here, before anything is moved that couldn't be undone.
            read_record(self._directory, self._state_dir, listed.identity)
        return feasible

    def _without_obstacles(self) -> OperationList:
        listed, failures = self._listed, self.outcome.failures
        stuck = dict(blocked_groups(self._directory, listed, self._state_dir))
        failures |= {listed.groups[number].path: failure for number, failure in stuck.items()}
        fit = [number for number in range(len(listed.groups)) if number not in stuck]
        try:
            require_pointers(self._directory, listed)
        except (StalePlan, OSError) as failure:
            paths = [listed.groups[number].path for number in fit]
            failures |= dict.fromkeys(paths if listed.groups else [self._directory], Failure.of(failure))
        feasible = listed.subset([] if listed.is_indivisible and failures else fit)
        return feasible.with_pointers([]) if failures and not feasible.groups else feasible

    # Forward ------------------------------------------------------------------------------------------

    def _forward(self, stage: Stage) -> None:
        # ``prepare`` compares the moved groups once more. One that has changed meanwhile is reverted, and the
        # rest is prepared again; an indivisible list is reverted as a whole.
        numbers, is_indivisible = range(len(stage.listed.groups)), stage.listed.is_indivisible
        try:
            failed = stage.execute()
            remaining = [number for number in numbers if number not in failed]
            while (remaining or not numbers) and not (failed and is_indivisible):
                changed = stage.prepare(remaining)
                if not changed:
                    break
                failed |= changed
                if not is_indivisible:
                    failed |= stage.revert([*changed])
                    remaining = [number for number in remaining if number not in changed]
        except (StalePlan, CheckpointError, OSError) as failure:
            self._fail_all(failure)
            self._revert(stage)
            return
        self._fail(failed)
        self._pending_groups = remaining
        if failed and (is_indivisible or not remaining):
            self._revert(stage)

    def commit(self) -> None:
        """Commit the executed groups, and unlink old names or removed files; ``close`` removes the journal.

        Raises:
            AccessDenied: It is committed, but can't be completed; the next command does that.
        """
        stage = self._stage
        if stage is None:
            return
        with self._settled_on_interrupt():
            # Unknown until ``commit`` returns: an interrupt in between may come before or after ``done.json``
            # is renamed to its place. An OSError other than UnknownCommit means that nothing is committed.
            try:
                self.is_committed = None
                stage.commit(self._pending_groups)
                self.is_committed = True
            except UnknownCommit:
                self._stage = None
                raise
            except OSError as failure:
                self._revert_or_leave(stage, failure, can_revert=True)
                return
            self._finish(stage)

    def close(self) -> None:
        """Remove the journal of a list that is committed and finished.

        Raises:
            AccessDenied: It can't be removed; the next command does that.
        """
        # The followers' recovery looks for the leader's journal. So they get a ``done.json`` of their own
        # before it is removed.
        if self._stage is not None and self._is_finished:
            with self._left_to_recovery():
                commit_followers(self._directory, self._listed)
            self._close(self._stage)

    def _finish(self, stage: Stage) -> None:
        if stage.listed.kind == "remove":
            with self._left_to_recovery():
                self._fail(purge_groups(stage, self._pending_groups, self.outcome))
            self._is_finished = True
            return
        # A list of moves is finished once the old names are unlinked. If that fails before any file has lost
        # its last name, the list can still be reverted.
        try:
            notes = stage.finish(self._pending_groups)
        except (CheckpointError, OSError) as failure:
            self._revert_or_leave(stage, failure, can_revert=stage.listed.is_revertible)
            return
        try:
            stage.drop_record([number for number in self._pending_groups if number not in notes])
        except (CheckpointError, OSError) as failure:  # the record may lack them already
            self._revert_or_leave(stage, failure, can_revert=False)
            return
        groups = stage.listed.groups
        self.outcome.done += [groups[number].path for number in self._pending_groups]
        self.outcome.failures |= {groups[number].path: Failure(why) for number, why in notes.items()}
        if stage.listed.kind == "trash":
            self.outcome.freed += sum(groups[number].contents.nbytes for number in self._pending_groups)
        self._is_finished = True

    # Back ---------------------------------------------------------------------------------------------

    def _revert_or_leave(self, stage: Stage, failure: Exception, *, can_revert: bool) -> None:
        """Revert a list whose commit or completion has failed, or leave that to recovery."""
        # A follower is never reverted alone: its leader may be committed, and the list with it.
        if can_revert and stage.listed.leader is None:
            self._fail_all(failure)
            self._revert(stage)
            return
        self._stage = None
        reason = f"{Failure.of(failure).text()}; the next command completes it"
        raise AccessDenied(self._directory, reason) from failure

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
            if self._stage is not None and self._listed.leader is not None:
                # Only the leader's journal shows whether this list is committed, so recovery decides.
                path, self._stage = self._stage.path, None
                settle_now(self._directory, path)
            self.revert()
        finally:
            self._stack.close()

    def leave(self) -> None:
        """Leave uncommitted operations to recovery."""
        self._stage = None

    def revert(self) -> None:
        """Revert uncommitted operations, and committed ones if no file has lost its last name."""
        if self._stage is not None and (self._listed.is_revertible or not self.is_committed):
            self._revert(self._stage)

    def _revert(self, stage: Stage) -> None:
        if self.is_committed:
            self.is_committed = None
        with self._left_to_recovery():
            stage.withdraw(stage.done or ())
            self.is_committed = False
            failures = stage.revert_all()
            if stage.listed.is_removal:
                self._fail(failures)
            else:
                for failure in failures.values():
                    raise failure
        self._close(stage)

    def _close(self, stage: Stage) -> None:
        self._stage = None
        with self._left_to_recovery():
            try:
                stage.close()
                if not self.outcome.stranded:  # recovery needs the journal to move stranded checkpoints back
                    remove_stage(stage.path)
            except OSError as error:
                if not stage.listed.is_removal:
                    raise
                if not self.outcome.stranded:
                    self.outcome.failures[stage.path] = Failure(
                        f"{system_text(error)}; the next prune removes it"
                    )

    @contextmanager
    def _left_to_recovery(self) -> Iterator[None]:
        try:
            yield
        except (StalePlan, StrandedCheckpoint, CheckpointError, OSError) as failure:
            self._stage = None
            reason = f"{Failure.of(failure).text()}; the next command in this directory recovers it"
            raise AccessDenied(self._directory, reason) from failure

    @contextmanager
    def _settled_on_interrupt(self) -> Iterator[None]:
        """Settle the journal on Ctrl-C, as recovery does."""
        try:
            yield
        except KeyboardInterrupt:
            stage, self._stage = self._stage, None
            if stage is not None:
                settle_now(self._directory, stage.path)
            raise

    # Failures -----------------------------------------------------------------------------------------

    def _fail_all(self, error: Exception) -> None:
        """Add one failure for all groups, or for the directory if the list has only pointers."""
        failure = Failure.of(error, names_file=not self._listed.is_removal)
        paths = [group.path for group in self._listed.groups] or [self._directory]
        gone = self.outcome.done
        self.outcome.failures |= dict.fromkeys((path for path in paths if path not in gone), failure)

    def _fail(self, failed: Mapping[int, Exception]) -> None:
        """Add failures by group; of an indivisible list, a single one applies to all."""
        groups, outcome = self._listed.groups, self.outcome
        if self._listed.is_removal:
            for number, error in failed.items():
                outcome.fail(groups[number].path, error)
            return
        is_indivisible = self._listed.is_indivisible
        failures = {
            groups[number].path: Failure.of(error, names_file=is_indivisible)
            for number, error in failed.items()
        }
        if is_indivisible and len(failures) == 1:
            [(culprit, failure)] = failures.items()
            others = failure._replace(culprit=os.path.basename(culprit))
            failures |= {group.path: others for group in groups if group.path != culprit}
        outcome.failures |= failures


# Removal for good ------------------------------------------------------------------------------------


def purge_groups(stage: Stage, numbers: Sequence[int], outcome: Outcome) -> Mapping[int, Exception]:
    """Unlink committed groups in the stage, and move back those that can't be; return the stranded ones."""
    # Of many groups, two threads unlink one half each: one works while the other waits for the disk. A file
    # with several names frees its bytes with the last of them, so one thread gets all such files.
    groups = stage.listed.groups
    halves: Sequence[Sequence[int]] = (numbers,)
    if len(numbers) >= _MANY:
        linked = [at for at in numbers if any(file.links > 1 for file in groups[at].contents.files)]
        single = [at for at in numbers if all(file.links == 1 for file in groups[at].contents.files)]
        halves = ([*linked, *single[::2]], single[1::2])
    stuck: list[int] = []
    for done, left in in_order(partial(_purge_part, stage), halves, len(halves)):
        outcome.add(done)
        stuck += left
    if not stuck:
        return {}
    # As in recovery, the commit is withdrawn before anything is moved back.
    try:
        stage.withdraw(stuck)
        return stage.revert(stuck)
    except OSError as error:
        left_there = StrandedCheckpoint(f"{system_text(error)}; the next command recovers it")
        return dict.fromkeys(stuck, left_there)


def _purge_part(stage: Stage, numbers: Sequence[int], check: Callable[[], None]) -> tuple[Outcome, list[int]]:
    """Unlink some groups; return the outcome, and the groups that are still whole."""
    outcome, stuck = Outcome(), list[int]()
    for number in numbers:
        check()
        path = stage.listed.groups[number].path
        try:
            for nbytes in stage.purge(number):
                outcome.freed += nbytes
            outcome.done.append(path)
        except (StalePlan, StrandedCheckpoint, OSError) as failure:
            outcome.fail(path, failure)
            if path in outcome.failures and not outcome.failures[path].is_stranded:
                stuck.append(number)
    return outcome, stuck
