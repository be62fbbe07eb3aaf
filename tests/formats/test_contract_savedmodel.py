"""SavedModels under the contract suite."""

from __future__ import annotations

from pathlib import Path

from ckpttool.testing import FormatContract

FILES = Path(__file__).parents[2] / "fixtures" / "files" / "savedmodel"
UNSAFE = "unsafe"  # refused on purpose; test_savedmodel.py looks at it


class TestSavedModel(FormatContract):
    format = "savedmodel"
    damages = 80
    fixtures = tuple(sorted(path for path in FILES.iterdir() if path.is_dir() and path.name != UNSAFE))
