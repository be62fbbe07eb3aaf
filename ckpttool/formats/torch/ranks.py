"""The files of all ranks of one save as one checkpoint: each tensor put together from what they kept of it.

What all ranks have alike stands once, under its own name. Where a rank has something else under the same name
(the state of its random numbers, the statistics of a batch normalisation that nobody averaged), the first
rank's has the name, and the others' lie below ``rank_<K>``. Whether two ranks have the same is known without
reading it: by the checksums that their files state.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

from ckpttool.checkpoint import Checkpoint, Producer
from ckpttool.errors import LimitExceeded
from ckpttool.formats.content.assembly import training_of
from ckpttool.formats.content.chunks import Chunked, Tile, strided_view
from ckpttool.formats.content.tree import make_mapped, replace_tensors, tensors_in, trees_equal
from ckpttool.formats.parts import Gathered, file_entry, open_file
from ckpttool.formats.torch.dcp_metadata import MetadataEntry, TensorChunk, check_chunks
from ckpttool.formats.torch.distributed import ONE_OF_SEVERAL
from ckpttool.formats.torch.rank_files import METADATA, RankFile
from ckpttool.report import Finding, counted, error, note, warning
from ckpttool.tensor import Path, Role, Shard, Tensor, Values
from ckpttool.training import training_state
from ckpttool.wire.pickle_nodes import Mapped
from ckpttool.wire.views import Strided

VARIANT = "ranks"
MAX_RANKS = 100_000
"""The most ranks that are counted; no job has had more."""
_MAX_DEPTH = 100
"""How deep trees of several ranks are compared; what lies deeper is one value."""
_MAX_TOLD = 10
"""How many missing files are told by name."""
_MAX_PIECES = 1 << 22
"""The most pieces that all tensors may lie in together."""
_SAVED_AT = ("epoch", "step", "learning_rate")
_ALONE = "rank-alone"
"""What a rank's own file says of itself: that there are others, which are here."""


def of_rank(rank: int) -> str:
    """Return the key below which lies what a rank has of its own."""
    return f"rank_{rank}"


def is_of_a_rank(key: object) -> bool:
    """Tell whether what a key leads to is a rank's own."""
    return isinstance(key, str) and key.startswith("rank_") and key[5:].isdigit()


@dataclass(slots=True)
class _KeptPart:
    """What one rank has under a name."""

    file: str
    rank: int
    tensor: Tensor
    checksum: int | None


@dataclass(slots=True)
class _RankGroup:
    """The files of one kind, by rank: those of the model, of its optimizer, or all that there are."""

    prefix: Path
    parts: dict[int, tuple[RankFile, Checkpoint]] = field(default_factory=dict)


def open_ranks(
    path: str, files: Sequence[RankFile], metadata: str | None = None, others: Iterable[str] = ()
) -> Checkpoint:
    """Return the checkpoint that files of ranks make; one that is missing or of another save is a finding.

    Args:
        path: How the user named it.
        files: Of one save or, by mistake, of several.
        metadata: What torch_checkpointing wrote beside them.
        others: Names of what else lies there, and is not read.
    """
    with Gathered("part") as parts:
        world, own = _files_of_one_world(parts, files)
        beside = _beside(parts, metadata)
        groups = _open_groups(parts, own)
        world = world or _count(beside.get("world_size")) or _told_world(groups)
        _note_missing(parts, groups, own, world)
        parts.findings += _of_other_saves(groups, world)
        parts.findings = [one for one in parts.findings if one.code != _ALONE]
        message = "it lies beside the ranks' files, and was not looked at"
        parts.findings += (note("not-part", message, name) for name in others)
        made = _Assembly(path, groups, is_whole=parts.complete)
        made.run()
        parts.findings += made.findings
        parts.complete &= made.is_whole
        name = os.path.basename(os.path.abspath(path))
        values = _metadata(groups) | ({"metadata": beside} if beside else {})
        paths = [file.path for file in files] + ([metadata] if metadata is not None else [])
        told = _told_first(groups)
        tensors = tuple(made.tensors)
        return Checkpoint(
            path=path,
            format="pytorch",
            variant=VARIANT,
            tensors=tensors,
            files=tuple(map(file_entry, paths)),
            spans=parts.spans,
            metadata=lambda: values,
            training=lambda: training_of(told, tensors, name),
            tree=made.tree,
            producer=Producer("pytorch"),
            findings=tuple(parts.findings),
            safety=tuple(dict.fromkeys(parts.safety)),
            judged=frozenset(parts.judged),
            complete=parts.complete,
            close=parts.keep(),
        )


