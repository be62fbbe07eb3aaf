"""The fields of a record's header that readers obey though no checksum covers them.

miniz, with which PyTorch reads, takes a record for a directory by one bit of its attributes, and reads
nothing of it. Python's zipfile, with which Keras and NumPy read, refuses versions that it doesn't know, ends
a name at a NUL, and takes another name from an extra field. A value that no writer sets is a finding, whoever
obeys it.

Source: PKWARE APPNOTE 6.3, 4.4; miniz ``mz_zip_reader_is_file_a_directory``; CPython ``Lib/zipfile``.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ckpttool.core.report import Finding, Severity, error, warning

SATURATED32, ZIP64_EXTRA = 0xFFFFFFFF, 0x0001
"""What a size or offset has that does not fit in 32 bits, and the extra field where it stands instead."""
UTF8, HAS_DESCRIPTOR = 0x0800, 0x0008
REFUSED_FLAGS = 0x0001 | 0x0020 | 0x0040 | 0x2000
"""Encrypted, patched, strongly encrypted, with headers that are masked: no reader takes such a record."""
HEADER, VERSION = "zip-header", "zip-version"

LOCAL, ENTRY = struct.Struct("<4s5H3I2H"), struct.Struct("<4s6H3I5H2I")
END, END64 = struct.Struct("<4s4H2IH"), struct.Struct("<4sQ2H2I4Q")
DESCRIPTOR, DESCRIPTOR64 = struct.Struct("<3I"), struct.Struct("<I2Q")
"""Checksum, stored size and size; with or without a signature before them."""
DESCRIPTOR_MAGIC = b"PK\x07\x08"
DESCRIPTOR_LENGTHS = (16, 24, 12, 20)  # writers add the signature

_KNOWN_FLAGS = 0x0006 | HAS_DESCRIPTOR | UTF8 | REFUSED_FLAGS  # 6: how well it was deflated
_NEWEST_VERSION = 63
_DIRECTORY, _NO_FILE = 0x10, 0x08 | 0x40  # DOS: a directory; a volume's label, a device
_UNIX_TYPE, _UNIX_DIRECTORY, _UNIX_LINK = 0o170000 << 16, 0o040000 << 16, 0o120000 << 16
_UNICODE_PATH = 0x7075
_HARMLESS_EXTRAS = frozenset(
    {0x5455, 0x7875, 0x5855, 0x7855, 0x756E, 0x000A, 0x000D, 0x6C78}  # times, owners and modes
    | {0xCAFE, 0xA11E, 0xD935}  # what jar and Android's tools mark and align records with
)
_EXTRA = struct.Struct("<2H")


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


def entry_findings(member: Member, attributes: int, extra: bytes) -> Iterator[Finding]:
    """Yield what no writer of checkpoints says in the directory of one of its records."""
    name = member.name
    if member.version > _NEWEST_VERSION:
        message = f"it asks for zip version {member.version / 10}, which not all readers take"
        yield warning(VERSION, message, name)
    if member.flags & ~_KNOWN_FLAGS:
        yield error(HEADER, f"flags 0x{member.flags:04x}, which no writer sets", name)
    if "\0" in name:
        yield error(HEADER, "a name with a NUL, at which some readers end it", name)
    if name.endswith("/"):
        if member.size:
            yield error(HEADER, f"a directory of {member.size:,} bytes, of which PyTorch reads nothing", name)
    elif kind := _kind_of_file(attributes):
        message = f"attributes 0x{attributes:08x} mark it as a {kind}; loaders may skip it"
        yield error(HEADER, message, name)
    if extra:
        for doubt in unknown_extras(extra, name, member.raw_name):
            yield error(HEADER, f"the directory's {doubt}", name)


def _kind_of_file(attributes: int) -> str | None:
    """Return what a record is by its attributes, or None for a file."""
    unix_type = attributes & _UNIX_TYPE
    if attributes & _DIRECTORY or unix_type == _UNIX_DIRECTORY:
        return "directory"
    if unix_type == _UNIX_LINK:
        return "symbolic link"
    return "device" if attributes & _NO_FILE else None


def with_version_errors(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings of an archive that is read with Python's zipfile, which refuses new versions."""
    return [one._replace(severity=Severity.ERROR) if one.code == VERSION else one for one in findings]


# Extra fields ---------------------------------------------------------------------------------------


def extra_fields(extra: bytes) -> list[tuple[int, bytes]] | None:
    """Return the fields of an extra block, or None if it is malformed."""
    fields, at = [], 0
    while at + 4 <= len(extra):
        kind, nbytes = _EXTRA.unpack_from(extra, at)
        fields.append((kind, extra[at + 4 : at + 4 + nbytes]))
        at += 4 + nbytes
    return fields if at == len(extra) else None


def unknown_extras(extra: bytes, name: str, raw_name: bytes, expected: Sequence[int] = ()) -> Iterator[str]:
    """Say which extra fields could show readers another record; those of ``expected`` kinds don't count."""
    fields = extra_fields(extra)
    if fields is None:
        yield "extra field is malformed"
    for kind, content in fields or ():
        if kind == _UNICODE_PATH:
            if content not in _unicode_paths(name, raw_name):
                yield "extra field has another name"
        elif kind not in (ZIP64_EXTRA, *expected) and kind not in _HARMLESS_EXTRAS:
            yield f"extra field is of unknown kind 0x{kind:04x}"


def _unicode_paths(name: str, raw_name: bytes) -> tuple[bytes, ...]:
    """Return the Unicode path fields that agree with a name: its version, a checksum, the name in UTF-8."""
    head = struct.pack("<BI", 1, zlib.crc32(raw_name))
    return head + raw_name, head + name.encode("utf-8", "surrogatepass")
