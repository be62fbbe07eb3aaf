"""The files of all ranks of one save as one checkpoint: tensors are assembled from the ranks' shards.

Each file is opened as a checkpoint of its own (``rank_files.py`` has their names), whose sharded tensors say
which indexes of the global tensor they hold (``distributed.py``). Then for each name:

- Shards are assembled; replicas of one shard count once.
- A tensor or value that all ranks have alike is kept once, under its name. Whether two tensors are equal is
  known from the checksums in their files, without reading them.
- If ranks differ (random states, statistics of a batch normalisation), the first rank's has the name, and
  the others' are below ``rank_<K>``.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from ckpttool.containers.pickle.pickle_nodes import DictSubclass
from ckpttool.core.checkpoint import Checkpoint, Producer
from ckpttool.core.errors import LimitExceeded
from ckpttool.core.report import Finding, error, note, warning
from ckpttool.core.tensor import Path, Role, Shard, Tensor
from ckpttool.core.text import counted
from ckpttool.core.training import training_state
from ckpttool.core.values import as_strided
from ckpttool.formats.content.assembly import training_of
from ckpttool.formats.content.boxes import Box, Piece, assemble
from ckpttool.formats.content.tree import replace_tensors, tensors_in, trees_equal
from ckpttool.formats.opening import MAX_RANKS, OpenedParts, file_entry
from ckpttool.formats.torch.distributed import ONE_OF_SEVERAL
from ckpttool.formats.torch.rank_files import METADATA, RankFile
from ckpttool.storage import fs

VARIANT = "ranks"
_MAX_DEPTH = 100
"""Depth to which the ranks' trees are compared; anything deeper is one value."""
_MAX_PIECES = 1 << 22
"""Limit on the pieces of all tensors together."""
_COMPARED_STATE = ("epoch", "step", "learning_rate")
_OTHER_RANKS_CODE = "rank-alone"
"""Code of the finding in a rank's file that other ranks' files exist; it is dropped, as they are here."""


def rank_key(rank: int) -> str:
    """Return the key for a rank's own content."""
    return f"rank_{rank}"


def is_rank_key(key: object) -> bool:
    """Return whether a key is of a rank's own content."""
    return isinstance(key, str) and key.startswith("rank_") and key[5:].isdigit()


_SAME = object()
"""Marks content that equals the first rank's."""


@dataclass(slots=True)
class _RankTensor:
    """A rank's tensor of some name; ``checksum`` is of its storage, None if its file has none."""

    file: str
    rank: int
    tensor: Tensor
    checksum: int | None


@dataclass(slots=True)
class _RankGroup:
    """The files of one stem (model, optimizer), by rank; ``prefix`` is empty if all have one stem."""

    prefix: Path
    parts: dict[int, tuple[RankFile, Checkpoint]] = field(default_factory=dict)


def open_ranks(
    path: str,
    files: Sequence[RankFile],
    metadata: str | None = None,
    others: Iterable[str] = (),
    *,
    allows_losses: bool,
) -> Checkpoint:
    """Return the checkpoint of the files of all ranks; a missing file, or one of another save, is a finding.

    Args:
        path: The directory, or the common stem of the files.
        files: Of one save or, by mistake, of several.
        metadata: Path of the ``metadata.pkl`` of torch_checkpointing.
        others: Names of files next to them, which aren't read.
    """
    with OpenedParts("part", allows_losses=allows_losses) as parts:
        world, job_files = _files_of_one_world(parts, files)
        metadata_part = None if metadata is None else parts.add_file(METADATA, metadata)
        job_metadata = dict(metadata_part.metadata) if metadata_part is not None else {}
        groups = _open_groups(parts, job_files)
        # The number of ranks is in the files' names, in torch_checkpointing's metadata, or in the meshes of
        # sharded tensors; without any of these the highest rank decides, so a missing last file goes
        # unnoticed.
        world_size = job_metadata.get("world_size")
        stated = world_size if type(world_size) is int and world_size > 0 else 0
        world = world or stated or _world_of_tensors(groups)
        _note_missing(parts, job_files, world)
        parts.findings += _stale_findings(groups, world)
        parts.findings = [finding for finding in parts.findings if finding.code != _OTHER_RANKS_CODE]
        message = "next to the ranks' files; not checked"
        parts.findings += (note("not-part", message, name) for name in others)
        assembly = _Assembly(path, groups, is_whole=parts.complete)
        assembly.run()
        parts.findings += assembly.findings
        parts.complete &= assembly.is_whole
        name = os.path.basename(fs.abspath(path))
        values = _metadata(groups) | ({"metadata": job_metadata} if job_metadata else {})
        paths = [file.path for file in files] + ([metadata] if metadata is not None else [])
        # The training state is from each kind's first rank; the first kind, the model, has precedence.
        firsts = [next(iter(group.parts.values()))[1] for group in groups if group.parts]
        first_metadata = {key: value for part in reversed(firsts) for key, value in part.metadata.items()}
        tensors = tuple(assembly.tensors)
        return parts.checkpoint(
            path=path,
            format="pytorch",
            variant=VARIANT,
            tensors=tensors,
            files=tuple(map(file_entry, paths)),
            spans=parts.spans,
            metadata=lambda: values,
            training=lambda: training_of(first_metadata, tensors, name),
            tree=assembly.tree,
            producer=Producer("pytorch"),
        )


