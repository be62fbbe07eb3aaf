"""Tensors that repeat what is stored: an expanded one of a terabyte may lie in four bytes."""

from __future__ import annotations

import math
from dataclasses import replace

from ckpttool.comparing.statistics import Statistics
from ckpttool.tensor import Tensor
from ckpttool.wire.strided import Strided

MAX_REPEATED_BYTES = 1 << 36
"""How much may be compared that is not stored: where both sides repeat, each in its own way."""


def once(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return both tensors without what both repeat along the same axes, and how often they repeated it."""
    if not isinstance(a.values, Strided) or not isinstance(b.values, Strided):
        return a, b, 1
    if not a.shape == b.shape == a.values.shape == b.values.shape:  # an arranged tensor's has more axes
        return a, b, 1
    axes = [
        axis
        for axis, length in enumerate(a.shape)
        if length > 1 and a.values.strides[axis] == b.values.strides[axis] == 0
    ]
    shape = tuple(1 if axis in axes else length for axis, length in enumerate(a.shape))
    times = math.prod(a.shape[axis] for axis in axes)
    return _of_shape(a, a.values, shape), _of_shape(b, b.values, shape), times


def _of_shape(tensor: Tensor, values: Strided, shape: tuple[int, ...]) -> Tensor:
    return replace(tensor, shape=shape, values=replace(values, shape=shape))


def is_endless(tensor: Tensor) -> bool:
    """Tell whether a tensor repeats so little so often that reading all of it would never end."""
    stored = tensor.storage.nbytes if tensor.storage is not None else tensor.nbytes
    return tensor.nbytes > MAX_REPEATED_BYTES and tensor.nbytes > 64 * stored


def repeated(found: Statistics, shape: tuple[int, ...], times: int) -> Statistics:
    """Return the statistics of tensors of ``shape``, from those of what they repeat."""
    root = math.sqrt(times)
    return replace(
        found,
        size=math.prod(shape),
        count=found.count * times,
        non_finite=found.non_finite * times,
        l2=found.l2 * root,
        norm_a=found.norm_a * root,
        norm_b=found.norm_b * root,
    )
