"""Tensors of distributed jobs in a process's own file: ``DTensor``, and ``ShardedTensor`` before it.

Each file has the elements that its process kept, and says where in the whole they lie. Of a ``DTensor`` that
follows from the mesh of processes, the process's place in it, and one placement for each of its dimensions,
carried out from left to right; a ``ShardedTensor`` says it in offsets.

Source: PyTorch ``torch/distributed/tensor/_dtensor_spec.py``, ``placement_types.py``, ``_utils.py``
(``compute_local_shape_and_global_offset``), ``torch/distributed/device_mesh.py``,
``torch/distributed/_shard/sharded_tensor/api.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.containers.pickle.pickle_nodes import Call, Global, references
from ckpttool.core.tensor import Extent, Path, Range, Shard
from ckpttool.core.values import in_memory
from ckpttool.formats.content.boxes import Box
from ckpttool.formats.content.plain_data import describe
from ckpttool.formats.content.tree import Leaf, TensorParts
from ckpttool.formats.torch.types import sizes, torch_dtype

if TYPE_CHECKING:
    from ckpttool.formats.torch.objects import TorchObjects

_DTENSOR, _SHARDED = "DTensor", "ShardedTensor"
_MODULES = (
    "torch.distributed.tensor",
    "torch.distributed._tensor",
    "torch.distributed._shard.sharded_tensor",
)
ONE_OF_SEVERAL = "<shard "
"""How the names begin of the parts that a process has of one tensor, where there are several."""
_MAX_MESH = 1 << 24
"""The most processes of a mesh; no job has had more."""
_MAX_DIMENSIONS = 64
"""The most dimensions of a mesh, and of a tensor."""
_MAX_PIECES = 1 << 12
"""The most pieces of a strided cut: as many as processes along another dimension of the mesh."""
_STATE_LENGTH = 5  # what `ShardedTensor.__getstate__` gives


def is_distributed(kind: object) -> bool:
    """Return whether a class is one of those that keep a process's part of a tensor."""
    if not isinstance(kind, Global) or kind.name not in (_DTENSOR, _SHARDED):
        return False
    return any(f"{kind.module}.".startswith(f"{module}.") for module in _MODULES)


def local_parts(objects: TorchObjects, call: Call) -> Leaf[TensorParts]:
    """Return the elements that the file holds of a distributed tensor, with their places in the whole."""
    _, kind, args, state = call.args[:4]
    if kind.name == _SHARDED:
        return _sharded_tensor(objects, args, state)
    attributes = _attributes(state)
    leaf = objects.leaf(attributes["_local_tensor"])
    if leaf is None or len(leaf.tensors) != 1:
        raise TypeError("its local tensor is none")
    (path, parts), shape = leaf.tensors[0], _shape(args[2])
    if parts.dtype != torch_dtype(args[1]):
        raise TypeError(f"a local tensor of {parts.dtype.name}")
    objects.check_references(attributes["_spec"])
    spec = _attributes(attributes["_spec"].state)
    mesh = _mesh(objects, spec["mesh"])
    shard = _dtensor_shard(mesh, spec, shape, parts.shape)
    parts = replace(parts, shard=shard, described_by=mesh.stored)
    return Leaf(((path, parts),), visits=sum(map(len, shard.ranges or ())))


def _attributes(state: Any) -> dict[str, Any]:
    """Return what BUILD sets: ``__dict__``, ``__slots__``, or both of them."""
    attributes: dict[str, Any] = {}
    for part in state if isinstance(state, tuple) and len(state) == 2 else (state,):
        attributes |= part if isinstance(part, dict) else {}
    return attributes


def _shape(node: Any) -> tuple[int, ...]:
    shape = sizes(node)
    if not all(type(length) is int and length >= 0 for length in shape):
        raise TypeError(f"shape {describe(shape)}")
    return shape


# DTensor ----------------------------------------------------------------------------------------------


class Mesh(NamedTuple):
    """Processes in an array: how many along each axis, where this one stands, and its number in the job.

    ``stored`` says where their numbers lie as tensors, which old versions of PyTorch read.
    """

    shape: tuple[int, ...]
    place: tuple[int, ...] | None
    is_member: bool
    rank: int | None
    world: int
    stored: frozenset[Extent]


