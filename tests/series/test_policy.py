"""Policies, and how durations, sizes and limits are written."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpttool.errors import UsageError
from ckpttool.series.members.order import group
from ckpttool.series.retention.policy import (
    PathRule,
    Policies,
    Policy,
    delete_limit,
    duration,
    nbytes,
    seconds,
    size,
    waiting_seconds,
    within,
)

BEST = {"keep_best": 2, "metric": "val_loss", "mode": "min"}


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({}, "no rule says what to keep (--keep N keeps the newest N)"),
        ({"incomplete": "remove"}, "no rule says what to keep (--keep N keeps the newest N)"),
        ({"keep_last": 0}, "--keep 0 would keep nothing (at least 1)"),
        ({"keep_daily": -1}, "--keep-daily -1 would keep nothing (at least 1)"),
        ({"keep_within": 0}, "--keep-within 0 would keep nothing (at least 1)"),
        ({"max_size": 0}, "--max-size 0 would keep nothing (at least 1)"),
        ({"keep_names": ("",)}, "--keep-name needs a glob of names, such as 'best*'"),
        ({**BEST, "mode": "least"}, "--mode least (min or max)"),
        ({"keep_last": 1, "incomplete": "drop"}, "--incomplete drop (keep or remove)"),
        (
            {"keep_best": 2, "metric": "loss"},
            "--keep-best N, --metric NAME and --mode min|max belong together (--mode min|max is missing)",
        ),
        (
            {"keep_last": 2, "mode": "min"},
            "--keep-best N, --metric NAME and --mode min|max belong together "
            "(--keep-best N and --metric NAME are missing)",
        ),
    ],
)
def test_what_no_policy_can_be(told, said) -> None:
    with pytest.raises(UsageError) as refusal:
        Policy(**told)
    assert str(refusal.value) == said


def test_the_rules_that_were_given() -> None:
    assert Policy(keep_last=3).rules == {"keep_last": 3}
    assert Policy(**BEST, keep_names=("best*",)).rules == {**BEST, "keep_names": ("best*",)}
    assert Policy(max_size=10, incomplete="remove").rules == {"max_size": 10, "incomplete": "remove"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(
            ("0", 0),
            ("30s", 30),
            ("90s", 90),
            ("2h", 7200),
            ("90m", 5400),
            ("90min", 5400),
            ("7d12h", 648_000),
        ),
        *(("1d1h1m1s", 90_061), ("2w", 1_209_600), ("1mo", 2_678_400), ("1y", 31_622_400), (" 1d ", 86_400)),
        ("1y1mo1w1d1h1min1s", 31_622_400 + 2_678_400 + 604_800 + 86_400 + 3600 + 60 + 1),
    ],
)
def test_durations(text: str, expected: int) -> None:
    assert seconds(text) == expected


@pytest.mark.parametrize("text", ["", "h", "2x", "-3", "1h2d", "٣", "1.5d", "7 d", "1d1d"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(UsageError, match=r"no duration: .* \(such as 7d12h, 90min or 2w\)"):
        seconds(text)


@pytest.mark.parametrize("read", [seconds, within])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("30", "30 of what? (such as 30s, 30min, 30h or 30d)"),
        ("1h30", "1h30: 30 of what? (such as 30s, 30min, 30h or 30d)"),
        ("007", "7 of what? (such as 7s, 7min, 7h or 7d)"),
    ],
)
def test_a_number_without_a_unit_is_no_duration(read, text: str, said: str) -> None:
    with pytest.raises(UsageError) as refusal:
        read(text)
    assert str(refusal.value).endswith(said)
    for advised in ("30s", "30min", "30h", "30d", "7d12h", "90min", "2w"):
        assert read(advised) > 0


def test_who_waits_may_leave_the_seconds_out() -> None:
    assert [waiting_seconds(text) for text in ("60", "0", "2m", " 5 ", "1h")] == [60, 0, 120, 5, 3600]
    with pytest.raises(UsageError, match="30 of what"):
        waiting_seconds("1h30")


def test_minutes_that_others_read_as_months_are_refused() -> None:
    assert (within("7d12h"), within("2mo"), within("2min")) == (648_000, 5_356_800, 120)
    for text in ("2m", "1h30m", "1y2m7d"):
        with pytest.raises(UsageError, match=r"could be minutes or months \(say min or mo\)"):
            within(text)


@pytest.mark.parametrize(
    ("number", "text"),
    [(648_000, "7d12h"), (604_800, "7d"), (5400, "1h30min"), (61, "1min1s"), (0, "0s"), (31_622_400, "366d")],
)
def test_a_duration_in_words(number: int, text: str) -> None:
    assert duration(number) == text
    assert not number or seconds(text) == number


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(
            ("500000000B", 500_000_000),
            ("0", 0),
            ("4 B", 4),
            ("200GB", 200 * 10**9),
            ("1.5TiB", 1_649_267_441_664),
        ),
        *(("8 GiB", 8 << 30), ("0.1GB", 100_000_000), ("64kB", 64_000), ("64K", 64_000), ("1PB", 10**15)),
        ("1.000000001GB", 1_000_000_001),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert nbytes(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1,5GB", "1e9", "inf", "12 parsecs", "٣GB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match=r"no size: .* \(such as 200GB, 1.5TiB or 4096B\)"):
        nbytes(text)


@pytest.mark.parametrize("number", ["200", "500000000", "1.5"])
def test_a_number_without_a_unit_is_no_size(number: str) -> None:
    with pytest.raises(UsageError) as refusal:
        nbytes(number)
    assert str(refusal.value) == f"{number} of what? (such as {number}B, {number}MB or {number}GB)"


@pytest.mark.parametrize(
    ("number", "text"),
    [
        *(
            (200 * 10**9, "200 GB"),
            (1_649_267_441_664, "1.5 TiB"),
            (512 << 10, "512 KiB"),
            (999, "999 bytes"),
            (1, "1 byte"),
        ),
        *((1_500, "1.5 kB"), (123_456_000, "123,456 kB"), (1_234_567, "1,234,567 bytes")),
    ],
)
def test_a_size_in_words_is_exact(number: int, text: str) -> None:
    assert size(number) == text


@pytest.mark.parametrize(
    ("limit", "removed", "total", "allowed"),
    [
        *(("10", 10, 20, True), ("10", 11, 20, False), ("0", 1, 9, False), ("0", 0, 9, True)),
        *(("50%", 5, 10, True), ("50%", 6, 10, False), ("33.3%", 1, 3, False), ("33.4%", 1, 3, True)),
        *(("100%", 3, 3, True), ("0%", 1, 10**9, False)),
    ],
)
def test_how_much_may_go(limit: str, removed: int, total: int, allowed: bool) -> None:
    assert delete_limit(limit).allows(removed, total) is allowed


@pytest.mark.parametrize("text", ["", "%", "101%", "-1", "ten", "1e3", "1.5"])
def test_what_is_no_limit(text: str) -> None:
    with pytest.raises(UsageError, match="no limit"):
        delete_limit(text)


# Policies by path -----------------------------------------------------------------------------------

LAST, TWO, ALL = Policy(keep_last=1), Policy(keep_last=2), Policy(keep_last=9)


def _policies(tmp_path: Path, *globs: str, default: Policy | None = LAST) -> Policies:
    rules = tuple(PathRule(glob, policy, glob) for glob, policy in zip(globs, (TWO, ALL), strict=False))
    return Policies(default, rules, str(tmp_path))


@pytest.mark.parametrize(
    ("globs", "policy"),
    [
        *(
            (("run/**",), TWO),
            (("**",), TWO),
            (("run/m_*.pt",), TWO),
            (("run",), LAST),
            (("other/**",), LAST),
        ),
        *((("run/**", "run/m_*"), ALL), (("run/m_*", "run/**"), ALL), (("run/**", "x/**"), TWO)),
        *((("run/m_epoch_1.pt",), LAST), (("run/m_epoch_*.pt",), TWO), (("../run/**",), LAST)),
    ],
)
def test_the_last_rule_that_matches_wins(entry, tmp_path, monkeypatch, globs, policy) -> None:
    monkeypatch.chdir(tmp_path)
    (one,) = group([entry("m_epoch_1.pt"), entry("m_epoch_2.pt")])
    assert _policies(tmp_path, *globs).of(one) == policy


def test_what_no_rule_is_for_has_no_policy(entry, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (one,) = group([entry("m_epoch_1.pt")])
    assert _policies(tmp_path, "other/**", default=None).of(one) is None
    assert Policies(LAST).of(one) == LAST


def test_rules_that_match_nothing_are_known(entry, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    groups = group([entry("m_epoch_1.pt")])
    assert [rule.glob for rule in _policies(tmp_path, "other/**", "run/**").unmatched(groups)] == ["other/**"]


def test_one_series_with_two_policies_is_refused(entry, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (one,) = group([entry("a_epoch_1.pt"), entry("b_epoch_2.pt")], "parent")
    with pytest.raises(UsageError) as refusal:
        _policies(tmp_path, "run/b_*").of(one)
    assert str(refusal.value) == (
        "run/* is one series with two policies: run/a_epoch_*.pt (no rule) and run/b_epoch_*.pt (run/b_*)"
    )
    assert _policies(tmp_path, "run/*").of(one) == TWO
