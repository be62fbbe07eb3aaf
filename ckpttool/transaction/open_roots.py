"""The open directories that operations work in, and what lies at their paths."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property, partial
from types import TracebackType

from ckpttool.io.directories import link_or_rename, rename, retry_while_busy
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
from ckpttool.transaction.journal import (
    Exchange,
    Location,
    Move,
    OperationList,
    Root,
)
from ckpttool.transaction.mounts import require_unmounted
from ckpttool.transaction.state_dir import StateDir
from ckpttool.transaction.unlinking import require_removable

_MOST_HELD = 64
"""Directories that are kept open beside the roots; of those in use at once there are fewer."""


class AlreadyGone(StalePlan):
    """Another process has removed it already."""

    def __init__(self) -> None:
        super().__init__("it has vanished, or a part of it,", since_plan=True)


class OpenRoots:
    """The directory, the stage and the trash of a list of operations, held open; used as a context.

    Attributes:
        listed: The operations.
        descriptors: Of the open directories.
    """

    def __init__(self, listed: OperationList, descriptors: Mapping[Root, int]) -> None:
        """Take open directories, which whoever opened them closes."""
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
        """Return the open directory that a path lies in, with the name there."""
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
            # The one that was used last is closed last. Threads that purge all use the same one.
            self._held[key] = self._held.pop(key)
        return self._held[key], name

    def status(self, location: Location) -> os.stat_result | None:
        """Return the status of a path, or None where there is none."""
        try:
            directory, name = self.at(location)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return status_of(name, directory)

    def unlink(self, location: Location) -> None:
        """Unlink a file, unless it has gone."""
        with suppress(FileNotFoundError):  # another process was faster
            directory, name = self.at(location)
            retry_while_busy(partial(os.unlink, name, dir_fd=directory))

    def contents_at(self, locations: Mapping[str, Location]) -> Contents:
        """Return what lies at some locations, with the paths that they stand for."""
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
        """Require that a group is as it was, at its members' locations."""
        group = self.listed.groups[number]
        try:
            if group.is_single:  # a mount point among single files is nothing that could be renamed
                (file,), (location,) = group.contents.files, locations.values()
                directory, name = self.at(location)
                is_same = file.is_of(os.stat(name, dir_fd=directory, follow_symlinks=False))
            else:
                here = self.contents_at(locations)
                is_same = is_unchanged(here, group.contents, self.listed.rewritten(number))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise StalePlan("it has vanished, or a part of it,", since_plan=True) from error
        if not is_same:
            raise StalePlan("it has changed", since_plan=True)

    def has_moved(self, one: Move) -> bool:
        """Tell whether what has the new name is what was moved; in our own places it always is."""
        status = self.status(one.target)
        if status is None or one.target.is_private:
            return status is not None
        if (other := self.status(one.source)) and os.path.samestat(status, other):
            return True
        noted = self.noted(one)
        if not stat.S_ISDIR(status.st_mode):
            return any(file.inode == status.st_ino for file in noted)
        here = self.contents_at({one.target.path: one.target})
        inodes = {file.inode for file in here.files}
        return any(file.inode in inodes for file in noted) or not (noted or here.files)

    def require_ready(self, number: int) -> None:
        """Require a group as it was when the plan was made, before anything is done with it.

        Raises:
            AlreadyGone: Nothing of it is there.
            StalePlan: It has changed.
            OSError: It holds a mount point, or this user can't change it.
        """
        group = self.listed.groups[number]
        home = {member: Location(self.listed.home(number), member) for member in group.members}
        try:
            self.require_unchanged(number, home)
        except StalePlan as change:
            if not any(map(self.status, home.values())):
                raise AlreadyGone from change
            raise
        if self.listed.kind == "remove":
            require_removable(self.descriptors["directory"], group.contents)

    def require_free(self, number: int) -> None:
        """Require that nothing has the names that a group is to get, but what leaves them first."""
        for one in self.listed.of_groups[number]:
            if isinstance(one, Exchange):
                status = self.status(Location("directory", one.path))
                is_free = status is None if one.old is None else status and one.old.file.is_of(status)
            else:
                status = None if one.target.is_private else self.status(one.target)
                is_free = status is None or (status.st_dev, status.st_ino) in self._leaving
            if not is_free:
                raise NameTaken(one.path if isinstance(one, Exchange) else one.target.path)

    @cached_property
    def _leaving(self) -> set[tuple[int, int]]:
        """Return the files that lose their names before others get them."""
        moves = (one for one in self.listed.operations if isinstance(one, Move) and one.target.is_private)
        found = (self.status(one.source) for one in moves if one.source.root == "directory")
        return {(status.st_dev, status.st_ino) for status in found if status is not None}

    def move(self, source: Location, target: Location) -> None:
        """Give an entry another name, never overwriting another; in the directory it keeps the old one."""
        (here, name), (there, other) = self.at(source), self.at(target)

        def is_taken() -> bool:
            return status_of(other, there) is not None

        if target.root != "directory":
            if target.root == "trash" and is_taken():  # in the stage nobody else puts anything
                raise NameTaken(other)
            retry_while_busy(partial(rename, name, here, other, there))
            return
        try:
            link_or_rename(name, here, other, there, is_taken, is_strict=True)
        except FileExistsError as error:
            raise NameTaken(other) from error

    def move_back(self, source: Location, target: Location) -> None:
        """Give an entry its old name again, never overwriting another, and take the new one away."""
        (there, name), (here, other) = self.at(target), self.at(source)
        if link_or_rename(name, there, other, here, lambda: status_of(other, here) is not None):
            retry_while_busy(partial(os.unlink, name, dir_fd=there))

    def link_back(self, source: Location, target: Location) -> None:
        """Give a file its old name again, beside the new one."""
        (there, name), (here, other) = self.at(target), self.at(source)
        link_or_rename(name, there, other, here, lambda: status_of(other, here) is not None)

    def member(self, one: Move) -> str:
        """Return the first path of the member that an operation moves."""
        location = one.source
        for earlier in reversed(self.listed.of_groups[one.group]):
            if isinstance(earlier, Move) and earlier.target == location:
                location = earlier.source
        return location.path

    def noted(self, one: Move) -> list[Fingerprint]:
        """Return the files of the member that an operation moves."""
        return self.listed.files_at(one.group, self.member(one))


