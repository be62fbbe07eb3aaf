"""Compressed streams and zip records, read like files in bounded memory; reading forwards is fast.

A file that joblib compresses is one stream from its first byte on. The stream is decompressed once when it is
opened, to get its length and check its checksum. Zip records have their sizes in the directory; those of one
file share budgets. ``Budget`` applies the same limits to names that expand from a compact form.

Source: joblib ``joblib/compressor.py``, ``joblib/numpy_pickle_compat.py`` (``read_zfile``).
"""

from __future__ import annotations

import struct
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple, Protocol

from ckpttool.core.errors import DamagedCheckpoint, LimitExceeded, Truncated
from ckpttool.core.readable import Readable

_MAX_EXPANSION, _MIN_LIMIT = 1032, 1 << 28
"""Largest expansion ratio (deflate's), and a size that is always allowed."""
_CHUNK, _PIECE = 1 << 16, 1 << 20
"""Compressed bytes per read, and limit on decompressed bytes per step."""
_KEPT = 1 << 22
"""Bytes kept before the position. Readers of overlapping windows step back."""
_MAX_RESTARTED_A_BYTE = 64
"""Limit on bytes decompressed again, per byte of the content."""
_FIRST_BLOCK = 1 << 20
"""Compressed bytes that yield the first byte of any stream; bz2 has blocks of up to 900 kB."""
_LZMA_MEMORY = 1 << 27
"""Memory limit in bytes; ``xz -9`` needs 65 MiB, and a header may ask for 4 GiB."""
_OVER_MEMORY = "Memory usage limit exceeded"  # LZMAError has no code
_LZMA_HEADER = struct.Struct("<BIQB")
_LZMA_DICTIONARIES = frozenset(one << power for one in (2, 3) for power in range(11, 31))
_LZMA_UNKNOWN, _MAX_LZMA_SIZE = (1 << 64) - 1, 1 << 38
"""Size of a stream that ends with a marker instead, and the largest that ``xz`` takes for a size."""
_ZFILE_HEADER = 2 + len(hex(1 << 64))


