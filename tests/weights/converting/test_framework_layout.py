"""Weights in another framework's layout and names, where it is known of what type each layer is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

from ckpttool import ConvertOptions, DiffOptions, UsageError, convert, diff, open_checkpoint
from ckpttool.containers.toml import parse_toml
from ckpttool.formats.writer import Content
from ckpttool.weights.converting.framework_layout import to_layout
from ckpttool.weights.converting.map_edits import rename_by_map
from ckpttool.weights.pairing.map_file import parse_map
from tests.support.checkpoints import numbers
from tests.support.contents import arrays, content_of, made_of
from tests.support.tensors import Array
from tests.support.twins import FIXTURES

LSTM = {"kernel": (3, 8), "recurrent_kernel": (2, 8), "bias": (8,)}


def torch_of(path: Path) -> tuple[dict[str, Array], list[str]]:
    with open_checkpoint(path) as opened:
        made, notes = to_layout(content_of(opened), opened, "torch")
        return arrays(made), notes


def require_twin(found: dict[str, Array]) -> None:
    truth = dict(np.load(FIXTURES / "twin.npz"))
    both = truth.pop("lstm.bias_ih_l0") + truth.pop("lstm.bias_hh_l0")
    assert np.array_equal(found.pop("lstm.bias_ih_l0"), both)
    assert np.array_equal(found.pop("lstm.bias_hh_l0"), np.zeros_like(both))
    assert found.keys() == truth.keys()
    assert all(np.array_equal(found[name], truth[name]) for name in truth)


# To PyTorch -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["twin.keras", "twin.h5", "twin-keras2.h5"])
def test_models_of_keras(twins: Path, name: str) -> None:
    found, notes = torch_of(twins / name)
    require_twin(found)
    assert "Dense kernel (I, O) = Linear weight (O, I): 2 tensors" in notes
    assert "a norm's eps is not a weight: the default is 1e-5 in PyTorch, 1e-3 in Keras" in notes
    assert notes[-1] == "left out, as names and layouts change: parts for keras only"


def test_a_zoo_of_layers(twins: Path) -> None:
    found, _ = torch_of(twins / "zoo.keras")
    truth = load_file(twins / "zoo.safetensors")
    assert found.keys() == truth.keys()
    assert all(np.array_equal(found[name], truth[name]) for name in truth)


def test_a_model_of_paddle(twins: Path) -> None:
    found, _ = torch_of(twins / "twin-fluid")
    truth = np.load(FIXTURES / "twin.npz")
    assert found.keys() == set(truth)
    assert all(np.array_equal(found[name], truth[name]) for name in truth)


@pytest.mark.parametrize("name", ["twin.weights.h5", "twin-tf/ckpt-1", "twin-savedmodel"])
def test_a_dense_that_may_stand_behind_a_flatten(twins: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"fc1.*: it may follow a Flatten"):
        torch_of(twins / name)


@pytest.mark.parametrize(
    ("weights", "name"),
    [
        ({"x.0": numbers(3, 5)}, "x.0"),
        ({"rnn/basic_lstm_cell/kernel": numbers(5, 8)}, "rnn/basic_lstm_cell/kernel"),
        ({"mine.tables": numbers(4, 4, 4)}, "mine.tables"),
    ],
)
def test_what_nothing_is_known_of_is_refused(weights: dict[str, Array], name: str) -> None:
    content, opened = made_of(weights, "keras")
    with pytest.raises(UsageError, match=f"^{name}: unknown layer type"):
        to_layout(content, opened, "torch")


def test_unknown_kernels_in_plain_containers_are_refused() -> None:
    content, opened = made_of({"c/kernel": numbers(3, 4, 5), "m.weight": numbers(2, 2)})
    with pytest.raises(UsageError, match=r"^c/kernel: unknown layer type"):
        to_layout(content, opened, "torch")


def test_what_is_pytorchs_stays(tmp_path: Path) -> None:
    torch.save({"fc.weight": torch.ones(2, 3), "epoch": 2}, tmp_path / "m.pth")
    with open_checkpoint(tmp_path / "m.pth") as opened:
        content = content_of(opened)
        assert to_layout(content, opened, "torch") == (
            content,
            ["all tensors already have the layout torch"],
        )


def test_an_attention_that_is_not_square_keeps_its_parts() -> None:
    held = {f"m.{part}.kernel": numbers(6, 2, 4) for part in ("query", "key", "value")}
    content, opened = made_of(held, "keras")
    made, _ = to_layout(content, opened, "torch")
    assert [(one.name, one.shape) for one in made.tensors] == [(f"m.{p}_proj.weight", (8, 6)) for p in "qkv"]


def test_both_directions_have_two_biases_each() -> None:
    cells = ("forward_lstm", "backward_lstm")
    held = {f"both.{cell}.cell.{name}": numbers(*shape) for cell in cells for name, shape in LSTM.items()}
    content, opened = made_of(held, "keras")
    found = arrays(to_layout(content, opened, "torch")[0])
    assert found.keys() == {f"both.{name}" for name in nn.LSTM(3, 2, bidirectional=True).state_dict()}
    assert np.array_equal(found["both.weight_ih_l0_reverse"], numbers(3, 8).T)
    assert np.array_equal(found["both.bias_ih_l0_reverse"], numbers(8))
    assert not found["both.bias_hh_l0_reverse"].any()


def test_an_optimizer_is_refused() -> None:
    content, opened = made_of(
        {"a.kernel": numbers(2, 3), "optimizer.m": numbers(2, 3)}, optimizer="optimizer"
    )
    for layout in ("torch", "keras"):
        with pytest.raises(UsageError, match=r"^optimizer\.m: an optimizer's state .* --only weights"):
            to_layout(content, opened, layout)


# With a map -------------------------------------------------------------------------------------------


def mapped(content: Content, text: str) -> Content:
    return rename_by_map(content, parse_map("map.toml", parse_toml(text)))[0]


def test_a_map_gives_names_and_the_layer_its_layout(twins: Path) -> None:
    with open_checkpoint(twins / "twin.keras") as opened:
        content = mapped(content_of(opened), '[names]\n"fc1.0" = "head.weight"\n')
        found = arrays(to_layout(content, opened, "torch")[0])
    truth = np.load(FIXTURES / "twin.npz")
    assert np.array_equal(found["head.weight"], truth["fc1.weight"])
    assert np.array_equal(found["fc1.bias"], truth["fc1.bias"])


def test_a_table_decides_the_layout() -> None:
    content, opened = made_of({"x.0": numbers(3, 3), "d.kernel": numbers(4, 4)}, "keras")
    tables = '[[tensor]]\nfrom = "x.0"\nto = "x.weight"\n\n[[tensor]]\nfrom = "d.kernel"\nto = "d.kernel"\n'
    found = arrays(to_layout(mapped(content, tables), opened, "torch")[0])
    assert np.array_equal(found["x.weight"], numbers(3, 3))
    assert np.array_equal(found["d.kernel"], numbers(4, 4))


def test_a_name_for_what_becomes_two_tensors_is_refused(twins: Path) -> None:
    with open_checkpoint(twins / "twin.keras") as opened:
        content = mapped(content_of(opened), '[names]\n"lstm.cell.2" = "rnn.bias"\n')
        with pytest.raises(UsageError, match="it is not one tensor in both layouts"):
            to_layout(content, opened, "torch")


def test_two_of_one_name_are_refused(twins: Path) -> None:
    with open_checkpoint(twins / "twin.keras") as opened:
        content = mapped(content_of(opened), '[names]\n"fc1.0" = "fc2.weight"\n')
        with pytest.raises(UsageError, match=r"^fc2\.weight: .* would both get this name"):
            to_layout(content, opened, "torch")


# To Keras ---------------------------------------------------------------------------------------------


class Net(nn.Module):
    """A module of each kind that has a twin in Keras, none of which follows a Flatten."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, (3, 2)), nn.BatchNorm2d(4)
        self.deep, self.up = nn.Conv1d(4, 4, 2, groups=2), nn.ConvTranspose2d(4, 6, 3)
        self.fc, self.tokens = nn.Linear(3, 2), nn.Embedding(7, 5)
        self.lstm, self.gru, self.rnn = nn.LSTM(5, 3), nn.GRU(5, 3), nn.RNN(5, 3)
        self.ln, self.attn = nn.LayerNorm(5), nn.MultiheadAttention(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.norm(self.conv(x)).mean((2, 3))[:, :3])


