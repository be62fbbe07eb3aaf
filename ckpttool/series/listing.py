"""Which checkpoints are here?"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from ckpttool.series.entry import Entry, shown
from ckpttool.series.planning import Problem
from ckpttool.series.protection import follow
from ckpttool.series.survey import survey


@dataclass(frozen=True, slots=True)
class Listed:
    """A checkpoint in a list, and what points at it."""

    entry: Entry
    protected: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Listing:
    """All checkpoints of a directory, series by series, each from the oldest on."""

    checkpoints: tuple[Listed, ...]
    problems: tuple[Problem, ...] = ()
    warnings: tuple[str, ...] = ()
    journals: tuple[str, ...] = ()


def list_checkpoints(
    directory: str | os.PathLike[str],
    *,
    recursive: bool = True,
    exclude: Sequence[str] = (),
    max_depth: int | None = None,
) -> Listing:
    """Return the checkpoints of a directory tree; nothing on disk is changed.

    Raises:
        CheckpointError: The directory can't be looked at.
    """
    found = survey(directory, recursive=recursive, exclude=exclude, max_depth=max_depth)
    pointed = follow(found.root, found.groups)
    listed = (Listed(entry, tuple(pointed.reasons.get(entry.path, ()))) for entry in found.entries)
    problems = [Problem(shown(error.path), error.reason) for error in found.errors]
    problems += [Problem(entry.path, entry.fault) for entry in found.entries if entry.fault]
    return Listing(tuple(listed), tuple(problems), found.warnings, found.journals)
