"""What a trainer takes away while a directory is looked at is nothing to complain of."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.directories import before_it_is_looked_at, before_it_is_looked_into, survey


@pytest.fixture
def legacy(files: Path, short: Path) -> Path:
    """Return a directory with a checkpoint that is a directory, in which others may lie."""
    shutil.copytree(files / "fluid" / "root" / "checkpoint_3", short / "checkpoint_3")
    return short / "checkpoint_3"


@pytest.mark.parametrize(
    ("place", "count"), [("short", 4), ("legacy", 5)], ids=["in a directory", "in a checkpoint"]
)
def test_a_directory_that_goes_before_it_is_opened(
    request: pytest.FixtureRequest, short: Path, monkeypatch: pytest.MonkeyPatch, place: str, count: int
) -> None:
    temporary = request.getfixturevalue(place) / "ckpt-9_temp"
    temporary.mkdir()
    before_it_is_looked_at(monkeypatch, temporary, temporary.rmdir)
    found = survey(short)
    assert not temporary.exists()
    assert (found.errors, len(found.entries)) == ((), count)


def test_a_checkpoint_that_goes_before_it_is_looked_into(
    legacy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before_it_is_looked_into(monkeypatch, legacy, lambda: shutil.rmtree(legacy))
    found = survey(legacy.parent)
    assert not legacy.exists()
    assert (found.errors, len(found.entries)) == ((), 4)
