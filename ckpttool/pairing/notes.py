"""What a pairing has to say of how it came about, in people's words; names are as the files have them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ckpttool.checkpoint import Checkpoint
from ckpttool.pairing.families import family_of
from ckpttool.pairing.layers import Steps, steps_of
from ckpttool.pairing.layouts import LayoutItem
from ckpttool.pairing.pairs import Clash, Pair, Unpaired
from ckpttool.pairing.variable_names import INSIDE
from ckpttool.report import counted, first_names
from ckpttool.tensor import Role

_SHOWN = 3
_TURNS = {2: (1, 0), 3: (2, 1, 0), 4: (3, 2, 0, 1), 5: (4, 3, 0, 1, 2)}
"""How a kernel of so many axes is turned from one framework's layout into another's."""


def display_name(item: LayoutItem) -> str:
    """Return what a tensor is called in its file; what a rule joins, what it is compared under."""
    return item.sources[0].name if len(item.sources) == 1 else item.name


def notes_of(
    pairs: Sequence[Pair], clashes: Iterable[Clash], unpaired: Unpaired, crossings: Sequence[Pair] = ()
) -> list[str]:
    """Return what names were read as, what was left out of them, and which couldn't be told apart."""
    told = [pair for pair in pairs if pair.how == "convention"]
    named = [pair for pair in told if not _has_one_number(pair)]
    notes = [*_map_notes(pairs), *_prefix_notes(named), *_word_notes(named)]
    if len(named) < len(told):
        count = counted(len(told) - len(named), "tensor")
        notes.append(f"numbers of an optimizer's variables read as Keras's order ({count})")
    if crossings:
        notes.append(f"equal content, but in another order on either side: {_pair_list(crossings, '=')}")
    return [*notes, *_clash_notes(clashes, unpaired)]


def _map_notes(pairs: Iterable[Pair]) -> list[str]:
    found = [pair for pair in pairs if pair.how == "map"]
    return [f"the map paired {counted(len(found), 'tensor')}: {_pair_list(found, '→')}"] if found else []


def _pair_list(pairs: Sequence[Pair], between: str) -> str:
    told = ", ".join(f"{display_name(pair.a)} {between} {display_name(pair.b)}" for pair in pairs[:_SHOWN])
    return told + (f", and {len(pairs) - _SHOWN:,} more" if len(pairs) > _SHOWN else "")


def non_weight_notes(side: str, items: Sequence[LayoutItem]) -> list[str]:
    """Return that tensors are left out because they are no weights, with the names of a few."""
    if not items:
        return []
    optimizer = sum(item.tensor.role is Role.OPTIMIZER for item in items)
    others = [item.name for item in items if item.tensor.role is not Role.OPTIMIZER]
    parts = [f"{optimizer:,} of an optimizer"] if optimizer else []
    parts += [first_names(others)] if others else []
    return [f"{counted(len(items), 'tensor')} of {side} that are not weights left out: {'; '.join(parts)}"]


def _has_one_number(pair: Pair) -> bool:
    """Tell whether a pair is of an optimizer's variables of which one has a number in Keras's list alone."""
    places = [steps_of(item.sources[0].path) for item in (pair.a, pair.b)]
    is_number = [steps[-2:-1] == ("vars",) and steps[-1].isdecimal() for steps in places]
    return pair.a.tensor.role is Role.OPTIMIZER and is_number[0] != is_number[1]


def _prefix_notes(pairs: Iterable[Pair]) -> list[str]:
    found = Counter(_differing_prefixes(pair) for pair in pairs)
    del found["", ""]
    notes = [
        f"{_prefixes(ours, theirs)} left out ({counted(count, 'tensor')})"
        for (ours, theirs), count in found.most_common(_SHOWN)
    ]
    rest = found.total() - sum(count for _, count in found.most_common(_SHOWN))
    return notes + ([f"other prefixes left out ({counted(rest, 'tensor')})"] if rest else [])


def _prefixes(ours: str, theirs: str) -> str:
    if ours and theirs:
        return f"prefix {ours} of A and {theirs} of B"
    return f"prefix {ours} of A" if ours else f"prefix {theirs} of B"


