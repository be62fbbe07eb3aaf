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
from ckpttool.pairing.families import family_of
from ckpttool.pairing.layers import Steps
from ckpttool.pairing.layouts import (
    DENSE,
    FLATTENED,
    LayoutItem,
    stored_item,
    torch_layout_items,
    torch_name_items,
)
from ckpttool.pairing.map_file import TensorMap
from ckpttool.pairing.map_rules import Becomes, apply_map
from ckpttool.pairing.notes import display_name, non_weight_notes, notes_of, split_undecided, unknown_layouts
from ckpttool.pairing.pairs import Clash, How, Pair, Unpaired
from ckpttool.pairing.renames import find_renames, in_file_order, pair_by_optimizer_order
from ckpttool.pairing.second_names import copies_among, pair_copies, take_second_names
from ckpttool.pairing.split_parameters import fuse_split_parameters
from ckpttool.pairing.twin_layers import layer_order, pair_twin_layers
from ckpttool.pairing.variable_names import (
    bare_name,
    crossed_pairs,
    is_bookkeeping,
    own_layer_names,
    torch_name,
    under_own_names,
)
from ckpttool.report import counted
from ckpttool.tensor import Role, Tensor

__all__ = ["How", "Layout", "Pair", "Pairing", "PairingOptions", "pair_up"]

Layout = Literal["auto", "as-is"]

_MAX_WRAPPED = 16
"""Modules around a model; nobody wraps it in more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairingOptions:
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
    removed: tuple[LayoutItem, ...] = ()
    added: tuple[LayoutItem, ...] = ()
    bookkeeping: tuple[tuple[Literal["a", "b"], LayoutItem], ...] = ()
    notes: tuple[str, ...] = ()
    crossed: tuple[tuple[str, str], ...] = ()
    undecided: tuple[Pair, ...] = ()
    unmatched: tuple[str, ...] = ()
    ordered: tuple[Pair, ...] = ()
    seconds: tuple[tuple[Tensor, str], ...] = ()


def pair_up(a: Checkpoint, b: Checkpoint, wishes: PairingOptions = PairingOptions()) -> Pairing:
    """Return which tensor of ``a`` is which of ``b``.

    Where content is looked at and can't be read, it tells nothing; whoever compares the tensors finds out.

    Raises:
        UsageError: A rule of the map matches nothing, names what is several tensors' name, or two rules give
            one name.
    """
    across = family_of(a.conventions) != family_of(b.conventions)
    notes: list[str] = []
    ours, theirs = (_participating_items(one, side, wishes, notes) for one, side in ((a, "A"), (b, "B")))
    unpaired = Unpaired(ours, theirs)
    is_one = not across and family_of(a.conventions) != "torch"
    layouts = _Layouts(a, wishes, is_one=is_one).of, _Layouts(b, wishes, is_one=is_one).of
    aside: list[LayoutItem] = []
    if wishes.mapping is not None:
        aside = apply_map(unpaired, wishes.mapping, layouts, flip=_leaves_torch(a, b))
    pair_copies(unpaired, (a.conventions, b.conventions))
    clashes = _pair_by_names(unpaired, layouts, as_stored=not across or wishes.layout == "as-is")
    clashes += _pair_by_own_names(unpaired, a, b, notes)
    told = find_renames(unpaired, across=across) if wishes.rename and wishes.content else []
    ordered = (
        pair_twin_layers(unpaired, (layer_order(a), layer_order(b)))
        if wishes.rename and not wishes.content
        else []
    )
    told_ties, seconds = take_second_names(unpaired, ours, theirs)
    notes += told_ties
    crossings = crossed_pairs(told, (_positions(ours), _positions(theirs))) if across else []
    pairs = _in_order_of(unpaired.pairs, ours)
    notes += notes_of(pairs, clashes, unpaired, crossings)
    pairs = [_as_stored_if_alike(pair, is_one=is_one) for pair in pairs]
    undecided: list[Pair] = []
    if wishes.layout == "auto":
        pairs, undecided = split_undecided(pairs, a, b)
        notes += unknown_layouts(pairs, a, b)
    left = [*unpaired.a, *aside], unpaired.b
    paired = [*pairs, *undecided]
    compared = [pair.a for pair in paired], [pair.b for pair in paired]
    books = [
        *_bookkeeping("a", left[0], compared[0], a, across),
        *_bookkeeping("b", left[1], compared[1], b, across),
    ]
    known = {id(item) for _, item in books}
    removed, added = (tuple(item for item in side if id(item) not in known) for side in left)
    return Pairing(
        tuple(pairs),
        removed,
        added,
        tuple(books),
        tuple(notes),
        tuple((display_name(pair.a), display_name(pair.b)) for pair in crossings),
        tuple(undecided),
        _unmatched_globs(wishes, a, b),
        tuple(ordered),
        tuple(seconds),
    )


def _bookkeeping(
    side: Literal["a", "b"],
    items: list[LayoutItem],
    compared: list[LayoutItem],
    checkpoint: Checkpoint,
    across: bool,
) -> Iterator[tuple[Literal["a", "b"], LayoutItem]]:
    copies = copies_among(items, compared, checkpoint.conventions)
    for item in items:
        if id(item) in copies or is_bookkeeping(item.sources[0], checkpoint.conventions, across=across):
            yield side, item


def _positions(items: list[LayoutItem]) -> dict[int, int]:
    return {id(item.tensor): at for at, item in enumerate(in_file_order(items))}


def _unmatched_globs(wishes: PairingOptions, a: Checkpoint, b: Checkpoint) -> tuple[str, ...]:
    items = [stored_item(tensor) for one in (a, b) for tensor in one.tensors] if wishes.ignore else []
    if wishes.only == "weights":
        items += _as_model([item for item in items if item.tensor.role is Role.WEIGHTS])
    return tuple(glob for glob in wishes.ignore if not any(_is_ignored(item, (glob,)) for item in items))


def _leaves_torch(a: Checkpoint, b: Checkpoint) -> bool:
    """Tell whether the first side is PyTorch's, so that rules that lead to its layout go backwards."""
    return family_of(a.conventions) == "torch" and family_of(b.conventions) != "torch"


