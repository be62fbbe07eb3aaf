"""Reading of pointers, and the search of the checkpoint that a target means now.

A target is looked up in the pointer's own run first, then among renamed checkpoints, then in moved runs.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from shlex import quote
from typing import ClassVar, NamedTuple

from ckpttool.core.errors import AccessDenied, CheckpointError, NotFound, from_os_error
from ckpttool.core.naming import parse_name
from ckpttool.formats.discovery import OWN_PREFIX, Globs
from ckpttool.formats.pointer_kind import PointerKind, TextKind
from ckpttool.formats.tensorflow.prefix import INDEX
from ckpttool.runs.entry import Entry
from ckpttool.runs.series import Group
from ckpttool.storage import fs
from ckpttool.storage.fs import Names, Snapshot
from ckpttool.storage.source import NotRegular
from ckpttool.transaction.history import identities, read_record
from ckpttool.transaction.journal import OperationList
from ckpttool.transaction.paths import is_within, shown
from ckpttool.transaction.state_dir import state_dirs

# Names of files that are being written: the suffixes of many programs; the parts and the stage of a
# TensorFlow bundle (``ckpt-2.index.tempstate1234``, ``ckpt-2_temp``); and the stage of the Hugging Face
# Trainer (``tmp-checkpoint-10``). The final name is in all of them.
_TEMPORARY = re.compile(
    r"\.?(?P<name>.+?)\.(?:tmp|temp|part|partial|incomplete)(?:[-._][\w-]*)?", re.IGNORECASE
)
_TENSORFLOW = re.compile(r"(?P<name>.+)(?:\.tempstate[0-9]+|_temp(?:_[0-9a-f]{32})?)")
_STAGED = re.compile(r"tmp[-_](?P<name>.+)", re.IGNORECASE)


class Pointer(NamedTuple):
    """Pointer to a checkpoint.

    Attributes:
        kind: Its kind.
        reason: Reason to protect the target, in a word or two.
        holder: Path of the file that contains it.
        target: Path of the target, as written; None if it can't be read.
    """

    kind: PointerKind
    reason: str
    holder: str
    target: str | None

    @property
    def directory(self) -> str:
        """Return the directory that relative names belong to."""
        return os.path.dirname(self.holder) or os.curdir


OnError = Callable[[CheckpointError], object]
"""Called with the error of a file or directory that can't be read; it may name any checkpoint."""


def pointers_of(kind: TextKind, directory: str, names: Names, snapshot: Snapshot) -> Iterator[Pointer]:
    """Yield the pointers in files of a kind in a directory; ``names`` are all names there.

    Raises:
        CheckpointError: A file can't be read.
    """
    others = (name for name in sorted(names) if name not in kind.files and kind.matches(name))
    for name in (*kind.files, *others):
        path = os.path.join(directory, name)
        try:
            if name not in names or names[name].is_dir():
                continue
        except OSError as error:  # a circular symlink
            raise from_os_error(error, path) from error
        # ``surrogateescape`` as in ``os.fsdecode``: a name in the text equals that of a file, whatever bytes
        # are in it. A file of a certain kind that can't be parsed yields a pointer without a target.
        data = read_small(path, kind.limit, snapshot)
        targets = None
        with suppress(ValueError):
            if data is not None:
                targets = kind.targets(data.decode("utf-8", "surrogateescape"), names)
        if targets is not None:
            yield from (Pointer(kind, kind.reason(name), path, target) for target in targets)
        elif kind.is_certain:
            yield Pointer(kind, kind.reason(name), path, None)


def read_small(path: str, limit: int, snapshot: Snapshot) -> bytes | None:
    """Return the content of a small file; None if it is too large, not a regular file, or missing.

    Raises:
        CheckpointError: It can't be read: it may name any checkpoint.
    """
    try:
        data = snapshot.read(path, limit)
    except NotRegular:
        return None
    except OSError as error:
        if fs.is_absence(error):
            return None
        raise from_os_error(error, path) from error
    return data if len(data) <= limit else None


def raise_error(error: CheckpointError) -> None:
    """Raise an error, if nothing can be decided without the unreadable file."""
    raise error


def ignore_error(error: CheckpointError) -> None:
    """Ignore an error, if the unreadable file can't matter."""


def names_in(directory: str, snapshot: Snapshot, on_error: OnError = raise_error) -> Names:
    """Return the entries of a directory by name; none if it is missing, or its error is ignored."""
    try:
        return snapshot.names(directory)
    except OSError as error:
        if not fs.is_absence(error):
            on_error(from_os_error(error, directory))
        return {}


def temporary_for(name: str) -> str | None:
    """Return the final name of a writer's temporary file; None if the name isn't a temporary one."""
    match = _TEMPORARY.fullmatch(name) or _STAGED.fullmatch(name) or _TENSORFLOW.fullmatch(name)
    return match["name"] if match else None