# Finding the files ------------------------------------------------------------------------------------


def _files_of_one_world(parts: OpenedParts, files: Sequence[RankFile]) -> tuple[int, list[RankFile]]:
    """Return the number of ranks in the files' names, and its files; files of other numbers are errors."""

    def presence(world: int) -> tuple[float, int]:
        # The most complete job counts; of two, that with more files.
        stems = [file.stem for file in files if file.world == world]
        return len(stems) / max(1, world * len(set(stems))), len(stems)

    world, *other_worlds = sorted({file.world for file in files}, key=presence, reverse=True)
    if not other_worlds:
        return world, list(files)
    for file in files:
        if file.world != world:
            message = f"from a job of {file.world:,} ranks; others are from {world:,}"
            parts.findings.append(error("part-extra", message, file.name))
    return world, [file for file in files if file.world == world]


def _open_groups(parts: OpenedParts, files: Sequence[RankFile]) -> list[_RankGroup]:
    stems = list(dict.fromkeys(file.stem for file in files))
    groups = {stem: _RankGroup((stem,) if len(stems) > 1 else ()) for stem in stems}
    for file in files:
        part = parts.add_file(file.name, file.path)
        if part is not None:
            groups[file.stem].parts[file.rank] = (file, part)
    return list(groups.values())


def _world_of_tensors(groups: Iterable[_RankGroup]) -> int:
    """Return the number of ranks in the tensors' meshes, else one more than the highest rank."""
    worlds = [shard.world for group in groups for _, part in group.parts.values() for shard in _shards(part)]
    return max(worlds, default=0) or max((max(group.parts) + 1 for group in groups if group.parts), default=0)


def _shards(part: Checkpoint) -> Iterator[Shard]:
    return (tensor.shard for tensor in part.tensors if tensor.shard is not None)


def _note_missing(parts: OpenedParts, files: Sequence[RankFile], world: int) -> None:
    """Add findings for the files of a job of ``world`` ranks that are missing, and for others."""
    if world > MAX_RANKS:
        parts.fault("part-missing", f"implausible world size {world:,}", None)
        return
    present = {(file.stem, file.rank) for file in files}
    missing = []
    for stem, example in {file.stem: file for file in files}.items():
        # The rank is the number at the end of the name, before the suffix, so the name of a missing file is
        # made from that of any other file of its stem.
        name, suffix = os.path.splitext(example.name)
        prefix = name.rstrip("0123456789")
        missing += [f"{prefix}{rank}{suffix}" for rank in range(world) if (stem, rank) not in present]
    parts.note_missing(missing)
    for file in files:
        if file.rank >= world:
            message = f"a rank beyond the {world:,} of the job"
            parts.findings.append(error("part-extra", message, file.name))


# Checking that they are of one save -------------------------------------------------------------------


