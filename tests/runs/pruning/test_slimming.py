"""``--full N``: the newest stay whole, older ones lose what only resuming needs, and nothing else."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import getstate
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckpttool
from ckpttool import AccessDenied, Policy, UsageError, list_checkpoints, open_checkpoint, prune, undo, verify
from ckpttool.runs.entry import StatePart
from tests.support.changes import file_bytes
from tests.support.directories import Entry, file_of, make_entry
from tests.support.faults import fill_disk
from tests.support.frameworks import python_with_frameworks
from tests.support.retention import dry_run, plan_of, why_in

RULES = {"keep_last": 4, "keep_every_epochs": 5, "keep_daily": 3}


@pytest.fixture
def epochs(series: Path) -> Path:
    """Return a directory of ten epochs, each of its own time."""
    for file in series.glob("*.pth"):
        when = 1_700_000_000 + 60 * int(file.stem.split("_")[-1])
        os.utime(file, (when, when))
    return series


def _slim_names(pruned: Any) -> list[str]:
    return [entry.name for entry in pruned.plan.slimmed]


def _times(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in directory.rglob("*") if path.is_file()}


def _names(*epochs: int) -> list[str]:
    return [f"model_epoch_{epoch}.pth" for epoch in epochs]


# The plan: pure -------------------------------------------------------------------------------------


@st.composite
def _saves(draw: st.DrawFn) -> list[Entry]:
    numbers = draw(st.lists(st.integers(1, 40), min_size=1, max_size=12, unique=True))
    names = [f"a_epoch_{number}.pth" for number in numbers]
    return [
        make_entry(
            name,
            has_weights=True,
            state=StatePart(draw(st.sampled_from([0, 9, 500]))),
            files=[file_of(name, size=1000, modified=draw(st.integers(0, 50)) * 10**11)],
        )
        for name in names
    ]


def _plan(entries: Sequence[Entry], full: int, rules: Sequence[str] = (), **protections: Any) -> Any:
    return plan_of(entries, Policy(full=full, **{name: RULES[name] for name in rules}), **protections)


def _slim(entries: Sequence[Entry], full: int, rules: Sequence[str] = (), **protections: Any) -> set[str]:
    return {entry.path for entry in _plan(entries, full, rules, **protections).slimmed}


_CHOSEN = st.lists(st.sampled_from(sorted(RULES)), unique=True)


@given(_saves(), st.integers(1, 5), _CHOSEN)
def test_the_newest_with_training_state_stay_whole(entries, full, rules) -> None:
    made = _plan(entries, full, rules)
    (group,) = made.groups
    order = sorted((one for one in entries if one.holds_state), key=lambda one: -(one.epoch or 0))
    kept = {one.entry.path for one in group.keep}
    assert {one.path for one in order[:full]} <= kept - {one.path for one in group.slim}
    assert max(entries, key=lambda one: one.modified_ns).modified_ns in {
        one.entry.modified_ns for one in group.keep
    }
    assert all(one.holds_state and one.path in kept for one in group.slim)
    assert all("9 bytes" in why for why in group.whole.values())
    if not rules:
        assert not group.remove


@given(_saves(), st.integers(1, 5), _CHOSEN)
def test_a_larger_number_slims_a_subset(entries, full, rules) -> None:
    assert _slim(entries, full + 1, rules) - {
        one.path for one in _plan(entries, full, rules).removals
    } <= _slim(entries, full, rules)


@given(_saves(), st.integers(1, 5), st.data())
def test_what_is_protected_stays_whole(entries, full, data) -> None:
    paths = st.sets(st.sampled_from([one.path for one in entries]))
    reasons = {path: ["pinned"] for path in data.draw(paths)}
    whole = {path: "hard links" for path in data.draw(paths)}
    faults = {path: "damaged" for path in data.draw(paths)}
    slim = _slim(entries, full, reasons=reasons, unslimmable=whole, faults=faults)
    assert not slim & (reasons.keys() | whole.keys() | faults.keys())


@given(_saves(), st.integers(1, 5), st.permutations(sorted(RULES)), st.randoms(use_true_random=False))
def test_no_order_matters(entries, full, rules, random) -> None:
    assert _slim(random.sample(entries, len(entries)), full, rules) == _slim(entries, full, sorted(rules))


@given(_saves(), st.integers(1, 5), _CHOSEN)
def test_a_second_prune_does_nothing(entries, full, rules) -> None:
    made = _plan(entries, full, rules)
    slim = {one.path for one in made.slimmed}
    left = [
        replace(one, state=StatePart()) if one.path in slim else one
        for one in (kept.entry for group in made.groups for kept in group.keep)
    ]
    assert not _plan(left, full, rules).changes


# Files ----------------------------------------------------------------------------------------------


def test_older_files_lose_their_optimizer_and_keep_all_else(epochs: Path) -> None:
    before = {path.name: path.stat() for path in epochs.iterdir()}
    planned = dry_run(epochs, policy=Policy(full=2))
    done = prune(epochs, full=2)
    assert _slim_names(planned) == _slim_names(done) == _names(*range(8, 0, -1))
    assert (done.problems, done.warnings, done.trash) == ((), (), None)
    assert done.freed_bytes == sum(before[name].st_size - (epochs / name).stat().st_size for name in before)
    assert _times(epochs) == {name: status.st_mtime_ns for name, status in before.items()}
    assert sorted(os.listdir(epochs)) == sorted(before)
    for epoch in range(1, 9):
        path = epochs / f"model_epoch_{epoch}.pth"
        assert verify(path).is_valid
        with open_checkpoint(path) as slim:
            assert (slim.training.epoch, slim.training.loss is not None) == (epoch, True)
            assert not any("optimizer" in name for name in slim)
    again = prune(epochs, full=2)
    assert (again.plan.changes, len(again.plan.groups)) == (False, 1)


def test_undo_restores_bytes_and_times(epochs: Path) -> None:
    before, times = file_bytes(epochs), _times(epochs)
    done = prune(epochs, full=2, keep_last=6, trash=True)
    assert (len(done.plan.removals), len(done.plan.slimmed), done.freed_bytes) == (4, 4, 0)
    assert len(list_checkpoints(epochs).checkpoints) == 6
    restored = undo(epochs)
    assert (len(restored.restored), restored.problems) == (8, ())
    assert (file_bytes(epochs), _times(epochs)) == (before, times)


def test_undo_restores_nothing_over_what_came_since(epochs: Path) -> None:
    prune(epochs, full=9, trash=True)
    (epochs / "model_epoch_1.pth").write_bytes(b"another")
    (problem,) = undo(epochs).problems
    assert "model_epoch_1.pth already exists" in problem.message
    assert (epochs / "model_epoch_1.pth").read_bytes() == b"another"


def test_weights_may_get_another_type(epochs: Path) -> None:
    prune(epochs, full=9, dtype="bfloat16")
    with (
        open_checkpoint(epochs / "model_epoch_1.pth") as slim,
        open_checkpoint(epochs / "model_epoch_2.pth") as two,
    ):
        assert {tensor.dtype.name for tensor in slim.tensors} == {"bfloat16"}
        assert "float32" in {tensor.dtype.name for tensor in two.tensors}
    before = file_bytes(epochs)
    prune(epochs, full=9, dtype="bfloat16")
    assert file_bytes(epochs) == before


def test_mode_and_names_that_lead_to_it_stay(epochs: Path) -> None:
    path = epochs / "model_epoch_1.pth"
    path.chmod(0o640)
    outside = epochs.parent / "elsewhere.pth"
    outside.symlink_to(path)
    prune(epochs, full=9)
    assert (path.stat().st_mode & 0o777, open_checkpoint(outside).training.epoch) == (0o640, 1)


def test_what_points_at_a_checkpoint_keeps_it_whole(epochs: Path) -> None:
    (epochs / "latest").write_text("model_epoch_1.pth")
    (epochs / "best").symlink_to("model_epoch_2.pth")
    assert _slim_names(dry_run(epochs, policy=Policy(full=8))) == []


@pytest.mark.parametrize("depth", ["quick", "full"])
def test_what_is_damaged_stays_and_another_is_whole_in_its_place(epochs: Path, depth: Any) -> None:
    path = epochs / "model_epoch_9.pth"
    data = bytearray(path.read_bytes())
    data[data.index(b"optimizer_state_dict") - 3] ^= 0xFF
    path.write_bytes(data)
    slim = _slim_names(prune(epochs, full=2, depth=depth))
    assert "model_epoch_9.pth" not in slim and "model_epoch_8.pth" not in slim
    assert path.read_bytes() == data


def _link(path: Path) -> None:
    os.link(path, path.parent.parent / "other.pth")


def _with_manifest(path: Path) -> None:
    path.with_name(f"{path.name}.sha256").write_text(f"{'0' * 64}  {path.name}\n")


def _with_shared_manifest(path: Path) -> None:
    path.with_name("SHA256SUMS").write_text(f"{'0' * 64}  {path.name}\n")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_link, "it has other hard links"),
        (_with_manifest, "a manifest next to it records its current content"),
        (_with_shared_manifest, "SHA256SUMS records its current content"),
    ],
)
def test_what_can_t_be_slimmed_stays_whole_and_says_why(epochs: Path, run, change, why: str) -> None:
    change(epochs / "model_epoch_1.pth")
    before = file_bytes(epochs)
    status, out, _ = run("prune", epochs, "--full", "9", "--verify", "quick", "--yes")
    assert (status, f"whole: {why}" in out, file_bytes(epochs)) == (0, True, before)
    explained = why_in(epochs, epochs / "model_epoch_1.pth", policy=Policy(full=9), depth="quick")
    assert (explained.slims, f"it is kept whole: {why}" in explained.against) == (False, True)


def test_the_older_format_is_left_whole(tmp_path: Path, files: Path) -> None:
    for epoch in (1, 2):
        shutil.copy2(files / "pytorch-legacy" / "guide_legacy.pth", tmp_path / f"model_epoch_{epoch}.pth")
    planned = dry_run(tmp_path, policy=Policy(full=1), series=["*"])
    (group,) = planned.plan.groups
    assert list(group.whole.values()) == ["PyTorch legacy can't be rewritten in its own form"]


def test_on_a_full_disk_nothing_is_lost(epochs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = file_bytes(epochs)
    with monkeypatch.context() as patch:
        fill_disk(patch)
        try:
            done = prune(epochs, full=9)
        except AccessDenied as refusal:
            assert "no space left" in str(refusal)
        else:
            assert "not slimmed" in done.problems[0].message and not done.plan.slimmed
    assert file_bytes(epochs) == before


def test_what_holds_hardly_any_state_stays_whole_and_says_so(tmp_path: Path, run) -> None:
    import torch

    for epoch in (1, 2):
        values = {
            "model": {"w": torch.zeros(10_000)},
            "optimizer": {"state": {0: {"exp_avg": torch.ones(9)}}},
        }
        torch.save({"epoch": epoch, **values}, tmp_path / f"model_epoch_{epoch}.pth")
    status, out, _ = run("prune", tmp_path, "--full", "1", "--verify", "quick", "--yes", "-v")
    assert (status, "whole: only 36 bytes of it are training state" in out) == (0, True)
    explained = why_in(tmp_path, tmp_path / "model_epoch_1.pth", policy=Policy(full=1), depth="quick")
    assert explained.against == ("it is kept whole: only 36 bytes of it are training state",)


def test_what_is_not_copied_is_not_slimmed(epochs: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(epochs, tmp_path / "copy"))
    (copy / "model_epoch_1.pth").unlink()
    done = prune(epochs, full=8, require_copy=str(copy))
    assert _slim_names(done) == _names(2)


def test_rules_that_need_each_other() -> None:
    for rules in (
        {"dtype": "bfloat16"},
        {"full": 0},
        {"full": 1, "max_size": 10},
        {"full": 1, "dtype": "int8"},
    ):
        with pytest.raises(UsageError):
            Policy(**rules)


def test_max_delete_doesn_t_count_what_is_slimmed(epochs: Path) -> None:
    assert len(prune(epochs, full=1, max_delete="0").plan.slimmed) == 9


def test_undo_works_in_a_copy_of_the_directory(epochs: Path, tmp_path: Path) -> None:
    before = file_bytes(epochs)
    prune(epochs, full=9, trash=True)
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-a", epochs, copy], check=True)
    restored = undo(copy)
    assert (len(restored.restored), restored.problems, file_bytes(copy)) == (1, (), before)


def test_a_record_of_an_earlier_version_is_undone(epochs: Path) -> None:
    before = file_bytes(epochs)
    prune(epochs, full=9, trash=True)
    (record,) = epochs.glob(".ckpttool-trash/*/record.json")
    told = json.loads(record.read_text())
    undoing = told["steps"][0]["undoing"]
    ((_, _, name, (_, *slim), (old, *_)),) = undoing.pop("operations")
    (group,) = undoing.pop("groups")
    del group["survivors"]
    undoing |= {"schema": "ckpttool.swaps/1", "source": "trash", "target": "directory"}
    undoing |= {"rewrites": [], "relinks": []}
    members = {"members": [[old.removeprefix("trash/"), name]]}
    undoing["moves"] = [group | members | {"successor": {"waits": name, "file": slim}}]
    record.write_text(json.dumps(told))
    assert (undo(epochs).problems, file_bytes(epochs)) == ((), before)


def test_each_of_two_commands_can_be_undone(epochs: Path) -> None:
    before = file_bytes(epochs)
    prune(epochs, full=9, trash=True)
    prune(epochs, keep_last=9, trash=True)
    assert undo(epochs).problems == undo(epochs).problems == ()
    assert file_bytes(epochs) == before


# Random states --------------------------------------------------------------------------------------


def _random_states() -> dict[str, Any]:
    """Return states of generators, as their libraries and trainers save them."""
    import torch

    own, old, cpu = getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.zeros(16, dtype=torch.uint8)  # of torch.cuda.get_rng_state: a seed and an offset
    megatron = {"random_rng_state": own, "np_rng_state": old, "torch_rng_state": cpu, "cuda_rng_state": cuda}
    bit_generators = [np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox]
    return {
        "torch_rng_state": cpu,
        "cuda_rng_state_all": [cuda, cuda],
        "rng_state": {"python": own, "numpy": old, "cpu": cpu, "cuda": cuda},
        "megatron_rng": [{**megatron, "rng_tracker_states": {"model-parallel-rng": cuda}}],
        "random_state": own,
        "python_rng": [own[0], list(own[1]), own[2]],
        "np_rng": old,
        "numpy_random_state": np.random.get_state(legacy=False),
        "listed_rng": [old[0], old[1].tolist(), *old[2:]],
        **{f"{kind.__name__}_rng": kind(1).state for kind in (*bit_generators, np.random.SFC64)},
        "jax_rng": np.array([0, 42], np.uint32),  # jax.random.PRNGKey(42)
        "rngs": {"params": np.zeros(2, np.uint32), "dropout": np.zeros(4, np.uint32), "unused": None},
    }


def _named_like_random_states() -> dict[str, Any]:
    import torch

    table = torch.ones(60, 40)
    return {
        "rng_embedding": table,
        "rng_table": {"weight": table},
        "random_state": table,
        "random_states": {"mean": 3.5},
        "torch_rng": torch.nn.Parameter(table),
        "rng_state": torch.ones(5056),
        "long_rng": torch.zeros(5057, dtype=torch.uint8),
        "square_rng": torch.zeros(4, 4, dtype=torch.uint8),
        "np_rng": np.ones(624),
        "rng_pairs": np.zeros((60, 2), np.uint32),
        "rngs": [1, 2, 3],
        "rng_words": ["a", "b"],
        "rng_bytes": b"a" * 5056,
        "rng_settings": {"bit_generator": "PCG64", "state": {"note": "kept"}},
        "rng_nothing": {},
    }


@pytest.mark.parametrize(("values", "goes"), [(_random_states, True), (_named_like_random_states, False)])
def test_a_key_named_like_a_random_state_goes_only_with_one(values: Any, goes: bool, tmp_path: Path) -> None:
    import torch

    optimizer = {"state": {0: {"exp_avg": torch.ones(2000)}}, "param_groups": [{"params": [0]}]}
    saved = {"model": {"w": torch.zeros(9)}, "optimizer": optimizer, **values()}
    for epoch in (1, 2):
        torch.save({"epoch": epoch, **saved}, tmp_path / f"model_epoch_{epoch}.pth")
    assert _slim_names(prune(tmp_path, full=1)) == ["model_epoch_1.pth"]
    left = torch.load(tmp_path / "model_epoch_1.pth", weights_only=False)
    assert left.keys() == {"epoch", "model"} | (set() if goes else values().keys())


def test_what_lies_with_a_random_state_keeps_it(tmp_path: Path, run) -> None:
    import torch

    state = {"cpu": torch.get_rng_state(), "table": torch.ones(60, 40)}
    for epoch in (1, 2):
        values = {"model": {"w": torch.zeros(9)}, "rng_state": state}
        torch.save({"epoch": epoch, **values}, tmp_path / f"model_epoch_{epoch}.pth")
    before = file_bytes(tmp_path)
    status, out, _ = run("prune", tmp_path, "--full", "1", "--yes", "-v")
    assert (status, "rng_state.cpu isn't proven to be only training state" in out) == (0, True)
    assert file_bytes(tmp_path) == before


@pytest.mark.parametrize("has_tensor", [True, False])
def test_a_trainers_file_of_random_states_goes_only_with_some(trainer: Path, has_tensor: bool) -> None:
    import torch

    other = trainer / "checkpoint-2" / "rng_state.pth"
    torch.save({"table": torch.ones(60, 40) if has_tensor else [0.5, 1.5]}, other)
    done = prune(trainer, full=2)
    assert (done.problems, _slim_names(done)) == ((), ["checkpoint-6", "checkpoint-2"])
    assert [path.name for path in trainer.glob("checkpoint-[26]/rng_state.pth")] == [other.name]
    assert other.exists() and not other.with_name("optimizer.pt").exists()


# The command line -----------------------------------------------------------------------------------


def test_the_plan_and_the_total(epochs: Path, run) -> None:
    status, out, err = run("prune", epochs, "--keep", "3", "--full", "1", "--dry-run", "--check")
    assert (status, err) == (1, "")
    assert out.splitlines()[1:4] == [
        "  keep    model_epoch_10.pth  newest, last 3, full 1",
        "  slim    model_epoch_9.pth   frees about 184 B; last 3",
        "  slim    model_epoch_8.pth   frees about 184 B; last 3",
    ]
    assert out.splitlines()[-1] == "would remove 7 and slim 2 of 10 checkpoints and free about 29 kB"
    assert "slim" in run("list", epochs, "--keep", "3", "--full", "1").out


def test_json_and_explanation(epochs: Path, run) -> None:
    document = json.loads(run("prune", epochs, "--full", "9", "--dry-run", "--json").out)
    (group,) = document["groups"]
    path = str(epochs / "model_epoch_1.pth")
    listed = json.loads(run("list", epochs, "--full", "9", "--json").out)["checkpoints"]
    assert [one["path"] for one in listed if one["slims"]] == [path]
    assert (group["slim"], group["whole"]) == ([{"path": path, "freed_bytes": 184}], [])
    assert document["freed_bytes"] == 184
    out = run("prune", epochs, "--full", "9", "--explain", path).out
    assert out.splitlines()[0] == f"{path} would be kept without its training state"
    assert "10th newest with training state, not one of the newest 9" in out


def test_a_configuration_says_it(epochs: Path, run, monkeypatch: pytest.MonkeyPatch) -> None:
    (epochs / "ckpttool.toml").write_text('[retention]\nfull = 9\ndtype = "bfloat16"\n')
    monkeypatch.chdir(epochs)
    status, out, _ = run("prune")
    assert (status, out.splitlines()[-1].startswith("slimmed 1 of 10 checkpoints")) == (0, True)


def test_copy_takes_no_part_of_checkpoints(epochs: Path, tmp_path: Path, run) -> None:
    status, _, err = run("copy", epochs, tmp_path / "copy", "--full", "2")
    assert (status, "--full" in err) == (2, True)
    refusal = re.escape("--full: copies are whole (prune slims them)")
    for rules in ({"full": 2}, {"policy": Policy(keep_last=3, full=2, dtype="bfloat16")}):
        with pytest.raises(UsageError, match=f"^{refusal}$"):
            ckpttool.copy(epochs, tmp_path / "copy", **rules)
    assert not (tmp_path / "copy").exists()


# Directories ----------------------------------------------------------------------------------------


def test_a_trainers_directories_lose_files_of_their_own(trainer: Path) -> None:
    before, times = file_bytes(trainer), _times(trainer)
    done = prune(trainer, full=2, trash=True)
    assert _slim_names(done) == ["checkpoint-6", "checkpoint-2"]  # 4 is the best
    gone = before.keys() - {name for name in file_bytes(trainer) if not name.startswith(".ckpttool")}
    assert {name.split("/")[0] for name in gone} == {"checkpoint-6", "checkpoint-2"}
    assert {name.split("/")[1] for name in gone} == {"optimizer.pt", "rng_state.pth"}
    assert before.items() >= {(name, data) for name, data in file_bytes(trainer).items() if name[0] != "."}
    assert all(verify(trainer / name).is_valid for name in ("checkpoint-6", "checkpoint-2"))
    assert not prune(trainer, full=2).plan.changes
    assert undo(trainer).problems == ()
    assert (file_bytes(trainer), _times(trainer)) == (before, times)


def test_a_steps_directory_keeps_its_series(tmp_path: Path, files: Path) -> None:
    for step in (100, 200, 300):
        place = tmp_path / f"step_{step}"
        place.mkdir()
        shutil.copy2(files / "safetensors" / "metadata.safetensors", place / "model.safetensors")
        shutil.copy2(files / "safetensors" / "trainer" / "checkpoint-4" / "optimizer.pt", place / "optim.pt")
    done = prune(tmp_path, full=1)
    assert (_slim_names(done), done.plan.is_estimate) == (["step_200", "step_100"], False)
    assert os.listdir(tmp_path / "step_100") == ["model.safetensors"]
    again = prune(tmp_path, full=1)
    assert (len(again.plan.groups), again.plan.changes) == (1, False)


# Frameworks -----------------------------------------------------------------------------------------

TORCH = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
optimizer = torch.optim.Adam(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
x = torch.ones(2, 8)
for epoch in range(1, 4):
    model(x).sum().backward()
    optimizer.step()
    state = {"model_state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}
    state |= {"epoch": epoch, "rng_state": torch.get_rng_state(), "loss": 0.5, "args": {"lr": 0.1}}
    state |= {"lr_scheduler": scheduler.state_dict(), "expected": model(x).detach()}
    # None of these is what its key may make one think.
    state |= {"scaler": {"mean": torch.ones(3)}, "noise_scheduler": {"betas": torch.ones(9)}}
    state |= {"random_split": [2, 1], "optimizer_name": "adam", "opt": {"width": 4}}
    state |= {"ema": model.state_dict()}
    torch.save(state, f"model_epoch_{epoch}.pt")
    torch.save({"model": model.state_dict(), "optimal_model": model.state_dict()}, f"best_of_{epoch}.pt")
prune(".", full=1)
for epoch in range(1, 4):
    saved = torch.load(f"model_epoch_{epoch}.pt", weights_only=True)
    model.load_state_dict(saved["model_state_dict"])
    assert torch.equal(model(x), saved["expected"])
    assert (saved["epoch"], saved["loss"], saved["args"]) == (epoch, 0.5, {"lr": 0.1})
    keys = "optimizer", "rng_state", "lr_scheduler"
    assert [key in saved for key in keys] == [epoch == 3] * 3
    assert len(saved["noise_scheduler"]["betas"]) == 9 and len(saved["scaler"]["mean"]) == 3
    assert (saved["random_split"], saved["optimizer_name"]) == ([2, 1], "adam")
    assert saved["opt"] == {"width": 4}
    model.load_state_dict(saved["ema"])
    model.load_state_dict(torch.load(f"best_of_{epoch}.pt", weights_only=True)["optimal_model"])
"""

