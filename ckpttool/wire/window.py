"""The bytes of a pickle, of which a window is held in memory; large payloads are passed over."""

from __future__ import annotations

import struct

from ckpttool.errors import DamagedCheckpoint, LimitExceeded, Truncated
from ckpttool.wire.readable import Readable

MAX_STREAM = 1 << 28
"""The most bytes of one pickle that are interpreted; large payloads, which are skipped, don't count."""

MAX_LINE = 1 << 26
"""The most bytes of a text that a line spells, as protocol 0 does; in bytes."""

_FIRST_WINDOW = 1 << 10
_WINDOW = 1 << 20
_LONGEST_FIXED = 16  # no opcode has more bytes of fixed-size arguments


class Window:
    """Reads on in a pickle, byte by byte or in pieces.

    Attributes:
        data: The bytes that are held in memory.
        at: The place of the next byte in them.
    """

    def __init__(self, source: Readable, offset: int, end: int, where: str | None = None) -> None:
        """Begin at ``offset``, and never read beyond ``end``, in bytes."""
        self.source = source
        self._where = where
        self._start = self._base = offset
        self.end = end
        self.data = b""
        self.at = 0
        self._stop_at = self._refill_at = -1
        self._frame_end: int | None = None
        self._window = _FIRST_WINDOW
        self._streamed = 0

    def _refill(self, needed: int = _LONGEST_FIXED) -> None:
        """Bring at least ``needed`` bytes from the position on into the window, where there are so many."""
        self._base = self.position
        self.at = 0
        self._window = min(4 * self._window, _WINDOW)
        length = min(max(self._window, needed), self.end - self._base)
        self.data = self.source.read(self._base, length, self._where) if length > 0 else b""
        at_end = self._base + len(self.data) >= self.end
        self._refill_at = self.end if at_end else len(self.data) - _LONGEST_FIXED
        self._watch()
        if self._base - self._start - self._streamed > MAX_STREAM:
            raise self.exceeded(f"a pickle of more than {MAX_STREAM:,} bytes")

    # Frames ---------------------------------------------------------------------------------------

    def begin_frame(self, nbytes: int) -> bool:
        """Note that a frame of so many bytes begins here; return whether the last one has ended."""
        is_next = self._frame_end is None or self._frame_end == self.position
        self._frame_end = self.position + nbytes
        self._watch()
        return is_next

    def leave_frame(self) -> bool:
        """Tell whether the position agrees with the frame: an opcode ends where the frame does."""
        end = self._frame_end
        if end is None or self.position < end:
            return True
        self._frame_end = None
        self._watch()
        return self.position == end

    @property
    def is_in_frame(self) -> bool:
        """Tell whether more of a frame follows."""
        return self._frame_end is not None and self.position < self._frame_end

    def _watch(self) -> None:
        """Say behind which opcode to stop: at the frame's end, or where the window is to be filled again."""
        frame_end = self.end if self._frame_end is None else self._frame_end
        self._stop_at = min(self._refill_at, frame_end - self._base - 1)

    def take(self, nbytes: int) -> bytes:
        """Return the next bytes, as they are."""
        if self.at + nbytes > len(self.data):
            self.require(nbytes)
            self._refill(nbytes)
        begin = self.at
        self.at = end = begin + nbytes
        return self.data[begin:end]

    def line(self) -> bytes:
        """Return the bytes before the next line feed. At the end CPython takes the last byte for one."""
        end, length = self.data.find(b"\n", self.at), _WINDOW
        while end < 0:
            self._refill(length)
            end = self.data.find(b"\n")
            if end < 0 and self._base + len(self.data) >= self.end:
                end = max(self.at, len(self.data) - 1)
            if end < 0 and length >= MAX_LINE:
                raise self.exceeded(f"a line of more than {MAX_LINE:,} bytes")
            length *= 2
        line = self.data[self.at : end]
        self.at = min(end + 1, len(self.data))
        return line

    def skip(self, nbytes: int) -> int:
        """Pass over a payload and return its offset in the source."""
        self.require(nbytes)
        offset = self.position
        self._streamed += nbytes
        self.at += nbytes
        if self.at > len(self.data):
            self._refill()
        return offset

    def byte(self) -> int:
        """Return the next byte; an IndexError, which ``Interpreter.run`` expects, if the window has none."""
        number = self.data[self.at]
        self.at += 1
        return number

    def fixed(self, layout: struct.Struct) -> int:
        (number,) = layout.unpack_from(self.data, self.at)
        self.at += layout.size
        return number  # type: ignore[no-any-return]  # the layouts in use hold one integer each

    @property
    def position(self) -> int:
        """Return the offset of the next byte in the source."""
        return self._base + self.at

    def require(self, nbytes: int) -> None:
        """Require that so many bytes follow."""
        if nbytes < 0 or self.position + nbytes > self.end:
            found = f"{nbytes:,} bytes announced at byte {self.position:,}"
            available = f"at most {self.end - self.position:,}"
            raise Truncated(self.source.path, found, expected=available, where=self._where)

    # Errors ---------------------------------------------------------------------------------------

    def _place(self) -> str:
        place = f"byte {self.position:,}"
        return place if self._where is None else f"{self._where}, {place}"

    def damaged(self, found: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(self.source.path, found, where=self._place(), code="pickle-damaged")

    def truncated(self) -> Truncated:
        return Truncated(
            self.source.path, "truncated: the pickle goes on behind the end", where=self._place()
        )

    def exceeded(self, found: str) -> LimitExceeded:
        return LimitExceeded(self.source.path, found, where=self._place())
