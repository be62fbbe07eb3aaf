"""A directory for each save as PyTorch's users write it: what lies in it, and what is wrong with it."""

from __future__ import annotations

import argparse
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckpttool import Granularity, NotACheckpoint, Role, Safety, Unsupported, merge, open_checkpoint, verify
from tests.support.opening import checkpoints_in, only_checkpoint

FILES = Path(__file__).parents[2] / "fixtures" / "files" / "pytorch"


def written(directory: Path, *names: str) -> Path:
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({"w": np.arange(6, dtype=np.float32)}, path)
    return directory


def codes(path: Path) -> list[tuple[str, str | None]]:
    with open_checkpoint(path) as opened:
        return [(finding.code, finding.where) for finding in opened.findings]


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.mark.framework
def test_what_pytorch_wrote(torch, tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    step = tmp_path / "step_1"
    step.mkdir()
    torch.save(model.state_dict(), step / "model_1.pt")
    torch.save(optimizer.state_dict(), step / "optim-1.pt")
    (step / "args.json").write_text("{}")
    with open_checkpoint(step) as opened:
        assert (opened.format, opened.variant, opened.granularity) == (
            "pytorch",
            "directory",
            Granularity.FULL,
        )
        assert opened.findings == opened.safety == ()
        assert len(opened.files) == 3
        assert (opened.training.step, opened.training.learning_rate) == (1, 0.001)
        state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
        for index, slots in optimizer.state_dict()["state"].items():
            state |= {f"optim.state.{index}.{name}": tensor for name, tensor in slots.items()}
        assert {name: tensor.array().tolist() for name, tensor in opened.items()} == {
            name: tensor.tolist() for name, tensor in state.items()
        }
        roles = {name.partition(".")[0]: tensor.role for name, tensor in opened.items()}
        assert roles == {"model": Role.WEIGHTS, "optim": Role.OPTIMIZER}
    megatron = tmp_path / "iter_0000001"
    for rank in range(4):
        place = megatron / f"mp_rank_{rank % 2:02d}_{rank // 2:03d}"
        place.mkdir(parents=True)
        args = argparse.Namespace(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
        torch.save({"args": args, "iteration": 1, "model": model.state_dict()}, place / "model_optim_rng.pt")
    assert verify(megatron).is_valid
    shutil.rmtree(megatron / "mp_rank_01_001")
    assert codes(megatron) == [("part-missing", "mp_rank_01_001/model_optim_rng.pt")]
    shutil.rmtree(megatron / "mp_rank_00_001")
    shutil.rmtree(megatron / "mp_rank_01_000")
    assert len(codes(megatron)) == 3
    shutil.rmtree(megatron / "mp_rank_00_000")
    place.mkdir()
    torch.save({"args": argparse.Namespace(tensor_model_parallel_size=10**30)}, place / "model_optim_rng.pt")
    assert codes(megatron) == []


def test_one_file_in_it_is_read_as_it_is(tmp_path: Path) -> None:
    step = tmp_path / "checkpoint_000003"
    step.mkdir()
    shutil.copy(FILES / "guide.pth", step / "model.pt")
    with open_checkpoint(step) as whole, open_checkpoint(step / "model.pt") as one:
        assert {name: tensor.shape for name, tensor in whole.items()} == {n: t.shape for n, t in one.items()}
        assert whole.metadata == one.metadata
        assert whole.training.epoch == one.training.epoch is not None
        assert (whole.path, whole.variant) == (str(step), "directory")
    assert only_checkpoint(tmp_path, recursive=False).members == ("checkpoint_000003",)


@pytest.mark.parametrize("victim", ["model.safetensors", "mp_rank_01/model.safetensors"])
def test_every_file_in_it_is_verified(tmp_path: Path, victim: str) -> None:
    step = written(tmp_path / "step_5", "model.safetensors", "mp_rank_00/model.safetensors", victim)
    assert verify(step).is_valid
    os.truncate(step / victim, 40)
    found = verify(step)
    assert not found.is_valid
    assert [(one.code, one.where) for one in found.findings if one.check == "structure"] == [
        ("part-damaged", victim)
    ]


def test_what_a_pickle_in_it_could_run_is_told(tmp_path: Path) -> None:
    step = written(tmp_path / "step_5", "model.safetensors")
    (step / "extra.pkl").write_bytes(b"cposix\nsystem\n(S'true'\ntR.")
    assert verify(step).safety is Safety.UNSAFE


def test_what_no_format_knows_is_told(tmp_path: Path) -> None:
    step = written(tmp_path / "step_5", "model.safetensors")
    (step / "data.bin").write_bytes(b"\x01\x02" * 40)
    assert codes(step) == [("part-unrecognised", "data.bin")]


def test_ranks_are_not_merged_blindly(tmp_path: Path) -> None:
    step = written(tmp_path / "step_5", *(f"mp_rank_0{rank}/model.safetensors" for rank in (0, 1)))
    with open_checkpoint(step) as opened:
        assert opened.variant == "rank-directory"
    with pytest.raises(Unsupported, match="the files don't record the sharding"):
        merge([step], tmp_path / "whole.safetensors")


def test_gaps_between_ranks_and_no_others(tmp_path: Path) -> None:
    step = written(tmp_path / "step_5", *(f"rank_{rank}.safetensors" for rank in (8, 9, 11)))
    assert codes(step) == [("part-missing", "rank_10.safetensors")]
    other = written(tmp_path / "step_6", "lora_rank_4.safetensors", "lora_rank_8.safetensors")
    assert codes(other) == []
    hostile = written(tmp_path / "step_7", "rank_0.safetensors", "rank_99999.safetensors")
    assert len(codes(hostile)) == 11


@pytest.mark.parametrize("name", ["", "notes.txt"])
def test_a_directory_without_checkpoints_is_none(tmp_path: Path, name: str) -> None:
    step = tmp_path / "step_5"
    step.mkdir()
    if name:
        (step / name).write_text("step 5")
    with pytest.raises(NotACheckpoint):
        open_checkpoint(step)


def test_results_of_a_step_are_no_save(tmp_path: Path) -> None:
    step = tmp_path / "epoch_5"
    step.mkdir()
    np.save(step / "predictions.npy", np.zeros(3))
    (step / "log.pkl").write_bytes(pickle.dumps({"loss": [0.1]}))
    with pytest.raises(NotACheckpoint):
        open_checkpoint(step)
    assert {unit.format.name for unit in checkpoints_in(tmp_path) if unit.format} == {"numpy", "pickle"}
    written(step, "model.safetensors")
    with open_checkpoint(step) as opened:
        assert opened.format == "safetensors"
        assert len(opened.files) == 3


def test_other_formats_know_their_directories_better() -> None:
    trainer = FILES.parent / "safetensors" / "trainer" / "checkpoint-4"
    with open_checkpoint(trainer) as opened:
        assert opened.variant == "trainer"
