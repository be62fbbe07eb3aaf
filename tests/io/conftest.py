"""What writers of several containers need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ckpttool.storage.work import Calls, pool_of_calls


@pytest.fixture
def crew() -> Iterator[Calls]:
    """Return three threads that write."""
    made = pool_of_calls(3)
    yield made
    made.close()
