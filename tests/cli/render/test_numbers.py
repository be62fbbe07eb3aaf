"""How numbers, sizes, shares, ages and columns of metrics are said."""

from __future__ import annotations

from decimal import Decimal

from hypothesis import given
from hypothesis import strategies as st

from ckpttool.cli.render.terminal import number_cells
from ckpttool.cli.render.text_list import age_words
from ckpttool.core.text import amount, file_size, number, share, two_values, utc_time
from tests.support.golden import Golden

NAN, INF = float("nan"), float("inf")
SIZES = (0, 999, 1000, 9949, 9950, 999_499, 999_500, 1_073_741_824, 5 * 10**18)
NUMBERS = (1200, 0.1 + 0.2, NAN, "a\n", 1e-9, True, None)
AMOUNTS = (0, 1, 0.001, 0.00999, 0.01, 0.12345, 123.4, 999.9, 1234.5, 12345.0, -1e300, NAN, INF, -INF)
SHARES = ((0, 5), (5, 5), (1, 3), (1, 10_000), (9_999, 10_000), (0, 0))
PAIRS: tuple[tuple[object, object], ...] = (
    *((0.125, 0.126), (1.0, 1.0 + 2**-52), (0.0, -0.0), (NAN, 1.0), (NAN, -INF), (3, 4)),
    *((2**63, 2**63 + 1), (1 + 2j, 1 + 3j), ("a", "b"), (True, False)),
)
COLUMNS: tuple[list[float | None], ...] = (
    *([0.5638, 0.06282, 0.0421], [9.5, 91.25, None, 100.0], [91.25, 91.251], [0.25, 0.75, 0.5]),
    *([1.0, 2.0, 10.0], [-0.5, 12.25], [1e-9, 0.5], [3e12, 1.0], [NAN, 0.5, INF, -INF], [0.0, 0.0]),
    *([None, None], []),
)


def test_words(golden: Golden) -> None:
    golden(
        {f"size {one}": file_size(one) for one in SIZES}
        | {f"number {one!r}": number(one) for one in NUMBERS}
        | {f"amount {one!r}": amount(one) for one in AMOUNTS}
        | {f"share of {part} in {whole}": share(part, whole) for part, whole in SHARES}
        | {f"two values {a!r}, {b!r}": two_values(a, b) for a, b in PAIRS}
        | {f"age {seconds}": age_words(seconds) for seconds in (-5, 0, 59, 60, 7_200, 3 * 86_400)}
        | {f"time {seconds:g}": utc_time(seconds) for seconds in (0, 10**30)}
    )


def test_metrics_stand_below_one_another(golden: Golden) -> None:
    golden({f"{values}": "|".join(number_cells(values)) for values in COLUMNS})


COLUMN = st.lists(st.none() | st.floats(width=32), max_size=8)


@given(COLUMN)
def test_columns_have_one_width_and_one_point(values: list[float | None]) -> None:
    cells = number_cells(values)
    assert len({len(cell) for cell in cells if cell}) <= 1
    assert [bool(cell) for cell in cells] == [value is not None for value in values]
    points = {cell.index(".") for cell in cells if "." in cell}
    assert len(points) <= 1


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=8))
def test_cells_say_the_values(values: list[float]) -> None:
    for cell, value in zip(number_cells(values), values, strict=True):
        told = Decimal(cell.strip())
        tolerance = abs(Decimal(value)) / 10  # two digits at least
        assert abs(told - Decimal(value)) <= tolerance


@given(
    st.lists(st.integers(1, 99_999).map(lambda digits: digits / 1e5), min_size=2, max_size=30, unique=True)
)
def test_what_differs_is_told_apart(values: list[float]) -> None:
    assert len(set(number_cells(values))) == len(values)


def test_each_series_has_decimals_of_its_own() -> None:
    values, series = [1.0, 1e-06, 0.5, None, 0.3333], ["a", "b", "a", "b", "a"]
    assert [cell.strip() for cell in number_cells(values, series)] == ["1.000", "1e-06", "0.500", "", "0.333"]
    assert len({cell.index(".") for cell in number_cells(values, series)[::2]}) == 1
