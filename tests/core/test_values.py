"""Lazy values, combined at random, hold what NumPy makes of the same arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool import Tensor
from ckpttool.core.dtypes import BY_NAME
from ckpttool.core.readable import Buffer
from ckpttool.core.tensor import Extent
from ckpttool.core.values import (
    Contiguous,
    Strided,
    Tile,
    Tiled,
    as_strided,
    c_strides,
    flip_signs,
    in_memory,
    storages_of,
    stored_once,
)
from ckpttool.weights.converting.dtype_cast import cast_values
from ckpttool.weights.pairing.rearrangement import (
    add_tensors,
    concatenate,
    cut,
    parse_pattern,
    rearrange,
    transpose_pattern,
    zeros,
)
from tests.support.tensors import tensor_of

Array = np.ndarray[Any, Any]
Pair = tuple[Tensor, Array]
"""A lazy tensor, and the array that it should be."""

PATH = ("x",)


@st.composite
def stored(draw: st.DrawFn, shape: tuple[int, ...], dtype: str) -> Pair:
    """Elements as some file has them: in one piece, decoded, strided, repeated, in tiles, words swapped."""
    seed = draw(st.integers(0, 1 << 30))
    array = np.random.default_rng(seed).integers(-100, 100, shape).astype(dtype)
    kind = BY_NAME[array.dtype.name]
    form = draw(st.sampled_from(["contiguous", "memory", "big", "fortran", "expanded", "tiled"]))
    if form in ("contiguous", "memory", "big"):
        return tensor_of(array, streamed=form == "memory", big=form == "big"), array
    size = kind.itemsize
    if form == "fortran":
        data = Buffer("x", array.tobytes("F"))
        strides = c_strides(shape[::-1])[::-1]
        return Tensor(PATH, kind, shape, values=Strided(data, 0, size, shape, strides)), array
    if form == "expanded":
        array = np.broadcast_to(array[:1], shape) if shape[0] else array
        strides = (0, *c_strides(shape)[1:])
        data = Buffer("x", array[:1].tobytes())
        return Tensor(PATH, kind, shape, values=Strided(data, 0, size, shape, strides)), array
    at = draw(st.integers(0, shape[-1]))
    tiles = []
    for start, part in ((0, array[..., :at]), (at, array[..., at:])):
        view = as_strided(in_memory(np.ascontiguousarray(part).tobytes()), part.shape, size)
        assert view is not None
        tiles.append(Tile((*(0 for _ in shape[1:]), start), view))
    return Tensor(PATH, kind, shape, values=Tiled(shape, size, tuple(tiles))), array


@st.composite
def pairs(draw: st.DrawFn) -> Pair:
    """A stored tensor, and up to four operations on it, each done lazily and by NumPy."""
    shape = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=3)))
    dtype = draw(st.sampled_from(["float32", "float64", "int64", "uint8", "complex64"]))
    lazy, array = draw(stored(shape, dtype))
    for step in draw(
        st.lists(st.sampled_from(["transpose", "cut", "join", "add", "signs", "cast"]), max_size=4)
    ):
        if step == "transpose":
            order = draw(st.permutations(range(array.ndim)))
            lazy, array = rearrange(lazy, transpose_pattern(order), PATH), array.transpose(order)
        elif step == "cut":
            start = draw(st.integers(0, array.shape[0]))
            count = draw(st.integers(0, array.shape[0] - start))
            lazy, array = cut(lazy, start, count, PATH), array[start : start + count]
        elif step == "join":
            other = draw(stored(array.shape, array.dtype.name))
            lazy, array = concatenate([lazy, other[0]], PATH), np.concatenate([array, other[1]])
        elif step == "add":
            nothing = zeros(lazy, PATH)
            added = add_tensors(add_tensors(lazy, lazy, PATH), nothing, PATH)
            lazy, array = added, array + array + np.zeros_like(array)  # -0 and 0 are 0
        elif step == "signs" and array.dtype.kind == "c" and lazy.values is not None:
            values = flip_signs(lazy.values, lazy.dtype, conjugated=True, negated=True)
            lazy, array = Tensor(PATH, lazy.dtype, lazy.shape, values=values), -array.conj()
        elif step == "cast" and array.dtype.kind == "f":
            narrow = BY_NAME["float16"]
            values = cast_values(lazy, narrow)
            lazy, array = Tensor(PATH, narrow, lazy.shape, values=values), array.astype(np.float16)
    return lazy, array


@given(pairs(), st.sampled_from([1, 16, 48, 1 << 20]))
def test_combinations_are_what_numpy_makes(pair: Pair, limit: int) -> None:
    lazy, array = pair
    blocks = [bytes(block) for block in lazy.blocks(limit)]
    assert all(len(block) <= max(16, limit) for block in blocks) or array.dtype == np.float16
    assert b"".join(blocks) == array.tobytes()
    assert np.array_equal(lazy.array(), array)


@given(pairs(), st.data())
def test_any_box_can_be_filled(pair: Pair, data: st.DataObject) -> None:
    lazy, array = pair
    fill = getattr(lazy.values, "fill", None)
    if fill is None or getattr(lazy.values, "shape", lazy.shape) != lazy.shape:
        return
    start = tuple(data.draw(st.integers(0, length)) for length in array.shape)
    into = np.empty(
        [length - at for at, length in zip(start, array.shape, strict=True)], f"V{array.itemsize}"
    )
    fill(start, into)
    assert into.tobytes() == array[tuple(slice(at, None) for at in start)].tobytes()


@pytest.mark.parametrize("form", ["contiguous", "expanded"])
def test_what_was_rearranged_can_be_again(form: str) -> None:
    """Axes that were split and put together again are not those of the view below."""
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    lazy = tensor_of(array)
    if form == "expanded":
        array = np.broadcast_to(array[:1], array.shape)
        data = Buffer("x", array[:1].tobytes())
        lazy = Tensor(PATH, BY_NAME["float32"], array.shape, values=Strided(data, 0, 4, array.shape, (0, 1)))
    once = rearrange(lazy, parse_pattern("a (b c) -> (b a) c"), PATH, sizes={"b": 2})
    made = array.reshape(4, 2, 3).transpose(1, 0, 2).reshape(8, 3)
    assert np.array_equal(once.array(), made)
    again = rearrange(once, transpose_pattern((1, 0)), PATH)
    assert np.array_equal(again.array(), made.T)
    assert b"".join(map(bytes, again.blocks(16))) == made.T.tobytes()


def test_repeats_are_read_once_below_what_is_computed() -> None:
    view = Strided(Buffer("x", np.complex64(1 + 2j).tobytes()), 0, 8, (1000,), (0,))
    values = flip_signs(view, BY_NAME["complex64"], conjugated=True, negated=False)
    assert b"".join(stored_once(values).blocks(64)) == np.complex64(1 - 2j).tobytes()
    assert isinstance(stored_once(view), Contiguous)


def test_what_is_joined_says_which_stored_bytes_it_lies_in() -> None:
    extent = Extent("x.bin", 8, 4)
    part = Tensor(("a",), BY_NAME["float32"], (1,), values=in_memory(bytes(4)), storage=extent)
    assert storages_of(part) == (extent,)
    assert storages_of(concatenate([part, part], PATH)) == ()
