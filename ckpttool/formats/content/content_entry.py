"""Where the entry ``ckpttool.content`` is a record of a zip, or a file."""

from __future__ import annotations

from isal import isal_zlib

from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CheckpointError
from ckpttool.formats.content.carried import ENTRY, MAX_DOCUMENT, restored
from ckpttool.report import warning
from ckpttool.wire.source import Source
from ckpttool.wire.zip_directory import Member
from ckpttool.wire.zipped import Archive


def restored_from_record(checkpoint: Checkpoint, archive: Archive, member: Member | None) -> Checkpoint:
    """Return a checkpoint with all that a record says of it; with a warning instead where that can't be read.

    Args:
        checkpoint: What the format holds; it is not used any more.
        archive: What the record lies in.
        member: The record; None where there is none.
    """
    if member is None:
        return checkpoint
    if member.size > MAX_DOCUMENT:
        return _too_long(checkpoint, member.size, member.name)
    try:
        document = archive.read(member)
    except CheckpointError as failure:
        return _unread(checkpoint, failure.reason, member.name)
    if archive.has_checksums and isal_zlib.crc32(document) != member.crc32:
        return _unread(checkpoint, "its checksum does not match", member.name)
    return restored(checkpoint, document, member.name)


def restored_from_file(checkpoint: Checkpoint, source: Source | None) -> Checkpoint:
    """Return a checkpoint with all that a file beside it says of it; see ``restored_from_record``."""
    if source is None:
        return checkpoint
    if source.size > MAX_DOCUMENT:
        return _too_long(checkpoint, source.size, ENTRY)
    return restored(checkpoint, source.read(0, source.size, ENTRY), ENTRY)


def _too_long(checkpoint: Checkpoint, nbytes: int, where: str) -> Checkpoint:
    return _unread(checkpoint, f"{nbytes:,} bytes, and at most {MAX_DOCUMENT:,} are read", where)


def _unread(checkpoint: Checkpoint, why: str, where: str) -> Checkpoint:
    checkpoint.findings += (warning("content-entry", f"it was not used: {why}", where),)
    return checkpoint
