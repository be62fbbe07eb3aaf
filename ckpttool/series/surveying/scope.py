"""What of a directory is looked at, and what makes a series of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpttool.series.members.order import GroupBy


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What of a directory is looked at, and what makes a series of it.

    Attributes:
        recursive: Whether to descend; otherwise what lies in the directory itself is meant.
        exclude: Globs of what to pass over.
        max_depth: How many levels to descend at most.
        series: Globs of names that are one series each, whatever the names say.
        group_by: What makes one series of checkpoints; None for directory, format and name together.
        metrics: Logs that say what a checkpoint's metrics are, by its step or epoch.
    """

    recursive: bool = False
    exclude: Sequence[str] = ()
    max_depth: int | None = None
    series: Sequence[str] = ()
    group_by: GroupBy | None = None
    metrics: Sequence[str] = ()


WHOLE_TREE = Scope(recursive=True)
"""All that lies in a directory and below."""
