"""What people read of a Paddle Fluid checkpoint beside its tensors: its trainers and its lookup tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckpttool.render.escape import printable
from ckpttool.report import counted

MAX_TRAINERS = 8
"""More lines than that push out what matters; ``--json`` has all."""

_WORDS = {"epoch_id": "epoch", "step_id": "step"}


def fluid_lines(metadata: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield labels and what they tell: how far each trainer came, how much of each table is there."""
    trainers = metadata.get("trainers", {})
    for number in sorted(trainers, key=int)[:MAX_TRAINERS]:
        told = (f"{_WORDS.get(name, name)} {value}" for name, value in trainers[number].items())
        yield f"trainer {number}", printable(", ".join(told)) or "nothing"
    if len(trainers) > MAX_TRAINERS:
        yield "trainers", f"… and {len(trainers) - MAX_TRAINERS:,} more (--json has them all)"
    for name, table in metadata.get("lookup_tables", {}).items():
        row = "×".join(map(str, table["row_shape"])) or "1"
        size = f"{counted(table['rows'], 'row')} of {row} in {counted(table['shards'], 'shard')}"
        yield "lookup table", f"{printable(name)}: {size}" if name else size
