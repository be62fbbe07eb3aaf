"""A Keras configuration against the weights beside it: each layer has its own, and nobody else's are there.

Source: Keras ``src/legacy/saving/legacy_h5_format.py``, ``src/saving/saving_lib.py``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from ckpttool.containers.jsontext import objects
from ckpttool.core.report import Finding, error, warning
from ckpttool.core.text import counted
from ckpttool.formats.hdf5.tensors import OpenedHdf5
from ckpttool.formats.keras.layers import (
    LAYERS_KEY,
    Group,
    Layer,
    Shape,
    layer_of,
    layers_listed_by,
    layers_with_groups,
    weights_of,
)
from ckpttool.formats.keras.layout import Groups, called_in

_MAX_COMPARED = 100
"""The most different shapes in one layer that are compared, each with each."""
_SEEDS = "seed_generator"
_ODD_TOP = "_layer_checkpoint_dependencies"
"""How Keras 2.12 and before began the names of a model's layers."""
_WRAPPED = "layer"
"""Where a wrapper has its layer, in its group and in its configuration."""


def compare_listed_weights(config: object, shapes: Mapping[str, Sequence[Shape]]) -> Iterator[Finding]:
    """Compare a configuration with weights that are listed by the names of its layers.

    Args:
        config: The whole model's.
        shapes: The shapes of each layer's weights, in which None is a weight whose shape is not known.
    """
    model = layer_of(config)
    if model is None or not model.is_model:
        return
    is_built = _is_built(model) or any(shapes.values())
    layers = layers_listed_by(model)
    for layer in layers:
        if layer.name in shapes or (is_built and weights_of(layer)):
            yield from _layer_findings(layer, shapes.get(layer.name, ()), is_built=is_built)
    for name in shapes.keys() - {layer.name for layer in layers}:
        if shapes[name]:
            yield _foreign_weights(name)


def compare_grouped_weights(config: object, opened: OpenedHdf5) -> Iterator[Finding]:
    """Compare a configuration with weights in groups that are named after the classes of layers."""
    model = layer_of(config)
    groups = opened.tree.groups
    if model is None or not model.is_model or any(path[:1] and _ODD_TOP in path[0] for path in groups):
        return
    layers = filter(None, map(layer_of, objects(config)))
    names = Counter(layer.name for layer in layers if layer.name)
    shared = {name for name, count in names.items() if count > 1}
    yield from _GroupedWeights(opened, shared).compare(model, ())


class _GroupedWeights:
    """The groups of a file, compared model by model; a layer that several share is stored once."""

    def __init__(self, opened: OpenedHdf5, shared: set[str]) -> None:
        self._groups = opened.tree.groups
        self._shapes = {path: dataset.shape for path, dataset in opened.tree.datasets.items()}
        self._paths = sorted(self._shapes)
        self._shared = shared

    def compare(self, model: Layer, place: Group) -> Iterator[Finding]:
        top = (*place, LAYERS_KEY)
        filled = {path[len(top)] for path in self._weights_below(top) if len(path) > len(top)}
        is_built = bool(place) or _is_built(model) or bool(filled)
        for layer, candidates in layers_with_groups(model):
            name = next((name for name in candidates if (*top, name) in self._groups), candidates[0])
            filled.discard(name)
            group = (*top, name)
            if layer.is_model and layer.name not in self._shared:
                yield from self.compare(layer, group)
                continue
            stored = [self._shapes[path] for path in self._weights_below(group)]
            if stored or layer.name not in self._shared:
                yield from _layer_findings(layer, stored, is_built=is_built)
        yield from (_foreign_weights("/" + "/".join((*top, name))) for name in sorted(filled))

    def _weights_below(self, group: Group) -> Iterator[Group]:
        for at in range(bisect_left(self._paths, group), len(self._paths)):
            path = self._paths[at]
            if path[: len(group)] != group:
                return
            if not any(_SEEDS in part for part in path[len(group) :]):
                yield path


def _is_built(model: Layer) -> bool:
    """Return whether its layers have weights already; a chain without an input has none until it is used."""
    if model.kind != "Sequential" or model.config.get("build_input_shape") or model.node.get("build_config"):
        return True
    first = next(iter(layers_listed_by(model)), None)
    keys = {"batch_input_shape", "batch_shape"}
    return first is not None and (first.kind == "InputLayer" or not keys.isdisjoint(first.config))


def _layer_findings(layer: Layer, stored: Sequence[Shape], *, is_built: bool) -> Iterator[Finding]:
    """Compare the weights of one layer with what its configuration makes, in any order."""
    expected = weights_of(layer)
    if expected is None or (not stored and not is_built):
        return
    where = f"layer {layer.name!r:.100}"
    if len(stored) != len(expected):
        code = "weight-missing" if len(stored) < len(expected) else "weight-extra"
        message = (
            f"{counted(len(stored), 'weight')}, and its configuration ({layer.kind}) makes {len(expected)}"
        )
        yield error(code, message, where)
        return
    shapes, possible = set(stored), set(expected)
    if max(len(shapes), len(possible)) > _MAX_COMPARED:
        return
    if not (
        all(any(_fits(shape, one) for one in possible) for shape in shapes)
        and all(any(_fits(shape, one) for shape in shapes) for one in possible)
    ):
        makes = f"its configuration ({layer.kind}) makes {_shown(expected)}"
        yield error("weight-shape", f"weights of shapes {_shown(stored)}, and {makes}", where)


def _fits(shape: Shape, possible: Shape) -> bool:
    if shape is None or possible is None:
        return True
    return len(shape) == len(possible) and all(
        None in pair or pair[0] == pair[1] for pair in zip(shape, possible, strict=True)
    )


def _shown(shapes: Sequence[Shape]) -> str:
    texts = [
        "any" if shape is None else "×".join("?" if n is None else str(n) for n in shape) or "scalar"
        for shape in shapes[:8]
    ]
    return ", ".join(texts) + (", …" if len(shapes) > 8 else "")


def _foreign_weights(name: str) -> Finding:
    return error("weight-extra", "weights of what is no layer of the configuration", f"{name:.200}")


# Names of layers ------------------------------------------------------------------------------------


def layer_names_by_group(config: object, paths: Iterable[Group]) -> dict[Group, str]:
    """Return what the layers of a model are called, by their groups, also of models inside it.

    Args:
        config: The whole model's.
        paths: Groups and datasets of its file.
    """
    model = layer_of(config)
    if model is None or not model.is_model:
        return {}
    return dict(_names_by_group(model, (), {path[:at] for path in paths for at in range(1, len(path) + 1)}))


def _names_by_group(model: Layer, place: Group, present: Collection[Group]) -> Iterator[tuple[Group, str]]:
    for layer, candidates in layers_with_groups(model):
        name = next((name for name in candidates if (*place, LAYERS_KEY, name) in present), candidates[0])
        group = (*place, LAYERS_KEY, name)
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


def compare_layer_names(configured: Mapping[Group, str], groups: Groups) -> Iterator[Finding]:
    """Yield a warning for each layer that its group and the configuration call differently."""
    for group, name in configured.items():
        own = called_in(groups, group)
        if own is not None and own != name:
            message = (
                f"its group says that it is layer {own!r:.100}, and the configuration says {name!r:.100}"
            )
            yield warning("layer-name", message, "/" + "/".join(group))
