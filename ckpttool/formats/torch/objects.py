"""Tensors and modules in a pickle, read from the inert nodes of the calls that would rebuild them.

A pickled tensor is a call of a function such as ``torch._utils._rebuild_tensor_v2`` with a storage, an
offset, a shape and strides, in elements; ``_REBUILDERS`` has a method for each such function. A parameter, a
quantized, sparse or nested tensor and a tensor subclass are calls around other tensors. A pickled
``torch.nn.Module`` is read as its state dict.

Source: PyTorch ``torch/_utils.py``, ``torch/_tensor.py``, ``torch/serialization.py``; ``_save_to_state_dict``
in ``torch/nn/modules/module.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn

from ckpttool.containers.pickle.pickle_nodes import Call, Global, Persistent, references
from ckpttool.core.dtypes import BY_TORCH, DType
from ckpttool.core.errors import DamagedCheckpoint, LimitExceeded
from ckpttool.core.parameters import LogicalTensor
from ckpttool.core.readable import Readable, swap_width
from ckpttool.core.tensor import Extent, Path, Role, Values
from ckpttool.core.values import Contiguous, Strided, flip_signs, is_contiguous, strided_length
from ckpttool.formats.arrays.objects import numpy_leaf
from ckpttool.formats.content.plain_data import PayloadChecksums, describe
from ckpttool.formats.content.tree import MAX_VISITS, Leaf, TensorParts, TreeBudget, flatten, merge_slots
from ckpttool.formats.torch.distributed import Mesh, is_distributed, local_parts, read_mesh
from ckpttool.formats.torch.types import (
    COMPONENTS,
    checked_sizes,
    quantizer_fields,
    sizes,
    sparse_layout,
    torch_dtype,
)

MAX_AXES = 64
MAX_NESTING = 50
"""Limit on tensors inside tensors: a parameter holds a tensor, which may have attributes."""
MAX_TENSORS = 5_000_000
_MAX_INT64 = (1 << 63) - 1
_NESTED = ("buffer", "sizes", "strides", "storage_offsets")


@dataclass(frozen=True, slots=True)
class Storage:
    """Stored bytes that tensors are views of.

    Attributes:
        dtype: None if the storage is untyped; each tensor has its own then.
        source: Where the bytes are read from, ``nbytes`` of them from ``offset`` on.
        extent: The same place in the file; None if the bytes are compressed or in memory.
    """

    key: str
    dtype: DType | None
    nbytes: int
    source: Readable
    offset: int
    extent: Extent | None
    byteorder: Literal["little", "big"] = "little"


Resolve = Callable[[Any], Storage]
"""Returns the storage that a persistent id names; raises ``DamagedCheckpoint`` if there is none."""


def no_storage(persistent_id: Any) -> NoReturn:
    """Refuse a persistent id where none names a storage; a ``Resolve``."""
    raise TypeError("not a storage")


class TorchObjects:
    """Reads the tensors in the nodes of one pickle.

    ``leaf`` is a callback of ``tree.flatten``: a ``Leaf`` has the tensors that a node represents, at paths
    below it, and the rest of the node as plain data.
    """

    def __init__(self, path: str, resolve: Resolve) -> None:
        self.path = path
        self._resolve = resolve
        self._seen: dict[int, Leaf[TensorParts] | None] = {}
        self._checked: set[int] = set()
        self.budget = TreeBudget()
        """Counts the nodes inside tensors and modules against the limit on trees."""
        self._sums = PayloadChecksums()
        self._meshes: dict[int, Mesh] = {}
        """Device meshes that were read, by the ``id`` of their nodes."""
        self._depth = 0
        self._tensors = 0

    def leaf(self, node: object) -> Leaf[TensorParts] | None:
        """Return the tensors that a node represents, or None if it represents no tensor."""
        if isinstance(node, Persistent):
            return self.storage_leaf(node)
        if not isinstance(node, Call):
            return None
        address = id(node)
        if address not in self._seen:
            # A node may contain itself (a parameter that knows its module): inside, it counts as empty.
            self._seen[address] = Leaf()
            self._seen[address] = self._read_call(node)
        return self._seen[address]

    def _read_call(self, call: Call) -> Leaf[TensorParts] | None:
        if self._depth >= MAX_NESTING:
            raise self.exceeded(f"tensors nested more than {MAX_NESTING} deep")
        self._depth += 1
        function, leaf = call.function, None
        if isinstance(function, Global):
            rebuild = _REBUILDERS.get((function.module, function.name))
            if rebuild is None:
                leaf = module_leaf(self, call) or numpy_leaf(call, self.path, TensorParts, self._sums)
            else:
                try:
                    leaf = rebuild(self, call)
                except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                    found = f"invalid arguments of a tensor: {error}"
                    raise DamagedCheckpoint(
                        self.path, found, where=str(function), code="tensor-damaged"
                    ) from error
        self._depth -= 1
        self._tensors += len(leaf.tensors) if leaf else 0
        if self._tensors > MAX_TENSORS:
            raise self.exceeded(f"more than {MAX_TENSORS:,} tensors")
        return leaf

    # Storages and their views -----------------------------------------------------------------------

    def storage_leaf(self, node: Persistent) -> Leaf[TensorParts] | None:
        """Return a storage without a tensor, as a tensor of its own."""
        storage = self._resolve(node.id)
        dtype = storage.dtype or BY_TORCH["uint8"]
        parts = self.tensor_view(storage, dtype, 0, (storage.nbytes // dtype.itemsize,), (1,))
        return Leaf((((), parts),))

    def tensor_view(
        self, storage: Storage, dtype: DType, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> TensorParts:
        """Return a view of a storage; offset and strides in elements."""
        if len(shape) != len(strides) or len(shape) > MAX_AXES:
            raise self._bounds(storage, f"{len(shape)} axes and {len(strides)} strides")
        numbers = (offset, *shape, *strides)
        if (
            not all(type(number) is int and 0 <= number <= _MAX_INT64 for number in numbers)
            or (size := math.prod(shape)) > _MAX_INT64
        ):
            found = f"shape {describe(shape)}, strides {describe(strides)}, offset {describe(offset)}"
            raise self._bounds(storage, found)
        # The numbers come from the pickle, so the view is checked against its storage before anything is
        # read. A stride of 0 (an expanded tensor) is legal: shapes say nothing about the stored bytes.
        in_one_piece = is_contiguous(shape, strides)
        end = dtype.nbytes(offset + (size if in_one_piece else strided_length(shape, strides)))
        if end > storage.nbytes and 0 not in shape:
            raise self._bounds(storage, f"bytes up to {end:,} of a storage of {storage.nbytes:,}")
        start = storage.offset + dtype.nbytes(offset)
        swap = swap_width(dtype.word_bytes, storage.byteorder)
        nbytes = dtype.nbytes(size)
        extent = None
        values: Values
        if in_one_piece or nbytes == 0 or dtype.bits < 8:
            values = Contiguous(storage.source, start, nbytes, swap)
            extent = storage.extent and Extent(storage.extent.file, start, nbytes)
        else:
            values = Strided(storage.source, start, dtype.itemsize, shape, strides, swap)
        identity = (self.path, storage.key, dtype.name, start, shape, strides)
        return TensorParts(dtype, shape, values, extent, storage.extent, storage.byteorder, identity)

    def _bounds(self, storage: Storage, found: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(
            self.path,
            f"a tensor outside its storage: {found}",
            where=f"storage {storage.key}",
            code="tensor-bounds",
        )

    # Limits and references --------------------------------------------------------------------------

    def charge(self, visits: int) -> None:
        """Add nodes or numbers that were visited inside a tensor to the budget of the tree."""
        self.budget.visits += visits
        if self.budget.visits > MAX_VISITS:
            raise self.exceeded(f"a tree of more than {MAX_VISITS:,} objects")

    def exceeded(self, found: str) -> LimitExceeded:
        """Return the error of a limit that was exceeded."""
        return LimitExceeded(self.path, found)

    @contextmanager
    def name_nodes(self, names: Mapping[int, str]) -> Iterator[None]:
        """Describe nodes, by ``id``, by these names instead of reading them, within the context."""
        before = {node: self._seen[node] for node in names if node in self._seen}
        self._seen.update({node: Leaf(plain=name) for node, name in names.items()})
        try:
            yield
        finally:
            for node in names:
                self._seen.pop(node, None)
            self._seen.update(before)

    def check_references(self, node: object) -> None:
        """Raise ``DamagedCheckpoint`` unless each storage that a node refers to exists."""
        for reference in references(node, self._checked):
            self.leaf(reference)

    # Functions of torch._utils ----------------------------------------------------------------------

    def _storage(self, node: object) -> Storage:
        if isinstance(node, Call) and node.is_of("torch.storage", "TypedStorage"):
            node = node.state["_untyped_storage"] if isinstance(node.state, dict) else node.args[0]
        if not isinstance(node, Persistent):
            raise TypeError("not a storage")
        return self._resolve(node.id)

    def _tensor_v1(self, call: Call) -> Leaf[TensorParts]:
        storage = self._storage(call.args[0])
        dtype = storage.dtype or BY_TORCH["uint8"]  # an untyped storage has bytes
        return self._leaf(storage, dtype, call.args[1], call.args[2], call.args[3])

    def _tensor_v2(self, call: Call) -> Leaf[TensorParts]:
        return apply_lazy_signs(self._tensor_v1(call), call.args[6] if len(call.args) > 6 else None)

    def _tensor_v3(self, call: Call) -> Leaf[TensorParts]:
        # Types without a storage class, such as uint16 and float8, have an untyped storage, whose size is in
        # bytes. Offset and strides are in elements of the tensor's type all the same.
        storage = self._storage(call.args[0])
        leaf = self._leaf(storage, torch_dtype(call.args[6]), call.args[1], call.args[2], call.args[3])
        return apply_lazy_signs(leaf, call.args[7] if len(call.args) > 7 else None)

    def _leaf(
        self, storage: Storage, dtype: DType, offset: Any, shape: Any, strides: Any
    ) -> Leaf[TensorParts]:
        return Leaf((((), self.tensor_view(storage, dtype, offset, sizes(shape), sizes(strides))),))

    def _wrapped(self, call: Call) -> Leaf[TensorParts]:
        """Read the tensor in a wrapper: a parameter, a tensor on a device."""
        leaf = self.leaf(call.args[0])
        if leaf is None:
            raise TypeError("not a tensor")
        return leaf

    def _parameter_with_state(self, call: Call) -> Leaf[TensorParts]:
        return with_attributes(self._wrapped(call), self._attributes(call.args[3]))

    def _attributes(self, state: Any) -> list[tuple[Path, TensorParts]]:
        """Return the tensors among the attributes of a tensor; some subclasses keep their data there."""
        # They may be in slots and in containers. In containers, tensors without elements are left out: some
        # subclasses keep one to represent a length.
        tensors = flatten(merge_slots(state), self.leaf, self.path, budget=self.budget).tensors
        return [(path, parts) for path, parts in tensors if len(path) == 1 or 0 not in parts.shape]

    def _quantized(self, call: Call) -> Leaf[TensorParts]:
        return self.quantized_leaf(self._tensor_v1(call).tensors, call.args[4])

    def quantized_leaf(
        self, elements: tuple[tuple[Path, TensorParts], ...], parameters: Any
    ) -> Leaf[TensorParts]:
        """Return the stored integers of a quantized tensor with its scales and zero points."""
        scheme, *params = parameters
        name_of_scheme = str(describe(scheme)).removeprefix("torch.")
        plain = LogicalTensor({"scheme": name_of_scheme}, value_components=("",))
        tensors = list(elements)
        # Scale and zero point of a whole tensor are numbers, and become plain data. For each channel they are
        # tensors, followed by the number of the axis.
        for name, node in zip(quantizer_fields(name_of_scheme), params, strict=False):
            leaf = self.leaf(node)
            if leaf is None:
                plain[name] = describe(node)
            else:
                tensors += [((name, *path), parts) for path, parts in leaf.tensors]
        return Leaf(tuple(tensors), plain)

    def _sparse(self, call: Call) -> Leaf[TensorParts]:
        # COO has indices, values and size, and optionally whether it is coalesced. Compressed layouts have
        # compressed indices, plain indices, values and size. The shape of the values says nothing about that
        # of the tensor.
        layout = sparse_layout(call.args[0])
        *nodes, size = call.args[1][: len(COMPONENTS[layout]) + 1]
        shape = checked_sizes(size)
        plain = LogicalTensor(
            {"layout": layout, "shape": [*shape]}, shape=shape, value_components=("values",)
        )
        if len(call.args[1]) > len(nodes) + 1:
            plain["is_coalesced"] = describe(call.args[1][-1])
        return Leaf(tuple(self._components(COMPONENTS[layout], nodes)), plain)

    def _nested_tensor(self, call: Call) -> Leaf[TensorParts]:
        plain = LogicalTensor({"layout": "nested"}, value_components=("buffer",))
        return Leaf(tuple(self._components(_NESTED, call.args[:4])), plain)

    def _jagged_tensor(self, call: Call) -> Leaf[TensorParts]:
        state = call.args[0]
        tensors = [(name, node) for name, node in state.items() if self.leaf(node) is not None]
        names, nodes = [name for name, _ in tensors], [node for _, node in tensors]
        plain = {str(describe(name)): describe(node) for name, node in state.items() if name not in names}
        whole = LogicalTensor({"layout": "jagged", **plain}, value_components=("values",))
        return Leaf(tuple(self._components(names, nodes)), whole)

    def _components(self, names: Any, nodes: Any) -> Iterator[tuple[Path, TensorParts]]:
        for name, node in zip(names, nodes, strict=True):
            leaf = self.leaf(node)
            if leaf is None:
                raise TypeError(f"not a tensor of {name}")
            yield from (((str(describe(name)), *path), parts) for path, parts in leaf.tensors)

    def _meta_tensor(self, call: Call) -> Leaf[TensorParts]:
        dtype, shape = torch_dtype(call.args[0]), sizes(call.args[1])
        return Leaf((((), TensorParts(dtype, shape)),), LogicalTensor({"device": "meta"}))

    def _from_type(self, call: Call) -> Leaf[TensorParts]:
        """Read a tensor with attributes, or of a subclass."""
        function, kind, args, state = call.args[:4]
        if is_distributed(kind):
            self.check_references(state)
            return local_parts(call, self.leaf, self._mesh)
        # ``_rebuild_from_type_v2(function, class, args, state)``: the function rebuilds a tensor, which gets
        # the class and the state. A wrapper subclass (torchao's quantized tensors, for one) rebuilds without
        # values: its data are the tensors in the state, and its own shape is that of the whole.
        # Not by `leaf`, which knows nodes by their address: this one is freed after the call.
        leaf = self._read_call(Call(function, args if isinstance(args, tuple) else (args,)))
        if leaf is None:
            raise TypeError("not a tensor")
        known = {parts.identity for _, parts in leaf.tensors if parts.identity is not None}
        attributes = tuple(item for item in self._attributes(state) if item[1].identity not in known)
        if not leaf.tensors or leaf.tensors[0][1].values is not None or not attributes:
            return with_attributes(leaf, attributes)
        shape = checked_sizes(leaf.tensors[0][1].shape)
        plain = {"class": str(describe(kind)), "global_shape": [*shape]}
        return Leaf(attributes, LogicalTensor(plain, shape=shape))

    def _mesh(self, node: object) -> Mesh:
        """Return a pickled ``DeviceMesh``; each node is read once, as many tensors share a large mesh."""
        if id(node) not in self._meshes:
            leaves = filter(None, map(self.storage_leaf, references(node)))
            storages = [parts.storage for leaf in leaves for _, parts in leaf.tensors]
            mesh = read_mesh(node, frozenset(extent for extent in storages if extent is not None))
            self._meshes[id(node)] = mesh
            self.charge(mesh.world)
        return self._meshes[id(node)]

    def _wrapper_subclass(self, call: Call) -> Leaf[TensorParts]:
        return Leaf((((), TensorParts(torch_dtype(call.args[1]), sizes(call.args[2]))),))


_REBUILDERS: dict[tuple[str, str], Callable[[TorchObjects, Call], Leaf[TensorParts]]] = {
    ("torch._utils", "_rebuild_tensor"): TorchObjects._tensor_v1,
    ("torch._utils", "_rebuild_tensor_v2"): TorchObjects._tensor_v2,
    ("torch._utils", "_rebuild_tensor_v3"): TorchObjects._tensor_v3,
    ("torch._utils", "_rebuild_parameter"): TorchObjects._wrapped,
    ("torch._utils", "_rebuild_parameter_with_state"): TorchObjects._parameter_with_state,
    ("torch._utils", "_rebuild_device_tensor_from_numpy"): TorchObjects._wrapped,
    ("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"): TorchObjects._wrapped,
    ("torch._utils", "_rebuild_xla_tensor"): TorchObjects._wrapped,
    ("torch._utils", "_rebuild_qtensor"): TorchObjects._quantized,
    ("torch._utils", "_rebuild_sparse_tensor"): TorchObjects._sparse,
    ("torch._utils", "_rebuild_nested_tensor"): TorchObjects._nested_tensor,
    ("torch._utils", "_rebuild_meta_tensor_no_storage"): TorchObjects._meta_tensor,
    ("torch._utils", "_rebuild_wrapper_subclass"): TorchObjects._wrapper_subclass,
    ("torch._tensor", "_rebuild_from_type_v2"): TorchObjects._from_type,
    ("torch.nn.parameter", "Parameter"): TorchObjects._wrapped,
    ("torch.autograd.variable", "Variable"): TorchObjects._wrapped,
    ("torch.nested._internal.nested_tensor", "_rebuild_njt"): TorchObjects._jagged_tensor,
}


def with_attributes(
    leaf: Leaf[TensorParts], attributes: Iterable[tuple[Path, TensorParts]]
) -> Leaf[TensorParts]:
    """Return a tensor with the tensors of its attributes, which aren't weights."""
    others = ((path, replace(parts, role=Role.OTHER)) for path, parts in attributes)
    return replace(leaf, tensors=(*leaf.tensors, *others))


