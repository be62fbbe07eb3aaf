"""Which tensor of one checkpoint is which of another: by map, name, convention, content, shape.

Each way pairs what those before it have left, and only where it is sure: what a convention can't tell apart,
it doesn't pair. Roles pair with roles.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Literal

from ckpttool.checkpoint import Checkpoint
from ckpttool.pairing.alike import by_layers, order_of
from ckpttool.pairing.copies import copies_among, pair_copies
from ckpttool.pairing.families import family_of
from ckpttool.pairing.keys import bare, is_bookkeeping, spelled
from ckpttool.pairing.layers import Steps
from ckpttool.pairing.layouts import DENSE, FLATTENED, Item, in_torch_layout, stored, under_torch_names
from ckpttool.pairing.mapped import Becomes, apply_map
from ckpttool.pairing.mapping import TensorMap
from ckpttool.pairing.matching import Clash, How, Pair, Unpaired
from ckpttool.pairing.meeting import met
from ckpttool.pairing.notes import (
    no_weights_of,
    notes_of,
    shown,
    undecided_apart,
    unknown_layouts,
)
from ckpttool.pairing.own_names import by_own_names, own_places
from ckpttool.pairing.renames import by_optimizer_order, find_renames, in_order
from ckpttool.pairing.ties import take_ties
from ckpttool.pairing.words import crossed
from ckpttool.report import counted
from ckpttool.tensor import Role, Tensor

__all__ = ["How", "Layout", "Pair", "Pairing", "PairingWishes", "pair_up"]

Layout = Literal["auto", "as-is"]

_MAX_WRAPPED = 16
"""Modules around a model; nobody wraps it in more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairingWishes:
    """What is asked of a pairing.

    Attributes:
        layout: Whether tensors are brought to one layout by rules, or compared as stored.
        mapping: What the user's map file says.
        rename: Whether renames are looked for, by content and by shape.
        content: Whether equal content tells a rename; otherwise what a layer holds does.
        only: Whether all tensors are paired, or the model's alone.
        ignore: Globs of names; what they match is left out on both sides.
    """

    layout: Layout = "auto"
    mapping: TensorMap | None = None
    rename: bool = True
    content: bool = True
    only: Literal["weights", "all"] = "all"
    ignore: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pairing:
    """What is compared with what.

    Attributes:
        pairs: In the order of the first checkpoint.
        removed: What only the first checkpoint has.
        added: What only the second one has.
        bookkeeping: What only one of them has, and only its framework needs.
        notes: What was done to pair them, in people's words, with names as the files have them.
        crossed: The names, as the files have them, of those pairs that only content made, and that stand in
            another order on either side.
        undecided: Pairs of which nobody knows whether both sides are in one order: by a rule that may be the
            wrong one (``doubt``), or as stored, where one may be the other transposed. Not in ``pairs``.
        unmatched: Those globs of what is to be ignored that no tensor's name matches.
        ordered: Those pairs of layers that are alike of which only their order tells which is which.
        seconds: Tensors of the second one that are another by a second name, and the name that is paired.
    """

    pairs: tuple[Pair, ...]
    removed: tuple[Item, ...] = ()
    added: tuple[Item, ...] = ()
    bookkeeping: tuple[tuple[Literal["a", "b"], Item], ...] = ()
    notes: tuple[str, ...] = ()
    crossed: tuple[tuple[str, str], ...] = ()
    undecided: tuple[Pair, ...] = ()
    unmatched: tuple[str, ...] = ()
    ordered: tuple[Pair, ...] = ()
    seconds: tuple[tuple[Tensor, str], ...] = ()


def pair_up(a: Checkpoint, b: Checkpoint, wishes: PairingWishes = PairingWishes()) -> Pairing:
    """Return which tensor of ``a`` is which of ``b``.

    Where content is looked at and can't be read, it tells nothing; whoever compares the tensors finds out.

    Raises:
        UsageError: A rule of the map matches nothing, names what is several tensors' name, or two rules give
            one name.
    """
    across = family_of(a.conventions) != family_of(b.conventions)
    notes: list[str] = []
    ours, theirs = (_wanted(one, side, wishes, notes) for one, side in ((a, "A"), (b, "B")))
    unpaired = Unpaired(ours, theirs)
    is_one = not across and family_of(a.conventions) != "torch"
    layouts = _Layouts(a, wishes, is_one=is_one).of, _Layouts(b, wishes, is_one=is_one).of
    aside: list[Item] = []
    if wishes.mapping is not None:
        aside = apply_map(unpaired, wishes.mapping, layouts, flip=_leaves_torch(a, b))
    pair_copies(unpaired, (a.conventions, b.conventions))
    clashes = _by_names(unpaired, layouts, as_stored=not across or wishes.layout == "as-is")
    clashes += _by_own_names(unpaired, a, b, notes)
    told = find_renames(unpaired, across=across) if wishes.rename and wishes.content else []
    ordered = by_layers(unpaired, (order_of(a), order_of(b))) if wishes.rename and not wishes.content else []
    told_ties, seconds = take_ties(unpaired, ours, theirs)
    notes += told_ties
    crossings = crossed(told, (_places(ours), _places(theirs))) if across else []
    pairs = _sorted(unpaired.pairs, ours)
    notes += notes_of(pairs, clashes, unpaired, crossings)
    pairs = [_plain(pair, is_one=is_one) for pair in pairs]
    undecided: list[Pair] = []
    if wishes.layout == "auto":
        pairs, undecided = undecided_apart(pairs, a, b)
        notes += unknown_layouts(pairs, a, b)
    left = [*unpaired.a, *aside], unpaired.b
    paired = [*pairs, *undecided]
    compared = [pair.a for pair in paired], [pair.b for pair in paired]
    books = [*_books("a", left[0], compared[0], a, across), *_books("b", left[1], compared[1], b, across)]
    known = {id(item) for _, item in books}
    removed, added = (tuple(item for item in side if id(item) not in known) for side in left)
    return Pairing(
        tuple(pairs),
        removed,
        added,
        tuple(books),
        tuple(notes),
        tuple((shown(pair.a), shown(pair.b)) for pair in crossings),
        tuple(undecided),
        _unmatched(wishes, a, b),
        tuple(ordered),
        tuple(seconds),
    )


