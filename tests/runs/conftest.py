"""Directories of checkpoints: what waits for writers or locks waits for no clock."""

from __future__ import annotations

import pytest

from tests.support.faults import retry_at_once


@pytest.fixture(autouse=True)
def _never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    retry_at_once(monkeypatch.setattr)
