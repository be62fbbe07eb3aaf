"""Which variable of a ``.weights.h5`` is which weight of a listed ``.h5``: the orders of Keras 3.

A layer's weights are its own, then those of the layers that it is made of, in the order in which it made
them; an ``.h5`` has those that are trained before the others. ``.weights.h5`` numbers each layer's own, below
the name of the attribute that holds the layer. A layer that is not known, and consists of others, has no
order that can be told.

Source: Keras ``src/layers/layer.py``, ``src/legacy/saving/legacy_h5_format.py``,
``src/saving/saving_lib.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from ckpttool.formats.keras.layers import Layer, layer_of, layers_with_groups, snake_case, type_of, weights_of
from ckpttool.formats.keras.names import CLASSES

Parts = tuple[str, ...]

LAYERS_GROUP, VARS_GROUP = "layers", "vars"
_CONV_CELL = "ConvLSTMCell"
_OWN_STORE = frozenset({"TextVectorization", "StringLookup", "IntegerLookup", "Hashing", "FeatureSpace"})


class KerasRefusal(Exception):
    """Why a model can't be written as a Keras file, in a sentence that names the layer."""


class WeightSlot(NamedTuple):
    """One weight: its dataset among the numbered ones, what it is called, and if it is trained."""

    path: Parts
    name: Parts
    is_trained: bool


WeightCount = Callable[[Parts, Layer], int]
"""Tells how many weights of its own a layer has, whose group is named; raises ``KerasRefusal``."""


def weight_slots(layer: Layer, group: Parts, count: WeightCount) -> list[WeightSlot]:
    """Return the weights of one layer of a model, as a listed file has them.

    Args:
        layer: As the config has it.
        group: Where its numbered weights lie.
        count: See ``WeightCount``.

    Raises:
        KerasRefusal: Their order can't be told.
    """
    slots = list(_nested_slots(layer, group, (), count, is_inner=False))
    if len({slot.path for slot in slots}) < len(slots):
        raise KerasRefusal(f"layer {layer.name!r} contains a layer twice")
    if not layer.config.get("trainable", True):
        return slots
    return sorted(slots, key=lambda slot: not slot.is_trained)


def weight_names(model: Layer, paths: Mapping[str, Parts]) -> dict[str, str]:
    """Return what the layers of a model call their numbered weights.

    Args:
        model: As the config has it.
        paths: The datasets by the names of their tensors.

    Returns:
        Such as ``kernel``, by the names of tensors; without those whose layer has no known order.
    """
    tensors = {path: name for name, path in paths.items()}
    counts = Counter(path[:-2] for path in tensors if path[-2:-1] == (VARS_GROUP,))
    names: dict[str, str] = {}
    for layer, (group, _) in layers_with_groups(model):
        try:
            slots = weight_slots(layer, (LAYERS_GROUP, group), lambda at, _: counts[at])
        except KerasRefusal:
            continue
        names |= {tensors[slot.path]: slot.name[-1] for slot in slots if slot.path in tensors}
    return names


def _nested_slots(
    layer: Layer, group: Parts, name: Parts, count: WeightCount, *, is_inner: bool
) -> Iterator[WeightSlot]:
    parts = parts_of_layer(layer)
    own = count(group, layer)
    names = _weight_names(layer, own)
    if len(set(names)) < len(names):
        names = [f"{word}_{at}" for at, word in enumerate(names)]
    trained = own - type_of(layer.kind).untrained if layer.config.get("trainable", True) else 0
    if own and is_inner and layer.kind != _CONV_CELL and type_of(layer.kind).shapes is None:
        raise KerasRefusal(f"which weights of {layer.name!r} ({layer.kind}) are trained is not known")
    for at in range(own):
        yield WeightSlot((*group, VARS_GROUP, str(at)), (*name, names[at]), at < trained)
    for place, part in parts:
        yield from _nested_slots(part, (*group, *place), (*name, part.name), count, is_inner=True)


def _weight_names(layer: Layer, count: int) -> list[str]:
    layer_type = type_of("LSTMCell" if layer.kind.endswith("Cell") else layer.kind)
    known = layer_type.names
    if layer_type.kind in ("batch norm", "norm"):
        is_absent = {"gamma": not layer.config.get("scale"), "beta": not layer.config.get("center")}
        known = tuple(word for word in known if not is_absent.get(word))
    if layer_type.kind == "separable" or len(known) >= count:
        return list(known[:count])
    return [f"variable_{at}" for at in range(count)] if count > 1 else ["variable"] * count