class _Decompressor(Protocol):
    """Common interface of the standard library's decompressors."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


class Compression(NamedTuple):
    """Compression of a file.

    Attributes:
        magic: First bytes of the file.
        make: Returns a new decompressor.
        offset: Offset of the compressed stream.
        is_header: Checks a header that has more than a magic number.
    """

    name: str
    magic: bytes
    make: Callable[[], _Decompressor]
    offset: int = 0
    is_header: Callable[[bytes], bool] = bool


def _bz2() -> _Decompressor:
    import bz2

    return bz2.BZ2Decompressor()


def _lzma() -> _Decompressor:
    import lzma

    return lzma.LZMADecompressor(memlimit=_LZMA_MEMORY)


def _is_lzma_header(head: bytes) -> bool:
    """Return whether ``xz`` would recognise the header of an lzma stream, which has no magic number."""
    # A byte of properties, the dictionary's size, the uncompressed size, and the first byte of the stream,
    # which is always 0. ``xz`` only takes sizes of dictionaries that encoders use, and plausible file sizes.
    if len(head) < _LZMA_HEADER.size:
        return False
    _, dictionary, size, first = _LZMA_HEADER.unpack_from(head)
    return dictionary in _LZMA_DICTIONARIES and (size == _LZMA_UNKNOWN or size < _MAX_LZMA_SIZE) and not first


def _zlib(bits: int) -> Callable[[], _Decompressor]:
    return lambda: zlib.decompressobj(bits)


_COMPRESSIONS = (
    Compression("ZFile", b"ZF0x", _zlib(15), _ZFILE_HEADER),
    Compression("gzip", b"\x1f\x8b", _zlib(31)),
    Compression("bz2", b"BZh", _bz2),
    Compression("xz", b"\xfd7zXZ\0", _lzma),
    Compression("lzma", b"\x5d\0", _lzma, is_header=_is_lzma_header),
    *(Compression("zlib", bytes((0x78, level)), _zlib(15)) for level in (0x01, 0x5E, 0x9C, 0xDA)),
)


def _failures() -> tuple[type[Exception], ...]:
    """Return the exceptions that decompressors raise for damaged input; that of bz2 is an OSError."""
    from lzma import LZMAError

    return zlib.error, LZMAError, OSError, EOFError, ValueError


def compression_of(head: bytes) -> Compression | None:
    """Return the compression of a file that begins with ``head``, or None."""
    return next((one for one in _COMPRESSIONS if head.startswith(one.magic) and one.is_header(head)), None)


def first_bytes(compression: Compression, source: Readable, nbytes: int) -> bytes:
    """Return the first decompressed bytes of a file; none if it is damaged."""
    start = compression.offset
    packed = source.read(start, min(_FIRST_BLOCK, max(source.size - start, 0)))
    try:
        return compression.make().decompress(packed.removeprefix(b" "), nbytes)
    except _failures():
        return b""


class _Cursor(threading.local):
    """Position in the content, and the bytes before it, of each thread."""

    # Threads read different arrays at the same time: a shared position would jump back and forth between
    # them, and each step back decompresses everything from the start.

    def __init__(self, pieces: Callable[[], Iterator[bytes]]) -> None:
        """Begin at the start; ``threading.local`` calls this in each thread."""
        self._pieces = pieces
        self._stream = pieces()
        self._repeated = 0
        self.start, self.kept = 0, bytearray()

    def read_on(self) -> bool:
        """Decompress the next piece; False at the end."""
        piece = next(self._stream, b"")
        self.kept += piece
        if len(self.kept) > 2 * _KEPT:  # twice, so that a byte is moved once and not for each piece
            self.start += len(self.kept) - _KEPT
            del self.kept[:-_KEPT]
        return bool(piece)

    def restart(self) -> int:
        """Go back to the start; return the bytes that were decompressed again so far."""
        self._repeated += self.start + len(self.kept)
        self._stream = self._pieces()
        self.start, self.kept = 0, bytearray()
        return self._repeated


class Decompressed(Readable):
    """Content of a compressed stream; to read before the kept bytes decompresses it again from the start."""

    forwards: ClassVar[bool] = True
    _called: ClassVar[str] = "stream"

    def __init__(self, source: Readable, compression: Compression) -> None:
        """Read the stream once.

        Raises:
            Truncated, DamagedCheckpoint: It breaks off, or its checksum is wrong.
            LimitExceeded: It expands by more than deflate can.
        """
        self.path = source.path
        self.compression = compression
        self._source = source
        self._begin = compression.offset
        if compression.offset and source.read(compression.offset, min(1, source.size - self._begin)) == b" ":
            self._begin += 1  # Python 2 wrote a wider number
        self._limit = max(_MIN_LIMIT, _MAX_EXPANSION * source.size)
        self.trailing = 0
        self.size = sum(map(len, self._pieces()))
        self._require_stated_length()
        self._cursor = _Cursor(self._pieces)

    @property
    def stored(self) -> int:
        return self._source.size

    def read_into(self, offset: int, buffer: memoryview, where: str | None = None) -> None:
        self.check(offset, len(buffer), where)
        cursor, done = self._cursor, 0
        if offset < cursor.start:
            self._restart()
        while done < len(buffer):
            at = offset + done - cursor.start
            part = cursor.kept[at : at + len(buffer) - done]
            buffer[done : done + len(part)] = part
            done += len(part)
            if done < len(buffer) and not cursor.read_on():
                found = "the stream became shorter"
                raise DamagedCheckpoint(self.path, found, expected=f"{self.size:,} bytes")

    def _restart(self) -> None:
        repeated = self._cursor.restart()
        limit = max(_MIN_LIMIT, _MAX_RESTARTED_A_BYTE * self.size)
        if repeated > limit:
            found = f"decompressed {repeated:,} bytes again from the start (limit {limit:,})"
            raise LimitExceeded(self.path, f"{found}; arrays are stored out of order")

    def _pieces(self) -> Iterator[bytes]:
        """Yield the content from the beginning on, at most a MiB at once."""
        decompressor, at, done, packed = self.compression.make(), self._begin, 0, b""
        while not decompressor.eof:
            # bz2 and lzma keep unused input themselves, and have ``needs_input``; zlib returns it in
            # ``unconsumed_tail``, from which ``_step`` takes it.
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
                found = f"the {self.compression.name} stream ends early, after {done:,} bytes"
                raise Truncated(self.path, found)
        self.trailing = self._source.size - at + len(decompressor.unused_data)

    def _step(self, decompressor: Any, packed: bytes) -> tuple[bytes, bytes, bool]:
        """Return the next bytes, the unused input, and whether more output needs more input."""
        try:
            piece = decompressor.decompress(packed, _PIECE)
        except _failures() as failure:
            if str(failure) == _OVER_MEMORY:
                found = f"{self.compression.name} needs more than {_LZMA_MEMORY >> 20} MiB of memory"
                raise LimitExceeded(self.path, found) from failure
            found = f"a damaged {self.compression.name} stream: {failure}"
            raise DamagedCheckpoint(self.path, found) from failure
        left: bytes = getattr(decompressor, "unconsumed_tail", b"")
        return piece, left, not piece and not left

    def _require_stated_length(self) -> None:
        """Raise if the content of a ZFile, joblib's old format, doesn't have the size in its header."""
        # The header is "ZF" and the size of the content as a hexadecimal number, padded with spaces.
        if not self.compression.offset:
            return
        text = self._source.read(2, self.compression.offset - 2)
        if text.strip() != hex(self.size).encode():
            stated = text.decode("ascii", "backslashreplace").strip()
            raise DamagedCheckpoint(self.path, f"a ZFile of {self.size:,} bytes", expected=stated)


MAX_EXPANSION = 1032
"""Largest ratio of inflated to stored bytes: deflate codes at most 258 bytes in two bits."""

MIN_STRUCTURE = 6 << 20
STRUCTURE_A_BYTE = 16
FREE = 1 << 20
"""Limit on the bytes of a file's compressed records that are read as structure, and not streamed as values:
at least ``MIN_STRUCTURE``, or ``STRUCTURE_A_BYTE`` for each byte of the file after the first ``FREE``. Real
text and pickles compress to a tenth."""

MIN_SKIPPED = 1 << 31
SKIPPED_A_BYTE = 64
"""Limit on the bytes that are inflated only to be skipped: at least ``MIN_SKIPPED``, or ``SKIPPED_A_BYTE``
for each byte of the file. Each of many views of one record could inflate its beginning again."""

_SKIPPED_CHUNK = 1 << 16
_RAW = -15  # deflate without zlib's header, and its largest window
_MAX_STREAMS = 32  # of one file, kept between reads; each takes some 60 kB


class Inflation:
    """Budget of the compressed records of one file, and cache of their open streams."""

    def __init__(self, source: Readable) -> None:
        self.source = source
        self.limit = max(MIN_STRUCTURE, STRUCTURE_A_BYTE * (source.size - FREE))
        self._spent = self._skipped = 0
        self._kept: deque[Inflated] = deque()
        self._lock = threading.Lock()

    def charge(self, nbytes: int, where: str) -> None:
        """Count bytes that are read as structure."""
        with self._lock:
            self._spent += nbytes
        if self._spent > self.limit:
            found = f"compressed records of more than {self.limit:,} bytes besides tensor values"
            expected = f"the limit for a file of {self.source.size:,} bytes"
            raise LimitExceeded(self.source.path, found, expected=expected, where=where)

    def skip(self, nbytes: int, where: str) -> None:
        """Count bytes that are inflated only to be skipped."""
        with self._lock:
            self._skipped += nbytes
        limit = max(MIN_SKIPPED, SKIPPED_A_BYTE * self.source.size)
        if self._skipped > limit:
            found = f"decompressed {self._skipped:,} bytes only to skip them (limit {limit:,})"
            raise LimitExceeded(self.source.path, f"{found}; tensors are stored out of order", where=where)

    def keep(self, record: Inflated) -> None:
        """Keep the open stream of a record in the cache, and close the oldest one if the cache is full."""
        with self._lock:
            self._kept.append(record)
            oldest = self._kept.popleft() if len(self._kept) > _MAX_STREAMS else None
        # A stream that another thread is reading can't be closed: it moves to the end of the queue.
        if oldest is not None and oldest is not record and not oldest.release():
            self.keep(oldest)


class Inflated(Readable):
    """Content of a deflated record; ``size`` is the number of bytes that its zip declares.

    Reading backwards inflates from the start again. ``read`` is for structure, and has a budget;
    ``read_into`` streams values, and has none.
    """

    forwards: ClassVar[bool] = True
    _called: ClassVar[str] = "record"

    def __init__(self, inflation: Inflation, offset: int, stored: int, size: int, where: str) -> None:
        """Prepare to read a record; nothing is read yet."""
        self.path = inflation.source.path
        self.size = size
        self._inflation, self._source = inflation, inflation.source
        self._extent = (offset, offset + stored)
        self._where = where
        self._lock = threading.Lock()
        self._inflater: Any = None
        self._position = 0

    @property
    def is_open(self) -> bool:
        """Return whether an inflated stream is kept, from which later reads go on."""
        return self._inflater is not None

    @property
    def stored(self) -> int:
        return self._extent[1] - self._extent[0]

    def check(self, offset: int, nbytes: int, where: str | None = None) -> None:
        super().check(offset, nbytes, where or self._where)

    def read(self, offset: int, nbytes: int, where: str | None = None) -> bytes:
        self._inflation.charge(nbytes, where or self._where)
        return super().read(offset, nbytes, where)

    def read_into(self, offset: int, buffer: memoryview, where: str | None = None) -> None:
        with self._lock:
            if self._inflater is None or offset < self._position:
                self._start()
            self._inflation.skip(offset - self._position, where or self._where)
            while self._position < offset:
                self._inflate(min(_SKIPPED_CHUNK, offset - self._position))
            done = 0
            while done < len(buffer):
                piece = self._inflate(len(buffer) - done)
                buffer[done : done + len(piece)] = piece
                done += len(piece)
            # With the last byte, the end of the stream is checked as well: a record may inflate to more than
            # its zip declares, and other readers would show the rest.
            if self._position == self.size and not self._is_at_end():
                raise self._damage(f"inflates to more than {self.size:,} bytes")

    def release(self) -> bool:
        """Close the stream; return False if it is being read."""
        if not self._lock.acquire(blocking=False):
            return False
        self._inflater = None
        self._lock.release()
        return True

    def _start(self) -> None:
        """Begin to inflate from the start of the record."""
        from isal import isal_zlib  # many times as fast as zlib for high compression ratios

        if self.size > self.stored * MAX_EXPANSION:
            raise self._damage(f"{self.stored:,} compressed bytes can't inflate to the stated size")
        if self._inflater is None:
            self._inflation.keep(self)
        self._inflater = isal_zlib.decompressobj(_RAW)
        self._next = self._extent[0]
        self._position = 0

    def _inflate(self, limit: int) -> bytes:
        """Return at least one of the next bytes, and at most ``limit``."""
        while not self._inflater.eof:
            piece = self._step(limit)
            if piece:
                self._position += len(piece)
                return piece
        raise self._damage(f"inflates to {self._position:,} bytes")

    def _step(self, limit: int) -> bytes:
        """Return up to ``limit`` of the next bytes; maybe none, before the end of the stream."""
        # The inflater holds output back, so that bytes may come when all input is used up: the record has
        # ended early only if a call without input makes nothing.
        from isal import isal_zlib

        packed = self._inflater.unconsumed_tail
        if not packed:
            nbytes = min(_SKIPPED_CHUNK, self._extent[1] - self._next)
            packed = self._source.read(self._next, nbytes, self._where)
            self._next += nbytes
        try:
            piece: bytes = self._inflater.decompress(packed, limit)
        except isal_zlib.error as failure:  # type: ignore[misc]  # its stub has no class
            raise self._damage(f"can't be inflated: {failure}") from failure
        if not packed and not piece and not self._inflater.eof:
            raise self._damage(f"its stream ends after {self._position:,} bytes")
        return piece

    def _is_at_end(self) -> bool:
        """Return whether the stream and the record both end at the position."""
        while not self._inflater.eof:
            if self._step(1):
                return False
        return self._next == self._extent[1] and not self._inflater.unused_data

    def _damage(self, found: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(self.path, found, expected=f"{self.size:,} bytes", where=self._where)


class Budget:
    """Limit on the bytes of all names in a file, with shared prefixes and paths expanded."""

    # Keys of a sorted table and paths of nested groups store a shared prefix once, and expand to the square
    # of their size. Names are searched, sorted, compared and printed, so that a byte of them costs a
    # microsecond and tens of bytes of memory. Those of real models expand to a few times their stored size.

    def __init__(self, path: str, nbytes: int, what: str) -> None:
        """Set the limit for a file.

        Args:
            path: The file, for errors.
            nbytes: Its size.
            what: Plural noun of the names, for errors: ``keys``.
        """
        self._path, self._nbytes, self._what = path, nbytes, what
        self.limit = MIN_STRUCTURE + STRUCTURE_A_BYTE * max(0, nbytes - FREE)
        self.spent = 0

    def charge(self, nbytes: int, where: str | None = None) -> None:
        """Count bytes.

        Raises:
            LimitExceeded: The limit is exceeded.
        """
        self.spent += nbytes
        if self.spent > self.limit:
            found = f"{self._what} expand to more than {self.limit:,} bytes"
            expected = f"the limit for {self._nbytes:,} bytes"
            raise LimitExceeded(self._path, found, expected=expected, where=where)
