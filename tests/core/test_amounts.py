"""How durations and sizes are written."""

from __future__ import annotations

import pytest

from ckpttool import UsageError
from ckpttool.core.text import duration, nbytes, seconds, size, within
from tests.support.golden import Golden, refusal


def test_durations() -> None:
    expected = {
        "0": 0,
        "30s": 30,
        "90s": 90,
        "2h": 7200,
        "90m": 5400,
        "90min": 5400,
        "7d12h": 648_000,
        "1d1h1m1s": 90_061,
        "2w": 1_209_600,
        "1mo": 2_678_400,
        "1y": 31_622_400,
        " 1d ": 86_400,
        "1y1mo1w1d1h1min1s": 31_622_400 + 2_678_400 + 604_800 + 86_400 + 3600 + 60 + 1,
    }
    assert {text: seconds(text) for text in expected} == expected
    for text in ("", "h", "2x", "-3", "1h2d", "٣", "1.5d", "7 d", "1d1d"):
        with pytest.raises(UsageError, match=r"invalid duration: .* \(such as 7d12h, 90min or 2w\)"):
            seconds(text)


def test_a_number_without_a_unit_is_nothing(golden: Golden) -> None:
    lengths = ("30", "1h30", "007")
    sizes = ("200", "500000000", "1.5")
    golden(
        {f"{read.__name__} {text}": refusal(read, text) for read in (seconds, within) for text in lengths}
        | {f"nbytes {text}": refusal(nbytes, text) for text in sizes}
    )
    for advised in ("30s", "30min", "30h", "30d", "7d12h", "90min", "2w"):
        assert seconds(advised) > 0 and within(advised) > 0


def test_who_waits_may_leave_the_seconds_out() -> None:
    assert [seconds(text, is_lenient=True) for text in ("60", "0", "2m", " 5 ", "1h")] == [
        60,
        0,
        120,
        5,
        3600,
    ]
    with pytest.raises(UsageError, match="30 has no unit"):
        seconds("1h30", is_lenient=True)


def test_minutes_that_others_read_as_months_are_refused() -> None:
    assert (within("7d12h"), within("2mo"), within("2min")) == (648_000, 5_356_800, 120)
    for text in ("2m", "1h30m", "1y2m7d"):
        with pytest.raises(UsageError, match=r"could be minutes or months \(use min or mo\)"):
            within(text)


def test_a_duration_in_words() -> None:
    for number, text in (
        (648_000, "7d12h"),
        (604_800, "7d"),
        (5400, "1h30min"),
        (61, "1min1s"),
        (0, "0s"),
        (31_622_400, "366d"),
    ):
        assert duration(number) == text
        assert not number or seconds(text) == number


def test_sizes() -> None:
    expected = {
        "500000000B": 500_000_000,
        "0": 0,
        "4 B": 4,
        "200GB": 200 * 10**9,
        "1.5TiB": 1_649_267_441_664,
        "8 GiB": 8 << 30,
        "0.1GB": 100_000_000,
        "64kB": 64_000,
        "64K": 64_000,
        "1PB": 10**15,
        "1.000000001GB": 1_000_000_001,
    }
    assert {text: nbytes(text) for text in expected} == expected
    for text in ("", "GB", "-1GB", "1,5GB", "1e9", "inf", "12 parsecs", "٣GB"):
        with pytest.raises(UsageError, match=r"invalid size: .* \(such as 200GB, 1.5TiB or 4096B\)"):
            nbytes(text)


def test_who_is_lenient_may_leave_the_unit_out() -> None:
    expected = {
        "1000": 1000,
        "1.5": 1,
        "5gb": 5 * 10**9,
        "500mib": 500 << 20,
        "1.001kB": 1001,
        "7 Kb": 7000,
        "0": 0,
        "0.0GB": 0,
        f"{'9' * 18}TB": (10**18 - 1) * 10**12,
    }
    assert {text: nbytes(text, is_lenient=True) for text in expected} == expected
    for text in ("", "GB", "big", "-1", "1e9", "٣GB", "9" * 400):
        with pytest.raises(UsageError, match="invalid size"):
            nbytes(text, is_lenient=True)


def test_a_size_in_words_is_exact() -> None:
    expected = {
        200 * 10**9: "200 GB",
        1_649_267_441_664: "1.5 TiB",
        512 << 10: "512 KiB",
        999: "999 bytes",
        1: "1 byte",
        1_500: "1.5 kB",
        123_456_000: "123,456 kB",
        1_234_567: "1,234,567 bytes",
    }
    assert {number: size(number) for number in expected} == expected
