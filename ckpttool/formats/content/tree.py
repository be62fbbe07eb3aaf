"""The content of a checkpoint as one tree, ``Checkpoint.tree``: how it is made, changed, walked and compared.

A tree consists of plain Python containers and values, of ``Tensor`` objects, and of the inert nodes of
``ckpttool.containers.pickle.pickle_nodes``:

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
from typing import Any, NamedTuple

from ckpttool.containers.pickle.pickle_nodes import (
    ATOMS,
    NOTHING,
    Call,
    Global,
    Mapped,
    Opaque,
    children,
    is_gone,
    rebuild,
)
from ckpttool.core.errors import LimitExceeded
from ckpttool.core.tensor import Path, Tensor

_MAX_KEY_BITS = 64
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

    return fold(tree, expand)


def without_opaque(tree: object) -> object:
    """Return a tree in which what is ``Opaque`` is left out, or replaced by what of it can be carried."""

    def none_for_dropped(done: list[Any]) -> list[Any]:
        return [None if part is _DROPPED else part for part in done]

    def expand(node: object) -> object:
        if isinstance(node, Opaque):
            return _DROPPED if node.content is None else NodeParts([node.content], lambda done: done[0])
        if isinstance(node, dict):
            pairs = [pair for pair in node.items() if not any(map(is_gone, pair))]
            if isinstance(node, Mapped):
                node = Mapped(node.kind, pairs, node.state, node.factory)
            else:
                node = dict(pairs)
        parts = children(node)
        return node if parts is None else NodeParts(parts, lambda done: rebuild(node, none_for_dropped(done)))

    return none_for_dropped([fold(tree, expand)])[0]


# The parts of objects, by key ----------------------------------------------------------------------


def merge_slots(state: object) -> object:
    """Return the attributes of an object as one dictionary, where it has some in slots."""
    if not isinstance(state, tuple) or len(state) != 2 or not isinstance(state[1], dict):
        return state
    if state[0] is None or isinstance(state[0], dict):
        return {**(state[0] or {}), **state[1]}
    return state


def own_state(state: object) -> object:
    """Return the attributes of a mapping, without the versions of modules that a state dict carries."""
    state = merge_slots(state)
    return {k: v for k, v in state.items() if k != "_metadata"} if isinstance(state, dict) else state


def members(call: Call) -> list[tuple[Any, Any]]:
    """Return the parts of an object with the keys under which ``flatten`` finds them."""
    if is_object_array(call):
        shape = [] if len(call.state[1]) == 1 else [("<shape>", call.state[1])]
        return [*enumerate(call.state[4]), *shape]
    if is_size(call):
        return list(enumerate(call.args[0]))
    state = merge_slots(call.state)
    attributes = list(state.items()) if isinstance(state, dict) else []
    # What has no key of its own gets one in angle brackets.
    keyless: list[tuple[Any, Any]] = []
    if not isinstance(call.function, Global):
        keyless.append(("<function>", call.function))
    if call.args:
        keyless.append(("<args>", call.args))
    if call.kwargs:
        keyless.append(("<kwargs>", call.kwargs))
    if state is not None and not isinstance(state, dict):
        keyless.append(("<state>", state))
    keyed = [*attributes, *call.pairs, *enumerate(call.items)]
    if _are_distinct_keys([key for key, _ in keyed]):
        return add_under_free_keys(keyed, keyless)
    if call.items:
        keyless.append(("<items>", call.items))
    if call.pairs:
        keyless.append(("<pairs>", [[*pair] for pair in call.pairs]))
    return add_under_free_keys(attributes, keyless)


def _are_distinct_keys(keys: Sequence[object]) -> bool:
    """Tell whether keys differ, and can be looked up: what an object is given by them may be anything.

    Tuples in tuples are not hashed: shared ones make that walk explode.
    """
    for key in keys:
        parts = key if isinstance(key, tuple) else (key,)
        if any(isinstance(part, list | dict | set | bytearray | tuple) for part in parts):
            return False
    return len(set(keys)) == len(keys)


def add_under_free_keys(
    keyed: list[tuple[Any, Any]], keyless: list[tuple[Any, Any]]
) -> list[tuple[Any, Any]]:
    """Add parts in angle brackets to others, under keys that no other has."""
    taken = {key for key, _ in keyed}
    for key, part in keyless:
        while key in taken:
            key = f"<{key}>"
        keyed.append((key, part))
    return keyed


def is_size(call: Call) -> bool:
    """Tell whether a call makes a ``torch.Size``, which is a list of numbers."""
    return call.is_of("torch", "Size") and len(call.args) == 1 and isinstance(call.args[0], list | tuple)


def is_object_array(call: Call) -> bool:
    """Tell whether a call is a NumPy array of Python objects, which are a list at the end of its state."""
    if not isinstance(call.function, Global) or call.function.name != "_reconstruct":
        return False
    return isinstance(call.state, tuple) and len(call.state) == 5 and isinstance(call.state[4], list)


# Walks ---------------------------------------------------------------------------------------------


def walk(tree: object) -> Iterator[tuple[Path, object]]:
    """Yield every node of a tree that is no plain value, once, with the first path that leads to it.

    Keys of dictionaries are walked too, where they are no plain values.
    """
    seen: set[int] = set()
    pending: list[tuple[Path, object]] = [((), tree)]
    while pending:
        path, node = pending.pop()
        if type(node) in ATOMS or id(node) in seen:
            continue
        seen.add(id(node))
        yield path, node
        parts = [(path, part) if key is None else ((*path, key), part) for key, part in _keyed_parts(node)]
        pending += reversed(parts)


def _keyed_parts(node: object) -> Iterator[tuple[str | int | None, object]]:
    """Yield the parts of a node with their keys; without one what lies at the path of the node itself."""
    if isinstance(node, dict):
        yield from ((None, key) for key in node if type(key) not in ATOMS)
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


def _paired_parts(one: Any, two: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the parts of two nodes of one type, in pairs; None if they differ, or it can't be told."""
    if isinstance(one, bytearray):
        return () if one == two else None
    parts, others = children(one), children(two)
    if parts is None or others is None or isinstance(one, set | frozenset | Opaque):
        return None
    is_alike = len(parts) == len(others) and _outline(one) == _outline(two)
    return zip(parts, others, strict=True) if is_alike else None


