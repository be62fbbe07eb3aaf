"""The content of a checkpoint as one tree, ``Checkpoint.tree``: changed, walked, compared and flattened.

A tree consists of plain Python containers and values, of ``Tensor`` objects, and of the inert nodes of
``ckpttool.containers.pickle.pickle_nodes``:

- ``DictSubclass``: an ``OrderedDict``, ``defaultdict`` or ``Counter``.
- ``Global``: a name, such as ``torch.float32``.
- ``Call``: an object of a class that is known to be harmless data, as the call that would make it:
  ``torch.Size``, a NumPy scalar. Tensors among its arguments are ``Tensor`` objects. Three functions have
  other arguments than in a pickle: ``_rebuild_qtensor(tensor, parameters, requires_grad)``,
  ``_rebuild_from_type_v2(inner, class, state)`` and ``_mareconstruct(values, mask, fill_value)``; a storage
  is ``Call(its class, (tensor,))``.
- ``Opaque``: an object that can't be converted; its ``content`` is the part that can, or None.

An object that a checkpoint has in several places is one object here; nothing contains itself. ``flatten``
separates the root of a pickle, before there is a tree, into tensors by path and plain data: that root may
contain itself, and has ``Persistent`` nodes.

Files are hostile: a pickle of a few bytes can make a tree that is a million levels deep, or one of 2^100
paths by sharing. So no walk recurses: ``fold`` and ``flatten`` have limits on depth and on nodes visited, the
others visit each node once.
"""

from __future__ import annotations

import operator
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from ckpttool.containers.pickle.pickle_nodes import (
    ATOMS,
    NOTHING,
    Call,
    DictSubclass,
    Global,
    Opaque,
    Persistent,
    children,
    is_removed,
    rebuild,
)
from ckpttool.core.dtypes import DType
from ckpttool.core.errors import LimitExceeded
from ckpttool.core.tensor import Extent, Path, Role, Shard, Tensor, Values
from ckpttool.formats.content.plain_data import (
    KeyText,
    PlainDataRenderer,
    describe,
    small_call_nodes,
    stable_order,
)

_MAX_KEY_BITS = 64  # larger integers are described in paths, not used as keys
MAX_OPEN = 2000
"""Limit on the depth of a tree in ``fold``."""
MAX_FOLDED = 16_000_000
"""Limit on the objects of a tree in ``fold``."""
_COMPARE: dict[type, Callable[[Any, Any], bool]] = {
    **dict.fromkeys((type(None), bool, int, str, bytes, Global), operator.eq),
    float: lambda one, two: struct.pack("<d", one) == struct.pack("<d", two),
    Tensor: lambda one, two: one.name == two.name,
}
"""Comparison by type of nodes without parts; whether these are shared makes no difference."""
_DROPPED = object()
"""Result of a node that is removed, until its parent is rebuilt."""


def mark_none(root: object) -> object:
    """Return a tree for ``Checkpoint.tree``, in which None means no tree: a root of None is marked."""
    return Call(NOTHING, ()) if root is None else root


def replace_tensors(tree: object, tensors: Mapping[int, Tensor]) -> object:
    """Return a tree with other tensors in place of some, by the ``id`` of these; sharing is preserved."""

    def expand(node: object) -> object:
        if isinstance(node, Tensor):
            return tensors.get(id(node), node)
        return node_parts(node) or node

    return fold(tree, expand)


def without_opaque(tree: object) -> object:
    """Return a tree without ``Opaque`` nodes: each is replaced by its content, or removed if it has none."""

    # A pair of a dictionary with an opaque key or value is removed; in other containers and in the arguments
    # of calls a removed part becomes None, so that the parts after it keep their places.
    def none_for_dropped(done: list[Any]) -> list[Any]:
        return [None if part is _DROPPED else part for part in done]

    def expand(node: object) -> object:
        if isinstance(node, Opaque):
            return _DROPPED if node.content is None else NodeParts([node.content], lambda done: done[0])
        if isinstance(node, dict):
            pairs = [pair for pair in node.items() if not any(map(is_removed, pair))]
            if isinstance(node, DictSubclass):
                node = DictSubclass(node.kind, pairs, node.state, node.factory)
            else:
                node = dict(pairs)
        parts = children(node)
        return node if parts is None else NodeParts(parts, lambda done: rebuild(node, none_for_dropped(done)))

    return none_for_dropped([fold(tree, expand)])[0]


