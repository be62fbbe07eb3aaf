"""Finds the layers of a Keras model whose weights have another order than PyTorch's, because of a Flatten.

PyTorch flattens an image with the channels first, Keras with the channels last: the rows of the Dense after
it are in another order. The features are followed through the configuration, from layer to layer. The order
of a layer is in doubt after a Permute, a Reshape or a layer that is not Keras's, and before a Reshape.
``weights/pairing/layouts.py`` reorders the weights (``FLATTEN``).

Source: Keras ``src/layers``, ``src/models/functional.py``; tf_keras ``src/engine/functional.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from ckpttool.containers.jsontext import objects
from ckpttool.core.layers import DoubtReason, LayoutDoubt
from ckpttool.formats.keras.layers import Flow

if TYPE_CHECKING:
    from ckpttool.formats.keras.layer_tree import Layer, Steps

OrderKind = Literal["input", "features", "series", "image", "flat", "unknown"]
_SEQUENCE = 2
"""Number of axes of a sequence, without the batch; an image has more."""


class KernelOrder(NamedTuple):
    """Facts about the order of a layer's weights, as ``LayerKind`` has them."""

    flattened: tuple[int | None, ...] | None = None
    doubt: DoubtReason | None = None


def orders_in(model: Layer) -> dict[Steps, KernelOrder]:
    """Return the order of weights in the layers of a model where it differs from PyTorch's, or may."""
    walk = _ModelWalk()
    walk.through(model, _INPUT)
    return walk.orders


