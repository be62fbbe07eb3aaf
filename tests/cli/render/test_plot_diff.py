"""What is drawn of a difference: weights where they moved, folded where there are too many."""

from __future__ import annotations

from typing import Any

import pytest

from ckpttool import Difference, Role
from ckpttool.integrations.matplotlib import Bars, HeatMap, Lines
from tests.support import results
from tests.support.rendering import Drawn, draw_nothing, picture_of
from tests.support.results import change_of_strings, drift, step


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Drawn:
    return draw_nothing(monkeypatch)


def change(name: str, l2: float, role: Role = Role.WEIGHTS) -> Any:
    return results.change(name, role=role, l2=l2, norm_a=2.0)


def difference(*changed: Any) -> Difference:
    return results.difference(*changed, compared=10)


def test_weights_alone_where_they_moved(drawn: Drawn) -> None:
    found = difference(
        change("state.0.step", 8.0, Role.OPTIMIZER), change("fc.weight", 0.5), change("fc.bias", 1)
    )
    assert picture_of(found) == b"drawn"
    title = "relative change |Δ| / |a|"
    assert drawn.drawings == [HeatMap(title, ["fc"], ["weight", "bias"], [[0.25, 0.5]], is_logarithmic=True)]
    assert drawn.title.startswith("3 of 10 tensors changed")
    assert [row[0] for row in drawn.table[1:]] == ["fc.bias", "fc.weight", "state.0.step"]


def test_strings_have_no_bar(drawn: Drawn) -> None:
    picture_of(difference(change_of_strings("words"), change("fc.weight", 0.5)))
    assert (drawn.drawings[0].rows, drawn.drawings[0].columns) == (["fc"], ["weight"])
    assert not any("nan" in cell.lower() for row in drawn.table[1:] for cell in row)


def test_the_rest_where_no_weight_moved(drawn: Drawn) -> None:
    picture_of(difference(change("state.0.step", 8.0, Role.OPTIMIZER)))
    assert (drawn.drawings[0].rows, drawn.drawings[0].columns) == (["state.0"], ["step"])


def test_nothing_moved(drawn: Drawn) -> None:
    picture_of(difference())
    assert drawn.drawings == [Bars("relative change |Δ| / |a|", ["no values changed"], [None])]


def test_many_modules_are_folded_and_rare_kinds_share_a_column(drawn: Drawn) -> None:
    names = [f"layers.{at}.{part}.{leaf}" for at in range(100) for part in "qk" for leaf in ("w", "b")]
    names += [f"odd.{leaf}" for leaf in "cdefghijk"]
    picture_of(difference(*(change(name, at + 1.0) for at, name in enumerate(names))))
    (heat,) = drawn.drawings
    assert heat.rows == ["layers.*.q", "layers.*.k", "odd"]
    assert heat.columns == ["w", "b", "c", "d", "e", "f", "g", "h", "others"]
    assert heat.values[0][:2] == [397 / 2, 398 / 2]  # the largest of all layers
    assert heat.values[2][-1] == len(names) / 2


def test_series(drawn: Drawn) -> None:
    steps = (
        step(difference(change("a.w", 1.0)), 1.0),
        step(difference(change("b.w", 0.5), change("a.w", 2.0)), 2.0),
    )
    points = [(f"run/{at}.pth", at, None, None, 2.0 + at) for at in range(3)]
    picture_of(drift(points, *steps), "html")
    epochs = ["0", "1", "2"]
    assert drawn.drawings == [
        HeatMap("relative change |Δ| / |a|", ["a", "b"], epochs[1:], [[0.5, 1.0], [None, 0.25]], True, 1),
        Lines("norm of the weights", epochs, {"norm of the weights": [2.0, 3.0, 4.0]}, "epoch"),
        Lines("L2 of the change", epochs, {"L2 of the change": [None, 1.0, 2.0]}, "epoch"),
    ]
    assert drawn.title == "0.pth → 2.pth"
