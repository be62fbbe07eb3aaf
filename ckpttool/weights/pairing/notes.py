"""Notes on how tensors were paired, as sentences with the names in the files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.tensor import Role, Tensor
from ckpttool.core.text import counted, first_names
from ckpttool.formats.traits import Family, traits_of
from ckpttool.weights.pairing.layers import steps_of
from ckpttool.weights.pairing.layouts import LayoutItem
from ckpttool.weights.pairing.pairs import Clash, Pair, Unpaired
from ckpttool.weights.pairing.variable_names import WRAPPER_STEPS

_SHOWN = 3
_TURNS = {2: (1, 0), 3: (2, 1, 0), 4: (3, 2, 0, 1), 5: (4, 3, 0, 1, 2)}
"""Permutation of a kernel's axes between frameworks, by rank."""


def display_name(item: LayoutItem) -> str:
    """Return the name of a tensor in its file, or the name of the whole if it is fused from several."""
    return item.sources[0].name if len(item.sources) == 1 else item.name


def notes_of(
    pairs: Sequence[Pair], clashes: Iterable[Clash], unpaired: Unpaired, crossed: Sequence[Pair] = ()
) -> list[str]:
    """Return notes on mapped names, ignored prefixes, equated words, crossed contents and ambiguous names."""
    by_map = [pair for pair in pairs if pair.how == "map"]
    by_convention = [pair for pair in pairs if pair.how == "convention"]
    named = [pair for pair in by_convention if not _is_by_number(pair)]
    notes = []
    if by_map:
        notes.append(f"the map paired {counted(len(by_map), 'tensor')}: {_pair_list(by_map, '→')}")
    notes += [*_prefix_notes(named), *_word_notes(named)]
    if len(named) < len(by_convention):
        count = counted(len(by_convention) - len(named), "tensor")
        notes.append(f"numbers of an optimizer's variables read as Keras's order ({count})")
    if crossed:
        notes.append(f"equal content in a different order: {_pair_list(crossed, '=')}")
    return [*notes, *_clash_notes(clashes, unpaired)]


def _pair_list(pairs: Sequence[Pair], between: str) -> str:
    shown = ", ".join(f"{display_name(pair.a)} {between} {display_name(pair.b)}" for pair in pairs[:_SHOWN])
    return shown + (f", and {len(pairs) - _SHOWN:,} more" if len(pairs) > _SHOWN else "")


def _is_by_number(pair: Pair) -> bool:
    """Return whether a pair has an optimizer variable of Keras's numbered list on one side only."""
    # Keras numbers the variables of an optimizer (``optimizer/vars/5``), which shows neither slot nor weight.
    # If only one side has such a name, the pair rests on the order in which Keras creates the variables.
    paths = [steps_of(item.sources[0].path) for item in (pair.a, pair.b)]
    a, b = (steps[-2:-1] == ("vars",) and steps[-1].isdecimal() for steps in paths)
    return pair.a.tensor.role is Role.OPTIMIZER and a != b


def _prefix_notes(pairs: Iterable[Pair]) -> list[str]:
    """Return notes on ignored prefixes, the most frequent first."""
    counts = Counter(_differing_prefixes(pair) for pair in pairs)
    del counts["", ""]
    notes = []
    for (ours, theirs), count in counts.most_common(_SHOWN):
        if ours and theirs:
            prefixes = f"'{ours}' in A and '{theirs}' in B"
        else:
            prefixes = f"'{ours}' in A" if ours else f"'{theirs}' in B"
        notes.append(f"ignored the prefix {prefixes} ({counted(count, 'tensor')})")
    rest = counts.total() - sum(count for _, count in counts.most_common(_SHOWN))
    return notes + ([f"ignored other prefixes ({counted(rest, 'tensor')})"] if rest else [])


def _differing_prefixes(pair: Pair) -> tuple[str, str]:
    """Return the part before the common suffix of the two module paths, per side."""
    # Wrappers may occur at any depth, so they are compared apart from the other modules. A note has the
    # differing front, followed by the wrappers.
    modules = [steps_of(item.tensor.path)[:-1] for item in (pair.a, pair.b)]
    ours, theirs = ([step for step in steps if step not in WRAPPER_STEPS] for steps in modules)
    shared = 0
    while shared < min(len(ours), len(theirs)) and ours[-1 - shared] == theirs[-1 - shared]:
        shared += 1
    fronts = (ours[: len(ours) - shared], theirs[: len(theirs) - shared])
    wrappers = ([step for step in steps if step in WRAPPER_STEPS] for steps in modules)
    first, second = (
        "".join(f"{step}." for step in (*front, *inside))
        for front, inside in zip(fronts, wrappers, strict=True)
    )
    return first, second


