"""How numbers, sizes, shares, ages and columns of metrics are said."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.cli.render.numbers import amount, file_size, number, share, two_values, utc_time
from ckpttool.cli.render.text_list import age_words, metric_cells

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (9949, "9.9 kB"),
        (9950, "10 kB"),
        (999_499, "999 kB"),
        (999_500, "1.0 MB"),
        (1_073_741_824, "1.1 GB"),
        (5 * 10**18, "5000 PB"),
    ],
)
def test_sizes(nbytes: int, shown: str) -> None:
    assert file_size(nbytes) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1200, "1,200"),
        (0.1 + 0.2, "0.3"),
        (float("nan"), "nan"),
        ("a\n", "a\\n"),
        (1e-9, "1e-09"),
        (True, "True"),
        (None, "None"),
    ],
)
def test_numbers(value: object, shown: str) -> None:
    assert number(value) == shown


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0, "0"),
        (1, "1"),
        (0.001, "1.0e-3"),
        (0.00999, "1.0e-2"),
        (0.01, "0.01"),
        (0.12345, "0.123"),
        (123.4, "123"),
        (999.9, "1,000"),
        (1234.5, "1,234"),
        (12345.0, "1.2e4"),
        (-1e300, "-1.0e300"),
        (NAN, "NaN"),
        (INF, "inf"),
        (-INF, "-inf"),
    ],
)
def test_amount(value: float, said: str) -> None:
    assert amount(value) == said


@pytest.mark.parametrize(
    ("part", "whole", "said"),
    [
        (0, 5, "0%"),
        (5, 5, "100%"),
        (1, 3, "33.3%"),
        (1, 10_000, "<0.1%"),
        (9_999, 10_000, "99.9%"),
        (0, 0, "0%"),
    ],
)
def test_share(part: int, whole: int, said: str) -> None:
    assert share(part, whole) == said


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        (0.125, 0.126, "0.125 → 0.126"),
        (1.0, 1.0 + 2**-52, "1 → 1.0000000000000002"),
        (0.0, -0.0, "0 → -0"),
        (NAN, 1.0, "NaN → 1"),
        (NAN, -INF, "NaN → -inf"),
        (3, 4, "3 → 4"),
        (2**63, 2**63 + 1, "9,223,372,036,854,775,808 → 9,223,372,036,854,775,809"),
        (1 + 2j, 1 + 3j, "1+2j → 1+3j"),
        ("a", "b", "'a' → 'b'"),
        (True, False, "True → False"),
    ],
)
def test_two_values(a: object, b: object, said: str) -> None:
    assert two_values(a, b) == said


@pytest.mark.parametrize(
    ("values", "cells"),
    [
        ([0.5638, 0.06282, 0.0421], ["0.5638", "0.0628", "0.0421"]),
        ([9.5, 91.25, None, 100.0], ["  9.50", " 91.25", "", "100.00"]),
        ([91.25, 91.251], ["91.250", "91.251"]),
        ([0.25, 0.75, 0.5], ["0.25", "0.75", "0.50"]),
        ([1.0, 2.0, 10.0], [" 1", " 2", "10"]),
        ([-0.5, 12.25], ["-0.50", "12.25"]),
        ([1e-9, 0.5], ["1e-09", "0.5  "]),
        ([3e12, 1.0], ["3e+12", "1    "]),
        ([NAN, 0.5, INF, -INF], [" NaN  ", "   0.5", " inf  ", "-inf  "]),
        ([0.0, 0.0], ["0", "0"]),
        ([None, None], ["", ""]),
        ([], []),
    ],
)
def test_metrics_stand_below_one_another(values: list[float | None], cells: list[str]) -> None:
    assert [cell.rstrip() for cell in metric_cells(values)] == [cell.rstrip() for cell in cells]


NUMBERS = st.lists(st.none() | st.floats(width=32), max_size=8)


@given(NUMBERS)
def test_columns_have_one_width_and_one_point(values: list[float | None]) -> None:
    cells = metric_cells(values)
    assert len({len(cell) for cell in cells if cell}) <= 1
    assert [bool(cell) for cell in cells] == [value is not None for value in values]
    points = {cell.index(".") for cell in cells if "." in cell}
    assert len(points) <= 1


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=8))
def test_cells_say_the_values(values: list[float]) -> None:
    for cell, value in zip(metric_cells(values), values, strict=True):
        told = Decimal(cell.strip())
        tolerance = abs(Decimal(value)) / 10  # two digits at least
        assert abs(told - Decimal(value)) <= tolerance


@given(
    st.lists(st.integers(1, 99_999).map(lambda digits: digits / 1e5), min_size=2, max_size=30, unique=True)
)
def test_what_differs_is_told_apart(values: list[float]) -> None:
    assert len(set(metric_cells(values))) == len(values)


def test_ages() -> None:
    assert [age_words(seconds) for seconds in (-5, 0, 59, 60, 7_200, 3 * 86_400)] == [
        "now",
        "now",
        "59 s",
        "1 min",
        "2 h",
        "3 d",
    ]


def test_a_time_that_no_calendar_holds() -> None:
    assert utc_time(0) == "1970-01-01T00:00:00Z"
    assert utc_time(10**30) is None


def test_each_series_has_decimals_of_its_own() -> None:
    values, series = [1.0, 1e-06, 0.5, None, 0.3333], ["a", "b", "a", "b", "a"]
    assert [cell.strip() for cell in metric_cells(values, series)] == ["1.000", "1e-06", "0.500", "", "0.333"]
    assert len({cell.index(".") for cell in metric_cells(values, series)[::2]}) == 1
