"""Copies within a series, which rules would count twice."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckpttool.runs.members.order import group
from ckpttool.runs.members.series_doubts import copy_warnings
from tests.support.directories import survey


@pytest.fixture
def twice(short: Path) -> Path:
    """Return a directory with four epochs, and a copy of them, beside one another."""
    shutil.copytree(short, short.parent / "more" / "one")
    shutil.copytree(short, short.parent / "more" / "two")
    return short.parent / "more"


def _told(place: Path) -> list[str]:
    return list(copy_warnings(group(survey(str(place)).entries, "none")))


def test_two_directories_that_hold_the_same_are_told_once(twice: Path) -> None:
    first = sorted(path.name for path in (twice / "one").iterdir())
    (told,) = _told(twice)
    assert told.startswith("all checkpoints: ")
    assert told.endswith("hold the same bytes; copies count twice")
    assert any(str(twice / "one" / name) in told and str(twice / "two" / name) in told for name in first)


def test_one_byte_makes_another_checkpoint(twice: Path) -> None:
    for path in (twice / "two").iterdir():
        raw = bytearray(path.read_bytes())
        raw[raw.index(b"PK\x01\x02") + 14] ^= 1  # the time of an archive's member, which nobody reads
        path.write_bytes(raw)
    assert _told(twice) == []


def test_what_has_another_name_or_is_gone_is_no_copy(twice: Path) -> None:
    groups = group(survey(str(twice)).entries, "none")
    shutil.rmtree(twice / "two")
    assert list(copy_warnings(groups)) == []
    (twice / "two").mkdir()
    for epoch in (7, 8, 9):
        shutil.copy2(
            twice / "one" / f"model_epoch_{epoch}.pth", twice / "two" / f"model_epoch_{epoch + 9}.pth"
        )
    assert _told(twice) == []
