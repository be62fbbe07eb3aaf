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

from ckpttool.formats.content.flattening import Leaf
from ckpttool.formats.content.object_parts import references
from ckpttool.formats.content.plain_data import describe
from ckpttool.formats.torch.types import sizes, torch_dtype
from ckpttool.report import Finding, error, note
from ckpttool.tensor import Extent, Path, Range, Shard, Tensor
from ckpttool.wire.pickle_nodes import Call, Global
from ckpttool.wire.readable import InMemory

if TYPE_CHECKING:
    from ckpttool.formats.torch.objects import TensorParts, TorchObjects

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
    """Tell whether a class is one of those that keep a process's part of a tensor."""
    if not isinstance(kind, Global) or kind.name not in (_DTENSOR, _SHARDED):
        return False
    return any(f"{kind.module}.".startswith(f"{module}.") for module in _MODULES)


def local_parts(objects: TorchObjects, call: Call) -> Leaf[TensorParts]:
    """Return the elements that the file holds of a distributed tensor, with their places in the whole."""
    _, kind, args, state = call.args[:4]
    if kind.name == _SHARDED:
        return _sharded_tensor(objects, args, state)
    held = _attributes(state)
    found = objects.leaf(held["_local_tensor"])
    if found is None or len(found.tensors) != 1:
        raise TypeError("its local tensor is none")
    (path, parts), shape = found.tensors[0], _shape(args[2])
    if parts.dtype != torch_dtype(args[1]):
        raise TypeError(f"a local tensor of {parts.dtype.name}")
    objects.check_references(held["_spec"])
    told = _attributes(held["_spec"].state)
    mesh = _known_mesh(objects, told["mesh"])
    shard = _dtensor_shard(mesh, told, shape, parts.shape)
    parts = replace(parts, shard=shard, described_by=mesh.stored)
    return Leaf(((path, parts),), visits=sum(map(len, shard.ranges or ())))


def shard_findings(tensors: Sequence[Tensor]) -> Iterator[Finding]:
    """Yield what is to be said of the parts of tensors that a file holds."""
    for tensor in tensors:
        if tensor.shard is not None and tensor.shard.is_partial:
            message = (
                f"{', '.join(tensor.shard.placements)}: terms of a sum that was never made, not its values"
            )
            yield error("dtensor-partial", message, tensor.name)
    cut = [one.shard for one in tensors if one.shard is not None and not one.shard.is_whole]
    if cut:
        rank = "a process" if cut[0].rank is None else f"rank {cut[0].rank:,}"
        world = f" of {cut[0].world:,}" if cut[0].world else ""
        message = f"what {rank}{world} kept of {len(cut):,} tensors; the others have the rest"
        yield note("rank-alone", message)


def _attributes(state: Any) -> Mapping[str, Any]:
    """Return what BUILD sets: ``__dict__``, ``__slots__``, or both of them."""
    held: dict[str, Any] = {}
    for part in state if isinstance(state, tuple) and len(state) == 2 else (state,):
        held |= part if isinstance(part, dict) else {}
    return held


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


class _Placement(NamedTuple):
    """How a tensor lies on one dimension of a mesh; ``axis`` is None where that doesn't cut it."""

    text: str
    axis: int | None
    pieces: int


def _known_mesh(objects: TorchObjects, node: Any) -> Mesh:
    """Return a mesh, read once: it is that of many tensors, and may have a hundred thousand processes."""
    mesh = objects.meshes.get(id(node))
    if mesh is None:
        leaves = (leaf for one in references(node) if (leaf := objects.bare(one)) is not None)
        stored = (parts.storage for leaf in leaves for _, parts in leaf.tensors)
        mesh = objects.meshes[id(node)] = _mesh(node, frozenset(one for one in stored if one is not None))
        objects.charge(mesh.world)
    return mesh


def _dtensor_shard(
    mesh: Mesh, told: Mapping[str, Any], shape: tuple[int, ...], local: tuple[int, ...]
) -> Shard:
    placements = [_placement(node, len(shape)) for node in told["placements"]]
    if len(placements) != len(mesh.shape):
        raise ValueError(f"{len(placements)} placements on a mesh of {len(mesh.shape)} dimensions")
    texts = tuple(one.text for one in placements)
    ranges: tuple[tuple[Range, ...], ...] | None
    if not mesh.is_member:
        ranges = tuple(() for _ in shape)
    elif mesh.place is None and any(one.axis is not None for one in placements):
        ranges = None
    else:
        ranges = _ranges(shape, mesh, [(at, placements[at]) for at in _order(told, placements)])
    if ranges is not None and mesh.is_member:
        expected = tuple(sum(end - start for start, end in runs) for runs in ranges)
        if expected != local:
            found = f"a local tensor of shape {list(local)}; {', '.join(texts)} of {list(shape)} gives"
            raise ValueError(f"{found} {list(expected)}")
    return Shard(shape, ranges, texts, mesh.shape, mesh.rank, mesh.world)


