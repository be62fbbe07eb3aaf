"""Checksums of the content of a file: computed, listed in a manifest, or kept by a store.

Digests are of the whole file. CRCs are kept by block, since they can be combined: to the CRC of the whole,
and to those of the parts of an upload, whose checksum is kept by stores.

Source: google/leveldb ``util/crc32c.h``; google/crc32c ``include/crc32c/crc32c.h``; NVM Express, NVM Command
Set Specification 1.0d, section 5.2.1.3.4.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

_MASK_DELTA = 0xA282EAD8
_MASK_32 = 0xFFFFFFFF
_STEP = 1 << 18
_CRC32_POLYNOMIAL = 0xEDB88320
_CRC32C_POLYNOMIAL = 0x82F63B78
_CRC64NVME_POLYNOMIAL = 0x9A6C9329AC4BC9B5
_POLYNOMIALS = {
    "crc32": _CRC32_POLYNOMIAL,
    "crc32c": _CRC32C_POLYNOMIAL,
    "crc64nvme": _CRC64NVME_POLYNOMIAL,
}
"""Reflected, as the algorithms use them: the highest bit is that of x⁰, and always set."""

Crc = Callable[[memoryview, int], int]
"""Returns the CRC of bytes, given the CRC of the bytes before them."""


def crc_functions() -> dict[str, Crc]:
    """Return CRC functions of writable buffers, by algorithm; CRC-64/NVME only if ``awscrt`` is installed."""
    from isal import isal_zlib

    functions: dict[str, Crc] = {"crc32": isal_zlib.crc32, "crc32c": crc32c}
    try:
        from awscrt.checksums import crc64nvme
    except ImportError:
        return functions
    return functions | {"crc64nvme": crc64nvme}


def crc_digits(crc: int, algorithm: str) -> str:
    """Return a CRC in hexadecimal digits."""
    return f"{crc:0{crc_bytes(algorithm) * 2}x}"


def crc_bytes(algorithm: str) -> int:
    """Return the size of a CRC in bytes."""
    return _POLYNOMIALS[algorithm].bit_length() // 8


def crc32c(data: bytes | memoryview, before: int = 0) -> int:
    """Return the CRC-32C of bytes; ``before`` is that of the bytes before them."""
    view = memoryview(data)
    if not view.readonly and view.nbytes:
        return _buffer_function()(view, before)
    return _sum_copies(view, before)


def _sum_copies(view: memoryview, before: int) -> int:
    import google_crc32c

    for start in range(0, len(view), _STEP):  # extend() takes only bytes, and one copy of all could be large
        before = google_crc32c.extend(before, bytes(view[start : start + _STEP]))
    return before


@cache
def _buffer_function() -> Callable[[memoryview, int], int]:
    """Return a function that sums a buffer without a copy, and without the interpreter's lock."""
    # ``google_crc32c.extend`` takes only bytes, and holds the interpreter's lock. So the C function that it
    # calls is called through ctypes, which releases the lock. It is in a library that the extension module is
    # linked with, so the system's loader finds it through that module.
    try:
        import ctypes

        from google_crc32c import _crc32c

        extend = ctypes.CDLL(_crc32c.__file__).crc32c_extend
    except (ImportError, OSError, AttributeError):  # another build of the package, or Windows
        return _sum_copies
    extend.restype = ctypes.c_uint32
    extend.argtypes = (ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t)

    def sum_buffer(view: memoryview, before: int) -> int:
        held = ctypes.c_char.from_buffer(view)  # keeps the buffer, and has its address
        crc: int = extend(before, ctypes.addressof(held), view.nbytes)
        return crc

    return sum_buffer


def mask_crc(crc: int) -> int:
    """Return the masked form of a checksum, in which LevelDB's tables and TFRecord files store it."""
    # The CRC of data that contains CRCs would be weak (``crc32c.h``), so they are rotated and shifted.
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & _MASK_32


def unmask_crc(stored: int) -> int:
    """Return the checksum with the given masked form."""
    turned = (stored - _MASK_DELTA) & _MASK_32
    return (turned >> 17 | turned << 15) & _MASK_32


def combined_crc(first: int, second: int, nbytes: int, algorithm: str) -> int:
    """Return the CRC of two joined strings, from their CRCs; ``nbytes`` is the length of the second."""
    return combined_crc32(first, second, nbytes, _POLYNOMIALS[algorithm]) if first else second


def combined_crc32(first: int, second: int, nbytes: int, polynomial: int = _CRC32_POLYNOMIAL) -> int:
    """Return the CRC of two joined strings, from their CRCs; ``nbytes`` is the length of the second.

    Source: zlib ``crc32.c``, ``crc32_combine``.
    """
    # CRCs are linear over GF(2): the result is the CRC of the first string followed by ``nbytes`` zero bytes,
    # plus that of the second. Appending zero bits is a linear map of the CRC's bits. The maps for powers of
    # two are squares of each other; those in the binary form of ``nbytes`` are applied one after the other.
    exponent = 3  # eight zero bits are a zero byte
    while nbytes:
        if nbytes & 1:
            first = _image(_zero_bits(polynomial, exponent), first)
        nbytes >>= 1
        exponent += 1
    return first ^ second


@cache
def _zero_bits(polynomial: int, exponent: int) -> list[int]:
    """Return the map for 2 to the power of ``exponent`` zero bits; row i is the image of bit i."""
    # A single zero bit shifts the CRC to the right, and adds the polynomial if bit 0 drops out.
    if exponent == 0:
        return [polynomial] + [1 << bit for bit in range(polynomial.bit_length() - 1)]
    rows = _zero_bits(polynomial, exponent - 1)
    return [_image(rows, row) for row in rows]


