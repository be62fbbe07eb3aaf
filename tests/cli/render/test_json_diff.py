"""The documents of ``diff``."""

from __future__ import annotations

from typing import Any

from ckpttool import Difference
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


def test_keys_of_the_contract() -> None:
    document = diff_json(found())
    assert next(iter(document)) == "schema"
    wanted = {
        "schema": "ckpttool.diff/1",
        "equal": False,
        "a": "a.pth",
        "b": "b",
        "unchanged": 1,
        "added": ["new"],
        "removed": ["old"],
        "renamed": [["fc.weight", "head.weight"]],
    }
    assert document | wanted == document
    first = document["changed"][0]
    assert (
        first | {"name": "w", "kind": "values", "max_abs": 0.25, "l2": 0.5, "cosine": 0.75, "count": 2}
        == first
    )
    assert first["max_rel"] == "Infinity"
    assert document["values"] == [
        {"path": "epoch", "a": 9, "b": 10},
        {"path": "lr", "a": None, "b": None, "absent": "a"},
        {"path": "x", "a": "NaN", "b": None, "absent": "b"},
    ]


def test_what_else_it_says() -> None:
    document = diff_json(found())
    assert document["compared"] == 4
    assert document["reported"] == [{"path": "format", "a": "pytorch zip", "b": "safetensors"}]
    assert document["rules"] == {"a rule": 3}
    assert document["notes"] == ["a note"]
    assert document["broken"] == [{"name": "q", "side": "b", "why": "it ends too early"}]
    assert document["not_compared"] == ["the code"]
    assert document["compared_bytes"] == 240
    assert document["tolerance"] == {"rtol": 0.001, "atol": 0.0, "bitwise": False}
    assert document["sides"]["a"] == {
        "path": "a.pth",
        "format": "pytorch",
        "variant": "zip",
        "producer": "pytorch",
        "bytes": 4000,
        "tensors": 5,
        "parameters": 22,
    }
    first = document["changed"][0]
    assert first["how"] == "convention"
    assert first["b"] == {
        "name": "module.w",
        "role": "weights",
        "dtype": "float32",
        "shape": [10, 2],
        "bytes": 80,
    }
    assert (first["where"], first["at"], first["norms"]) == ([3, 1], [-0.25, 0.0], [2.0, 2.5])
    assert (first["relative"], first["size"], first["non_finite"], first["mean_abs"]) == (0.25, 20, 1, 0.0125)


def test_numbers_where_shapes_differ_are_null_and_where_types_do_are_zero() -> None:
    _, shape, dtype = diff_json(found())["changed"]
    assert (shape["kind"], shape["max_abs"]) == ("shape", None)
    assert (shape["count"], shape["l2"], shape["where"]) == (None, None, None)
    assert (dtype["kind"], dtype["max_abs"], dtype["count"], dtype["l2"]) == ("dtype", 0, 0, 0)


def test_strings_have_no_numbers() -> None:
    told_of, *_ = diff_json(found(**NO_DISTANCE, non_finite=0, at_a="ab", at_b="c"))["changed"]
    numbers = ("max_abs", "mean_abs", "max_rel", "l2", "cosine", "relative", "norms")
    assert {told_of[name] for name in numbers} == {None}
    assert (told_of["count"], told_of["size"], told_of["at"]) == (2, 20, ["ab", "c"])


def test_complex_elements_are_their_parts() -> None:
    document = diff_json(found(at_a=1 + 2j, at_b=complex("nan")))
    assert document["changed"][0]["at"] == [[1.0, 2.0], ["NaN", 0.0]]


def test_series() -> None:
    series = drift(
        [("a.pth", 1, None, 0.5, 2.0), ("b", 2, 7, float("nan"))], step(found(), 0.5, 0.25, None, 0.25, "w")
    )
    document = diff_json(series)
    assert list(document) == ["schema", "equal", "checkpoints", "steps"]
    assert document["schema"] == "ckpttool.diff/1"
    assert document["equal"] is False
    assert document["checkpoints"] == [
        {"path": "a.pth", "epoch": 1, "step": None, "loss": 0.5, "norm": 2.0},
        {"path": "b", "epoch": 2, "step": 7, "loss": "NaN", "norm": None},
    ]
    (told,) = document["steps"]
    numbers = {"l2": 0.5, "relative": 0.25, "cosine": None, "max_abs": 0.25, "largest": "w"}
    assert told == numbers | {key: value for key, value in diff_json(found()).items() if key != "schema"}
