"""Removes checkpoints for good, so that a kill at any instruction loses nothing that was to stay.

What goes is renamed into the stage of a journal, and unlinked only there, so that no half of a checkpoint
ever lies where one is looked for. Everything happens below open directories, never through a symlink: what
another process puts in a path's place meanwhile is not touched. ``journal`` says what is written down before;
what a kill left is settled at the end of this module, when ``recovery`` asks for it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import attrgetter

from ckpttool.core.errors import AccessDenied, from_os_error, system_text
from ckpttool.io import fs
from ckpttool.io.atomic import sync_directory, write_in
from ckpttool.io.directories import (
    OpenDirectory,
    link_or_rename,
    make_directory,
    remove_directory,
    rename,
    retry_while_busy,
)
from ckpttool.io.work import in_order
from ckpttool.transaction.copies import inodes_of_removal
from ckpttool.transaction.files import (
    Contents,
    Fingerprint,
    StalePlan,
    contents,
    fingerprint,
    is_same_file,
    opened,
    status_at,
    status_of,
)
from ckpttool.transaction.journal import (
    NoRoom,
    Recovery,
    Removal,
    Removals,
    begin_journal,
    removals_document,
    remove_stage,
    require_system,
)
from ckpttool.transaction.lock import FULL
from ckpttool.transaction.mounts import require_one_mount, require_unmounted
from ckpttool.transaction.paths import shown
from ckpttool.transaction.state_dir import open_own, state_dir_of

_MANY = 200
"""From so many checkpoints on a second thread is worth its start."""

_IS_SINGLE = attrgetter("is_single")


class AlreadyGone(Exception):
    """Somebody else has removed it already."""


class StrandedCheckpoint(Exception):
    """A checkpoint, or what is left of it, lies where it was set aside; the message says where."""


@dataclass(slots=True)
class RemovalOutcome:
    """What became of removals: ``failed`` says why, by path; ``freed`` is in bytes.

    What was gone already counts as removed, and frees nothing. ``crowded`` are those of the failed for which
    the disk was too full; of the ``stranded`` a part is gone, or all lies in the stage.
    """

    removed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    crowded: set[str] = field(default_factory=set)
    stranded: set[str] = field(default_factory=set)
    freed: int = 0


def remove(directory: str, journal: Removals) -> RemovalOutcome:
    """Remove checkpoints of one directory; what has changed since the plan was made stays.

    On a full disk each that goes makes room: what failed for want of it is tried again as long as some go.
    """
    require_system(directory, "removed")
    outcome = RemovalOutcome()
    while journal.removals or journal.rewrites:
        refusal, so_far = None, len(outcome.removed)
        try:
            _remove_with_journal(directory, journal, outcome)
            journal = Removals(_crowded_out(directory, journal, outcome))
            if len(outcome.removed) > so_far:
                continue
        except NoRoom as failure:
            refusal = failure
        # There is no room for a journal, or for what moving to the stage takes: something goes without one.
        first = next(filter(_IS_SINGLE, journal.removals), next(iter(journal.removals), None))
        if first is None or journal.rewrites:  # pointers are rewritten before anything goes
            if refusal is not None and not outcome.removed:
                raise refusal
            outcome.failed |= {removal.path: "no space left for a journal" for removal in journal.removals}
            break
        _unlink_at_once(directory, first, outcome)
        journal = Removals(tuple(removal for removal in journal.removals if removal is not first))
    return outcome


def _remove_with_journal(directory: str, journal: Removals, outcome: RemovalOutcome) -> None:
    with journaled_stage(directory, journal) as stage:
        place, scratch = OpenDirectory(directory, stage.directory), OpenDirectory(stage.path, stage.inner)
        for rewrite in journal.rewrites:
            write_in(place, rewrite.name, rewrite.text.encode(), scratch)
        staged = [
            (number, removal)
            for number, removal in zip(place_numbers(journal.removals), journal.removals, strict=True)
            if _succeeds(outcome, removal, partial(stage.set_aside, number, removal))
        ]
        # What follows can't be taken back: that all of it is in the stage must be on the disk before.
        sync_directory(directory)
        _unlink_staged(stage, staged, outcome)
        try:
            stage.close()
        except OSError as error:
            outcome.failed[stage.path] = system_text(error)


def _unlink_staged(
    stage: RemovalStage, staged: Sequence[tuple[int, Removal]], outcome: RemovalOutcome
) -> None:
    """Unlink what was set aside; of many, two threads do one half each: the disk works meanwhile."""
    if len(staged) < _MANY:
        _unlink_each(stage, staged, outcome)
        return
    # What has several names is counted as freed with the last of them: one thread has all of those.
    linked = [pair for pair in staged if any(file.links > 1 for file in pair[1].contents.files)]
    single = [pair for pair in staged if all(file.links == 1 for file in pair[1].contents.files)]
    halves = ([*linked, *single[::2]], single[1::2])
    for part in in_order(partial(_unlink_half, stage), halves, len(halves)):
        outcome.removed += part.removed
        outcome.failed |= part.failed
        outcome.crowded |= part.crowded
        outcome.stranded |= part.stranded
        outcome.freed += part.freed


def _unlink_half(
    stage: RemovalStage, half: Sequence[tuple[int, Removal]], check: Callable[[], None]
) -> RemovalOutcome:
    outcome = RemovalOutcome()
    _unlink_each(stage, half, outcome, check)
    return outcome


def _unlink_each(
    stage: RemovalStage,
    staged: Sequence[tuple[int, Removal]],
    outcome: RemovalOutcome,
    check: Callable[[], None] = lambda: None,
) -> None:
    for number, removal in staged:
        check()
        if _succeeds(outcome, removal, partial(_unlink_or_restore, stage, number, removal, outcome)):
            outcome.removed.append(removal.path)


def _unlink_or_restore(stage: RemovalStage, number: int, removal: Removal, outcome: RemovalOutcome) -> None:
    try:
        for nbytes in stage.unlink(number, removal):
            outcome.freed += nbytes
    except (StalePlan, OSError):
        stage.restore(number, removal)
        raise


def _crowded_out(directory: str, journal: Removals, outcome: RemovalOutcome) -> tuple[Removal, ...]:
    """Return what failed on a full disk and lies where it lay; it counts as failed no more."""
    crowded = tuple(
        removal
        for removal in journal.removals
        if removal.path in outcome.crowded
        and all(fs.lexists(os.path.join(directory, name)) for name in removal.members)
    )
    for removal in crowded:
        del outcome.failed[removal.path]
    outcome.crowded.clear()
    return crowded


def _unlink_at_once(directory: str, removal: Removal, outcome: RemovalOutcome) -> None:
    """Unlink a checkpoint without a journal, so that there is room for one.

    A kill leaves nothing half-done of a single file; of others it leaves a part.
    """

    def unlink() -> None:
        with opened(directory) as place:
            if not any(status_of(name, place) for name in removal.members):
                raise AlreadyGone
            require_unmounted(place, removal.members)
            require_removable(place, removal.contents)
            for freed in _unlink_all(place, removal, shown(directory)):
                outcome.freed += freed

    if _succeeds(outcome, removal, unlink):
        outcome.removed.append(removal.path)


def _succeeds(outcome: RemovalOutcome, removal: Removal, step: Callable[[], object]) -> bool:
    try:
        step()
    except AlreadyGone:
        outcome.removed.append(removal.path)
    except StalePlan as change:
        outcome.failed[removal.path] = str(change)
    except StrandedCheckpoint as rest:
        outcome.failed[removal.path] = str(rest)
        outcome.stranded.add(removal.path)
    except OSError as error:
        outcome.failed[removal.path] = system_text(error)
        if error.errno in FULL:
            outcome.crowded.add(removal.path)
    else:
        return True
    return False


@contextmanager
def journaled_stage(directory: str, journal: Removals) -> Iterator[RemovalStage]:
    """Write a journal, yield the stage to work on, and take both away if all went well."""
    path = begin_journal(directory, state_dir_of(directory), removals_document(journal), "removed")
    try:
        try:
            with opened(directory) as place, open_own(directory, *os.path.split(path)) as inner:
                assert inner.descriptor is not None  # the system was asked
                stage = RemovalStage(path, place, inner.descriptor)
                try:
                    yield stage
                finally:
                    stage.abandon()
            remove_stage(path)
        except KeyboardInterrupt:
            recover_removals(directory, path, journal.removals, Recovery())
            remove_stage(path)
            raise
    except OSError as error:
        reason = from_os_error(error, directory).reason
        raise AccessDenied(directory, f"{reason}; the next prune recovers") from error


# The stage ----------------------------------------------------------------------------------------


def place_numbers(removals: Sequence[Removal]) -> list[int]:
    """Return the number of the directory that each checkpoint is put in: single files share one."""
    shared = next((number for number, removal in enumerate(removals) if removal.is_single), 0)
    return [shared if removal.is_single else number for number, removal in enumerate(removals)]


@dataclass(frozen=True, slots=True)
class RemovalStage:
    """An owned directory: where checkpoints are put before they are unlinked.

    Attributes:
        path: Its path.
        directory: Descriptor of the directory that the checkpoints lie in.
        inner: Descriptor of the owned directory itself.
        shared: Descriptor of the directory in it that single files are put in, by its number; see ``close``.
    """

    path: str
    directory: int
    inner: int
    shared: dict[int, int] = field(default_factory=dict)

    def close(self) -> None:
        """Remove the directory of single files, and close it."""
        for number in list(self.shared):
            os.close(self.shared.pop(number))
            retry_while_busy(partial(remove_directory, str(number), self.inner))

    def abandon(self) -> None:
        """Close what is open, and leave what lies there."""
        while self.shared:
            os.close(self.shared.popitem()[1])

    def set_aside(self, number: int, removal: Removal) -> None:
        """Rename a checkpoint away, its index first.

        Args:
            number: Of the directory that it is put in; see ``place_numbers``.
            removal: The checkpoint.
        """
        try:
            _require_unchanged(self.directory, removal)
        except StalePlan as change:
            if not any(status_of(name, self.directory) for name in removal.members):
                raise AlreadyGone from change
            raise
        require_removable(self.directory, removal.contents)
        with self._made_place(number, removal) as place:
            try:
                for name in removal.members:
                    retry_while_busy(partial(rename, name, self.directory, name, place))
                # Only what was renamed is known to be what was checked: another could have come between.
                _require_unchanged(place, removal)
            except (OSError, StalePlan):
                self.restore(number, removal)
                raise

    @contextmanager
    def _made_place(self, number: int, removal: Removal) -> Iterator[int]:
        """Make the directory that a checkpoint is put in, and open it; that of single files stays open."""
        if removal.is_single:
            if number not in self.shared:
                self.shared[number] = make_directory(str(number), 0o700, self.inner)
            yield self.shared[number]
            return
        place = make_directory(str(number), 0o700, self.inner)
        try:
            yield place
        finally:
            os.close(place)

    def put_back(self, number: int, removal: Removal) -> None:
        """Rename a checkpoint to where it was, its index last."""
        with opened(str(number), self.inner) as place:
            for name in reversed(removal.members):
                if status_of(name, place) is not None:
                    _move_back(name, place, self.directory)
        if not removal.is_single:
            retry_while_busy(partial(remove_directory, str(number), self.inner))

    def restore(self, number: int, removal: Removal) -> None:
        """Put a checkpoint back of which nothing was removed."""
        try:
            self.put_back(number, removal)
        except OSError as error:
            raise StrandedCheckpoint(
                f"not put back: {system_text(error)}; it is in {self._place(number)}"
            ) from error

    def unlink(self, number: int, removal: Removal) -> Iterator[int]:
        """Unlink a checkpoint that was set aside; yield the bytes that each file frees."""
        if number in self.shared and removal.is_single:
            (file,) = removal.contents.files
            yield _unlink_file(file.path, self.shared[number], file)
            return
        with opened(str(number), self.inner) as place:
            yield from _unlink_all(place, removal, self._place(number))
        try:
            retry_while_busy(partial(remove_directory, str(number), self.inner))
        except OSError as failure:
            raise _partly_removed(failure, self._place(number)) from failure

    def _place(self, number: int) -> str:
        return shown(os.path.join(self.path, str(number)))


def _move_back(name: str, place: int, directory: int) -> None:
    """Rename without ever replacing what is there now."""
    if is_same_file(name, place, name, directory):  # a kill came between the two steps below
        os.unlink(name, dir_fd=place)
        return
    if status_of(name, directory) is not None:
        raise FileExistsError(errno.EEXIST, "its place is taken by another file", name)
    if link_or_rename(name, place, name, directory, lambda: False):
        os.unlink(name, dir_fd=place)


# Looking first -------------------------------------------------------------------------------------


def _require_unchanged(place: int, removal: Removal) -> None:
    try:
        if removal.is_single:  # a mount point among single files is nothing that could be renamed
            (file,) = removal.contents.files
            status = os.stat(file.path, dir_fd=place, follow_symlinks=False)
            is_same = fingerprint(file.path, status) == file
        else:
            here = contents(place, removal.members)
            require_unmounted(place, removal.members, here)
            is_same = here.is_same_as(removal.contents)
    except FileNotFoundError as error:
        raise StalePlan("it has vanished, or a part of it,", since_plan=True) from error
    if not is_same:
        raise StalePlan("it has changed", since_plan=True)


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


def _unlink_all(place: int, removal: Removal, shown_place: str) -> Iterator[int]:
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


# What a kill left -----------------------------------------------------------------------------------

_COPIED = (
    "a prune was interrupted while it removed it, and the directory was copied as it was then, "
    "without the times of its files"
)


def recover_removals(directory: str, path: str, removals: Sequence[Removal], recovery: Recovery) -> None:
    """Unlink what was interrupted while it was removed, or else put it back.

    Args:
        directory: The directory that it lay in.
        path: Of the stage that it was set aside in.
        removals: What its journal says.
        recovery: Is told what became of it.
    """
    with opened(directory) as place, open_own(directory, *os.path.split(path)) as inner:
        assert inner.descriptor is not None  # else nothing was begun
        stage = RemovalStage(path, place, inner.descriptor)
        shared = place_numbers(removals)
        for number, removal in enumerate(removals):
            # A directory of its own is what ckpttool gave single files, too, before they shared one.
            has_own = status_of(str(number), stage.inner) is not None
            _recover_removal(stage, number if has_own else shared[number], removal, recovery)
        for number, removal in enumerate(removals):
            if removal.is_single:
                try:
                    retry_while_busy(partial(remove_directory, str(number), stage.inner))
                except FileNotFoundError:
                    continue
                except OSError as error:
                    if not recovery.failed:
                        recovery.failed[stage.path] = system_text(error)


def _recover_removal(stage: RemovalStage, number: int, removal: Removal, recovery: Recovery) -> None:
    if status_of(str(number), stage.inner) is None:
        return
    try:
        with opened(str(number), stage.inner) as place:
            if removal.is_single and status_of(removal.members[0], place) is None:
                return  # it wasn't put there yet, or has gone already
            inodes = inodes_of_removal(removal, place, stage.directory)
            removal = removal._replace(contents=inodes.of(removal.contents))
            try:
                is_finished = _is_to_finish(stage, place, removal)
                if is_finished:
                    _finish(stage, place, removal)
            except StalePlan as change:
                raise StalePlan(_COPIED if inodes.now is None else str(change)) from change
        if not is_finished:
            stage.put_back(number, removal)
        elif not removal.is_single:
            retry_while_busy(partial(remove_directory, str(number), stage.inner))
        (recovery.finished if is_finished else recovery.put_back).append(removal.path)
    except StalePlan as change:
        recovery.failed[removal.path] = f"{change}; what is left of it is in {stage.path}"
    except OSError as error:
        recovery.failed[removal.path] = f"{system_text(error)}; what is left of it is in {stage.path}"


def _is_to_finish(stage: RemovalStage, place: int, removal: Removal) -> bool:
    """Tell whether a removal lost a part in its stage already, or is whole and still wanted.

    What is lost while nothing lies in the stage was never removed by us, and says nothing of the rest.
    """
    # For each file, of the stage and of its old place, those that have the name: whether it is this file.
    states = [
        [
            file.is_of(status)
            for one in (place, stage.directory)
            if (status := status_at(file.path, one)) is not None
        ]
        for file in removal.contents.files
    ]
    has_begun = any(status_of(name, place) is not None for name in removal.members)
    is_lost = not any(states) or (has_begun and not all(states))
    is_whole = all(True in state for state in states)
    is_wanted = has_begun and all(status_of(name, stage.directory) for name in removal.survivors)
    return is_lost or (is_whole and is_wanted)


def _finish(stage: RemovalStage, place: int, removal: Removal) -> None:
    """Rename away what is still in its place, unless it is another file by now, and unlink all."""
    for name in removal.members:
        files = [file for file in removal.contents.files if file.path.split(os.sep)[0] == name]
        if files and all(_is_there(file, stage.directory) for file in files):
            if status_of(name, place) is not None:
                os.unlink(name, dir_fd=place)  # put back already, but for this second name
            retry_while_busy(partial(rename, name, stage.directory, name, place))
    for _ in purge(place, removal.contents, may_be_gone=True):
        pass


def _is_there(file: Fingerprint, directory: int) -> bool:
    status = status_at(file.path, directory)
    return status is not None and file.is_of(status)
