"""How content that is neither tensor nor plain data is told: its size, and the CRC-32 of all of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from zlib import crc32

from ckpttool.report import counted
from ckpttool.wire.zip_directory import Member
from ckpttool.wire.zipped import Archive

RECORDS = "other records"
"""The key under which records of an archive are told that its format says nothing of."""


def described(nbytes: int, crc: int, *, what: str = "") -> str:
    """Return how content is told; ``what`` is put before its size."""
    return f"<{what}{nbytes:,} bytes, CRC-32 {crc:08x}>"


def described_member(member: Member, *, has_checksums: bool = True) -> str:
    """Return how a record of a zip is told, by what the directory says; its content isn't read."""
    if not has_checksums:
        return f"<{member.size:,} bytes of a record without a checksum>"
    return described(member.size, member.crc32)


def described_members(archive: Archive, is_told: Callable[[str], bool]) -> dict[str, str]:
    """Return how the records of an archive are told, but for those that are told elsewhere."""
    return {
        member.name: described_member(member, has_checksums=archive.has_checksums)
        for member in archive.members
        if not member.name.endswith("/") and not is_told(member.name)
    }


def told_below(records: Mapping[str, str], told: Mapping[str, object]) -> dict[str, object]:
    """Return records under a key that what is told doesn't have yet; nothing where there are none."""
    key = RECORDS
    while key in told:
        key += "'"
    return {key: dict(sorted(records.items()))} if records else {}


def digest(parts: Iterable[bytes]) -> int:
    """Return the CRC-32 of texts, each with its length, so that none can pass for a part of another."""
    crc = 0
    for part in parts:
        crc = crc32(part, crc32(len(part).to_bytes(8, "little"), crc))
    return crc


def told_operators(found: Iterable[tuple[str, bytes]]) -> dict[str, str]:
    """Return how many operators of each kind there are, and a checksum of all that is set for them.

    Args:
        found: Each operator's kind, and what is set; their order has no say.
    """
    kinds: dict[str, Counter[bytes]] = {}
    for kind, content in found:
        kinds.setdefault(kind, Counter())[content] += 1
    return {
        kind: f"<{counted(each.total(), 'operator')}, CRC-32 {digest(sorted(each.elements())):08x}>"
        for kind, each in sorted(kinds.items())
    }
