"""What a trainer takes away while a directory is looked at is nothing to complain of."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from ckpttool.formats import discovery
from ckpttool.series.surveying import survey as surveying
from ckpttool.series.surveying.survey import survey_directory


@pytest.fixture
def legacy(files: Path, short: Path) -> Path:
    """Return a directory with a checkpoint that is a directory, in which others may lie."""
    shutil.copytree(files / "fluid" / "root" / "checkpoint_3", short / "checkpoint_3")
    return short / "checkpoint_3"


@pytest.mark.parametrize(
    ("place", "room", "count"),
    [("short", discovery, 4), ("legacy", surveying, 5)],
    ids=["in a directory", "in a checkpoint"],
)
def test_a_directory_that_goes_before_it_is_opened(
    request: pytest.FixtureRequest,
    short: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    room: ModuleType,
    count: int,
) -> None:
    temporary = request.getfixturevalue(place) / "ckpt-9_temp"
    temporary.mkdir()
    unit_at = room.unit_at

    def vanishing(path: str) -> object:
        if path == str(temporary):
            os.rmdir(path)
        return unit_at(path)

    monkeypatch.setattr(room, "unit_at", vanishing)
    found = survey_directory(str(short))
    assert not temporary.exists()
    assert (found.errors, len(found.entries)) == ((), count)


def test_a_checkpoint_that_goes_before_it_is_looked_into(
    legacy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan = surveying.scan

    def vanishing(path: str) -> object:
        if path == str(legacy):
            shutil.rmtree(path)
        return scan(path)

    monkeypatch.setattr(surveying, "scan", vanishing)
    found = survey_directory(str(legacy.parent))
    assert not legacy.exists()
    assert (found.errors, len(found.entries)) == ((), 4)
