"""Merging files: shards with and without their index, parts with tensors of their own, and misfits."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpttool import (
    CheckpointError,
    ConvertOptions,
    DamagedCheckpoint,
    UsageError,
    convert,
    merge,
    open_checkpoint,
)
from tests.support.conversions import digests, true_digests

State = dict[str, torch.Tensor]
NAMES = tuple(f"model-{at:05d}-of-00003.safetensors" for at in (1, 2, 3))


def weights(seed: int = 5) -> State:
    """Return the tensors of a model: several layers, several types, one of them empty."""
    made = torch.Generator().manual_seed(seed)
    state = {f"layers.{at}.weight": torch.randn(40, 30, generator=made) for at in range(6)}
    state |= {f"layers.{at}.bias": torch.randn(40, generator=made).to(torch.bfloat16) for at in range(6)}
    return state | {"position": torch.arange(7), "scale": torch.tensor(0.5), "none": torch.zeros(0, 4)}


def thirds(state: State) -> list[State]:
    return [dict(list(state.items())[at::3]) for at in range(3)]


def shards(directory: Path, state: State, names: tuple[str, ...] = NAMES) -> list[Path]:
    """Write a set of shards without its index."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, part in zip(names, thirds(state), strict=True):
        save_file(part, directory / name, metadata={"format": "pt"})
    return [directory / name for name in names]


def index(directory: Path, state: State) -> Path:
    """Write the index of a set of shards."""
    mapped = {key: name for name, part in zip(NAMES, thirds(state), strict=True) for key in part}
    total = sum(tensor.nbytes for tensor in state.values())
    path = directory / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": mapped}))
    return path


def assert_equal(found: Mapping[str, torch.Tensor], state: State) -> None:
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name], tensor)


def refused(*sources: Path, kind: type[Exception] = DamagedCheckpoint) -> str:
    """Return why sources make no whole; nothing is written."""
    target = sources[0].parent / "refused.safetensors"
    with pytest.raises(kind) as told:
        merge(sources, target)
    assert not any(name.startswith((".ckpttool", "refused")) for name in os.listdir(target.parent))
    return str(told.value)


# Shards -----------------------------------------------------------------------------------------------


def test_shards_without_their_index(tmp_path: Path) -> None:
    state = weights()
    paths = shards(tmp_path / "in", state)
    merged = merge([paths[2], paths[0], paths[1]], tmp_path / "whole.safetensors")
    assert (merged.verified, merged.tensors, merged.dropped) == (True, 15, ())
    assert merged.sources == tuple(map(str, (paths[2], paths[0], paths[1])))
    assert_equal(load_file(tmp_path / "whole.safetensors"), state)
    assert os.listdir(tmp_path / "in") and sorted(os.listdir(tmp_path)) == ["in", "whole.safetensors"]


def test_shards_on_the_disks_of_several_machines(tmp_path: Path) -> None:
    state = weights()
    paths = []
    for at, path in enumerate(shards(tmp_path / "in", state)):
        (tmp_path / f"node{at}").mkdir()
        paths.append(path.rename(tmp_path / f"node{at}" / path.name))
    merge(paths, tmp_path / "whole.pth")
    assert_equal(torch.load(tmp_path / "whole.pth", weights_only=True, mmap=True), state)


def test_shards_that_are_counted_from_0(tmp_path: Path) -> None:
    names = tuple(f"model-{at:05d}-of-00003.safetensors" for at in (0, 1, 2))
    merge(shards(tmp_path, weights(), names), tmp_path / "whole.safetensors")
    assert_equal(load_file(tmp_path / "whole.safetensors"), weights())


def test_shards_that_torch_saved(tmp_path: Path) -> None:
    paths = []
    for at, part in enumerate(thirds(weights()), 1):
        paths.append(tmp_path / f"pytorch_model-{at:05d}-of-00003.bin")
        torch.save(part, paths[-1])
    merge(paths, tmp_path / "whole.pth")
    found = torch.load(tmp_path / "whole.pth", weights_only=True, mmap=True)
    assert type(found) is dict
    assert_equal(found, weights())


