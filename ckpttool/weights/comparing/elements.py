"""Reads the bytes of a tensor's elements into reused buffers, and compares buffers with ``memcmp``."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ckpttool.core.errors import CheckpointError, DamagedCheckpoint
from ckpttool.core.readable import Buffer, aligned_buffer
from ckpttool.core.tensor import Tensor
from ckpttool.core.values import Contiguous
from ckpttool.storage.source import Source

if TYPE_CHECKING:
    import numpy as np

_STREAMED_BYTES = 1 << 18
"""Block size of streamed tensors."""


class Side(str, enum.Enum):
    """Side of a comparison."""

    A = "a"
    B = "b"


class Unreadable(Exception):
    """Raised if ``side`` can't be read; ``error`` is the reason."""

    def __init__(self, side: Side, error: CheckpointError) -> None:
        super().__init__(side, error)
        self.side = side
        self.error = error


def contiguous_values(tensor: Tensor) -> Contiguous | None:
    """Return the contiguous range of a file or buffer that holds the elements, or None.

    Any thread can read such a range at any offset.
    """
    values = tensor.values
    if not isinstance(values, Contiguous) or values.nbytes != tensor.nbytes:
        return None
    return values if isinstance(values.source, Source | Buffer) else None


def stream_key(tensor: Tensor) -> int | None:
    """Return a key shared by tensors to be read one after another; None if ``contiguous_values`` has a range.

    Two readers at different offsets of one compressed record would inflate it from its start again and again.
    """
    if contiguous_values(tensor) is not None:
        return None
    values = tensor.values
    return id(values.source) if isinstance(values, Contiguous) else id(tensor)


class ElementReader:
    """Reader of one side's elements as bytes in C order: little-endian, or ``as_stored`` in the file's order.

    For one thread. Tensors without a ``contiguous_values`` can only be read forwards, from offset 0.
    """

    __slots__ = ("_block", "_blocks", "_contiguous", "_position", "_side", "_swap", "_tensor")

    def __init__(self, tensor: Tensor, side: Side, *, as_stored: bool = False) -> None:
        self._tensor = tensor
        self._side = side
        self._contiguous = contiguous_values(tensor)
        self._swap = 1 if self._contiguous is None or as_stored else self._contiguous.swap
        self._blocks: Iterator[memoryview] = iter(())
        self._block = memoryview(b"")
        self._position = 0

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill a buffer from an offset in bytes; raises ``Unreadable``."""
        try:
            if self._contiguous is None:
                self._stream_into(offset, buffer)
            else:
                self._contiguous.source.read_into(self._contiguous.offset + offset, buffer)
        except CheckpointError as error:
            raise Unreadable(self._side, error) from error
        if self._swap != 1:
            import numpy as np

            words: np.ndarray[Any, Any] = np.frombuffer(buffer, f"u{self._swap}")
            words.byteswap(inplace=True)

    def _stream_into(self, offset: int, buffer: memoryview) -> None:
        if offset != self._position or offset == 0:
            assert offset == 0  # a stream can't be entered in the middle
            self._blocks, self._block, self._position = (
                self._tensor.blocks(_STREAMED_BYTES),
                self._block[:0],
                0,
            )
        done = 0
        while done < len(buffer):
            if not self._block:
                block = next(self._blocks, None)
                if block is None:
                    raise self._misfit("fewer bytes of elements")
                self._block = memoryview(block)
                continue
            count = min(len(self._block), len(buffer) - done)
            buffer[done : done + count] = self._block[:count]
            self._block = self._block[count:]
            done += count
        # At the end of the tensor the stream is asked for one more block, so that elements beyond those of
        # the shape are noticed.
        self._position += done
        if self._position == self._tensor.nbytes and (self._block or next(self._blocks, None)):
            raise self._misfit(f"more than {self._position:,} bytes of elements")

    def _misfit(self, found: str) -> DamagedCheckpoint:
        extent = self._tensor.extent or self._tensor.storage
        expected = f"{self._tensor.nbytes:,} bytes"
        return DamagedCheckpoint(
            extent.file if extent else "", found, expected=expected, where=self._tensor.name
        )


def _libc_memcmp() -> Callable[[int, int, int], int] | None:
    # Comparing ``bytes`` objects copies the buffers and holds the interpreter lock. ctypes releases the lock
    # during the call, so that threads compare in parallel. On Windows, CDLL(None) is a TypeError.
    try:
        import ctypes

        function = ctypes.CDLL(None).memcmp
    except (ImportError, OSError, AttributeError, TypeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    function.restype = ctypes.c_int
    compare: Callable[[int, int, int], int] = function
    return compare


class Buffers:
    """Two buffers of one size, one for each side.

    Attributes:
        a: Buffer of the first side.
        b: Buffer of the second side.
        data: Both, adjacent.
    """

    def __init__(self, nbytes: int) -> None:
        self.data = aligned_buffer(2 * nbytes)
        self.a, self.b = self.data[:nbytes], self.data[nbytes:]
        self._memcmp = _libc_memcmp()
        if self._memcmp is not None:
            import ctypes

            self._at = ctypes.addressof(ctypes.c_char.from_buffer(self.data))

    def same(self, nbytes: int) -> bool:
        """Return whether the first ``nbytes`` of both are equal."""
        if self._memcmp is not None:
            return self._memcmp(self._at, self._at + len(self.a), nbytes) == 0
        return bytes(self.a[:nbytes]) == bytes(self.b[:nbytes])
