"""What undo prints."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.support.rendering import text_of
from tests.support.results import undone


@pytest.fixture(autouse=True)
def zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the local time be that of a zone an hour ahead of UTC."""
    monkeypatch.setenv("TZ", "CET-1")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def test_a_renaming() -> None:
    done = undone(
        "rename",
        {"run/ckpt-9": "run/model-9", "run/ckpt-10": "run/model-10"},
        pointers=("run/模型.txt",),
    )
    assert text_of(done) == (
        "rename of 2026-01-02 04:04:05+01:00\n"
        "  run/ckpt-9    was model-9\n"
        "  run/ckpt-10   was model-10\n"
        "  run/模型.txt  rewritten\n"
        "restored 2 checkpoints"
    )


def test_one_out_of_the_trash() -> None:
    done = undone("trash", {"run/a\nb.pt": "run/x"}, dry_run=True)
    assert text_of(done) == (
        "prune --trash of 2026-01-02 04:04:05+01:00\n"
        "  run/a\\nb.pt  from the trash\nwould restore 1 checkpoint"
    )


def test_pointers_alone() -> None:
    done = undone("rename", pointers=("run/latest",))
    assert text_of(done) == (
        "rename of 2026-01-02 04:04:05+01:00\n"
        "  run/latest  rewritten\n"
        "restored 1 pointer; no checkpoint had moved"
    )
