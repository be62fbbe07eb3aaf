"""What is mounted among a checkpoint's files: it isn't the checkpoint's, and goes nowhere with it."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable

from ckpttool.storage import fs
from ckpttool.transaction.files import Contents, contents
from ckpttool.transaction.paths import is_within

HOLDS_MOUNT = "holds a mount point"

_MOUNTS = "/proc/self/mountinfo"
"""Linux's list. It alone tells of a directory that is mounted in a second place of its own file system."""
_MOUNT_POINT = 4
"""Which word of a line that is; see proc(5)."""
_ESCAPED = re.compile(rb"\\([0-7]{3})")
_OF_DESCRIPTOR = re.compile(rb"^mnt_id:\s*(\d+)$", re.MULTILINE)


def mount_points(below: str | None = None) -> frozenset[str] | None:
    """Return the paths at which something is mounted, or None where the system has no list of them."""
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
    """Require that nothing is mounted at or below some names of a directory; one that is not there is fine.

    The directory is given by its path, or by its open descriptor; ``known`` is what lies at the names, if
    somebody has looked.
    """
    names = list(names)
    points = mount_points()
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
    """Return whether one of some mount points is one of some names of a directory, or lies below it."""
    points = list(points)
    if not points:
        return False
    own = f"/proc/self/fd/{directory}"
    real = os.readlink(own) if isinstance(directory, int) else fs.realpath(directory)
    near = [path for path in points if is_within(path, real)]
    return bool(near) and any(is_within(path, os.path.join(real, name)) for name in names for path in near)


def require_one_mount(descriptor: int, other: int) -> None:
    """Require that two open directories lie in one mount, whatever was mounted since they were opened."""
    if _mount(descriptor) != _mount(other):
        raise OSError(errno.EBUSY, HOLDS_MOUNT)


def _mount(descriptor: int) -> tuple[int, int | None]:
    """Return the device of an open directory, and the number of its mount where the system tells it."""
    device = os.fstat(descriptor).st_dev
    try:
        with open(f"/proc/self/fdinfo/{descriptor}", "rb") as file:
            match = _OF_DESCRIPTOR.search(file.read())
    except OSError:  # another system, or one without /proc
        return device, None
    return device, int(match[1]) if match else None
