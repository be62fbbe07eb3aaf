"""Builds the content tree (``Checkpoint.tree``) out of the nodes of a pickle; nothing is lost silently.

A node becomes what it is in Python where it is plain, stays as it is where it is data of a class that is
known to be harmless, and becomes an ``Opaque`` elsewhere. Tensors inside of what can't be carried stay, under
the same names. What a framework's own objects become is said in its folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ckpttool.containers.pickle.constructors import is_plain
from ckpttool.containers.pickle.pickle_nodes import (
    ATOMS,
    FROM_TYPE,
    Call,
    Global,
    Mapped,
    Opaque,
    Payload,
    Persistent,
    children,
    is_gone,
    rebuild,
)
from ckpttool.containers.pickle.trust import Trust, trust
from ckpttool.core.tensor import Path, Tensor
from ckpttool.core.values import Contiguous, Strided
from ckpttool.formats.content.flattening import Leaf
from ckpttool.formats.content.plain_data import describe
from ckpttool.formats.content.tree import NodeParts, fold, members

MAX_READ = 1 << 26
"""The most bytes of texts and byte strings that are taken out of a pickle into a tree."""
OPAQUE, TENSOR = 1, 2
_RECORDS = frozenset({("argparse", "Namespace"), ("types", "SimpleNamespace")})
"""Classes of which any attribute may be missing."""


FrameworkNode = Callable[["TreeBuilder", Any, Leaf[Any]], object]
"""Says what an object becomes that turned out to be tensors; it gets the builder, the object, and these."""


class TreeBuilder:
    """Builds the tree of what one pickle holds.

    Args:
        leaf: As for ``flattening.flatten``, which has asked it before.
        tensors: The tensors that came out of that, with their names.
        path: The file, for errors.
        framework_node: Says what the objects become that hold tensors.
        unwrap: Says what a node stands for, where it merely wraps another.
    """

    def __init__(
        self,
        leaf: Callable[[object], Leaf[Any] | None],
        tensors: tuple[Tensor, ...],
        path: str,
        framework_node: FrameworkNode,
        unwrap: Callable[[object], object] = lambda node: node,
    ) -> None:
        self._leaf, self._path, self._framework_node, self._unwrap = leaf, path, framework_node, unwrap
        self._tensors = tensors
        self._by_view: dict[object, Tensor] | None = None
        self._by_values = {
            id(tensor.values): tensor for tensor in reversed(tensors) if tensor.values is not None
        }
        self._bytes_left = MAX_READ
        # Nodes are kept with what is known of them: an address alone may come to be another's.
        self._known: dict[int, tuple[object, int, str]] = {}

    def run(self, root: object) -> object:
        """Return the tree."""
        return fold(root, self._expand, lambda node: self.opaque("a cycle"), self._path)

    # Nodes --------------------------------------------------------------------------------------------

    def _expand(self, node: object) -> object:
        node = self._unwrap(node)
        kind = type(node)
        if kind in ATOMS:
            return node
        expand = _EXPAND.get(kind)
        return self.opaque(f"a {kind.__name__}") if expand is None else expand(self, node)

    def _sequence(self, node: Any) -> NodeParts:
        return NodeParts(node, lambda done: self.remember(rebuild(node, done), done))

    def _set(self, node: Any) -> NodeParts:
        def make(done: list[Any]) -> object:
            return self.remember(rebuild(node, [*map(self._new_key, done)]), done)

        return NodeParts(list(node), make)

    def _new_key(self, key: Any) -> Any:
        """Return what may be a key, as text where it is none."""
        if isinstance(key, Opaque) and is_gone(key):
            return self.opaque(f"a key that is {key.what}", str(describe(key.what)))
        try:
            hash(key)
        except TypeError:
            return self.opaque("a key that can't be one")
        return key

    def _new_keys(self, nodes: list[Any], keys: list[Any]) -> list[Any]:
        """Return the new keys; those that can't be carried are texts, the same as in the names of tensors."""
        made = []
        for node, key in zip(nodes, keys, strict=True):
            if self._flags(key) & OPAQUE:
                key = self.opaque(f"a key that can't be carried: {self._reason(key)}", str(describe(node)))
            made.append(self._new_key(key))
        return made

    def _dict(self, node: dict[Any, Any]) -> NodeParts:
        keys = list(node)

        def make(done: list[Any]) -> object:
            parts = [*self._new_keys(keys, done[: len(keys)]), *done[len(keys) :]]
            return self.remember(rebuild(node, parts), parts)

        return NodeParts(children(node) or (), make)

    def _payload(self, payload: Payload) -> object:
        self._bytes_left -= payload.nbytes
        if self._bytes_left < 0:
            return self.opaque(f"{payload.nbytes:,} bytes of text or data, beyond the limit of {MAX_READ:,}")
        data = payload.read()
        return data.decode("utf-8", "surrogatepass") if payload.kind == "text" else data

    def _global(self, name: Global) -> object:
        if trust(name.module, name.name) is Trust.PLAIN:
            return name
        return self.opaque(f"the name {name}, which is no data")

    def _persistent(self, node: Persistent) -> object:
        leaf = self._leaf(node)
        if leaf is None or not leaf.tensors:
            return self.opaque("a reference to what is not data in the file")
        return self._framework_node(self, node, leaf)

    def tensor(self, leaf: Leaf[Any]) -> object:
        """Return the first of the tensors that a node turned out to be, as the checkpoint has it."""
        parts = leaf.tensors[0][1]
        if parts.values is None:
            return self.opaque("a tensor without values")
        tensor = self._by_values.get(id(parts.values))
        if tensor is None:
            if self._by_view is None:
                self._by_view = {_view_key(tensor): tensor for tensor in reversed(self._tensors)}
            tensor = self._by_view.get(_view_key(parts))
        if tensor is None:
            return self.opaque("a tensor without a name")
        return self.remember(tensor, (), TENSOR)

    def tensor_of(self, parts: Any) -> Tensor | None:
        """Return the tensor that has the very values of one that a node turned out to be."""
        tensor = self._by_values.get(id(parts.values))
        if tensor is not None:
            self.remember(tensor, (), TENSOR)
        return tensor

    # Objects ------------------------------------------------------------------------------------------

    def _call(self, call: Call) -> object:
        leaf = self._leaf(call)
        if leaf is None or not leaf.tensors or not isinstance(call.function, Global):
            return self.object_node(call)
        return self._framework_node(self, call, leaf)

    def content_of(self, leaf: Leaf[Any]) -> object:
        """Return the tensors of an object that can't be carried itself."""
        return self.remember(_nested_tensors(leaf.tensors, self._by_values), (), TENSOR)

    def call_or_opaque(self, call: Call, leaf: Leaf[Any]) -> object:
        """Return a new call, or what is left of it where a part can't be carried."""
        self.remember(call, call.args)
        if not self._flags(call) & OPAQUE:
            return call
        return self.opaque_call(call, leaf, self._reason(call))

    def opaque_call(self, call: Call, leaf: Leaf[Any], why: str) -> Opaque:
        """Return what is left of an object of which a part can't be carried."""
        content = self.content_of(leaf)
        return self.opaque(f"an object made by {call.function}, which holds {why}", content, why)

    def object_node(self, call: Call) -> object:
        """Return an object as it is where its class is known as data, and its attributes elsewhere."""
        number = _plain_value(call)
        if number is not None:
            return number
        known = is_plain(call)
        function, *parts = children(call) or ()
        is_named = isinstance(function, Global)  # a name that is called is judged with its call

        def make(done: list[Any]) -> object:
            made: Call = rebuild(call, [function, *done] if is_named else [done[-1], *done[:-1]])
            self.remember(made, done)
            is_complete = not self._flags(made) & OPAQUE or _is_record(made)
            return made if known and is_complete else self._opaque_object(call, made, known)

        return NodeParts(parts if is_named else [*parts, function], make)

    def _opaque_object(self, call: Call, made: Call, known: bool) -> Opaque:
        """Return what of an object is carried: a dictionary of its parts, if there are tensors among them."""
        name = call.function if isinstance(call.function, Global) else "what is no class"
        why = self._reason(made) if known else ""
        what = f"an object of {name}, which {f'holds {why}' if why else 'is not known to be plain data'}"
        if not self._flags(made) & TENSOR and not made.pairs:
            return self.opaque(what, reason=why)
        content = {self._new_key(key): part for key, part in members(made)}
        self.remember(content, [made])
        return self.opaque(what, content, why)

    # What is known of new nodes ------------------------------------------------------------------------

    def remember(self, node: object, parts: Iterable[object], also: int = 0) -> object:
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

    def _flags(self, node: object) -> int:
        known = self._known.get(id(node))
        return 0 if known is None else known[1]

    def _reason(self, node: object) -> str:
        known = self._known.get(id(node))
        return "" if known is None else known[2]

    def opaque(self, what: str, content: object = None, reason: str = "") -> Opaque:
        """Return what can't be carried; ``reason`` is the part of it that can't, told of what is around."""
        made = Opaque(what, content)
        self._known[id(made)] = made, OPAQUE | self._flags(content), reason or what
        return made


