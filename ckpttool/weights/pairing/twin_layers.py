"""Layers that have other names on either side, paired by what they hold: which variables, of which shapes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.tensor import Role
from ckpttool.weights.pairing.layers import Steps
from ckpttool.weights.pairing.layouts import LayoutItem
from ckpttool.weights.pairing.pairs import Pair, Unpaired
from ckpttool.weights.pairing.renames import in_file_order
from ckpttool.weights.pairing.variable_names import LayerWords, bare_name, leaf_name

Layers = dict[Steps, dict[str, LayoutItem]]
"""The weights by layer and variable."""
Order = Mapping[str, int]
_BOOKKEEPING = "num_batches_tracked"
_GROUPS = ("/layers/", "layers.")
"""How keys, and names without a key, begin in a file of Keras that has groups for layers."""


def pair_twin_layers(unpaired: Unpaired, orders: tuple[Order, Order]) -> list[Pair]:
    """Pair the layers of which each side has one like it; return those pairs that only order tells.

    Several layers that are alike are paired in order, and only where all layers that are left follow each
    other in the same order on both sides.

    Args:
        unpaired: Both sides.
        orders: Of either side, where layers stand, by their names, if the files say it.
    """
    words = LayerWords(unpaired)
    for known_words in (words, None):  # what layers are called tells more of them apart
        ours, theirs = (_layers_in_order(unpaired.a, orders[0]), _layers_in_order(unpaired.b, orders[1]))
        singles = [_single_layers(side, known_words) for side in (ours, theirs)]
        shared = [(place, singles[1][key]) for key, place in singles[0].items() if key in singles[1]]
        unpaired.take(_pairs_of_layers((ours[a], theirs[b]) for a, b in shared))
    ours, theirs = (_layers_in_order(unpaired.a, orders[0]), _layers_in_order(unpaired.b, orders[1]))
    if [_layer_key(one, None) for one in ours.values()] != [_layer_key(one, None) for one in theirs.values()]:
        return []
    by_order = _pairs_of_layers(zip(ours.values(), theirs.values(), strict=True))
    unpaired.take(by_order)
    return by_order


def _layers_in_order(items: Sequence[LayoutItem], order: Order) -> Layers:
    """Return the weights by layer and variable, in the order that the files say, or of the tensors."""
    layers: Layers = {}
    for item in in_file_order([*items]):
        if item.tensor.role is Role.WEIGHTS and (place := bare_name(item.tensor)[:-1]):
            layers.setdefault(place, {})[leaf_name(item)] = item
    if not order:
        return layers
    position = {place: next((order[step] for step in place if step in order), len(order)) for place in layers}
    return {place: layers[place] for place in sorted(layers, key=position.__getitem__)}


def _layer_key(layer: Mapping[str, LayoutItem], words: LayerWords | None) -> Hashable:
    """Return what layers that are alike have in common: variables of these shapes, and a word."""
    kinds = frozenset((name, one.tensor.shape) for name, one in layer.items() if name != _BOOKKEEPING)
    return kinds if words is None else (kinds, frozenset(words.of(one) for one in layer.values()))


def _single_layers(layers: Layers, words: LayerWords | None) -> dict[Hashable, Steps]:
    """Return the layers that are like no other of their side, by what they hold."""
    places: dict[Hashable, list[Steps]] = {}
    for place, layer in layers.items():
        places.setdefault(_layer_key(layer, words), []).append(place)
    return {key: alike[0] for key, alike in places.items() if len(alike) == 1}


def _pairs_of_layers(
    layers: Iterable[tuple[Mapping[str, LayoutItem], Mapping[str, LayoutItem]]],
) -> list[Pair]:
    return [Pair(item, b[name], "shape") for a, b in layers for name, item in a.items() if name in b]


def layer_order(checkpoint: Checkpoint) -> dict[str, int]:
    """Return where each layer stands in a model of Keras, by its name.

    A configuration says it; without one, the groups do, which lie in the model's order class by class.
    """
    model = checkpoint.metadata.get("model_config")
    config = model.get("config") if isinstance(model, dict) else None
    layers = config.get("layers") if isinstance(config, dict) else config
    stored = [one for one in checkpoint.tensors if (one.key or one.name).startswith(_GROUPS)]
    if any(one.key is None for one in stored):
        return {}  # groups with the names of other layers
    names: list[object]
    if isinstance(layers, list):
        configs = [layer.get("config") if isinstance(layer, dict) else None for layer in layers]
        names = [one.get("name") if isinstance(one, dict) else None for one in configs]
    else:
        names = [str(one.path[0]) for one in stored]
    texts = [name if isinstance(name, str) else "" for name in names]
    return {name: at for at, name in enumerate(dict.fromkeys(texts)) if name}
