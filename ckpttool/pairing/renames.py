"""Renamed tensors: told by equal content, by the layer that they are in, by equal shape and position.

Content is told by a few elements spread over a tensor; where these are several tensors' own, by all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable

from ckpttool.pairing.contents import checksum, sample
from ckpttool.pairing.layers import Steps
from ckpttool.pairing.layouts import LayoutItem
from ckpttool.pairing.pairs import Pair, Unpaired
from ckpttool.pairing.variable_names import LayerWords, bare_name, leaf_name
from ckpttool.tensor import Role

Kind = tuple[Role, str, tuple[int, ...]]

_DIGITS = re.compile(r"(\d+)")
_NUMBER = re.compile(r"\d+")
_OPTIMIZER_NUMBER = re.compile(r"optimizer\.vars\.\d+")
"""What ``.keras`` and ``.weights.h5`` have; ``.h5`` has names, in the same order."""

_OPTIMIZER_LIST = re.compile(r"(?:^|/)_variables/(\d+)/\.ATTRIBUTES/")
"""The same list in a checkpoint of TensorFlow, whose tensors people know by their kind and number."""


def find_renames(unpaired: Unpaired, *, across: bool) -> list[Pair]:
    """Pair what has another name on either side; return the pairs that nothing but content tells.

    Args:
        unpaired: Both sides.
        across: Whether they are of two families; then what stands for one thing in both is paired with it.
    """
    words = LayerWords(unpaired) if across else None
    contents = _ContentMatcher(unpaired, words)
    before = len(unpaired.pairs)
    contents.match(unpaired)
    told = unpaired.pairs[before:]
    pair_by_layer(unpaired)
    contents.match(unpaired, in_order=True)
    pair_by_shape(unpaired, words)
    return told


class _ContentMatcher:
    """What tensors hold: of each a sample, and the checksum of those whose samples are equal."""

    def __init__(self, unpaired: Unpaired, words: LayerWords | None) -> None:
        kinds = _shared_kinds(unpaired)
        items = [item for item in (*unpaired.a, *unpaired.b) if _kind(item) in kinds]
        self._samples = {id(item): sample(item.tensor) for item in items}
        self._sums: dict[int, int | None] = {}
        self._words = words

    def match(self, unpaired: Unpaired, *, in_order: bool = False) -> None:
        """Pair tensors of equal content; several with the same, if asked, in order where leaves are equal."""
        if self._words is not None:
            self._match(unpaired, self._words.of, in_order=in_order)
        self._match(unpaired, lambda item: None, in_order=in_order)

    def _match(self, unpaired: Unpaired, word: Callable[[LayoutItem], str | None], *, in_order: bool) -> None:
        unless = self._words.contradict if self._words is not None else lambda a, b: False
        clashes = unpaired.match(
            lambda item: _with_more(self._sampled(item), word(item)), "content", unless=unless
        )
        for clash in clashes:
            for item in (*clash.a, *clash.b):
                if id(item) not in self._sums:
                    self._sums[id(item)] = checksum(item.tensor)
        unpaired.match(lambda item: _with_more(self._summed(item), word(item)), "content", unless=unless)
        if in_order:
            unpaired.match(
                lambda item: _with_more(self._summed(item), (word(item), leaf_name(item))),
                "content",
                in_order=True,
                unless=unless,
            )

    def _sampled(self, item: LayoutItem) -> Hashable | None:
        found = self._samples.get(id(item))
        return None if found is None else (*_kind(item), found)

    def _summed(self, item: LayoutItem) -> Hashable | None:
        found = self._sums.get(id(item))
        return None if found is None else (*_kind(item), found)


def _with_more(key: Hashable | None, more: Hashable) -> Hashable | None:
    return None if key is None else (key, more)


def pair_by_layer(unpaired: Unpaired) -> None:
    """Pair the other tensors of a layer of which one was found under another name."""
    places: dict[tuple[Role, Steps], set[Steps]] = {}
    for pair in unpaired.pairs:
        if pair.how == "content":
            place = bare_name(pair.a.tensor).steps[:-1]
            places.setdefault((pair.a.tensor.role, place), set()).add(bare_name(pair.b.tensor).steps[:-1])
    to = {key: next(iter(found)) for key, found in places.items() if len(found) == 1}
    new = set(to.values())
    theirs = {id(item) for item in unpaired.b}

    def key(item: LayoutItem) -> Hashable | None:
        role, place = item.tensor.role, bare_name(item.tensor).steps[:-1]
        there = (place if place in new else None) if id(item) in theirs else to.get((role, place))
        return None if there is None else (role, there, leaf_name(item), item.tensor.shape)

    if to:
        unpaired.match(key, "shape")


def pair_by_optimizer_order(unpaired: Unpaired) -> None:
    """Pair what optimizers hold in order, where one side has Keras's numbers, and both have the same."""
    ours, theirs = (
        sorted(
            (item for item in in_file_order(side) if item.tensor.role is Role.OPTIMIZER),
            key=_optimizer_list_place,
        )
        for side in (unpaired.a, unpaired.b)
    )
    has_numbers = any(
        side and all(_OPTIMIZER_NUMBER.fullmatch(item.tensor.name) for item in side)
        for side in (ours, theirs)
    )
    if has_numbers and list(map(_kind, ours)) == list(map(_kind, theirs)):
        unpaired.take(Pair(a, b, "convention") for a, b in zip(ours, theirs, strict=True))


