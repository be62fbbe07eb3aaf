"""Which layers of a Keras model have weights in another order than PyTorch's, as something was flattened.

The configuration is followed from layer to layer. If something is not plainly the same in PyTorch, a layer's
order is in doubt: what stands behind a Permute, a Reshape or a layer that is not Keras's, and what a Reshape
takes.

Source: Keras ``src/layers``, ``src/models/functional.py``; tf_keras ``src/engine/functional.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from ckpttool.containers.jsontext import objects
from ckpttool.core.layers import DoubtReason, LayoutDoubt
from ckpttool.formats.keras.layers import Flow, Layer, layers_listed_by, type_of

Place = tuple[str, ...]
"""The names of the models inside of which a layer lies, and its own."""
Way = Literal["input", "features", "series", "image", "flat", "unknown"]
SEQUENCE = 2
"""The axes of a sequence, without the batch; more are an image."""
_SEQUENTIAL = "Sequential"


class KernelOrder(NamedTuple):
    """Facts about the order of a layer's weights, as ``LayerKind`` has them."""

    flattened: tuple[int | None, ...] | None = None
    doubt: DoubtReason | None = None


def orders_in(model: Layer) -> dict[Place, KernelOrder]:
    """Return what is to be said of the layers whose weights are in another order, or may be."""
    walk = _ModelWalk()
    walk.through(model, (), _INPUT)
    return walk.orders


