"""What the framework that wrote a fixture says about it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.tensor import Tensor

Truth = Mapping[str, Any]
Description = dict[tuple[str | int, ...], tuple[str, tuple[int, ...]]]


def read_truth(path: Path) -> Truth:
    """Return what the framework says about a fixture."""
    text = path.with_name(f"{path.name}.expected.json").read_text(encoding="utf-8")
    truth: Truth = json.loads(text)
    return truth


def described(checkpoint: Checkpoint) -> Description:
    """Return dtype and shape of each tensor, by path."""
    return {tensor.path: (tensor.dtype.name, tensor.shape) for tensor in checkpoint.tensors}


def expected_digests(truth: Truth) -> dict[tuple[str | int, ...], str]:
    """Return the SHA-256 of each tensor's elements, by path, where the framework could tell it."""
    return {tuple(tensor["path"]): tensor["sha256"] for tensor in truth["tensors"] if tensor["sha256"]}


def digest(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's elements in C order, little-endian."""
    return hashlib.sha256(tensor.tobytes()).hexdigest()


def refuse(constant: str) -> NoReturn:
    """Refuse what is no JSON: NaN and the infinities."""
    raise AssertionError(f"{constant} is no JSON")
