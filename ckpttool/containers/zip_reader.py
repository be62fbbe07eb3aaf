"""Zips: their records, as stated in the central directory, local headers and data descriptors.

A zip states each record up to three times::

    local header     signature, ..., lengths, name, extra fields     before the content
    data descriptor  [signature], CRC-32, stored size, size          after the content, if the flag is set
    directory entry  signature, ..., lengths, name, extra fields     at the end of the file
    end record       number of entries, offset and size of the directory; before it, if they are too large,
                     the ZIP64 end record and its locator

Readers that trust different ones of these can be shown different files, so all must agree, and the records
must tile the file: a byte that nothing declares is a finding.

Readers also obey header fields that no checksum covers. miniz, PyTorch's library, takes a record for a
directory because of one bit of its attributes, and reads no bytes of it. Python's zipfile, which Keras and
NumPy use, refuses versions that it doesn't know, ends a name at a NUL, and takes another name from an extra
field. A value that no writer sets is a finding.

Source: PKWARE APPNOTE 6.3, 4.4; miniz ``mz_zip_reader_is_file_a_directory``; CPython ``Lib/zipfile``.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cached_property
from typing import NamedTuple

from ckpttool.containers.compressed import Inflated, Inflation
from ckpttool.core.errors import DamagedCheckpoint, LimitExceeded, Truncated, Unsupported
from ckpttool.core.readable import Readable
from ckpttool.core.report import Finding, Severity, error, trailing_bytes, warning
from ckpttool.storage.source import Source

SATURATED32, ZIP64_EXTRA = 0xFFFFFFFF, 0x0001
"""Value of a size or offset that doesn't fit in 32 bits, and kind of the extra field with the true one."""
UTF8, HAS_DESCRIPTOR = 0x0800, 0x0008
REFUSED_FLAGS = 0x0001 | 0x0020 | 0x0040 | 0x2000
"""Encrypted, patched, strongly encrypted, masked headers: no reader of checkpoints accepts such records."""
HEADER, VERSION = "zip-header", "zip-version"

LOCAL, ENTRY = struct.Struct("<4s5H3I2H"), struct.Struct("<4s6H3I5H2I")
END, END64 = struct.Struct("<4s4H2IH"), struct.Struct("<4sQ2H2I4Q")
DESCRIPTOR, DESCRIPTOR64 = struct.Struct("<3I"), struct.Struct("<I2Q")
"""Checksum, stored size and size; a signature before them is optional."""
DESCRIPTOR_MAGIC = b"PK\x07\x08"
DESCRIPTOR_LENGTHS = (16, 24, 12, 20)  # writers add the signature

_KNOWN_FLAGS = 0x0006 | HAS_DESCRIPTOR | UTF8 | REFUSED_FLAGS  # 6: how well it was deflated
_NEWEST_VERSION = 63
_DIRECTORY, _NO_FILE = 0x10, 0x08 | 0x40  # DOS: a directory; a volume's label, a device
_UNIX_TYPE, _UNIX_DIRECTORY, _UNIX_LINK = 0o170000 << 16, 0o040000 << 16, 0o120000 << 16
_UNICODE_PATH = 0x7075
_HARMLESS_EXTRAS = frozenset(
    {0x5455, 0x7875, 0x5855, 0x7855, 0x756E, 0x000A, 0x000D, 0x6C78}  # times, owners and modes
    | {0xCAFE, 0xA11E, 0xD935}  # marks and alignment of jar and Android's tools
)
_EXTRA = struct.Struct("<2H")


class Member(NamedTuple):
    """A record of a zip, as in the central directory.

    Attributes:
        version: Version needed to extract, times 10.
        modified: Time and date in DOS format.
        stored: Size in the file.
        size: Size of the content.
        header: Offset of the local header.
        payload: Offset of the stored bytes; -1 until the local header is read.
    """

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
        """Return the offset after the stored bytes."""
        return self.payload + self.stored


