"""What the nodes consist of that a pickle's interpreter builds: an object's parts, and all nodes below."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ckpttool.wire.pickle_nodes import Call, Global, Mapped, Persistent


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


def nodes(root: object, visited: set[int] | None = None) -> Iterator[object]:
    """Yield every node that can hold others in what the interpreter built, each once.

    ``visited`` keeps the addresses of the nodes seen, for several walks over what one pickle holds.
    """
    seen = set() if visited is None else visited
    pending: list[object] = [root]
    while pending:
        node = pending.pop()
        parts = direct_parts(node)
        if parts is not None and id(node) not in seen:
            seen.add(id(node))
            yield node
            pending.extend(parts)


def references(root: object, visited: set[int] | None = None) -> Iterator[Persistent]:
    """Yield every reference in what the interpreter built, as ``nodes`` does."""
    return (node for node in nodes(root, visited) if isinstance(node, Persistent))


def direct_parts(node: object) -> Iterable[object] | None:
    """Return all that a node holds, or None where it can't hold anything."""
    if isinstance(node, Call):
        pairs = [part for pair in node.pairs for part in pair]
        return [node.function, node.args, node.kwargs, node.state, *node.items, *pairs]
    if isinstance(node, Mapped):
        return [node.state, *node.keys(), *node.values()]
    if isinstance(node, dict):
        return [*node.keys(), *node.values()]
    if isinstance(node, list | tuple | set | frozenset):
        return node
    return (node.id,) if isinstance(node, Persistent) else None
