"""Which layers of a Keras model have weights in another order than PyTorch's, as something was flattened.

PyTorch flattens channels first, Keras last: the rows of a Dense after a Flatten are in another order. The
configuration is followed from layer to layer. If something is not plainly the same in PyTorch, a layer's
order is in doubt: that of a layer after a Permute, a Reshape or a layer that is not Keras's, and of those
whose output a Reshape takes. ``weights/pairing/layouts.py`` turns the weights (``FLATTEN``).

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

Way = Literal["input", "features", "series", "image", "flat", "unknown"]
_SEQUENCE = 2
"""Number of axes of a sequence, without the batch; more are an image."""


class KernelOrder(NamedTuple):
    """Facts about the order of a layer's weights, as ``LayerKind`` has them."""

    flattened: tuple[int | None, ...] | None = None
    doubt: DoubtReason | None = None


def orders_in(model: Layer) -> dict[Steps, KernelOrder]:
    """Return the layers of a model whose weights are in another order, or may be."""
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
            Flow.SAME: lambda layer, given: given,
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
            Flow.REPEAT: lambda layer, given: given._replace(rank=_SEQUENCE),
            Flow.RESHAPE: self._reshape,
            Flow.DISTRIBUTE: self._distributed,
        }

    def through(self, model: Layer, given: FeatureOrder) -> FeatureOrder:
        """Return the order of a model's output for that of its input."""
        if model.cls == "Sequential":
            for layer in model.layers:
                given = self._layer(layer, [given])
            return given
        layers = {layer.name: layer for layer in model.layers}
        origins = {
            name: [*dict.fromkeys(_input_layers(layer.node.get("inbound_nodes")))]
            for name, layer in layers.items()
        }
        orders: dict[str, FeatureOrder] = {}
        for name in _sorted_by_origin(origins):
            inputs = [orders.get(origin, _unknown("what is not told")) for origin in origins[name]]
            if not inputs and layers[name].cls == "InputLayer":
                inputs = [given]
            orders[name] = self._layer(layers[name], inputs)
        outputs = _input_layers(model.config.get("output_layers"))
        return _merged([orders[name] for name in outputs if name in orders])

    def _layer(self, layer: Layer, inputs: Sequence[FeatureOrder]) -> FeatureOrder:
        given = _merged(inputs, joined=layer.cls == "Concatenate")
        if not given.is_known and len(inputs) > 1:
            self._doubt_makers(given, LayoutDoubt.JOINED, given.cause or "a Flatten")
        if layer.is_model:
            return self.through(layer, given)
        rule = self._rules.get(layer.type.flow) if layer.is_known else None
        if rule is not None:
            return rule(layer, given)
        self._doubt_inputs(layer, given)
        self._doubt_makers(given, LayoutDoubt.OUTPUT_ORDER, f"a {layer.cls}")
        return _unknown(f"a {layer.cls}", given.makers)

    def _doubt(self, path: Steps, doubt: LayoutDoubt, other: str = "") -> None:
        if path not in self._doubted:  # the first reason counts
            self._doubted.add(path)
            self.orders[path] = KernelOrder(doubt=DoubtReason(doubt, other))

    def _doubt_makers(self, given: FeatureOrder, doubt: LayoutDoubt, other: str) -> None:
        pending = [given.makers]
        while pending:
            makers = pending.pop()
            if id(makers) not in self._doubted_makers:  # those before them were doubted, too
                self._doubted_makers[id(makers)] = makers
                pending += makers.before
                if makers.path is not None:
                    self._doubt(makers.path, doubt, other)

    def _doubt_inputs(self, layer: Layer, given: FeatureOrder) -> None:
        """Doubt a layer with weights if the order of the features that it takes is not known."""
        if not given.is_known:
            cause = "a Flatten" if given.way == "flat" else given.cause
            self._doubt(layer.path, LayoutDoubt.INPUT_ORDER, cause)

    # Layers with weights ------------------------------------------------------------------------------

    def _dense(self, layer: Layer, given: FeatureOrder) -> FeatureOrder:
        if given.way == "flat":
            self.orders.setdefault(layer.path, KernelOrder(flattened=given.flattened))
        else:
            self._doubt_inputs(layer, given)
        rank = _rank(layer, given)
        is_open = given.way in ("image", "series") or (given.way == "input" and (rank or 0) > _SEQUENCE)
        return _made_by(layer, "series" if is_open and rank != 1 else "features", rank)

    def _norm(self, layer: Layer, given: FeatureOrder) -> FeatureOrder:
        self._doubt_inputs(layer, given)
        axis = layer.config.get("axis")
        if isinstance(axis, list) and len(axis) > 1:
            self._doubt(layer.path, LayoutDoubt.SEVERAL_AXES)
        return given._replace(makers=Makers(layer.path, (given.makers,)))

    def _convolution(self, layer: Layer, given: FeatureOrder) -> FeatureOrder:
        self._doubt_inputs(layer, given)
        if _is_channels_first(layer):
            return _unknown(f"a {layer.cls} of channels first")
        count = layer.config.get("filters")
        if layer.cls.startswith("Depthwise"):
            factor = layer.config.get("depth_multiplier")
            count = given.channels * factor if given.channels and type(factor) is int else None
        axes = next(int(digit) for digit in "123" if f"{digit}D" in layer.cls)
        return FeatureOrder("image", axes + 1, channels=count if type(count) is int and count > 0 else None)

    def _recurrent(self, layer: Layer, given: FeatureOrder) -> FeatureOrder:
        self._doubt_inputs(layer, given)
        inner = layer.config.get("layer")
        config = inner.get("config") if isinstance(inner, Mapping) else layer.config
        returned = config.get("return_sequences") if isinstance(config, Mapping) else None
        return _made_by(layer, "features", _SEQUENCE if returned else 1)

    def _attention(self, layer: Layer, given: FeatureOrder) -> FeatureOrder:
        self._doubt_inputs(layer, given)
        is_plain = given.way in ("input", "features") and given.rank == _SEQUENCE
        return _made_by(layer, "features" if is_plain else "series", given.rank)

    def _embedding(self, layer: Layer, given: FeatureOrder) -> FeatureOrder:
        rank = _rank(layer, given)
        return _made_by(layer, "features", None if rank is None else rank + 1)

    def _distributed(self, layer: Layer, given: FeatureOrder) -> FeatureOrder:
        inner = layer.config.get("layer")
        cls = inner.get("class_name") if isinstance(inner, Mapping) else None
        if cls == "Dense" and given.way != "flat":
            return self._dense(layer, given)
        self._doubt_inputs(layer, given)
        return _unknown("a TimeDistributed", Makers(layer.path, (given.makers,)))

    # Layers without weights ---------------------------------------------------------------------------

    def _input(self, layer: Layer, given: FeatureOrder) -> FeatureOrder:
        if len(layer.path) > 1 and given != _INPUT:
            return given
        shape = layer.config.get("batch_shape", layer.config.get("batch_input_shape"))
        if not isinstance(shape, list) or not shape:
            return given
        last = shape[-1] if type(shape[-1]) is int and len(shape) > 1 else None
        return FeatureOrder("input", len(shape) - 1, channels=last)

    def _over_image(self, layer: Layer, given: FeatureOrder) -> FeatureOrder:
        if _is_channels_first(layer):
            return _unknown(f"a {layer.cls} of channels first", given.makers)
        if not given.is_known or given.way == "image":
            return given
        return given._replace(way="series" if layer.cls.endswith("1D") else "image")

    def _global_pool(self, layer: Layer, given: FeatureOrder) -> FeatureOrder:
        if _is_channels_first(layer):
            return _unknown(f"a {layer.cls} of channels first", given.makers)
        rank = given.rank if layer.config.get("keepdims") else 1
        return FeatureOrder("features", rank, makers=given.makers) if given.is_known else given

    def _flatten(self, layer: Layer, given: FeatureOrder) -> FeatureOrder:
        if layer.config.get("data_format") == "channels_first":
            return _unknown("a Flatten of channels first", given.makers)
        made = _flattened(given, _lengths(layer))
        if made.way == "flat" and given.way != "image":
            self._doubt_makers(given, LayoutDoubt.OUTPUT_ORDER, "a Flatten")
        return made

    def _reshape(self, layer: Layer, given: FeatureOrder) -> FeatureOrder:
        target = layer.config.get("target_shape")
        lengths = target if isinstance(target, list) and all(type(one) is int for one in target) else []
        if len(lengths) == 1:
            if given.way == "image" and given.channels == lengths[0]:  # one place for each channel
                return FeatureOrder("features", 1, makers=given.makers)
            return _flattened(given, _lengths(layer))
        is_vector = given.way in ("features", "input") and _rank(layer, given) in (1, None)
        if lengths and is_vector and all(length == 1 for length in lengths[:-1]):
            return given._replace(rank=len(lengths))
        self._doubt_makers(given, LayoutDoubt.OUTPUT_ORDER, "a Reshape")
        if not lengths or not is_vector:
            return _unknown("a Reshape", given.makers)
        if len(lengths) == _SEQUENCE:
            return FeatureOrder("series", _SEQUENCE)
        return FeatureOrder("image", len(lengths), channels=lengths[-1] if lengths[-1] > 0 else None)


