"""Trees of objects turned into others, without recursion: what is shared stays shared, cycles are told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckpttool.errors import LimitExceeded

MAX_OPEN = 2000
"""How deep a tree may be."""
MAX_FOLDED = 16_000_000
"""How many objects a tree may have."""


class Parts(NamedTuple):
    """A node that is not done yet: its parts, and what makes the new node out of the new parts."""

    parts: Sequence[object]
    make: Callable[[list[Any]], object]


@dataclass(slots=True)
class _Frame:
    node: object
    parts: Iterator[object]
    make: Callable[[list[Any]], object]
    done: list[Any] = field(default_factory=list)


def fold(
    root: object, expand: Callable[[object], object], cycle: Callable[[object], object], where: str = ""
) -> object:
    """Return what a tree becomes, from its leaves up.

    Args:
        root: The tree.
        expand: Says what a node becomes, or its ``Parts`` where these come first.
        cycle: Says what a node becomes where it is met inside of itself.
        where: The file, for errors.

    Raises:
        LimitExceeded: The tree is too deep or too large.
    """
    # Nodes are kept with what they became: an address alone may come to be another's.
    known: dict[int, tuple[object, object]] = {}
    entered: set[int] = set()
    stack = [_Frame(None, iter((root,)), lambda done: done[0])]
    visits = 0
    while True:
        frame = stack[-1]
        done = frame.done
        for node in frame.parts:
            at = id(node)
            if at in known:
                done.append(known[at][1])
                continue
            if at in entered:
                done.append(cycle(node))
                continue
            made = expand(node)
            if type(made) is not Parts:
                done.append(made)
                if made is not node:
                    known[at] = node, made
                continue
            visits += 1 + len(made.parts)
            if len(stack) > MAX_OPEN or visits > MAX_FOLDED:
                raise LimitExceeded(where, f"objects nested over {MAX_OPEN:,} deep, or over {MAX_FOLDED:,}")
            entered.add(at)
            stack.append(_Frame(node, iter(made.parts), made.make))
            break
        else:
            made = frame.make(done)
            stack.pop()
            if not stack:
                return made
            entered.discard(id(frame.node))
            known[id(frame.node)] = frame.node, made
            stack[-1].done.append(made)