def _placement(node: Any, axes: int) -> _Placement:
    """Return a placement as it is pickled: an object with a dimension, or without."""
    function = node.function if isinstance(node, Call) else None
    if not isinstance(function, Global):
        raise TypeError("no placement")
    name, told = function.name, _attributes(node.state)
    if name not in ("Shard", "_StridedShard"):
        reduction = told.get("reduce_op")
        return _Placement(f"{name}({reduction if isinstance(reduction, str) else ''})", None, 1)
    axis, pieces = told["dim"], told.get("split_factor", 1)
    if type(axis) is not int or not -axes <= axis < axes:
        raise ValueError(f"{name} along axis {describe(axis)} of {axes}")
    if type(pieces) is not int or not 1 <= pieces <= _MAX_PIECES:
        raise ValueError(f"{name} of {describe(pieces)} pieces")
    text = f"Shard({axis})" if name == "Shard" else f"_StridedShard({axis}, {pieces})"
    return _Placement(text, axis % axes, pieces if name == "_StridedShard" else 1)


def _order(told: Mapping[str, Any], placements: Sequence[_Placement]) -> list[int]:
    """Return in which order the dimensions of the mesh cut: from left to right, or as it is said."""
    order: list[int] = []
    entries = told.get("shard_order")
    if not told.get("use_strided_shard_as_shard_order") and isinstance(entries, tuple):
        for entry in entries[:_MAX_DIMENSIONS]:
            dims = entry.args[1] if isinstance(entry, Call) and len(entry.args) == 2 else ()
            order += [at for at in dims[:_MAX_DIMENSIONS] if type(at) is int and 0 <= at < len(placements)]
    return list(dict.fromkeys((*order, *range(len(placements)))))


def _ranges(
    shape: tuple[int, ...], mesh: Mesh, placements: Sequence[tuple[int, _Placement]]
) -> tuple[tuple[Range, ...], ...]:
    """Return which indexes of each axis a process has, by cutting what is left for it again and again."""
    ranges: list[list[Range]] = [[(0, length)] if length else [] for length in shape]
    for at, placement in placements:
        if placement.axis is not None and mesh.place is not None:
            left = ranges[placement.axis]
            total = sum(end - start for start, end in left)
            own = _cut(total, placement.pieces, mesh.shape[at], mesh.place[at])
            ranges[placement.axis] = list(_taken(left, own))
    return tuple(map(tuple, ranges))


