"""How many parameters a model has, and how many of its tensors' elements are those of buffers."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.utils import parametrizations, prune, spectral_norm

from ckpttool import Role, convert, inspect, open_checkpoint


def elements_of(path: Path) -> tuple[int, int]:
    with open_checkpoint(path) as checkpoint:
        return checkpoint.parameters, checkpoint.buffers


def state_of(module: torch.nn.Module) -> dict[str, Any]:
    return module.state_dict()


def nested(key: str) -> Callable[[torch.nn.Module], object]:
    return lambda module: {key: module.state_dict(), "epoch": 1}


def normalized() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Embedding(3, 2))


def masked() -> torch.nn.Module:
    module = torch.nn.Linear(4, 3)
    prune.random_unstructured(module, "weight", 0.5)
    return module


def with_positions() -> torch.nn.Module:
    module = torch.nn.Linear(4, 3)
    module.register_buffer("position_ids", torch.arange(7).reshape(1, 7))
    module.register_buffer("causal", torch.ones(1, 1, 5, 5, dtype=torch.bool))
    return module


def tied() -> torch.nn.Module:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    module[1].weight = module[0].weight
    return module


@pytest.mark.parametrize("hold", [state_of, nested("model"), nested("net")])
@pytest.mark.parametrize(
    "make",
    [
        normalized,
        masked,
        with_positions,
        tied,
        lambda: spectral_norm(torch.nn.Linear(4, 3)),
        lambda: parametrizations.spectral_norm(torch.nn.Linear(4, 3)),
        lambda: parametrizations.weight_norm(torch.nn.Linear(4, 3)),
        lambda: torch.nn.TransformerEncoderLayer(8, 2),
    ],
)
def test_modules(
    make: Callable[[], torch.nn.Module], hold: Callable[[torch.nn.Module], object], tmp_path: Path
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        module = make()
    parameters = sum(one.numel() for one in module.parameters())
    buffers = sum(one.numel() for one in module.buffers())
    torch.save(hold(module), tmp_path / "m.pth")
    assert elements_of(tmp_path / "m.pth") == (parameters, buffers)


def test_a_whole_module(tmp_path: Path) -> None:
    module = normalized()
    torch.save(module, tmp_path / "m.pth")
    assert elements_of(tmp_path / "m.pth") == (sum(one.numel() for one in module.parameters()), 17)


def quantized(scheme: str) -> torch.Tensor:
    weight = torch.ones(4, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if scheme == "tensor":
            return torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8)
        scales, zeros = torch.ones(4), torch.zeros(4, dtype=torch.int64)
        return torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)


def sparse(layout: torch.layout) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        block = (2, 2) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
        return torch.eye(6).to_sparse(layout=layout, blocksize=block)


def ragged(layout: torch.layout) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=layout)


@pytest.mark.parametrize(
    "hold", [lambda one: one, lambda one: {"model": one}, lambda one: {"a": 1, "net": one}]
)
@pytest.mark.parametrize(
    ("tensor", "size"),
    [
        *((sparse(getattr(torch, f"sparse_{kind}")), 36) for kind in ("coo", "csr", "csc", "bsr", "bsc")),
        (quantized("tensor"), 24),
        (quantized("channel"), 24),
        (ragged(torch.strided), 18),
        (ragged(torch.jagged), 18),
        (torch.empty(3, 5, device="meta"), 15),
    ],
)
def test_tensors_that_are_stored_as_several_count_by_their_logical_shape(
    tensor: torch.Tensor, size: int, hold: Callable[[object], object], tmp_path: Path
) -> None:
    """Neighbours stay what they are, whatever they are called."""
    torch.save(hold({"foo": torch.ones(2), "bar": tensor, "baz": torch.ones(3)}), tmp_path / "m.pth")
    assert elements_of(tmp_path / "m.pth") == (size + 5, 0)
    assert {one.role for one in inspect(tmp_path / "m.pth").tensors} == {Role.WEIGHTS}


@pytest.mark.parametrize("hold", [lambda one: one, lambda one: {"a": 1, "flow": one}])
@pytest.mark.parametrize(
    "settings",
    [
        {"scheme": "affine"},
        {"scheme": "per_tensor_affine", "scale": 0.1, "zero_point": 0},
        {"layout": "nested"},
        {"layout": "jagged"},
        {"layout": "sparse_coo", "shape": [2, 2]},
        {"class": "Net", "global_shape": [2, 2]},
    ],
)
def test_settings_of_the_user_describe_no_tensor(
    settings: dict[str, object], hold: Callable[[object], object], tmp_path: Path
) -> None:
    moments = {"state": {0: {"exp_avg": torch.ones(3, 4)}}, "param_groups": [{"params": [0]}]}
    content = {**settings, "model": {"fc.weight": torch.ones(3, 4)}, "optimizer": moments}
    torch.save(hold(content), tmp_path / "m.pth")
    assert elements_of(tmp_path / "m.pth") == (12, 0)
    roles = {one.name.rpartition(".")[2]: one.role for one in inspect(tmp_path / "m.pth").tensors}
    assert roles == {"weight": Role.WEIGHTS, "exp_avg": Role.OPTIMIZER}


@pytest.mark.parametrize("to", ["torch-dcp", "safetensors", "hdf5"])
def test_a_conversion_counts_as_its_source(to: str, tmp_path: Path) -> None:
    torch.save({"model": {"w": sparse(torch.sparse_coo), "b": torch.ones(3)}}, tmp_path / "m.pth")
    convert(tmp_path / "m.pth", tmp_path / "converted", to=to)
    assert elements_of(tmp_path / "converted") == (36 + 3, 0)


def test_dynamic_quantization(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = torch.nn.Sequential(torch.nn.Linear(6, 4))
        net = torch.ao.quantization.quantize_dynamic(net, {torch.nn.Linear}, dtype=torch.qint8)
    torch.save(net.state_dict(), tmp_path / "m.pth")
    assert elements_of(tmp_path / "m.pth") == (6 * 4 + 4, 2)  # and the scale and zero point of its outputs


# Packed words -----------------------------------------------------------------------------------------

_IN, _OUT, _GROUP, _LAYER = 64, 32, 32, "model.layers.0.q_proj"
_HALF, _INT32 = torch.float16, torch.int32


def gptq(bits: int) -> dict[str, torch.Tensor]:
    return {
        "qweight": torch.zeros(_IN * bits // 32, _OUT, dtype=_INT32),
        "qzeros": torch.zeros(_IN // _GROUP, _OUT * bits // 32, dtype=_INT32),
        "scales": torch.zeros(_IN // _GROUP, _OUT, dtype=_HALF),
        "g_idx": torch.zeros(_IN, dtype=_INT32),
    }


_AWQ = {
    "qweight": torch.zeros(_IN, _OUT * 4 // 32, dtype=_INT32),
    "qzeros": torch.zeros(_IN // _GROUP, _OUT * 4 // 32, dtype=_INT32),
    "scales": torch.zeros(_IN // _GROUP, _OUT, dtype=_HALF),
}
_MLX = {
    "weight": torch.zeros(_OUT, _IN * 4 // 32, dtype=torch.uint32),
    "scales": torch.zeros(_OUT, _IN // _GROUP, dtype=_HALF),
    "biases": torch.zeros(_OUT, _IN // _GROUP, dtype=_HALF),
}
_NF4 = {
    "weight": torch.zeros(_IN * _OUT // 2, 1, dtype=torch.uint8),
    "weight.absmax": torch.zeros(_IN * _OUT // 64, dtype=torch.uint8),
    "weight.quant_map": torch.zeros(16),
    "weight.quant_state.bitsandbytes__nf4": torch.zeros(90, dtype=torch.uint8),
}
_INT8 = {"weight": torch.zeros(_OUT, _IN, dtype=torch.int8), "SCB": torch.zeros(_OUT)}
_FP8 = {"weight": torch.zeros(_OUT, _IN).to(torch.float8_e4m3fn), "weight_scale_inv": torch.zeros(1, 1)}
_PACKED = {
    "weight_packed": torch.zeros(_OUT, _IN // 8, dtype=_INT32),
    "weight_scale": torch.zeros(_OUT, 2, dtype=_HALF),
    "weight_shape": torch.tensor([_OUT, _IN]),
}


@pytest.mark.parametrize(
    ("name", "save"), [("model.safetensors", save_file), ("pytorch_model.bin", torch.save)]
)
@pytest.mark.parametrize(
    ("tensors", "config"),
    [
        *(
            (gptq(bits), {"quantization_config": {"quant_method": "gptq", "bits": bits}})
            for bits in (2, 3, 4, 8)
        ),
        (_AWQ, {"quantization_config": {"quant_method": "awq", "bits": 4}}),
        (_MLX, {"quantization": {"group_size": 32, "bits": 4}}),
        (_MLX, {"quantization": {"group_size": 32, "bits": 8, _LAYER: {"group_size": 32, "bits": 4}}}),
        (_NF4, {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}),
        (_INT8, {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}),
        (_FP8, {"quantization_config": {"quant_method": "fp8"}}),
        (_PACKED, {"quantization_config": {"config_groups": {"group_0": {"weights": {"num_bits": 4}}}}}),
        ({"weight": torch.zeros(_OUT, _IN)}, {}),
    ],
)
def test_words_hold_as_many_weights_as_the_configuration_says(
    tensors: dict[str, torch.Tensor],
    config: dict[str, object],
    name: str,
    save: Callable[..., None],
    tmp_path: Path,
) -> None:
    state = {f"{_LAYER}.{part}": value for part, value in tensors.items()}
    state |= {f"{_LAYER}.bias": torch.zeros(_OUT), "model.norm.weight": torch.zeros(_IN)}
    save(state, tmp_path / name)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert elements_of(tmp_path / name) == (_IN * _OUT + _OUT + _IN, 0)
