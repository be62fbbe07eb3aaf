"""What people read of a Fluid checkpoint: whole lines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.support.rendering import lines_of
from tests.support.results import inspection


def fluid_lines(told: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the lines after the size and what it holds, each in two."""
    for line in lines_of(inspection(format="fluid", metadata=lambda: told))[3:]:
        label, value = line[2:17].rstrip(), line[17:]
        yield label, value


def test_trainers_and_tables() -> None:
    told = {
        "trainers": {
            "10": {"epoch_id": 3, "step_id": 40},
            "2": {"epoch_id": 3, "step_id": 41, "lr": "fast\x1b"},
            "3": {},
        },
        "lookup_tables": {
            "emb": {"shards": 2, "rows": 40, "height": 40, "row_shape": [8]},
            "": {"shards": 1, "rows": 1, "height": None, "row_shape": []},
        },
    }
    assert list(fluid_lines(told)) == [
        ("trainer 2", "epoch 3, step 41, lr fast\\x1b"),
        ("trainer 3", "nothing"),
        ("trainer 10", "epoch 3, step 40"),
        ("lookup table", "emb: 40 rows of 8 in 2 shards"),
        ("lookup table", "1 row of 1 in 1 shard"),
    ]


def test_many_trainers_are_counted() -> None:
    told = {"trainers": {str(number): {"epoch_id": number} for number in range(20)}}
    lines = list(fluid_lines(told))
    assert lines[-1] == ("trainers", "… and 12 more (--json has them all)")
    assert len(lines) == 9
