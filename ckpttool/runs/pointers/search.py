"""Search of pointers: the directories, and the checkpoints and series that names can refer to."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from shlex import quote
from typing import ClassVar

from ckpttool.core.errors import CheckpointError, NotFound
from ckpttool.core.naming import parse_name
from ckpttool.formats.globs import Globs
from ckpttool.formats.pointer_kind import PointerKind
from ckpttool.runs.members.entry import Entry
from ckpttool.runs.members.order import Group
from ckpttool.runs.pointers.readers import OnError, Pointer
from ckpttool.runs.pointers.targets import (
    CheckpointIndex,
    PointerProtections,
    exists,
    lies_nearby,
    paths_of,
    renamed_targets,
    targets_elsewhere,
    targets_in_run,
    was_here,
)
from ckpttool.storage import fs
from ckpttool.storage.snapshot import Snapshot
from ckpttool.transaction.paths import is_within, shown


class SearchedKind(PointerKind, ABC):
    """Kind of pointer with a search of its own.

    Attributes:
        depends_on_faults: Whether a faulty checkpoint has no such pointer.
    """

    depends_on_faults: ClassVar[bool] = False

    @abstractmethod
    def find(self, search: Search, found: PointerProtections) -> None:
        """Add all that pointers of this kind protect; one that can't be read may name anything.

        Raises:
            CheckpointError: Something can't be read: all series are left alone.
        """


@dataclass(frozen=True, slots=True)
class Search:
    """Directory in which pointers are looked for, and the checkpoints that they may name.

    Attributes:
        root: The directory.
        groups: The series in it.
        index: Finds their checkpoints.
        series: Finds the series that a name can mean.
        reach: Finds the series in a directory, and below it.
        ignored: Unreadable files that name none of them.
        recursive: Whether notes are looked for in all directories below, too.
        asks_trackers: Whether trackers are asked.
        is_note: Returns whether a file of some name may be a note.
        faults: Paths of checkpoints that turned out faulty.
        errors: Failures of the survey; what couldn't be read may be a newest checkpoint.
    """

    root: str
    groups: Sequence[Group]
    index: CheckpointIndex
    series: SeriesIndex
    reach: Reach
    ignored: Globs
    recursive: bool
    asks_trackers: bool
    is_note: Callable[[str], bool]
    faults: Collection[str] = ()
    errors: Collection[CheckpointError] = ()

    @property
    def entries(self) -> list[Entry]:
        """Return the checkpoints of all series."""
        return [entry for group in self.groups for entry in group.entries]

    @property
    def snapshot(self) -> Snapshot:
        """Return the snapshot that everything is looked up in."""
        return self.index.snapshot

    @property
    def above(self) -> str:
        """Return the directory around."""
        return fs.dirname(self.snapshot.realpath(self.root))

    def unread(
        self, found: PointerProtections, groups: Callable[[], Iterable[Group]] | None = None
    ) -> OnError:
        """Return the handler of unreadable pointers: it leaves alone some series, by default all."""

        def leave_alone(error: CheckpointError) -> None:
            if isinstance(error, NotFound) or self.ignored.of(error.path):  # it has just gone
                return
            hint = f"--exclude {quote(os.path.basename(error.path))} ignores it"
            why = f"{shown(error.path)}: {error.reason}; it may name any checkpoint ({hint})"
            for group in self.groups if groups is None else groups():
                found.leave_alone(group.key, why, error.path)

        return leave_alone


@contextmanager
def reporting(on_error: OnError) -> Iterator[None]:
    """Report an error of the block, and continue after it."""
    try:
        yield
    except CheckpointError as error:
        on_error(error)


def follow_pointer(
    found: PointerProtections, pointer: Pointer, index: CheckpointIndex, candidates: Collection[Group]
) -> None:
    """Protect the checkpoints that a pointer names; leave candidates alone if it is unread or dangling."""
    if pointer.target is None:
        for group in candidates:
            found.leave_alone(group.key, f"{shown(pointer.holder)}: {pointer.reason} can't be read")
        return
    snapshot = index.snapshot
    inside = [pointer.holder] if snapshot.isdir(pointer.holder) else []
    directories = [pointer.directory, *inside]
    paths = paths_of(pointer.target, pointer.directory)
    is_there = any(exists(path, snapshot) for path in paths)
    targets = targets_in_run(pointer.target, directories, index)
    targets = targets or renamed_targets(pointer.target, directories, index)
    if not targets and not is_there:
        targets = targets_elsewhere(pointer.target, directories, index)
    targets += [entry for path in paths if exists(path, snapshot) and (entry := index.find(path)) is not None]
    for entry in targets:
        found.protect(entry, pointer.reason, pointer.holder)
    if targets or is_there or lies_nearby(pointer.target, directories, snapshot):
        return
    dangling = f"{shown(pointer.holder)}: {pointer.reason} is {pointer.target}, which doesn't exist"
    dangling += pointer.kind.hint and f" ({pointer.kind.hint})"
    if pointer.kind.fallback and was_here(pointer.target, directories, snapshot):
        found.warnings.append(f"{dangling} any more; {pointer.kind.fallback}")
        return
    for group in candidates:
        found.leave_alone(group.key, dangling)


class SeriesIndex:
    """Finds the series that a name can mean."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.by_directory: dict[str, dict[str, Group]] = defaultdict(dict)
        self.by_blank: dict[tuple[str, str], dict[str, Group]] = defaultdict(dict)
        for group in groups:
            for entry in group.entries:
                self.by_directory[entry.directory][group.key] = group
                self.by_blank[entry.directory, entry.fields.blank][group.key] = group

    def candidates(self, pointer: Pointer, directory: str) -> Collection[Group]:
        """Return the series that a pointer can mean: those of its target's name, or else all beside it."""
        beside = self.by_directory.get(directory, {}).values()
        if pointer.target is not None:
            return self.by_name(directory, os.path.basename(pointer.target.rstrip("/\\"))) or beside
        formats = pointer.kind.formats
        return [
            group
            for group in beside
            if formats is None or any(entry.format in formats for entry in group.entries)
        ]

    def by_name(self, directory: str, name: str) -> Collection[Group]:
        """Return the series in a directory that a name would belong to."""
        groups = self.by_blank.get((directory, parse_name(name).blank))
        if groups is None:
            groups = {}
            for (parent, blank), candidates in self.by_blank.items():
                if parent == directory and fnmatchcase(name, blank):
                    groups |= candidates
        return groups.values()


