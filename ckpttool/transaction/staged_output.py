"""Outputs that appear whole or not at all: written next to the target, synced, and renamed.

Everything is written below ``.ckpttool-<id>.new/content/`` in the directory of the target, under its final
name. This directory, the area, is locked while a command works in it. One without a lock was left by a kill,
and is cleared when the next output is staged in the same directory. An area has

- ``owner``: its inode and the host where it was made, by which a copy or an extracted archive is recognised.
- ``content``: the new files, under their final names.
- ``replaced``: the old files, once they are set aside.
- ``journal.json``, ``done.json``: the moves, as in the stage of any command (``operations``).

The area, its subdirectories and the target's directory are held open. If another user of the target's
directory replaces one of them by a symlink, nothing is written, moved or removed through it.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from types import TracebackType
from typing import Literal

from ckpttool.core.errors import AccessDenied, CheckpointError, UsageError, from_os_error, system_text
from ckpttool.storage import fs
from ckpttool.storage.directories import (
    HAS_LOCKS,
    NO_FOLLOW,
    OWN_PREFIX,
    OpenDirectory,
    adopt_mode,
    is_scratch_name,
    link_or_rename,
    remove_leftover,
    try_lock,
)
from ckpttool.storage.sink import Sink, WrittenTensor
from ckpttool.storage.work import Advance, default_jobs, no_advance, pool_of_calls
from ckpttool.transaction.files import StalePlan, contents
from ckpttool.transaction.journal import CONTENT, REPLACED, OperationList, output_operations
from ckpttool.transaction.old_journals import MOVING
from ckpttool.transaction.operations import begin_output, open_output
from ckpttool.transaction.settling import settle
from ckpttool.transaction.stages import JOURNAL, require_system
from ckpttool.transaction.state_dir import own_bytes, parse_own
from ckpttool.transaction.stored_journals import read_output
from ckpttool.transaction.unlinking import StrandedCheckpoint

OutputShape = Literal["file", "directory", "prefix"]

_PATIENCE = 3.0
"""Seconds to wait for another command that is making or clearing areas in the same directory."""

_OWNER = "owner"
_NAME = re.compile(re.escape(OWN_PREFIX) + r"[0-9a-f]{12}\.new")
_BOOT = "/proc/sys/kernel/random/boot_id"
_MAX_BYTES = 1 << 24
"""Limit on the size of ``owner``."""


class UnsafeArea(Exception):
    """An area must not be touched; the message has the reason."""


class StagedOutput:
    """Target that is being written.

    Attributes:
        target: Its final path.
        path: Its current path, to open and check it before the commit.
        written: Tensors that were written through sinks; complete after ``settle``.
        warnings: Sentences on interrupted outputs in its directory that could not be cleared.
    """

    def __init__(
        self,
        target: str | os.PathLike[str],
        shape: OutputShape = "file",
        *,
        replaces: Iterable[str] | None = None,
        jobs: int | None = None,
        advance: Advance = no_advance,
    ) -> None:
        """Create an area for a target.

        Args:
            target: Path of a file or a directory, or the prefix of several files.
            shape: Which of these it is.
            replaces: Names in its directory that it replaces; None if they have to be free.
            jobs: Number of threads that copy tensors.
            advance: Called with numbers of copied bytes.
        """
        self.target = os.fspath(target).rstrip(os.sep)
        self.shape = shape
        directory, self._name = os.path.split(self.target)
        self._replaces = replaces
        self._pool = pool_of_calls(default_jobs() if jobs is None else jobs)
        self._advance = advance
        self._sinks: list[Sink] = []
        self._syncing = pool_of_calls(1)
        self.written: list[WrittenTensor] = []
        self.warnings: tuple[str, ...] = ()
        self._holds_old = False
        self._open = ExitStack()
        self._area: OpenDirectory | None = None
        try:
            self._directory = self._open.enter_context(OpenDirectory(directory or os.curdir))
            # Areas are made and cleared only under the lock of the target's directory. Between its creation
            # and its own lock, an area looks like one that a kill left, and another command would remove it.
            with _cleared(self._directory) as self.warnings:
                area = self._open.enter_context(
                    self._directory.make(f"{OWN_PREFIX}{os.urandom(6).hex()}.new", 0o700)
                )
                self._area = area
                if area.descriptor is not None and not _try_lock_directory(area.descriptor):
                    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), area.path)
                claim(area)
            self._content = self._open.enter_context(area.make(CONTENT))
            self.path = self._content.join(self._name)
            if shape == "directory":
                self._content.make(self._name).close()
        except OSError as error:
            self.discard()
            raise from_os_error(error, directory or os.curdir) from error
        except BaseException:
            self.discard()
            raise

    def __enter__(self) -> StagedOutput:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.discard()

    def create(self, name: str = "") -> Sink:
        """Create a file of the target.

        Args:
            name: Path of the file in a directory; rest of its name after a prefix; empty for a single file.
        """
        path = os.path.join(self._name, name) if self.shape == "directory" else self._name + name
        above, own = os.path.split(path)
        with self._content.make_or_open(above) as directory:
            sink = Sink(directory.join(own), self._pool, self._advance, directory)
        self._sinks.append(sink)
        return sink

    def settle(self) -> None:
        """Complete the files; the target can be opened at ``path`` then.

        A thread syncs them from then on, and ``commit`` waits for it.
        """
        self.require_in_place()
        for sink in self._sinks:
            sink.settle()
            self.written += sink.written
        self._pool.close()
        self._syncing.add(self._sync)

    def _sync(self) -> None:
        for sink in self._sinks:
            sink.close()
        self._content.sync_tree()

    def commit(self) -> None:
        """Move the target to its final path, all of it or nothing.

        After an OSError the old files are in place again; if that fails, an AccessDenied has their location.
        """
        # A rename may reach the disk before the data: after a power failure, the target would be empty. So
        # the files are synced before.
        self._syncing.settle()
        self._sinks.clear()
        self.require_in_place()
        # As with any checkpoint, the index comes last.
        names = sorted(self._content.names(), key=lambda name: (name.endswith(".index"), name))
        if self._replaces is None and (present := next(filter(self._directory.has, names), None)) is not None:
            raise UsageError(f"{self._directory.join(present)} was created meanwhile")
        old = [name for name in (self._replaces or ()) if self._directory.has(name)]
        is_over_file = not self._directory.holds_directory(self._name)
        for name in set(names) & set(old):
            _keep_mode(self._content, name, self._directory, name)
        # A single rename or link is atomic. Anything more takes a journal, so that a kill can be reverted.
        if names == old == [self._name] and self.shape == "file" and is_over_file:
            self._content.replace(self._name, self._directory, self._name)
        elif not old and len(names) == 1:
            move_without_replacing(names[0], self._content, self._directory)
        else:
            self._swap(names, old)
        self._directory.sync()
        self.discard()

    def staged_paths(self, old_names: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the paths of new files, relative to the target's directory, for a journal that moves them.

        They are synced, and have mode, owner and times of the old files. They must be moved before this
        output ends.

        Args:
            old_names: Name of the old file by new name in a directory; None if the target is a file.
        """
        self._syncing.settle()
        self._sinks.clear()
        self.require_in_place()
        staged = {}
        with ExitStack() as opened:
            content, directory = self._content, self._directory
            if old_names is not None:
                content, directory = (
                    opened.enter_context(one.open(self._name)) for one in (content, directory)
                )
            for name, old in ({self._name: self._name} if old_names is None else old_names).items():
                _keep_mode(content, name, directory, old)
                status = directory.status(old)
                if status is None:
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), directory.join(old))
                times = status.st_atime_ns, status.st_mtime_ns
                os.utime(content.at(name), ns=times, dir_fd=content.descriptor, follow_symlinks=False)
                staged[name] = os.path.relpath(content.join(name), self._directory.path)
        self._content.sync_tree()
        return staged

    def link_in(self, directory: str, names: Iterable[str]) -> None:
        """Link files of a directory into the target, which is a directory, too."""
        with OpenDirectory(directory) as source:
            for name in names:
                above, own = os.path.split(os.path.join(self._name, name))
                with self._content.make_or_open(above) as place:
                    os.link(
                        *(source.at(name), place.at(own)),
                        src_dir_fd=source.descriptor,
                        dst_dir_fd=place.descriptor,
                        follow_symlinks=False,
                    )

    def require_in_place(self) -> None:
        """Require that paths still lead to the open directories."""
        # The files are read back by path, and must be those that were written.
        area = self._area
        assert area is not None  # it is not discarded
        if area.descriptor is not None and not (
            self._directory.is_at_path() and self._directory.leads_to(os.path.basename(area.path), area)
        ):
            reason = "its directory or the staging directory was moved or replaced meanwhile"
            raise AccessDenied(self.target, f"{reason}; nothing was written there")

    def _swap(self, names: list[str], old: list[str]) -> None:
        """Set aside the old files, and move the new ones to their places; revert both if that fails."""
        area = self._area
        assert area is not None  # it is not discarded
        require_system(self.target, "written")
        # The index of a TensorFlow checkpoint leaves first and comes last: without it there is none.
        old = sorted(old, key=lambda name: not name.endswith(".index"))
        area.make(REPLACED).close()
        self._holds_old = True  # ``discard`` must not remove the area with the old files in it
        try:
            new_contents, old_contents = (
                {name: contents(place.fd, [name]) for name in given}
                for place, given in ((self._content, names), (self._directory, old))
            )
            self._move(area, output_operations(self.target, new_contents, old_contents))
        except (StalePlan, StrandedCheckpoint) as failure:
            raise AccessDenied(self.target, str(failure)) from failure
        self._holds_old = False

    def _move(self, area: OpenDirectory, listed: OperationList) -> None:
        """Set aside the old files and move in the new ones, or revert both."""
        with begin_output(self._directory, area, listed) as stage:
            try:
                for failure in stage.execute().values():
                    raise failure
                numbers = range(len(listed.groups))
                stage.prepare(numbers)
                stage.commit(numbers)
            except BaseException as error:
                for failure in stage.revert_all().values():
                    reason = f"it can't be moved there ({error_text(error)}), and the old version was"
                    raise AccessDenied(self.target, f"{reason} {failure}") from failure
                self._holds_old = False
                raise

    def discard(self) -> None:
        """Remove everything that isn't committed; may be called twice."""
        self._syncing.close()
        self._pool.close()
        for sink in self._sinks:
            with suppress(OSError):  # the file is removed below
                sink.abandon()
        self._sinks.clear()
        area, self._area = self._area, None
        try:
            if area is not None and not self._holds_old:
                remove_area(self._directory, area)
        except OSError as error:  # only a warning: the output is committed, or has failed already
            self.warnings += (f"{area.path if area else ''} can't be removed: {error_text(error)}",)
        finally:
            self._open.close()


