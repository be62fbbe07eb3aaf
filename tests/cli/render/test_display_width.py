"""Columns of a terminal: a Chinese, Japanese or Korean character takes two, a combining mark none."""

from __future__ import annotations

from unicodedata import combining, east_asian_width

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.cli.render.terminal import display_width, pad, shorten, text_table

NAMES = st.text("ab_.-0模型検証ａé", max_size=40)


def _on_a_terminal(text: str) -> int:
    """Return the columns that a terminal gives a text, by the Unicode database."""
    return sum(0 if combining(one) else 1 + (east_asian_width(one) in "WF") for one in text)


@given(NAMES)
def test_a_wide_character_takes_two_columns(name: str) -> None:
    assert display_width(name) == _on_a_terminal(name)


@given(NAMES, st.integers(5, 60))
def test_a_name_is_shortened_to_the_columns_there_are(name: str, room: int) -> None:
    short = shorten(name, room)
    assert _on_a_terminal(short) <= room
    assert short == name or "…" in short


@given(st.lists(NAMES.filter(str.strip), min_size=1, max_size=5))
def test_columns_begin_below_one_another(names: list[str]) -> None:
    table = text_table(["name", "what"], [(name, "!") for name in names], width=200, left=["what"])
    ends = {
        _on_a_terminal(line[: line.rindex(mark)])
        for line, mark in zip(table.lines, ["w", *"!" * len(names)], strict=True)
    }
    assert len(ends) == 1


@pytest.mark.parametrize(("name", "told"), [("ab", "ab    |"), ("模型", "模型  |")])
def test_padding_fills_up_to_a_width(name: str, told: str) -> None:
    assert pad(name, 6) + "|" == told
