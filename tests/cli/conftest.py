"""A place without configurations, and a series to work on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing above the test's own directory is looked at."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def series(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory of ten epochs, below the working directory."""
    shutil.copytree(files / "series", tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    return Path("run")
