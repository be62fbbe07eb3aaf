"""``inspect``: facts about the checkpoint at a path, or the newest of a directory."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass

from ckpttool.core.errors import from_os_error
from ckpttool.ops.inspect import Inspection, inspection, open_to_inspect
from ckpttool.storage import fs


@dataclass(frozen=True, slots=True)
class ChosenCheckpoint:
    """Checkpoint that a path means, the number of others in the directory, and pending journals."""

    path: str
    others: int
    journals: tuple[str, ...] = ()
    in_subdirectories: bool = False


def newest_in(path: str) -> ChosenCheckpoint:
    """Return the checkpoint that a path means: itself, or the newest in the directory.

    Checkpoints directly in the directory come before deeper ones.
    """
    try:
        is_directory = stat.S_ISDIR(fs.stat(path).st_mode)
    except OSError as error:
        raise from_os_error(error, path) from error
    except ValueError:  # a NUL in the path: opening it fails
        is_directory = False
    # A survey's modules are imported for directories alone: ``inspect`` of a file starts faster without.
    if not is_directory:
        return ChosenCheckpoint(path, 0)
    from ckpttool.formats import recognition_error
    from ckpttool.formats.discovery import unit_at
    from ckpttool.formats.interface import Probe
    from ckpttool.runs.scope import Scope
    from ckpttool.runs.series import newest_first
    from ckpttool.runs.survey import survey_directory

    if unit_at(path) is not None:
        return ChosenCheckpoint(path, 0)
    for recursive in (False, True):
        survey = survey_directory(path, Scope(recursive=recursive))
        if survey.entries:
            # A damaged or unfinished one is shown only if there is no other.
            newest = min(newest_first(survey.groups), key=lambda entry: not entry.is_sound)
            return ChosenCheckpoint(newest.path, len(survey.entries) - 1, survey.journals, recursive)
    with Probe(path) as probe:
        raise recognition_error(probe)


def inspect(path: str | os.PathLike[str], *, filter: str | None = None, stats: bool = False) -> Inspection:
    """Return facts about a checkpoint.

    Args:
        path: A file, directory or index; of a directory of several checkpoints, the newest.
        filter: Glob that the names of the tensors must match.
        stats: Whether to read the values and compute statistics of the numeric ones.

    Raises:
        CheckpointError: It isn't a checkpoint, or can't be read.
    """
    with open_to_inspect(newest_in(os.fspath(path)).path, stats=stats) as checkpoint:
        return inspection(checkpoint, filter=filter, stats=stats)