def gates(array: Array) -> Array:
    reset, update, new = np.split(array, 3)
    return np.concatenate([update, reset, new])


def expected_of(net: nn.Module) -> dict[str, Array]:
    """Return what Keras holds, by the table of layouts, computed here."""
    held = {name: one.numpy() for name, one in net.state_dict().items()}
    made = {
        "conv/kernel": held["conv.weight"].transpose(2, 3, 1, 0),
        "deep/kernel": held["deep.weight"].transpose(2, 1, 0),
        "up/kernel": held["up.weight"].transpose(2, 3, 1, 0),
        "fc/kernel": held["fc.weight"].T,
        "tokens/embeddings": held["tokens.weight"],
        "gru/cell/kernel": gates(held["gru.weight_ih_l0"]).T,
        "gru/cell/recurrent_kernel": gates(held["gru.weight_hh_l0"]).T,
        "gru/cell/bias": np.stack([gates(held[f"gru.bias_{part}_l0"]) for part in ("ih", "hh")]),
        "attn/output_dense/kernel": held["attn.out_proj.weight"].reshape(6, 2, 3).transpose(1, 2, 0),
        "attn/output_dense/bias": held["attn.out_proj.bias"],
    }
    made |= {f"{name}/bias": held[f"{name}.bias"] for name in ("conv", "deep", "up", "fc")}
    for name in ("lstm", "rnn"):
        made[f"{name}/cell/kernel"] = held[f"{name}.weight_ih_l0"].T
        made[f"{name}/cell/recurrent_kernel"] = held[f"{name}.weight_hh_l0"].T
        made[f"{name}/cell/bias"] = held[f"{name}.bias_ih_l0"] + held[f"{name}.bias_hh_l0"]
    for name in ("norm", "ln"):
        made |= {f"{name}/gamma": held[f"{name}.weight"], f"{name}/beta": held[f"{name}.bias"]}
    made |= {
        f"norm/moving_{to}": held[f"norm.running_{own}"]
        for to, own in (("mean", "mean"), ("variance", "var"))
    }
    kernels = held["attn.in_proj_weight"].reshape(3, 2, 3, 6).transpose(0, 3, 1, 2)
    for at, part in enumerate(("query", "key", "value")):
        made[f"attn/{part}_dense/kernel"] = kernels[at]
        made[f"attn/{part}_dense/bias"] = held["attn.in_proj_bias"].reshape(3, 2, 3)[at]
    return made


