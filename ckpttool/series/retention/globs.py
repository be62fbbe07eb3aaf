"""Globs of paths, as configurations have them: name by name, with ``**`` for any number of directories."""

from __future__ import annotations

import os
from collections.abc import Sequence
from fnmatch import fnmatchcase


def matches(glob: str, path: str) -> bool:
    """Tell whether a path matches a glob, name by name; ``**`` stands for any number of directories.

    Args:
        glob: With slashes.
        path: Relative, with slashes; one that leads upwards matches nothing.
    """
    parts = glob.split("/")
    names = path.split("/")
    if os.pardir in names:
        return False
    reached = _skipped({0}, parts)
    for name in names:
        stays = {at for at in reached if at < len(parts) and parts[at] == "**"}
        moves = {at + 1 for at in reached - stays if at < len(parts) and fnmatchcase(name, parts[at])}
        reached = _skipped(stays | moves, parts)
    return len(parts) in reached


def _skipped(reached: set[int], parts: Sequence[str]) -> set[int]:
    """Return the places in a glob that are reached if each ``**`` may also stand for nothing."""
    for at, part in enumerate(parts):
        if at in reached and part == "**":
            reached = reached | {at + 1}
    return reached
