"""Which checkpoints are here, and which is the newest that is intact?"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ckpttool.errors import NotFound, UsageError
from ckpttool.series.entry import Entry
from ckpttool.series.order import newest_first
from ckpttool.series.planning import Depth, Problem, read_in_full
from ckpttool.series.pointers import temporary_for
from ckpttool.series.protection import follow
from ckpttool.series.survey import Survey, survey

Mode = Literal["min", "max"]


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


@dataclass(frozen=True, slots=True)
class Latest:
    """The newest intact checkpoint, or why there is none; ``passed_over`` were newer, or better."""

    entry: Entry | None
    reason: str | None = None
    passed_over: tuple[Problem, ...] = ()
    journals: tuple[str, ...] = ()

    @property
    def path(self) -> str | None:
        """Return the path of the checkpoint, or None where there is none."""
        return None if self.entry is None else self.entry.path


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
    problems = [Problem(error.path, error.reason) for error in found.errors]
    problems += [Problem(entry.path, entry.fault) for entry in found.entries if entry.fault]
    return Listing(tuple(listed), tuple(problems), found.warnings, found.journals)


def latest(
    directory: str | os.PathLike[str],
    *,
    recursive: bool = False,
    depth: Depth = "quick",
    best: str | None = None,
    mode: Mode | None = None,
    jobs: int | None = None,
) -> Latest:
    """Return the newest intact checkpoint of a directory; with ``best`` that of the best metric.

    Args:
        directory: Where they lie; it may be missing, as before a run's first job.
        recursive: Whether to descend.
        depth: Whether intact means the structure, or every byte.
        best: Name of a metric.
        mode: Which of its values are good.
        jobs: Number of threads.

    Raises:
        UsageError: A metric without a mode, or a mode without a metric.
        CheckpointError: The directory can't be looked at.
    """
    if (best is None) != (mode is None):
        raise UsageError("--best METRIC and --mode min|max belong together")
    try:
        found = survey(directory, recursive=recursive)
    except NotFound as error:
        return Latest(None, f"{error.path}: {error.reason}")
    passed_over: list[Problem] = []
    for entry in _candidates(found, best, mode):
        fault = _fault(entry, depth, jobs)
        if fault is None:
            return Latest(entry, None, tuple(passed_over), found.journals)
        passed_over.append(Problem(entry.path, fault))
    return Latest(None, _why_none(found, best), tuple(passed_over), found.journals)


def _candidates(found: Survey, best: str | None, mode: Mode | None) -> Iterable[Entry]:
    """Return checkpoints, the most wanted first; a run's own directory stands back behind those in it."""
    ordered = [entry for entry in newest_first(found.groups) if not entry.holds_others]
    if best is None:
        return ordered
    measured = [(value, entry) for entry in ordered if (value := entry.metric(best)) is not None]
    sign = 1 if mode == "min" else -1
    return [entry for _, entry in sorted(measured, key=lambda pair: sign * pair[0])]


def _fault(entry: Entry, depth: Depth, jobs: int | None) -> str | None:
    if entry.fault is not None:
        return entry.fault
    if temporary_for(entry.name) is not None:
        return "being written"
    return read_in_full(entry, jobs) if depth == "full" else None


def _why_none(found: Survey, best: str | None) -> str:
    count = len(found.entries)
    if not count:
        return f"{found.root}: no checkpoint"
    if best is not None and all(entry.metric(best) is None for entry in found.entries):
        return f"{found.root}: no checkpoint with a metric {best!r}"
    return f"{found.root}: none of {count} checkpoints is intact"