def apply_lazy_signs(leaf: Leaf[TensorParts], bits: object) -> Leaf[TensorParts]:
    """Return a tensor whose conjugate and negative bits are applied when it is read."""
    if not isinstance(bits, dict) or not (bits.get("conj") or bits.get("neg")):
        return leaf
    ((path, parts),) = leaf.tensors
    if parts.values is None:
        return leaf
    # PyTorch conjugates and negates lazily: it sets a bit and leaves the stored elements unchanged. The bytes
    # in the file then aren't those of the tensor, which therefore has no extent.
    values = flip_signs(
        parts.values, parts.dtype, conjugated=bool(bits.get("conj")), negated=bool(bits.get("neg"))
    )
    identity = (parts.identity, bool(bits.get("conj")), bool(bits.get("neg")))
    return Leaf(((path, replace(parts, values=values, extent=None, identity=identity)),))


# Modules -----------------------------------------------------------------------------------------------

MAX_MODULE_NESTING = 500
MAX_MODULES = 1_000_000

_TENSORS = ("_parameters", "_buffers", "_modules")
_STATE_DICT_ATTRIBUTES = frozenset({*_TENSORS, "_non_persistent_buffers_set", "_flat_weights"})
"""Attributes that repeat the state dict; an RNN lists its parameters again in ``_flat_weights``."""
_HOOKS = frozenset(
    {
        "_backward_hooks",
        "_backward_pre_hooks",
        "_compiled_call_impl",
        "_forward_hooks",
        "_forward_hooks_always_called",
        "_forward_hooks_with_kwargs",
        "_forward_pre_hooks",
        "_forward_pre_hooks_with_kwargs",
        "_is_full_backward_hook",
        "_load_state_dict_post_hooks",
        "_load_state_dict_pre_hooks",
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
    }
)
"""Hooks that every module has; empty ones are left out."""


