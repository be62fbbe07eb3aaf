"""Types of elements: rounded as PyTorch rounds them, and nothing lost without a word."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from ckpttool import Role, UsageError, open_checkpoint
from ckpttool.formats.writer import Content
from ckpttool.weights.converting.dtype_cast import TARGETS, cast
from tests.support.checkpoints import tensor
from tests.support.contents import content_of
from tests.support.tensors import tensor_of

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SOURCES = [*DTYPES, "float64", "float8_e4m3fn", "float8_e5m2"]


def bits(tensor: torch.Tensor) -> np.ndarray:
    """Return the bits of each element; of a NaN, whichever, zero."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return torch.where(tensor.isnan(), 0, tensor.view(width)).numpy()


def through(source: torch.Tensor, target: str) -> torch.Tensor:
    """Return what a cast gives, as PyTorch reads its bytes."""
    name = str(source.dtype).removeprefix("torch.")
    raw = source.view(torch.uint8).numpy().tobytes()
    held = np.frombuffer(raw, getattr(ml_dtypes, name, None) or np.dtype(name))
    made, _ = cast(Content((tensor_of(held, name),)), target)
    return torch.frombuffer(bytearray(made.tensors[0].tobytes()), dtype=DTYPES[target])


def finite(source: torch.Tensor, target: str) -> torch.Tensor:
    """Return the elements that stay finite, or were not."""
    kept = source.float().isfinite().logical_not() | source.to(DTYPES[target]).float().isfinite()
    return source[kept & ((source.double().isfinite()) == source.to(DTYPES[target]).double().isfinite())]


def test_every_value_is_what_torch_makes_of_it() -> None:
    for target in TARGETS:
        for source in SOURCES:
            dtype = getattr(torch, source)
            if dtype.itemsize == 1:
                given_ = torch.arange(256).to(torch.uint8).view(dtype)
            elif dtype.itemsize == 2:
                given_ = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
            else:
                chance = np.random.default_rng(1)
                wide = chance.normal(size=1 << 16) * 2.0 ** chance.integers(-60, 15, 1 << 16)
                given_ = torch.from_numpy(wide).to(dtype)
            if source != target:
                if dtype.itemsize > 1:
                    given_ = finite(given_, target)
                assert np.array_equal(bits(through(given_, target)), bits(given_.to(DTYPES[target]))), (
                    source,
                    target,
                )


@given(npst.arrays(np.uint32, st.integers(0, 40)))
@pytest.mark.parametrize("target", ["float16", "bfloat16"])
def test_any_bits_of_float32(target: str, words: np.ndarray) -> None:
    source = finite(torch.from_numpy(words.view("f4").copy()), target)
    if source.numel():
        assert np.array_equal(bits(through(source, target)), bits(source.to(DTYPES[target])))


