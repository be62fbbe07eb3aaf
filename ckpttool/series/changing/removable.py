"""Whether a checkpoint can be removed as a whole, told before the first step of it."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

from ckpttool.series.files import Contents, opened


def require_removable(place: int, found: Contents) -> None:
    """Require that all directories of a checkpoint let this user unlink what they hold, as far as they tell.

    Raises:
        PermissionError: One doesn't.
        OSError: One can't be opened.
    """
    for path in found.directories:
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
