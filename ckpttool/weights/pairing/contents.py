"""What tensors hold: a few elements spread over each, and the checksum of all where several have these."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from isal import isal_zlib

from ckpttool.core.errors import CheckpointError
from ckpttool.core.tensor import Tensor
from ckpttool.weights.pairing.layouts import LayoutItem
from ckpttool.weights.pairing.rearrangement import elements

_SAMPLES = 16
_SMALL = 1 << 12
"""Bytes that are read faster as a whole than element by element."""


def sample(tensor: Tensor) -> bytes | None:
    """Return some elements, or a checksum of few or packed ones; None where they can't be read."""
    if tensor.dtype.bits < 8 or tensor.nbytes <= _SMALL:
        total = checksum(tensor)
        return None if total is None else total.to_bytes(4, "little")
    last = tensor.size - 1
    positions = sorted({at * last // (_SAMPLES - 1) for at in range(_SAMPLES)})
    try:
        return elements(tensor, positions)
    except CheckpointError:  # whoever compares it says what is wrong
        return None


def checksum(tensor: Tensor) -> int | None:
    """Return the CRC-32 of all elements; None where they can't be read."""
    total = 0
    try:
        for block in tensor.blocks():
            total = isal_zlib.crc32(block, total)
    except CheckpointError:
        return None
    return total


def same_content(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors of one side hold the same; what can't be read doesn't."""
    if (a.dtype, a.shape) != (b.dtype, b.shape) or a.values is None or b.values is None:
        return False
    total = checksum(a)
    return total is not None and total == checksum(b)


def same_samples(items: Iterable[LayoutItem]) -> list[list[LayoutItem]]:
    """Return those of one type and shape that have the same sample, where there are several."""
    groups: dict[Hashable, list[LayoutItem]] = {}
    for item in items:
        tensor = item.tensor
        held = sample(tensor) if tensor.values is not None and tensor.size else None
        if held is not None:
            groups.setdefault((tensor.dtype.name, tensor.shape, held), []).append(item)
    return [group for group in groups.values() if len(group) > 1]


def same_checksums(items: Iterable[LayoutItem]) -> list[list[LayoutItem]]:
    """Return those of one sample that are equal in all elements, where there are several."""
    groups: dict[Hashable, list[LayoutItem]] = {}
    for item in items:
        total = checksum(item.tensor)
        if total is not None:
            groups.setdefault(total, []).append(item)
    return [group for group in groups.values() if len(group) > 1]
