"""Headers of NumPy's files, and the bytes of an element that they tell."""

from __future__ import annotations

import io
import itertools
import math
import string
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool import CheckpointError
from ckpttool.containers.npy import itemsize, read_npy_header
from ckpttool.core.readable import Buffer
from tests.support.numpy_files import npy


@pytest.mark.parametrize(
    ("descr", "nbytes"),
    [("<U3", 12), ("|S3", 3), ("<M8[ns]", 8), ([("a", "<f4"), ("b", "<i2", (2, 3))], 16), ("|V7", 7)],
)
def test_bytes_of_an_element(descr: object, nbytes: int) -> None:
    assert itemsize(descr) == nbytes


SIZES = ("", "0", "1", "2", "3", "4", "5", "6", "7", "8", "10", "12", "16", "24", "32")
NOT_WRITTEN = ("a", "T")
"""An old name of ``S``, and a type of texts of any length: no array is saved with them."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", sorted({*string.ascii_letters, "?"} - {*NOT_WRITTEN}))
def test_types_are_those_of_numpy(kind: str) -> None:
    units = ("", "[ns]", "[25s]", "[D]", "[xs]", "[generic]", "[]") if kind in "mM" else ("",)
    for order, size, unit in itertools.product(("", "<", ">", "|", "="), SIZES, units):
        descr, nbytes = f"{order}{kind}{size}{unit}", None
        with suppress(TypeError, ValueError):
            nbytes = np.dtype(descr).itemsize
        if nbytes is None:
            with pytest.raises(ValueError, match="a type"):
                itemsize(descr)
        else:
            assert itemsize(descr) == nbytes, descr


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype="<f4").reshape(2, 3),
        np.array([True, False]),
        np.zeros(2, [("a", "<f4"), ("b", "<i2", (2,))]),
        np.array(["2020-01-01"], "M8[D]"),
        np.array(["ab"]),
    ],
    ids=lambda array: array.dtype.str,
)
def test_headers_with_one_flipped_bit_are_those_of_numpy(array: np.ndarray) -> None:
    """What NumPy refuses is refused, and what it reads has the bytes that it reads."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    whole = buffer.getvalue()
    for bit in range(8 * (len(whole) - array.nbytes)):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        loaded = None
        with suppress(Exception):  # of whatever class NumPy raises
            loaded = np.load(io.BytesIO(data))
        try:
            header = read_npy_header(Buffer("a.npy", bytes(data)), 0, len(data))
            nbytes = itemsize(header.descr) * math.prod(header.shape)
        except (CheckpointError, ValueError):
            continue
        if header.data + nbytes == len(data):
            assert loaded is not None, f"bit {bit}"
            assert (loaded.shape, loaded.nbytes) == (header.shape, nbytes), f"bit {bit}"


@given(st.text("{}[]()',: descrfotanhp_<4|O0123456789TrueFalse\\\n", max_size=120))
def test_any_header_is_read_or_refused(text: str) -> None:
    source = Buffer("a.npy", npy(text, bytes(64)))
    with suppress(CheckpointError):
        read_npy_header(source, 0, source.size)
