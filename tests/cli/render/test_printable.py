"""Names out of files, made fit for a terminal."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.golden import Golden
from tests.support.rendering import escaped

ANY_TEXT = st.text(st.characters(exclude_categories=()))
"""All that a Python string can hold, lone surrogates included."""


TEXTS = (
    *("fc.weight", "", "a\nb\tc\rd", "\x1b[31mred", "\x9b31m", "\x7f\x00", "abc\u202edef", "\u2066x\u2069"),
    *("zero\u200bwidth\ufeff", "line\u2028sep\u2029", "tag\U000e0041", "\ud800", "\ue000", "größe 大小 ×"),
    "e\u0301",
)


def test_what_is_shown(golden: Golden) -> None:
    golden({ascii(text): escaped(text) for text in TEXTS})


@given(ANY_TEXT)
def test_no_control_survives(text: str) -> None:
    shown = escaped(text)
    assert not {unicodedata.category(character) for character in shown} & {
        "Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp",
    }  # fmt: skip
    assert len(shown.splitlines()) <= 1
    shown.encode("utf-8")


@given(ANY_TEXT)
def test_what_is_fit_stays_as_it_is(text: str) -> None:
    shown = escaped(text)
    assert escaped(shown) == shown


ASSIGNED = 0x32400
"""Behind it come planes of private use, of tags, and of nothing."""


@pytest.mark.parametrize("step", [97, pytest.param(1, marks=pytest.mark.thorough)])
def test_every_character_by_itself(step: int) -> None:
    for code in (*range(ASSIGNED), *range(ASSIGNED, 0x110000, step)):
        shown = escaped(chr(code))
        assert shown == chr(code) or (shown.isascii() and shown.startswith("\\")), hex(code)
