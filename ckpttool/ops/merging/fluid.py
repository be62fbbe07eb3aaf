"""Merges a Paddle Fluid checkpoint: requires all trainers, and joins the shards of lookup tables.

A lookup table is sparse: each parameter server has a tensor of row numbers and one of those rows' values.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import DamagedCheckpoint
from ckpttool.core.tensor import Tensor
from ckpttool.core.text import counted
from ckpttool.formats.content.boxes import Run, join_runs
from ckpttool.formats.paddle.fluid_serial import SHARD
from ckpttool.formats.paddle.parts import HEIGHTS, TABLES, heights_of
from ckpttool.ops.merging.merged_checkpoint import MergedCheckpoint, with_contents

if TYPE_CHECKING:
    import numpy as np

ROWS_AT_ONCE = 1 << 21
"""Limit on the row numbers in memory at once, about 16 MiB of int64 and as much again to sort them."""
_MIXER = 0x9E3779B97F4A7C15
"""2^64 / golden ratio, the multiplier of Fibonacci hashing, which spreads regular row numbers evenly."""


class _PartialTable(NamedTuple):
    """Shard of a lookup table: the rows of one parameter server."""

    name: str
    rows: Tensor
    values: Tensor


def merge_fluid(checkpoint: Checkpoint, sources: tuple[str, ...]) -> MergedCheckpoint:
    """Return a checkpoint with whole lookup tables, as a job with one parameter server writes them."""
    # Trainers are numbered from 0, and their number isn't recorded: a gap shows that one is missing.
    trainers = checkpoint.metadata.get("trainers")
    numbers = {int(number) for number in trainers} if isinstance(trainers, Mapping) else set()
    lacking = next((at for at in range(len(numbers)) if at not in numbers), None)
    if lacking is not None:
        found = f"it is missing, but trainer_{max(numbers)} exists"
        raise DamagedCheckpoint(checkpoint.path, found, where=f"trainer_{lacking}", code="trainer-missing")
    tables = {table: shards for table, shards in _tables(checkpoint).items() if len(shards) > 1}
    if not tables:
        return MergedCheckpoint(checkpoint=checkpoint, sources=sources)
    heights, notes = heights_of(checkpoint.native), []
    joined: dict[tuple[str | int, ...], Tensor] = {}
    parts: set[tuple[str | int, ...]] = set()
    for table, shards in tables.items():
        _require_disjoint(checkpoint.path, shards)
        name = f"{table}_0" if table else "0"
        heights[f"{TABLES[0]}.{name}"] = max(heights.pop(f"{TABLES[0]}.{one.name}", 0) for one in shards)
        count = sum(shard.rows.size for shard in shards)
        row_numbers = [shard.rows for shard in shards]
        # A growing table has memory reserved beyond its rows; only rows with a number are in use.
        values = [replace(shard.values, shape=(shard.rows.size, *shard.values.shape[1:])) for shard in shards]
        shape = (count, *shards[0].values.shape[1:])
        for tensor in (
            _joined_tensor((TABLES[0], name, "rows"), shards[0].rows, (count,), row_numbers),
            _joined_tensor((TABLES[0], name, "values"), shards[0].values, shape, values),
        ):
            joined[tensor.path] = tensor
        parts |= {path for shard in shards for path in (shard.rows.path, shard.values.path)}
        servers = counted(len(shards), "parameter server")
        notes.append(f"{table or 'lookup table'}: {count:,} rows of {servers}")
    metadata = dict(checkpoint.metadata)
    summaries = metadata.get("lookup_tables")
    if isinstance(summaries, Mapping):
        metadata["lookup_tables"] = {
            table: {**summary, "shards": 1} if table in tables else summary
            for table, summary in summaries.items()
        }
    whole = with_contents(
        checkpoint,
        tensors=(*(one for one in checkpoint.tensors if one.path not in parts), *joined.values()),
        metadata=metadata,
        native={**checkpoint.native, HEIGHTS: json.dumps(heights).encode()},
    )
    return MergedCheckpoint(checkpoint=whole, sources=sources, notes=tuple(notes))


def _tables(checkpoint: Checkpoint) -> dict[str, list[_PartialTable]]:
    """Return the shards of lookup tables in order, without tables that have a shard without row numbers."""
    by_path = {tensor.path: tensor for tensor in checkpoint.tensors}
    tables: dict[str, dict[int, _PartialTable]] = defaultdict(dict)
    without_rows = set()
    for path, values in by_path.items():
        match = SHARD.fullmatch(str(path[1])) if path[0] == TABLES[0] and path[2:] == ("values",) else None
        if match is None:
            continue
        table, rows = match["table"] or "", by_path.get((*path[:2], "rows"))
        if rows is None or not values.shape or values.shape[0] < rows.size:
            without_rows.add(table)
        else:
            tables[table][int(match["index"])] = _PartialTable(str(path[1]), rows, values)
    return {
        table: [shards[at] for at in sorted(shards)]
        for table, shards in tables.items()
        if table not in without_rows
    }


def _joined_tensor(
    path: tuple[str, ...], like: Tensor, shape: tuple[int, ...], parts: Sequence[Tensor]
) -> Tensor:
    whole = join_runs(path, shape, like.role, [Run(parts, 0, math.prod(shape))])
    assert whole is not None  # the reader compared the types, and found the values in one piece each
    return whole


# Rows ---------------------------------------------------------------------------------------------------


def _require_disjoint(path: str, shards: Sequence[_PartialTable]) -> None:
    """Raise DamagedCheckpoint if two shards have the same row."""
    import numpy as np

    # Tables may have billions of rows, so their numbers aren't all in memory at once. A pass compares those
    # whose hash modulo the number of passes is the pass: equal numbers are always in the same pass, and each
    # pass reads the numbers again. The hash makes passes equally large, whether servers own ranges of rows
    # or every n-th one.
    total = sum(shard.rows.size for shard in shards)
    passes = max(1, -(-total // ROWS_AT_ONCE))
    for at in range(passes):
        of_shards = [np.concatenate([*_numbers_of_pass(shard.rows, at, passes)]) for shard in shards]
        unique, counts = np.unique(np.concatenate(of_shards), return_counts=True)
        doubled = unique[counts > 1]
        if len(doubled):
            row = int(doubled[0])
            holders = [shard.name for shard, own in zip(shards, of_shards, strict=True) if row in own]
            message = f"row {row:,} is in {' and in '.join(holders)}, like {len(doubled) - 1:,} others"
            raise DamagedCheckpoint(
                path, message, expected="each row once", where=holders[0], code="rows-twice"
            )


def _numbers_of_pass(rows: Tensor, at: int, passes: int) -> Iterator[np.ndarray[Any, Any]]:
    """Yield the row numbers of a shard that belong to a pass, block by block."""
    import numpy as np

    yield np.empty(0, "<i8")
    for block in rows.blocks():
        numbers = np.frombuffer(bytes(block), "<i8")
        mixed = (numbers.astype("<u8") * np.uint64(_MIXER)) >> np.uint64(32)
        yield numbers[mixed % np.uint64(passes) == at]