def _stale_findings(groups: Sequence[_RankGroup], world: int) -> Iterator[Finding]:
    """Yield an error for each file of another rank than its name says, another job, or another step."""
    firsts: dict[str, tuple[object, str]] = {}
    for group in groups:
        for rank, (file, part) in group.parts.items():
            # A sharded tensor has the mesh of the job that saved it, and the rank, whatever the name of the
            # file. A file that was renamed, or copied from another job, contradicts its name here.
            shards = list(_shards(part))
            worlds = {shard.world for shard in shards if shard.world} - {world}
            if worlds:
                message = (
                    f"its tensors were sharded for {max(worlds):,} ranks, but this is a job of {world:,}"
                )
                yield error("part-stale", message, file.name)
            ranks = {shard.rank for shard in shards if shard.rank is not None} - {rank}
            if ranks:
                message = f"it holds the shards of rank {min(ranks):,}: a file with the wrong name"
                yield error("part-stale", message, file.name)
        yield from _step_findings(group, firsts)


def _step_findings(group: _RankGroup, firsts: dict[str, tuple[object, str]]) -> Iterator[Finding]:
    """Yield an error for each file with another step, epoch or learning rate than the first that has one."""
    for file, part in group.parts.values():
        state = training_state(part.metadata)  # from plain values; no tensor is read
        for name in _COMPARED_STATE:
            value = getattr(state, name)
            if value is None:
                continue
            first, first_file = firsts.setdefault(name, (value, file.name))
            if first != value:
                message = f"{name.replace('_', ' ')} {value!r:.20}, but {first_file} says {first!r:.20}"
                yield error("part-stale", message, file.name)
                break


# Assembling -------------------------------------------------------------------------------------------


