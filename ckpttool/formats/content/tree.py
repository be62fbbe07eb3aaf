"""The content of a checkpoint as one tree, ``Checkpoint.tree``: how it is made, changed, walked and compared.

A tree consists of plain Python containers and values, of ``Tensor`` objects, and of the inert nodes of
``ckpttool.wire.pickle_nodes``:

- ``Mapped``: an ``OrderedDict``, ``defaultdict`` or ``Counter``.
- ``Global``: a name that stands for itself, such as ``torch.float32``.
- ``Call``: an object of a class that is known to be harmless data, by what would make it: ``torch.Size``, a
  NumPy scalar. Tensors among its arguments are ``Tensor`` objects. Three functions have arguments of their
  own: ``_rebuild_qtensor(tensor, parameters, requires_grad)``, ``_rebuild_from_type_v2(inner, class, state)``
  and ``_mareconstruct(values, mask, fill_value)``; a storage is ``Call(its class, (tensor,))``.
- ``Opaque``: what can't be carried.

Objects that are shared are shared here; nothing holds itself.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckpttool.errors import LimitExceeded
from ckpttool.formats.content.object_parts import members
from ckpttool.tensor import Path, Tensor
from ckpttool.wire.pickle_nodes import NOTHING, Call, Global, Mapped, Opaque, is_gone

_MAX_KEY_BITS = 64
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})
MAX_OPEN = 2000
"""How deep a tree may be."""
MAX_FOLDED = 16_000_000
"""How many objects a tree may have."""
_COMPARE: dict[type, Callable[[Any, Any], bool]] = {
    **dict.fromkeys((type(None), bool, int, str, bytes, Global), operator.eq),
    float: lambda one, two: struct.pack("<d", one) == struct.pack("<d", two),
    Tensor: lambda one, two: one.name == two.name,
}
"""How nodes are compared that have no parts, and are shared by whoever likes."""
_DROPPED = object()
"""Stands for what is left out, while the tree around it is made."""


def mark_none(root: object) -> object:
    """Return the tree of what a file holds, with a None that it holds marked: no tree at all is None, too."""
    return Call(NOTHING, ()) if root is None else root


def replace_tensors(tree: object, tensors: Mapping[int, Tensor]) -> object:
    """Return a tree with other tensors, given by the ``id`` of those that they replace; the rest stay.

    What is shared stays shared.
    """

    def expand(node: object) -> object:
        if isinstance(node, Tensor):
            return tensors.get(id(node), node)
        return node_parts(node) or node

    return fold(tree, expand, _no_cycle)


def without_opaque(tree: object) -> object:
    """Return a tree in which what is ``Opaque`` is left out, or replaced by what of it can be carried."""

    def none_for_dropped(done: list[Any]) -> list[Any]:
        return [None if part is _DROPPED else part for part in done]

    def expand(node: object) -> object:
        if isinstance(node, Opaque):
            return _DROPPED if node.content is None else NodeParts([node.content], lambda done: done[0])
        parts = node_parts(node)
        if parts is None:
            return node
        if isinstance(node, dict):
            pairs = [pair for pair in node.items() if not any(map(is_gone, pair))]
            remaining = [*(key for key, _ in pairs), *(value for _, value in pairs)]
            if isinstance(node, Mapped):
                remaining += [node.state, node.factory]
            return NodeParts(remaining, lambda done: dict_like(node, none_for_dropped(done), len(pairs)))
        return NodeParts(parts.parts, lambda done: parts.make(none_for_dropped(done)))

    return none_for_dropped([fold(tree, expand, _no_cycle)])[0]


def walk(tree: object) -> Iterator[tuple[Path, object]]:
    """Yield every node of a tree that is no plain value, once, with the first path that leads to it.

    Keys of dictionaries are walked too, where they are no plain values.
    """
    seen: set[int] = set()
    pending: list[tuple[Path, object]] = [((), tree)]
    while pending:
        path, node = pending.pop()
        if type(node) in _ATOMS or id(node) in seen:
            continue
        seen.add(id(node))
        yield path, node
        parts = [(path, part) if key is None else ((*path, key), part) for key, part in _keyed_parts(node)]
        pending += reversed(parts)


def _keyed_parts(node: object) -> Iterator[tuple[str | int | None, object]]:
    """Yield the parts of a node with their keys; without one what lies at the path of the node itself."""
    if isinstance(node, dict):
        yield from ((None, key) for key in node if type(key) not in _ATOMS)
        yield from ((_path_part(key), part) for key, part in node.items())
        if isinstance(node, Mapped):
            yield from (("<state>", node.state), ("<factory>", node.factory))
    elif isinstance(node, list | tuple | set | frozenset):
        yield from enumerate(node)
    elif isinstance(node, Call):
        if any(isinstance(part, Tensor) for part in node.args):
            yield from (
                (None, part) for part in (*node.args, node.kwargs, node.state, node.items, node.pairs)
            )
        else:
            yield from ((_path_part(key), part) for key, part in members(node))
    elif isinstance(node, Opaque):
        yield None, node.content


def _path_part(key: object) -> str | int:
    if isinstance(key, str) or (type(key) is int and key.bit_length() <= _MAX_KEY_BITS):
        return key
    if isinstance(key, Opaque) and isinstance(key.content, str):
        return key.content
    from ckpttool.formats.content.plain_data import describe

    return str(describe(key))


def tensors_in(tree: object) -> Iterator[Tensor]:
    """Yield every tensor object of a tree, once, in its order."""
    return (node for _, node in walk(tree) if isinstance(node, Tensor))


def opaque_nodes(tree: object) -> Iterator[tuple[str, str]]:
    """Yield the path of each ``Opaque`` node, and why it can't be carried."""
    for path, node in walk(tree):
        if isinstance(node, Opaque):
            yield ".".join(map(str, path)) if path else "the whole", node.what


