"""In which order a tensor has its features on its way through a model of Keras, as against PyTorch.

Source: Keras ``src/layers``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

Place = tuple[str, ...]
Way = Literal["input", "features", "series", "image", "flat", "untold"]

UNLIKE = " unlike PyTorch's: "
"""Stands between the class of a layer and why its weights may be in another order than PyTorch's."""
BEFORE = "stands before it"
SEQUENCE = 2
"""The axes of a sequence, without the batch; more are an image."""

AS_THEY_ARE = frozenset(
    (
        *("Activation", "ActivityRegularization", "AlphaDropout", "Dropout", "ELU", "GaussianDropout"),
        *("GaussianNoise", "Identity", "LeakyReLU", "Masking", "ReLU", "Rescaling", "Softmax"),
        *("SpatialDropout1D", "SpatialDropout2D", "SpatialDropout3D", "UnitNormalization"),
    )
)
"""Layers behind which each element is where it was."""
NORMS = frozenset(
    (
        *("BatchNormalization", "SyncBatchNormalization", "LayerNormalization", "GroupNormalization"),
        *("RMSNormalization", "Normalization", "PReLU"),
    )
)
"""Layers with weights for each feature, behind which each element is where it was."""
_MOVING = ("MaxPooling", "AveragePooling", "ZeroPadding", "Cropping", "UpSampling")
OVER_IMAGES = frozenset(f"{kind}{axes}D" for kind in _MOVING for axes in (1, 2, 3)) | {
    *("CenterCrop", "RandomCrop", "RandomFlip", "RandomRotation", "RandomZoom", "Resizing"),
}
"""Layers without weights that work along all axes but the channels."""
CONVOLUTIONS = frozenset(
    f"{kind}{axes}D{ending}"
    for kind in ("Conv", "SeparableConv", "DepthwiseConv")
    for axes in (1, 2, 3)
    for ending in ("", "Transpose")
)
GLOBAL_POOLS = frozenset(f"Global{kind}Pooling{axes}D" for kind in ("Max", "Average") for axes in (1, 2, 3))
RECURRENT = frozenset({"LSTM", "GRU", "SimpleRNN", "RNN", "Bidirectional"})
ATTENTIONS = frozenset(
    {"MultiHeadAttention", "Attention", "AdditiveAttention", "GroupQueryAttention", "GroupedQueryAttention"}
)
MERGES = frozenset({"Add", "Average", "Maximum", "Minimum", "Multiply", "Subtract"})


class Order(NamedTuple):
    """What is known of a tensor between two layers.

    Attributes:
        way: ``features``: the last axis has features, and Flatten makes the same of it in both frameworks;
            ``series``: the last axis has features, and what Flatten makes can't be told; ``image``: the last
            axis has channels, which PyTorch has first; ``flat``: what Flatten made of an image; ``untold``.
        rank: The number of axes without the batch, where it is known.
        said: Of ``flat``, the shape of the image as text; of ``untold``, what makes it so.
        channels: How many features an image has, where that is known.
        makers: The layers whose outputs stand along the last axis.
    """

    way: Way
    rank: int | None = None
    said: str = ""
    channels: int | None = None
    makers: frozenset[Place] = frozenset()

    @property
    def is_known(self) -> bool:
        """Tell whether the last axis has features in the order in which the layers before gave them."""
        return self.way not in ("flat", "untold")

    @property
    def why(self) -> str:
        """Return why features may be in another order than PyTorch's."""
        return f"a Flatten {BEFORE}" if self.way == "flat" else f"{self.said} {BEFORE}"


def untold(said: str, makers: frozenset[Place] = frozenset()) -> Order:
    """Return an order of which nothing is known, because of what."""
    return Order("untold", said=said, makers=makers)


def merged(orders: Sequence[Order], *, joined: bool = False) -> Order:
    """Return the order of what is made of several tensors, element by element or joined along an axis."""
    makers = frozenset(maker for one in orders for maker in one.makers)
    first = orders[0] if orders else untold("what is not told")
    if len(orders) < 2:
        return first._replace(makers=makers)
    unknown = next((one for one in orders if one.way == "untold"), None)
    if unknown is not None:
        return unknown._replace(makers=makers)
    ways = {one.way for one in orders}
    ranks = {one.rank for one in orders}
    rank = None if None in ranks else max(one for one in ranks if one is not None)
    if "flat" in ways:
        is_one = not joined and len({(one.way, one.said) for one in orders}) == 1
        return first._replace(makers=makers) if is_one else untold("a Flatten", makers)
    channels = {one.channels for one in orders if one.way == "image"}
    known = channels.pop() if len(channels) == 1 and not joined else None
    order: tuple[Way, ...] = ("image", "series", "features", "input")
    way = next(one for one in order if one in ways)
    return Order(way, rank, channels=known, makers=makers)


def flattened(given: Order, shape: Sequence[int | None] | None) -> Order:
    """Return the order behind a Flatten.

    Args:
        given: What it takes.
        shape: The shape of that without the batch, where it is known.
    """
    rank = given.rank if shape is None else len(shape)
    if given.way in ("flat", "untold"):
        return given
    if rank is not None and rank < SEQUENCE:
        return given._replace(rank=1)
    if given.way != "image" and rank == SEQUENCE:
        return untold("a Flatten", given.makers) if given.way == "series" else given._replace(rank=1)
    if given.way in ("features", "series") and rank is not None:
        return untold("a Flatten", given.makers)
    told = shape is not None and all(length is not None and length > 0 for length in shape)
    if told:
        return Order("flat", 1, f"({', '.join(map(str, shape or ()))})")
    is_image = given.way == "image" or (rank is not None and rank > SEQUENCE)
    return Order("flat", 1, f"(*, {given.channels})" if is_image and given.channels else "")


def reshaped(given: Order, target: object, shape: Sequence[int | None] | None) -> tuple[Order, bool]:
    """Return the order behind a Reshape, and whether what made the features counts in another order.

    Args:
        given: What it takes.
        target: The shape that it makes, as a configuration says it.
        shape: The shape of what it takes without the batch, where it is known.
    """
    lengths = target if isinstance(target, list) and all(type(one) is int for one in target) else None
    rank = given.rank if shape is None else len(shape)
    if not lengths:
        return untold("a Reshape", given.makers), True
    if len(lengths) == 1:
        if given.way == "image" and given.channels == lengths[0]:  # one place for each channel
            return Order("features", 1, makers=given.makers), False
        return flattened(given, shape), False
    is_vector = given.way in ("features", "input") and rank in (1, None)
    if is_vector and all(length == 1 for length in lengths[:-1]):
        return given._replace(rank=len(lengths)), False
    if not is_vector:
        return untold("a Reshape", given.makers), True
    if len(lengths) == SEQUENCE:
        return Order("series", SEQUENCE), True
    return Order("image", len(lengths), channels=lengths[-1] if lengths[-1] > 0 else None), True


def convolved(given: Order, kind: str, config: Mapping[str, object]) -> Order:
    """Return the order behind a convolution."""
    count = config.get("filters")
    if kind.startswith("Depthwise"):
        factor = config.get("depth_multiplier")
        count = given.channels * factor if given.channels and type(factor) is int else None
    channels = count if type(count) is int and count > 0 else None
    if config.get("data_format") not in (None, "channels_last"):
        return untold(f"a {kind} of channels first")
    found = next(int(axes) for axes in "123" if f"{axes}D" in kind)
    return Order("image", found + 1, channels=channels)
