"""Tensors that are not paired yet, and pairing by a key: only if it is one tensor's on each side."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ckpttool.core.layers import DoubtReason
from ckpttool.weights.pairing.layouts import LayoutItem

How = Literal["name", "convention", "map", "content", "shape"]
Keyed = Callable[[LayoutItem], "Hashable | None"]
Clash = tuple[Sequence[LayoutItem], Sequence[LayoutItem]]
"""Tensors of both sides that share a key."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One tensor on both sides, and how that was found."""

    a: LayoutItem
    b: LayoutItem
    how: How

    @property
    def doubt(self) -> DoubtReason | None:
        """Return why one of them may be in another order than the rule says that was followed, or None."""
        return self.a.doubt or self.b.doubt


class Unpaired:
    """The tensors of both sides that no pair has yet, in their order, and the pairs."""

    def __init__(self, a: Iterable[LayoutItem], b: Iterable[LayoutItem]) -> None:
        self.a = list(a)
        self.b = list(b)
        self.pairs: list[Pair] = []

    def match(
        self,
        key: Keyed,
        how: How | Callable[[LayoutItem, LayoutItem], How],
        *,
        in_order: bool = False,
        unless: Callable[[LayoutItem, LayoutItem], bool] = lambda a, b: False,
    ) -> list[Clash]:
        """Pair the tensors that are alone on their side with a key; return those that share one.

        Args:
            key: What is looked at; None is no key.
            how: What tells that they are one.
            in_order: Whether as many on both sides are paired in their order.
            unless: What tells that two of one key are not one all the same.
        """
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
        self.take(pairs)
        return clashes

    def take(self, pairs: Iterable[Pair]) -> None:
        """Add pairs, and drop their tensors from the unpaired."""
        new = list(pairs)
        if new:
            self.pairs += new
            self.drop([pair.a for pair in new], [pair.b for pair in new])

    def drop(self, a: Iterable[LayoutItem], b: Iterable[LayoutItem]) -> None:
        """Drop tensors that are to be paired with none."""
        ours, theirs = {id(item) for item in a}, {id(item) for item in b}
        self.a = [item for item in self.a if id(item) not in ours]
        self.b = [item for item in self.b if id(item) not in theirs]


def _group_by_key(items: Iterable[LayoutItem], key: Keyed) -> dict[Hashable, list[LayoutItem]]:
    groups: dict[Hashable, list[LayoutItem]] = {}
    for item in items:
        if (value := key(item)) is not None:
            groups.setdefault(value, []).append(item)
    return groups
