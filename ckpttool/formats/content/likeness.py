"""Are two trees the same, node by node? Told without making anything of them."""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable
from typing import Any

from ckpttool.tensor import Tensor
from ckpttool.wire.pickled import Call, Global, Mapped

_COMPARE: dict[type, Callable[[Any, Any], bool]] = {
    **dict.fromkeys((type(None), bool, int, str, bytes, Global), operator.eq),
    float: lambda one, two: struct.pack("<d", one) == struct.pack("<d", two),
    Tensor: lambda one, two: one.name == two.name,
}
"""How nodes are compared that have no parts, and are shared by whoever likes."""


def are_alike(tree: object, other: object) -> bool:
    """Tell whether two trees have the same nodes in the same places, and share them alike.

    Tensors are told by their names. Dictionaries have their keys in one order. False is also the answer where
    that can't be told: of sets, and of what is ``Opaque``.
    """
    # Which node of the other tree stands where a node stands, by address, and the other way round.
    there: dict[int, int] = {}
    back: dict[int, int] = {}
    pending: list[tuple[Any, Any]] = [(tree, other)]
    while pending:
        one, two = pending.pop()
        if type(one) is not type(two):
            return False
        compare = _COMPARE.get(type(one))
        if compare is not None or (one == () and two == ()):
            if compare is not None and not compare(one, two):
                return False
            continue
        if id(one) in there or id(two) in back:
            if there.get(id(one)) != id(two) or back.get(id(two)) != id(one):
                return False
            continue
        there[id(one)], back[id(two)] = id(two), id(one)
        below = _below(one, two)
        if below is None:
            return False
        pending += below
    return True


def _below(one: Any, two: Any) -> list[tuple[Any, Any]] | None:
    """Return the parts of two nodes of one type, in pairs; None where they differ, or it can't be told."""
    if isinstance(one, list | tuple):
        return list(zip(one, two, strict=True)) if len(one) == len(two) else None
    if isinstance(one, dict):
        if len(one) != len(two):
            return None
        pairs = [*zip(one, two, strict=True), *zip(one.values(), two.values(), strict=True)]
        if isinstance(one, Mapped):
            pairs += [(one.kind, two.kind), (one.state, two.state), (one.factory, two.factory)]
        return pairs
    if isinstance(one, Call):
        return _below_call(one, two)
    return [] if isinstance(one, bytearray) and one == two else None


def _below_call(one: Call, two: Call) -> list[tuple[Any, Any]] | None:
    if (one.is_new, len(one.items), len(one.pairs)) != (two.is_new, len(two.items), len(two.pairs)):
        return None
    pairs = [(getattr(one, part), getattr(two, part)) for part in ("function", "args", "kwargs", "state")]
    pairs += zip(one.items, two.items, strict=True)
    for mine, others in zip(one.pairs, two.pairs, strict=True):
        pairs += zip(mine, others, strict=True)
    return pairs
