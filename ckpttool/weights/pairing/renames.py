"""Pairs renamed tensors: by equal content, by layer, by equal shape and position.

Content is compared by a few elements spread over a tensor and, if several tensors share these, by the CRC-32
of all. ``pair_layers`` pairs without content: by the names and shapes of layers' variables.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

from isal import isal_zlib

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CheckpointError
from ckpttool.core.tensor import Role, Tensor
from ckpttool.formats.keras.layer_tree import layer_of
from ckpttool.weights.pairing.layers import Steps
from ckpttool.weights.pairing.layouts import LayoutItem
from ckpttool.weights.pairing.pairs import Pair, Unpaired
from ckpttool.weights.pairing.rearrangement import elements
from ckpttool.weights.pairing.variable_names import LayerWords, bare_name, leaf_name

Kind = tuple[Role, str, tuple[int, ...]]

_DIGITS = re.compile(r"(\d+)")
_NUMBER = re.compile(r"\d+")
_OPTIMIZER_NUMBER = re.compile(r"optimizer\.vars\.\d+")
"""Optimizer variables in ``.keras`` and ``.weights.h5``; ``.h5`` has other names in the same order."""

_OPTIMIZER_LIST = re.compile(r"(?:^|/)_variables/(\d+)/\.ATTRIBUTES/")
"""Keys of the same list in a TensorFlow checkpoint, whose tensors are named by kind and number."""
_Layers = dict[Steps, dict[str, LayoutItem]]
"""Weights by layer and variable."""
_Order = Mapping[str, int]
_BOOKKEEPING = "num_batches_tracked"
_GROUPS = ("/layers/", "layers.")
"""Prefixes of keys, or of names without a key, in a Keras file that groups variables by layer."""
_SAMPLES = 16
_SMALL = 1 << 12
"""Size in bytes up to which a tensor is faster to read as a whole than element by element."""


def find_renames(unpaired: Unpaired, *, families_differ: bool) -> list[Pair]:
    """Pair tensors whose names differ; return the pairs made by unique content.

    Args:
        unpaired: Unpaired tensors.
        families_differ: Whether the sides are of two families; tensors whose layers have one word in both are
            then paired first, and those with contradicting words never.
    """
    # Order matters: unique content is nearly certain; the layers that it pairs identify their other variables
    # (biases of zeros have no unique content); equal contents are then paired in order; shapes come last.
    words = LayerWords(unpaired) if families_differ else None
    contents = _ContentMatcher(unpaired, words)
    before = len(unpaired.pairs)
    contents.match(unpaired)
    by_content = unpaired.pairs[before:]
    pair_by_layer(unpaired)
    contents.match(unpaired, in_order=True)
    pair_by_shape(unpaired, words)
    return by_content


class _ContentMatcher:
    """Pairs by content: samples of all tensors, checksums only of those whose samples clash."""

    def __init__(self, unpaired: Unpaired, words: LayerWords | None) -> None:
        # Only tensors of kinds that both sides have are read. The content of a scalar identifies it only if
        # it is a weight: counters are often equal.
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
        """Pair tensors of unique content; with ``in_order``, also several of equal content and leaf name."""
        if self._words is not None:
            self._match(unpaired, self._words.shared_word, in_order=in_order)
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
    """Pair the remaining tensors of layers that are known from a pair by content."""
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
        """Return the key (role, layer on the second side, variable, shape); None if the layer is unknown."""
        role, layer = item.tensor.role, bare_name(item.tensor)[:-1]
        if id(item) in theirs:
            counterpart = layer if layer in known else None
        else:
            counterpart = counterparts.get((role, layer))
        return None if counterpart is None else (role, counterpart, leaf_name(item), item.tensor.shape)

    unpaired.match(key, "shape")


def pair_by_shape(unpaired: Unpaired, words: LayerWords | None) -> None:
    """Pair tensors of one variable name and shape in order, if both sides have equally many."""
    unpaired.a, unpaired.b = in_file_order(unpaired.a), in_file_order(unpaired.b)

    def key(item: LayoutItem, *more: Hashable) -> Hashable | None:
        if item.tensor.role not in (Role.WEIGHTS, Role.OPTIMIZER):
            return None
        return (item.tensor.role, leaf_name(item), item.tensor.shape, *more)

    if words is not None:
        unpaired.match(lambda item: key(item, words.shared_word(item)), "shape", in_order=True)
    unpaired.match(key, "shape", in_order=True)
    if any(_NUMBER.fullmatch(leaf_name(item)) for item in (*unpaired.a, *unpaired.b)):
        # Variables of layers of unknown type have numbers for names; a unique kind still pairs them.
        unpaired.match(lambda item: _kind(item) if item.tensor.role is Role.WEIGHTS else None, "shape")


def _kind(item: LayoutItem) -> Kind:
    return item.tensor.role, item.tensor.dtype.name, item.tensor.shape


# Order ------------------------------------------------------------------------------------------------


def pair_by_optimizer_order(unpaired: Unpaired) -> None:
    """Pair optimizer variables in order, if one side has Keras's numbered list and both have equal kinds."""

    def list_index(item: LayoutItem) -> tuple[bool, int, str]:
        """Return the sort key of a variable in the list; variables outside the list come first."""
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
        unpaired.add_pairs(Pair(a, b, "convention") for a, b in zip(ours, theirs, strict=True))


