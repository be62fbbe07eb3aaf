"""Sharded tensors in the file of one process: ``DTensor``, and ``ShardedTensor`` before it.

Such a tensor is a local tensor and its place in the global one. A ``DTensor`` has a device mesh (an array of
processes), the coordinate of this process in it, and a placement for each dimension of the mesh:
``Shard(axis)`` cuts an axis among the processes along that dimension, ``Replicate`` and ``Partial`` keep all
of it. A ``ShardedTensor`` has offsets and sizes.

Source: PyTorch ``torch/distributed/tensor/_dtensor_spec.py``, ``placement_types.py``, ``_utils.py``
(``compute_local_shape_and_global_offset``), ``torch/distributed/device_mesh.py``,
``torch/distributed/_shard/sharded_tensor/api.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ckpttool.containers.pickle.pickle_nodes import Call, Global
from ckpttool.core.tensor import Extent, Path, Range, Shard
from ckpttool.core.values import in_memory
from ckpttool.formats.content.boxes import Box
from ckpttool.formats.content.plain_data import describe
from ckpttool.formats.content.tree import Leaf, TensorParts
from ckpttool.formats.torch.types import sizes, torch_dtype

_DTENSOR, _SHARDED = "DTensor", "ShardedTensor"
_MODULES = (
    "torch.distributed.tensor",
    "torch.distributed._tensor",
    "torch.distributed._shard.sharded_tensor",
)
ONE_OF_SEVERAL = "<shard "
"""Prefix of the names of a tensor's shards if a process has several."""
_MAX_MESH = 1 << 24
"""Limit on processes of a mesh, far beyond any known job."""
_MAX_DIMENSIONS = 64
"""Limit on dimensions of a mesh."""
_MAX_PIECES = 1 << 12
"""Limit on the split factor of a strided shard, which is the size of another dimension of the mesh."""
_STATE_LENGTH = 5  # of the tuple from `ShardedTensor.__getstate__`


def is_distributed(kind: object) -> bool:
    """Return whether a class is ``DTensor`` or ``ShardedTensor``."""
    if not isinstance(kind, Global) or kind.name not in (_DTENSOR, _SHARDED):
        return False
    return any(f"{kind.module}.".startswith(f"{module}.") for module in _MODULES)


def local_parts(
    call: Call, read: Callable[[object], Leaf[TensorParts] | None], mesh_of: Callable[[Any], Mesh]
) -> Leaf[TensorParts]:
    """Return the local part of a distributed tensor, with its place in the global tensor.

    Args:
        call: Rebuilds the tensor.
        read: Returns the tensors that a node represents, or None.
        mesh_of: Returns the mesh of a pickled ``DeviceMesh``.
    """
    _, kind, args, state = call.args[:4]
    if kind.name == _SHARDED:
        return _sharded_tensor(args, state, read)
    attributes = _state_attributes(state)
    leaf = read(attributes["_local_tensor"])
    if leaf is None or len(leaf.tensors) != 1:
        raise TypeError("no local tensor")
    (path, parts), shape = leaf.tensors[0], _shape(args[2])
    if parts.dtype != torch_dtype(args[1]):
        raise TypeError(f"a local tensor of {parts.dtype.name}")
    spec = _state_attributes(attributes["_spec"].state)
    mesh = mesh_of(spec["mesh"])
    shard = _dtensor_shard(mesh, spec, shape, parts.shape)
    parts = replace(parts, shard=shard, described_by=mesh.stored)
    return Leaf(((path, parts),), visits=sum(map(len, shard.ranges or ())))