def _optimizer_list_place(item: LayoutItem) -> tuple[bool, int, str]:
    """Return what puts variables in the order of their optimizer's list; what has no number in it, first."""
    found = _OPTIMIZER_LIST.search(item.sources[0].key or "")
    return _rank(found[1]) if found else (False, 0, "")


def pair_by_shape(unpaired: Unpaired, words: LayerWords | None) -> None:
    """Pair tensors of one kind and shape in order, where there are as many of them on both sides."""
    unpaired.a, unpaired.b = in_file_order(unpaired.a), in_file_order(unpaired.b)

    def key(item: LayoutItem) -> Hashable | None:
        if item.tensor.role not in (Role.WEIGHTS, Role.OPTIMIZER):
            return None
        return (item.tensor.role, leaf_name(item), item.tensor.shape)

    if words is not None:
        unpaired.match(lambda item: _with_more(key(item), words.of(item)), "shape", in_order=True)
    unpaired.match(key, "shape", in_order=True)
    if any(_NUMBER.fullmatch(leaf_name(item)) for item in (*unpaired.a, *unpaired.b)):
        # A variable that has nothing but a number, because nobody knows of what layer it is.
        unpaired.match(_shape_alone, "shape")


def _shape_alone(item: LayoutItem) -> Hashable | None:
    return _kind(item) if item.tensor.role is Role.WEIGHTS else None


def in_file_order(items: list[LayoutItem]) -> list[LayoutItem]:
    """Return tensors in the order of their file; where that is the alphabet's, with numbers counted."""
    names = [item.sources[0].name for item in items]
    if names != sorted(names):
        return items
    return sorted(items, key=lambda item: _natural(item.sources[0].name))


def _natural(name: str) -> list[tuple[bool, int, str]]:
    return [_rank(part) for part in _DIGITS.split(name) if part]


def _rank(part: str) -> tuple[bool, int, str]:
    """Return what puts numbers in their order; they may be longer than Python makes integers of."""
    if not part.isdecimal():
        return False, 0, part
    number = part.lstrip("0")
    return True, len(number), number


def _kind(item: LayoutItem) -> Kind:
    return item.tensor.role, item.tensor.dtype.name, item.tensor.shape


def _shared_kinds(unpaired: Unpaired) -> set[Kind]:
    """Return the kinds of tensors that both sides have, of which the content is worth looking at."""
    return {_kind(item) for item in unpaired.a if _has_telling_content(item)} & {
        _kind(item) for item in unpaired.b
    }


def _has_telling_content(item: LayoutItem) -> bool:
    tensor = item.tensor
    return tensor.values is not None and (
        tensor.size > 1 or (tensor.size == 1 and tensor.role is Role.WEIGHTS)
    )
