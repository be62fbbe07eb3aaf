"""Directories of DeepSpeed: the real ones, ranks that are missing or of another job, and what lies around."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ckpttool import Role, Safety, list_checkpoints, open_checkpoint, verify
from tests.support.checkpoints import codes
from tests.support.commands import Run
from tests.support.opening import paths_in

FILES = Path(__file__).parents[2] / "fixtures" / "files"
ZERO = FILES / "deepspeed"
TAG = "global_step2"
OPTIMIZER_1 = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


def copied(stage: int, into: Path) -> Path:
    """Return a copy of a run's directory."""
    target = into / f"zero-{stage}"
    shutil.copytree(ZERO / f"zero-{stage}", target)
    return target


@pytest.mark.parametrize("stage", range(4))
def test_a_tag_is_one_checkpoint_and_the_scripts_are_none(stage: int) -> None:
    root = ZERO / f"zero-{stage}"
    names = [path.name for path in paths_in(root)]
    assert names == sorted(path.name for path in root.iterdir() if path.is_dir())


@pytest.mark.parametrize("stage", range(4))
def test_nothing_is_found_in_what_deepspeed_wrote(stage: int) -> None:
    with open_checkpoint(ZERO / f"zero-{stage}" / TAG) as opened:
        assert (opened.findings, opened.safety, opened.complete) == ((), (), True)
        assert opened.producer.framework == "deepspeed"


def test_parameters_of_stage_3_are_put_together() -> None:
    with open_checkpoint(ZERO / "zero-3" / TAG) as opened:
        weight = opened["module.0.weight"]
        assert (weight.dtype.name, weight.shape, weight.role) == ("float32", (4, 5), Role.WEIGHTS)
        assert weight.extent is None
        assert (opened.parameters, opened.buffers) == (47, 1)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_missing_rank(tmp_path: Path, stage: int) -> None:
    tag = copied(stage, tmp_path) / TAG
    (tag / OPTIMIZER_1).unlink()
    with open_checkpoint(tag) as opened:
        assert "part-missing" in codes(opened)
        assert not opened.complete
        assert opened["module.0.weight"].shape == (4, 5)
        assert (opened["module.0.weight"].values is None) == (stage == 3)
    assert not verify(tag).is_valid


@pytest.mark.parametrize(
    ("run", "name"),
    [
        ("zero-2", OPTIMIZER_1),
        ("zero-3", "zero_pp_rank_1_mp_rank_00_model_states.pt"),
        ("pipeline", "mp_rank_01_model_states.pt"),
        ("pipeline", "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt"),
        ("pipeline", "layer_03-model_states.pt"),
        ("experts", "layer_0_expert_2_mp_rank_00_model_states.pt"),
    ],
)
def test_a_missing_file_is_told_by_its_name(tmp_path: Path, run: str, name: str) -> None:
    tag = tmp_path / TAG
    shutil.copytree(ZERO / run / TAG, tag)
    (tag / name).unlink()
    with open_checkpoint(tag) as opened:
        (finding,) = [one for one in opened.findings if one.code == "part-missing"]
        assert finding.where == name
        assert not opened.complete


def test_no_layer_of_a_pipeline(tmp_path: Path) -> None:
    tag = tmp_path / TAG
    shutil.copytree(ZERO / "pipeline" / TAG, tag)
    for path in tag.glob("layer_*"):
        path.unlink()
    with open_checkpoint(tag) as opened:
        lacking = [one.where for one in opened.findings if one.code == "part-missing"]
    assert lacking == [f"layer_0{at}-model_states.pt" for at in (0, 1, 3)]


@pytest.mark.parametrize("run", ["pipeline", "experts"])
def test_layers_and_experts_make_one_module(run: str) -> None:
    with open_checkpoint(ZERO / run / TAG) as opened:
        assert (opened.findings, opened.safety, opened.complete) == ((), (), True)
        weights = {tensor.path[0] for tensor in opened.tensors if tensor.role is Role.WEIGHTS}
        assert weights == {"module"}
        assert opened.training.step == 2


def test_missing_model_states(tmp_path: Path) -> None:
    tag = copied(1, tmp_path) / TAG
    (tag / "mp_rank_00_model_states.pt").unlink()
    with open_checkpoint(tag) as opened:
        assert codes(opened) == {"part-missing"}


def test_a_damaged_rank(tmp_path: Path) -> None:
    tag = copied(3, tmp_path) / TAG
    (tag / OPTIMIZER_1).write_bytes(b"nothing of the kind")
    with open_checkpoint(tag) as opened:
        assert "part-damaged" in codes(opened)
    assert verify(tag).safety is Safety.UNKNOWN


