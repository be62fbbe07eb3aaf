"""Where the records of a zip lie; everything that a zip states twice is compared.

A zip is described by its central directory, its local headers and its data descriptors. Readers that
trust different ones can be shown different files, so all must agree, and the records must tile the file:
a byte that nothing declares is a finding.

Source: PKWARE APPNOTE 6.3; PyTorch ``caffe2/serialize/inline_container.cc`` for its padding field.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

from ckpttool.errors import DamagedCheckpoint, LimitExceeded, Truncated, Unsupported
from ckpttool.report import Finding, error
from ckpttool.wire.inflated import Inflated
from ckpttool.wire.readable import Readable
from ckpttool.wire.source import Source

LOCAL_MAGIC = b"PK\x03\x04"
EMPTY_MAGIC = b"PK\x05\x06"

STORED, DEFLATED = 0, 8

MAX_MEMBERS = 500_000
MAX_DIRECTORY = 1 << 28
MAX_INFLATED = 1 << 28
"""The most bytes that a member which has to be inflated may have."""

_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR64 = struct.Struct("<4sIQI")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_DESCRIPTOR_MAGIC = b"PK\x07\x08"
_MAX_COMMENT = 0xFFFF
_SATURATED16, _SATURATED32 = 0xFFFF, 0xFFFFFFFF
_ZIP64_EXTRA, _PADDING_EXTRA = 0x0001, 0x4246
_HARMLESS_EXTRAS = frozenset({0x5455, 0x7875, 0x5855, 0x7855, 0x000A})  # times and owners
_ENCRYPTED, _HAS_DESCRIPTOR, _PATCHED, _UTF8 = 0x0001, 0x0008, 0x0020, 0x0800
_GUESSED_EXTRA = 160  # most local headers fit in one read with this much for the extra field


class Member(NamedTuple):
    """A record of a zip, as the central directory describes it; sizes and offsets in bytes."""

    name: str
    raw_name: bytes
    version: int
    flags: int
    method: int
    modified: tuple[int, int]
    crc32: int
    stored: int
    size: int
    header: int
    payload: int = -1

    @property
    def end(self) -> int:
        """Return the offset behind the stored bytes."""
        return self.payload + self.stored


class Archive:
    """An opened zip.

    Attributes:
        findings: Where the descriptions of a record disagree, and bytes that nothing declares; complete
            once ``members`` has been asked for.
    """

    def __init__(self, source: Source) -> None:
        """Read the directory.

        Raises:
            Truncated: There is no end-of-central-directory record.
            DamagedCheckpoint: The directory can't be relied on.
        """
        self.source = source
        self.findings: list[Finding] = []
        self._directory = find_directory(source, self.findings)
        self._listed = read_directory(source, self._directory)

    @property
    def names(self) -> Iterator[str]:
        """Yield the names of all records, as the directory lists them."""
        return (member.name for member in self._listed)

    @cached_property
    def members(self) -> tuple[Member, ...]:
        """Return all records in the order of the file, having compared every local header.

        Raises:
            DamagedCheckpoint: A record lies outside the file or over another one.
        """
        in_file_order = sorted(self._listed, key=lambda member: member.header)
        return tuple(locate(self.source, in_file_order, self._directory.offset, self.findings))

    @cached_property
    def has_checksums(self) -> bool:
        """Tell whether any record has a checksum; PyTorch can be told to leave them all 0."""
        return any(member.crc32 for member in self.members) or not any(m.size for m in self.members)

    def content(self, member: Member) -> Readable:
        """Return something to read the content of a member from; see ``offset``.

        Raises:
            LimitExceeded: It would inflate to more than ``MAX_INFLATED`` bytes.
        """
        if member.method == STORED:
            return self.source
        if member.size > MAX_INFLATED:
            found = f"a compressed record of {member.size:,} bytes"
            raise LimitExceeded(
                self.source.path, found, expected=f"at most {MAX_INFLATED:,}", where=member.name
            )
        return Inflated(self.source, member.payload, member.stored, member.size, member.name)

    def offset(self, member: Member) -> int:
        """Return the offset of a member's first byte in what ``content`` returns."""
        return member.payload if member.method == STORED else 0

    def read(self, member: Member) -> bytes:
        """Return the content of a small member.

        Raises:
            DamagedCheckpoint: It can't be read or inflated.
        """
        return self.content(member).read(self.offset(member), member.size, member.name)


class Directory(NamedTuple):
    """Where the central directory lies, and how many records it announces."""

    offset: int
    nbytes: int
    records: int


