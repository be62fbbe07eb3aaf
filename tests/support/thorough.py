"""What ``make thorough`` plays beside ``make test``: the rest of long matrices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], count: int) -> list[Any]:
    """Mark all cases as thorough but some, spread evenly over them.

    Args:
        cases: What a test is parametrized with: values, tuples or ``pytest.param``.
        count: How many of them ``make test`` plays; the first is among them.
    """
    every = list(cases)
    stays = {index * len(every) // count for index in range(count)}
    return [case if index in stays else _thorough(case) for index, case in enumerate(every)]


def _thorough(case: Any) -> Any:
    if hasattr(case, "values") and hasattr(case, "marks"):
        return pytest.param(*case.values, id=case.id, marks=(*case.marks, pytest.mark.thorough))
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.thorough)
