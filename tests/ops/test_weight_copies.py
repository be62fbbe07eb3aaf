"""Two copies of the weights in one directory, as Hugging Face's libraries lay them out."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckpttool.weights.comparing import compare
from ckpttool.weights.comparing.compare import compare_all
from tests.support.commands import Run

State = dict[str, torch.Tensor]


def state(seed: int = 0) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {f"layer{number}.weight": torch.randn(4, 3, generator=generator) for number in range(4)}


def write(folder: Path, safe: State, other: State, stems: tuple[str, str], *, sharded: bool) -> None:
    names = (f"{stems[0]}.safetensors", f"{stems[1]}.bin")
    for name, tensors, save in zip(names, (safe, other), (save_file, torch.save), strict=True):
        stem, _, suffix = name.rpartition(".")
        shard = f"{stem}-00001-of-00001.{suffix}" if sharded else name
        save(tensors, folder / shard)
        if sharded:
            index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, shard)}
            (folder / f"{name}.index.json").write_text(json.dumps(index))
        os.utime(folder / shard, (1_700_000_000, 1_700_000_000 if suffix == "safetensors" else 1_700_000_100))


STEMS = [
    ("model", "pytorch_model"),
    ("adapter_model", "adapter_model"),
    ("diffusion_pytorch_model", "diffusion_pytorch_model"),
    ("model.fp16", "pytorch_model.fp16"),
]


@pytest.mark.parametrize("sharded", [False, True], ids=["one", "sharded"])
@pytest.mark.parametrize("stems", STEMS, ids=" ".join)
def test_other_values_are_a_warning(stems: tuple[str, str], sharded: bool, tmp_path: Path, run: Run) -> None:
    changed = {**state(), "layer2.weight": state(1)["layer2.weight"]}
    write(tmp_path, state(), changed, stems, sharded=sharded)
    answer = run("verify", tmp_path)
    assert answer.status == 0
    warnings = [line for line in answer.out.splitlines() if "copies-differ" in line]
    assert len(warnings) == 1
    assert f"{stems[1]}.bin" in warnings[0] and "for 1 of 4 tensors: layer2.weight" in warnings[0]
    assert ("which is newer" in warnings[0]) or sharded
    assert run("verify", tmp_path, "--strict").status == 1


@pytest.mark.parametrize("first", [0, 200, 299])
def test_all_of_a_tensor_is_compared(first: int, tmp_path: Path, run: Run) -> None:
    weight = torch.ones(300, 300)
    changed = weight.clone()
    changed[first:] = 2
    write(tmp_path, {"w": weight}, {"w": changed}, STEMS[0], sharded=False)
    assert "has different values for 1 of 1 tensor: w" in run("verify", tmp_path).out
    assert "copies-differ" not in run("verify", tmp_path, "--quick").out


def test_a_copy_that_vanishes_is_no_internal_error(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, state(), state(1), STEMS[0], sharded=False)

    def compare_and_remove(*args: Any, **keywords: Any) -> Any:
        outcomes = compare_all(*args, **keywords)
        (tmp_path / "pytorch_model.bin").unlink()
        return outcomes

    monkeypatch.setattr(compare, "compare_all", compare_and_remove)
    answer = run("verify", tmp_path / "model.safetensors")
    assert answer.status == 0 and "pytorch_model.bin next to it has different values for 4 of 4" in answer.out


@pytest.mark.parametrize("sharded", [False, True], ids=["one", "sharded"])
def test_equal_copies_say_nothing(sharded: bool, tmp_path: Path, run: Run) -> None:
    write(tmp_path, state(), state(), STEMS[0], sharded=sharded)
    answer = run("verify", tmp_path)
    assert answer.status == 0 and "copies-differ" not in answer.out


def test_weights_of_another_model_are_no_copy(tmp_path: Path, run: Run) -> None:
    others = {f"head.{name}": tensor for name, tensor in state(1).items()}
    write(tmp_path, state(), others, STEMS[0], sharded=False)
    assert "copies-differ" not in run("verify", tmp_path).out