# Which files there are --------------------------------------------------------------------------------


def _files_of_one_world(parts: Gathered, files: Sequence[RankFile]) -> tuple[int, list[RankFile]]:
    """Return how many ranks the names speak of, and their files; those of another job are an error each."""
    worlds = sorted({file.world for file in files}, key=lambda world: _presence(files, world), reverse=True)
    if len(worlds) == 1:
        return worlds[0], list(files)
    for file in files:
        if file.world != worlds[0]:
            message = f"of a job of {file.world:,} ranks; others are of {worlds[0]:,}"
            parts.findings.append(error("part-extra", message, file.name))
    return worlds[0], [file for file in files if file.world == worlds[0]]


def _presence(files: Sequence[RankFile], world: int) -> tuple[float, int]:
    """Return how much of a job of so many ranks is there, and of how many files."""
    count = sum(file.world == world for file in files)
    kinds = len({file.stem for file in files if file.world == world})
    return count / max(1, world * kinds), count


def _beside(parts: Gathered, path: str | None) -> Mapping[str, Any]:
    """Return what torch_checkpointing says of the files of the ranks."""
    if path is None:
        return {}
    part = parts.add(METADATA, partial(open_file, path))
    return dict(part.metadata) if part is not None else {}


def _open_groups(parts: Gathered, files: Sequence[RankFile]) -> list[_RankGroup]:
    stems = list(dict.fromkeys(file.stem for file in files))
    groups = {stem: _RankGroup((stem,) if len(stems) > 1 else ()) for stem in stems}
    for file in files:
        part = parts.add(file.name, partial(open_file, file.path))
        if part is not None:
            groups[file.stem].parts[file.rank] = (file, part)
    return list(groups.values())


def _told_world(groups: Iterable[_RankGroup]) -> int:
    """Return how many ranks the tensors speak of, or what the highest number among the names asks for."""
    told = [shard.world for group in groups for _, part in group.parts.values() for shard in _shards(part)]
    return max(told, default=0) or max((max(group.parts) + 1 for group in groups if group.parts), default=0)


def _shards(part: Checkpoint) -> Iterator[Shard]:
    return (tensor.shard for tensor in part.tensors if tensor.shard is not None)


def _note_missing(
    parts: Gathered, groups: Sequence[_RankGroup], files: Sequence[RankFile], world: int
) -> None:
    """Note the files that a job of so many ranks writes and that are not there."""
    if world > MAX_RANKS:
        parts.fault("missing", f"{world:,} ranks are not to be believed", None)
        return
    here = {(file.stem, file.rank) for file in files}
    likes = {file.stem: file for file in files}
    lacking = [
        _with_rank(like.name, rank)
        for stem, like in likes.items()
        for rank in range(world)
        if (stem, rank) not in here
    ]
    for name in lacking[:_MAX_TOLD]:
        parts.fault("missing", "there is no such file", name)
    if len(lacking) > _MAX_TOLD:
        parts.fault("missing", f"{len(lacking) - _MAX_TOLD:,} more files are not there", None)
    for file in files:
        if file.rank >= world:
            message = f"a rank that a job of {world:,} ranks does not have"
            parts.findings.append(error("part-extra", message, file.name))


def _with_rank(name: str, rank: int) -> str:
    """Return how another rank's file is named."""
    stem, suffix = os.path.splitext(name)
    return f"{stem.rstrip('0123456789')}{rank}{suffix}"


# Whether they are of one save -------------------------------------------------------------------------


