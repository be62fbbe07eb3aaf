"""Engine for directories on a disk, which are locked, and changed by links and renames."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime, timezone

from ckpttool.core.errors import AccessDenied, CheckpointError
from ckpttool.storage import fs
from ckpttool.transaction.engine import Engine, UndoMethod
from ckpttool.transaction.files import Contents, Fingerprint, StalePlan, contents, opened, status_at
from ckpttool.transaction.history import CommandRecord
from ckpttool.transaction.journal import Group, Location, OperationList
from ckpttool.transaction.mounts import require_unmounted
from ckpttool.transaction.open_roots import OpenRoots, open_roots
from ckpttool.transaction.removal import move_to_trash, remove
from ckpttool.transaction.settling import Settled, settle_stage
from ckpttool.transaction.stages import JOURNAL, stages
from ckpttool.transaction.state_dir import (
    StateDir,
    may_keep_state_beside,
    open_own,
    other_owner,
    require_own,
    state_dir_beside,
    state_dir_of_stage,
)
from ckpttool.transaction.stored_journals import read_journal
from ckpttool.transaction.transaction import Failure, Outcome, apply, blocked_groups
from ckpttool.transaction.unlinking import purge, require_removable


class DiskEngine(Engine):
    """Commands on a directory of this machine, which is locked while it is changed."""

    def undo_method(self, removals: Sequence[tuple[str, Contents]], *, is_trash: bool) -> UndoMethod:
        return UndoMethod.TRASH if is_trash else UndoMethod.NONE

    def remove(self, removals: Sequence[Group], identity: str, method: UndoMethod) -> Outcome:
        if method is UndoMethod.TRASH:
            return move_to_trash(self.directory, removals, identity)
        return remove(self.directory, removals)

    def restorable(
        self, record: CommandRecord, undoing: OperationList, *, is_latest_step: bool, dry_run: bool
    ) -> tuple[list[int], frozenset[int], dict[str, Failure]]:
        numbers = range(len(undoing.groups))
        if dry_run and not is_latest_step:  # after two renames, the names in between don't exist yet
            return [*numbers], frozenset(), {}
        stuck = dict(blocked_groups(self.directory, undoing, record.state_dir))
        failures = {undoing.groups[number].path: failure for number, failure in stuck.items()}
        return [one for one in numbers if one not in stuck], frozenset(), failures

    def restore(self, record: CommandRecord, undoing: OperationList) -> tuple[Outcome, frozenset[int]]:
        return apply(self.directory, undoing, record.state_dir), frozenset()

    def purge(
        self, record: CommandRecord, listed: OperationList, *, dry_run: bool
    ) -> Iterator[tuple[int, int | Exception]]:
        with opened(record.place) as place:
            for number, group in enumerate(listed.groups):
                try:
                    yield number, _remove_from_place(place, group, dry_run=dry_run)
                except (StalePlan, OSError) as failure:
                    yield number, failure

    def age(self, identity: str) -> float:
        moment = datetime.strptime(identity.partition("Z")[0], "%Y%m%dT%H%M%S.%f")
        return time.time() - moment.replace(tzinfo=timezone.utc).timestamp()

    def journals(self) -> list[str]:
        # Stages are searched for in both possible places, since the directory may have become one that a
        # trainer scans, or may have ceased to be one, after the command was killed.
        paths: list[str] = []
        with suppress(CheckpointError):  # an unreadable directory has no journal that could be settled
            paths += stages(StateDir(self.directory))
        with suppress(CheckpointError):
            if may_keep_state_beside(self.directory):
                paths += stages(state_dir_beside(self.directory))
        pending: list[str] = []
        for path in (os.path.join(stage, JOURNAL) for stage in paths):
            try:
                fs.lstat(path)
            except PermissionError:
                pass  # another user's stage can't be entered; the journal may exist
            except OSError:
                continue
            pending.append(path)
        return pending

    def owner_of(self, journal: str) -> str | None:
        stage = os.path.dirname(journal)
        try:
            return other_owner(fs.lstat(stage), fs.stat(state_dir_of_stage(stage).directory))
        except OSError:  # its command has just removed it
            return None

    def hidden_names(self) -> frozenset[str]:
        names: set[str] = set()
        for path in self.journals():
            stage = os.path.dirname(path)
            try:
                journal = read_journal(stage, self.directory)
            except CheckpointError:  # the next command that changes something refuses to go on
                continue
            if journal is not None:
                names |= _hidden_names(self.directory, stage, journal)
        return frozenset(names)

    def leftovers(self) -> list[str]:
        paths = stages(StateDir(self.directory))
        try:
            paths += stages(state_dir_beside(self.directory))
        except AccessDenied:  # the parent needs to be listed only if it may hold stages
            if may_keep_state_beside(self.directory):
                raise
        return paths

    def settle(self, path: str) -> Settled | None:
        require_own(path, self.directory)
        return settle_stage(self.directory, path)


# The trash ------------------------------------------------------------------------------------------


def _remove_from_place(place: int, group: Group, *, dry_run: bool) -> int:
    """Remove a checkpoint from the trash; return the bytes that this frees, or would free."""
    freed = sum(_freed_bytes(place, file) for file in group.contents.files)
    require_unmounted(place, group.members)
    if dry_run:
        return freed
    require_removable(place, group.contents)
    try:
        for _ in purge(place, group.contents, allow_missing=True):
            pass
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # unlisted files are kept, and reported
            raise
    return freed


def _freed_bytes(place: int, file: Fingerprint) -> int:
    """Return the bytes freed by removing a file; 0 if it is missing."""
    status = status_at(file.path, place)
    if status is None:
        return 0
    if not file.is_of(status):
        raise StalePlan(f"{file.path} has changed since it was moved to the trash")
    return status.st_size if status.st_nlink == 1 else 0


# Names hidden by journals ---------------------------------------------------------------------------


def _hidden_names(directory: str, stage: str, listed: OperationList) -> set[str]:
    """Return the names in a directory that aren't checkpoints while a journal moves them."""
    names = {
        one.name for one in listed.pointers if (one.after if listed.is_committed else one.before) is None
    }
    try:
        with (
            open_own(directory, *os.path.split(stage)) as inner,
            open_roots(directory, listed, state_dir_of_stage(stage), inner.descriptor) as roots,
        ):
            for number, group in enumerate(listed.groups):
                is_done = listed.done is not None and number in listed.done
                names.update(_hidden_names_of(directory, roots, number, group, is_done=is_done))
    except (CheckpointError, OSError):  # the next command that changes something refuses to go on
        return names
    return names


