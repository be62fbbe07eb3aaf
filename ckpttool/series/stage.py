"""Where checkpoints are put before they are unlinked, and each step with them, undone where it fails.

Everything happens below open directories, never through a symlink.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from ckpttool.series.files import Contents, Fingerprint, contents, fingerprint, opened
from ckpttool.series.journal import Removal

RETRIES = 5
RETRY_SECONDS = 0.2
"""An open file on NFS keeps its directory busy for a moment after it was unlinked."""

_BUSY = {errno.EBUSY, errno.ENOTEMPTY, errno.EEXIST}


class Changed(Exception):
    """What is on the disk isn't what the plan was made for."""


class Gone(Exception):
    """Somebody else has removed it already."""


@dataclass(frozen=True, slots=True)
class Stage:
    """An owned directory: where checkpoints are put before they are unlinked.

    Attributes:
        path: Its path.
        home: Descriptor of the directory that the checkpoints lie in.
        inner: Descriptor of the owned directory itself.
    """

    path: str
    home: int
    inner: int

    def set_aside(self, number: int, removal: Removal) -> None:
        """Rename a checkpoint away, its index first.

        Raises:
            Changed: It isn't what it was; it is back where it was.
            Gone: Nothing of it is there any more.
            OSError: It can't be renamed; what could be is back where it was.
        """
        if not any(status_of(name, self.home) for name in removal.members):
            raise Gone
        self._check(self.home, removal)
        os.mkdir(str(number), 0o700, dir_fd=self.inner)
        try:
            with opened(str(number), self.inner) as place:
                for name in removal.members:
                    persist(partial(os.rename, name, name, src_dir_fd=self.home, dst_dir_fd=place))
                # Only what was renamed is known to be what was checked: another could have come between.
                self._check(place, removal)
        except (OSError, Changed):
            self.put_back(number, removal)
            raise

    def _check(self, place: int, removal: Removal) -> None:
        try:
            is_same = contents(place, removal.members).is_same_as(removal.contents)
        except FileNotFoundError as error:
            raise Changed("it has vanished, or a part of it, since the plan was made") from error
        if not is_same:
            raise Changed("it has changed since the plan was made")

    def put_back(self, number: int, removal: Removal) -> None:
        """Rename a checkpoint to where it was, its index last.

        Raises:
            OSError: Something else is there now.
        """
        with opened(str(number), self.inner) as place:
            for name in reversed(removal.members):
                if status_of(name, place) is not None:
                    _move_back(name, place, self.home)
        persist(partial(os.rmdir, str(number), dir_fd=self.inner))

    def unlink(self, number: int, removal: Removal) -> Iterator[int]:
        """Unlink a checkpoint that was set aside; yield the bytes that each file frees.

        Raises:
            Changed: It isn't what it was; nothing of it was unlinked.
            OSError: Something can't be unlinked; the journal stays.
        """
        with opened(str(number), self.inner) as place:
            self._check(place, removal)
            for file in removal.contents.files:
                yield unlink_file(place, file)
            remove_directories(place, removal.contents)
        persist(partial(os.rmdir, str(number), dir_fd=self.inner))


def unlink_file(place: int, file: Fingerprint) -> int:
    """Unlink a file if it is the one that is meant, or has gone; return the bytes that this frees.

    Raises:
        Changed: Another file is there.
        OSError: It can't be unlinked.
    """
    parent, name = os.path.split(file.path)
    with opened(parent, place) as directory:
        status = status_of(name, directory)
        if status is None:
            return 0
        if fingerprint(file.path, status).identity != file.identity:
            raise Changed("it has changed while it was being removed")
        persist(partial(os.unlink, name, dir_fd=directory))
    return status.st_size if status.st_nlink == 1 and stat.S_ISREG(status.st_mode) else 0


def remove_directories(place: int, found: Contents) -> None:
    """Remove the directories of a checkpoint, the innermost first; one that holds something else stays.

    Raises:
        OSError: One can't be removed.
    """
    for path in sorted(found.directories, key=lambda path: path.count(os.sep), reverse=True):
        parent, name = os.path.split(path)
        try:
            with opened(parent, place) as directory:
                persist(partial(os.rmdir, name, dir_fd=directory))
        except FileNotFoundError:
            continue


def status_of(name: str, directory: int) -> os.stat_result | None:
    """Return the status of a name in an open directory, or None where there is none."""
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _move_back(name: str, place: int, home: int) -> None:
    """Rename without ever replacing what is there now."""
    there, here = status_of(name, home), status_of(name, place)
    if there is not None and here is not None and (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino):
        os.unlink(name, dir_fd=place)  # a kill came between the two steps below
        return
    if there is not None:
        raise FileExistsError(errno.EEXIST, "its place is taken by another file", name)
    if here is not None and stat.S_ISREG(here.st_mode):
        try:
            os.link(name, name, src_dir_fd=place, dst_dir_fd=home, follow_symlinks=False)
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links
            os.rename(name, name, src_dir_fd=place, dst_dir_fd=home)
        else:
            os.unlink(name, dir_fd=place)
        return
    os.rename(name, name, src_dir_fd=place, dst_dir_fd=home)


def persist(step: Callable[[], None]) -> None:
    """Do a step; where it is busy try again for a while.

    Raises:
        OSError: It can't be done.
    """
    for attempt in range(RETRIES):
        try:
            return step()
        except OSError as error:
            if error.errno not in _BUSY or attempt == RETRIES - 1:
                raise
            time.sleep(RETRY_SECONDS)
    return None
