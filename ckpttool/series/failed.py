"""Runs that came to nothing: their newest checkpoint was never finished, or holds weights that are NaN.

Telling costs reading the newest checkpoint of each series, so nobody is told who doesn't ask.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ckpttool.errors import CheckpointError
from ckpttool.series.entry import Entry
from ckpttool.series.order import Group
from ckpttool.series.pointers import temporary_for

STALE_SECONDS = 3600
"""No checkpoint takes an hour to write; a younger one may be about to be finished."""


def failed_runs(
    groups: Sequence[Group], now: float, *, busy: Collection[str] = (), jobs: int | None = None
) -> dict[str, str]:
    """Return why series failed, by their keys.

    Args:
        groups: The series.
        now: In seconds since 1970.
        busy: Paths of checkpoints that a writer is at work on.
        jobs: Number of threads.
    """
    found = {one.key: _failure(one.entries[-1], now, busy, jobs) for one in groups}
    return {key: reason for key, reason in found.items() if reason is not None}


def _failure(newest: Entry, now: float, busy: Collection[str], jobs: int | None) -> str | None:
    if newest.fault is not None:
        is_finished = newest.path not in busy and temporary_for(newest.name) is None
        is_stale = newest.modified_ns / 10**9 < now - STALE_SECONDS
        is_cut = newest.fault.startswith("incomplete") and is_finished and is_stale
        return f"its newest, {newest.name}, is {newest.fault}" if is_cut else None
    if not newest.has_weights:
        return None
    told = not_numbers(newest, jobs)
    return None if told is None else f"its newest, {newest.name}, has NaN: {told}"


def not_numbers(entry: Entry, jobs: int | None = None) -> str | None:
    """Return where a checkpoint holds NaN, after reading all its values; None where it holds none.

    What can't be read is damaged, not diverged, and none of it counts. Infinities are on purpose in masks.
    """
    from ckpttool.ops.verify import verify

    try:
        verdict = verify(entry.unit, only=("values",), jobs=jobs)
    except CheckpointError:
        return None
    found = next((one for one in verdict.findings if one.code == "nan"), None)
    return None if found is None else ": ".join(filter(None, (found.where, found.message)))