class _Assembly:
    """Assembles the tensors of a checkpoint from those of its ranks."""

    def __init__(self, path: str, groups: Sequence[_RankGroup], *, is_whole: bool) -> None:
        self._path, self._groups = path, groups
        self._has_all_ranks = self.is_whole = is_whole
        self.tensors: list[Tensor] = []
        self.findings: list[Finding] = []
        self._replacements: dict[int, Tensor] = {}
        """Tensors of the whole checkpoint, by the ``id`` of the rank's tensor that they replace."""
        self._by_rank: dict[int, list[Tensor]] = defaultdict(list)
        self._differing: dict[int, Tensor] = {}
        """A rank's own tensors, by the ``id`` of the tensor in its file."""
        self._cuts: list[str] = []
        self._stale: set[str] = set()
        self._pieces = 0
        self._has_shards = any(
            True for group in groups for _, part in group.parts.values() for _ in _shards(part)
        )

    def run(self) -> None:
        """Assemble all tensors, in the order of each group's first rank."""
        for group in self._groups:
            for path, parts in _parts_by_path(group).items():
                if any(part.tensor.shard is not None for part in parts):
                    self._add_sharded(group, path, parts)
                else:
                    self._add_plain(group, path, parts)
        for _, tensors in sorted(self._by_rank.items()):
            self.tensors += tensors
        if self._cuts:
            message = "ranks hold different slices, but the files don't record the sharding"
            if len(self._cuts) > 1:
                message += f"; {counted(len(self._cuts) - 1, 'other tensor')} likewise"
            self.findings.append(warning("cut-not-said", message, self._cuts[0]))

    def tree(self) -> object:
        """Return the common content, with the content in which a rank differs below ``rank_<K>``."""
        if self._cuts or not all(group.parts for group in self._groups):
            return None
        common: dict[Any, Any] = {}
        by_rank: dict[Any, Any] = {}
        for group in self._groups:
            # The common tree is the first rank's, with the keys that only others have. Tensors in it are then
            # replaced by the assembled ones.
            trees = {rank: part.tree for rank, (_, part) in group.parts.items()}
            first = next(iter(trees.values()))
            content = first
            for rank, tree in trees.items():
                content = _add_missing(content, tree)
                difference = self._tree_difference(first, tree)
                if difference is not _SAME:
                    _put(by_rank, (rank_key(rank), *group.prefix), difference)
            content = replace_tensors(content, self._replacements)
            if not group.prefix:
                return _mapped_like(content, {**content, **by_rank}) if isinstance(content, dict) else content
            common[group.prefix[0]] = content
        return {**common, **by_rank}

    def _tree_difference(self, first: object, other: object, depth: int = 0) -> object:
        """Return the differing parts of a rank's tree in nested dictionaries, or ``_SAME``."""
        if isinstance(other, Tensor):
            return self._differing.get(id(other), _SAME)
        pairs = _common_items(first, other) if depth < _MAX_DEPTH else None
        if pairs is None and any(id(tensor) in self._differing for tensor in tensors_in(other)):
            return replace_tensors(other, self._differing)
        if pairs is None:
            return _SAME if first is other or trees_equal(first, other) else other
        parts = {key: self._tree_difference(*pair, depth + 1) for key, pair in pairs.items()}
        return {key: part for key, part in parts.items() if part is not _SAME} or _SAME

    def _add_sharded(self, group: _RankGroup, path: Path, parts: list[_RankTensor]) -> None:
        """Add the tensor of a name for which at least one rank has a shard."""
        first = next(part for part in parts if part.tensor.shard is not None)
        full_path, (dtype, shape) = (*group.prefix, *path), _global_type(first.tensor)
        shards: list[_RankTensor] = []
        strangers: list[_RankTensor] = []
        # The first shard decides type and shape of the whole. Parts that differ, or aren't shards, can't be
        # assembled with the others, but aren't dropped either: they are listed for their rank.
        for part in parts:
            fits = part.tensor.shard is not None and _global_type(part.tensor) == (dtype, shape)
            (shards if fits else strangers).append(part)
        tensor = self._put_together(full_path, shape, self._without_replicas(full_path, shards))
        owner = self._owner_name(group, first.tensor)
        tensor = replace(tensor, path=full_path, role=first.tensor.role, shares_with=owner, shard=None)
        self.tensors.append(tensor)
        self._replacements |= {id(part.tensor): tensor for part in parts}
        for part in strangers:
            other_dtype, other_shape = _global_type(part.tensor)
            expected = f"a part of {dtype} {list(shape)} in {first.file}"
            message = f"{_name(path)} is {other_dtype} {list(other_shape)}, but {expected}"
            self._fault(error("part-stale", message, part.file))
            self._add_for_rank(full_path, part)

    def _owner_name(self, group: _RankGroup, tensor: Tensor) -> str | None:
        if tensor.shares_with is None:
            return None
        return _name((*group.prefix, tensor.shares_with))

    def _add_plain(self, group: _RankGroup, path: Path, parts: list[_RankTensor]) -> None:
        """Add the tensors of a name that no rank shards: equal ones once, others for each rank."""
        first = parts[0]
        others = [part for part in parts[1:] if not _are_same(first, part)]
        full_path = (*group.prefix, *path)
        # Weights, unlike buffers, are equal in all ranks of a data-parallel job. If they differ, the ranks
        # have slices of them (tensor parallelism), which can't be assembled without knowing the axis.
        is_cut = first.tensor.role is Role.WEIGHTS and any(
            first.tensor.shape != other.tensor.shape
            or (not self._has_shards and _are_same(first, other) is False)
            for other in others
        )
        if is_cut:
            self._cuts.append(_name(full_path))
            for part in parts:
                self._add_for_rank(full_path, part)
            return
        owner = self._owner_name(group, first.tensor)
        tensor = replace(first.tensor, path=full_path, shares_with=owner)
        self.tensors.append(tensor)
        self._replacements |= {id(part.tensor): tensor for part in parts}
        for other in others:
            self._check_step(path, first, other)
            self._add_for_rank(full_path, other)

    def _check_step(self, path: Path, first: _RankTensor, other: _RankTensor) -> None:
        """Add an error if the checksum of a rank's optimizer step differs from the first rank's."""
        is_step = path[-1] == "step" and first.tensor.role is Role.OPTIMIZER and first.tensor.size == 1
        if is_step and _are_same(first, other) is False and other.file not in self._stale:
            self._stale.add(other.file)
            message = f"its optimizer has made a different number of steps than that of {first.file}"
            self._fault(error("part-stale", message, other.file))

    def _add_for_rank(self, path: Path, part: _RankTensor) -> None:
        """Add a rank's own tensor below ``rank_<K>``."""
        role = Role.OTHER if part.tensor.role is Role.WEIGHTS else part.tensor.role
        rank_path = (rank_key(part.rank), *path)
        tensor = replace(part.tensor, path=rank_path, role=role, shares_with=None, shard=None)
        self._by_rank[part.rank].append(tensor)
        self._differing[id(part.tensor)] = tensor

    def _without_replicas(self, path: Path, shards: Sequence[_RankTensor]) -> list[_RankTensor]:
        """Return one shard of each range; replicas that differ get a warning, and are kept for their rank."""
        distinct: dict[object, _RankTensor] = {}
        for part in shards:
            assert part.tensor.shard is not None  # the caller chose those
            first = distinct.setdefault(part.tensor.shard.ranges, part)
            if first is part or _are_same(first, part):
                continue
            if _are_same(first, part) is False and not part.tensor.shard.is_partial:
                message = f"{_name(path)} is replicated, but differs from that of rank {first.rank:,}"
                self.findings.append(warning("replica-differs", message, part.file))
                self._check_step(path, first, part)
            self._add_for_rank(path, part)
        return list(distinct.values())

    def _put_together(self, path: Path, shape: tuple[int, ...], parts: Sequence[_RankTensor]) -> Tensor:
        """Return a tensor assembled from shards; it has no values if they don't tile it."""
        first = parts[0].tensor
        name = _name(path)
        empty = replace(first, shape=shape, values=None, extent=None, storage=None)
        shards = [part.tensor.shard for part in parts if part.tensor.shard is not None]
        if len(parts) == 1 and shards and shards[0].is_whole:
            return first
        if len(shards) < len(parts) or any(shard.ranges is None for shard in shards):
            self._fault(error("chunks-wrong", "the files don't record the part that a rank has", name))
            return empty
        self._pieces += sum(math.prod(len(runs) for runs in shard.ranges or ()) for shard in shards)
        if self._pieces > _MAX_PIECES:
            raise LimitExceeded(self._path, f"tensors in more than {_MAX_PIECES:,} pieces", where=name)
        pieces = [piece for part in parts for piece in _pieces(part.tensor)]
        whole, fault = assemble(self._path, name, empty, pieces)
        if fault is not None:
            # If a file is missing, its finding counts for all tensors.
            self.is_whole = False
            self.findings += [fault] if self._has_all_ranks else []
        elif whole.values is None:
            message = "its elements can't be read in place, so it can't be assembled"
            self._fault(error("part-not-read", message, name))
        return whole

    def _fault(self, finding: Finding) -> None:
        self.is_whole = False
        self.findings.append(finding)