def _outline(node: object) -> object:
    """Return what makes nodes of one type other ones beside their parts."""
    if isinstance(node, Call):
        return node.is_new, len(node.items)
    return node.kind if isinstance(node, Mapped) else None


class NodeParts(NamedTuple):
    """A node that is not done yet: its parts, and what makes the new node out of the new parts."""

    parts: Sequence[object]
    make: Callable[[list[Any]], object]


def node_parts(node: object) -> NodeParts | None:
    """Return the parts of a node of a tree, and what makes the like of it; None where it has none."""
    parts = children(node)
    return None if parts is None else NodeParts(parts, lambda done: rebuild(node, done))


def no_cycle(node: object) -> object:
    """Refuse a node that holds itself."""
    raise ValueError("a tree that holds itself")


def fold(
    root: object,
    expand: Callable[[object], object],
    cycle: Callable[[object], object] = no_cycle,
    where: str = "",
) -> object:
    """Transform a tree from its leaves up.

    Args:
        root: The tree.
        expand: Says what a node becomes, or its ``NodeParts`` if these come first.
        cycle: Says what a node becomes where it is met inside of itself.
        where: The file, for errors.
    """
    # Nodes are kept with what they became: an address alone may come to be another's.
    known: dict[int, tuple[object, object]] = {}
    entered: set[int] = set()
    # Each open node, its parts still to come, the function that makes it of its parts, and those made.
    stack: list[tuple[object, Iterator[object], Callable[[list[Any]], object], list[Any]]] = []
    stack.append((None, iter((root,)), lambda done: done[0], []))
    visits = 0
    while True:
        whole, parts, make, done = stack[-1]
        for node in parts:
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
            stack.append((node, iter(made.parts), made.make, []))
            break
        else:
            made = make(done)
            stack.pop()
            if not stack:
                return made
            entered.discard(id(whole))
            known[id(whole)] = whole, made
            stack[-1][-1].append(made)
