"""How many parameters a model has, and how many of its tensors' elements are those of buffers."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.utils import parametrizations, prune, spectral_norm

from ckpttool import Role, convert, inspect, open_checkpoint
from tests.conftest import Run
from tests.support.frameworks import python_with_frameworks


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
_NF4_IN_HALVES = _NF4 | {"weight": torch.zeros(_IN * _OUT // 4, 1, dtype=torch.bfloat16)}
_PACKED = {
    "weight_packed": torch.zeros(_OUT, _IN // 8, dtype=_INT32),
    "weight_scale": torch.zeros(_OUT, 2, dtype=_HALF),
    "weight_shape": torch.tensor([_OUT, _IN]),
}
_MXFP4 = {
    "gate_up_proj_blocks": torch.zeros(2, _OUT // 2, _IN // 32, 16, dtype=torch.uint8),
    "gate_up_proj_scales": torch.zeros(2, _OUT // 2, _IN // 32, dtype=torch.uint8),
}
_OPENAI = {
    name.replace("_blocks", ".blocks").replace("_scales", ".scales"): one for name, one in _MXFP4.items()
}
_AQLM = {
    "codes": torch.zeros(_OUT, _IN // 8, 2, dtype=torch.int8),
    "codebooks": torch.zeros(2, 256, 1, 8, dtype=_HALF),
    "scales": torch.zeros(_OUT, 1, 1, 1, dtype=_HALF),
}


def hqq(bits: int, axis: int = 1) -> dict[str, torch.Tensor]:
    groups = _IN * _OUT // _GROUP
    rows, columns = (groups, _GROUP) if axis else (_GROUP, groups)
    each, dtype = (10, _INT32) if bits == 3 else (8 // bits, torch.uint8)
    return {
        "W_q": torch.zeros(math.ceil(rows / each), columns, dtype=dtype),
        "scale": torch.zeros((rows, 1) if axis else (1, columns), dtype=_HALF),
        "zero": torch.zeros((rows, 1) if axis else (1, columns), dtype=_HALF),
        "nbits": torch.tensor(bits, dtype=_INT32),
        "shape": torch.tensor([_OUT, _IN]),
        "packing": torch.tensor([*b"4bit_u8"], dtype=torch.uint8),
        "round_zero": torch.tensor(1, dtype=torch.uint8),
    }


def quanto(bits: int, rows: int) -> dict[str, torch.Tensor]:
    columns = _IN * _OUT // rows
    data = {
        8: {"_data": torch.zeros(rows, columns, dtype=torch.int8)},
        4: {"_data._data": torch.zeros(math.ceil(rows / 2), columns, dtype=torch.uint8)},
        2: {"_data._data": torch.zeros(math.ceil(rows / 4), columns, dtype=torch.uint8)},
    }[bits]
    beside = {"_scale": torch.zeros(rows, 1), "_shift": torch.zeros(rows, 1)}
    outer = {"input_scale": torch.ones(()), "output_scale": torch.ones(())}
    return {f"weight.{name}": one for name, one in (data | beside).items()} | outer


def without(tensors: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {other: one for other, one in tensors.items() if other != name}


def hqq_settings(bits: int) -> dict[str, object]:
    of_weights = {"weight_quant_params": {"nbits": bits, "axis": 0}, "scale_quant_params": {"nbits": 8}}
    return {"quantization_config": {"quant_method": "hqq", "quant_config": of_weights}}


def write_layer(path: Path, tensors: dict[str, torch.Tensor], config: object) -> None:
    state = {f"{_LAYER}.{part}": value for part, value in tensors.items()}
    state |= {f"{_LAYER}.bias": torch.zeros(_OUT), "model.norm.weight": torch.zeros(_IN)}
    (torch.save if path.suffix == ".bin" else save_file)(state, path)
    if config is not None:
        (path.parent / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", ["diffusion_pytorch_model.safetensors", "pytorch_model.bin"])
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
        *((gptq(bits), None) for bits in (2, 3, 4, 8)),
        (without(gptq(4), "g_idx"), {"quantization_config": {"quant_method": "gptq", "bits": 4}}),
        (_AWQ, None),
        (_NF4, None),
        (_NF4, {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}),
        (_NF4_IN_HALVES, {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}),
        (_MXFP4, {"quantization_config": {"quant_method": "mxfp4"}}),
        (_OPENAI, None),
        *((hqq(bits), {}) for bits in (1, 2, 3, 4, 8)),
        *((hqq(bits, axis=0), hqq_settings(bits)) for bits in (1, 2, 4, 8)),
        *((quanto(bits, rows), {}) for bits in (2, 4, 8) for rows in (_OUT, 4 * _OUT, 1)),
        (_AQLM, {"quantization_config": {"quant_method": "aqlm"}}),
        (_INT8, {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}),
        (_FP8, {"quantization_config": {"quant_method": "fp8"}}),
        (_PACKED, {"quantization_config": {"config_groups": {"group_0": {"weights": {"num_bits": 4}}}}}),
        ({"weight": torch.zeros(_OUT, _IN)}, {}),
    ],
)
def test_words_hold_as_many_weights_as_the_layer_has(
    tensors: dict[str, torch.Tensor], config: dict[str, object] | None, name: str, tmp_path: Path
) -> None:
    write_layer(tmp_path / name, tensors, config)
    assert elements_of(tmp_path / name) == (_IN * _OUT + _OUT + _IN, 0)
    with open_checkpoint(tmp_path / name) as checkpoint:
        assert checkpoint.packed == 0


@pytest.mark.parametrize(
    ("tensors", "config", "words"),
    [
        (without(gptq(4), "g_idx"), None, "256 (int32)"),
        (_MLX, {}, "256 (uint32)"),
        (_PACKED, {"quantization_config": {}}, "256 (int32)"),
        (
            _PACKED,
            {
                "quantization_config": {
                    "config_groups": {bits: {"weights": {"num_bits": bits}} for bits in (4, 8)}
                }
            },
            "256 (int32)",
        ),
        (hqq(4, axis=0), {}, "1,024 (uint8)"),
        (hqq(4) | {"W_q": torch.zeros(32, 16, dtype=_HALF)}, hqq_settings(4), "512 (float16)"),
    ],
)
def test_words_of_which_nothing_says_what_they_hold_are_no_parameters(
    run: Run, tensors: dict[str, torch.Tensor], config: object, words: str, tmp_path: Path
) -> None:
    write_layer(tmp_path / "model.safetensors", tensors, config)
    lines = [line.strip() for line in run("inspect", tmp_path / "model.safetensors").out.splitlines()]
    assert f"packed words   {words}, with an unknown number of further parameters" in lines
    assert elements_of(tmp_path / "model.safetensors") == (_OUT + _IN, 0)


def test_names_of_quantized_layers_prove_nothing_without_their_shapes(tmp_path: Path) -> None:
    state = {
        "vq.codes": torch.zeros(7, dtype=torch.int64),
        "vq.codebooks": torch.zeros(4, 16, 8),
        "net.skip_blocks": torch.zeros(3, dtype=torch.int64),
        "net.skip_scales": torch.zeros(5),
    }
    save_file(state, tmp_path / "model.safetensors")
    assert elements_of(tmp_path / "model.safetensors") == (4 * 16 * 8 + 5, 7 + 3)


# Keras ------------------------------------------------------------------------------------------------

_QUANTIZE = """
import json, sys, keras
from keras import layers, quantizers

