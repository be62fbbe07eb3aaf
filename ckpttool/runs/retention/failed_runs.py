"""Runs that came to nothing: their newest checkpoint was never finished, or holds weights that are NaN.

Telling costs reading the newest checkpoint of each series, so nobody is told who doesn't ask. Where such a
run is to go, it is read backwards until one is found that is worth keeping.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ckpttool.core.errors import CheckpointError
from ckpttool.runs.members.entry import Entry
from ckpttool.runs.members.full_read import Progress, findings_of_weights, no_progress, read_all
from ckpttool.runs.members.order import Group, may_be_newest
from ckpttool.runs.members.saves import parts_of
from ckpttool.runs.pointers.readers import temporary_for

STALE_SECONDS = 3600
"""No checkpoint takes an hour to write; a younger one may be about to be finished."""


def failures(
    groups: Sequence[Group],
    now: float,
    *,
    busy: Collection[str] = (),
    jobs: int | None = None,
    goes: bool = False,
    progress: Progress = no_progress,
) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """Find the series of saves that failed.

    ``busy`` has the paths of checkpoints that a writer is at work on. If failed series are removed
    (``goes``), they are read to find the checkpoint that is worth keeping.

    Returns:
        Why series failed, by key; the path of the newest intact and finite checkpoint, by its series' key;
        and the faults that reading found, by path.
    """
    reasons = failed_runs(groups, now, busy=busy, jobs=jobs)
    faults: dict[str, str] = {}
    finite: dict[str, str] = {}
    for group in groups if goes else ():
        if group.key in reasons and (path := _newest_finite(group, jobs, progress, faults)) is not None:
            finite[group.key] = path
    return reasons, finite, faults


def failed_runs(
    groups: Sequence[Group], now: float, *, busy: Collection[str] = (), jobs: int | None = None
) -> dict[str, str]:
    """Return why series failed, by their keys.

    Where times contradict the order, or counts one another, a run failed only if all that may be its newest
    say so: one that was restarted goes on.
    """
    failures = {group.key: _series_failure(group, now, busy, jobs) for group in groups}
    return {key: reason for key, reason in failures.items() if reason is not None}


def _series_failure(group: Group, now: float, busy: Collection[str], jobs: int | None) -> str | None:
    first = None
    for entry in may_be_newest(group.entries):
        reason = _entry_failure(entry, now, busy, jobs)
        if reason is None:
            return None
        first = first or reason
    return first


def _entry_failure(newest: Entry, now: float, busy: Collection[str], jobs: int | None) -> str | None:
    if newest.fault is not None:
        parts = parts_of(newest)
        is_finished = not any(part.path in busy or temporary_for(part.name) for part in parts)
        is_stale = newest.modified_ns / 10**9 < now - STALE_SECONDS
        is_cut = not all(part.is_complete for part in parts)  # that a part is missing is no failure
        is_cut &= newest.is_incomplete and is_finished and is_stale
        return f"its newest, {newest.name}, is {newest.fault}" if is_cut else None
    for part in parts_of(newest):
        if part.has_weights and (nan := nan_in_weights(part, jobs)) is not None:
            return f"its newest, {part.name}, has NaN: {nan}"
    return None


def nan_in_weights(entry: Entry, jobs: int | None = None) -> str | None:
    """Return where the weights of a checkpoint hold NaN, after reading all its values; None where none do.

    What can't be read is damaged, not diverged, and none of it counts. Infinities are on purpose in masks.
    """
    from ckpttool.ops.verify import verify

    try:
        verdict = verify(entry.unit, only=("values",), jobs=jobs)
        findings = findings_of_weights(entry, (one for one in verdict.findings if one.code == "nan"))
    except CheckpointError:
        return None
    return ": ".join(filter(None, (findings[0].where, findings[0].message))) if findings else None


def _newest_finite(group: Group, jobs: int | None, progress: Progress, faults: dict[str, str]) -> str | None:
    """Return the path of the newest that is intact and finite.

    Where each holds infinities, as attention masks do on purpose, it is the newest that is intact.
    """
    newest = None
    for entry in reversed(group.entries):
        if not entry.is_sound:
            continue
        reads = {part.path: read_all(part, jobs, progress) for part in parts_of(entry)}
        damages = {path: read.damage for path, read in reads.items() if read.damage is not None}
        if damages:
            faults |= damages
        elif all(read.is_finite for read in reads.values()):
            return entry.path
        else:
            newest = newest or entry.path
    return newest
