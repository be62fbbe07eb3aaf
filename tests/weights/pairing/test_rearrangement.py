"""Tensors in another order than stored, against NumPy's reshape and transpose."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool import DamagedCheckpoint, Tensor, open_checkpoint
from ckpttool.core import values
from ckpttool.core.dtypes import BY_NAME
from ckpttool.core.values import Reordered, Strided, in_memory
from ckpttool.weights.pairing.rearrangement import (
    LayoutMismatch,
    Pattern,
    add_tensors,
    concatenate,
    cut,
    elements,
    parse_pattern,
    rearrange,
    transpose_pattern,
)
from tests.support.checkpoints import Sequential, numbers, tensor
from tests.support.tensors import Array, tensor_of

TYPES = ["<f4", "u1", "<f8", "<c16", "<i2"]


def sequential(one: Tensor) -> Tensor:
    assert one.values is not None
    return replace(one, values=Sequential(one.values), extent=None)


def content(one: Tensor, limit: int = 1 << 20) -> bytes:
    return b"".join(map(bytes, one.blocks(limit)))


@st.composite
def arrangements(draw: st.DrawFn) -> tuple[Array, Pattern, dict[str, int], Array]:
    """Draw an array, a way to cut, order and merge its axes, and what NumPy makes of it."""
    cuts = draw(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=2), min_size=1, max_size=3))
    names = [[f"x{at}{inner}" for inner in range(len(parts))] for at, parts in enumerate(cuts)]
    sizes = {
        name: size
        for group, parts in zip(names, cuts, strict=True)
        for name, size in zip(group, parts, strict=True)
    }
    order = draw(st.permutations([name for group in names for name in group]))
    groups: list[tuple[str, ...]] = []
    rest = list(order)
    while rest:
        count = draw(st.integers(1, len(rest)))
        groups.append(tuple(rest[:count]))
        rest = rest[count:]
    dtype = draw(st.sampled_from(TYPES))
    array = numbers(*(math.prod(parts) for parts in cuts), dtype=dtype)
    flat = [name for group in names for name in group]
    expected = array.reshape([sizes[name] for name in flat]).transpose([flat.index(name) for name in order])
    expected = expected.reshape([math.prod(sizes[name] for name in group) for group in groups])
    return array, Pattern(tuple(map(tuple, names)), tuple(groups)), sizes, expected


@given(arrangements(), st.sampled_from([16, 48, 1 << 20]), st.booleans())
def test_any_arrangement_is_what_numpy_makes(
    drawn: tuple[Array, Pattern, dict[str, int], Array], limit: int, is_sequential: bool
) -> None:
    array, way, sizes, expected = drawn
    stored = tensor("x", array)
    made = rearrange(sequential(stored) if is_sequential else stored, way, ("y",), sizes=sizes)
    assert (made.name, made.shape, made.dtype) == ("y", expected.shape, stored.dtype)
    assert content(made, limit) == np.ascontiguousarray(expected).tobytes()


@given(arrangements())
def test_the_inverse_leads_back(drawn: tuple[Array, Pattern, dict[str, int], Array]) -> None:
    array, way, sizes, _ = drawn
    there = rearrange(tensor("x", array), way, ("y",), sizes=sizes)
    back = rearrange(tensor("y", there.array()), way.inverse(), ("x",), sizes=sizes)
    assert back.shape == array.shape
    assert content(back) == array.tobytes()


@pytest.mark.parametrize("gates", [(1, 0, 2), (2, 0, 1)])
@pytest.mark.parametrize("is_sequential", [False, True])
def test_gates_change_places_and_back(gates: tuple[int, ...], is_sequential: bool) -> None:
    array = numbers(5, 12)
    way = parse_pattern("i (g u) -> (g u) i", gates)
    stored = sequential(tensor("x", array)) if is_sequential else tensor("x", array)
    made = rearrange(stored, way, ("y",), sizes={"g": 3})
    expected = np.concatenate([array.T[4 * gate : 4 * gate + 4] for gate in gates])
    assert np.array_equal(made.array(), expected)
    back = rearrange(tensor("y", expected), way.inverse(), ("x",), sizes={"g": 3})
    assert np.array_equal(back.array(), array)


def test_one_row_of_two() -> None:
    array = numbers(2, 6)
    made = rearrange(
        tensor("x", array), parse_pattern("row (g u) -> (g u)", (1, 0, 2)), ("y",), sizes={"g": 3}, row=1
    )
    assert made.array().tolist() == [8, 9, 6, 7, 10, 11]


def test_what_is_larger_than_memory_allows_is_read_several_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "PASS_BYTES", 1024)
    monkeypatch.setattr(values, "_BOX_BYTES", 512)
    array = numbers(37, 29)
    reads = []

    class Counted(Sequential):
        def blocks(self, limit: int) -> Any:
            reads.append(limit)
            return super().blocks(limit)

    stored = tensor("x", array)
    assert stored.values is not None
    made = rearrange(replace(stored, values=Counted(stored.values)), transpose_pattern((1, 0)), ("y",))
    assert isinstance(made.values, Reordered)
    assert np.array_equal(made.array(), array.T)
    assert len(reads) >= array.nbytes // 1024


@pytest.mark.parametrize("pass_bytes", [1 << 25, 700])
@pytest.mark.parametrize("dtype", ["<f4", ">f4"])
def test_compressed_chunks_of_hdf5(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pass_bytes: int, dtype: str
) -> None:
    monkeypatch.setattr(values, "PASS_BYTES", pass_bytes)
    array = numbers(23, 5, 6, dtype=dtype)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=array, chunks=(7, 2, 6), compression="gzip")
    with open_checkpoint(tmp_path / "x.h5") as stored:
        made = rearrange(stored["x"], parse_pattern("k i o -> o i k"), ("y",))
        assert isinstance(made.values, Reordered)
        assert np.array_equal(made.array(), array.transpose(2, 1, 0))
        merged = rearrange(stored["x"], parse_pattern("e h d -> (h d) e"), ("y",))
        assert np.array_equal(merged.array(), array.reshape(23, 30).T)
        turned = rearrange(stored["x"], parse_pattern("(g u) i o -> i (g u) o", (0,)), ("y",), sizes={"g": 1})
        assert np.array_equal(turned.array(), array.transpose(1, 0, 2))
        assert np.array_equal(cut(stored["x"], 3, 9, ("y",)).array(), array[3:12])


def test_stored_views_stay_views_and_what_keeps_its_order_stays_as_it_is() -> None:
    stored = tensor("x", numbers(4, 6))
    turned = rearrange(stored, transpose_pattern((1, 0)), ("y",))
    again = rearrange(turned, transpose_pattern((1, 0)), ("z",))
    assert isinstance(turned.values, Strided) and isinstance(again.values, Strided)
    assert np.array_equal(again.array(), numbers(4, 6))
    assert rearrange(tensor("x", numbers(1, 6)), transpose_pattern((1, 0)), ("y",)).shape == (6, 1)
    flat = rearrange(stored, parse_pattern("h d -> (h d)"), ("y",))
    assert flat.values is stored.values and flat.shape == (24,)


def test_big_endian_elements_are_swapped_once() -> None:
    array = numbers(3, 4)
    one = replace(tensor_of(array, big=True), path=("x",))
    assert np.array_equal(rearrange(one, transpose_pattern((1, 0)), ("y",)).array(), array.T)


@pytest.mark.parametrize(
    ("shape", "text", "sizes", "told"),
    [
        ((3,), "i o -> o i", {}, "1 axes, not 2"),
        ((10, 4), "(h w c) o -> o (c h w)", {"h": 3, "w": 1}, "an axis of 10, which 3 does not divide"),
        ((10, 4), "(h w c) o -> o (c h w)", {"h": 3, "w": 1, "c": 3}, "an axis of 10, not 9"),
        ((10, 4), "(h w c) o -> o (c h w)", {"h": 5}, "unknown length of w"),
        ((2, 4), "1 o -> o 1", {}, "an axis of 2, not 1"),
    ],
)
def test_what_does_not_fit_is_refused(shape: Any, text: str, sizes: dict[str, int], told: str) -> None:
    with pytest.raises(LayoutMismatch, match=f"^{told}$"):
        rearrange(tensor("x", numbers(*shape)), parse_pattern(text), ("y",), sizes=sizes)


def test_packed_elements_are_refused() -> None:
    four = Tensor(("x",), BY_NAME["float4_e2m1fn"], (4, 2), values=in_memory(b"abcd"))
    with pytest.raises(LayoutMismatch, match="4 bits"):
        rearrange(four, transpose_pattern((1, 0)), ("y",))
    with pytest.raises(LayoutMismatch, match="float4"):
        concatenate([four, four], ("y",))


@pytest.mark.parametrize("is_sequential", [False, True])
def test_rows_are_joined_and_cut(is_sequential: bool) -> None:
    parts = [numbers(2, 3), numbers(4, 3, start=50)]
    tensors = [tensor("x", part) for part in parts]
    whole = concatenate([sequential(one) for one in tensors] if is_sequential else tensors, ("y",))
    expected = np.concatenate(parts)
    assert whole.shape == (6, 3) and np.array_equal(whole.array(), expected)
    stored = tensor("y", expected)
    rows = cut(sequential(stored) if is_sequential else stored, 1, 3, ("z",))
    assert np.array_equal(rows.array(), expected[1:4])
    with pytest.raises(LayoutMismatch, match=r"rows 5\.\.8 of shape"):
        cut(stored, 5, 3, ("z",))
    with pytest.raises(LayoutMismatch, match="shapes"):
        concatenate([stored, tensor("x", numbers(2, 4))], ("z",))
    with pytest.raises(LayoutMismatch, match="types float32, float64"):
        concatenate([stored, tensor("x", numbers(2, 3, dtype="<f8"))], ("z",))


def test_sums_are_those_of_the_type() -> None:
    a, b = np.float32([1e8, 1.0, np.inf]), np.float32([3.0, 2.0, -np.inf])
    total = add_tensors(tensor("a", a), sequential(tensor("b", b)), ("y",))
    with np.errstate(all="ignore"):
        assert np.array_equal(total.array(), a + b, equal_nan=True)
    half = np.arange(40, dtype="<f2")
    assert content(add_tensors(tensor("a", half), tensor("b", half), ("y",)), 16) == (half + half).tobytes()
    with pytest.raises(LayoutMismatch):
        add_tensors(tensor("a", a), tensor("b", half), ("y",))


def test_no_values_stay_no_values() -> None:
    meta = replace(tensor("x", numbers(2, 3)), values=None)
    assert rearrange(meta, transpose_pattern((1, 0)), ("y",)).values is None
    assert concatenate([meta, meta], ("y",)).values is None
    assert cut(meta, 0, 1, ("y",)).values is None
    assert add_tensors(meta, meta, ("y",)).values is None


def test_fewer_elements_than_the_shape_says_are_damage() -> None:
    short = replace(tensor("x", numbers(2, 3)), values=Sequential(in_memory(b"1234" * 5)))
    with pytest.raises(DamagedCheckpoint, match="fewer elements"):
        content(rearrange(short, transpose_pattern((1, 0)), ("y",)))


@given(st.integers(1, 40), st.integers(1, 12), st.data())
def test_samples_are_the_elements_at_their_positions(rows: int, columns: int, data: st.DataObject) -> None:
    array = numbers(rows, columns)
    positions = sorted(data.draw(st.sets(st.integers(0, array.size - 1), max_size=9)))
    turned = np.ascontiguousarray(array.T).reshape(-1)[positions].tobytes()
    stored = tensor("x", array)
    for one in (stored, sequential(stored)):
        assert elements(one, positions) == array.reshape(-1)[positions].tobytes()
        assert elements(rearrange(one, transpose_pattern((1, 0)), ("y",)), positions) == turned
    twice = concatenate([stored, stored], ("y",))
    assert elements(twice, [array.size]) == array.reshape(-1)[:1].tobytes()


@pytest.mark.parametrize("pass_bytes", [64, 1 << 20])
def test_what_lies_in_pieces_is_gathered_from_them(monkeypatch: pytest.MonkeyPatch, pass_bytes: int) -> None:
    monkeypatch.setattr(values, "PASS_BYTES", pass_bytes)
    array = numbers(5, 12)
    pieces = []
    for columns in (slice(0, 7), slice(7, 12)):
        part = tensor("x", np.ascontiguousarray(array[:, columns]))
        stored = values.as_strided(part.values, part.shape, 4)
        assert stored is not None
        pieces.append(values.Tile((0, columns.start), stored))
    whole = replace(tensor("x", array), values=values.Tiled((5, 12), 4, tuple(pieces)), extent=None)
    made = rearrange(whole, transpose_pattern((1, 0)), ("y",))
    assert np.array_equal(made.array(), array.T)
    way = parse_pattern("i (g u) -> (g u) i", (1, 0, 2))
    gated = rearrange(whole, way, ("y",), sizes={"g": 3})
    assert np.array_equal(gated.array(), np.concatenate([array.T[4:8], array.T[:4], array.T[8:]]))