def test_a_rank_too_many(tmp_path: Path) -> None:
    tag = copied(1, tmp_path) / TAG
    shutil.copy(tag / OPTIMIZER_1, tag / OPTIMIZER_1.replace("rank_1", "rank_2"))
    with open_checkpoint(tag) as opened:
        assert "part-extra" in codes(opened)


def test_ranks_of_two_saves(tmp_path: Path) -> None:
    first, second = copied(0, tmp_path) / "global_step1", ZERO / "zero-0" / TAG
    name = "mp_rank_00_model_states.pt"
    shutil.copy(second / name, first / name.replace("00", "01"))
    with open_checkpoint(first) as opened:
        assert {"part-stale", "part-extra"} <= codes(opened)


@pytest.mark.framework
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", ["int", "tensor"])
def test_an_optimizer_of_another_save(tmp_path: Path, stage: int, kind: str) -> None:
    """Optimizer states as DeepSpeed writes them, without its own classes."""
    import torch

    inner = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
    tag = copied(stage, tmp_path) / TAG
    for step, name in ((2, OPTIMIZER_1.replace("rank_1", "rank_0")), (1, OPTIMIZER_1)):
        count = step if kind == "int" else torch.tensor(float(step))
        state = {"state": {0: {"step": count, "exp_avg": torch.zeros(4)}}, "param_groups": [{"lr": 0.1}]}
        told = {"zero_stage": stage, "partition_count": 2, inner: state}
        torch.save({"optimizer_state_dict": told}, tag / name)
    with open_checkpoint(tag) as opened:
        (finding,) = (one for one in opened.findings if one.code == "part-stale")
    assert finding.where == OPTIMIZER_1
    assert (
        finding.message
        == {
            "int": "state 0's step is 1, but the first rank's 2",
            "tensor": "its optimizer has made a different number of steps than the first rank's",
        }[kind]
    )


@pytest.mark.framework
def test_model_states_of_another_job(tmp_path: Path) -> None:
    import torch

    tag = copied(3, tmp_path) / TAG
    path = tag / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    told = torch.load(path, weights_only=False)
    torch.save(told | {"dp_world_size": 4}, path)
    with open_checkpoint(tag) as opened:
        found = [(one.code, one.where, one.message) for one in opened.findings]
    assert found == [("part-stale", path.name, "dp_world_size is 4, but the first rank's is 2")]


def test_partitions_of_two_sizes(tmp_path: Path) -> None:
    """The first rank's partition in place of the last one's, which is shorter."""
    tag = copied(1, tmp_path) / TAG
    shutil.copy(ZERO / "zero-3" / TAG / OPTIMIZER_1, tag / OPTIMIZER_1)
    with open_checkpoint(tag) as opened:
        assert {"stage-disagrees", "partition-sum"} <= codes(opened)


def test_a_directory_of_the_trainer_is_the_trainers(tmp_path: Path) -> None:
    """Trainer keeps DeepSpeed's tag and `latest` inside its own directory."""
    target = tmp_path / "checkpoint-2"
    shutil.copytree(FILES / "safetensors" / "trainer" / "checkpoint-2", target)
    shutil.copytree(ZERO / "zero-1" / TAG, target / TAG)
    shutil.copy(ZERO / "zero-1" / "latest", target)
    assert paths_in(tmp_path) == [target]
    with open_checkpoint(target) as opened:
        assert opened.variant == "trainer"
    (listed,) = list_checkpoints(tmp_path).checkpoints
    assert not listed.entry.holds_others  # prune would never take it


def test_prune_keeps_the_tag_that_latest_names(tmp_path: Path, run: Run) -> None:
    root = copied(0, tmp_path)
    (root / "latest").write_text("global_step1", encoding="utf-8")
    answer = run("prune", root, "--keep-last", "1", "--dry-run", "--json")
    (group,) = json.loads(answer.out)["groups"]
    kept = {Path(entry["path"]).name: entry["reasons"] for entry in group["keep"]}
    assert set(kept) == {"global_step1", "global_step2"}
    assert any("latest" in reason for reason in kept["global_step1"])
    assert answer.status == 0


def test_prune_removes_a_tag_that_nothing_names(tmp_path: Path, run: Run) -> None:
    root = copied(0, tmp_path)
    (group,) = json.loads(run("prune", root, "--keep-last", "1", "--dry-run", "--json").out)["groups"]
    assert [Path(entry["path"]).name for entry in group["remove"]] == ["global_step1"]