def _word_notes(pairs: Iterable[Pair]) -> list[str]:
    """Return a note on variable names that were equated without a layout rule."""
    by_name = [pair for pair in pairs if pair.a.rule is None and pair.b.rule is None]
    leaves = [(_last_step(pair.a), _last_step(pair.b)) for pair in by_name]
    other = [pair for pair in leaves if pair[0] != pair[1] and not any(map(str.isdecimal, pair))]
    if not other:
        return []
    words = ", ".join(f"{ours} = {theirs}" for ours, theirs in dict.fromkeys(other))
    return [f"{words} ({counted(len(other), 'tensor')})"]


def _last_step(item: LayoutItem) -> str:
    return (steps_of(item.sources[0].path) or ("",))[-1]


def _clash_notes(clashes: Iterable[Clash], unpaired: Unpaired) -> list[str]:
    """Return notes on ambiguous names of tensors that are still unpaired."""
    alone = {id(item) for item in (*unpaired.a, *unpaired.b)}
    notes = []
    for clash in clashes:
        sides = [[item.sources[0].name for item in side if id(item) in alone] for side in clash]
        if all(sides):
            ours, theirs = (" and ".join(names[:_SHOWN]) for names in sides)
            notes.append(
                f"{ours} of A and {theirs} of B can't be distinguished by name, so none is paired by it"
            )
    return notes[:_SHOWN] + ([f"{len(notes) - _SHOWN:,} more like these"] if len(notes) > _SHOWN else [])


def non_weight_notes(side: str, items: Sequence[LayoutItem]) -> list[str]:
    """Return a note on tensors that were skipped because they aren't weights."""
    return [f"skipped {training_tensors(item.tensor for item in items)} in {side}"] if items else []


def training_tensors(tensors: Iterable[Tensor]) -> str:
    """Return the number of optimizer tensors, and the number and first names of other tensors, as text."""
    roles = [(tensor.role, tensor.name) for tensor in tensors]
    others = [name for role, name in roles if role is not Role.OPTIMIZER]
    optimizer = len(roles) - len(others)
    parts = [counted(optimizer, "optimizer tensor")] if optimizer else []
    parts += [f"{counted(len(others), 'other tensor')} ({first_names(others)})"] if others else []
    return " and ".join(parts)


# Unknown layouts --------------------------------------------------------------------------------------


def unknown_layouts(pairs: Iterable[Pair], a: Checkpoint, b: Checkpoint) -> list[str]:
    """Return a note on matrices that were compared as stored because their layers are unknown."""
    names = [name for pair in pairs if pair.how != "content" for name in _unknown_matrices(pair, a, b)]
    if not names:
        return []
    return [f"compared as stored, since their layers' types are unknown: {first_names(names)}"]


def split_undecided(pairs: Iterable[Pair], a: Checkpoint, b: Checkpoint) -> tuple[list[Pair], list[Pair]]:
    """Return the pairs that can be compared, and those whose layouts may differ."""
    decided: list[Pair] = []
    undecided: list[Pair] = []
    for pair in pairs:
        is_doubtful = pair.doubt is not None and pair.a.tensor.size == pair.b.tensor.size
        # A square kernel has one shape in both layouts, so comparing it as stored would succeed and be wrong.
        shape, turn = pair.a.tensor.shape, _TURNS.get(len(pair.a.tensor.shape))
        fits_both = turn is not None and shape == pair.b.tensor.shape == tuple(shape[axis] for axis in turn)
        fits_both = fits_both and max(shape[0], shape[-1]) > 1
        is_open = is_doubtful or (fits_both and _unknown_matrices(pair, a, b))
        (undecided if is_open else decided).append(pair)
    return decided, undecided


def _unknown_matrices(pair: Pair, a: Checkpoint, b: Checkpoint) -> list[str]:
    """Return the names of a pair's tensors that may be transposed since their layers are unknown."""
    is_one_family = traits_of(a.conventions).family == traits_of(b.conventions).family
    if is_one_family or pair.how == "map" or pair.a.rule is not None or pair.b.rule is not None:
        return []
    return [
        item.sources[0].name
        for item, side in ((pair.a, a), (pair.b, b))
        if traits_of(side.conventions).family is not Family.TORCH
        and len(item.tensor.shape) > 1
        and item.sources[0].name not in side.layers
    ]
