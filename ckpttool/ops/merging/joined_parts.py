"""Joins checkpoints with different tensors into one: shards without an index, or parts of a model."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ckpttool.containers.pickle.pickle_nodes import DictSubclass
from ckpttool.core.checkpoint import Checkpoint, own_names_of
from ckpttool.core.errors import CheckpointError, DamagedCheckpoint, UsageError
from ckpttool.core.tensor import Span, Tensor
from ckpttool.core.text import counted
from ckpttool.formats.content.tree import trees_equal
from ckpttool.formats.content.tree_json import encode_tree
from ckpttool.formats.readings import add_part_name

_SHARD = re.compile(r"(?P<stem>.+)-(?P<part>\d{1,9})-of-(?P<total>\d{1,9})(?P<suffix>\.\w+)", re.DOTALL)
_OF_A_TENSOR_PARALLEL_RANK = re.compile(r"consolidated\.\d+\.\w+|.*(mp|tp)_rank_\d+.*|.*-tp\d+.*", re.DOTALL)
_NUMBER = re.compile(r"\d+")
_STAGES = ("epoch", "step")
_MAX_DEPTH = 100
_SHOWN_CHARACTERS = 60


MergePart = tuple[str, Checkpoint]
"""An open checkpoint, after its path as given."""


# Shards ---------------------------------------------------------------------------------------------------


def shards_of(paths: Sequence[str]) -> list[str] | None:
    """Return files named ``<stem>-<part>-of-<total>`` in order; None for other files, or a set of one."""
    found = [(path, match) for path in paths if (match := _SHARD.fullmatch(os.path.basename(path)))]
    if not found or all(int(match["total"]) == 1 for _, match in found):
        return None
    if len(found) < len(paths):
        other = next(path for path in paths if path not in {one for one, _ in found})
        raise UsageError(f"{other} is not a shard, but {found[0][0]} is")
    sets = {(match["stem"], int(match["total"]), match["suffix"]) for _, match in found}
    if len(sets) > 1:
        names = " and ".join(f"{stem}-*-of-{total}{suffix}" for stem, total, suffix in sorted(sets)[:2])
        raise UsageError(f"shards of {counted(len(sets), 'set')}: {names}")
    numbered: dict[int, str] = {}
    for path, match in found:
        first = numbered.setdefault(int(match["part"]), path)
        if first != path:
            raise DamagedCheckpoint(
                path, f"{first} is the same shard", expected="each once", code="part-twice"
            )
    _require_all(numbered, found[0][1])
    return [numbered[at] for at in sorted(numbered)]


def _require_all(numbered: Mapping[int, str], like: re.Match[str]) -> None:
    """Raise DamagedCheckpoint unless shards are 1 to N of N, or, as some libraries count, 0 to N - 1."""
    # The count is in the name of each shard. A shard 0 shows that they are counted from 0.
    total = int(like["total"])
    first = 0 if 0 in numbered else 1
    strange = [at for at in numbered if not first <= at < first + total]
    if strange:
        found = f"shard {strange[0]:,} of a set of {total:,}"
        raise DamagedCheckpoint(numbered[strange[0]], found, code="shard-extra")
    lacking = (at for at in range(first, first + total) if at not in numbered)
    at = next(lacking, None)
    if at is not None:
        width = len(like["part"])
        name = f"{like['stem']}-{at:0{width}d}-of-{like['total']}{like['suffix']}"
        directory = os.path.dirname(next(iter(numbered.values())))
        found = f"this shard is missing: {len(numbered):,} of {total:,} are given"
        raise DamagedCheckpoint(os.path.join(directory, name), found, code="shard-missing")


# Joining --------------------------------------------------------------------------------------------------


def join_parts(parts: Sequence[MergePart], variant: str | None) -> Checkpoint:
    """Return parts as one checkpoint, which doesn't close them.

    Args:
        parts: Open, intact checkpoints.
        variant: ``sharded`` for the shards of one set; None keeps the first part's.
    """
    first_path, first = parts[0]
    for path, checkpoint in parts[1:]:
        if checkpoint.format != first.format:
            found = f"{checkpoint.format}, but {first_path} is {first.format}"
            raise DamagedCheckpoint(path, found, expected="parts of one format", code="shard-format")
    _require_disjoint(parts)
    _require_one_save(parts)
    if variant is not None:
        _require_types(parts)
    metadata = _unite(parts, lambda one: one.metadata, "metadata")
    native = _unite(parts, lambda one: one.native, "native content")
    tree = None
    checkpoints = [checkpoint for _, checkpoint in parts]
    if any(one.tree is not None for one in checkpoints):
        tree = _unite(parts, _tree_or_tensors, "content")
    staged = [
        one.training
        for one in checkpoints
        if any(getattr(one.training, stage) is not None for stage in _STAGES)
    ]

    def spans() -> Iterator[Span]:
        for path, checkpoint in parts:
            for span in checkpoint.spans():
                yield span._replace(where=f"{os.path.basename(path)}: {span.where}")

    return Checkpoint(
        path=first_path,
        format=first.format,
        variant=variant or first.variant,
        conventions=first.conventions,
        tensors=tuple(tensor for one in checkpoints for tensor in one.tensors),
        files=tuple(entry for one in checkpoints for entry in one.files),
        spans=spans,
        metadata=lambda: metadata,
        training=lambda: staged[0] if staged else first.training,
        layers=lambda: {name: kind for one in checkpoints for name, kind in one.layers.items()},
        own_names=lambda: {name: own for one in checkpoints for name, own in own_names_of(one).items()},
        tree=lambda: tree,
        native=lambda: native,
        producer=first.producer,
        findings=tuple(add_part_name(found, path) for path, one in parts for found in one.findings),
        safety=tuple(add_part_name(found, path) for path, one in parts for found in one.safety),
    )


# Consistency ----------------------------------------------------------------------------------------------


def _require_one_save(parts: Sequence[MergePart]) -> None:
    """Raise DamagedCheckpoint if parts have different epochs or steps."""
    for stage in _STAGES:
        seen: list[tuple[object, str]] = []
        for path, checkpoint in parts:
            number = getattr(checkpoint.training, stage)
            if number is not None:
                seen.append((number, path))
        for number, path in seen[1:]:
            first, where = seen[0]
            if number != first:
                found = f"saved at {stage} {number}, but {where} at {stage} {first}"
                raise DamagedCheckpoint(path, found, expected="parts of one save", code="part-stale")


def _require_disjoint(parts: Sequence[MergePart]) -> None:
    """Raise DamagedCheckpoint if two parts have a tensor of the same name, even an equal one."""
    owners: dict[str, tuple[MergePart, Tensor]] = {}
    for part in parts:
        for tensor in part[1].tensors:
            first, other = owners.setdefault(tensor.name, (part, tensor))
            if first is not part:
                raise _duplicate_error(first, other, part, tensor)


def _duplicate_error(first: MergePart, one: Tensor, second: MergePart, two: Tensor) -> CheckpointError:
    # Slices of one tensor, cut for tensor parallelism, have the same name in all ranks. Without a record of
    # the axis they can't be joined; they are distinguished from duplicates for the message only, by unlike
    # shapes or by the usual names of such files.
    (first_path, owner), (path, checkpoint) = first, second
    doubled = [name for name in checkpoint if name in owner]
    unlike = any(owner[name].shape != checkpoint[name].shape for name in doubled)
    named = all(_OF_A_TENSOR_PARALLEL_RANK.fullmatch(os.path.basename(one)) for one in (first_path, path))
    shapes = f"{list(two.shape)} here and {list(one.shape)} in {first_path}"
    if unlike or named:
        found = f"{shapes}: slices of a tensor-parallel model; no file records the axis of the cut"
        expected = "parts with different tensors"
    else:
        others = f" and {counted(len(doubled) - 1, 'other')}" if len(doubled) > 1 else " too"
        found = f"{first_path} holds it{others}"
        expected = "parts with different tensors; average combines whole checkpoints"
    return DamagedCheckpoint(path, found, expected=expected, where=two.name, code="tensor-twice")


def _require_types(parts: Sequence[MergePart]) -> None:
    """Raise DamagedCheckpoint if shards disagree on the types of tensors with names alike but for numbers."""
    # Nothing ties shards without an index together. Those of a float16 and of a bfloat16 save of the same
    # model fit by names and shapes; but within a save, all tensors of a kind, ``layers.#.weight``, have one
    # type or a few, and any two shards have one of these in common.
    seen: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for path, checkpoint in parts:
        for tensor in checkpoint.tensors:
            seen[_NUMBER.sub("#", tensor.name)][path].add(tensor.dtype.name)
    for pattern, by_path in seen.items():
        (first, types), *others = by_path.items()
        for path, own in others:
            if types.isdisjoint(own):
                found = f"{' and '.join(sorted(own))}, but {' and '.join(sorted(types))} in {first}"
                raise DamagedCheckpoint(
                    path,
                    found,
                    expected="shards of one save, as an index lists them",
                    where=pattern,
                    code="shard-stale",
                )


# Union of trees ---------------------------------------------------------------------------------------


def _unite(parts: Sequence[MergePart], take: Callable[[Checkpoint], object], what: str) -> Any:
    """Return the trees that ``take`` returns for each part, united."""
    whole = take(parts[0][1])
    for path, checkpoint in parts[1:]:
        try:
            whole = unite_trees(whole, take(checkpoint))
        except TreeConflict as conflict:
            found = f"{conflict} ({what}); parts must come from one save"
            raise DamagedCheckpoint(path, found, where=conflict.where, code="part-stale") from conflict
    return whole


def _tree_or_tensors(checkpoint: Checkpoint) -> object:
    """Return the tree of a checkpoint; if it has none, its tensors by name."""
    tree = checkpoint.tree
    return {tensor.name: tensor for tensor in checkpoint.tensors} if tree is None else tree


class TreeConflict(ValueError):
    """Two trees have different values at one path, ``where``."""

    def __init__(self, where: str, message: str) -> None:
        super().__init__(message)
        self.where = where


def unite_trees(one: object, two: object, path: tuple[str, ...] = ()) -> object:
    """Return the union of two trees; dictionaries are united key by key, other values must be equal."""
    if isinstance(one, DictSubclass) and isinstance(two, DictSubclass):
        is_one_class = one.kind == two.kind and _are_equal(one.factory, two.factory)
    else:
        is_one_class = type(one) is type(two)
    if isinstance(one, dict) and isinstance(two, dict) and is_one_class and len(path) < _MAX_DEPTH:
        pairs = {**one}
        for key, value in two.items():
            pairs[key] = unite_trees(one[key], value, (*path, str(key))) if key in one else value
        if isinstance(one, DictSubclass) and isinstance(two, DictSubclass):
            state = two.state if one.state is None else one.state
            if one.state is not None and two.state is not None:
                state = unite_trees(one.state, two.state, (*path, "<state>"))
            return DictSubclass(one.kind, pairs, state, one.factory)
        return pairs
    if not _are_equal(one, two):
        raise TreeConflict(".".join(path), f"{_excerpt(two)}, but {_excerpt(one)} in an earlier part")
    return one


def _are_equal(one: object, two: object) -> bool:
    """Return whether two trees are the same to the last bit: 0 differs from -0.0, and 1 from 1.0."""
    # ``trees_equal`` is False for sets and opaque nodes, which it can't compare; their encodings can be.
    if one is two or trees_equal(one, two):
        return True
    return type(one) is type(two) and json.dumps(encode_tree(one)) == json.dumps(encode_tree(two))


def _excerpt(value: object) -> str:
    text = f"a {type(value).__name__}" if isinstance(value, dict | Tensor) else repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
