"""Removes the training state from checkpoints, as planned for ``--full``.

The path of a checkpoint always exists: the old file gets a second name in the trash, or in the stage of the
journal, and the slim file replaces it atomically. After a kill, recovery reverts or completes the operations.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import count

from ckpttool.core.errors import CheckpointError, UsageError
from ckpttool.formats import open_checkpoint
from ckpttool.formats.interface import MANIFEST_SUFFIXES
from ckpttool.formats.writer import Rewritten
from ckpttool.ops.slim import (
    NotSlim,
    manifest_of,
    plan_slim_file,
    plan_trim,
    require_slim_directory,
    write_slim_file,
    write_trimmed,
)
from ckpttool.runs.entry import Entry
from ckpttool.runs.look import Progress
from ckpttool.runs.retention.plan import GroupPlan
from ckpttool.storage import fs
from ckpttool.transaction.files import Contents, Fingerprint, fingerprint
from ckpttool.transaction.journal import FILES, Group, Location, Move, OperationList, Root, StoredFile
from ckpttool.transaction.staged_output import StagedOutput
from ckpttool.transaction.transaction import apply


def obstacle_to_slimming(entry: Entry, dtype: str | None) -> str | None:
    """Return why a checkpoint can't be slimmed, by its structure; None if it can."""
    # Another hard link would keep the old file, and its bytes: nothing would be freed. A manifest would no
    # longer match.
    files = _replaced_files(entry)
    if entry.contents.symlinks:
        return "a part of it is a symlink"
    if any(file.links > 1 for file in files):
        return "it has other hard links"
    if entry.holds_others:
        return "it contains other checkpoints"
    if any(name.endswith(MANIFEST_SUFFIXES) for name in entry.unit.members):
        return "a manifest next to it records its current content"
    try:
        with open_checkpoint(entry.unit.path) as checkpoint:
            if (manifest := manifest_of(checkpoint)) is not None:
                return f"{manifest} records its current content"
            if _is_one_file(entry):
                plan_slim_file(checkpoint, dtype)
            elif not entry.state.files:
                plan_trim(checkpoint)
    except (NotSlim, CheckpointError) as failure:
        return str(failure)
    return None


def _is_one_file(entry: Entry) -> bool:
    return not entry.state.files and len(entry.contents.files) == 1


def _replaced_files(entry: Entry) -> tuple[Fingerprint, ...]:
    """Return the files that slimming removes or writes anew: some of a directory, or all."""
    if not entry.state.files:
        return entry.contents.files
    names = {os.path.join(entry.name, name) for name in entry.state.files}
    return tuple(file for file in entry.contents.files if file.path in names)


class Slimming:
    """Slims checkpoints one by one.

    Attributes:
        freed: Bytes freed.
        failed: Why checkpoints stayed whole, by path.
    """

    def __init__(self, identity: str | None, jobs: int | None, progress: Progress) -> None:
        """Slim with ``jobs`` threads; the trash of command ``identity`` keeps the old files, None deletes."""
        self._identity, self._jobs, self._progress = identity, jobs, progress
        self._numbers = count(int(FILES) + 1)
        self.freed = 0
        self.failed: dict[str, str] = {}

    def slim(self, group: GroupPlan, entry: Entry) -> None:
        """Slim one checkpoint of a series, whose directory is locked."""
        try:
            if entry.state.files:
                self._slim_directory(entry)
            elif _is_one_file(entry):
                self._slim_file(entry, None if group.policy is None else group.policy.dtype)
            else:
                self._trim_directory(entry)
        except (NotSlim, CheckpointError, UsageError) as failure:
            self.failed[entry.path] = str(failure).removeprefix(entry.unit.path).removeprefix(": ")

    def _slim_file(self, entry: Entry, dtype: str | None) -> None:
        name = entry.name

        def place(staged: StagedOutput) -> None:
            self._replace(entry, entry.contents, _successors(entry, staged.staged_paths(), ""))

        with open_checkpoint(entry.unit.path) as checkpoint:
            plan = plan_slim_file(checkpoint, dtype, self._jobs)
            with self._progress(name, plan.work) as advance:
                write_slim_file(plan, place, advance)

    def _slim_directory(self, entry: Entry) -> None:
        require_slim_directory(entry.unit.path, entry.state.files)
        self._replace(entry, Contents(_replaced_files(entry)))

    def _trim_directory(self, entry: Entry) -> None:
        def place(staged: StagedOutput, new: Rewritten) -> None:
            alike = {now: old for old, now in new.files.items()}
            successors = _successors(entry, staged.staged_paths(alike), entry.name)
            names = {os.path.join(entry.name, name) for name in new.replaced}
            files = (file for file in entry.contents.files if file.path in names)
            self._replace(entry, Contents(tuple(files)), successors)

        write_trimmed(entry.unit.path, place, self._jobs, self._progress)

    def _replace(self, entry: Entry, contents: Contents, successors: Sequence[StoredFile] = ()) -> None:
        """Replace files of a checkpoint; the old files are moved to the trash, or removed.

        Args:
            entry: The checkpoint.
            contents: The files.
            successors: New files that replace them, or get new names; the last one is the index, if any.
        """
        # New files come first and old ones leave last, so that the checkpoint is complete at each moment.
        # Files under new names come before those that replace others: an index among these then lists files
        # that exist.
        place: Root = "stage" if self._identity is None else "trash"
        old = {
            file.path: StoredFile(
                Location(place, os.path.join(str(next(self._numbers)), os.path.basename(file.path))), file
            )
            for file in contents.files
        }
        comes = [
            Move(0, one.location, Location("directory", one.file.path), one.file, old.get(one.file.path))
            for one in sorted(successors, key=lambda one: one.file.path in old)
        ]
        replaced = {one.file.path for one in successors}
        leaves = [
            Move(0, Location("directory", path), one.location)
            for path, one in old.items()
            if path not in replaced
        ]
        group = Group(entry.path, tuple(old), contents)
        listed = OperationList("slim", (group,), (*comes, *leaves), self._identity)
        moved = apply(entry.directory, listed)
        if entry.path not in moved.done:
            raise NotSlim(moved.failed.get(entry.path, "it no longer exists"))
        self.freed += contents.nbytes - sum(one.file.size for one in successors)


def _successors(entry: Entry, waits: Mapping[str, str], below: str) -> tuple[StoredFile, ...]:
    """Return the staged files of a slimmed checkpoint in the order of their placement.

    Args:
        entry: The checkpoint.
        waits: Paths of the staged files by name, an index last.
        below: Directory that they are moved to, relative to the checkpoint's.
    """
    return tuple(
        StoredFile(
            Location("directory", path),
            fingerprint(os.path.join(below, name), fs.lstat(os.path.join(entry.directory, path))),
        )
        for name, path in waits.items()
    )