def module_leaf(objects: TorchObjects, call: Call) -> Leaf[TensorParts] | None:
    """Return the tensors of a pickled ``torch.nn.Module`` under the names of its state dict, or None.

    Names are the dotted paths of ``_modules`` keys. All other attributes of the modules are plain data;
    tensors among them, such as buffers that aren't persistent, follow those of the state dict. All storages
    that the module refers to are checked.
    """
    if not is_module(call):
        return None
    tensors: list[tuple[Path, TensorParts]] = []
    classes: dict[str, str] = {}
    attributes: dict[str, object] = {}
    modules = list(_modules(objects, call))
    for prefix, module in modules:
        classes[prefix.rstrip(".")] = str(describe(module.function))
        for key, node in _other_attributes(module).items():
            name = f"{prefix}{describe(key)}"
            while name in attributes:  # attributes may have dots in their names
                name = f"<{name}>"
            attributes[name] = node
        # Its own part of the state dict: parameters, then persistent buffers.
        buffers = module.state["_buffers"].items()
        state_items = [*module.state["_parameters"].items()]
        state_items += (item for item in buffers if not _is_non_persistent(module.state, item[0]))
        for key, node in state_items:
            leaf = objects.leaf(node)
            for path, parts in leaf.tensors if leaf else ():
                name = f"{prefix}{describe(key)}"
                tensors.append(((name, *path), replace(parts, role=Role.WEIGHTS)))
    budget, spent = objects.budget, objects.budget.visits
    # An attribute that refers to a module (a cycle, often) is described by the module's first name.
    names = {id(module): f"<the module {prefix.rstrip('.')!r}>" for prefix, module in reversed(modules)}
    with objects.name_nodes(names):
        others = flatten(attributes, objects.leaf, objects.path, budget=budget)
    tensors += [(path, replace(parts, role=Role.OTHER)) for path, parts in others.tensors]
    objects.check_references(call)
    plain: dict[str, object] = {"<class>": classes[""], "modules": classes}
    plain |= {"attributes": others.plain} if others.plain else {}
    return Leaf(tuple(tensors), plain, budget.visits - spent)


