"""Files in a checkpoint's directory that its framework doesn't write: somebody put them there."""

from __future__ import annotations

import os

from ckpttool.formats.interface import SIDECARS
from ckpttool.ops.manifest import SHARED
from ckpttool.series.members.entry import Entry


def strangers(entry: Entry) -> tuple[str, ...]:
    """Return what goes with a checkpoint and isn't its own, by its names in the checkpoint's directory.

    A directory ends with a slash, and stands for all that lies in it. Of formats that allow whatever name
    nobody can tell.
    """
    written = None if entry.unit.format is None else entry.unit.format.written
    if written is None:
        return ()
    inside = [file.path.partition(os.sep)[2].partition(os.sep) for file in entry.contents.files]
    names = dict.fromkeys(name + slash for name, slash, _ in inside if name)
    return tuple(
        name
        for name in sorted(names)
        if not (written.fullmatch(name) or name.endswith(SIDECARS) or name in SHARED)
    )
