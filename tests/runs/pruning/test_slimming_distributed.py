"""``--full N`` of distributed checkpoints: items of optimizers go out of files that hold weights, too."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from ckpttool import AccessDenied, open_checkpoint, prune, undo, verify
from ckpttool.transaction import operations
from tests.formats.test_megatron import CONFIG
from tests.support.changes import file_bytes
from tests.support.faults import fill_disk, is_killed_at
from tests.support.thorough import sampled

WEIGHTS = [f"decoder.layers.{number}.linear.weight" for number in range(3)]


def _save(directory: Path, state: Mapping[str, Any], files: int = 1) -> Path:
    writer = FileSystemWriter(directory, single_file_per_rank=files == 1, thread_count=files)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(state), storage_writer=writer, no_dist=True)
    return directory


def _megatron(directory: Path, step: int, files: int = 1) -> Path:
    """Save what Megatron's distributed optimizer saves: flat names, and what is not sharded beside."""
    torch.manual_seed(step)
    state = {name: torch.randn(16, 16) for name in WEIGHTS}
    for moment in ("exp_avg", "exp_avg_sq", "fp32_param"):
        state |= {f"optimizer.state.{moment}.{name}": torch.randn(16, 16) for name in WEIGHTS}
    _save(directory, state, files)
    torch.save({"iteration": step, "args": {"lr": 0.5}}, directory / "common.pt")
    (directory / "metadata.json").write_text(json.dumps(CONFIG), "utf-8")
    return directory


def _fsdp(directory: Path, step: int, files: int = 1) -> Path:
    """Save a model and its optimizer under a key each, as PyTorch's guide does."""
    torch.manual_seed(step)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 16)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": step}
    return _save(directory, state | {"ema": {"scale": torch.ones(3)}}, files)


Save = Callable[[Path, int, int], Path]
KINDS = pytest.mark.parametrize(("save", "files"), [(_megatron, 1), (_megatron, 4), (_fsdp, 1), (_fsdp, 4)])


@pytest.fixture
def run_of(tmp_path: Path) -> Callable[..., Path]:
    """Return what saves two steps into a directory."""

    def make(save: Save, files: int = 1) -> Path:
        directory = tmp_path / "run"
        for step in (1, 2):
            save(directory / f"iter_000000{step}", step, files)
        return directory

    return make


def _loaded(directory: Path) -> dict[str, torch.Tensor]:
    """Return all tensors that PyTorch itself finds in a checkpoint, by name."""
    described = FileSystemReader(directory).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in described.items()
        if hasattr(entry, "size")
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=directory, no_dist=True)
    return state


@KINDS
def test_pytorch_loads_all_but_the_optimizers_states(run_of, save: Save, files: int) -> None:
    run = run_of(save, files)
    old, before = run / "iter_0000001", file_bytes(run)
    expected = {name: value for name, value in _loaded(old).items() if not name.startswith("optimizer")}
    times = {path.name: path.stat().st_mtime_ns for path in old.iterdir()}
    done = prune(run, full=1, trash=True)
    assert ([one.name for one in done.plan.slimmed], done.problems) == (["iter_0000001"], ())
    found = _loaded(old)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    report = verify(old)
    assert report.is_valid and not report.findings
    kept = {name: data for name, data in before.items() if name in file_bytes(run)}
    stays = {f"iter_0000001/{name}" for name in ("common.pt", "metadata.json")} & before.keys()
    assert stays <= kept.keys()
    assert (old / ".metadata").stat().st_mtime_ns == times[".metadata"]
    assert not prune(run, full=1).plan.changes
    restored = undo(run)
    assert (len(restored.restored), restored.problems) == (1, ())
    assert file_bytes(run) == before
    assert {path.name: path.stat().st_mtime_ns for path in old.iterdir()} == times


def test_files_that_hold_no_state_are_not_written_again(run_of) -> None:
    run = run_of(_megatron, 12)
    old = run / "iter_0000001"
    before = {path.name: path.stat() for path in old.glob("*.distcp")}
    assert len(before) == 12
    prune(run, full=1)
    after = {path.name: path.stat() for path in old.glob("*.distcp")}
    assert len(after) == len(WEIGHTS)
    assert {name: one.st_ino for name, one in after.items()}.items() <= {
        name: one.st_ino for name, one in before.items()
    }.items()


def test_what_is_freed_is_what_the_disk_gains(run_of) -> None:
    run = run_of(_fsdp)
    before = sum(map(len, file_bytes(run).values()))
    done = prune(run, full=1)
    assert done.freed_bytes == before - sum(map(len, file_bytes(run).values())) > 0


def _change_metadata(directory: Path, change: Callable[[Any], object]) -> None:
    path = directory / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def test_what_megatron_adds_to_the_metadata_follows_their_entries(run_of) -> None:
    run = run_of(_megatron)
    old = run / "iter_0000001"
    known = {"nd_reformulated_orig_global_shape": (16, 16), "scale": 0.5}
    _change_metadata(
        old, lambda one: one.__dict__.update(mcore_data=dict.fromkeys(one.state_dict_metadata, known))
    )
    prune(run, full=1)
    metadata = pickle.loads((old / ".metadata").read_bytes())
    assert metadata.mcore_data == dict.fromkeys(WEIGHTS, known)
    assert set(metadata.planner_data) == set(WEIGHTS)


