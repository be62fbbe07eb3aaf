"""DeepSpeed's universal checkpoints, as ``ds_to_universal`` leaves them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ckpttool import CheckpointError, latest, merge, open_checkpoint, verify

SHAPES = {"fc.weight": (4, 4), "fc.bias": (4,), "norm.weight": (4,)}
STATES = ("fp32", "exp_avg", "exp_avg_sq")
TAG = "global_step10_universal"


def universal(
    root: Path, *, stage: int = 2, mp: int = 1, flat: bool = False, pointer: str | None = None
) -> Path:
    """Return a directory with the values that it holds by name: of ZeRO 3 they are flat."""
    directory = root / TAG
    for at, (name, shape) in enumerate(SHAPES.items()):
        (directory / "zero" / name).mkdir(parents=True)
        for number, state in enumerate(STATES):
            value = torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 10 * at + 100 * number
            torch.save(value.flatten() if flat else {"param": value}, directory / f"zero/{name}/{state}.pt")
        torch.save(torch.tensor(10.0), directory / f"zero/{name}/step.pt")
    groups = {"zero_stage": stage, "base_optimizer_state": {"param_groups": [{"lr": 1e-4}]}}
    torch.save(
        {"optimizer_state_dict": groups, "ds_version": "0.16.0"}, directory / "zero/optimizer_state.pt"
    )
    for rank in range(mp):
        torch.save(
            {
                "module": {name: torch.zeros(shape).bfloat16() for name, shape in SHAPES.items()},
                "param_shapes": [{name: torch.Size(shape) for name, shape in SHAPES.items()}],
                "buffer_names": [],
                "shared_params": {},
                "global_steps": 10,
                "dp_world_size": 2,
                "mp_world_size": mp,
                "ds_config": {"zero_optimization": {"stage": stage}},
                "ds_version": "0.16.0",
                "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
            },
            directory / f"mp_rank_{rank:02d}_model_states.pt",
        )
    if pointer is not None:
        (root / pointer).write_text(TAG, "utf-8")
    return directory


@pytest.mark.parametrize("pointer", [None, "latest", "latest_universal"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("mp", [1, 2])
def test_it_is_valid_and_found(stage: int, mp: int, pointer: str | None, tmp_path: Path) -> None:
    directory = universal(tmp_path, stage=stage, mp=mp, flat=stage == 3, pointer=pointer)
    verdict = verify(directory)
    assert (verdict.is_valid, [one for one in verdict.findings if one.check == "structure"]) == (True, [])
    assert latest(tmp_path).path == str(directory)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("mp", [1, 2])
def test_a_merge_gives_the_weights_in_full_precision(flat: bool, mp: int, tmp_path: Path) -> None:
    directory = universal(tmp_path, flat=flat, mp=mp)
    merge([directory], tmp_path / "w.safetensors", only="weights")
    merge([directory], tmp_path / "all.pt")
    whole = torch.load(tmp_path / "all.pt", weights_only=True)
    weights = load_file(tmp_path / "w.safetensors")
    assert weights.keys() == SHAPES.keys()
    for name, shape in SHAPES.items():
        for state in STATES:
            stored = torch.load(directory / f"zero/{name}/{state}.pt")
            expected = (stored if flat else stored["param"]).reshape(shape)
            found = weights[name] if state == "fp32" else whole["optimizer"]["state"][name][state]
            assert found.dtype == torch.float32 and torch.equal(found, expected), (name, state)
        assert torch.equal(whole["module"][name], weights[name])
        assert whole["optimizer"]["state"][name]["step"] == 10
    assert whole["optimizer"]["param_groups"][0]["lr"] == 1e-4
    assert whole["global_steps"] == 10


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


@pytest.mark.parametrize(
    ("change", "code", "where"),
    [
        (lambda one: shutil.rmtree(one / "zero/fc.bias"), "part-missing", "zero/fc.bias/fp32.pt"),
        (lambda one: (one / "zero/fc.bias/fp32.pt").unlink(), "part-missing", "zero/fc.bias/fp32.pt"),
        (lambda one: cut_short(one / "zero/fc.weight/fp32.pt"), "part-damaged", "zero/fc.weight/fp32.pt"),
        (
            lambda one: cut_short(one / "zero/fc.weight/exp_avg.pt"),
            "part-damaged",
            "zero/fc.weight/exp_avg.pt",
        ),
        (lambda one: cut_short(one / "zero/optimizer_state.pt"), "part-damaged", "zero/optimizer_state.pt"),
        (
            lambda one: torch.save({"other": torch.ones(4)}, one / "zero/fc.bias/fp32.pt"),
            "part-damaged",
            "zero/fc.bias/fp32.pt",
        ),
        (
            lambda one: torch.save({"param": torch.ones(5)}, one / "zero/fc.bias/fp32.pt"),
            "part-damaged",
            "zero/fc.bias/fp32.pt",
        ),
    ],
)
def test_what_is_missing_or_damaged_is_an_error(
    change: Callable[[Path], object], code: str, where: str, tmp_path: Path
) -> None:
    directory = universal(tmp_path)
    change(directory)
    verdict = verify(directory)
    assert not verdict.is_valid
    assert (code, where) in [(one.code, one.where) for one in verdict.findings]
    with pytest.raises(CheckpointError):
        merge([directory], tmp_path / "w.safetensors")


def test_a_lost_state_is_a_warning(tmp_path: Path) -> None:
    """Some optimizers keep other states of some parameters."""
    directory = universal(tmp_path)
    (directory / "zero/fc.bias/exp_avg_sq.pt").unlink()
    (found,) = (one for one in verify(directory).findings if one.check == "structure")
    assert (found.code, found.where, found.severity) == (
        "part-missing",
        "zero/fc.bias/exp_avg_sq.pt",
        "warning",
    )


def test_slices_of_what_has_no_directory_are_not_taken_for_the_whole(tmp_path: Path) -> None:
    directory = universal(tmp_path, mp=2)
    for rank in range(2):
        path = directory / f"mp_rank_{rank:02d}_model_states.pt"
        state = torch.load(path, weights_only=True)
        state["module"]["frozen.weight"] = torch.full((2, 4), float(rank))
        torch.save(state, path)
    with pytest.raises(CheckpointError, match=r"frozen\.weight"):
        merge([directory], tmp_path / "w.safetensors")
    with open_checkpoint(directory) as checkpoint:
        assert checkpoint.variant == "deepspeed-universal"
