"""Where checkpoints are put before they are unlinked, and each step with them, undone where it fails.

Everything happens below open directories, never through a symlink.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

from ckpttool.transaction.files import Contents, Fingerprint, contents, opened
from ckpttool.transaction.journal import Removal
from ckpttool.transaction.mounts import require_one_mount, require_unmounted
from ckpttool.transaction.paths import shown
from ckpttool.wire.directories import link_or_rename, make_directory, retry_while_busy


class StalePlan(Exception):
    """What is on the disk isn't what the plan was made for.

    Attributes:
        problem: What is different.
        since_plan: Whether it has become so since the plan was made.
    """

    def __init__(self, problem: str, *, since_plan: bool = False) -> None:
        super().__init__(f"{problem} since the plan was made" if since_plan else problem)
        self.problem = problem
        self.since_plan = since_plan


class AlreadyGone(Exception):
    """Somebody else has removed it already."""


class StrandedCheckpoint(Exception):
    """A checkpoint, or what is left of it, lies where it was set aside; the message says where."""


def place_numbers(removals: Sequence[Removal]) -> list[int]:
    """Return the number of the directory that each checkpoint is put in: single files share one."""
    shared = next((number for number, removal in enumerate(removals) if removal.is_single), 0)
    return [shared if removal.is_single else number for number, removal in enumerate(removals)]


@dataclass(frozen=True, slots=True)
class RemovalStage:
    """An owned directory: where checkpoints are put before they are unlinked.

    Attributes:
        path: Its path.
        directory: Descriptor of the directory that the checkpoints lie in.
        inner: Descriptor of the owned directory itself.
        shared: Descriptor of the directory in it that single files are put in, by its number; see ``close``.
    """

    path: str
    directory: int
    inner: int
    shared: dict[int, int] = field(default_factory=dict)

    def close(self) -> None:
        """Remove the directory of single files, and close it."""
        for number in list(self.shared):
            os.close(self.shared.pop(number))
            retry_while_busy(partial(os.rmdir, str(number), dir_fd=self.inner))

    def abandon(self) -> None:
        """Close what is open, and leave what lies there."""
        while self.shared:
            os.close(self.shared.popitem()[1])

    def set_aside(self, number: int, removal: Removal) -> None:
        """Rename a checkpoint away, its index first.

        Args:
            number: Of the directory that it is put in; see ``place_numbers``.
            removal: The checkpoint.
        """
        if removal.is_single:
            self._set_file_aside(number, removal)
            return
        if not any(status_of(name, self.directory) for name in removal.members):
            raise AlreadyGone
        _require_unchanged(self.directory, removal)
        require_removable(self.directory, removal.contents)
        place = make_directory(str(number), 0o700, self.inner)
        try:
            for name in removal.members:
                retry_while_busy(partial(os.rename, name, name, src_dir_fd=self.directory, dst_dir_fd=place))
            # Only what was renamed is known to be what was checked: another could have come between.
            _require_unchanged(place, removal)
        except (OSError, StalePlan):
            self.restore(number, removal)
            raise
        finally:
            os.close(place)

    def _set_file_aside(self, number: int, removal: Removal) -> None:
        (name,), (file,) = removal.members, removal.contents.files
        status = status_of(name, self.directory)
        if status is None:
            raise AlreadyGone
        _require_same(file, status)
        if number not in self.shared:
            self.shared[number] = make_directory(str(number), 0o700, self.inner)
        place = self.shared[number]
        retry_while_busy(partial(os.rename, name, name, src_dir_fd=self.directory, dst_dir_fd=place))
        try:
            # Only what was renamed is known to be what was checked: another could have come between.
            _require_same(file, status_of(name, place))
        except (OSError, StalePlan):
            self.restore(number, removal)
            raise

    def put_back(self, number: int, removal: Removal) -> None:
        """Rename a checkpoint to where it was, its index last."""
        with opened(str(number), self.inner) as place:
            for name in reversed(removal.members):
                if status_of(name, place) is not None:
                    _move_back(name, place, self.directory)
        if not removal.is_single:
            retry_while_busy(partial(os.rmdir, str(number), dir_fd=self.inner))

    def restore(self, number: int, removal: Removal) -> None:
        """Put a checkpoint back of which nothing was removed."""
        try:
            self.put_back(number, removal)
        except OSError as error:
            raise StrandedCheckpoint(
                f"not put back: {error_text(error)}; it lies in {self._place(number)}"
            ) from error

    def unlink(self, number: int, removal: Removal) -> Iterator[int]:
        """Unlink a checkpoint that was set aside; yield the bytes that each file frees."""
        if number in self.shared and removal.is_single:
            yield unlink_here(self.shared[number], removal.contents.files[0])
            return
        with opened(str(number), self.inner) as place:
            yield from unlink_all(place, removal, self._place(number))
        try:
            retry_while_busy(partial(os.rmdir, str(number), dir_fd=self.inner))
        except OSError as failure:
            raise _partly_removed(failure, self._place(number)) from failure

    def _place(self, number: int) -> str:
        return shown(os.path.join(self.path, str(number)))


def _move_back(name: str, place: int, directory: int) -> None:
    """Rename without ever replacing what is there now."""
    there, here = status_of(name, directory), status_of(name, place)
    if there is not None and here is not None and (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino):
        os.unlink(name, dir_fd=place)  # a kill came between the two steps below
        return
    if there is not None:
        raise FileExistsError(errno.EEXIST, "its place is taken by another file", name)
    if link_or_rename(name, place, name, directory, lambda: False):
        os.unlink(name, dir_fd=place)


# Looking first -------------------------------------------------------------------------------------


def _require_unchanged(place: int, removal: Removal) -> None:
    try:
        here = contents(place, removal.members)
        require_unmounted(place, removal.members, here)
    except FileNotFoundError as error:
        raise StalePlan("it has vanished, or a part of it,", since_plan=True) from error
    if not here.is_same_as(removal.contents):
        raise StalePlan("it has changed", since_plan=True)


def _require_same(file: Fingerprint, status: os.stat_result | None) -> None:
    if status is None:
        raise StalePlan("it has vanished, or a part of it,", since_plan=True)
    if not _is_same(file, status) or status.st_dev != file.device:
        raise StalePlan("it has changed", since_plan=True)


def _is_same(file: Fingerprint, status: os.stat_result) -> bool:
    """Tell whether a file is the one that is meant, even if the file system is mounted anew."""
    return status.st_ino == file.inode and status.st_mtime_ns == file.mtime_ns and status.st_size == file.size


def require_removable(place: int, contents: Contents) -> None:
    """Require that all directories of a checkpoint let this user unlink what they hold."""
    for path in contents.directories:
        with suppress(FileNotFoundError), opened(path, place) as directory:  # what has gone is no hindrance
            if not _may_unlink_in(directory):
                raise PermissionError(errno.EACCES, f"{path} can't be changed by this user")


def _may_unlink_in(directory: int) -> bool:
    """Tell whether a directory lets this user unlink what it holds; a sticky one only what is his own."""
    asks_effective = os.access in os.supports_effective_ids
    if not os.access(os.curdir, os.W_OK | os.X_OK, dir_fd=directory, effective_ids=asks_effective):
        return False
    status = os.fstat(directory)
    user = os.geteuid()
    if not status.st_mode & stat.S_ISVTX or user in (0, status.st_uid):
        return True
    with os.scandir(directory) as entries:
        return all(entry.stat(follow_symlinks=False).st_uid == user for entry in entries)


# Unlinking ------------------------------------------------------------------------------------------


def unlink_all(place: int, removal: Removal, shown_place: str) -> Iterator[int]:
    """Unlink all files and directories of a checkpoint; yield the bytes that each file frees.

    Args:
        place: Descriptor of the directory that its members lie in.
        removal: The checkpoint.
        shown_place: What the user is told of where the rest lies.
    """
    has_begun = False
    try:
        _require_unchanged(place, removal)
        for parent, files in groupby(removal.contents.files, key=lambda file: os.path.dirname(file.path)):
            with _opened_within(parent, place) as directory:
                for file in files:
                    freed = unlink_here(directory, file, os.path.basename(file.path))
                    has_begun = True
                    yield freed
        remove_directories(place, removal.contents)
    except (StalePlan, OSError) as failure:
        if not has_begun:
            raise
        raise _partly_removed(failure, shown_place) from failure


def _partly_removed(failure: StalePlan | OSError, shown_place: str) -> StrandedCheckpoint:
    why = error_text(failure) if isinstance(failure, OSError) else str(failure)
    return StrandedCheckpoint(f"partly removed: {why}; the rest lies in {shown_place}")


def error_text(error: OSError) -> str:
    """Return what the system said, as a part of a sentence."""
    return (error.strerror or str(error)).lower()


def unlink_file(place: int, file: Fingerprint) -> int:
    """Unlink a file if it is the one that is meant, or has gone; return the bytes that this frees."""
    parent, name = os.path.split(file.path)
    with _opened_within(parent, place) as directory:
        return unlink_here(directory, file, name)


@contextmanager
def _opened_within(path: str, place: int) -> Iterator[int]:
    """Open a directory below another, in the same mount: what is mounted there later isn't touched either."""
    with opened(path, place) as directory:
        if path:
            require_one_mount(directory, place)
        yield directory


def unlink_here(directory: int, file: Fingerprint, name: str | None = None) -> int:
    """Unlink a file of an open directory; see ``unlink_file``.

    Args:
        directory: The directory that it lies in.
        file: The file.
        name: Its name there, where its path is longer.
    """
    name = file.path if name is None else name
    status = status_of(name, directory)
    if status is None:
        return 0
    if not _is_same(file, status):
        raise StalePlan("it has changed while it was being removed")
    retry_while_busy(partial(os.unlink, name, dir_fd=directory))
    return status.st_size if status.st_nlink == 1 and stat.S_ISREG(status.st_mode) else 0


def remove_directories(place: int, contents: Contents) -> None:
    """Remove the directories of a checkpoint, the innermost first; one that holds something else stays."""
    for path in sorted(contents.directories, key=lambda path: path.count(os.sep), reverse=True):
        parent, name = os.path.split(path)
        try:
            with _opened_within(parent, place) as directory:
                retry_while_busy(partial(os.rmdir, name, dir_fd=directory))
        except FileNotFoundError:
            continue


def status_of(name: str, directory: int) -> os.stat_result | None:
    """Return the status of a name in an open directory, or None where there is none."""
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None