def _books(
    side: Literal["a", "b"], items: list[Item], compared: list[Item], checkpoint: Checkpoint, across: bool
) -> Iterator[tuple[Literal["a", "b"], Item]]:
    copies = copies_among(items, compared, checkpoint.conventions)
    for item in items:
        if id(item) in copies or is_bookkeeping(item.sources[0], checkpoint.conventions, across=across):
            yield side, item


def _places(items: list[Item]) -> dict[int, int]:
    return {id(item.tensor): at for at, item in enumerate(in_order(items))}


def _unmatched(wishes: PairingWishes, a: Checkpoint, b: Checkpoint) -> tuple[str, ...]:
    items = [stored(tensor) for one in (a, b) for tensor in one.tensors] if wishes.ignore else []
    if wishes.only == "weights":
        items += _as_model([item for item in items if item.tensor.role is Role.WEIGHTS])
    return tuple(glob for glob in wishes.ignore if not any(_ignored(item, (glob,)) for item in items))


def _leaves_torch(a: Checkpoint, b: Checkpoint) -> bool:
    """Tell whether the first side is PyTorch's, so that rules that lead to its layout go backwards."""
    return family_of(a.conventions) == "torch" and family_of(b.conventions) != "torch"


def _wanted(checkpoint: Checkpoint, side: str, wishes: PairingWishes, notes: list[str]) -> list[Item]:
    """Return the tensors that take part, as stored."""
    items = [stored(tensor) for tensor in checkpoint.tensors]
    if wishes.only == "weights":
        notes += no_weights_of(side, [item for item in items if item.tensor.role is not Role.WEIGHTS])
        items = _as_model([item for item in items if item.tensor.role is Role.WEIGHTS])
    kept = [item for item in items if not _ignored(item, wishes.ignore)]
    if len(kept) != len(items):
        notes.append(f"{len(items) - len(kept):,} of {len(items):,} tensors of {side} ignored")
    return kept


def _as_model(items: list[Item]) -> list[Item]:
    """Return a model's tensors under the model's names: without the key that its state dict has."""
    containers = {item.tensor.path[0] if len(item.tensor.path) > 1 else None for item in items}
    if len(containers) != 1 or not all(bare(item.tensor).front for item in items):
        return items
    return [replace(item, name=".".join(map(str, item.tensor.path[1:]))) for item in items]


