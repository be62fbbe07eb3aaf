"""File that is being written: bytes in sequence, and tensors that threads copy to their offsets."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any, Literal

from isal import isal_zlib

from ckpttool.core.errors import DamagedCheckpoint
from ckpttool.core.tensor import Tensor
from ckpttool.core.values import Contiguous
from ckpttool.storage.checksums import combined_crc, crc32c
from ckpttool.storage.directories import CREATE, OpenDirectory
from ckpttool.storage.source import Source
from ckpttool.storage.work import Advance, Calls

Algorithm = Literal["crc32", "crc32c"]

_BUFFER_BYTES = 1 << 20
_SMALL = 1 << 16
"""A tensor up to this size is copied to the buffer, which costs less than a task for a thread."""
_BLOCK = 1 << 18
"""Bytes read, summed and written at once, which should fit a processor's cache."""
_SHARED = 4096
"""File systems that share data between files do so in whole blocks of this size."""
SUMS: dict[str, Callable[[bytes | memoryview, int], int]] = {"crc32": isal_zlib.crc32, "crc32c": crc32c}
_NO_KERNEL_COPY = frozenset(
    {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EIO}
)


class WrittenTensor:
    """Tensor in a file.

    Attributes:
        tensor: The tensor.
        offset: Offset of its first byte in the file.
        algorithm: Algorithm of its checksum.
        elements_checksum: Checksum of its bytes alone; None until they have been read.
    """

    __slots__ = ("_before", "_pool", "algorithm", "elements_checksum", "offset", "tensor")

    def __init__(self, tensor: Tensor, offset: int, algorithm: Algorithm, before: int, pool: Calls) -> None:
        self.tensor, self.offset, self.algorithm = tensor, offset, algorithm
        self.elements_checksum: int | None = None
        self._before, self._pool = before, pool

    @property
    def nbytes(self) -> int:
        """Size of its elements in bytes."""
        return self.tensor.nbytes

    @property
    def checksum(self) -> int:
        """Checksum of the bytes before it and its own, see ``Sink.put``; waits for all pending copies."""
        if self.elements_checksum is None:
            self._pool.settle()
        assert self.elements_checksum is not None  # settled without an error
        return combined_crc(self._before, self.elements_checksum, self.nbytes, self.algorithm)


class Sink:
    """One file of a target, written from start to end; written bytes may be changed later.

    Attributes:
        path: Its path while it is written.
        written: The tensors, in order.
    """

    def __init__(
        self, path: str, pool: Calls, advance: Advance, directory: OpenDirectory | None = None
    ) -> None:
        """Create the file exclusively; its path is relative to ``directory`` if that is given."""
        self.path = path
        self._pool, self._advance = pool, advance
        if directory is None:
            self._descriptor = os.open(path, CREATE, 0o666)
        else:
            self._descriptor = directory.create(os.path.basename(path))
        self._buffer = bytearray()
        self._flushed = 0
        self.written: list[WrittenTensor] = []

    @property
    def offset(self) -> int:
        """Size of the file so far, which is the offset of the next byte."""
        return self._flushed + len(self._buffer)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append bytes."""
        if len(data) >= _BUFFER_BYTES:
            self._flush()
            _write_at(self._descriptor, self._flushed, memoryview(data))
            self._flushed += len(data)
            return
        self._buffer += data
        if len(self._buffer) >= _BUFFER_BYTES:
            self._flush()

    def put(self, tensor: Tensor, checksum: Algorithm | None = None, before: int = 0) -> WrittenTensor:
        """Append the elements of a tensor: little-endian, in C order, packed.

        Large ones are copied by other threads; their errors are raised by ``settle``, ``close`` or
        ``WrittenTensor.checksum``. Read checksums after the last tensor was put, since each waits for all.

        Args:
            tensor: The tensor.
            checksum: Checksum that the format needs; CRC-32 if it needs none.
            before: Checksum of bytes before the tensor, from which its own continues.
        """
        written = WrittenTensor(tensor, self.offset, checksum or "crc32", before, self._pool)
        self.written.append(written)
        if tensor.nbytes <= _SMALL:
            data = tensor.tobytes()
            _require_nbytes(len(data), tensor)
            written.elements_checksum = SUMS[written.algorithm](data, 0)
            self.write(data)
            self._advance(len(data))
            return written
        # The tensor's range is skipped now, and filled by a thread at any time.
        self._flush()
        self._flushed += tensor.nbytes
        self._pool.add(lambda: self._copy(tensor, written))
        return written

    def patch(self, offset: int, data: bytes) -> None:
        """Replace bytes that were written, or that a tensor will fill."""
        # After the pending copies: one of them may write the same range.
        self._flush()
        self._pool.settle()
        _write_at(self._descriptor, offset, memoryview(data))

    def settle(self) -> None:
        """Wait until all tensors are in the file; see ``Pool.settle``."""
        self._flush()
        self._pool.settle()

    def close(self) -> None:
        """Sync the file and close it; may be called twice."""
        if self._descriptor < 0:
            return
        self.settle()
        os.fsync(self._descriptor)
        self.abandon()

    def abandon(self) -> None:
        """Close the file as it is; may be called twice."""
        # Forgotten before it is closed: even if ``close`` fails, the number may be that of another file then.
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _flush(self) -> None:
        if self._buffer:
            _write_at(self._descriptor, self._flushed, memoryview(self._buffer))
            self._flushed += len(self._buffer)
            self._buffer = bytearray()

    def _copy(self, tensor: Tensor, written: WrittenTensor) -> None:
        # Each block is read for the checksum in any case. The kernel then copies it again from file to file
        # only if it can share the data, or have a server copy them: the elements have to be in a file as they
        # are to be written, and at the same offset in a block. Otherwise the kernel would copy them page by
        # page, which takes twice the time of writing the bytes that were just read.
        add, values = SUMS[written.algorithm], tensor.values
        is_direct = (
            isinstance(values, Contiguous)
            and values.swap == 1
            and isinstance(values.source, Source)
            and (values.source.begin + values.offset - written.offset) % _SHARED == 0
        )
        done, total = 0, 0
        for block in tensor.blocks(_BLOCK):
            self._pool.check()
            total = add(block, total)
            if is_direct:
                is_direct = self._copy_by_kernel(values, done, written.offset + done, len(block))
            if not is_direct:
                _write_at(self._descriptor, written.offset + done, block)
            done += len(block)
            self._advance(len(block))
        _require_nbytes(done, tensor)
        written.elements_checksum = total

    def _copy_by_kernel(self, values: Any, start: int, to: int, nbytes: int) -> bool:
        """Let the kernel copy or share bytes; return whether it supports that here."""
        try:
            values.source.copy_to(self._descriptor, values.offset + start, to, nbytes)
        except OSError as error:
            if error.errno not in _NO_KERNEL_COPY:
                raise
            return False
        return True


def _require_nbytes(found: int, tensor: Tensor) -> None:
    if found != tensor.nbytes:
        raise DamagedCheckpoint(
            tensor.extent.file if tensor.extent else "",
            f"{found:,} bytes were read",
            expected=f"{tensor.nbytes:,}",
            where=tensor.name,
        )


def _write_at(descriptor: int, offset: int, data: memoryview) -> None:
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count
