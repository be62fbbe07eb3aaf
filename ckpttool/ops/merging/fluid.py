"""A Paddle Fluid checkpoint, whole: all trainers, and each lookup table from the rows of all its servers."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import DamagedCheckpoint
from ckpttool.formats.content.chunks import JoinedRuns
from ckpttool.formats.paddle.fluid_parts import HEIGHTS, TABLES, heights_of
from ckpttool.formats.paddle.fluid_serial import SHARD
from ckpttool.ops.merging.merged_checkpoint import MergedCheckpoint, with_contents
from ckpttool.report import counted
from ckpttool.tensor import Tensor
from ckpttool.wire.readable import Contiguous

if TYPE_CHECKING:
    import numpy as np

    Integers = np.ndarray[Any, np.dtype[np.int64]]

ROWS_AT_ONCE = 1 << 21
"""How many row numbers are compared with each other at once."""
_MIXER = 0x9E3779B97F4A7C15
"""Fibonacci hashing: row numbers that follow any rule are spread evenly."""


class _TableShard(NamedTuple):
    """The rows of a lookup table that one parameter server kept."""

    name: str
    rows: Tensor
    values: Tensor


def merge_fluid(checkpoint: Checkpoint, sources: tuple[str, ...]) -> MergedCheckpoint:
    """Return a checkpoint with whole lookup tables, as a job with one parameter server writes them."""
    _require_trainers(checkpoint)
    tables = {table: shards for table, shards in _tables(checkpoint).items() if len(shards) > 1}
    if not tables:
        return MergedCheckpoint(checkpoint=checkpoint, sources=sources)
    heights, notes = heights_of(checkpoint.native), []
    made: dict[tuple[str | int, ...], Tensor] = {}
    gone = {shard.rows.path for shards in tables.values() for shard in shards}
    gone |= {shard.values.path for shards in tables.values() for shard in shards}
    for table, shards in tables.items():
        _require_disjoint(checkpoint.path, shards)
        name = f"{table}_0" if table else "0"
        height = max(heights.pop(f"{TABLES[0]}.{shard.name}", 0) for shard in shards)
        heights[f"{TABLES[0]}.{name}"] = height
        for tensor in _joined_table(name, shards):
            made[tensor.path] = tensor
        rows = sum(shard.rows.size for shard in shards)
        notes.append(
            f"{table or 'lookup table'}: {rows:,} rows of {counted(len(shards), 'parameter server')}"
        )
    whole = with_contents(
        checkpoint,
        tensors=(*(one for one in checkpoint.tensors if one.path not in gone), *made.values()),
        metadata=_metadata(checkpoint.metadata, tables),
        native={**checkpoint.native, HEIGHTS: json.dumps(heights).encode()},
    )
    return MergedCheckpoint(checkpoint=whole, sources=sources, notes=tuple(notes))


def _require_trainers(checkpoint: Checkpoint) -> None:
    """Require that no trainer is missing before another: they are numbered from 0."""
    told = checkpoint.metadata.get("trainers")
    numbers = {int(number) for number in told} if isinstance(told, Mapping) else set()
    lacking = next((at for at in range(len(numbers)) if at not in numbers), None)
    if lacking is not None:
        found = f"there is none, and trainer_{max(numbers)} is there"
        where = f"trainer_{lacking}"
        raise DamagedCheckpoint(checkpoint.path, found, where=where, code="trainer-missing")


def _tables(checkpoint: Checkpoint) -> dict[str, list[_TableShard]]:
    """Return the shards of each lookup table whose shards all say which rows they have, in their order."""
    by_path = {tensor.path: tensor for tensor in checkpoint.tensors}
    found: dict[str, dict[int, _TableShard]] = defaultdict(dict)
    bare = set()
    for path, values in by_path.items():
        match = SHARD.fullmatch(str(path[1])) if path[0] == TABLES[0] and path[2:] == ("values",) else None
        if match is None:
            continue
        table, rows = match["table"] or "", by_path.get((*path[:2], "rows"))
        if rows is None or not values.shape or values.shape[0] < rows.size:
            bare.add(table)
        else:
            found[table][int(match["index"])] = _TableShard(str(path[1]), rows, values)
    return {
        table: [shards[at] for at in sorted(shards)] for table, shards in found.items() if table not in bare
    }


def _joined_table(name: str, shards: Sequence[_TableShard]) -> Iterator[Tensor]:
    """Yield the numbers and the values of all rows, server after server."""
    count = sum(shard.rows.size for shard in shards)
    first = shards[0]
    yield _joined_tensor((TABLES[0], name, "rows"), first.rows, (count,), [shard.rows for shard in shards])
    used = [_used(shard) for shard in shards]
    shape = (count, *first.values.shape[1:])
    yield _joined_tensor((TABLES[0], name, "values"), first.values, shape, used)


def _used(shard: _TableShard) -> Tensor:
    """Return the values of the rows that have a number; a table that grows has room for more."""
    return replace(shard.values, shape=(shard.rows.size, *shard.values.shape[1:]))


def _joined_tensor(
    path: tuple[str, ...], like: Tensor, shape: tuple[int, ...], parts: Sequence[Tensor]
) -> Tensor:
    runs = tuple(
        part.values._replace(nbytes=part.dtype.nbytes(math.prod(part.shape)))
        for part in parts
        if isinstance(part.values, Contiguous)
    )
    storages = tuple(part.storage for part in parts if part.storage is not None)
    return Tensor(path, like.dtype, shape, like.role, JoinedRuns(runs, storages))


def _metadata(told: Mapping[str, object], tables: Mapping[str, Sequence[_TableShard]]) -> dict[str, object]:
    kept = dict(told)
    summaries = kept.get("lookup_tables")
    if isinstance(summaries, Mapping):
        kept["lookup_tables"] = {
            table: {**summary, "shards": 1} if table in tables else summary
            for table, summary in summaries.items()
        }
    return kept


# Rows ---------------------------------------------------------------------------------------------------


def _require_disjoint(path: str, shards: Sequence[_TableShard]) -> None:
    """Require that no row lies in two shards, however many there are: some of them are compared at a time."""
    import numpy as np

    total = sum(shard.rows.size for shard in shards)
    passes = max(1, -(-total // ROWS_AT_ONCE))
    for at in range(passes):
        found = [_rows_of(shard, at, passes) for shard in shards]
        numbers, counts = np.unique(np.concatenate(found), return_counts=True)
        doubled = numbers[counts > 1]
        if len(doubled):
            row = int(doubled[0])
            holders = [shard.name for shard, own in zip(shards, found, strict=True) if row in own]
            message = f"row {row:,} is in {' and in '.join(holders)}, like {len(doubled) - 1:,} others"
            raise DamagedCheckpoint(
                path, message, expected="each row once", where=holders[0], code="rows-twice"
            )


def _rows_of(shard: _TableShard, at: int, passes: int) -> Integers:
    """Return those row numbers of a shard that are compared in a pass."""
    import numpy as np

    found = []
    for block in shard.rows.blocks():
        own = np.frombuffer(bytes(block), "<i8")
        mixed = (own.astype("<u8") * np.uint64(_MIXER)) >> np.uint64(32)
        found.append(own[mixed % np.uint64(passes) == at])
    return np.concatenate(found) if found else np.empty(0, "<i8")