# Members of objects -----------------------------------------------------------------------------------


def merge_slots(state: object) -> object:
    """Return the state of an object, with attributes in ``__slots__`` merged into the dictionary."""
    # Pickle protocol 2 and later: (the ``__dict__`` or None, the attributes in slots).
    if not isinstance(state, tuple) or len(state) != 2 or not isinstance(state[1], dict):
        return state
    if state[0] is None or isinstance(state[0], dict):
        return {**(state[0] or {}), **state[1]}
    return state


def _mapping_attributes(state: object) -> object:
    """Return the attributes of a mapping, without the ``_metadata`` of a module's state dict."""
    state = merge_slots(state)
    return {k: v for k, v in state.items() if k != "_metadata"} if isinstance(state, dict) else state


def members(call: Call) -> list[tuple[Any, Any]]:
    """Return the parts of an object by the keys that they have in paths."""
    # Attributes, pairs and items are found by their own keys, as long as these are distinct. Parts without a
    # key, such as constructor arguments, get one in angle brackets.
    if is_object_array(call):
        shape = [] if len(call.state[1]) == 1 else [("<shape>", call.state[1])]
        return [*enumerate(call.state[4]), *shape]
    if is_size(call):
        return list(enumerate(call.args[0]))
    state = merge_slots(call.state)
    attributes = list(state.items()) if isinstance(state, dict) else []
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
        return _add_under_free_keys(keyed, keyless)
    if call.items:
        keyless.append(("<items>", call.items))
    if call.pairs:
        keyless.append(("<pairs>", [[*pair] for pair in call.pairs]))
    return _add_under_free_keys(attributes, keyless)


def _are_distinct_keys(keys: Sequence[object]) -> bool:
    """Return whether keys are distinct and hashable."""
    # Nested tuples that share their parts may take exponential time to hash: they count as not hashable.
    for key in keys:
        parts = key if isinstance(key, tuple) else (key,)
        if any(isinstance(part, list | dict | set | bytearray | tuple) for part in parts):
            return False
    return len(set(keys)) == len(keys)


def _add_under_free_keys(
    keyed: list[tuple[Any, Any]], keyless: list[tuple[Any, Any]]
) -> list[tuple[Any, Any]]:
    """Append parts to others, with more angle brackets around a key that is taken."""
    taken = {key for key, _ in keyed}
    for key, part in keyless:
        while key in taken:
            key = f"<{key}>"
        keyed.append((key, part))
    return keyed


def is_size(call: Call) -> bool:
    """Return whether a call makes a ``torch.Size``, which is treated as a list of numbers."""
    return call.is_of("torch", "Size") and len(call.args) == 1 and isinstance(call.args[0], list | tuple)


def is_object_array(call: Call) -> bool:
    """Return whether a call makes a NumPy array of objects: a list at the end of its state."""
    if not isinstance(call.function, Global) or call.function.name != "_reconstruct":
        return False
    return isinstance(call.state, tuple) and len(call.state) == 5 and isinstance(call.state[4], list)


# Walks ---------------------------------------------------------------------------------------------


def walk(tree: object) -> Iterator[tuple[Path, object]]:
    """Yield every node but plain values once, with its first path; keys of dictionaries are nodes, too."""
    # The stack gives the last part first, so that parts are pushed in reverse order.
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
    """Yield the parts of a node with their keys; those with None have the path of the node itself."""
    if isinstance(node, dict):
        yield from ((None, key) for key in node if type(key) not in ATOMS)
        yield from ((_path_part(key), part) for key, part in node.items())
        if isinstance(node, DictSubclass):
            yield from (("<state>", node.state), ("<factory>", node.factory))
    elif isinstance(node, list | tuple | set | frozenset):
        yield from enumerate(node)
    elif isinstance(node, Call):
        # A call around a tensor (an array, a parameter, a storage) has the path of the tensor's name.
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
    return str(describe(key))


def tensors_in(tree: object) -> Iterator[Tensor]:
    """Yield every tensor of a tree once, in order."""
    return (node for _, node in walk(tree) if isinstance(node, Tensor))