def in_file_order(items: list[LayoutItem]) -> list[LayoutItem]:
    """Return tensors in file order; if that is alphabetical, numbers in names are sorted as numbers."""
    # Some files list names alphabetically (HDF5 groups, for one), with layer 10 before layer 2.
    names = [item.sources[0].name for item in items]
    if names != sorted(names):
        return items
    return sorted(
        items,
        key=lambda item: [_number_rank(part) for part in _DIGITS.split(item.sources[0].name) if part],
    )


def _number_rank(part: str) -> tuple[bool, int, str]:
    """Return the natural sort key of a part of a name; numbers may be too long for ``int()``."""
    if not part.isdecimal():
        return False, 0, part
    number = part.lstrip("0")
    return True, len(number), number


# Contents -----------------------------------------------------------------------------------------------


def sample(tensor: Tensor) -> bytes | None:
    """Return some elements, or the checksum of a small or packed tensor; None if it can't be read."""
    if tensor.dtype.bits < 8 or tensor.nbytes <= _SMALL:
        total = checksum(tensor)
        return None if total is None else total.to_bytes(4, "little")
    last = tensor.size - 1
    positions = sorted({at * last // (_SAMPLES - 1) for at in range(_SAMPLES)})
    try:
        return elements(tensor, positions)
    except CheckpointError:  # reported when the tensor is compared
        return None


def checksum(tensor: Tensor) -> int | None:
    """Return the CRC-32 of all elements, or None if they can't be read."""
    total = 0
    try:
        for block in tensor.blocks():
            total = isal_zlib.crc32(block, total)
    except CheckpointError:
        return None
    return total


def same_content(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of one side are readable and have equal content."""
    if (a.dtype, a.shape) != (b.dtype, b.shape) or a.values is None or b.values is None:
        return False
    total = checksum(a)
    return total is not None and total == checksum(b)


def group_by_sample(items: Iterable[LayoutItem]) -> list[list[LayoutItem]]:
    """Return the groups of at least two items with equal dtype, shape and sample."""
    groups: dict[Hashable, list[LayoutItem]] = {}
    for item in items:
        tensor = item.tensor
        held = sample(tensor) if tensor.values is not None and tensor.size else None
        if held is not None:
            groups.setdefault((tensor.dtype.name, tensor.shape, held), []).append(item)
    return [group for group in groups.values() if len(group) > 1]


def group_by_checksum(items: Iterable[LayoutItem]) -> list[list[LayoutItem]]:
    """Return the groups of at least two items with equal checksums."""
    groups: dict[Hashable, list[LayoutItem]] = {}
    for item in items:
        total = checksum(item.tensor)
        if total is not None:
            groups.setdefault(total, []).append(item)
    return [group for group in groups.values() if len(group) > 1]


# Layers -------------------------------------------------------------------------------------------------


def pair_layers(unpaired: Unpaired, orders: tuple[_Order, _Order]) -> list[Pair]:
    """Pair layers by the names and shapes of their variables; return the pairs made by order only.

    Layers that are unique on both sides are paired first. The rest is paired in order only if the sequences
    of layers on both sides are identical.

    Args:
        unpaired: Unpaired tensors.
        orders: For each side, the position of layers by name; empty if unknown.
    """
    words = LayerWords(unpaired)
    for known_words in (words, None):  # with words, more layers are unique
        ours, theirs = (_layers_in_order(unpaired.a, orders[0]), _layers_in_order(unpaired.b, orders[1]))
        singles = [_single_layers(side, known_words) for side in (ours, theirs)]
        shared = [(place, singles[1][key]) for key, place in singles[0].items() if key in singles[1]]
        unpaired.add_pairs(_pairs_of_layers((ours[a], theirs[b]) for a, b in shared))
    ours, theirs = (_layers_in_order(unpaired.a, orders[0]), _layers_in_order(unpaired.b, orders[1]))
    if [_layer_key(one, None) for one in ours.values()] != [_layer_key(one, None) for one in theirs.values()]:
        return []
    by_order = _pairs_of_layers(zip(ours.values(), theirs.values(), strict=True))
    unpaired.add_pairs(by_order)
    return by_order


def _layers_in_order(items: Sequence[LayoutItem], order: _Order) -> _Layers:
    """Return the weights by layer and variable, in the model's order if known, else in file order."""
    layers: _Layers = {}
    for item in in_file_order([*items]):
        if item.tensor.role is Role.WEIGHTS and (place := bare_name(item.tensor)[:-1]):
            layers.setdefault(place, {})[leaf_name(item)] = item
    if not order:
        return layers
    position = {place: next((order[step] for step in place if step in order), len(order)) for place in layers}
    return {place: layers[place] for place in sorted(layers, key=position.__getitem__)}


def _layer_key(layer: Mapping[str, LayoutItem], words: LayerWords | None) -> Hashable:
    """Return the key of a layer: names and shapes of its variables, and its word."""
    kinds = frozenset((name, one.tensor.shape) for name, one in layer.items() if name != _BOOKKEEPING)
    return kinds if words is None else (kinds, frozenset(words.shared_word(one) for one in layer.values()))


def _single_layers(layers: _Layers, words: LayerWords | None) -> dict[Hashable, Steps]:
    """Return the layers whose key is unique on their side, by key."""
    places: dict[Hashable, list[Steps]] = {}
    for place, layer in layers.items():
        places.setdefault(_layer_key(layer, words), []).append(place)
    return {key: alike[0] for key, alike in places.items() if len(alike) == 1}


def _pairs_of_layers(
    layers: Iterable[tuple[Mapping[str, LayoutItem], Mapping[str, LayoutItem]]],
) -> list[Pair]:
    return [Pair(item, b[name], "shape") for a, b in layers for name, item in a.items() if name in b]


def layer_order(checkpoint: Checkpoint) -> dict[str, int]:
    """Return the position of each layer in a Keras model by name, from its configuration or its groups.

    Without a configuration, groups of layers of one class are in the model's order.
    """
    stored = [one for one in checkpoint.tensors if (one.key or one.name).startswith(_GROUPS)]
    if any(one.key is None for one in stored):
        return {}  # the groups have the names of other layers
    model = layer_of(checkpoint.metadata.get("model_config"))
    if model is not None and model.layers:
        names = [layer.name for layer in model.layers]
    else:
        names = [str(one.path[0]) for one in stored]
    return {name: at for at, name in enumerate(dict.fromkeys(names)) if name}
