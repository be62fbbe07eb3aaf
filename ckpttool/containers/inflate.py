"""A compressed record, read like a file: in bounded memory, fast as long as one reads forwards."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, ClassVar

from ckpttool.core.errors import DamagedCheckpoint, LimitExceeded
from ckpttool.core.readable import Readable

MAX_EXPANSION = 1032
"""How many bytes may come of one: more than 258 for two bits is not in deflate's tables."""

MIN_STRUCTURE = 6 << 20
STRUCTURE_A_BYTE = 16
FREE = 1 << 20
"""Of a file's compressed records so many bytes may be read as structure (not streamed as values): in any
case, and for each byte of the file behind its first MiB. Honest text and pickles become a tenth."""

MIN_SKIPPED = 1 << 31
SKIPPED_A_BYTE = 64
"""Views of one record can make its beginning be inflated again and again: so many bytes may be passed over,
in any case, and for each byte of the file."""

_CHUNK = 1 << 16
_RAW = -15  # deflate without zlib's header, and its largest window
_MAX_STREAMS = 32  # of one file, kept between reads; each takes some 60 kB


class Inflation:
    """What the compressed records of one file share: a budget, and memory for streams between two reads."""

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
            found = f"compressed records of more than {self.limit:,} bytes besides values"
            expected = f"less in a file of {self.source.size:,} bytes"
            raise LimitExceeded(self.source.path, found, expected=expected, where=where)

    def skip(self, nbytes: int, where: str) -> None:
        """Count bytes that are inflated only to be passed over."""
        with self._lock:
            self._skipped += nbytes
        limit = max(MIN_SKIPPED, SKIPPED_A_BYTE * self.source.size)
        if self._skipped > limit:
            found = f"decompressed {self._skipped:,} bytes only to skip them (limit {limit:,})"
            raise LimitExceeded(self.source.path, f"{found}; tensors are stored out of order", where=where)

    def keep(self, record: Inflated) -> None:
        """Keep what a record has opened, and let go of what another has that was opened long ago."""
        with self._lock:
            self._kept.append(record)
            oldest = self._kept.popleft() if len(self._kept) > _MAX_STREAMS else None
        if oldest is not None and oldest is not record and not oldest.release():
            self.keep(oldest)


class Inflated(Readable):
    """What a deflated record holds; ``size`` in bytes as its zip states it.

    To read backwards starts again from the beginning. ``read`` is for structure, and has a budget;
    ``read_into`` streams, and has none.
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
        """Tell whether a stream is kept, to be read on from."""
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
                self._inflate(min(_CHUNK, offset - self._position))
            done = 0
            while done < len(buffer):
                piece = self._inflate(len(buffer) - done)
                buffer[done : done + len(piece)] = piece
                done += len(piece)
            if self._position == self.size and not self._is_at_end():
                raise self._damage(f"inflates to more than {self.size:,} bytes")

    def release(self) -> bool:
        """Let go of the stream, and tell whether that was possible: not while it is read."""
        if not self._lock.acquire(blocking=False):
            return False
        self._inflater = None
        self._lock.release()
        return True

    def _start(self) -> None:
        """Begin to inflate, perhaps anew."""
        from isal import isal_zlib  # many times as fast as zlib where much comes of little

        if self.size > self.stored * MAX_EXPANSION:
            raise self._damage(f"{self.stored:,} bytes, which can't be inflated to so many")
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
        """Return up to ``limit`` of the next bytes: some is still to come when all input is used up."""
        from isal import isal_zlib

        packed = self._inflater.unconsumed_tail
        if not packed:
            nbytes = min(_CHUNK, self._extent[1] - self._next)
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
        """Tell whether the stream ends here, and with it the record."""
        while not self._inflater.eof:
            if self._step(1):
                return False
        return self._next == self._extent[1] and not self._inflater.unused_data

    def _damage(self, found: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(self.path, found, expected=f"{self.size:,} bytes", where=self._where)