_EXPAND: dict[type, Callable[[TreeBuilder, Any], object]] = {
    bytearray: lambda builder, node: bytearray(node),
    list: TreeBuilder._sequence,
    tuple: TreeBuilder._sequence,
    set: TreeBuilder._set,
    frozenset: TreeBuilder._set,
    dict: TreeBuilder._dict,
    Mapped: TreeBuilder._dict,
    Payload: TreeBuilder._payload,
    Global: TreeBuilder._global,
    Persistent: TreeBuilder._persistent,
    Call: TreeBuilder._call,
}


def _view_key(tensor: Any) -> object:
    """Return what two views of the same bytes have in common; equal bytes in memory are not the same ones."""
    values = tensor.values
    where = values if isinstance(values, Contiguous | Strided) else id(values)
    return tensor.dtype.name, tensor.shape, where


def _nested_tensors(tensors: Iterable[tuple[Path, Any]], by_values: dict[int, Tensor]) -> object:
    """Return dictionaries in which tensors have the paths that they have below a node.

    A tensor that is the node itself has the others as its attributes.
    """
    root: dict[Any, Any] = {}
    itself: Tensor | None = None
    for path, parts in tensors:
        tensor = by_values.get(id(parts.values))
        if tensor is None:
            continue
        if not path:
            itself = itself or tensor
            continue
        level = root
        for key in path[:-1]:
            level = level.setdefault(key, {})
        level[path[-1]] = tensor
    if itself is None:
        return root
    return Call(FROM_TYPE, (itself, Global("torch", "Tensor"), root)) if root else itself


def _is_record(call: Call) -> bool:
    function = call.function
    return isinstance(function, Global) and (function.module, function.name) in _RECORDS and not call.args


def _plain_value(call: Call) -> object:
    """Return the number or the bytes that a call makes, or None."""
    if call.kwargs or call.state is not None or call.items or call.pairs:
        return None
    args = call.args
    if (
        call.is_of("builtins", "complex")
        and len(args) == 2
        and all(type(arg) in (int, float) for arg in args)
    ):
        return complex(*args)
    if call.is_of("builtins", "bytearray") and all(type(arg) is bytes for arg in args) and len(args) < 2:
        return bytearray(*args)
    if call.is_of("builtins", "bytearray") and len(args) == 2 and args[1] in ("latin-1", "latin1"):
        return bytearray(args[0], "latin-1") if isinstance(args[0], str) else None
    return None
