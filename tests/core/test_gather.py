"""Elements brought into another order, against NumPy's transpose and as_strided."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from ckpttool.core import gather as gathering
from ckpttool.core.gather import blocks_by_box, boxes, copy, gather
from ckpttool.core.readable import Buffer
from ckpttool.core.values import Strided, strided_length

SHAPES = st.lists(st.integers(0, 9), max_size=5)
TUNING = st.fixed_dictionaries(
    {
        "_TILE_BYTES": st.sampled_from([16, 64, 200, 1000, 1 << 19]),
        "_RUN_BYTES": st.sampled_from([1, 32, 100, 1 << 14]),
        "_GAP_BYTES": st.sampled_from([0, 8, 64, 1 << 12]),
        "_LINES_BYTES": st.sampled_from([1, 24, 512]),
        "_PERIOD_BYTES": st.sampled_from([1, 8, 256]),
        "_SMALL_BOX_BYTES": st.sampled_from([16, 100, 1 << 23]),
    }
)


class Forwards(Buffer):
    """Bytes that can't be read backwards."""

    forwards: ClassVar[bool] = True
    position = 0

    def read_into(self, offset: int, buffer: memoryview, where: str | None = None) -> None:
        assert offset >= self.position
        super().read_into(offset, buffer, where)
        self.position = offset + len(buffer)


def tuned(patch: pytest.MonkeyPatch, tuning: dict[str, int]) -> None:
    for name, value in tuning.items():
        patch.setattr(gathering, name, value)


def numbers(shape: tuple[int, ...], itemsize: int) -> np.ndarray:
    count = math.prod(shape) * itemsize
    return np.random.default_rng(count).integers(0, 256, count, np.uint8).view(f"V{itemsize}").reshape(shape)


@given(SHAPES, st.randoms(use_true_random=False), st.sampled_from([1, 2, 3, 4, 8, 16]), TUNING)
def test_permuted_axes_are_numpys_transpose(
    lengths: list[int], random: object, itemsize: int, tuning: dict[str, int]
) -> None:
    order = random.sample(range(len(lengths)), len(lengths))  # type: ignore[attr-defined]
    stored = numbers(tuple(lengths), itemsize)
    expected = stored.transpose(order)
    strides = tuple(stride // itemsize for stride in expected.strides)
    view = Strided(Buffer("x", stored.tobytes()), 0, itemsize, expected.shape, strides)
    with pytest.MonkeyPatch.context() as patch:
        tuned(patch, tuning)
        assert b"".join(map(bytes, view.blocks(48))) == expected.tobytes()


@given(
    st.lists(st.tuples(st.integers(1, 7), st.integers(0, 50)), min_size=1, max_size=4),
    st.sampled_from([(2, 2), (4, 4), (8, 4), (16, 8)]),
    TUNING,
)
def test_any_steps_are_numpys_view_with_its_words_reversed(
    axes: list[tuple[int, int]], words: tuple[int, int], tuning: dict[str, int]
) -> None:
    """Some repeat elements, some overlap, some leave gaps; the last axis of the result is a view, too."""
    shape, steps = tuple(length for length, _ in axes), tuple(step for _, step in axes)
    itemsize, swap = words
    stored = numbers((strided_length(shape, steps),), itemsize)
    view = as_strided(stored, shape, tuple(step * itemsize for step in steps))
    expected = np.ascontiguousarray(view).view(f"u{swap}").byteswap()
    wide = np.zeros((*shape[:-1], 2 * shape[-1]), f"V{itemsize}")
    with pytest.MonkeyPatch.context() as patch:
        tuned(patch, tuning)
        gather(Buffer("x", stored.tobytes()), 0, steps, swap, wide[..., ::2])
    assert wide[..., ::2].tobytes() == expected.tobytes()
    assert not any(wide[..., 1::2].tobytes())


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_what_can_only_be_read_forwards_is(order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "_TILE_BYTES", 1000)
    stored = numbers((17, 23, 29), 4)
    expected = stored.transpose(order)
    steps = tuple(stride // 4 for stride in expected.strides)
    into = np.zeros(expected.shape, "V4")
    gather(Forwards("x", stored.tobytes()), 0, steps, 1, into)
    assert into.tobytes() == expected.tobytes()


@given(SHAPES, st.randoms(use_true_random=False), st.sampled_from([1, 2, 3, 8, 16]), TUNING)
def test_an_array_is_copied_into_one_of_any_order(
    lengths: list[int], random: object, itemsize: int, tuning: dict[str, int]
) -> None:
    order = random.sample(range(len(lengths)), len(lengths))  # type: ignore[attr-defined]
    stored = numbers(tuple(lengths), itemsize)
    into = np.zeros([lengths[axis] for axis in order], stored.dtype).transpose(np.argsort(order))
    with pytest.MonkeyPatch.context() as patch:
        tuned(patch, tuning)
        copy(stored, into)
    assert into.tobytes() == stored.tobytes()


@pytest.mark.parametrize("order", [(1, 0), (0, 1)])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_large_matrices_with_rows_of_a_power_of_two(order: tuple[int, int], itemsize: int) -> None:
    stored = numbers((3000, 1024), itemsize)
    expected = stored.transpose(order)
    steps = tuple(stride // itemsize for stride in expected.strides)
    view = Strided(Buffer("x", stored.tobytes()), 0, itemsize, expected.shape, steps)
    assert b"".join(map(bytes, view.blocks(1 << 20))) == expected.tobytes()


def test_each_stored_byte_is_read_about_once() -> None:
    reads: list[int] = []

    class Counted(Buffer):
        def read_into(self, offset: int, buffer: memoryview, where: str | None = None) -> None:
            reads.append(len(buffer))
            super().read_into(offset, buffer, where)

    stored = numbers((3, 3, 128, 1000), 4)
    steps = tuple(stride // 4 for stride in stored.transpose(3, 2, 0, 1).strides)
    view = Strided(Counted("x", stored.tobytes()), 0, 4, (1000, 128, 3, 3), steps)
    assert b"".join(map(bytes, view.blocks(1 << 20))) == stored.transpose(3, 2, 0, 1).tobytes()
    assert sum(reads) == stored.nbytes
    assert len(reads) < stored.nbytes // 4000


def test_the_third_large_tensor_at_one_time_gets_a_small_box(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "_SMALL_BOX_BYTES", 100)
    asked: list[int] = []

    def fill(start: tuple[int, ...], into: np.ndarray) -> None:
        asked.append(into.size)

    def began() -> object:
        blocks = blocks_by_box((1000,), 1, 16, fill)
        next(blocks)
        return blocks

    first, second, third = began(), began(), began()
    assert asked == [1000, 1000, 100]
    del first
    fourth = began()
    assert asked[-1] == 1000
    del second, third, fourth


@given(st.lists(st.integers(1, 6), max_size=4), st.integers(1, 50))
def test_boxes_tile_a_shape_in_c_order(shape: list[int], limit: int) -> None:
    at = np.arange(math.prod(shape)).reshape(shape)
    found = [at[tuple(map(slice, start, np.add(start, size)))] for start, size in boxes(tuple(shape), limit)]
    assert np.concatenate([box.reshape(-1) for box in found]).tolist() == list(range(at.size))
    assert all(box.size <= limit for box in found)
