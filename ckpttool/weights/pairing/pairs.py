"""Pairs of tensors, and pairing by keys that are unique on each side."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ckpttool.core.layers import DoubtReason
from ckpttool.weights.pairing.layouts import LayoutItem

How = Literal["name", "convention", "map", "content", "shape"]
Key = Callable[[LayoutItem], "Hashable | None"]
Clash = tuple[Sequence[LayoutItem], Sequence[LayoutItem]]
"""Tensors of both sides with one key, too many to pair."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A tensor of each side, and the step that paired them."""

    a: LayoutItem
    b: LayoutItem
    how: How

    @property
    def doubt(self) -> DoubtReason | None:
        """Reason why the elements of one of them may be in another order than its rule assumes, or None."""
        return self.a.doubt or self.b.doubt


class Unpaired:
    """Unpaired tensors of both sides, in their order, and the pairs made so far."""

    def __init__(self, a: Iterable[LayoutItem], b: Iterable[LayoutItem]) -> None:
        self.a = list(a)
        self.b = list(b)
        self.pairs: list[Pair] = []

    def match(
        self,
        key: Key,
        how: How | Callable[[LayoutItem, LayoutItem], How],
        *,
        in_order: bool = False,
        unless: Callable[[LayoutItem, LayoutItem], bool] = lambda a, b: False,
    ) -> list[Clash]:
        """Pair the tensors whose key is unique on both sides; return the clashes.

        Args:
            key: Key of a tensor; None excludes it.
            how: The step recorded in the pairs.
            in_order: Whether equally many tensors of one key are paired in order.
            unless: Predicate that rejects a pair in spite of equal keys.
        """
        # A key that several tensors of a side share says nothing about which of them belong together. So they
        # stay unpaired, for a later step with a finer key, unless their order may decide.
        theirs = _group_by_key(self.b, key)
        clashes: list[Clash] = []
        pairs = []
        for value, a_items in _group_by_key(self.a, key).items():
            b_items = theirs.get(value)
            if b_items is None:
                continue
            if len(a_items) == len(b_items) and (in_order or len(a_items) == 1):
                pairs += [
                    Pair(a, b, how if isinstance(how, str) else how(a, b))
                    for a, b in zip(a_items, b_items, strict=True)
                    if not unless(a, b)
                ]
            else:
                clashes.append((a_items, b_items))
        self.add_pairs(pairs)
        return clashes

    def add_pairs(self, pairs: Iterable[Pair]) -> None:
        """Add pairs, and remove their tensors from the unpaired."""
        new = list(pairs)
        if new:
            self.pairs += new
            self.drop([pair.a for pair in new], [pair.b for pair in new])

    def drop(self, a: Iterable[LayoutItem], b: Iterable[LayoutItem]) -> None:
        """Remove tensors from the unpaired."""
        ours, theirs = {id(item) for item in a}, {id(item) for item in b}
        self.a = [item for item in self.a if id(item) not in ours]
        self.b = [item for item in self.b if id(item) not in theirs]


def _group_by_key(items: Iterable[LayoutItem], key: Key) -> dict[Hashable, list[LayoutItem]]:
    groups: dict[Hashable, list[LayoutItem]] = {}
    for item in items:
        if (value := key(item)) is not None:
            groups.setdefault(value, []).append(item)
    return groups
