"""Headers of NumPy's files, and the bytes of an element that they tell."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool import CheckpointError
from ckpttool.core.readable import Buffer
from ckpttool.io.npy import itemsize, read_npy_header
from tests.support.numpy_files import npy


@pytest.mark.parametrize(
    ("descr", "nbytes"),
    [("<U3", 12), ("|S3", 3), ("<M8[ns]", 8), ([("a", "<f4"), ("b", "<i2", (2, 3))], 16), ("|V7", 7)],
)
def test_bytes_of_an_element(descr: object, nbytes: int) -> None:
    assert itemsize(descr) == nbytes


@given(st.text("{}[]()',: descrfotanhp_<4|O0123456789TrueFalse\\\n", max_size=120))
def test_any_header_is_read_or_refused(text: str) -> None:
    source = Buffer("a.npy", npy(text, bytes(64)))
    with suppress(CheckpointError):
        read_npy_header(source, 0, source.size)