@contextmanager
def open_roots(
    directory: str, listed: OperationList, state_dir: StateDir, stage: int | None = None
) -> Iterator[OpenRoots]:
    """Open the directories that operations work in; the trash only if it is there.

    Args:
        directory: The directory.
        listed: The operations.
        state_dir: Where the trash lies.
        stage: Descriptor of the stage, if there is one yet.
    """
    with ExitStack() as stack:
        descriptors: dict[Root, int] = {"directory": stack.enter_context(opened(directory))}
        if stage is not None:
            descriptors["stage"] = stage
        if listed.identity is not None and listed.numbered("trash"):
            with suppress(FileNotFoundError):
                descriptors["trash"] = stack.enter_context(open_place(state_dir, listed.identity))
        yield stack.enter_context(OpenRoots(listed, descriptors))


def require_file(file: Fingerprint, name: str, directory: int, otherwise: str) -> None:
    """Require that a name in an open directory is that of a file as it was noted."""
    status = status_of(name, directory)
    if status is None or not file.is_of(status):
        raise StalePlan(otherwise, since_plan=True)


def identities(files: Iterable[Fingerprint], texts: Collection[str] = ()) -> set[tuple[str, int, int, int]]:
    """Return identities that survive a remount, without device numbers; of texts only the paths."""
    return {
        (file.path, 0, 0, 0) if file.path in texts else (file.path, file.inode, file.size, file.mtime_ns)
        for file in files
    }


def is_unchanged(here: Contents, noted: Contents, texts: Collection[str] = ()) -> bool:
    """Tell whether files are those that were noted, and lie in the same directories.

    Args:
        here: What is there.
        noted: What was noted.
        texts: Paths of files that are rewritten, and compared by their texts then.
    """
    is_same = identities(here.files, texts) == identities(noted.files, texts)
    return is_same and set(here.directories) == set(noted.directories)
