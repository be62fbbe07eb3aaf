"""Headers of Paddle's streams: as it writes them, and as the reader understands them."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.dtypes import BY_NAME
from ckpttool.wire.lodtensor import (
    ELEMENTS,
    NUMBERS,
    lod_tensor_header,
    read_file,
    rows_header,
    values_header,
)
from ckpttool.wire.source import Buffer

SHAPES = st.lists(st.sampled_from([0, 1, 2, 127, 128, 300, 1 << 14, 1 << 40]), max_size=6).map(tuple)


def test_the_smallest_file_of_paddle() -> None:
    expected = bytes(4) + bytes(8) + bytes(4) + struct.pack("<i", 2) + b"\x08\x05"
    assert lod_tensor_header(BY_NAME["float32"], ()) == expected


@pytest.mark.parametrize(
    "name", ["fp32", "fp64", "fp16", "bf16", "bool", "int8", "int64", "complex64", "scalar"]
)
def test_a_file_of_paddle_begins_with_it(files: Path, name: str) -> None:
    data = (files / "paddle" / f"{name}.lodtensor").read_bytes()
    stream = read_file(Buffer("v", data))
    assert data[: stream.offset] == lod_tensor_header(stream.dtype, stream.shape)


@given(st.sampled_from(sorted(NUMBERS)), SHAPES.filter(lambda shape: 0 in shape or len(shape) < 2))
def test_it_is_read_as_it_was_written(name: str, shape: tuple[int, ...]) -> None:
    dtype = BY_NAME[name]
    assert ELEMENTS[NUMBERS[name]] is dtype
    if 1 << 40 in shape and 0 not in shape:
        shape = (5,)
    nbytes = dtype.nbytes(0 if 0 in shape else shape[0] if shape else 1)
    stream = read_file(Buffer("v", lod_tensor_header(dtype, shape) + bytes(nbytes)))
    assert (stream.dtype, stream.shape, stream.rows) == (dtype, shape, None)


@given(st.lists(st.integers(0, (1 << 63) - 1), max_size=9), st.integers(0, (1 << 63) - 1), st.integers(0, 3))
def test_rows_are_read_as_they_were_written(rows: list[int], height: int, spare: int) -> None:
    dtype, shape = BY_NAME["int16"], (len(rows) + spare, 3)
    ids = struct.pack(f"<{len(rows)}q", *rows)
    data = rows_header(len(rows)) + ids + values_header(height, dtype, shape) + bytes(6 * shape[0])
    stream = read_file(Buffer("v", data))
    assert (stream.dtype, stream.shape) == (dtype, shape)
    assert stream.rows is not None
    assert (stream.rows.total, stream.rows.height) == (len(rows), height)
    assert data[stream.rows.offset : stream.rows.offset + len(ids)] == ids


def test_types_that_paddle_has_no_number_for() -> None:
    with pytest.raises(KeyError):
        lod_tensor_header(BY_NAME["uint32"], ())
