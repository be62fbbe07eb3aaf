"""Settles the journal of an interrupted command: completes committed groups and reverts the others."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from ckpttool.core.errors import CheckpointError, from_os_error, system_text
from ckpttool.transaction.files import StalePlan
from ckpttool.transaction.journal import Exchange, Location, Move, OperationList, Rewrite
from ckpttool.transaction.operations import Stage, open_stage
from ckpttool.transaction.paths import shown
from ckpttool.transaction.stages import remove_places, remove_stage
from ckpttool.transaction.state_dir import open_own
from ckpttool.transaction.stored_journals import read_journal
from ckpttool.transaction.unlinking import purge


@dataclass(slots=True)
class Settled:
    """Result of settling a journal, by number of the group.

    Attributes:
        finished: What was completed.
        put_back: What was reverted.
        failures: Why some could be neither.
        notes: What the user has to know of some that are completed.
        left: What files the stage holds that the journal doesn't list.
    """

    finished: list[int] = field(default_factory=list)
    put_back: list[int] = field(default_factory=list)
    failures: dict[int, str] = field(default_factory=dict)
    notes: dict[int, str] = field(default_factory=dict)
    left: str | None = None


def settle_now(directory: str, path: str) -> None:
    """Settle a stage after Ctrl-C, and remove it; failures are left to the next command."""
    try:
        found = settle_stage(directory, path)
        if found is None or not (found[1].failures or found[1].left):
            remove_stage(path)
    except OSError as error:
        raise from_os_error(error, path) from error


def settle_stage(directory: str, path: str) -> tuple[OperationList, Settled] | None:
    """Settle the journal of a stage; return None if it has none.

    Args:
        directory: The directory, which is locked.
        path: Path of the stage.
    """
    listed = read_journal(path, directory)
    if listed is None:
        # remove_stage reports what is left in it.
        with open_own(directory, *os.path.split(path)) as inner, suppress(OSError):
            remove_places(inner)
        return None
    try:
        with open_stage(directory, path, listed) as stage:
            settled = settle(stage)
            try:
                stage.close()
            except OSError as error:
                if not (settled.failures or settled.notes):
                    where = "move files that the journal doesn't list where they belong"
                    settled.left = f"{system_text(error)}; {where}"
    except CheckpointError as failure:  # its trash is another's, say
        settled = Settled(failures=dict.fromkeys(range(len(listed.groups)), failure.reason))
        settled.left = None if listed.groups else failure.reason
    return listed, settled


def settle(stage: Stage) -> Settled:
    """Complete the committed groups of an open stage, and revert the others and their pointers."""
    return _Settlement(stage).settle()


class _Settlement:
    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._settled = Settled()

    @property
    def _listed(self) -> OperationList:
        return self._stage.listed

    def settle(self) -> Settled:
        settled, listed = self._settled, self._listed
        is_removal = listed.kind == "remove"
        numbers = range(len(listed.groups))
        if not is_removal and (self._is_old_copy() if listed.is_copy is None else listed.is_copy):
            advice = f"keep what you need, and remove {shown(self._stage.path)}"
            why = f"the directory was copied while a command was at work; {advice}"
            return Settled(failures=dict.fromkeys(numbers, why), left=None if listed.groups else why)
        back: list[int] = []
        for number in numbers:
            try:
                if is_removal and not self._stage.holds(number):  # nothing was done with it, or all
                    back += [number] * (number not in (self._stage.done or ()))
                else:
                    (settled.finished if self._is_to_finish(number) else settled.put_back).append(number)
            except OSError as error:
                where = self._stage.shown_place(number)
                settled.failures[number] = f"{system_text(error)}; it is in {where}"
        if settled.failures and not is_removal and listed.is_indivisible:
            why = next(iter(settled.failures.values()))
            return Settled(failures={number: settled.failures.get(number, why) for number in numbers})
        self._keep_blocked()
        self._back([*back, *settled.put_back])
        self._complete()
        return settled

    def _keep_blocked(self) -> None:
        """Complete and commit groups that can't be reverted, since other files have their names.

        A trainer that has gone on after the kill has saved under them.
        """
        settled, listed = self._settled, self._listed
        if self._stage.is_committed or listed.kind in ("remove", "output"):
            return
        kept = [number for number in settled.put_back if any(map(self._is_taken, listed.of_groups[number]))]
        if kept and listed.is_indivisible and listed.kind != "trash":
            kept = settled.put_back
        try:
            for number in kept:
                self._stage.advance(number)
        except (OSError, StalePlan):  # what is in its way is told when it is reverted
            return
        if not kept:
            return
        if listed.pointers and len(kept) == len(listed.groups):
            self._stage.sync()  # the new names are durable before a pointer names them
            for one in listed.pointers:
                if not (isinstance(one, Rewrite) and one.after is None):
                    with suppress(StalePlan):  # a trainer has written that, too
                        self._stage.write_pointer(one)
        self._stage.sync()
        self._stage.record(kept)
        self._stage.commit(kept)
        settled.finished += kept
        settled.put_back = [number for number in settled.put_back if number not in kept]

    def _is_taken(self, one: Move | Exchange) -> bool:
        """Tell whether another file has the old name of a moved file."""
        if isinstance(one, Exchange):
            status = self._stage.roots.status(Location("directory", one.path))
            aside = None if one.old is None else self._stage.roots.status(one.old.location)
            is_new = status is not None and one.new is not None and one.new.file.is_of(status)
            if status is None or aside is None or is_new or os.path.samestat(status, aside):
                return False
            return not self._stage.is_in_trash(one, status)
        if one.source.root == "trash":  # it was restored, and written to since
            return self._stage.roots.has_moved(one) and not self._stage.is_as_noted(one, one.target)
        if not self._stage.roots.has_moved(one):
            return False
        source, target = self._stage.roots.status(one.source), self._stage.roots.status(one.target)
        if one.source.is_private or source is None or (target and os.path.samestat(source, target)):
            return False
        here = self._stage.roots.contents_at({one.source.path: one.source})
        return self._listed.inodes.isdisjoint(file.inode for file in here.files)

    def _back(self, numbers: Sequence[int]) -> None:
        settled, done = self._settled, self._stage.done or frozenset()
        was_committed = self._stage.is_committed
        if not done.isdisjoint(settled.put_back):
            self._stage.withdraw(settled.put_back)
        if not was_committed and not settled.failures:
            failed = self._stage.back_all()
        else:
            failed = self._stage.back(numbers) if numbers else {}
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
            for _ in purge(self._stage.place_of(number), contents, may_be_gone=True):
                pass
        except StalePlan:
            failures[number] = (
                "prune was killed while removing it, and the remaining files have changed or were copied; "
                f"they are in {where}: remove them, or move them back"
            )
        except OSError as error:
            failures[number] = f"{system_text(error)}; what is left of it is in {where}"

    def _is_to_finish(self, number: int) -> bool:
        """Tell whether a group is to be completed: it is committed, and a removal is still wanted.

        What has changed in the stage, or has no survivors any more, is put back unless a part of it is gone.
        """
        listed, status = self._listed, self._stage.roots.status
        if number not in (self._stage.done or ()):
            return False
        if listed.kind != "remove":
            return True
        if any(status(Location("stage", file.path)) is None for file in listed.final_contents(number).files):
            return True
        try:
            self._stage.roots.require_unchanged(number, listed.ends(number))
        except StalePlan:
            return False
        return all(status(Location("directory", name)) for name in listed.groups[number].survivors)

    def _is_old_copy(self) -> bool:
        """Tell whether the files of a 0.1 journal were copied since: none has a recorded inode."""
        if self._listed.kind == "output" or self._stage.is_committed:
            return False  # its area is known by its own inode, or all is done
        is_there = False
        for one in self._listed.operations:
            if isinstance(one, Move):
                locations: tuple[Location, ...] = (one.source, one.target)
            elif isinstance(one, Exchange):
                aside = (stored.location for stored in (one.old, one.new) if stored is not None)
                locations = (Location("directory", one.path), *aside)
            else:
                continue
            for location in locations:
                if self._stage.roots.status(location) is not None:
                    is_there = True
                    here = self._stage.roots.contents_at({location.path: location}).files
                    if not self._listed.inodes.isdisjoint(file.inode for file in here):
                        return False
        return is_there
