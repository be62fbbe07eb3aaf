"""What writers of several containers need."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from ckpttool.io.work import Calls, pool_of_calls


@pytest.fixture
def crew() -> Iterator[Calls]:
    """Return three threads that write."""
    made = pool_of_calls(3)
    yield made
    made.close()


def _at_once(descriptor: int) -> None:
    """Stand in for a synchronisation that takes time: what lies in the system's cache survives a kill."""


@pytest.fixture
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing wait for a disk."""
    monkeypatch.setattr(os, "fsync", _at_once)
