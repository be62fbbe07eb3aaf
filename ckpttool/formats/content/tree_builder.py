"""Builds the content tree (``Checkpoint.tree``) out of the nodes of a pickle; nothing is lost silently.

A node becomes what it is in Python where it is plain, stays as it is where it is data of a class that is
known to be harmless, and becomes an ``Opaque`` elsewhere. Tensors inside of what can't be carried stay, under
the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ckpttool.core.values import Contiguous, Strided
from ckpttool.formats.content.flattening import Leaf
from ckpttool.formats.content.object_parts import members
from ckpttool.formats.content.plain_data import describe
from ckpttool.formats.content.tree import NodeParts, dict_like, fold, make_call
from ckpttool.formats.torch.modules import is_module
from ckpttool.tensor import Path, Tensor
from ckpttool.wire.calls import is_plain
from ckpttool.wire.pickle_nodes import (
    FROM_TYPE,
    MASKED,
    NDARRAY,
    QUANTIZED,
    REQUIRES_GRAD,
    Call,
    Global,
    Mapped,
    Opaque,
    Payload,
    Persistent,
    is_gone,
    views_memory,
)
from ckpttool.wire.trust import Trust, trust

MAX_READ = 1 << 26
"""The most bytes of texts and byte strings that are taken out of a pickle into a tree."""
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})
_VIEWS = frozenset(
    {("torch._utils", name) for name in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3")}
)
_RECONSTRUCT = frozenset({"_reconstruct", "_frombuffer"})
OPAQUE, TENSOR = 1, 2
_RECORDS = frozenset({("argparse", "Namespace"), ("types", "SimpleNamespace")})
"""Classes of which any attribute may be missing."""


def build_tree(
    root: object,
    leaf: Callable[[object], Leaf[Any] | None],
    tensors: tuple[Tensor, ...],
    path: str,
    *,
    unwrap: Callable[[object], object] = lambda node: node,
    arrays: bool = True,
) -> object:
    """Return the tree of what a pickle holds.

    Args:
        root: What the interpreter built.
        leaf: As for ``flattening.flatten``, which has asked it before.
        tensors: The tensors that came out of that, with their names.
        path: The file, for errors.
        unwrap: Says what a node stands for, where it merely wraps another.
        arrays: Whether an array of NumPy is told from a tensor.
    """
    return TreeBuilder(leaf, tensors, path, unwrap, arrays).run(root)


class TreeBuilder:
    """Builds one tree; see ``build_tree`` for the arguments."""

    def __init__(
        self,
        leaf: Callable[[object], Leaf[Any] | None],
        tensors: tuple[Tensor, ...],
        path: str,
        unwrap: Callable[[object], object],
        arrays: bool,
    ) -> None:
        self._leaf, self._path, self._unwrap, self._arrays = leaf, path, unwrap, arrays
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
        return fold(root, self._expand, lambda node: self._opaque("a cycle"), self._path)

    # Nodes --------------------------------------------------------------------------------------------

    def _expand(self, node: object) -> object:
        node = self._unwrap(node)
        kind = type(node)
        if kind in _ATOMS:
            return node
        expand = _EXPAND.get(kind)
        return self._opaque(f"a {kind.__name__}") if expand is None else expand(self, node)

    def _sequence(self, node: Any) -> NodeParts:
        kind = type(node)
        return NodeParts(list(node), lambda done: self._remember(kind(done), done))

    def _set(self, node: Any) -> NodeParts:
        kind = type(node)
        return NodeParts(list(node), lambda done: self._remember(kind(map(self._new_key, done)), done))

    def _new_key(self, key: Any) -> Any:
        """Return what may be a key, as text where it is none."""
        if isinstance(key, Opaque) and is_gone(key):
            return self._opaque(f"a key that is {key.what}", str(describe(key.what)))
        try:
            hash(key)
        except TypeError:
            return self._opaque("a key that can't be one")
        return key

    def _new_keys(self, nodes: list[Any], keys: list[Any]) -> list[Any]:
        """Return the new keys; those that can't be carried are texts, the same as in the names of tensors."""
        made = []
        for node, key in zip(nodes, keys, strict=True):
            if self._flags(key) & OPAQUE:
                key = self._opaque(f"a key that can't be carried: {self._reason(key)}", str(describe(node)))
            made.append(self._new_key(key))
        return made

    def _dict(self, node: dict[Any, Any]) -> NodeParts:
        keys, count = list(node), len(node)
        state = [node.state, node.factory] if isinstance(node, Mapped) else []

        def make(done: list[Any]) -> object:
            parts = [*self._new_keys(keys, done[:count]), *done[count:]]
            return self._remember(dict_like(node, parts, count), parts)

        return NodeParts([*keys, *node.values(), *state], make)

    def _payload(self, payload: Payload) -> object:
        self._bytes_left -= payload.nbytes
        if self._bytes_left < 0:
            return self._opaque(f"{payload.nbytes:,} bytes of text or data, beyond the limit of {MAX_READ:,}")
        data = payload.read()
        return data.decode("utf-8", "surrogatepass") if payload.kind == "text" else data

    def _global(self, name: Global) -> object:
        if trust(name.module, name.name) is Trust.PLAIN:
            return name
        return self._opaque(f"the name {name}, which is no data")

    def _persistent(self, node: Persistent) -> object:
        leaf = self._leaf(node)
        if leaf is None or not leaf.tensors:
            return self._opaque("a reference to what is not data in the file")
        tensor = self._tensor(leaf)
        kind = node.id[1] if isinstance(node.id, tuple) and len(node.id) > 1 else None
        if isinstance(tensor, Tensor) and isinstance(kind, Global) and kind.name.endswith("Storage"):
            return self._remember(Call(kind, (tensor,)), [tensor])
        return tensor

    def _tensor(self, leaf: Leaf[Any]) -> object:
        """Return the first of the tensors that a node turned out to be, as the checkpoint has it."""
        parts = leaf.tensors[0][1]
        if parts.values is None:
            return self._opaque("a tensor without values")
        tensor = self._by_values.get(id(parts.values))
        if tensor is None:
            if self._by_view is None:
                self._by_view = {_view_key(tensor): tensor for tensor in reversed(self._tensors)}
            tensor = self._by_view.get(_view_key(parts))
        if tensor is None:
            return self._opaque("a tensor without a name")
        return self._remember(tensor, (), TENSOR)

    # Objects ------------------------------------------------------------------------------------------

    def _call(self, call: Call) -> object:
        leaf = self._leaf(call)
        function = call.function
        if leaf is None or not leaf.tensors or not isinstance(function, Global):
            return self._object(call)
        if is_module(call):
            return self._module(call, leaf)
        if leaf.tensors[0][1].shard is not None:
            return self._tensor(leaf)
        name = (function.module, function.name)
        if name in _VIEWS:
            return self._view(call, leaf)
        if function == QUANTIZED:
            return self._quantized_tensor(call, leaf)
        if function == FROM_TYPE:
            return self._from_type(call, leaf)
        if function == MASKED or function.name == MASKED.name:
            return self._masked_array(call, leaf)
        if name[0].startswith("numpy.") and name[1] in _RECONSTRUCT:
            return self._array(call, leaf)
        return self._object(call)

    def _view(self, call: Call, leaf: Leaf[Any]) -> object:
        tensor = self._tensor(leaf)
        if len(call.args) > 5 and call.args[5]:
            return self._opaque("the hooks of a tensor", tensor)
        if call.function != Global("torch._utils", "_rebuild_tensor") and call.args[4] is True:
            return self._remember(Call(REQUIRES_GRAD, (tensor,)), [tensor])
        return tensor

    def _quantized_tensor(self, call: Call, leaf: Leaf[Any]) -> NodeParts:
        tensor, grad = self._tensor(leaf), call.args[5] is True
        return NodeParts(
            [call.args[4]], lambda done: self._call_or_opaque(Call(QUANTIZED, (tensor, done[0], grad)), leaf)
        )

    def _from_type(self, call: Call, leaf: Leaf[Any]) -> object:
        function, kind, args, state = call.args[:4]
        if isinstance(function, Global) and (function.module, function.name) in _VIEWS:
            inner = self._view(Call(function, args), leaf)
            parts = [kind, state]
            return NodeParts(parts, lambda done: self._call_or_opaque(Call(FROM_TYPE, (inner, *done)), leaf))
        if function == QUANTIZED:
            tensor, grad = self._tensor(leaf), args[5] is True

            def make(done: list[Any]) -> object:
                inner = self._call_or_opaque(Call(QUANTIZED, (tensor, done[2], grad)), leaf)
                return self._call_or_opaque(Call(FROM_TYPE, (inner, *done[:2])), leaf)

            return NodeParts([kind, state, args[4]], make)
        if function == FROM_TYPE:
            return self._opaque_call(call, leaf, "a class in a class")
        args = args if isinstance(args, tuple) else (args,)

        def make_of_parts(done: list[Any]) -> object:
            inner = self._remember(Call(done[0], done[1]), done[:2])
            return self._call_or_opaque(Call(FROM_TYPE, (inner, *done[2:])), leaf)

        return NodeParts([function, args, kind, state], make_of_parts)

    def _array(self, call: Call, leaf: Leaf[Any]) -> object:
        tensor = self._tensor(leaf)
        if not self._arrays:
            return tensor
        made = self._remember(Call(NDARRAY, (tensor,)), [tensor])
        is_array = isinstance(call.function, Global) and call.function.name == "_reconstruct"
        kind = call.args[0] if call.args and is_array else None
        if isinstance(kind, Global) and kind != Global("numpy", "ndarray"):
            return self._opaque(f"the class {kind} of an array", made)
        return made

    def _masked_array(self, call: Call, leaf: Leaf[Any]) -> object:
        tensors = {path: self._by_values.get(id(parts.values)) for path, parts in leaf.tensors}
        values, mask = tensors.get(()), tensors.get(("mask",))
        if values is None or mask is None:
            return self._opaque("a masked array", _nested_tensors(leaf.tensors, self._by_values))
        for tensor in (values, mask):
            self._remember(tensor, (), TENSOR)
        fill = call.state[6] if isinstance(call.state, tuple) and len(call.state) > 6 else None
        return NodeParts(
            [fill], lambda done: self._call_or_opaque(Call(MASKED, (values, mask, done[0])), leaf)
        )

    def _module(self, call: Call, leaf: Leaf[Any]) -> Opaque:
        content = self._content_of(leaf)
        return self._opaque(
            f"an object of the class {call.function}, of which the state dict is carried", content
        )

    def _content_of(self, leaf: Leaf[Any]) -> object:
        """Return the tensors of an object that can't be carried itself."""
        return self._remember(_nested_tensors(leaf.tensors, self._by_values), (), TENSOR)

    def _call_or_opaque(self, call: Call, leaf: Leaf[Any]) -> object:
        """Return a new call, or what is left of it where a part can't be carried."""
        self._remember(call, call.args)
        if not self._flags(call) & OPAQUE:
            return call
        return self._opaque_call(call, leaf, self._reason(call))

    def _opaque_call(self, call: Call, leaf: Leaf[Any], why: str) -> Opaque:
        content = self._content_of(leaf)
        return self._opaque(f"an object made by {call.function}, which holds {why}", content, why)

    def _object(self, call: Call) -> object:
        """Return an object as it is where its class is known as data, and its attributes elsewhere."""
        number = _plain_value(call)
        if number is not None:
            return number
        call = _as_new_object(call)
        known = is_data(call)
        parts = [call.args, call.kwargs, call.state, call.items, call.pairs]
        if not isinstance(call.function, Global):
            parts.append(call.function)

        def make(done: list[Any]) -> object:
            function = call.function if len(done) == 5 else done[5]
            made = make_call(function, *done[:5], is_new=call.is_new)
            self._remember(made, done)
            is_complete = not self._flags(made) & OPAQUE or _is_record(made)
            return made if known and is_complete else self._opaque_object(call, made, known)

        return NodeParts(parts, make)

    def _opaque_object(self, call: Call, made: Call, known: bool) -> Opaque:
        """Return what of an object is carried: a dictionary of its parts, if there are tensors among them."""
        name = call.function if isinstance(call.function, Global) else "what is no class"
        why = self._reason(made) if known else ""
        what = f"an object of {name}, which {f'holds {why}' if why else 'is not known to be plain data'}"
        if not self._flags(made) & TENSOR and not made.pairs:
            return self._opaque(what, reason=why)
        content = {self._new_key(key): part for key, part in members(made)}
        self._remember(content, [made])
        return self._opaque(what, content, why)

    # What is known of new nodes ------------------------------------------------------------------------

    def _remember(self, node: object, parts: Iterable[object], also: int = 0) -> object:
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

    def _opaque(self, what: str, content: object = None, reason: str = "") -> Opaque:
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


def is_data(call: Call) -> bool:
    """Tell whether to make an object runs nothing that the file chose."""
    return is_plain(call) and not views_memory(call.state)


def _is_record(call: Call) -> bool:
    function = call.function
    return isinstance(function, Global) and (function.module, function.name) in _RECORDS and not call.args


def _as_new_object(call: Call) -> Call:
    """Return an object as newer protocols have it; ``copyreg._reconstructor`` makes an empty one."""
    if not call.is_of("copyreg", "_reconstructor") or len(call.args) != 3:
        return call
    kind, base, state = call.args
    if not isinstance(kind, Global) or base != Global("builtins", "object") or state is not None:
        return call
    return make_call(kind, (), None, call.state, call.items, call.pairs, is_new=True)


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
    if call.is_of("builtins", "bytes") and not args:
        return b""
    if call.is_of("builtins", "bytearray") and all(type(arg) is bytes for arg in args) and len(args) < 2:
        return bytearray(*args)
    if call.is_of("builtins", "bytearray") and len(args) == 2 and args[1] in ("latin-1", "latin1"):
        return bytearray(args[0], "latin-1") if isinstance(args[0], str) else None
    return None