def _of_other_saves(groups: Sequence[_RankGroup], world: int) -> Iterator[Finding]:
    """Yield where a file is another rank's than its name says, of another job, or of another step."""
    first: dict[str, tuple[object, str]] = {}
    for group in groups:
        for rank, (file, part) in group.parts.items():
            shards = list(_shards(part))
            worlds = {shard.world for shard in shards if shard.world} - {world}
            if worlds:
                message = f"its tensors were cut for {max(worlds):,} ranks, and this is a job of {world:,}"
                yield error("part-stale", message, file.name)
            ranks = {shard.rank for shard in shards if shard.rank is not None} - {rank}
            if ranks:
                message = f"it holds what rank {min(ranks):,} kept: a file with another's name"
                yield error("part-stale", message, file.name)
        yield from _of_other_steps(group, first)


def _of_other_steps(group: _RankGroup, first: dict[str, tuple[object, str]]) -> Iterator[Finding]:
    """Yield where a file says another step, epoch or rate than the first that says one."""
    for file, part in group.parts.values():
        state = training_state(part.metadata)  # of what is no tensor: none is read
        for name in _SAVED_AT:
            told = getattr(state, name)
            if told is None:
                continue
            known, where = first.setdefault(name, (told, file.name))
            if known != told:
                message = f"{name.replace('_', ' ')} {told!r:.20}, and {where} says {known!r:.20}"
                yield error("part-stale", message, file.name)
                break


# What they make together ------------------------------------------------------------------------------


