"""Bytes that can be read at any offset."""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from ckpttool.core.errors import LimitExceeded, Truncated

if TYPE_CHECKING:
    import numpy as np

_LARGE = 1 << 16
MAX_READ = 1 << 28
"""Limit on the bytes of one ``read``; larger data is streamed."""


class Readable(ABC):
    """A source of bytes; offsets and sizes are in bytes.

    Attributes:
        path: Path of the file, for errors.
        size: Number of bytes.
        forwards: Whether reading backwards is slow, as in a compressed stream.
    """

    __slots__ = ()

    path: str
    size: int
    forwards: ClassVar[bool] = False
    _called: ClassVar[str]
    """Name of the whole in errors."""

    def read(self, offset: int, nbytes: int, where: str | None = None) -> bytes:
        """Return exactly ``nbytes`` bytes from ``offset``.

        Raises:
            Truncated: The range isn't inside, or the file became shorter.
            LimitExceeded: More than ``MAX_READ`` bytes are asked for.
            DamagedCheckpoint: They can't be decompressed.
        """
        if nbytes > MAX_READ:
            found = f"{nbytes:,} bytes to read at once"
            raise LimitExceeded(self.path, found, expected=f"at most {MAX_READ:,}", where=where)
        self.check(offset, nbytes, where)
        buffer = bytearray(nbytes)
        self.read_into(offset, memoryview(buffer), where)
        return bytes(buffer)

    def check(self, offset: int, nbytes: int, where: str | None = None) -> None:
        """Require that a range is inside the source.

        Raises:
            Truncated: It isn't.
        """
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size:
            if not self.size:
                raise Truncated(self.path, f"the {self._called} is empty", where=where)
            found = f"bytes {offset}..{offset + nbytes} lie outside the {self._called}"
            raise Truncated(self.path, found, expected=f"{self.size} bytes", where=where)

    @property
    def reads_are_free(self) -> bool:
        """Return whether reads take no requests to a store."""
        return True

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:  # noqa: B027 - files have nothing to prefetch
        """Announce ranges of offsets that will be read soon, which a store reads at once."""

    @property
    def stored(self) -> int:
        """Return the number of its bytes in the file: fewer than ``size`` if it is compressed."""
        return self.size

    @abstractmethod
    def read_into(self, offset: int, buffer: memoryview, where: str | None = None) -> None:
        """Fill a buffer from ``offset``.

        Raises:
            Truncated: The bytes end before.
            DamagedCheckpoint: They can't be decompressed, or are those of another file now.
        """


class Buffer(Readable):
    """Bytes in memory, such as decompressed ones, read like a file."""

    __slots__ = ("_data", "path", "size")

    _called: ClassVar[str] = "data"

    def __init__(self, path: str, data: bytes) -> None:
        self.path = path
        self._data = data
        self.size = len(data)

    def read_into(self, offset: int, buffer: memoryview, where: str | None = None) -> None:
        self.check(offset, len(buffer), where)
        buffer[:] = self._data[offset : offset + len(buffer)]


def aligned_buffer(nbytes: int) -> memoryview:
    """Return memory to read into; large memory starts at a page."""
    # Some processors copy from a page of the system's cache four times slower to an address that is up to 31
    # bytes further into its own page, as the start of a large ``bytearray`` is.
    if nbytes < _LARGE:
        return memoryview(bytearray(nbytes))
    return memoryview(mmap.mmap(-1, nbytes))


def reader_from(source: Readable, base: int) -> Callable[[int, memoryview], None]:
    """Return a function that fills a buffer from an offset relative to ``base``, in bytes."""
    return lambda offset, buffer: source.read_into(base + offset, buffer)


def swap_bytes(view: memoryview, word: int) -> memoryview:
    """Return the bytes with each word of 2, 4 or 8 bytes reversed; the same view for 1."""
    if word == 1:
        return view
    import numpy as np

    words: np.ndarray[Any, Any] = np.frombuffer(view, f"u{word}")
    return memoryview(words.byteswap().view(np.uint8).data)


def swap_width(word: int, byteorder: str) -> int:
    """Return the word to reverse so that values in ``byteorder`` become little-endian."""
    return word if byteorder == "big" else 1
