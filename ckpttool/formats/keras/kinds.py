"""Which layer of Keras each weight belongs to: told by a configuration, or by groups named after classes.

A layer is known where it is one of Keras's own and has the weights that its class has when nobody changed
them: not quantized, not adapted. Of wrappers and models, what is inside them is told.

Source: Keras ``src/legacy/saving/legacy_h5_format.py``, ``src/saving/saving_lib.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

from ckpttool.core.tensor import Role, Tensor
from ckpttool.formats.keras.layers import (
    LAYERS,
    LAYERS_KEY,
    Group,
    Layer,
    layer_of,
    layers_listed_by,
    layers_with_groups,
    snake_case,
    type_of,
    weights_of,
)
from ckpttool.formats.keras.orders import KernelOrder, Place, orders_in

_GROUPS = {
    snake_case(kind, words): kind
    for kind, known in LAYERS.items()
    if known.shapes is not None and not known.wraps and kind != "StackedRNNCells"
    for words in ("[a-z]+", "[a-z0-9]+")
}
_COUNT = re.compile(r"_[0-9]+$")
UNLIKE = " unlike PyTorch's: "
"""Stands between the class of a layer and why its weights may be in another order than PyTorch's."""
UNWIRED = " of unknown wiring"
"""Stands behind the class of a layer where nothing says what stands before it, and that would count."""
_TO_BE_WIRED = ("Dense", "GRU")
_OPTIONAL = {"scale": "gamma", "center": "beta"}
"""The weights that a norm may lack, by the settings that say so."""
MISSING_WEIGHTS: Mapping[str, tuple[str, ...]] = {
    "": (),
    " without gamma": ("gamma",),
    " without beta": ("beta",),
    " without gamma and beta": ("gamma", "beta"),
}
"""What stands behind the class of a norm, and the weights that it says are missing."""
_TEXT_OF_MISSING = {names: text for text, names in MISSING_WEIGHTS.items()}

_NORMS = ("batch norm", "norm")

Kinds = Mapping[str, str]
Orders = Mapping[Place, KernelOrder]


class LayerKind(NamedTuple):
    """Of which class a layer is, and what else counts for how its weights lie.

    Attributes:
        name: The class; of a wrapper, that of the layer inside.
        missing: The weights of a norm that its configuration leaves out.
        is_reset_early: Whether a GRU resets before it multiplies, as PyTorch's never does.
        order: What is to be said of the order of its weights.
        is_unwired: Whether nothing says what stands before it, and that would count.
    """

    name: str
    missing: tuple[str, ...] = ()
    is_reset_early: bool = False
    order: KernelOrder = KernelOrder()
    is_unwired: bool = False

    def text_for(self, tensor: Tensor) -> str:
        """Return the text that ``Checkpoint.layers`` has for one of its weights.

        What stands before a Dense counts for its kernel alone, and not for its bias.
        """
        if len(tensor.shape) > 1:
            return self.text
        is_of_inputs = self.order.flattened is not None or (self.name == "Dense" and self.order.before)
        order = KernelOrder() if is_of_inputs else self.order
        return self._replace(order=order, is_unwired=False).text

    @property
    def text(self) -> str:
        """Return all that is known of it; conversions store this text, and pairing reads it."""
        text = self.name + _TEXT_OF_MISSING[self.missing]
        if self.is_reset_early:
            text += f"{UNLIKE}reset_after is not set"
        if self.order.flattened is not None:
            text += f" after Flatten {self.order.flattened}".rstrip()
        elif self.order.before:
            text += f"{UNLIKE}{self.order.before} stands before it"
        elif self.order.doubt:
            text += UNLIKE + self.order.doubt
        return text + UNWIRED * self.is_unwired


Find = Callable[[tuple[str, ...]], "LayerKind | None"]


def kind_of(layer: Layer) -> LayerKind | None:
    """Return the class of a layer, or of what it is wrapped around; None if nobody can tell."""
    inner = layer
    while (key := type_of(inner.kind).wraps) and inner.is_known:
        wrapped = layer_of(inner.config.get(key))
        if wrapped is None:
            return None
        inner = wrapped
    if inner.is_model or weights_of(inner) is None:
        return None
    kind = type_of(inner.kind).kind
    is_off = {name: inner.config.get(key) is False for key, name in _OPTIONAL.items() if kind in _NORMS}
    return LayerKind(
        inner.kind,
        missing=tuple(name for name, is_missing in is_off.items() if is_missing),
        is_reset_early=kind == "gru" and not inner.config.get("reset_after"),
    )


