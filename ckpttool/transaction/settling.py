"""Settles the journal of an interrupted command: completes committed groups and reverts the others."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain

from ckpttool.core.errors import CheckpointError, DamagedCheckpoint, from_os_error, system_text
from ckpttool.transaction.files import StalePlan
from ckpttool.transaction.journal import Location, Move, OperationList
from ckpttool.transaction.operations import Stage, open_stage
from ckpttool.transaction.paths import shown
from ckpttool.transaction.stages import remove_places, remove_stage
from ckpttool.transaction.state_dir import open_own
from ckpttool.transaction.stored_journals import commit_followers, read_journal
from ckpttool.transaction.unlinking import purge


@dataclass(slots=True)
class Settled:
    """Result of settling a journal, by number of the group.

    Attributes:
        listed: Operations of the journal.
        finished: Completed groups.
        reverted: Reverted groups.
        failures: Reasons why others could be neither completed nor reverted.
        notes: Notes for the user on completed groups.
        left: Message on files in the stage that the journal doesn't list; None without any.
    """

    listed: OperationList
    finished: list[int] = field(default_factory=list)
    reverted: list[int] = field(default_factory=list)
    failures: dict[int, str] = field(default_factory=dict)
    notes: dict[int, str] = field(default_factory=dict)
    left: str | None = None

    @property
    def is_complete(self) -> bool:
        """Whether nothing remains for the next command."""
        return not self.failures and self.left is None

    @classmethod
    def failed(cls, listed: OperationList, why: str) -> Settled:
        """Return the result if nothing can be done."""
        failures = dict.fromkeys(range(len(listed.groups)), why)
        return cls(listed, failures=failures, left=None if listed.groups else why)


def settle_now(directory: str, path: str) -> None:
    """Settle a stage after Ctrl-C; failures are left to the next command."""
    try:
        with suppress(DamagedCheckpoint):
            settle_stage(directory, path)
    except OSError as error:
        raise from_os_error(error, path) from error


def settle_stage(directory: str, path: str) -> Settled | None:
    """Settle the journal of a stage, and remove the stage unless something remains for the next command.

    Args:
        directory: The directory, which is locked.
        path: Path of the stage.

    Returns:
        The result; None if the stage has no journal.

    Raises:
        DamagedCheckpoint: It has files that the journal doesn't list.
    """
    listed, settled = read_journal(path, directory), None
    if listed is None:
        with open_own(directory, *os.path.split(path)) as inner, suppress(OSError):  # reported below
            remove_places(inner)
    else:
        settled = _settle_open(directory, path, listed)
    if settled is None or settled.is_complete:
        if listed is not None and settled is not None and (listed.is_committed or settled.finished):
            commit_followers(directory, listed)
        is_empty = remove_stage(path)
        if not (is_empty or (settled is not None and settled.notes)):
            expected = "move them where they belong"
            raise DamagedCheckpoint(path, "files not listed in the journal", expected=expected)
    return settled


def _settle_open(directory: str, path: str, listed: OperationList) -> Settled:
    try:
        with open_stage(directory, path, listed) as stage:
            settled = settle(stage)
            try:
                stage.close()
            except OSError as error:
                if not (settled.failures or settled.notes):
                    where = "move files not listed in the journal where they belong"
                    settled.left = f"{system_text(error)}; {where}"
            return settled
    except CheckpointError as failure:  # such as a trash of another user
        return Settled.failed(listed, failure.reason)


def settle(stage: Stage) -> Settled:
    """Complete the committed groups of an open stage, and revert the others and their pointers."""
    return _Settlement(stage).settle()


class _Settlement:
    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._settled = Settled(stage.listed)

    @property
    def _listed(self) -> OperationList:
        return self._stage.listed

    def settle(self) -> Settled:
        settled, listed = self._settled, self._listed
        is_removal = listed.kind == "remove"
        numbers = range(len(listed.groups))
        # In a copy of the directory all inodes differ, so moved files can't be identified, and no move
        # is settled. A removal is: nothing whose fingerprint differs is ever unlinked, and whole
        # checkpoints are moved back.
        if not is_removal and (self._is_old_copy() if listed.is_copy is None else listed.is_copy):
            advice = f"keep the files you need, and remove {shown(self._stage.path)}"
            why = f"the directory was copied while a command was running; {advice}"
            return Settled.failed(listed, why)
        to_revert: list[int] = []
        for number in numbers:
            try:
                # A removal that has nothing in the stage was not begun, or has been completed. Without a
                # commit, its pointers are restored.
                if is_removal and not self._stage.has_moved_part(number):
                    to_revert += [number] * (number not in (self._stage.done or ()))
                else:
                    (settled.finished if self._is_to_finish(number) else settled.reverted).append(number)
            except OSError as error:
                where = self._stage.shown_place(number)
                settled.failures[number] = f"{system_text(error)}; it is in {where}"
        if settled.failures and not is_removal and listed.is_indivisible:
            why = next(iter(settled.failures.values()))
            return Settled(listed, failures={**dict.fromkeys(numbers, why), **settled.failures})
        try:
            self._keep_blocked()
        except (OSError, CheckpointError) as error:
            return Settled.failed(listed, system_text(error) if isinstance(error, OSError) else error.reason)
        self._revert([*to_revert, *settled.reverted])
        self._complete()
        return settled

    def _keep_blocked(self) -> None:
        """Complete and commit groups that can't be reverted, since other files have their names."""
        # A trainer that continued after the kill may have saved under the old name of a checkpoint that had
        # been moved already. Neither of the two may be lost, so the move is completed, and in an
        # indivisible list all moves are.
        settled, listed = self._settled, self._listed
        if self._stage.is_committed or listed.kind in ("remove", "output"):
            return
        kept = [
            number for number in settled.reverted if any(map(self._is_taken, listed.moves_by_group[number]))
        ]
        if kept and listed.is_indivisible and listed.kind != "trash":
            kept = settled.reverted
        try:
            for number in kept:
                self._stage.advance(number)
        except (OSError, StalePlan):  # reverting it then fails, too, and reports the reason
            return
        if not kept:
            return
        if listed.pointers and len(kept) == len(listed.groups):
            self._stage.sync()  # the new names are durable before a pointer names them
            for one in listed.pointers:
                if one.after is not None:
                    with suppress(StalePlan):  # a trainer has rewritten it, too
                        self._stage.write_pointer(one)
        self._stage.sync()
        self._stage.record(kept)
        self._stage.commit(kept)
        settled.finished += kept
        settled.reverted = [number for number in settled.reverted if number not in kept]

    def _is_taken(self, one: Move) -> bool:
        """Return whether others have saved under the old name of a moved file."""
        roots = self._stage.roots
        if not roots.has_moved(one):
            return False
        if one.replaces is not None:
            if roots.status(one.target) is None or roots.is_same_file(one.target, one.replaces.location):
                return False
            return not (roots.is_unmodified_at(one, one.target) or self._stage.is_in_trash(one))
        if one.is_new:
            return False
        if one.source.root == "trash":  # it was restored, and written to since
            return not roots.is_unmodified_at(one, one.target)
        if one.source.is_private or roots.status(one.source) is None:
            return False
        if roots.is_same_file(one.source, one.target):
            return False
        here = roots.contents_at({one.source.path: one.source})
        return self._listed.inodes.isdisjoint(file.inode for file in here.files)

    def _revert(self, numbers: Sequence[int]) -> None:
        settled, done = self._settled, self._stage.done or frozenset()
        was_committed = self._stage.is_committed
        # ``done.json`` is shortened before anything is moved back: if this is killed as well, the next
        # recovery must not take these groups for committed, and unlink them.
        if not done.isdisjoint(settled.reverted):
            self._stage.withdraw(settled.reverted)
        if not was_committed and not settled.failures:
            failed = self._stage.revert_all()
        else:
            failed = self._stage.revert(numbers) if numbers else {}
        settled.failures |= {number: str(failure) for number, failure in failed.items()}

    def _complete(self) -> None:
        settled, listed = self._settled, self._listed
        if listed.kind == "remove":
            for number in settled.finished:
                self._purge(number)
        elif self._stage.is_committed and not settled.failures:
            try:
                settled.notes = self._stage.finish(settled.finished)
                self._stage.drop_record([at for at in settled.finished if at not in settled.notes])
            except OSError as error:
                settled.failures |= dict.fromkeys(settled.finished, system_text(error))

    def _purge(self, number: int) -> None:
        """Unlink the remaining files of a removed group."""
        failures, where = self._settled.failures, self._stage.shown_place(number)
        try:
            contents = self._listed.groups[number].contents
            for _ in purge(self._stage.staged_descriptor(number), contents, allow_missing=True):
                pass
        except StalePlan:
            failures[number] = (
                "prune was killed while removing it, and the remaining files have changed or were copied; "
                f"they are in {where}: remove them, or move them back"
            )
        except OSError as error:
            failures[number] = f"{system_text(error)}; the rest is in {where}"

    def _is_to_finish(self, number: int) -> bool:
        """Return whether a group is to be completed: it is committed, and a removal is still wanted."""
        # If a file of a removed checkpoint is missing in the stage, unlinking has begun, and is completed. A
        # whole one is moved back if it was modified in the stage since, or if the checkpoints that the plan
        # was to keep have disappeared: it may be the last one.
        listed, status = self._listed, self._stage.roots.status
        if number not in (self._stage.done or ()):
            return False
        if listed.kind != "remove":
            return True
        if any(status(Location("stage", file.path)) is None for file in listed.final_contents(number).files):
            return True
        try:
            self._stage.roots.require_unchanged(number, listed.final_locations(number))
        except StalePlan:
            return False
        return all(status(Location("directory", name)) for name in listed.groups[number].survivors)

    def _is_old_copy(self) -> bool:
        """Return whether the files of a 0.1 journal were copied since: none has a recorded inode."""
        if self._listed.kind == "output" or self._stage.is_committed:
            return False  # an area has its own inode in ``owner``, and a committed list needs no check
        is_there = False
        for location in (place for one in chain(*self._listed.moves_by_group) for place in one.locations):
            if self._stage.roots.status(location) is not None:
                is_there = True
                here = self._stage.roots.contents_at({location.path: location}).files
                if not self._listed.inodes.isdisjoint(file.inode for file in here):
                    return False
        return is_there
