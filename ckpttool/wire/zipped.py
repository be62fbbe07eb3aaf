"""Where the records of a zip lie; everything that a zip states twice is compared.

A zip is described by its central directory, its local headers and its data descriptors. Readers that
trust different ones can be shown different files, so all must agree, and the records must tile the file:
a byte that nothing declares is a finding.

``zip_directory`` reads the first of the three; the others are compared with it here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property

from ckpttool.errors import DamagedCheckpoint, Truncated
from ckpttool.report import Finding, error
from ckpttool.wire.inflate import Inflated, Inflation
from ckpttool.wire.readable import Readable
from ckpttool.wire.source import Source
from ckpttool.wire.zip_directory import (
    LOCAL_MAGIC,
    SATURATED32,
    STORED,
    ZIP64_EXTRA,
    Member,
    extra_fields,
    find_directory,
    read_directory,
)

_LOCAL = struct.Struct("<4s5H3I2H")
_DESCRIPTOR_MAGIC = b"PK\x07\x08"
_HAS_DESCRIPTOR = 0x0008
_PADDING_EXTRA = 0x4246
_HARMLESS_EXTRAS = frozenset({0x5455, 0x7875, 0x5855, 0x7855, 0x000A})  # times and owners
_SMALL, _READ_AHEAD = 1 << 12, 1 << 16
"""Records of so many bytes are read for their headers' sake, up to so many bytes at once."""
_GUESSED_EXTRA = 160  # most local headers fit in one read with this much for the extra field


class Archive:
    """An opened zip.

    Attributes:
        findings: Where the descriptions of a record disagree, and bytes that nothing declares; complete
            once ``members`` has been asked for.
    """

    def __init__(self, source: Source) -> None:
        """Read the directory."""
        self.source = source
        self.findings: list[Finding] = []
        self._directory = find_directory(source, self.findings)
        self._listed = read_directory(source, self._directory)
        self._inflation = Inflation(source)

    @property
    def names(self) -> Iterator[str]:
        """Yield the names of all records, as the directory lists them."""
        return (member.name for member in self._listed)

    @cached_property
    def members(self) -> tuple[Member, ...]:
        """Return all records in the order of the file, having compared every local header."""
        in_file_order = sorted(self._listed, key=lambda member: member.header)
        return tuple(locate(self.source, in_file_order, self._directory.offset, self.findings))

    @cached_property
    def has_checksums(self) -> bool:
        """Tell whether any record has a checksum; PyTorch can be told to leave them all 0."""
        return any(member.crc32 for member in self.members) or not any(m.size for m in self.members)

    def content(self, member: Member) -> Readable:
        """Return something to read the content of a member from; see ``offset``."""
        if member.method == STORED:
            return self.source
        return Inflated(self._inflation, member.payload, member.stored, member.size, member.name)

    def offset(self, member: Member) -> int:
        """Return the offset of a member's first byte in what ``content`` returns."""
        return member.payload if member.method == STORED else 0

    def read(self, member: Member) -> bytes:
        """Return the content of a small member."""
        return self.content(member).read(self.offset(member), member.size, member.name)


def locate(source: Readable, members: list[Member], end: int, findings: list[Finding]) -> list[Member]:
    """Return the members with their payload offsets, having compared every local header."""
    located: list[Member] = []
    previous: Member | None = None
    boundaries = [*(member.header for member in members), end][1:]
    expected_start = 0
    nearby = _Nearby(source)
    for index, (member, boundary) in enumerate(zip(members, boundaries, strict=True)):
        if boundary > nearby.end:
            nearby.fetch(member, boundaries, index)
        if previous is not None:
            expected_start = previous.end
        if member.header < expected_start:
            found = f"the record at byte {member.header:,} overlaps the one before it"
            raise DamagedCheckpoint(source.path, found, where=member.name, code="zip-overlap")
        if previous is None and member.header:
            findings.append(error("zip-gap", f"{member.header:,} bytes lie before the first record"))
        previous = _locate_one(nearby, member, boundary, findings)
        located.append(previous)
    return located


class _Nearby:
    """Reads the headers of a zip's records; those of small neighbours all at once.

    Attributes:
        end: Offset behind the records that are held in memory.
    """

    def __init__(self, source: Readable) -> None:
        self.path, self.size = source.path, source.size
        self.end = 0
        self._source = source
        self._begin, self._data = 0, b""

    def fetch(self, member: Member, boundaries: Sequence[int], index: int) -> None:
        """Hold a member and those behind it, as far as they are small; its boundary is at ``index``."""
        begin = end = member.header
        while index < len(boundaries) and 0 <= boundaries[index] - end <= _SMALL:
            end = boundaries[index]
            index += 1
            if end - begin > _READ_AHEAD - _SMALL:
                break
        if end == begin or end > self.size:
            return
        with suppress(Truncated):  # the file became shorter: whoever needs what is missing tells where
            self._data = self._source.read(begin, end - begin, member.name)
            self._begin, self.end = begin, end

    def read(self, offset: int, nbytes: int, where: str | None = None) -> bytes:
        """Return bytes as ``Readable.read`` does."""
        start = offset - self._begin
        if self._begin <= offset and offset + nbytes <= self.end and nbytes >= 0:
            return self._data[start : start + nbytes]
        return self._source.read(offset, nbytes, where)