def _parts_by_path(group: _RankGroup) -> dict[Path, list[_RankTensor]]:
    """Return the ranks' tensors of each path, in the order of ranks."""
    by_path: dict[Path, list[_RankTensor]] = defaultdict(list)
    for rank, (file, part) in group.parts.items():
        checksums = {(s.extent.file, s.extent.offset, s.extent.nbytes): s.crc32 for s in part.spans()}
        for tensor in part.tensors:
            extent = tensor.storage or tensor.extent
            checksum = None if extent is None else checksums.get((extent.file, extent.offset, extent.nbytes))
            # If a process has several shards of one tensor, each has a key of its own below the tensor's name
            # (``distributed.py``); they are parts of the tensor at the path without this key.
            is_one_of_several = tensor.shard is not None and str(tensor.path[-1]).startswith(ONE_OF_SEVERAL)
            path = tensor.path[:-1] if is_one_of_several else tensor.path
            by_path[path].append(_RankTensor(file.name, rank, tensor, checksum))
    return by_path


def _global_type(tensor: Tensor) -> tuple[str, tuple[int, ...]]:
    """Return the type and shape of a tensor, or of the global tensor if it is a shard."""
    return tensor.dtype.name, tensor.shape if tensor.shard is None else tensor.shard.shape


def _are_same(one: _RankTensor, other: _RankTensor) -> bool | None:
    """Return whether two tensors are equal views of equal storages; None without checksums."""
    a, b = one.tensor, other.tensor
    if (a.dtype, a.shape, a.byteorder) != (b.dtype, b.shape, b.byteorder):
        return False
    if a.size == 0:
        return True
    # A checksum is of a whole storage. Views of different places in their storages may have equal elements
    # although the checksums differ, or different ones although they are equal, so nothing is known of them.
    if None in (one.checksum, other.checksum, a.storage, b.storage) or _view(a) != _view(b):
        return None
    return one.checksum == other.checksum