directory, counts = sys.argv[1], {}


def network(width):
    words = keras.Input((6,), dtype="int32")
    x = layers.Embedding(11, width)(words)
    x = layers.EinsumDense("abc,cde->abde", output_shape=(None, 3, 5), bias_axes="e")(x)
    x = layers.LayerNormalization()(layers.Dense(9)(layers.Dense(7, use_bias=False)(x)))
    return keras.Model(words, x)


def reversible():
    words, layer = keras.Input((6,), dtype="int32"), layers.ReversibleEmbedding(11, 7, tie_weights=False)
    return keras.Model(words, layer(layer(words), reverse=True))


def calibrated(mode):
    data = keras.Input((6,))
    dense, plain = layers.Dense(5), layers.Dense(5, use_bias=False)
    model = keras.Model(data, [dense(data), plain(data)])
    given = {"dataset": ["text"], "tokenizer": str.split, "group_size": 3}
    config = {"gptq": quantizers.GPTQConfig, "awq": quantizers.AWQConfig}[mode](weight_bits=4, **given)
    for layer in (dense, plain):
        layer.quantize(mode, config=config)
        setattr(layer, f"is_{mode}_calibrated", True)
    return model


def save(name, model, *suffixes):
    for suffix in suffixes:
        (model.save_weights if "weights" in suffix else model.save)(f"{directory}/{name}{suffix}")


blocks = quantizers.Int4QuantizationConfig
for name, make, mode, config in (
    ("int8", lambda: network(7), "int8", None),
    ("int4", lambda: network(7), "int4", None),
    ("blocks", lambda: network(7), "int4", blocks(block_size=4)),
    ("reversible8", reversible, "int8", None),
    ("reversible4", reversible, "int4", None),
):
    model = make()
    counts[name] = model.count_params()
    model.quantize(mode, config=config)
    save(name, model, ".keras", ".weights.h5")
model = network(8)
counts["channels"] = model.count_params()
model.quantize("int4", config=blocks(block_size=-1))
save("channels", model, ".keras")
for mode in ("gptq", "awq"):
    save(mode, calibrated(mode), ".weights.h5")
    counts[mode] = 6 * 5 + 5 + 6 * 5
print(json.dumps(counts))
"""


@pytest.mark.framework
def test_quantized_layers_of_keras(tmp_path: Path) -> None:
    counts = json.loads(python_with_frameworks("-c", _QUANTIZE, tmp_path))
    found = {path.name: elements_of(path) for path in tmp_path.iterdir()}
    assert len(found) == 13
    assert found == {name: (counts[name.partition(".")[0]], 0) for name in found}