def _ignored(item: Item, globs: Sequence[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs for name in (item.name, item.tensor.name))


class _Layouts:
    """What each stored tensor of a checkpoint becomes in PyTorch's layout; found out when first asked.

    Where both sides are of one other family, only its name becomes PyTorch's: ``is_one``.
    """

    def __init__(self, checkpoint: Checkpoint, wishes: PairingWishes, *, is_one: bool) -> None:
        self._checkpoint = checkpoint
        self._is_wanted = wishes.layout == "auto"
        self._items = under_torch_names if is_one else in_torch_layout

    def of(self, item: Item) -> list[Item]:
        """Return what a stored tensor becomes."""
        made = self._made.get(id(item.tensor), [item]) if self._is_wanted else [item]
        return [item] if len(made) == 1 and made[0].tensor is item.tensor else made

    @cached_property
    def _made(self) -> dict[int, list[Item]]:
        found: dict[int, list[Item]] = {}
        for item in self._items(self._checkpoint):
            found.setdefault(id(item.sources[0]), []).append(item)
        return found


# The ways ---------------------------------------------------------------------------------------------


def _by_names(unpaired: Unpaired, layouts: tuple[Becomes, Becomes], *, as_stored: bool) -> list[Clash]:
    """Pair by names; return what conventions can't tell apart.

    Args:
        unpaired: Both sides as stored; afterwards in one layout.
        layouts: Of either side, what each stored tensor is in PyTorch's layout; itself where not asked.
        as_stored: Whether equal names count before layouts do.
    """
    if as_stored:
        _equal_names(unpaired)
    unpaired.a = [made for item in unpaired.a for made in layouts[0](item)]
    unpaired.b = [made for item in unpaired.b for made in layouts[1](item)]
    unpaired.a, unpaired.b = met(unpaired.a, unpaired.b), met(unpaired.b, unpaired.a)
    _equal_names(unpaired)
    return _by_convention(unpaired)


def _equal_names(unpaired: Unpaired) -> None:
    """Pair equal names, two tensors of one name by their keys; what serves nobody knows what, with any."""
    unpaired.match(lambda item: item.tensor.path, _named, unless=_serve_others)
    unpaired.match(lambda item: (item.tensor.role, item.name), _named, in_order=True)
    unknown = {item.name for item in (*unpaired.a, *unpaired.b) if item.tensor.role is Role.OTHER}
    unpaired.match(lambda item: item.name if item.name in unknown else None, _named)


def _serve_others(a: Item, b: Item) -> bool:
    return a.tensor.role is not b.tensor.role and Role.OTHER not in (a.tensor.role, b.tensor.role)


def _named(a: Item, b: Item) -> How:
    return "name" if a.sources[0].name == b.sources[0].name else "convention"


def _by_convention(unpaired: Unpaired) -> list[Clash]:
    """Pair names that are equal in PyTorch's words, then without what wraps a model; return what clashes."""
    unpaired.match(lambda item: _keyed(item, spelled(item.tensor)), "convention")
    clashes = unpaired.match(lambda item: _keyed(item, bare(item.tensor).steps), "convention")
    by_optimizer_order(unpaired)
    for flipped in (False, True):
        _by_common_prefix(unpaired, flipped=flipped)
    return clashes


def _keyed(item: Item, steps: Steps) -> Hashable | None:
    return (item.tensor.role, steps) if steps else None


def _by_own_names(unpaired: Unpaired, a: Checkpoint, b: Checkpoint, notes: list[str]) -> list[Clash]:
    """Pair layers that have numbers on one side by the names that their variables were given."""
    if not unpaired.a or not unpaired.b or not any(places := (own_places(a), own_places(b))):
        return []
    before = len(unpaired.pairs)
    unpaired.a, unpaired.b = by_own_names(unpaired.a, places[0]), by_own_names(unpaired.b, places[1])
    _equal_names(unpaired)
    clashes = _by_convention(unpaired)
    if count := len(unpaired.pairs) - before:
        notes.append(f"numbered layers taken by the names of their variables ({counted(count, 'tensor')})")
    return clashes


def _by_common_prefix(unpaired: Unpaired, *, flipped: bool) -> None:
    """Pair the weights of which one side has all below more modules, if that is all that differs."""
    wrapped, plain = (unpaired.b, unpaired.a) if flipped else (unpaired.a, unpaired.b)
    deeper = {id(item): bare(item.tensor).steps for item in wrapped if item.tensor.role is Role.WEIGHTS}
    known = {bare(item.tensor).steps for item in plain if item.tensor.role is Role.WEIGHTS}
    depth = _wrapping(set(deeper.values()), known)
    if depth is None:
        return

    def key(item: Item) -> Hashable | None:
        steps = bare(item.tensor).steps
        return _keyed(item, steps[depth:] if id(item) in deeper else steps)

    unpaired.match(lambda item: key(item) if item.tensor.role is Role.WEIGHTS else None, "convention")


def _wrapping(deeper: set[Steps], known: set[Steps]) -> int | None:
    """Return the least number of modules around all names of one side that the other side hasn't got."""
    if len(known) < 2:
        return None
    for depth in range(1, min(len(_common(deeper)), _MAX_WRAPPED) + 1):
        shorter = {steps[depth:] for steps in deeper}
        if known <= shorter or shorter <= known:
            return depth
    return None


def _common(names: Collection[Steps]) -> Steps:
    if not names:
        return ()
    first, last = min(names), max(names)
    same = 0
    while same < min(len(first), len(last)) - 1 and first[same] == last[same]:
        same += 1
    return first[:same]


def _sorted(pairs: Iterable[Pair], items: Iterable[Item]) -> list[Pair]:
    order = {id(item.tensor): at for at, item in enumerate(items)}
    return sorted(pairs, key=lambda pair: order.get(id(pair.a.sources[0]), len(order)))


def _plain(pair: Pair, *, is_one: bool) -> Pair:
    """Return a pair as stored, where both sides hold it alike: no rule can be wrong, and it is read faster.

    Args:
        pair: As it came about.
        is_one: Whether both sides are of one family that is not PyTorch's.
    """
    a, b = pair.a, pair.b
    if len(a.sources) != 1 or len(b.sources) != 1 or (pair.how == "map" and is_one):
        return pair
    rules = {a.rule, b.rule}
    is_alike = None not in rules and (len(rules) == 1 or rules == {DENSE, FLATTENED})
    is_alike &= a.sources[0].shape == b.sources[0].shape and a.tensor.size == a.sources[0].size
    if not is_one and not is_alike:
        return pair
    return Pair(stored(a.sources[0]), stored(b.sources[0]), pair.how)
