"""Tensors of PyTorch with what hangs on them: attributes, and bits that say how they are to be read.

Source: PyTorch ``torch/_tensor.py``, ``torch/_utils.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpttool.formats.content.trees import Leaf
from ckpttool.tensor import Path, Role
from ckpttool.wire.signs import SignFlipped

if TYPE_CHECKING:
    from ckpttool.formats.torch.objects import TensorParts


def with_attributes(
    found: Leaf[TensorParts], attributes: Iterable[tuple[Path, TensorParts]]
) -> Leaf[TensorParts]:
    """Return a tensor with those that hang on it, which are no part of a model's state."""
    told = ((path, replace(parts, role=Role.OTHER)) for path, parts in attributes)
    return replace(found, tensors=(*found.tensors, *told))


def resolved_bits(found: Leaf[TensorParts], bits: object) -> Leaf[TensorParts]:
    """Return a tensor with its lazy conjugation and negation carried out when it is read."""
    if not isinstance(bits, dict) or not (bits.get("conj") or bits.get("neg")):
        return found
    ((path, parts),) = found.tensors
    if parts.values is None:
        return found
    values = SignFlipped(parts.values, parts.dtype, bool(bits.get("conj")), bool(bits.get("neg")))
    identity = (parts.identity, bool(bits.get("conj")), bool(bits.get("neg")))
    return Leaf(((path, replace(parts, values=values, extent=None, identity=identity)),))
