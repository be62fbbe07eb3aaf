"""Pairs the tensors of two checkpoints: by map, name, convention, content and shape, in this order.

Each step pairs tensors that the steps before it left unpaired, and only if they are unambiguous to it.
Weights pair with weights, and optimizer state with optimizer state.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Literal

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.tensor import Role, Tensor
from ckpttool.core.text import counted
from ckpttool.formats.traits import Family, traits_of
from ckpttool.weights.pairing.layers import Steps
from ckpttool.weights.pairing.layouts import (
    DENSE,
    FLATTENED,
    LayoutItem,
    fuse_split_parameters,
    stored_item,
    torch_layout_items,
    torch_name_items,
)
from ckpttool.weights.pairing.map_file import LayoutConversion, TensorMap, apply_map
from ckpttool.weights.pairing.notes import (
    display_name,
    non_weight_notes,
    notes_of,
    split_undecided,
    unknown_layouts,
)
from ckpttool.weights.pairing.pairs import Clash, How, Pair, Unpaired
from ckpttool.weights.pairing.renames import (
    find_renames,
    in_file_order,
    layer_order,
    pair_by_optimizer_order,
    pair_layers,
)
from ckpttool.weights.pairing.second_names import copies_among, drop_second_names, pair_copies
from ckpttool.weights.pairing.variable_names import (
    bare_name,
    crossed_pairs,
    is_bookkeeping,
    numbered_layer_names,
    rename_numbered_layers,
    torch_name,
)

__all__ = ["How", "Layout", "Pair", "Pairing", "PairingOptions", "pair_up"]

Layout = Literal["auto", "as-is"]

_MAX_WRAPPED = 16
"""Maximum number of modules around a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairingOptions:
    """Options of a pairing.

    Attributes:
        layout: ``auto`` brings tensors to one layout by rules, ``as-is`` compares them as stored.
        mapping: The user's map file.
        rename: Whether renamed tensors are paired, by content and by shape.
        content: Whether renames are found by content; otherwise by the variables of layers.
        only: Whether all tensors are paired, or only the model's weights.
        ignore: Globs of names that are left out on both sides.
    """

    layout: Layout = "auto"
    mapping: TensorMap | None = None
    rename: bool = True
    content: bool = True
    only: Literal["weights", "all"] = "all"
    ignore: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pairing:
    """Result of ``pair_up``.

    Attributes:
        pairs: In the order of the first checkpoint.
        removed: Tensors of the first checkpoint alone.
        added: Tensors of the second one alone.
        bookkeeping: Unpaired tensors that only their framework needs, such as ``num_batches_tracked``.
        notes: Sentences on how tensors were paired, with names as in the files.
        crossed: Names in the files of pairs made by content alone whose order differs between the sides.
        undecided: Pairs that may hold their elements in different orders: the rule may be the wrong one
            (``doubt``), or one side may be the other transposed. Not in ``pairs``.
        unmatched: Globs of ``PairingOptions.ignore`` that match no tensor.
        ordered: Pairs of identical layers that only their order distinguishes.
        second_names: Tensors of the second checkpoint with the other name under which they are paired.
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
    second_names: tuple[tuple[Tensor, str], ...] = ()


def pair_up(a: Checkpoint, b: Checkpoint, options: PairingOptions = PairingOptions()) -> Pairing:
    """Return the pairing of the tensors of ``a`` and ``b``.

    Unreadable tensors aren't paired by content; their errors are raised when they are compared.

    Raises:
        UsageError: A rule of the map matches nothing, uses a name that several tensors have, or two rules
            give one name.
    """
    families = traits_of(a.conventions).family, traits_of(b.conventions).family
    families_differ = families[0] != families[1]
    # Two checkpoints of one family have the same layouts: their names become PyTorch's, and nothing is
    # transposed. Two of PyTorch need neither.
    names_only = not families_differ and families[0] is not Family.TORCH
    notes: list[str] = []
    ours, theirs = (_participants(one, side, options, notes) for one, side in ((a, "A"), (b, "B")))
    unpaired = Unpaired(ours, theirs)

    # From certain to likely. Names as stored are paired before the conversion only within a family; across
    # families, equal names may have different layouts. The second run pairs names as PyTorch has them.
    to_torch = (
        _layout_conversion(a, options, names_only=names_only),
        _layout_conversion(b, options, names_only=names_only),
    )
    without_counterpart: list[LayoutItem] = []
    if options.mapping is not None:
        from_torch = families[0] is Family.TORCH and families_differ
        without_counterpart = apply_map(unpaired, options.mapping, to_torch, from_torch=from_torch)
    pair_copies(unpaired, (a.conventions, b.conventions))
    if not families_differ or options.layout == "as-is":
        _pair_equal_names(unpaired)
    # Convert the unpaired to PyTorch's layouts, and fuse parameters that the other side has fused.
    first = [made for item in unpaired.a for made in to_torch[0](item)]
    second = [made for item in unpaired.b for made in to_torch[1](item)]
    unpaired.a, unpaired.b = fuse_split_parameters(first, second), fuse_split_parameters(second, first)
    _pair_equal_names(unpaired)
    clashes = _pair_by_convention(unpaired)
    clashes += _pair_by_own_names(unpaired, a, b, notes)
    by_content: list[Pair] = []
    by_order: list[Pair] = []
    if options.rename and options.content:
        by_content = find_renames(unpaired, families_differ=families_differ)
    elif options.rename:
        by_order = pair_layers(unpaired, (layer_order(a), layer_order(b)))
    tie_notes, second_names = drop_second_names(unpaired, ours, theirs)
    notes += tie_notes

    # Results, in the order of the first checkpoint. Pairs whose layouts are doubtful are set apart, and
    # tensors that only one framework needs don't count as removed or added.
    crossed = crossed_pairs(by_content, (_positions(ours), _positions(theirs))) if families_differ else []
    order = {id(item.tensor): at for at, item in enumerate(ours)}
    pairs = sorted(unpaired.pairs, key=lambda pair: order.get(id(pair.a.sources[0]), len(order)))
    notes += notes_of(pairs, clashes, unpaired, crossed)
    pairs = [_as_stored_if_alike(pair, names_only=names_only) for pair in pairs]
    undecided: list[Pair] = []
    if options.layout == "auto":
        pairs, undecided = split_undecided(pairs, a, b)
        notes += unknown_layouts(pairs, a, b)
    removed, added = [*unpaired.a, *without_counterpart], unpaired.b
    paired = [*pairs, *undecided]
    bookkeeping = [
        *_bookkeeping_items("a", removed, [pair.a for pair in paired], a, families_differ),
        *_bookkeeping_items("b", added, [pair.b for pair in paired], b, families_differ),
    ]
    excused = {id(item) for _, item in bookkeeping}
    return Pairing(
        pairs=tuple(pairs),
        removed=tuple(item for item in removed if id(item) not in excused),
        added=tuple(item for item in added if id(item) not in excused),
        bookkeeping=tuple(bookkeeping),
        notes=tuple(notes),
        crossed=tuple((display_name(pair.a), display_name(pair.b)) for pair in crossed),
        undecided=tuple(undecided),
        unmatched=_unmatched_globs(options, a, b),
        ordered=tuple(by_order),
        second_names=tuple(second_names),
    )


# Participants -----------------------------------------------------------------------------------------


def _participants(
    checkpoint: Checkpoint, side: str, options: PairingOptions, notes: list[str]
) -> list[LayoutItem]:
    """Return the tensors to be paired, as stored."""
    items = [stored_item(tensor) for tensor in checkpoint.tensors]
    if options.only == "weights":
        notes += non_weight_notes(side, [item for item in items if item.tensor.role is not Role.WEIGHTS])
        items = _weights_of_model(items)
    kept = [item for item in items if not _is_ignored(item, options.ignore)]
    if len(kept) != len(items):
        notes.append(f"{len(items) - len(kept):,} of {len(items):,} tensors of {side} ignored")
    return kept


def _weights_of_model(items: Iterable[LayoutItem]) -> list[LayoutItem]:
    """Return the weights, without the container key that holds the state dict if all are in one."""
    weights = [item for item in items if item.tensor.role is Role.WEIGHTS]
    containers = {item.tensor.path[0] if len(item.tensor.path) > 1 else None for item in weights}
    if len(containers) != 1 or any(bare_name(one.tensor) == torch_name(one.tensor) for one in weights):
        return weights
    return [replace(item, name=".".join(map(str, item.tensor.path[1:]))) for item in weights]


def _is_ignored(item: LayoutItem, globs: Sequence[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs for name in (item.name, item.tensor.name))


def _unmatched_globs(options: PairingOptions, a: Checkpoint, b: Checkpoint) -> tuple[str, ...]:
    items = [stored_item(tensor) for one in (a, b) for tensor in one.tensors] if options.ignore else []
    if options.only == "weights":
        items += _weights_of_model(items)
    return tuple(glob for glob in options.ignore if not any(_is_ignored(item, (glob,)) for item in items))


def _bookkeeping_items(
    side: Literal["a", "b"],
    items: list[LayoutItem],
    compared: list[LayoutItem],
    checkpoint: Checkpoint,
    families_differ: bool,
) -> Iterator[tuple[Literal["a", "b"], LayoutItem]]:
    """Yield unpaired tensors that only their framework needs, and copies of paired ones."""
    format = checkpoint.conventions
    copies = copies_among(items, compared, format)
    for item in items:
        if id(item) in copies or is_bookkeeping(item.sources[0], format, families_differ=families_differ):
            yield side, item


def _positions(items: list[LayoutItem]) -> dict[int, int]:
    return {id(item.tensor): at for at, item in enumerate(in_file_order(items))}


# Layouts ----------------------------------------------------------------------------------------------


def _layout_conversion(
    checkpoint: Checkpoint, options: PairingOptions, *, names_only: bool
) -> LayoutConversion:
    """Return the conversion of a checkpoint's tensors to PyTorch's layouts, or names only.

    Rules are applied on first use, since pairing by equal names may need none.
    """
    convert_all = torch_name_items if names_only else torch_layout_items

    @cache
    def items_by_source() -> dict[int, list[LayoutItem]]:
        by_source: dict[int, list[LayoutItem]] = {}
        for item in convert_all(checkpoint):
            by_source.setdefault(id(item.sources[0]), []).append(item)
        return by_source

    def convert(item: LayoutItem) -> list[LayoutItem]:
        items = items_by_source().get(id(item.tensor), [item]) if options.layout == "auto" else [item]
        return [item] if len(items) == 1 and items[0].tensor is item.tensor else items

    return convert


def _as_stored_if_alike(pair: Pair, *, names_only: bool) -> Pair:
    """Return the pair without layout rules if both sides have the same layout."""
    # Stored bytes can then be compared as they are, which is faster, and a wrong rule can't matter. Of two
    # Dense kernels, one may be known to follow a Flatten and the other not: both are stored as (I, O).
    a, b = pair.a, pair.b
    if len(a.sources) != 1 or len(b.sources) != 1 or (pair.how == "map" and names_only):
        return pair
    rules = {a.rule, b.rule}
    is_alike = None not in rules and (len(rules) == 1 or rules == {DENSE, FLATTENED})
    is_alike &= a.sources[0].shape == b.sources[0].shape and a.tensor.size == a.sources[0].size
    if not names_only and not is_alike:
        return pair
    return Pair(stored_item(a.sources[0]), stored_item(b.sources[0]), pair.how)


# Names ------------------------------------------------------------------------------------------------


def _pair_equal_names(unpaired: Unpaired) -> None:
    """Pair equal names: first equal paths, then names of one role, then names of unknown role with any."""

    def have_other_roles(a: LayoutItem, b: LayoutItem) -> bool:
        return a.tensor.role is not b.tensor.role and Role.OTHER not in (a.tensor.role, b.tensor.role)

    def how(a: LayoutItem, b: LayoutItem) -> How:
        return "name" if a.sources[0].name == b.sources[0].name else "convention"

    unpaired.match(lambda item: item.tensor.path, how, unless=have_other_roles)
    unpaired.match(lambda item: (item.tensor.role, item.name), how, in_order=True)
    unknown = {item.name for item in (*unpaired.a, *unpaired.b) if item.tensor.role is Role.OTHER}
    unpaired.match(lambda item: item.name if item.name in unknown else None, how)


def _pair_by_convention(unpaired: Unpaired) -> list[Clash]:
    """Pair names that are equal in PyTorch's terms, then without wrappers; return the clashes."""
    unpaired.match(lambda item: _role_key(item, torch_name(item.tensor)), "convention")
    clashes = unpaired.match(lambda item: _role_key(item, bare_name(item.tensor)), "convention")
    pair_by_optimizer_order(unpaired)
    _pair_by_common_prefix(unpaired, unpaired.a, unpaired.b)
    _pair_by_common_prefix(unpaired, unpaired.b, unpaired.a)
    return clashes


