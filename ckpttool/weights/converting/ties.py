"""Ties between tensors that get other names, or of which some stay behind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ckpttool.core.tensor import Tensor
from ckpttool.core.text import counted, first_names


def carry_ties(pairs: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
    """Return the second of each pair, tied where the first ones are and both are still the same bytes.

    Args:
        pairs: Each tensor as it was, and as it is now; an owner stands before those that share with it.
    """
    owners: dict[str, Tensor] = {}
    made = []
    for old, new in pairs:
        is_same = new.values is old.values and new.shape == old.shape
        owner = owners.setdefault(old.shares_with or old.name, new) if is_same else new
        shares_with = None if owner is new else owner.name
        made.append(new if new.shares_with == shares_with else replace(new, shares_with=shares_with))
    return tuple(made)


def lost_ties(olds: Sequence[Tensor], made: Sequence[Tensor]) -> list[str]:
    """Return that tensors which shared their bytes don't any more, if there are such.

    Args:
        olds: For each of ``made``, the tensor that it was.
        made: What ``carry_ties`` returned.
    """
    owners: dict[str, set[str]] = {}
    for old, new in zip(olds, made, strict=True):
        owners.setdefault(old.shares_with or old.name, set()).add(new.shares_with or new.name)
    members: dict[str, set[str]] = {}
    for old in olds:
        members.setdefault(old.shares_with or old.name, set()).add(old.name)
    names = [
        name
        for owner, tied in members.items()
        if len(tied) > 1 and len(owners[owner]) > 1
        for name in sorted(tied)
    ]
    if not names:
        return []
    shown = first_names(names)
    return [f"{counted(len(names), 'tensor')} that shared bytes: not all of them do any more: {shown}"]
