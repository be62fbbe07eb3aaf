"""Detection of mount points among a checkpoint's files, which are never moved or removed with it."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable

from ckpttool.storage import fs
from ckpttool.transaction.files import Contents, contents
from ckpttool.transaction.paths import is_within

HOLDS_MOUNT = "contains a mount point"

_MOUNTS = "/proc/self/mountinfo"
"""Linux's list of mounts. Only it shows bind mounts within a file system, whose device is the same."""
_MOUNT_POINT = 4
"""Index of the mount point in a line; see proc(5)."""
# A space in a path is written as ``\040``.
_ESCAPED = re.compile(rb"\\([0-7]{3})")
_OF_DESCRIPTOR = re.compile(rb"^mnt_id:\s*(\d+)$", re.MULTILINE)


def mount_points(below: str | None = None) -> frozenset[str] | None:
    """Return the paths of all mount points; None if the system has no list of them."""
    try:
        with open(_MOUNTS, "rb") as file:
            lines = file.read().splitlines()
    except OSError:  # another system, or one without /proc
        return None
    escaped = (words[_MOUNT_POINT] for line in lines if len(words := line.split()) > _MOUNT_POINT)
    points = frozenset(
        os.fsdecode(_ESCAPED.sub(lambda match: bytes([int(match[1], 8)]), point)) for point in escaped
    )
    if below is None:
        return points
    real = fs.realpath(below)
    return frozenset(point for point in points if is_within(point, real))


def require_unmounted(directory: str | int, names: Iterable[str], known: Contents | None = None) -> None:
    """Raise OSError (EBUSY) if a mount point is at or below some names of a directory.

    Missing names are fine. The directory is given by its path or its open descriptor; ``known`` are the
    contents at the names, if they have been read already.
    """
    names = list(names)
    points = mount_points()
    # Without the list, a directory on another device than its parent is the only sign of a mount.
    if points is None:
        crosses = any(_crosses(directory, name) for name in names) if known is None else known.crosses
    else:
        crosses = (known is not None and known.crosses) or is_mounted(directory, names, points)
    if crosses:
        raise OSError(errno.EBUSY, HOLDS_MOUNT)


def _crosses(directory: str | int, name: str) -> bool:
    try:
        return contents(directory, [name]).crosses
    except (FileNotFoundError, NotADirectoryError):
        return False


def is_mounted(directory: str | int, names: Iterable[str], points: Iterable[str]) -> bool:
    """Return whether a mount point is at or below one of some names of a directory."""
    points = list(points)
    if not points:
        return False
    # Mount points are listed by real paths. That of an open directory is the target of its link in /proc,
    # even if it has been renamed since.
    own = f"/proc/self/fd/{directory}"
    real = os.readlink(own) if isinstance(directory, int) else fs.realpath(directory)
    near = [path for path in points if is_within(path, real)]
    return bool(near) and any(is_within(path, os.path.join(real, name)) for name in names for path in near)


def require_one_mount(descriptor: int, other: int) -> None:
    """Raise OSError (EBUSY) unless two open directories are in the same mount."""
    if _mount(descriptor) != _mount(other):
        raise OSError(errno.EBUSY, HOLDS_MOUNT)


def _mount(descriptor: int) -> tuple[int, int | None]:
    """Return the device of an open directory, and the ID of its mount; None if the system has none."""
    # A bind mount has the same device number, and only its mount ID differs.
    device = os.fstat(descriptor).st_dev
    try:
        with open(f"/proc/self/fdinfo/{descriptor}", "rb") as file:
            match = _OF_DESCRIPTOR.search(file.read())
    except OSError:  # another system, or one without /proc
        return device, None
    return device, int(match[1]) if match else None
