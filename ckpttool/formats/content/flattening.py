"""The tree of objects that a pickle holds, taken apart: tensors here, plain data there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from ckpttool.containers.pickle.pickle_nodes import Call, Mapped, Persistent
from ckpttool.core.dtypes import DType
from ckpttool.core.errors import LimitExceeded
from ckpttool.core.tensor import Extent, Path, Role, Shard, Values
from ckpttool.formats.content.plain_data import KeyText, PlainDataRenderer, small_call_nodes, stable_order
from ckpttool.formats.content.tree import (
    add_under_free_keys,
    is_object_array,
    is_size,
    members,
    merge_slots,
    own_state,
)

MAX_VISITS = 2_000_000
MAX_DEPTH = 500
MAX_REPEATS = 200_000
"""How often containers may be met again: what is shared is told at each place, and can multiply at will."""
_MAX_KEY_BITS = 64
_MAX_STATE_DEPTH = 32
"""How deep state dicts are told from other dictionaries."""

_SCALARS = frozenset({int, float, str, bool, type(None)})
_EMPTY: dict[type, Callable[[], object]] = {dict: dict, set: list, frozenset: list}
"""What empty containers become: a hostile file has millions of them."""
_BRACKETS = 4
"""How many pairs of brackets keys that look alike get before they are counted."""
_SCALARS_PER_VISIT = 8
"""How many numbers in a list count as one object: they take far less memory and time."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TensorParts:
    """What a format knows of a tensor before it has a name; a role only where the object itself says it.

    ``described_by`` are storages that say how it lies, and are no tensors of the checkpoint's own.
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
    """What a node turned out to be: tensors at paths below it, and what else is to be told of it."""

    tensors: tuple[tuple[Path, T], ...] = ()
    plain: object = None
    visits: int = 0
    """How many objects it is made of, where they are many: it counts for so many wherever it is met."""


@dataclass(slots=True)
class TreeBudget:
    """What was spent on a tree; several trees of one file may have one together."""

    visits: int = 0
    repeats: int = 0


@dataclass(slots=True)
class Flat(Generic[T]):
    """A tree taken apart: tensors by path in the order of the tree, and the rest as plain data.

    Attributes:
        modules: Paths of the state dicts of modules, which PyTorch marks with the versions of the modules.
        optimizers: Paths of the state dicts of optimizers.
    """

    tensors: list[tuple[Path, T]] = field(default_factory=list)
    plain: Any = None
    modules: set[Path] = field(default_factory=set)
    optimizers: set[Path] = field(default_factory=set)


class _Nothing:
    """Marks what leaves nothing behind in the plain tree."""


_NOTHING = _Nothing()


class _OpenContainer(NamedTuple):
    """A container on the way down: where its plain twin goes, and its children still to visit."""

    path: Path
    node: object
    twin: Any
    children: Iterator[tuple[Any, Any]]
    key: Any


def itself(node: object) -> object:
    """Return a node that wraps nothing."""
    return node


def flatten(
    root: object,
    leaf: Callable[[object], Leaf[T] | None],
    where: str,
    unwrap: Callable[[object], object] = itself,
    budget: TreeBudget | None = None,
) -> Flat[T]:
    """Take a tree apart, without recursion.

    Args:
        root: What the interpreter built.
        leaf: Says what a node is, or None where it is no tensor.
        where: The file, for errors.
        unwrap: Says what a node stands for, where it merely wraps another.
        budget: What other trees have spent already.
    """
    return _Flattening(leaf, where, unwrap, budget or TreeBudget()).run(root)


class _Flattening(Generic[T]):
    """A tree on its way of being taken apart."""

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
        self._is_wrapped = unwrap is not itself
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
                self._stack[-1].twin[current.key] = form
        self._flat.plain = None if form is _NOTHING else form
        self._flat.tensors = _with_own_names(self._flat.tensors)
        return self._flat

    def _descend(self, current: _OpenContainer) -> bool:
        """Visit the children that are left, up to one that must be opened; tell whether there was one."""
        depth = len(self._stack)
        path, twin, spent = current.path, current.twin, self._spent
        for key, child in current.children:
            spent.visits += 1
            if spent.visits > MAX_VISITS:
                raise LimitExceeded(self._where, f"a tree of more than {MAX_VISITS:,} objects")
            if type(key) is str:
                # Nobody needs the path of a scalar that is no more than it looks.
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
        """Return the plain form of a node, or open it if it is a container."""
        node = self._unwrap(node) if self._is_wrapped else node
        leaf = self._leaf(node)
        if leaf is not None:
            self._flat.tensors.extend((path + below, tensor) for below, tensor in leaf.tensors)
            self._spent.visits += len(leaf.tensors) + leaf.visits
            return _NOTHING if leaf.plain is None else leaf.plain
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
        self._spent.repeats += id(node) in self._known
        if self._spent.repeats > MAX_REPEATS:
            raise LimitExceeded(self._where, f"more than {MAX_REPEATS:,} repetitions of shared objects")
        self._known.add(id(node))
        self._entered.add(id(node))
        if isinstance(node, dict) and len(path) <= _MAX_STATE_DEPTH:
            versions = node.state if isinstance(node, Mapped) else None
            if isinstance(versions, dict) and isinstance(versions.get("_metadata"), dict):
                self._flat.modules.add(path)  # what ``Module.state_dict`` returns
            elif isinstance(node.get("param_groups"), list) and isinstance(node.get("state"), dict):
                self._flat.optimizers.add(path)  # what ``Optimizer.state_dict`` returns
        self._stack.append(_OpenContainer(path, node, {}, children, key))

    def _children(self, node: object) -> Iterator[tuple[Any, Any]] | None:
        """Return the keyed parts of a container, or None if a node is none."""
        if isinstance(node, Mapped) and (state := own_state(node.state)):
            return iter(add_under_free_keys(list(node.items()), [("<state>", state)]))
        if isinstance(node, dict):
            return iter(list(node.items()))
        if isinstance(node, list | tuple):
            return iter(enumerate(node))
        if isinstance(node, set | frozenset):
            return iter(enumerate(stable_order(node)))
        if isinstance(node, Call):
            is_special = is_object_array(node) or is_size(node)
            has_members = isinstance(merge_slots(node.state), dict) or bool(node.pairs or node.items)
            return iter(members(node)) if is_special or has_members or not self._fits_line(node) else None
        return None

    def _fits_line(self, call: Call) -> bool:
        """Tell whether an object can be described in a line: it is small, and no tensor can be in it."""
        parts = small_call_nodes(call)
        return parts is not None and not any(
            isinstance(part, Persistent) or (isinstance(part, Call) and self._leaf(part) is not None)
            for part in parts
        )

    def _plain_form(self, container: _OpenContainer) -> object:
        """Return the plain form of a container whose children have all been seen."""
        node, twin = container.node, container.twin
        remaining = {key: form for key, form in twin.items() if form is not _NOTHING}
        if len(remaining) < len(twin) and not remaining:
            return _NOTHING
        if len(remaining) == len(twin) and isinstance(node, list | tuple | set | frozenset):
            return list(remaining.values())
        if isinstance(node, Call):
            if node.is_of("torch", "Size"):
                return list(remaining.values())
            return {"<class>": str(self._plain(node.function)), **self._keys_as_text(remaining)}
        return self._keys_as_text(remaining)

    def _keys_as_text(self, twin: dict[Any, object]) -> dict[str, object]:
        """Return a mapping with its keys as text; ``[1]`` is the key 1 where there is a key "1", too."""
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
    """Return tensors with paths of which no two give one name: beside a key ``a.b``, ``a`` has a ``[b]``.

    The tensor whose key is the name keeps it: in a state dict, that is the parameter of this name.
    """
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
    """Return with how many keys all paths begin; the last key of a path doesn't count."""
    shared = takewhile(lambda keys: len({*keys}) == 1, zip(*(path[:-1] for path in paths), strict=False))
    return sum(1 for _ in shared)


def _free_path(path: Path, shared: int, taken: set[str], repetitions: Counter[Path]) -> Path:
    """Return a path with brackets around keys after the shared ones, under a name that nothing has yet."""
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
