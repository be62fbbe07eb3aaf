"""Checksums of the content of a file: computed, listed in a manifest, or kept by a store.

Digests are of the whole. CRCs are known of blocks, and combine: to that of the whole, and to those of the
parts of an upload, of which stores keep a checksum of checksums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ckpttool.storage.crc import combined_crc, crc_bytes, crc_digits, crc_functions

BLOCK_BYTES = 1 << 23
"""Of how many bytes a manifest has CRCs: parts of uploads are usually a multiple, and 1 TB has 131,072."""
TITLES = {
    "crc32": "CRC-32",
    "crc32c": "CRC-32C",
    "crc64nvme": "CRC-64/NVME",
    "md5": "MD5",
    "sha1": "SHA-1",
    "sha256": "SHA-256",
    "git-sha1": "git's SHA-1",
}
CRCS = ("crc32", "crc32c", "crc64nvme")


class Checksum(NamedTuple):
    """A checksum in hexadecimal digits; with ``parts``, of the checksums of parts of so many bytes each."""

    algorithm: str
    digits: str
    parts: tuple[int, ...] = ()


class StoredChecksums(NamedTuple):
    """What a store keeps of an object's content; without any checksum, ``reason`` says why.

    ``version`` is that of the object when it was asked for, if it was told.
    """

    checksums: tuple[Checksum, ...] = ()
    reason: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True)
class FileSums:
    """What is known of the content of a file.

    Attributes:
        nbytes: Its size; None if only digests are known.
        digests: Of the whole, in hexadecimal digits, by algorithm.
        blocks: The CRC of each block, by algorithm; the last block may be shorter.
        block_bytes: The size of a block.
    """

    nbytes: int | None
    digests: Mapping[str, str] = field(default_factory=dict)
    blocks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    block_bytes: int = BLOCK_BYTES

    def value_like(self, other: Checksum) -> str | None:
        """Return the checksum of the same kind as another one; None if it can't be known from this."""
        crcs = self.blocks.get(other.algorithm)
        if crcs is None or self.nbytes is None:
            return None if other.parts else self.digests.get(other.algorithm)
        if not other.parts:
            return crc_digits(self._combined(crcs, 0, self.nbytes, other.algorithm), other.algorithm)
        function = crc_functions().get(other.algorithm)
        if function is None or not self._has_parts(other.parts):
            return None
        width, begin, joined = crc_bytes(other.algorithm), 0, b""
        for nbytes in other.parts:
            joined += self._combined(crcs, begin, begin + nbytes, other.algorithm).to_bytes(width, "big")
            begin += nbytes
        return crc_digits(function(memoryview(joined), 0), other.algorithm)

    def _has_parts(self, parts: Sequence[int]) -> bool:
        """Tell whether parts consist of whole blocks."""
        return sum(parts) == self.nbytes and not any(nbytes % self.block_bytes for nbytes in parts[:-1])

    def _combined(self, crcs: Sequence[int], begin: int, end: int, algorithm: str) -> int:
        combined = 0
        for at in range(begin, end, self.block_bytes):
            nbytes = min(self.block_bytes, end - at)
            combined = combined_crc(combined, crcs[at // self.block_bytes], nbytes, algorithm)
        return combined