def _view(tensor: Tensor) -> object:
    """Return a tensor's offset and strides in its storage, and the storage's size, or None."""
    if tensor.values is None:
        return None
    view = as_strided(tensor.values, tensor.shape, tensor.dtype.itemsize)
    base, nbytes = (0, 0) if tensor.storage is None else (tensor.storage.offset, tensor.storage.nbytes)
    return None if view is None else (view.offset - base, view.strides, nbytes)


def _pieces(tensor: Tensor) -> Iterator[Piece[Tensor]]:
    """Yield the boxes of the global tensor that a rank has, with their places in its own tensor."""
    # The shard is the product of index ranges along each axis, and its own elements are those ranges without
    # gaps: so each combination of one range an axis is a box.
    assert tensor.shard is not None  # the caller chose those
    assert tensor.shard.ranges is not None
    axes = []
    for runs in tensor.shard.ranges:
        length, axis = 0, []
        for start, end in runs:
            axis.append((start, length, end - start))
            length += end - start
        axes.append(axis)
    for sides in product(*axes):
        offsets, start_in_part, lengths = (tuple(side[field] for side in sides) for field in range(3))
        yield Piece(Box(offsets, lengths), tensor, start_in_part)


# Metadata ---------------------------------------------------------------------------------------------


def _metadata(groups: Sequence[_RankGroup]) -> dict[str, Any]:
    """Return the ranks' common metadata, with that in which a rank differs below ``rank_<K>``."""
    common: dict[str, Any] = {}
    by_rank: dict[str, Any] = {}
    for group in groups:
        parts = {rank: part.metadata for rank, (_, part) in group.parts.items()}
        first: Mapping[str, Any] = next(iter(parts.values()), {})
        content: object = first
        for rank, metadata in parts.items():
            content = _add_missing(content, metadata)
            if (difference := _metadata_difference(first, metadata)) is not _SAME:
                _put(by_rank, (rank_key(rank), *group.prefix), difference)
        if content:
            _put(common, group.prefix, content)
    return {**common, **by_rank}


def _metadata_difference(first: object, other: object, depth: int = 0) -> object:
    """Return the differing parts of plain data in nested dictionaries, or ``_SAME``."""
    # By their ``repr`` 1, 1.0 and True differ, and a NaN equals a NaN. With ``==`` a loss of NaN would differ
    # from itself, and each rank would seem to have a loss of its own.
    if not isinstance(first, Mapping) or not isinstance(other, Mapping) or depth == _MAX_DEPTH:
        return _SAME if repr(first) == repr(other) else other
    parts = {
        key: _metadata_difference(first[key], value, depth + 1)
        for key, value in other.items()
        if key in first
    }
    return {key: part for key, part in parts.items() if part is not _SAME} or _SAME


def _common_items(first: object, other: object) -> dict[Any, tuple[object, object]] | None:
    """Return pairs of the values of two containers by common key; None if they are compared as a whole."""
    if isinstance(first, dict) and isinstance(other, dict):
        return {key: (first[key], value) for key, value in other.items() if key in first}
    if not isinstance(first, list | tuple) or not isinstance(other, list | tuple) or len(first) != len(other):
        return None
    # Lists are compared item by item only if they hold tensors. Any other list, such as a random state, is
    # one value: parts of it from different ranks would mean nothing.
    if not any(True for _ in tensors_in(other)):
        return None
    return dict(enumerate(zip(first, other, strict=True)))


def _put(tree: dict[Any, Any], path: Path, content: object) -> None:
    """Put content into nested dictionaries at a path; with an empty path it joins the root's."""
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    if path:
        tree[path[-1]] = content
    elif isinstance(content, Mapping):
        tree.update(content)


def _add_missing(first: object, other: object, depth: int = 0) -> object:
    """Return a tree with the keys that only another one has; the first one's values have precedence."""
    if not isinstance(first, dict) or not isinstance(other, dict) or depth == _MAX_DEPTH:
        return first
    pairs = {
        key: _add_missing(value, other[key], depth + 1) if key in other else value
        for key, value in first.items()
    }
    return _mapped_like(first, pairs | {key: value for key, value in other.items() if key not in first})


def _mapped_like(example: dict[Any, Any], pairs: dict[Any, Any]) -> dict[Any, Any]:
    if not isinstance(example, DictSubclass):
        return pairs
    return DictSubclass(example.kind, pairs, example.state, example.factory)


def _name(path: Path) -> str:
    return ".".join(map(str, path))