def saved_whole(net: nn.Module, path: Path) -> None:
    torch.save(net, path)


def saved_in_a_dict(net: nn.Module, path: Path) -> None:
    torch.save({"model": net, "epoch": 3}, path)


def scripted(net: nn.Module, path: Path) -> None:
    torch.jit.script(net).save(str(path))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("save", [saved_whole, scripted])
def test_a_module_of_pytorch(save: Callable[[nn.Module, Path], None], tmp_path: Path) -> None:
    torch.manual_seed(3)
    net = Net().eval()
    save(net, tmp_path / "net.pt")
    with open_checkpoint(tmp_path / "net.pt") as opened:
        weights = Content(tuple(one for one in opened.tensors if one.role.value == "weights"))
        made, notes = to_layout(weights, opened, "keras")
        found = {"/".join(map(str, one.path)): one.array() for one in made.tensors}
    expected = expected_of(net)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert np.array_equal(found[name], array), name
    assert "LSTM bias = bias_ih + bias_hh: 2 tensors" in notes


def keras_of(net: nn.Module, path: Path) -> dict[str, Array]:
    torch.save(net, path / "net.pt")
    with open_checkpoint(path / "net.pt") as opened:
        weights = Content(tuple(one for one in opened.tensors if one.role.value == "weights"))
        return arrays(to_layout(weights, opened, "keras")[0])