def opaque_nodes(tree: object) -> Iterator[tuple[str, str]]:
    """Yield the path of each ``Opaque`` node, and its description."""
    for path, node in walk(tree):
        if isinstance(node, Opaque):
            yield ".".join(map(str, path)) if path else "the whole", node.reason


def trees_equal(tree: object, other: object) -> bool:
    """Return whether two trees have equal nodes in the same places, and share them alike.

    Tensors are compared by name, dictionaries with the order of their keys. False if it can't be known: for
    sets and ``Opaque`` nodes.
    """
    # Nodes of the two trees in the same place, by address, in both directions: sharing is alike if each node
    # has the same counterpart wherever it is met.
    counterparts: dict[int, int] = {}
    origins: dict[int, int] = {}
    pending: list[tuple[Any, Any]] = [(tree, other)]
    while pending:
        one, two = pending.pop()
        if type(one) is not type(two):
            return False
        # Sharing of nodes without parts means nothing, as Python itself shares small numbers, short strings
        # and the empty tuple.
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
    """Return the parts of two nodes of one type in pairs; None if the nodes differ or can't be compared."""
    if isinstance(one, bytearray):
        return () if one == two else None
    parts, others = children(one), children(two)
    if parts is None or others is None or isinstance(one, set | frozenset | Opaque):
        return None
    is_alike = len(parts) == len(others) and _outline(one) == _outline(two)
    return zip(parts, others, strict=True) if is_alike else None


def _outline(node: object) -> object:
    """Return the properties of a node that are not among its parts."""
    if isinstance(node, Call):
        return node.is_new, len(node.items)
    return node.kind if isinstance(node, DictSubclass) else None


class NodeParts(NamedTuple):
    """Parts of a node, which ``fold`` transforms first, and a function that makes a node of the results."""

    parts: Sequence[object]
    make: Callable[[list[Any]], object]


def node_parts(node: object) -> NodeParts | None:
    """Return the parts of a node and a function that rebuilds it from new ones; None if it has no parts."""
    parts = children(node)
    return None if parts is None else NodeParts(parts, lambda done: rebuild(node, done))


def _refuse_cycle(node: object) -> object:
    raise ValueError("a tree that contains itself")


def fold(
    root: object,
    expand: Callable[[object], object],
    cycle: Callable[[object], object] = _refuse_cycle,
    where: str = "",
) -> object:
    """Transform a tree from its leaves up, without recursion; a shared node is transformed once.

    Args:
        root: The tree.
        expand: Returns the result for a node, or its ``NodeParts`` if its parts come first.
        cycle: Returns the result for a node that is met inside itself.
        where: The file, for errors.

    Raises:
        LimitExceeded: The tree is deeper than ``MAX_OPEN``, or has more than ``MAX_FOLDED`` nodes.
    """
    # Results by the address of the node. The node itself is kept as well: an address alone could be reused
    # for another node once the first is freed.
    known: dict[int, tuple[object, object]] = {}
    entered: set[int] = set()
    # Nodes whose parts are being transformed: the node, its remaining parts, its ``make``, the results so
    # far.
    stack: list[tuple[object, Iterator[object], Callable[[list[Any]], object], list[Any]]] = []
    stack.append((None, iter((root,)), lambda done: done[0], []))
    visits = 0
    # Each round continues with the innermost node. Its parts are an iterator: after a part that has parts
    # itself (``break``), the loop resumes with the next; once all have results, ``else`` makes the node.
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
                raise LimitExceeded(
                    where, f"objects nested more than {MAX_OPEN:,} deep, or more than {MAX_FOLDED:,}"
                )
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


# Flattening -------------------------------------------------------------------------------------------

MAX_VISITS = 2_000_000
"""Limit on objects visited by ``flatten``, shared ones each time."""
MAX_DEPTH = 500
"""Limit on the depth of a tree in ``flatten``."""
MAX_REPEATS = 200_000
"""Limit on visits of containers that were visited before: these are flattened in each place."""
_MAX_STATE_DEPTH = 32
"""Limit on the depth at which state dicts are recognised."""

