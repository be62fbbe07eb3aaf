"""The documents of ``diff``."""

from __future__ import annotations

import json
from typing import Any

from ckpttool import Difference
from tests.support.golden import Golden
from tests.support.rendering import diff_json
from tests.support.results import (
    MISSING,
    NO_DISTANCE,
    change,
    difference,
    drift,
    reshaped,
    retyped,
    side,
    step,
)

FOUND: dict[str, Any] = {
    "size": 20,
    "count": 2,
    "non_finite": 1,
    "max_abs": 0.25,
    "mean_abs": 0.0125,
    "max_rel": float("inf"),
    "l2": 0.5,
    "cosine": 0.75,
    "norm_a": 2.0,
    "norm_b": 2.5,
    "where": (3, 1),
    "at_a": -0.25,
    "at_b": 0.0,
}


def found(**measured: Any) -> Difference:
    """Return a difference in everything; ``measured`` is said of the values of its first tensor."""
    return difference(
        change("w", "module.w", how="convention", **FOUND | measured),
        reshaped("s", (10, 2), (2, 10)),
        retyped("d", "float64"),
        a=side(nbytes=4000, tensors=5, parameters=22),
        b=side("b", format="safetensors"),
        compared=4,
        unchanged=1,
        added=("new",),
        removed=("old",),
        renamed=(("fc.weight", "head.weight"),),
        values=(("epoch", 9, 10), ("lr", MISSING, None), ("x", float("nan"), MISSING)),
        reported=(("format", "pytorch zip", "safetensors"),),
        rules={"a rule": 3},
        notes=("a note",),
        broken=(("q", "b", "it ends too early"),),
        not_compared=("the code",),
        compared_nbytes=240,
        tolerance={"rtol": 0.001},
    )


def pretty(document: object) -> str:
    return json.dumps(document, indent=1, ensure_ascii=False)


def test_documents(golden: Golden) -> None:
    """Numbers are null where shapes differ, and zero where types do; strings have none."""
    points = [("a.pth", 1, None, 0.5, 2.0), ("b", 2, 7, float("nan"))]
    series = diff_json(drift(points, step(found(), 0.5, 0.25, None, 0.25, "w")))
    whole = diff_json(found())
    assert [*series["steps"][0].items()][-len(whole) + 1 :] == [*whole.items()][1:]
    series["steps"] = [
        {key: value for key, value in one.items() if key not in whole} for one in series["steps"]
    ]
    strings, *_ = diff_json(found(**NO_DISTANCE, non_finite=0, at_a="ab", at_b="c"))["changed"]
    complexes = diff_json(found(at_a=1 + 2j, at_b=complex("nan")))["changed"][0]["at"]
    golden(
        {
            "a difference": pretty(whole),
            "strings": pretty(strings),
            "complex elements are their parts": complexes,
            "a series": pretty(series),
        }
    )