def test_what_keras_has_no_twin_of(tmp_path: Path) -> None:
    cases = [
        (
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2)),
            r"2\.weight: it may follow a Flatten",
        ),
        (nn.ModuleList([nn.Linear(4, 2)]), r"0\.weight: it may follow a Flatten"),
        (nn.Sequential(nn.Linear(2, 4), nn.Unflatten(1, (2, 2))), r"0\.weight: it may .* precede a Reshape"),
        (nn.Sequential(nn.LSTM(3, 2, 2)), r"0\.weight_ih_l1: Keras has one layer for each"),
        (nn.Sequential(nn.LSTM(3, 2, bidirectional=True)), r"0\.weight_ih_l0_reverse: Keras has one"),
        (nn.Sequential(nn.LayerNorm((3, 4))), r"0\.weight: no rule for LayerNorm"),
        (nn.Sequential(nn.Bilinear(2, 3, 4)), r"0\.weight: no rule for Bilinear"),
        (nn.Sequential(nn.ConvTranspose2d(4, 4, 2, groups=2)), r"0\.weight: Keras has no grouped transposed"),
        (nn.Sequential(nn.MultiheadAttention(4, 2, kdim=3)), r"0\.q_proj_weight: no rule"),
    ]
    for at, (net, told) in enumerate(cases):
        folder = tmp_path / str(at)
        folder.mkdir()
        with pytest.raises(UsageError, match=told):
            keras_of(net, folder)


def test_a_chain_of_linear_layers_says_how_they_are_connected(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Sequential(nn.Dropout(), nn.Linear(8, 4)))
    found = keras_of(net, tmp_path)
    held = {name: one.numpy() for name, one in net.state_dict().items()}
    assert found.keys() == {"0.kernel", "0.bias", "2.1.kernel", "2.1.bias"}
    assert np.array_equal(found["0.kernel"], held["0.weight"].T)
    assert np.array_equal(found["2.1.kernel"], held["2.1.weight"].T)


def test_a_state_dict_does_not_say_of_what_types_its_layers_are() -> None:
    with open_checkpoint(FIXTURES / "twin.pth") as opened, pytest.raises(UsageError, match="--model FILE"):
        to_layout(content_of(opened), opened, "keras")


# Compared with its source -----------------------------------------------------------------------------


def require_equal(source: Path, layout: Literal["torch", "keras"], target: Path) -> None:
    converted = convert(source, target, ConvertOptions(layout=layout, only="weights"))
    assert converted.verified
    found = diff(source, target, DiffOptions(only="weights"))
    assert (found.changed, found.added, found.removed) == ((), (), ())
    assert found.undecided == () and found.equal


@pytest.mark.parametrize("name", ["twin.keras", "twin.h5", "twin-static.pdmodel", "zoo.keras"])
def test_what_is_laid_out_as_pytorch_has_it_is_equal_to_its_source(
    twins: Path, tmp_path: Path, name: str
) -> None:
    require_equal(twins / name, "torch", tmp_path / "made.safetensors")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("net", [Net().eval(), nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))])
def test_what_is_laid_out_as_keras_has_it_is_equal_to_its_source(net: nn.Module, tmp_path: Path) -> None:
    scripted(net, tmp_path / "net.pt")
    require_equal(tmp_path / "net.pt", "keras", tmp_path / "made.npz")
