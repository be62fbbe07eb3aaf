"""Makes a ``Checkpoint`` of the nodes of a pickle: tensors with names, ties and roles, and the content tree.

A node in the tree (``Checkpoint.tree``) is a Python value if it is plain, the recorded ``Call`` if its class
is known to be harmless data, and otherwise an ``Opaque``, which describes it and keeps the tensors in it
under the same names. Each framework's folder converts the framework's own objects.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpttool.containers.pickle.constructors import is_plain
from ckpttool.containers.pickle.pickle_nodes import (
    ATOMS,
    FROM_TYPE,
    Call,
    DictSubclass,
    Global,
    Opaque,
    Payload,
    Persistent,
    Trust,
    children,
    is_removed,
    rebuild,
    trust,
)
from ckpttool.core.checkpoint import Checkpoint, FileEntry, Producer, TrainingState
from ckpttool.core.parameters import logical_tensor_at
from ckpttool.core.report import Finding, error, note
from ckpttool.core.tensor import (
    WHOLE_WEIGHTS,
    Path,
    Role,
    Span,
    Tensor,
    is_training_key,
    role_below,
    role_of,
    role_of_module,
)
from ckpttool.core.text import counted
from ckpttool.core.training import is_training_scalar, training_state
from ckpttool.core.values import Contiguous, Strided
from ckpttool.formats.content.plain_data import describe, lazy_scalar, other_records
from ckpttool.formats.content.tree import (
    Flat,
    Leaf,
    NodeParts,
    TensorParts,
    fold,
    identity,
    mark_none,
    members,
)
from ckpttool.formats.interface import Probe

MAX_READ = 1 << 26
"""Limit on bytes of strings and bytes objects per pickle that are read into a tree."""
OPAQUE, TENSOR = 1, 2
"""Flags of a node: it is or has an ``Opaque``, or a tensor, at any depth."""
_RECORDS = (Global("argparse", "Namespace"), Global("types", "SimpleNamespace"))
"""Classes that remain valid if an attribute is ``Opaque``."""


FrameworkNode = Callable[["TreeBuilder", Any, Leaf[Any]], object]
"""Returns the tree node of an object that holds tensors, from the builder, the object and its ``Leaf``."""


class TreeBuilder:
    """Builds the content tree of one pickle, after ``flatten`` has found its tensors.

    Args:
        leaf: As given to ``flatten``.
        tensors: The tensors that it found, with names.
        path: The file, for errors.
        framework_node: Returns the nodes of objects that hold tensors.
        unwrap: As given to ``flatten``.
    """

    def __init__(
        self,
        leaf: Callable[[object], Leaf[Any] | None],
        tensors: tuple[Tensor, ...],
        path: str,
        framework_node: FrameworkNode,
        unwrap: Callable[[object], object] = identity,
    ) -> None:
        self._leaf, self._path, self._framework_node, self._unwrap = leaf, path, framework_node, unwrap
        self._tensors = tensors
        # Of tied tensors the first one counts, so that both dictionaries are filled backwards.
        self._by_view: dict[object, Tensor] | None = None
        self._by_values = {
            id(tensor.values): tensor for tensor in reversed(tensors) if tensor.values is not None
        }
        self._bytes_left = MAX_READ
        # Flags of new nodes and the reason why a part is opaque, by address; the node is kept as well, since
        # an address alone could be reused for another node.
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
        """Return a key if it is hashable; otherwise an ``Opaque``."""
        if isinstance(key, Opaque) and is_removed(key):
            return self.opaque(f"a key that is {key.reason}", str(describe(key.reason)))
        try:
            hash(key)
        except TypeError:
            return self.opaque("a key that can't be one")
        return key

    def _new_keys(self, nodes: list[Any], keys: list[Any]) -> list[Any]:
        """Return the new keys of a dictionary."""
        # An opaque key keeps the text that it has in the names of tensors below it.
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
        """Return the named tensor of a leaf's first tensor; an ``Opaque`` if it has none."""
        # It is found by the identity of its values, otherwise by its view of the file.
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
        """Return the named tensor with the same values object, or None."""
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
        """Return the tensors of an object that becomes an ``Opaque``, by their paths below it."""
        return self.remember(_nested_tensors(leaf.tensors, self._by_values), (), TENSOR)

    def call_or_opaque(self, call: Call, leaf: Leaf[Any]) -> object:
        """Return a new call, or an ``Opaque`` with its tensors if an argument is opaque."""
        self.remember(call, call.args)
        if not self._flags(call) & OPAQUE:
            return call
        return self.opaque_call(call, leaf, self._reason(call))

    def opaque_call(self, call: Call, leaf: Leaf[Any], why: str) -> Opaque:
        """Return an ``Opaque`` with the tensors of a call, of whose arguments one is opaque (``why``)."""
        content = self.content_of(leaf)
        return self.opaque(f"an object made by {call.function}, which holds {why}", content, why)

    def object_node(self, call: Call) -> object:
        """Return an object of a class known as data as it is, any other as an ``Opaque`` with its members."""
        # Some values are pickled as calls: a complex number, a bytearray. Of other objects the parts are
        # transformed first, as an opaque part makes the object opaque, too.
        number = _plain_value(call)
        if number is not None:
            return number
        known = is_plain(call)
        function, *parts = children(call) or ()
        is_named = isinstance(function, Global)  # ``is_plain`` judges the name together with its arguments

        def make(done: list[Any]) -> object:
            made: Call = rebuild(call, [function, *done] if is_named else [done[-1], *done[:-1]])
            self.remember(made, done)
            is_record = is_named and function in _RECORDS and not made.args
            is_complete = is_record or not self._flags(made) & OPAQUE
            return made if known and is_complete else self._opaque_object(call, made, known)

        return NodeParts(parts if is_named else [*parts, function], make)

    def _opaque_object(self, call: Call, made: Call, known: bool) -> Opaque:
        """Return an ``Opaque`` of an object, with its members if it has tensors or pairs."""
        name = call.function if isinstance(call.function, Global) else "what is no class"
        why = self._reason(made) if known else ""
        what = f"an object of {name}, which {f'holds {why}' if why else 'is not known to be plain data'}"
        if not self._flags(made) & TENSOR and not made.pairs:
            return self.opaque(what, reason=why)
        content = {self._new_key(key): part for key, part in members(made)}
        self.remember(content, [made])
        return self.opaque(what, content, why)

    # Flags of new nodes ----------------------------------------------------------------------------------

    def remember(self, node: object, parts: Iterable[object], flags: int = 0) -> object:
        """Record the flags of a new node from those of its parts, and the first reason; return the node."""
        # ``fold`` makes a node after its parts, whose flags are known by then. So each node looks at its own
        # parts only, and no tree below an opaque node is walked again.
        reason = ""
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
        """Return a new ``Opaque``; ``reason`` describes it in messages about the objects around it."""
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
    DictSubclass: TreeBuilder._dict,
    Payload: TreeBuilder._payload,
    Global: TreeBuilder._global,
    Persistent: TreeBuilder._persistent,
    Call: TreeBuilder._call,
}


