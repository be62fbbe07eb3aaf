"""Policies over time. What stays was worked out by hand, with a calendar; the last column says how."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any, NamedTuple

import pytest

from ckpttool import Policy
from tests.support.retention import series_plan


class Scenario(NamedTuple):
    zone: str
    policy: dict[str, Any]
    saves: list[str]
    kept: dict[str, tuple[str, ...]]
    why: str


SCENARIOS = {
    "daily, with gaps": Scenario(
        "UTC",
        {"keep_daily": 3},
        ["2026-05-01 10:00", "2026-05-01 22:00", "2026-05-04 09:00", "2026-05-09 08:00", "2026-05-09 20:00"],
        {
            "2026-05-01 22:00": ("daily 2026-05-01",),
            "2026-05-04 09:00": ("daily 2026-05-04",),
            "2026-05-09 20:00": ("newest", "daily 2026-05-09"),
        },
        "three days have a checkpoint; those between have none and don't count",
    ),
    "daily, more than there are": Scenario(
        "UTC",
        {"keep_daily": 30},
        ["2026-05-01 10:00", "2026-05-01 11:00", "2026-05-02 00:00"],
        {
            "2026-05-01 11:00": ("daily 2026-05-01",),
            "2026-05-02 00:00": ("newest", "daily 2026-05-02"),
        },
        "midnight begins the day; the older one of the 1st goes though only two of 30 days are there",
    ),
    "daily, in the zone of who asks (Tokyo)": Scenario(
        "Asia/Tokyo",
        {"keep_daily": 2},
        ["2026-05-04T14:58Z", "2026-05-04T14:59Z", "2026-05-04T15:00Z"],
        {
            "2026-05-04T14:59Z": ("daily 2026-05-04",),
            "2026-05-04T15:00Z": ("newest", "daily 2026-05-05"),
        },
        "Tokyo is 9 h ahead: 14:59Z is 23:59 on the 4th, 15:00Z is 00:00 on the 5th",
    ),
    "daily, in the zone of who asks (UTC)": Scenario(
        "UTC",
        {"keep_daily": 2},
        ["2026-05-04T14:58Z", "2026-05-04T14:59Z", "2026-05-04T15:00Z"],
        {"2026-05-04T15:00Z": ("newest", "daily 2026-05-04")},
        "the same moments are one day in UTC",
    ),
    "daily, when summer time begins": Scenario(
        "America/New_York",
        {"keep_daily": 3},
        ["2026-03-08T04:30Z", "2026-03-08T05:30Z", "2026-03-09T03:30Z", "2026-03-09T04:30Z"],
        {
            "2026-03-08T04:30Z": ("daily 2026-03-07",),
            "2026-03-09T03:30Z": ("daily 2026-03-08",),
            "2026-03-09T04:30Z": ("newest", "daily 2026-03-09"),
        },
        "04:30Z is 23:30 EST on the 7th; the 8th has 23 hours and ends at 04:00Z, since EDT is 4 h behind",
    ),
    "hourly, when summer time ends": Scenario(
        "America/New_York",
        {"keep_hourly": 3},
        ["2026-11-01T05:10Z", "2026-11-01T05:30Z", "2026-11-01T06:30Z", "2026-11-01T07:30Z"],
        {
            "2026-11-01T05:30Z": ("hourly 2026-11-01 01:00",),
            "2026-11-01T06:30Z": ("hourly 2026-11-01 01:00",),
            "2026-11-01T07:30Z": ("newest", "hourly 2026-11-01 02:00"),
        },
        "05:30Z is 01:30 EDT and 06:30Z is 01:30 EST: two hours of one name",
    ),
    "hourly": Scenario(
        "UTC",
        {"keep_hourly": 2},
        ["2026-05-04 10:59", "2026-05-04 11:00", "2026-05-04 11:59", "2026-05-04 17:30"],
        {
            "2026-05-04 11:59": ("hourly 2026-05-04 11:00",),
            "2026-05-04 17:30": ("newest", "hourly 2026-05-04 17:00"),
        },
        "the hours 17 and 11; 10 would be the third",
    ),
    "hourly, in a zone half an hour off": Scenario(
        "Asia/Kolkata",
        {"keep_hourly": 2},
        ["2026-05-04T10:00Z", "2026-05-04T10:29Z", "2026-05-04T10:30Z"],
        {
            "2026-05-04T10:29Z": ("hourly 2026-05-04 15:00",),
            "2026-05-04T10:30Z": ("newest", "hourly 2026-05-04 16:00"),
        },
        "India is 5:30 ahead: its hour 16 begins at 10:30Z",
    ),
    "weekly, from Monday on": Scenario(
        "UTC",
        {"keep_weekly": 2},
        ["2026-05-03 23:00", "2026-05-03 23:59", "2026-05-04 00:00", "2026-05-10 23:59"],
        {
            "2026-05-03 23:59": ("weekly 2026-W18",),
            "2026-05-10 23:59": ("newest", "weekly 2026-W19"),
        },
        "4 May 2026 is a Monday: 4 to 10 May are week 19",
    ),
    "weekly, at the end of a year of 53 weeks": Scenario(
        "UTC",
        {"keep_weekly": 2},
        ["2026-12-27 12:00", "2026-12-28 12:00", "2027-01-01 12:00", "2027-01-03 12:00", "2027-01-04 12:00"],
        {
            "2027-01-03 12:00": ("weekly 2026-W53",),
            "2027-01-04 12:00": ("newest", "weekly 2027-W01"),
        },
        "2026 begins on a Thursday, so that it has 53 ISO weeks; the last ends on Sunday, 3 January 2027",
    ),
    "weekly, where the new year's week begins in the old": Scenario(
        "UTC",
        {"keep_weekly": 2},
        ["2024-12-29 12:00", "2024-12-30 12:00", "2024-12-31 12:00", "2025-01-02 12:00"],
        {
            "2024-12-29 12:00": ("weekly 2024-W52",),
            "2025-01-02 12:00": ("newest", "weekly 2025-W01"),
        },
        "Monday, 30 December 2024, begins ISO week 1 of 2025",
    ),
    "monthly, with a month missing and a leap day": Scenario(
        "UTC",
        {"keep_monthly": 3},
        ["2023-12-31 23:00", "2024-01-31 00:00", "2024-02-28 12:00", "2024-02-29 12:00", "2024-04-01 00:00"],
        {
            "2024-01-31 00:00": ("monthly 2024-01",),
            "2024-02-29 12:00": ("monthly 2024-02",),
            "2024-04-01 00:00": ("newest", "monthly 2024-04"),
        },
        "April, February and January have one; March has none",
    ),
    "yearly, with a year missing": Scenario(
        "UTC",
        {"keep_yearly": 2},
        ["2022-07-01 00:00", "2023-12-31 23:59", "2025-01-01 00:00", "2025-11-01 00:00"],
        {
            "2023-12-31 23:59": ("yearly 2023",),
            "2025-11-01 00:00": ("newest", "yearly 2025"),
        },
        "2025 and 2023; in 2024 nothing was saved",
    ),
    "within, from the newest back": Scenario(
        "UTC",
        {"keep_within": 7 * 86400},
        ["2025-06-03 11:59", "2025-06-03 12:00", "2025-06-05 00:00", "2025-06-10 12:00"],
        {
            "2025-06-03 12:00": ("within 7d",),
            "2025-06-05 00:00": ("within 7d",),
            "2025-06-10 12:00": ("newest", "within 7d"),
        },
        "exactly seven days are within; a year that has passed since changes nothing",
    ),
    "within a day of 25 hours": Scenario(
        "Europe/Berlin",
        {"keep_within": 86400},
        ["2026-10-24T22:30Z", "2026-10-25T00:00Z", "2026-10-25T22:30Z"],
        {
            "2026-10-24T22:30Z": ("within 1d",),
            "2026-10-25T00:00Z": ("within 1d",),
            "2026-10-25T22:30Z": ("newest", "within 1d"),
        },
        "a duration is of 24 hours: 22:30Z to 22:30Z, though it was 00:30 and is 23:30 in Berlin",
    ),
    "all periods together": Scenario(
        "UTC",
        {"keep_hourly": 1, "keep_daily": 2, "keep_weekly": 2, "keep_monthly": 2, "keep_yearly": 2},
        ["2025-12-31 12:00", "2026-01-31 12:00", "2026-02-07 12:00", "2026-02-10 12:00", "2026-02-11 12:00"],
        {
            "2025-12-31 12:00": ("yearly 2025",),
            "2026-01-31 12:00": ("monthly 2026-01",),
            "2026-02-07 12:00": ("weekly 2026-W06",),
            "2026-02-10 12:00": ("daily 2026-02-10",),
            "2026-02-11 12:00": (
                *("newest", "hourly 2026-02-11 12:00", "daily 2026-02-11", "weekly 2026-W07"),
                *("monthly 2026-02", "yearly 2026"),
            ),
        },
        "each rule counts for itself: Saturday, 7 February, is the end of week 6, the 9th begins week 7",
    ),
    "a name's date is of local time": Scenario(
        "America/New_York",
        {"keep_daily": 2},
        ["2026-05-04 00:10", "2026-05-04 23:50", "2026-05-05 00:10"],
        {
            "2026-05-04 23:50": ("daily 2026-05-04",),
            "2026-05-05 00:10": ("newest", "daily 2026-05-05"),
        },
        "what has no zone is what the clock on the wall said",
    ),
}


@pytest.fixture
def zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Return what sets the zone, which is as before afterwards."""
    yield monkeypatch
    monkeypatch.undo()
    time.tzset()