def _image(rows: list[int], bits: int) -> int:
    image = 0
    for row in rows:
        if bits & 1:
            image ^= row
        bits >>= 1
    return image


BLOCK_BYTES = 1 << 23
"""Size of the blocks whose CRCs a manifest has: parts of uploads are usually multiples; 1 TB has 131,072."""
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
_MD5_OF_EMPTY = "d41d8cd98f00b204e9800998ecf8427e"  # the MD5 of zero bytes
_COMMON_PART_SIZES = tuple(mebibytes << 20 for mebibytes in (8, 5, 16, 32, 64, 128))
"""Part sizes of other programs' uploads, in bytes: those of boto3 and the AWS tools first."""
CRCS = ("crc32", "crc32c", "crc64nvme")


class Checksum(NamedTuple):
    """Checksum of a file.

    Attributes:
        algorithm: Key of ``TITLES``.
        digits: Hexadecimal digits.
        parts: Sizes in bytes of the parts whose checksums it is a checksum of; empty if it is of the content.
    """

    algorithm: str
    digits: str
    parts: tuple[int, ...] = ()


class StoredChecksums(NamedTuple):
    """Checksums that a store keeps of an object's content.

    Attributes:
        checksums: The checksums.
        reason: Explanation if none are known.
        version: Version of the object that has them; empty if the store didn't state it.
    """

    checksums: tuple[Checksum, ...] = ()
    reason: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True)
class FileSums:
    """Size and checksums of a file.

    Attributes:
        nbytes: Size of the file in bytes; None if only digests are known.
        digests: Digests of the whole in hexadecimal digits, by algorithm.
        blocks: CRCs of all blocks, by algorithm; the last block may be shorter.
        block_bytes: Size of a block in bytes.
    """

    nbytes: int | None
    digests: Mapping[str, str] = field(default_factory=dict)
    blocks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    block_bytes: int = BLOCK_BYTES

    def value_like(self, other: Checksum) -> str | None:
        """Return the checksum of the same kind as another one; None if these don't suffice to compute it."""
        crcs = self.blocks.get(other.algorithm)
        if crcs is None or self.nbytes is None:
            return None if other.parts else self.digests.get(other.algorithm)
        if not other.parts:
            return crc_digits(self._combined(crcs, 0, self.nbytes, other.algorithm), other.algorithm)
        function = crc_functions().get(other.algorithm)
        if function is None or not self._has_parts(other.parts):
            return None
        # The checksum of an upload in parts is the CRC of the parts' CRCs, joined as big-endian integers. The
        # CRC of a part follows from those of its blocks, if parts begin at the boundaries of blocks.
        width, begin, joined = crc_bytes(other.algorithm), 0, b""
        for nbytes in other.parts:
            joined += self._combined(crcs, begin, begin + nbytes, other.algorithm).to_bytes(width, "big")
            begin += nbytes
        return crc_digits(function(memoryview(joined), 0), other.algorithm)

    def _has_parts(self, parts: Sequence[int]) -> bool:
        """Return whether parts consist of whole blocks."""
        return sum(parts) == self.nbytes and not any(nbytes % self.block_bytes for nbytes in parts[:-1])

    def _combined(self, crcs: Sequence[int], begin: int, end: int, algorithm: str) -> int:
        combined = 0
        for at in range(begin, end, self.block_bytes):
            nbytes = min(self.block_bytes, end - at)
            combined = combined_crc(combined, crcs[at // self.block_bytes], nbytes, algorithm)
        return combined


class ContentTag:
    """ETag that S3 computes of bytes: their MD5, or for an upload in parts, the MD5 of the parts' MD5s.

    Source: https://docs.aws.amazon.com/AmazonS3/latest/API/API_Object.html
    """

    def __init__(self, size: int, part: int) -> None:
        from hashlib import md5

        self._md5 = partial(md5, usedforsecurity=False)
        self._parts: list[Any] = []
        self._part, self._room, self._has_parts = part, 0, size > part

    def update(self, block: bytes) -> None:
        view = memoryview(block)
        while view:
            if not self._room:
                self._parts.append(self._md5())
                self._room = self._part
            self._parts[-1].update(view[: self._room])
            taken = min(len(view), self._room)
            view, self._room = view[taken:], self._room - taken

    @property
    def value(self) -> str:
        digests = [one.digest() for one in self._parts]
        if not self._has_parts:
            return (digests[0] if digests else self._md5().digest()).hex()
        return f"{self._md5(b''.join(digests)).hexdigest()}-{len(digests)}"


def is_content_tag(etag: str, size: int) -> bool:
    """Return whether an object's ETag has the form of those that S3 computes of bytes."""
    # Some servers state the ETag of an empty object for every object.
    match = _ETAG.fullmatch(etag)
    return match is not None and (not size or match[1] != _MD5_OF_EMPTY)


def content_tag_like(etag: str, size: int, part: int) -> ContentTag | None:
    """Return an empty tag to compute an ETag like another one; None if that isn't computed of bytes.

    Args:
        etag: The ETag.
        size: Number of bytes.
        part: Part size of ckpttool's own uploads.
    """
    # An ETag ends with the number of parts, which doesn't give their size. The usual sizes are tried, and the
    # first one that gives this number is taken. If that is wrong, the ETags differ, which proves nothing: the
    # bytes are compared then.
    if (match := _ETAG.fullmatch(etag)) is None:
        return None
    if match[2] is None:
        return ContentTag(size, max(size, 1))
    sizes = (part, *_COMMON_PART_SIZES)
    fitting = next((one for one in sizes if -(-size // one) == int(match[2])), None)
    return None if fitting is None else ContentTag(size, fitting)
