"""Files that are opened only while they are read: a checkpoint may have more than a process may keep open."""

from __future__ import annotations

import os

from ckpttool.errors import AccessDenied, DamagedCheckpoint
from ckpttool.wire.source import Source


class Reopened(Source):
    """A file that stays open until it is told to ``rest``; from then on each read opens and closes it."""

    __slots__ = ("_identity", "_is_closed")

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Look at a regular file.

        Raises:
            NotFound, AccessDenied: It can't be opened.
        """
        super().__init__(path)
        self._identity = _identity(self._descriptor)
        self._is_closed = False

    def rest(self) -> None:
        """Give the open file back; the next read opens it anew."""
        super().close()

    def close(self) -> None:
        """Read no more; closing twice is allowed."""
        super().close()
        self._is_closed = True

    def read_into(self, offset: int, buffer: memoryview, where: str | None = None) -> None:
        """Fill a buffer from ``offset``.

        Raises:
            Truncated: The file ends before; it became shorter since it was opened.
            DamagedCheckpoint: Another file lies in its place now.
            AccessDenied: It was closed, or can't be opened any more.
        """
        if self._is_closed:
            raise AccessDenied(self.path, "it was closed", where=where)
        if self._descriptor >= 0:
            super().read_into(offset, buffer, where)
            return
        with Source(self.path) as now:
            if _identity(now._descriptor) != self._identity:
                raise DamagedCheckpoint(self.path, "it was replaced while it was read", where=where)
            now.size = self.size
            now.read_into(offset, buffer, where)


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino
