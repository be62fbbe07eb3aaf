"""Open directories of a list of operations, and checks of the files at their paths."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property, partial
from types import TracebackType

from ckpttool.storage.directories import link_or_rename, rename, retry_while_busy
from ckpttool.transaction.files import (
    Contents,
    Fingerprint,
    NameTaken,
    StalePlan,
    contents,
    joined,
    opened,
    status_of,
)
from ckpttool.transaction.history import open_place
from ckpttool.transaction.journal import Location, Move, OperationList, Root
from ckpttool.transaction.mounts import require_unmounted
from ckpttool.transaction.state_dir import StateDir
from ckpttool.transaction.unlinking import require_removable

_MOST_HELD = 64
"""Limit on open subdirectories, larger than the number in use at once."""


class AlreadyGone(StalePlan):
    """Another process has removed the checkpoint already."""

    def __init__(self) -> None:
        super().__init__("all or part of it has vanished", since_plan=True)


class OpenRoots:
    """Open descriptors of the directory, the stage and the trash of a list; a context manager.

    Attributes:
        listed: The operations.
        descriptors: Descriptors of the open directories.
    """

    def __init__(self, listed: OperationList, descriptors: Mapping[Root, int]) -> None:
        """Use open descriptors, which the caller closes."""
        self.listed, self.descriptors = listed, descriptors
        self._held: dict[tuple[Root, str], int] = {}

    def __enter__(self) -> OpenRoots:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._held:
            os.close(self._held.popitem()[1])

    def at(self, location: Location) -> tuple[int, str]:
        """Return the descriptor of a location's directory, and its name there."""
        root, path = location
        above, _, name = path.rpartition(os.sep)
        if root not in self.descriptors:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if not above:
            return self.descriptors[root], name
        key = root, above
        if key not in self._held:
            with opened(above, self.descriptors[root]) as directory:
                while len(self._held) >= _MOST_HELD:
                    os.close(self._held.pop(next(iter(self._held))))
                self._held[key] = os.dup(directory)
        elif key != next(reversed(self._held)):
            # The least recently used one is closed first. So a directory isn't closed while it is in use:
            # threads that unlink checkpoints all use the same one.
            self._held[key] = self._held.pop(key)
        return self._held[key], name

    def status(self, location: Location) -> os.stat_result | None:
        """Return the status of a location; None if it is missing."""
        try:
            directory, name = self.at(location)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return status_of(name, directory)

    def unlink(self, location: Location) -> None:
        """Unlink a file; nothing is done if it is missing."""
        with suppress(FileNotFoundError):  # another process was faster
            directory, name = self.at(location)
            retry_while_busy(partial(os.unlink, name, dir_fd=directory))

    def contents_at(self, locations: Mapping[str, Location]) -> Contents:
        """Return the contents at some locations, under the paths that they map from."""
        together: dict[tuple[Root, str], dict[str, str]] = {}
        for member, (root, path) in locations.items():
            above, name = os.path.split(path)
            together.setdefault((root, above), {})[name] = member
        found: list[Contents] = []
        for (root, above), members in together.items():
            directory = self.at(Location(root, os.path.join(above, os.curdir)))[0]
            here = contents(directory, members)
            require_unmounted(directory, members, here)
            found.append(here.renamed(members))
        return joined(found)

    def require_unchanged(self, number: int, locations: Mapping[str, Location]) -> None:
        """Require that a group is unmodified, at its members' locations."""
        group = self.listed.groups[number]
        try:
            if group.is_single:  # no look for mounts: a file that is a mount point can't be renamed
                (file,), (location,) = group.contents.files, locations.values()
                directory, name = self.at(location)
                is_same = file.is_of(os.stat(name, dir_fd=directory, follow_symlinks=False))
            else:
                here = self.contents_at(locations)
                texts, recorded = self.listed.rewritten_paths(number), group.contents
                has_same_files = _identities(here.files, texts) == _identities(recorded.files, texts)
                is_same = has_same_files and set(here.directories) == set(recorded.directories)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise StalePlan("all or part of it has vanished", since_plan=True) from error
        if not is_same:
            raise StalePlan("it has changed", since_plan=True)

    def is_same_file(self, one: Location, other: Location) -> bool:
        """Return whether two locations are names of one file."""
        first, second = self.status(one), self.status(other)
        return first is not None and second is not None and os.path.samestat(first, second)

    def has_moved(self, one: Move) -> bool:
        """Return whether a move is done, or for one that replaces a file, whether that has been set aside."""
        # In the stage and the trash only ckpttool makes names, so it is enough that the name exists. In the
        # directory, others may have saved under it since: it has to have an inode of the moved files.
        location = one.target if one.replaces is None else one.replaces.location
        status = self.status(location)
        if status is None or location.is_private:
            return status is not None
        if self.is_same_file(one.source, one.target):
            return True
        recorded = self.fingerprints_of(one)
        if not stat.S_ISDIR(status.st_mode):
            return any(file.inode == status.st_ino for file in recorded)
        here = self.contents_at({one.target.path: one.target})
        inodes = {file.inode for file in here.files}
        return any(file.inode in inodes for file in recorded) or not (recorded or here.files)

    def is_unmodified_at(self, one: Move, location: Location) -> bool:
        """Return whether the unmodified file or directory of a move is at a location."""
        status = self.status(location)
        if status is None or one.file is not None:
            return status is not None and one.file is not None and one.file.is_of(status)
        here = self.contents_at({self._member(one): location})
        texts = self.listed.rewritten_paths(one.group)
        return _identities(here.files, texts) == _identities(self.fingerprints_of(one), texts)

    def fingerprints_of(self, one: Move) -> list[Fingerprint]:
        """Return the fingerprints of the files that an operation moves."""
        return self.listed.files_at(one.group, self._member(one)) if one.file is None else [one.file]

    def _member(self, one: Move) -> str:
        """Return the original path of the member that an operation moves."""
        location = one.source
        for earlier in reversed(self.listed.moves_by_group[one.group]):
            if earlier.target == location:
                location = earlier.source
        return location.path

    def require_ready(self, number: int) -> None:
        """Require that a group is as planned, before its first operation.

        Raises:
            AlreadyGone: All of it is missing.
            StalePlan: It has changed.
            OSError: It has a mount point, or this user can't change it.
        """
        group = self.listed.groups[number]
        home = {member: Location(self.listed.original_root(number), member) for member in group.members}
        try:
            self.require_unchanged(number, home)
        except StalePlan as change:
            if not any(map(self.status, home.values())):
                raise AlreadyGone from change
            raise
        if self.listed.kind == "remove":
            require_removable(self.descriptors["directory"], group.contents)

    def require_free(self, number: int) -> None:
        """Require that the new names of a group are free, or are freed by earlier operations."""
        for one in self.listed.moves_by_group[number]:
            status = None if one.target.is_private else self.status(one.target)
            if one.replaces is not None:
                is_free = status is not None and one.replaces.file.is_of(status)
            else:
                is_free = status is None or (status.st_dev, status.st_ino) in self._moved_away
            if not is_free:
                raise NameTaken(one.target.path)

    @cached_property
    def _moved_away(self) -> set[tuple[int, int]]:
        """Device and inode of the files that are moved away before others get their names."""
        moves = (one for one in self.listed.operations if isinstance(one, Move) and one.target.is_private)
        found = (self.status(one.source) for one in moves if one.source.root == "directory")
        return {(status.st_dev, status.st_ino) for status in found if status is not None}

    def move(self, source: Location, target: Location) -> None:
        """Rename an entry without overwriting another; in the directory, a file keeps both names."""
        try:
            if target.root == "directory":
                self.link(source, target, is_strict=True)
                return
            if target.root == "trash" and self.status(target):  # names in the stage are always free
                raise NameTaken(target.path)
            (here, name), (there, other) = self.at(source), self.at(target)
            retry_while_busy(partial(rename, name, here, other, there))
        except FileExistsError as error:
            raise NameTaken(target.path) from error

    def link(self, source: Location, target: Location, *, is_strict: bool = False) -> bool:
        """Link an entry to a second name, or rename it if it can't have two; return whether it has both."""
        (here, name), (there, other) = self.at(source), self.at(target)
        return link_or_rename(
            name, here, other, there, lambda: status_of(other, there) is not None, is_strict=is_strict
        )

    def move_back(self, one: Move) -> None:
        """Move an entry back to its old name, without overwriting another."""
        if self.link(one.target, one.source):
            self.unlink(one.target)


