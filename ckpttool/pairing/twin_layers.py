"""Layers that have other names on either side, paired by what they hold: which variables, of which shapes."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence

from ckpttool.checkpoint import Checkpoint
from ckpttool.pairing.layers import Steps
from ckpttool.pairing.layouts import LayoutItem
from ckpttool.pairing.pairs import Pair, Unpaired
from ckpttool.pairing.renames import in_file_order
from ckpttool.pairing.variable_names import LayerWords, bare_name, leaf_name
from ckpttool.tensor import Role, Tensor

Layers = dict[Steps, dict[str, LayoutItem]]
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
    sides = tuple(
        _layers_in_order(side, order) for side, order in zip((unpaired.a, unpaired.b), orders, strict=True)
    )
    for has_words in (True, False):
        keys = [
            [_layer_key(layer, words if has_words else None) for layer in side.values()] for side in sides
        ]
        places = [dict(zip(side, found, strict=True)) for side, found in zip(sides, keys, strict=True)]
        unpaired.take(_pairs_of_layers(sides, [_unique_places(one) for one in places]))
        sides = tuple(
            _layers_in_order(side, order)
            for side, order in zip((unpaired.a, unpaired.b), orders, strict=True)
        )
    ours, theirs = ([_layer_key(layer, None) for layer in side.values()] for side in sides)
    if ours != theirs:
        return []
    told = _pairs_of_layers(sides, [dict(enumerate(side)) for side in sides])
    unpaired.take(told)
    return told


def _layers_in_order(items: Sequence[LayoutItem], order: Order) -> Layers:
    """Return the weights by layer and variable, in the order that the files say, or of the tensors."""
    found: Layers = {}
    for item in in_file_order([*items]):
        if item.tensor.role is Role.WEIGHTS and (place := bare_name(item.tensor).steps[:-1]):
            found.setdefault(place, {})[leaf_name(item)] = item
    if not order:
        return found
    return dict(sorted(found.items(), key=lambda one: _place_in_order(one[0], order)))


def _place_in_order(place: Steps, order: Order) -> int:
    return next((order[step] for step in place if step in order), len(order))


def _layer_key(layer: Mapping[str, LayoutItem], words: LayerWords | None) -> Hashable:
    kinds = frozenset((name, one.tensor.shape) for name, one in layer.items() if name != _BOOKKEEPING)
    return kinds if words is None else (kinds, frozenset(words.of(one) for one in layer.values()))


def _unique_places(places: Mapping[Steps, Hashable]) -> dict[Hashable, Steps]:
    """Return the places whose key is theirs alone."""
    found: dict[Hashable, list[Steps]] = {}
    for place, key in places.items():
        found.setdefault(key, []).append(place)
    return {key: own[0] for key, own in found.items() if len(own) == 1}


def _pairs_of_layers(sides: Collection[Layers], keyed: Sequence[Mapping[Hashable, Steps]]) -> list[Pair]:
    ours, theirs = sides
    pairs = []
    for key, place in keyed[0].items():
        if key in keyed[1]:
            a, b = ours[place], theirs[keyed[1][key]]
            pairs += [Pair(item, b[name], "shape") for name, item in a.items() if name in b]
    return pairs


def layer_order(checkpoint: Checkpoint) -> dict[str, int]:
    """Return where each layer stands in a model of Keras, by its name.

    A configuration says it; without one, the groups do, which lie in the model's order class by class.
    """
    told = checkpoint.metadata.get("model_config")
    config = told.get("config") if isinstance(told, dict) else None
    layers = config.get("layers") if isinstance(config, dict) else config
    stored = [one for one in checkpoint.tensors if (one.key or one.name).startswith(_GROUPS)]
    if any(one.key is None for one in stored):
        return {}  # groups with the names of other layers
    names = (
        [_configured_name(layer) for layer in layers]
        if isinstance(layers, list)
        else [*map(_outermost, stored)]
    )
    return {name: at for at, name in enumerate(dict.fromkeys(names)) if name}


def _outermost(tensor: Tensor) -> str:
    return str(tensor.path[0])


def _configured_name(layer: object) -> str:
    config = layer.get("config") if isinstance(layer, dict) else None
    name = config.get("name") if isinstance(config, dict) else None
    return name if isinstance(name, str) else ""