def clear_areas(directory: str) -> tuple[str, ...]:
    """Complete or revert interrupted outputs in a directory; return sentences on those that could not be."""
    if not has_leftovers(directory):
        return ()
    try:
        with OpenDirectory(directory) as opened, _cleared(opened) as warnings:
            return warnings
    except OSError as error:
        raise from_os_error(error, directory) from error


def has_leftovers(directory: str) -> bool:
    """Return whether a directory on a disk has interrupted outputs, or half-written files."""
    if not fs.place_of(directory).can_rename:
        return False
    try:
        return any(map(is_leftover_name, fs.listdir(directory)))
    except OSError:  # nothing could be cleared there, either
        return False


@contextmanager
def _cleared(directory: OpenDirectory) -> Iterator[tuple[str, ...]]:
    """Clear a directory of interrupted outputs, and lock it against others that make or clear areas.

    Yields sentences on those that could not be cleared.
    """
    if not HAS_LOCKS or directory.descriptor is None:
        yield (*recover_areas(directory),)
        return
    # Opened again, since a lock is held until its descriptor is closed. This one is closed once the area is
    # locked, and the other one when the output ends.
    with directory.open(os.curdir) as again:
        until = time.monotonic() + _PATIENCE
        while not (is_alone := _try_lock_directory(again.fd)) and time.monotonic() < until:
            time.sleep(0.02)
        if is_alone:
            yield (*recover_areas(directory),)
        else:
            yield (f"{directory.path} is locked: leftovers of killed commands are not cleared",)


