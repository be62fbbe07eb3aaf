"""Numbers that checkpoints hold as tensors: read when they are asked for, and as people wrote them."""

from __future__ import annotations

import math
import struct

from ckpttool.core.tensor import Tensor
from ckpttool.core.training import Scalar

_SCALARS = {"float64": "<d", "float32": "<f", "float16": "<e"}


def lazy_scalar(tensor: Tensor) -> Scalar:
    """Return what reads the one element of a tensor, as a number; None where the file doesn't hold it."""

    def read() -> float | int | None:
        data = tensor.tobytes()
        if len(data) != tensor.nbytes:
            return None
        if tensor.dtype.name in _SCALARS:
            (number,) = struct.unpack(_SCALARS[tensor.dtype.name], data)
            return float(number) if tensor.dtype.name == "float64" else shortest(number)
        if tensor.dtype.name == "bfloat16":
            (number,) = struct.unpack("<f", b"\0\0" + data)
            return float(f"{number:.3g}")
        if tensor.dtype.kind == "integer":
            return int.from_bytes(data, "little", signed=tensor.dtype.name.startswith("int"))
        return None

    return read


def shortest(number: float) -> float:
    """Return the shortest decimal that is the same float32: 0.02 where the bits say 0.0199999996."""
    if not math.isfinite(number):
        return number
    same = struct.pack("<f", number)
    candidates = (float(f"{number:.{digits}g}") for digits in range(6, 10))
    return next(short for short in candidates if struct.pack("<f", short) == same)
