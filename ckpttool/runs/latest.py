"""``latest``: the checkpoint to resume from, in one directory or several, after writers have finished."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from ckpttool.core.errors import (
    AccessDenied,
    NotFound,
)
from ckpttool.core.options import (
    Depth,
    Mode,
)
from ckpttool.formats import suffix_format
from ckpttool.runs.entry import Entry
from ckpttool.runs.look import FullReader, Progress, no_progress
from ckpttool.runs.modes import resolve_mode
from ckpttool.runs.resume_choice import Latest, LatestQuery, LatestSearch, SearchAnswer
from ckpttool.runs.series import Group, newest_first
from ckpttool.runs.survey import Survey
from ckpttool.runs.writers import (
    POLL_SECONDS,
    SYSTEM,
    Tell,
    WriterWait,
)
from ckpttool.storage import fs
from ckpttool.transaction.paths import shown

_MAX_LOOKS = 20
"""Limit on surveys of a directory in which checkpoints are renamed or removed meanwhile."""


def latest(
    directory: str | os.PathLike[str],
    *,
    recursive: bool = True,
    exclude: Sequence[str] = (),
    max_depth: int | None = None,
    depth: Depth = "full",
    best: str | None = None,
    mode: Mode | None = None,
    metrics: Sequence[str] = (),
    before: int | None = None,
    allow_unsafe: bool = False,
    resume_exact: bool = False,
    missing_ok: bool = False,
    wait: float = 0,
    tell: Tell | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Latest:
    """Return the newest intact checkpoint of a directory; with ``best`` that of the best metric.

    Args:
        directory: Directory of the checkpoints.
        recursive: Whether to descend.
        exclude: Globs of paths to skip.
        max_depth: Limit on the levels to descend.
        depth: ``full`` reads every byte of the answer, ``quick`` checks its structure.
        best: Name of a metric.
        mode: Whether low or high values of it are good; None decides by its name.
        metrics: Logs with more metrics.
        before: Step before which it was saved.
        resume_exact: Whether a training must resume exactly from it.
        allow_unsafe: Whether to accept a checkpoint that runs code when it is loaded.
        missing_ok: Whether the directory may be missing, as before a run's first job.
        wait: Seconds to wait for checkpoints that are being written and would be chosen.
        tell: Called with a message for each save that is waited for.
        jobs: Number of threads.
        progress: Progress of reading; see ``prune``.

    Raises:
        UsageError: A mode without a metric, or a metric whose name doesn't say which values are good; or
            nothing says which of several runs is newer.
        NotFound: The directory doesn't exist.
        CheckpointError: The directory can't be read; or none was found, and some paths can't be read, or an
            intact checkpoint is unsafe; or checkpoints are renamed or removed during every scan.
    """
    query = LatestQuery(
        recursive=recursive,
        exclude=exclude,
        max_depth=max_depth,
        depth=depth,
        best=best,
        mode=mode,
        metrics=metrics,
        before=before,
        allow_unsafe=allow_unsafe,
        resume_exact=resume_exact,
        missing_ok=missing_ok,
        wait=wait,
        jobs=jobs,
    )
    return find_latest(os.fspath(directory), query, tell=tell, progress=progress)


def find_latest(
    directory: str, query: LatestQuery, *, tell: Tell | None = None, progress: Progress | None = None
) -> Latest:
    """Return the checkpoint of a directory by a query; see ``latest``."""
    # Each round surveys the directory, and ends in one of four ways: an unfinished save that would be chosen
    # is waited for; a candidate that changed while it was read is refused from now on; checkpoints vanished
    # during the survey, which is repeated; or there is an answer.
    clock = SYSTEM
    watch = WriterWait(query.wait, tell or (lambda text: None), clock)
    reader = FullReader(query.jobs, progress or no_progress) if query.depth == "full" else None
    refused: frozenset[str] = frozenset()
    looks = 0
    while True:
        search = LatestSearch(directory, query, clock.time(), refused, frozenset(watch.writing), reader)
        surveyed = search.survey()
        # Reading takes long, and would be in vain while a preferred checkpoint is being written.
        look = search.look(surveyed, reads=not query.wait)
        if query.wait and watch.wait([*look.unsettled, *watch.growing(look.quiet)]):
            continue
        if query.wait and reader is not None:
            look = search.look(surveyed, reads=True)
            if watch.wait(look.unsettled):
                continue
        changing = {save.path for save in watch.changed_meanwhile([*look.unsettled, *look.quiet])} - refused
        if changing:
            refused |= changing
            continue
        looks += 1
        if vanished := _vanished(surveyed, look):
            if looks == _MAX_LOOKS:
                problem = f"checkpoints are renamed or removed during every scan: {vanished[0]}"
                raise AccessDenied(shown(directory), problem, expected="try again later")
            clock.sleep(POLL_SECONDS)
            continue
        if look.latest.entry is None and look.unreadable:
            raise _unreadable_error(directory, look.unreadable)
        if look.latest.entry is None and look.unsafe:
            raise _none_safe_error(directory, look.unsafe)
        if look.latest.entry is None and not query.missing_ok and not fs.lexists(directory):
            hint = "--missing-ok accepts a run without a checkpoint yet"
            raise NotFound(directory, "directory not found", expected=hint)
        waited_for = tuple(save.path for save in watch.waited_for)
        return replace(look.latest, waited=watch.waited, waited_for=waited_for, best=query.best)


def latest_of(
    directories: Sequence[str | os.PathLike[str]],
    query: LatestQuery,
    *,
    tell: Tell | None = None,
    progress: Progress | None = None,
) -> Latest:
    """Return the newest intact checkpoint of several directories; of equals, that of the first directory.

    Only a possible answer is read in full. A missing directory has no checkpoint, unless all are missing.

    Args:
        directories: Directories of the checkpoints; the nearest first.

    Raises:
        NotFound: No directory exists.
        CheckpointError: One of them can't be read, so that the newest is unknown.
    """
    find = partial(find_latest, tell=tell, progress=progress)
    if len(directories) == 1:
        return find(os.fspath(directories[0]), query)
    # First only structures are checked, in all directories. Then the best candidate is read in full; if it
    # turns out damaged, its directory offers the next one, and the comparison is repeated.
    found: dict[str, Latest] = {}
    missing: list[NotFound] = []
    for directory in dict.fromkeys(os.fspath(path) for path in directories):
        left = max(query.wait - sum(one.waited for one in found.values()), 0)
        try:
            found[directory] = find(directory, replace(query, depth="quick", wait=left))
        except NotFound as error:
            missing.append(error)
    if not found:
        raise missing[0]
    read: dict[str, Latest] = {}
    while True:
        first = _first({**found, **read}, query)
        if first is None or first in read or query.depth == "quick":
            return _joined({**found, **read}, first)
        read[first] = find(first, replace(query, depth="full", wait=0))


def _first(found: Mapping[str, Latest], query: LatestQuery) -> str | None:
    """Return the directory with the newest checkpoint, or the best; None if none has one."""
    entries = {directory: one.entry for directory, one in found.items() if one.entry is not None}
    if query.best is not None:
        sign = 1 if resolve_mode(query.best, query.mode, "--best") == "min" else -1
        values = {directory: sign * (found[directory].value or 0.0) for directory in entries}
        entries = {name: one for name, one in entries.items() if values[name] == min(values.values())}
    groups: list[Group] = []
    for directory, entry in entries.items():
        if not any(_is_same_save(entry, group.entries[0]) for group in groups):
            # A run may be in several directories here, as on a local disk and in a store: by an equal
            # ``run``, steps decide between them, not times.
            groups.append(Group(directory, (replace(entry, run=""),)))
    newest = next(newest_first(groups), None)
    return next((group.key for group in groups if group.entries[0] is newest), None)


def _is_same_save(entry: Entry, other: Entry) -> bool:
    """Return whether two checkpoints are copies of one save."""
    # Times and paths of copies differ. Without an epoch and step, the signature is that of all saves of the
    # run, so name and size must be equal, too.
    if (entry.epoch, entry.step) != (other.epoch, other.step):
        return False
    if (entry.granularity, entry.signature) != (other.granularity, other.signature):
        return False
    is_counted = entry.epoch is not None or entry.step is not None
    return is_counted or (entry.name, entry.nbytes) == (other.name, other.nbytes)


def _joined(found: Mapping[str, Latest], first: str | None) -> Latest:
    """Return the answer of one directory, with the problems and warnings of all."""
    answer = found[first] if first is not None else next(iter(found.values()))
    everything = list(found.values())
    reasons = [one.reason for one in everything if one.reason is not None]
    return replace(
        answer,
        reason=None if answer.entry is not None else "; ".join(reasons),
        passed_over=tuple(problem for one in everything for problem in one.passed_over),
        warnings=tuple(dict.fromkeys(warning for one in everything for warning in one.warnings)),
        journals=tuple(path for one in everything for path in one.journals),
        waited=sum(one.waited for one in everything),
        waited_for=tuple(path for one in everything for path in one.waited_for),
        none_yet=all(one.none_yet for one in everything),
    )


def _vanished(surveyed: Survey | NotFound, look: SearchAnswer) -> list[str]:
    """Return paths that were renamed or removed since they were listed, and could be the answer.

    Sound and older checkpoints may vanish: trainings remove them. So may a file without a checkpoint's name,
    unless it is the only one.
    """
    # A faulty candidate may have been renamed while it was read, and be fine under its new name, as when a
    # writer puts a finished save in place. A pending journal that has vanished was recovered meanwhile.
    if isinstance(surveyed, NotFound):
        return []
    chosen = look.latest.entry
    unseen = [path for path in surveyed.vanished if chosen is None or _has_name_of_save(path)]
    faulty = [entry for entry in surveyed.entries if entry.fault is not None]
    seen = [*([] if chosen is None else [chosen]), *faulty, *look.rejected]
    members = (os.path.join(entry.directory, name) for entry in seen for name in entry.unit.members)
    return unseen + [shown(path) for path in (*members, *surveyed.journals) if not fs.lexists(path)]


def _has_name_of_save(path: str) -> bool:
    """Return whether a name may be that of a checkpoint: it has a number, or a checkpoint's suffix."""
    name = os.path.basename(path)
    return suffix_format(name) is not None or any(map(str.isdigit, name))


def _unreadable_error(root: str, paths: Sequence[tuple[str, str]]) -> AccessDenied:
    """Return the error for a search without a result in which not everything could be read."""
    # What can't be read now may be the newest checkpoint, so a job mustn't take this for its first run.
    path, why = paths[0]
    others = f" (and {len(paths) - 1:,} more)" if len(paths) > 1 else ""
    problem = "no checkpoint to resume from was found, but not all could be read"
    return AccessDenied(shown(root), f"{problem}: {path}: {why}{others}")


def _none_safe_error(root: str, unsafe: Sequence[Entry]) -> AccessDenied:
    """Return the error for a search with only unsafe results."""
    # This is an error rather than an empty answer, which a job would take for its first run and train anew.
    others = f"; and {len(unsafe) - 1:,} more" if len(unsafe) > 1 else ""
    problem = f"no checkpoint is safe to resume from: {unsafe[0].path}: unsafe: {unsafe[0].danger}{others}"
    return AccessDenied(shown(root), problem, expected="--allow-unsafe accepts it")