_SCALARS = frozenset({int, float, str, bool, type(None)})
_EMPTY: dict[type, Callable[[], object]] = {dict: dict, set: list, frozenset: list}
"""Plain forms of empty containers, a fast path: a hostile file has millions of them."""
_BRACKETS = 4
"""Limit on brackets around a key that looks like another; then a number is added."""
_SCALARS_PER_VISIT = 8
"""Numbers in a list that count as one object: they take far less memory and time than others."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TensorParts:
    """Properties of a tensor that doesn't have a name yet.

    Attributes:
        values: Lazy elements; None if the file lacks them.
        extent: Bytes of the elements in the file, if they are contiguous there.
        storage: Bytes of the storage around them.
        identity: Equal for tensors that are the same view of the same elements.
        role: Only if the object itself determines it; otherwise it is inferred from the path.
        described_by: For a nested tensor, the storages of its sizes and strides, which are no tensors.
    """

    dtype: DType
    shape: tuple[int, ...]
    values: Values | None = None
    extent: Extent | None = None
    storage: Extent | None = None
    byteorder: Literal["little", "big"] = "little"
    identity: object = None
    role: Role | None = None
    shard: Shard | None = None
    described_by: frozenset[Extent] = frozenset()


@dataclass(frozen=True, slots=True)
class Leaf(Generic[T]):
    """Result of ``leaf`` for a node that isn't opened: tensors at paths below it, and plain data.

    Attributes:
        plain: Its plain data; None if it has none.
        visits: Number of objects in it, if they are many; counted against the limit at each visit.
    """

    tensors: tuple[tuple[Path, T], ...] = ()
    plain: object = None
    visits: int = 0


@dataclass(slots=True)
class TreeBudget:
    """Counters of a walk against its limits; trees of one file may share them."""

    visits: int = 0
    repeats: int = 0


@dataclass(slots=True)
class Flat(Generic[T]):
    """A flattened tree: tensors by path in the order of the tree, and the rest as plain data.

    Attributes:
        modules: Paths of the state dicts of modules, which PyTorch marks with ``_metadata``.
        optimizers: Paths of the state dicts of optimizers.
    """

    tensors: list[tuple[Path, T]] = field(default_factory=list)
    plain: Any = None
    modules: set[Path] = field(default_factory=set)
    optimizers: set[Path] = field(default_factory=set)


_TENSORS_ONLY = object()
"""Plain form of a node that holds tensors only, and is removed from the plain data."""


class _OpenContainer(NamedTuple):
    """A container whose children are being visited.

    Attributes:
        forms: Plain forms of its children so far, by key.
        children: The remaining keys and children.
        key: Its key in the container around it.
    """

    path: Path
    node: object
    forms: Any
    children: Iterator[tuple[Any, Any]]
    key: Any


def identity(node: object) -> object:
    """Return a node as it is: the default ``unwrap``."""
    return node


def flatten(
    root: object,
    leaf: Callable[[object], Leaf[T] | None],
    where: str,
    unwrap: Callable[[object], object] = identity,
    budget: TreeBudget | None = None,
) -> Flat[T]:
    """Separate a tree into tensors and plain data, without recursion.

    Args:
        root: The root of a pickle, or a tree.
        leaf: Returns the tensors or value of a node; None for containers and plain values.
        where: The file, for errors.
        unwrap: Returns the node inside a node that merely wraps it; any other as it is.
        budget: Counters shared with other trees of the file.

    Raises:
        LimitExceeded: The tree is too deep, or has too many nodes.
    """
    return _Flattening(leaf, where, unwrap, budget or TreeBudget()).run(root)


class _Flattening(Generic[T]):
    """State of ``flatten``: a stack of open containers, in place of recursion."""

    def __init__(
        self,
        leaf: Callable[[object], Leaf[T] | None],
        where: str,
        unwrap: Callable[[object], object],
        budget: TreeBudget,
    ) -> None:
        self._leaf, self._where, self._unwrap = leaf, where, unwrap
        self._flat: Flat[T] = Flat()
        self._stack: list[_OpenContainer] = []
        self._entered: set[int] = set()
        self._known: set[int] = set()
        self._spent = budget
        self._is_wrapped = unwrap is not identity
        self._plain = PlainDataRenderer().render

    def run(self, root: object) -> Flat[T]:
        form = self._enter(root, (), None)
        while self._stack:
            current = self._stack[-1]
            if self._descend(current):
                continue
            self._stack.pop()
            self._entered.discard(id(current.node))
            form = self._plain_form(current)
            if self._stack:
                self._stack[-1].forms[current.key] = form
        self._flat.plain = None if form is _TENSORS_ONLY else form
        self._flat.tensors = _with_own_names(self._flat.tensors)
        return self._flat

    def _descend(self, current: _OpenContainer) -> bool:
        """Visit the remaining children up to a container that must be opened; return whether one was."""
        depth = len(self._stack)
        path, twin, spent = current.path, current.forms, self._spent
        for key, child in current.children:
            spent.visits += 1
            if spent.visits > MAX_VISITS:
                raise LimitExceeded(self._where, f"a tree of more than {MAX_VISITS:,} objects")
            if type(key) is str:
                # Most values are scalars under a text: they need no path.
                if type(child) in _SCALARS and not self._is_wrapped and self._leaf(child) is None:
                    twin[key] = self._plain(child)
                    continue
                part: str | int = key
            elif type(key) is int and key.bit_length() <= _MAX_KEY_BITS:
                part = key
            else:
                part = KeyText(self._plain(key))
            form = self._enter(child, (*path, part), key)
            if len(self._stack) > depth:
                return True
            twin[key] = form
        return False

    def _enter(self, node: object, path: Path, key: Any) -> object:
        """Return the plain form of a node; if it is a container, push it on the stack instead."""
        node = self._unwrap(node) if self._is_wrapped else node
        leaf = self._leaf(node)
        if leaf is not None:
            self._flat.tensors.extend((path + below, tensor) for below, tensor in leaf.tensors)
            self._spent.visits += len(leaf.tensors) + leaf.visits
            return _TENSORS_ONLY if leaf.plain is None else leaf.plain
        # A fast path for lists of scalars, which hold no tensors.
        if isinstance(node, list | tuple) and _SCALARS.issuperset(map(type, node)):
            self._spent.visits += len(node) // _SCALARS_PER_VISIT
            return [self._plain(item) for item in node]
        if not node and (empty := _EMPTY.get(type(node))) is not None:
            return empty()
        children = self._children(node)
        if children is None:
            return self._plain(node)
        if id(node) in self._entered:
            return "<a cycle>"
        self._open(node, path, key, children)
        return None

    def _open(self, node: object, path: Path, key: Any, children: Iterator[tuple[Any, Any]]) -> None:
        if len(self._stack) >= MAX_DEPTH:
            raise LimitExceeded(self._where, f"objects nested more than {MAX_DEPTH} deep")
        # Plain data has no sharing, so a shared container is flattened in each of its places. A list that has
        # the next one twice, and so on, has 2^n places after n levels; this limit is reached long before that
        # on visits.
        self._spent.repeats += id(node) in self._known
        if self._spent.repeats > MAX_REPEATS:
            raise LimitExceeded(self._where, f"more than {MAX_REPEATS:,} repetitions of shared objects")
        self._known.add(id(node))
        self._entered.add(id(node))
        if isinstance(node, dict) and len(path) <= _MAX_STATE_DEPTH:
            state = node.state if isinstance(node, DictSubclass) else None
            if isinstance(state, dict) and isinstance(state.get("_metadata"), dict):
                self._flat.modules.add(path)  # the result of ``Module.state_dict``
            elif isinstance(node.get("param_groups"), list) and isinstance(node.get("state"), dict):
                self._flat.optimizers.add(path)  # the result of ``Optimizer.state_dict``
        self._stack.append(_OpenContainer(path, node, {}, children, key))

    def _children(self, node: object) -> Iterator[tuple[Any, Any]] | None:
        """Return the keys and parts of a container, or None for any other node."""
        if isinstance(node, DictSubclass) and (state := _mapping_attributes(node.state)):
            return iter(_add_under_free_keys(list(node.items()), [("<state>", state)]))
        if isinstance(node, dict):
            return iter(list(node.items()))
        if isinstance(node, list | tuple):
            return iter(enumerate(node))
        if isinstance(node, set | frozenset):
            return iter(enumerate(stable_order(node)))
        if isinstance(node, Call):
            # An object is opened if it has parts by key, or may hold a tensor; others become one line.
            is_special = is_object_array(node) or is_size(node)
            has_members = isinstance(merge_slots(node.state), dict) or bool(node.pairs or node.items)
            return iter(members(node)) if is_special or has_members or not self._fits_line(node) else None
        return None

    def _fits_line(self, call: Call) -> bool:
        """Return whether an object is described in one line: it is small, and has no tensor in it."""
        parts = small_call_nodes(call)
        return parts is not None and not any(
            isinstance(part, Persistent) or (isinstance(part, Call) and self._leaf(part) is not None)
            for part in parts
        )

    def _plain_form(self, container: _OpenContainer) -> object:
        """Return the plain form of a container whose children have all been visited."""
        # Children that hold only tensors were removed from it. A list that lost some becomes a dictionary, so
        # that the rest keep their indices; a container that lost all is removed itself.
        node, twin = container.node, container.forms
        remaining = {key: form for key, form in twin.items() if form is not _TENSORS_ONLY}
        if len(remaining) < len(twin) and not remaining:
            return _TENSORS_ONLY
        if len(remaining) == len(twin) and isinstance(node, list | tuple | set | frozenset):
            return list(remaining.values())
        if isinstance(node, Call):
            if node.is_of("torch", "Size"):
                return list(remaining.values())
            return {"<class>": str(self._plain(node.function)), **self._keys_as_text(remaining)}
        return self._keys_as_text(remaining)

    def _keys_as_text(self, twin: dict[Any, object]) -> dict[str, object]:
        """Return a mapping with its keys as text; the key 1 is ``[1]`` if there is a key "1" as well."""
        if all(type(key) is str for key in twin):
            return twin
        plain: dict[str, object] = {}
        repetitions: Counter[str] = Counter()
        for key, form in twin.items():
            text = first = key if isinstance(key, str) else KeyText(self._plain(key))
            while not isinstance(key, str) and (text in plain or text in twin):
                count = repetitions[first] = repetitions[first] + 1
                text = KeyText(f"[{text}]" if count <= _BRACKETS else f"[{first}] {count}")
            plain[text] = form
        return plain


def _with_own_names(tensors: list[tuple[Path, T]]) -> list[tuple[Path, T]]:
    """Return tensors with paths that give distinct names."""
    # The name is the path joined by dots, so that a key ``a.b`` and a key ``b`` in ``a`` collide. The tensor
    # with a dotted key keeps its name, as in a state dict it is the name of the parameter; the other path
    # becomes ``a.[b]``.
    by_name: dict[str, list[int]] = {}
    for at, (path, _) in enumerate(tensors):
        by_name.setdefault(_dotted(path), []).append(at)
    if len(by_name) == len(tensors):
        return tensors
    paths, taken, repetitions = [path for path, _ in tensors], set(by_name), Counter[Path]()
    for places in by_name.values():
        if len(places) == 1:
            continue
        shared = _shared_length([paths[at] for at in places])
        keys = [at for at in places if len(paths[at]) == shared + 1 and type(paths[at][-1]) is str]
        for at in places:
            if at not in keys[:1]:
                paths[at] = _free_path(paths[at], shared, taken, repetitions)
    return [(path, tensor) for path, (_, tensor) in zip(paths, tensors, strict=True)]


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))


def _shared_length(paths: Sequence[Path]) -> int:
    """Return the length of the common prefix of paths, without the last key of any."""
    shared = takewhile(lambda keys: len({*keys}) == 1, zip(*(path[:-1] for path in paths), strict=False))
    return sum(1 for _ in shared)


def _free_path(path: Path, shared: int, taken: set[str], repetitions: Counter[Path]) -> Path:
    """Return a path with a free name, by brackets around keys after the common prefix; mark it as taken."""
    bracketed = (*path[:shared], *map(_bracketed, path[shared:]))
    first = path = bracketed if _dotted(bracketed) != _dotted(path) else _last_bracketed(path)
    while (name := _dotted(path)) in taken:
        count = repetitions[first] = repetitions[first] + 1
        path = _last_bracketed(path) if count <= _BRACKETS else (*first[:-1], f"{first[-1]} {count}")
    taken.add(name)
    return path


def _bracketed(part: str | int) -> str | int:
    return f"[{part}]" if type(part) is not str or "." in part else part


def _last_bracketed(path: Path) -> Path:
    return *path[:-1], f"[{path[-1]}]"