def kinds_in(model: Layer, orders: Orders | None = None, place: Place = ()) -> dict[str, LayerKind]:
    """Return what the layers of a model are, by name; those that it lists, not those inside of them.

    Args:
        model: Its configuration.
        orders: What is to be said of the orders of weights in the outermost model; None where this is that.
        place: The names of the models inside of which it lies, and its own, without the outermost's.
    """
    orders = orders_in(model) if orders is None else orders
    kinds = {layer.name: kind for layer in layers_listed_by(model) if (kind := kind_of(layer)) is not None}
    return {
        name: kind._replace(order=orders.get((*place, name), KernelOrder())) for name, kind in kinds.items()
    }


def kinds_by_name(config: object, tensors: Iterable[Tensor]) -> Kinds:
    """Return what the layers of weights are in a file that lists them by the names of layers."""
    model = layer_of(config)
    if model is None or not model.is_model:
        return {}
    return _kinds_of_weights(tensors, _KindsByName(model).find, lambda tensor: tuple(map(str, tensor.path)))


class _KindsByName:
    """The layers of a model by name, those of models inside it by the names of both."""

    def __init__(self, model: Layer, orders: Orders | None = None, place: Place = ()) -> None:
        orders = orders_in(model) if orders is None else orders
        self._kinds = kinds_in(model, orders, place)
        inner = [layer for layer in layers_listed_by(model) if layer.is_model]
        self._models = {layer.name: _KindsByName(layer, orders, (*place, layer.name)) for layer in inner}

    def find(self, path: tuple[str, ...]) -> LayerKind | None:
        name = next((step for step in path if step in self._kinds or step in self._models), None)
        if name is None or name in self._kinds:
            return self._kinds.get(name or "")
        return self._models[name].find(path[path.index(name) + 1 :])


def kinds_by_group(config: object, groups: Iterable[Group], tensors: Iterable[Tensor]) -> Kinds:
    """Return what the layers of weights are in a file whose groups are named after the classes of layers.

    Args:
        config: The whole model's; None where the file has none, so that the groups alone tell.
        groups: All groups of the file.
        tensors: Its tensors.
    """
    model = layer_of(config)
    if model is None or not model.is_model:
        return _kinds_of_weights(tensors, _kind_of_group, _stored_path)
    kinds = dict(_kinds_by_group(model, frozenset(groups), (), orders_in(model), ()))
    lengths = sorted({len(group) for group in kinds})

    def find(path: tuple[str, ...]) -> LayerKind | None:
        return next((kinds[path[:length]] for length in lengths if path[:length] in kinds), None)

    return _kinds_of_weights(tensors, find, _stored_path)


def _kinds_by_group(
    model: Layer, groups: frozenset[Group], place: Group, orders: Orders, names: Place
) -> Iterator[tuple[Group, LayerKind]]:
    kinds = kinds_in(model, orders, names)
    for layer, candidates in layers_with_groups(model):
        name = next((name for name in candidates if (*place, LAYERS_KEY, name) in groups), candidates[0])
        group = (*place, LAYERS_KEY, name)
        if layer.is_model:
            yield from _kinds_by_group(layer, groups, group, orders, (*names, layer.name))
        elif layer.name in kinds:
            yield group, kinds[layer.name]


def _kind_of_group(path: tuple[str, ...]) -> LayerKind | None:
    """Return the class that the outermost group of a known one is named after; in lists, Keras does so."""
    for part, group in pairwise(path):
        kind = _GROUPS.get(_COUNT.sub("", group)) if part == LAYERS_KEY else None
        if kind is not None:
            return LayerKind(kind, is_unwired=kind in _TO_BE_WIRED)
    return None


def _stored_path(tensor: Tensor) -> tuple[str, ...]:
    """Return the groups in the file that a tensor lies in, and its name there."""
    return tuple(tensor.key[1:].split("/")) if tensor.key else tuple(map(str, tensor.path))


def _kinds_of_weights(
    tensors: Iterable[Tensor], find: Find, place: Callable[[Tensor], tuple[str, ...]]
) -> Kinds:
    kinds: dict[str, str] = {}
    for tensor in tensors:
        kind = find(place(tensor)) if tensor.role is Role.WEIGHTS else None
        if kind is not None:
            kinds.setdefault(tensor.name, kind.text_for(tensor))
    return kinds


def outermost_kind(layers: Iterable[Layer], orders: dict[int, Orders]) -> LayerKind | None:
    """Return what the outermost known layer is, among those that lead to a weight from outside in.

    Args:
        layers: The layers.
        orders: What was found of the orders in each outermost model, by its ``id``; more is put in.
    """
    models: list[Layer] = []
    for layer in layers:
        if layer.is_model:
            models.append(layer)
        elif (kind := kind_of(layer)) is not None:
            if not models:
                return kind._replace(is_unwired=kind.name == "Dense")
            outermost = models[0]
            if id(outermost) not in orders:
                orders[id(outermost)] = orders_in(outermost)
            place = (*(model.name for model in models[1:]), layer.name)
            return kind._replace(order=orders[id(outermost)].get(place, KernelOrder()))
    return None
