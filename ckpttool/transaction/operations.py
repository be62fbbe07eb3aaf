"""Lists of operations: a kill at any of them leaves a directory as it was, or as it was to be.

A journal lists all operations before the first is done. The operations of one checkpoint, its group, are all
done or none; if pointers are written, all groups are done or none. Then ``done.json`` is written, with the
numbers of the committed groups: it is the point of no return. Before it, recovery reverts every operation,
the last first; after it, recovery completes the committed groups, and reverts the others.

```
journal written -> pointers written -> groups moved to the stage -> done written -> stage emptied -> removed
    |__________________ recovery takes all back ___________________|___ recovery empties the stage ___|
```

Everything happens below open directories, never through a symlink. What is moved is compared with its
fingerprint before and after: another process may put a file in its place between the look and the call.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import groupby

from ckpttool.core.errors import AccessDenied, system_text
from ckpttool.io.atomic import write_in
from ckpttool.io.directories import (
    OpenDirectory,
    link_or_rename,
    remove_directory,
    rename,
    retry_while_busy,
    sync_descriptor,
)
from ckpttool.transaction.files import (
    Contents,
    Fingerprint,
    StalePlan,
    contents,
    is_same_file,
    opened,
    status_at,
    status_of,
)
from ckpttool.transaction.journal import (
    DONE,
    PLACE,
    OperationList,
    Recovery,
    Relocation,
    Removal,
    Rewrite,
    new_stage,
    operations_document,
    remove_places,
)
from ckpttool.transaction.mounts import require_one_mount, require_unmounted
from ckpttool.transaction.paths import shown
from ckpttool.transaction.pointer_files import restored_pointer, text_at, write_pointer
from ckpttool.transaction.state_dir import open_own, state_dir_of


class AlreadyGone(Exception):
    """Another process has removed it already."""


class StrandedCheckpoint(Exception):
    """A checkpoint, or what is left of it, is still in the stage; the message says where."""


def removal_operations(groups: Sequence[Removal], rewrites: Sequence[Rewrite] = ()) -> OperationList:
    """Return the operations that write pointers, then move checkpoints into the stage, indexes first."""
    moves = (
        Relocation(number, name, os.path.join(PLACE, name))
        for number, group in enumerate(groups)
        for name in group.members
    )
    return OperationList(tuple(groups), (*rewrites, *moves))


@contextmanager
def begin_stage(directory: str, listed: OperationList) -> Iterator[Stage]:
    """Write the journal of some removals, and yield its stage."""
    document = operations_document(listed)
    with (
        new_stage(directory, state_dir_of(directory), document, "removed", has_place=True) as inner,
        opened(directory) as here,
        inner.open(PLACE) as shared,
    ):
        yield Stage(listed, here, inner, shared.descriptor)


@contextmanager
def open_stage(directory: str, path: str, listed: OperationList) -> Iterator[Stage]:
    """Open the stage that a kill left for a directory."""
    with ExitStack() as stack:
        here = stack.enter_context(opened(directory))
        inner = stack.enter_context(open_own(directory, *os.path.split(path)))
        shared = None
        with suppress(FileNotFoundError):
            shared = stack.enter_context(inner.open(PLACE)).descriptor
        yield Stage(listed, here, inner, shared)


class Stage:
    """Operations of one journal in progress, with the open directory and its stage.

    Attributes:
        path: Path of the stage.
        listed: Operations.
        done: Numbers of the committed groups.
    """

    def __init__(
        self, listed: OperationList, directory: int, inner: OpenDirectory, shared: int | None
    ) -> None:
        """Take a stage: ``inner``, with its place ``shared``, for a directory; all are open."""
        assert inner.descriptor is not None  # as that of the directory is not
        self.path = inner.path
        self.listed = listed
        self.done = listed.done or frozenset()
        self._places = listed.places()
        self._directory, self._stage, self._inner, self._shared = directory, inner.descriptor, inner, shared

    # Forward ------------------------------------------------------------------------------------------

    def write_pointers(self) -> None:
        """Rewrite the pointers; if one fails, restore them all."""
        try:
            for one in self.listed.rewrites:
                write_pointer(one, self._directory, self._stage)
        except (OSError, StalePlan):
            self.restore_pointers(range(len(self.listed.groups)))
            raise

    def set_aside(self, number: int) -> None:
        """Move a checkpoint into the stage, or leave it whole where it is.

        Raises:
            AlreadyGone: Nothing of it is there.
            StalePlan: It has changed.
            StrandedCheckpoint: It has changed, and another file has its name by now.
            OSError: It can't be moved.
        """
        group = self.listed.groups[number]
        try:
            _require_unchanged(self._directory, group)
        except StalePlan as change:
            if not any(status_of(name, self._directory) for name in group.members):
                raise AlreadyGone from change
            raise
        require_removable(self._directory, group.contents)
        with self.place_of(number) as place:
            try:
                for name in group.members:
                    retry_while_busy(partial(rename, name, self._directory, name, place))
                # Another file could have come between the look and the call.
                _require_unchanged(place, group)
            except (OSError, StalePlan):
                self.restore(number)
                raise

    def commit(self, numbers: Collection[int]) -> None:
        """Commit some groups, once all that was moved is on the disk; after an OSError none is committed."""
        try:
            with self.place_of(min(numbers)) as place:
                sync_descriptor(place)
            sync_descriptor(self._directory)
            self._write_done(numbers)
        except OSError as error:
            try:
                with suppress(FileNotFoundError):
                    self._inner.unlink(DONE)
                    self._inner.sync()
            except OSError as failure:  # it may be on the disk, or not: recovery will see
                raise AccessDenied(self.path, f"{system_text(error)}; the next prune recovers") from failure
            raise

    def withdraw(self, numbers: Collection[int]) -> None:
        """Uncommit groups that are about to be restored."""
        if not self.done.isdisjoint(numbers):
            self._write_done(self.done - frozenset(numbers))

    def _write_done(self, numbers: Collection[int]) -> None:
        write_in(self._inner, DONE, json.dumps(sorted(numbers)).encode())
        self.done = frozenset(numbers)

    # Back ---------------------------------------------------------------------------------------------

    def restore(self, number: int) -> None:
        """Move a checkpoint back of which nothing was removed, its index last; all of it, or nothing."""
        members = self.listed.groups[number].members
        try:
            with self.place_of(number) as place:
                names = [name for name in reversed(members) if status_of(name, place) is not None]
                for name in names:
                    _require_free(name, place, self._directory)
                for name in names:
                    _move_back(name, place, self._directory)
        except OSError as error:
            where = f"it is in {self.shown_place(number)}, to be moved or removed by hand"
            raise StrandedCheckpoint(f"not put back: {system_text(error)}; {where}") from error

    def restore_pointers(self, numbers: Collection[int]) -> None:
        """Name restored checkpoints in the pointers again; changes by other processes are kept."""
        if not numbers:
            return
        names = {os.path.basename(self.listed.groups[number].path) for number in numbers}
        is_all = len(numbers) == len(self.listed.groups)
        for one in reversed(self.listed.rewrites):
            with suppress(StalePlan, ValueError):
                now = text_at(one.name, self._directory)
                back = restored_pointer(now, one, names, is_all=is_all)
                if back.after != back.before:
                    write_pointer(back, self._directory, self._stage)

    # What is there --------------------------------------------------------------------------------------

    @contextmanager
    def place_of(self, number: int) -> Iterator[int]:
        """Open the directory in the stage that a checkpoint moves to."""
        name = self._places[number]
        if name == PLACE and self._shared is not None:
            yield self._shared
            return
        with opened(name, self._stage) as place:
            yield place

    def shown_place(self, number: int) -> str:
        """Return the path of that directory, for messages."""
        return shown(os.path.join(self.path, self._places[number]))

    def holds(self, number: int) -> bool:
        """Tell whether a part of a checkpoint lies in the stage."""
        members = self.listed.groups[number].members
        try:
            with self.place_of(number) as place:
                return any(status_of(name, place) is not None for name in members)
        except FileNotFoundError:  # of a journal of 0.1, the directory for this one
            return False

    def _is_in_place(self, number: int) -> bool:
        """Tell whether all names of a checkpoint are in the directory."""
        return all(status_of(name, self._directory) for name in self.listed.groups[number].members)

    def close(self) -> None:
        """Remove the directories that checkpoints were moved to, which are empty."""
        remove_places(self._inner)

    # Finishing ------------------------------------------------------------------------------------------

    def purge(self, number: int) -> Iterator[int]:
        """Unlink an unchanged checkpoint that was set aside; yield the bytes that each file frees."""
        group = self.listed.groups[number]
        with self.place_of(number) as place:
            yield from purge_unchanged(place, group, self.shown_place(number))

    def recover(self, recovery: Recovery) -> None:
        """Complete committed groups, revert the others, and restore their pointers."""
        finished: dict[int, bool] = {}
        for number, group in reversed(list(enumerate(self.listed.groups))):
            if self.holds(number):
                try:
                    finished[number] = self._is_to_finish(number)
                except OSError as error:
                    recovery.failed[group.path] = f"{system_text(error)}; it is in {self.shown_place(number)}"
        self.withdraw([number for number, is_finished in finished.items() if not is_finished])
        for number, is_finished in finished.items():
            self._settle(number, recovery, is_back=not is_finished)
        # Also those that a recovery moved back that was killed itself.
        taken_back = {*range(len(self.listed.groups))} - self.done
        self.restore_pointers(
            [number for number in taken_back if self._is_in_place(number) and not self.holds(number)]
        )
        for done in (recovery.finished, recovery.put_back):
            done.reverse()
        try:
            self.close()
        except OSError as error:
            if not recovery.failed:
                where = "move files that the journal doesn't list where they belong"
                recovery.failed[self.path] = f"{system_text(error)}; {where}"

    def _settle(self, number: int, recovery: Recovery, *, is_back: bool) -> None:
        """Revert or complete one group, and record the result."""
        group = self.listed.groups[number]
        try:
            if is_back:
                self.restore(number)
                recovery.put_back.append(group.path)
            else:
                with self.place_of(number) as place:
                    for _ in purge(place, group.contents, may_be_gone=True):
                        pass
                recovery.finished.append(group.path)
        except StrandedCheckpoint as rest:
            recovery.failed[group.path] = str(rest)
        except StalePlan:
            recovery.failed[group.path] = (
                "prune was killed while removing it, and the remaining files have changed or were copied; "
                f"they are in {self.shown_place(number)}: remove them, or move them back"
            )
        except OSError as error:
            left = self.shown_place(number)
            recovery.failed[group.path] = f"{system_text(error)}; what is left of it is in {left}"

    def _is_to_finish(self, number: int) -> bool:
        """Tell whether a committed group has lost a part, or is unchanged and its survivors exist."""
        group = self.listed.groups[number]
        if number not in self.done:
            return False
        with self.place_of(number) as place:
            if any(status_at(file.path, place) is None for file in group.contents.files):
                return True
            try:
                _require_unchanged(place, group)
            except StalePlan:
                return False
        return all(status_of(name, self._directory) for name in group.survivors)


def _require_free(name: str, place: int, directory: int) -> None:
    """Raise FileExistsError if another file has the name to which a staged entry moves back."""
    if status_of(name, directory) is not None and not is_same_file(name, place, name, directory):
        raise FileExistsError(errno.EEXIST, "its place is taken by another file", name)


def _move_back(name: str, place: int, directory: int) -> None:
    """Rename without ever replacing what is there now."""
    if is_same_file(name, place, name, directory):  # a kill came between the two steps below
        os.unlink(name, dir_fd=place)
        return
    _require_free(name, place, directory)
    if link_or_rename(name, place, name, directory, lambda: False):
        os.unlink(name, dir_fd=place)


# Looking first -------------------------------------------------------------------------------------


def _require_unchanged(place: int, removal: Removal) -> None:
    try:
        if removal.is_single:  # a mount point among single files is nothing that could be renamed
            (file,) = removal.contents.files
            is_same = file.is_of(os.stat(file.path, dir_fd=place, follow_symlinks=False))
        else:
            here = contents(place, removal.members)
            require_unmounted(place, removal.members, here)
            is_same = _identities(here) == _identities(removal.contents)
    except FileNotFoundError as error:
        raise StalePlan("it has vanished, or a part of it,", since_plan=True) from error
    if not is_same:
        raise StalePlan("it has changed", since_plan=True)


def _identities(contents: Contents) -> set[str | tuple[str, int, int, int]]:
    """Return identities that survive a remount: without device numbers."""
    files = {(file.path, file.inode, file.size, file.mtime_ns) for file in contents.files}
    return {*files, *contents.directories}


def require_removable(place: int, contents: Contents) -> None:
    """Require that all directories of a checkpoint let this user unlink what they hold."""
    for path in contents.directories:
        with suppress(FileNotFoundError), opened(path, place) as directory:  # what has gone is no hindrance
            if not _may_unlink_in(directory):
                raise PermissionError(errno.EACCES, f"{path} can't be changed by this user")


def _may_unlink_in(directory: int) -> bool:
    """Tell whether a directory lets this user unlink what it holds; a sticky one only what is his own."""
    asks_effective = os.access in os.supports_effective_ids
    if not os.access(os.curdir, os.W_OK | os.X_OK, dir_fd=directory, effective_ids=asks_effective):
        return False
    status = os.fstat(directory)
    user = os.geteuid()
    if not status.st_mode & stat.S_ISVTX or user in (0, status.st_uid):
        return True
    with os.scandir(directory) as entries:
        return all(entry.stat(follow_symlinks=False).st_uid == user for entry in entries)


# Unlinking ------------------------------------------------------------------------------------------


def purge_unchanged(place: int, removal: Removal, shown_place: str) -> Iterator[int]:
    """Unlink a checkpoint that is as it was; yield the bytes that each file frees.

    Args:
        place: Descriptor of the directory that its members lie in.
        removal: The checkpoint.
        shown_place: What the user is told of where the rest lies.
    """
    has_begun = False
    try:
        _require_unchanged(place, removal)
        for freed in purge(place, removal.contents):
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
