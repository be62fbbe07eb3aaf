"""Mount points, as the system tells of them; only root could make some."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpttool.transaction import mounts


def list_mounts(patch: pytest.MonkeyPatch, file: Path) -> Callable[[Path], None]:
    """Let a file be the system's list of mounts; return what makes it say that one is at a path."""
    file.write_text("22 1 254:0 / / rw - ext4 /dev/vda rw\n")
    patch.setattr(mounts, "_MOUNTS", str(file))

    def add(path: Path) -> None:
        escaped = os.path.realpath(path).replace("\\", "\\134").replace(" ", "\\040")
        with file.open("a") as lines:
            lines.write(f"63 22 254:0 /elsewhere {escaped} rw,relatime - ext4 /dev/vda rw\n")

    return add


def list_no_mounts(patch: pytest.MonkeyPatch, elsewhere: Path) -> None:
    """Let the system have no list of mounts; only that a path lies on another device is seen."""
    patch.setattr(mounts, "_MOUNTS", str(elsewhere / "no such list"))
    for name in ("stat", "lstat"):
        patch.setattr(os, name, _on_another_device(getattr(os, name), elsewhere))


def _on_another_device(real: Callable[..., os.stat_result], path: Path) -> Callable[..., os.stat_result]:
    inode = path.stat().st_ino

    def look(*arguments: object, **options: object) -> os.stat_result:
        status = real(*arguments, **options)
        if status.st_ino == inode:
            return os.stat_result([*status[:2], status.st_dev + 1, *status[3:]])
        return status

    return look


def mount_once_open(patch: pytest.MonkeyPatch, name: str) -> None:
    """Let the kernel say of directories of a name, once they are open, that they lie in another mount."""
    real = mounts._mount

    def mount(descriptor: int) -> tuple[int, int | None]:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        return (0, 99) if os.path.basename(path) == name else real(descriptor)

    patch.setattr(mounts, "_mount", mount)


def mount_of(descriptor: int) -> tuple[int, int | None]:
    """Return the device of an open directory, and the number of its mount."""
    return mounts._mount(descriptor)
