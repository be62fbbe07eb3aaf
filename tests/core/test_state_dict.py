"""``Checkpoint.state_dict`` against what PyTorch itself loads, and tensors as NumPy takes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import ckpttool


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(4)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    state = {"epoch": 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "m.pth")
    return tmp_path / "m.pth"


@pytest.mark.framework
def test_it_loads_as_the_framework_does(saved: Path) -> None:
    wanted = torch.load(saved)["model"]
    with ckpttool.open_checkpoint(saved) as checkpoint:
        loaded = checkpoint.state_dict()
    assert loaded.keys() == wanted.keys()
    assert all(torch.equal(loaded[name], wanted[name]) for name in wanted)
    assert all(loaded[name].dtype == wanted[name].dtype for name in wanted)
    model = Net()
    model.load_state_dict(loaded, strict=True)
    assert torch.equal(model.head.weight, wanted["embed.weight"])
    assert loaded["embed.weight"] is loaded["head.weight"]  # tied in the file, tied here
    loaded["norm.bias"] += 1  # writable, and the file's own stays
    assert torch.equal(torch.load(saved)["model"]["norm.bias"], wanted["norm.bias"])


@pytest.mark.framework
@pytest.mark.parametrize(
    "dtype",
    ["float64", "float16", "bfloat16", "int8", "int64", "bool", "complex64", "float8_e4m3fn", "float8_e5m2"],
)
def test_every_type_arrives(tmp_path: Path, dtype: str) -> None:
    wanted = torch.arange(12).reshape(3, 4).to(getattr(torch, dtype))
    torch.save({"w": wanted.t()}, tmp_path / "m.pth")
    with ckpttool.open_checkpoint(tmp_path / "m.pth") as checkpoint:
        loaded = checkpoint.state_dict()["w"]
        array = np.asarray(checkpoint["w"])
    assert (loaded.dtype, loaded.shape) == (wanted.dtype, (4, 3))
    numbers = wanted.to(torch.complex64).t().numpy()
    assert loaded.to(torch.complex64).numpy().tolist() == numbers.tolist()
    assert array.astype("complex64").tolist() == numbers.tolist()


def test_one_of_several(tmp_path: Path) -> None:
    state = {"gen": {"w": torch.ones(2)}, "disc": {"w": torch.zeros(2)}}
    torch.save(state, tmp_path / "m.pth")
    with ckpttool.open_checkpoint(tmp_path / "m.pth") as checkpoint:
        assert checkpoint.state_dict("numpy").keys() == {"gen.w", "disc.w"}
        assert checkpoint.state_dict("numpy", key="disc")["w"].tolist() == [0, 0]
        with pytest.raises(KeyError, match="did you mean disc"):
            checkpoint.state_dict("numpy", key="dsc")
        with pytest.raises(ckpttool.UsageError, match="choose from numpy, torch, tensorflow"):
            checkpoint.state_dict("jax")  # type: ignore[arg-type]


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "run",))

    torch.save({"model": {"w": torch.ones(2)}, "evil": Runs()}, tmp_path / "m.pth")
    with ckpttool.open_checkpoint(tmp_path / "m.pth") as checkpoint:
        assert checkpoint.state_dict(key="model")["w"].tolist() == [1, 1]
    assert not (tmp_path / "run").exists()
    verdict = ckpttool.verify(tmp_path / "m.pth")
    assert (bool(verdict), verdict.ok, verdict.is_valid) == (False, False, True)


def test_a_tensor_is_indexed_as_numpy_does(saved: Path) -> None:
    wanted = torch.load(saved)["model"]["embed.weight"].numpy()
    with ckpttool.open_checkpoint(saved) as checkpoint:
        tensor = checkpoint["model.embed.weight"]
        assert repr(tensor) == "<Tensor model.embed.weight float32 (10, 4) weights>"
        assert (len(tensor), bool(tensor)) == (10, True)
        assert tensor[3].tolist() == wanted[3].tolist()
        assert tensor[2:5, 1].tolist() == wanted[2:5, 1].tolist()
        assert np.asarray(tensor, dtype="float64").dtype == np.float64
        assert np.array(tensor, copy=True).flags.writeable
        with pytest.raises(KeyError, match=r"did you mean model\.embed\.weight"):
            checkpoint["embed.weight"]
        with pytest.raises(TypeError, match="scalar"):
            len(checkpoint["model.norm.num_batches_tracked"])


def test_notebooks_show_a_table(tmp_path: Path) -> None:
    torch.save({"<b>": torch.ones(2, 3)}, tmp_path / "m.pth")
    with ckpttool.open_checkpoint(tmp_path / "m.pth") as checkpoint:
        shown = checkpoint._repr_html_()
    assert "<td>&lt;b&gt;</td><td>float32</td><td>2×3</td>" in shown


def test_a_file_that_was_cut_meanwhile(saved: Path) -> None:
    with ckpttool.open_checkpoint(saved) as checkpoint:
        saved.write_bytes(saved.read_bytes()[:600])
        with pytest.raises(ckpttool.Truncated, match="bytes too early"):
            checkpoint.state_dict()
