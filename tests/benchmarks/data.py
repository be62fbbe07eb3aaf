"""The checkpoints to measure on, written by the real frameworks."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from tests.benchmarks.sparse import write_zeros

TENSORS = 256
_MIB = 1 << 20
_SEED = 20


def write_zip(path: Path, mebibytes: int) -> None:
    """Write a ``torch.save`` zip of 256 float32 tensors that fill so many MiB."""
    import torch

    torch.save(_state_dict(mebibytes), path)
    _flush(path)


def write_safetensors(path: Path, mebibytes: int) -> None:
    """Write the same tensors as safetensors."""
    from safetensors.torch import save_file

    save_file(_state_dict(mebibytes), path)
    _flush(path)


def write_shards(directory: Path, mebibytes: int, count: int) -> None:
    """Write the same tensors as so many safetensors files with an index, as Hugging Face does."""
    import json

    from safetensors.torch import save_file

    directory.mkdir()
    tensors = [*_state_dict(mebibytes).items()]
    step = len(tensors) // count
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    places = {}
    for at, name in enumerate(names):
        part = dict(tensors[at * step : (at + 1) * step])
        save_file(part, directory / name)
        _flush(directory / name)
        places.update(dict.fromkeys(part, name))
    index = {"metadata": {"total_size": mebibytes * _MIB}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def write_repeated(path: Path, part: Path, times: int) -> None:
    """Write a zip of the tensors of another one, several times over, each with a storage of its own."""
    import torch

    parts = [torch.load(part, mmap=True) for _ in range(times)]
    repeated = {f"part{k}.{name}": tensor for k, part in enumerate(parts) for name, tensor in part.items()}
    torch.save(repeated, path)
    _flush(path)


def write_sparse(path: Path, gibibytes: int) -> None:
    """Write a zip of 256 float32 tensors of zeros that fill so many GiB and take no room on the disk."""
    rows = gibibytes * 1024 * _MIB // (TENSORS * 4 * 1024)
    write_zeros(path, {_name(index): (rows, 1024) for index in range(TENSORS)})


def write_many_tensors(path: Path, count: int) -> None:
    """Write a zip of many tensors of four elements."""
    import torch

    torch.manual_seed(_SEED)
    torch.save({_name(index): torch.randn(4) for index in range(count)}, path)


def write_series(directory: Path, count: int) -> None:
    """Write one small training checkpoint per epoch: weights, optimizer, epoch, loss."""
    import torch

    torch.manual_seed(_SEED)
    net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    net(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
    directory.mkdir()
    for epoch in range(1, count + 1):
        checkpoint: dict[str, Any] = {
            "epoch": epoch,
            "model_state_dict": net.state_dict(),
            "optimizer_state_dict": optimizer.state_dict(),
            "loss": 1 / epoch,
        }
        torch.save(checkpoint, directory / f"epoch_{epoch:04d}.pth")


def copy_series(source: Path, target: Path) -> None:
    """Make the target an exact copy of a directory, whatever was there before."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)


def _state_dict(mebibytes: int) -> dict[str, Any]:
    import torch

    torch.manual_seed(_SEED)
    rows = mebibytes * _MIB // (TENSORS * 4 * 1024)
    return {_name(index): torch.randn(rows, 1024) for index in range(TENSORS)}


def _name(index: int) -> str:
    return f"layers.{index}.weight"


def _flush(path: Path) -> None:
    """Write the file out now, not while something is being timed."""
    with path.open("rb+") as stream:
        os.fsync(stream.fileno())
