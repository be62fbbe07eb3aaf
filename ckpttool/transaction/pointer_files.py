"""Rewriting of pointers when checkpoints move, and restoring them; changes by others are kept.

Paths are resolved from open directories, never through a symlink: a file that is reached through one isn't a
pointer of the directory.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress

from ckpttool.core.errors import AccessDenied, from_os_error
from ckpttool.formats import checkpoint_lists, list_kind
from ckpttool.formats.pointer_kind import CheckpointList
from ckpttool.storage import fs
from ckpttool.storage.directories import (
    CREATE,
    OWN_PREFIX,
    adopt_mode,
    link_or_rename,
    rename,
    sync_descriptor,
)
from ckpttool.storage.source import NotRegular, regular_descriptor
from ckpttool.transaction.files import StalePlan, opened, status_of
from ckpttool.transaction.journal import OperationList, Rewrite

MAX_TEXT = 1 << 26
"""Limit on the size of a pointer, state file or index, in bytes."""


def text_at(path: str, place: int | None = None) -> str | None:
    """Return the text of a small file; None if it is missing. Bytes that aren't UTF-8 are surrogates.

    Args:
        path: The file.
        place: Descriptor of the directory that the path is relative to.
    """
    try:
        is_in_store = place is None and not fs.place_of(path).has_links
        with (
            fs.open_regular(path)
            if is_in_store
            else open(regular_descriptor(path, follows=False, dir_fd=place), "rb") as file
        ):
            data = file.read(MAX_TEXT + 1)
    except FileNotFoundError:
        return None
    except NotRegular as error:
        raise StalePlan(f"{os.path.basename(path)} is not a regular file") from error
    if len(data) > MAX_TEXT:
        raise StalePlan(f"{os.path.basename(path)} is too large for a pointer file")
    return data.decode("utf-8", "surrogateescape")


def require_pointers(directory: str, listed: OperationList) -> None:
    """Require that no pointer has changed since the plan was made; nothing has moved yet."""
    with opened(directory) as place:
        for one in listed.pointers:
            if _text_of(one._replace(name=listed.old_path(one.name)), place) != one.before:
                raise StalePlan(f"{one.name} has changed", since_plan=True)


def restore_pointer(
    one: Rewrite, restored: Collection[str], directory: int, stage: int, *, is_all: bool
) -> None:
    """Make a pointer name restored checkpoints again; changes by others are kept.

    Args:
        one: The rewrite to be reverted.
        restored: Names of the restored checkpoints.
        directory: Descriptor of the directory.
        stage: Descriptor of the stage.
        is_all: Whether all checkpoints of the journal are restored.
    """
    with suppress(StalePlan, ValueError):
        back = restored_pointer(_text_of(one, directory), one, restored, is_all=is_all)
        if back.after != back.before:
            write_pointer(back, directory, stage)


def restored_pointer(now: str | None, one: Rewrite, restored: Collection[str], *, is_all: bool) -> Rewrite:
    """Return the rewrite that names restored checkpoints again.

    Args:
        now: Its current text; None if it is missing.
        one: The rewrite to be reverted.
        restored: Names of the restored checkpoints.
        is_all: Whether all checkpoints that the rewrite took out are restored.

    Raises:
        ValueError: It names no checkpoint any more.
    """
    # If others have changed it since, only a list can be merged, entry by entry. Other
    # pointers are left unchanged.
    if now == one.after and is_all:
        return one.inverse
    kind = None if one.is_link else list_kind(one.name)
    if kind is None or now is None or now == one.before or one.before is None or one.after is None:
        return one._replace(before=now, after=now)
    return one._replace(before=now, after=kind.merged(now, one.after, one.before, restored))


@contextmanager
def _opened_parent(name: str, directory: int) -> Iterator[tuple[int, str]]:
    """Open the parent directory of a pointer, and yield its descriptor with the pointer's name."""
    above, base = os.path.split(name)
    with ExitStack() as stack:
        try:
            place = stack.enter_context(opened(above, directory))
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                raise StalePlan(f"{name} is reached through a symlink, or not in a directory") from error
            raise
        yield place, base


def _text_of(one: Rewrite, directory: int) -> str | None:
    """Return the text of a pointer, or the target of a symlink; None if it is missing."""
    try:
        with _opened_parent(one.name, directory) as (place, base):
            return os.readlink(base, dir_fd=place) if one.is_link else text_at(base, place)
    except OSError as error:
        # It is missing, or isn't a symlink any more.
        if error.errno == errno.ENOENT or (one.is_link and error.errno == errno.EINVAL):
            return None
        raise


