"""Cadence of saves: their interval, cost, and the best interval, from files on the disk.

Sources: J. W. Young, "A first order approximation to the optimum checkpoint interval" (Communications of the
ACM 17, 1974); J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps"
(Future Generation Computer Systems 22, 2006), of which it is the first term.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from ckpttool.core.result import document_of
from ckpttool.formats.interface import MANIFEST_SUFFIXES
from ckpttool.runs.entry import Entry
from ckpttool.runs.series import is_flat
from ckpttool.storage import fs

_MIN_CHECKPOINTS = 3
"""Minimum number of checkpoints for an interval: two have only one, which may be a pause."""
_PAUSE = 5
"""An interval longer than this many median intervals is a pause: a job waited, or was restarted."""
_DAY = 86_400


@dataclass(frozen=True, slots=True)
class Cadence:
    """Cadence of a series; unknown values are None. Times are in seconds.

    Attributes:
        interval: Median time from one save to the next.
        steps, epochs: Median steps and epochs between two saves.
        pauses: Number of intervals over five times the median.
        nbytes: Median bytes of a checkpoint.
        save_time: Time that a save takes.
        free_bytes: Free bytes of the file system.
        best_interval: Interval that wastes the least time, given the mean time between failures.
        unknown_reason: Why intervals are unknown.
    """

    interval: float | None = None
    steps: float | None = None
    epochs: float | None = None
    pauses: int = 0
    nbytes: float = 0
    save_time: float | None = None
    free_bytes: int | None = None
    best_interval: float | None = None
    unknown_reason: str | None = None

    @property
    def daily_bytes(self) -> float | None:
        """Return the bytes saved a day."""
        return None if self.interval is None else self.nbytes * _DAY / self.interval

    @property
    def seconds_until_full(self) -> float | None:
        """Return the seconds until the file system is full, if nothing is removed."""
        if self.free_bytes is None or not self.daily_bytes:
            return None
        return self.free_bytes / self.daily_bytes * _DAY

    @property
    def share_of_time(self) -> float | None:
        """Return the share of the time that saving takes, from 0 to 1."""
        if self.save_time is None or self.interval is None:
            return None
        return min(1.0, self.save_time / self.interval)

    @property
    def best_steps(self) -> float | None:
        """Return the best interval in steps."""
        return self._best_count(self.steps)

    @property
    def best_epochs(self) -> float | None:
        """Return the best interval in epochs."""
        return self._best_count(self.epochs)

    def _best_count(self, between: float | None) -> float | None:
        if between is None or self.best_interval is None or not self.interval:
            return None
        return between * self.best_interval / self.interval

    def document(self) -> dict[str, Any]:
        return document_of(
            self,
            *("interval", "steps", "epochs", "pauses", "bytes", "bytes_a_day", "free_bytes"),
            *("seconds_until_full", "save_time", "share_of_time"),
            *("best_interval", "best_steps", "best_epochs"),
            names={"bytes_a_day": "daily_bytes"},
        )


def best_interval(save_time: float, mtbf: float) -> float:
    """Return the interval in seconds that wastes the least time on saves and lost work, by Young's formula.

    Args:
        save_time: Seconds that a save takes.
        mtbf: Mean time between failures, in seconds.
    """
    # With an interval T, saving takes save_time / T of the time, and a failure loses T / 2 of work on
    # average, once in mtbf: T / (2 mtbf). The sum is least where both are equal.
    return math.sqrt(2 * save_time * mtbf)


def cadence_of(
    entries: Sequence[Entry], *, mtbf: float | None = None, save_time: float | None = None
) -> Cadence:
    """Return the cadence of a series.

    Args:
        entries: Its checkpoints, the oldest first.
        mtbf: Mean time between failures, in seconds; None for no best interval.
        save_time: Seconds that a save takes; None estimates it from the files.
    """
    sound = [entry for entry in entries if entry.is_sound]
    if not sound:
        return Cadence(unknown_reason="no checkpoint is intact")
    free = fs.place_of(sound[0].path).free_bytes(sound[0].directory)
    taken = _save_time(sound) if save_time is None else save_time
    nbytes = median(entry.nbytes for entry in sound)
    unknown, intervals = None, list[float]()
    if len(sound) < _MIN_CHECKPOINTS:
        unknown = f"fewer than {_MIN_CHECKPOINTS} checkpoints"
    elif not (intervals := _intervals(sound)):
        unknown = "all were written within a minute, as if copied"
    usual = median(intervals) if intervals else None
    return Cadence(
        interval=usual,
        steps=_median_gap(sound, lambda entry: entry.step),
        epochs=_median_gap(sound, lambda entry: entry.epoch),
        pauses=sum(one > _PAUSE * usual for one in intervals) if usual else 0,
        nbytes=nbytes,
        save_time=taken,
        free_bytes=free,
        best_interval=None if mtbf is None or taken is None else best_interval(taken, mtbf),
        unknown_reason=unknown,
    )


def _intervals(sound: Sequence[Entry]) -> list[float]:
    """Return the seconds between saves, by recorded times, else by files' times."""
    # Recorded times may be coarse: if two are equal, files' times are used.
    recorded = [entry.saved_at for entry in sound if entry.saved_at is not None]
    if len(recorded) < len(sound) or len(set(recorded)) < len(recorded):
        if is_flat(sound):
            return []
        recorded = [entry.modified_ns / 1e9 for entry in sound]
    return [later - earlier for earlier, later in pairwise(sorted(recorded)) if later > earlier]


def _median_gap(sound: Sequence[Entry], count: Callable[[Entry], float | None]) -> float | None:
    counts = [value for entry in sound if (value := count(entry)) is not None]
    if len(counts) < _MIN_CHECKPOINTS or len(counts) < len(sound):
        return None
    return median(later - earlier for earlier, later in pairwise(sorted(counts))) or None


def _save_time(sound: Sequence[Entry]) -> float | None:
    """Return the median seconds from a save's first file to its last one; None for single files."""
    # A writer that saves several files leaves their times: the spread is a lower bound of the save's
    # duration, as the time before the first file was closed isn't recorded.
    spreads = []
    for entry in sound:
        times = [file.mtime_ns for file in entry.contents.files if not file.path.endswith(MANIFEST_SUFFIXES)]
        if len(times) > 1:
            spreads.append((max(times) - min(times)) / 1e9)
    return (median(spreads) or None) if spreads else None
