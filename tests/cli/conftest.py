"""What the tests of configurations share."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from ckpttool.cli.verify_config import VerifyConfig, read_config


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing above the test's own directory is looked at."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text), "utf-8")
    path.chmod(0o644)
    return path


def told(text: str) -> VerifyConfig:
    """Return what a configuration in the current directory says."""
    write(Path("ckpttool.toml"), text)
    return read_config("ckpttool.toml")
