"""Compares a Keras configuration with the weights in its file: missing, extra and misshapen ones.

An ``.h5`` has no checksums, so a flipped byte in a name or in a shape often shows only here.

Source: Keras ``src/legacy/saving/legacy_h5_format.py``, ``src/saving/saving_lib.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from ckpttool.containers.jsontext import objects
from ckpttool.core.report import Finding, error, warning
from ckpttool.core.text import counted
from ckpttool.formats.hdf5.tensors import OpenedHdf5
from ckpttool.formats.keras.layer_tree import LAYERS_GROUP, Layer, Steps, layer_of, paths_below
from ckpttool.formats.keras.layers import Shape
from ckpttool.formats.keras.layout import OLD_LAYERS, SEEDS, Groups, layer_name_in
from ckpttool.formats.keras.model import KerasModel

_MAX_COMPARED = 100
"""Maximum number of different shapes in one layer that are compared, pair by pair."""


def compare_listed_weights(model: KerasModel, shapes: Mapping[str, Sequence[Shape]]) -> Iterator[Finding]:
    """Yield the findings for weights that are listed by the names of layers.

    Args:
        model: The configured model.
        shapes: The shapes of the weights of each layer; None if one is not known.
    """
    layers = model.layer.layers
    is_built = _is_built(model.layer) or any(shapes.values())
    for layer in layers:
        if layer.name in shapes or (is_built and layer.weight_shapes()):
            yield from _layer_findings(layer, shapes.get(layer.name, ()), is_built=is_built)
    for name in shapes.keys() - {layer.name for layer in layers}:
        if shapes[name]:
            yield _foreign_weights(name)


def compare_grouped_weights(model: KerasModel, opened: OpenedHdf5) -> Iterator[Finding]:
    """Yield the findings for weights in groups that are named after the classes of layers."""
    if any(path[:1] and OLD_LAYERS in path[0] for path in opened.tree.groups):
        return
    # A layer that several models of the configuration use is stored once, below any of them.
    layers = filter(None, map(layer_of, objects(model.layer.node)))
    names = Counter(layer.name for layer in layers if layer.name)
    shared = {name for name, count in names.items() if count > 1}
    yield from _GroupedWeights(opened, shared).compare(model.layer, ())


class _GroupedWeights:
    """The groups of a file, compared model by model."""

    def __init__(self, opened: OpenedHdf5, shared: set[str]) -> None:
        self._groups = opened.tree.groups
        self._shapes = {path: dataset.shape for path, dataset in opened.tree.datasets.items()}
        self._paths = sorted(self._shapes)
        self._shared = shared

    def compare(self, model: Layer, place: Steps) -> Iterator[Finding]:
        top = (*place, LAYERS_GROUP)
        # The groups with weights at this level. Those that no layer of the configuration accounts for are
        # left in the end.
        foreign = {path[: len(top) + 1] for path in self._weights_below(top) if len(path) > len(top)}
        is_built = bool(place) or _is_built(model) or bool(foreign)
        for layer in model.layers:
            group = layer.group_in(place, self._groups)
            foreign.discard(group)
            if layer.is_model and layer.name not in self._shared:
                yield from self.compare(layer, group)
                continue
            stored = [self._shapes[path] for path in self._weights_below(group)]
            if stored or layer.name not in self._shared:
                yield from _layer_findings(layer, stored, is_built=is_built)
        yield from (_foreign_weights("/" + "/".join(group)) for group in sorted(foreign))

    def _weights_below(self, group: Steps) -> Iterator[Steps]:
        for path in paths_below(self._paths, group):
            if not any(SEEDS in part for part in path[len(group) :]):
                yield path


def _is_built(model: Layer) -> bool:
    """Return whether its layers have weights; a Sequential without an input has none until its first call."""
    if model.cls != "Sequential" or model.config.get("build_input_shape") or model.node.get("build_config"):
        return True
    first = next(iter(model.layers), None)
    keys = {"batch_input_shape", "batch_shape"}
    return first is not None and (first.cls == "InputLayer" or not keys.isdisjoint(first.config))


def _layer_findings(layer: Layer, stored: Sequence[Shape], *, is_built: bool) -> Iterator[Finding]:
    """Yield the findings for the weights of one layer, in any order."""
    expected = layer.weight_shapes()
    if expected is None or (not stored and not is_built):
        return
    where = f"layer {layer.name!r:.100}"
    if len(stored) != len(expected):
        code = "weight-missing" if len(stored) < len(expected) else "weight-extra"
        message = (
            f"{counted(len(stored), 'weight')}, but its configuration ({layer.cls}) makes {len(expected)}"
        )
        yield error(code, message, where)
        return
    # Known shapes may have open axes, so they are not sorted and matched one to one: each stored shape must
    # fit some expected one, and the other way round.
    shapes, possible = set(stored), set(expected)
    if max(len(shapes), len(possible)) > _MAX_COMPARED:
        return
    if not (
        all(any(_fits(shape, one) for one in possible) for shape in shapes)
        and all(any(_fits(shape, one) for shape in shapes) for one in possible)
    ):
        makes = f"its configuration ({layer.cls}) makes {_shown(expected)}"
        yield error("weight-shape", f"weights of shapes {_shown(stored)}, but {makes}", where)


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
    return error("weight-extra", "weights that belong to no layer in the configuration", f"{name:.200}")


def compare_layer_names(configured: Mapping[Steps, str], groups: Groups) -> Iterator[Finding]:
    """Yield a warning for each layer whose name in its group and in the configuration differ."""
    for group, name in configured.items():
        own = layer_name_in(groups, group)
        if own is not None and own != name:
            message = f"its group names layer {own!r:.100}, but the configuration names {name!r:.100}"
            yield warning("layer-name", message, "/" + "/".join(group))
