"""What the checkpoint is that a path stands for: of a directory of several, the newest."""

from __future__ import annotations

import os

from ckpttool.ops.inspect import Inspection, inspection, open_to_inspect
from ckpttool.runs.surveying.newest import newest_in


def inspect(path: str | os.PathLike[str], *, filter: str | None = None, stats: bool = False) -> Inspection:
    """Return what a checkpoint is.

    Args:
        path: A file, directory or index; of a directory of several checkpoints, the newest.
        filter: Glob that the names of the tensors must match.
        stats: Whether to read the values and compute statistics of the numeric ones.

    Raises:
        CheckpointError: It is none, or can't be read.
    """
    with open_to_inspect(newest_in(os.fspath(path)).path, stats=stats) as checkpoint:
        return inspection(checkpoint, filter=filter, stats=stats)
