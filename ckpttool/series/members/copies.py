"""Copies within a series: checkpoints of one name in several directories that hold the same bytes."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

from ckpttool.series.files import Fingerprint
from ckpttool.series.members.entry import Entry
from ckpttool.series.members.order import Group
from ckpttool.wire.source import open_regular

_CHUNK = 1 << 20
_SAMPLES, _SAMPLE = 8, 64


def copies(groups: Sequence[Group]) -> Iterator[str]:
    """Yield, for each series that has copies of one checkpoint, which two are the same: rules count both.

    Of what has one name and one size a few samples are read, and of two with the same samples as much as is
    alike.
    """
    for one in groups:
        if (pair := _pair(one)) is not None:
            first, second = pair
            yield f"{one.key}: {first.path} and {second.path} hold the same bytes; copies count twice"


def _pair(group: Group) -> tuple[Entry, Entry] | None:
    alike: dict[tuple[str, int], list[Entry]] = defaultdict(list)
    for entry in group.entries:
        if entry.is_sound:
            alike[entry.name, entry.nbytes].append(entry)
    for found in alike.values():
        for same in _alike_in_samples(found) if len({entry.directory for entry in found}) > 1 else ():
            for one, other in pairwise(same):
                if one.directory != other.directory and _are_equal(one, other):
                    return one, other
    return None


def _alike_in_samples(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    """Yield checkpoints that can't be told apart by a few bytes of their largest files."""
    found: dict[bytes, list[Entry]] = defaultdict(list)
    for entry in entries:
        largest = max(entry.contents.files, key=lambda file: (file.size, file.path), default=None)
        if largest is not None and (sample := _samples(entry, largest)) is not None:
            found[sample].append(entry)
    yield from found.values()


def _samples(entry: Entry, file: Fingerprint) -> bytes | None:
    try:
        with open_regular(os.path.join(entry.directory, file.path)) as stream:
            taken = []
            for part in range(_SAMPLES):
                stream.seek(file.size * part // _SAMPLES)
                taken.append(stream.read(_SAMPLE))
            return b"".join(taken)
    except OSError:
        return None


def _are_equal(one: Entry, other: Entry) -> bool:
    files, others = ({file.path: file for file in entry.contents.files} for entry in (one, other))
    if files.keys() != others.keys() or any(file.size != others[path].size for path, file in files.items()):
        return False
    return all(
        _same_bytes(os.path.join(one.directory, path), os.path.join(other.directory, path)) for path in files
    )


def _same_bytes(one: str, other: str) -> bool:
    """Tell whether two files hold the same bytes; what can't be read is the same as nothing."""
    try:
        with open_regular(one) as first, open_regular(other) as second:
            while (chunk := first.read(_CHUNK)) == second.read(_CHUNK):
                if not chunk:
                    return True
    except OSError:
        return False
    return False
