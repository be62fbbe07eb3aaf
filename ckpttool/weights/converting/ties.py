"""Keeps ties (``Tensor.shares_with``) when tensors are renamed or removed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ckpttool.core.tensor import Tensor
from ckpttool.core.text import counted, first_names


def carry_ties(pairs: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
    """Return the new tensors, tied if the old ones are and the bytes are still the same.

    Args:
        pairs: (Old tensor, new tensor); owners come before the tensors that share with them.
    """
    # The owner of a group may have been dropped or changed. So the first tensor that still has the group's
    # values and shape becomes the owner, and one that was cast or rearranged leaves the group.
    owners: dict[str, Tensor] = {}
    made = []
    for old, new in pairs:
        is_same = new.values is old.values and new.shape == old.shape
        owner = owners.setdefault(old.shares_with or old.name, new) if is_same else new
        shares_with = None if owner is new else owner.name
        made.append(new if new.shares_with == shares_with else replace(new, shares_with=shares_with))
    return tuple(made)


def lost_ties(olds: Sequence[Tensor], made: Sequence[Tensor]) -> list[str]:
    """Return a note on tensors that shared bytes and no longer do.

    Args:
        olds: The old tensor of each of ``made``.
        made: Result of ``carry_ties``.
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
    return [f"{counted(len(names), 'tensor')} that shared bytes, but no longer all do: {shown}"]