@pytest.mark.parametrize("given", ["index", "directory", "index and shards", "shards"])
def test_shards_with_their_index(tmp_path: Path, given: str) -> None:
    paths = shards(tmp_path / "in", weights())
    path = index(tmp_path / "in", weights())
    sources = {
        "index": [path],
        "directory": [path.parent],
        "index and shards": [paths[1], path, paths[0]],
        "shards": paths,
    }[given]
    merge(sources, tmp_path / "whole.safetensors")
    assert_equal(load_file(tmp_path / "whole.safetensors"), weights())


def test_one_into_shards_and_back(tmp_path: Path) -> None:
    save_file(weights(), tmp_path / "one.safetensors")
    merge([tmp_path / "one.safetensors"], tmp_path / "set", ConvertOptions(to="safetensors", shard_size=9000))
    assert len(list((tmp_path / "set").glob("*-of-*.safetensors"))) > 2
    merge([tmp_path / "set"], tmp_path / "whole.safetensors")
    assert_equal(load_file(tmp_path / "whole.safetensors"), weights())


@pytest.mark.parametrize("name", ["safetensors/sharded", "pytorch/pytorch-sharded"])
def test_real_sets(files: Path, tmp_path: Path, name: str) -> None:
    merge([files / name], tmp_path / "whole.safetensors")
    with open_checkpoint(tmp_path / "whole.safetensors") as whole:
        found = digests(whole)
    assert found == true_digests(files / name)


# Shards that make no whole ------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("with_index", [True, False])
def test_a_missing_shard(tmp_path: Path, at: int, with_index: bool) -> None:
    paths = shards(tmp_path, weights())
    if with_index:
        index(tmp_path, weights())
    assert NAMES[at] in refused(*(path for path in paths if path is not paths[at]))


def test_a_single_shard_is_no_whole(tmp_path: Path) -> None:
    paths = shards(tmp_path, weights())
    assert refused(paths[1]) == (f"{tmp_path / NAMES[0]}: this shard is missing: 1 of 3 are given")
    index(tmp_path, weights())
    assert NAMES[0] in refused(paths[1])


def test_a_shard_twice(tmp_path: Path) -> None:
    paths = shards(tmp_path / "in", weights())
    shutil.copytree(tmp_path / "in", tmp_path / "copy")
    told = refused(*paths, tmp_path / "copy" / NAMES[1])
    assert told == f"{tmp_path / 'copy' / NAMES[1]}: {paths[1]} is the same shard (each once)"
    assert refused(*paths, paths[0], kind=UsageError) == f"{paths[0]} is given twice"


def test_a_shard_too_many(tmp_path: Path) -> None:
    paths = shards(tmp_path, weights())
    extra = tmp_path / "model-00004-of-00003.safetensors"
    shutil.copy(paths[0], extra)
    assert refused(*paths, extra) == f"{extra}: shard 4 of a set of 3"


def test_shards_of_two_sets(tmp_path: Path) -> None:
    paths = shards(tmp_path, weights())
    other = tmp_path / "model-00001-of-00002.safetensors"
    shutil.copy(paths[0], other)
    assert refused(*paths[1:], other, kind=UsageError) == (
        "shards of 2 sets: model-*-of-2.safetensors and model-*-of-3.safetensors"
    )
    plain = tmp_path / "head.safetensors"
    shutil.copy(paths[0], plain)
    assert "is not a shard" in refused(*paths, plain, kind=UsageError)


def test_a_shard_of_another_save(tmp_path: Path) -> None:
    paths = shards(tmp_path, weights())
    other = {name: tensor.double() for name, tensor in thirds(weights())[1].items() if "weight" in name}
    save_file(other, paths[1], metadata={"format": "pt"})
    told = refused(*paths)
    assert told.startswith(f"{paths[1]}[layers.#.weight]: float64, but float32 in {paths[0]}")


