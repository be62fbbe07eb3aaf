"""Writer of tensor bundles: one shard of elements, and the index.

Source: tensorflow/tensorflow ``core/util/tensor_bundle/tensor_bundle.cc`` (for strings and variants
``WriteStringTensor`` and ``WriteVariantTensor``), ``core/protobuf/tensor_bundle.proto``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ckpttool.containers.protobuf import bytes_field, encoded_varint, fixed32_field, number_field
from ckpttool.containers.table import TableWriter
from ckpttool.core.errors import DamagedCheckpoint
from ckpttool.core.tensor import Tensor
from ckpttool.formats.tensorflow.bundle import DTYPES
from ckpttool.formats.tensorflow.prefix import INDEX, shard_name
from ckpttool.formats.writer import Target
from ckpttool.storage.checksums import crc32c, mask_crc
from ckpttool.storage.sink import Sink, WrittenTensor

NUMBERS: Mapping[str, int] = {dtype.name: number for number, dtype in DTYPES.items()}
"""TensorFlow's ``DataType`` number by name."""
MAX_KEY = 1 << 16
"""Limit on the bytes of a key."""
_STRING = "string"
_VERSION_1 = number_field(1, 1)
_HEADER = number_field(1, 1) + bytes_field(3, _VERSION_1)  # one shard, little-endian
_MAX_U32 = (1 << 32) - 1
_MAX_VARINT_BITS = 63
_CHECKSUM_BYTES = 4
_EMPTY = memoryview(b"")


def write_bundle(
    target: Target, prefix: str, tensors: Iterable[tuple[bytes, Tensor]], texts: Mapping[bytes, bytes]
) -> None:
    """Write a bundle, the index last.

    Args:
        target: Staging area of the new files.
        prefix: Prefix of the two files' names in the target.
        tensors: Tensors with their keys.
        texts: Additional scalar strings by key.
    """
    data = target.create(shard_name(prefix, 0, 1))
    entries: dict[bytes, tuple[str, tuple[int, ...], int, int, int | WrittenTensor]] = {}
    for key, tensor in tensors:
        offset = data.offset
        checksum: int | WrittenTensor
        if tensor.dtype.name == _STRING:
            checksum = _put_strings(data, tensor)
        elif tensor.dtype.name == "variant":
            checksum = _put_variants(data, tensor)
        else:
            checksum = data.put(tensor, "crc32c")
        entries[key] = (tensor.dtype.name, tensor.shape, offset, data.offset - offset, checksum)
    for key, text in texts.items():
        offset = data.offset
        checksum = _put_text(data, text)
        entries[key] = (_STRING, (), offset, data.offset - offset, checksum)
    data.settle()  # other threads write and sum the elements; the entries need all sums
    table = TableWriter(target.create(prefix + INDEX))
    table.add(b"", _HEADER)
    for key in sorted(entries):
        dtype, shape, offset, nbytes, checksum = entries[key]
        crc = checksum.checksum if isinstance(checksum, WrittenTensor) else checksum
        entry = (
            number_field(1, NUMBERS[dtype]),
            bytes_field(2, shape_message(shape)),
            number_field(4, offset),
            number_field(5, nbytes),
            fixed32_field(6, mask_crc(crc)),
        )
        table.add(key, b"".join(entry))
    table.finish()


def shape_message(shape: tuple[int, ...]) -> bytes:
    """Return a TensorShapeProto."""
    return b"".join(bytes_field(2, number_field(1, length)) for length in shape)


def refused_type(tensor: Tensor) -> Iterator[str]:
    """Yield a reason if TensorFlow stores elements of the tensor's type in another width."""
    stored = DTYPES[NUMBERS[tensor.dtype.name]]
    if tensor.dtype != stored:
        yield (
            f"{tensor.name}: {tensor.dtype} takes {tensor.dtype.bits} bits here, but "
            f"{stored.bits} in TensorFlow"
        )


