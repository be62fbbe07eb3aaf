"""Which layers of a Keras model have weights in another order than PyTorch's, as something was flattened.

The configuration is followed from layer to layer. What is not plainly the same in PyTorch is told so: what
stands behind a Permute, a Reshape or a layer that is not Keras's, and what a Reshape takes.

Source: Keras ``src/models/functional.py``, ``src/layers/reshaping``; tf_keras ``src/engine/functional.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from ckpttool.formats.keras.layers import Layer, listed
from ckpttool.formats.keras.orders import (
    AS_THEY_ARE,
    ATTENTIONS,
    CONVOLUTIONS,
    GLOBAL_POOLS,
    MERGES,
    NORMS,
    OVER_IMAGES,
    RECURRENT,
    SEQUENCE,
    UNLIKE,
    Order,
    Place,
    convolved,
    flattened,
    merged,
    reshaped,
    untold,
)
from ckpttool.wire.jsontext import objects

_SEQUENTIAL = "Sequential"
_INPUT = Order("input")


def orders_in(model: Layer) -> dict[Place, str]:
    """Return what is to be said of layers whose weights are in another order, or may be.

    The keys are the names of the models inside of which a layer lies, and its own. Of a Dense that takes
    flattened images that is their shape, `` after Flatten (4, 3, 4)``, or ``(*, 4)`` where only the channels
    are told; of others why nobody can tell, behind ``UNLIKE``.
    """
    walk = _Walk()
    walk.through(model, (), _INPUT)
    return walk.told


class _Walk:
    """The way through a model."""

    def __init__(self) -> None:
        self.told: dict[Place, str] = {}
        self._rules: dict[str, Callable[[Layer, Place, Order], Order]] = {
            **dict.fromkeys(AS_THEY_ARE, lambda layer, place, given: given),
            **dict.fromkeys(NORMS, self._norm),
            **dict.fromkeys(OVER_IMAGES, self._over_image),
            **dict.fromkeys(CONVOLUTIONS, self._convolution),
            **dict.fromkeys(GLOBAL_POOLS, self._global_pool),
            **dict.fromkeys(RECURRENT, self._recurrent),
            **dict.fromkeys(ATTENTIONS, self._attention),
            **dict.fromkeys(MERGES, lambda layer, place, given: given),
            "Concatenate": lambda layer, place, given: given,
            "Dense": self._dense,
            "Embedding": self._embedding,
            "Flatten": self._flatten,
            "InputLayer": self._input,
            "RepeatVector": lambda layer, place, given: given._replace(rank=SEQUENCE),
            "Reshape": self._reshape,
            "TimeDistributed": self._distributed,
        }

    def through(self, model: Layer, place: Place, given: Order) -> Order:
        """Return what a model gives for what it takes."""
        if model.kind == _SEQUENTIAL:
            for layer in listed(model):
                given = self._layer(layer, place, [given])
            return given
        layers = {layer.name: layer for layer in listed(model)}
        origins = {
            name: [*dict.fromkeys(_origins(one.node.get("inbound_nodes")))] for name, one in layers.items()
        }
        found: dict[str, Order] = {}
        for name in _sorted(origins):
            before = [found.get(one, untold("what is not told")) for one in origins[name]]
            is_input = layers[name].kind == "InputLayer"
            found[name] = self._layer(layers[name], place, before or ([given] if is_input else []))
        ends = [found[name] for name in _origins(model.config.get("output_layers")) if name in found]
        return merged(ends)

    def _layer(self, layer: Layer, place: Place, before: Sequence[Order]) -> Order:
        own = (*place, layer.name)
        given = merged(before, joined=layer.kind == "Concatenate")
        if not given.is_known and len(before) > 1:
            self._mark(given.makers, f"it is joined with what {given.said or 'a Flatten'} gives")
        if layer.is_model:
            return self.through(layer, own, given)
        rule = self._rules.get(layer.kind) if layer.is_known else None
        if rule is not None:
            return rule(layer, own, given)
        self._mark({own}, given.why if not given.is_known else "")
        self._mark(given.makers, f"a {layer.kind} takes what it gives")
        return untold(f"a {layer.kind}", given.makers)

    def _mark(self, places: Sequence[Place] | frozenset[Place] | set[Place], why: str) -> None:
        for place in places if why else ():
            if UNLIKE not in self.told.get(place, ""):
                self.told[place] = UNLIKE + why

    def _weighted(self, place: Place, given: Order) -> None:
        if not given.is_known:
            self._mark({place}, given.why)

    # Layers with weights ------------------------------------------------------------------------------

    def _dense(self, layer: Layer, place: Place, given: Order) -> Order:
        if given.way == "flat":
            self.told.setdefault(place, f" after Flatten {given.said}".rstrip())
        else:
            self._weighted(place, given)
        rank = _rank(layer, given)
        is_open = given.way in ("image", "series") or (given.way == "input" and (rank or 0) > SEQUENCE)
        is_series = is_open and rank != 1
        return Order("series" if is_series else "features", rank, makers=frozenset({place}))

    def _norm(self, layer: Layer, place: Place, given: Order) -> Order:
        self._weighted(place, given)
        axis = layer.config.get("axis")
        if isinstance(axis, list) and len(axis) > 1:
            self._mark({place}, "it has weights along several axes")
        return given._replace(makers=given.makers | {place})

    def _convolution(self, layer: Layer, place: Place, given: Order) -> Order:
        self._weighted(place, given)
        return convolved(given, layer.kind, layer.config)

    def _recurrent(self, layer: Layer, place: Place, given: Order) -> Order:
        self._weighted(place, given)
        inner = layer.config.get("layer")
        config = inner.get("config") if isinstance(inner, Mapping) else layer.config
        returned = config.get("return_sequences") if isinstance(config, Mapping) else None
        return Order("features", SEQUENCE if returned else 1, makers=frozenset({place}))

    def _attention(self, layer: Layer, place: Place, given: Order) -> Order:
        self._weighted(place, given)
        is_plain = given.way in ("input", "features") and given.rank == SEQUENCE
        return Order("features" if is_plain else "series", given.rank, makers=frozenset({place}))

    def _embedding(self, layer: Layer, place: Place, given: Order) -> Order:
        rank = _rank(layer, given)
        return Order("features", None if rank is None else rank + 1, makers=frozenset({place}))

    def _distributed(self, layer: Layer, place: Place, given: Order) -> Order:
        inner = layer.config.get("layer")
        kind = inner.get("class_name") if isinstance(inner, Mapping) else None
        if kind == "Dense" and given.way != "flat":
            return self._dense(layer, place, given)
        self._weighted(place, given)
        return untold("a TimeDistributed", given.makers | {place})

    # Layers without weights ---------------------------------------------------------------------------

    def _input(self, layer: Layer, place: Place, given: Order) -> Order:
        if len(place) > 1 and given != _INPUT:
            return given
        shape = layer.config.get("batch_shape", layer.config.get("batch_input_shape"))
        if not isinstance(shape, list) or not shape:
            return given
        last = shape[-1] if type(shape[-1]) is int and len(shape) > 1 else None
        return Order("input", len(shape) - 1, channels=last)

    def _over_image(self, layer: Layer, place: Place, given: Order) -> Order:
        if layer.config.get("data_format") not in (None, "channels_last"):
            return untold(f"a {layer.kind} of channels first", given.makers)
        if not given.is_known or given.way == "image":
            return given
        is_series = layer.kind.endswith("1D")
        return given._replace(way="series" if is_series else "image")

    def _global_pool(self, layer: Layer, place: Place, given: Order) -> Order:
        if layer.config.get("data_format") not in (None, "channels_last"):
            return untold(f"a {layer.kind} of channels first", given.makers)
        rank = given.rank if layer.config.get("keepdims") else 1
        return given if not given.is_known else Order("features", rank, makers=given.makers)

    def _flatten(self, layer: Layer, place: Place, given: Order) -> Order:
        if layer.config.get("data_format") == "channels_first":
            return untold("a Flatten of channels first", given.makers)
        made = flattened(given, _shape(layer))
        if made.way == "flat":
            self._mark(given.makers if given.way != "image" else (), "a Flatten takes what it gives")
        return made

    def _reshape(self, layer: Layer, place: Place, given: Order) -> Order:
        made, is_moved = reshaped(given, layer.config.get("target_shape"), _shape(layer))
        if is_moved:
            self._mark(given.makers, "a Reshape takes what it gives")
        return made


def _shape(layer: Layer) -> list[int | None] | None:
    """Return the shape that a layer was built for, without the batch."""
    built = layer.node.get("build_config")
    shape = built.get("input_shape") if isinstance(built, Mapping) else None
    if not isinstance(shape, list) or not shape:
        return None
    return [length if type(length) is int else None for length in shape[1:]]


def _rank(layer: Layer, given: Order) -> int | None:
    shape = _shape(layer)
    return given.rank if shape is None else len(shape)


# Connections ------------------------------------------------------------------------------------------


def _sorted(origins: Mapping[str, Sequence[str]]) -> Iterator[str]:
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
                pending += [(one, False) for one in origins[name] if one in origins and one not in done]


def _origins(inbound: object) -> Iterator[str]:
    """Yield the names of the layers that a layer takes something from."""
    for one in objects(inbound):
        history = one.get("keras_history")
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
