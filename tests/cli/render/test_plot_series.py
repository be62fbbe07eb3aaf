"""What is drawn of series: what counts along, which metrics belong together, and what a policy would keep."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from typing import Any

import pytest

from tests.support.directories import damaged
from tests.support.rendering import Drawn, draw_nothing, picture_of
from tests.support.results import listing, row

MOST_PANELS = 24
SVG = "{http://www.w3.org/2000/svg}"


RUN = [row(f"m_epoch_{at}-val_loss=0.{9 - at}.pt", step=100 * at, loss=0.5 / at) for at in (1, 2, 10)]
PLAN = [replace(one, kept=kept) for one, kept in zip(RUN, ((), ("best 1",), ("newest",)), strict=True)]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Drawn:
    return draw_nothing(monkeypatch)


def test_metrics_of_one_kind_over_steps(drawn: Drawn) -> None:
    assert picture_of(listing(RUN)) == b"drawn"
    (panel,) = drawn.drawings
    assert (panel.title, panel.axis, panel.positions) == ("run/0", "step", [100, 200, 1000])
    assert panel.metrics == ["loss", "val_loss"]
    assert drawn.title == "run: 3 checkpoints in 1 series"


def test_the_metric_that_was_asked_for(drawn: Drawn) -> None:
    rows = [row(f"m_epoch_{at}.pt", metrics={"val_loss": 0.5, "val_acc": 0.1 * at}) for at in (1, 2)]
    picture_of(listing(rows, best="val_acc"))
    assert [panel.metrics for panel in drawn.drawings] == [["val_acc"]]


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
        row(f"{name}.pt", step=step, epoch=epoch)
        for name, step, epoch in zip("ab", steps, epochs, strict=True)
    ]
    picture_of(listing(rows))
    assert [(panel.axis, [*panel.positions]) for panel in drawn.drawings] == [(axis, places)]


def test_all_panels_count_alike_where_they_can(drawn: Drawn) -> None:
    stepless = [row(f"n_epoch_{at}.pt") for at in (1, 2)]
    picture_of(listing(RUN, stepless))
    assert [panel.axis for panel in drawn.drawings] == ["epoch", "epoch"]


def test_single_ones_and_too_many_are_told(drawn: Drawn) -> None:
    many = [[row(f"{at}_epoch_{epoch}.pt") for epoch in (1, 2)] for at in range(MOST_PANELS + 5)]
    picture_of(listing(RUN, [row("alone.pt")], *many))
    assert len(drawn.drawings) == MOST_PANELS
    assert drawn.drawings[0].title == "run/0"
    assert drawn.title.endswith(f"in {MOST_PANELS + 7} series ({MOST_PANELS} drawn)")
    picture_of(listing([row("alone.pt")]))
    assert [panel.title for panel in drawn.drawings] == ["run/0"]


def test_the_numbers_below_a_page(drawn: Drawn) -> None:
    picture_of(listing(PLAN, best="val_loss"), "html")
    assert drawn.numbers.headings == [
        *("checkpoint", "series", "epoch", "step", "loss", "val_loss", "size", "changed (UTC)"),
        *("policy", "state", "notes"),
    ]
    assert drawn.numbers.rows[1] == [
        *("run/m_epoch_2-val_loss=0.7.pt", "run/*", "2", "200", "0.25", "0.7", "4.0 kB"),
        *("2001-09-09T01:46:40Z", "keep: best 1", "readable", ""),
    ]


def texts(picture: bytes) -> set[str]:
    root = ElementTree.fromstring(picture)
    return {"".join(one.itertext()) for one in root.iter(f"{SVG}text")}


def test_a_panel_says_what_it_shows() -> None:
    rows = [replace(PLAN[0]), replace(PLAN[1], is_best=True), PLAN[2]]
    rows.append(row("m_epoch_11.pt", step=1100, fault=damaged("no"), kept=("damaged",)))
    said = texts(picture_of(listing(rows, best="val_loss"), title="the run"))
    assert {"the run: 4 checkpoints in 1 series", "run/0", "step", "val_loss", "loss"} <= said
    assert {"keep", "remove", "best", "size", "size (remove)", "not sound"} <= said
    assert {"100", "1,000", "4.0 kB", "0 B"} <= said


def test_without_a_policy_nothing_is_said_of_one() -> None:
    said = texts(picture_of(listing(RUN)))
    assert not {"keep", "remove", "size (remove)", "best", "not sound"} & said
    assert "size" in said


@pytest.mark.parametrize("kind", ["svg", "png", "html"])
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
    assert "run/0" in texts(picture_of(listing(rows)))