def _try_lock_directory(descriptor: int) -> bool:
    """Try to lock a directory; True on a file system without locks, where nothing is cleared."""
    try:
        return try_lock(descriptor)
    except OSError:
        return True


def _keep_mode(content: OpenDirectory, name: str, directory: OpenDirectory, other: str) -> None:
    """Give a file the mode and the owner of the one that it replaces, and a directory the mode."""
    new, old = content.status(name), directory.status(other)
    if new is None or old is None:
        return
    if stat.S_ISDIR(new.st_mode) and stat.S_ISDIR(old.st_mode):
        with content.open(name) as place:
            os.chmod(place.path if place.descriptor is None else place.descriptor, stat.S_IMODE(old.st_mode))
    elif stat.S_ISREG(new.st_mode):
        descriptor = os.open(content.at(name), os.O_RDWR | NO_FOLLOW, dir_fd=content.descriptor)
        try:
            adopt_mode(descriptor, directory.at(other), directory.descriptor)
        finally:
            os.close(descriptor)


# Areas --------------------------------------------------------------------------------------------


def is_leftover_name(name: str) -> bool:
    """Return whether a name is that of an area, or of a half-written file."""
    return _NAME.fullmatch(name) is not None or is_scratch_name(name)


def claim(area: OpenDirectory) -> None:
    """Write the owner of an area: its inode, and this host."""
    document = {"inode": area.own_status().st_ino, **_host()}
    descriptor = area.create(_OWNER, 0o600)
    try:
        os.write(descriptor, json.dumps(document).encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _host() -> dict[str, str]:
    """Return the name of this host, and the ID of its current boot."""
    boot = ""
    with suppress(OSError), open(_BOOT, encoding="ascii") as file:
        boot = file.read().strip()
    return {"host": os.uname().nodename if hasattr(os, "uname") else "", "boot": boot}


def move_without_replacing(name: str, here: OpenDirectory, there: OpenDirectory) -> None:
    """Move an entry to another directory; raise an OSError if another one has its name there."""
    has_both = link_or_rename(
        here.at(name), here.descriptor, there.at(name), there.descriptor, lambda: there.has(name)
    )
    if has_both:
        with suppress(OSError):  # it is removed with the area
            here.unlink(name)


def remove_area(directory: OpenDirectory, area: OpenDirectory) -> None:
    """Remove an area with everything in it: the journal first, the owner last."""
    # Without the journal, recovery moves nothing out of a half-removed area. With the owner, the next command
    # can still remove the rest.
    for name in sorted(area.names(), key=lambda name: (name == _OWNER, name not in (JOURNAL, MOVING))):
        area.remove(name)
    directory.remove_held(area, os.path.basename(area.path))


# Recovery of areas ----------------------------------------------------------------------------------


def recover_areas(directory: OpenDirectory) -> list[str]:
    """Clear a directory of interrupted outputs and half-written files; those of running commands are skipped.

    Returns sentences on those that could not be cleared.
    """
    warnings = []
    # Only a free lock shows that a command has ended. Without locks, nothing is cleared.
    for name in sorted(directory.names()) if HAS_LOCKS else ():
        try:
            if is_scratch_name(name):
                remove_leftover(directory, name)
            elif _NAME.fullmatch(name) and directory.holds_directory(name):
                _recover_area(directory, name)
        except (UnsafeArea, OSError, CheckpointError) as why:
            if directory.has(name):  # unless its command has just ended, and removed it
                warnings.append(f"{directory.join(name)} is left unchanged: {error_text(why)}")
    return warnings


def _recover_area(directory: OpenDirectory, name: str) -> None:
    """Clear an area that isn't locked: the old files are moved back, unless the output is committed."""
    _require_this_users(directory.status(name))  # before opening, which may fail for another user's
    with directory.open(name) as area:
        _require_this_users(area.own_status())
        if not try_lock(area.fd):
            return  # its command is running
        if not _has_no_owner_yet(area):
            _require_made_here(directory, area)
            _settle(directory, area)
            directory.sync()
        remove_area(directory, area)


def _require_this_users(status: os.stat_result | None) -> None:
    if status is not None and status.st_uid != os.geteuid():
        raise UnsafeArea("it belongs to another user")


def _has_no_owner_yet(area: OpenDirectory) -> bool:
    """Return whether an area is empty, since its command was killed before the owner was written."""
    names = area.names()
    if not names:
        return True
    owner = area.status(_OWNER)
    return names == [_OWNER] and owner is not None and not stat.S_ISDIR(owner.st_mode) and not owner.st_size


def _require_made_here(directory: OpenDirectory, area: OpenDirectory) -> None:
    """Require that no other user could write in an area, and that it was made on this host."""
    status = area.own_status()
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UnsafeArea("others may have written to it")
    owner: object = None
    if area.has(_OWNER):
        kind = "an owner file"
        text = own_bytes(area, _OWNER, directory.path or os.curdir, kind, _MAX_BYTES)
        owner = parse_own(area.join(_OWNER), text, kind, lambda document: document)
    match owner:
        case {"inode": int(inode), "host": str(host), "boot": str(boot)}:
            own = _host()
            if inode != status.st_ino:
                raise UnsafeArea("it is a copy, or was extracted from an archive")
            # A free lock proves that the command has ended only if that ran under this kernel. A
            # container may have another host name, but has the same boot ID. If this host was restarted
            # since, the command has ended.
            if host != own["host"] and (not boot or boot != own["boot"]):
                raise UnsafeArea(f"it was made on the host {host!r}, where a command may still use it")
        case _:
            raise UnsafeArea("its host is not recorded")


def _settle(directory: OpenDirectory, area: OpenDirectory) -> None:
    """Settle the journal of an area; if it is committed, only the old files are left in it."""
    if not (area.has(JOURNAL) or area.has(MOVING)):  # nothing was moved
        return
    for name in (CONTENT, REPLACED):
        if not area.holds_directory(name):
            raise UnsafeArea(f"{area.join(name)} is not a directory")
    listed = read_output(directory, area)
    with open_output(directory, area, listed) as stage:
        for why in settle(stage).failures.values():
            raise UnsafeArea(why)
        if not stage.is_committed:
            with area.open(REPLACED) as aside:
                for name in aside.names():
                    raise UnsafeArea(f"{aside.join(name)} is not a file that was set aside")


def error_text(error: BaseException) -> str:
    """Return an error in one line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{system_text(error)}: {error.filename}" if error.filename else system_text(error)
    return str(error) or type(error).__name__
