"""Checkpoints inside others: they are told, and nothing goes with what is around them."""

from __future__ import annotations

import shutil
from pathlib import Path

from ckpttool import Policy
from tests.support.retention import Pruned, dry_run, kept_reasons


def _planned(directory: Path, **told: object) -> Pruned:
    return dry_run(directory, **{"policy": Policy(keep_last=2), "depth": "quick", **told})


def _nested(trainer: Path, source: Path, *names: str) -> None:
    inside = trainer / "checkpoint-2" / "best"
    inside.mkdir()
    for name in names:
        shutil.copy(source, inside / name)


def test_another_frameworks_are_told_and_stay(trainer: Path, files: Path) -> None:
    _nested(trainer, next(files.rglob("*.keras")), "a.keras", "b.keras")
    for recursive in (False, True):
        reasons = kept_reasons(_planned(trainer, recursive=recursive))["checkpoint-2"]
        assert "holds 2 other checkpoints: best/a.keras, …" in reasons


def test_a_trainers_own_inside_is_told(trainer: Path) -> None:
    shutil.copytree(trainer / "checkpoint-6", trainer / "checkpoint-2" / "best")
    assert "holds 1 other checkpoint: best" in kept_reasons(_planned(trainer))["checkpoint-2"]


def test_parts_of_it_are_none(trainer: Path, files: Path) -> None:
    _nested(trainer, files / "pytorch" / "guide.pth", "pytorch_model.bin")
    assert "checkpoint-2" not in kept_reasons(_planned(trainer))


def test_one_that_hides_another_is_told(trainer: Path) -> None:
    """With a checkpoint-<n> inside it is a run's own directory, as a Trainer's final model lies in one."""
    shutil.copytree(trainer / "checkpoint-6", trainer / "checkpoint-2" / "checkpoint-12")
    planned = _planned(trainer)
    told = "not part of the series: it contains 1 other checkpoint; treated as a separate run"
    assert f"{trainer}/checkpoint-2: {told}" in planned.warnings
    assert all("checkpoint-2" not in entry.path for entry in planned.plan.removals)
    assert not any("checkpoint-2" in one for one in _planned(trainer, exclude=["checkpoint-2"]).warnings)
