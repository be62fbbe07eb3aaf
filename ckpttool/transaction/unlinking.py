"""Unlinking of checkpoints: only unmodified files, and none through a symlink or a mount point."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import groupby

from ckpttool.core.errors import system_text
from ckpttool.storage.directories import remove_directory, retry_while_busy
from ckpttool.transaction.files import Contents, Fingerprint, StalePlan, opened, status_of
from ckpttool.transaction.mounts import require_one_mount


class StrandedCheckpoint(Exception):
    """A checkpoint, or the rest of it, isn't in its place; the message has its location."""


def require_removable(place: int, contents: Contents) -> None:
    """Require that this user may unlink all entries of a checkpoint's directories."""
    for path in contents.directories:
        with suppress(FileNotFoundError), opened(path, place) as directory:  # a missing one is fine
            if not _may_unlink_in(directory):
                raise PermissionError(errno.EACCES, f"{path} can't be changed by this user")


def _may_unlink_in(directory: int) -> bool:
    """Return whether this user may unlink all entries of a directory."""
    # In a sticky directory, only root, its owner and the owner of an entry may unlink it.
    asks_effective = os.access in os.supports_effective_ids
    if not os.access(os.curdir, os.W_OK | os.X_OK, dir_fd=directory, effective_ids=asks_effective):
        return False
    status = os.fstat(directory)
    user = os.geteuid()
    if not status.st_mode & stat.S_ISVTX or user in (0, status.st_uid):
        return True
    with os.scandir(directory) as entries:
        return all(entry.stat(follow_symlinks=False).st_uid == user for entry in entries)


def purge_checked(
    place: int, contents: Contents, shown_place: str, check: Callable[[], None]
) -> Iterator[int]:
    """Unlink a checkpoint after a last check; yield the bytes that each file frees.

    Args:
        place: Descriptor of the directory that the contents are relative to.
        contents: Files and directories of the checkpoint.
        shown_place: Path of that directory, for the message if only a part can be unlinked.
        check: Raises StalePlan if the checkpoint has changed.

    Raises:
        StalePlan: It has changed; nothing was unlinked.
        OSError: Nothing could be unlinked.
        StrandedCheckpoint: A part was unlinked.
    """
    has_begun = False
    try:
        check()
        for freed in purge(place, contents):
            has_begun = True
            yield freed
    except (StalePlan, OSError) as failure:
        if not has_begun:
            raise
        why = system_text(failure) if isinstance(failure, OSError) else str(failure)
        raise StrandedCheckpoint(f"partly removed: {why}; the rest is in {shown_place}") from failure


def purge(place: int, contents: Contents, *, allow_missing: bool = False) -> Iterator[int]:
    """Unlink files and remove their directories; yield the bytes that each file frees.

    A directory that has other entries is kept, and raises an OSError.

    Args:
        place: Descriptor of the directory that the contents are relative to.
        contents: Files and directories to remove.
        allow_missing: Whether some of them may be missing already.
    """
    # Each directory is opened once for all of its files. Directories are removed after
    # them, the deepest first.
    for parent, files in groupby(contents.files, key=lambda file: os.path.dirname(file.path)):
        try:
            with _opened_within(parent, place) as directory:
                for file in files:
                    yield _unlink_file(os.path.basename(file.path), directory, file)
        except FileNotFoundError:
            if not allow_missing:
                raise
    for path in sorted(contents.directories, key=lambda path: path.count(os.sep), reverse=True):
        parent, name = os.path.split(path)
        with suppress(FileNotFoundError), _opened_within(parent, place) as directory:
            retry_while_busy(partial(remove_directory, name, directory))


@contextmanager
def _opened_within(path: str, place: int) -> Iterator[int]:
    """Open a directory below another one, in the same mount."""
    # Another file system may have been mounted there since the checkpoint was checked.
    with opened(path, place) as directory:
        if path:
            require_one_mount(directory, place)
        yield directory


def _unlink_file(name: str, directory: int, file: Fingerprint) -> int:
    """Unlink a file if it is unmodified; return the bytes that this frees, 0 if it is missing."""
    status = status_of(name, directory)
    if status is None:
        return 0
    if not file.is_of(status):
        raise StalePlan("it changed while it was being removed")
    with suppress(FileNotFoundError):  # already unlinked by another process
        retry_while_busy(partial(os.unlink, name, dir_fd=directory))
    return status.st_size if status.st_nlink == 1 and stat.S_ISREG(status.st_mode) else 0