def _view_key(tensor: Any) -> object:
    """Return a key that is equal for views of the same bytes in the file."""
    # Values in memory compare by identity: equal bytes don't make two arrays one.
    values = tensor.values
    where = values if isinstance(values, Contiguous | Strided) else id(values)
    return tensor.dtype.name, tensor.shape, where


def _nested_tensors(tensors: Iterable[tuple[Path, Any]], by_values: dict[int, Tensor]) -> object:
    """Return nested dictionaries of tensors by their paths below a node.

    A tensor at the empty path is the node itself, with the others as attributes.
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


def _plain_value(call: Call) -> object:
    """Return the complex number or bytearray that a call makes, or None."""
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
    # Protocol 2 has no opcode for bytes. A bytearray is then pickled as text in Latin-1, whose characters are
    # the bytes.
    if call.is_of("builtins", "bytearray") and len(args) == 2 and args[1] in ("latin-1", "latin1"):
        return bytearray(args[0], "latin-1") if isinstance(args[0], str) else None
    return None


_LAYER_TENSORS = ("weight", "bias")
"""Names of the tensors of a module that is one layer."""


def checkpoint_of_tree(
    *,
    probe: Probe,
    format: str,
    variant: str | None,
    flat: Flat[TensorParts],
    files: tuple[FileEntry, ...],
    spans: Callable[[], Iterator[Span]],
    producer: Producer,
    findings: tuple[Finding, ...] = (),
    safety: tuple[Finding, ...] = (),
    records: Mapping[str, str] = {},
    tree: Callable[[tuple[Tensor, ...]], object] | None = None,
) -> Checkpoint:
    """Return the checkpoint of a flattened tree.

    Args:
        probe: The opened file.
        format: Name of the format.
        variant: The format's variant.
        flat: The flattened tree.
        files: Its files.
        spans: Returns the spans to scan.
        producer: Framework and release.
        findings: Findings of the reader.
        safety: Safety findings of the reader.
        records: Descriptions of further records of the archive, by name.
        tree: Makes ``Checkpoint.tree`` from the named tensors.
    """
    tensors = name_tensors(flat.tensors, flat.plain, flat.modules, flat.optimizers)
    metadata = flat.plain if isinstance(flat.plain, dict) else {} if flat.plain is None else {"": flat.plain}
    if records:
        metadata = {**metadata, **other_records(records, metadata)}
    return Checkpoint(
        path=probe.path,
        format=format,
        variant=variant,
        tensors=tensors,
        files=files,
        spans=spans,
        metadata=lambda: metadata,
        training=lambda: training_of(metadata, tensors, probe.name),
        tree=lambda: None if tree is None else mark_none(tree(tensors)),
        producer=producer,
        findings=(*findings, *shard_findings(tensors)),
        safety=safety,
        close=probe.close,
    )


def tree_builder(
    root: object,
    leaf: Callable[[object], Leaf[TensorParts] | None],
    path: str,
    framework_node: FrameworkNode,
    unwrap: Callable[[object], object] = identity,
) -> Callable[[tuple[Tensor, ...]], object]:
    """Return a function that builds the tree from named tensors, for ``TreeBuilder``'s other arguments."""

    def build(tensors: tuple[Tensor, ...]) -> object:
        return TreeBuilder(leaf, tensors, path, framework_node, unwrap).run(root)

    return build


