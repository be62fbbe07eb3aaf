"""Metrics that a name tells otherwise than the checkpoint itself."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from ckpttool.runs.members.entry import Entry
from ckpttool.runs.metrics.agreement import disagreements


@pytest.mark.parametrize(
    ("name", "inside"),
    [
        ("e-val_loss=0.12.pt", 0.1249),
        ("e-val_loss=0.12.pt", 0.1151),
        ("e-val_loss=1.pt", 1.4),
        ("e-val_loss=91.2.pt", 0.91234),
        ("e-val_loss=nan.pt", math.nan),
        ("e-val_loss=inf.pt", math.inf),
        ("e-val_loss=1e-05.pt", 1.4e-5),
        ("e-other_loss=0.1.pt", 0.9),
    ],
)
def test_rounded_in_the_name(entry: Callable[..., Entry], name: str, inside: float) -> None:
    assert list(disagreements([entry(name, metrics={"val_loss": inside})])) == []


@pytest.mark.parametrize(
    ("name", "inside"),
    [
        ("e-val_loss=0.1.pt", 0.9),
        ("e-val_loss=0.12.pt", 0.1),
        ("e-val_loss=1.00.pt", 1.4),
        ("e-val_loss=0.5.pt", math.nan),
        ("e-val_loss=nan.pt", 0.5),
    ],
)
def test_another_inside(entry: Callable[..., Entry], name: str, inside: float) -> None:
    (told,) = disagreements([entry(name, metrics={"val_loss": inside})])
    what = "val_loss of 1 checkpoint is another inside than in the name, and what is inside counts"
    assert told == f"{what}: run/{name} has {inside:.6g} inside"


def test_several_are_told_once(entry: Callable[..., Entry]) -> None:
    entries = [entry(f"epoch_{number}_loss_0.{number}.pt", loss=0.01) for number in (1, 2, 3)]
    (told,) = disagreements(entries)
    assert told.startswith("loss of 3 checkpoints is another inside")
    assert told.endswith("run/epoch_1_loss_0.1.pt has 0.01 inside")