@pytest.mark.parametrize("key", ["epoch", "global_step"])
def test_shards_of_two_steps(tmp_path: Path, key: str) -> None:
    paths = shards(tmp_path, weights())
    for at, (path, part) in enumerate(zip(paths, thirds(weights()), strict=True)):
        save_file(part, path, metadata={"format": "pt", key: str(8 + (at == 2))})
    stage = key.removeprefix("global_")
    assert refused(*paths) == (
        f"{paths[2]}: saved at {stage} 9, but {paths[0]} at {stage} 8 (parts of one save)"
    )


def test_metadata_that_contradict_each_other(tmp_path: Path) -> None:
    paths = shards(tmp_path, weights())
    save_file(thirds(weights())[2], paths[2], metadata={"format": "pt", "run": "b"})
    save_file(thirds(weights())[0], paths[0], metadata={"format": "pt", "run": "a"})
    assert refused(*paths).startswith(f"{paths[2]}[run]: 'b', but 'a' in an earlier part")


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    paths = shards(tmp_path, weights())
    doubled = {**thirds(weights())[1], **thirds(weights())[0]}
    save_file(doubled, paths[1])
    told = refused(*paths)
    assert told.startswith(f"{paths[1]}[") and f"{paths[0]} holds it and 4 others" in told


@pytest.mark.parametrize("fault", ["total_size", "gone", "stale", "damaged"])
def test_a_set_that_does_not_fit_its_index(tmp_path: Path, fault: str) -> None:
    paths = shards(tmp_path, weights())
    path = index(tmp_path, weights())
    told = json.loads(path.read_text())
    expected = {"total_size": path.name, "gone": NAMES[1], "stale": NAMES[0], "damaged": NAMES[2]}[fault]
    if fault == "total_size":
        told["metadata"]["total_size"] -= 4
    elif fault == "gone":
        paths[1].unlink()
    elif fault == "stale":
        save_file(thirds(weights())[1], paths[0])
    else:
        os.truncate(paths[2], 400)
    path.write_text(json.dumps(told))
    assert refused(path).startswith(f"{path}[{expected}")
    with pytest.raises(CheckpointError, match=re.escape(f"{expected}")):
        convert(path, tmp_path / "converted.safetensors")
    assert not (tmp_path / "converted.safetensors").exists()


@pytest.mark.parametrize("at", [0, 2])
def test_a_damaged_shard(tmp_path: Path, at: int) -> None:
    paths = shards(tmp_path, weights())
    os.truncate(paths[at], paths[at].stat().st_size - 1)
    assert str(paths[at]) in refused(*paths)


# Parts with tensors of their own ------------------------------------------------------------------------


def test_parts_of_a_model(tmp_path: Path) -> None:
    state = weights()
    encoder = {name: tensor for name, tensor in state.items() if name.startswith("layers")}
    decoder = {name: tensor for name, tensor in state.items() if name not in encoder}
    torch.save(encoder, tmp_path / "encoder.pth")
    torch.save(decoder, tmp_path / "decoder.pth")
    merge([tmp_path / "encoder.pth", tmp_path / "decoder.pth"], tmp_path / "model.pth")
    assert_equal(torch.load(tmp_path / "model.pth", weights_only=True), {**encoder, **decoder})


def test_nested_parts_come_together_key_by_key(tmp_path: Path) -> None:
    one, two = torch.nn.Linear(3, 2), torch.nn.Linear(2, 4)
    optimizer = torch.optim.Adam(one.parameters(), lr=0.5)
    one(torch.ones(3)).sum().backward()
    optimizer.step()
    first = {"epoch": 3, "model": {"one.weight": one.weight.data}, "optimizer": optimizer.state_dict()}
    second = {
        "epoch": 3,
        "model": {"two.weight": two.weight.data},
        "seeds": (1, {2: "x"}),
        "note": float("nan"),
    }
    torch.save(first, tmp_path / "a.pth")
    torch.save(second, tmp_path / "b.pth")
    merge([tmp_path / "a.pth", tmp_path / "b.pth"], tmp_path / "whole.pth")
    found = torch.load(tmp_path / "whole.pth", weights_only=True)
    assert list(found) == ["epoch", "model", "optimizer", "seeds", "note"]
    assert (found["epoch"], found["seeds"], list(found["model"])) == (
        3,
        (1, {2: "x"}),
        ["one.weight", "two.weight"],
    )
    assert torch.equal(found["model"]["two.weight"], two.weight.data)
    assert found["optimizer"]["param_groups"] == optimizer.state_dict()["param_groups"]
    again = torch.optim.Adam(one.parameters(), lr=0.1)
    again.load_state_dict(found["optimizer"])