class _ModelWalk:
    """The way through a model, from what it takes to what it gives."""

    def __init__(self) -> None:
        self.orders: dict[Place, KernelOrder] = {}
        self._doubted: set[Place] = set()
        self._rules: dict[Flow | None, Callable[[Layer, Place, FeatureOrder], FeatureOrder]] = {
            Flow.SAME: lambda layer, place, given: given,
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
            Flow.REPEAT: lambda layer, place, given: given._replace(rank=SEQUENCE),
            Flow.RESHAPE: self._reshape,
            Flow.DISTRIBUTE: self._distributed,
        }

    def through(self, model: Layer, place: Place, given: FeatureOrder) -> FeatureOrder:
        """Return what a model gives for what it takes."""
        layers = layers_listed_by(model)
        if model.kind == _SEQUENTIAL:
            for layer in layers:
                given = self._layer(layer, place, [given])
            return given
        by_name = {layer.name: layer for layer in layers}
        origins = {
            name: [*dict.fromkeys(_input_layers(layer.node.get("inbound_nodes")))]
            for name, layer in by_name.items()
        }
        orders: dict[str, FeatureOrder] = {}
        for name in _layers_in_order(origins):
            inputs = [orders.get(origin, unknown_order("what is not told")) for origin in origins[name]]
            if not inputs and by_name[name].kind == "InputLayer":
                inputs = [given]
            orders[name] = self._layer(by_name[name], place, inputs)
        outputs = _input_layers(model.config.get("output_layers"))
        return merge_orders([orders[name] for name in outputs if name in orders])

    def _layer(self, layer: Layer, parent: Place, inputs: Sequence[FeatureOrder]) -> FeatureOrder:
        place = (*parent, layer.name)
        given = merge_orders(inputs, joined=layer.kind == "Concatenate")
        if not given.is_known and len(inputs) > 1:
            self._doubt(given.makers, LayoutDoubt.JOINED, given.cause or "a Flatten")
        if layer.is_model:
            return self.through(layer, place, given)
        rule = self._rules.get(type_of(layer.kind).flow) if layer.is_known else None
        if rule is not None:
            return rule(layer, place, given)
        self._doubt_inputs(place, given)
        self._doubt(given.makers, LayoutDoubt.OUTPUT_ORDER, f"a {layer.kind}")
        return unknown_order(f"a {layer.kind}", given.makers)

    def _doubt(self, places: Iterable[Place], doubt: LayoutDoubt, other: str = "") -> None:
        for place in places:
            if place not in self._doubted:  # the first reason counts
                self._doubted.add(place)
                self.orders[place] = KernelOrder(doubt=DoubtReason(doubt, other))

    def _doubt_inputs(self, place: Place, given: FeatureOrder) -> None:
        """Doubt a layer with weights if the order of the features that it takes is not known."""
        if not given.is_known:
            self._doubt([place], LayoutDoubt.INPUT_ORDER, "a Flatten" if given.way == "flat" else given.cause)

    # Layers with weights ------------------------------------------------------------------------------

    def _dense(self, layer: Layer, place: Place, given: FeatureOrder) -> FeatureOrder:
        if given.way == "flat":
            self.orders.setdefault(place, KernelOrder(flattened=given.flattened))
        else:
            self._doubt_inputs(place, given)
        rank = _rank(layer, given)
        is_open = given.way in ("image", "series") or (given.way == "input" and (rank or 0) > SEQUENCE)
        is_series = is_open and rank != 1
        return FeatureOrder("series" if is_series else "features", rank, makers=frozenset({place}))

    def _norm(self, layer: Layer, place: Place, given: FeatureOrder) -> FeatureOrder:
        self._doubt_inputs(place, given)
        axis = layer.config.get("axis")
        if isinstance(axis, list) and len(axis) > 1:
            self._doubt([place], LayoutDoubt.SEVERAL_AXES)
        return given._replace(makers=given.makers | {place})

    def _convolution(self, layer: Layer, place: Place, given: FeatureOrder) -> FeatureOrder:
        self._doubt_inputs(place, given)
        return convolved_order(given, layer.kind, layer.config)

    def _recurrent(self, layer: Layer, place: Place, given: FeatureOrder) -> FeatureOrder:
        self._doubt_inputs(place, given)
        inner = layer.config.get("layer")
        config = inner.get("config") if isinstance(inner, Mapping) else layer.config
        returned = config.get("return_sequences") if isinstance(config, Mapping) else None
        return FeatureOrder("features", SEQUENCE if returned else 1, makers=frozenset({place}))

    def _attention(self, layer: Layer, place: Place, given: FeatureOrder) -> FeatureOrder:
        self._doubt_inputs(place, given)
        is_plain = given.way in ("input", "features") and given.rank == SEQUENCE
        return FeatureOrder("features" if is_plain else "series", given.rank, makers=frozenset({place}))

    def _embedding(self, layer: Layer, place: Place, given: FeatureOrder) -> FeatureOrder:
        rank = _rank(layer, given)
        return FeatureOrder("features", None if rank is None else rank + 1, makers=frozenset({place}))

    def _distributed(self, layer: Layer, place: Place, given: FeatureOrder) -> FeatureOrder:
        inner = layer.config.get("layer")
        kind = inner.get("class_name") if isinstance(inner, Mapping) else None
        if kind == "Dense" and given.way != "flat":
            return self._dense(layer, place, given)
        self._doubt_inputs(place, given)
        return unknown_order("a TimeDistributed", given.makers | {place})

    # Layers without weights ---------------------------------------------------------------------------

    def _input(self, layer: Layer, place: Place, given: FeatureOrder) -> FeatureOrder:
        if len(place) > 1 and given != _INPUT:
            return given
        shape = layer.config.get("batch_shape", layer.config.get("batch_input_shape"))
        if not isinstance(shape, list) or not shape:
            return given
        last = shape[-1] if type(shape[-1]) is int and len(shape) > 1 else None
        return FeatureOrder("input", len(shape) - 1, channels=last)

    def _over_image(self, layer: Layer, place: Place, given: FeatureOrder) -> FeatureOrder:
        if layer.config.get("data_format") not in (None, "channels_last"):
            return unknown_order(f"a {layer.kind} of channels first", given.makers)
        if not given.is_known or given.way == "image":
            return given
        is_series = layer.kind.endswith("1D")
        return given._replace(way="series" if is_series else "image")

    def _global_pool(self, layer: Layer, place: Place, given: FeatureOrder) -> FeatureOrder:
        if layer.config.get("data_format") not in (None, "channels_last"):
            return unknown_order(f"a {layer.kind} of channels first", given.makers)
        rank = given.rank if layer.config.get("keepdims") else 1
        return given if not given.is_known else FeatureOrder("features", rank, makers=given.makers)

    def _flatten(self, layer: Layer, place: Place, given: FeatureOrder) -> FeatureOrder:
        if layer.config.get("data_format") == "channels_first":
            return unknown_order("a Flatten of channels first", given.makers)
        made = flattened_order(given, _shape(layer))
        if made.way == "flat" and given.way != "image":
            self._doubt(given.makers, LayoutDoubt.OUTPUT_ORDER, "a Flatten")
        return made

    def _reshape(self, layer: Layer, place: Place, given: FeatureOrder) -> FeatureOrder:
        made, is_moved = reshaped_order(given, layer.config.get("target_shape"), _shape(layer))
        if is_moved:
            self._doubt(given.makers, LayoutDoubt.OUTPUT_ORDER, "a Reshape")
        return made


