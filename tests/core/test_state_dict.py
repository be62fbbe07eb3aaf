"""``Checkpoint.state_dict`` against what PyTorch itself loads, and tensors as NumPy takes them."""

from __future__ import annotations

from collections.abc import Callable
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


# Optimizers -----------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "plain SGD": lambda own: torch.optim.SGD(own, lr=0.1),
    "SGD": lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9),
    "two groups": lambda own: torch.optim.AdamW([{"params": own[:1]}, {"params": own[1:], "lr": 0.5}]),
    "a tensor as rate": lambda own: torch.optim.Adam(own, lr=torch.tensor(0.1), foreach=False),
    "None and tuples": lambda own: torch.optim.Adafactor(own),
    "lists of tensors": lambda own: torch.optim.LBFGS(own, history_size=4, max_iter=3),
}
LAYOUTS: dict[str, Callable[[object], object]] = {
    "script": lambda state: {"epoch": 1, "optimizer_state_dict": state},
    "Lightning": lambda state: {"state_dict": {"w": torch.ones(2)}, "optimizer_states": [state]},
    "alone": lambda state: state,
}


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(3))]


def step(optimizer: torch.optim.Optimizer, own: list[nn.Parameter]) -> None:
    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        total = torch.stack([(one**2).sum() for one in own]).sum()
        total.backward()
        return total

    optimizer.step(loss)


def same(one: object, two: object) -> bool:
    """Return whether two states have equal values of the same types in the same order."""
    if type(one) is not type(two):
        return False
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        return one.dtype == two.dtype and torch.equal(one, two)
    if isinstance(one, dict) and isinstance(two, dict):
        return list(one) == list(two) and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(two, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    return one == two


@pytest.mark.framework
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_on_as_if_never_saved(tmp_path: Path, name: str, layout: str) -> None:
    own = parameters()
    optimizer = OPTIMIZERS[name](own)
    step(optimizer, own)
    torch.save(LAYOUTS[layout](optimizer.state_dict()), tmp_path / "m.pth")
    with ckpttool.open_checkpoint(tmp_path / "m.pth") as checkpoint:
        loaded = checkpoint.state_dict(key="optimizer")
    assert same(loaded, optimizer.state_dict())
    others = [nn.Parameter(one.detach().clone()) for one in own]
    again = OPTIMIZERS[name](others)
    again.load_state_dict(loaded)
    step(optimizer, own)
    step(again, others)
    assert all(map(torch.equal, own, others))


@pytest.mark.framework
def test_an_optimizer_beside_the_weights(files: Path) -> None:
    for folder in (
        files / "safetensors" / "trainer" / "checkpoint-2",
        files / "pytorch" / "trainer-bin" / "checkpoint-1",
    ):
        wanted = torch.load(folder / "optimizer.pt")
        with ckpttool.open_checkpoint(folder) as checkpoint:
            assert same(checkpoint.state_dict(key="optimizer"), wanted)


@pytest.mark.framework
def test_a_converted_optimizer(saved: Path, tmp_path: Path) -> None:
    ckpttool.convert(saved, tmp_path / "m.safetensors")
    with ckpttool.open_checkpoint(tmp_path / "m.safetensors") as checkpoint:
        assert same(checkpoint.state_dict(key="optimizer"), torch.load(saved)["optimizer"])


def test_one_of_several_optimizers(tmp_path: Path) -> None:
    own = parameters()
    states = [OPTIMIZERS[name](own).state_dict() for name in ("SGD", "two groups")]
    torch.save({"gen": {"opt": states[0]}, "disc": {"opt": states[1]}}, tmp_path / "m.pth")
    with ckpttool.open_checkpoint(tmp_path / "m.pth") as checkpoint:
        assert same(checkpoint.state_dict(key="disc.opt"), states[1])
        with pytest.raises(KeyError, match=r"2 optimizers \(choose from gen\.opt, disc\.opt\)"):
            checkpoint.state_dict(key="optimizer")


def test_objects_in_an_optimizer(tmp_path: Path) -> None:
    groups = [{"lr": np.float64(0.1), "params": []}]
    torch.save({"optimizer": {"state": {}, "param_groups": groups}}, tmp_path / "m.pth")
    with ckpttool.open_checkpoint(tmp_path / "m.pth") as checkpoint:
        assert checkpoint.state_dict("numpy", key="optimizer")["param_groups"] == [{"lr": 0.1, "params": []}]
    groups[0]["lr"] = tmp_path
    torch.save({"optimizer": {"state": {}, "param_groups": groups}}, tmp_path / "m.pth")
    with (
        ckpttool.open_checkpoint(tmp_path / "m.pth") as checkpoint,
        pytest.raises(TypeError, match=r"optimizer\.param_groups\.0\.lr: an object that can't be made"),
    ):
        checkpoint.state_dict(key="optimizer")


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_empty_tensors(tmp_path: Path, shape: tuple[int, ...]) -> None:
    torch.save({"w": torch.empty(shape)}, tmp_path / "m.pth")
    with ckpttool.open_checkpoint(tmp_path / "m.pth") as checkpoint:
        loaded = checkpoint.state_dict()["w"]
    assert (loaded.shape, loaded.dtype) == (shape, torch.float32)


def test_a_file_that_was_cut_meanwhile(saved: Path) -> None:
    with ckpttool.open_checkpoint(saved) as checkpoint:
        saved.write_bytes(saved.read_bytes()[:600])
        with pytest.raises(ckpttool.Truncated, match="bytes too early"):
            checkpoint.state_dict()
