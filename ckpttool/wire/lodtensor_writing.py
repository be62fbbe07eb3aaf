"""What stands around the elements in Paddle's tensor streams; see ``ckpttool.wire.lodtensor``.

Source: PaddlePaddle/Paddle ``paddle/fluid/framework/lod_tensor.cc``, ``SerializeToStream``, and
``selected_rows.cc``.
"""

from __future__ import annotations

import struct

from ckpttool.dtypes import DType
from ckpttool.wire.lodtensor import ELEMENTS

NUMBERS: dict[str, int] = {dtype.name: number for number, dtype in ELEMENTS.items()}
"""The numbers of ``VarType.Type`` by the names of the types of elements."""

NO_LEVELS = bytes(8)
"""The sequences of a tensor that has none: a count of 0."""

_VERSION = bytes(4)
_DATA_TYPE, _DIMS = 0x08, 0x10  # fields 1 and 2 of TensorDesc, both varints


def lod_tensor_header(dtype: DType, shape: tuple[int, ...], levels: bytes = NO_LEVELS) -> bytes:
    """Return what stands in front of the elements of a LoDTensor; ``levels`` as ``lod_bytes`` gives them."""
    return _VERSION + levels + tensor_header(dtype, shape)


def rows_header(count: int) -> bytes:
    """Return what stands in front of the row numbers of a SelectedRows."""
    return _VERSION + struct.pack("<Q", count)


def values_header(height: int, dtype: DType, shape: tuple[int, ...]) -> bytes:
    """Return what stands between the row numbers of a SelectedRows, out of ``height``, and its elements."""
    return struct.pack("<q", height) + tensor_header(dtype, shape)


def tensor_header(dtype: DType, shape: tuple[int, ...]) -> bytes:
    """Return a version and a ``TensorDesc``, which stand in front of the elements in any stream.

    Raises:
        KeyError: Paddle has no number for the type.
    """
    axes = b"".join(bytes([_DIMS]) + _varint(length) for length in shape)
    description = bytes([_DATA_TYPE]) + _varint(NUMBERS[dtype.name]) + axes
    return _VERSION + struct.pack("<i", len(description)) + description


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
