"""What people read of a series: rows that stand for themselves, and what they can't say below."""

from __future__ import annotations

from typing import Any

from ckpttool import Difference
from tests.support import results
from tests.support.golden import Golden
from tests.support.rendering import lines_of, text_of
from tests.support.results import drift, reshaped, side, step

HOSTILE = "\x1b[2Ja\nb\u202e"


def difference(b: str, *changed: Any) -> Difference:
    return results.difference(*changed, compared=4, b=side(b))


def test_what_a_row_cannot_say_stands_below(golden: Golden) -> None:
    found = drift(
        [("run/1", 0), ("run/2", 1), ("run/3", 2)],
        step(difference("run/2", reshaped("w")), relative=None, cosine=None),
        step(difference("run/3")),
    )
    golden(text_of(found))


def test_a_directory_that_all_share_is_left_out() -> None:
    for paths, names in (
        (["run/1.pth", "run/2.pth"], ["1.pth", "2.pth"]),
        (["a/1.pth", "b/1.pth"], ["a/1.pth", "b/1.pth"]),
        (["1.pth", "2.pth"], ["1.pth", "2.pth"]),
        (["run/", "run/"], ["run/", "run/"]),
    ):
        points = [(path, at) for at, path in enumerate(paths)]
        rows = lines_of(drift(points, step(difference(paths[1]))))[3:]
        assert [row.split()[0] for row in rows] == names


def test_nothing_from_a_file_reaches_the_terminal_unescaped() -> None:
    moved = step(difference(HOSTILE, reshaped(HOSTILE)), 1.0, 0.5, None, 1.0, HOSTILE)
    text = text_of(drift([("x", 0), (HOSTILE, 1)], moved), width=200)
    assert all(character.isprintable() or character == "\n" for character in text)
    assert "\\x1b[2Ja\\nb\\u202e" in text


def test_colour_only_where_it_is_wanted(golden: Golden) -> None:
    found = drift([("x", 0), ("y", 1)], step(difference("y")))
    assert "\x1b" not in text_of(found)
    golden(ascii(text_of(found, colour=True).split("\n")[0]))
