"""Which checkpoint is to be resumed from: the newest that is intact, or the best."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ckpttool.errors import NotFound, UsageError
from ckpttool.series.choice import newest_first, tiers
from ckpttool.series.entry import Entry, shown
from ckpttool.series.planning import Depth, Problem, read_in_full
from ckpttool.series.pointers import temporary_for
from ckpttool.series.survey import Survey, nothing_in, survey

Mode = Literal["min", "max"]

_MAX_RIVALS = 3
"""More names than that nobody reads in one line."""


@dataclass(frozen=True, slots=True)
class Latest:
    """The newest intact checkpoint, or why there is none; ``passed_over`` were newer, or better."""

    entry: Entry | None
    reason: str | None = None
    passed_over: tuple[Problem, ...] = ()
    warnings: tuple[str, ...] = ()
    journals: tuple[str, ...] = ()

    @property
    def path(self) -> str | None:
        """Return the path of the checkpoint, or None where there is none."""
        return None if self.entry is None else self.entry.path


def latest(
    directory: str | os.PathLike[str],
    *,
    recursive: bool = False,
    exclude: Sequence[str] = (),
    max_depth: int | None = None,
    depth: Depth = "quick",
    best: str | None = None,
    mode: Mode | None = None,
    jobs: int | None = None,
) -> Latest:
    """Return the newest intact checkpoint of a directory; with ``best`` that of the best metric.

    Args:
        directory: Where they lie; it may be missing, as before a run's first job.
        recursive: Whether to descend.
        exclude: Globs of what to pass over.
        max_depth: How many levels to descend at most.
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
        found = survey(directory, recursive=recursive, exclude=exclude, max_depth=max_depth)
    except NotFound as error:
        return Latest(None, f"{error.path}: {error.reason}")
    passed_over = [Problem(shown(error.path), error.reason) for error in found.errors]
    for entry in _candidates(found, best, mode):
        fault = _fault(entry, depth, jobs)
        if fault is None:
            passed_over += _hopeless(found, passed_over)
            return Latest(entry, None, tuple(passed_over), _warnings(found, entry, best), found.journals)
        passed_over.append(Problem(entry.path, fault))
    return Latest(None, _why_none(found, best, recursive), tuple(passed_over), (), found.journals)


def _hopeless(found: Survey, told: Sequence[Problem]) -> Iterator[Problem]:
    """Yield what is wrong in series of which nothing is sound: nobody can tell that they are older."""
    known = {problem.path for problem in told}
    for one in found.groups:
        if not any(entry.is_sound for entry in one.entries):
            for entry in reversed(one.entries):
                if entry.fault is not None and entry.path not in known:
                    yield Problem(entry.path, entry.fault)


def _warnings(found: Survey, chosen: Entry, best: str | None) -> tuple[str, ...]:
    """Return what is doubtful about a choice: the order of its series, and other series as good."""
    warnings = [warning for one in found.groups if one.key == chosen.group for warning in one.warnings]
    keys = {entry.path: entry.group for entry in found.entries if not entry.holds_others}
    rivals = [[one for one in tier if one.key in keys.values()] for tier in tiers(found.groups)]
    for tier in rivals:
        if best is None and len(tier) > 1 and any(one.key == chosen.group for one in tier):
            others = sorted({one.key for one in tier} - {chosen.group})
            told = ", ".join(others[:_MAX_RIVALS]) + (", …" if len(others) > _MAX_RIVALS else "")
            warnings.append(f"{len(tier)} series compete; {chosen.group} was chosen over {told}")
    return tuple(warnings)


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


def _why_none(found: Survey, best: str | None, recursive: bool) -> str:
    count = len(found.entries)
    if not count:
        return f"{found.root}: {nothing_in(found.root, recursive=recursive)}"
    if best is not None and all(entry.metric(best) is None for entry in found.entries):
        return f"{found.root}: no checkpoint with a metric {best!r}"
    if count == 1:
        return f"{found.root}: its only checkpoint is not intact"
    return f"{found.root}: none of {count:,} checkpoints is intact"