def _differing_prefixes(pair: Pair) -> tuple[str, str]:
    """Return what stands in front of either name and not of the other."""
    (ours, theirs), inside = zip(*(_split_wrappers(item) for item in (pair.a, pair.b)), strict=True)
    same = 0
    while same < min(len(ours), len(theirs)) and ours[-1 - same] == theirs[-1 - same]:
        same += 1
    fronts = (ours[: len(ours) - same], theirs[: len(theirs) - same])
    both = zip(fronts, inside, strict=True)
    first, second = ("".join(f"{step}." for step in (*front, *wraps)) for front, wraps in both)
    return first, second


def _split_wrappers(item: LayoutItem) -> tuple[Steps, Steps]:
    """Return the steps to the layer of a tensor, and those of them that a wrapper added."""
    steps = steps_of(item.tensor.path)[:-1]
    return tuple(one for one in steps if one not in INSIDE), tuple(one for one in steps if one in INSIDE)


def _word_notes(pairs: Iterable[Pair]) -> list[str]:
    """Return which words for one thing were taken for each other, where no layout rule says it."""
    plain = [pair for pair in pairs if pair.a.rule is None and pair.b.rule is None]
    leaves = [(_last_step(pair.a), _last_step(pair.b)) for pair in plain]
    other = [pair for pair in leaves if pair[0] != pair[1] and not any(map(str.isdecimal, pair))]
    if not other:
        return []
    words = ", ".join(f"{ours} = {theirs}" for ours, theirs in dict.fromkeys(other))
    return [f"{words} ({counted(len(other), 'tensor')})"]


def _last_step(item: LayoutItem) -> str:
    return (steps_of(item.sources[0].path) or ("",))[-1]


def _clash_notes(clashes: Iterable[Clash], unpaired: Unpaired) -> list[str]:
    left = {id(item) for item in (*unpaired.a, *unpaired.b)}
    notes = []
    for clash in clashes:
        sides = [[item.sources[0].name for item in side if id(item) in left] for side in (clash.a, clash.b)]
        if all(sides):
            ours, theirs = (" and ".join(names[:_SHOWN]) for names in sides)
            notes.append(
                f"{ours} of A and {theirs} of B can't be told apart by their names, so none is paired by it"
            )
    return notes[:_SHOWN] + ([f"{len(notes) - _SHOWN:,} more like these"] if len(notes) > _SHOWN else [])


def unknown_layouts(pairs: Iterable[Pair], a: Checkpoint, b: Checkpoint) -> list[str]:
    """Return which matrices were compared as stored because nothing says what layer they are of."""
    names = [name for pair in pairs if pair.how != "content" for name in _unknown_matrices(pair, a, b)]
    if not names:
        return []
    return [f"compared as stored, for nothing says of what type of layer they are: {first_names(names)}"]


def split_undecided(pairs: Iterable[Pair], a: Checkpoint, b: Checkpoint) -> tuple[list[Pair], list[Pair]]:
    """Return the pairs that can be compared, and those that may lie otherwise without showing it."""
    decided: list[Pair] = []
    undecided: list[Pair] = []
    for pair in pairs:
        is_doubtful = pair.doubt is not None and pair.a.tensor.size == pair.b.tensor.size
        is_open = is_doubtful or (_fits_both_layouts(pair) and _unknown_matrices(pair, a, b))
        (undecided if is_open else decided).append(pair)
    return decided, undecided


def _unknown_matrices(pair: Pair, a: Checkpoint, b: Checkpoint) -> list[str]:
    """Return what a pair's matrix is called by frameworks that may hold it transposed, if nothing says it."""
    is_family = family_of(a.conventions) == family_of(b.conventions)
    if is_family or pair.how == "map" or pair.a.rule is not None or pair.b.rule is not None:
        return []
    return [
        item.sources[0].name
        for item, side in ((pair.a, a), (pair.b, b))
        if family_of(side.conventions) != "torch"
        and len(item.tensor.shape) > 1
        and item.sources[0].name not in side.layers
    ]


def _fits_both_layouts(pair: Pair) -> bool:
    """Tell whether a kernel has the shape that it has in the other layout, too, and other elements there."""
    shape, turn = pair.a.tensor.shape, _TURNS.get(len(pair.a.tensor.shape))
    is_same = turn is not None and shape == pair.b.tensor.shape == tuple(shape[axis] for axis in turn)
    return is_same and max(shape[0], shape[-1]) > 1