def entry_findings(member: Member, attributes: int, extra: bytes) -> Iterator[Finding]:
    """Yield findings about values in an entry of the directory that no writer of checkpoints sets."""
    name = member.name
    if member.version > _NEWEST_VERSION:
        message = f"it needs zip version {member.version / 10}, which not all readers support"
        yield warning(VERSION, message, name)
    if member.flags & ~_KNOWN_FLAGS:
        yield error(HEADER, f"flags 0x{member.flags:04x}, which no writer sets", name)
    if "\0" in name:
        yield error(HEADER, "a name with a NUL, at which some readers cut it", name)
    if name.endswith("/"):
        if member.size:
            yield error(HEADER, f"a directory of {member.size:,} bytes, which PyTorch ignores", name)
    elif kind := _kind_of_file(attributes):
        message = f"attributes 0x{attributes:08x} mark it as a {kind}; loaders may skip it"
        yield error(HEADER, message, name)
    if extra:
        for doubt in unknown_extras(extra, name, member.raw_name):
            yield error(HEADER, f"the directory's {doubt}", name)


def _kind_of_file(attributes: int) -> str | None:
    """Return the kind of file that a record's attributes state; None for a regular file."""
    unix_type = attributes & _UNIX_TYPE
    if attributes & _DIRECTORY or unix_type == _UNIX_DIRECTORY:
        return "directory"
    if unix_type == _UNIX_LINK:
        return "symbolic link"
    return "device" if attributes & _NO_FILE else None