def find_directory(source: Readable, findings: list[Finding]) -> Directory:
    """Return where the central directory lies, from the end record and its ZIP64 twin.

    Raises:
        Truncated: There is no end record.
        DamagedCheckpoint: The end records contradict each other or the file.
    """
    tail_offset = max(0, source.size - _MAX_COMMENT - _END.size - _LOCATOR64.size)
    tail = source.read(tail_offset, source.size - tail_offset)
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or len(tail) - at < _END.size:
        found = f"{source.size:,} bytes of a zip that ends before its directory"
        raise Truncated(source.path, found)
    _, disk, first_disk, here, count, nbytes, offset, comment = _END.unpack_from(tail, at)
    end = tail_offset + at
    if comment:
        raise DamagedCheckpoint(
            source.path, f"a zip comment of {comment} bytes", expected="none", code="zip-comment"
        )
    trailing = source.size - end - _END.size
    if trailing:
        findings.append(error("trailing-bytes", f"{trailing:,} bytes lie behind the end of the zip"))
    stated = Directory(offset, nbytes, count)
    directory, boundary = _zip64_directory(source, stated, end, findings)
    if (disk, first_disk) != (0, 0) or here != count:
        findings.append(error("zip-headers-disagree", "the end record speaks of several disks"))
    if directory.offset + directory.nbytes != boundary:
        found = f"the directory ends at byte {directory.offset + directory.nbytes:,}"
        raise DamagedCheckpoint(source.path, found, expected=f"{boundary:,}", code="zip-directory")
    return directory


def _zip64_directory(
    source: Readable, stated: Directory, end: int, findings: list[Finding]
) -> tuple[Directory, int]:
    """Return the directory as the ZIP64 end record has it, where there is one, and what must follow it."""
    saturated = stated.records == _SATURATED16 or _SATURATED32 in (stated.nbytes, stated.offset)
    locator_at = end - _LOCATOR64.size
    locator = source.read(locator_at, _LOCATOR64.size) if locator_at >= 0 else b""
    if locator[:4] != b"PK\x06\x07":
        if saturated:
            raise DamagedCheckpoint(source.path, "a large zip without its ZIP64 record", code="zip-directory")
        return stated, end
    _, disk, at, disks = _LOCATOR64.unpack(locator)
    if at + _END64.size != locator_at:
        found = f"the ZIP64 record is said to lie at byte {at:,}"
        raise DamagedCheckpoint(
            source.path, found, expected=f"{locator_at - _END64.size:,}", code="zip-directory"
        )
    magic, nbytes, _, _, disk64, first_disk, here, count, size, offset = _END64.unpack(
        source.read(at, _END64.size)
    )
    if magic != b"PK\x06\x06" or nbytes != _END64.size - 12:
        raise DamagedCheckpoint(source.path, "no ZIP64 record where one is announced", code="zip-directory")
    if (disk, disks, disk64, first_disk) != (0, 1, 0, 0) or here != count:
        findings.append(error("zip-headers-disagree", "the ZIP64 record speaks of several disks"))
    large = Directory(offset, size, count)
    pairs = (
        (stated.records, count, _SATURATED16),
        (stated.nbytes, size, _SATURATED32),
        (stated.offset, offset, _SATURATED32),
    )
    if any(small not in (wide, limit) for small, wide, limit in pairs):
        findings.append(error("zip-headers-disagree", "the end record and its ZIP64 twin disagree"))
    return large, at


def read_directory(source: Readable, directory: Directory) -> list[Member]:
    """Return the records that the central directory lists, in its order.

    Raises:
        DamagedCheckpoint: It is not a list of as many records as announced.
        LimitExceeded: It is longer than any honest one.
    """
    if directory.records > MAX_MEMBERS or directory.nbytes > MAX_DIRECTORY:
        found = f"a directory of {directory.records:,} records in {directory.nbytes:,} bytes"
        raise LimitExceeded(source.path, found, expected=f"at most {MAX_MEMBERS:,}")
    data = source.read(directory.offset, directory.nbytes, "zip directory")
    members, at = [], 0
    for index in range(directory.records):
        if at + _CENTRAL.size > len(data) or data[at : at + 4] != b"PK\x01\x02":
            found = f"no record {index} in the directory"
            raise DamagedCheckpoint(
                source.path, found, expected=f"{directory.records} records", code="zip-directory"
            )
        member, at = _directory_entry(source.path, data, at)
        members.append(member)
    if at != len(data):
        found = f"{len(data) - at:,} bytes in the directory belong to no record"
        raise DamagedCheckpoint(source.path, found, code="zip-directory")
    return members


