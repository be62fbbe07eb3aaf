"""What is drawn of a difference: weights where they moved, folded where there are too many."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ckpttool import Difference
from ckpttool.comparing.statistics import Statistics
from ckpttool.dtypes import BY_NAME
from ckpttool.ops.difference import Change, Described, Facts
from ckpttool.ops.drift import Drift, DriftStep, Point
from ckpttool.render import plot_diff
from ckpttool.render.plot import Bars, Heat, Lines, Numbers
from ckpttool.tensor import Role

F32 = BY_NAME["float32"]
SIDE = Described("a.pth", "pytorch", None, None, 1, 1, 1)


class Drawn:
    """What would have been drawn."""

    kind: str
    title: str
    drawings: list[Any]
    numbers: Numbers


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Drawn:
    told = Drawn()

    def picture(kind: str, title: str, drawings: list[Any], numbers: Numbers) -> bytes:
        told.kind, told.title, told.drawings, told.numbers = kind, title, drawings, numbers
        return b"drawn"

    monkeypatch.setattr(plot_diff, "picture", picture)
    return told


def change(name: str, l2: float, role: Role = Role.WEIGHTS) -> Change:
    facts = Facts(name, role, F32, (4,), 16)
    found = Statistics(
        size=4,
        count=1,
        max_abs=l2,
        mean_abs=l2 / 4,
        max_rel=l2,
        l2=l2,
        cosine=1.0,
        norm_a=2.0,
        norm_b=2.0,
        where=(0,),
        at_a=0.0,
        at_b=l2,
    )
    return Change(a=facts, b=facts, kind="values", statistics=found)


def difference(*changed: Change) -> Difference:
    return Difference(a=SIDE, b=SIDE, compared=10, unchanged=10 - len(changed), changed=changed)


def test_weights_alone_where_they_moved(drawn: Drawn) -> None:
    found = difference(
        change("state.0.step", 8.0, Role.OPTIMIZER), change("fc.weight", 0.5), change("fc.bias", 1)
    )
    assert plot_diff.difference_picture("svg", found) == b"drawn"
    assert drawn.drawings == [Bars("relative change |Δ| / |a|", ["fc.weight", "fc.bias"], [0.25, 0.5])]
    assert drawn.title.startswith("3 of 10 tensors changed")
    assert [row[0] for row in drawn.numbers.rows] == ["fc.bias", "fc.weight", "state.0.step"]


def test_strings_have_no_bar(drawn: Drawn) -> None:
    nothing = dict.fromkeys(
        ("max_abs", "mean_abs", "max_rel", "l2", "cosine", "norm_a", "norm_b"), float("nan")
    )
    found = change("words", 1.0)
    assert found.statistics is not None
    words = replace(found, statistics=replace(found.statistics, at_a="a", at_b="b", **nothing))
    plot_diff.difference_picture("svg", difference(words, change("fc.weight", 0.5)))
    assert drawn.drawings[0].names == ["fc.weight"]
    assert not any("nan" in cell.lower() for row in drawn.numbers.rows for cell in row)


def test_the_rest_where_no_weight_moved(drawn: Drawn) -> None:
    plot_diff.difference_picture("svg", difference(change("state.0.step", 8.0, Role.OPTIMIZER)))
    assert drawn.drawings[0].names == ["state.0.step"]


def test_nothing_moved(drawn: Drawn) -> None:
    plot_diff.difference_picture("svg", difference())
    assert drawn.drawings[0].names == ["no values changed"]


@pytest.mark.parametrize(
    ("names", "drawn_names"),
    [
        ([f"m{at}.{leaf}" for at in range(100) for leaf in ("w", "b")], [f"m{at}" for at in range(100)]),
        ([f"layers.{at}.{leaf}.w" for at in range(100) for leaf in "qk"], ["layers.*.q", "layers.*.k"]),
    ],
)
def test_many_are_folded(drawn: Drawn, names: list[str], drawn_names: list[str]) -> None:
    changes = [change(name, at + 1.0) for at, name in enumerate(names)]
    plot_diff.difference_picture("svg", difference(*changes))
    (bars,) = drawn.drawings
    assert bars.names == drawn_names
    assert bars.values[-1] == len(names) / 2


def test_series(drawn: Drawn) -> None:
    steps = (
        DriftStep(difference(change("a.w", 1.0)), 1.0, 0.5, 1.0, 1.0, "a.w"),
        DriftStep(difference(change("b.w", 0.5), change("a.w", 2.0)), 2.0, 0.5, 1.0, 1.0, "a.w"),
    )
    points = tuple(Point(f"run/{at}.pth", at, None, None, 2.0 + at) for at in range(3))
    plot_diff.drift_picture("html", Drift(points, steps))
    names = ["0.pth", "1.pth", "2.pth"]
    assert drawn.drawings == [
        Heat("relative change |Δ| / |a|", ["a.w", "b.w"], names[1:], [[0.5, 1.0], [None, 0.25]], True),
        Lines("norm of the weights", names, {"norm of the weights": [2.0, 3.0, 4.0]}),
        Lines("L2 of the change", names, {"L2 of the change": [None, 1.0, 2.0]}),
    ]
    assert drawn.title == "0.pth → 2.pth"
