"""Directories whose checkpoints get other names: all that names them follows, and nothing is lost."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections import Counter
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from ckpttool import undo, verify
from tests.support.frameworks import python_with_frameworks
from tests.support.opening import checkpoint_at, checkpoints_in
from tests.support.renamings import content, is_valid, names, renamed, seal
from tests.support.runs import make_run
from tests.support.state_files import CheckpointState, read_state, write_state
from tests.support.thorough import sampled

# What follows ---------------------------------------------------------------------------------------


def test_pins_notes_and_links_follow(short: Path) -> None:
    (short / "last.pth").symlink_to("model_epoch_10.pth")
    (short / "absolute.pth").symlink_to(short / "model_epoch_9.pth")
    (short / "second.pth").symlink_to("last.pth")
    (short.parent / "beside").symlink_to("run/model_epoch_8.pth")
    (short / "sub").mkdir()
    (short / "sub" / "up").symlink_to("../model_epoch_7.pth")
    (short / "gone").symlink_to("model_epoch_99.pth")
    (short / "best.txt").write_text("  model_epoch_9.pth\r\n")
    (short / "latest").write_text(str(short / "model_epoch_10.pth"))
    (short / "notes.md").write_text("model_epoch_9.pth was good\n")
    (short / ".ckpttool-pins.toml").write_text('# mine\npinned = ["model_epoch_8.pth", "gone.pth"]\n')
    before = content(short)
    done = renamed(short)
    assert [one.path for one in done.problems] == [f"{short}/notes.md"]
    assert (done.planned.warnings, done.planned.update_count) == ((), 7)
    assert [pair[1] for pair in done.renames] == [
        f"{short}/model-e{epoch:04d}.pth" for epoch in (7, 8, 9, 10)
    ]
    assert os.readlink(short / "last.pth") == "model-e0010.pth"
    assert os.readlink(short / "absolute.pth") == str(short / "model-e0009.pth")
    assert os.readlink(short / "second.pth") == "last.pth"
    assert os.readlink(short.parent / "beside") == "run/model-e0008.pth"
    assert os.readlink(short / "sub" / "up") == "../model-e0007.pth"
    assert os.readlink(short / "gone") == "model_epoch_99.pth"
    assert (short / "best.txt").read_bytes() == b"  model-e0009.pth\r\n"
    assert (short / "latest").read_text() == str(short / "model-e0010.pth")
    assert (short / "notes.md").read_text() == "model_epoch_9.pth was good\n"
    assert (short / ".ckpttool-pins.toml").read_text() == '# mine\npinned = ["model-e0008.pth", "gone.pth"]\n'
    assert renamed(short).renames == ()
    assert undo(str(short)).problems == ()
    assert content(short) == before


def test_manifests_follow(short: Path) -> None:
    seal(short / "model_epoch_9.pth")
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in short.glob("*.pth")
    ]
    (short / "SHA256SUMS").write_text("".join(lines))
    before = content(short)
    renamed(short)
    assert is_valid(short / "model-e0009.pth")
    assert is_valid(short / "model-e0010.pth")
    assert (short / "model-e0009.pth.sha256").read_text().endswith("  model-e0009.pth\n")
    digests = json.loads((short / "model-e0009.pth.digests.json").read_text())
    assert list(digests["files"]) == ["model-e0009.pth"]
    assert "model_epoch" not in (short / "SHA256SUMS").read_text()
    undo(str(short))
    assert content(short) == before


def test_a_trainers_run_follows(trainer: Path) -> None:
    state = json.loads((trainer / "checkpoint-10" / "trainer_state.json").read_text())
    (trainer / "trainer_state.json").write_text(json.dumps(state, indent=1))
    seal(trainer / "checkpoint-6")
    times = {path.name: path.stat().st_mtime_ns for path in (trainer / "checkpoint-6").iterdir()}
    for step in (2, 4, 6, 8, 10):
        os.utime(trainer / f"checkpoint-{step}", ns=(step, step * 10**9))
    before = content(trainer)
    done = renamed(trainer, "{run}-s{step:06d}")
    assert done.problems == ()
    assert "save_total_limit deletes it" in done.planned.warnings[0]
    assert "finds only checkpoint-<step>" in done.planned.warnings[1]
    for step in (2, 4, 6, 8, 10):
        assert (trainer / f"checkpoint-s{step:06d}").stat().st_mtime_ns == step * 10**9
    assert [name for name in names(trainer) if name.startswith("checkpoint")] == [
        f"checkpoint-s{step:06d}{end}"
        for step in (2, 4, 6, 8, 10)
        for end in (("", ".digests.json", ".sha256") if step == 6 else ("",))
    ]  # fmt: skip
    for place in (trainer, *trainer.glob("checkpoint-s??????")):
        told = json.loads((place / "trainer_state.json").read_text())
        assert told["best_model_checkpoint"] == "trainer/checkpoint-s000004"
        assert told | {"global_step": 0} == state | {
            "best_model_checkpoint": "trainer/checkpoint-s000004",
            "global_step": 0,
        }
    assert is_valid(trainer / "checkpoint-s000006")
    now = {path.name: path.stat().st_mtime_ns for path in (trainer / "checkpoint-s000006").iterdir()}
    assert now == times
    undo(str(trainer))
    assert content(trainer) == before
    for step in (2, 4, 6, 8, 10):
        assert (trainer / f"checkpoint-{step}").stat().st_mtime_ns == step * 10**9


def test_names_that_no_trainer_cleans_up(trainer: Path) -> None:
    (told,) = renamed(trainer, "mine-s{step}", dry_run=True).planned.warnings[:1]
    assert "finds only checkpoint-<step>" in told


def test_names_that_the_trainer_knows_are_no_doubt(trainer: Path) -> None:
    shutil.move(trainer / "checkpoint-8", trainer / "save-8")
    done = renamed(trainer, "checkpoint-{step}")
    assert done.renames == ()
    assert [one.message for one in done.planned.plan.refused] == [
        "its name would be 'checkpoint-8', which means a save of the Hugging Face Trainer"
    ]


def test_a_set_that_is_alone_in_a_directory_is_renamed_as_beside_others(sharded: Path) -> None:
    for path in sharded.iterdir():
        if not path.name.startswith("epoch_4"):
            path.unlink()
    assert len(renamed(sharded, "run-e{epoch:04d}").renames) == 1
    assert {path.name.partition("-0000")[0] for path in sharded.glob("*-of-*")} == {"run-e0004"}
    assert verify(sharded / "run-e0004.safetensors.index.json").is_valid


def test_sharded_sets_follow(sharded: Path) -> None:
    before = content(sharded)
    modes = {path.name: (path.stat().st_mode, path.stat().st_mtime_ns) for path in sharded.iterdir()}
    told = json.loads((sharded / "epoch_3.safetensors.index.json").read_text())
    done = renamed(sharded, "set-e{epoch:02d}")
    assert (len(done.renames), done.problems) == (4, ())
    for epoch in range(1, 5):
        index = sharded / f"set-e{epoch:02d}.safetensors.index.json"
        assert is_valid(index)
        old = f"epoch_{epoch}.safetensors.index.json"
        assert (index.stat().st_mode, index.stat().st_mtime_ns) == modes[old]
    now = json.loads((sharded / "set-e03.safetensors.index.json").read_text())
    assert now["metadata"] == told["metadata"]
    assert now["weight_map"] == {
        key: name.replace("epoch_3", "set-e03") for key, name in told["weight_map"].items()
    }
    assert not [name for name in names(sharded) if name.startswith("epoch")]
    undo(str(sharded))
    assert content(sharded) == before


def test_sets_of_keras_follow(files: Path, tmp_path: Path) -> None:
    source = next((files / "keras").rglob("*.weights.json"))
    stem = source.name.removesuffix(".weights.json")
    for epoch in (1, 2):
        for path in source.parent.glob(f"{stem}_?????.weights.h5"):
            shutil.copy(path, tmp_path / path.name.replace(stem, f"w_epoch_{epoch}"))
        text = source.read_text().replace(f"{stem}_0", f"w_epoch_{epoch}_0")
        (tmp_path / f"w_epoch_{epoch}.weights.json").write_text(text)
    done = renamed(tmp_path)
    assert [os.path.basename(new) for _, new in done.renames] == [
        "w-e0001.weights.json",
        "w-e0002.weights.json",
    ]
    assert is_valid(tmp_path / "w-e0002.weights.json")
    assert "epoch_2" not in (tmp_path / "w-e0002.weights.json").read_text()


@pytest.fixture
def managed(files: Path, tmp_path: Path) -> Path:
    """Return the directory of a manager with ten checkpoints."""
    return Path(shutil.copytree(files / "tensorflow" / "manager", tmp_path / "managed"))


@pytest.mark.parametrize("kind", ["relative", "absolute", "stale"])
def test_state_files_follow(managed: Path, kind: str) -> None:
    was = read_state(managed)
    front = {"relative": "", "absolute": f"{managed}/", "stale": "/gone/run/"}[kind]
    paths = tuple(front + path for path in was.paths)
    write_state(managed, CheckpointState(front + was.latest, paths, was.timestamps, was.preserved))
    before = content(managed)
    done = renamed(managed, "{run}-n{number:04d}")
    assert done.problems == ()
    state = read_state(managed)
    told = front if kind != "stale" else ""
    assert state.paths == tuple(f"{told}ckpt-n{int(path.rpartition('-')[2]):04d}" for path in was.paths)
    assert (state.latest, state.timestamps, state.preserved) == (
        state.paths[-1],
        was.timestamps,
        was.preserved,
    )
    assert all((managed / f"{os.path.basename(path)}.index").exists() for path in state.paths)
    undo(str(managed))
    assert content(managed) == before


def test_a_manager_will_not_write_over_new_names(managed: Path) -> None:
    before = content(managed)
    refused = renamed(managed, "ckpt-{number:d}{number}").planned.plan.refused
    assert len(refused) == 10
    assert refused[0].message.endswith(
        "'ckpt-11', which TensorFlow's manager may overwrite: it numbers its saves ckpt-<n>"
    )
    assert content(managed) == before
    assert renamed(managed, "ckpt-{number}").problems == ()
    assert renamed(managed, "other-{number}").problems == ()
    assert len(renamed(managed, "ckpt-{number}").planned.plan.refused) == 10
    assert renamed(managed, "ckpt-{number:03d}").problems == ()


def test_a_state_file_that_cannot_be_read_keeps_the_names(managed: Path) -> None:
    (managed / "checkpoint").write_text('model_checkpoint_path: "ckpt-1\n')
    before = content(managed)
    done = renamed(managed, "{run}-n{number:04d}")
    assert (done.renames, content(managed)) == ((), before)
    assert {one.message for one in done.problems} == {
        f"left alone: {managed}/checkpoint names it, and can't be updated: unexpected text at character 23"
    }


TENSORFLOW = """
import os, sys
import tensorflow as tf
from ckpttool import rename

