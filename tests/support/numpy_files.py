"""NumPy's files, byte by byte: with headers that NumPy would never write."""

from __future__ import annotations

import sys

import pytest

same_zips = pytest.mark.skipif(
    sys.version_info < (3, 11, 4), reason="zipfile asks for version 4.5 of zip, even without ZIP64"
)
"""Mark of tests that expect the bytes of ``numpy.savez``, whose zip is that of Python."""


def npy(header: str, data: bytes = b"", version: int = 1) -> bytes:
    """Return a file with a header, of one of three versions, and what lies behind it."""
    text = header.encode("utf-8") + b"\n"
    width = 2 if version == 1 else 4
    return b"\x93NUMPY" + bytes([version, 0]) + len(text).to_bytes(width, "little") + text + data


def header(descr: str, shape: str, order: str = "False") -> str:
    """Return the text of a header."""
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}"
