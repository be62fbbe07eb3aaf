"""What an index that stays names never goes, whoever else names it, and wherever it lies."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ckpttool import Policy, PruneRequest, RenameRequest, list_checkpoints, prune, rename, undo
from ckpttool.runs import look
from ckpttool.storage.fs import Snapshot
from tests.support.moments import before_call
from tests.support.opening import checkpoints_in
from tests.support.retention import dry_run, kept_reasons, overlook_need


def _shard(path: Path, name: str, value: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: np.full((4, 4), value, np.float32)}, path)


def _index(path: Path, weight_map: Mapping[str, str]) -> None:
    path.write_text(json.dumps({"metadata": {"total_size": 128}, "weight_map": weight_map}))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a directory of three sets that have one shard in common: an adapter's base."""
    place = tmp_path / "run"
    _shard(place / "base.safetensors", "w1", 0)
    for step in (100, 200, 300):
        _shard(place / f"step_{step}-b.safetensors", "w2", step)
        weight_map = {"w1": "base.safetensors", "w2": f"step_{step}-b.safetensors"}
        _index(place / f"step_{step}.safetensors.index.json", weight_map)
    return place


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    """Return a directory of three sets whose common shard lies in a directory below, beside others."""
    place = tmp_path / "run"
    for step in (100, 200, 300):
        _shard(place / "shared" / f"base_step_{step}.safetensors", "w1", step)
        _shard(place / f"step_{step}-b.safetensors", "w2", step)
        weight_map = {"w1": "shared/base_step_100.safetensors", "w2": f"step_{step}-b.safetensors"}
        _index(place / f"step_{step}.safetensors.index.json", weight_map)
    return place


def _request(directory: Path, keep: int = 1, **told: object) -> PruneRequest:
    return PruneRequest(directory=str(directory), policy=Policy(keep_last=keep), **told)  # type: ignore[arg-type]


def _load(index: Path) -> dict[str, float]:
    """Return one value of each tensor behind an index, as the library itself reads it."""
    weight_map = json.loads(index.read_text())["weight_map"]
    return {key: float(load_file(index.parent / name)[key][0, 0]) for key, name in weight_map.items()}


def _names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir() if not path.name.startswith(".")}


STEP_300 = {"base.safetensors", "step_300-b.safetensors", "step_300.safetensors.index.json"}


def test_sets_that_share_a_shard_are_all_found(run: Path) -> None:
    units = {os.path.basename(unit.path): unit for unit in checkpoints_in(run)}
    assert sorted(units) == [f"step_{step}.safetensors.index.json" for step in (100, 200, 300)]
    unit = units["step_200.safetensors.index.json"]
    assert set(unit.members) == {"step_200.safetensors.index.json", "step_200-b.safetensors"}
    assert unit.shared == ("base.safetensors",)


@pytest.mark.parametrize("trash", [False, True])
@pytest.mark.parametrize("recursive", [False, True])
def test_a_shared_shard_stays_with_whoever_needs_it(run: Path, trash: bool, recursive: bool) -> None:
    done = prune(_request(run, recursive=recursive), trash=trash)
    assert len(done.plan.removals) == 2
    assert _names(run) == STEP_300
    assert _load(run / "step_300.safetensors.index.json") == {"w1": 0, "w2": 300}
    if trash:
        undo(str(run))
        assert _load(run / "step_100.safetensors.index.json") == {"w1": 0, "w2": 100}


def test_a_dry_run_counts_no_shared_shard(run: Path) -> None:
    own = ("step_{}-b.safetensors", "step_{}.safetensors.index.json")
    size = sum((run / name.format(step)).stat().st_size for step in (100, 200) for name in own)
    assert prune(_request(run), dry_run=True).freed_bytes == size == prune(_request(run)).freed_bytes