def _dtensor_shard(
    mesh: Mesh, spec: Mapping[str, Any], shape: tuple[int, ...], local: tuple[int, ...]
) -> Shard:
    placements = [_placement(node, len(shape)) for node in spec["placements"]]
    if len(placements) != len(mesh.shape):
        raise ValueError(f"{len(placements)} placements on a mesh of {len(mesh.shape)} dimensions")
    texts = tuple(text for text, _, _ in placements)
    ranges: tuple[tuple[Range, ...], ...] | None
    if not mesh.is_member:
        ranges = tuple(() for _ in shape)
    elif mesh.place is None and any(axis is not None for _, axis, _ in placements):
        ranges = None
    else:
        cuts = [(axis, pieces) for _, axis, pieces in placements]
        ranges = _ranges(shape, mesh, cuts, _cut_order(spec, len(placements)))
    if ranges is not None and mesh.is_member:
        expected = tuple(sum(end - start for start, end in runs) for runs in ranges)
        if expected != local:
            found = f"a local tensor of shape {list(local)}; {', '.join(texts)} of {list(shape)} gives"
            raise ValueError(f"{found} {list(expected)}")
    return Shard(shape, ranges, texts, mesh.shape, mesh.rank, mesh.world)


def _placement(node: Any, axes: int) -> tuple[str, int | None, int]:
    """Return a pickled placement as text, the axis that it cuts, or None, and the pieces cut first."""
    function = node.function if isinstance(node, Call) else None
    if not isinstance(function, Global):
        raise TypeError("no placement")
    name, fields = function.name, _attributes(node.state)
    if name not in ("Shard", "_StridedShard"):
        reduction = fields.get("reduce_op")
        return f"{name}({reduction if isinstance(reduction, str) else ''})", None, 1
    axis, pieces = fields["dim"], fields.get("split_factor", 1)
    if type(axis) is not int or not -axes <= axis < axes:
        raise ValueError(f"{name} along axis {describe(axis)} of {axes}")
    if type(pieces) is not int or not 1 <= pieces <= _MAX_PIECES:
        raise ValueError(f"{name} of {describe(pieces)} pieces")
    text = f"Shard({axis})" if name == "Shard" else f"_StridedShard({axis}, {pieces})"
    return text, axis % axes, pieces if name == "_StridedShard" else 1


def _cut_order(spec: Mapping[str, Any], dimensions: int) -> list[int]:
    """Return in which order the dimensions of the mesh cut: from left to right, or as it is said."""
    order: list[int] = []
    entries = spec.get("shard_order")
    if not spec.get("use_strided_shard_as_shard_order") and isinstance(entries, tuple):
        for entry in entries[:_MAX_DIMENSIONS]:
            dims = entry.args[1] if isinstance(entry, Call) and len(entry.args) == 2 else ()
            order += [dim for dim in dims[:_MAX_DIMENSIONS] if type(dim) is int and 0 <= dim < dimensions]
    return list(dict.fromkeys((*order, *range(dimensions))))


def _ranges(
    shape: tuple[int, ...], mesh: Mesh, cuts: Sequence[tuple[int | None, int]], order: Sequence[int]
) -> tuple[tuple[Range, ...], ...]:
    """Return the indexes of each axis that a process has, by cutting the rest again and again.

    ``cuts`` has for each dimension of the mesh the axis, None without one, and the pieces that are cut first.
    """
    ranges: list[list[Range]] = [[(0, length)] if length else [] for length in shape]
    for dimension in order:
        axis, pieces = cuts[dimension]
        if axis is not None and mesh.place is not None:
            total = sum(end - start for start, end in ranges[axis])
            chunks = _chunks(total, pieces, mesh.shape[dimension], mesh.place[dimension])
            ranges[axis] = list(_select(ranges[axis], chunks))
    return tuple(map(tuple, ranges))