def _is_channels_first(layer: Layer) -> bool:
    return layer.config.get("data_format") not in (None, "channels_last")


def _lengths(layer: Layer) -> list[int | None] | None:
    """Return the shape that a layer was built for, without the batch; None if it is not known."""
    shape = layer.built_for
    return None if shape is None else [length if type(length) is int else None for length in shape[1:]]


def _rank(layer: Layer, given: FeatureOrder) -> int | None:
    shape = layer.built_for
    return given.rank if shape is None else len(shape) - 1


# Connections ----------------------------------------------------------------------------------------


def _sorted_by_origin(origins: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield layers after those that they take something from; those in a cycle, in any order."""
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


class Makers(NamedTuple):
    """Layers whose outputs are along one axis: one, and those before it.

    They are linked, not joined: each norm in a chain adds itself, and there may be any number.
    """

    path: Steps | None = None
    before: tuple[Makers, ...] = ()


NO_MAKERS = Makers()


class FeatureOrder(NamedTuple):
    """Order of the features of a tensor between two layers.

    Attributes:
        way: ``features``: the last axis has features, and Flatten makes the same of it in both frameworks;
            ``series``: the last axis has features, and what Flatten makes can't be told; ``image``: the last
            axis has channels, which PyTorch has first; ``flat``: what Flatten made of an image; ``unknown``.
        rank: The number of axes without the batch, where it is known.
        flattened: Of ``flat``, the shape of the image, as ``LayerKind`` has it.
        cause: Of ``unknown``, the layer that makes it so: "a Lambda".
        channels: How many features an image has, where that is known.
        makers: The layers whose outputs are along the last axis.
    """

    way: Way
    rank: int | None = None
    flattened: tuple[int | None, ...] = ()
    cause: str = ""
    channels: int | None = None
    makers: Makers = NO_MAKERS

    @property
    def is_known(self) -> bool:
        """Return whether the last axis has features in the order in which the layers before gave them."""
        return self.way not in ("flat", "unknown")


_INPUT = FeatureOrder("input")


def _unknown(cause: str, makers: Makers = NO_MAKERS) -> FeatureOrder:
    """Return an order of which nothing is known; ``cause`` is the layer that makes it so."""
    return FeatureOrder("unknown", cause=cause, makers=makers)


def _made_by(layer: Layer, way: Way, rank: int | None) -> FeatureOrder:
    """Return the order of features that a layer makes."""
    return FeatureOrder(way, rank, makers=Makers(layer.path))


def _merged(orders: Sequence[FeatureOrder], *, joined: bool = False) -> FeatureOrder:
    """Return the order of several tensors combined, element by element or joined along an axis."""
    first = orders[0] if orders else _unknown("what is not told")
    if len(orders) < 2:
        return first
    known_makers = tuple(order.makers for order in orders if order.makers is not NO_MAKERS)
    makers = Makers(before=known_makers) if known_makers else NO_MAKERS
    unknown = next((order for order in orders if order.way == "unknown"), None)
    if unknown is not None:
        return unknown._replace(makers=makers)
    ways = {order.way for order in orders}
    ranks = {order.rank for order in orders}
    rank = None if None in ranks else max(rank for rank in ranks if rank is not None)
    if "flat" in ways:
        is_alike = not joined and len({(order.way, order.flattened) for order in orders}) == 1
        return first._replace(makers=makers) if is_alike else _unknown("a Flatten", makers)
    channels = {order.channels for order in orders if order.way == "image"}
    known = channels.pop() if len(channels) == 1 and not joined else None
    strongest: tuple[Way, ...] = ("image", "series", "features", "input")
    way = next(way for way in strongest if way in ways)
    return FeatureOrder(way, rank, channels=known, makers=makers)


def _flattened(given: FeatureOrder, shape: Sequence[int | None] | None) -> FeatureOrder:
    """Return the order after a Flatten of features in a shape, without the batch; None if it is not known."""
    rank = given.rank if shape is None else len(shape)
    if given.way in ("flat", "unknown"):
        return given
    if rank is not None and rank < _SEQUENCE:
        return given._replace(rank=1)
    if given.way != "image" and rank == _SEQUENCE:
        return _unknown("a Flatten", given.makers) if given.way == "series" else given._replace(rank=1)
    if given.way in ("features", "series") and rank is not None:
        return _unknown("a Flatten", given.makers)
    if shape is not None and all(length is not None and length > 0 for length in shape):
        return FeatureOrder("flat", 1, tuple(shape))
    is_image = given.way == "image" or (rank is not None and rank > _SEQUENCE)
    return FeatureOrder("flat", 1, (None, given.channels) if is_image and given.channels else ())
