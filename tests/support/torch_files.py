"""Files that PyTorch writes; tests that use them are skipped without it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")


def saved(path: Path, content: object, *, is_zip: bool = True) -> Path:
    """Return a path at which PyTorch has saved something, in the form of now or in the one before."""
    torch.save(content, path, _use_new_zipfile_serialization=is_zip)
    return path


def of_every_type(names: Iterable[str]) -> dict[str, Any]:
    """Return tensors of each type: some elements, one of them, and none."""
    held = {}
    for name in names:
        data = bytes(range(48)) if name != "bool" else bytes([0, 1]) * 24
        whole = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(getattr(torch, name))
        held |= {f"{name}.some": whole, f"{name}.one": whole[0], f"{name}.none": whole[:0].reshape(0, 3)}
    return held
