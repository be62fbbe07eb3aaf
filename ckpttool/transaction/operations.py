"""Lists of operations: a kill at any of them leaves a directory as it was, or as it was to be.

A journal lists all operations before the first is done. The operations of one checkpoint, its group, are all
done or none; if pointers are written, all groups are done or none. Then ``done.json`` is written, with the
numbers of the committed groups: it is the point of no return. Before it, recovery reverts every operation,
the last first; after it, recovery completes the committed groups, and reverts the others.

```
journal written -> operations done -> record written -> done written -> old names unlinked -> removed
    |_______________ recovery reverts all ___________________|________ recovery completes _______|
```

Everything happens below open directories, never through a symlink. What is moved is compared with its
fingerprint before and after: another process may put a file in its place between the look and the call.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Literal

from ckpttool.core.errors import AccessDenied, CheckpointError, from_os_error, system_text
from ckpttool.io.atomic import write_in
from ckpttool.io.directories import (
    OpenDirectory,
    link_or_rename,
    remove_directory,
    retry_while_busy,
    sync_descriptor,
)
from ckpttool.transaction.files import (
    Contents,
    Fingerprint,
    StalePlan,
    contents,
    opened,
    status_of,
)
from ckpttool.transaction.history import (
    UndoStep,
    add_step,
    drop_groups,
    drop_step,
    make_place,
    tidy,
)
from ckpttool.transaction.journal import (
    PLACE,
    Exchange,
    Group,
    Move,
    Operation,
    OperationList,
    Place,
    Relink,
    Rewrite,
    Spot,
    operations_document,
)
from ckpttool.transaction.mounts import require_one_mount
from ckpttool.transaction.paths import shown
from ckpttool.transaction.places import Places, identities, is_unchanged, open_places, require_file
from ckpttool.transaction.pointer_files import restore_pointer, write_pointer
from ckpttool.transaction.stages import DONE, JOURNAL, new_stage, remove_places, remove_stage
from ckpttool.transaction.state_dir import StateDir, open_own, state_dir_of, state_dir_of_stage
from ckpttool.transaction.stored_journals import read_journal


class StrandedCheckpoint(Exception):
    """A checkpoint, or what is left of it, lies elsewhere than it should; the message says where."""


class UnknownCommit(AccessDenied):
    """Whether groups are committed only recovery can tell, once the disk works again."""


Failures = dict[int, Exception]
"""Why some groups were not done, by their numbers."""


def removal_operations(
    groups: Sequence[Group], rewrites: Sequence[Rewrite] = (), identity: str | None = None
) -> OperationList:
    """Return the operations that write pointers, then move checkpoints away, indexes first.

    Args:
        groups: The checkpoints.
        rewrites: The pointers.
        identity: Of the command into whose trash they go; None for a removal.
    """
    place: Place = "stage" if identity is None else "trash"
    moves = (
        Move(number, Spot("directory", name), Spot(place, os.path.join(PLACE, name)))
        for number, group in enumerate(groups)
        for name in group.members
    )
    return OperationList(
        "remove" if identity is None else "trash", tuple(groups), (*rewrites, *moves), identity
    )


@contextmanager
def begin_stage(directory: str, listed: OperationList, state_dir: StateDir | None = None) -> Iterator[Stage]:
    """Write a journal, and yield its stage, in which nothing is done yet.

    Args:
        directory: The directory, which is locked.
        listed: The operations.
        state_dir: Where stage and trash lie, if that is not where they would be made now.
    """
    state_dir = state_dir_of(directory) if state_dir is None else state_dir
    document, word = operations_document(listed), "removed" if listed.kind == "remove" else "moved"
    with ExitStack() as stack:
        inner = stack.enter_context(new_stage(directory, state_dir, document, word, listed.places("stage")))
        try:
            stage = stack.enter_context(_opened_stage(directory, inner, listed, state_dir))
        except BaseException as failure:
            remove_places(inner)
            remove_stage(inner.path)
            if listed.identity is not None:
                tidy(state_dir, listed.identity)
            if isinstance(failure, OSError):
                reason = from_os_error(failure, directory).reason
                raise AccessDenied(directory, f"{reason}; nothing was {word}") from failure
            raise
        yield stage


@contextmanager
def open_stage(directory: str, path: str, listed: OperationList) -> Iterator[Stage]:
    """Open the stage that a kill left for a directory."""
    with (
        open_own(directory, *os.path.split(path)) as inner,
        _opened_stage(directory, inner, listed, state_dir_of_stage(path)) as stage,
    ):
        yield stage


@contextmanager
def _opened_stage(
    directory: str, inner: OpenDirectory, listed: OperationList, state_dir: StateDir
) -> Iterator[Stage]:
    assert inner.descriptor is not None  # as that of the directory is not
    if listed.identity is not None and (numbers := listed.places("trash")):
        make_place(state_dir, listed.identity, numbers)
    with open_places(directory, listed, state_dir, inner.descriptor) as places:
        yield Stage(places, directory, state_dir, inner)


@contextmanager
def begin_output(directory: OpenDirectory, area: OpenDirectory, listed: OperationList) -> Iterator[Stage]:
    """Write the journal of an output into its area, and yield that as a stage."""
    write_in(area, JOURNAL, json.dumps(operations_document(listed)).encode())
    with open_output(directory, area, listed) as stage:
        yield stage


@contextmanager
def open_output(directory: OpenDirectory, area: OpenDirectory, listed: OperationList) -> Iterator[Stage]:
    """Open the area of an output as a stage."""
    assert directory.descriptor is not None and area.descriptor is not None  # else nothing was begun
    roots: dict[Place, int] = {"directory": directory.descriptor, "stage": area.descriptor}
    with Places(listed, roots) as places:
        yield Stage(places, directory.path, StateDir(directory.path), area)


def settle_stage(directory: str, path: str) -> tuple[OperationList, Settled] | None:
    """Complete or revert what a kill left in a stage; return None where that has no journal.

    Args:
        directory: The directory, which is locked.
        path: Path of the stage.
    """
    listed = read_journal(path, directory)
    if listed is None:
        with open_own(directory, *os.path.split(path)) as inner, suppress(OSError):  # what it holds is told
            remove_places(inner)
        return None
    try:
        with open_stage(directory, path, listed) as stage:
            settled = stage.settle()
            try:
                stage.close()
            except OSError as error:
                if not settled.failures:
                    where = "move files that the journal doesn't list where they belong"
                    settled.left = f"{system_text(error)}; {where}"
    except CheckpointError as failure:  # its trash is another's, say
        settled = Settled(failures=dict.fromkeys(range(len(listed.groups)), failure.reason))
        settled.left = None if listed.groups else failure.reason
    return listed, settled


class Stage:
    """Operations of one journal in progress, with the open directory and its stage.

    Attributes:
        path: Path of the stage.
        directory: Path of the directory.
        listed: Operations.
        done: Numbers of the committed groups.
        is_committed: Whether the commit was written, of pointers alone, too.
    """

    def __init__(self, places: Places, directory: str, state_dir: StateDir, inner: OpenDirectory) -> None:
        """Take a stage: ``inner``, for a directory, with the open places of its operations."""
        self.path = inner.path
        self.directory = directory
        self.listed = places.listed
        self.done = self.listed.done or frozenset()
        self.is_committed = bool(self.done) or (self.listed.done is not None and not self.listed.groups)
        self._state_dir, self._inner, self._places = state_dir, inner, places

    # Forward ------------------------------------------------------------------------------------------

    def forward(self) -> Failures:
        """Do all operations up to the commit; return why some groups were not done.

        Nothing of those is left undone if groups are independent; else whoever calls reverts all.

        Raises:
            OSError: A pointer can't be written.
            StalePlan: A pointer has changed.
        """
        listed, failures = self.listed, dict[int, Exception]()
        is_synced = True
        for one in listed.operations:
            if isinstance(one, Rewrite | Relink):
                if failures:
                    break
                if isinstance(one, Rewrite) and one.after is None:
                    continue  # it goes with the old names
                if not is_synced:  # the new names are on the disk before anything says them
                    self._sync()
                    is_synced = True
                write_pointer(one, self._places.roots["directory"], self._places.roots["stage"])
            elif one.group not in failures:
                is_synced = False
                try:
                    self._do(one)
                except (OSError, StalePlan) as failure:
                    failures[one.group] = failure
                    if not listed.is_indivisible:
                        failures |= self.back([one.group])
                    elif listed.kind not in ("remove", "trash"):
                        break
        return failures

    def _do(self, one: Move | Exchange) -> None:
        steps = self.listed.of_groups[one.group]
        if one is steps[0]:
            self._places.require_ready(one.group)
        if isinstance(one, Move):
            self._places.move(one.source, one.target, keeps=one.is_link)
        else:
            self._exchange(one)
        if one is steps[-1]:
            # Another file could have come between the look and the call.
            self._places.require_unchanged(one.group, self.listed.ends(one.group))

    def _exchange(self, one: Exchange) -> None:
        """Put the old file aside, and the new one in its place; its name is never free."""
        directory, name = self._places.at(Spot("directory", one.path))
        if one.new is not None:
            source, waiting = self._places.at(one.new.spot)
            require_file(one.new.file, waiting, source, "what was to take its place has gone")
        if one.old is None:
            assert one.new is not None  # else nothing is to be done
            self._places.move(one.new.spot, Spot("directory", one.path))
            return
        require_file(one.old.file, name, directory, "it has changed")
        aside, other = self._places.at(one.old.spot)
        if one.new is None:
            self._places.move(Spot("directory", one.path), one.old.spot)
            return
        link_or_rename(name, directory, other, aside, lambda: status_of(other, aside) is not None)
        require_file(one.old.file, other, aside, "it has changed")
        retry_while_busy(partial(os.replace, waiting, name, src_dir_fd=source, dst_dir_fd=directory))

    def commit(self, numbers: Collection[int]) -> None:
        """Commit some groups, once all that was done is on the disk; after an OSError none is committed."""
        try:
            self._sync()
            self._record(numbers)
            self._write_done(numbers)
        except OSError as error:
            try:
                with suppress(FileNotFoundError):
                    self._inner.unlink(DONE)
                    self._inner.sync()
                self._forget()
            except OSError as failure:  # it may be on the disk, or not: recovery will see
                raise UnknownCommit(
                    self.path, f"{system_text(error)}; the next command recovers"
                ) from failure
            raise

    def withdraw(self, numbers: Collection[int]) -> None:
        """Uncommit groups that are about to be restored."""
        rest = self.done - frozenset(numbers)
        if rest != self.done:
            self._write_done(rest)
        elif self.is_committed and not self.listed.groups:
            self._inner.unlink(DONE)
            self._inner.sync()
            self.is_committed = False

    def _write_done(self, numbers: Collection[int]) -> None:
        write_in(self._inner, DONE, json.dumps(sorted(numbers)).encode())
        self.done = frozenset(numbers)
        self.is_committed = bool(self.done) or not self.listed.groups

    def _record(self, numbers: Collection[int]) -> None:
        """Record how groups are undone, in the command's place in the trash."""
        listed = self.listed
        if listed.identity is None or listed.kind == "restore":
            return
        done = listed.only(numbers)
        rewritten = {one.name for one in listed.pointers}
        found = [done.final_contents(number) for number in range(len(done.groups))]
        for number, known in enumerate(found):
            if not rewritten.isdisjoint(file.path for file in known.files):
                found[number] = contents(
                    self._places.roots["directory"], [now for _, now in done.names(number)]
                )
        step = UndoStep(os.path.basename(self.path), done.inverse(found))
        kind: Literal["rename", "trash"] = "rename" if listed.kind == "rename" else "trash"
        add_step(self.directory, self._state_dir, listed.identity, kind, step)

    # Back ---------------------------------------------------------------------------------------------

    def back(self, numbers: Collection[int]) -> Failures:
        """Revert the operations of some groups, the last first; return what could not be reverted.

        Pointers name again what is back; changes that others made to them are kept.
        """
        failures = Failures()
        self._relink(numbers)
        for (number, _), steps in groupby(reversed(self.listed.operations), key=_group_and_place):
            if number is None:
                for one in steps:
                    if isinstance(one, Rewrite | Relink):
                        self._restore_pointer(one, set(numbers) - failures.keys())
            elif number in numbers and number not in failures:
                try:
                    self._revert(number, [one for one in steps if isinstance(one, Move | Exchange)])
                except OSError as error:
                    where = f"it is in {self.shown_place(number)}, to be moved or removed by hand"
                    failures[number] = StrandedCheckpoint(f"not put back: {system_text(error)}; {where}")
        return failures

    def _relink(self, numbers: Collection[int]) -> None:
        """Give files that lost their old names these again, before pointers say them."""
        lost = [
            one
            for one in self.listed.operations
            if isinstance(one, Move) and one.is_link and one.group in numbers and self._is_unlinked(one)
        ]
        for one in lost:
            self._places.move(one.target, one.source, keeps=True, is_back=True)
        if lost:
            self._sync()

    def _is_unlinked(self, one: Move) -> bool:
        if self._places.status(one.source) is not None:
            return False
        status = self._places.status(one.target)
        return status is not None and stat.S_ISREG(status.st_mode) and self._places.has_moved(one)

    def back_all(self) -> Failures:
        """Revert all operations, and what was recorded of them."""
        failures = self.back(range(len(self.listed.groups)))
        self._sync()
        if not failures:
            self._forget()
        return failures

    def _forget(self) -> None:
        """Take the journal out of the record."""
        if self.listed.identity is not None and self.listed.kind != "restore":
            drop_step(self.directory, self._state_dir, self.listed.identity, os.path.basename(self.path))

    def _revert(self, number: int, steps: Sequence[Move | Exchange]) -> None:
        """Revert operations of one group that follow each other, all of them or none."""
        moves = [one for one in steps if isinstance(one, Move) and self._places.has_moved(one)]
        for one in moves:
            if (source := self._places.status(one.source)) is not None:
                target = self._places.status(one.target)
                if target is None or not os.path.samestat(source, target):
                    raise FileExistsError(errno.EEXIST, "its place is taken by another file", one.source.path)
        for step in steps:
            if isinstance(step, Exchange):
                self._revert_exchange(step)
            elif step in moves:
                self._revert_move(step)

    def _revert_move(self, one: Move) -> None:
        """Give an entry its old name again; a file that was restored, and written to since, stays."""
        source, target = self._places.status(one.source), self._places.status(one.target)
        is_kept = self.listed.kind in ("restore", "output") and one.source.is_private
        if is_kept and target is not None and not self._is_as_noted(one):
            if source is not None:
                self._places.unlink(one.source)
        elif source is None:
            self._places.move(one.target, one.source, is_back=True)
        else:  # it has both names
            self._places.unlink(one.target)

    def _is_as_noted(self, one: Move) -> bool:
        here = self._places.contents_at({self._places.member(one): one.target})
        return identities(here.files) == identities(self._places.noted(one))

    def _revert_exchange(self, one: Exchange) -> None:
        spot = Spot("directory", one.path)
        status = self._places.status(spot)
        is_new = one.new is not None and status is not None and one.new.file.is_of(status)
        aside = None if one.old is None else self._places.status(one.old.spot)
        if one.old is None or aside is None:  # nothing was replaced, or it is back
            if one.old is None and is_new:
                self._give_back(one)
                self._places.unlink(spot)
            return
        if status is not None and os.path.samestat(status, aside):
            self._places.unlink(one.old.spot)
            return
        if status is not None and not is_new:
            raise FileExistsError(errno.EEXIST, "its place is taken by another file", one.path)
        if is_new:
            self._give_back(one)
        (here, name), (there, other) = self._places.at(one.old.spot), self._places.at(spot)
        retry_while_busy(partial(os.replace, name, other, src_dir_fd=here, dst_dir_fd=there))

    def _give_back(self, one: Exchange) -> None:
        """Let a file that came from the trash have its name there again; others were made for this."""
        if (
            one.new is not None
            and one.new.spot.place == "trash"
            and self._places.status(one.new.spot) is None
        ):
            self._places.move(Spot("directory", one.path), one.new.spot, keeps=True)

    def _restore_pointer(self, one: Rewrite | Relink, numbers: Collection[int]) -> None:
        groups = self.listed.groups
        back = [number for number in numbers if self._is_home(number) or self.holds(number)]
        names = {os.path.basename(groups[number].path) for number in back}
        directory, stage = self._places.roots["directory"], self._places.roots["stage"]
        restore_pointer(one, names, directory, stage, is_all=len(back) == len(groups))

    def _is_home(self, number: int) -> bool:
        """Tell whether all members of a group are where they were before the first operation."""
        home = (Spot(self.listed.home(number), member) for member in self.listed.groups[number].members)
        return all(map(self._places.status, home))

    # Finishing ------------------------------------------------------------------------------------------

    def finish(self, number: int) -> None:
        """Unlink the old names of a committed group, and what it has replaced.

        Raises:
            StalePlan: A file was written to since: it has both names.
        """
        for one in reversed(self.listed.of_groups[number]):
            if isinstance(one, Exchange):
                if one.old is not None and one.old.spot.place == "stage":
                    if (status := self._places.status(one.old.spot)) and not one.old.file.is_of(status):
                        raise StalePlan(f"what it replaced was written to; it is in {self.path}")
                    self._places.unlink(one.old.spot)
            elif not one.target.is_private:
                source, target = self._places.status(one.source), self._places.status(one.target)
                if source is None or target is None or not os.path.samestat(source, target):
                    continue  # moved by renaming, or another file by now
                noted = {(file.size, file.mtime_ns) for file in self._places.noted(one)}
                if not one.source.is_private and (source.st_size, source.st_mtime_ns) not in noted:
                    both = f"{one.source.path} and {one.target.path}"
                    raise StalePlan(f"it was written to meanwhile, and has both names, {both}")
                self._places.unlink(one.source)

    def finish_pointers(self) -> None:
        """Unlink the indexes that others stand for under new names."""
        for one in self.listed.pointers:
            if isinstance(one, Rewrite) and one.after is None:
                with suppress(StalePlan):  # it says something else by now: it isn't ours
                    write_pointer(one, self._places.roots["directory"], self._places.roots["stage"])

    def purge(self, number: int) -> Iterator[int]:
        """Unlink an unchanged checkpoint that was set aside; yield the bytes that each file frees."""
        has_begun = False
        try:
            self._places.require_unchanged(number, self.listed.ends(number))
            for freed in purge(self._place_of(number), self.listed.groups[number].contents):
                has_begun = True
                yield freed
        except (StalePlan, OSError) as failure:
            if not has_begun:
                raise
            raise _partly_removed(failure, self.shown_place(number)) from failure

    def _place_of(self, number: int) -> int:
        """Return the open directory in the stage that a removed group lies in, by its own names."""
        return self._places.at(next(iter(self.listed.ends(number).values())))[0]

    def drop_record(self, numbers: Collection[int]) -> None:
        """Take restored groups out of the record of the command that they were restored from."""
        if self.listed.kind == "restore" and self.listed.identity is not None:
            drop_groups(
                self.directory, self._state_dir, self.listed.only(numbers), self._places.roots["directory"]
            )

    def close(self) -> None:
        """Remove the empty directories for files, in the stage and in the trash."""
        remove_places(self._inner)
        if self.listed.identity is not None:
            tidy(self._state_dir, self.listed.identity)

    # What is there --------------------------------------------------------------------------------------

    def shown_place(self, number: int) -> str:
        """Return the path of the directory that a group is moved to, for messages."""
        spot = next(iter(self.listed.ends(number).values()))
        roots = {"stage": self.path, "directory": self.directory}
        if spot.place == "trash":
            roots["trash"] = self._state_dir.trash_place(self.listed.identity or "")
        return shown(os.path.join(roots[spot.place], os.path.dirname(spot.path)))

    def holds(self, number: int) -> bool:
        """Tell whether a part of a group lies where operations bring it."""
        return any(
            self._places.has_moved(one) if isinstance(one, Move) else self._was_exchanged(one)
            for one in self.listed.of_groups[number]
        )

    def _was_exchanged(self, one: Exchange) -> bool:
        if one.old is not None:
            return self._places.status(one.old.spot) is not None
        status = self._places.status(Spot("directory", one.path))
        return one.new is not None and status is not None and one.new.file.is_of(status)

    def _sync(self) -> None:
        """Make the names that operations give and take durable."""
        for place, above in self.listed.parents:
            with suppress(FileNotFoundError, NotADirectoryError):  # nothing was done there
                sync_descriptor(self._places.at(Spot(place, os.path.join(above, os.curdir)))[0])

    # Recovery -------------------------------------------------------------------------------------------

    def settle(self) -> Settled:
        """Complete committed groups, and revert the others and their pointers."""
        settled, is_removal = Settled(), self.listed.kind == "remove"
        back: list[int] = []
        numbers = range(len(self.listed.groups))
        if not is_removal and self._is_copy():
            advice = f"keep what you need, and remove {shown(self.path)}"
            why = f"the directory was copied while a command was at work; {advice}"
            return Settled(failures=dict.fromkeys(numbers, why))
        for number in numbers:
            try:
                is_held = self.holds(number)
                if not is_held and is_removal:  # nothing was done with it, or all
                    back += [number] * (number not in self.done)
                    continue
                (settled.finished if self._is_to_finish(number) else settled.put_back).append(number)
            except OSError as error:
                settled.failures[number] = f"{system_text(error)}; it is in {self.shown_place(number)}"
        if settled.failures and not is_removal and self.listed.is_indivisible:
            return Settled(
                failures=dict.fromkeys(range(len(self.listed.groups)), min(settled.failures.values()))
            )
        self._keep_blocked(settled)
        self._settle_groups(settled, [*back, *settled.put_back])
        return settled

    def _keep_blocked(self, settled: Settled) -> None:
        """Commit groups that can't be reverted, since their names are those of other files by now.

        A trainer that has gone on after the kill has saved under them.
        """
        if self.is_committed or self.listed.kind in ("remove", "output"):
            return
        blocked = [number for number in settled.put_back if self._is_blocked(number)]
        kept = blocked
        if blocked and self.listed.is_indivisible and self.listed.kind != "trash":
            kept = settled.put_back if all(map(self._is_at_end, settled.put_back)) else []
        if not kept:
            return
        if len(kept) == len(self.listed.groups):
            for one in self.listed.pointers:
                if not (isinstance(one, Rewrite) and one.after is None):
                    with suppress(StalePlan):  # a trainer has written that, too
                        write_pointer(one, self._places.roots["directory"], self._places.roots["stage"])
        self.commit(kept)
        settled.finished += kept
        settled.put_back = [number for number in settled.put_back if number not in kept]

    def _is_blocked(self, number: int) -> bool:
        """Tell whether a group is at its end, and another file has one of the names that it had."""
        return self._is_at_end(number) and any(map(self._is_taken, self.listed.of_groups[number]))

    def _is_at_end(self, number: int) -> bool:
        return all(map(self._places.status, self.listed.ends(number).values()))

    def _is_taken(self, one: Move | Exchange) -> bool:
        """Tell whether another file has the name from which an operation has moved one."""
        if isinstance(one, Exchange):
            status = self._places.status(Spot("directory", one.path))
            aside = None if one.old is None else self._places.status(one.old.spot)
            is_new = status is not None and one.new is not None and one.new.file.is_of(status)
            return not (status is None or aside is None or is_new or os.path.samestat(status, aside))
        if one.source.place == "trash":  # it was restored, and written to since
            return self._places.has_moved(one) and not self._is_as_noted(one)
        source, target = self._places.status(one.source), self._places.status(one.target)
        if one.source.is_private or source is None or (target and os.path.samestat(source, target)):
            return False
        known = {file.inode for group in self.listed.groups for file in group.contents.files}
        here = self._places.contents_at({one.source.path: one.source})
        return known.isdisjoint(file.inode for file in here.files)

    def _settle_groups(self, settled: Settled, back: Sequence[int]) -> None:
        was_committed = self.is_committed
        if not self.done.isdisjoint(settled.put_back):
            self.withdraw(settled.put_back)
        if not was_committed and not settled.failures:
            failed = self.back_all()
        else:
            failed = self.back(back) if back else {}
        settled.failures |= {number: str(failure) for number, failure in failed.items()}
        for number in settled.finished:
            try:
                self._complete(number)
            except StalePlan as change:
                settled.failures[number] = str(change)
            except OSError as error:
                left = self.shown_place(number)
                settled.failures[number] = f"{system_text(error)}; what is left of it is in {left}"
        if self.is_committed and not settled.failures:
            self.finish_pointers()
            self.drop_record(self.done)

    def _is_to_finish(self, number: int) -> bool:
        """Tell whether a group is committed, and if it is removed that this is wanted still.

        What has changed in the stage, or has no survivors any more, is put back unless a part of it is gone.
        """
        if number not in self.done:
            return False
        if self.listed.kind != "remove":
            return True
        if any(
            self._places.status(Spot("stage", file.path)) is None
            for file in self.listed.final_contents(number).files
        ):
            return True
        try:
            self._places.require_unchanged(number, self.listed.ends(number))
        except StalePlan:
            return False
        survivors = self.listed.groups[number].survivors
        return all(self._places.status(Spot("directory", name)) for name in survivors)

    def _complete(self, number: int) -> None:
        if self.listed.kind != "remove":
            self.finish(number)
            return
        try:
            for _ in purge(self._place_of(number), self.listed.groups[number].contents, may_be_gone=True):
                pass
        except StalePlan as change:
            raise StalePlan(
                "prune was killed while removing it, and the remaining files have changed or were copied; "
                f"they are in {self.shown_place(number)}: remove them, or move them back"
            ) from change

    def _is_copy(self) -> bool:
        """Tell whether what has moved was copied since: nothing tells then which file is which."""
        inodes = {file.inode for group in self.listed.groups for file in group.contents.files}
        has_copies = False
        for one in self.listed.operations:
            if not isinstance(one, Move):
                continue
            member = self._places.member(one)
            noted = self.listed.files_at(one.group, member)
            statuses = [self._places.status(spot) for spot in (one.source, one.target)]
            for spot, status in zip((one.source, one.target), statuses, strict=True):
                if status is None:
                    continue
                here = self._places.contents_at({member: spot}).files
                if not inodes.isdisjoint(file.inode for file in here):
                    return False  # one file that is still itself tells that nothing was copied
                is_old = self.is_committed or one.target.is_private  # else the new name is one too many
                if spot == (one.source if is_old else one.target) and not spot.is_private and statuses[1]:
                    has_copies |= _versions(here) == _versions(noted) and not _are_one(*statuses)
        return has_copies


