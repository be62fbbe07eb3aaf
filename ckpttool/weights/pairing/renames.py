"""Renamed tensors: told by equal content, by the layer that they are in, by equal shape and position.

Content is told by a few elements spread over a tensor; where these are several tensors' own, by all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping

from ckpttool.core.tensor import Role
from ckpttool.weights.pairing.contents import checksum, sample
from ckpttool.weights.pairing.layers import Steps
from ckpttool.weights.pairing.layouts import LayoutItem
from ckpttool.weights.pairing.pairs import Pair, Unpaired
from ckpttool.weights.pairing.variable_names import LayerWords, bare_name, leaf_name

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
    by_content = unpaired.pairs[before:]
    pair_by_layer(unpaired)
    contents.match(unpaired, in_order=True)
    pair_by_shape(unpaired, words)
    return by_content


class _ContentMatcher:
    """What tensors hold: of each a sample, and the checksum of those whose samples are equal."""

    def __init__(self, unpaired: Unpaired, words: LayerWords | None) -> None:
        # Content tells something if both sides have tensors of the kind, and not of a counter.
        telling = (
            item
            for item in unpaired.a
            if item.tensor.values is not None
            and (item.tensor.size > 1 or (item.tensor.size == 1 and item.tensor.role is Role.WEIGHTS))
        )
        kinds = set(map(_kind, telling)) & set(map(_kind, unpaired.b))
        items = [item for item in (*unpaired.a, *unpaired.b) if _kind(item) in kinds]
        self._samples = {id(item): sample(item.tensor) for item in items}
        self._checksums: dict[int, int | None] = {}
        self._words = words

    def match(self, unpaired: Unpaired, *, in_order: bool = False) -> None:
        """Pair tensors of equal content; several with the same, if asked, in order where leaves are equal."""
        if self._words is not None:
            self._match(unpaired, self._words.of, in_order=in_order)
        self._match(unpaired, lambda item: None, in_order=in_order)

    def _match(self, unpaired: Unpaired, word: Callable[[LayoutItem], str | None], *, in_order: bool) -> None:
        unless = self._words.contradict if self._words is not None else lambda a, b: False

        def key(item: LayoutItem, content: Mapping[int, object], *more: Hashable) -> Hashable | None:
            held = content.get(id(item))
            return None if held is None else (_kind(item), held, word(item), *more)

        clashes = unpaired.match(lambda item: key(item, self._samples), "content", unless=unless)
        for a_items, b_items in clashes:
            for item in (*a_items, *b_items):
                if id(item) not in self._checksums:
                    self._checksums[id(item)] = checksum(item.tensor)
        unpaired.match(lambda item: key(item, self._checksums), "content", unless=unless)
        if in_order:
            unpaired.match(
                lambda item: key(item, self._checksums, leaf_name(item)),
                "content",
                in_order=True,
                unless=unless,
            )


def pair_by_layer(unpaired: Unpaired) -> None:
    """Pair the other tensors of a layer of which one was found under another name."""
    candidates: dict[tuple[Role, Steps], set[Steps]] = {}
    for pair in unpaired.pairs:
        if pair.how == "content":
            layer = bare_name(pair.a.tensor)[:-1]
            candidates.setdefault((pair.a.tensor.role, layer), set()).add(bare_name(pair.b.tensor)[:-1])
    counterparts = {key: next(iter(layers)) for key, layers in candidates.items() if len(layers) == 1}
    if not counterparts:
        return
    known = set(counterparts.values())
    theirs = {id(item) for item in unpaired.b}

    def key(item: LayoutItem) -> Hashable | None:
        """Return the variable and the layer of the second side; None if nothing says which that is."""
        role, layer = item.tensor.role, bare_name(item.tensor)[:-1]
        if id(item) in theirs:
            counterpart = layer if layer in known else None
        else:
            counterpart = counterparts.get((role, layer))
        return None if counterpart is None else (role, counterpart, leaf_name(item), item.tensor.shape)

    unpaired.match(key, "shape")


def pair_by_shape(unpaired: Unpaired, words: LayerWords | None) -> None:
    """Pair tensors of one kind and shape in order, where there are as many of them on both sides."""
    unpaired.a, unpaired.b = in_file_order(unpaired.a), in_file_order(unpaired.b)

    def key(item: LayoutItem, *more: Hashable) -> Hashable | None:
        if item.tensor.role not in (Role.WEIGHTS, Role.OPTIMIZER):
            return None
        return (item.tensor.role, leaf_name(item), item.tensor.shape, *more)

    if words is not None:
        unpaired.match(lambda item: key(item, words.of(item)), "shape", in_order=True)
    unpaired.match(key, "shape", in_order=True)
    if any(_NUMBER.fullmatch(leaf_name(item)) for item in (*unpaired.a, *unpaired.b)):
        # A variable that has nothing but a number, because nobody knows of what layer it is.
        unpaired.match(lambda item: _kind(item) if item.tensor.role is Role.WEIGHTS else None, "shape")


def _kind(item: LayoutItem) -> Kind:
    return item.tensor.role, item.tensor.dtype.name, item.tensor.shape


# Order ------------------------------------------------------------------------------------------------


def pair_by_optimizer_order(unpaired: Unpaired) -> None:
    """Pair what optimizers hold in order, where one side has Keras's numbers, and both have the same."""

    def list_index(item: LayoutItem) -> tuple[bool, int, str]:
        """Return what puts variables in the order of the list; what has no number in it, first."""
        match = _OPTIMIZER_LIST.search(item.sources[0].key or "")
        return _number_rank(match[1]) if match else (False, 0, "")

    ours, theirs = (
        sorted((item for item in in_file_order(side) if item.tensor.role is Role.OPTIMIZER), key=list_index)
        for side in (unpaired.a, unpaired.b)
    )
    has_numbers = any(
        side and all(_OPTIMIZER_NUMBER.fullmatch(item.tensor.name) for item in side)
        for side in (ours, theirs)
    )
    if has_numbers and list(map(_kind, ours)) == list(map(_kind, theirs)):
        unpaired.take(Pair(a, b, "convention") for a, b in zip(ours, theirs, strict=True))


def in_file_order(items: list[LayoutItem]) -> list[LayoutItem]:
    """Return tensors in the order of their file; where that is the alphabet's, with numbers counted."""
    names = [item.sources[0].name for item in items]
    if names != sorted(names):
        return items
    return sorted(
        items,
        key=lambda item: [_number_rank(part) for part in _DIGITS.split(item.sources[0].name) if part],
    )


def _number_rank(part: str) -> tuple[bool, int, str]:
    """Return what puts numbers in their order; they may be longer than Python makes integers of."""
    if not part.isdecimal():
        return False, 0, part
    number = part.lstrip("0")
    return True, len(number), number