class _Assembly:
    """The tensors of a checkpoint on their way of being put together."""

    def __init__(self, path: str, groups: Sequence[_RankGroup], *, is_whole: bool) -> None:
        self._path, self._groups = path, groups
        self._ranks_are_here = self.is_whole = is_whole
        self.tensors: list[Tensor] = []
        self.findings: list[Finding] = []
        self._made: dict[int, Tensor] = {}
        """By the address of a rank's own tensor, what takes its place in the tree."""
        self._own: dict[int, list[Tensor]] = defaultdict(list)
        self._others: dict[int, Tensor] = {}
        """By the same, what a rank has of its own."""
        self._cuts: list[str] = []
        self._stale: set[str] = set()
        self._pieces = 0
        self._has_shards = any(
            True for group in groups for _, part in group.parts.values() for _ in _shards(part)
        )

    def run(self) -> None:
        """Put all tensors together, each group's in the order of its first rank."""
        for group in self._groups:
            for path, kept in _parts_by_path(group).items():
                self._add(group, path, kept)
        for _, own in sorted(self._own.items()):
            self.tensors += own
        if self._cuts:
            message = "the ranks have slices of it, and how they were cut is not said"
            if len(self._cuts) > 1:
                message += f"; {counted(len(self._cuts) - 1, 'other tensor')} likewise"
            self.findings.append(warning("cut-not-said", message, self._cuts[0]))

    def tree(self) -> object:
        """Return all that the files hold: in common, and below its number what a rank has otherwise."""
        if self._cuts or not all(group.parts for group in self._groups):
            return None
        whole: dict[Any, Any] = {}
        own: dict[Any, Any] = {}
        for group in self._groups:
            trees = {rank: part.tree for rank, (_, part) in group.parts.items()}
            first = next(iter(trees.values()))
            content = first
            for rank, tree in trees.items():
                content = _united(content, tree)
                other = self._otherwise(first, tree)
                if other is not _SAME:
                    _below(own, (of_rank(rank), *group.prefix), other)
            content = replace_tensors(content, self._made)
            if not group.prefix:
                return _mapped_like(content, {**content, **own}) if isinstance(content, dict) else content
            whole[group.prefix[0]] = content
        return {**whole, **own}

    def _otherwise(self, first: object, other: object, depth: int = 0) -> object:
        """Return what of a rank's tree is not as in the first one's, in dictionaries."""
        if isinstance(other, Tensor):
            return self._others.get(id(other), _SAME)
        pairs = _pairs(first, other) if depth < _MAX_DEPTH else None
        if pairs is None and any(id(tensor) in self._others for tensor in tensors_in(other)):
            return replace_tensors(other, self._others)
        if pairs is None:
            return _SAME if first is other or trees_equal(first, other) else other
        parts = {key: self._otherwise(*both, depth + 1) for key, both in pairs.items()}
        return {key: part for key, part in parts.items() if part is not _SAME} or _SAME

    def _add(self, group: _RankGroup, path: Path, kept: list[_KeptPart]) -> None:
        """Add what the ranks have under one name: parts of a tensor, or whole ones."""
        cut = next((one for one in kept if one.tensor.shard is not None), None)
        if cut is None:
            self._add_plain(group, path, kept)
            return
        whole_path, like = (*group.prefix, *path), _described(cut.tensor)
        alike: list[_KeptPart] = []
        unlike: list[_KeptPart] = []
        for one in kept:
            fits = one.tensor.shard is not None and _described(one.tensor) == like
            (alike if fits else unlike).append(one)
        tensor = self._put_together(whole_path, like[1], self._distinct(whole_path, alike))
        owner = self._owner(group, cut.tensor)
        made = replace(tensor, path=whole_path, role=cut.tensor.role, shares_with=owner, shard=None)
        self.tensors.append(made)
        self._made |= {id(one.tensor): made for one in kept}
        for one in unlike:
            dtype, shape = _described(one.tensor)
            expected = f"a part of {like[0]} {list(like[1])} in {cut.file}"
            message = f"{_name(path)} is {dtype} {list(shape)}, and {expected}"
            self._fault(error("part-stale", message, one.file))
            self._keep_apart(whole_path, one)

    def _owner(self, group: _RankGroup, tensor: Tensor) -> str | None:
        if tensor.shares_with is None:
            return None
        return _name((*group.prefix, tensor.shares_with))

    def _add_plain(self, group: _RankGroup, path: Path, kept: list[_KeptPart]) -> None:
        """Add what each rank has as a whole: once where it is the same."""
        first = kept[0]
        others = [one for one in kept[1:] if not _are_same(first, one)]
        whole_path = (*group.prefix, *path)
        if any(self._is_cut(first, one) for one in others):
            self._cuts.append(_name(whole_path))
            for one in kept:
                self._keep_apart(whole_path, one)
            return
        made = replace(first.tensor, path=whole_path, shares_with=self._owner(group, first.tensor))
        self.tensors.append(made)
        self._made |= {id(one.tensor): made for one in kept}
        for one in others:
            self._note_step(path, first, one)
            self._keep_apart(whole_path, one)

    def _is_cut(self, first: _KeptPart, other: _KeptPart) -> bool:
        """Tell whether two ranks have slices of one tensor: what is no buffer is the same in all, or cut."""
        a, b = first.tensor, other.tensor
        is_other = a.shape != b.shape or (not self._has_shards and _are_same(first, other) is False)
        return a.role is Role.WEIGHTS and is_other

    def _note_step(self, path: Path, first: _KeptPart, other: _KeptPart) -> None:
        """Note where a rank's optimizer has made another number of steps, by the checksums of these."""
        is_step = path[-1] == "step" and first.tensor.role is Role.OPTIMIZER and first.tensor.size == 1
        if is_step and _are_same(first, other) is False and other.file not in self._stale:
            self._stale.add(other.file)
            message = f"its optimizer has made another number of steps than that of {first.file}"
            self._fault(error("part-stale", message, other.file))

    def _keep_apart(self, path: Path, one: _KeptPart) -> None:
        """Add what a rank has of its own, below its number."""
        role = Role.OTHER if one.tensor.role is Role.WEIGHTS else one.tensor.role
        own = replace(one.tensor, path=(of_rank(one.rank), *path), role=role, shares_with=None, shard=None)
        self._own[one.rank].append(own)
        self._others[id(one.tensor)] = own

    def _distinct(self, path: Path, kept: Sequence[_KeptPart]) -> list[_KeptPart]:
        """Return parts without those that several ranks have alike; copies that differ are told, and kept."""
        found: dict[object, _KeptPart] = {}
        for one in kept:
            assert one.tensor.shard is not None  # the caller chose those
            first = found.setdefault(one.tensor.shard.ranges, one)
            if first is one or _are_same(first, one):
                continue
            if _are_same(first, one) is False and not one.tensor.shard.is_partial:
                message = f"{_name(path)} is a copy of what rank {first.rank:,} has, and differs from it"
                self.findings.append(warning("replica-differs", message, one.file))
                self._note_step(path, first, one)
            self._keep_apart(path, one)
        return list(found.values())

    def _put_together(self, path: Path, shape: tuple[int, ...], kept: Sequence[_KeptPart]) -> Tensor:
        """Return a tensor in one piece or in several; one without values where they don't make it."""
        first = kept[0].tensor
        name = _name(path)
        empty = replace(first, shape=shape, values=None, extent=None, storage=None)
        alone = next(
            (one.tensor for one in kept if one.tensor.shard is not None and one.tensor.shard.is_whole), None
        )
        if alone is not None and len(kept) == 1:
            return alone
        if any(one.tensor.shard is None or one.tensor.shard.ranges is None for one in kept):
            self._fault(error("chunks-wrong", "which part of it a rank has is not said", name))
            return empty
        shards = (one.tensor.shard for one in kept)
        self._pieces += sum(math.prod(len(runs) for runs in one.ranges or ()) for one in shards if one)
        if self._pieces > _MAX_PIECES:
            raise LimitExceeded(self._path, f"tensors in more than {_MAX_PIECES:,} pieces", where=name)
        placed = [(one, box) for one in kept for box in _boxes(one.tensor)]
        chunks = [TensorChunk(start, lengths) for _, (start, _, lengths) in placed]
        wrong = list(check_chunks(self._path, name, MetadataEntry(path, first.dtype, shape, chunks)))
        if wrong:
            # Where a file is missing, that was told, and stands for all tensors.
            self.is_whole = False
            self.findings += wrong if self._ranks_are_here else ()
            return empty
        values = _values(shape, first, placed)
        if values is None:
            self._fault(
                error(
                    "part-not-read",
                    "its elements don't lie in the files as they are: it can't be put together",
                    name,
                )
            )
        return replace(empty, values=values)

    def _fault(self, finding: Finding) -> None:
        self.is_whole = False
        self.findings.append(finding)


