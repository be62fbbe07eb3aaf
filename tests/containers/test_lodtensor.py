"""Headers of Paddle's streams: as it writes them, and as the reader understands them."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool import DamagedCheckpoint
from ckpttool.containers.lodtensor import (
    ELEMENTS,
    NUMBERS,
    lod_tensor_header,
    read_file,
    rows_header,
    values_header,
)
from ckpttool.core.dtypes import BY_NAME
from ckpttool.core.readable import Buffer

SHAPES = st.lists(st.sampled_from([0, 1, 2, 127, 128, 300, 1 << 14, 1 << 40]), max_size=6).map(tuple)


def lod_tensor(description: bytes, data: bytes, lod: bytes = b"\0" * 8) -> bytes:
    return b"\0" * 4 + lod + b"\0" * 4 + struct.pack("<i", len(description)) + description + data


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


def test_rows_whose_values_are_a_whole_tensor() -> None:
    """As some releases of 2018 wrote them."""
    values = lod_tensor(b"\x08\x05\x10\x02\x10\x03", struct.pack("<6f", *range(6)))
    rows = struct.pack("<IQ2qq", 0, 2, 3, 4, 9)
    stream = read_file(Buffer("rows", rows + values))
    assert (stream.shape, stream.rows and stream.rows[1:]) == ((2, 3), (2, 9))


def test_tables_that_have_room_for_more_rows() -> None:
    values = lod_tensor(b"\x08\x05\x10\x04\x10\x01", bytes(16))[12:]
    stream = read_file(Buffer("rows", struct.pack("<IQ2qq", 0, 2, 3, 4, 9) + values))
    assert (stream.shape, stream.rows and stream.rows.total) == ((4, 1), 2)


@pytest.mark.parametrize(
    "data",
    [
        lod_tensor(b"\x08\x05\x10" + b"\xff" * 9 + b"\x01", b""),  # a length of -1
        lod_tensor(b"\x08\x05" + b"\x10\xff\xff\xff\xff\xff\xff\xff\xff\x7f" * 4, b""),  # 2^252 elements
        lod_tensor(b"\x08\x05" + b"\x10\x01" * 65, bytes(4)),
        lod_tensor(b"\x10\x01", bytes(4)),  # no type
        lod_tensor(b"\x08\x05", bytes(4), struct.pack("<QQ", 1, 1 << 60)),
        lod_tensor(b"\x08\x05", bytes(4), struct.pack("<QQ3s", 1, 3, b"abc")),
        struct.pack("<IQ", 0, 1 << 63),
        struct.pack("<IQq", 0, 0, 9),
    ],
)
def test_hostile_numbers(data: bytes) -> None:
    with pytest.raises(DamagedCheckpoint):
        read_file(Buffer("x", data))


def test_packed_lengths_are_read() -> None:
    stream = read_file(Buffer("x", lod_tensor(b"\x08\x05\x12\x02\x02\x01", bytes(8))))
    assert stream.shape == (2, 1)