def require_own_layer(layer: Layer) -> None:
    """Require that a layer stores its weights as Keras's own layers do, and not in an order of its own."""
    if not layer.is_known or layer.kind not in CLASSES:
        raise KerasRefusal(f"layer {layer.name!r} ({layer.kind}) is not one of Keras's own")
    if layer.kind in _OWN_STORE or (type_of(layer.kind).shapes is not None and weights_of(layer) is None):
        raise KerasRefusal(
            f"layer {layer.name!r} ({layer.kind}) was quantized, adapted or stores its own state"
        )


def parts_of_layer(layer: Layer) -> list[tuple[Parts, Layer]]:
    """Return the layers that a layer is made of, in its order, each with the path to its group."""
    if type_of(layer.kind).is_weightless:
        return []
    if layer.is_model:
        return [((LAYERS_GROUP, name), part) for part, (name, _) in layers_with_groups(layer)]
    if cell := type_of(layer.kind).cell:
        return [(("cell",), _made_layer(layer, f"{snake_case(layer.kind, '[a-z]+')}_cell", cell))]
    if layer.kind in ("MultiHeadAttention", "GroupQueryAttention", "GroupedQueryAttention"):
        return _attention_denses(layer)
    rule = _MADE_OF.get(layer.kind)
    return [] if rule is None else rule(layer.config)


def _made_layer(layer: Layer, name: str, kind: str, **more: Any) -> Layer:
    """Return a layer inside another one, described by the config of that."""
    config = {**layer.config, "name": name, **more}
    return Layer(name, kind, config, {**layer.node, "class_name": kind, "registered_name": None})


def _attention_denses(layer: Layer) -> list[tuple[Parts, Layer]]:
    mark = "" if layer.kind == "MultiHeadAttention" else "_"
    bias = "d" if layer.config.get("use_bias", True) else None
    names = {"query": "query", "key": "key", "value": "value", "output": "attention_output"}
    return [
        ((f"{mark}{word}_dense",), _made_layer(layer, name, "EinsumDense", bias_axes=bias))
        for word, name in names.items()
    ]


def _described_layer(node: object) -> Layer:
    layer = layer_of(node)
    if layer is None:
        raise KerasRefusal("a layer inside another is not described")
    return layer


def _stacked_cells(config: Mapping[str, Any]) -> list[tuple[Parts, Layer]]:
    used: Counter[str] = Counter()
    cells: list[tuple[Parts, Layer]] = []
    for node in config.get("cells", ()):
        cell = _described_layer(node)
        name = snake_case(cell.kind, "[a-z]+")
        cells.append((("cells", f"{name}_{used[name]}" if used[name] else name), cell))
        used[name] += 1
    return cells


def _bidirectional_layers(config: Mapping[str, Any]) -> list[tuple[Parts, Layer]]:
    forward = _described_layer(config.get("layer"))
    node = config.get("backward_layer")
    backward = (
        _described_layer(node) if node else _made_layer(forward, f"backward_{forward.name}", forward.kind)
    )
    return [(("forward_layer",), forward), (("backward_layer",), backward)]


_MADE_OF: dict[str, Callable[[Mapping[str, Any]], list[tuple[Parts, Layer]]]] = {
    "Bidirectional": _bidirectional_layers,
    "RNN": lambda config: [(("cell",), _described_layer(config.get("cell")))],
    "StackedRNNCells": _stacked_cells,
    "TimeDistributed": lambda config: [(("layer",), _described_layer(config.get("layer")))],
}


def own_weight_count(group: Parts, layer: Layer) -> int:
    """Return how many weights of its own a layer makes, by its config; a ``WeightCount``."""
    if type_of(layer.kind).is_weightless or layer.is_model or parts_of_layer(layer):
        return 0
    if layer.kind == _CONV_CELL:
        return 3 if layer.config.get("use_bias", True) else 2
    require_own_layer(layer)
    shapes = weights_of(layer)
    if shapes is None:
        raise KerasRefusal(f"how many weights layer {layer.name!r} ({layer.kind}) has is not known")
    return len(shapes)
