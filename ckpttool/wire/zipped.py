"""Where the records of a zip lie; everything that a zip states twice is compared.

A zip is described by its central directory, its local headers and its data descriptors. Readers that
trust different ones can be shown different files, so all must agree, and the records must tile the file:
a byte that nothing declares is a finding.

``zip_directory`` reads the first of the three, and ``zip_records`` compares the others with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from ckpttool.report import Finding
from ckpttool.wire.inflated import Inflated, Inflation
from ckpttool.wire.readable import Readable
from ckpttool.wire.source import Source
from ckpttool.wire.zip_directory import STORED, Member, find_directory, read_directory
from ckpttool.wire.zip_records import locate


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
        self._inflation = Inflation(source)

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
        """Return something to read the content of a member from; see ``offset``."""
        if member.method == STORED:
            return self.source
        return Inflated(self._inflation, member.payload, member.stored, member.size, member.name)

    def offset(self, member: Member) -> int:
        """Return the offset of a member's first byte in what ``content`` returns."""
        return member.payload if member.method == STORED else 0

    def read(self, member: Member) -> bytes:
        """Return the content of a small member.

        Raises:
            DamagedCheckpoint: It can't be read or inflated.
        """
        return self.content(member).read(self.offset(member), member.size, member.name)