def is_internal(name: str) -> bool:
    """Return whether a directory belongs to ckpttool or Git, and so holds no pointers of users."""
    return name.startswith(OWN_PREFIX) or name == ".git"


_MOST_LEVELS = 4
"""Depth of a file in a checkpoint's directory: ``iter_0000100/mp_rank_00/…``."""


_SLASHES = re.compile(r"[/\\]+")


class CheckpointIndex:
    """Finds the checkpoint that a path belongs to: real paths, and base names for runs that were moved."""

    def __init__(self, entries: Sequence[Entry], snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        directories = {entry.directory for entry in entries}
        real = {directory: snapshot.realpath(directory) for directory in directories}
        self.by_path: dict[str, Entry] = {}
        self.by_name: dict[tuple[str, str], Entry] = {}
        self.paths: dict[str, list[str]] = defaultdict(list)
        for entry in entries:
            for name in {entry.name, *entry.unit.members}:
                path = os.path.join(real[entry.directory], name)
                self.by_path[path] = entry
                self.by_name[entry.directory, name] = entry
                self.paths[name].append(path)

    def find(self, path: str) -> Entry | None:
        """Return the checkpoint at a path, or around it."""
        return self.enclosing(self.snapshot.realpath(path))

    def enclosing(self, path: str) -> Entry | None:
        """Return the checkpoint at a path in a directory without symlinks, or around it."""
        while path not in self.by_path:
            above = fs.dirname(path)
            if above == path:
                return None
            path = above
        return self.by_path[path]

    def holds_others(self, path: str) -> bool:
        """Return whether a checkpoint's directory contains other checkpoints."""
        return self.by_name[os.path.dirname(path), os.path.basename(path)].holds_others


def targets_in_run(target: str, directories: Sequence[str], index: CheckpointIndex) -> list[Entry]:
    """Return the checkpoints named like a pointer's target in the directories of its own run.

    The target may also be a file inside a checkpoint.
    """
    # Absolute paths and those of moved runs have other directories, so names are tried from the end of the
    # path: ``step_5/model.pt`` is found as ``model.pt``, then as ``step_5``, if ``model.pt`` exists in that.
    parts = path_parts(target)
    for level in range(min(len(parts), _MOST_LEVELS)):
        name, below = parts[-1 - level], parts[len(parts) - level :]
        named = [index.by_name.get((directory, name)) for directory in directories]
        entries = [
            entry
            for entry in named
            if entry is not None
            and (not below or index.snapshot.lexists(os.path.join(entry.unit.path, *below)))
        ]
        if entries:
            return entries
    return []


def renamed_targets(target: str, directories: Sequence[str], index: CheckpointIndex) -> list[Entry]:
    """Return the unchanged checkpoints that had the name of a pointer's target before a rename."""
    # Records of renames, the oldest first, are followed: a target may have been renamed several times, so new
    # names join the names that are looked for. A checkpoint of such a name is only taken if it has files of
    # the recorded sizes and times: another one may have been saved under the name since.
    renamed: dict[str, Entry] = {}
    for directory in directories:
        names = {os.path.basename(target.rstrip("/\\").replace("\\", "/"))}
        for undoing, number in _renamings(directory):
            group = undoing.groups[number]
            new = {now for now, old in undoing.old_and_new_paths(number) if old in names}
            if os.path.basename(group.path) in names:
                new |= {now for now, _ in undoing.old_and_new_paths(number)}
            names |= new
            moved = {(file.size, file.mtime_ns) for file in group.contents.files}  # a copy has other inodes
            for name in new:
                entry = index.by_name.get((directory, name))
                if entry is not None and moved <= {(f.size, f.mtime_ns) for f in entry.contents.files}:
                    renamed[entry.path] = entry
    return list(renamed.values())


def _renamings(directory: str) -> Iterator[tuple[OperationList, int]]:
    """Yield the recorded undo steps of renames in a directory, oldest first, with a group number."""
    if not fs.place_of(directory).can_rename:
        return
    try:
        known = {identity: home for home in state_dirs(directory) for identity in identities(home)}
        records = [read_record(directory, known[identity], identity) for identity in sorted(known)]
    except AccessDenied:
        raise
    except CheckpointError:
        return
    for record in records:
        if record is not None and record.kind == "rename":
            for step in record.steps:
                yield from ((step.undoing, number) for number in range(len(step.undoing.groups)))


def targets_elsewhere(target: str, directories: Sequence[str], index: CheckpointIndex) -> list[Entry]:
    """Return the checkpoints that a pointer's target may be now, if its own run has none of its name."""
    # The run may have been moved, so absolute paths in pointers are compared from the end. Another run's
    # checkpoint of the same name must not match (``run1/step_5`` and ``run2/step_5``): a path has to share
    # more of its last names with the target than the run's own directory does. A bare name has to be below
    # that directory.
    parts = path_parts(target)
    paths = index.paths.get(parts[-1], ()) if parts else ()
    if len(parts) == 1:
        below = os.path.join(index.snapshot.realpath(directories[0]), "")
        return [index.by_path[path] for path in paths if path.startswith(below)]
    common = {path: _common_tail(parts, path) for path in paths}
    most = max(common.values(), default=0)
    if not common or most <= _common_tail_of_run(parts, directories, index.snapshot):
        return []
    return [index.by_path[path] for path, count in common.items() if count == most]


def exists_outside_survey(target: str, directories: Sequence[str], snapshot: Snapshot) -> bool:
    """Return whether a target exists outside the survey, as in the rest of a moved run."""
    parts = path_parts(target)
    if not parts:
        return False
    if any(exists(os.path.join(directory, parts[-1]), snapshot) for directory in directories):
        return True
    count = _common_tail_of_run(parts, directories, snapshot) + 1
    if count > len(parts):
        return False
    above = snapshot.realpath(directories[0])
    for _ in range(count):
        above = fs.dirname(above)
        if exists(os.path.join(above, *parts[-count:]), snapshot):
            return True
    return False


def was_in_run(target: str, directories: Sequence[str], snapshot: Snapshot) -> bool:
    """Return whether a path is, or was, in the pointer's own run, as far as its names show."""
    real = list(map(snapshot.realpath, directories))
    above = os.path.dirname(target.rstrip("/"))
    if snapshot.realpath(above) in real:
        return True
    parts = path_parts(above)
    if not parts or os.path.isabs(target):
        return False
    return any(_common_tail(parts, directory) == len(parts) for directory in real)


def path_parts(path: str) -> list[str]:
    """Return the names in a path, with slashes of any system."""
    return [part for part in _SLASHES.split(path) if part not in ("", os.curdir)]


def _common_tail_of_run(parts: Sequence[str], directories: Sequence[str], snapshot: Snapshot) -> int:
    """Return the number of a path's last names that a path of the same name in its own run shares."""
    return max(_common_tail(parts, os.path.join(snapshot.realpath(one), parts[-1])) for one in directories)


def _common_tail(parts: Sequence[str], path: str) -> int:
    """Return the number of equal names at the end of two paths."""
    pairs = enumerate(zip(reversed(parts), reversed(path.split(os.sep)), strict=False))
    return next((count for count, (one, other) in pairs if one != other), min(len(parts), path.count(os.sep)))


def paths_of(target: str, directory: str) -> list[str]:
    """Return the possible paths of a target on the disk or in the store of its directory."""
    # A pointer must not cause requests to another store, and a path of a disk means nothing in a store.
    paths = [os.path.join(directory, target), target]
    return [path for path in paths if fs.root_of(path) == fs.root_of(directory)]


def exists(path: str, snapshot: Snapshot) -> bool:
    """Return whether a path exists, or a TensorFlow checkpoint with that prefix."""
    try:
        return snapshot.exists(path) or snapshot.exists(f"{path}{INDEX}")
    except AccessDenied as error:
        # A moved run's old path may not be readable by this user; its checkpoints are elsewhere then.
        if not isinstance(error.__cause__, PermissionError):
            raise
        return False


@dataclass(slots=True)
class PointerProtections:
    """Protections by pointers: reasons to keep checkpoints, and series to leave alone.

    Attributes:
        reasons: Reasons to keep checkpoints, by path.
        skipped: Why series are left alone, by their keys.
        holders: The file that a reason comes from, by the checkpoint's path and the reason.
        warnings: Missing targets that don't matter to the program that wrote the pointer.
        unread: Paths that can't be read, for which series are left alone, by their keys.
    """

    reasons: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    skipped: dict[str, str] = field(default_factory=dict)
    holders: dict[tuple[str, str], str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    unread: dict[str, str] = field(default_factory=dict)

    def protect(self, entry: Entry, reason: str, holder: str | None = None) -> None:
        """Add a reason to keep a checkpoint."""
        self._add(entry.path, reason, None if holder is None else shown(holder))

    def update(self, other: PointerProtections) -> None:
        """Add the protections by other pointers."""
        for path, reasons in other.reasons.items():
            for reason in reasons:
                self._add(path, reason, other.holders.get((path, reason)))
        for key, why in other.skipped.items():
            self.leave_alone(key, why, other.unread.get(key))
        self.warnings += other.warnings

    def leave_alone(self, key: str, why: str, unread: str | None = None) -> None:
        """Leave a series alone; of several reasons, the first counts."""
        if self.skipped.setdefault(key, why) is why and unread is not None:
            self.unread[key] = unread

    def _add(self, path: str, reason: str, holder: str | None) -> None:
        if reason not in self.reasons[path]:
            self.reasons[path].append(reason)
            if holder is not None:
                self.holders[path, reason] = holder


class SearchedKind(PointerKind, ABC):
    """Kind of pointer with a search of its own.

    Attributes:
        depends_on_faults: Whether a faulty checkpoint has no such pointer.
    """

    depends_on_faults: ClassVar[bool] = False

    @abstractmethod
    def find(self, search: Search, found: PointerProtections) -> None:
        """Add the protections by pointers of this kind; an unreadable pointer may name any checkpoint.

        Raises:
            CheckpointError: A pointer can't be read: all series are left alone.
        """


@dataclass(frozen=True, slots=True)
class Search:
    """Directory in which pointers are looked for, and the checkpoints that they may name.

    Attributes:
        root: The directory.
        groups: The series in it.
        index: Finds their checkpoints.
        series: Finds the series that a name or a directory can mean.
        ignored: Unreadable files that name none of them.
        recursive: Whether notes are looked for in all directories below, too.
        asks_trackers: Whether trackers are asked.
        is_note: Returns whether a file of some name may be a note.
        faults: Paths of checkpoints that turned out faulty.
        errors: Errors of the survey; an unreadable path may be a newest checkpoint.
    """

    root: str
    groups: Sequence[Group]
    index: CheckpointIndex
    series: SeriesIndex
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
        """Return the snapshot of the directories that pointers are looked up in."""
        return self.index.snapshot

    @property
    def above(self) -> str:
        """Return the parent directory."""
        return fs.dirname(self.snapshot.realpath(self.root))

    def error_handler(
        self, found: PointerProtections, groups: Callable[[], Iterable[Group]] | None = None
    ) -> OnError:
        """Return a handler of unreadable pointers that leaves alone some series, by default all."""

        def leave_alone(error: CheckpointError) -> None:
            if isinstance(error, NotFound) or self.ignored.matching(error.path):  # removed meanwhile
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
    # Lookups go from the certain to the doubtful, and stop at the first that finds something. A dangling
    # pointer may mean any checkpoint of the series that its name would belong to, so these are left alone;
    # except if the target was in this run and the program that wrote the pointer goes on without it.
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
    if targets or is_there or exists_outside_survey(pointer.target, directories, snapshot):
        return
    dangling = f"{shown(pointer.holder)}: {pointer.reason} is {pointer.target}, which doesn't exist"
    dangling += pointer.kind.hint and f" ({pointer.kind.hint})"
    if pointer.kind.fallback and was_in_run(pointer.target, directories, snapshot):
        found.warnings.append(f"{dangling} any more; {pointer.kind.fallback}")
        return
    for group in candidates:
        found.leave_alone(group.key, dangling)


class SeriesIndex:
    """Finds the series that a name can mean, in a directory or below it."""

    def __init__(self, groups: Sequence[Group], snapshot: Snapshot) -> None:
        self._groups, self._snapshot = groups, snapshot
        self.by_directory: dict[str, dict[str, Group]] = defaultdict(dict)
        self.by_blank: dict[tuple[str, str], dict[str, Group]] = defaultdict(dict)
        for group in groups:
            for entry in group.entries:
                self.by_directory[entry.directory][group.key] = group
                self.by_blank[entry.directory, entry.fields.blank][group.key] = group
        self._real = {directory: snapshot.realpath(directory) for directory in self.by_directory}

    def candidates(self, pointer: Pointer, directory: str) -> Collection[Group]:
        """Return the series that a pointer can mean: of its target's name, or else all in its directory."""
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

    def below(self, directory: str) -> list[Group]:
        """Return the series in a directory, and below it."""
        real = self._snapshot.realpath(directory)
        return [
            group
            for group in self._groups
            if any(is_within(path, real) for path in self._real_directories(group))
        ]

    def beside(self, path: str) -> list[Group]:
        """Return the series in a path's directory that its name would belong to, else all of them."""
        real = self._snapshot.realpath(os.path.dirname(path))
        beside = [group for group in self._groups if real in self._real_directories(group)]
        return _groups_of_name(beside, path) or beside

    def by_name_below(self, path: str, directory: str) -> list[Group]:
        """Return the series below a directory that a name would belong to, else all of them."""
        below = self.below(directory)
        return _groups_of_name(below, path) or below

    def _real_directories(self, group: Group) -> Collection[str]:
        return {self._real[entry.directory] for entry in group.entries}


def _groups_of_name(groups: Iterable[Group], path: str) -> list[Group]:
    blank = parse_name(os.path.basename(path)).blank
    return [group for group in groups if any(entry.fields.blank == blank for entry in group.entries)]
