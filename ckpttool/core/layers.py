"""Types of layers, with the facts that decide the order of elements in their weights."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from ckpttool.core.report import Sentence


class LayoutDoubt(Enum):
    """Reasons why a weight may have another layout than PyTorch's; the values are those of sidecars.

    Each but the last two is about the order of elements. ``{}`` in ``text`` is the other layer.
    """

    INPUT_ORDER = "input-order"
    OUTPUT_ORDER = "output-order"
    JOINED = "joined"
    SEVERAL_AXES = "several-axes"
    FLATTENED_SHAPE = "flattened-shape"
    UNWIRED = "unwired"
    RESET = "reset"
    RESET_UNKNOWN = "reset-unknown"

    @property
    def text(self) -> str:
        """Template of the message."""
        return _TEXTS[self]

    @property
    def is_about_order(self) -> bool:
        """Whether the order of elements is in doubt, and not the arithmetic of a GRU."""
        return self not in (LayoutDoubt.RESET, LayoutDoubt.RESET_UNKNOWN)


# Sidecars record the values of ``LayoutDoubt``, so these texts may change. Those of version 0.1, which
# recorded its sentences, are parsed by separate patterns in ``formats.layer_documents``.
_TEXTS = {
    LayoutDoubt.INPUT_ORDER: "it follows {}",
    LayoutDoubt.OUTPUT_ORDER: "{} uses its output",
    LayoutDoubt.JOINED: "it is joined with the output of {}",
    LayoutDoubt.SEVERAL_AXES: "it has weights along several axes",
    LayoutDoubt.FLATTENED_SHAPE: "it follows a Flatten of unknown shape",
    LayoutDoubt.UNWIRED: "it may follow a Flatten or precede a Reshape, which isn't recorded",
    LayoutDoubt.RESET: "reset_after is not set",
    LayoutDoubt.RESET_UNKNOWN: "a GRU without a bias does not show whether reset_after is set",
}


class DoubtReason(NamedTuple):
    """A doubt, and the other layer that it comes from: "a Reshape"."""

    doubt: LayoutDoubt
    other: str = ""

    @property
    def text(self) -> Sentence:
        """Message of the doubt."""
        return Sentence(self.doubt.text.format(self.other))


UNWIRED = DoubtReason(LayoutDoubt.UNWIRED)


class LayerKind(NamedTuple):
    """Type of the layer that a weight belongs to, as its framework calls it.

    Attributes:
        cls: Class of Keras (``Dense``), or operator of Paddle (``conv2d``).
        missing: Weights that a norm is configured without: ``gamma``, ``beta``.
        reset_after: Whether a GRU applies its reset gate after the multiplication, as PyTorch's does.
        flattened: Shape of the image that a Flatten before the layer takes, without the batch; ``(None, 4)``
            if only the channels are known, ``()`` if nothing is; None without a Flatten.
        doubt: Reason why the order of elements may be another than PyTorch's; None if it is known.
    """

    cls: str
    missing: tuple[str, ...] = ()
    reset_after: bool = True
    flattened: tuple[int | None, ...] | None = None
    doubt: DoubtReason | None = None