@pytest.mark.parametrize(("source", "target"), [("float32", "bfloat16"), ("float32", "float16")])
def test_a_nan_of_float32_has_the_bits_that_torch_gives_it(source: str, target: str) -> None:
    words = [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FA12345, 0xFFD23456]
    given_ = torch.from_numpy(np.array([*words, 0x3F800000] * 40, "u4").view("f4"))
    made, expected = through(given_, target), given_.to(DTYPES[target])
    if target == "bfloat16" and expected.view(torch.int16)[0] != -1:
        assert made.isnan().equal(given_.isnan())  # processors with an instruction for it have other bits
    else:
        assert torch.equal(made.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("source", ["float16", "float8_e4m3fn", "float8_e5m2"])
def test_a_nan_of_fewer_bits_has_the_bits_that_torch_gives_it(source: str) -> None:
    given_ = torch.full((70,), float("nan")).to(getattr(torch, source))
    made = through(given_, "bfloat16")
    assert torch.equal(made.view(torch.int16), given_.to(torch.bfloat16).view(torch.int16))


def test_a_tie_of_float64_is_rounded_twice_as_torch_does() -> None:
    source = torch.tensor([1 + 2**-11 + 2**-40, 1 + 3 * 2**-11 - 2**-40], dtype=torch.float64)
    assert through(source, "float16").tolist() == source.to(torch.float16).tolist() == [1.0, 1 + 2**-9]


@pytest.mark.parametrize(
    ("value", "source", "target"),
    [(65520.0, "float32", "float16"), (3.4028235e38, "float32", "bfloat16"), (1e39, "float64", "float32")],
)
def test_a_finite_value_that_would_become_infinite(value: float, source: str, target: str) -> None:
    assert torch.tensor(value, dtype=getattr(torch, source)).to(DTYPES[target]).isinf()
    held = np.array([1, value, np.inf, np.nan, -value], source)
    made, _ = cast(Content((tensor("fc.weight", held),)), target)
    with pytest.raises(UsageError, match=rf"fc\.weight: 2 finite values would become infinite in {target}"):
        made.tensors[0].tobytes()
    calm, _ = cast(Content((tensor("t", np.array([np.inf, np.nan, 1], source)),)), target)
    assert np.isinf(calm.tensors[0].array().astype("f8")[0])


def test_what_is_not_floating_stays() -> None:
    kept = tensor("n", np.arange(3)), tensor("b", np.array([True])), tensor("c", np.array([1j], "complex64"))
    made, notes = cast(Content(kept), "float16")
    assert all(one is other for one, other in zip(made.tensors, kept, strict=True))
    assert notes == []


def test_blocks_are_as_large_as_asked_and_empty_tensors_are_empty() -> None:
    held = np.random.default_rng(0).normal(size=300_001).astype("f4")
    made, _ = cast(Content((tensor("t", held), tensor("e", np.zeros((0, 3), "f4")))), "bfloat16")
    blocks = [bytes(block) for block in made.tensors[0].blocks(4096)]
    assert max(map(len, blocks)) <= 4096
    assert b"".join(blocks) == torch.from_numpy(held).bfloat16().view(torch.uint8).numpy().tobytes()
    assert made.tensors[1].tobytes() == b"" and made.tensors[1].shape == (0, 3)


def test_packed_floats_are_widened() -> None:
    codes = np.arange(16, dtype=np.uint8).repeat(3)
    made, _ = cast(Content((tensor_of(codes, "float4_e2m1fn"),)), "float32")
    assert np.array_equal(made.tensors[0].array(), codes.view(ml_dtypes.float4_e2m1fn).astype("f4"))


def test_a_dict_with_ties_and_an_optimizer(tmp_path: Path) -> None:
    shared = torch.randn(3, 4)
    state = {"a.weight": shared, "b.weight": shared, "n": torch.arange(2)}
    held = {"model": state, "optimizer": {"state": {0: {"step": torch.tensor(1001.0)}}}, "epoch": 2}
    torch.save(held, tmp_path / "m.pth")
    with open_checkpoint(tmp_path / "m.pth") as opened:
        made, notes = cast(content_of(opened), "bfloat16")
        by_name = {one.name: one for one in made.tensors}
        assert by_name["model.b.weight"].shares_with == "model.a.weight"
        for name in ("a.weight", "b.weight"):
            expected = shared.bfloat16().view(torch.uint8).numpy().tobytes()
            assert by_name[f"model.{name}"].tobytes() == expected
        assert by_name["optimizer.state.0.step"].array() == 1001  # 1000 in bfloat16
        assert made.tree["model"]["a.weight"] is by_name["model.a.weight"]
        assert made.tree["epoch"] == 2
    assert notes == [
        "2 tensors of float32 rounded to bfloat16",
        "kept 1 optimizer tensor as stored",
    ]


def test_an_optimizers_state_is_widened() -> None:
    state = replace(tensor("exp_avg", np.float16([1.5])), role=Role.OPTIMIZER)
    made, notes = cast(Content((state,)), "float32")
    assert made.tensors[0].array().tolist() == [1.5]
    assert notes == ["1 tensor of float16 widened to float32"]


def test_scales_are_not_applied_and_that_is_said() -> None:
    held = tensor_of(np.array([1, 2], ml_dtypes.float8_e4m3fn), "float8_e4m3fn")
    _, notes = cast(Content((replace(held, path=("w",)),)), "bfloat16")
    assert notes[1] == "w: converted without their scales"


def test_another_type_is_refused() -> None:
    with pytest.raises(UsageError, match="no type to convert to: 'int8'"):
        cast(Content(()), "int8")
