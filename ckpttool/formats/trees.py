"""The tree of objects that a pickle holds, taken apart: tensors here, plain data there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ckpttool.checkpoint import Path
from ckpttool.errors import LimitExceeded
from ckpttool.wire.pickled import Call, Global, Mapped, Payload, Persistent

MAX_VISITS = 2_000_000
MAX_DEPTH = 500
MAX_REPEATS = 200_000
"""How often containers may be met again: what is shared is told at each place, and can multiply at will."""
_MAX_TEXT = 4096
_MAX_INTEGER_BITS = 4096
_MAX_KEY_BITS = 64
_SHOWN_ARGS = 8

_SCALARS = frozenset({int, float, str, bool, type(None)})
_SCALARS_A_VISIT = 8  # in memory and time a number in a list is far less than an object

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Leaf(Generic[T]):
    """What a node turned out to be: tensors at paths below it, and what else is to be told of it."""

    tensors: tuple[tuple[Path, T], ...] = ()
    plain: object = None


@dataclass(slots=True)
class Flat(Generic[T]):
    """A tree taken apart: tensors by path in the order of the tree, and the rest as plain data."""

    tensors: list[tuple[Path, T]] = field(default_factory=list)
    plain: Any = None


class _Gone:
    """Marks what leaves nothing behind in the plain tree."""


_GONE = _Gone()


@dataclass(frozen=True, slots=True)
class _Open:
    """A container on the way down: where its plain twin goes, and its children still to visit."""

    path: Path
    node: object
    twin: Any
    children: Iterator[tuple[Any, Any]]
    key: Any


def _itself(node: object) -> object:
    return node


def flatten(
    root: object,
    leaf: Callable[[object], Leaf[T] | None],
    where: str,
    unwrap: Callable[[object], object] = _itself,
) -> Flat[T]:
    """Take a tree apart, without recursion.

    Args:
        root: What the interpreter built.
        leaf: Says what a node is, or None where it is no tensor.
        where: The file, for errors.
        unwrap: Says what a node stands for, where it merely wraps another.

    Raises:
        LimitExceeded: The tree, shared parts counted each time, is too large or too deep.
    """
    return _Flattening(leaf, where, unwrap).run(root)


class _Flattening(Generic[T]):
    """A tree on its way of being taken apart."""

    def __init__(
        self, leaf: Callable[[object], Leaf[T] | None], where: str, unwrap: Callable[[object], object]
    ) -> None:
        self._leaf, self._where, self._unwrap = leaf, where, unwrap
        self._flat: Flat[T] = Flat()
        self._stack: list[_Open] = []
        self._entered: set[int] = set()
        self._known: set[int] = set()
        self._visits = self._repeats = 0

    def run(self, root: object) -> Flat[T]:
        form = self._enter(root, (), None)
        while self._stack:
            current = self._stack[-1]
            if self._descend(current):
                continue
            self._stack.pop()
            self._entered.discard(id(current.node))
            form = _closed(current)
            if self._stack:
                self._stack[-1].twin[current.key] = form
        self._flat.plain = None if form is _GONE else form
        return self._flat

    def _descend(self, current: _Open) -> bool:
        """Visit the children that are left, up to one that must be opened; tell whether there was one."""
        depth = len(self._stack)
        for key, child in current.children:
            self._visits += 1
            if self._visits > MAX_VISITS:
                raise LimitExceeded(self._where, f"a tree of more than {MAX_VISITS:,} objects")
            form = self._enter(child, (*current.path, _path_part(key)), key)
            if len(self._stack) > depth:
                return True
            current.twin[key] = form
        return False

    def _enter(self, node: object, path: Path, key: Any) -> object:
        """Return the plain form of a node, or open it where it is a container."""
        node = self._unwrap(node)
        found = self._leaf(node)
        if found is not None:
            self._flat.tensors.extend((path + below, tensor) for below, tensor in found.tensors)
            self._visits += len(found.tensors)
            return _GONE if found.plain is None else found.plain
        if isinstance(node, list | tuple) and _SCALARS.issuperset(map(type, node)):
            self._visits += len(node) // _SCALARS_A_VISIT
            return [plain(item) for item in node]
        parts = _children(node)
        if parts is None:
            return plain(node)
        if id(node) in self._entered:
            return "<a cycle>"
        self._open(node, path, key, parts)
        return None

    def _open(self, node: object, path: Path, key: Any, parts: Iterator[tuple[Any, Any]]) -> None:
        if len(self._stack) >= MAX_DEPTH:
            raise LimitExceeded(self._where, f"objects nested more than {MAX_DEPTH} deep")
        self._repeats += id(node) in self._known
        if self._repeats > MAX_REPEATS:
            raise LimitExceeded(self._where, f"more than {MAX_REPEATS:,} repetitions of shared objects")
        self._known.add(id(node))
        self._entered.add(id(node))
        self._stack.append(_Open(path, node, {}, parts, key))


def _path_part(key: Any) -> str | int:
    if type(key) is int and key.bit_length() > _MAX_KEY_BITS:
        return str(plain(key))
    return key if type(key) in (str, int) else str(plain(key))


def _children(node: object) -> Iterator[tuple[Any, Any]] | None:
    """Return the keyed parts of a container, or None where a node is none."""
    if isinstance(node, dict):
        return iter(list(node.items()))
    if isinstance(node, list | tuple):
        return iter(enumerate(node))
    if isinstance(node, set | frozenset):
        return iter(enumerate(sorted(node, key=_order)))
    if isinstance(node, Call):
        return _call_children(node)
    return None


def _order(item: object) -> tuple[str, str]:
    return type(item).__name__, repr(plain(item)) if isinstance(item, str | int | float) else ""


def _call_children(call: Call) -> Iterator[tuple[Any, Any]] | None:
    """Return what an object holds: its state, its items, or the arguments that it is made of."""
    state = call.state
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
        state = {**(state[0] if isinstance(state[0], dict) else {}), **state[1]}
    if isinstance(state, dict):
        return iter([*state.items(), *call.pairs, *enumerate(call.items)])
    if _is_object_array(call):
        return iter(enumerate(state[4]))
    if call.pairs or call.items:
        return iter([*call.pairs, *enumerate(call.items)])
    if call.is_of("torch", "Size") and len(call.args) == 1 and isinstance(call.args[0], list | tuple):
        return iter(enumerate(call.args[0]))
    return None


def _is_object_array(call: Call) -> bool:
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
        parts = _parts(node)
        if parts is not None and id(node) not in seen:
            seen.add(id(node))
            yield node
            pending.extend(parts)


def references(root: object, visited: set[int] | None = None) -> Iterator[Persistent]:
    """Yield every reference in what the interpreter built, as ``nodes`` does."""
    return (node for node in nodes(root, visited) if isinstance(node, Persistent))


def _parts(node: object) -> Iterable[object] | None:
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


def _closed(opened: _Open) -> object:
    """Return the plain form of a container whose children have all been seen."""
    node, twin = opened.node, opened.twin
    left = {key: form for key, form in twin.items() if form is not _GONE}
    if len(left) < len(twin) and not left:
        return _GONE
    if len(left) == len(twin) and isinstance(node, list | tuple | set | frozenset):
        return list(left.values())
    if isinstance(node, Call):
        if node.is_of("torch", "Size"):
            return list(left.values())
        return {"<class>": str(plain(node.function)), **_with_text_keys(left)}
    return _with_text_keys(left)


def _with_text_keys(twin: Mapping[Any, object]) -> dict[str, object]:
    return {key if isinstance(key, str) else str(plain(key)): form for key, form in twin.items()}


def plain(node: object) -> object:
    """Return a node that holds no other as plain data, or a sentence that describes it."""
    if node is None or isinstance(node, bool | float):
        return node
    if isinstance(node, str):
        return node if len(node) <= _MAX_TEXT else f"{node[:_MAX_TEXT]}… ({len(node):,} characters)"
    if isinstance(node, int):
        return (
            node if node.bit_length() <= _MAX_INTEGER_BITS else f"<an integer of {node.bit_length():,} bits>"
        )
    if isinstance(node, bytes):
        return f"<{len(node):,} bytes: {node[:16].hex(' ')}{' …' if len(node) > 16 else ''}>"
    if isinstance(node, complex):
        return str(node)
    if isinstance(node, Payload):
        return f"<{node.nbytes:,} bytes of {'text' if node.kind == 'text' else 'data'}>"
    if isinstance(node, Global):
        return str(node)
    if isinstance(node, Persistent):
        return "<a reference>"
    if isinstance(node, Call):
        return _described_call(node)
    if isinstance(node, tuple | list):
        return str(
            [plain(item) if not isinstance(item, tuple | list) else "…" for item in node[:_SHOWN_ARGS]]
        )
    return f"<{type(node).__name__}>"


def _described_call(call: Call) -> str:
    if call.is_of("torch", "device"):
        return ":".join(str(plain(arg)) for arg in call.args)
    shown = ", ".join(
        repr(plain(arg)) if isinstance(arg, str | int | float | None) else "…"
        for arg in call.args[:_SHOWN_ARGS]
    )
    function = call.function if isinstance(call.function, Global) else "…"
    return f"{function}({shown[:200]})"