# Strings and variants -------------------------------------------------------------------------------
#
# Strings are stored as all lengths (varints), the masked CRC of the lengths (4 bytes), all bytes. Variants
# are stored one by one: length (varint), bytes, masked CRC so far (4 bytes). The CRC of an entry is not that
# of the stored bytes: each length counts as a fixed-width integer, 4 bytes for strings (8 if it is longer
# than 32 bits) and 8 for variants; stored CRCs count as they are. Entries are therefore copied element by
# element, and the CRC is computed again along the way.


def _put_text(sink: Sink, text: bytes) -> int:
    """Append one string; return the checksum of its entry."""
    length = encoded_varint(len(text))
    checksum, stored = _append_stored_checksum(crc32c(_checksummed_length(len(text))))
    sink.write(length + stored)
    sink.write(text)
    return crc32c(text, checksum)


def _put_strings(sink: Sink, tensor: Tensor) -> int:
    """Append the strings of another bundle's tensor; return the checksum of their entry."""
    stored = _StoredBytes(tensor)
    total = checksum = 0
    for _ in range(tensor.size):
        length = stored.length()
        total += length
        checksum = crc32c(_checksummed_length(length), checksum)
        sink.write(encoded_varint(length))
    checksum, ending = _append_stored_checksum(checksum)
    sink.write(ending)
    stored.skip(_CHECKSUM_BYTES)
    checksum = stored.copy(sink, total, checksum)
    stored.require_end()
    return checksum


def _put_variants(sink: Sink, tensor: Tensor) -> int:
    """Append the variants of another bundle's tensor; return the checksum of their entry."""
    stored = _StoredBytes(tensor)
    checksum = 0
    for _ in range(tensor.size):
        length = stored.length()
        sink.write(encoded_varint(length))
        checksum = stored.copy(sink, length, crc32c(length.to_bytes(8, "little"), checksum))
        checksum, ending = _append_stored_checksum(checksum)
        sink.write(ending)
        stored.skip(_CHECKSUM_BYTES)
    stored.require_end()
    return checksum


def _checksummed_length(length: int) -> bytes:
    """Return a string's length in the form that the checksum covers."""
    return length.to_bytes(4 if length <= _MAX_U32 else 8, "little")


def _append_stored_checksum(checksum: int) -> tuple[int, bytes]:
    """Return the checksum extended by its own masked form, and the masked form, which is stored."""
    stored = mask_crc(checksum).to_bytes(_CHECKSUM_BYTES, "little")
    return crc32c(stored, checksum), stored


class _StoredBytes:
    """Sequential reader of the stored bytes of a tensor of strings or variants."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._blocks = tensor.blocks()
        self._block = _EMPTY

    def length(self) -> int:
        """Read a varint."""
        number = shift = 0
        while shift <= _MAX_VARINT_BITS:
            (byte,) = next(self._pieces(1))
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                return number
            shift += 7
        raise self._damage("a length that doesn't end")

    def copy(self, sink: Sink, nbytes: int, checksum: int) -> int:
        """Copy the next bytes to a file; return the checksum extended by them."""
        for piece in self._pieces(nbytes):
            checksum = crc32c(piece, checksum)
            sink.write(piece)
        return checksum

    def skip(self, nbytes: int) -> None:
        """Skip the next bytes."""
        for _ in self._pieces(nbytes):
            pass

    def require_end(self) -> None:
        """Raise ``DamagedCheckpoint`` unless all bytes were read."""
        if self._block or any(map(len, self._blocks)):
            raise self._damage("bytes after the last element")

    def _pieces(self, nbytes: int) -> Iterator[memoryview]:
        while nbytes:
            if not self._block:
                self._block = next(self._blocks, _EMPTY)
            if not self._block:
                raise self._damage("elements that end too early")
            piece, self._block = self._block[:nbytes], self._block[nbytes:]
            nbytes -= len(piece)
            yield piece

    def _damage(self, found: str) -> DamagedCheckpoint:
        path = self._tensor.extent.file if self._tensor.extent else ""
        return DamagedCheckpoint(path, found, where=self._tensor.name, code="checksum-mismatch")
