"""What a pointer means whose checkpoint was renamed since, as the records tell that ``undo`` goes by."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from ckpttool.errors import CheckpointError
from ckpttool.series.changing.history import homes, identities, read_record
from ckpttool.series.changing.moves import Move
from ckpttool.series.members.entry import Entry
from ckpttool.series.pointers.meaning import Index


def renamed_since(target: str, directories: Sequence[str], index: Index) -> list[Entry]:
    """Return the checkpoints that were called as a pointer's target is, before ``rename`` renamed them.

    One that was changed since, or another one that has its name now, is none of them.

    Args:
        target: What it names, as it stands there.
        directories: Where its own run lies.
        index: The checkpoints that were looked at.
    """
    found: dict[str, Entry] = {}
    for directory in directories:
        names = {os.path.basename(target.rstrip("/\\").replace("\\", "/"))}
        for move in _moves(directory):
            new = {now for now, old in move.members if old in names}
            if os.path.basename(move.path) in names:
                new |= {now for now, _ in move.members}
            names |= new
            for name in new:
                entry = index.by_name.get((directory, name))
                if entry is not None and _is_same(entry, move):
                    found[entry.path] = entry
    return list(found.values())


def _moves(directory: str) -> Iterator[Move]:
    """Yield what takes renamings back in a directory, the oldest first; nothing of what can't be read."""
    try:
        known = {identity: home for home in homes(directory) for identity in identities(directory, home)}
        records = [read_record(directory, known[identity], identity) for identity in sorted(known)]
    except (CheckpointError, OSError):
        return
    for record in records:
        if record is not None and record.kind == "rename":
            for step in record.steps:
                yield from step.undoing.moves


def _is_same(entry: Entry, move: Move) -> bool:
    """Tell whether a checkpoint has all files that were renamed; in a copy they have other inodes."""
    now = {(file.size, file.mtime_ns) for file in entry.contents.files}
    return now.issuperset((file.size, file.mtime_ns) for file in move.contents.files)
