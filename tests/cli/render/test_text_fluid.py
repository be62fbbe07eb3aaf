"""What people read of a Fluid checkpoint."""

from __future__ import annotations

from tests.support.golden import Golden
from tests.support.rendering import text_of
from tests.support.results import inspection


def test_trainers_and_tables(golden: Golden) -> None:
    few = {
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
    many = {"trainers": {str(number): {"epoch_id": number} for number in range(20)}}
    golden(
        {
            "few": text_of(inspection(format="fluid", metadata=lambda: few)),
            "many": text_of(inspection(format="fluid", metadata=lambda: many)),
        }
    )