def trees_equal(tree: object, other: object) -> bool:
    """Tell whether two trees have the same nodes in the same places, and share them alike.

    Tensors are told by their names. Dictionaries have their keys in one order. False is also the answer where
    that can't be told: of sets, and of what is ``Opaque``.
    """
    # Which node of the other tree stands where a node stands, by address, and the other way round.
    counterparts: dict[int, int] = {}
    origins: dict[int, int] = {}
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
        if id(one) in counterparts or id(two) in origins:
            if counterparts.get(id(one)) != id(two) or origins.get(id(two)) != id(one):
                return False
            continue
        counterparts[id(one)], origins[id(two)] = id(two), id(one)
        pairs = _paired_parts(one, two)
        if pairs is None:
            return False
        pending += pairs
    return True


def _paired_parts(one: Any, two: Any) -> list[tuple[Any, Any]] | None:
    """Return the parts of two nodes of one type, in pairs; None if they differ, or it can't be told."""
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
        if (one.is_new, len(one.items), len(one.pairs)) != (two.is_new, len(two.items), len(two.pairs)):
            return None
        pairs = [(getattr(one, part), getattr(two, part)) for part in ("function", "args", "kwargs", "state")]
        pairs += zip(one.items, two.items, strict=True)
        for pair, other_pair in zip(one.pairs, two.pairs, strict=True):
            pairs += zip(pair, other_pair, strict=True)
        return pairs
    return [] if isinstance(one, bytearray) and one == two else None


class NodeParts(NamedTuple):
    """A node that is not done yet: its parts, and what makes the new node out of the new parts."""

    parts: Sequence[object]
    make: Callable[[list[Any]], object]


def fold(
    root: object, expand: Callable[[object], object], cycle: Callable[[object], object], where: str = ""
) -> object:
    """Return what a tree becomes, from its leaves up.

    Args:
        root: The tree.
        expand: Says what a node becomes, or its ``NodeParts`` if these come first.
        cycle: Says what a node becomes where it is met inside of itself.
        where: The file, for errors.
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
            address = id(node)
            if address in known:
                done.append(known[address][1])
                continue
            if address in entered:
                done.append(cycle(node))
                continue
            made = expand(node)
            if type(made) is not NodeParts:
                done.append(made)
                if made is not node:
                    known[address] = node, made
                continue
            visits += 1 + len(made.parts)
            if len(stack) > MAX_OPEN or visits > MAX_FOLDED:
                raise LimitExceeded(where, f"objects nested over {MAX_OPEN:,} deep, or over {MAX_FOLDED:,}")
            entered.add(address)
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


@dataclass(slots=True)
class _Frame:
    node: object
    parts: Iterator[object]
    make: Callable[[list[Any]], object]
    done: list[Any] = field(default_factory=list)


def node_parts(node: object) -> NodeParts | None:
    """Return the parts of a node of a tree, and what makes the like of it; None where it has none."""
    kind = type(node)
    if kind in _ATOMS:
        return None
    if isinstance(node, list | tuple | set | frozenset) and kind in (list, tuple, set, frozenset):
        return NodeParts(list(node), kind)
    if isinstance(node, dict):
        state = [node.state, node.factory] if isinstance(node, Mapped) else []
        return NodeParts([*node, *node.values(), *state], lambda done: dict_like(node, done, len(node)))
    if isinstance(node, Call):
        parts = [node.function, node.args, node.kwargs, node.state, node.items, node.pairs]
        return NodeParts(parts, lambda done: make_call(*done, is_new=node.is_new))
    if isinstance(node, Opaque) and node.content is not None:
        return NodeParts([node.content], lambda done: Opaque(node.what, done[0]))
    return None


def dict_like(node: dict[Any, Any], done: list[Any], count: int) -> object:
    """Return a dictionary of a node's class, of ``count`` keys, their values, and its state and factory."""
    pairs = zip(done[:count], done[count : 2 * count], strict=True)
    return make_mapped(node.kind, pairs, *done[2 * count :]) if isinstance(node, Mapped) else dict(pairs)


def make_mapped(
    kind: Any, pairs: Iterable[tuple[Any, Any]], state: object = None, factory: object = None
) -> Mapped:
    """Return a dictionary of another class."""
    made = Mapped(kind)
    made.update(pairs)
    made.state, made.factory = state, factory
    return made


def make_call(
    function: object,
    args: Any,
    kwargs: object = None,
    state: object = None,
    items: Iterable[Any] = (),
    pairs: Iterable[Any] = (),
    *,
    is_new: bool = False,
) -> Call:
    """Return the record of a call with all that is set on what it makes."""
    call = Call(function, args, kwargs)
    call.state, call.items, call.pairs = state, list(items), list(pairs)
    call.is_new = is_new
    return call


def _no_cycle(node: object) -> object:
    raise ValueError("a tree that holds itself")