def _chunks(total: int, pieces: int, count: int, place: int) -> Iterator[Range]:
    """Yield which indexes one of ``count`` processes has, of each piece that they are cut into first.

    Pieces are as ``torch.chunk`` cuts them: all as long as the first, and the last ones shorter or empty.
    """
    length = -(-total // pieces)
    for start in range(0, total, max(length, 1)):
        size = min(length, total - start)
        step = -(-size // count)
        yield start + min(size, place * step), start + min(size, (place + 1) * step)


def _select(runs: Sequence[Range], positions: Iterator[Range]) -> Iterator[Range]:
    """Yield the indexes at positions in runs, both in their order; what follows without a gap is one run."""
    begin = end = 0  # the run that is to be yielded next
    number = skipped = 0  # of the runs, and the positions before that one
    for low, high in positions:
        while low < high:
            start, stop = runs[number]
            if low - skipped >= stop - start:
                skipped += stop - start
                number += 1
                continue
            first = start + low - skipped
            last = min(stop, first + high - low)
            low += last - first
            if first != end and begin < end:
                yield begin, end
            begin, end = (begin if first == end and begin < end else first), last
    if begin < end:
        yield begin, end


def _mesh(objects: TorchObjects, node: Any) -> Mesh:
    """Return a mesh as it is pickled, which each version of PyTorch does in a way of its own.

    It is read once: it is that of many tensors, and may have a hundred thousand processes.
    """
    if (known := objects.meshes.get(id(node))) is not None:
        return known
    leaves = (leaf for reference in references(node) if (leaf := objects.bare(reference)) is not None)
    storages = [parts.storage for leaf in leaves for _, parts in leaf.tensors]
    stored = frozenset(extent for extent in storages if extent is not None)
    fields = _attributes(node.state)
    shape = _mesh_shape(fields)
    is_sound = len(shape) <= _MAX_DIMENSIONS and all(type(length) is int and length > 0 for length in shape)
    if not is_sound or math.prod(shape) > _MAX_MESH:
        raise ValueError(f"a mesh of shape {describe(shape)}")
    coordinate = fields.get("_coordinate_on_dim")
    is_member = coordinate is not None or "_coordinate_on_dim" not in fields
    place = None
    if coordinate is not None:
        place = tuple(coordinate)
        if len(place) != len(shape) or not all(
            type(index) is int and 0 <= index < length for index, length in zip(place, shape, strict=True)
        ):
            raise ValueError(f"a place {describe(coordinate)} in a mesh of shape {describe(shape)}")
    ranks = _mesh_ranks(fields)
    rank = fields.get("_rank")
    if type(rank) is not int:
        rank = None
        if place is not None and len(ranks) == math.prod(shape):
            position = 0
            for index, length in zip(place, shape, strict=True):
                position = position * length + index
            rank = ranks[position]
    mesh = objects.meshes[id(node)] = Mesh(shape, place, is_member, rank, max(ranks, default=-1) + 1, stored)
    objects.charge(mesh.world)
    return mesh


def _mesh_shape(fields: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the processes along each dimension: by its layout, before 2.9 by an array of numbers."""
    layout_node = fields.get("_layout")
    if layout_node is None:
        array = fields.get("mesh", fields.get("_mesh"))
        return sizes(array.args[2])  # storage, offset, shape, …
    layout = _attributes(layout_node.state)
    if "axes" in layout:
        return tuple(_count(_attributes(axis.state)["shape"]) for axis in layout["axes"])
    shape = layout["shape"]
    return (shape,) if type(shape) is int else tuple(map(_count, shape))


def _count(lengths: Any) -> int:
    """Return the processes along one dimension, which may be several that were flattened."""
    lengths = (lengths,) if type(lengths) is int else lengths
    if len(lengths) > _MAX_DIMENSIONS or not all(type(length) is int for length in lengths):
        raise ValueError("dimensions in dimensions of a mesh")
    return math.prod(lengths)


def _mesh_ranks(fields: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the numbers of the mesh's processes, or of the mesh's that it is a part of."""
    for key in ("_flatten_rank_map", "_flatten_mesh_list"):
        ranks = fields.get(key)
        if isinstance(ranks, tuple | list) and all(
            type(rank) is int and 0 <= rank < _MAX_MESH for rank in ranks
        ):
            return tuple(ranks)
    return ()


# ShardedTensor ----------------------------------------------------------------------------------------


def _sharded_tensor(objects: TorchObjects, args: Any, state: Any) -> Leaf[TensorParts]:
    """Return the parts that a process kept of a ``ShardedTensor``: one nearly always, none, or several."""
    if not isinstance(state, tuple) or len(state) != _STATE_LENGTH:
        raise TypeError("no state of a ShardedTensor")
    shards, _, group, _, _ = state
    objects.check_references(state)
    shape, dtype = _shape(args[2]), torch_dtype(args[1])
    numbers = _attributes(group.state)
    rank, world = numbers["global_rank"], numbers["global_world_size"]
    if type(rank) is not int or type(world) is not int:
        raise TypeError("processes that are no numbers")
    common = Shard(shape, None, rank=rank, world=world)
    tensors: list[tuple[Path, TensorParts]] = []
    for index, node in enumerate(shards):
        fields = _attributes(node.state)
        leaf = objects.leaf(fields["tensor"])
        if leaf is None or len(leaf.tensors) != 1:
            raise TypeError("a shard that is no tensor")
        (_, parts) = leaf.tensors[0]
        metadata = _attributes(fields["metadata"].state)
        box = Box(_shape(metadata["shard_offsets"]), _shape(metadata["shard_sizes"]))
        if box.lengths != parts.shape or not box.is_inside(shape):
            raise ValueError(f"a shard of shape {list(parts.shape)} at {list(box.offsets)} of {list(shape)}")
        ranges = tuple(
            ((start, end),) if start < end else () for start, end in zip(box.offsets, box.ends, strict=True)
        )
        path: Path = () if len(shards) == 1 else (f"{ONE_OF_SEVERAL}{index}>",)
        tensors.append((path, replace(parts, shard=common._replace(ranges=ranges))))
    if not tensors:
        shard = common._replace(ranges=tuple(() for _ in shape))
        tensors.append(((), TensorParts(dtype, (0, *shape[1:]), in_memory(b""), shard=shard)))
    return Leaf(tuple(tensors))
