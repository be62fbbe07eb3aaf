"""What the layer of a tensor is for, as its name says it, and what contradicts that."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable

from ckpttool.pairing.keys import bare
from ckpttool.pairing.layouts import Item
from ckpttool.pairing.matching import Pair, Unpaired
from ckpttool.tensor import Role

Class = tuple[Role, str, tuple[int, ...]]

_RECURRENT_LAYER = re.compile(r"_l\d+")
_PART = re.compile(
    r"(?:(?:w|to|fc|linear|lin|dense)_?)?(?:(?P<q>q|query)|(?P<k>k|key)|(?P<v>v|value)"
    r"|(?P<out>o|out|output|attention_output))(?:_?(?:proj|projection|lin|linear|dense|layer|fc))?"
)
"""The four layers of an attention, by the names that models give them."""


def leaf(item: Item) -> str:
    """Return what PyTorch calls the variable, whichever layer of a stack it is of."""
    steps = bare(item.tensor).steps
    return _RECURRENT_LAYER.sub("", steps[-1]) if steps else ""


def word_of(item: Item) -> str | None:
    """Return what the layer of a tensor is called, where that is a word and no number."""
    steps = bare(item.tensor).steps
    name = steps[-2].lstrip("_").lower() if len(steps) > 1 else ""
    if found := _PART.fullmatch(name):
        return found.lastgroup
    return name if name and not any(map(str.isdecimal, name)) else None


class Words:
    """The words that both sides have for layers, of what no pair has yet."""

    def __init__(self, unpaired: Unpaired) -> None:
        ours, theirs = ({_worded(item) for item in side} for side in (unpaired.a, unpaired.b))
        self._known = ours & theirs

    def of(self, item: Item) -> str | None:
        """Return what a tensor's layer is called, if the other side has a layer like it that is called so."""
        found = _worded(item)
        return found[1] if found in self._known else None

    def contradict(self, a: Item, b: Item) -> bool:
        """Tell whether both layers have names that the other side has for another one."""
        ours, theirs = self.of(a), self.of(b)
        return ours is not None and theirs is not None and ours != theirs


def _class(item: Item) -> Class:
    return item.tensor.role, leaf(item), item.tensor.shape


def _worded(item: Item) -> tuple[Class, str | None]:
    return _class(item), word_of(item)


def crossed(pairs: Iterable[Pair], places: tuple[dict[int, int], dict[int, int]]) -> list[Pair]:
    """Return the pairs that stand in another order on either side than others of their class.

    Args:
        pairs: Those that content alone made.
        places: Of either side, where each stored tensor stands in its order, by identity.
    """
    classes: dict[Hashable, list[Pair]] = {}
    for pair in pairs:
        words = {word_of(pair.a), word_of(pair.b)}
        key = (_class(pair.a), _class(pair.b), words.pop() if len(words) == 1 else None)
        classes.setdefault(key, []).append(pair)
    found = []
    for same in classes.values():
        ours = sorted(same, key=lambda pair: places[0][id(pair.a.sources[0])])
        theirs = sorted(same, key=lambda pair: places[1][id(pair.b.sources[0])])
        found += [pair for pair, other in zip(ours, theirs, strict=True) if pair is not other]
    return found
