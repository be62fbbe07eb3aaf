"""Expected values of a fixture, from the framework that wrote it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.tensor import Tensor

if TYPE_CHECKING:
    import numpy as np

Truth = Mapping[str, Any]
Description = dict[tuple[str | int, ...], tuple[str, tuple[int, ...]]]


def read_truth(path: Path) -> Truth:
    """Return the expected values of a fixture."""
    truth: Truth = json.loads(_truth_of(path).read_text(encoding="utf-8"))
    return truth


def write_truth(path: Path, format: str, tensors: Mapping[str, np.ndarray[Any, Any]], **more: object) -> None:
    """Write the expected values of a fixture.

    Args:
        path: The fixture.
        format: Name of the format.
        tensors: Arrays by name, in the order of the file, as the framework reads them.
        more: Other keys, such as ``variant`` or ``training``.
    """
    # Digests instead of values keep fixtures small; a fixed order of bytes makes them the same on any
    # machine.
    rows = [
        {
            "path": [name],
            "dtype": array.dtype.name,
            "shape": array.shape,
            "sha256": hashlib.sha256(array.astype(array.dtype.newbyteorder("<")).tobytes()).hexdigest(),
        }
        for name, array in tensors.items()
    ]
    document = json.dumps({"format": format, **more, "tensors": rows}, indent=2)
    _truth_of(path).write_text(f"{document}\n", encoding="utf-8")


def _truth_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.expected.json")


def described(checkpoint: Checkpoint) -> Description:
    """Return dtype and shape of each tensor, by path."""
    return {tensor.path: (tensor.dtype.name, tensor.shape) for tensor in checkpoint.tensors}


def expected_digests(truth: Truth) -> dict[tuple[str | int, ...], str]:
    """Return the SHA-256 of each tensor's elements by path; without tensors that the framework can't read."""
    return {tuple(tensor["path"]): tensor["sha256"] for tensor in truth["tensors"] if tensor["sha256"]}


def digest(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's elements in C order, little-endian."""
    return hashlib.sha256(tensor.tobytes()).hexdigest()


def refuse(constant: str) -> NoReturn:
    """Fail for NaN and the infinities, which JSON doesn't have."""
    raise AssertionError(f"{constant} is not valid JSON")