@pytest.mark.parametrize("exclude", ["step_300*", "*300.safetensors.index.json"])
def test_an_index_that_is_passed_over_keeps_its_shards(run: Path, exclude: str) -> None:
    (run / "step_200.safetensors.index.json").unlink()
    (run / "step_200-b.safetensors").unlink()
    (run / "step_100.safetensors.index.json").unlink()
    (run / "step_100-b.safetensors").unlink()
    for name in ("base_1.safetensors", "base_2.safetensors"):
        _shard(run / name, "w1", 0)
    prune(_request(run, exclude=(exclude,), series=("base*",)))
    assert _load(run / "step_300.safetensors.index.json") == {"w1": 0, "w2": 300}


def test_a_shard_below_that_several_need(deep: Path) -> None:
    done = prune(_request(deep, recursive=True, series=("base_*",)))
    gone = {os.path.basename(entry.path) for entry in done.plan.removals}
    assert gone == {
        "base_step_200.safetensors",
        "step_100.safetensors.index.json",
        "step_200.safetensors.index.json",
    }
    assert _load(deep / "step_300.safetensors.index.json") == {"w1": 100, "w2": 300}


@pytest.mark.parametrize("trash", [False, True])
def test_an_index_above_the_directory_that_is_thinned_out(deep: Path, trash: bool) -> None:
    prune(_request(deep / "shared", series=("base_*",)), trash=trash)
    assert _names(deep / "shared") == {"base_step_100.safetensors", "base_step_300.safetensors"}
    assert _load(deep / "step_300.safetensors.index.json") == {"w1": 100, "w2": 300}


