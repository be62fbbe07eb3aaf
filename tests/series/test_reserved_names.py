"""Names that another program gives or looks for: which stay, and what is said of the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from ckpttool.formats.hf_trainer import HfTrainer
from ckpttool.formats.interface import Unit
from ckpttool.series.files import Contents, Fingerprint
from ckpttool.series.members.entry import Entry
from ckpttool.series.renaming.reserved_names import lost_lookups, reason_to_leave

Make = Callable[..., Entry]


def below(entry: Entry, directory: str, *files: str) -> Entry:
    """Return an entry that is a directory in another."""
    found = tuple(Fingerprint(f"{entry.name}/{name}", 1, number, 9, 0) for number, name in enumerate(files))
    unit = Unit(f"{directory}/{entry.name}", (entry.name,), entry.unit.format)
    return replace(entry, unit=unit, path=unit.path, contents=Contents(found, (entry.name,)))


@pytest.mark.parametrize("name", ["latest.weights.h5", "latest.weights.h5.bkp"])
def test_what_keras_goes_on_from_keeps_its_name(entry: Make, name: str) -> None:
    one = entry(name, format="keras-weights")
    assert "BackupAndRestore" in (reason_to_leave(one, [name, "training_metadata.json"]) or "")
    assert reason_to_leave(one, [name, "metadata.json"]) is None
    assert reason_to_leave(entry("w.01.weights.h5"), ["training_metadata.json"]) is None


def test_what_accelerate_counts_keeps_its_name(entry: Make) -> None:
    files = ("model.safetensors", "random_states_0.pkl")
    for directory, name, inside, is_left in [
        ("a/checkpoints", "checkpoint_3", files, True),
        ("a/checkpoints", "checkpoint_3", files[:1], False),
        ("a/checkpoints", "step_30", files, False),
        ("a/saves", "checkpoint_3", files, False),
    ]:
        why = reason_to_leave(below(entry(name, format="safetensors"), directory, *inside), [])
        assert (why or "").startswith("Accelerate") == is_left


def test_what_a_trainer_deletes_is_told(entry: Make) -> None:
    saves = [
        replace(one, unit=replace(one.unit, format=HfTrainer()))
        for one in (entry("checkpoint-2"), entry("checkpoint-4"))
    ]

    def lost(*names: str) -> list[str]:
        return list(lost_lookups(list(zip(saves, names, strict=True))))

    deleted, found = lost("checkpoint-s2", "x-4")
    assert deleted.startswith("run/checkpoint-2: ") and "save_total_limit deletes it" in deleted
    assert found.startswith("run/checkpoint-2 (and 1 more): ") and "resume_from_checkpoint" in found
    assert [one.partition(":")[0] for one in lost("a-2", "a-4")] == ["run/checkpoint-2 (and 1 more)"]
    assert lost("checkpoint-2", "checkpoint-4") == []


def test_what_lightning_looks_for_is_told(entry: Make) -> None:
    (lost,) = lost_lookups([(entry("last.ckpt"), "run-e3.ckpt")])
    assert (
        lost == "run/last.ckpt: Lightning's ckpt_path='last' won't find it any more: it looks for last.ckpt"
    )
