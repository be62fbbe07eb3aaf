"""What ``make thorough`` plays beside ``make test``: the rest of long matrices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import pytest
from hypothesis import settings

_Place = TypeVar("_Place")
IS_THOROUGH = settings().max_examples >= 1000


def sampled(cases: Iterable[Any], count: int) -> list[Any]:
    """Mark all cases as thorough but some, spread evenly over them.

    Args:
        cases: What a test is parametrized with: values, tuples or ``pytest.param``.
        count: How many of them ``make test`` plays; the first is among them.
    """
    every = list(cases)
    stays = {index * len(every) // count for index in range(count)}
    return [case if index in stays else _thorough(case) for index, case in enumerate(every)]


def spread(places: Sequence[_Place], count: int) -> Sequence[_Place]:
    """Return all places in ``make thorough``, otherwise so many, spread evenly from first to last.

    Args:
        places: Of a file, at which it is cut or a bit of it is flipped.
        count: How many of them ``make test`` plays, at least 2.
    """
    if IS_THOROUGH or len(places) <= count:
        return places
    return [places[index * (len(places) - 1) // (count - 1)] for index in range(count)]


def _thorough(case: Any) -> Any:
    if hasattr(case, "values") and hasattr(case, "marks"):
        return pytest.param(*case.values, id=case.id, marks=(*case.marks, pytest.mark.thorough))
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.thorough)