def test_metadata_that_runs_code_is_not_written_again(run_of) -> None:
    run = run_of(_megatron)
    _change_metadata(run / "iter_0000001", lambda one: one.__dict__.update(storage_meta=os.system))
    before = file_bytes(run)
    assert not prune(run, full=1).plan.slimmed
    assert file_bytes(run) == before


def _with_a_circle(metadata: Any) -> None:
    metadata.more = []
    metadata.more.append(metadata.more)


def _with_items_elsewhere(metadata: Any) -> None:
    name = next(index for index in metadata.storage_data if index.fqn.startswith("optimizer"))
    metadata.storage_data[name].relative_path = "common.pt"


def _with_lists_of_lists(metadata: Any) -> None:
    shared: list[Any] = ["x"]
    for _ in range(28):
        shared = [shared, shared]
    metadata.mcore_data = {WEIGHTS[0]: shared}


@pytest.mark.parametrize("change", [_with_a_circle, _with_items_elsewhere, _with_lists_of_lists])
def test_metadata_that_pytorch_does_not_write_stay(run_of, change: Callable[[Any], None]) -> None:
    run = run_of(_megatron)
    _change_metadata(run / "iter_0000001", change)
    before = file_bytes(run)
    assert not prune(run, full=1, depth="quick").plan.slimmed
    assert file_bytes(run) == before


def test_weights_keep_their_type(run_of) -> None:
    run = run_of(_megatron)
    planned = prune(run, full=1, dtype="bfloat16", dry_run=True)
    assert planned.plan.freed_bytes == 3 * 3 * 16 * 16 * 4
    prune(run, full=1, dtype="bfloat16")
    with open_checkpoint(run / "iter_0000001") as slim:
        assert {tensor.dtype.name for tensor in slim.tensors} == {"float32"}


# What can't be done ---------------------------------------------------------------------------------


def test_a_damaged_weight_is_not_copied(run_of) -> None:
    run = run_of(_megatron)
    path = run / "iter_0000001" / "__0_0.distcp"
    with open_checkpoint(run / "iter_0000001") as checkpoint:
        extent = checkpoint[WEIGHTS[1]].extent
    data = bytearray(path.read_bytes())
    data[extent.offset + 5] ^= 1
    path.write_bytes(data)
    before = file_bytes(run)
    done = prune(run, full=1, depth="quick")
    (problem,) = done.problems
    assert f"not slimmed: {WEIGHTS[1]}" in problem.message and "CRC-32" in problem.message
    assert file_bytes(run) == before


def test_names_that_prove_nothing_stay(tmp_path: Path, run) -> None:
    for step in (1, 2):
        state = {"model": {"layer": torch.ones(16, 16)}, "optimizer": {"table": torch.ones(64, 64)}}
        _save(tmp_path / f"iter_000000{step}", state)
    before = file_bytes(tmp_path)
    status, out, _ = run("prune", tmp_path, "--full", "1", "--yes", "-v")
    assert (status, "optimizer.table isn't proven to be only training state" in out) == (0, True)
    assert file_bytes(tmp_path) == before


def test_metadata_of_each_rank_stay(tmp_path: Path, files: Path, run) -> None:
    for step in (1, 2):
        shutil.copytree(files / "torch-dcp" / "rank-metadata", tmp_path / f"iter_000000{step}")
    before = file_bytes(tmp_path)
    assert not prune(tmp_path, full=1).plan.slimmed
    assert file_bytes(tmp_path) == before


def test_on_a_full_disk_nothing_is_lost(run_of, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(_megatron)
    before = file_bytes(run)
    with monkeypatch.context() as patch:
        fill_disk(patch)
        try:
            done = prune(run, full=1)
        except AccessDenied as refusal:
            assert "no space left" in str(refusal)
        else:
            assert "not slimmed" in done.problems[0].message
    assert file_bytes(run) == before


def test_a_data_file_that_a_trainer_writes_anew_keeps_its_name(
    run_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(_megatron)
    commit = operations.Stage.commit

    def save_and_commit(*arguments: Any) -> None:
        _megatron(run / "iter_0000001", 7)
        commit(*arguments)

    monkeypatch.setattr(operations.Stage, "commit", save_and_commit)
    prune(run, full=1, trash=True)
    torch.manual_seed(7)
    assert torch.equal(_loaded(run / "iter_0000001")[WEIGHTS[0]], torch.randn(16, 16))


def test_undo_leaves_a_file_that_was_written_since(run_of) -> None:
    run = run_of(_megatron)
    prune(run, full=1, trash=True)
    (new,) = (run / "iter_0000001").glob("*.distcp")
    new.write_bytes(b"another")
    undo(run)
    assert new.read_bytes() == b"another"


# Kills ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", sampled(range(1, 190), 6))
def test_a_command_that_is_killed_leaves_what_pytorch_loads(run_of, number: int) -> None:
    run = run_of(_megatron, 2)
    whole, old = file_bytes(run), run / "iter_0000001"
    expected = {name: value for name, value in _loaded(old).items() if name in WEIGHTS}
    is_killed_at(number, partial(prune, run, full=1, trash=True))
    found = _loaded(old)  # before anything recovers
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert prune(run, full=1, trash=True).problems == ()
    assert _loaded(old).keys() == expected.keys()
    while any(old.parent.glob(".ckpttool-trash/*")):
        assert undo(run).problems == ()
    assert {name: data for name, data in file_bytes(run).items() if name[0] != "."} == whole
