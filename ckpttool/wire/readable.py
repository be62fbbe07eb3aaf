"""Elements in bytes that can be read: in one piece, or decoded in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ckpttool.wire.inflated import Inflated
from ckpttool.wire.source import Buffer, Source

if TYPE_CHECKING:
    import numpy as np

Readable: TypeAlias = Source | Buffer | Inflated
"""What bytes can be read from at any offset."""


def reader_from(source: Readable, base: int) -> Callable[[int, memoryview], None]:
    """Return what fills a buffer from an offset that counts from ``base``, in bytes."""
    return lambda offset, buffer: source.read_into(base + offset, buffer)


class Contiguous(NamedTuple):
    """Elements that lie in one piece, in C order.

    ``swap`` is the bytes of a word whose order is to be reversed, 1 for none.
    """

    source: Readable
    offset: int
    nbytes: int
    swap: int = 1

    def blocks(self, limit: int) -> Iterator[memoryview]:
        buffer = bytearray(min(self.nbytes, max(16, limit - limit % 16)))
        for start in range(0, self.nbytes, len(buffer) or 1):
            view = memoryview(buffer)[: min(len(buffer), self.nbytes - start)]
            self.source.read_into(self.offset + start, view)
            yield swapped(view, self.swap)

    def once(self) -> Contiguous:
        return self


class InMemory(NamedTuple):
    """Elements that had to be decoded, as bytes in C order; small by nature."""

    data: bytes
    swap: int = 1

    def blocks(self, limit: int) -> Iterator[memoryview]:
        step = max(16, limit - limit % 16)
        for start in range(0, len(self.data), step):
            yield swapped(memoryview(self.data)[start : start + step], self.swap)

    def once(self) -> InMemory:
        return self


def swapped(view: memoryview, word: int) -> memoryview:
    """Return the bytes with each word of 2, 4 or 8 bytes reversed; the same view for 1."""
    if word == 1:
        return view
    import numpy as np

    words: np.ndarray[Any, Any] = np.frombuffer(view, f"u{word}")
    return memoryview(words.byteswap().view(np.uint8).data)


def swap_width(word: int, byteorder: str) -> int:
    """Return the word to reverse so that values in ``byteorder`` become little-endian."""
    return word if byteorder == "big" else 1
