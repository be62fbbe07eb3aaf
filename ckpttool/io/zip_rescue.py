"""The records of a zip that was cut off before its directory: found by their local headers alone.

A record counts if its own header, or its data descriptor, states a checksum that its bytes have; and the one
that is cut off does, if its header states its size and it isn't compressed: what lies in it may be whole.

Source: PKWARE APPNOTE 6.3; pytorch ``caffe2/serialize/inline_container.cc``: local headers without sizes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from isal import isal_zlib

from ckpttool.io.source import Source
from ckpttool.io.zip_headers import HAS_DESCRIPTOR, SATURATED32, UTF8, ZIP64_EXTRA, extra_fields
from ckpttool.io.zip_reader import DEFLATED, LOCAL_MAGIC, MAX_MEMBERS, STORED, Member

_LOCAL = struct.Struct("<4s5H3I2H")
_DESCRIPTOR = b"PK\x07\x08"
_FORMS = (struct.Struct("<4x3I"), struct.Struct("<4xI2Q"))
"""A data descriptor: checksum, stored and full size, of 32 or of 64 bits."""
_FIRST_WINDOW, _WINDOW = 1 << 16, 1 << 22
_LONGEST_NAME = 4096


class _End(NamedTuple):
    """Where a record's bytes end and the next record begins, with the checksum that is stated for them."""

    payload: int
    following: int
    crc32: int


def rescued_records(source: Source) -> Iterator[Member]:
    """Yield the records of a zip that have their checksums, from the first on, and the one that is cut off.

    One that is compressed or named in a way that nobody could follow ends the search.
    """
    at, buffer = 0, bytearray(min(_WINDOW, source.size))  # used again and again: new memory takes longer
    for _ in range(MAX_MEMBERS):
        if at + _LOCAL.size > source.size:
            return
        fields = _LOCAL.unpack(source.read(at, _LOCAL.size))
        magic, version, flags, method, time, date, crc, stored, size, name_length, extra_length = fields
        payload = at + _LOCAL.size + name_length + extra_length
        if magic != LOCAL_MAGIC or name_length > _LONGEST_NAME or payload > source.size:
            return
        names = source.read(at + _LOCAL.size, name_length + extra_length)
        raw_name, extra = names[:name_length], names[name_length:]
        if flags & HAS_DESCRIPTOR:
            end = _end_by_descriptor(source, payload, buffer) if method == STORED else None
        else:
            stored = _wide_size(extra, stored)
            end = _End(payload + stored, payload + stored, crc)
        if end is None or method not in (STORED, DEFLATED):
            return
        is_cut = end.payload > source.size
        if is_cut and method == DEFLATED:
            return
        name = raw_name.decode("utf-8" if flags & UTF8 else "cp437", "backslashreplace")
        stored = end.payload - payload
        size = stored if method == STORED else size
        is_summed = bool(flags & HAS_DESCRIPTOR)  # nothing else shows where it ends
        is_unsummed = is_cut or method == DEFLATED
        if is_unsummed or is_summed or _crc32(source, payload, end.payload, buffer) == end.crc32:
            yield Member(
                name, raw_name, version, flags, method, (time, date), end.crc32, stored, size, at, payload
            )
        at = end.following


def _wide_size(extra: bytes, stored: int) -> int:
    """Return how many bytes are stored, if need be as the ZIP64 field has it."""
    if stored != SATURATED32:
        return stored
    wide = next((data for kind, data in extra_fields(extra) or () if kind == ZIP64_EXTRA), b"")
    return int.from_bytes(wide[8:16], "little") if len(wide) >= 16 else stored


def _end_by_descriptor(source: Source, payload: int, buffer: bytearray) -> _End | None:
    """Return where a stored record ends whose size stands behind it; None if it is cut off.

    The bytes of a record may hold what looks like a descriptor: only one that states the record's own size
    and checksum counts.
    """
    crc, summed, at, nbytes = 0, payload, payload, _FIRST_WINDOW
    while at < source.size:
        read = min(nbytes, len(buffer), source.size - at)
        view, nbytes = memoryview(buffer)[:read], 2 * nbytes
        source.read_into(at, view)
        found = buffer.find(_DESCRIPTOR, 0, read)
        while found >= 0:
            place = at + found
            for form in _FORMS:
                if place + form.size > source.size:
                    continue
                stated, stored, size = form.unpack(source.read(place, form.size))
                if stored == size == place - payload > 0:  # an empty record has no descriptor
                    crc, summed = isal_zlib.crc32(view[summed - at : found], crc), place
                    if crc == stated:
                        return _End(place, place + form.size, stated)
            found = buffer.find(_DESCRIPTOR, found + 1, read)
        following = at + max(1, read - len(_DESCRIPTOR) + 1)
        if summed < following:
            crc, summed = isal_zlib.crc32(view[summed - at : following - at], crc), following
        at = following
    return None


def _crc32(source: Source, start: int, end: int, buffer: bytearray) -> int:
    crc = 0
    while start < end:
        block = memoryview(buffer)[: end - start]
        source.read_into(start, block)
        crc, start = isal_zlib.crc32(block, crc), start + len(block)
    return crc
