"""What is known of the nodes of a tree on its way: whether all of them can be carried, and hold tensors."""

from __future__ import annotations

from collections.abc import Iterable

from ckpttool.wire.pickled import Opaque

OPAQUE, TENSOR = 1, 2


class Noting:
    """Remembers of new nodes what lies in them."""

    def __init__(self) -> None:
        # Nodes are kept with what is known of them: an address alone may come to be another's.
        self._known: dict[int, tuple[object, int, str]] = {}

    def _noted(self, node: object, parts: Iterable[object], also: int = 0) -> object:
        """Remember of a new node what lies in it, at any depth, and the first reason why a part is opaque."""
        flags, reason = also, ""
        for part in parts:
            known = self._known.get(id(part))
            if known is not None:
                flags |= known[1]
                reason = reason or known[2]
        if flags:
            self._known[id(node)] = node, flags, reason
        return node

    def _flags_of(self, node: object) -> int:
        known = self._known.get(id(node))
        return 0 if known is None else known[1]

    def _reason(self, node: object) -> str:
        known = self._known.get(id(node))
        return "" if known is None else known[2]

    def _gone(self, what: str, content: object = None, reason: str = "") -> Opaque:
        """Return what can't be carried; ``reason`` is the part of it that can't, told of what is around."""
        made = Opaque(what, content)
        self._known[id(made)] = made, OPAQUE | self._flags_of(content), reason or what
        return made