class Reach:
    """Finds the series that a list, or an entry in it, can mean."""

    def __init__(self, groups: Sequence[Group], snapshot: Snapshot) -> None:
        self._groups, self._seen = groups, snapshot
        self.directories = {entry.directory for group in groups for entry in group.entries}
        self._real = {directory: snapshot.realpath(directory) for directory in self.directories}

    def below(self, directory: str) -> list[Group]:
        """Return the series in a directory, and below it."""
        real = self._seen.realpath(directory)
        return [
            group
            for group in self._groups
            if any(is_within(path, real) for path in self._real_directories(group))
        ]

    def beside(self, path: str) -> list[Group]:
        """Return the series around a path that its name would belong to, or all if there is none."""
        real = self._seen.realpath(os.path.dirname(path))
        beside = [group for group in self._groups if real in self._real_directories(group)]
        return _groups_of_name(beside, path) or beside

    def like(self, path: str, directory: str) -> list[Group]:
        """Return the series below a directory that a name would belong to, or all if there is none."""
        below = self.below(directory)
        return _groups_of_name(below, path) or below

    def _real_directories(self, group: Group) -> Collection[str]:
        return {self._real[entry.directory] for entry in group.entries}


def _groups_of_name(groups: Iterable[Group], path: str) -> list[Group]:
    blank = parse_name(os.path.basename(path)).blank
    return [group for group in groups if any(entry.fields.blank == blank for entry in group.entries)]