def test_shards_below_of_one_index_alone_keep_it(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        _shard(tmp_path / "shards" / f"{step}.safetensors", "w", step)
        _index(tmp_path / f"step_{step}.safetensors.index.json", {"w": f"shards/{step}.safetensors"})
    done = prune(_request(tmp_path, recursive=True))
    assert done.plan.removals == ()
    assert kept_reasons(done)["step_1.safetensors.index.json"] == ("has parts in other directories",)


def test_a_link_to_an_index_is_a_pointer(run: Path) -> None:
    (run / "best.safetensors.index.json").symlink_to("step_100.safetensors.index.json")
    prune(_request(run))
    assert _load(run / "best.safetensors.index.json") == {"w1": 0, "w2": 100}
    assert not (run / "step_200-b.safetensors").exists()


def test_a_chain_of_links_through_another_checkpoint(trainer: Path) -> None:
    store = trainer.parent / "store.safetensors"
    os.rename(trainer / "checkpoint-4" / "model.safetensors", store)
    (trainer / "checkpoint-4" / "model.safetensors").symlink_to(store)
    (trainer / "checkpoint-10" / "model.safetensors").unlink()
    (trainer / "checkpoint-10" / "model.safetensors").symlink_to("../checkpoint-4/model.safetensors")
    for step in (2, 4, 6, 8, 10):
        state = trainer / f"checkpoint-{step}" / "trainer_state.json"
        told = json.loads(state.read_text())
        state.write_text(json.dumps(told | {"best_model_checkpoint": None}))
    prune(_request(trainer, depth="quick"))
    assert len(load_file(trainer / "checkpoint-10" / "model.safetensors")) > 0


def test_pytorch_s_index_too(tmp_path: Path) -> None:
    import torch

    torch.save({"w1": torch.zeros(4)}, tmp_path / "base.bin")
    for step in (1, 2, 3):
        torch.save({"w2": torch.full((4,), float(step))}, tmp_path / f"step_{step}-b.bin")
        _index(tmp_path / f"step_{step}.bin.index.json", {"w1": "base.bin", "w2": f"step_{step}-b.bin"})
    prune(_request(tmp_path))
    assert _names(tmp_path) == {"base.bin", "step_3-b.bin", "step_3.bin.index.json"}


def test_two_keras_indexes(tmp_path: Path) -> None:
    for name in ("a.weights.h5", "b_1.weights.h5", "b_2.weights.h5"):
        (tmp_path / name).write_bytes(b"\x89HDF\r\n\x1a\n")
    for epoch in (1, 2):
        weight_map = {"/layers/a/vars": "a.weights.h5", "/layers/b/vars": [f"b_{epoch}.weights.h5"]}
        _index(tmp_path / f"epoch_{epoch}.weights.json", weight_map)
    shared = {os.path.basename(unit.path): unit.shared for unit in checkpoints_in(tmp_path)}
    assert shared == {f"epoch_{epoch}.weights.json": ("a.weights.h5",) for epoch in (1, 2)}


# The last check, whatever a plan says -----------------------------------------------------------------


@pytest.mark.parametrize("trash", [False, True])
def test_an_index_that_is_written_after_the_plan(run: Path, trash: bool) -> None:
    def confirm(planned: object) -> bool:
        weight_map = {"w1": "base.safetensors", "w2": "step_200-b.safetensors"}
        _index(run / "merged.safetensors.index.json", weight_map)
        return True

    done = prune(_request(run), trash=trash, confirm=confirm)
    assert list(done.failed.values()) == ["merged.safetensors.index.json, which is kept, needs a part of it"]
    assert _load(run / "merged.safetensors.index.json") == {"w1": 0, "w2": 200}
    assert not (run / "step_100-b.safetensors").exists()


@pytest.mark.parametrize("trash", [False, True])
def test_a_plan_that_overlooks_what_a_survivor_needs(
    run: Path, trash: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    overlook_need(monkeypatch, run / "step_100-b.safetensors")
    done = prune(_request(run), trash=trash)
    assert [os.path.basename(path) for path in done.failed] == ["step_100.safetensors.index.json"]
    assert (run / "step_100-b.safetensors").exists()
    assert not (run / "step_200-b.safetensors").exists()


# New names ---------------------------------------------------------------------------------------------


def test_new_names_leave_a_shared_shard_and_its_index_right(run: Path) -> None:
    done = rename(RenameRequest(directory=str(run), template="at_{step}"))
    assert len(done.renames) == 3 and not done.problems
    assert _load(run / "at_100.safetensors.index.json") == {"w1": 0, "w2": 100}
    assert _load(run / "at_300.safetensors.index.json") == {"w1": 0, "w2": 300}


def test_a_directory_that_an_index_above_names_keeps_its_name(tmp_path: Path) -> None:
    for step in (1, 2):
        place = tmp_path / f"step_{step}"
        _shard(place / "model-00001-of-00001.safetensors", "w", step)
        _index(place / "model.safetensors.index.json", {"w": "model-00001-of-00001.safetensors"})
    _index(tmp_path / "m.safetensors.index.json", {"w": "step_1/model-00001-of-00001.safetensors"})
    planned = dry_run(tmp_path, policy=Policy(keep_last=1))
    assert planned.plan.removals == ()
    rename(RenameRequest(directory=str(tmp_path), template="at_{step}"))
    assert _load(tmp_path / "m.safetensors.index.json") == {"w": 1}


# How it is found ----------------------------------------------------------------------------------------


def test_places_name_each_link_on_the_way(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "x").touch()
    (tmp_path / "d").symlink_to("store")
    (tmp_path / "a").symlink_to("d/x")
    (tmp_path / "round").symlink_to("round")
    real = os.path.realpath(tmp_path)
    found = list(look.resolved_links(str(tmp_path / "a"), Snapshot()))
    assert found == [f"{real}/a", f"{real}/d", f"{real}/store/x"]
    assert next(look.resolved_links(str(tmp_path / "round"), Snapshot())) == f"{real}/round"
    assert look.all_places([str(tmp_path / "d" / "x")], Snapshot()) == {f"{real}/d", f"{real}/store/x"}


def test_what_vanishes_while_it_is_looked_at_is_no_error(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _shard(run / "single.safetensors", "w", 0)

    single = run / "single.safetensors"
    before_call(monkeypatch, single, lambda: single.unlink(missing_ok=True))
    errors: list[object] = []
    assert len(checkpoints_in(run, on_error=errors.append)) == 3
    assert errors == []
    _shard(run / "single.safetensors", "w", 0)
    assert list_checkpoints(run).problems == ()
