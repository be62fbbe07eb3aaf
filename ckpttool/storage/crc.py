"""CRC-32C, the masked form in which TensorFlow and LevelDB store it, and the CRC of bytes put together.

Stores keep CRC-32, CRC-32C or CRC-64/NVME of what is in them.

Source: google/leveldb ``util/crc32c.h``; google/crc32c ``include/crc32c/crc32c.h``; NVM Express, NVM Command
Set Specification 1.0d, section 5.2.1.3.4.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

_MASK_DELTA = 0xA282EAD8
_ALL = 0xFFFFFFFF
_STEP = 1 << 18
_CRC32_POLYNOMIAL = 0xEDB88320
_CRC32C_POLYNOMIAL = 0x82F63B78
_CRC64NVME_POLYNOMIAL = 0x9A6C9329AC4BC9B5
_POLYNOMIALS = {
    "crc32": _CRC32_POLYNOMIAL,
    "crc32c": _CRC32C_POLYNOMIAL,
    "crc64nvme": _CRC64NVME_POLYNOMIAL,
}
"""The bits of each in reverse, so that the highest one is set."""

Crc = Callable[[memoryview, int], int]
"""Returns the CRC of bytes, told that of the bytes in front of them."""


def crc_functions() -> dict[str, Crc]:
    """Return what sums a writable buffer, by algorithm; CRC-64 only if a package is there that does it."""
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
    """Return how many bytes a CRC has."""
    return _POLYNOMIALS[algorithm].bit_length() // 8


def crc32c(data: bytes | memoryview, before: int = 0) -> int:
    """Return the CRC-32C of bytes; ``before`` is that of the bytes in front of them."""
    view = memoryview(data)
    if not view.readonly and view.nbytes:
        return _buffer_function()(view, before)
    return _sum_copies(view, before)


def _sum_copies(view: memoryview, before: int) -> int:
    import google_crc32c

    for start in range(0, len(view), _STEP):  # it takes nothing but bytes, and a copy of all would be large
        before = google_crc32c.extend(before, bytes(view[start : start + _STEP]))
    return before


@cache
def _buffer_function() -> Callable[[memoryview, int], int]:
    """Return what sums a buffer where it is, while other threads go on.

    ``google_crc32c.extend`` takes a copy, and holds the interpreter's lock. The function that it calls is
    called directly, where the system's loader finds it behind the extension module.
    """
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
    """Return a checksum as it is stored: a checksum of data that holds checksums would be weak."""
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & _ALL


def unmask_crc(stored: int) -> int:
    """Return the checksum that was stored in its masked form."""
    turned = (stored - _MASK_DELTA) & _ALL
    return (turned >> 17 | turned << 15) & _ALL


def combined_crc(first: int, second: int, nbytes: int, algorithm: str) -> int:
    """Return the CRC of two byte strings from theirs; ``nbytes`` is the length of the second."""
    return combined_crc32(first, second, nbytes, _POLYNOMIALS[algorithm]) if first else second


def combined_crc32(first: int, second: int, nbytes: int, polynomial: int = _CRC32_POLYNOMIAL) -> int:
    """Return the CRC of two byte strings from theirs; ``nbytes`` is the length of the second.

    Appending a zero byte is a linear map of the checksum's bits; it is applied ``nbytes`` times by squaring.

    Source: zlib ``crc32.c``, ``crc32_combine``.
    """
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
