"""What is drawn of series: what counts along, which metrics belong together, and what a policy would keep."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from ckpttool.integrations.matplotlib import Bars
from tests.support.directories import damaged
from tests.support.rendering import Drawn, draw_nothing, picture_of
from tests.support.results import listing, row

MOST_RUNS = 24
SVG = "{http://www.w3.org/2000/svg}"


RUN = [row(f"m_epoch_{at}-val_loss=0.{9 - at}.pt", step=100 * at, loss=0.5 / at) for at in (1, 2, 10)]
PLAN = [one._replace(kept=kept) for one, kept in zip(RUN, ((), ("best 1",), ("newest",)), strict=True)]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Drawn:
    return draw_nothing(monkeypatch)


def test_a_metric_of_all_runs_over_steps(drawn: Drawn) -> None:
    assert picture_of(listing(RUN)) == b"drawn"
    (panel,) = drawn.drawings
    assert (panel.title, panel.axis) == ("loss", "step")
    (run,) = panel.runs
    assert [(x, y) for x, y, _ in run.points] == [(100, 0.5), (200, 0.25), (1000, 0.05)]
    assert drawn.title == "run: 3 checkpoints in 1 run"


def test_the_metric_that_was_asked_for(drawn: Drawn) -> None:
    rows = [row(f"m_epoch_{at}.pt", metrics={"val_loss": 0.5, "val_acc": 0.1 * at}) for at in (1, 2)]
    picture_of(listing(rows, best="val_acc"))
    assert [panel.title for panel in drawn.drawings] == ["val_acc"]


@pytest.mark.parametrize(
    ("steps", "epochs", "axis", "places"),
    [
        ([None, 5], [1, 2], "epoch", [1, 2]),
        ([5, 5], [1, 2], "epoch", [1, 2]),
        ([None, None], [None, 2], "checkpoint", [1, 2]),
        ([20, 10], [1, 2], "step", [10, 20]),
    ],
)
def test_what_counts_along(
    drawn: Drawn, steps: list[int | None], epochs: list[int | None], axis: str, places: list[float]
) -> None:
    rows = [
        row(f"{name}.pt", step=step, epoch=epoch, metrics={"f1": 0.5})
        for name, step, epoch in zip("ab", steps, epochs, strict=True)
    ]
    picture_of(listing(rows))
    (panel,) = drawn.drawings
    assert (panel.axis, [x for x, _, _ in panel.runs[0].points]) == (axis, places)


def test_all_runs_share_an_axis_and_what_removing_frees_is_said(drawn: Drawn) -> None:
    stepless = [row(f"n_epoch_{at}.pt", metrics={"loss": 1.0 / at}) for at in (1, 2)]
    picture_of(listing(PLAN, stepless))
    (panel,) = drawn.drawings
    assert (panel.axis, len(panel.runs)) == ("epoch", 2)
    assert drawn.title == "run: 5 checkpoints in 2 runs, 4.0 kB to free"


def test_single_ones_and_too_many_are_told(drawn: Drawn) -> None:
    many = [
        [row(f"{at}_epoch_{epoch}.pt", metrics={"f1": 0.5}) for epoch in (1, 2)]
        for at in range(MOST_RUNS + 5)
    ]
    picture_of(listing(RUN, [row("alone.pt")], *many))
    assert drawn.title.endswith(f"in {MOST_RUNS + 7} runs ({MOST_RUNS} drawn)")


def test_without_any_metric_sizes_are_drawn(drawn: Drawn) -> None:
    picture_of(listing([row("alone.pt")]))
    assert drawn.drawings == [Bars("size in bytes", ["run/0"], [4000.0])]


def texts(picture: bytes) -> set[str]:
    root = ElementTree.fromstring(picture)
    return {"".join(one.itertext()) for one in root.iter(f"{SVG}text")}


def test_a_panel_says_what_it_shows() -> None:
    rows = [PLAN[0], PLAN[1]._replace(is_best=True), PLAN[2]]
    rows.append(row("m_epoch_11.pt", step=1100, fault=damaged("no"), kept=("damaged",)))
    said = texts(picture_of(listing(rows, best="val_loss"), title="the run"))
    assert {"the run: 4 checkpoints in 1 run, 4.0 kB to free", "run/0", "step", "val_loss"} <= said
    assert {"keep", "remove", "best", "damaged or incomplete"} <= said


def test_names_at_the_lines_are_beside_their_ends() -> None:
    rising = [row(f"a_epoch_{at}.pt", metrics={"f1": 0.1 * at}) for at in range(1, 10)]
    falling = [row(f"b_epoch_{at}.pt", metrics={"f1": 1 - 0.1 * at}) for at in range(1, 10)]
    root = ElementTree.fromstring(picture_of(listing(rising, falling)))
    heights = {"".join(one.itertext()): float(_height(one)) for one in root.iter(f"{SVG}text")}
    assert heights["0"] < heights["1"] - 100  # the rising one ends above; y counts downwards


def _height(text: ElementTree.Element) -> str:
    found = re.search(r"translate\(\S+ (\S+)\)", text.get("transform", ""))
    return found[1] if found else text.get("y", "0")


def test_without_a_policy_nothing_is_said_of_one() -> None:
    said = texts(picture_of(listing(RUN)))
    assert not {"keep", "remove", "best", "damaged or incomplete"} & said


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_same_checkpoints_give_the_same_bytes(kind: str) -> None:
    first = picture_of(listing(PLAN, best="val_loss"), kind)
    assert picture_of(listing(PLAN, best="val_loss"), kind) == first


@pytest.mark.parametrize(
    "rows",
    [
        [row("a.pt")],
        [
            row("a_epoch_1.pt", metrics={"f1": float("nan")}),
            row("a_epoch_2.pt", metrics={"f1": float("inf")}),
        ],
        [row("a_epoch_1.pt", metrics={"f1": 0.5}), row("a_epoch_2.pt")],
        [row(f"a_epoch_{at}.pt", metrics={"f1": 1e300 * at}) for at in (1, 2)],
        [row(f"a_epoch_{at}.pt", epoch=10**15 * at, step=None) for at in (1, 2)],
        [row("a_epoch_1.pt", is_empty=True), row("a_epoch_2.pt", is_empty=True)],
        [row(f"$x_<b>\x1b_epoch_{at}.pt", metrics={"$f_1": at}) for at in (1, 2)],
    ],
)
def test_odd_values_are_drawn(rows: list[Any]) -> None:
    assert any(text.startswith("run: ") for text in texts(picture_of(listing(rows))))