def write_pointer(one: Rewrite, directory: int, stage: int) -> None:
    """Rewrite a pointer atomically, unless it has changed since the plan was made."""
    # The new text is written and synced in the stage, and renamed over the old file. A new file is linked to
    # its name instead, which fails if a trainer has just made one of this name.
    if _text_of(one, directory) == one.after:
        return
    _require_text(one, directory)
    with _opened_parent(one.name, directory) as (place, name), _keeping_time(place, one.name):
        if one.after is None:
            os.unlink(name, dir_fd=place)
        else:
            temporary = _write_temporary(one, one.after, directory, stage)
            _require_text(one, directory)  # a trainer may have rewritten it during a slow sync
            if one.before is None:
                _link_new_file(stage, temporary, place, name)
            elif one.is_link:
                rename(temporary, stage, name, place)
            else:
                os.replace(temporary, name, src_dir_fd=stage, dst_dir_fd=place)
        sync_descriptor(place)


def _require_text(one: Rewrite, directory: int) -> None:
    """Require that a pointer has the same text as when the plan was made."""
    if _text_of(one, directory) != one.before:
        raise StalePlan(f"{one.name} has changed", since_plan=True)


def _write_temporary(one: Rewrite, text: str, directory: int, stage: int) -> str:
    """Write a new pointer into the stage, and return its name there."""
    temporary = temporary_name()
    if one.is_link:
        os.symlink(text, temporary, dir_fd=stage)
        return temporary
    like = one.name if one.before is not None else one.like or one.name
    descriptor = os.open(temporary, CREATE, 0o666, dir_fd=stage)
    with open(descriptor, "wb") as file, _opened_parent(like, directory) as (near, other):
        file.write(text.encode("utf-8", "surrogateescape"))
        file.flush()
        adopt_mode(descriptor, other, near)  # the mode and the owner of the file that it replaces
        status = status_of(other, near)
        # A part of a checkpoint keeps its time as well, since that is when the checkpoint was saved.
        if status is not None and (one.like is not None or os.sep in one.name):
            os.utime(descriptor, ns=(status.st_atime_ns, status.st_mtime_ns))
        # The text must reach the disk before the name does, or a crash could leave an empty pointer.
        os.fsync(descriptor)
    return temporary


def _link_new_file(scratch: int, temporary: str, place: int, name: str) -> None:
    """Give a new file its name; raise StalePlan if another file has it."""
    try:
        has_both = link_or_rename(temporary, scratch, name, place, lambda: status_of(name, place) is not None)
    except FileExistsError as error:
        raise StalePlan(f"{name} was created", since_plan=True) from error
    if has_both:
        os.unlink(temporary, dir_fd=scratch)


@contextmanager
def _keeping_time(place: int, name: str) -> Iterator[None]:
    """Preserve the time of a directory in a checkpoint while a file in it is replaced."""
    # Trainers sort checkpoints by the times of their directories.
    status = os.fstat(place)
    yield
    if os.sep in name:
        os.utime(place, ns=(status.st_atime_ns, status.st_mtime_ns))


def temporary_name() -> str:
    """Return a name for a file in a stage that is removed with it."""
    return f"{OWN_PREFIX}{os.urandom(6).hex()}.tmp"


# Lists of checkpoints ---------------------------------------------------------------------------------


def list_rewrites(directory: str, removed: Collection[str]) -> tuple[Rewrite, ...]:
    """Return the rewrites of a directory's lists that name removed checkpoints.

    Args:
        directory: The directory.
        removed: Names of the checkpoints in it that are removed.

    Raises:
        CheckpointError: A list can't be read, or it is a symlink: its target is never rewritten.
    """
    rewrites = (
        _list_rewrite(kind, directory, name, removed) for kind in checkpoint_lists() for name in kind.files
    )
    return tuple(one for one in rewrites if one is not None)


def _list_rewrite(
    kind: CheckpointList, directory: str, name: str, removed: Collection[str]
) -> Rewrite | None:
    path = os.path.join(directory, name)
    try:
        if not stat.S_ISREG(fs.stat(path).st_mode):
            return None
        with fs.open_regular(path) as file:
            data = file.read(kind.limit + 1)
        if len(data) > kind.limit:
            return None
        before = data.decode("utf-8", "surrogateescape")
        after = kind.without(before, directory, removed)
    except OSError as error:
        if fs.is_absence(error):
            return None
        raise from_os_error(error, path) from error
    if after == before:
        return None
    # The target may be outside of the directory, and a rewrite would replace the link by a file.
    if fs.islink(path):
        raise AccessDenied(path, "is a symlink, and lists a checkpoint to be removed; nothing was removed")
    return Rewrite(name, before, after)
