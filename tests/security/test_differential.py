"""The pickle interpreter and CPython's own unpicklers import the same names and make the same calls."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.security.differential import disagreement
from tests.security.pickle_streams import REAL, stream


@pytest.mark.parametrize("data", REAL, ids=range(len(REAL)))
def test_real_pickles_are_carried_out_alike(data: bytes) -> None:
    assert disagreement(data) is None


@given(st.randoms(use_true_random=False))
def test_streams_of_opcodes_are_carried_out_alike(choose: object) -> None:
    assert disagreement(stream(choose)) is None


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\4cm\nf\nN2\x94h\0.",  # DUP leaves the memo alone
        b"(Vx\nios\nsystem!",  # the last byte stands for the end of a line
        b"\x80\4cm\nf\n)R}I010\nNsb.",  # C reads an octal number
        b"\x80\4\x95\5\0\0\0\0\0\0\0\x95\1\0\0\0\0\0\0\0N.",  # a frame in a frame
        b"\x80\4C\1a\x98.",
        b"}(u.",
        b"N0]q\0(h\0h\0e.",
        b"\x80\4\x8c\1m\x8c\1f\x93)\x81}\x92.",
    ],
)
def test_where_readers_of_pickles_have_differed(data: bytes) -> None:
    assert disagreement(data) is None


@pytest.mark.parametrize("count", [2_000, pytest.param(10_000, marks=pytest.mark.thorough)])
def test_streams_and_changed_pickles_are_carried_out_alike(count: int) -> None:
    """In a process of its own, whose memory is limited: CPython makes what a pickle announces."""
    command = [sys.executable, "-m", "tests.security.differential", str(count), "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == (f"{count} streams, 0 differ\n", 0)
