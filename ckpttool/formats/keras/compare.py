"""A Keras configuration against the weights beside it: each layer has its own, and nobody else's are there.

Source: Keras ``src/legacy/saving/legacy_h5_format.py``, ``src/saving/saving_lib.py``.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from ckpttool.formats.hdf5.tensors import Opened
from ckpttool.formats.keras.layers import Layer, Shape, layer_of, listed, weights_of
from ckpttool.report import Finding, counted, error
from ckpttool.wire.jsontext import objects

Group = tuple[str, ...]

_MAX_COMPARED = 100
"""The most different shapes in one layer that are compared, each with each."""
_SEEDS = "seed_generator"
LAYERS = "layers"
_CLASSES = {"GroupQueryAttention": "GroupedQueryAttention"}
"""What Keras calls a class in its source, where a configuration calls it differently."""
_ODD_TOP = "_layer_checkpoint_dependencies"
"""How Keras 2.12 and before began the names of a model's layers."""


def compare_listed(config: object, layers: Mapping[str, Sequence[Shape]]) -> Iterator[Finding]:
    """Compare a configuration with weights that are listed by the names of its layers.

    Args:
        config: The whole model's.
        layers: The shapes of each layer's weights, in which None is a weight whose shape is not known.
    """
    model = layer_of(config)
    if model is None or not model.is_model:
        return
    is_built = _is_built(model) or any(layers.values())
    known = listed(model)
    for layer in known:
        if layer.name not in layers and not (is_built and weights_of(layer)):
            continue
        yield from _judged(layer, layers.get(layer.name, ()), is_built=is_built)
    for name in layers.keys() - {layer.name for layer in known}:
        if layers[name]:
            yield _foreign(name)


def compare_grouped(config: object, opened: Opened) -> Iterator[Finding]:
    """Compare a configuration with weights in groups that are named after the classes of layers."""
    model = layer_of(config)
    groups = opened.tree.groups
    if model is None or not model.is_model or any(path[:1] and _ODD_TOP in path[0] for path in groups):
        return
    layers = filter(None, map(layer_of, objects(config)))
    names = Counter(layer.name for layer in layers if layer.name)
    yield from _Grouped(opened, {name for name, count in names.items() if count > 1}).compare(model, ())


class _Grouped:
    """The groups of a file, compared model by model; a layer that several share is stored once."""

    def __init__(self, opened: Opened, shared: set[str]) -> None:
        self._groups = opened.tree.groups
        self._shapes = {path: one.shape for path, one in opened.tree.datasets.items()}
        self._paths = sorted(self._shapes)
        self._shared = shared

    def compare(self, model: Layer, place: Group) -> Iterator[Finding]:
        top = (*place, LAYERS)
        filled = {path[len(top)] for path in self._below(top) if len(path) > len(top)}
        is_built = bool(place) or _is_built(model) or bool(filled)
        for layer, candidates in grouped(model):
            name = next((name for name in candidates if (*top, name) in self._groups), candidates[0])
            filled.discard(name)
            group = (*top, name)
            if layer.is_model and layer.name not in self._shared:
                yield from self.compare(layer, group)
                continue
            found = [self._shapes[path] for path in self._below(group)]
            if found or layer.name not in self._shared:
                yield from _judged(layer, found, is_built=is_built)
        yield from (_foreign("/" + "/".join((*top, name))) for name in sorted(filled))

    def _below(self, group: Group) -> Iterator[Group]:
        """Yield the weights below a group."""
        for at in range(bisect_left(self._paths, group), len(self._paths)):
            path = self._paths[at]
            if path[: len(group)] != group:
                return
            if not any(_SEEDS in part for part in path[len(group) :]):
                yield path


def grouped(model: Layer) -> Iterator[tuple[Layer, tuple[str, str]]]:
    """Yield each layer with the names that Keras 3 and Keras 2 give to its group."""
    used: tuple[Counter[str], Counter[str]] = Counter(), Counter()
    for layer in listed(model):
        names = []
        for counter, words in zip(used, ("[a-z]+", "[a-z0-9]+"), strict=True):
            name = snake_case(_CLASSES.get(layer.kind, layer.kind.rpartition(">")[2]), words)
            names.append(f"{name}_{counter[name]}" if counter[name] else name)
            counter[name] += 1
        yield layer, (names[0], names[1])


def snake_case(name: str, words: str) -> str:
    """Return what Keras names a group after a class; ``words`` is a pattern, in which Keras 2 has digits."""
    name = re.sub(rf"(.)([A-Z]{words})", r"\1_\2", re.sub(r"\W+", "", name))
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()


def _is_built(model: Layer) -> bool:
    """Tell whether its layers have weights already; a chain without an input has none until it is used."""
    if model.kind != "Sequential" or model.config.get("build_input_shape") or model.node.get("build_config"):
        return True
    first = next(iter(listed(model)), None)
    told = ("batch_input_shape", "batch_shape")
    return first is not None and (first.kind == "InputLayer" or any(key in first.config for key in told))


def _judged(layer: Layer, found: Sequence[Shape], *, is_built: bool) -> Iterator[Finding]:
    """Compare the weights of one layer with what its configuration makes."""
    wanted = weights_of(layer)
    if wanted is None or (not found and not is_built):
        return
    where = f"layer {layer.name!r:.100}"
    if len(found) != len(wanted):
        code = "weight-missing" if len(found) < len(wanted) else "weight-extra"
        message = f"{counted(len(found), 'weight')}, and its configuration ({layer.kind}) makes {len(wanted)}"
        yield error(code, message, where)
    elif not _are_alike(set(found), set(wanted)):
        makes = f"its configuration ({layer.kind}) makes {_shown(wanted)}"
        yield error("weight-shape", f"weights of shapes {_shown(found)}, and {makes}", where)


def _are_alike(found: set[Shape], wanted: set[Shape]) -> bool:
    """Tell whether each shape has one among the others that it could be."""
    if len(found) > _MAX_COMPARED or len(wanted) > _MAX_COMPARED:
        return True
    return all(any(_fits(shape, one) for one in wanted) for shape in found) and all(
        any(_fits(shape, one) for shape in found) for one in wanted
    )


def _fits(shape: Shape, wanted: Shape) -> bool:
    if shape is None or wanted is None:
        return True
    return len(shape) == len(wanted) and all(
        None in pair or pair[0] == pair[1] for pair in zip(shape, wanted, strict=True)
    )


def _shown(shapes: Sequence[Shape]) -> str:
    told = (
        "any" if one is None else "×".join("?" if n is None else str(n) for n in one) or "scalar"
        for one in shapes
    )
    return ", ".join(list(told)[:8]) + (", …" if len(shapes) > 8 else "")


def _foreign(name: str) -> Finding:
    return error("weight-extra", "weights of what is no layer of the configuration", f"{name:.200}")
