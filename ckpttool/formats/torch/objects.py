"""PyTorch's objects in a pickle, read as tensors: what ``torch._utils`` would rebuild, without calling it.

Source: PyTorch ``torch/_utils.py``, ``torch/_tensor.py``, ``torch/serialization.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from ckpttool.dtypes import BY_TORCH, DType
from ckpttool.errors import DamagedCheckpoint, LimitExceeded
from ckpttool.formats.arrays.objects import numpy_leaf
from ckpttool.formats.content.flattening import MAX_VISITS, Leaf, TreeBudget, flatten
from ckpttool.formats.content.object_parts import merge_slots, references
from ckpttool.formats.content.plain_data import PayloadChecksums, describe
from ckpttool.formats.torch.distributed import Mesh, is_distributed, local_parts
from ckpttool.formats.torch.modules import module_leaf
from ckpttool.formats.torch.types import COMPONENTS, quantizer_fields, sizes, sparse_layout, torch_dtype
from ckpttool.tensor import Extent, Path, Role, Shard, Values
from ckpttool.wire.pickle_nodes import Call, Global, Persistent
from ckpttool.wire.readable import Contiguous, Readable, swap_width
from ckpttool.wire.views import LazyConjNeg, Strided, is_contiguous, reach

MAX_AXES = 64
MAX_NESTING = 50
"""How deep tensors may lie in tensors: a parameter holds a tensor, which holds attributes."""
MAX_TENSORS = 5_000_000
_MAX_INT64 = (1 << 63) - 1
_NESTED = ("buffer", "sizes", "strides", "storage_offsets")


@dataclass(frozen=True, slots=True)
class Storage:
    """Stored bytes that tensors are views of; ``dtype`` is None where the storage is untyped."""

    key: str
    dtype: DType | None
    nbytes: int
    source: Readable
    offset: int
    extent: Extent | None
    byteorder: Literal["little", "big"] = "little"


@dataclass(frozen=True, slots=True)
class TensorParts:
    """What a format knows of a tensor before it has a name; a role only where the object itself tells it.

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


Resolve = Callable[[Any], Storage]
"""Returns the storage that a persistent id names."""


