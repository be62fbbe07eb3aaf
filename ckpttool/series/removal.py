"""Removes checkpoints for good, so that a kill at any instruction loses nothing that was to stay.

Everything happens below open directories, never through a symlink: what another process puts in a path's
place meanwhile is not touched. See ``journal`` for what is written down, and ``recovery`` for what is done
about it later.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from ckpttool.errors import AccessDenied, from_os_error
from ckpttool.series.files import Contents, Fingerprint, contents, fingerprint, opened
from ckpttool.series.home import home_of
from ckpttool.series.journal import JOURNAL, STAGE_PREFIX, TEMPORARY, Journal, Removal, dumps
from ckpttool.series.lock import FULL
from ckpttool.wire.atomic import sync_directory, write_atomically

RETRIES = 5
RETRY_SECONDS = 0.2
"""An open file on NFS keeps its directory busy for a moment after it was unlinked."""

_BELOW_DIRECTORIES = os.rename in os.supports_dir_fd
_BUSY = {errno.EBUSY, errno.ENOTEMPTY, errno.EEXIST}


class Changed(Exception):
    """What is on the disk isn't what the plan was made for."""


class NoRoom(AccessDenied):
    """The disk, or a quota, is full."""


class Gone(Exception):
    """Somebody else has removed it already."""


@dataclass(slots=True)
class Outcome:
    """What became of removals: ``failed`` says why, by path; ``freed`` is in bytes.

    What was gone already counts as removed, and frees nothing.
    """

    removed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    freed: int = 0


def remove(directory: str, journal: Journal) -> Outcome:
    """Remove checkpoints of one directory; what has changed since the plan was made stays.

    Raises:
        AccessDenied: The directory can't be changed; nothing was.
    """
    _require_system(directory)
    outcome = Outcome()
    while journal.removals or journal.rewrites:
        try:
            _carry_out(directory, journal, outcome)
            break
        except NoRoom as refusal:
            single = next(filter(_is_single_file, journal.removals), None)
            if single is None or journal.rewrites:  # pointers are rewritten before anything goes
                _give_up(journal, outcome, refusal)
                break
            _unlink_at_once(directory, single, outcome)
            journal = Journal(tuple(one for one in journal.removals if one is not single))
    return outcome


def _carry_out(directory: str, journal: Journal, outcome: Outcome) -> None:
    with begun(directory, journal) as stage:
        for rewrite in journal.rewrites:
            write_atomically(os.path.join(directory, rewrite.name), rewrite.text.encode())
        staged = [
            number
            for number, removal in enumerate(journal.removals)
            if _tried(outcome, removal, partial(stage.set_aside, number, removal))
        ]
        sync_directory(directory)
        for number in staged:
            removal = journal.removals[number]
            if _tried(outcome, removal, partial(_unlink, stage, number, removal, outcome)):
                outcome.removed.append(removal.path)


def _is_single_file(removal: Removal) -> bool:
    return len(removal.members) == len(removal.contents.files) == 1 and not removal.contents.directories


def _unlink_at_once(directory: str, removal: Removal, outcome: Outcome) -> None:
    """Unlink a checkpoint that is a single file. That needs no journal: nothing can be left half-done."""

    def unlink() -> None:
        with opened(directory) as home:
            outcome.freed += unlink_file(home, removal.contents.files[0])

    if _tried(outcome, removal, unlink):
        outcome.removed.append(removal.path)


def _give_up(journal: Journal, outcome: Outcome, refusal: NoRoom) -> None:
    """Note what stays for want of room for a journal.

    Raises:
        NoRoom: Nothing was removed at all.
    """
    if not outcome.removed:
        raise refusal
    outcome.failed |= {one.path: "no room for a journal" for one in journal.removals}


def _require_system(directory: str) -> None:
    if not _BELOW_DIRECTORIES:
        raise AccessDenied(directory, "this system can't remove below open directories; nothing was removed")


def _tried(outcome: Outcome, removal: Removal, step: Callable[[], object]) -> bool:
    try:
        step()
    except Gone:
        outcome.removed.append(removal.path)
    except Changed as change:
        outcome.failed[removal.path] = str(change)
    except OSError as error:
        outcome.failed[removal.path] = (error.strerror or str(error)).lower()
    else:
        return True
    return False


def _unlink(stage: Stage, number: int, removal: Removal, outcome: Outcome) -> None:
    try:
        for nbytes in stage.unlink(number, removal):
            outcome.freed += nbytes
    except Changed:
        stage.put_back(number, removal)
        raise


@contextmanager
def begun(directory: str, journal: Journal) -> Iterator[Stage]:
    """Write a journal, yield the stage to work on, and take both away if all went well.

    Raises:
        NoRoom: The disk is too full for a journal; nothing was changed.
        AccessDenied: The journal can't be written; nothing was changed.
    """
    around, suffix = home_of(directory)
    name = f"{STAGE_PREFIX}{os.urandom(4).hex()}{suffix}"
    path = os.path.join(around, name)
    try:
        os.mkdir(path, 0o700)
        try:
            write_atomically(os.path.join(path, JOURNAL), dumps(journal))
            sync_directory(around)
        except BaseException:
            clear(path)
            raise
    except OSError as error:
        reason = from_os_error(error, directory).reason
        refusal = NoRoom if error.errno in FULL else AccessDenied
        raise refusal(directory, f"{reason}; nothing was removed") from error
    try:
        with opened(directory) as home, opened(around) as place, opened(name, place) as inner:
            yield Stage(path, home, inner)
        clear(path)
    except KeyboardInterrupt:
        from ckpttool.series.recovery import settle

        settle(directory, path)
        raise
    except OSError as error:
        reason = from_os_error(error, directory).reason
        raise AccessDenied(directory, f"{reason}; the next prune settles what was begun") from error


def clear(path: str) -> bool:
    """Remove an owned directory with its journal; tell whether nothing else was left in it."""
    names = os.listdir(path)
    ours = [name for name in names if name == JOURNAL or _is_temporary(name)]
    if len(ours) < len(names):
        return False
    for name in ours:
        os.unlink(os.path.join(path, name))
    os.rmdir(path)
    return True


def _is_temporary(name: str) -> bool:
    return name.startswith(STAGE_PREFIX) and name.endswith(TEMPORARY)


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
