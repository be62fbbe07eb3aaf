"""What is drawn of series: what counts along, which metrics belong together, and what a policy would keep."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckpttool.formats.interface import Unit
from ckpttool.naming import parse_name
from ckpttool.render import plot_series
from ckpttool.render.plot import KINDS, Numbers
from ckpttool.render.plot_series import MOST_PANELS, SeriesPanel, series_picture
from ckpttool.series.files import Contents, Fingerprint
from ckpttool.series.listing import ListedCheckpoint, ListedSeries, Listing
from ckpttool.series.members.entry import Entry
from tests.support.directories import damaged

SVG = "{http://www.w3.org/2000/svg}"


def row(
    name: str, *, kept: tuple[str, ...] | None = None, best: bool = False, **told: Any
) -> ListedCheckpoint:
    fields = parse_name(name)
    path = str(Path("run", name))
    contents = Contents((Fingerprint(name, 1, len(name), 4_000, 10**18),))
    given = {
        "contents": contents,
        "epoch": fields.epoch,
        "step": fields.step,
        "metrics": fields.metrics,
    } | told
    entry = Entry(
        path=path,
        unit=Unit(path, (name,), None),
        format="pytorch",
        fields=fields,
        group="run/*",
        **given,
    )
    return ListedCheckpoint(entry, kept=kept, is_best=best)


def listing(*series: Sequence[ListedCheckpoint], best: str | None = None) -> Listing:
    listed = tuple(ListedSeries(f"run/{at}", tuple(rows)) for at, rows in enumerate(series))
    return Listing(tuple(one for rows in series for one in rows), series=listed, best=best)


RUN = [row(f"m_epoch_{at}-val_loss=0.{9 - at}.pt", step=100 * at, loss=0.5 / at) for at in (1, 2, 10)]
PLAN = [replace(one, kept=kept) for one, kept in zip(RUN, ((), ("best 1",), ("newest",)), strict=True)]


class Drawn:
    """What would have been drawn."""

    title: str
    panels: list[SeriesPanel]
    numbers: Numbers


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Drawn:
    told = Drawn()

    def picture(kind: str, title: str, panels: list[SeriesPanel], numbers: Numbers) -> bytes:
        told.title, told.panels, told.numbers = title, panels, numbers
        return b"drawn"

    monkeypatch.setattr(plot_series, "picture", picture)
    return told


def test_metrics_of_one_kind_over_steps(drawn: Drawn) -> None:
    assert series_picture("svg", "run", listing(RUN)) == b"drawn"
    (panel,) = drawn.panels
    assert (panel.title, panel.axis, panel.positions) == ("run/0", "step", [100, 200, 1000])
    assert panel.metrics == ["loss", "val_loss"]
    assert drawn.title == "run: 3 checkpoints in 1 series"


def test_the_metric_that_was_asked_for(drawn: Drawn) -> None:
    rows = [row(f"m_epoch_{at}.pt", metrics={"val_loss": 0.5, "val_acc": 0.1 * at}) for at in (1, 2)]
    series_picture("svg", "run", listing(rows, best="val_acc"))
    assert [panel.metrics for panel in drawn.panels] == [["val_acc"]]


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
    series_picture("svg", "run", listing(rows))
    assert [(panel.axis, [*panel.positions]) for panel in drawn.panels] == [(axis, places)]


def test_all_panels_count_alike_where_they_can(drawn: Drawn) -> None:
    stepless = [row(f"n_epoch_{at}.pt") for at in (1, 2)]
    series_picture("svg", "run", listing(RUN, stepless))
    assert [panel.axis for panel in drawn.panels] == ["epoch", "epoch"]


def test_single_ones_and_too_many_are_told(drawn: Drawn) -> None:
    many = [[row(f"{at}_epoch_{epoch}.pt") for epoch in (1, 2)] for at in range(MOST_PANELS + 5)]
    series_picture("svg", "run", listing(RUN, [row("alone.pt")], *many))
    assert len(drawn.panels) == MOST_PANELS
    assert drawn.panels[0].title == "run/0"
    assert drawn.title.endswith(f"in {MOST_PANELS + 7} series ({MOST_PANELS} drawn)")
    series_picture("svg", "run", listing([row("alone.pt")]))
    assert [panel.title for panel in drawn.panels] == ["run/0"]


def test_the_numbers_below_a_page(drawn: Drawn) -> None:
    series_picture("html", "run", listing(PLAN, best="val_loss"))
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
    said = texts(series_picture("svg", "the run", listing(rows, best="val_loss")))
    assert {"the run: 4 checkpoints in 1 series", "run/0", "step", "val_loss", "loss"} <= said
    assert {"keep", "remove", "best", "size", "size (remove)", "not sound"} <= said
    assert {"100", "1,000", "4.0 kB", "0 B"} <= said


def test_without_a_policy_nothing_is_said_of_one() -> None:
    said = texts(series_picture("svg", "run", listing(RUN)))
    assert not {"keep", "remove", "size (remove)", "best", "not sound"} & said
    assert "size" in said


@pytest.mark.parametrize("kind", KINDS)
def test_same_checkpoints_give_the_same_bytes(kind: str) -> None:
    first = series_picture(kind, "run", listing(PLAN, best="val_loss"))
    assert series_picture(kind, "run", listing(PLAN, best="val_loss")) == first


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
        [row("a_epoch_1.pt", contents=Contents()), row("a_epoch_2.pt", contents=Contents())],
        [row(f"$x_<b>\x1b_epoch_{at}.pt", metrics={"$f_1": at}) for at in (1, 2)],
    ],
)
def test_odd_values_are_drawn(rows: list[ListedCheckpoint]) -> None:
    assert "run/0" in texts(series_picture("svg", "run", listing(rows)))
