"""A compressed stream, read like a file: in bounded memory, fast as long as one reads forwards.

What joblib compresses is one stream from the file's first byte on. It is read once when it is opened: that
tells its length, and whether the checksum that its format carries is right.

Source: joblib ``joblib/compressor.py``, ``joblib/numpy_pickle_compat.py`` (``read_zfile``).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple, Protocol

from ckpttool.core.errors import DamagedCheckpoint, LimitExceeded, Truncated
from ckpttool.core.readable import Readable

_MAX_EXPANSION, _MIN_LIMIT = 1032, 1 << 30
"""How many bytes may come of one, and how many in any case: other streams are there to fill a disk."""
_CHUNK, _PIECE = 1 << 16, 1 << 20
"""How much is read at once, and how much of it decompressed."""
_KEPT = 1 << 22
"""So many bytes before the position are kept: who reads windows reads the end of one twice."""
_MAX_RESTARTED_A_BYTE = 64
_FIRST_BLOCK = 1 << 20
"""How much is read for the first byte: bz2 has blocks of up to 900 kB."""
_ZFILE_HEADER = 2 + len(hex(1 << 64))


class _Decompressor(Protocol):
    """What is common to the decompressors of the standard library."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


class Compression(NamedTuple):
    """A kind of compression: its name, how it begins, and what reads it from which offset on."""

    name: str
    magic: bytes
    make: Callable[[], _Decompressor]
    offset: int = 0


def _bz2() -> _Decompressor:
    import bz2

    return bz2.BZ2Decompressor()


def _lzma() -> _Decompressor:
    import lzma

    return lzma.LZMADecompressor()


def _zlib(bits: int) -> Callable[[], _Decompressor]:
    return lambda: zlib.decompressobj(bits)


_COMPRESSIONS = (
    Compression("ZFile", b"ZF0x", _zlib(15), _ZFILE_HEADER),
    Compression("gzip", b"\x1f\x8b", _zlib(31)),
    Compression("bz2", b"BZh", _bz2),
    Compression("xz", b"\xfd7zXZ\0", _lzma),
    Compression("lzma", b"\x5d\0", _lzma),
    *(Compression("zlib", bytes((0x78, level)), _zlib(15)) for level in (0x01, 0x5E, 0x9C, 0xDA)),
)


def _failures() -> tuple[type[Exception], ...]:
    """Return what decompressors raise for damaged input; that of bz2 is an OSError."""
    from lzma import LZMAError

    return zlib.error, LZMAError, OSError, EOFError, ValueError


def compression_of(head: bytes) -> Compression | None:
    """Return how a file that begins like this is compressed, or None."""
    return next((one for one in _COMPRESSIONS if head.startswith(one.magic)), None)


def first_bytes(compression: Compression, source: Readable, nbytes: int) -> bytes:
    """Return the first bytes of what a file holds; none if it is damaged."""
    start = compression.offset
    packed = source.read(start, min(_FIRST_BLOCK, max(source.size - start, 0)))
    try:
        return compression.make().decompress(packed.removeprefix(b" "), nbytes)
    except _failures():
        return b""


class Decompressed(Readable):
    """What a compressed stream holds; reading backwards beyond what is kept starts again."""

    forwards: ClassVar[bool] = True
    _called: ClassVar[str] = "stream"

    def __init__(self, source: Readable, compression: Compression) -> None:
        """Read the stream once.

        Raises:
            Truncated, DamagedCheckpoint: It breaks off, or its checksum is wrong.
            LimitExceeded: It expands to more than honest ones do.
        """
        self.path = source.path
        self.compression = compression
        self._source = source
        self._begin = compression.offset
        if compression.offset and source.read(compression.offset, min(1, source.size - self._begin)) == b" ":
            self._begin += 1  # Python 2 wrote a wider number
        self._limit = max(_MIN_LIMIT, _MAX_EXPANSION * source.size)
        self._restarted = self._position = 0
        self._kept = b""
        self.trailing = 0
        self.size = sum(map(len, self._pieces()))
        self._require_stated_length()
        self._restart()

    @property
    def stored(self) -> int:
        return self._source.size

    def read_into(self, offset: int, buffer: memoryview, where: str | None = None) -> None:
        self.check(offset, len(buffer), where)
        if offset < self._position - len(self._kept):
            self._count_restart()
            self._restart()
        done = 0
        while done < len(buffer):
            at = offset + done - (self._position - len(self._kept))
            if at < len(self._kept):
                part = self._kept[at : at + len(buffer) - done]
                buffer[done : done + len(part)] = part
                done += len(part)
            else:
                self._read_on()

    def _read_on(self) -> None:
        piece = next(self._stream, None)
        if piece is None:
            raise DamagedCheckpoint(self.path, "the stream became shorter", expected=f"{self.size:,} bytes")
        self._position += len(piece)
        self._kept = (self._kept + piece)[-_KEPT:]

    def _restart(self) -> None:
        self._stream: Iterator[bytes] = self._pieces()
        self._kept, self._position = b"", 0

    def _count_restart(self) -> None:
        self._restarted += self._position
        if self._restarted > max(_MIN_LIMIT, _MAX_RESTARTED_A_BYTE * self.size):
            found = f"a compressed stream that is read from its beginning for {self._restarted:,} bytes"
            raise LimitExceeded(self.path, found, expected="arrays in its order")

    def _pieces(self) -> Iterator[bytes]:
        """Yield the content from the beginning on, at most a MiB at once."""
        decompressor, at, done, packed = self.compression.make(), self._begin, 0, b""
        while not decompressor.eof:
            if not packed and getattr(decompressor, "needs_input", True):
                packed = self._source.read(at, min(_CHUNK, self._source.size - at))
                at += len(packed)
            piece, packed, is_stuck = self._step(decompressor, packed)
            done += len(piece)
            if done > self._limit:
                found = f"{self._source.size:,} bytes that expand to more than {self._limit:,}"
                raise LimitExceeded(self.path, found)
            if piece:
                yield piece
            elif is_stuck and at >= self._source.size and not decompressor.eof:
                found = f"the {self.compression.name} stream breaks off after {done:,} bytes"
                raise Truncated(self.path, found)
        self.trailing = self._source.size - at + len(decompressor.unused_data)

    def _step(self, decompressor: Any, packed: bytes) -> tuple[bytes, bytes, bool]:
        """Return the next bytes, the input that is still to be used, and whether nothing more comes of it."""
        try:
            piece = decompressor.decompress(packed, _PIECE)
        except _failures() as failure:
            found = f"a damaged {self.compression.name} stream: {failure}"
            raise DamagedCheckpoint(self.path, found) from failure
        left: bytes = getattr(decompressor, "unconsumed_tail", b"")
        return piece, left, not piece and not left

    def _require_stated_length(self) -> None:
        """Require that a ZFile has the length that it states."""
        if not self.compression.offset:
            return
        text = self._source.read(2, self.compression.offset - 2)
        if text.strip() != hex(self.size).encode():
            stated = text.decode("ascii", "backslashreplace").strip()
            raise DamagedCheckpoint(self.path, f"a ZFile of {self.size:,} bytes", expected=stated)