def _cut(total: int, pieces: int, count: int, place: int) -> Iterator[Range]:
    """Yield which indexes one of ``count`` processes has, of each piece that they are cut into first.

    Pieces are as ``torch.chunk`` cuts them: all as long as the first, and the last ones shorter or empty.
    """
    length = -(-total // pieces)
    for start in range(0, total, max(length, 1)):
        size = min(length, total - start)
        step = -(-size // count)
        yield start + min(size, place * step), start + min(size, (place + 1) * step)


def _taken(runs: Sequence[Range], places: Iterator[Range]) -> Iterator[Range]:
    """Yield the indexes at places in runs, both in their order; what follows without a gap is one run."""
    begin = end = at = base = 0
    for low, high in places:
        while low < high:
            start, stop = runs[at]
            if low - base >= stop - start:
                base += stop - start
                at += 1
                continue
            first = start + low - base
            last = min(stop, first + high - low)
            low += last - first
            if first != end and begin < end:
                yield begin, end
            begin, end = (begin if first == end and begin < end else first), last
    if begin < end:
        yield begin, end


def _mesh(node: Any, stored: frozenset[Extent]) -> Mesh:
    """Return a mesh as it is pickled, which each version of PyTorch does in a way of its own."""
    told = _attributes(node.state)
    shape = _mesh_shape(told)
    is_sound = len(shape) <= _MAX_DIMENSIONS and all(type(length) is int and length > 0 for length in shape)
    if not is_sound or math.prod(shape) > _MAX_MESH:
        raise ValueError(f"a mesh of shape {describe(shape)}")
    place = told.get("_coordinate_on_dim")
    is_member = place is not None or "_coordinate_on_dim" not in told
    own = None
    if place is not None:
        own = tuple(place)
        if len(own) != len(shape) or not all(
            type(at) is int and 0 <= at < length for at, length in zip(own, shape, strict=True)
        ):
            raise ValueError(f"a place {describe(place)} in a mesh of shape {describe(shape)}")
    ranks = _mesh_ranks(told)
    rank = told.get("_rank")
    if type(rank) is not int:
        rank = ranks[_flat(own, shape)] if own is not None and len(ranks) == math.prod(shape) else None
    return Mesh(shape, own, is_member, rank, max(ranks, default=-1) + 1, stored)


def _mesh_shape(told: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the processes along each dimension: by its layout, before 2.9 by an array of numbers."""
    layout = told.get("_layout")
    if layout is None:
        array = told.get("mesh", told.get("_mesh"))
        return sizes(array.args[2])  # storage, offset, shape, …
    held = _attributes(layout.state)
    if "axes" in held:
        return tuple(_count(_attributes(axis.state)["shape"]) for axis in held["axes"])
    shape = held["shape"]
    return (shape,) if type(shape) is int else tuple(map(_count, shape))


def _count(lengths: Any) -> int:
    """Return the processes along one dimension, which may be several that were flattened."""
    lengths = (lengths,) if type(lengths) is int else lengths
    if len(lengths) > _MAX_DIMENSIONS or not all(type(length) is int for length in lengths):
        raise ValueError("dimensions in dimensions of a mesh")
    return math.prod(lengths)


def _mesh_ranks(told: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the numbers of the mesh's processes, or of the mesh's that it is a part of."""
    for key in ("_flatten_rank_map", "_flatten_mesh_list"):
        ranks = told.get(key)
        if isinstance(ranks, tuple | list) and all(
            type(one) is int and 0 <= one < _MAX_MESH for one in ranks
        ):
            return tuple(ranks)
    return ()


def _flat(place: Sequence[int], shape: Sequence[int]) -> int:
    """Return where a place in an array lies when all of it is put in a row."""
    at = 0
    for index, length in zip(place, shape, strict=True):
        at = at * length + index
    return at


# ShardedTensor ----------------------------------------------------------------------------------------


def _sharded_tensor(objects: TorchObjects, args: Any, state: Any) -> Leaf[TensorParts]:
    """Return the parts that a process kept of a ``ShardedTensor``: one nearly always, none, or several."""
    if not isinstance(state, tuple) or len(state) != _STATE_LENGTH:
        raise TypeError("no state of a ShardedTensor")
    own, _, group, _, _ = state
    objects.check_references(state)
    shape, dtype = _shape(args[2]), torch_dtype(args[1])
    numbers = _attributes(group.state)
    rank, world = numbers["global_rank"], numbers["global_world_size"]
    if type(rank) is not int or type(world) is not int:
        raise TypeError("processes that are no numbers")
    common = Shard(shape, None, rank=rank, world=world)
    tensors: list[tuple[Path, TensorParts]] = []
    for at, node in enumerate(own):
        held = _attributes(node.state)
        found = objects.leaf(held["tensor"])
        if found is None or len(found.tensors) != 1:
            raise TypeError("a shard that is no tensor")
        (_, parts) = found.tensors[0]
        place = _attributes(held["metadata"].state)
        starts, lengths = _shape(place["shard_offsets"]), _shape(place["shard_sizes"])
        ends = tuple(start + length for start, length in zip(starts, lengths, strict=True))
        if lengths != parts.shape or any(end > length for end, length in zip(ends, shape, strict=True)):
            raise ValueError(f"a shard of shape {list(parts.shape)} at {list(starts)} of {list(shape)}")
        ranges = tuple(
            ((start, end),) if start < end else () for start, end in zip(starts, ends, strict=True)
        )
        path: Path = () if len(own) == 1 else (f"{ONE_OF_SEVERAL}{at}>",)
        tensors.append((path, replace(parts, shard=replace(common, ranges=ranges))))
    if not tensors:
        from ckpttool.formats.torch.objects import TensorParts

        nothing = (0, *shape[1:])
        none = replace(common, ranges=tuple(() for _ in shape))
        tensors.append(((), TensorParts(dtype, nothing, InMemory(b""), shard=none)))
    return Leaf(tuple(tensors))
