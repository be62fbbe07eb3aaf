"""What people read of a series: rows that stand for themselves, and what they can't say below."""

from __future__ import annotations

from typing import Any

import pytest

from ckpttool import Difference
from ckpttool.dtypes import BY_NAME
from ckpttool.ops.difference import Change, Described, Facts
from ckpttool.ops.drift import Drift, DriftStep, Point
from ckpttool.render.text_drift import drift_text, short_names
from ckpttool.tensor import Role

F32 = BY_NAME["float32"]
HOSTILE = "\x1b[2Ja\nb\u202e"


def difference(b: str, **more: Any) -> Difference:
    sides = {name: Described(path, "pytorch", None, None, 1, 1, 1) for name, path in (("a", "x"), ("b", b))}
    return Difference(**sides, compared=4, unchanged=4 - len(more.get("changed", ())), **more)


def reshaped(name: str) -> Change:
    a, b = (Facts(name, Role.WEIGHTS, F32, shape, 16) for shape in ((2, 2), (4,)))
    return Change(a=a, b=b, kind="shape")


def drift(paths: list[str], steps: list[DriftStep]) -> Drift:
    return Drift(tuple(Point(path, at, None, None, None) for at, path in enumerate(paths)), tuple(steps))


def test_what_a_row_cannot_say_stands_below() -> None:
    found = drift(
        ["run/1", "run/2", "run/3"],
        [
            DriftStep(difference("run/2", changed=(reshaped("w"),)), 0.0, None, None, 0.0, None),
            DriftStep(difference("run/3"), 0.0, 0.0, 1.0, 0.0, None),
        ],
    )
    assert drift_text(found).splitlines() == [
        "3 checkpoints: 1 of 2 steps changed something",
        "",
        "  checkpoint  epoch  changed",
        "  1               0",
        "  2               1   1 of 4",
        "  3               2   0 of 4",
        "",
        "  2: 1 of 4 tensors changed in shape",
    ]


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["run/1.pth", "run/2.pth"], ["1.pth", "2.pth"]),
        (["a/1.pth", "b/1.pth"], ["a/1.pth", "b/1.pth"]),
        (["1.pth", "2.pth"], ["1.pth", "2.pth"]),
        (["run/", "run/"], ["run/", "run/"]),
    ],
)
def test_a_directory_that_all_share_is_left_out(paths: list[str], names: list[str]) -> None:
    assert short_names(drift(paths, [])) == names


def test_nothing_from_a_file_reaches_the_terminal_unescaped() -> None:
    step = DriftStep(difference(HOSTILE, changed=(reshaped(HOSTILE),)), 1.0, 0.5, None, 1.0, HOSTILE)
    text = drift_text(drift(["x", HOSTILE], [step]), width=200)
    assert all(character.isprintable() or character == "\n" for character in text)
    assert "\\x1b[2Ja\\nb\\u202e" in text


def test_colour_only_where_it_is_wanted() -> None:
    found = drift(["x", "y"], [DriftStep(difference("y"), 0.0, 0.0, 1.0, 0.0, None)])
    assert "\x1b" not in drift_text(found)
    assert drift_text(found, colour=True).startswith("\x1b[1mall equal: 2 checkpoints\x1b[0m\n")
