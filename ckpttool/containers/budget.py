"""Budgets of names and keys: their bytes once written out, in proportion to the file."""

from __future__ import annotations

from ckpttool.containers.inflate import FREE, MIN_STRUCTURE, STRUCTURE_A_BYTE
from ckpttool.core.errors import LimitExceeded


class Budget:
    """How many bytes the names in a file may take once prefixes and paths that they share are written out.

    Names are searched, sorted, compared and printed, so that a byte of them costs a microsecond and tens of
    bytes of memory. Those of real models take a few times what an index stores of them.
    """

    def __init__(self, path: str, nbytes: int, what: str) -> None:
        """Begin to count.

        Args:
            path: The file, for errors.
            nbytes: Its size.
            what: What is counted, for errors: ``keys``.
        """
        self._path, self._nbytes, self._what = path, nbytes, what
        self.limit = MIN_STRUCTURE + STRUCTURE_A_BYTE * max(0, nbytes - FREE)
        self.spent = 0

    def charge(self, nbytes: int, where: str | None = None) -> None:
        """Count bytes.

        Raises:
            LimitExceeded: They are more than the file may have.
        """
        self.spent += nbytes
        if self.spent > self.limit:
            found = f"{self._what} of more than {self.limit:,} bytes once written out"
            expected = f"less in {self._nbytes:,} bytes"
            raise LimitExceeded(self._path, found, expected=expected, where=where)