def _hidden_names_of(
    directory: str, roots: OpenRoots, number: int, group: Group, *, is_done: bool
) -> Iterator[str]:
    # A file that replaces another one hides nothing: its name always has one of the two.
    moves = [one for one in roots.listed.moves_by_group[number] if one.file is None and one.replaces is None]
    arriving = [one for one in moves if not one.target.is_private]
    moved = [one for one in moves if roots.has_moved(one)]
    if arriving and not is_done:
        # Before the commit, a checkpoint counts under its old names while it has all of them, and
        # its new names are hidden. A directory has only one name at a time: once all parts are
        # moved, the new names count.
        is_in_place = all(
            roots.status(Location(roots.listed.original_root(number), name)) for name in group.members
        )
        if is_in_place or len(arriving) > len([one for one in arriving if one in moved]):
            yield from (one.target.path for one in arriving if one in moved)
        if roots.listed.original_root(number) == "directory" and not is_in_place:
            yield from _names_left(directory, group)
    elif roots.listed.original_root(number) == "directory" and moved and (arriving or not group.is_single):
        yield from _names_left(directory, group)


def _names_left(directory: str, group: Group) -> Iterator[str]:
    """Yield members of a partly moved checkpoint that have not been saved again since."""
    for name in group.members:
        recorded = [file for file in group.contents.files if file.path.split(os.sep)[0] == name]
        try:
            now = contents(directory, [name]).files
        except OSError:  # missing or unreadable: hidden as well
            now = ()
        # Inodes aren't compared: in a copy of the directory, all of them differ.
        kept = {(file.path, file.size, file.mtime_ns) for file in recorded}
        if not now or any((file.path, file.size, file.mtime_ns) in kept for file in now):
            yield name
