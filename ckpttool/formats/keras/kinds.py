"""Which layer of Keras each weight belongs to: told by a configuration, or by groups named after classes.

A layer is known where it is one of Keras's own and has the weights that its class has when nobody changed
them: not quantized, not adapted. Of wrappers and models, what is inside them is told.

Source: Keras ``src/legacy/saving/legacy_h5_format.py``, ``src/saving/saving_lib.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise

from ckpttool.core.layers import DoubtReason, LayerKind, LayoutDoubt
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
_TO_BE_WIRED = ("Dense", "GRU")
_OPTIONAL = {"scale": "gamma", "center": "beta"}
"""The weights that a norm may lack, by the settings that say so."""
_NORMS = ("batch norm", "norm")

Kinds = Mapping[str, LayerKind]
Orders = Mapping[Place, KernelOrder]


_UNWIRED = DoubtReason(LayoutDoubt.UNWIRED)


def kind_for_weight(kind: LayerKind, tensor: Tensor) -> LayerKind:
    """Return the kind with only the facts that apply to one weight of the layer.

    The layers before a Dense decide about its kernel alone, and not about its bias.
    """
    if len(tensor.shape) > 1:
        return kind
    is_of_inputs = kind.doubt == _UNWIRED or (
        kind.cls == "Dense" and kind.doubt is not None and kind.doubt.doubt is LayoutDoubt.INPUT_ORDER
    )
    return kind._replace(flattened=None, doubt=None if is_of_inputs else kind.doubt)


Find = Callable[[tuple[str, ...]], LayerKind | None]


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
        reset_after=kind != "gru" or bool(inner.config.get("reset_after")),
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
    return {name: _with_order(kind, orders.get((*place, name))) for name, kind in kinds.items()}


def _with_order(kind: LayerKind, order: KernelOrder | None) -> LayerKind:
    return kind if order is None else kind._replace(flattened=order.flattened, doubt=order.doubt)


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
            return LayerKind(kind, doubt=_UNWIRED if kind in _TO_BE_WIRED else None)
    return None


def _stored_path(tensor: Tensor) -> tuple[str, ...]:
    """Return the groups in the file that a tensor lies in, and its name there."""
    return tuple(tensor.key[1:].split("/")) if tensor.key else tuple(map(str, tensor.path))


def _kinds_of_weights(
    tensors: Iterable[Tensor], find: Find, place: Callable[[Tensor], tuple[str, ...]]
) -> Kinds:
    kinds: dict[str, LayerKind] = {}
    for tensor in tensors:
        kind = find(place(tensor)) if tensor.role is Role.WEIGHTS else None
        if kind is not None:
            kinds.setdefault(tensor.name, kind_for_weight(kind, tensor))
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
                return kind._replace(doubt=_UNWIRED if kind.cls == "Dense" else None)
            outermost = models[0]
            if id(outermost) not in orders:
                orders[id(outermost)] = orders_in(outermost)
            place = (*(model.name for model in models[1:]), layer.name)
            return _with_order(kind, orders[id(outermost)].get(place))
    return None
