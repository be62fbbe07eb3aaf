"""SavedModels under the contract suite."""

from __future__ import annotations

from pathlib import Path

from tests.support.contracts import Contract

FILES = Path(__file__).parents[2] / "fixtures" / "files" / "savedmodel"
UNSAFE = "unsafe"  # refused on purpose; test_savedmodel.py looks at it


class TestSavedModel(Contract):
    format = "savedmodel"
    damages = min(80, Contract.damages)
    fixtures = tuple(sorted(path for path in FILES.iterdir() if path.is_dir() and path.name != UNSAFE))
