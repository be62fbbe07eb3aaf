"""When a checkpoint was last read in full and found valid, as its digests beside it have it: ``verified``.

It is a line of its own at the beginning of the document, so that it is read and replaced without the rest,
which has a line a tensor.
"""

from __future__ import annotations

import re

from ckpttool.core.errors import CheckpointError, from_os_error
from ckpttool.formats.interface import Unit
from ckpttool.ops.manifest import DIGESTS_SUFFIX, base_at
from ckpttool.storage import fs
from ckpttool.storage.atomic import write_atomically

_HEAD_BYTES = 512
_HEAD = re.compile(
    rb'(\{\n "schema": "ckpttool\.digests/\d+",\n)( "verified": \{"at": "([0-9TZ:-]{1,32})"[^\n]*\n)?'
)


def record_of(unit: Unit) -> str | None:
    """Return the path of the digests beside a checkpoint on this machine; None if there are none."""
    if not fs.place_of(unit.path).opens_by_path:  # it is changed in its place
        return None
    record = base_at(unit.path, unit.format.name if unit.format else None) + DIGESTS_SUFFIX
    return record if fs.isfile(record) else None


def last_read(record: str) -> str | None:
    """Return when a checkpoint was last read in full: ``2026-01-02T03:04:05Z``, or an empty text for never.

    None stands for a document that can't be read, or is not as ``--write-manifest`` writes it.
    """
    try:
        with fs.open_source(record) as source:
            match = _HEAD.match(source.read(0, min(_HEAD_BYTES, source.size)))
    except CheckpointError:
        return None
    return None if match is None else (match[3] or b"").decode()


def write_last_read(record: str, moment: str) -> None:
    """Write down that a checkpoint was read in full at a moment, and is valid.

    Raises:
        CheckpointError: The document can't be read or replaced.
    """
    with fs.open_source(record) as source:
        text = source.read(0, source.size)
    line = f' "verified": {{"at": "{moment}", "depth": "full"}},\n'.encode()
    try:
        write_atomically(record, _HEAD.sub(lambda match: match[1] + line, text, count=1))
    except OSError as error:
        raise from_os_error(error, record) from error
