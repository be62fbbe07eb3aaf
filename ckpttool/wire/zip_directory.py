"""The central directory of a zip: which records there are, and where.

Source: PKWARE APPNOTE 6.3.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from ckpttool.errors import DamagedCheckpoint, LimitExceeded, Truncated, Unsupported
from ckpttool.report import Finding, error
from ckpttool.wire.readable import Readable

LOCAL_MAGIC = b"PK\x03\x04"
EMPTY_MAGIC = b"PK\x05\x06"

STORED, DEFLATED = 0, 8

MAX_MEMBERS = 500_000
MAX_DIRECTORY = 1 << 28

SATURATED32, ZIP64_EXTRA = 0xFFFFFFFF, 0x0001
"""What a size or offset has that does not fit in 32 bits, and the extra field where it stands instead."""

_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR64 = struct.Struct("<4sIQI")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_EXTRA = struct.Struct("<2H")
_MAX_COMMENT = 0xFFFF
_SATURATED16 = 0xFFFF
_ENCRYPTED, _PATCHED, _UTF8 = 0x0001, 0x0020, 0x0800


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


class Directory(NamedTuple):
    """Where the central directory lies, and how many records it announces."""

    offset: int
    nbytes: int
    records: int


def find_directory(source: Readable, findings: list[Finding]) -> Directory:
    """Return where the central directory lies, from the end record and its ZIP64 twin."""
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
    lead = min(end, _LOCATOR64.size)
    locator = tail[at - lead : at] if at >= lead else source.read(end - lead, lead)
    directory, boundary = _zip64_directory(source, stated, end, locator, findings)
    if (disk, first_disk) != (0, 0) or here != count:
        findings.append(error("zip-headers-disagree", "the end record speaks of several disks"))
    if directory.offset + directory.nbytes != boundary:
        found = f"the directory ends at byte {directory.offset + directory.nbytes:,}"
        raise DamagedCheckpoint(source.path, found, expected=f"{boundary:,}", code="zip-directory")
    return directory


def _zip64_directory(
    source: Readable, stated: Directory, end: int, locator: bytes, findings: list[Finding]
) -> tuple[Directory, int]:
    """Return the directory as the ZIP64 end record has it, where there is one, and what must follow it.

    ``locator`` is what stands directly before the end record, where the file has so much there.
    """
    saturated = stated.records == _SATURATED16 or SATURATED32 in (stated.nbytes, stated.offset)
    locator_at = end - _LOCATOR64.size
    if len(locator) < _LOCATOR64.size or locator[:4] != b"PK\x06\x07":
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
        (stated.nbytes, size, SATURATED32),
        (stated.offset, offset, SATURATED32),
    )
    if any(small not in (wide, limit) for small, wide, limit in pairs):
        findings.append(error("zip-headers-disagree", "the end record and its ZIP64 twin disagree"))
    return large, at


def read_directory(source: Readable, directory: Directory) -> list[Member]:
    """Return the records that the central directory lists, in its order."""
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
    name_at = at + _CENTRAL.size
    extra_at = name_at + name_len
    raw_name, extra = data[name_at:extra_at], data[extra_at : extra_at + extra_len]
    end = extra_at + extra_len + comment_len
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


def extra_fields(extra: bytes) -> list[tuple[int, bytes]] | None:
    """Return the fields of an extra block, or None where it is no list of fields."""
    fields, at = [], 0
    while at + 4 <= len(extra):
        kind, nbytes = _EXTRA.unpack_from(extra, at)
        fields.append((kind, extra[at + 4 : at + 4 + nbytes]))
        at += 4 + nbytes
    return fields if at == len(extra) else None


def _widened(path: str, name: str, extra: bytes, size: int, stored: int, header: int) -> tuple[int, int, int]:
    """Return sizes and offset with the saturated ones taken from the ZIP64 field."""
    if SATURATED32 not in (size, stored, header):
        return size, stored, header
    wide = next((data for kind, data in extra_fields(extra) or () if kind == ZIP64_EXTRA), b"")
    numbers = [size, stored, header]
    saturated = [index for index, number in enumerate(numbers) if number == SATURATED32]
    if len(wide) < 8 * len(saturated):
        raise DamagedCheckpoint(
            path, "a large record without its ZIP64 field", where=name, code="zip-directory"
        )
    for position, index in enumerate(saturated):
        (numbers[index],) = struct.unpack_from("<Q", wide, 8 * position)
    return numbers[0], numbers[1], numbers[2]
