"""Which series one would resume from."""

from __future__ import annotations

import pytest

from ckpttool import Granularity
from ckpttool.runs.members.order import group, newest_first, tiers
from tests.support.directories import damaged

FULL = {"granularity": Granularity.FULL, "has_weights": True}
WEIGHTS = {"granularity": Granularity.PARTIAL, "has_weights": True}
OPTIMIZER = {"granularity": Granularity.PARTIAL}
NEITHER = {"granularity": Granularity.LIGHTWEIGHT}
LATER = {"modified": 10**15}


def _first(*entries) -> str:
    return next(iter(newest_first(group(entries)))).name


@pytest.mark.parametrize(
    ("wanted", "other"),
    [
        (("checkpoint-300", FULL), ("training_args.bin", NEITHER)),
        (("checkpoint-300", FULL), ("model.safetensors", WEIGHTS)),
        (("model_epoch_3.pth", WEIGHTS), ("test_embeddings.pt", WEIGHTS)),
        (("model_epoch_3.pth", WEIGHTS), ("history.pkl", NEITHER)),
        (("model_3.pt", WEIGHTS), ("optim_3.pt", OPTIMIZER)),
        (("model.pt", WEIGHTS), ("optim_3.pt", OPTIMIZER)),
        (("optim_3.pt", OPTIMIZER), ("rng_epoch_9.pt", NEITHER)),
        (("model_3.pt", WEIGHTS), ("user_9.pt", WEIGHTS)),
        (("model_3.pt", WEIGHTS), ("model_4_ema.pt", WEIGHTS)),
        (
            ("model.pt", WEIGHTS),
            ("model_epoch_9.pt", {"fault": damaged("cut"), "signature": None}),
        ),
    ],
)
def test_what_there_is_to_resume_from_comes_before_time(entry, wanted, other) -> None:
    one = entry(wanted[0], **wanted[1], signature="one")
    two = entry(other[0], **({"signature": "two"} | other[1] | LATER))
    assert _first(one, two) == _first(two, one) == wanted[0]


def test_series_as_good_as_each_other_compete(entry) -> None:
    entries = [entry("a_epoch_3.pt", **WEIGHTS), entry("b_epoch_5.pt", **WEIGHTS), entry("c.pt", **WEIGHTS)]
    assert [[one.key for one in tier] for tier in tiers(group(entries))] == [
        ["run/a_epoch_*.pt", "run/b_epoch_*.pt"],
        ["run/c.pt"],
    ]
    assert _first(*entries) == "b_epoch_5.pt"