@dataclass(slots=True)
class Settled:
    """What became of the groups of a journal, by number: completed, reverted, or why neither.

    ``left`` says what files the stage holds that the journal doesn't list.
    """

    finished: list[int] = field(default_factory=list)
    put_back: list[int] = field(default_factory=list)
    failures: dict[int, str] = field(default_factory=dict)
    left: str | None = None


def _group_and_place(one: Operation) -> tuple[int | None, Place]:
    """Return the group of an operation, and where it moves: what goes through the stage is moved twice."""
    if isinstance(one, Move):
        return one.group, one.target.place
    return (one.group if isinstance(one, Exchange) else None), "directory"


def _are_one(status: os.stat_result | None, other: os.stat_result | None) -> bool:
    return status is not None and other is not None and os.path.samestat(status, other)


def _versions(files: Iterable[Fingerprint]) -> set[tuple[str, int, int]]:
    """Return what a copy has in common with its original."""
    return {(file.path, file.size, file.mtime_ns) for file in files}


# Unlinking ------------------------------------------------------------------------------------------


def purge_unchanged(place: int, group: Group, shown_place: str) -> Iterator[int]:
    """Unlink a checkpoint that is as it was; yield the bytes that each file frees.

    Args:
        place: Descriptor of the directory that its members lie in.
        group: The checkpoint.
        shown_place: What the user is told of where the rest lies.
    """
    has_begun = False
    try:
        here = contents(place, group.members)
        if not is_unchanged(here, group.contents):
            raise StalePlan("it has changed", since_plan=True)
        for freed in purge(place, group.contents):
            has_begun = True
            yield freed
    except (StalePlan, OSError) as failure:
        if not has_begun:
            raise
        raise _partly_removed(failure, shown_place) from failure


