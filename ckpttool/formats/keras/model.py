"""A model of Keras: all its layers, the kind of each, and names and kinds for the weights in its file.

Files with lists have the names of layers; files with numbered variables have groups named after classes and
numbered in the order of the model. Without a configuration, the groups alone give the classes of layers.

Source: Keras ``src/legacy/saving/legacy_h5_format.py``, ``src/saving/saving_lib.py``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

from ckpttool.core.layers import UNWIRED, LayerKind, LayoutDoubt
from ckpttool.core.tensor import Role, Tensor
from ckpttool.formats.keras.layer_tree import (
    GROUP_WORDS,
    LAYERS_GROUP,
    VARIABLES_GROUP,
    KerasRefusal,
    Layer,
    Steps,
    layer_of,
    snake_case,
)
from ckpttool.formats.keras.layers import LAYERS
from ckpttool.formats.keras.layout import stored_path

if TYPE_CHECKING:
    from ckpttool.formats.keras.orders import KernelOrder

Kinds = Mapping[str, LayerKind]
"""The kinds of layers by the names of their weights."""
_WRAPPED = "layer"
"""Name of a wrapped layer, in the wrapper's group and in its configuration."""
_TO_BE_WIRED = ("Dense", "GRU")
"""Classes whose layout depends on more than their group: layers before and after, or ``reset_after``."""
_COUNT = re.compile(r"_[0-9]+$")


class KerasModel:
    """An outermost model whose configuration lists its layers.

    Attributes:
        layer: The model itself, as a layer.
    """

    def __init__(self, layer: Layer) -> None:
        self.layer = layer

    @classmethod
    def of_config(cls, config: object) -> KerasModel | None:
        """Return the model that a configuration describes, or None if it doesn't list layers."""
        layer = layer_of(config)
        return cls(layer) if layer is not None and layer.is_model else None

    @cached_property
    def orders(self) -> Mapping[Steps, KernelOrder]:
        """The layers whose weights are in another order than PyTorch's, or may be, by their paths."""
        from ckpttool.formats.keras.orders import orders_in

        return orders_in(self.layer)

    def kind_of(self, layer: Layer, path: Steps | None = None) -> LayerKind | None:
        """Return the kind of a layer, with the order of its weights in the model.

        Args:
            layer: A layer of the model.
            path: The path that it has here, if it was parsed alone.
        """
        kind, order = layer.kind, self.orders.get(layer.path if path is None else path)
        if kind is None or order is None:
            return kind
        return kind._replace(flattened=order.flattened, doubt=order.doubt)

    def layer_names(self, paths: Iterable[Steps]) -> dict[Steps, str]:
        """Return the names of all layers, also those in inner models, by their groups.

        Args:
            paths: Groups and datasets of its file.
        """
        present = {path[:at] for path in paths for at in range(1, len(path) + 1)}
        return dict(_names_by_group(self.layer, (), present))

    def kinds_by_name(self, tensors: Iterable[Tensor]) -> Kinds:
        """Return the kinds of weights in a file that lists them by the names of layers."""
        kinds: dict[Steps, LayerKind | None] = {}
        for _, layer in self.layer.layers_with_groups((), ()):
            if (kind := self.kind_of(layer)) is not None:
                kinds[layer.path] = kind
            elif layer.is_model:
                kinds.setdefault(layer.path)

        # A listed name may have steps that are no layers, such as name scopes: they are skipped until one is
        # a layer, or an inner model, whose layers are looked up next.
        def find(path: Steps) -> LayerKind | None:
            place: Steps = ()
            for step in path:
                if (found := (*place, step)) in kinds:
                    if kinds[found] is not None:
                        return kinds[found]
                    place = found
            return None

        return _kinds_of_weights(tensors, find, lambda tensor: tuple(map(str, tensor.path)))

    def kinds_by_group(self, groups: Iterable[Steps], tensors: Iterable[Tensor]) -> Kinds:
        """Return the kinds of weights in a file whose groups are named after the classes of layers."""
        found = (
            (group, self.kind_of(layer))
            for group, layer in self.layer.layers_with_groups((), frozenset(groups))
        )
        kinds = {group: kind for group, kind in found if kind is not None}
        lengths = sorted({len(group) for group in kinds})

        # Groups inside that of a layer are its parts (``cell``), whose weights are of the layer's kind. An
        # inner model has no kind, so the shortest group with one is the layer's.
        def find(path: Steps) -> LayerKind | None:
            return next((kinds[path[:length]] for length in lengths if path[:length] in kinds), None)

        return _kinds_of_weights(tensors, find, stored_path)