def _locate_one(source: _Nearby, member: Member, boundary: int, findings: list[Finding]) -> Member:
    guess = min(_LOCAL.size + len(member.raw_name) + _GUESSED_EXTRA, source.size - member.header)
    data = source.read(member.header, max(guess, 0), member.name)
    if len(data) < _LOCAL.size or data[:4] != LOCAL_MAGIC:
        found = f"no record at byte {member.header:,}"
        raise DamagedCheckpoint(source.path, found, where=member.name, code="zip-directory")
    fields = _LOCAL.unpack_from(data)
    name_len, extra_len = fields[9], fields[10]
    length = _LOCAL.size + name_len + extra_len
    if length > len(data):
        data = source.read(member.header, length, member.name)
    payload = member.header + length
    if payload + member.stored > boundary:
        found = f"bytes {payload:,}..{payload + member.stored:,} overlap what lies at {boundary:,}"
        raise DamagedCheckpoint(source.path, found, where=member.name, code="zip-overlap")
    for contradiction in _differences(member, fields, data, name_len, length):
        findings.append(error("zip-headers-disagree", contradiction, member.name))
    tail = payload + member.stored
    if boundary - tail > 24:
        findings.append(
            error("zip-gap", f"{boundary - tail:,} undeclared bytes follow the record", member.name)
        )
    elif difference := _descriptor_difference(member, source.read(tail, boundary - tail)):
        findings.append(error("zip-headers-disagree", difference, member.name))
    return Member(*member[:-1], payload)


def _differences(
    member: Member, local: tuple[int, ...], data: bytes, name_len: int, length: int
) -> list[str]:
    """Say where a local header contradicts the directory."""
    _, version, flags, method, time, date, crc, stored, size = local[:9]
    found = []
    if data[_LOCAL.size : _LOCAL.size + name_len] != member.raw_name:
        found.append("the local header has another name")
    if (version, flags, method, (time, date)) != (
        member.version,
        member.flags,
        member.method,
        member.modified,
    ):
        found.append("the local header has another version, method, time or flags")
    deferred = flags & _HAS_DESCRIPTOR
    for what, here, there in (
        ("checksum", crc, member.crc32),
        ("size", stored, member.stored),
        ("size", size, member.size),
    ):
        if here != there and not (deferred and here == 0) and here != SATURATED32:
            found.append(f"the local header has another {what}: {here} instead of {there}")
    fields = extra_fields(data[_LOCAL.size + name_len : length])
    if fields is None:
        found.append("the local header's extra field is no list of fields")
    for kind, content in fields or ():
        if kind == _PADDING_EXTRA:
            if content.strip(b"Z"):
                found.append("the padding before the record is not padding")
        elif kind != ZIP64_EXTRA and kind not in _HARMLESS_EXTRAS:
            found.append(f"the local header has an unknown extra field 0x{kind:04x}")
    wide = [content for kind, content in fields or () if kind == ZIP64_EXTRA]
    if (wide or SATURATED32 in (size, stored)) and not states_the_same(member, wide, size, stored):
        found.append("the local header's ZIP64 field has other sizes")
    return found


def states_the_same(member: Member, wide: list[bytes], size: int, stored: int) -> bool:
    """Tell whether a local ZIP64 field agrees with the directory.

    It has the two sizes, or those that the header has no room for; miniz adds the record's offset. What was
    not known yet is 0 there, and in the data descriptor.
    """
    pairs = (size, member.size), (stored, member.stored)
    lacking = [number for here, number in pairs if here == SATURATED32]
    if not wide or len(wide) > 1 or len(wide[0]) % 8:
        return not wide and not lacking
    told = list(struct.unpack(f"<{len(wide[0]) // 8}Q", wide[0]))
    deferred = bool(member.flags & _HAS_DESCRIPTOR)
    return any(
        len(told) == len(way)
        and all(here == there or (deferred and not here) for here, there in zip(told, way, strict=True))
        for sizes in (lacking, [member.size, member.stored])
        for way in (sizes, [*sizes, member.header])
    )


def _descriptor_difference(member: Member, descriptor: bytes) -> str | None:
    """Say where the bytes behind a record contradict the directory, or None."""
    if not member.flags & _HAS_DESCRIPTOR:
        return f"{len(descriptor)} undeclared bytes follow the record" if descriptor else None
    body = (
        descriptor[4:] if descriptor[:4] == _DESCRIPTOR_MAGIC and len(descriptor) in (16, 24) else descriptor
    )
    if len(body) == 12:
        stated = struct.unpack("<3I", body)
    elif len(body) == 20:
        stated = struct.unpack("<I2Q", body)
    else:
        return f"the data descriptor has {len(descriptor)} bytes instead of 16 or 24"
    if stated != (member.crc32, member.stored, member.size):
        return "the data descriptor has another checksum or size"
    return None