def _set(zone: pytest.MonkeyPatch, name: str) -> None:
    zone.setenv("TZ", name)
    time.tzset()


def _seconds(save: str) -> float:
    return datetime.fromisoformat(save.replace("Z", "+00:00")).timestamp()


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("source", ["inside", "file"])
def test_scenario(entry, zone, name: str, source: str) -> None:
    told = SCENARIOS[name]
    _set(zone, told.zone)
    entries = [
        entry(f"m_step_{step}.pt", saved_at=_seconds(save))
        if source == "inside"
        else entry(f"m_step_{step}.pt", modified=int(_seconds(save)) * 10**9)
        for step, save in enumerate(told.saves, 1)
    ]
    made = series_plan(entries, Policy(**told.policy))
    saves = {one.path: save for one, save in zip(entries, told.saves, strict=True)}
    assert {saves[kept.entry.path]: kept.reasons for kept in made.keep} == told.kept, told.why


def test_a_year_of_a_save_a_day(entry, zone) -> None:
    """restic's example: 7 days, 5 weeks, 12 months and 75 years of 365 saves at noon.

    2026 ends on a Thursday. Days: 25 to 31 December. Weeks end on Sundays: 27, 20, 13 and 6 December, and
    the 31st, as far as the year goes. Months: their last days. Years: the 31st again.
    """
    _set(zone, "Europe/Berlin")
    start = datetime(2026, 1, 1, 12).timestamp()
    days = [datetime.fromtimestamp(start + day * 86400) for day in range(365)]
    entries = [entry(f"m_epoch_{day}.pt", saved_at=when.timestamp()) for day, when in enumerate(days)]
    policy = Policy(keep_daily=7, keep_weekly=5, keep_monthly=12, keep_yearly=75)
    made = series_plan(entries, policy)
    kept = sorted(f"{days[int(one.entry.epoch)]:%m-%d}" for one in made.keep)
    months = [
        "01-31",
        "02-28",
        "03-31",
        "04-30",
        "05-31",
        "06-30",
        "07-31",
        "08-31",
        "09-30",
        "10-31",
        "11-30",
    ]
    december = ["12-06", "12-13", "12-20", "12-25", "12-26", "12-27", "12-28", "12-29", "12-30", "12-31"]
    assert kept == [*months, *december]
    assert len(made.remove) == 365 - 21


STEPS = {
    # each, steps, what stays, why
    "exact multiples": (1000, [500, 1000, 1500, 2000, 2500], [500, 1000, 2000, 2500], "0 is a multiple"),
    "never exact": (1000, [999, 1999, 2999], [999, 1999, 2999], "one a stretch"),
    "one off": (1000, [1001, 1501, 2001, 2501], [1001, 2001, 2501], "the first behind each multiple"),
    "a gap": (1000, [100, 200, 5100, 5200, 5300], [100, 5100, 5300], "4 first_of_multiples have none"),
    "coarser than the run": (10**6, [100, 200, 300], [100, 300], "the first of the only stretch, the newest"),
    "each step": (1, [1, 2, 3], [1, 2, 3], "each has a stretch of its own"),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("count", ["step", "epoch"])
def test_every_so_many(entry, name: str, count: str) -> None:
    each, counts, kept, why = STEPS[name]
    entries = [entry(f"m_{count}_{number}.pt") for number in counts]
    made = series_plan(entries, Policy(**{f"keep_every_{count}s": each}))
    assert sorted(getattr(one.entry, count) for one in made.keep) == kept, why
