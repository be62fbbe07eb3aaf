"""Whole tensors of the boxes that files hold of them, compared with an array that counts each element."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.core.dtypes import BY_NAME
from ckpttool.core.errors import LimitExceeded
from ckpttool.core.readable import Buffer
from ckpttool.core.tensor import Extent, Role, Tensor
from ckpttool.core.values import Contiguous, storages_of
from ckpttool.formats.content import boxes as under_test
from ckpttool.formats.content.boxes import Box, Piece, Run, assemble, find_overlap, join_runs

SHAPE = (4, 6)
ARRAY = np.arange(24, dtype="<i4").reshape(SHAPE)
RUNS = st.tuples(st.integers(0, 4), st.integers(0, 4))


def tensor(array: np.ndarray, file: str = "a") -> Tensor:
    extent = Extent(file, 0, array.nbytes)
    values = Contiguous(Buffer(file, array.tobytes()), 0, array.nbytes)
    return Tensor(("w",), BY_NAME["int32"], array.shape, Role.WEIGHTS, values, extent, extent)


def piece(box: Box, file: str = "a") -> Piece[Tensor]:
    place = tuple(slice(start, end) for start, end in zip(box.offsets, box.ends, strict=True))
    return Piece(box, tensor(ARRAY[place], file))


def array_of(made: Tensor) -> np.ndarray:
    return np.frombuffer(b"".join(map(bytes, made.blocks())), "<i4").reshape(made.shape)


WHOLE = Tensor(("w",), BY_NAME["int32"], SHAPE, Role.WEIGHTS)


def box_of(runs: tuple[tuple[int, int], ...]) -> Box:
    return Box(tuple(start for start, _ in runs), tuple(length for _, length in runs))


@given(st.lists(st.tuples(RUNS, RUNS), max_size=6))
def test_boxes_make_a_tensor_if_they_have_each_element_once(runs: list[tuple[tuple[int, int], ...]]) -> None:
    boxes = [box_of(one) for one in runs]
    counts = np.zeros((8, 10), int)
    for box in boxes:
        counts[tuple(slice(start, end) for start, end in zip(box.offsets, box.ends, strict=True))] += 1
    is_inside = all(box.is_inside(SHAPE) for box in boxes)
    if is_inside:
        pieces = [piece(box) for box in boxes]
        made, fault = assemble("p", "w", WHOLE, pieces)
        assert (fault is None) == (counts[:4, :6] == 1).all()
        assert fault is not None or (array_of(made) == ARRAY).all()
    else:
        made, fault = assemble("p", "w", WHOLE, [Piece(box, None) for box in boxes])
        assert fault is not None and "outside" in fault.message and made.values is None
    assert (find_overlap("p", "w", boxes) is None) == bool((counts <= 1).all())


@given(st.lists(st.integers(0, 4), max_size=3), st.lists(st.integers(0, 6), max_size=3))
def test_a_grid_makes_the_tensor(rows: list[int], columns: list[int]) -> None:
    sides = [sorted({0, *cuts, length}) for cuts, length in zip((rows, columns), SHAPE, strict=True)]
    boxes = [
        Box((top, left), (bottom - top, right - left))
        for top, bottom in zip(sides[0], sides[0][1:], strict=False)
        for left, right in zip(sides[1], sides[1][1:], strict=False)
    ]
    made, fault = assemble("p", "w", WHOLE, [piece(box, str(box)) for box in boxes])
    assert fault is None and (array_of(made) == ARRAY).all()
    assert [one.file for one in storages_of(made)] == [str(box) for box in boxes]


def test_the_only_piece_is_the_tensor_where_it_lies() -> None:
    only = piece(Box((0, 0), SHAPE))
    assert assemble("p", "w", WHOLE, [only]) == (only.part, None)


def test_boxes_of_one_part_are_read_from_it() -> None:
    part = tensor(ARRAY[[2, 3, 0, 1]])
    pieces = [Piece(Box((2, 0), (2, 6)), part, (0, 0)), Piece(Box((0, 0), (2, 6)), part, (2, 0))]
    made, fault = assemble("p", "w", WHOLE, pieces)
    assert fault is None and (array_of(made) == ARRAY).all()
    assert storages_of(made) == (part.storage,)


def test_a_lost_piece_is_no_fault_of_the_boxes() -> None:
    pieces: list[Piece[Tensor]] = [piece(Box((0, 0), (2, 6))), Piece(Box((2, 0), (2, 6)), None)]
    assert assemble("p", "w", WHOLE, pieces) == (WHOLE, None)


def test_many_boxes_along_two_axes_are_compared() -> None:
    grid = [Box((2 * row, 3 * column), (2, 3)) for row in range(60) for column in range(60)]
    assert find_overlap("p", "w", grid) is None
    assert find_overlap("p", "w", [*grid, Box((61, 100), (1, 1))]) == (
        Box((60, 99), (2, 3)),
        Box((61, 100), (1, 1)),
    )


def test_boxes_without_end_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "_MAX_COMPARED", 3)
    with pytest.raises(LimitExceeded, match="4 chunks are too many to compare"):
        find_overlap("p", "w", [Box((at, at), (10, 1)) for at in range(4)])


# Runs -----------------------------------------------------------------------------------------------


@given(st.data())
def test_runs_make_a_tensor_of_flat_ones(data: st.DataObject) -> None:
    """Each rank has an equal part, somewhere in its flat tensors; the last one's is padded."""
    world = data.draw(st.integers(1, 5))
    part = -(-24 // world)
    padded = np.resize(ARRAY.reshape(-1), part * world)
    runs = []
    for rank in range(world):
        before, after = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
        held = padded[rank * part : (rank + 1) * part]
        flat = np.concatenate([np.full(before, -1, "<i4"), held, np.full(after, -1, "<i4")])
        cut = data.draw(st.integers(0, len(flat)))
        runs.append(Run([tensor(flat[:cut], f"{rank}a"), tensor(flat[cut:], f"{rank}b")], before, part))
    made = join_runs(("w",), SHAPE, Role.WEIGHTS, runs)
    assert made is not None and (array_of(made) == ARRAY).all()
    assert join_runs(("w",), SHAPE, Role.WEIGHTS, [run._replace(start=99) for run in runs]) is None
    assert part * (world - 1) >= 24 or join_runs(("w",), SHAPE, Role.WEIGHTS, runs[:-1]) is None


def test_runs_of_two_types_are_not_joined() -> None:
    one = tensor(np.arange(12, dtype="<i4"))
    two = replace(one, dtype=BY_NAME["float32"])
    assert join_runs(("w",), SHAPE, Role.WEIGHTS, [Run([one], 0, 12), Run([two], 0, 12)]) is None
