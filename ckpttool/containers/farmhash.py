"""FarmHash's Fingerprint64, TensorFlow's fingerprint of the index of a SavedModel's variables.

Source: google/farmhash ``src/farmhash.cc`` (namespace ``farmhashna``).
"""

from __future__ import annotations

import struct

_MASK = (1 << 64) - 1
_K0, _K1, _K2 = 0xC3A5C85C97CB3127, 0xB492B66FBE98F273, 0x9AE16A3B2F90404F
_SEED = 81
_BLOCK = 64
_WORD, _HALF, _WORDS = struct.Struct("<Q"), struct.Struct("<I"), struct.Struct("<8Q")

Pair = tuple[int, int]


def fingerprint64(data: bytes) -> int:
    """Return the 64-bit fingerprint of bytes."""
    # Python's integers have no fixed width: a value is reduced to 64 bits where the C++ code overflows and
    # the high bits would matter, which is before each shift to the right, and in results.
    if len(data) <= 16:
        return _hash_0_to_16(data)
    if len(data) <= 32:
        return _hash_17_to_32(data)
    return _hash_over_64(data) if len(data) > _BLOCK else _hash_33_to_64(data)


def _word(data: bytes, at: int) -> int:
    number: int = _WORD.unpack_from(data, at)[0]
    return number


def _rotate(value: int, by: int) -> int:
    value &= _MASK
    return (value >> by | value << (64 - by)) & _MASK


def _shift_mix(value: int) -> int:
    value &= _MASK
    return value ^ value >> 47


def _hash_len_16(first: int, second: int, multiplier: int) -> int:
    first, second = first & _MASK, second & _MASK
    a = _shift_mix((first ^ second) * multiplier)
    b = _shift_mix((second ^ a) * multiplier)
    return b * multiplier & _MASK


def _hash_0_to_16(data: bytes) -> int:
    length = len(data)
    multiplier = _K2 + length * 2
    if length >= 8:
        a, b = _word(data, 0) + _K2, _word(data, length - 8)
        return _hash_len_16(_rotate(b, 37) * multiplier + a, (_rotate(a, 25) + b) * multiplier, multiplier)
    if length >= 4:
        first, last = _HALF.unpack_from(data, 0)[0], _HALF.unpack_from(data, length - 4)[0]
        return _hash_len_16(length + (first << 3), last, multiplier)
    if not length:
        return _K2
    y = data[0] + (data[length >> 1] << 8)
    z = length + (data[-1] << 2)
    return _shift_mix(y * _K2 ^ z * _K0) * _K2 & _MASK


def _hash_17_to_32(data: bytes) -> int:
    multiplier = _K2 + len(data) * 2
    a, b = _word(data, 0) * _K1, _word(data, 8)
    c, d = _word(data, len(data) - 8) * multiplier, _word(data, len(data) - 16) * _K2
    y = _rotate(a + b, 43) + _rotate(c, 30) + d
    return _hash_len_16(y, a + _rotate(b + _K2, 18) + c, multiplier)


def _hash_33_to_64(data: bytes) -> int:
    size = len(data)
    multiplier = _K2 + size * 2
    a, b = _word(data, 0) * _K2, _word(data, 8)
    c, d = _word(data, size - 8) * multiplier, _word(data, size - 16) * _K2
    y = _rotate(a + b, 43) + _rotate(c, 30) + d
    z = _hash_len_16(y, a + _rotate(b + _K2, 18) + c, multiplier)
    e, f = _word(data, 16) * multiplier, _word(data, 24)
    g, h = (y + _word(data, size - 32)) * multiplier, (z + _word(data, size - 24)) * multiplier
    return _hash_len_16(_rotate(e + f, 43) + _rotate(g, 30) + h, e + _rotate(f + a, 18) + g, multiplier)


def _weak_hash_32(words: tuple[int, ...], a: int, b: int) -> Pair:
    w, x, y, z = words
    a += w
    b = _rotate(b + a + z, 21)
    total = a + x + y
    return total + z & _MASK, b + _rotate(total, 44) + a & _MASK


def _hash_over_64(data: bytes) -> int:
    x, y = _SEED * _K2 & _MASK, (_SEED * _K1 + 113) & _MASK
    z = _shift_mix(y * _K2 + 113) * _K2 & _MASK
    x = x + _word(data, 0) & _MASK
    v: Pair = (0, 0)
    w: Pair = (0, 0)
    behind = (len(data) - 1) // _BLOCK * _BLOCK
    for at in range(0, behind, _BLOCK):
        x, y, z, v, w = _round(_WORDS.unpack_from(data, at), x, y, z, v, w, _K1, 1)
    # The last round takes the last 64 bytes, which overlap the block before unless the length is a multiple.
    multiplier = _K1 + ((z & 0xFF) << 1)
    first = w[0] + (len(data) - 1 & 63)
    v = (v[0] + first, v[1])
    w = (first + v[0], w[1])
    x, y, z, v, w = _round(_WORDS.unpack_from(data, len(data) - _BLOCK), x, y, z, v, w, multiplier, 9)
    low = _hash_len_16(v[0], w[0], multiplier) + _shift_mix(y) * _K0 + z
    return _hash_len_16(low, _hash_len_16(v[1], w[1], multiplier) + x, multiplier)


def _round(
    words: tuple[int, ...], x: int, y: int, z: int, v: Pair, w: Pair, multiplier: int, weight: int
) -> tuple[int, int, int, Pair, Pair]:
    """Return the state after a block of eight words."""
    x = _rotate(x + y + v[0] + words[1], 37) * multiplier
    y = _rotate(y + v[1] + words[6], 42) * multiplier
    x = (x ^ w[1] * weight) & _MASK
    y = y + v[0] * weight + words[5] & _MASK
    z = _rotate(z + w[0], 33) * multiplier & _MASK
    v = _weak_hash_32(words[:4], v[1] * multiplier, x + w[0])
    w = _weak_hash_32(words[4:], z + w[1], y + words[2])
    return z, y, x, v, w
