"""Copies in another place that a removal requires, byte for byte, at the same paths as ``copy`` puts them."""

from __future__ import annotations

import os
from collections.abc import Iterable

from ckpttool.core.errors import UsageError
from ckpttool.ops.copy_check import is_same
from ckpttool.ops.file_copy import is_unchanged, status_of
from ckpttool.runs.members.entry import Entry
from ckpttool.runs.members.full_read import Progress
from ckpttool.storage import fs
from ckpttool.storage.work import Advance
from ckpttool.transaction.files import Fingerprint
from ckpttool.transaction.paths import bare, is_within


class RequiredCopies:
    """Copies of the checkpoints of a directory in another place."""

    def __init__(self, root: str, location: str, progress: Progress) -> None:
        """Take the directory and the place.

        Raises:
            UsageError: The place is in the directory itself.
        """
        if is_within(fs.realpath(bare(location)), fs.realpath(root)):
            raise UsageError(f"--require-copy {location}: it lies in {root}, and is no other place")
        self._root, self._location, self._progress = root, location, progress
        self._proven: dict[str, dict[str, os.stat_result]] = {}
        fs.refresh(location)

    def lacking(self, entries: Iterable[Entry]) -> dict[str, str]:
        """Return reasons to keep checkpoints whose copy isn't proven, by path.

        Raises:
            CheckpointError: The place can't be asked.
        """
        reasons: dict[str, str] = {}
        for entry in entries:
            with self._progress(entry.name, entry.nbytes) as advance:
                proven = self._proven[entry.path] = {}
                for file in entry.contents.files:
                    path = os.path.join(entry.directory, file.path)
                    copy = os.path.join(bare(self._location), os.path.relpath(path, self._root))
                    status = status_of(copy)
                    if status is None or not _is_copy(path, file, copy, status, advance):
                        reasons[entry.path] = f"not proven in {self._location}"
                        break
                    proven[copy] = status
        return reasons

    def changed(self) -> dict[str, str]:
        """Return reasons to keep checkpoints whose copy has changed since it was proven, by path."""
        fs.refresh(self._location)
        reason = f"its copy in {self._location} has changed since the plan was made"
        return {
            path: reason
            for path, proven in self._proven.items()
            if not all(is_unchanged(copy, status) for copy, status in proven.items())
        }


def _is_copy(path: str, file: Fingerprint, copy: str, status: os.stat_result, advance: Advance) -> bool:
    own = status_of(path)
    if own is None or own.st_size != status.st_size:
        return False
    is_itself = (status.st_dev, status.st_ino) in ((own.st_dev, own.st_ino), (file.device, file.inode))
    return not is_itself and is_same(path, copy, advance)
