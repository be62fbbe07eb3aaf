"""Which layer of Keras each weight belongs to: told by a configuration, or by groups named after classes.

A layer is known where it is one of Keras's own and has the weights that its class has when nobody changed
them: not quantized, not adapted. Of wrappers and models, what is inside them is told.

Source: Keras ``src/legacy/saving/legacy_h5_format.py``, ``src/saving/saving_lib.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from ckpttool.formats.keras.layers import (
    LAYERS_KEY,
    RULES,
    Group,
    Layer,
    layer_of,
    layers_listed_by,
    layers_with_groups,
    snake_case,
    weights_of,
)
from ckpttool.formats.keras.orders import BEFORE, UNLIKE, orders_in
from ckpttool.tensor import Role, Tensor

_WRAPPERS = {"TimeDistributed": "layer", "Bidirectional": "layer", "RNN": "cell"}
"""Layers around a layer, and what their configuration calls it."""

_GROUPS = {
    snake_case(kind, words): kind
    for kind in RULES.keys() - _WRAPPERS.keys() - {"StackedRNNCells"}
    for words in ("[a-z]+", "[a-z0-9]+")
}
_COUNT = re.compile(r"_[0-9]+$")
_AFTER = " after Flatten"
UNWIRED = " of unknown wiring"
"""Stands behind the class of a layer where nothing says what stands before it, and that would count."""
_TO_BE_WIRED = ("Dense", "GRU")
_OPTIONAL = {"scale": "gamma", "center": "beta"}
"""The weights that a norm may lack, by the settings that say so."""

_GRU = ("GRU", "GRUCell")
_EARLY = f"{UNLIKE}reset_after is not set"

Kinds = Mapping[str, str]
Orders = Mapping[tuple[str, ...], str]
Find = Callable[[tuple[str, ...]], "str | None"]


def kind_of(layer: Layer) -> str | None:
    """Return the class of a layer, or of what it is wrapped around; None if nobody can tell."""
    inner = _unwrapped_layer(layer)
    if inner is None or inner.is_model or weights_of(inner) is None:
        return None
    is_early = inner.kind in _GRU and not inner.config.get("reset_after")
    return inner.kind + _missing_weights(inner) + (_EARLY if is_early else "")


def _unwrapped_layer(layer: Layer) -> Layer | None:
    """Return a layer, or what it is wrapped around; None if that is not told."""
    inner = layer
    while inner.kind in _WRAPPERS and inner.is_known:
        wrapped = layer_of(inner.config.get(_WRAPPERS[inner.kind]))
        if wrapped is None:
            return None
        inner = wrapped
    return inner


def _missing_weights(layer: Layer) -> str:
    """Return which weights of a norm its configuration leaves out, as words behind its class."""
    is_norm = layer.kind in ("BatchNormalization", "LayerNormalization", "GroupNormalization")
    names = [name for key, name in _OPTIONAL.items() if is_norm and layer.config.get(key) is False]
    return f" without {' and '.join(names)}" if names else ""


def kinds_in(model: Layer, orders: Orders | None = None, place: tuple[str, ...] = ()) -> dict[str, str]:
    """Return what the layers of a model are, by name; those that it lists, not those inside of them.

    Args:
        model: Its configuration.
        orders: What is to be said of the orders of weights in the outermost model; None where this is that.
        place: The names of the models inside of which it lies, and its own, without the outermost's.
    """
    said = orders_in(model) if orders is None else orders
    found = {layer.name: kind for layer in layers_listed_by(model) if (kind := kind_of(layer)) is not None}
    return {name: kind + said.get((*place, name), "") for name, kind in found.items()}


def plain(kind: str) -> str:
    """Return the class of a layer, without what a Dense stands behind, which counts for its kernel alone."""
    name, _, why = kind.partition(UNLIKE)
    is_of_inputs = name == "Dense" and why.endswith(BEFORE)
    return name if is_of_inputs else kind.partition(_AFTER)[0].removesuffix(UNWIRED)


def kinds_by_name(config: object, tensors: Iterable[Tensor]) -> Kinds:
    """Return what the layers of weights are in a file that lists them by the names of layers."""
    model = layer_of(config)
    if model is None or not model.is_model:
        return {}
    return _kinds_of_weights(tensors, _KindsByName(model).find, lambda tensor: tuple(map(str, tensor.path)))


class _KindsByName:
    """The layers of a model by name, those of models inside it by the names of both."""

    def __init__(self, model: Layer, orders: Orders | None = None, place: tuple[str, ...] = ()) -> None:
        told = orders_in(model) if orders is None else orders
        self._kinds = kinds_in(model, told, place)
        inner = [layer for layer in layers_listed_by(model) if layer.is_model]
        self._models = {one.name: _KindsByName(one, told, (*place, one.name)) for one in inner}

    def find(self, path: tuple[str, ...]) -> str | None:
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
    starts = {len(group) for group in kinds}

    def find(path: tuple[str, ...]) -> str | None:
        return next((kinds[path[:at]] for at in sorted(starts) if path[:at] in kinds), None)

    return _kinds_of_weights(tensors, find, _stored_path)


def _kinds_by_group(
    model: Layer, groups: frozenset[Group], place: Group, orders: Orders, names: tuple[str, ...]
) -> Iterator[tuple[Group, str]]:
    kinds = kinds_in(model, orders, names)
    for layer, candidates in layers_with_groups(model):
        name = next((name for name in candidates if (*place, LAYERS_KEY, name) in groups), candidates[0])
        group = (*place, LAYERS_KEY, name)
        if layer.is_model:
            yield from _kinds_by_group(layer, groups, group, orders, (*names, layer.name))
        elif layer.name in kinds:
            yield group, kinds[layer.name]


def _kind_of_group(path: tuple[str, ...]) -> str | None:
    """Return the class that the outermost group of a known one is named after; in lists, Keras does so."""
    for at, part in enumerate(path[:-1]):
        kind = _GROUPS.get(_COUNT.sub("", path[at + 1])) if part == LAYERS_KEY else None
        if kind is not None:
            return kind + UNWIRED * (kind in _TO_BE_WIRED)
    return None


def _stored_path(tensor: Tensor) -> tuple[str, ...]:
    """Return the groups in the file that a tensor lies in, and its name there."""
    return tuple(tensor.key[1:].split("/")) if tensor.key else tuple(map(str, tensor.path))


def _kinds_of_weights(
    tensors: Iterable[Tensor], find: Find, place: Callable[[Tensor], tuple[str, ...]]
) -> Kinds:
    found: dict[str, str] = {}
    for tensor in tensors:
        kind = find(place(tensor)) if tensor.role is Role.WEIGHTS else None
        if kind is not None:
            found.setdefault(tensor.name, kind if len(tensor.shape) > 1 else plain(kind))
    return found


def outermost_kind(layers: Iterable[Layer], known: dict[int, Orders]) -> str | None:
    """Return what the outermost known layer is, among those that lead to a weight from outside in.

    Args:
        layers: The layers.
        known: What was found of the orders in each outermost model, by its ``id``; more is put in.
    """
    models: list[Layer] = []
    for layer in layers:
        if layer.is_model:
            models.append(layer)
        elif (kind := kind_of(layer)) is not None:
            if models and id(models[0]) not in known:
                known[id(models[0])] = orders_in(models[0])
            place = (*(model.name for model in models[1:]), layer.name)
            return (
                kind + known[id(models[0])].get(place, "") if models else kind + UNWIRED * (kind == "Dense")
            )
    return None