class _ModelWalk:
    """Follows the features through a model, from its input to its output."""

    def __init__(self) -> None:
        self.orders: dict[Steps, KernelOrder] = {}
        self._doubted: set[Steps] = set()
        self._doubted_makers: dict[int, Makers] = {}
        self._rules: dict[Flow | None, Callable[[Layer, FeatureOrder], FeatureOrder]] = {
            Flow.SAME: lambda layer, order: order,
            Flow.NORM: self._norm,
            Flow.SPATIAL: self._over_image,
            Flow.CONVOLUTION: self._convolution,
            Flow.GLOBAL_POOL: self._global_pool,
            Flow.RECURRENT: self._recurrent,
            Flow.ATTENTION: self._attention,
            Flow.DENSE: self._dense,
            Flow.EMBEDDING: self._embedding,
            Flow.FLATTEN: self._flatten,
            Flow.INPUT: self._input,
            Flow.REPEAT: lambda layer, order: order._replace(rank=_SEQUENCE),
            Flow.RESHAPE: self._reshape,
            Flow.DISTRIBUTE: self._distributed,
        }

    def through(self, model: Layer, order: FeatureOrder) -> FeatureOrder:
        """Return the order of a model's output for the order of its input."""
        # A Sequential's layers follow each other. Others have ``inbound_nodes``, from which each layer is
        # computed after the layers before it, as Keras does.
        if model.cls == "Sequential":
            for layer in model.layers:
                order = self._layer(layer, [order])
            return order
        layers = {layer.name: layer for layer in model.layers}
        origins = {
            name: [*dict.fromkeys(_input_layers(layer.node.get("inbound_nodes")))]
            for name, layer in layers.items()
        }
        orders: dict[str, FeatureOrder] = {}
        for name in _sorted_by_origin(origins):
            inputs = [orders.get(origin, _unknown("an unknown layer")) for origin in origins[name]]
            if not inputs and layers[name].cls == "InputLayer":
                inputs = [order]
            orders[name] = self._layer(layers[name], inputs)
        outputs = _input_layers(model.config.get("output_layers"))
        return _merged([orders[name] for name in outputs if name in orders])

    def _layer(self, layer: Layer, inputs: Sequence[FeatureOrder]) -> FeatureOrder:
        # A layer without a rule may reorder its features, so its own weights, the features after it and the
        # weights of the layers that made its input are all in doubt.
        order = _merged(inputs, joined=layer.cls == "Concatenate")
        if not order.is_known and len(inputs) > 1:
            self._doubt_makers(order, LayoutDoubt.JOINED, order.cause or "a Flatten")
        if layer.is_model:
            return self.through(layer, order)
        rule = self._rules.get(layer.type.flow) if layer.is_known else None
        if rule is not None:
            return rule(layer, order)
        self._doubt_inputs(layer, order)
        self._doubt_makers(order, LayoutDoubt.OUTPUT_ORDER, f"a {layer.cls}")
        return _unknown(f"a {layer.cls}", order.makers)

    def _doubt(self, path: Steps, doubt: LayoutDoubt, other: str = "") -> None:
        if path not in self._doubted:  # the first reason counts
            self._doubted.add(path)
            self.orders[path] = KernelOrder(doubt=DoubtReason(doubt, other))

    def _doubt_makers(self, order: FeatureOrder, doubt: LayoutDoubt, other: str) -> None:
        # Makers are compared by identity, and kept so that no other gets the same id: equality would walk
        # the whole chain.
        pending = [order.makers]
        while pending:
            makers = pending.pop()
            if id(makers) not in self._doubted_makers:  # those before them were doubted, too
                self._doubted_makers[id(makers)] = makers
                pending += makers.before
                if makers.path is not None:
                    self._doubt(makers.path, doubt, other)

    def _doubt_inputs(self, layer: Layer, order: FeatureOrder) -> None:
        """Doubt the weights of a layer if the order of its input features is not known."""
        if not order.is_known:
            cause = "a Flatten" if order.kind == "flat" else order.cause
            self._doubt(layer.path, LayoutDoubt.INPUT_ORDER, cause)

    # Layers with weights ------------------------------------------------------------------------------

    def _dense(self, layer: Layer, order: FeatureOrder) -> FeatureOrder:
        if order.kind == "flat":
            self.orders.setdefault(layer.path, KernelOrder(flattened=order.flattened))
        else:
            self._doubt_inputs(layer, order)
        # A Dense on an image makes features along the last axis. Where PyTorch's network has this axis at a
        # later Flatten isn't known: it may have kept the channels first around a Linear.
        rank = _rank(layer, order)
        is_open = order.kind in ("image", "series") or (order.kind == "input" and (rank or 0) > _SEQUENCE)
        return _made_by(layer, "series" if is_open and rank != 1 else "features", rank)

    def _norm(self, layer: Layer, order: FeatureOrder) -> FeatureOrder:
        self._doubt_inputs(layer, order)
        axis = layer.config.get("axis")
        if isinstance(axis, list) and len(axis) > 1:
            self._doubt(layer.path, LayoutDoubt.SEVERAL_AXES)
        return order._replace(makers=Makers(layer.path, (order.makers,)))

    def _convolution(self, layer: Layer, order: FeatureOrder) -> FeatureOrder:
        self._doubt_inputs(layer, order)
        if _is_channels_first(layer):
            return _unknown(f"a {layer.cls} of channels first")
        # Whatever the input was, the output is an image with the filters as channels. A depthwise convolution
        # makes ``depth_multiplier`` channels of each channel, so their number is known only if that of the
        # input is.
        count = layer.config.get("filters")
        if layer.cls.startswith("Depthwise"):
            factor = layer.config.get("depth_multiplier")
            count = order.channels * factor if order.channels and type(factor) is int else None
        axes = next(int(digit) for digit in "123" if f"{digit}D" in layer.cls)
        return FeatureOrder("image", axes + 1, channels=count if type(count) is int and count > 0 else None)

    def _recurrent(self, layer: Layer, order: FeatureOrder) -> FeatureOrder:
        self._doubt_inputs(layer, order)
        inner = layer.config.get("layer")
        config = inner.get("config") if isinstance(inner, Mapping) else layer.config
        returned = config.get("return_sequences") if isinstance(config, Mapping) else None
        return _made_by(layer, "features", _SEQUENCE if returned else 1)

    def _attention(self, layer: Layer, order: FeatureOrder) -> FeatureOrder:
        self._doubt_inputs(layer, order)
        # Over a sequence both frameworks have the features along the last axis. Over more axes PyTorch's
        # network may have had the channels first, so a later Flatten is in doubt.
        is_plain = order.kind in ("input", "features") and order.rank == _SEQUENCE
        return _made_by(layer, "features" if is_plain else "series", order.rank)

    def _embedding(self, layer: Layer, order: FeatureOrder) -> FeatureOrder:
        rank = _rank(layer, order)
        return _made_by(layer, "features", None if rank is None else rank + 1)

    def _distributed(self, layer: Layer, order: FeatureOrder) -> FeatureOrder:
        inner = layer.config.get("layer")
        cls = inner.get("class_name") if isinstance(inner, Mapping) else None
        if cls == "Dense" and order.kind != "flat":
            return self._dense(layer, order)
        self._doubt_inputs(layer, order)
        return _unknown("a TimeDistributed", Makers(layer.path, (order.makers,)))

    # Layers without weights ---------------------------------------------------------------------------

    def _input(self, layer: Layer, order: FeatureOrder) -> FeatureOrder:
        if len(layer.path) > 1 and order != _INPUT:
            return order
        shape = layer.config.get("batch_shape", layer.config.get("batch_input_shape"))
        if not isinstance(shape, list) or not shape:
            return order
        last = shape[-1] if type(shape[-1]) is int and len(shape) > 1 else None
        return FeatureOrder("input", len(shape) - 1, channels=last)

    def _over_image(self, layer: Layer, order: FeatureOrder) -> FeatureOrder:
        if _is_channels_first(layer):
            return _unknown(f"a {layer.cls} of channels first", order.makers)
        if not order.is_known or order.kind == "image":
            return order
        return order._replace(kind="series" if layer.cls.endswith("1D") else "image")

    def _global_pool(self, layer: Layer, order: FeatureOrder) -> FeatureOrder:
        if _is_channels_first(layer):
            return _unknown(f"a {layer.cls} of channels first", order.makers)
        # One value is left of each channel, so there is nothing for a Flatten to reorder, even if
        # ``keepdims`` leaves axes of length 1.
        rank = order.rank if layer.config.get("keepdims") else 1
        return FeatureOrder("features", rank, makers=order.makers) if order.is_known else order

    def _flatten(self, layer: Layer, order: FeatureOrder) -> FeatureOrder:
        if layer.config.get("data_format") == "channels_first":
            return _unknown("a Flatten of channels first", order.makers)
        # Behaviour differs for images only, whose order follows from their shape. If it isn't sure that the
        # input is an image, the layers that made its features are in doubt.
        made = _flattened(order, _lengths(layer))
        if made.kind == "flat" and order.kind != "image":
            self._doubt_makers(order, LayoutDoubt.OUTPUT_ORDER, "a Flatten")
        return made

    def _reshape(self, layer: Layer, order: FeatureOrder) -> FeatureOrder:
        # A Reshape to one axis is a Flatten, and one that adds axes of length 1 moves nothing. Any other
        # divides the features, in Keras into places with all channels of each, in PyTorch into whole
        # channels. So the rows of the layers that made them would have to be in another order.
        target = layer.config.get("target_shape")
        lengths = target if isinstance(target, list) and all(type(one) is int for one in target) else []
        if len(lengths) == 1:
            if order.kind == "image" and order.channels == lengths[0]:  # one place for each channel
                return FeatureOrder("features", 1, makers=order.makers)
            return _flattened(order, _lengths(layer))
        is_vector = order.kind in ("features", "input") and _rank(layer, order) in (1, None)
        if lengths and is_vector and all(length == 1 for length in lengths[:-1]):
            return order._replace(rank=len(lengths))
        self._doubt_makers(order, LayoutDoubt.OUTPUT_ORDER, "a Reshape")
        if not lengths or not is_vector:
            return _unknown("a Reshape", order.makers)
        if len(lengths) == _SEQUENCE:
            return FeatureOrder("series", _SEQUENCE)
        return FeatureOrder("image", len(lengths), channels=lengths[-1] if lengths[-1] > 0 else None)