def _partly_removed(failure: StalePlan | OSError, shown_place: str) -> StrandedCheckpoint:
    why = system_text(failure) if isinstance(failure, OSError) else str(failure)
    return StrandedCheckpoint(f"partly removed: {why}; the rest is in {shown_place}")


def purge(place: int, contents: Contents, *, may_be_gone: bool = False) -> Iterator[int]:
    """Unlink files and remove their directories; yield the bytes that each file frees.

    A directory that holds something else stays, and is an OSError.

    Args:
        place: Descriptor of the directory that they lie in.
        contents: What goes.
        may_be_gone: Whether a part of it may have gone before.
    """
    for parent, files in groupby(contents.files, key=lambda file: os.path.dirname(file.path)):
        try:
            with _opened_within(parent, place) as directory:
                for file in files:
                    yield _unlink_file(os.path.basename(file.path), directory, file)
        except FileNotFoundError:
            if not may_be_gone:
                raise
    for path in sorted(contents.directories, key=lambda path: path.count(os.sep), reverse=True):
        parent, name = os.path.split(path)
        with suppress(FileNotFoundError), _opened_within(parent, place) as directory:
            retry_while_busy(partial(remove_directory, name, directory))


@contextmanager
def _opened_within(path: str, place: int) -> Iterator[int]:
    """Open a directory below another, in the same mount: what is mounted there later isn't touched either."""
    with opened(path, place) as directory:
        if path:
            require_one_mount(directory, place)
        yield directory


def _unlink_file(name: str, directory: int, file: Fingerprint) -> int:
    """Unlink a file if it is the one that is meant, or has gone; return the bytes that this frees."""
    status = status_of(name, directory)
    if status is None:
        return 0
    if not file.is_of(status):
        raise StalePlan("it has changed while it was being removed")
    with suppress(FileNotFoundError):  # somebody was faster
        retry_while_busy(partial(os.unlink, name, dir_fd=directory))
    return status.st_size if status.st_nlink == 1 and stat.S_ISREG(status.st_mode) else 0