def _role_key(item: LayoutItem, steps: Steps) -> Hashable | None:
    return (item.tensor.role, steps) if steps else None


def _pair_by_common_prefix(unpaired: Unpaired, wrapped: list[LayoutItem], plain: list[LayoutItem]) -> None:
    """Pair weights whose names on one side have an additional common prefix of modules."""
    deeper = {id(item): bare_name(item.tensor) for item in wrapped if item.tensor.role is Role.WEIGHTS}
    names = {bare_name(item.tensor) for item in plain if item.tensor.role is Role.WEIGHTS}
    depth = _wrapper_depth(set(deeper.values()), names)
    if depth is None:
        return

    def key(item: LayoutItem) -> Hashable | None:
        if item.tensor.role is not Role.WEIGHTS:
            return None
        steps = bare_name(item.tensor)
        return _role_key(item, steps[depth:] if id(item) in deeper else steps)

    unpaired.match(key, "convention")


def _wrapper_depth(deeper: set[Steps], names: set[Steps]) -> int | None:
    """Return the number of leading modules in all of ``deeper`` that ``names`` lack, or None."""
    if len(names) < 2 or not deeper:
        return None
    # A common prefix of the lexicographically first and last name is one of all names. The smallest depth is
    # taken at which one side's names include the other's.
    first, last = min(deeper), max(deeper)
    shared = 0
    while shared < min(len(first), len(last)) - 1 and first[shared] == last[shared]:
        shared += 1
    for depth in range(1, min(shared, _MAX_WRAPPED) + 1):
        shorter = {steps[depth:] for steps in deeper}
        if names <= shorter or shorter <= names:
            return depth
    return None


def _pair_by_own_names(unpaired: Unpaired, a: Checkpoint, b: Checkpoint, notes: list[str]) -> list[Clash]:
    """Pair layers that are numbered in one file by the names that their variables were created with."""
    if not unpaired.a or not unpaired.b:
        return []
    names_a, names_b = numbered_layer_names(a), numbered_layer_names(b)
    if not names_a and not names_b:
        return []
    before = len(unpaired.pairs)
    unpaired.a = rename_numbered_layers(unpaired.a, names_a)
    unpaired.b = rename_numbered_layers(unpaired.b, names_b)
    _pair_equal_names(unpaired)
    clashes = _pair_by_convention(unpaired)
    if count := len(unpaired.pairs) - before:
        notes.append(f"numbered layers taken by the names of their variables ({counted(count, 'tensor')})")
    return clashes
