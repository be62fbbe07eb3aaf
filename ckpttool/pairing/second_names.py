"""Tensors that one side holds under two names: ties, copies in TensorFlow's exports, Paddle's cells."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence

from ckpttool.pairing.contents import same_checksums, same_content, same_samples
from ckpttool.pairing.layers import steps_of
from ckpttool.pairing.layouts import LayoutItem, stored_item
from ckpttool.pairing.pairs import Unpaired
from ckpttool.pairing.variable_names import bare_name
from ckpttool.tensor import Role, Tensor

FORMATS = ("tensorflow", "savedmodel")
_LISTS = ("_all_variables", "keras_api")
_CELL = re.compile(r"(?P<of>.+)\.(?P<at>\d+)\.cell(_(?P<way>fw|bw))?\.(?P<what>(weight|bias)_(ih|hh))")
_SHOWN = 3
Seconds = list[tuple[Tensor, str]]
"""Tensors of the second side with the name under which each is paired."""


def pair_copies(unpaired: Unpaired, formats: tuple[str, str]) -> None:
    """Pair the items of such lists on both sides by the variables that they are copies of."""
    if not all(one in FORMATS for one in formats):
        return
    copied = {**_copy_keys(unpaired.a), **_copy_keys(unpaired.b)}
    unpaired.match(lambda item: copied.get(id(item)), "name")


def _may_be_copy(item: LayoutItem) -> bool:
    return item.tensor.role is Role.OTHER and steps_of(item.tensor.path)[:1] in [(name,) for name in _LISTS]


def may_be_copy(tensor: Tensor, format: str) -> bool:
    """Tell whether a tensor may be held once more under another name."""
    return format in FORMATS and _may_be_copy(stored_item(tensor))


def _copy_keys(items: Sequence[LayoutItem]) -> dict[int, Hashable]:
    """Return for each copy what it is a copy of; where several are equal, one each in the order of names."""
    found: dict[int, Hashable] = {}
    for group in same_samples(_candidates(items)):
        for same in [group] if len(group) == 2 else same_checksums(group):
            copies = [item for item in same if _may_be_copy(item)]
            names = sorted(bare_name(item.tensor).steps for item in same if not _may_be_copy(item))
            found |= {
                id(copy): (steps_of(copy.tensor.path)[0], steps)
                for copy, steps in zip(copies, names, strict=False)
            }
    return found


def _candidates(items: Sequence[LayoutItem]) -> list[LayoutItem]:
    copies = [item for item in items if _may_be_copy(item)]
    kinds = {(item.tensor.dtype.name, item.tensor.shape) for item in copies}
    owned = [
        item
        for item in items
        if not _may_be_copy(item)
        and item.tensor.role is not Role.OPTIMIZER
        and (item.tensor.dtype.name, item.tensor.shape) in kinds
    ]
    return [*copies, *owned]


def copies_among(items: Iterable[LayoutItem], compared: Iterable[LayoutItem], format: str) -> set[int]:
    """Return which items hold what a compared one of their side does, to the last byte."""
    left = {id(item) for item in items if format in FORMATS and _may_be_copy(item)}
    if not left:
        return set()
    own = [item for item in items if id(item) in left]
    sources = [stored_item(source) for item in compared for source in item.sources]
    found = set()
    for group in same_samples(_candidates([*own, *sources])):
        if not {id(item) for item in group} & left:
            continue
        for same in same_checksums(group):
            if any(id(item) not in left for item in same):
                found |= {id(item) for item in same} & left
    return found


def take_second_names(
    unpaired: Unpaired, ours: Iterable[LayoutItem], theirs: Iterable[LayoutItem]
) -> tuple[list[str], Seconds]:
    """Take out what is paired under another name of the same tensor; return what there is to say of it."""
    if not unpaired.a and not unpaired.b:
        return [], []
    paired = {id(source) for pair in unpaired.pairs for item in (pair.a, pair.b) for source in item.sources}
    notes: list[str] = []
    seconds: Seconds = []
    for side, items, own in (("A", unpaired.a, ours), ("B", unpaired.b, theirs)):
        twins = _paired_twins(items, own, paired)
        found = [item for item in items if id(item) in twins]
        unpaired.drop(*((found, []) if side == "A" else ([], found)))
        seconds += [(item.sources[0], twins[id(item)]) for item in found if side == "B"]
        if found:
            told = ", ".join(f"{item.sources[0].name} is {twins[id(item)]}" for item in found[:_SHOWN])
            more = f", and {len(found) - _SHOWN:,} more" if len(found) > _SHOWN else ""
            notes.append(f"second names of {side} left out: {told}{more}")
    return notes, seconds


def _paired_twins(items: Iterable[LayoutItem], own: Iterable[LayoutItem], paired: set[int]) -> dict[int, str]:
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
        twin = twin or _paddle_rnn_twin(tensor, by_name, paired)
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


def _paddle_rnn_twin(tensor: Tensor, by_name: Mapping[str, list[Tensor]], paired: set[int]) -> Tensor | None:
    """Return what a Paddle RNN's cell is called in the RNN, if it holds the same."""
    match = _CELL.fullmatch(tensor.name)
    if match is None:
        return None
    name = f"{match['of']}.{match['what']}_l{match['at']}{'_reverse' * (match['way'] == 'bw')}"
    twin = next(iter(by_name.get(name, ())), None)
    is_same = twin is not None and id(twin) in paired and same_content(tensor, twin)
    return twin if is_same else None
