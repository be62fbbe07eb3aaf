"""Families of formats: those of one share their names and layouts of weights."""

from __future__ import annotations

from typing import Literal

Family = Literal["torch", "keras", "paddle"]

_FAMILIES: dict[str, Family] = {
    "tensorflow": "keras",
    "savedmodel": "keras",
    "keras": "keras",
    "keras-h5": "keras",
    "fluid": "paddle",
    "paddle": "paddle",
}


def family_of(format: str) -> Family:
    """Return the family of a format; plain containers hold PyTorch's names more often than not."""
    return _FAMILIES.get(format, "torch")
