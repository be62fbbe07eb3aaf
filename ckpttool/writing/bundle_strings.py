"""Strings and variants as a tensor bundle holds them: lengths, checksums, bytes.

Their checksums are computed of lengths as whole integers, which are stored as varints.

Source: tensorflow/tensorflow ``core/util/tensor_bundle/tensor_bundle.cc``, ``WriteStringTensor`` and
``WriteVariantTensor``.
"""

from __future__ import annotations

from collections.abc import Iterator

from ckpttool.errors import DamagedCheckpoint
from ckpttool.tensor import Tensor
from ckpttool.wire.crc import crc32c, masked
from ckpttool.wire.protobuf_writing import encoded_varint
from ckpttool.wire.sink import Sink

_MAX_U32 = (1 << 32) - 1
_MAX_VARINT_BITS = 63
_CHECKSUM_BYTES = 4
_EMPTY = memoryview(b"")


def put_string(sink: Sink, text: bytes) -> int:
    """Append one string; return the checksum of its entry."""
    length = encoded_varint(len(text))
    checksum, stored = _ended(crc32c(_summed(len(text))))
    sink.write(length + stored)
    sink.write(text)
    return crc32c(text, checksum)


def put_strings(sink: Sink, tensor: Tensor) -> int:
    """Append the strings of a tensor of another bundle; return the checksum of their entry.

    Raises:
        CheckpointError: They can't be read, or don't fit their lengths.
    """
    stored = _Stored(tensor)
    total = checksum = 0
    for _ in range(tensor.size):
        length = stored.length()
        total += length
        checksum = crc32c(_summed(length), checksum)
        sink.write(encoded_varint(length))
    checksum, ending = _ended(checksum)
    sink.write(ending)
    stored.skip(_CHECKSUM_BYTES)
    checksum = stored.copied(sink, total, checksum)
    stored.require_end()
    return checksum


def put_variants(sink: Sink, tensor: Tensor) -> int:
    """Append the variants of a tensor of another bundle; see ``put_strings``."""
    stored = _Stored(tensor)
    checksum = 0
    for _ in range(tensor.size):
        length = stored.length()
        sink.write(encoded_varint(length))
        checksum = stored.copied(sink, length, crc32c(length.to_bytes(8, "little"), checksum))
        checksum, ending = _ended(checksum)
        sink.write(ending)
        stored.skip(_CHECKSUM_BYTES)
    stored.require_end()
    return checksum


def _summed(length: int) -> bytes:
    """Return the length of a string as it is summed."""
    return length.to_bytes(4 if length <= _MAX_U32 else 8, "little")


def _ended(checksum: int) -> tuple[int, bytes]:
    """Return the checksum that goes on, and the one that is stored; it is summed itself."""
    stored = masked(checksum).to_bytes(_CHECKSUM_BYTES, "little")
    return crc32c(stored, checksum), stored


class _Stored:
    """The bytes of a tensor, one after the other."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._blocks = tensor.blocks()
        self._block = _EMPTY

    def length(self) -> int:
        """Return the next length."""
        number = shift = 0
        while shift <= _MAX_VARINT_BITS:
            (byte,) = next(self._pieces(1))
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                return number
            shift += 7
        raise self._damaged("a length that doesn't end")

    def copied(self, sink: Sink, nbytes: int, checksum: int) -> int:
        """Append the next bytes to a file; return the checksum with them."""
        for piece in self._pieces(nbytes):
            checksum = crc32c(piece, checksum)
            sink.write(piece)
        return checksum

    def skip(self, nbytes: int) -> None:
        """Leave out the next bytes."""
        for _ in self._pieces(nbytes):
            pass

    def require_end(self) -> None:
        """Require that nothing is left."""
        if self._block or any(map(len, self._blocks)):
            raise self._damaged("bytes behind the last element")

    def _pieces(self, nbytes: int) -> Iterator[memoryview]:
        while nbytes:
            if not self._block:
                self._block = next(self._blocks, _EMPTY)
            if not self._block:
                raise self._damaged("elements that end too early")
            piece, self._block = self._block[:nbytes], self._block[nbytes:]
            nbytes -= len(piece)
            yield piece

    def _damaged(self, found: str) -> DamagedCheckpoint:
        path = self._tensor.extent.file if self._tensor.extent else ""
        return DamagedCheckpoint(path, found, where=self._tensor.name, code="checksum-mismatch")