@contextmanager
def open_roots(
    directory: str, listed: OperationList, state_dir: StateDir, stage: int | None = None
) -> Iterator[OpenRoots]:
    """Open the roots of a list of operations; the trash only if it exists.

    Args:
        directory: The directory.
        listed: The operations.
        state_dir: Location of the trash.
        stage: Descriptor of the stage; None if it isn't made yet.
    """
    with ExitStack() as stack:
        descriptors: dict[Root, int] = {"directory": stack.enter_context(opened(directory))}
        if stage is not None:
            descriptors["stage"] = stage
        if listed.identity is not None and listed.numbered_directories("trash"):
            with suppress(FileNotFoundError):
                descriptors["trash"] = stack.enter_context(open_place(state_dir, listed.identity)).fd
        yield stack.enter_context(OpenRoots(listed, descriptors))


def require_file(file: Fingerprint, name: str, directory: int) -> None:
    """Require that an entry of an open directory is an unmodified file."""
    status = status_of(name, directory)
    if status is None or not file.is_of(status):
        raise StalePlan("it has changed", since_plan=True)


def _identities(files: Iterable[Fingerprint], texts: Collection[str] = ()) -> set[tuple[str, int, int, int]]:
    """Return identities without device numbers, which change with a remount.

    Args:
        files: The files.
        texts: Paths of files that are rewritten. Only their paths count: their texts are compared elsewhere.
    """
    return {
        (file.path, 0, 0, 0) if file.path in texts else (file.path, file.inode, file.size, file.mtime_ns)
        for file in files
    }
