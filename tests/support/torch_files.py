"""Files that PyTorch writes; tests that use them are skipped without it."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")


def saved(path: Path, content: object, *, is_zip: bool = True) -> Path:
    """Return a path at which PyTorch has saved something, in the form of now or in the one before."""
    torch.save(content, path, _use_new_zipfile_serialization=is_zip)
    return path
