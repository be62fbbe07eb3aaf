"""Ties between tensors that get other names, or of which some stay behind."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ckpttool.checkpoint import Tensor


def retied(pairs: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
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
