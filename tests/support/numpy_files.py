"""NumPy's files, byte by byte: with headers that NumPy would never write."""

from __future__ import annotations


def npy(header: str, data: bytes = b"", version: int = 1) -> bytes:
    """Return a file with a header, of one of three versions, and what lies behind it."""
    text = header.encode("utf-8") + b"\n"
    width = 2 if version == 1 else 4
    return b"\x93NUMPY" + bytes([version, 0]) + len(text).to_bytes(width, "little") + text + data


def header(descr: str, shape: str, order: str = "False") -> str:
    """Return the text of a header."""
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}"
