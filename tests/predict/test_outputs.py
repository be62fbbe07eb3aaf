"""What outputs are judged by, in numbers and in words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from ckpttool.predict.inputs import dtype_named
from ckpttool.predict.prediction import (
    insensitive_findings,
    judge_by_labels,
    largest_difference,
    non_finite_findings,
    recording_findings,
    rerun_findings,
)
from ckpttool.predict.request import PredictionRequest

_USUAL = PredictionRequest()
_DTYPES = st.sampled_from(["f2", "f4", "f8", "i4", "i8", "u8", "?", "c8", "U3"])
_ARRAYS = _DTYPES.flatmap(lambda dtype: arrays(dtype, array_shapes(min_dims=0, min_side=0, max_side=4)))
_FINITE = arrays("f8", array_shapes(max_side=4), elements=st.floats(-1e6, 1e6))
BFLOAT16 = dtype_named("bfloat16")

Array = np.ndarray[Any, Any]


def _told(now: Array, recorded: Array, request: PredictionRequest = _USUAL) -> list[str]:
    return [one.message for one in recording_findings({"y": now}, {"y": recorded}, request)]


@given(_ARRAYS)
def test_what_is_the_same_is_not_unlike(array: Array) -> None:
    assert _told(array, array.copy()) == []
    assert list(rerun_findings({"y": array}, {"y": array.copy()}, _USUAL)) == []
    assert largest_difference({"y": array}, {"y": array.copy()}) == 0


@given(_FINITE, st.integers(0))
def test_one_value_that_is_one_percent_off_is_seen(array: Array, at: int) -> None:
    array = np.where(np.abs(array) < 1e-2, 1.0, array)
    other = array.copy()
    other.flat[at % other.size] *= 1.01
    (message,) = _told(other, array)
    assert message.startswith(f"1 of {array.size:,} values differ, most at [")
    assert largest_difference({"y": other}, {"y": array}) > 0


@given(_FINITE, _FINITE)
def test_what_is_unlike_is_so_from_both_sides(a: Array, b: Array) -> None:
    exact = PredictionRequest(rtol=0.0, atol=0.0)
    assert bool(_told(a, b, exact)) == bool(_told(b, a, exact))


@pytest.mark.parametrize(
    ("now", "recorded", "told"),
    [
        (
            np.array([1.0, 2.0]),
            np.array([1.0, 2.5]),
            "1 of 2 values differ, most at [1]: 2 now, 2.5 recorded (rtol 1e-08, atol 1e-10)",
        ),
        (
            np.array(1),
            np.array(2),
            "1 of 1 values differ, most at the scalar: 1 now, 2 recorded (rtol 0, atol 0)",
        ),
        (
            np.array([2**60 + 1]),
            np.array([2**60]),
            f"1 of 1 values differ, most at [0]: {2**60 + 1} now, {2**60} recorded (rtol 0, atol 0)",
        ),
        (
            np.array([np.inf]),
            np.array([-np.inf]),
            "1 of 1 values differ, most at [0]: inf now, -inf recorded (rtol 1e-08, atol 1e-10)",
        ),
        (
            np.array([np.nan]),
            np.array([1.0]),
            "1 of 1 values differ, most at [0]: nan now, 1 recorded (rtol 1e-08, atol 1e-10)",
        ),
        (np.array(["a"]), np.array(["b"]), "1 of 1 values differ"),
        (np.array(["1"]), np.array([2]), "1 of 1 values differ"),
        (np.ones((1, 2)), np.ones(2), "shape changed: (1, 2) now, (2,) recorded"),
    ],
)
def test_what_differs_is_told(now: Array, recorded: Array, told: str) -> None:
    assert _told(now, recorded) == [told]


@pytest.mark.parametrize(
    ("now", "recorded"),
    [
        (np.array([np.inf, np.nan]), np.array([np.inf, np.nan])),
        (np.float32([1.00001]), np.float64([1.0])),
        (np.array([1.0], BFLOAT16), np.array([1.01], BFLOAT16)),
        (np.array([1.0], BFLOAT16), np.float32([1.0])),
        (np.array([True]), np.array([1])),
        (np.array([0.0]), np.array([-0.0])),
    ],
)
def test_what_is_near_enough(now: Array, recorded: Array) -> None:
    assert _told(now, recorded) == []


@pytest.mark.parametrize("scale", [1e-9, 1e-5, 1.0])
def test_the_tolerance_is_as_small_as_what_was_recorded(scale: float) -> None:
    recorded = np.float32([1, -0.5, 1e-4]) * np.float32(scale)
    near, far = recorded * np.float32(1.000005), recorded * np.float32(1.05)
    assert _told(near, recorded) == []
    assert [one.partition(" values")[0] for one in _told(far, recorded)] == ["3 of 3"]


def test_what_masks_values_hides_no_others() -> None:
    recorded = np.float32([-1e9, 0.5, 0.25])
    assert _told(np.float32([-1e9, 0.5, 0.2501]), recorded) != []
    assert _told(np.float32([-1e9, 0.5, 0.2501]), recorded, PredictionRequest(atol=1e-3)) == []


def test_nothing_but_zeros_was_recorded() -> None:
    assert _told(np.float32([1e-7, 0]), np.zeros(2, np.float32)) == []
    assert _told(np.float32([1e-5, 0]), np.zeros(2, np.float32)) != []


_SPREAD = np.float32([0.2, 0.8])
_NEAR_1 = np.float32([1, 1e-12, 0.9999999])


@pytest.mark.parametrize(
    ("outputs", "elsewhere", "told"),
    [
        ({"y": _SPREAD}, {"y": _SPREAD + 0.01}, {}),
        ({"y": _SPREAD}, {}, {}),
        ({"y": _SPREAD}, {"y": _SPREAD[:1]}, {}),
        ({"y": _SPREAD}, {"y": _SPREAD.copy()}, {"y": "constant"}),
        ({"y": _SPREAD * 1e6}, {"y": _SPREAD * 1e6 + 0.05}, {"y": "constant"}),
        ({"y": _SPREAD, "z": _SPREAD}, {"y": _SPREAD + 1, "z": _SPREAD}, {"z": "constant"}),
        ({"y": _NEAR_1}, {"y": 1 - _NEAR_1}, {"y": "saturated, every value is 0 or 1"}),
        ({"y": np.float32([-1, 1, 1])}, {}, {"y": "saturated, every value is -1 or 1"}),
        ({"y": np.array([1.0, 0.995], BFLOAT16)}, {}, {"y": "saturated, every value is 0 or 1"}),
        (
            {"y": np.zeros(3)},
            {"y": np.ones(3)},
            {"y": "no value is further from 0 than the tolerance, 1e-10"},
        ),
        ({"y": np.array([3])}, {"y": np.array([3])}, {"y": "constant"}),
        ({"y": np.array([0, 1])}, {"y": np.array([1, 1])}, {}),
        ({"y": np.array(["a"])}, {"y": np.array(["a"])}, {"y": "constant"}),
        ({"y": _SPREAD, "class": np.array([3])}, {"y": _SPREAD + 1, "class": np.array([3])}, {}),
        ({"y": _SPREAD, "none": np.ones((0, 2))}, {"y": _SPREAD + 1, "none": np.ones((0, 2))}, {}),
    ],
)
def test_outputs_that_could_not_show_a_change(
    outputs: dict[str, Array], elsewhere: dict[str, Array], told: dict[str, str]
) -> None:
    found = list(insensitive_findings(outputs, elsewhere, _USUAL))
    assert {one.where: one.message.rpartition(":")[0].partition(", other")[0] for one in found} == told
    assert {(one.code, one.severity.value) for one in found} <= {("recording-insensitive", "warning")}


def test_a_tolerance_of_the_users_is_what_an_output_is_held_against() -> None:
    (found,) = insensitive_findings({"y": _SPREAD}, {}, PredictionRequest(atol=0.9))
    assert found.message.startswith("no value is further from 0 than the tolerance, 0.9: ")


def test_outputs_of_another_model() -> None:
    found = recording_findings({"a": np.ones(1)}, {"b": np.ones(1)}, _USUAL)
    assert [(one.code, one.message) for one in found] == [
        ("recording-mismatch", "output 'a' is not in the recording"),
        ("recording-mismatch", "output 'b' is recorded, but not returned by this model"),
    ]


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", BFLOAT16, "c8"])
def test_what_is_not_finite(dtype: Any) -> None:
    array = np.array([1, np.nan, np.inf, -np.inf]).astype(dtype)
    assert [
        one.message for one in non_finite_findings({"y": array, "n": np.ones(2), "t": np.array(["nan"])})
    ] == ["1 NaN and 2 Inf in 4 values"]


def _judged(output: Any, labels: Any, **options: Any) -> tuple[str, list[str]]:
    request = PredictionRequest(labels="l.npy", input="i.npz", **options)
    told, findings = judge_by_labels(np.array(output), np.array(labels), request)
    return told, [one.code for one in findings]


@pytest.mark.parametrize(
    ("output", "labels", "accuracy"),
    [
        ([[0.1, 0.9], [0.8, 0.2]], [1, 1], 0.5),
        ([[0.1, 0.9], [0.8, 0.2]], [[0, 1], [1, 0]], 1),
        ([[0.4, 0.3, 0.2], [0.1, 0.1, 0.2]], [[0, 0, 1], [1, 0, 0]], 0),
        ([0.9, 0.2], [1, 1], 0.5),
        ([[0.9], [0.2]], [1, 0], 1),
        ([3, 4], [3, 5], 0.5),
        ([[[0.1, 0.9], [0.8, 0.2]]], [[1, 0]], 1),
    ],
)
def test_accuracy(output: Any, labels: Any, accuracy: float) -> None:
    told, codes = _judged(output, labels, min_accuracy=0.75)
    assert told.startswith(f"accuracy {accuracy:.4g} on ")
    assert codes == ([] if accuracy >= 0.75 else ["accuracy-too-low"])


@pytest.mark.parametrize(
    ("output", "labels"),
    [
        ([[1.0, 2.0]], [1, 2, 3]),
        ([1.0], []),
        ([1.0], ["a"]),
        ([], []),
        ([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], [[1, 2], [3, 4], [5, 6]]),
    ],
)
@pytest.mark.parametrize("option", [{"min_accuracy": 0.0}, {"max_error": 9.0}])
def test_labels_of_something_else(output: Any, labels: Any, option: dict[str, float]) -> None:
    assert _judged(output, labels, **option) == ("", ["labels-mismatch"])


def test_mean_error() -> None:
    assert _judged([[1.0], [3.0]], [1.0, 2.0], max_error=0.5) == ("mean error 0.5", [])
    assert _judged([[1.0], [3.0]], [1.0, 2.0], max_error=0.4) == ("mean error 0.5", ["error-too-large"])
    assert _judged([np.nan], [1.0], max_error=9.0)[1] == ["error-too-large"]
