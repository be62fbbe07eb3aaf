"""When a checkpoint was saved, and in which hour, day, week, month and year of local time that was."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckpttool.runs.members.entry import Entry

EARLIEST = 347_155_200
"""1981 in seconds since 1970. Clocks that were never set begin in 1970, times in zip files in 1980."""

_MANY = 3
"""Two files may be of one moment: what a signal made a trainer save follows what it saves anyway."""
_COPY_SECONDS = 2
"""No training that anybody prunes by the clock saves three times at such a pace; a copy of files does."""


PERIODS: Mapping[str, tuple[Callable[[datetime], Hashable], str]] = {
    # The fold tells the two hours apart that carry one name when summer time ends.
    "keep_hourly": (lambda when: (when.date(), when.hour, when.fold), "%Y-%m-%d %H:00"),
    "keep_daily": (datetime.date, "%Y-%m-%d"),
    "keep_weekly": (lambda when: tuple(when.isocalendar())[:2], "%G-W%V"),
    "keep_monthly": (lambda when: (when.year, when.month), "%Y-%m"),
    "keep_yearly": (lambda when: when.year, "%Y"),
}
"""By the rule that counts natural periods: a key that is equal for all moments of one, and its format."""


def local_time(seconds: float) -> datetime | None:
    """Return a time in the local zone, without naming it; None where no calendar has it."""
    try:
        return datetime.fromtimestamp(seconds)
    except (ValueError, OverflowError, OSError):
        return None


def date_doubt(seconds: float, now: float | None) -> str | None:
    """Return why a time can't be believed, or None where it can."""
    if now is not None and seconds > now:
        return f"dated in the future ({_day(seconds)})"
    if seconds < EARLIEST:
        return f"dated {_day(seconds)}, by a clock that wasn't set"
    return None if local_time(seconds) is not None else f"dated {_day(seconds)}"


def date_doubts(entries: Sequence[Entry], now: float | None) -> dict[str, str]:
    """Return why checkpoints of a series have no date that can be believed, by path."""
    reasons = {entry.path: date_doubt(entry.save_time, now) for entry in entries}
    doubts = {path: why for path, why in reasons.items() if why is not None}
    by_file = [entry for entry in entries if entry.saved_at is None and entry.path not in doubts]
    for burst in _bursts(by_file):
        span = (burst[-1].modified_ns - burst[0].modified_ns) // 10**9 + 1
        why = f"no date ({len(burst):,} files within {span:,} s, as by a copy)"
        doubts.update((entry.path, why) for entry in burst)
    return doubts


def _bursts(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    """Yield checkpoints whose files are as if written in one go, the oldest first.

    They lie within moments, all others apart; or they follow one another faster than anything is trained.
    """
    from ckpttool.runs.members.order import CONTRADICTION_SECONDS

    for near in _split_at_gaps(sorted(entries, key=lambda entry: entry.modified_ns), CONTRADICTION_SECONDS):
        is_at_once = near[-1].modified_ns - near[0].modified_ns <= CONTRADICTION_SECONDS * 10**9
        for burst in [near] if is_at_once else _split_at_gaps(near, _COPY_SECONDS):
            if len(burst) >= _MANY:
                yield burst


def _split_at_gaps(ordered: Sequence[Entry], seconds: int) -> Iterator[list[Entry]]:
    """Yield what follows one another within so many seconds."""
    part = list(ordered[:1])
    for before, entry in pairwise(ordered):
        if entry.modified_ns - before.modified_ns > seconds * 10**9:
            yield part
            part = []
        part.append(entry)
    if part:
        yield part


def _day(seconds: float) -> str:
    when = local_time(seconds)
    return f"{seconds:.0f} s after 1970" if when is None else when.strftime("%Y-%m-%d")
