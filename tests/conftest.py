"""What several test modules share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.register_assert_rewrite("ckpttool.testing")

FIXTURES = Path(__file__).parents[1] / "fixtures" / "files"


class Answer(NamedTuple):
    """What a command answered."""

    status: int
    out: str
    err: str


Run = Callable[..., Answer]


@pytest.fixture(scope="session")
def files() -> Path:
    """Return the directory of the fixtures."""
    return FIXTURES


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return what runs a command in this process."""
    for name in ("CKPTTOOL_DEBUG", "NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)

    def answer(*arguments: object) -> Answer:
        from ckpttool.cli import run as run_command

        capsys.readouterr()
        status = run_command([str(argument) for argument in arguments])
        return Answer(status, *capsys.readouterr())

    return answer
