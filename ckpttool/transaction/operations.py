"""Executes lists of operations; after a kill, recovery completes committed groups and reverts the others.

A journal lists all operations before the first one is executed. The operations of one checkpoint, its group,
are all executed or none; if pointers are rewritten, this holds for all groups together. Then ``done.json`` is
written with the numbers of the committed groups: the point of no return. Before it, recovery reverts every
operation, in reverse order; after it, recovery completes the committed groups, and reverts the others.

```
journal written -> operations done -> record written -> done written -> old names unlinked -> removed
    |_______________ recovery reverts all ___________________|________ recovery completes _______|
```

Paths are resolved from open directories, never through a symlink. Files are compared with their fingerprints
before and after a move: another process may replace one between the check and the call.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import chain, groupby
from typing import Literal

from ckpttool.core.errors import AccessDenied, CheckpointError, from_os_error, system_text
from ckpttool.storage.directories import (
    OpenDirectory,
    link_or_rename,
    retry_while_busy,
    sync_descriptor,
    write_in,
)
from ckpttool.transaction.files import StalePlan, status_of
from ckpttool.transaction.history import UndoStep, add_step, drop_groups, drop_step, make_place, tidy
from ckpttool.transaction.journal import (
    Location,
    Move,
    Operation,
    OperationList,
    Rewrite,
    Root,
    StoredFile,
)
from ckpttool.transaction.journal_documents import operations_document
from ckpttool.transaction.lock import DISK_FULL
from ckpttool.transaction.open_roots import OpenRoots, open_roots, require_file
from ckpttool.transaction.paths import shown
from ckpttool.transaction.pointer_files import restore_pointer, temporary_name, write_pointer
from ckpttool.transaction.stages import (
    DONE,
    JOURNAL,
    NoRoom,
    journal_text,
    new_stage_name,
    remove_open_stage,
    remove_places,
)
from ckpttool.transaction.state_dir import StateDir, open_own, state_dir_of, state_dir_of_stage
from ckpttool.transaction.unlinking import StrandedCheckpoint, purge_checked

Failures = dict[int, Exception]
"""Errors of groups that were not done, by group number."""


class UnknownCommit(AccessDenied):
    """The disk failed during a commit; only recovery can find out whether it took effect."""


@contextmanager
def begin_stage(directory: str, listed: OperationList, state_dir: StateDir | None = None) -> Iterator[Stage]:
    """Create a stage with the journal, synced, and yield it; no operation is executed yet.

    The stage is kept when the context ends.

    Args:
        directory: The directory, which is locked.
        listed: The operations.
        state_dir: Location of stage and trash; None for the default of the directory.

    Raises:
        NoRoom: The disk is full.
    """
    state_dir = state_dir_of(directory) if state_dir is None else state_dir
    result = f"; nothing was {'removed' if listed.kind == 'remove' else 'moved'}"
    with ExitStack() as stack:
        try:
            place = stack.enter_context(OpenDirectory(state_dir.path))
            inner = stack.enter_context(place.make(new_stage_name(state_dir), 0o700))
            try:
                for number in sorted(listed.numbered_directories("stage")):
                    inner.make(number, 0o700).close()
                # If the directory is copied while this command runs, the copy has the same journal, but all
                # its inodes differ. The stage's own inode shows recovery which of the two it is in.
                document = {**operations_document(listed), "stage": inner.own_status().st_ino}
                write_in(inner, JOURNAL, journal_text(directory, document, result))
                place.sync()
                stage = stack.enter_context(_opened_stage(directory, inner, listed, state_dir))
            except BaseException:
                remove_places(inner)
                remove_open_stage(place, inner)
                if listed.identity is not None:
                    tidy(state_dir, listed.identity)
                raise
        except OSError as error:
            reason = from_os_error(error, directory).reason
            if error.errno in DISK_FULL:
                reason += f" for the journal{result}: free a few kB and try again"
                raise NoRoom(directory, reason) from error
            raise AccessDenied(directory, f"{reason}{result}") from error
        yield stage


@contextmanager
def open_stage(directory: str, path: str, listed: OperationList) -> Iterator[Stage]:
    """Open a stage that an interrupted command left for a directory."""
    with (
        open_own(directory, *os.path.split(path)) as inner,
        _opened_stage(directory, inner, listed, state_dir_of_stage(path)) as stage,
    ):
        yield stage


@contextmanager
def _opened_stage(
    directory: str, inner: OpenDirectory, listed: OperationList, state_dir: StateDir
) -> Iterator[Stage]:
    assert inner.descriptor is not None  # stages are made only on systems with ``dir_fd``
    if listed.identity is not None and (numbers := listed.numbered_directories("trash")):
        make_place(state_dir, listed.identity, numbers)
    with open_roots(directory, listed, state_dir, inner.descriptor) as roots:
        yield Stage(roots, directory, state_dir, inner)


@contextmanager
def begin_output(directory: OpenDirectory, area: OpenDirectory, listed: OperationList) -> Iterator[Stage]:
    """Write the journal of an output into its area, and yield the area as a stage."""
    write_in(area, JOURNAL, json.dumps(operations_document(listed)).encode())
    with open_output(directory, area, listed) as stage:
        yield stage


@contextmanager
def open_output(directory: OpenDirectory, area: OpenDirectory, listed: OperationList) -> Iterator[Stage]:
    """Open the area of an output as a stage."""
    assert directory.descriptor is not None and area.descriptor is not None  # as for any stage
    descriptors: dict[Root, int] = {"directory": directory.descriptor, "stage": area.descriptor}
    with OpenRoots(listed, descriptors) as roots:
        yield Stage(roots, directory.path, StateDir(directory.path), area)


class Stage:
    """Execution of one journal, with its directory and its stage open.

    Attributes:
        path: Path of the stage.
        directory: Path of the directory.
        listed: Operations of the journal.
        done: Numbers of the committed groups; None before the commit.
        roots: The open directories.
    """

    def __init__(self, roots: OpenRoots, directory: str, state_dir: StateDir, inner: OpenDirectory) -> None:
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

    def execute(self) -> Failures:
        """Execute all operations before the commit; return the errors by group.

        A group that fails is reverted here if it is independent of the others; else the caller reverts all.

        Raises:
            OSError: A pointer can't be written.
            StalePlan: A pointer has changed.
        """
        listed, failures = self.listed, Failures()
        is_synced = True
        for one in listed.operations:
            if isinstance(one, Rewrite):
                if failures:
                    break
                if one.after is None:
                    continue  # removed with the old names, after the commit
                if not is_synced:  # new names must be durable before a pointer refers to them
                    self.sync()
                    is_synced = True
                self.write_pointer(one)
            elif one.group not in failures:
                is_synced = False
                try:
                    self._do(one)
                except (OSError, StalePlan) as failure:
                    failures[one.group] = failure
                    # One failure reverts a whole indivisible list, so the rest needn't be tried.
                    # A removal goes on: it is repeated without the groups that fail, and should
                    # find all of these at once.
                    if not listed.is_indivisible:
                        failures |= self._revert_group(one.group)
                    elif not listed.is_removal:
                        break
        return failures

    def write_pointer(self, one: Rewrite) -> None:
        """Rewrite a pointer, unless it has changed since the plan was made."""
        write_pointer(one, self.roots.descriptors["directory"], self.roots.descriptors["stage"])

    def _do(self, one: Move) -> None:
        steps = self.listed.moves_by_group[one.group]
        if one is steps[0]:
            self.roots.require_ready(one.group)
            self._set_aside(steps)
        self._move(one)
        if one is steps[-1]:
            # Another process may have replaced a file between the check and the call.
            self.roots.require_unchanged(one.group, self.listed.final_locations(one.group))

    def _set_aside(self, steps: Sequence[Move]) -> None:
        """Link files that will be replaced to a second name, and sync."""
        # ``os.replace`` in ``_move`` takes a replaced file's name. It must have another one on the disk by
        # then, or a power failure could lose its data.
        replacing = [(one.target, one.replaces) for one in steps if one.replaces is not None]
        for location, old in replacing:
            if self.roots.status(old.location) is None:
                directory, name = self.roots.at(location)
                require_file(old.file, name, directory)
                aside, other = self.roots.at(old.location)
                link_or_rename(name, directory, other, aside, lambda: False)
                require_file(old.file, other, aside)
        if replacing:
            self.sync()

    def _move(self, one: Move) -> None:
        """Give a file or a directory its new name, replacing the file that has it."""
        old = one.replaces
        if (one.file or old) and not self.roots.is_unmodified_at(one, one.source):
            is_leaving = one.target.is_private
            problem = "it has changed" if is_leaving else "its replacement has vanished"
            raise StalePlan(problem, since_plan=True)
        if old is None:
            self.roots.move(one.source, one.target)
            return
        source, waiting = self.roots.at(one.source)
        directory, name = self.roots.at(one.target)
        if status_of(name, directory) is not None:  # without hard links, setting it aside has renamed it
            require_file(old.file, name, directory)
        # A file from the trash keeps its name there until the commit, so that it can be reverted. So it gets
        # a temporary name in the stage, which is renamed over the old file. Without hard links it leaves the
        # trash now, since the journal lists no third name that recovery could look for.
        if one.source.root == "trash":
            stage, other = self.roots.descriptors["stage"], temporary_name()
            with suppress(OSError):
                os.link(waiting, other, src_dir_fd=source, dst_dir_fd=stage, follow_symlinks=False)
                source, waiting = stage, other
        retry_while_busy(partial(os.replace, waiting, name, src_dir_fd=source, dst_dir_fd=directory))

    def advance(self, number: int) -> None:
        """Execute the remaining operations of a group after a kill.

        Raises:
            StalePlan: A file that is still to be moved has changed.
            OSError: A file can't be moved.
        """
        for one in self.listed.moves_by_group[number]:
            if one.replaces is not None:
                if self._is_waiting(one, one.replaces):
                    self._set_aside([one])
                    self._move(one)
            elif not self.roots.has_moved(one):
                if not self.roots.is_unmodified_at(one, one.source):
                    raise StalePlan("it has changed", since_plan=True)
                self._move(one)

    def _is_waiting(self, one: Move, old: StoredFile) -> bool:
        """Return whether a file is yet to be replaced: the name is free, or still has the old file."""
        is_missing = self.roots.status(one.target) is None or self.roots.status(old.location) is None
        return is_missing or self.roots.is_same_file(one.target, old.location)

    def prepare(self, numbers: Collection[int]) -> Failures:
        """Sync the operations of some groups, and write their undo step.

        Returns:
            Errors of groups that have changed since they were moved; if any, nothing is recorded.
        """
        failures = Failures()
        if self.listed.kind not in ("remove", "output"):
            for number in numbers:
                try:
                    self.roots.require_unchanged(number, self.listed.final_locations(number))
                except (OSError, StalePlan) as failure:
                    failures[number] = failure
        if not failures:
            self.sync()
            try:
                self.record(numbers)
            except (OSError, CheckpointError):  # the step may be in the record all the same
                self._drop_undo_step()
                raise
        return failures

    def commit(self, numbers: Collection[int]) -> None:
        """Commit some groups; after an OSError none is committed."""
        try:
            self._write_done(numbers)
        except OSError as error:
            # The file may have reached the disk although writing it failed. The operations may be
            # reverted only if it is removed durably; otherwise recovery could find it, and take reverted
            # groups for committed ones.
            try:
                with suppress(FileNotFoundError):
                    self._inner.unlink(DONE)
                    self._inner.sync()
                if self.listed.leader is None:  # a leader's commit counts for this list, too
                    self._drop_undo_step()
            except OSError as failure:
                reason = f"{system_text(error)}; the next command recovers it"
                raise UnknownCommit(self.path, reason) from failure
            raise

    def withdraw(self, numbers: Collection[int]) -> None:
        """Withdraw the commit of groups that are about to be moved back."""
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
        """Add the undo step of some groups to the command's record in the trash."""
        listed = self.listed
        if listed.identity is None or listed.kind == "restore":
            return
        done = listed.subset(numbers)
        step = UndoStep(os.path.basename(self.path), done.inverse())
        kind: Literal["rename", "trash"] = "rename" if listed.kind == "rename" else "trash"
        add_step(self.directory, self._state_dir, listed.identity, kind, step)

    # Back ---------------------------------------------------------------------------------------------

    def revert(self, numbers: Collection[int]) -> Failures:
        """Revert the operations of some groups in reverse order; return the errors by group.

        Pointers name restored checkpoints again; changes that others made to them are kept.
        """
        # Old names are linked again first, and are durable when the pointers name them. Only then are the new
        # names removed, so that a pointer never names a missing file.
        failures = self._relink(numbers)
        back = [number for number in numbers if self._is_in_place(number) or self.has_moved_part(number)]
        # A new index is removed again, unless a trainer has saved files of the same names since: then the
        # index belongs to the new checkpoint, whatever its text.
        pointers = self.listed.pointers
        saved = self._saved_again({one.name: one.after or "" for one in pointers if one.before is None})
        for (number, _), steps in groupby(reversed(self.listed.operations), key=_group_and_root):
            if number is None:
                for one in steps:
                    if isinstance(one, Rewrite) and one.name not in saved:
                        self._restore_pointer(one, [at for at in back if at not in failures])
            elif number in numbers and number not in failures:
                failures |= self._revert_moves(number, [one for one in steps if isinstance(one, Move)])
        self.sync()
        return failures

    def _revert_group(self, number: int) -> Failures:
        """Revert the operations of one group, without pointers."""
        return self._revert_moves(number, self.listed.moves_by_group[number][::-1])

    def _revert_moves(self, number: int, steps: Sequence[Move]) -> Failures:
        try:
            self._revert_steps(steps)
        except (OSError, StalePlan) as failure:
            why = system_text(failure) if isinstance(failure, OSError) else str(failure)
            where = f"it is in {self.shown_place(number)}: move or remove it by hand"
            return {number: StrandedCheckpoint(f"not restored: {why}; {where}")}
        return {}

    def _relink(self, numbers: Collection[int]) -> Failures:
        """Restore old names that were unlinked, before pointers name them again."""
        failures = Failures()
        moves = (one for number in numbers for one in self.listed.moves_by_group[number] if one.is_rename)
        unlinked = [one for one in moves if self._is_unlinked(one)]
        for one in unlinked:
            try:
                self.roots.link(one.target, one.source)
            except OSError as failure:
                failures[one.group] = StrandedCheckpoint(f"not restored: {system_text(failure)}")
        if unlinked:
            self.sync()
        return failures

    def _is_unlinked(self, one: Move) -> bool:
        status = self.roots.status(one.target)
        is_file = status is not None and stat.S_ISREG(status.st_mode)
        return is_file and self.roots.status(one.source) is None and self.roots.has_moved(one)

    def revert_all(self) -> Failures:
        """Revert all operations, and drop their undo step."""
        failures = self.revert(range(len(self.listed.groups)))
        if not failures:
            self._drop_undo_step()
        return failures

    def _drop_undo_step(self) -> None:
        """Remove the undo step of this journal from the record."""
        if self.listed.identity is not None and self.listed.kind != "restore":
            drop_step(self.directory, self._state_dir, self.listed.identity, os.path.basename(self.path))

    def _revert_steps(self, steps: Sequence[Move]) -> None:
        """Revert consecutive operations of one group, unless one of them is blocked."""
        # All steps are checked before the first is reverted: a checkpoint that is blocked
        # stays whole in its place.
        roots = self.roots
        moved = [one for one in steps if roots.has_moved(one)]
        for one in moved:
            is_new = one.replaces is not None or one.is_new  # a new file is dropped, and needs no old name
            if not is_new and roots.status(one.source) and not roots.is_same_file(one.source, one.target):
                raise FileExistsError(errno.EEXIST, _TAKEN, one.source.path)
        for one in moved:
            if one.replaces is not None:
                self._restore_replaced(one, one.replaces)
            elif not one.is_new:
                self._revert_move(one)
            elif roots.is_unmodified_at(one, one.target):
                roots.unlink(one.target)

    def _revert_move(self, one: Move) -> None:
        """Move an entry back to its old name, unless it was restored and modified since."""
        # An entry from the trash, or a new file of an output, that was written to since belongs to the
        # writer. It keeps its place, and only its second name is removed.
        is_restored = one.source.root == "trash" or (self.listed.kind == "output" and one.source.is_private)
        if is_restored and not self.roots.is_unmodified_at(one, one.target):
            self.roots.unlink(one.source)
        elif self.roots.status(one.source) is None:
            self.roots.move_back(one)
        else:  # it has both names
            self.roots.unlink(one.target)

    def _restore_replaced(self, one: Move, old: StoredFile) -> None:
        """Give a replaced file its name again, unless others have saved under it since."""
        roots = self.roots
        if roots.is_same_file(one.target, old.location):
            roots.unlink(old.location)
            return
        is_new = roots.is_unmodified_at(one, one.target)
        if not is_new and roots.status(one.target) is not None:
            if not self.is_in_trash(one):
                raise FileExistsError(errno.EEXIST, _TAKEN, one.target.path)
            roots.unlink(old.location)  # the newer save has replaced it
            return
        # Without hard links, the restored file has left the trash: before it is replaced, it
        # gets its name there again.
        if is_new and one.source.root == "trash" and roots.status(one.source) is None:
            roots.link(one.target, one.source)
            self.sync()
        (here, name), (there, other) = roots.at(old.location), roots.at(one.target)
        retry_while_busy(partial(os.replace, name, other, src_dir_fd=here, dst_dir_fd=there))

    def is_in_trash(self, one: Move) -> bool:
        """Return whether the file to restore is still in the trash, and another file has its name."""
        is_there = one.source.root == "trash" and self.roots.status(one.source) is not None
        return is_there and not self.roots.is_same_file(one.source, one.target)

    def _restore_pointer(self, one: Rewrite, back: Sequence[int]) -> None:
        groups = self.listed.groups
        names = {os.path.basename(groups[number].path) for number in back}
        directory, stage = self.roots.descriptors["directory"], self.roots.descriptors["stage"]
        restore_pointer(one, names, directory, stage, is_all=len(back) == len(groups))

    def _is_in_place(self, number: int) -> bool:
        """Return whether all members of a group exist at their original locations."""
        home = (
            Location(self.listed.original_root(number), member)
            for member in self.listed.groups[number].members
        )
        return all(map(self.roots.status, home))

    # Finishing ------------------------------------------------------------------------------------------

    def finish(self, numbers: Collection[int]) -> dict[int, str]:
        """Unlink the old names of committed groups, and the files that were replaced.

        Returns:
            Notes for the user on groups whose files others have modified or replaced.
        """
        groups = [self.listed.moves_by_group[number] for number in numbers]
        # A trainer may have saved under a new name since. Then the renamed file has only its old name, and an
        # index that refers to it is needed. The other old indexes are removed before the data: without its
        # index, the rest of a checkpoint isn't taken for one.
        kept = {one.source.path: one for one in chain.from_iterable(groups) if self._is_kept(one)}
        notes = {
            one.group: f"{one.target.path} was saved meanwhile; {path} keeps its name"
            for path, one in kept.items()
        }
        old = {one.name: one.before or "" for one in self.listed.pointers if one.after is None}
        saved = self._saved_again(old)
        for index in self.listed.pointers:
            if index.name in old and index.name not in saved:
                is_needed = any(path in old[index.name] for path in kept)
                with suppress(StalePlan):  # others have rewritten it; it isn't ours any more
                    self.write_pointer(index.inverse if is_needed else index)
        # A name is unlinked only if both names are links of the same unmodified file. If a file was modified
        # since under one of them, the user is told of both.
        for one in chain.from_iterable(map(reversed, groups)):
            if one.file is not None or one.target.is_private or self.roots.status(one.source) is None:
                continue
            if not self.roots.is_same_file(one.source, one.target):
                if one.source.is_private:
                    notes[one.group] = f"{_TAKEN}; it is in {self.shown_place(one.group)}"
            elif one.source.is_private or self.roots.is_unmodified_at(one, one.source):
                self.roots.unlink(one.source)
            else:
                names = f"{one.source.path} and {one.target.path}"
                notes[one.group] = f"modified meanwhile; {names} are the same file: remove one of them"
        for location in chain.from_iterable(map(self.listed.unlinked_locations, numbers)):
            self.roots.unlink(location)
        return notes

    def _is_kept(self, one: Move) -> bool:
        """Return whether a file has only its old name, since another file has the new one."""
        has_one_name = one.is_rename and not self.roots.is_same_file(one.source, one.target)
        return has_one_name and self.roots.is_unmodified_at(one, one.source)

    def _saved_again(self, indexes: Mapping[str, str]) -> set[str]:
        """Return the indexes that name files saved since by others, even if their text is unchanged.

        Args:
            indexes: Their texts, by name.
        """
        if not indexes:
            return set()
        groups = self.listed.groups
        pairs = (pair for number in range(len(groups)) for pair in self.listed.old_and_new_paths(number))
        found = {name: self.roots.status(Location("directory", name)) for pair in pairs for name in pair}
        # A file under a listed name whose inode the journal doesn't list was saved after the plan was made.
        others = [
            name
            for name, status in found.items()
            if status is not None and stat.S_ISREG(status.st_mode) and status.st_ino not in self.listed.inodes
        ]
        return {index for index, text in indexes.items() if any(name in text for name in others)}

    def drop_record(self, numbers: Collection[int]) -> None:
        """Drop restored groups from the record of the command that is undone."""
        if self.listed.kind == "restore" and self.listed.identity is not None:
            drop_groups(self.directory, self._state_dir, self.listed.subset(numbers))

    def staged_descriptor(self, number: int) -> int:
        """Return the descriptor of the directory in the stage that holds a removed group."""
        return self.roots.at(next(iter(self.listed.final_locations(number).values())))[0]

    def purge(self, number: int) -> Iterator[int]:
        """Unlink a removed checkpoint if it is unmodified; yield the bytes freed by each file."""
        return purge_checked(
            self.staged_descriptor(number),
            self.listed.groups[number].contents,
            self.shown_place(number),
            lambda: self.roots.require_unchanged(number, self.listed.final_locations(number)),
        )

    def close(self) -> None:
        """Remove empty numbered directories in the stage and the trash."""
        remove_places(self._inner)
        if self.listed.identity is not None:
            tidy(self._state_dir, self.listed.identity)

    # State ----------------------------------------------------------------------------------------------

    def shown_place(self, number: int) -> str:
        """Return the path of a directory that holds a group or a part of it, for messages."""
        moved = (end for one in self.listed.moves_by_group[number] for end in (one.target, one.source))
        there = (location for location in moved if location.is_private and self.roots.status(location))
        location = next(there, next(iter(self.listed.final_locations(number).values())))
        roots = {"stage": self.path, "directory": self.directory}
        if location.root == "trash":
            roots["trash"] = self._state_dir.trash_place(self.listed.identity or "")
        return shown(os.path.join(roots[location.root], os.path.dirname(location.path)))

    def has_moved_part(self, number: int) -> bool:
        """Return whether a part of a group is at its final location."""
        return any(map(self.roots.has_moved, self.listed.moves_by_group[number]))

    def sync(self) -> None:
        """Sync all directories that operations change."""
        for place, above in self.listed.parents:
            with suppress(FileNotFoundError, NotADirectoryError):  # nothing was moved there
                sync_descriptor(self.roots.at(Location(place, os.path.join(above, os.curdir)))[0])


_TAKEN = "another file now has this name"


def _group_and_root(one: Operation) -> tuple[int | None, Root]:
    """Return the group of an operation, and the root that it moves to."""
    # Checkpoints that exchange their names are moved twice, into the stage first. Each of the two runs of a
    # group's moves is reverted on its own.
    return (one.group, one.target.root) if isinstance(one, Move) else (None, "directory")
