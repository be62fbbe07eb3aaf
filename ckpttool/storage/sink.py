"""A file that is being written: bytes one after the other, and tensors that threads copy to their places."""

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
"""A tensor up to this size goes through the buffer: to hand it to a thread costs more."""
_BLOCK = 1 << 18
"""What is read, summed and written at once: it stays in a processor's cache meanwhile."""
_SHARED = 4096
"""File systems that share bytes between files share blocks of so many, and whole ones."""
SUMS: dict[str, Callable[[bytes | memoryview, int], int]] = {"crc32": isal_zlib.crc32, "crc32c": crc32c}
_NO_KERNEL_COPY = frozenset(
    {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EIO}
)


class Written:
    """A tensor in its place.

    Attributes:
        tensor: What was put there.
        offset: Where in the file it begins, in bytes.
        algorithm: Which checksum it was summed by.
        elements_checksum: The checksum of its bytes alone, as they were read; None until they were.
    """

    __slots__ = ("_before", "_pool", "algorithm", "elements_checksum", "offset", "tensor")

    def __init__(self, tensor: Tensor, offset: int, algorithm: Algorithm, before: int, pool: Calls) -> None:
        self.tensor, self.offset, self.algorithm = tensor, offset, algorithm
        self.elements_checksum: int | None = None
        self._before, self._pool = before, pool

    @property
    def nbytes(self) -> int:
        """Return how many bytes it takes."""
        return self.tensor.nbytes

    @property
    def checksum(self) -> int:
        """Return the checksum that ``Sink.put`` was asked for; this waits for all that is on its way."""
        if self.elements_checksum is None:
            self._pool.settle()
        assert self.elements_checksum is not None  # settled without an error
        return combined_crc(self._before, self.elements_checksum, self.nbytes, self.algorithm)


class Sink:
    """One file of a target, written from start to end; written bytes may be changed later.

    Attributes:
        path: Where it lies while it is written.
        written: The tensors that were put, in their order.
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
        self.written: list[Written] = []

    @property
    def offset(self) -> int:
        """Return the size of the file so far, which is the offset of the next byte."""
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

    def put(self, tensor: Tensor, checksum: Algorithm | None = None, before: int = 0) -> Written:
        """Append the elements of a tensor: little-endian, in C order, packed.

        Large ones are copied by other threads; what fails there is raised by ``settle``, ``close`` or
        ``Written.checksum``. Ask for checksums after the last tensor was put: each waits for all.

        Args:
            tensor: What is appended.
            checksum: Which checksum the format wants of it; CRC-32 where it wants none.
            before: The checksum of bytes in front of the tensor, from which its own continues.
        """
        written = Written(tensor, self.offset, checksum or "crc32", before, self._pool)
        self.written.append(written)
        if tensor.nbytes <= _SMALL:
            data = tensor.tobytes()
            _require_nbytes(len(data), tensor)
            written.elements_checksum = SUMS[written.algorithm](data, 0)
            self.write(data)
            self._advance(len(data))
            return written
        self._flush()
        self._flushed += tensor.nbytes
        self._pool.add(lambda: self._copy(tensor, written))
        return written

    def patch(self, offset: int, data: bytes) -> None:
        """Replace bytes that were written, or that a tensor will fill."""
        self._flush()
        self._pool.settle()
        _write_at(self._descriptor, offset, memoryview(data))

    def settle(self) -> None:
        """Wait until all that was put is in the file; see ``Pool.settle``."""
        self._flush()
        self._pool.settle()

    def close(self) -> None:
        """Make the file durable, and close it; closing twice is allowed."""
        if self._descriptor < 0:
            return
        self.settle()
        os.fsync(self._descriptor)
        self.abandon()

    def abandon(self) -> None:
        """Close the file as it is; closing twice is allowed."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)  # even where it fails, the number is given back, and may be another's

    def _flush(self) -> None:
        if self._buffer:
            _write_at(self._descriptor, self._flushed, memoryview(self._buffer))
            self._flushed += len(self._buffer)
            self._buffer = bytearray()

    def _copy(self, tensor: Tensor, written: Written) -> None:
        add = SUMS[written.algorithm]
        values, is_direct = tensor.values, _is_shareable(tensor, written.offset)
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
        """Let the kernel copy or share bytes; return whether it did."""
        try:
            values.source.copy_to(self._descriptor, values.offset + start, to, nbytes)
        except OSError as error:
            if error.errno not in _NO_KERNEL_COPY:
                raise
            return False
        return True


def _is_shareable(tensor: Tensor, to: int) -> bool:
    """Return whether the elements are in a file as they are to be written, and at the same place in a block.

    The kernel may share these with the other file, or have a server copy them. Elsewhere it would copy them
    page by page, which takes twice the time of writing what was just read to be summed.
    """
    values = tensor.values
    if not isinstance(values, Contiguous) or values.swap != 1 or not isinstance(values.source, Source):
        return False
    return (values.source.begin + values.offset - to) % _SHARED == 0


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
