"""Numbers below one another, and words that say who is special."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.render.numbers import utc_time
from ckpttool.render.text_list import age_words, metric_cells

NAN, INF = float("nan"), float("inf")


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


numbers = st.lists(st.none() | st.floats(width=32), max_size=8)


@given(numbers)
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