def with_version_errors(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings with those about versions as errors, as Python's zipfile refuses new versions."""
    return [one._replace(severity=Severity.ERROR) if one.code == VERSION else one for one in findings]


# Extra fields ---------------------------------------------------------------------------------------


def extra_fields(extra: bytes) -> list[tuple[int, bytes]] | None:
    """Return kind and content of the fields of an extra block, or None if it is malformed."""
    fields, at = [], 0
    while at + 4 <= len(extra):
        kind, nbytes = _EXTRA.unpack_from(extra, at)
        fields.append((kind, extra[at + 4 : at + 4 + nbytes]))
        at += 4 + nbytes
    return fields if at == len(extra) else None


def unknown_extras(extra: bytes, name: str, raw_name: bytes, expected: Sequence[int] = ()) -> Iterator[str]:
    """Yield a problem for each extra field that may change the reading; ``expected`` kinds are allowed."""
    fields = extra_fields(extra)
    if fields is None:
        yield "extra field is malformed"
    for kind, content in fields or ():
        if kind == _UNICODE_PATH:
            if content not in _unicode_paths(name, raw_name):
                yield "extra field has a different name"
        elif kind not in (ZIP64_EXTRA, *expected) and kind not in _HARMLESS_EXTRAS:
            yield f"extra field is of unknown kind 0x{kind:04x}"


def _unicode_paths(name: str, raw_name: bytes) -> tuple[bytes, ...]:
    """Return the Unicode path fields that agree with a name: version, checksum of the name, name in UTF-8."""
    head = struct.pack("<BI", 1, zlib.crc32(raw_name))
    return head + raw_name, head + name.encode("utf-8", "surrogatepass")


LOCAL_MAGIC = b"PK\x03\x04"
EMPTY_MAGIC = b"PK\x05\x06"

STORED, DEFLATED = 0, 8

MAX_MEMBERS = 500_000
MAX_DIRECTORY = 1 << 28

_LOCATOR64 = struct.Struct("<4sIQI")
_MAX_COMMENT = 0xFFFF
_SATURATED16 = 0xFFFF
_LONGEST_DESCRIPTOR = max(DESCRIPTOR_LENGTHS)
_ALIGNMENT = 64
_by_directory: ContextVar[bool] = ContextVar("by_directory", default=False)
_PADDING_EXTRA = 0x4246
_SMALL, _READ_AHEAD = 1 << 12, 1 << 16
"""Largest record that is read together with its neighbours' headers, and the bytes read at once for that."""
_GUESSED_EXTRA = 160  # most local headers fit in one read with this much for the extra field


class Directory(NamedTuple):
    """Offset, size and number of records of the central directory."""

    offset: int
    nbytes: int
    records: int


class LostRecord(NamedTuple):
    """Reason why a record of a damaged zip is lost, and its stated checksum."""

    why: str
    crc32: int


class Rescue(NamedTuple):
    """The rescued records of a damaged zip.

    Attributes:
        members: Records whose bytes have their checksum, and one that is truncated with the file.
        aliases: Members with another name in their local header, by that name.
        lost: Other records whose names are known.
        findings: Problems of the structure.
        is_cut: Whether the zip may have had further records.
    """

    members: tuple[Member, ...]
    aliases: Mapping[str, Member]
    lost: Mapping[str, LostRecord]
    findings: tuple[Finding, ...]
    is_cut: bool


def duplicate_record(path: str, name: str | None = None) -> DamagedCheckpoint:
    """Return the error for two records with one name; readers differ in which one they take."""
    return DamagedCheckpoint(path, "two records with one name", where=name, code="zip-duplicate")


class Archive:
    """An opened zip.

    Attributes:
        findings: Contradictions about records, and undeclared bytes; complete after ``members`` was read.
        rescue: The rescued records, if the zip was opened by ``rescue``.
    """

    def __init__(self, source: Source, rescue: Callable[[Source], Rescue] | None = None) -> None:
        """Read the directory, or take the records that ``rescue`` returns."""
        self.source = source
        self.findings: list[Finding] = []
        self._inflation = Inflation(source)
        self.rescue = None if rescue is None else rescue(source)
        if self.rescue is None:
            self._directory = find_directory(source, self.findings)
            self._listed = read_directory(source, self._directory, self.findings)
        else:
            self._listed = list(self.rescue.members)
            self.findings += self.rescue.findings

    @property
    def is_cut(self) -> bool:
        """Return whether a damaged zip may have had more records than are known."""
        return self.rescue is not None and self.rescue.is_cut

    @property
    def lost(self) -> Mapping[str, LostRecord]:
        """Return the lost records of a damaged zip by name."""
        return {} if self.rescue is None else self.rescue.lost

    def require(self, member: Member | None, name: str) -> Member:
        """Return a record that the format needs.

        Raises:
            DamagedCheckpoint: It is missing, or lost.
        """
        if member is None:
            record = self.lost.get(name)
            why = "no such record" if record is None else record.why
            raise DamagedCheckpoint(self.source.path, why, where=name, code="part-missing")
        return member

    @property
    def names(self) -> Iterator[str]:
        """Yield the names of all records; for a damaged zip also aliases, and lost ones with a checksum."""
        yield from (member.name for member in self._listed)
        yield from self.rescue.aliases if self.rescue is not None else ()
        yield from (name for name, record in self.lost.items() if record.crc32)

    @cached_property
    def members(self) -> tuple[Member, ...]:
        """Return all records in the order of the file, after comparing their local headers.

        Within ``by_directory``, the local headers of a zip in a store aren't read, if the directory alone
        implies the offsets.
        """
        if self.rescue is not None:
            return self.rescue.members
        in_file_order = sorted(self._listed, key=lambda member: member.header)
        if not self.source.reads_are_free and _by_directory.get():
            located = locate_by_directory(in_file_order, self._directory.offset)
            if located is not None:
                return tuple(located)
        self.source.prefetch(_header_ranges(in_file_order, self._directory.offset))
        return tuple(with_payload_offsets(self.source, in_file_order, self._directory.offset, self.findings))

    @cached_property
    def has_checksums(self) -> bool:
        """Return whether any record has a checksum; PyTorch has an option to write 0 for all."""
        return any(member.crc32 for member in self.members) or not any(m.size for m in self.members)

    def content(self, member: Member) -> Readable:
        """Return the source of a member's content, which begins there at ``offset``."""
        if member.method == STORED:
            return self.source
        return Inflated(self._inflation, member.payload, member.stored, member.size, member.name)

    def offset(self, member: Member) -> int:
        """Return the offset of a member's first byte in its ``content``."""
        return member.payload if member.method == STORED else 0

    def read(self, member: Member) -> bytes:
        """Return the content of a small member."""
        return self.content(member).read(self.offset(member), member.size, member.name)


# The central directory ------------------------------------------------------------------------------


def find_directory(source: Readable, findings: list[Finding]) -> Directory:
    """Return the position of the central directory, from the end record and its ZIP64 twin."""
    # The end record is found from the end of the file, as a comment of up to 64 KiB may follow it. A comment
    # is refused: it could contain an end record of another directory, which other readers would find. For the
    # same reason the directory must end exactly where the end records begin.
    tail_offset = max(0, source.size - _MAX_COMMENT - END.size - _LOCATOR64.size)
    tail = source.read(tail_offset, source.size - tail_offset)
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or len(tail) - at < END.size:
        found = f"{source.size:,} bytes of a zip that ends before its directory"
        raise Truncated(source.path, found)
    _, disk, first_disk, here, count, nbytes, offset, comment = END.unpack_from(tail, at)
    end = tail_offset + at
    if comment:
        raise DamagedCheckpoint(
            source.path, f"a zip comment of {comment} bytes", expected="none", code="zip-comment"
        )
    trailing = source.size - end - END.size
    if trailing:
        findings.append(trailing_bytes(trailing, "the end of the zip"))
    stated = Directory(offset, nbytes, count)
    lead = min(end, _LOCATOR64.size)
    locator = tail[at - lead : at] if at >= lead else source.read(end - lead, lead)
    directory, boundary = _zip64_directory(source, stated, end, locator, findings)
    if (disk, first_disk) != (0, 0) or here != count:
        findings.append(error("zip-headers-disagree", "the end record names several disks"))
    if directory.offset + directory.nbytes != boundary:
        found = f"the directory ends at byte {directory.offset + directory.nbytes:,}"
        raise DamagedCheckpoint(source.path, found, expected=f"{boundary:,}", code="zip-directory")
    return directory


def _zip64_directory(
    source: Readable, stated: Directory, end: int, locator: bytes, findings: list[Finding]
) -> tuple[Directory, int]:
    """Return the directory, from the ZIP64 end record if one is present, and the offset where it must end.

    ``locator``: the bytes before the end record, at most the size of a ZIP64 locator.
    """
    # A number that doesn't fit in the end record is saturated there, and complete in the ZIP64 end record.
    # PyTorch always writes the latter, so that both may have a number: then they must agree.
    saturated = stated.records == _SATURATED16 or SATURATED32 in (stated.nbytes, stated.offset)
    locator_at = end - _LOCATOR64.size
    if len(locator) < _LOCATOR64.size or locator[:4] != b"PK\x06\x07":
        if saturated:
            raise DamagedCheckpoint(source.path, "a large zip without its ZIP64 record", code="zip-directory")
        return stated, end
    _, disk, at, disks = _LOCATOR64.unpack(locator)
    if at + END64.size != locator_at:
        found = f"the ZIP64 locator points to byte {at:,}"
        raise DamagedCheckpoint(
            source.path, found, expected=f"{locator_at - END64.size:,}", code="zip-directory"
        )
    magic, nbytes, _, _, disk64, first_disk, here, count, size, offset = END64.unpack(
        source.read(at, END64.size)
    )
    if magic != b"PK\x06\x06" or nbytes != END64.size - 12:
        raise DamagedCheckpoint(source.path, "no ZIP64 record where one is announced", code="zip-directory")
    if (disk, disks, disk64, first_disk) != (0, 1, 0, 0) or here != count:
        findings.append(error("zip-headers-disagree", "the ZIP64 record names several disks"))
    large = Directory(offset, size, count)
    pairs = (
        (stated.records, count, _SATURATED16),
        (stated.nbytes, size, SATURATED32),
        (stated.offset, offset, SATURATED32),
    )
    if any(small not in (wide, limit) for small, wide, limit in pairs):
        findings.append(error("zip-headers-disagree", "the end record and the ZIP64 record disagree"))
    return large, at


def read_directory(source: Readable, directory: Directory, findings: list[Finding]) -> list[Member]:
    """Return the records of the central directory in its order, after checking each entry."""
    if directory.records > MAX_MEMBERS or directory.nbytes > MAX_DIRECTORY:
        found = f"a directory of {directory.records:,} records in {directory.nbytes:,} bytes"
        raise LimitExceeded(source.path, found, expected=f"at most {MAX_MEMBERS:,}")
    data = source.read(directory.offset, directory.nbytes, "zip directory")
    members, at = [], 0
    for index in range(directory.records):
        if at + ENTRY.size > len(data) or data[at : at + 4] != b"PK\x01\x02":
            found = f"no record {index} in the directory"
            raise DamagedCheckpoint(
                source.path, found, expected=f"{directory.records} records", code="zip-directory"
            )
        member, at = directory_entry(source.path, data, at, findings)
        members.append(member)
    if at != len(data):
        found = f"{len(data) - at:,} bytes in the directory belong to no record"
        raise DamagedCheckpoint(source.path, found, code="zip-directory")
    return members


def directory_entry(path: str, data: bytes, at: int, findings: list[Finding]) -> tuple[Member, int]:
    """Return the record of an entry of the directory, and the index in ``data`` of the next entry."""
    fields = ENTRY.unpack_from(data, at)
    _, _, version, flags, method, time, date, crc, stored, size, name_len, extra_len, comment_len = fields[
        :13
    ]
    disk, _, attributes, header = fields[13:]
    name_at = at + ENTRY.size
    extra_at = name_at + name_len
    raw_name, extra = data[name_at:extra_at], data[extra_at : extra_at + extra_len]
    end = extra_at + extra_len + comment_len
    name = _decode_name(path, raw_name, flags)
    if end > len(data):
        raise DamagedCheckpoint(path, "the directory ends inside a record", where=name, code="zip-directory")
    if disk or comment_len:
        raise DamagedCheckpoint(
            path, "a record on another disk, or with a comment", where=name, code="zip-directory"
        )
    if flags & REFUSED_FLAGS:
        raise DamagedCheckpoint(path, "an encrypted or patched record", where=name, code="zip-encrypted")
    if method not in (STORED, DEFLATED):
        raise Unsupported(path, f"zip compression method {method}", where=name)
    numbers = _zip64_numbers(path, name, extra, size, stored, header)
    member = Member(
        name, raw_name, version, flags, method, (time, date), crc, numbers[1], numbers[0], numbers[2]
    )
    if method == STORED and member.size != member.stored:
        found = f"a stored record of {member.stored:,} bytes that claims {member.size:,}"
        raise DamagedCheckpoint(path, found, where=name, code="zip-directory")
    findings += entry_findings(member, attributes, extra)
    wide = [content for kind, content in extra_fields(extra) or () if kind == ZIP64_EXTRA] if extra else []
    if wide and not zip64_field_agrees(member, wide, size, stored):
        findings.append(
            error("zip-headers-disagree", "the directory's ZIP64 field has different sizes", name)
        )
    return member, end


def _decode_name(path: str, raw_name: bytes, flags: int) -> str:
    try:
        return raw_name.decode("utf-8" if flags & UTF8 else "cp437")
    except UnicodeDecodeError as failure:
        name = raw_name.decode("utf-8", "backslashreplace")
        raise DamagedCheckpoint(
            path, "a record's name is not UTF-8", where=name, code="zip-directory"
        ) from failure


def _zip64_numbers(
    path: str, name: str, extra: bytes, size: int, stored: int, header: int
) -> tuple[int, int, int]:
    """Return sizes and offset, with saturated ones replaced by those in the ZIP64 field."""
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


# The records, compared with the directory -----------------------------------------------------------


def with_payload_offsets(
    source: Readable, members: list[Member], end: int, findings: list[Finding]
) -> list[Member]:
    """Return the members with their payload offsets, after comparing their local headers."""
    located: list[Member] = []
    # Records tile the file: each ends, with its data descriptor, where the next one begins, and the last one
    # at the directory. Local headers of small records that follow each other are fetched by one read.
    boundaries = [*(member.header for member in members), end][1:]
    headers = _HeaderReader(source)
    for index, (member, boundary) in enumerate(zip(members, boundaries, strict=True)):
        if boundary > headers.end:
            headers.fetch(member, boundaries, index)
        if index == 0 and member.header:
            findings.append(error("zip-gap", f"{member.header:,} bytes before the first record"))
        located.append(_locate_member(headers, member, boundary, findings))
    return located


@contextmanager
def by_directory() -> Iterator[None]:
    """Trust the directories of zips in stores: for listings, which give no verdict.

    Comparing local headers takes a request for each large record, and a checkpoint has hundreds.
    """
    token = _by_directory.set(True)
    try:
        yield
    finally:
        _by_directory.reset(token)


def locate_by_directory(members: list[Member], end: int) -> list[Member] | None:
    """Return the members with the payload offsets that the directory implies; None if one is ambiguous."""
    # The payload, and the data descriptor if the flag is set, end where the next record begins. A descriptor
    # has one of four lengths (with a signature or without, sizes of 4 bytes or of 8). PyTorch writes them,
    # and pads local headers so that payloads begin at multiples of 64: lengths differ by less than 64, so
    # that only one of the four is possible.
    located = []
    boundaries = [*(member.header for member in members), end][1:]
    for member, boundary in zip(members, boundaries, strict=True):
        has_descriptor = bool(member.flags & HAS_DESCRIPTOR)
        starts = [
            boundary - member.stored - nbytes for nbytes in (DESCRIPTOR_LENGTHS if has_descriptor else (0,))
        ]
        first = member.header + LOCAL.size + len(member.raw_name)
        possible = [one for one in starts if one >= first and not (has_descriptor and one % _ALIGNMENT)]
        if len(possible) != 1:
            return None
        located.append(Member(*member[:-1], possible[0]))
    return located if not members or members[0].header == 0 else None


def _header_ranges(members: Sequence[Member], end: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of the local headers and the data descriptors of all records, for ``prefetch``."""
    boundaries = [*(member.header for member in members), end][1:]
    for member, boundary in zip(members, boundaries, strict=True):
        length = LOCAL.size + len(member.raw_name) + _GUESSED_EXTRA
        yield member.header, min(member.header + length, boundary)
        yield max(boundary - _LONGEST_DESCRIPTOR, member.header), boundary


class _HeaderReader:
    """Reader of local headers that fetches neighbouring small records by one read.

    Attributes:
        end: Offset after the records in memory.
    """

    def __init__(self, source: Readable) -> None:
        self.path, self.size = source.path, source.size
        self.end = 0
        self._source = source
        self._begin, self._data = 0, b""

    def fetch(self, member: Member, boundaries: Sequence[int], index: int) -> None:
        """Fetch a member and the small ones after it; ``boundaries[index]`` is the member's end."""
        begin = end = member.header
        while index < len(boundaries) and 0 <= boundaries[index] - end <= _SMALL:
            end = boundaries[index]
            index += 1
            if end - begin > _READ_AHEAD - _SMALL:
                break
        if end == begin or end > self.size:
            return
        with suppress(Truncated):  # the file became shorter: the read of the missing record raises
            self._data = self._source.read(begin, end - begin, member.name)
            self._begin, self.end = begin, end

    def read(self, offset: int, nbytes: int, where: str | None = None) -> bytes:
        """Return bytes as ``Readable.read`` does."""
        start = offset - self._begin
        if self._begin <= offset and offset + nbytes <= self.end and nbytes >= 0:
            return self._data[start : start + nbytes]
        return self._source.read(offset, nbytes, where)


def _locate_member(source: _HeaderReader, member: Member, boundary: int, findings: list[Finding]) -> Member:
    guess = min(LOCAL.size + len(member.raw_name) + _GUESSED_EXTRA, source.size - member.header)
    data = source.read(member.header, max(guess, 0), member.name)
    if len(data) < LOCAL.size or data[:4] != LOCAL_MAGIC:
        found = f"no record at byte {member.header:,}"
        raise DamagedCheckpoint(source.path, found, where=member.name, code="zip-directory")
    fields = LOCAL.unpack_from(data)
    name_len, extra_len = fields[9], fields[10]
    length = LOCAL.size + name_len + extra_len
    if length > len(data):
        data = source.read(member.header, length, member.name)
    payload = member.header + length
    if payload + member.stored > boundary:
        found = f"bytes {payload:,}..{payload + member.stored:,} overlap the next part at {boundary:,}"
        raise DamagedCheckpoint(source.path, found, where=member.name, code="zip-overlap")
    for contradiction in _header_differences(member, fields, data, name_len, length):
        findings.append(error("zip-headers-disagree", contradiction, member.name))
    tail = payload + member.stored
    if boundary - tail > _LONGEST_DESCRIPTOR:
        findings.append(
            error("zip-gap", f"{boundary - tail:,} undeclared bytes follow the record", member.name)
        )
    elif difference := _descriptor_difference(member, source.read(tail, boundary - tail)):
        findings.append(error("zip-headers-disagree", difference, member.name))
    return Member(*member[:-1], payload)


def _header_differences(
    member: Member, local: tuple[int, ...], data: bytes, name_len: int, length: int
) -> list[str]:
    """Return the contradictions between a local header and the directory."""
    # Writers that stream a record don't know its checksum and sizes when they write the local header: these
    # are 0 there, and in the data descriptor. Saturated sizes are in the ZIP64 field. All else is equal.
    _, version, flags, method, time, date, crc, stored, size = local[:9]
    found = []
    if data[LOCAL.size : LOCAL.size + name_len] != member.raw_name:
        found.append("the local header has a different name")
    if (version, flags, method, (time, date)) != (
        member.version,
        member.flags,
        member.method,
        member.modified,
    ):
        found.append("the local header has a different version, method, time or flags")
    deferred = flags & HAS_DESCRIPTOR
    for what, here, there in (
        ("checksum", crc, member.crc32),
        ("size", stored, member.stored),
        ("size", size, member.size),
    ):
        if here != there and not (deferred and here == 0) and here != SATURATED32:
            found.append(f"the local header has a different {what}: {here} instead of {there}")
    extra = data[LOCAL.size + name_len : length]
    doubts = unknown_extras(extra, member.name, member.raw_name, (_PADDING_EXTRA,))
    found += (f"the local header's {doubt}" for doubt in doubts)
    fields = extra_fields(extra) or ()
    if any(kind == _PADDING_EXTRA and content.strip(b"Z") for kind, content in fields):
        found.append("invalid padding before the record")
    wide = [content for kind, content in fields if kind == ZIP64_EXTRA]
    if (wide or SATURATED32 in (size, stored)) and not zip64_field_agrees(member, wide, size, stored):
        found.append("the local header's ZIP64 field has different sizes")
    return found


def zip64_field_agrees(member: Member, wide: list[bytes], size: int, stored: int) -> bool:
    """Return whether a ZIP64 field agrees with the member's sizes and offset."""
    # The field has both sizes, or only the saturated ones; miniz adds the offset of the record. A number that
    # wasn't known when the field was written is 0, and in the data descriptor.
    pairs = (size, member.size), (stored, member.stored)
    lacking = [number for here, number in pairs if here == SATURATED32]
    if not wide or len(wide) > 1 or len(wide[0]) % 8:
        return not wide and not lacking
    numbers = list(struct.unpack(f"<{len(wide[0]) // 8}Q", wide[0]))
    deferred = bool(member.flags & HAS_DESCRIPTOR)
    return any(
        len(numbers) == len(expected)
        and all(
            here == there or (deferred and not here) for here, there in zip(numbers, expected, strict=True)
        )
        for sizes in (lacking, [member.size, member.stored])
        for expected in (sizes, [*sizes, member.header])
    )


def _descriptor_difference(member: Member, descriptor: bytes) -> str | None:
    """Return the contradiction between the bytes after a record and the directory, or None."""
    if not member.flags & HAS_DESCRIPTOR:
        return f"{len(descriptor)} undeclared bytes follow the record" if descriptor else None
    body = (
        descriptor[4:] if descriptor[:4] == DESCRIPTOR_MAGIC and len(descriptor) in (16, 24) else descriptor
    )
    form = next((one for one in (DESCRIPTOR, DESCRIPTOR64) if one.size == len(body)), None)
    if form is None:
        return f"the data descriptor has {len(descriptor)} bytes instead of 16 or 24"
    if form.unpack(body) != (member.crc32, member.stored, member.size):
        return "the data descriptor has a different checksum or size"
    return None
