"""Checksums of the content of a file: computed, listed in a manifest, or kept by a store.

Digests are of the whole. CRCs are known of blocks, and combine: to that of the whole, and to those of the
parts of an upload, of which stores keep a checksum of checksums.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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
_ETAG = re.compile(r'"?([0-9a-f]{32})(?:-([1-9][0-9]{0,4}))?"?')
_OF_NOTHING = "d41d8cd98f00b204e9800998ecf8427e"
_PARTS_OF_OTHERS = tuple(mebibytes << 20 for mebibytes in (8, 5, 16, 32, 64, 128))
"""How large the parts are in which other programs upload: boto3 and the AWS tools first."""
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


class ContentTag:
    """ETag that S3 computes of bytes: their MD5, or that of the MD5s of parts.

    Source: https://docs.aws.amazon.com/AmazonS3/latest/API/API_Object.html
    """

    def __init__(self, size: int, part: int) -> None:
        self._parts: list[Any] = []
        self._part, self._room, self._has_parts = part, 0, size > part

    def update(self, block: bytes) -> None:
        view = memoryview(block)
        while view:
            if not self._room:
                self._parts.append(hashlib.md5(usedforsecurity=False))
                self._room = self._part
            self._parts[-1].update(view[: self._room])
            taken = min(len(view), self._room)
            view, self._room = view[taken:], self._room - taken

    @property
    def value(self) -> str:
        digests = [one.digest() for one in self._parts]
        if not self._has_parts:
            return (digests[0] if digests else hashlib.md5(usedforsecurity=False).digest()).hex()
        return f"{hashlib.md5(b''.join(digests), usedforsecurity=False).hexdigest()}-{len(digests)}"


def is_content_tag(etag: str, size: int) -> bool:
    """Return whether an object's ETag has the form of those that S3 computes of bytes.

    Some servers state that of no bytes for every object.
    """
    match = _ETAG.fullmatch(etag)
    return match is not None and (not size or match[1] != _OF_NOTHING)


def content_tag_like(etag: str, size: int, part: int) -> ContentTag | None:
    """Return an empty tag for bytes that may have an ETag; None if it isn't computed of bytes.

    Args:
        etag: The ETag.
        size: Number of the bytes.
        part: Size of the parts in which ckpttool uploads them.
    """
    if (match := _ETAG.fullmatch(etag)) is None:
        return None
    if match[2] is None:
        return ContentTag(size, max(size, 1))
    sizes = (part, *_PARTS_OF_OTHERS)
    fitting = next((one for one in sizes if -(-size // one) == int(match[2])), None)
    return None if fitting is None else ContentTag(size, fitting)
