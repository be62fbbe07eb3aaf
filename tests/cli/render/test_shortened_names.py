"""Names that are too long for a table lose what tells nothing, and stay different from each other."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.cli.render.terminal import display_width, shorten_names

PARTS = st.text("ab01-模é", min_size=1, max_size=12)
PATHS = st.lists(PARTS, min_size=1, max_size=5).map(os.sep.join)
LOGS = "lightning_logs/version_0/checkpoints/last.ckpt"


@pytest.mark.parametrize(
    ("names", "room", "short"),
    [
        (["a.pt", "b.pt"], 4, ["a.pt", "b.pt"]),
        (
            [f"lightning/lr0.01/{LOGS}", f"lightning/lr0.001/{LOGS}", "model.pth"],
            30,
            ["lightning/lr0.01/…/last.ckpt", "lightning/lr0.001/…/last.ckpt", "model.pth"],
        ),
        (
            [f"runs/lr0.01/{LOGS}", f"runs/lr0.001/{LOGS}"],
            24,
            ["…/lr0.01/…/last.ckpt", "…/lr0.001/…/last.ckpt"],
        ),
        ([f"runs/lr0.01/{LOGS}", f"runs/lr0.001/{LOGS}"], 16, ["….01/…/last.ckpt", "…001/…/last.ckpt"]),
        (["a-long-beginning-1.pt", "a-long-beginning-2.pt"], 8, ["…ng-1.pt", "…ng-2.pt"]),
        ([f"{'b' * 30}-{epoch}-{'e' * 30}" for epoch in (1, 2)], 12, ["…bbb-1-eeee…", "…bbb-2-eeee…"]),
    ],
)
def test_what_tells_them_apart_stays(names: list[str], room: int, short: list[str]) -> None:
    found = shorten_names(names, room)
    assert found == short


@given(st.lists(PATHS, max_size=8), st.integers(5, 60))
def test_they_fit(names: list[str], room: int) -> None:
    short = shorten_names(names, room)
    assert all(display_width(name) <= room for name in short)
    assert [name for name in names if display_width(name) <= room] == [
        new for old, new in zip(names, short, strict=True) if display_width(old) <= room
    ]
    assert all(new == old or "…" in new for old, new in zip(names, short, strict=True))


@given(st.lists(st.text("ab01", min_size=30, max_size=50), unique=True, max_size=8), st.integers(5, 29))
def test_where_a_cut_tells_all_apart_they_are_told_apart(names: list[str], room: int) -> None:
    cuts = [
        {f"{name[:start]}…{name[len(name) - room + 1 + start :]}" for name in names} for start in range(room)
    ]
    if any(len(cut) == len(names) for cut in cuts):
        assert len(set(shorten_names(names, room))) == len(names)


@given(st.lists(st.text("abc01", min_size=1, max_size=10), unique=True, min_size=2, max_size=6), PATHS, PATHS)
def test_a_directory_that_tells_them_apart_stays(runs: list[str], above: str, below: str) -> None:
    names = [f"{above}/{run}/{'d' * 40}/{below}/model.pt" for run in runs]
    short = shorten_names(names, 28)
    assert len(set(short)) == len(names)
    assert all(run in name.split(os.sep) for run, name in zip(runs, short, strict=True))
