"""CRC-32C, and the masked form in which TensorFlow and LevelDB store it.

Source: google/leveldb ``util/crc32c.h``.
"""

from __future__ import annotations

_MASK_DELTA = 0xA282EAD8
_ALL = 0xFFFFFFFF
_STEP = 1 << 18


def crc32c(data: bytes | memoryview, before: int = 0) -> int:
    """Return the CRC-32C of bytes; ``before`` is that of the bytes in front of them."""
    import google_crc32c

    view = memoryview(data)
    for start in range(0, len(view), _STEP):  # it takes nothing but bytes, and a copy of all would be large
        before = google_crc32c.extend(before, bytes(view[start : start + _STEP]))
    return before


def masked(crc: int) -> int:
    """Return a checksum as it is stored: a checksum of data that holds checksums would be weak."""
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & _ALL


def unmasked(stored: int) -> int:
    """Return the checksum that was stored in its masked form."""
    turned = (stored - _MASK_DELTA) & _ALL
    return (turned >> 17 | turned << 15) & _ALL