def _participating_items(
    checkpoint: Checkpoint, side: str, wishes: PairingOptions, notes: list[str]
) -> list[LayoutItem]:
    """Return the tensors that take part, as stored."""
    items = [stored_item(tensor) for tensor in checkpoint.tensors]
    if wishes.only == "weights":
        notes += non_weight_notes(side, [item for item in items if item.tensor.role is not Role.WEIGHTS])
        items = _as_model([item for item in items if item.tensor.role is Role.WEIGHTS])
    kept = [item for item in items if not _is_ignored(item, wishes.ignore)]
    if len(kept) != len(items):
        notes.append(f"{len(items) - len(kept):,} of {len(items):,} tensors of {side} ignored")
    return kept


def _as_model(items: list[LayoutItem]) -> list[LayoutItem]:
    """Return a model's tensors under the model's names: without the key that its state dict has."""
    containers = {item.tensor.path[0] if len(item.tensor.path) > 1 else None for item in items}
    if len(containers) != 1 or not all(bare_name(item.tensor).front for item in items):
        return items
    return [replace(item, name=".".join(map(str, item.tensor.path[1:]))) for item in items]


def _is_ignored(item: LayoutItem, globs: Sequence[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs for name in (item.name, item.tensor.name))


class _Layouts:
    """What each stored tensor of a checkpoint becomes in PyTorch's layout; found out when first asked.

    Where both sides are of one other family, only its name becomes PyTorch's: ``is_one``.
    """

    def __init__(self, checkpoint: Checkpoint, wishes: PairingOptions, *, is_one: bool) -> None:
        self._checkpoint = checkpoint
        self._is_wanted = wishes.layout == "auto"
        self._items = torch_name_items if is_one else torch_layout_items

    def of(self, item: LayoutItem) -> list[LayoutItem]:
        """Return what a stored tensor becomes."""
        made = self._made.get(id(item.tensor), [item]) if self._is_wanted else [item]
        return [item] if len(made) == 1 and made[0].tensor is item.tensor else made

    @cached_property
    def _made(self) -> dict[int, list[LayoutItem]]:
        found: dict[int, list[LayoutItem]] = {}
        for item in self._items(self._checkpoint):
            found.setdefault(id(item.sources[0]), []).append(item)
        return found


# The ways ---------------------------------------------------------------------------------------------


def _pair_by_names(unpaired: Unpaired, layouts: tuple[Becomes, Becomes], *, as_stored: bool) -> list[Clash]:
    """Pair by names; return what conventions can't tell apart."""
    if as_stored:
        _pair_equal_names(unpaired)
    unpaired.a = [made for item in unpaired.a for made in layouts[0](item)]
    unpaired.b = [made for item in unpaired.b for made in layouts[1](item)]
    unpaired.a, unpaired.b = (
        fuse_split_parameters(unpaired.a, unpaired.b),
        fuse_split_parameters(unpaired.b, unpaired.a),
    )
    _pair_equal_names(unpaired)
    return _pair_by_convention(unpaired)


def _pair_equal_names(unpaired: Unpaired) -> None:
    """Pair equal names, two tensors of one name by their keys; what serves nobody knows what, with any."""
    unpaired.match(lambda item: item.tensor.path, _how_named, unless=_serve_others)
    unpaired.match(lambda item: (item.tensor.role, item.name), _how_named, in_order=True)
    unknown = {item.name for item in (*unpaired.a, *unpaired.b) if item.tensor.role is Role.OTHER}
    unpaired.match(lambda item: item.name if item.name in unknown else None, _how_named)


def _serve_others(a: LayoutItem, b: LayoutItem) -> bool:
    return a.tensor.role is not b.tensor.role and Role.OTHER not in (a.tensor.role, b.tensor.role)


def _how_named(a: LayoutItem, b: LayoutItem) -> How:
    return "name" if a.sources[0].name == b.sources[0].name else "convention"


def _pair_by_convention(unpaired: Unpaired) -> list[Clash]:
    """Pair names that are equal in PyTorch's words, then without what wraps a model; return what clashes."""
    unpaired.match(lambda item: _role_key(item, torch_name(item.tensor)), "convention")
    clashes = unpaired.match(lambda item: _role_key(item, bare_name(item.tensor).steps), "convention")
    pair_by_optimizer_order(unpaired)
    for flipped in (False, True):
        _pair_by_common_prefix(unpaired, flipped=flipped)
    return clashes


def _role_key(item: LayoutItem, steps: Steps) -> Hashable | None:
    return (item.tensor.role, steps) if steps else None


def _pair_by_own_names(unpaired: Unpaired, a: Checkpoint, b: Checkpoint, notes: list[str]) -> list[Clash]:
    """Pair layers that have numbers on one side by the names that their variables were given."""
    if not unpaired.a or not unpaired.b or not any(places := (own_layer_names(a), own_layer_names(b))):
        return []
    before = len(unpaired.pairs)
    unpaired.a, unpaired.b = under_own_names(unpaired.a, places[0]), under_own_names(unpaired.b, places[1])
    _pair_equal_names(unpaired)
    clashes = _pair_by_convention(unpaired)
    if count := len(unpaired.pairs) - before:
        notes.append(f"numbered layers taken by the names of their variables ({counted(count, 'tensor')})")
    return clashes


def _pair_by_common_prefix(unpaired: Unpaired, *, flipped: bool) -> None:
    """Pair the weights of which one side has all below more modules, if that is all that differs."""
    wrapped, plain = (unpaired.b, unpaired.a) if flipped else (unpaired.a, unpaired.b)
    deeper = {id(item): bare_name(item.tensor).steps for item in wrapped if item.tensor.role is Role.WEIGHTS}
    known = {bare_name(item.tensor).steps for item in plain if item.tensor.role is Role.WEIGHTS}
    depth = _wrapper_depth(set(deeper.values()), known)
    if depth is None:
        return

    def key(item: LayoutItem) -> Hashable | None:
        steps = bare_name(item.tensor).steps
        return _role_key(item, steps[depth:] if id(item) in deeper else steps)

    unpaired.match(lambda item: key(item) if item.tensor.role is Role.WEIGHTS else None, "convention")


def _wrapper_depth(deeper: set[Steps], known: set[Steps]) -> int | None:
    """Return the least number of modules around all names of one side that the other side hasn't got."""
    if len(known) < 2:
        return None
    for depth in range(1, min(len(_common_prefix(deeper)), _MAX_WRAPPED) + 1):
        shorter = {steps[depth:] for steps in deeper}
        if known <= shorter or shorter <= known:
            return depth
    return None


def _common_prefix(names: Collection[Steps]) -> Steps:
    if not names:
        return ()
    first, last = min(names), max(names)
    same = 0
    while same < min(len(first), len(last)) - 1 and first[same] == last[same]:
        same += 1
    return first[:same]


def _in_order_of(pairs: Iterable[Pair], items: Iterable[LayoutItem]) -> list[Pair]:
    order = {id(item.tensor): at for at, item in enumerate(items)}
    return sorted(pairs, key=lambda pair: order.get(id(pair.a.sources[0]), len(order)))


def _as_stored_if_alike(pair: Pair, *, is_one: bool) -> Pair:
    """Return a pair as stored if both sides hold it alike: no rule can be wrong, and it is read faster."""
    a, b = pair.a, pair.b
    if len(a.sources) != 1 or len(b.sources) != 1 or (pair.how == "map" and is_one):
        return pair
    rules = {a.rule, b.rule}
    is_alike = None not in rules and (len(rules) == 1 or rules == {DENSE, FLATTENED})
    is_alike &= a.sources[0].shape == b.sources[0].shape and a.tensor.size == a.sources[0].size
    if not is_one and not is_alike:
        return pair
    return Pair(stored_item(a.sources[0]), stored_item(b.sources[0]), pair.how)