def test_parts_of_two_epochs(tmp_path: Path) -> None:
    for name, epoch in (("a", 3), ("b", 4)):
        torch.save({"epoch": epoch, f"{name}.weight": torch.ones(2)}, tmp_path / f"{name}.pth")
    told = refused(tmp_path / "a.pth", tmp_path / "b.pth")
    assert (
        told
        == f"{tmp_path / 'b.pth'}: saved at epoch 4, but {tmp_path / 'a.pth'} at epoch 3 (parts of one save)"
    )


def test_parts_that_say_different_things(tmp_path: Path) -> None:
    for name, rate in (("a", 0.5), ("b", 0.25)):
        torch.save({"settings": {"dropout": rate}, f"{name}.weight": torch.ones(2)}, tmp_path / f"{name}.pth")
    told = refused(tmp_path / "a.pth", tmp_path / "b.pth")
    assert told.startswith(f"{tmp_path / 'b.pth'}[settings.dropout]: 0.25, but 0.5 in an earlier part")


def test_the_same_tensor_twice_is_refused_though_it_is_equal(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "a": torch.ones(1)}, tmp_path / "a.pth")
    torch.save({"w": torch.ones(2), "b": torch.ones(1)}, tmp_path / "b.pth")
    told = refused(tmp_path / "a.pth", tmp_path / "b.pth")
    where = tmp_path / "a.pth"
    expected = "parts with different tensors; average combines whole checkpoints"
    assert told == f"{tmp_path / 'b.pth'}[w]: {where} holds it too ({expected})"


@pytest.mark.parametrize(
    ("names", "rows"),
    [(("consolidated.00.pth", "consolidated.01.pth"), (4, 4)), (("left.pth", "right.pth"), (4, 3))],
)
def test_slices_of_a_tensor_parallel_model(
    tmp_path: Path, names: tuple[str, str], rows: tuple[int, int]
) -> None:
    for name, count in zip(names, rows, strict=True):
        torch.save({"wq.weight": torch.ones(count, 8), "norm.weight": torch.ones(8)}, tmp_path / name)
    told = refused(tmp_path / names[0], tmp_path / names[1])
    assert told.startswith(f"{tmp_path / names[1]}[wq.weight]: [{rows[1]}, 8] here and [{rows[0]}, 8] in ")
    assert "tensor-parallel" in told


def test_parts_of_two_formats(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pth")
    save_file({"b": torch.ones(2)}, tmp_path / "b.safetensors")
    told = refused(tmp_path / "a.pth", tmp_path / "b.safetensors")
    assert told.endswith(f"safetensors, but {tmp_path / 'a.pth'} is pytorch (parts of one format)")


# Places -------------------------------------------------------------------------------------------------


def test_a_target_that_is_read(tmp_path: Path) -> None:
    paths = shards(tmp_path, weights())
    with pytest.raises(UsageError, match="is the source itself"):
        merge(paths, paths[1], ConvertOptions(force=True))
    paths = shards(tmp_path / "set", weights())
    index(tmp_path / "set", weights())
    with pytest.raises(UsageError, match="is inside the source"):
        merge([tmp_path / "set"], tmp_path / "set" / "whole.safetensors")
    assert all(load_file(path) for path in paths)


def test_nothing_to_merge(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing"):
        merge([], tmp_path / "whole.pth")
    with pytest.raises(CheckpointError, match="no such file"):
        merge([tmp_path / "a.pth", tmp_path / "b.pth"], tmp_path / "whole.pth")


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    paths = shards(tmp_path, weights())
    found = merge(paths, tmp_path / "whole.safetensors", ConvertOptions(dry_run=True))
    assert (found.dry_run, found.tensors, found.verified) == (True, 15, False)
    assert sorted(os.listdir(tmp_path)) == sorted(NAMES)
