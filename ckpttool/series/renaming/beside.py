"""What lies beside checkpoints under their names, and is no part of them: it keeps its name."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

from ckpttool.formats.discovery import OWN_PREFIX
from ckpttool.report import counted
from ckpttool.series.members.entry import Entry
from ckpttool.series.paths import shown
from ckpttool.series.renaming.names import Renaming, unit_stem

_SHOWN = 3
"""How many names a warning tells; the others are counted."""

_BEHIND = re.compile(r"[^0-9A-Za-z]|$")
_DIGIT = re.compile(r"[0-9]")


def left_beside(
    renamings: Sequence[Renaming], entries: Sequence[Entry], standing: Mapping[str, Collection[str]]
) -> Iterator[str]:
    """Yield, by directory, what is called after a checkpoint that gets another name, and won't follow it.

    ``epoch_3.json`` and ``epoch_3.pth.md5`` are called after ``epoch_3.pth``; only names with a number count.

    Args:
        renamings: What gets another name.
        entries: All checkpoints, those that keep their names included.
        standing: All names in each of their directories.
    """
    parts = {(entry.directory, name) for entry in entries for name in (entry.name, *entry.unit.members)}
    stems: dict[str, set[str]] = defaultdict(set)
    for one in renamings:
        stems[one.entry.directory] |= set(filter(_DIGIT.search, (one.entry.name, unit_stem(one.entry))))
    for directory, known in stems.items():
        others = (name for name in standing.get(directory, ()) if (directory, name) not in parts)
        left = sorted(name for name in others if not name.startswith(OWN_PREFIX) and _is_after(name, known))
        if left:
            more = f" and {len(left) - _SHOWN:,} more" if len(left) > _SHOWN else ""
            is_one = len(left) == 1
            told = "begins with an old name and doesn't" if is_one else "begin with an old name and don't"
            names = f"{', '.join(left[:_SHOWN])}{more}"
            yield f"{shown(directory)}{os.sep}: {counted(len(left), 'file')} {told} follow: {names}"


def _is_after(name: str, known: Collection[str]) -> bool:
    return any(name[: match.start()] in known for match in _BEHIND.finditer(name, 1))
