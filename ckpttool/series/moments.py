"""When a checkpoint was saved, and in which hour, day, week, month and year of local time that was."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from datetime import datetime
from typing import NamedTuple

from ckpttool.series.entry import Entry

EARLIEST = 347_155_200
"""1981 in seconds since 1970. Clocks that were never set begin in 1970, times in zip files in 1980."""


def saved(entry: Entry) -> float:
    """Return when a checkpoint was saved, in seconds since 1970: by its own account, else by its file's."""
    return entry.modified_ns / 10**9 if entry.saved_at is None else entry.saved_at


def moment(seconds: float) -> datetime | None:
    """Return a time in the local zone, without naming it; None where no calendar has it."""
    try:
        return datetime.fromtimestamp(seconds)
    except (ValueError, OverflowError, OSError):
        return None


def doubtful(seconds: float, now: float | None) -> str | None:
    """Return why a time can't be believed, or None where it can.

    Args:
        seconds: Since 1970.
        now: In seconds since 1970; None where nothing lies in the future.
    """
    if now is not None and seconds > now:
        return f"dated in the future ({_day(seconds)})"
    if seconds < EARLIEST:
        return f"dated {_day(seconds)}, by a clock that wasn't set"
    return None if moment(seconds) is not None else f"dated {_day(seconds)}"


def _day(seconds: float) -> str:
    when = moment(seconds)
    return f"{seconds:.0f} s after 1970" if when is None else when.strftime("%Y-%m-%d")


class Period(NamedTuple):
    """A natural period: what all moments of one have in common, and how it is written."""

    key: Callable[[datetime], Hashable]
    format: str


PERIODS: Mapping[str, Period] = {
    # The fold tells the two hours apart that carry one name when summer time ends.
    "keep_hourly": Period(lambda when: (when.date(), when.hour, when.fold), "%Y-%m-%d %H:00"),
    "keep_daily": Period(datetime.date, "%Y-%m-%d"),
    "keep_weekly": Period(lambda when: tuple(when.isocalendar())[:2], "%G-W%V"),
    "keep_monthly": Period(lambda when: (when.year, when.month), "%Y-%m"),
    "keep_yearly": Period(lambda when: when.year, "%Y"),
}
"""The natural periods, by the rule that counts them."""
