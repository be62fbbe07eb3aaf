"""Names that another program gives or looks for: which stay, and what is said of the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpttool.runs.renaming.reserved_names import lost_lookups, reason_to_leave
from tests.support.directories import directory_entry, entry_at, make_entry


@pytest.mark.parametrize("name", ["latest.weights.h5", "latest.weights.h5.bkp"])
def test_what_keras_goes_on_from_keeps_its_name(name: str) -> None:
    one = make_entry(name, format="keras-weights")
    assert "BackupAndRestore" in (reason_to_leave(one, [name, "training_metadata.json"]) or "")
    assert reason_to_leave(one, [name, "metadata.json"]) is None
    assert reason_to_leave(make_entry("w.01.weights.h5"), ["training_metadata.json"]) is None


def test_what_accelerate_counts_keeps_its_name() -> None:
    files = ("model.safetensors", "random_states_0.pkl")
    for directory, name, inside, is_left in [
        ("a/checkpoints", "checkpoint_3", files, True),
        ("a/checkpoints", "checkpoint_3", files[:1], False),
        ("a/checkpoints", "step_30", files, False),
        ("a/saves", "checkpoint_3", files, False),
    ]:
        entry = directory_entry(name, *inside, directory=directory, format="safetensors")
        why = reason_to_leave(entry, [])
        assert (why or "").startswith("Accelerate") == is_left


def test_what_a_trainer_deletes_is_told(trainer: Path) -> None:
    saves = [entry_at(trainer / "checkpoint-2"), entry_at(trainer / "checkpoint-4")]

    def lost(*names: str) -> list[str]:
        return list(lost_lookups(list(zip(saves, names, strict=True))))

    deleted, found = lost("checkpoint-s2", "x-4")
    assert deleted.startswith(f"{trainer}/checkpoint-2: ") and "save_total_limit deletes it" in deleted
    assert found.startswith(f"{trainer}/checkpoint-2 (and 1 more): ") and "resume_from_checkpoint" in found
    assert [one.partition(":")[0] for one in lost("a-2", "a-4")] == [f"{trainer}/checkpoint-2 (and 1 more)"]
    assert lost("checkpoint-2", "checkpoint-4") == []


def test_what_lightning_looks_for_is_told() -> None:
    (lost,) = lost_lookups([(make_entry("last.ckpt"), "run-e3.ckpt")])
    assert (
        lost == "run/last.ckpt: Lightning's ckpt_path='last' won't find it any more: it looks for last.ckpt"
    )
