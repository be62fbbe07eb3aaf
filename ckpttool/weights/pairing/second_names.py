"""Tensors stored under two names: ties, copies in TensorFlow's exports, Paddle's recurrent cells."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence

from ckpttool.core.tensor import Role, Tensor
from ckpttool.formats.traits import traits_of
from ckpttool.weights.pairing.layers import steps_of
from ckpttool.weights.pairing.layouts import LayoutItem, stored_item
from ckpttool.weights.pairing.pairs import Unpaired
from ckpttool.weights.pairing.renames import group_by_checksum, group_by_sample, same_content
from ckpttool.weights.pairing.variable_names import bare_name

_LISTS = (("_all_variables",), ("keras_api",))
"""First steps of the lists in TensorFlow's exports that hold copies of variables."""
_CELL = re.compile(r"(?P<of>.+)\.(?P<at>\d+)\.cell(_(?P<way>fw|bw))?\.(?P<what>(weight|bias)_(ih|hh))")
_SHOWN = 3

SecondNames = list[tuple[Tensor, str]]
"""Tensors of the second side, each with the other name under which it is paired."""


def pair_copies(unpaired: Unpaired, formats: tuple[str, str]) -> None:
    """Pair the copies in the lists of two exports by the variables that they are copies of."""
    if all(traits_of(format).has_object_graph for format in formats):
        originals = {**_originals_of_copies(unpaired.a), **_originals_of_copies(unpaired.b)}
        unpaired.match(lambda item: originals.get(id(item)), "name")


def may_be_copy(tensor: Tensor, format: str) -> bool:
    """Return whether a tensor is in a list of copies."""
    return traits_of(format).has_object_graph and _is_in_list(tensor)


def _is_in_list(tensor: Tensor) -> bool:
    return tensor.role is Role.OTHER and steps_of(tensor.path)[:1] in _LISTS


def _is_listed(item: LayoutItem) -> bool:
    return _is_in_list(item.tensor)


def _originals_of_copies(items: Sequence[LayoutItem]) -> dict[int, Hashable]:
    """Return (list, name of the original) by ``id`` of the copy; equal originals are assigned by name."""
    originals: dict[int, Hashable] = {}
    # An export doesn't record which variable a copy belongs to, so equal values decide. Two tensors with
    # equal samples are taken as a variable and its copy; larger groups, such as those of zeros, are divided
    # by checksums of all bytes.
    for group in group_by_sample(_copies_and_candidates(items)):
        for same in [group] if len(group) == 2 else group_by_checksum(group):
            copies = [item for item in same if _is_listed(item)]
            names = sorted(bare_name(item.tensor) for item in same if not _is_listed(item))
            originals |= {
                id(copy): (steps_of(copy.tensor.path)[0], steps)
                for copy, steps in zip(copies, names, strict=False)
            }
    return originals


def copies_among(items: Iterable[LayoutItem], compared: Iterable[LayoutItem], format: str) -> set[int]:
    """Return the ``id`` of the items that are copies of compared ones of their side, by checksum."""
    listed = [item for item in items if may_be_copy(item.tensor, format)]
    if not listed:
        return set()
    ids = set(map(id, listed))
    sources = [stored_item(source) for item in compared for source in item.sources]
    copies = set()
    for group in group_by_sample(_copies_and_candidates([*listed, *sources])):
        if ids.isdisjoint(map(id, group)):
            continue
        for same in group_by_checksum(group):
            if any(id(item) not in ids for item in same):
                copies |= {id(item) for item in same} & ids
    return copies


def _copies_and_candidates(items: Sequence[LayoutItem]) -> list[LayoutItem]:
    """Return the items in lists of copies, and the variables with their dtypes and shapes."""
    copies = [item for item in items if _is_listed(item)]
    kinds = {(item.tensor.dtype.name, item.tensor.shape) for item in copies}
    variables = [
        item
        for item in items
        if not _is_listed(item)
        and item.tensor.role is not Role.OPTIMIZER
        and (item.tensor.dtype.name, item.tensor.shape) in kinds
    ]
    return [*copies, *variables]


# Ties and cells ---------------------------------------------------------------------------------------


def drop_second_names(
    unpaired: Unpaired, ours: Iterable[LayoutItem], theirs: Iterable[LayoutItem]
) -> tuple[list[str], SecondNames]:
    """Remove tensors that are paired under another name from the unpaired; return notes and those of B."""
    if not unpaired.a and not unpaired.b:
        return [], []
    paired = {id(source) for pair in unpaired.pairs for item in (pair.a, pair.b) for source in item.sources}
    notes: list[str] = []
    second_names: SecondNames = []
    for side, items, participants in (("A", unpaired.a, ours), ("B", unpaired.b, theirs)):
        twins = _paired_names(items, participants, paired)
        gone = [item for item in items if id(item) in twins]
        unpaired.drop(*((gone, []) if side == "A" else ([], gone)))
        if side == "B":
            second_names += [(item.sources[0], twins[id(item)]) for item in gone]
        if gone:
            names = ", ".join(f"{item.sources[0].name} is {twins[id(item)]}" for item in gone[:_SHOWN])
            more = f", and {len(gone) - _SHOWN:,} more" if len(gone) > _SHOWN else ""
            notes.append(f"ignored second names in {side}: {names}{more}")
    return notes, second_names


def _paired_names(
    items: Iterable[LayoutItem], participants: Iterable[LayoutItem], paired: set[int]
) -> dict[int, str]:
    """Return the other name under which a tensor is paired, by ``id`` of its item."""
    by_name: dict[str, list[Tensor]] = {}
    for item in participants:
        by_name.setdefault(item.sources[0].name, []).append(item.sources[0])
    tied: dict[Hashable, list[Tensor]] = {}
    for tensor in (one for same in by_name.values() for one in same):
        tied.setdefault(_owner(tensor, by_name), []).append(tensor)
    twins = {}
    for item in items:
        tensor = item.sources[0]
        same = tied.get(_owner(tensor, by_name), []) if len(item.sources) == 1 else []
        twin = next((one for one in same if one is not tensor and id(one) in paired), None)
        if twin is None and (match := _CELL.fullmatch(tensor.name)):
            # Paddle stores the weights of an RNN's cells twice: as ``0.cell.weight_ih`` and ``weight_ih_l0``.
            name = f"{match['of']}.{match['what']}_l{match['at']}{'_reverse' * (match['way'] == 'bw')}"
            twin = next(iter(by_name.get(name, ())), None)
            if twin is not None and not (id(twin) in paired and same_content(tensor, twin)):
                twin = None
        if twin is not None:
            twins[id(item)] = twin.name
    return twins


def _owner(tensor: Tensor, by_name: Mapping[str, list[Tensor]]) -> Hashable:
    """Return a key for the bytes of a tensor; several tensors may have one name."""
    if tensor.shares_with is None:
        return id(tensor)
    named = [one for one in by_name.get(tensor.shares_with, ()) if one.shares_with is None]
    if not named:
        return tensor.shares_with  # the owner isn't among the participants
    if len(named) > 1:
        named = [one for one in named if one.storage is not None and one.storage == tensor.storage]
    return id(named[0] if len(named) == 1 else tensor)
