"""The checkpoint to resume from where a run has several places: a disk of this machine, and a store."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from ckpttool.core.errors import NotFound
from ckpttool.runs.entry import Entry
from ckpttool.runs.latest import Latest, LatestQuery, find_latest
from ckpttool.runs.look import Progress
from ckpttool.runs.modes import resolve_mode
from ckpttool.runs.series import Group, newest_first
from ckpttool.runs.writers import Tell


def latest_of(
    directories: Sequence[str | os.PathLike[str]],
    query: LatestQuery,
    *,
    tell: Tell | None = None,
    progress: Progress | None = None,
) -> Latest:
    """Return the newest intact checkpoint of several directories; of equals, that of the first directory.

    Only what may be the answer is read in full. A directory that doesn't exist has none, unless all don't.

    Args:
        directories: Where they lie; the nearest first.

    Raises:
        NotFound: No directory exists.
        CheckpointError: One of them can't be looked at: nobody knows then which is the newest.
    """
    find = partial(find_latest, tell=tell, progress=progress)
    if len(directories) == 1:
        return find(os.fspath(directories[0]), query)
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
    """Return the directory that has the newest, or the best; None where none has one."""
    entries = {directory: one.entry for directory, one in found.items() if one.entry is not None}
    if query.best is not None:
        sign = 1 if resolve_mode(query.best, query.mode, "--best") == "min" else -1
        values = {directory: sign * (found[directory].value or 0.0) for directory in entries}
        entries = {name: one for name, one in entries.items() if values[name] == min(values.values())}
    groups: list[Group] = []
    for directory, entry in entries.items():
        if not any(_is_same_save(entry, group.entries[0]) for group in groups):
            groups.append(Group(directory, (replace(entry, run=""),)))  # a run has several places here
    newest = next(newest_first(groups), None)
    return next((group.key for group in groups if group.entries[0] is newest), None)


def _identity(entry: Entry) -> tuple[object, ...]:
    return entry.epoch, entry.step, entry.granularity, entry.signature


def _is_same_save(entry: Entry, other: Entry) -> bool:
    """Tell whether two checkpoints were saved at one moment of a training: one is a copy of the other."""
    if _identity(entry) != _identity(other):
        return False
    is_counted = entry.epoch is not None or entry.step is not None
    return is_counted or (entry.name, entry.nbytes) == (other.name, other.nbytes)


def _joined(found: Mapping[str, Latest], first: str | None) -> Latest:
    """Return the answer of one directory, with what was noticed in all of them."""
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
