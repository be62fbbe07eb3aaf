"""Which checkpoint of a directory is newest."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass

from ckpttool.errors import from_os_error


@dataclass(frozen=True, slots=True)
class Chosen:
    """The checkpoint that stands for a path, and how many others lie there."""

    path: str
    others: int


def newest_in(path: str) -> Chosen:
    """Return the checkpoint that a path stands for: itself, or the newest in the directory.

    Raises:
        NotACheckpoint: There is none.
        CheckpointError: The path can't be looked at.
    """
    try:
        is_directory = stat.S_ISDIR(os.stat(path).st_mode)
    except OSError as error:
        raise from_os_error(error, path) from error
    if not is_directory:
        return Chosen(path, 0)
    from ckpttool.formats import unrecognised
    from ckpttool.formats.discovery import discover
    from ckpttool.formats.interface import Probe

    units = list(discover(path))
    if not units:
        raise unrecognised(Probe(path))
    newest = max(units, key=lambda unit: os.stat(unit.path).st_mtime_ns)
    return Chosen(newest.path, len(units) - 1)
