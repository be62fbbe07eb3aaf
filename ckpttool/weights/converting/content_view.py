"""View of a content as a checkpoint, so that it can be paired: new names, and the source's layer types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple, TypeVar

from ckpttool.core.checkpoint import Checkpoint, own_names_of
from ckpttool.core.tensor import Tensor
from ckpttool.formats.writer import Content
from ckpttool.weights.pairing.map_file import TensorMap, TensorRule

T = TypeVar("T")


class ContentView(NamedTuple):
    """View of a content as a checkpoint.

    Attributes:
        checkpoint: The content's tensors. Those that a map only renamed have the source's names, which
            identify their layers. It shares the files of the source, and must not be closed.
        tensors: The content's tensors by ``id`` of the view's.
        names_from_map: Name given by a map, by name in the view.
        layouts_from_map: Names of tensors whose layout a map has decided.
    """

    checkpoint: Checkpoint
    tensors: Mapping[int, Tensor]
    names_from_map: Mapping[str, str]
    layouts_from_map: frozenset[str]

    @property
    def tensor_map(self) -> TensorMap | None:
        """Map that pairs the tensors named by the user's map with those names, or None."""
        if not self.names_from_map and not self.layouts_from_map:
            return None
        rules = [
            TensorRule(place=name, sources=(name,), targets=(name,)) for name in sorted(self.layouts_from_map)
        ]
        return TensorMap("map", self.names_from_map, tuple(rules))


def state_conventions(content: Content, checkpoint: Checkpoint) -> Content:
    """Return a content with the conventions and layer types of its source recorded."""
    stated = checkpoint.layers
    kinds = {id(one.values): stated[one.name] for one in reversed(checkpoint.tensors) if one.name in stated}
    layers = {one.name: kinds[id(one.values)] for one in content.tensors if id(one.values) in kinds}
    return replace(content, conventions=checkpoint.conventions, layers=layers)


def view_of(content: Content, checkpoint: Checkpoint) -> ContentView:
    """Return the view of a content that was taken from ``checkpoint``."""
    # Renaming makes new Tensor objects, but keeps their ``values``: these identify a tensor of the source.
    stored = {id(tensor.values): tensor for tensor in checkpoint.tensors}
    origins = {one.name: stored[id(one.values)] for one in content.tensors if id(one.values) in stored}
    names = {one.name for one in content.tensors}
    tensors: dict[int, Tensor] = {}
    names_from_map: dict[str, str] = {}
    shown: list[Tensor] = []
    for tensor in content.tensors:
        origin = origins.get(tensor.name)
        if content.mapped.get(tensor.name) == "name" and origin is not None:
            names_from_map[origin.name] = tensor.name
        else:
            origin = tensor
        shown.append(origin)
        tensors[id(origin)] = tensor

    def by_shown_name(stated: Mapping[str, T]) -> dict[str, T]:
        pairs = ((one.name, origins.get(tensors[id(one)].name)) for one in shown)
        return {name: stated[own.name] for name, own in pairs if own is not None and own.name in stated}

    view = Checkpoint(
        path=checkpoint.path,
        format=checkpoint.format,
        variant=checkpoint.variant,
        conventions=checkpoint.conventions,
        tensors=tuple(shown),
        files=checkpoint.files,
        spans=lambda: iter(()),
        metadata=lambda: checkpoint.metadata,
        layers=lambda: by_shown_name(checkpoint.layers),
        own_names=lambda: by_shown_name(own_names_of(checkpoint)),
    )
    layouts_from_map = frozenset(
        name for name, what in content.mapped.items() if what == "layout" and name in names
    )
    return ContentView(view, tensors, names_from_map, layouts_from_map)
