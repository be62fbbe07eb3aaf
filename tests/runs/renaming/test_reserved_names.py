"""Names that another program gives or looks for: which stay, and what is said of the others."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.renamings import names, renamed
from tests.support.saves import save


@pytest.mark.parametrize(
    ("name", "beside", "is_left"),
    [
        ("latest.weights.h5", "training_metadata.json", True),
        ("latest.weights.h5.bkp", "training_metadata.json", True),
        ("latest.weights.h5", "metadata.json", False),
        ("w.01.weights.h5", "training_metadata.json", False),
    ],
)
def test_what_keras_goes_on_from_keeps_its_name(
    tmp_path: Path, name: str, beside: str, is_left: bool
) -> None:
    save(tmp_path / name, epoch=1)
    (tmp_path / beside).write_text("{}")
    done = renamed(tmp_path, "net-{epoch}")
    assert (name in names(tmp_path)) == is_left
    assert any("BackupAndRestore" in problem.message for problem in done.problems) == is_left


@pytest.mark.parametrize(
    ("place", "count", "is_left"),
    [
        ("checkpoints/checkpoint_3", 2, True),
        ("checkpoints/checkpoint_3", 1, False),
        ("checkpoints/step_30", 2, False),
        ("saves/checkpoint_3", 2, False),
    ],
)
def test_what_accelerate_counts_keeps_its_name(
    files: Path, tmp_path: Path, place: str, count: int, is_left: bool
) -> None:
    one = tmp_path / place
    one.mkdir(parents=True)
    shutil.copy(files / "safetensors" / "metadata.safetensors", one / "model.safetensors")
    if count == 2:
        (one / "random_states_0.pkl").write_bytes(b"\x80\x04}\x94.")
    done = renamed(one.parent, "net-{name}")
    assert one.exists() == is_left
    assert any("Accelerate sorts the names next to it" in one.message for one in done.problems) == is_left


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("checkpoint-s{step}", ["save_total_limit deletes it", "resume_from_checkpoint"]),
        ("x-{step}", ["resume_from_checkpoint"]),
        ("checkpoint-{step}", []),
    ],
)
def test_what_a_trainer_looks_for_and_deletes_is_told(trainer: Path, template: str, told: list[str]) -> None:
    for step in (6, 8, 10):
        shutil.rmtree(trainer / f"checkpoint-{step}")
    warnings = renamed(trainer, template, dry_run=True).planned.warnings
    lost = [one for one in warnings if one.startswith(f"{trainer}/checkpoint-2 (and 1 more): ")]
    assert [next(words for words in told if words in one) for one in lost] == told


def test_what_lightning_looks_for_is_told(tmp_path: Path) -> None:
    path = save(tmp_path / "last.ckpt", epoch=3)
    told = f"{path}: Lightning's ckpt_path='last' will no longer find it: it looks for last.ckpt"
    assert told in renamed(tmp_path, "run-e{epoch}", dry_run=True).planned.warnings