def name_tensors(
    parts_by_path: list[tuple[Path, TensorParts]],
    plain: object,
    modules: Collection[Path] = (),
    optimizers: Collection[Path] = (),
) -> tuple[Tensor, ...]:
    """Return the tensors with names, roles and ties; for the arguments see ``Flat``."""
    of_unknown_role = [(path, parts.shape) for path, parts in parts_by_path if parts.role is None]
    inferred = iter(infer_roles(of_unknown_role, plain, modules, optimizers))
    owners: dict[object, str] = {}
    tensors = []
    for path, parts in parts_by_path:
        tensor = Tensor(
            path or ("tensor",),
            parts.dtype,
            parts.shape,
            next(inferred) if parts.role is None else parts.role,
            parts.values,
            parts.extent,
            parts.storage,
            parts.byteorder,
            shard=parts.shard,
        )
        # Tensors are tied if they are the same view of the same bytes: ``identity`` for a view of a storage.
        # An array in a pickle is tied to another if both are one object; empty ones are never tied.
        view: object = None
        if parts.identity is not None:
            view = parts.identity if parts.storage is not None and parts.storage.nbytes else None
        elif parts.values is not None and 0 not in parts.shape:
            view = (id(parts.values), parts.dtype.name, parts.shape)
        owner = tensor.name if view is None else owners.setdefault(view, tensor.name)
        tensors.append(tensor if owner == tensor.name else replace(tensor, shares_with=owner))
    return tuple(tensors)


def infer_roles(
    tensors: Sequence[tuple[Path, tuple[int, ...]]],
    plain: object,
    modules: Collection[Path] = (),
    optimizers: Collection[Path] = (),
) -> list[Role]:
    """Return the role of each tensor from its path, its shape and the data around it.

    Args:
        tensors: Path and shape of each.
        plain: The checkpoint's plain data.
        modules: As ``Flat.modules``: all tensors in these belong to the model, whatever their names.
        optimizers: As ``Flat.optimizers``: no tensor below these is a weight.
    """
    # The strongest evidence decides: a state dict of an optimizer; the mark of a module's state dict; a
    # dictionary whose keys look like those of modules; last of all the tensor's own path.
    if isinstance(plain, dict) and "param_groups" in plain:
        return [Role.OPTIMIZER] * len(tensors)
    tensors, plain = _whole_tensors(tensors, plain)
    parents = {path[:-1] for path, _ in tensors}
    module_roles = {path: role_of_module(path) for path in modules if path in parents}
    has_nothing_else = not isinstance(plain, dict) or not plain
    if has_nothing_else and () not in module_roles and all(len(path) <= 1 for path, _ in tensors):
        # A bare state dict: its tensors are weights, whatever their names.
        return [
            Role.TRAINING if path and shape == () and is_training_scalar(path[0]) else Role.WEIGHTS
            for path, shape in tensors
        ]
    layers = _layers(dict(tensors))
    of_optimizers = {
        parent for parent in parents if any(parent[:count] in optimizers for count in range(len(parent) + 1))
    }
    roles = []
    for path, shape in tensors:
        parent = path[:-1]
        if path and parent in of_optimizers:
            roles.append(Role.OPTIMIZER)
        elif path and parent in module_roles:
            roles.append(module_roles[parent])
        elif (layer_names := layers.get(parent)) is not None:
            roles.append(_role_among_layers(path, shape, layer_names))
        else:
            roles.append(role_of(path, shape))
    return roles


