"""Whether another place has what is to be removed, byte for byte, at the same paths as ``copy`` puts it."""

from __future__ import annotations

import os
from collections.abc import Iterable

from ckpttool.core.errors import UsageError
from ckpttool.ops.copy_check import is_same
from ckpttool.ops.file_copy import status_of
from ckpttool.runs.members.entry import Entry
from ckpttool.runs.members.full_read import Progress
from ckpttool.storage import fs
from ckpttool.storage.work import Advance
from ckpttool.transaction.files import Fingerprint
from ckpttool.transaction.paths import bare, is_within


def without_copy(entries: Iterable[Entry], root: str, location: str, progress: Progress) -> dict[str, str]:
    """Return why to keep each checkpoint of which a place isn't proven to have all, by its path.

    Raises:
        UsageError: The place lies in the directory itself.
        CheckpointError: The place can't be asked.
    """
    if is_within(fs.realpath(bare(location)), fs.realpath(root)):
        raise UsageError(f"--require-copy {location}: it lies in {root}, and is no other place")
    reasons = {}
    for entry in entries:
        with progress(entry.name, entry.nbytes) as advance:
            places = ((os.path.join(entry.directory, file.path), file) for file in entry.contents.files)
            if not all(
                _has_copy(path, file, os.path.join(bare(location), os.path.relpath(path, root)), advance)
                for path, file in places
            ):
                reasons[entry.path] = f"not proven in {location}"
    return reasons


def _has_copy(path: str, file: Fingerprint, copy: str, advance: Advance) -> bool:
    status, own = status_of(copy), status_of(path)
    if status is None or own is None or own.st_size != status.st_size:
        return False
    is_itself = (status.st_dev, status.st_ino) in ((own.st_dev, own.st_ino), (file.device, file.inode))
    return not is_itself and is_same(path, copy, advance)
