"""Whose a journal or a record is: only what this user wrote, or the directory's owner, is obeyed.

Wherever several users write, another could plant one, and have removed or renamed what he himself may not
touch.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ckpttool.errors import AccessDenied, DamagedCheckpoint, from_os_error
from ckpttool.wire.directories import OpenDirectory
from ckpttool.wire.source import NotRegular, regular_descriptor

MAX_BYTES = 1 << 28
"""Of a journal; two million files take less."""

_OTHERS = stat.S_IWGRP | stat.S_IWOTH

LEFT_AS_IT_IS = "it is left as it is"


def require_own(path: str, directory: str, otherwise: str = LEFT_AS_IT_IS) -> None:
    """Require that a directory of ours was made by this user, or by the owner of what it is for.

    Others may write in it only where they may in ``directory``, too, and remove there what they like.

    Args:
        path: The directory of ours.
        directory: What it is for.
        otherwise: What to say of one that belongs to another user.
    """
    try:
        status, around = os.lstat(path), os.stat(directory)
    except OSError as error:
        raise from_os_error(error, path) from error
    require_own_status(path, status, around, otherwise)


def require_own_status(
    path: str, status: os.stat_result, around: os.stat_result, otherwise: str = LEFT_AS_IT_IS
) -> None:
    """Require the same of a directory by its status, and by that of what it is for."""
    if not stat.S_ISDIR(status.st_mode):
        what = "a symlink" if stat.S_ISLNK(status.st_mode) else "no directory"
        raise AccessDenied(path, f"is {what}; it is left as it is")
    _require_owner(path, status, around, otherwise)
    is_sticky = bool(around.st_mode & stat.S_ISVTX)
    if status.st_mode & _OTHERS & (_OTHERS if is_sticky else ~around.st_mode):
        raise AccessDenied(path, "others may have written in it; it is left as it is")


@contextmanager
def open_own(directory: str, around: str, *names: str) -> Iterator[OpenDirectory]:
    """Open a directory of ours, through no link, and require that what was opened is ours.

    Args:
        directory: What it is for.
        around: The directory around it.
        names: Its name there, or those that lead to it.
    """
    path = os.path.join(around, *names)
    require_own(path, directory)
    with ExitStack() as stack:
        place = stack.enter_context(OpenDirectory(around))
        for name in names:
            place = stack.enter_context(place.open(name))
        require_own_status(path, place.own_status(), os.stat(directory))
        yield place


def read_own(place: OpenDirectory, name: str, directory: str, what: str, most: int = MAX_BYTES) -> bytes:
    """Return what a file of ours holds.

    Args:
        place: The directory that it lies in.
        name: Its name there.
        directory: The directory that it is for.
        what: What it should be: "a journal".
        most: The most bytes that it may have.
    """
    path, status_before = place.join(name), place.status(name)
    if status_before is not None and stat.S_ISLNK(status_before.st_mode):
        raise DamagedCheckpoint(path, "a symlink", expected=what)
    try:
        descriptor = regular_descriptor(place.at(name), follows=False, dir_fd=place.descriptor)
    except NotRegular as error:
        raise DamagedCheckpoint(path, "no regular file", expected=what) from error
    try:
        status = os.fstat(descriptor)
        _require_owner(path, status, os.stat(directory))
        if status.st_size > most:
            raise DamagedCheckpoint(path, f"{status.st_size:,} bytes", expected=f"{what} of at most {most:,}")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(most)
    finally:
        os.close(descriptor)


def foreign_text(error: Exception, what: str) -> str:
    """Return what is wrong with a journal or a record, in words that tell a user something."""
    text = f"{what} that isn't one of ours"
    return f"{text}: {error}" if type(error) is ValueError else text


def _require_owner(
    path: str, status: os.stat_result, around: os.stat_result, otherwise: str = LEFT_AS_IT_IS
) -> None:
    if not hasattr(os, "geteuid") or status.st_uid in (os.geteuid(), around.st_uid):
        return
    raise AccessDenied(path, f"belongs to another user, {user_name(status.st_uid)}; {otherwise}")


def user_name(user: int) -> str:
    """Return what a user is called, from his number."""
    try:
        import pwd

        return pwd.getpwuid(user).pw_name
    except (ImportError, KeyError):  # no such system, or nobody whom it knows
        return f"number {user}"
