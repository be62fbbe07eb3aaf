"""What undo prints."""

from __future__ import annotations

import time

import pytest

from tests.support.golden import Golden
from tests.support.rendering import text_of
from tests.support.results import undone


def test_what_was_taken_back(golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    """The local time is that of a zone an hour ahead of UTC."""
    moved = {"run/ckpt-9": "run/model-9", "run/ckpt-10": "run/model-10"}
    try:
        monkeypatch.setenv("TZ", "CET-1")
        time.tzset()
        golden(
            {
                "a renaming": text_of(undone("rename", moved, pointers=("run/模型.txt",))),
                "the trash": text_of(undone("trash", {"run/a\nb.pt": "run/x"}, dry_run=True)),
                "pointers alone": text_of(undone("rename", pointers=("run/latest",))),
            }
        )
    finally:
        monkeypatch.undo()
        time.tzset()