def _other_attributes(module: Call) -> dict[Any, Any]:
    """Return a module's attributes besides its state dict, by name."""
    state = module.state
    attributes = {name: node for name, node in state["_buffers"].items() if _is_non_persistent(state, name)}
    attributes |= {name: node for name, node in state["_modules"].items() if not _is_child(node)}
    attributes |= {
        key: node
        for key, node in state.items()
        if key not in _STATE_DICT_ATTRIBUTES and (node or key not in _HOOKS)
    }
    parts: list[tuple[str, object]] = [("<args>", module.args), ("<kwargs>", module.kwargs)]
    parts += [("<items>", module.items), ("<pairs>", module.pairs)]
    return attributes | {key: node for key, node in parts if node}


def _modules(objects: TorchObjects, root: Call) -> Iterator[tuple[str, Call]]:
    """Yield all modules with their dotted prefixes, parents first."""
    pending = [("", 0, root)]
    count = 0
    while pending:
        prefix, depth, module = pending.pop()
        count += 1
        if depth > MAX_MODULE_NESTING or count > MAX_MODULES:
            raise objects.exceeded(f"{count:,} modules, nested {depth} deep")
        yield prefix, module
        children = [
            (f"{prefix}{describe(name)}.", depth + 1, child)
            for name, child in module.state["_modules"].items()
            if _is_child(child)
        ]
        pending += reversed(children)


def _is_non_persistent(state: dict[str, Any], name: object) -> bool:
    """Return whether a buffer isn't persistent, so that it isn't in the state dict."""
    hidden = state.get("_non_persistent_buffers_set")
    return isinstance(hidden, set | frozenset | list | tuple) and name in hidden


def _is_child(node: object) -> bool:
    return isinstance(node, Call) and is_module(node)


def is_module(call: Call) -> bool:
    state = call.state
    return isinstance(state, dict) and all(
        isinstance(state.get(key), dict) for key in ("_parameters", "_buffers", "_modules")
    )