def _parts_by_path(group: _RankGroup) -> dict[Path, list[_KeptPart]]:
    """Return what the ranks have under each name, in the order of ranks."""
    found: dict[Path, list[_KeptPart]] = defaultdict(list)
    for rank, (file, part) in group.parts.items():
        stated = {(s.extent.file, s.extent.offset, s.extent.nbytes): s.crc32 for s in part.spans()}
        for tensor in part.tensors:
            place = tensor.storage or tensor.extent
            checksum = None if place is None else stated.get((place.file, place.offset, place.nbytes))
            is_one_of_several = tensor.shard is not None and str(tensor.path[-1]).startswith(ONE_OF_SEVERAL)
            found[tensor.path[:-1] if is_one_of_several else tensor.path].append(
                _KeptPart(file.name, rank, tensor, checksum)
            )
    return found


def _described(tensor: Tensor) -> tuple[str, tuple[int, ...]]:
    """Return the type and the shape of a tensor, or of that of which it is a part."""
    return tensor.dtype.name, tensor.shape if tensor.shard is None else tensor.shard.shape


def _are_same(one: _KeptPart, other: _KeptPart) -> bool | None:
    """Tell whether two tensors are views of the same stored bytes; None where no checksum says it."""
    a, b = one.tensor, other.tensor
    if (a.dtype, a.shape, a.byteorder) != (b.dtype, b.shape, b.byteorder):
        return False
    if a.size == 0:
        return True
    if None in (one.checksum, other.checksum, a.storage, b.storage) or _inside(a) != _inside(b):
        return None
    return one.checksum == other.checksum


def _inside(tensor: Tensor) -> object:
    """Return where in its storage a tensor lies, and how large that is."""
    base, nbytes = (0, 0) if tensor.storage is None else (tensor.storage.offset, tensor.storage.nbytes)
    view = (
        strided_view(tensor.values, tensor.shape, tensor.dtype.itemsize)
        if tensor.values is not None
        else None
    )
    return None if view is None else (view.offset - base, view.strides, nbytes)


def _boxes(tensor: Tensor) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """Yield the boxes that a rank's tensor has: where in the whole, where in it, and how large."""
    assert tensor.shard is not None  # the caller chose those
    assert tensor.shard.ranges is not None
    axes = []
    for runs in tensor.shard.ranges:
        at, axis = 0, []
        for start, end in runs:
            axis.append((start, at, end - start))
            at += end - start
        axes.append(axis)
    for box in product(*axes):
        yield tuple(one[0] for one in box), tuple(one[1] for one in box), tuple(one[2] for one in box)


