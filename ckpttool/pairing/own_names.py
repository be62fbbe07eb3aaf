"""Layers by the names that their variables were given, where the path to them has only a number.

A functional model of Keras has ``_operations/1/_kernel`` in a checkpoint of TensorFlow, and ``d1/kernel``
in every file of its own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from ckpttool.checkpoint import Checkpoint
from ckpttool.pairing.layers import Steps, steps_of
from ckpttool.pairing.layouts import Item

_LISTS = ("_operations", "_layers", "layers")
_LAYER = re.compile(r"layer(_with_weights)?-\d+")


def own_places(checkpoint: Checkpoint) -> dict[Steps, Steps]:
    """Return for each place that is a number what the layer there is called, where that is one name."""
    names = checkpoint.own_names
    found: dict[Steps, set[Steps]] = {}
    for tensor in checkpoint.tensors if names else ():
        steps, own = steps_of(tensor.path), steps_of((names.get(tensor.name, ""),))
        depth = _numbered(steps)
        inside = len(steps) - depth
        if depth and len(own) > inside:
            found.setdefault(steps[:depth], set()).add(own[: len(own) - inside])
    single = {place: next(iter(told)) for place, told in found.items() if len(told) == 1}
    count = Counter(single.values())
    return {place: told for place, told in single.items() if count[told] == 1}


def _numbered(steps: Steps) -> int:
    """Return how many steps lead to the innermost layer that is called by a number; 0 where none is."""
    for depth in range(len(steps) - 1, 0, -1):
        is_item = depth > 1 and steps[depth - 1].isdecimal() and steps[depth - 2] in _LISTS
        if is_item or _LAYER.fullmatch(steps[depth - 1]):
            return depth
    return 0


def by_own_names(items: Iterable[Item], places: dict[Steps, Steps]) -> list[Item]:
    """Return items of which those in such a place are called by the layer's own name."""
    return [_called(item, places) for item in items]


def _called(item: Item, places: dict[Steps, Steps]) -> Item:
    steps = steps_of(item.tensor.path)
    depth = _numbered(steps)
    own = places.get(steps[:depth])
    if own is None:
        return item
    path = (*own, *steps[depth:])
    return replace(item, name=".".join(path), tensor=replace(item.tensor, path=path))
