"""Which layer of Keras each weight belongs to: told by a configuration, or by groups named after classes.

A layer is known where it is one of Keras's own and has the weights that its class has when nobody changed
them: not quantized, not adapted. Of wrappers and models, what is inside them is told.

Source: Keras ``src/legacy/saving/legacy_h5_format.py``, ``src/saving/saving_lib.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from ckpttool.checkpoint import Role, Tensor
from ckpttool.formats.keras_compare import LAYERS, Group, grouped, snake_case
from ckpttool.formats.keras_flattened import flattened
from ckpttool.formats.keras_layers import RULES, Layer, layer_of, listed, weights_of

_WRAPPERS = {"TimeDistributed": "layer", "Bidirectional": "layer", "RNN": "cell"}
"""Layers around a layer, and what their configuration calls it."""

_GROUPS = {
    snake_case(kind, words): kind
    for kind in RULES.keys() - _WRAPPERS.keys() - {"StackedRNNCells"}
    for words in ("[a-z]+", "[a-z0-9]+")
}
_COUNT = re.compile(r"_[0-9]+$")

Kinds = Mapping[str, str]
Find = Callable[[tuple[str, ...]], "str | None"]


def kind_of(layer: Layer) -> str | None:
    """Return the class of a layer, or of what it is wrapped around; None where nobody can tell."""
    inner = layer
    while inner.kind in _WRAPPERS and inner.is_known:
        wrapped = layer_of(inner.config.get(_WRAPPERS[inner.kind]))
        if wrapped is None:
            return None
        inner = wrapped
    return None if inner.is_model or weights_of(inner) is None else inner.kind


def kinds_in(model: Layer) -> dict[str, str]:
    """Return what the layers of a model are, by name; those that it lists, not those inside of them."""
    before = flattened(model)
    found = {layer.name: kind for layer in listed(model) if (kind := kind_of(layer)) is not None}
    return {
        name: f"{kind} after Flatten {before[name]}".rstrip() if kind == "Dense" and name in before else kind
        for name, kind in found.items()
    }


def plain(kind: str) -> str:
    """Return the class of a layer, without what it stands behind, which counts for its kernel alone."""
    return kind.partition(" ")[0]


def kinds_listed(config: object, tensors: Iterable[Tensor]) -> Kinds:
    """Return what the layers of weights are in a file that lists them by the names of layers."""
    model = layer_of(config)
    if model is None or not model.is_model:
        return {}
    return _of_weights(tensors, _Listed(model).find, lambda tensor: tuple(map(str, tensor.path)))


class _Listed:
    """The layers of a model by name, those of models inside it by the names of both."""

    def __init__(self, model: Layer) -> None:
        self._kinds = kinds_in(model)
        self._models = {layer.name: _Listed(layer) for layer in listed(model) if layer.is_model}

    def find(self, path: tuple[str, ...]) -> str | None:
        name = next((step for step in path if step in self._kinds or step in self._models), None)
        if name is None or name in self._kinds:
            return self._kinds.get(name or "")
        return self._models[name].find(path[path.index(name) + 1 :])


def kinds_grouped(config: object, groups: Iterable[Group], tensors: Iterable[Tensor]) -> Kinds:
    """Return what the layers of weights are in a file whose groups are named after the classes of layers.

    Args:
        config: The whole model's; None where the file has none, so that the groups alone tell.
        groups: All groups of the file.
        tensors: Its tensors.
    """
    model = layer_of(config)
    if model is None or not model.is_model:
        return _of_weights(tensors, _told_by_group, _raw)
    kinds = dict(_kinds_by_group(model, frozenset(groups), ()))
    starts = {len(group) for group in kinds}

    def find(path: tuple[str, ...]) -> str | None:
        return next((kinds[path[:at]] for at in sorted(starts) if path[:at] in kinds), None)

    return _of_weights(tensors, find, _raw)


def _kinds_by_group(model: Layer, groups: frozenset[Group], place: Group) -> Iterator[tuple[Group, str]]:
    kinds = kinds_in(model)
    for layer, candidates in grouped(model):
        name = next((name for name in candidates if (*place, LAYERS, name) in groups), candidates[0])
        group = (*place, LAYERS, name)
        if layer.is_model:
            yield from _kinds_by_group(layer, groups, group)
        elif layer.name in kinds:
            yield group, kinds[layer.name]


def _told_by_group(path: tuple[str, ...]) -> str | None:
    """Return the class that the outermost group of a known one is named after; in lists, Keras does so."""
    for at, part in enumerate(path[:-1]):
        kind = _GROUPS.get(_COUNT.sub("", path[at + 1])) if part == LAYERS else None
        if kind is not None:
            return kind
    return None


def _raw(tensor: Tensor) -> tuple[str, ...]:
    """Return the groups in the file that a tensor lies in, and its name there."""
    return tuple(tensor.key[1:].split("/")) if tensor.key else tuple(map(str, tensor.path))


def _of_weights(tensors: Iterable[Tensor], find: Find, place: Callable[[Tensor], tuple[str, ...]]) -> Kinds:
    found: dict[str, str] = {}
    for tensor in tensors:
        kind = find(place(tensor)) if tensor.role is Role.WEIGHTS else None
        if kind is not None:
            found.setdefault(tensor.name, kind if len(tensor.shape) > 1 else plain(kind))
    return found


def kind_along(layers: Iterable[Layer]) -> str | None:
    """Return what the outermost known layer is, among those that lead to a weight from outside in."""
    models: list[Layer] = []
    for layer in layers:
        if layer.is_model:
            models.append(layer)
        elif (kind := kind_of(layer)) is not None:
            return kinds_in(models[-1]).get(layer.name, kind) if models else kind
    return None
