"""Names that one side has for what it holds under another name, too: ties, and Paddle's second names."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping

from ckpttool.pairing.contents import same_content
from ckpttool.pairing.layouts import Item
from ckpttool.pairing.matching import Unpaired
from ckpttool.tensor import Tensor

_CELL = re.compile(r"(?P<of>.+)\.(?P<at>\d+)\.cell(_(?P<way>fw|bw))?\.(?P<what>(weight|bias)_(ih|hh))")
_SHOWN = 3


Seconds = list[tuple[Tensor, str]]
"""Tensors of the second side with the name under which each is paired."""


def take_ties(unpaired: Unpaired, ours: Iterable[Item], theirs: Iterable[Item]) -> tuple[list[str], Seconds]:
    """Take out what is paired under another name of the same tensor; return what there is to say of it."""
    if not unpaired.a and not unpaired.b:
        return [], []
    paired = {id(source) for pair in unpaired.pairs for item in (pair.a, pair.b) for source in item.sources}
    notes: list[str] = []
    seconds: Seconds = []
    for side, items, own in (("A", unpaired.a, ours), ("B", unpaired.b, theirs)):
        twins = _twins(items, own, paired)
        found = [item for item in items if id(item) in twins]
        unpaired.drop(*((found, []) if side == "A" else ([], found)))
        seconds += [(item.sources[0], twins[id(item)]) for item in found if side == "B"]
        if found:
            told = ", ".join(f"{item.sources[0].name} is {twins[id(item)]}" for item in found[:_SHOWN])
            more = f", and {len(found) - _SHOWN:,} more" if len(found) > _SHOWN else ""
            notes.append(f"second names of {side} left out: {told}{more}")
    return notes, seconds


def _twins(items: Iterable[Item], own: Iterable[Item], paired: set[int]) -> dict[int, str]:
    """Return for each tensor that is paired under another name that name."""
    by_name: dict[str, list[Tensor]] = {}
    for item in own:
        by_name.setdefault(item.sources[0].name, []).append(item.sources[0])
    tied: dict[Hashable, list[Tensor]] = {}
    for tensor in (one for same in by_name.values() for one in same):
        tied.setdefault(_owner(tensor, by_name), []).append(tensor)
    found = {}
    for item in items:
        tensor = item.sources[0]
        same = tied.get(_owner(tensor, by_name), []) if len(item.sources) == 1 else []
        twin = next((one for one in same if one is not tensor and id(one) in paired), None)
        twin = twin or _second(tensor, by_name, paired)
        if twin is not None:
            found[id(item)] = twin.name
    return found


def _owner(tensor: Tensor, by_name: Mapping[str, list[Tensor]]) -> Hashable:
    """Return what stands for the bytes that a tensor shows; a name may be several tensors'."""
    if tensor.shares_with is None:
        return id(tensor)
    named = [one for one in by_name.get(tensor.shares_with, ()) if one.shares_with is None]
    if not named:
        return tensor.shares_with  # which takes no part
    if len(named) > 1:
        named = [one for one in named if one.storage is not None and one.storage == tensor.storage]
    return id(named[0] if len(named) == 1 else tensor)


def _second(tensor: Tensor, by_name: Mapping[str, list[Tensor]], paired: set[int]) -> Tensor | None:
    """Return what a Paddle RNN's cell is called in the RNN, if it holds the same."""
    match = _CELL.fullmatch(tensor.name)
    if match is None:
        return None
    name = f"{match['of']}.{match['what']}_l{match['at']}{'_reverse' * (match['way'] == 'bw')}"
    twin = next(iter(by_name.get(name, ())), None)
    is_same = twin is not None and id(twin) in paired and same_content(tensor, twin)
    return twin if is_same else None