def _state_attributes(state: Any) -> dict[str, Any]:
    """Return the attributes in a pickled state: a dictionary, or a pair of it and that of the slots."""
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
    """A device mesh: an array of processes.

    Attributes:
        shape: Number of processes along each dimension.
        place: Coordinate of this process; None if it isn't known.
        is_member: Whether this process is in the mesh; others have no elements.
        rank: Number of this process in the job, None if it isn't known.
        world: Number of processes that the mesh implies.
        stored: Storages of the tensor of ranks that old versions of PyTorch pickle.
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
    # A process outside the mesh pickles the tensor as well, but has no elements of it. Without the coordinate
    # of the process its part of a sharded axis is unknown, while a replica is the whole tensor anywhere.
    if not mesh.is_member:
        ranges = tuple(() for _ in shape)
    elif mesh.place is None and any(axis is not None for _, axis, _ in placements):
        ranges = None
    else:
        cuts = [(axis, pieces) for _, axis, pieces in placements]
        ranges = _ranges(shape, mesh, cuts, _cut_order(spec, len(placements)))
    if ranges is not None and mesh.is_member:
        # The ranges follow from mesh, placements and coordinate; the local tensor's shape is independent of
        # these. If the two disagree, elements would be assembled in wrong places.
        expected = tuple(sum(end - start for start, end in runs) for runs in ranges)
        if expected != local:
            found = f"a local tensor of shape {list(local)}; {', '.join(texts)} of {list(shape)} gives"
            raise ValueError(f"{found} {list(expected)}")
    return Shard(shape, ranges, texts, mesh.shape, mesh.rank, mesh.world)


def _placement(node: Any, axes: int) -> tuple[str, int | None, int]:
    """Return a placement as text, the axis that it shards (None if it doesn't), and its split factor."""
    function = node.function if isinstance(node, Call) else None
    if not isinstance(function, Global):
        raise TypeError("not a placement")
    name, fields = function.name, _state_attributes(node.state)
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
    """Return the dimensions of the mesh in the order in which they cut: from left to right by default."""
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
    """Return the indexes that a process has along each axis.

    ``cuts`` has, for each dimension of the mesh, the axis that it shards (None if it doesn't) and the split
    factor.
    """
    # Each dimension of the mesh cuts what the earlier ones left of its axis (``Shard(0), Shard(0)`` cuts axis
    # 0 twice), so the ranges are narrowed one dimension after another.
    ranges: list[list[Range]] = [[(0, length)] if length else [] for length in shape]
    for dimension in order:
        axis, pieces = cuts[dimension]
        if axis is not None and mesh.place is not None:
            total = sum(end - start for start, end in ranges[axis])
            chunks = _chunks(total, pieces, mesh.shape[dimension], mesh.place[dimension])
            ranges[axis] = list(_select(ranges[axis], chunks))
    return tuple(map(tuple, ranges))


def _chunks(total: int, pieces: int, count: int, place: int) -> Iterator[Range]:
    """Yield the indexes of one of ``count`` processes in each of ``pieces``."""
    # A strided shard first cuts the axis into as many pieces as another dimension of the mesh will, and takes
    # a chunk of each. Both cuts follow ``torch.chunk``: all pieces are as long as the first, rounded up, so
    # the last ones are shorter or empty.
    length = -(-total // pieces)
    for start in range(0, total, max(length, 1)):
        size = min(length, total - start)
        step = -(-size // count)
        yield start + min(size, place * step), start + min(size, (place + 1) * step)


def _select(runs: Sequence[Range], positions: Iterator[Range]) -> Iterator[Range]:
    """Yield the indexes at some positions among those of ``runs``; adjacent ones are joined."""
    # ``runs`` are ranges of indexes of the axis, which are numbered through: position 5 of (0, 4), (8, 12) is
    # index 9. Both sequences are sorted, so one pass over them suffices.
    begin = end = 0  # the run to be yielded next
    number = skipped = 0  # index of the current run, and the positions before it
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


def read_mesh(node: Any, stored: frozenset[Extent]) -> Mesh:
    """Return a pickled ``DeviceMesh``; ``stored`` as ``Mesh`` has it."""
    # Versions of PyTorch pickle different attributes: a tensor of ranks (``mesh``, ``_mesh``) or, since 2.9,
    # a layout; the ranks as a list or a map; and the coordinate of the process, which is None outside of the
    # mesh.
    fields = _state_attributes(node.state)
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
    return Mesh(shape, place, is_member, rank, max(ranks, default=-1) + 1, stored)


def _mesh_shape(fields: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the shape of a mesh, from its layout, or before 2.9 from its tensor of ranks."""
    layout_node = fields.get("_layout")
    if layout_node is None:
        array = fields.get("mesh", fields.get("_mesh"))
        return sizes(array.args[2])  # storage, offset, shape, …
    layout = _state_attributes(layout_node.state)
    if "axes" in layout:
        return tuple(_count(_state_attributes(axis.state)["shape"]) for axis in layout["axes"])
    shape = layout["shape"]
    return (shape,) if type(shape) is int else tuple(map(_count, shape))


def _count(lengths: Any) -> int:
    """Return the number of processes along a dimension, which may be several flattened ones."""
    lengths = (lengths,) if type(lengths) is int else lengths
    if len(lengths) > _MAX_DIMENSIONS or not all(type(length) is int for length in lengths):
        raise ValueError("nested dimensions of a mesh")
    return math.prod(lengths)


def _mesh_ranks(fields: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ranks of the mesh, or of the larger mesh that it is a part of; empty if unknown."""
    for key in ("_flatten_rank_map", "_flatten_mesh_list"):
        ranks = fields.get(key)
        if isinstance(ranks, tuple | list) and all(
            type(rank) is int and 0 <= rank < _MAX_MESH for rank in ranks
        ):
            return tuple(ranks)
    return ()


# ShardedTensor ----------------------------------------------------------------------------------------


def _sharded_tensor(
    args: Any, state: Any, read: Callable[[object], Leaf[TensorParts] | None]
) -> Leaf[TensorParts]:
    """Return the local shards of a ``ShardedTensor``: nearly always one, but there may be none or several."""
    if not isinstance(state, tuple) or len(state) != _STATE_LENGTH:
        raise TypeError("not the state of a ShardedTensor")
    shards, _, group, _, _ = state
    shape, dtype = _shape(args[2]), torch_dtype(args[1])
    numbers = _state_attributes(group.state)
    rank, world = numbers["global_rank"], numbers["global_world_size"]
    if type(rank) is not int or type(world) is not int:
        raise TypeError("ranks that are not numbers")
    common = Shard(shape, None, rank=rank, world=world)
    tensors: list[tuple[Path, TensorParts]] = []
    for index, node in enumerate(shards):
        fields = _state_attributes(node.state)
        leaf = read(fields["tensor"])
        if leaf is None or len(leaf.tensors) != 1:
            raise TypeError("a shard that is not a tensor")
        (_, parts) = leaf.tensors[0]
        metadata = _state_attributes(fields["metadata"].state)
        box = Box(_shape(metadata["shard_offsets"]), _shape(metadata["shard_sizes"]))
        if box.lengths != parts.shape or not box.is_inside(shape):
            raise ValueError(f"a shard of shape {list(parts.shape)} at {list(box.offsets)} of {list(shape)}")
        ranges = tuple(
            ((start, end),) if start < end else () for start, end in zip(box.offsets, box.ends, strict=True)
        )
        path: Path = () if len(shards) == 1 else (f"{ONE_OF_SEVERAL}{index}>",)
        tensors.append((path, replace(parts, shard=common._replace(ranges=ranges))))
    # A process without a shard gets an empty tensor, so that its file names the tensor as well.
    if not tensors:
        shard = common._replace(ranges=tuple(() for _ in shape))
        tensors.append(((), TensorParts(dtype, (0, *shape[1:]), in_memory(b""), shard=shard)))
    return Leaf(tuple(tensors))
