"""Weights that hold nothing are warned of; what is one value in honest models is not."""

from __future__ import annotations

import json
import struct
import warnings
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from ckpttool import Finding, Severity, verify
from tests.support.torch_files import saved

pytestmark = pytest.mark.framework


def findings_of(path: Path) -> list[tuple[str, str | None]]:
    return [(finding.code, finding.where) for finding in _findings(path)]


def codes(path: Path) -> list[str]:
    return [finding.code for finding in _findings(path)]


def _findings(path: Path) -> list[Finding]:
    return [one for one in verify(path).findings if one.check != "safety"]


def safetensors(path: Path, tensors: Mapping[str, tuple[list[int], bytes]]) -> Path:
    header, end = {}, 0
    for name, (shape, data) in tensors.items():
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data for _, data in tensors.values()))
    return path


class Attention(nn.Module):
    """A causal mask as GPT-2 kept it, positions as BERT does, and a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(8, 24)
        self.register_buffer("bias", torch.ones(1, 1, 8, 8).tril())
        self.register_buffer("attn_mask", torch.zeros(8, 8))
        self.register_buffer("masked_bias", torch.tensor(-1e4))
        self.register_buffer("position_ids", torch.zeros(1, 8, dtype=torch.long))
        self.register_buffer("kv_cache", torch.zeros(8, 8))


class Honest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8, padding_idx=0)
        self.attn = Attention()
        self.convs = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.LayerNorm([4, 6, 6]))
        self.head = nn.Linear(8, 2)
        self.gate = nn.Parameter(torch.zeros(1, 1, 8))
        self.layer_scale = nn.Parameter(torch.full((8, 1, 1), 1e-6))
        nn.init.zeros_(self.head.bias)


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_fresh_model_and_optimizer_are_no_findings(is_zip: bool, tmp_path: Path) -> None:
    model = Honest()
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # all moments are zero
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 0}
    assert codes(saved(tmp_path / "a.pth", content, is_zip=is_zip)) == []
    assert codes(saved(tmp_path / "b.pth", model.state_dict(), is_zip=is_zip)) == []
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    assert codes(saved(tmp_path / "c.pth", plain.state_dict(), is_zip=is_zip)) == []


def test_observers_and_masks_of_pruning_are_no_findings(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        observer = torch.ao.quantization.PerChannelMinMaxObserver()  # its minima have no element yet
        quantised = torch.quantize_per_channel(
            torch.randn(4, 4), torch.ones(4), torch.zeros(4, dtype=torch.long), 0, torch.qint8
        )
    layer = prune.identity(nn.Linear(4, 4), "weight")
    content = {**observer.state_dict(prefix="observer."), **layer.state_dict(prefix="layer."), "q": quantised}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = saved(tmp_path / "a.pth", {"state_dict": content})
    assert codes(path) == []


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_matrix_of_one_value_is_named(is_zip: bool, tmp_path: Path) -> None:
    state = Honest().state_dict()
    state["attn.c_attn.weight"].zero_()
    state["convs.0.weight"].fill_(0.5)
    path = saved(tmp_path / "a.pth", {"model": state}, is_zip=is_zip)
    assert findings_of(path) == [
        ("weights-constant", "model.attn.c_attn.weight"),
        ("weights-constant", "model.convs.0.weight"),
    ]
    messages = [finding.message for finding in _findings(path)]
    assert messages == ["all 192 values are 0", "all 108 values are 0.5"]
    assert verify(path).is_valid
    assert not verify(path, strict=True).is_valid


def test_one_other_value_anywhere_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of a large tensor are looked at apart, and may each repeat a value of their own."""
    monkeypatch.setattr("ckpttool.storage.scan.PIECE_BYTES", 1 << 16)
    count = (1 << 14) + (1 << 10)  # more than one piece
    for at in (None, 0, 1, count // 2, count - 1):
        weight = torch.zeros(count)
        if at is not None:
            weight[at] = 1
        path = saved(tmp_path / "a.pth", {"weight": weight.reshape(2, -1)})
        assert codes(path) == (["weights-zero"] if at is None else [])
    halves = torch.cat([torch.zeros(1 << 14), torch.ones(1 << 14)]).reshape(2, -1)
    assert codes(saved(tmp_path / "a.pth", {"weight": halves})) == []


def test_weights_that_are_all_zero_are_one_warning(tmp_path: Path) -> None:
    state = {name: torch.zeros_like(one) for name, one in nn.Linear(4, 4).state_dict().items()}
    path = saved(tmp_path / "a.pth", state)
    assert findings_of(path) == [("weights-zero", None)]
    assert [one.message for one in _findings(path)] == ["all 2 weights are zero"]
    zeros = safetensors(tmp_path / "a.safetensors", {"w": ([2, 2], bytes(16)), "b": ([2], bytes(8))})
    assert codes(zeros) == ["weights-zero"]
    biases = safetensors(tmp_path / "b.safetensors", {"bias": ([2], bytes(8))})
    assert codes(biases) == []


def test_an_adapter_that_was_never_trained_has_a_warning_of_its_own(tmp_path: Path) -> None:
    def adapter(second: float) -> Path:
        factors = struct.pack("<8f", *range(8))
        tensors = {
            f"base_model.model.layers.{at}.q_proj.lora_{kind}.weight": (
                shape,
                factors if kind == "A" else struct.pack("<8f", second * at, *[0] * 7),
            )
            for at in range(4)
            for kind, shape in (("A", [2, 4]), ("B", [4, 2]))
        }
        return safetensors(tmp_path / "adapter_model.safetensors", tensors)

    assert codes(adapter(1)) == []  # a layer that had no gradient is no finding
    path = adapter(0)
    assert codes(path) == ["adapter-untrained"]
    assert _findings(path)[0].where is not None
    assert str(_findings(path)[0].where).endswith("layers.2.q_proj.lora_B.weight and 1 more")


def test_weights_without_an_element_are_counted(tmp_path: Path) -> None:
    """This is what ``save_pretrained`` writes of a model that ZeRO-3 has split."""
    tensors = {
        "model.embed.weight": ([0], b""),
        "model.proj.weight": ([0], b""),
        "model.norm.weight": ([4], struct.pack("<4f", 1, 2, 3, 4)),
        "model.attn._extra_state": ([0], b""),
    }
    path = safetensors(tmp_path / "model.safetensors", tensors)
    assert findings_of(path) == [("weights-empty", "model.embed.weight, model.proj.weight")]
    assert _findings(path)[0].message.startswith("2 of 4 weights have no elements")


def test_an_index_that_knows_better_makes_it_an_error(tmp_path: Path) -> None:
    name = "model-00001-of-00001.safetensors"
    safetensors(tmp_path / name, {"a.weight": ([0], b""), "b.weight": ([2], struct.pack("<2f", 1, 2))})
    index = {"metadata": {"total_size": 4096}, "weight_map": {"a.weight": name, "b.weight": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    found = verify(tmp_path / "model.safetensors.index.json")
    (size,) = [one for one in found.findings if one.code == "shard-total-size"]
    assert size.severity is Severity.ERROR
    assert size.message.endswith("1 tensor of them without elements")


@pytest.mark.parametrize(
    "content",
    [{}, nn.Identity().state_dict(), {"model_state_dict": {}, "epoch": 3}, {"state_dict": {}, "loss": 0.5}],
)
def test_a_file_or_a_state_dict_of_no_tensors_is_told(content: object, tmp_path: Path) -> None:
    assert codes(saved(tmp_path / "a.pth", content)) == ["no-tensors"]
    assert codes(saved(tmp_path / "b.pth", content, is_zip=False)) == ["no-tensors"]


@pytest.mark.parametrize(
    "content",
    [
        {"epoch": 3, "loss": 0.5},
        {"hyper_params": {}, "epoch": 1},
        {"optimizer_state_dict": {}, "step": 2},
        [1, 2],
    ],
)
def test_a_file_of_other_things_is_no_finding(content: object, tmp_path: Path) -> None:
    assert codes(saved(tmp_path / "a.pth", content)) == []
