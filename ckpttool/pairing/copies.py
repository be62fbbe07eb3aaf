"""The private lists in which TensorFlow's exports hold every variable once more, in an order of their own."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from ckpttool.pairing.contents import alike, equal
from ckpttool.pairing.keys import bare
from ckpttool.pairing.layers import steps_of
from ckpttool.pairing.layouts import Item, stored
from ckpttool.pairing.matching import Unpaired
from ckpttool.tensor import Role, Tensor

FORMATS = ("tensorflow", "savedmodel")
_LISTS = ("_all_variables", "keras_api")


def pair_copies(unpaired: Unpaired, formats: tuple[str, str]) -> None:
    """Pair the items of such lists on both sides by the variables that they are copies of."""
    if not all(one in FORMATS for one in formats):
        return
    copied = {**_copied(unpaired.a), **_copied(unpaired.b)}
    unpaired.match(lambda item: copied.get(id(item)), "name")


def _may_be_copy(item: Item) -> bool:
    return item.tensor.role is Role.OTHER and steps_of(item.tensor.path)[:1] in [(name,) for name in _LISTS]


def may_be_copy(tensor: Tensor, format: str) -> bool:
    """Tell whether a tensor may be held once more under another name."""
    return format in FORMATS and _may_be_copy(stored(tensor))


def _copied(items: Sequence[Item]) -> dict[int, Hashable]:
    """Return for each copy what it is a copy of; where several are equal, one each in the order of names."""
    found: dict[int, Hashable] = {}
    for group in alike(_candidates(items)):
        for same in [group] if len(group) == 2 else equal(group):
            copies = [item for item in same if _may_be_copy(item)]
            names = sorted(bare(item.tensor).steps for item in same if not _may_be_copy(item))
            found |= {
                id(copy): (steps_of(copy.tensor.path)[0], steps)
                for copy, steps in zip(copies, names, strict=False)
            }
    return found


def _candidates(items: Sequence[Item]) -> list[Item]:
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


def copies_among(items: Iterable[Item], compared: Iterable[Item], format: str) -> set[int]:
    """Return which items hold what a compared one of their side does, to the last byte."""
    left = {id(item) for item in items if format in FORMATS and _may_be_copy(item)}
    if not left:
        return set()
    own = [item for item in items if id(item) in left]
    sources = [stored(source) for item in compared for source in item.sources]
    found = set()
    for group in alike(_candidates([*own, *sources])):
        if not {id(item) for item in group} & left:
            continue
        for same in equal(group):
            if any(id(item) not in left for item in same):
                found |= {id(item) for item in same} & left
    return found
