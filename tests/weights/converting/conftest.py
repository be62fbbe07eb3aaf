"""What several tests of conversions start from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.twins import unpacked


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with one network in every framework."""
    return unpacked("others", tmp_path_factory.mktemp("twins"))
