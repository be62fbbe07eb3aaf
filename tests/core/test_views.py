"""Strided views against NumPy's own."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from ckpttool.core import values as under_test
from ckpttool.core.readable import Buffer
from ckpttool.core.values import Contiguous, Strided, is_contiguous, stored_once, strided_length

AXES = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 40)), max_size=5)
ITEMS = st.sampled_from([1, 2, 4, 8, 16])
LIMITS = st.sampled_from([1, 16, 17, 48, 100, 1000, 1 << 20])


def view_and_truth(
    axes: list[tuple[int, int]], itemsize: int, offset: int
) -> tuple[Strided, bytes, np.ndarray]:
    """Return a view of random bytes, and the same bytes as NumPy gathers them."""
    shape = tuple(length for length, _ in axes)
    strides = tuple(stride for _, stride in axes)
    count = offset + strided_length(shape, strides)
    data = np.random.default_rng(count).integers(0, 256, count * itemsize, np.uint8)
    items = data.view(f"V{itemsize}")
    expected = as_strided(items[offset:], shape, tuple(stride * itemsize for stride in strides))
    view = Strided(Buffer("x", data.tobytes()), offset * itemsize, itemsize, shape, strides)
    return view, np.ascontiguousarray(expected).tobytes(), items


def gathered(view: Strided | Contiguous, limit: int) -> bytes:
    blocks = [bytes(block) for block in view.blocks(limit)]
    assert all(len(block) <= max(limit, 16) for block in blocks)
    return b"".join(blocks)


@given(AXES, ITEMS, st.integers(0, 9), LIMITS)
def test_any_view_is_what_numpy_sees(
    axes: list[tuple[int, int]], itemsize: int, offset: int, limit: int
) -> None:
    view, expected, _ = view_and_truth(axes, itemsize, offset)
    assert gathered(view, limit) == expected


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=5).flatmap(
        lambda shape: st.tuples(st.just(shape), st.permutations(range(len(shape))))
    ),
    LIMITS,
)
def test_transposed_tensors(drawn: tuple[list[int], list[int]], limit: int) -> None:
    shape, order = drawn
    base = np.arange(math.prod(shape), dtype="<u4").reshape(shape)
    moved = base.transpose(order)
    strides = tuple(stride // 4 for stride in moved.strides)
    view = Strided(Buffer("x", base.tobytes()), 0, 4, moved.shape, strides)
    assert gathered(view, limit) == moved.tobytes()


@given(AXES, ITEMS)
def test_boxes_of_any_size_make_the_same_bytes(axes: list[tuple[int, int]], itemsize: int) -> None:
    """Make what is read at once so small that views are cut into many boxes."""
    view, expected, _ = view_and_truth(axes, itemsize, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(under_test, "BOX_BYTES", 32)
        assert gathered(view, 32) == expected


@given(AXES)
def test_once_has_each_repeated_element_once(axes: list[tuple[int, int]]) -> None:
    view, expected, _ = view_and_truth(axes, 4, 0)
    once = stored_once(view)
    strides = once.strides if isinstance(once, Strided) else (1,)
    assert list(strides) == sorted(strides, reverse=True)  # the order of the file
    few, all_ = gathered(once, 1 << 20), expected
    repeats = math.prod(length for length, stride in axes if not stride)
    assert sorted(np.frombuffer(few, "V4").tolist() * repeats) == sorted(np.frombuffer(all_, "V4").tolist())


@given(AXES)
def test_contiguous_is_what_numpy_calls_it(axes: list[tuple[int, int]]) -> None:
    shape = tuple(length for length, _ in axes)
    strides = tuple(stride for _, stride in axes)
    if 0 in shape:
        return
    _, expected, items = view_and_truth(axes, 4, 0)
    if is_contiguous(shape, strides):
        assert items.tobytes()[: len(expected)] == expected


def test_expanded_terabyte_is_read_in_small_memory() -> None:
    view = Strided(Buffer("x", b"abcd"), 0, 4, (1 << 20, 1 << 20), (0, 0))
    blocks = view.blocks(1 << 16)
    assert bytes(next(blocks)) == b"abcd" * (1 << 14)
    assert [bytes(block) for block in stored_once(view).blocks(1 << 16)] == [b"abcd"]


@pytest.mark.parametrize("word", [2, 4, 8])
def test_words_are_swapped(word: int) -> None:
    data = bytes(range(64))
    view = Strided(Buffer("x", data), 0, word, (64 // word,), (1,), swap=word)
    expected = b"".join(data[at : at + word][::-1] for at in range(0, 64, word))
    assert gathered(view, 16) == expected


def test_empty_views_read_nothing() -> None:
    assert list(Strided(Buffer("x", b""), 0, 4, (0, 3), (3, 1)).blocks(16)) == []
    assert (strided_length((0, 3), (3, 1)), strided_length((), ()), strided_length((2, 3), (3, 1))) == (
        0,
        1,
        6,
    )
