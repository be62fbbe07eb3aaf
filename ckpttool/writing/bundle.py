"""TensorFlow's tensor bundles as they are written: one shard of elements, and the index of where they lie.

Source: tensorflow/tensorflow ``core/util/tensor_bundle/tensor_bundle.cc``,
``core/protobuf/tensor_bundle.proto``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from ckpttool.formats.tensorflow.bundle import DTYPES
from ckpttool.formats.tensorflow.prefix import INDEX, shard_name
from ckpttool.tensor import Tensor
from ckpttool.wire.crc import masked
from ckpttool.wire.protobuf_writing import bytes_field, fixed32_field, number_field
from ckpttool.wire.sink import Sink, Written
from ckpttool.wire.sstable_writing import TableWriter
from ckpttool.wire.staged import Staged
from ckpttool.writing.bundle_strings import put_string, put_strings, put_variants

NUMBERS: Mapping[str, int] = {dtype.name: number for number, dtype in DTYPES.items()}
"""TensorFlow's number of each type, by name."""
MAX_KEY = 1 << 16
"""Bytes of a key."""

_STRING = "string"
_PUT = {_STRING: put_strings, "variant": put_variants}
_VERSION_1 = number_field(1, 1)
_HEADER = number_field(1, 1) + bytes_field(3, _VERSION_1)  # one shard, little-endian


class _Placed(NamedTuple):
    """An entry of the index, of which the elements are in the shard or on their way."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    checksum: int | Written

    def message(self) -> bytes:
        """Return the entry; it waits for its checksum."""
        crc = self.checksum.checksum if isinstance(self.checksum, Written) else self.checksum
        return b"".join(
            (
                number_field(1, NUMBERS[self.dtype]),
                bytes_field(2, shape_message(self.shape)),
                number_field(4, self.offset),
                number_field(5, self.nbytes),
                fixed32_field(6, masked(crc)),
            )
        )


def shape_message(shape: tuple[int, ...]) -> bytes:
    """Return a shape as TensorFlow's messages have it."""
    return b"".join(bytes_field(2, number_field(1, length)) for length in shape)


def write_bundle(
    target: Staged, prefix: str, tensors: Iterable[tuple[bytes, Tensor]], texts: Mapping[bytes, bytes]
) -> None:
    """Write a bundle, the index last.

    Args:
        target: Where it is staged.
        prefix: What the names of its two files begin with there.
        tensors: What it holds, by key.
        texts: Strings that it holds besides, by key.

    Raises:
        CheckpointError: The source can't be read.
        OSError: The target can't be written.
    """
    data = target.create(shard_name(prefix, 0, 1))
    placed = {key: _placed(data, tensor) for key, tensor in tensors}
    for key, text in texts.items():
        offset = data.offset
        checksum = put_string(data, text)
        placed[key] = _Placed(_STRING, (), offset, data.offset - offset, checksum)
    data.settle()
    table = TableWriter(target.create(prefix + INDEX))
    table.add(b"", _HEADER)
    for key in sorted(placed):
        table.add(key, placed[key].message())
    table.finish()


def _placed(data: Sink, tensor: Tensor) -> _Placed:
    offset = data.offset
    put = _PUT.get(tensor.dtype.name)
    checksum = data.put(tensor, "crc32c") if put is None else put(data, tensor)
    return _Placed(tensor.dtype.name, tensor.shape, offset, data.offset - offset, checksum)


def strange(tensor: Tensor) -> Iterator[str]:
    """Yield why elements can't lie in a bundle, where another format stores the same type in another way."""
    stored = DTYPES[NUMBERS[tensor.dtype.name]]
    if tensor.dtype != stored:
        yield (
            f"{tensor.name}: {tensor.dtype} takes {tensor.dtype.bits} bits here, "
            f"and {stored.bits} in TensorFlow"
        )