def _is_channels_first(layer: Layer) -> bool:
    return layer.config.get("data_format") not in (None, "channels_last")


def _lengths(layer: Layer) -> list[int | None] | None:
    """Return the input shape that a layer was built for, without the batch; None if it is not known."""
    shape = layer.built_for
    return None if shape is None else [length if type(length) is int else None for length in shape[1:]]


def _rank(layer: Layer, order: FeatureOrder) -> int | None:
    shape = layer.built_for
    return order.rank if shape is None else len(shape) - 1


# Connections ----------------------------------------------------------------------------------------


def _sorted_by_origin(origins: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield layers after the layers before them; those in a cycle, in any order."""
    # A depth-first search with a stack: a hostile configuration may be a chain of any length. A layer is
    # pushed again below its origins, marked, and is yielded when the mark is popped.
    done: set[str] = set()
    for start in origins:
        pending = [(start, False)]
        entered: set[str] = set()
        while pending:
            name, are_origins_done = pending.pop()
            if are_origins_done:
                done.add(name)
                yield name
            elif name not in done and name not in entered:
                entered.add(name)
                pending.append((name, True))
                before = [origin for origin in origins[name] if origin in origins and origin not in done]
                pending += [(origin, False) for origin in before]


def _input_layers(inbound: object) -> Iterator[str]:
    """Yield the names of the layers whose outputs a layer takes."""
    for call in objects(inbound):
        history = call.get("keras_history")
        if isinstance(history, list) and history and isinstance(history[0], str):
            yield history[0]
    pending = [inbound]
    while pending:  # Keras 2: [[["flatten", 0, 0, {}]]]
        node = pending.pop()
        if isinstance(node, list) and len(node) in (3, 4) and isinstance(node[0], str):
            yield node[0]
            pending += node[3:]
        elif isinstance(node, list):
            pending += node
        elif isinstance(node, Mapping) and "class_name" not in node:
            pending += node.values()


# The order of features between two layers -----------------------------------------------------------


class Makers(NamedTuple):
    """Layers whose outputs are along one axis: one, and those before it."""

    # A linked list: a tuple of all of them would be copied for each norm of a chain, of any length.
    path: Steps | None = None
    before: tuple[Makers, ...] = ()


NO_MAKERS = Makers()


class FeatureOrder(NamedTuple):
    """Order of the features of a tensor between two layers.

    Attributes:
        kind: ``features``: features along the last axis, which both frameworks flatten alike; ``series``:
            features along the last axis, which they may flatten differently; ``image``: channels along the
            last axis, which PyTorch has first; ``flat``: a flattened image; ``input``: the model's input;
            ``unknown``.
        rank: Number of axes without the batch; None if it is not known.
        flattened: Shape of the image before a Flatten, as in ``LayerKind``; for ``flat`` only.
        cause: The layer that makes the order unknown: "a Lambda"; for ``unknown`` only.
        channels: Number of channels of an image; None if it is not known.
        makers: The layers whose outputs are along the last axis.
    """

    kind: OrderKind
    rank: int | None = None
    flattened: tuple[int | None, ...] = ()
    cause: str = ""
    channels: int | None = None
    makers: Makers = NO_MAKERS

    @property
    def is_known(self) -> bool:
        """Whether the features along the last axis are in the order of the layers that made them."""
        return self.kind not in ("flat", "unknown")


_INPUT = FeatureOrder("input")


def _unknown(cause: str, makers: Makers = NO_MAKERS) -> FeatureOrder:
    return FeatureOrder("unknown", cause=cause, makers=makers)


def _made_by(layer: Layer, kind: OrderKind, rank: int | None) -> FeatureOrder:
    return FeatureOrder(kind, rank, makers=Makers(layer.path))


def _merged(orders: Sequence[FeatureOrder], *, joined: bool = False) -> FeatureOrder:
    """Return the order of several tensors combined, element by element or joined along an axis."""
    # The kind that is surest to differ from PyTorch's wins: added to an image, anything is an image. Flat
    # images can be added if they have one shape; joined with anything, they are unknown.
    first = orders[0] if orders else _unknown("an unknown layer")
    if len(orders) < 2:
        return first
    known_makers = tuple(order.makers for order in orders if order.makers is not NO_MAKERS)
    makers = Makers(before=known_makers) if known_makers else NO_MAKERS
    unknown = next((order for order in orders if order.kind == "unknown"), None)
    if unknown is not None:
        return unknown._replace(makers=makers)
    kinds = {order.kind for order in orders}
    ranks = {order.rank for order in orders}
    rank = None if None in ranks else max(rank for rank in ranks if rank is not None)
    if "flat" in kinds:
        is_alike = not joined and len({(order.kind, order.flattened) for order in orders}) == 1
        return first._replace(makers=makers) if is_alike else _unknown("a Flatten", makers)
    channels = {order.channels for order in orders if order.kind == "image"}
    known = channels.pop() if len(channels) == 1 and not joined else None
    strongest: tuple[OrderKind, ...] = ("image", "series", "features", "input")
    kind = next(kind for kind in strongest if kind in kinds)
    return FeatureOrder(kind, rank, channels=known, makers=makers)


def _flattened(order: FeatureOrder, shape: Sequence[int | None] | None) -> FeatureOrder:
    """Return the order after a Flatten.

    Args:
        order: Order of the features before it.
        shape: Their shape without the batch, if it is known.
    """
    # A vector is unchanged. Both frameworks flatten a sequence alike, unless it was an image or may have been
    # one (``series``). An image is reordered: by its shape if that is known in full, else by its channels.
    rank = order.rank if shape is None else len(shape)
    if order.kind in ("flat", "unknown"):
        return order
    if rank is not None and rank < _SEQUENCE:
        return order._replace(rank=1)
    if order.kind != "image" and rank == _SEQUENCE:
        return _unknown("a Flatten", order.makers) if order.kind == "series" else order._replace(rank=1)
    if order.kind in ("features", "series") and rank is not None:
        return _unknown("a Flatten", order.makers)
    if shape is not None and all(length is not None and length > 0 for length in shape):
        return FeatureOrder("flat", 1, tuple(shape))
    is_image = order.kind == "image" or (rank is not None and rank > _SEQUENCE)
    return FeatureOrder("flat", 1, (None, order.channels) if is_image and order.channels else ())