KERAS = """
import keras, numpy as np
x = np.ones((2, 8), "float32")
names = "m_{}.keras", "w_{}.weights.h5", "f_epoch_{}.h5"
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(2)])
model.compile("adam", "mean_squared_error")
for epoch in range(1, 4):
    model.fit(x, np.ones((2, 2)), verbose=0)
    for name, save in zip(names, (model.save, model.save_weights, model.save)):
        save(name.format(epoch))
    np.save(f"expected_{epoch}.npy", model.predict(x, verbose=0))
prune(".", full=1)
for epoch in (2, 3):
    expected = np.load(f"expected_{epoch}.npy")
    model = keras.models.load_model(f"m_{epoch}.keras")
    assert np.array_equal(model.predict(x, verbose=0), expected)
    whole = keras.models.load_model(f"f_epoch_{epoch}.h5", compile=False)
    assert np.array_equal(whole.predict(x, verbose=0), expected)
    model.load_weights("w_1.weights.h5")
    model.load_weights(f"w_{epoch}.weights.h5")
    assert np.array_equal(model.predict(x, verbose=0), expected)
"""

TRAINER = """
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
torch.manual_seed(0)
sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 16}
model = BertForSequenceClassification(BertConfig(vocab_size=50, max_position_embeddings=8, **sizes))
data = [{"input_ids": torch.randint(0, 50, (4,)), "labels": torch.tensor(at % 2)} for at in range(12)]
arguments = TrainingArguments(
    "run", max_steps=3, per_device_train_batch_size=4, save_steps=1, report_to="none", disable_tqdm=True
)
Trainer(model, arguments, train_dataset=data).train()
for step in (1, 2, 3):
    saved = BertForSequenceClassification.from_pretrained(f"run/checkpoint-{step}")
    torch.save(saved.state_dict(), f"expected_{step}.bin")
prune(".", full=1)
for step in (1, 2, 3):
    loaded = BertForSequenceClassification.from_pretrained(f"run/checkpoint-{step}").state_dict()
    expected = torch.load(f"expected_{step}.bin")
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
"""


PRUNE = """
def prune(directory, **rules):
    import ckpttool
    done = ckpttool.prune(directory, exclude=["*.npy", "expected_*"], series=["best_of_*"], **rules)
    print(done.problems, len(done.plan.slimmed))
"""


@pytest.mark.framework
@pytest.mark.parametrize(
    ("script", "count"),
    [(TORCH, 2), (KERAS, 6), pytest.param(TRAINER, 2, marks=pytest.mark.thorough)],
    ids=["torch", "keras", "trainer"],
)
def test_frameworks_load_what_is_slim_and_predict_the_same(script: str, count: int, tmp_path: Path) -> None:
    """The script saves, prunes, and loads what is slim by then."""
    said = python_with_frameworks("-c", PRUNE + script, cwd=tmp_path)
    assert said.splitlines()[-1] == f"() {count}"


def test_the_summary_says_what_was_done(epochs: Path) -> None:
    assert prune(epochs, full=8, dry_run=True).summary.startswith("0 to remove, 2 to slim, ")
    assert prune(epochs, full=8).summary.startswith("0 removed, 2 slimmed, ")