class TorchObjects:
    """Reads the nodes of one pickle; ``leaf`` is what ``flattening.flatten`` asks."""

    def __init__(self, path: str, resolve: Resolve) -> None:
        self.path = self._path = path
        self._resolve = resolve
        self._seen: dict[int, Leaf[TensorParts] | None] = {}
        self._checked: set[int] = set()
        self.budget = TreeBudget()
        """What the trees inside its objects have cost."""
        self._sums = PayloadChecksums()
        self.meshes: dict[int, Mesh] = {}
        """By the address of their nodes, the meshes of processes that tensors lie on."""
        self._depth = 0
        self._tensors = 0

    def leaf(self, node: object) -> Leaf[TensorParts] | None:
        """Return the tensors that a node stands for, or None where it is no tensor."""
        if isinstance(node, Persistent):
            return self.bare(node)
        if not isinstance(node, Call):
            return None
        at = id(node)
        if at not in self._seen:
            self._seen[at] = Leaf()  # what it is met as inside itself: a parameter may know its module
            self._seen[at] = self._bounded(node)
        return self._seen[at]

    def _bounded(self, call: Call) -> Leaf[TensorParts] | None:
        if self._depth >= MAX_NESTING:
            raise self.exceeded(f"tensors nested more than {MAX_NESTING} deep")
        self._depth += 1
        found = self._read(call)
        self._depth -= 1
        self._tensors += len(found.tensors) if found else 0
        if self._tensors > MAX_TENSORS:
            raise self.exceeded(f"more than {MAX_TENSORS:,} tensors")
        return found

    def _read(self, call: Call) -> Leaf[TensorParts] | None:
        function = call.function
        if not isinstance(function, Global):
            return None
        rebuild = _REBUILDERS.get((function.module, function.name))
        if rebuild is not None:
            try:
                return rebuild(self, call)
            except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                raise self._damaged(call, f"arguments that rebuild no tensor: {error}") from error
        return module_leaf(self, call) or numpy_leaf(call, self._path, TensorParts, self._sums)

    def bare(self, node: Persistent) -> Leaf[TensorParts] | None:
        """Return a storage without a tensor, as a tensor of its own."""
        storage = self._resolve(node.id)
        dtype = storage.dtype or BY_TORCH["uint8"]
        parts = self.view(storage, dtype, 0, (storage.nbytes // dtype.itemsize,), (1,))
        return Leaf((((), parts),))

    def view(
        self, storage: Storage, dtype: DType, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> TensorParts:
        """Return a view of a storage; offset and strides in elements."""
        if len(shape) != len(strides) or len(shape) > MAX_AXES:
            raise self._bounds(storage, f"{len(shape)} axes and {len(strides)} strides")
        if not all(map(_is_count, (offset, *shape, *strides))) or (size := math.prod(shape)) > _MAX_INT64:
            told = f"shape {describe(shape)}, strides {describe(strides)}, offset {describe(offset)}"
            raise self._bounds(storage, told)
        is_whole = is_contiguous(shape, strides)
        last = dtype.nbytes(offset + (size if is_whole else reach(shape, strides)))
        if last > storage.nbytes and 0 not in shape:
            raise self._bounds(storage, f"bytes up to {last:,} of a storage of {storage.nbytes:,}")
        start = storage.offset + dtype.nbytes(offset)
        swap = swap_width(dtype.word_bytes, storage.byteorder)
        nbytes = dtype.nbytes(size)
        extent = None
        values: Values
        if is_whole or nbytes == 0 or dtype.bits < 8:
            values = Contiguous(storage.source, start, nbytes, swap)
            extent = storage.extent and Extent(storage.extent.file, start, nbytes)
        else:
            values = Strided(storage.source, start, dtype.itemsize, shape, strides, swap)
        identity = (self._path, storage.key, dtype.name, start, shape, strides)
        return TensorParts(dtype, shape, values, extent, storage.extent, storage.byteorder, identity)

    def _bounds(self, storage: Storage, found: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(
            self._path,
            f"a tensor outside its storage: {found}",
            where=f"storage {storage.key}",
            code="tensor-bounds",
        )

    def charge(self, visits: int) -> None:
        """Count what was looked at inside a tensor that is told for no other reason."""
        self.budget.visits += visits
        if self.budget.visits > MAX_VISITS:
            raise self.exceeded(f"a tree of more than {MAX_VISITS:,} objects")

    def exceeded(self, found: str) -> LimitExceeded:
        """Return the error that says which limit was passed."""
        return LimitExceeded(self._path, found)

    def _damaged(self, call: Call, found: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(self._path, found, where=str(call.function), code="tensor-damaged")

    @contextmanager
    def told_before(self, told: Mapping[int, str]) -> Iterator[None]:
        """Tell nodes, by address, as what they are elsewhere, as long as the context lasts."""
        before = {node: self._seen[node] for node in told if node in self._seen}
        self._seen.update({node: Leaf(plain=text) for node, text in told.items()})
        try:
            yield
        finally:
            for node in told:
                self._seen.pop(node, None)
            self._seen.update(before)

    def check_references(self, node: object) -> None:
        """Require that whatever a node refers to is there."""
        for reference in references(node, self._checked):
            self.leaf(reference)

    # What torch._utils rebuilds ---------------------------------------------------------------------

    def _storage(self, node: object) -> Storage:
        if isinstance(node, Call) and node.is_of("torch.storage", "TypedStorage"):
            node = node.state["_untyped_storage"] if isinstance(node.state, dict) else node.args[0]
        if not isinstance(node, Persistent):
            raise TypeError("no storage")
        return self._resolve(node.id)

    def _tensor_v1(self, call: Call) -> Leaf[TensorParts]:
        storage = self._storage(call.args[0])
        return self._leaf(storage, _known(storage.dtype), call.args[1], call.args[2], call.args[3])

    def _tensor_v2(self, call: Call) -> Leaf[TensorParts]:
        found = self._tensor_v1(call)
        return resolved_bits(found, call.args[6] if len(call.args) > 6 else None)

    def _tensor_v3(self, call: Call) -> Leaf[TensorParts]:
        storage = self._storage(call.args[0])
        found = self._leaf(storage, torch_dtype(call.args[6]), call.args[1], call.args[2], call.args[3])
        return resolved_bits(found, call.args[7] if len(call.args) > 7 else None)

    def _leaf(
        self, storage: Storage, dtype: DType, offset: Any, shape: Any, strides: Any
    ) -> Leaf[TensorParts]:
        return Leaf((((), self.view(storage, dtype, offset, sizes(shape), sizes(strides))),))

    def _first(self, call: Call) -> Leaf[TensorParts]:
        """Read what wraps a tensor: a parameter, a tensor on a device."""
        found = self.leaf(call.args[0])
        if found is None:
            raise TypeError("no tensor")
        return found

    def _with_state(self, call: Call) -> Leaf[TensorParts]:
        found = self._first(call)
        return with_attributes(found, self._attributes(call.args[3]))

    def _attributes(self, state: Any) -> list[tuple[Path, TensorParts]]:
        """Return the tensors among the attributes of a tensor; some subclasses keep their data there.

        They may lie in slots, and in containers; in these, some of no elements only stand for a length.
        """
        found = flatten(merge_slots(state), self.leaf, self.path, budget=self.budget).tensors
        return [(path, parts) for path, parts in found if len(path) == 1 or 0 not in parts.shape]

    def _quantized(self, call: Call) -> Leaf[TensorParts]:
        storage = self._storage(call.args[0])
        found = self._leaf(storage, _known(storage.dtype), call.args[1], call.args[2], call.args[3])
        return self.quantized(found.tensors, call.args[4])

    def quantized(self, elements: tuple[tuple[Path, TensorParts], ...], parameters: Any) -> Leaf[TensorParts]:
        """Return the elements of a quantized tensor with the parameters that make numbers of them."""
        scheme, *params = parameters
        told: dict[str, object] = {"scheme": str(describe(scheme)).removeprefix("torch.")}
        tensors = list(elements)
        for name, node in zip(quantizer_fields(told["scheme"]), params, strict=False):
            below = self.leaf(node)
            if below is None:
                told[name] = describe(node)
            else:
                tensors += [((name, *path), parts) for path, parts in below.tensors]
        return Leaf(tuple(tensors), told)

    def _sparse(self, call: Call) -> Leaf[TensorParts]:
        layout = sparse_layout(call.args[0])
        *nodes, size = call.args[1][: len(COMPONENTS[layout]) + 1]
        told: dict[str, object] = {"layout": layout, "shape": [describe(length) for length in sizes(size)]}
        if len(call.args[1]) > len(nodes) + 1:
            told["is_coalesced"] = describe(call.args[1][-1])
        return Leaf(tuple(self._components(COMPONENTS[layout], nodes)), told)

    def _nested(self, call: Call) -> Leaf[TensorParts]:
        return Leaf(tuple(self._components(_NESTED, call.args[:4])), {"layout": "nested"})

    def _jagged(self, call: Call) -> Leaf[TensorParts]:
        state = call.args[0]
        tensors = [(name, node) for name, node in state.items() if self.leaf(node) is not None]
        names, nodes = [name for name, _ in tensors], [node for _, node in tensors]
        told = {str(describe(name)): describe(node) for name, node in state.items() if name not in names}
        return Leaf(tuple(self._components(names, nodes)), {"layout": "jagged", **told})

    def _components(self, names: Any, nodes: Any) -> Iterator[tuple[Path, TensorParts]]:
        for name, node in zip(names, nodes, strict=True):
            found = self.leaf(node)
            if found is None:
                raise TypeError(f"no tensor of {name}")
            yield from (((str(describe(name)), *path), parts) for path, parts in found.tensors)

    def _meta(self, call: Call) -> Leaf[TensorParts]:
        dtype, shape = torch_dtype(call.args[0]), sizes(call.args[1])
        return Leaf((((), TensorParts(dtype, shape)),), {"device": "meta"})

    def _from_type(self, call: Call) -> Leaf[TensorParts]:
        """Read a tensor with attributes, or of a subclass; some subclasses keep the data in attributes."""
        function, kind, args, state = call.args[:4]
        if is_distributed(kind):
            return local_parts(self, call)
        # Not by `leaf`, which knows nodes by their address: this one is gone after the call.
        found = self._bounded(Call(function, args if isinstance(args, tuple) else (args,)))
        if found is None:
            raise TypeError("no tensor")
        known = {parts.identity for _, parts in found.tensors if parts.identity is not None}
        below = tuple(item for item in self._attributes(state) if item[1].identity not in known)
        if not found.tensors or found.tensors[0][1].values is not None or not below:
            return with_attributes(found, below)
        told = {"class": str(describe(kind)), "global_shape": list(found.tensors[0][1].shape)}
        return Leaf(below, told)

    def _wrapper(self, call: Call) -> Leaf[TensorParts]:
        return Leaf((((), TensorParts(torch_dtype(call.args[1]), sizes(call.args[2]))),))


_REBUILDERS: dict[tuple[str, str], Callable[[TorchObjects, Call], Leaf[TensorParts]]] = {
    ("torch._utils", "_rebuild_tensor"): TorchObjects._tensor_v1,
    ("torch._utils", "_rebuild_tensor_v2"): TorchObjects._tensor_v2,
    ("torch._utils", "_rebuild_tensor_v3"): TorchObjects._tensor_v3,
    ("torch._utils", "_rebuild_parameter"): TorchObjects._first,
    ("torch._utils", "_rebuild_parameter_with_state"): TorchObjects._with_state,
    ("torch._utils", "_rebuild_device_tensor_from_numpy"): TorchObjects._first,
    ("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"): TorchObjects._first,
    ("torch._utils", "_rebuild_xla_tensor"): TorchObjects._first,
    ("torch._utils", "_rebuild_qtensor"): TorchObjects._quantized,
    ("torch._utils", "_rebuild_sparse_tensor"): TorchObjects._sparse,
    ("torch._utils", "_rebuild_nested_tensor"): TorchObjects._nested,
    ("torch._utils", "_rebuild_meta_tensor_no_storage"): TorchObjects._meta,
    ("torch._utils", "_rebuild_wrapper_subclass"): TorchObjects._wrapper,
    ("torch._tensor", "_rebuild_from_type_v2"): TorchObjects._from_type,
    ("torch.nn.parameter", "Parameter"): TorchObjects._first,
    ("torch.autograd.variable", "Variable"): TorchObjects._first,
    ("torch.nested._internal.nested_tensor", "_rebuild_njt"): TorchObjects._jagged,
}


def _is_count(number: object) -> bool:
    return type(number) is int and 0 <= number <= _MAX_INT64


def _known(dtype: DType | None) -> DType:
    if dtype is None:
        return BY_TORCH["uint8"]
    return dtype


def with_attributes(
    found: Leaf[TensorParts], attributes: Iterable[tuple[Path, TensorParts]]
) -> Leaf[TensorParts]:
    """Return a tensor with those that hang on it, which are no part of a model's state."""
    told = ((path, replace(parts, role=Role.OTHER)) for path, parts in attributes)
    return replace(found, tensors=(*found.tensors, *told))


def resolved_bits(found: Leaf[TensorParts], bits: object) -> Leaf[TensorParts]:
    """Return a tensor with its lazy conjugation and negation carried out when it is read."""
    if not isinstance(bits, dict) or not (bits.get("conj") or bits.get("neg")):
        return found
    ((path, parts),) = found.tensors
    if parts.values is None:
        return found
    values = LazyConjNeg(parts.values, parts.dtype, bool(bits.get("conj")), bool(bits.get("neg")))
    identity = (parts.identity, bool(bits.get("conj")), bool(bits.get("neg")))
    return Leaf(((path, replace(parts, values=values, extent=None, identity=identity)),))
