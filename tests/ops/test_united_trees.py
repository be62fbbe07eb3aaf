"""Two trees of plain data as one."""

from __future__ import annotations

import math
import struct

import pytest

from ckpttool.ops.merging.joined_parts import TreeConflict, unite_trees

(ODD_NAN,) = struct.unpack(">d", bytes.fromhex("7ff800000000beef"))


def test_dictionaries_come_together() -> None:
    one, two = {"a": {"x": 1}, "n": math.nan}, {"a": {"y": -0.0}, "n": math.nan}
    made = unite_trees(one, two)
    assert list(made) == ["a", "n"]  # type: ignore[call-overload]
    assert made["a"] == {"x": 1, "y": 0.0}  # type: ignore[index]


@pytest.mark.parametrize(
    ("one", "two"),
    [(0.0, -0.0), (math.nan, ODD_NAN), (1, 1.0), (1, True), ([0.0], [-0.0]), ((1,), (1.0,)), ([1], (1,))],
)
def test_what_differs_in_a_bit_is_not_equal(one: object, two: object) -> None:
    for a, b in ((one, two), (two, one)):
        with pytest.raises(TreeConflict) as caught:
            unite_trees({"x": {"y": a}}, {"x": {"y": b}})
        assert caught.value.where == "x.y"


@pytest.mark.parametrize(
    "value", [0, -0.0, ODD_NAN, "a", b"a", None, [1, (2.5,)], {3, 4}, 1 + 2j, frozenset({1})]
)
def test_what_is_the_same_is_one(value: object) -> None:
    assert unite_trees({"x": value}, {"x": value}) == {"x": value} or value != value