def _values(shape: tuple[int, ...], like: Tensor, placed: Sequence[tuple[_KeptPart, Any]]) -> Values | None:
    """Return the elements of pieces as one tensor's; None where they can't be read where they lie."""
    width, pieces, storages = like.dtype.itemsize, [], []
    for one, (start, inside, lengths) in placed:
        tensor = one.tensor
        view = None if tensor.values is None else strided_view(tensor.values, tensor.shape, width)
        if view is None or tensor.dtype.bits < 8:
            return None
        skipped = sum(at * stride for at, stride in zip(inside, view.strides, strict=True))
        offset = view.offset + skipped * width
        pieces.append(Tile(start, Strided(view.source, offset, width, lengths, view.strides, view.swap)))
        storages += [tensor.storage] if tensor.storage is not None else []
    known = tuple(dict.fromkeys(storages)) if len(storages) == len(placed) else ()
    return Chunked(shape, width, tuple(pieces), known)


# What is no tensor ------------------------------------------------------------------------------------


def _told_first(groups: Sequence[_RankGroup]) -> Mapping[str, Any]:
    """Return what the first rank of each kind says, all in one."""
    told: dict[str, Any] = {}
    for group in groups:
        first = next(iter(group.parts.values()), None)
        told = {**(first[1].metadata if first is not None else {}), **told}
    return told


def _metadata(groups: Sequence[_RankGroup]) -> dict[str, Any]:
    """Return what the ranks say of what is no tensor, and below its number what one says otherwise."""
    told: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for group in groups:
        parts = {rank: part.metadata for rank, (_, part) in group.parts.items()}
        first: Mapping[str, Any] = next(iter(parts.values()), {})
        whole: object = first
        for rank, said in parts.items():
            whole = _united(whole, said)
            if (other := _differing(first, said)) is not _SAME:
                _below(own, (of_rank(rank), *group.prefix), other)
        if whole:
            _below(told, group.prefix, whole)
    return {**told, **own}


def _differing(first: object, other: object, depth: int = 0) -> object:
    """Return what of plain data is not as in another, in dictionaries."""
    if not isinstance(first, Mapping) or not isinstance(other, Mapping) or depth == _MAX_DEPTH:
        return _SAME if repr(first) == repr(other) else other
    parts = {key: _differing(first[key], value, depth + 1) for key, value in other.items() if key in first}
    return {key: part for key, part in parts.items() if part is not _SAME} or _SAME


class _Same:
    """Stands for what is as the first rank has it."""


_SAME = _Same()


def _pairs(first: object, other: object) -> dict[Any, tuple[object, object]] | None:
    """Return what two containers have under the same keys; None of what is told as one value."""
    if isinstance(first, dict) and isinstance(other, dict):
        return {key: (first[key], value) for key, value in other.items() if key in first}
    if not isinstance(first, list | tuple) or not isinstance(other, list | tuple) or len(first) != len(other):
        return None
    if not any(True for _ in tensors_in(other)):
        return None
    return dict(enumerate(zip(first, other, strict=True)))


def _below(tree: dict[Any, Any], path: Path, content: object) -> None:
    """Put content into dictionaries where a path leads; without a path it is all of them."""
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    if path:
        tree[path[-1]] = content
    elif isinstance(content, Mapping):
        tree.update(content)


def _united(first: object, other: object, depth: int = 0) -> object:
    """Return a tree with what another has besides it; what stands in both is the first one's."""
    if not isinstance(first, dict) or not isinstance(other, dict) or depth == _MAX_DEPTH:
        return first
    pairs = {
        key: _united(value, other[key], depth + 1) if key in other else value for key, value in first.items()
    }
    return _mapped_like(first, pairs | {key: value for key, value in other.items() if key not in first})


def _mapped_like(like: dict[Any, Any], pairs: dict[Any, Any]) -> dict[Any, Any]:
    if not isinstance(like, Mapped):
        return pairs
    return make_mapped(like.kind, pairs, like.state, like.factory)


def _name(path: Path) -> str:
    return ".".join(map(str, path))


def _count(value: object) -> int:
    return value if type(value) is int and value > 0 else 0