def _shape(layer: Layer) -> list[int | None] | None:
    """Return the shape that a layer was built for, without the batch."""
    built = layer.node.get("build_config")
    shape = built.get("input_shape") if isinstance(built, Mapping) else None
    if not isinstance(shape, list) or not shape:
        return None
    return [length if type(length) is int else None for length in shape[1:]]


def _rank(layer: Layer, given: FeatureOrder) -> int | None:
    shape = _shape(layer)
    return given.rank if shape is None else len(shape)


# Connections ----------------------------------------------------------------------------------------


def _layers_in_order(origins: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield layers behind those that they take something from; what is in a cycle, in any order."""
    done: set[str] = set()
    for start in origins:
        pending = [(start, False)]
        entered: set[str] = set()
        while pending:
            name, is_left = pending.pop()
            if is_left:
                done.add(name)
                yield name
            elif name not in done and name not in entered:
                entered.add(name)
                pending.append((name, True))
                before = [origin for origin in origins[name] if origin in origins and origin not in done]
                pending += [(origin, False) for origin in before]


def _input_layers(inbound: object) -> Iterator[str]:
    """Yield the names of the layers that a layer takes something from."""
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


class FeatureOrder(NamedTuple):
    """What is known of a tensor between two layers.

    Attributes:
        way: ``features``: the last axis has features, and Flatten makes the same of it in both frameworks;
            ``series``: the last axis has features, and what Flatten makes can't be told; ``image``: the last
            axis has channels, which PyTorch has first; ``flat``: what Flatten made of an image; ``unknown``.
        rank: The number of axes without the batch, where it is known.
        flattened: Of ``flat``, the shape of the image, as ``LayerKind`` has it.
        cause: Of ``unknown``, the layer that makes it so: "a Lambda".
        channels: How many features an image has, where that is known.
        makers: The layers whose outputs stand along the last axis.
    """

    way: Way
    rank: int | None = None
    flattened: tuple[int | None, ...] = ()
    cause: str = ""
    channels: int | None = None
    makers: frozenset[Place] = frozenset()

    @property
    def is_known(self) -> bool:
        """Return whether the last axis has features in the order in which the layers before gave them."""
        return self.way not in ("flat", "unknown")


_INPUT = FeatureOrder("input")


def unknown_order(cause: str, makers: frozenset[Place] = frozenset()) -> FeatureOrder:
    """Return an order of which nothing is known; ``cause`` is the layer that makes it so."""
    return FeatureOrder("unknown", cause=cause, makers=makers)


def merge_orders(orders: Sequence[FeatureOrder], *, joined: bool = False) -> FeatureOrder:
    """Return the order of what is made of several tensors, element by element or joined along an axis."""
    makers = frozenset(maker for order in orders for maker in order.makers)
    first = orders[0] if orders else unknown_order("what is not told")
    if len(orders) < 2:
        return first._replace(makers=makers)
    unknown = next((order for order in orders if order.way == "unknown"), None)
    if unknown is not None:
        return unknown._replace(makers=makers)
    ways = {order.way for order in orders}
    ranks = {order.rank for order in orders}
    rank = None if None in ranks else max(rank for rank in ranks if rank is not None)
    if "flat" in ways:
        is_alike = not joined and len({(order.way, order.flattened) for order in orders}) == 1
        return first._replace(makers=makers) if is_alike else unknown_order("a Flatten", makers)
    channels = {order.channels for order in orders if order.way == "image"}
    known = channels.pop() if len(channels) == 1 and not joined else None
    strongest: tuple[Way, ...] = ("image", "series", "features", "input")
    way = next(way for way in strongest if way in ways)
    return FeatureOrder(way, rank, channels=known, makers=makers)


def flattened_order(given: FeatureOrder, shape: Sequence[int | None] | None) -> FeatureOrder:
    """Return the order behind a Flatten.

    Args:
        given: What it takes.
        shape: The shape of that without the batch, where it is known.
    """
    rank = given.rank if shape is None else len(shape)
    if given.way in ("flat", "unknown"):
        return given
    if rank is not None and rank < SEQUENCE:
        return given._replace(rank=1)
    if given.way != "image" and rank == SEQUENCE:
        return unknown_order("a Flatten", given.makers) if given.way == "series" else given._replace(rank=1)
    if given.way in ("features", "series") and rank is not None:
        return unknown_order("a Flatten", given.makers)
    if shape is not None and all(length is not None and length > 0 for length in shape):
        return FeatureOrder("flat", 1, tuple(shape))
    is_image = given.way == "image" or (rank is not None and rank > SEQUENCE)
    return FeatureOrder("flat", 1, (None, given.channels) if is_image and given.channels else ())


def reshaped_order(
    given: FeatureOrder, target: object, shape: Sequence[int | None] | None
) -> tuple[FeatureOrder, bool]:
    """Return the order behind a Reshape, and whether what made the features counts in another order.

    Args:
        given: What it takes.
        target: The shape that it makes, as a configuration says it.
        shape: The shape of what it takes without the batch, where it is known.
    """
    lengths = target if isinstance(target, list) else []
    if not all(type(length) is int for length in lengths):
        lengths = []
    rank = given.rank if shape is None else len(shape)
    if not lengths:
        return unknown_order("a Reshape", given.makers), True
    if len(lengths) == 1:
        if given.way == "image" and given.channels == lengths[0]:  # one place for each channel
            return FeatureOrder("features", 1, makers=given.makers), False
        return flattened_order(given, shape), False
    is_vector = given.way in ("features", "input") and rank in (1, None)
    if is_vector and all(length == 1 for length in lengths[:-1]):
        return given._replace(rank=len(lengths)), False
    if not is_vector:
        return unknown_order("a Reshape", given.makers), True
    if len(lengths) == SEQUENCE:
        return FeatureOrder("series", SEQUENCE), True
    return FeatureOrder("image", len(lengths), channels=lengths[-1] if lengths[-1] > 0 else None), True


def convolved_order(given: FeatureOrder, kind: str, config: Mapping[str, object]) -> FeatureOrder:
    """Return the order behind a convolution."""
    count = config.get("filters")
    if kind.startswith("Depthwise"):
        factor = config.get("depth_multiplier")
        count = given.channels * factor if given.channels and type(factor) is int else None
    channels = count if type(count) is int and count > 0 else None
    if config.get("data_format") not in (None, "channels_last"):
        return unknown_order(f"a {kind} of channels first")
    axes = next(int(digit) for digit in "123" if f"{digit}D" in kind)
    return FeatureOrder("image", axes + 1, channels=channels)
