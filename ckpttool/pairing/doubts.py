"""Weights that may lie in another order than PyTorch's, for all that the files say."""

from __future__ import annotations

from typing import NamedTuple

from ckpttool.checkpoint import Checkpoint
from ckpttool.formats.keras.kinds import UNWIRED as UNWIRED_KIND
from ckpttool.formats.keras.orders import UNLIKE
from ckpttool.pairing.families import family_of
from ckpttool.pairing.layers import Layer, layers_of
from ckpttool.tensor import Tensor

UNWIRED = "it may stand behind a Flatten or before a Reshape, and nothing says whether it does"
_UNTOLD = "Dense after Flatten"
_LEAST_IMAGE = 4
"""Two places with two channels: the fewest elements that have two orders."""


class Doubt(NamedTuple):
    """A weight that may be in another order than PyTorch's, and why."""

    tensor: Tensor
    why: str


def doubtful(checkpoint: Checkpoint) -> list[Doubt]:
    """Return the weights whose elements may be in another order than PyTorch's, for all that is known.

    What stands behind a Flatten or before a Reshape is in another order. The configuration of a model says
    where they are. Files of weights alone don't, and of a Dense in them only what is too small for an image
    is certain.
    """
    if family_of(checkpoint.conventions) == "paddle":
        return []
    found = {}
    for layer in layers_of(checkpoint):
        for name, tensor in layer.variables.items():
            kind = checkpoint.layers.get(tensor.name)
            if kind is not None and UNLIKE in kind:
                found[id(tensor)] = Doubt(tensor, kind.partition(UNLIKE)[2])
            elif (name, kind) == ("kernel", _UNTOLD):
                found[id(tensor)] = Doubt(tensor, "it stands behind a Flatten of a shape that is not told")
            elif name == "kernel" and not _is_wired(kind) and (why := _unknown(layer, tensor)):
                found[id(tensor)] = Doubt(tensor, why)
    return [found[id(tensor)] for tensor in checkpoint.tensors if id(tensor) in found]


def _is_wired(kind: str | None) -> bool:
    """Tell whether a configuration said how the layers are connected."""
    return kind is not None and UNWIRED_KIND not in kind


def _unknown(layer: Layer, kernel: Tensor) -> str | None:
    """Return what is not known of a kernel where nothing says how the layers are connected."""
    if layer.kind == "dense" and len(kernel.shape) == 2 and may_be_image(*kernel.shape):
        return UNWIRED
    if layer.kind == "gru" and "bias" not in layer.variables:
        return "a GRU without a bias does not show whether reset_after is set"
    return None


def may_be_image(*lengths: int) -> bool:
    """Tell whether features as many as one of these may be an image: places, each with channels."""
    return max(lengths) >= _LEAST_IMAGE