def _whole_tensors(
    tensors: Sequence[tuple[Path, tuple[int, ...]]], plain: object
) -> tuple[Sequence[tuple[Path, tuple[int, ...]]], object]:
    """Return the tensors with components (of sparse and quantized ones) at the path of the whole.

    The plain data is returned without descriptions of tensors at the top.
    """
    if not isinstance(plain, dict) or not plain:
        return tensors, plain
    whole: list[tuple[Path, tuple[int, ...]]] = []
    described: set[Path] = set()
    for path, shape in tensors:
        found = logical_tensor_at(plain, path)
        if found is not None:
            path, logical = found
            described.add(path)
            shape = shape if logical.shape is None else logical.shape
        whole.append((path, shape))
    if () in described:
        return whole, None
    return whole, {key: value for key, value in plain.items() if (key,) not in described}


def _layers(shapes: Mapping[Path, tuple[int, ...]]) -> dict[Path, set[str]]:
    """Return the paths of dictionaries that look like state dicts, with the first names of their modules.

    Those below a key that determines the role, such as ``optimizer``, are left out.
    """
    layers: dict[Path, set[str]] = {}
    for path, shape in shapes.items():
        key = path[-1] if path else None
        if not isinstance(key, str) or ("." not in key and key not in _LAYER_TENSORS):
            continue
        if role_of((key,), shape) is Role.WEIGHTS:
            layers.setdefault(path[:-1], set()).add(key.partition(".")[0])
    return {path: names for path, names in layers.items() if role_below(path) is None}


def _role_among_layers(path: Path, shape: tuple[int, ...], layer_names: Collection[str]) -> Role:
    """Return the role of a tensor in a dictionary that looks like a state dict."""
    # Buffers may have any name, so that all in such a dictionary counts as the model's. Not so if a key holds
    # all weights, or if the name is usual next to weights: then it is the dictionary of a whole checkpoint,
    # and each path is judged by itself. Nor do scalars that are named like a counter of the training.
    key = path[-1]
    if not isinstance(key, str):
        return role_of(path, shape)
    role = role_of((key,), shape)
    if role in (Role.WEIGHTS, Role.OPTIMIZER):
        return role
    first, dot, _ = key.partition(".")
    if first in layer_names:
        return Role.WEIGHTS
    if any(WHOLE_WEIGHTS.search(name) for name in layer_names) or is_training_key(first):
        return role_of(path, shape)
    if not dot and shape == () and is_training_scalar(key):
        return Role.TRAINING
    return Role.WEIGHTS


def training_of(metadata: Mapping[str, Any], tensors: tuple[Tensor, ...], name: str) -> TrainingState:
    """Return the training state from plain values, scalar tensors, and the file's name."""
    scalars = {
        tensor.path: lazy_scalar(tensor)
        for tensor in tensors
        if tensor.size == 1 and tensor.role in (Role.TRAINING, Role.OTHER)
    }
    return training_state(metadata, scalars, name)


def shard_findings(tensors: Sequence[Tensor]) -> Iterator[Finding]:
    """Yield findings about sharded tensors in the file of one rank."""
    for tensor in tensors:
        if tensor.shard is not None and tensor.shard.is_partial:
            placements = ", ".join(tensor.shard.placements)
            message = f"{placements}: terms of a sum that was never computed, not its values"
            yield error("dtensor-partial", message, tensor.name)
    cut = [tensor.shard for tensor in tensors if tensor.shard is not None and not tensor.shard.is_whole]
    if cut:
        rank = "a process" if cut[0].rank is None else f"rank {cut[0].rank:,}"
        world = f" of {cut[0].world:,}" if cut[0].world else ""
        message = (
            f"only the slices of {rank}{world} in {counted(len(cut), 'tensor')}; other ranks have the rest"
        )
        yield note("rank-alone", message)