def _names_by_group(model: Layer, place: Steps, present: Container[Steps]) -> Iterator[tuple[Steps, str]]:
    # The group of the layer inside a wrapper is ``layers/time_distributed/layer``; it has a name only if the
    # file has that group.
    for layer in model.layers:
        group = layer.group_in(place, present)
        if layer.name:
            yield group, layer.name
        inside, inner = (*group, _WRAPPED), layer_of(layer.config.get(_WRAPPED))
        if layer.is_model:
            yield from _names_by_group(layer, group, present)
        elif layer.is_known and inner is not None and inside in present:
            if inner.name:
                yield inside, inner.name
            if inner.is_model:
                yield from _names_by_group(inner, inside, present)


def weight_names(model: Layer, paths: Mapping[str, Steps]) -> dict[str, str]:
    """Return the names that the layers of a model give to their numbered weights.

    Args:
        model: Its configuration.
        paths: The datasets by the names of their tensors.

    Returns:
        Names such as ``kernel``, by the names of tensors; without layers whose order is not known.
    """
    tensors = {path: name for name, path in paths.items()}
    counts = Counter(path[:-2] for path in tensors if path[-2:-1] == (VARIABLES_GROUP,))
    names: dict[str, str] = {}
    for layer in model.layers:
        try:
            weights = layer.weights((LAYERS_GROUP, layer.groups[0]), lambda group, _: counts[group])
        except KerasRefusal:
            continue
        names |= {tensors[one.path]: one.name[-1] for one in weights if one.path in tensors}
    return names


# Kinds of weights -----------------------------------------------------------------------------------


def kind_for_weight(kind: LayerKind, tensor: Tensor) -> LayerKind:
    """Return the kind with only the facts that apply to one weight of the layer."""
    # The layers before a Dense decide about the rows of its kernel, and not about its bias.
    if len(tensor.shape) > 1:
        return kind
    is_of_inputs = kind.doubt == UNWIRED or (
        kind.cls == "Dense" and kind.doubt is not None and kind.doubt.doubt is LayoutDoubt.INPUT_ORDER
    )
    return kind._replace(flattened=None, doubt=None if is_of_inputs else kind.doubt)


def kinds_of_groups(tensors: Iterable[Tensor]) -> Kinds:
    """Return the kinds of weights in a file without a configuration, by the names of groups."""
    return _kinds_of_weights(tensors, _kind_of_group, stored_path)


_CLASSES = {
    snake_case(cls, words): cls
    for cls, known in LAYERS.items()
    if known.shapes is not None
    for words in GROUP_WORDS
}
"""Classes by the names of their groups."""


def _kind_of_group(path: Steps) -> LayerKind | None:
    """Return the kind of the outermost group that is named after a known class."""
    for part, group in pairwise(path):
        cls = _CLASSES.get(_COUNT.sub("", group)) if part == LAYERS_GROUP else None
        if cls is not None:
            return LayerKind(cls, doubt=UNWIRED if cls in _TO_BE_WIRED else None)
    return None


def _kinds_of_weights(
    tensors: Iterable[Tensor],
    find: Callable[[Steps], LayerKind | None],
    path_of: Callable[[Tensor], Steps],
) -> Kinds:
    kinds: dict[str, LayerKind] = {}
    for tensor in tensors:
        kind = find(path_of(tensor)) if tensor.role is Role.WEIGHTS else None
        if kind is not None:
            kinds.setdefault(tensor.name, kind_for_weight(kind, tensor))
    return kinds
