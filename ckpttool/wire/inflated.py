"""A compressed record, read like a file: in bounded memory, fast as long as one reads forwards."""

from __future__ import annotations

import threading
import zlib
from typing import ClassVar

from ckpttool.errors import DamagedCheckpoint
from ckpttool.wire.readable import Readable
from ckpttool.wire.source import Source

_CHUNK = 1 << 16


class Inflated(Readable):
    """What a deflated record holds; ``size`` in bytes as its zip states it.

    To read backwards starts again from the beginning.
    """

    forwards: ClassVar[bool] = True
    _called: ClassVar[str] = "record"

    def __init__(self, source: Source, offset: int, stored: int, size: int, where: str) -> None:
        self.path = source.path
        self.size = size
        self._source = source
        self._extent = (offset, offset + stored)
        self._where = where
        self._lock = threading.Lock()
        self._restart()

    def check(self, offset: int, nbytes: int, where: str | None = None) -> None:
        super().check(offset, nbytes, where or self._where)

    def read_into(self, offset: int, buffer: memoryview, where: str | None = None) -> None:
        with self._lock:
            if offset < self._position:
                self._restart()
            while self._position < offset:
                self._inflate(min(_CHUNK, offset - self._position))
            done = 0
            while done < len(buffer):
                piece = self._inflate(len(buffer) - done)
                buffer[done : done + len(piece)] = piece
                done += len(piece)
            if self._position == self.size and not self._is_at_end():
                raise self._damaged(f"inflates to more than {self.size:,} bytes")

    def _restart(self) -> None:
        self._inflater = zlib.decompressobj(-zlib.MAX_WBITS)
        self._next = self._extent[0]
        self._position = 0

    def _inflate(self, limit: int) -> bytes:
        """Return at least one of the next bytes, and at most ``limit``."""
        while not self._inflater.eof:
            piece = self._step(limit)
            if piece:
                self._position += len(piece)
                return piece
        raise self._damaged(f"inflates to {self._position:,} bytes")

    def _step(self, limit: int) -> bytes:
        """Return up to ``limit`` of the next bytes: zlib may hold some when all input is used up."""
        packed = self._inflater.unconsumed_tail or self._more()
        try:
            piece = self._inflater.decompress(packed, limit)
        except zlib.error as failure:
            raise self._damaged(f"can't be inflated: {failure}") from failure
        if not packed and not piece and not self._inflater.eof:
            raise self._damaged(f"its stream ends after {self._position:,} bytes")
        return piece

    def _more(self) -> bytes:
        nbytes = min(_CHUNK, self._extent[1] - self._next)
        packed = self._source.read(self._next, nbytes, self._where)
        self._next += nbytes
        return packed

    def _is_at_end(self) -> bool:
        """Tell whether the stream ends here, and with it the record."""
        while not self._inflater.eof:
            if self._step(1):
                return False
        return self._next == self._extent[1] and not self._inflater.unused_data

    def _damaged(self, found: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(self.path, found, expected=f"{self.size:,} bytes", where=self._where)