run = sys.argv[1]
value, step = tf.Variable(0.0), tf.Variable(0, dtype=tf.int64)
checkpoint = tf.train.Checkpoint(value=value, step=step)
manager = tf.train.CheckpointManager(checkpoint, run, 3, step_counter=step)
for number in range(1, 5):
    value.assign(number / 4)
    step.assign(number * 10)
    manager.save()
rename(run, template="{run}-s{step:08d}")
latest = tf.train.latest_checkpoint(run)
assert latest == os.path.join(run, "ckpt-s00000040")
value.assign(-1)
checkpoint.restore(latest).assert_consumed()
assert (value.numpy(), step.numpy()) == (1.0, 40)
again = tf.train.CheckpointManager(checkpoint, run, 3, step_counter=step)
assert [os.path.basename(path) for path in again.checkpoints] == [f"ckpt-s000000{n}0" for n in (2, 3, 4)]
again.save()
assert not os.path.exists(os.path.join(run, "ckpt-s00000020.index"))
assert tf.train.latest_checkpoint(run) == again.latest_checkpoint
"""


@pytest.mark.framework
def test_tensorflow_restores_what_it_calls_the_latest(tmp_path: Path) -> None:
    python_with_frameworks("-c", TENSORFLOW, tmp_path / "run")


@pytest.mark.framework
def test_transformers_loads_renamed_shards(tmp_path: Path) -> None:
    import torch
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    run = tmp_path / "run"
    whole = {}
    for epoch in (1, 2):
        model = BertModel(config)
        model.save_pretrained(run / f"bert_epoch_{epoch}", max_shard_size="40KB")
        whole[epoch] = {name: value.clone() for name, value in model.state_dict().items()}
    done = renamed(run)
    assert [os.path.basename(new) for _, new in done.renames] == ["bert-e0001", "bert-e0002"]
    again = BertModel.from_pretrained(run / "bert-e0002").state_dict()
    assert all(torch.equal(again[name], value) for name, value in whole[2].items())
    # Their shards, named after the set in one directory, and back under the name that transformers wants.
    flat = tmp_path / "flat"
    flat.mkdir()
    for epoch in (1, 2):
        source = run / f"bert-e000{epoch}"
        for path in source.glob("model-*.safetensors"):
            shutil.copy(path, flat / path.name.replace("model", f"b_epoch_{epoch}"))
        text = (source / "model.safetensors.index.json").read_text().replace('"model-', f'"b_epoch_{epoch}-')
        (flat / f"b_epoch_{epoch}.safetensors.index.json").write_text(text)
    renamed(flat, "{run}-e{epoch:03d}")
    (flat / "b-e001.safetensors.index.json").rename(flat / "model.safetensors.index.json")
    shutil.copy(run / "bert-e0001" / "config.json", flat)
    again = BertModel.from_pretrained(flat).state_dict()
    assert all(torch.equal(again[name], value) for name, value in whole[1].items())


@pytest.mark.parametrize(
    "kind",
    sampled(
        [
            "tensorflow",
            "deepspeed",
            "safetensors",
            "paddle",
            "torch-dcp",
            "keras",
            "savedmodel",
            "torchscript",
        ],
        4,
    ),
)
def test_every_format_stays_valid_and_comes_back(files: Path, tmp_path: Path, kind: str) -> None:
    ignored = shutil.ignore_patterns("*.expected.json")
    run = Path(shutil.copytree(files / kind, tmp_path / kind, ignore=ignored))
    before = content(run)
    units = [unit for unit in checkpoints_in(run) if verify(unit, only=["structure", "checksum"]).is_valid]
    done = renamed(run, "r-{name}-q", recursive=True)
    assert len(done.renames) == len(units) > 0
    for _, new in done.renames:
        unit = checkpoint_at(new)
        assert unit is not None and verify(unit, only=["structure", "checksum"]).is_valid, new
    assert undo(str(run), recursive=True).problems == ()
    assert content(run) == before


def test_paths_into_a_run_that_was_renamed_before_follow_its_own_names(tmp_path: Path) -> None:
    for run, day in (("a", "20240131"), ("b", "20240229")):
        for path in list(make_run(tmp_path / run, 1, 2).iterdir()):
            seconds = datetime.strptime(day, "%Y%m%d").timestamp()
            os.utime(path, (seconds, seconds))
    (tmp_path / "b" / "from.json").write_text('{"init": "../a/model_epoch_1.pth"}')
    done = renamed(tmp_path, "{name}-{date}", recursive=True)
    assert done.failed == done.stale == {}
    (first,) = (new for old, new in done.renames if old == f"{tmp_path}/a/model_epoch_1.pth")
    text = (tmp_path / "b" / "from.json").read_text()
    assert text == json.dumps({"init": f"../a/{os.path.basename(first)}"})


def test_twice_as_many_runs_are_twice_the_work(tmp_path: Path) -> None:
    def calls(runs: int) -> Counter[str]:
        tree = tmp_path / str(runs)
        for number in range(runs):
            run = make_run(tree / f"{number:02}", 1)
            (run / "best.txt").write_text("model_epoch_1.pth")
            (run / "last.pth").symlink_to("model_epoch_1.pth")
        made: Counter[str] = Counter()

        def count(_: FrameType, event: str, function: Any) -> None:
            made[function.__name__ if event == "c_call" else event] += 1

        sys.setprofile(count)
        try:
            done = renamed(tree, recursive=True)
        finally:
            sys.setprofile(None)
        assert len(done.renames) == runs
        return made

    calls(1)  # imports, and what is kept from then on
    few, many = calls(6), calls(12)
    ratios = {name: many[name] / few[name] for name in ("call", "scandir", "lstat", "stat", "readlink")}
    assert {name: ratio for name, ratio in ratios.items() if ratio > 2.1} == {}
