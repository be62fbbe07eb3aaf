"""Executes lists of operations: after a kill, recovery completes or reverts the whole list.

A journal lists all operations before the first is done. The operations of one checkpoint, its group, are all
done or none; if pointers are written, all groups are done or none. Then ``done.json`` is written, with the
numbers of the committed groups: it is the point of no return. Before it, recovery reverts every operation,
the last first; after it, recovery completes the committed groups, and reverts the others.

```
journal written -> operations done -> record written -> done written -> old names unlinked -> removed
    |_______________ recovery reverts all ___________________|________ recovery completes _______|
```

Everything happens below open directories, never through a symlink. What is moved is compared with its
fingerprint before and after: another process may put a file in its place between the check and the call.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import groupby
from typing import Literal

from ckpttool.core.errors import AccessDenied, CheckpointError, from_os_error, system_text
from ckpttool.storage.atomic import write_in
from ckpttool.storage.directories import OpenDirectory, link_or_rename, retry_while_busy, sync_descriptor
from ckpttool.transaction.files import StalePlan, status_of
from ckpttool.transaction.history import UndoStep, add_step, drop_groups, drop_step, make_place, tidy
from ckpttool.transaction.journal import (
    Exchange,
    Location,
    Move,
    Operation,
    OperationList,
    Relink,
    Rewrite,
    Root,
)
from ckpttool.transaction.journal_documents import operations_document
from ckpttool.transaction.open_roots import OpenRoots, identities, open_roots, require_file
from ckpttool.transaction.paths import shown
from ckpttool.transaction.pointer_files import restore_pointer, temporary_name, write_pointer
from ckpttool.transaction.stages import DONE, JOURNAL, new_stage, remove_places, remove_stage
from ckpttool.transaction.state_dir import StateDir, open_own, state_dir_of, state_dir_of_stage
from ckpttool.transaction.unlinking import StrandedCheckpoint, purge_checked

Failures = dict[int, Exception]
"""Why some groups were not done, by their numbers."""


class UnknownCommit(AccessDenied):
    """The disk failed during a commit; only recovery can tell whether it took effect."""


@contextmanager
def begin_stage(directory: str, listed: OperationList, state_dir: StateDir | None = None) -> Iterator[Stage]:
    """Write a journal and yield its stage, before the first operation.

    Args:
        directory: The directory, which is locked.
        listed: The operations.
        state_dir: Where stage and trash lie, if that is not where they would be made now.
    """
    state_dir = state_dir_of(directory) if state_dir is None else state_dir
    document, word = operations_document(listed), "removed" if listed.kind == "remove" else "moved"
    with ExitStack() as stack:
        inner = stack.enter_context(new_stage(directory, state_dir, document, word, listed.numbered("stage")))
        try:
            try:
                stage = stack.enter_context(_opened_stage(directory, inner, listed, state_dir))
            except BaseException:
                remove_places(inner)
                remove_stage(inner.path)
                if listed.identity is not None:
                    tidy(state_dir, listed.identity)
                raise
        except OSError as failure:
            reason = from_os_error(failure, directory).reason
            raise AccessDenied(directory, f"{reason}; nothing was {word}") from failure
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
    if listed.identity is not None and (numbers := listed.numbered("trash")):
        make_place(state_dir, listed.identity, numbers)
    with open_roots(directory, listed, state_dir, inner.descriptor) as roots:
        yield Stage(roots, directory, state_dir, inner)


@contextmanager
def begin_output(directory: OpenDirectory, area: OpenDirectory, listed: OperationList) -> Iterator[Stage]:
    """Write the journal of an output into its directory, and yield it as a stage."""
    write_in(area, JOURNAL, json.dumps(operations_document(listed)).encode())
    with open_output(directory, area, listed) as stage:
        yield stage


@contextmanager
def open_output(directory: OpenDirectory, area: OpenDirectory, listed: OperationList) -> Iterator[Stage]:
    """Open the directory of an output as a stage."""
    assert directory.descriptor is not None and area.descriptor is not None  # else nothing was begun
    descriptors: dict[Root, int] = {"directory": directory.descriptor, "stage": area.descriptor}
    with OpenRoots(listed, descriptors) as roots:
        yield Stage(roots, directory.path, StateDir(directory.path), area)


class Stage:
    """Operations of one journal in progress, with the open directory and its stage.

    Attributes:
        path: Path of the stage.
        directory: Path of the directory.
        listed: Operations.
        done: Numbers of the committed groups; None before the commit.
        roots: The open directories.
    """

    def __init__(self, roots: OpenRoots, directory: str, state_dir: StateDir, inner: OpenDirectory) -> None:
        """Take a stage: ``inner``, for a directory, with the open directories of its operations."""
        self.path = inner.path
        self.directory = directory
        self.listed, self.done = roots.listed, roots.listed.done
        self.roots = roots
        self._state_dir, self._inner = state_dir, inner

    @property
    def is_committed(self) -> bool:
        """Whether some groups are committed, or the pointers of a list without groups."""
        return self.listed.commits(self.done)

    # Forward ------------------------------------------------------------------------------------------

    def forward(self) -> Failures:
        """Do all operations up to the commit; return the errors by group.

        Groups that are independent of others are reverted then; else whoever calls reverts all.

        Raises:
            OSError: A pointer can't be written.
            StalePlan: A pointer has changed.
        """
        listed, failures = self.listed, Failures()
        is_synced = True
        for one in listed.operations:
            if isinstance(one, Rewrite | Relink):
                if failures:
                    break
                if isinstance(one, Rewrite) and one.after is None:
                    continue  # it goes with the old names
                if not is_synced:  # the new names are on the disk before anything says them
                    self.sync()
                    is_synced = True
                self.write_pointer(one)
            elif one.group not in failures:
                is_synced = False
                try:
                    self._do(one)
                except (OSError, StalePlan) as failure:
                    failures[one.group] = failure
                    if not listed.is_indivisible:
                        failures |= self._back_group(one.group)
                    elif listed.kind not in ("remove", "trash"):
                        break
        return failures

    def write_pointer(self, one: Rewrite | Relink) -> None:
        """Rewrite a pointer, unless it has changed since the plan was made."""
        write_pointer(one, self.roots.descriptors["directory"], self.roots.descriptors["stage"])

    def _do(self, one: Move | Exchange) -> None:
        steps = self.listed.of_groups[one.group]
        if one is steps[0]:
            self.roots.require_ready(one.group)
            self._set_aside([step for step in steps if isinstance(step, Exchange)])
        if isinstance(one, Move):
            self.roots.move(one.source, one.target)
        else:
            self._exchange(one)
        if one is steps[-1]:
            # Another file could have come between the check and the call.
            self.roots.require_unchanged(one.group, self.listed.ends(one.group))

    def _set_aside(self, exchanges: Sequence[Exchange]) -> None:
        """Link the files that are replaced to another name, and sync, before they lose their own."""
        for one in exchanges:
            is_aside = one.old is not None and self.roots.status(one.old.location) is not None
            if one.old is not None and one.new is not None and not is_aside:
                directory, name = self.roots.at(Location("directory", one.path))
                require_file(one.old.file, name, directory, "it has changed")
                aside, other = self.roots.at(one.old.location)
                link_or_rename(name, directory, other, aside, lambda: False)
                require_file(one.old.file, other, aside, "it has changed")
        if exchanges:
            self.sync()

    def _exchange(self, one: Exchange) -> None:
        """Replace the old file by the new one atomically."""
        here = Location("directory", one.path)
        if one.new is None:
            assert one.old is not None  # one of them is given
            directory, name = self.roots.at(here)
            require_file(one.old.file, name, directory, "it has changed")
            self.roots.move(here, one.old.location)
            return
        source, waiting = self.roots.at(one.new.location)
        require_file(one.new.file, waiting, source, "what was to take its place has gone")
        if one.old is None:
            self.roots.move(one.new.location, here)
            return
        directory, name = self.roots.at(here)
        if status_of(name, directory) is not None:  # it has, where there are hard links
            require_file(one.old.file, name, directory, "it has changed")
        if one.new.location.root == "trash":  # where it keeps its name until the commit
            stage, other = self.roots.descriptors["stage"], temporary_name()
            with suppress(OSError):  # else it leaves the trash now: the journal knows no third name of it
                os.link(waiting, other, src_dir_fd=source, dst_dir_fd=stage, follow_symlinks=False)
                source, waiting = stage, other
        retry_while_busy(partial(os.replace, waiting, name, src_dir_fd=source, dst_dir_fd=directory))

    def advance(self, number: int) -> None:
        """Do the remaining operations of a group after a kill.

        Raises:
            StalePlan: What is left to be moved has changed.
            OSError: It can't be moved.
        """
        for one in self.listed.of_groups[number]:
            if isinstance(one, Exchange):
                if self._is_waiting(one):
                    self._set_aside([one])
                    self._exchange(one)
            elif not self.roots.has_moved(one):
                if not self.is_as_noted(one, one.source):
                    raise StalePlan("it has changed", since_plan=True)
                self.roots.move(one.source, one.target)

    def _is_waiting(self, one: Exchange) -> bool:
        """Tell whether an exchange is still to be done: the name is free, or has the old file."""
        status = self.roots.status(Location("directory", one.path))
        if one.old is None or status is None:
            return status is None
        aside = self.roots.status(one.old.location)
        return aside is None or os.path.samestat(status, aside)

    def prepare(self, numbers: Collection[int]) -> Failures:
        """Sync the operations of some groups, and record how they are undone.

        Returns:
            Which of them have changed since; if there are any, nothing is recorded.
        """
        failures = Failures()
        if self.listed.kind not in ("remove", "output"):
            for number in numbers:
                try:
                    self.roots.require_unchanged(number, self.listed.ends(number))
                except (OSError, StalePlan) as failure:
                    failures[number] = failure
        if not failures:
            self.sync()
            try:
                self.record(numbers)
            except (OSError, CheckpointError):  # it may have been written
                self._forget()
                raise
        return failures

    def commit(self, numbers: Collection[int]) -> None:
        """Commit some groups; after an OSError none is committed."""
        try:
            self._write_done(numbers)
        except OSError as error:
            try:
                with suppress(FileNotFoundError):
                    self._inner.unlink(DONE)
                    self._inner.sync()
                self._forget()
            except OSError as failure:  # it may be on the disk, or not: recovery will see
                reason = f"{system_text(error)}; the next command recovers"
                raise UnknownCommit(self.path, reason) from failure
            raise

    def withdraw(self, numbers: Collection[int]) -> None:
        """Uncommit groups that are about to be restored."""
        done = self.done or frozenset()
        if not done.isdisjoint(numbers):
            self._write_done(done - frozenset(numbers))
        elif self.is_committed and not self.listed.groups:
            self._inner.unlink(DONE)
            self._inner.sync()
            self.done = None

    def _write_done(self, numbers: Collection[int]) -> None:
        write_in(self._inner, DONE, json.dumps(sorted(numbers)).encode())
        self.done = frozenset(numbers)

    def record(self, numbers: Collection[int]) -> None:
        """Write the undo step of some groups to the command's record in the trash."""
        listed = self.listed
        if listed.identity is None or listed.kind == "restore":
            return
        done = listed.only(numbers)
        step = UndoStep(os.path.basename(self.path), done.inverse())
        kind: Literal["rename", "trash"] = "rename" if listed.kind == "rename" else "trash"
        add_step(self.directory, self._state_dir, listed.identity, kind, step)

    # Back ---------------------------------------------------------------------------------------------

    def back(self, numbers: Collection[int]) -> Failures:
        """Revert the operations of some groups in reverse order; return the errors by group.

        Pointers name again what is back; changes that others made to them are kept.
        """
        failures = self._relink(numbers)
        back = [number for number in numbers if self._is_home(number) or self.holds(number)]
        rewrites = [one for one in self.listed.pointers if isinstance(one, Rewrite)]
        saved = self._saved_again({one.name: one.after or "" for one in rewrites if one.before is None})
        for (number, _), steps in groupby(reversed(self.listed.operations), key=_group_and_place):
            if number is None:
                for one in steps:
                    if isinstance(one, Rewrite | Relink) and one.name not in saved:
                        self._restore_pointer(one, [at for at in back if at not in failures])
            elif number in numbers and number not in failures:
                failures |= self._reverted(number, [one for one in steps if isinstance(one, Move | Exchange)])
        self.sync()
        return failures

    def _back_group(self, number: int) -> Failures:
        """Revert the operations of one group of a list without pointers."""
        return self._reverted(number, self.listed.of_groups[number][::-1])

    def _reverted(self, number: int, steps: Sequence[Move | Exchange]) -> Failures:
        try:
            self._revert(steps)
        except (OSError, StalePlan) as failure:
            why = system_text(failure) if isinstance(failure, OSError) else str(failure)
            where = f"it is in {self.shown_place(number)}, to be moved or removed by hand"
            return {number: StrandedCheckpoint(f"not put back: {why}; {where}")}
        return {}

    def _relink(self, numbers: Collection[int]) -> Failures:
        """Restore unlinked old names before pointers name them again."""
        failures, is_changed = Failures(), False
        for one in self.listed.operations:
            if isinstance(one, Move) and one.is_within and one.group in numbers and self._is_unlinked(one):
                try:
                    self.roots.link_back(one.source, one.target)
                except OSError as failure:
                    failures[one.group] = StrandedCheckpoint(f"not put back: {system_text(failure)}")
                is_changed = True
        if is_changed:
            self.sync()
        return failures

    def _is_unlinked(self, one: Move) -> bool:
        if self.roots.status(one.source) is not None:
            return False
        status = self.roots.status(one.target)
        return status is not None and stat.S_ISREG(status.st_mode) and self.roots.has_moved(one)

    def back_all(self) -> Failures:
        """Revert all operations, and drop their undo step."""
        failures = self.back(range(len(self.listed.groups)))
        if not failures:
            self._forget()
        return failures

    def _forget(self) -> None:
        """Drop the undo step of this journal from the record."""
        if self.listed.identity is not None and self.listed.kind != "restore":
            drop_step(self.directory, self._state_dir, self.listed.identity, os.path.basename(self.path))

    def _revert(self, steps: Sequence[Move | Exchange]) -> None:
        """Revert consecutive operations of one group, unless one of them is blocked."""
        moves = [one for one in steps if isinstance(one, Move) and self.roots.has_moved(one)]
        for one in moves:
            source, target = self.roots.status(one.source), self.roots.status(one.target)
            if source is not None and not (target is not None and os.path.samestat(source, target)):
                raise FileExistsError(errno.EEXIST, _TAKEN, one.source.path)
        for step in steps:
            if isinstance(step, Exchange):
                self._revert_exchange(step)
            elif step in moves:
                self._revert_move(step)

    def _revert_move(self, one: Move) -> None:
        """Move an entry back to its old name, unless it was restored and modified since."""
        source, target = self.roots.status(one.source), self.roots.status(one.target)
        is_kept = self.listed.kind in ("restore", "output") and one.source.is_private
        if is_kept and target is not None and not self.is_as_noted(one, one.target):
            if source is not None:
                self.roots.unlink(one.source)
        elif source is None:
            self.roots.move_back(one.source, one.target)
        else:  # it has both names
            self.roots.unlink(one.target)

    def is_as_noted(self, one: Move, location: Location) -> bool:
        """Tell whether the unmodified file or directory of a move is at a location."""
        if self.roots.status(location) is None:
            return False
        here = self.roots.contents_at({self.roots.member(one): location})
        texts = self.listed.rewritten(one.group)
        return identities(here.files, texts) == identities(self.roots.noted(one), texts)

    def _revert_exchange(self, one: Exchange) -> None:
        location = Location("directory", one.path)
        status = self.roots.status(location)
        is_new = one.new is not None and status is not None and one.new.file.is_of(status)
        aside = None if one.old is None else self.roots.status(one.old.location)
        if one.old is None or aside is None:  # nothing was replaced, or it is back
            if one.old is None and is_new:
                self._give_back(one)
                self.roots.unlink(location)
            return
        if status is not None and os.path.samestat(status, aside):
            self.roots.unlink(one.old.location)
            return
        if status is not None and not is_new:
            if not self.is_in_trash(one, status):
                raise FileExistsError(errno.EEXIST, _TAKEN, one.path)
            self.roots.unlink(one.old.location)  # what was saved since replaces it, and not what was restored
            return
        if is_new:
            self._give_back(one)
        (here, name), (there, other) = self.roots.at(one.old.location), self.roots.at(location)
        retry_while_busy(partial(os.replace, name, other, src_dir_fd=here, dst_dir_fd=there))

    def is_in_trash(self, one: Exchange, status: os.stat_result) -> bool:
        """Tell whether the file to restore is still in the trash, and another file has its name."""
        stored = None if one.new is None or one.new.location.root != "trash" else one.new
        kept = None if stored is None else self.roots.status(stored.location)
        return kept is not None and not os.path.samestat(kept, status)

    def _give_back(self, one: Exchange) -> None:
        """Link a restored file back into the trash before it is replaced."""
        if (
            one.new is not None
            and one.new.location.root == "trash"
            and self.roots.status(one.new.location) is None
        ):
            self.roots.link_back(one.new.location, Location("directory", one.path))
            self.sync()

    def _restore_pointer(self, one: Rewrite | Relink, back: Sequence[int]) -> None:
        groups = self.listed.groups
        names = {os.path.basename(groups[number].path) for number in back}
        directory, stage = self.roots.descriptors["directory"], self.roots.descriptors["stage"]
        restore_pointer(one, names, directory, stage, is_all=len(back) == len(groups))

    def _is_home(self, number: int) -> bool:
        """Tell whether all members of a group exist at their original locations."""
        home = (Location(self.listed.home(number), member) for member in self.listed.groups[number].members)
        return all(map(self.roots.status, home))

    # Finishing ------------------------------------------------------------------------------------------

    def finish(self, numbers: Collection[int]) -> dict[int, str]:
        """Unlink the old names of committed groups, and the files that they have replaced.

        Returns:
            Notes for the user on groups whose files others have modified or replaced.
        """
        kept = {one.source.path: one for number in numbers for one in self._kept(number)}
        both = {
            one.group: f"{one.target.path} was saved meanwhile; {path} keeps its name"
            for path, one in kept.items()
        }
        rewrites = [one for one in self.listed.pointers if isinstance(one, Rewrite)]
        old = {one.name: one.before or "" for one in rewrites if one.after is None}
        saved = self._saved_again(old)
        for index in rewrites:  # without its index there is no checkpoint under the old name
            if index.name in old and index.name not in saved:
                is_needed = any(path in old[index.name] for path in kept)
                with suppress(StalePlan):  # it says something else by now: it isn't ours
                    self.write_pointer(index.inverse if is_needed else index)
        for one in (step for number in numbers for step in reversed(self.listed.of_groups[number])):
            if isinstance(one, Exchange):
                if one.old is not None and one.old.location.root == "stage":
                    self.roots.unlink(one.old.location)
                if one.new is None or one.new.location.root != "trash":
                    continue
                one = Move(one.group, one.new.location, Location("directory", one.path))
            if one.target.is_private or self.roots.status(one.source) is None:
                continue
            if not self._has_both_names(one):
                if one.source.is_private:
                    both[one.group] = f"{_TAKEN}; it is in {self.shown_place(one.group)}"
            elif one.source.is_private or self.is_as_noted(one, one.source):
                self.roots.unlink(one.source)
            else:
                names = f"{one.source.path} and {one.target.path}"
                both[one.group] = f"modified meanwhile; {names} are the same file: remove one of them"
        return both

    def _kept(self, number: int) -> Iterator[Move]:
        """Yield the moves whose file has only its old name, since another file has the new one."""
        for one in self.listed.of_groups[number]:
            if isinstance(one, Move) and one.is_within and self._is_alone(one):
                yield one

    def _is_alone(self, one: Move) -> bool:
        return not self._has_both_names(one) and self.is_as_noted(one, one.source)

    def _saved_again(self, indexes: Mapping[str, str]) -> set[str]:
        """Return the indexes that name files saved since by others, even if their text is unchanged.

        Args:
            indexes: Their texts, by name.
        """
        if not indexes:
            return set()
        groups = self.listed.groups
        pairs = (pair for number in range(len(groups)) for pair in self.listed.names(number))
        found = {name: self.roots.status(Location("directory", name)) for pair in pairs for name in pair}
        others = [
            name
            for name, status in found.items()
            if status is not None and stat.S_ISREG(status.st_mode) and status.st_ino not in self.listed.inodes
        ]
        return {index for index, text in indexes.items() if any(name in text for name in others)}

    def _has_both_names(self, one: Move) -> bool:
        source, target = self.roots.status(one.source), self.roots.status(one.target)
        return source is not None and target is not None and os.path.samestat(source, target)

    def drop_record(self, numbers: Collection[int]) -> None:
        """Drop restored groups from the record of the command that is undone."""
        if self.listed.kind == "restore" and self.listed.identity is not None:
            drop_groups(self.directory, self._state_dir, self.listed.only(numbers))

    def place_of(self, number: int) -> int:
        """Return the descriptor of the directory in the stage that holds a removed group."""
        return self.roots.at(next(iter(self.listed.ends(number).values())))[0]

    def purge(self, number: int) -> Iterator[int]:
        """Unlink a removed checkpoint if it is unmodified; yield the bytes freed by each file."""
        return purge_checked(
            self.place_of(number),
            self.listed.groups[number].contents,
            self.shown_place(number),
            lambda: self.roots.require_unchanged(number, self.listed.ends(number)),
        )

    def close(self) -> None:
        """Remove empty numbered directories in the stage and the trash."""
        remove_places(self._inner)
        if self.listed.identity is not None:
            tidy(self._state_dir, self.listed.identity)

    # What is there --------------------------------------------------------------------------------------

    def shown_place(self, number: int) -> str:
        """Return the path of a directory that holds a group or a part of it, for messages."""
        moves = [one for one in self.listed.of_groups[number] if isinstance(one, Move)]
        moved = (location for one in moves for location in (one.target, one.source))
        there = (location for location in moved if location.is_private and self.roots.status(location))
        location = next(there, next(iter(self.listed.ends(number).values())))
        roots = {"stage": self.path, "directory": self.directory}
        if location.root == "trash":
            roots["trash"] = self._state_dir.trash_place(self.listed.identity or "")
        return shown(os.path.join(roots[location.root], os.path.dirname(location.path)))

    def holds(self, number: int) -> bool:
        """Tell whether a part of a group is at its final location."""
        return any(
            self.roots.has_moved(one) if isinstance(one, Move) else self._was_exchanged(one)
            for one in self.listed.of_groups[number]
        )

    def _was_exchanged(self, one: Exchange) -> bool:
        if one.old is not None:
            return self.roots.status(one.old.location) is not None
        status = self.roots.status(Location("directory", one.path))
        return one.new is not None and status is not None and one.new.file.is_of(status)

    def sync(self) -> None:
        """Sync all directories that operations change."""
        for place, above in self.listed.parents:
            with suppress(FileNotFoundError, NotADirectoryError):  # nothing was done there
                sync_descriptor(self.roots.at(Location(place, os.path.join(above, os.curdir)))[0])


_TAKEN = "another file now has this name"


def _group_and_place(one: Operation) -> tuple[int | None, Root]:
    """Return the group of an operation, and the root it moves to: staged files are moved twice."""
    if isinstance(one, Move):
        return one.group, one.target.root
    return (one.group if isinstance(one, Exchange) else None), "directory"
