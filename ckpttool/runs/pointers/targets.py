"""Which checkpoint a pointer means now: in its own run, renamed since, or moved elsewhere with its run."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ckpttool.core.errors import AccessDenied, CheckpointError
from ckpttool.formats.tensorflow.prefix import INDEX
from ckpttool.runs.members.entry import Entry
from ckpttool.storage import fs
from ckpttool.storage.snapshot import Snapshot
from ckpttool.transaction.history import identities, read_record
from ckpttool.transaction.journal import OperationList
from ckpttool.transaction.paths import shown
from ckpttool.transaction.state_dir import state_dirs

_MOST_LEVELS = 4
"""How deep a file may lie in a checkpoint that is a directory: ``iter_0000100/mp_rank_00/…``."""


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
        """Tell whether other checkpoints lie inside one that is a directory."""
        return self.by_name[os.path.dirname(path), os.path.basename(path)].holds_others


def targets_in_run(target: str, directories: Sequence[str], index: CheckpointIndex) -> list[Entry]:
    """Return the checkpoints of a pointer's target's name in the directories of its own run.

    The target may be a file in one that is a directory.
    """
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
    """Return the checkpoints that were called as a pointer's target is, before ``rename`` renamed them.

    One that was changed since, or another one that has its name now, is none of them.
    """
    renamed: dict[str, Entry] = {}
    for directory in directories:
        names = {os.path.basename(target.rstrip("/\\").replace("\\", "/"))}
        for undoing, number in _renamings(directory):
            group = undoing.groups[number]
            new = {now for now, old in undoing.names(number) if old in names}
            if os.path.basename(group.path) in names:
                new |= {now for now, _ in undoing.names(number)}
            names |= new
            moved = {(file.size, file.mtime_ns) for file in group.contents.files}  # copies have other inodes
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
    """Return the checkpoints that a pointer's target may be now, where its own run has none of its name.

    Another run's checkpoint of the same name is none of them: what lies elsewhere has to have more of the
    path's last names in common with it than the run's own directory has. A bare name is below it.
    """
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


def lies_nearby(target: str, directories: Sequence[str], snapshot: Snapshot) -> bool:
    """Tell whether what a pointer means lies where nobody looked, as in the rest of a run that was moved."""
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


def was_here(target: str, directories: Sequence[str], snapshot: Snapshot) -> bool:
    """Tell whether a path names something in its own run, as far as anybody can tell of a relative one."""
    real = list(map(snapshot.realpath, directories))
    above = os.path.dirname(target.rstrip("/"))
    if snapshot.realpath(above) in real:
        return True
    parts = path_parts(above)
    if not parts or os.path.isabs(target):
        return False
    return any(_common_tail(parts, directory) == len(parts) for directory in real)


def path_parts(path: str) -> list[str]:
    """Return the names in a path, whoever's slashes it has."""
    return [part for part in _SLASHES.split(path) if part not in ("", os.curdir)]


def _common_tail_of_run(parts: Sequence[str], directories: Sequence[str], snapshot: Snapshot) -> int:
    """Return how many of a path's last names are those of a place in its own run."""
    return max(_common_tail(parts, os.path.join(snapshot.realpath(one), parts[-1])) for one in directories)


def _common_tail(parts: Sequence[str], path: str) -> int:
    """Return how many of the last names of two paths are the same."""
    pairs = enumerate(zip(reversed(parts), reversed(path.split(os.sep)), strict=False))
    return next((count for count, (one, other) in pairs if one != other), min(len(parts), path.count(os.sep)))


def paths_of(target: str, directory: str) -> list[str]:
    """Return the paths that a target in a directory may mean: those where the directory itself lies.

    Whoever writes a pointer must not make us ask another store, and files of this machine say nothing of one.
    """
    paths = [os.path.join(directory, target), target]
    return [path for path in paths if fs.root_of(path) == fs.root_of(directory)]


def exists(path: str, snapshot: Snapshot) -> bool:
    """Tell whether something lies at a path, or a TensorFlow checkpoint at a prefix."""
    try:
        return snapshot.exists(path) or snapshot.exists(f"{path}{INDEX}")
    except AccessDenied as error:
        # The place that a run was moved from may be closed to us; what is ours lies elsewhere then.
        if not isinstance(error.__cause__, PermissionError):
            raise
        return False


@dataclass(slots=True)
class PointerProtections:
    """What pointers say: reasons by path of the checkpoint, and series to leave alone, by key.

    Attributes:
        reasons: Why checkpoints stay, by their paths.
        skipped: Why series are left alone, by their keys.
        holders: The file that a reason comes from, by the checkpoint's path and the reason.
        warnings: What pointers name that is gone, where nobody has to wait for it.
        unread: Paths that can't be read, for which series are left alone, by their keys.
    """

    reasons: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    skipped: dict[str, str] = field(default_factory=dict)
    holders: dict[tuple[str, str], str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    unread: dict[str, str] = field(default_factory=dict)

    def protect(self, entry: Entry, reason: str, holder: str | None = None) -> None:
        """Add a reason to those for which a checkpoint stays."""
        self._add(entry.path, reason, None if holder is None else shown(holder))

    def update(self, other: PointerProtections) -> None:
        """Add what other pointers say."""
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