def _directory_entry(path: str, data: bytes, at: int) -> tuple[Member, int]:
    fields = _CENTRAL.unpack_from(data, at)
    _, _, version, flags, method, time, date, crc, stored, size, name_len, extra_len, comment_len = fields[
        :13
    ]
    disk, _, _, header = fields[13:]
    start = at + _CENTRAL.size
    raw_name = data[start : start + name_len]
    extra = data[start + name_len : start + name_len + extra_len]
    end = start + name_len + extra_len + comment_len
    name = _decoded(path, raw_name, flags)
    if end > len(data):
        raise DamagedCheckpoint(path, "the directory ends inside a record", where=name, code="zip-directory")
    if disk or comment_len:
        raise DamagedCheckpoint(
            path, "a record on another disk, or with a comment", where=name, code="zip-directory"
        )
    if flags & (_ENCRYPTED | _PATCHED):
        raise DamagedCheckpoint(path, "an encrypted or patched record", where=name, code="zip-encrypted")
    if method not in (STORED, DEFLATED):
        raise Unsupported(path, f"zip compression method {method}", where=name)
    size, stored, header = _widened(path, name, extra, size, stored, header)
    if method == STORED and size != stored:
        found = f"a stored record of {stored:,} bytes that claims {size:,}"
        raise DamagedCheckpoint(path, found, where=name, code="zip-directory")
    return Member(name, raw_name, version, flags, method, (time, date), crc, stored, size, header), end


def _decoded(path: str, raw_name: bytes, flags: int) -> str:
    try:
        return raw_name.decode("utf-8" if flags & _UTF8 else "cp437")
    except UnicodeDecodeError as failure:
        name = raw_name.decode("utf-8", "backslashreplace")
        raise DamagedCheckpoint(
            path, "a record's name is not UTF-8", where=name, code="zip-directory"
        ) from failure


def _extras(extra: bytes) -> list[tuple[int, bytes]] | None:
    """Return the fields of an extra block, or None where it is no list of fields."""
    fields, at = [], 0
    while at + 4 <= len(extra):
        kind, nbytes = struct.unpack_from("<2H", extra, at)
        fields.append((kind, extra[at + 4 : at + 4 + nbytes]))
        at += 4 + nbytes
    return fields if at == len(extra) else None


def _widened(path: str, name: str, extra: bytes, size: int, stored: int, header: int) -> tuple[int, int, int]:
    """Return sizes and offset with the saturated ones taken from the ZIP64 field."""
    wide = next((data for kind, data in _extras(extra) or () if kind == _ZIP64_EXTRA), b"")
    numbers = [size, stored, header]
    saturated = [index for index, number in enumerate(numbers) if number == _SATURATED32]
    if len(wide) < 8 * len(saturated):
        raise DamagedCheckpoint(
            path, "a large record without its ZIP64 field", where=name, code="zip-directory"
        )
    for position, index in enumerate(saturated):
        (numbers[index],) = struct.unpack_from("<Q", wide, 8 * position)
    return numbers[0], numbers[1], numbers[2]


def locate(source: Readable, members: list[Member], end: int, findings: list[Finding]) -> list[Member]:
    """Return the members with their payload offsets, having compared every local header.

    Raises:
        DamagedCheckpoint: A record lies outside the file or over another one.
    """
    located: list[Member] = []
    previous: Member | None = None
    boundaries = [*(member.header for member in members), end][1:]
    expected_start = 0
    for member, boundary in zip(members, boundaries, strict=True):
        if previous is not None:
            expected_start = previous.end
        if member.header < expected_start:
            found = f"the record at byte {member.header:,} overlaps the one before it"
            raise DamagedCheckpoint(source.path, found, where=member.name, code="zip-overlap")
        if previous is None and member.header:
            findings.append(error("zip-gap", f"{member.header:,} bytes lie before the first record"))
        previous = _locate_one(source, member, boundary, findings)
        located.append(previous)
    return located


def _locate_one(source: Readable, member: Member, boundary: int, findings: list[Finding]) -> Member:
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
    return member._replace(payload=payload)


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
        if here != there and not (deferred and here == 0) and here != _SATURATED32:
            found.append(f"the local header has another {what}: {here} instead of {there}")
    fields = _extras(data[_LOCAL.size + name_len : length])
    if fields is None:
        found.append("the local header's extra field is no list of fields")
    for kind, content in fields or ():
        if kind == _PADDING_EXTRA:
            if content.strip(b"Z"):
                found.append("the padding before the record is not padding")
        elif kind != _ZIP64_EXTRA and kind not in _HARMLESS_EXTRAS:
            found.append(f"the local header has an unknown extra field 0x{kind:04x}")
    return found


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
