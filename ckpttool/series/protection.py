"""What pointers protect: every checkpoint that something leads to, and series whose pointer leads nowhere."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ckpttool.formats.discovery import OWN_PREFIX
from ckpttool.formats.tf_prefix import INDEX
from ckpttool.naming import is_named_best, parse_name
from ckpttool.series.entry import Entry, shown
from ckpttool.series.order import Group
from ckpttool.series.pointers import READERS, Names, Pointer, from_newest, names_in, noted_name, temporary_for

WRITING = "being written"

_NEVER_ENTERED = frozenset({".git"})
_STALE_SECONDS = 3600
"""No checkpoint takes an hour to write; what is older was probably left behind."""


@dataclass(slots=True)
class Pointed:
    """What pointers say: reasons by path of the checkpoint, and series to leave alone, by key.

    Attributes:
        reasons: Why checkpoints stay, by their paths.
        skipped: Why series are left alone, by their keys.
        holders: The file that a reason comes from, by the checkpoint's path and the reason.
    """

    reasons: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    skipped: dict[str, str] = field(default_factory=dict)
    holders: dict[tuple[str, str], str] = field(default_factory=dict)

    def protect(self, entry: Entry, reason: str, holder: str | None = None) -> None:
        """Add a reason to those for which a checkpoint stays."""
        if reason not in self.reasons[entry.path]:
            self.reasons[entry.path].append(reason)
            if holder is not None:
                self.holders[entry.path, reason] = shown(holder)


class Index:
    """Finds the checkpoint that a path belongs to: real paths, and base names for runs that were moved."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        real = {directory: os.path.realpath(directory) for directory in {one.directory for one in entries}}
        self._nearby: dict[tuple[str, str], bool] = {}
        self.by_place: dict[str, Entry] = {}
        self.by_name: dict[tuple[str, str], Entry] = {}
        self.by_base: dict[str, list[Entry]] = defaultdict(list)
        for entry in entries:
            for name in {entry.name, *entry.unit.members}:
                self.by_place[os.path.join(real[entry.directory], name)] = entry
                self.by_name[entry.directory, name] = entry
                self.by_base[name].append(entry)

    def at(self, path: str) -> Entry | None:
        """Return the checkpoint at a path, or around it."""
        place = os.path.realpath(path)
        while place not in self.by_place:
            above = os.path.dirname(place)
            if above == place:
                return None
            place = above
        return self.by_place[place]

    def is_nearby(self, directory: str, name: str) -> bool:
        """Tell whether a name lies where a run that was moved as a whole may have it: in a sibling."""
        above = os.path.normpath(os.path.join(directory, os.pardir))
        if (above, name) not in self._nearby:
            inside = [one.path for one in names_in(above).values() if one.is_dir(follow_symlinks=False)]
            places = [above, *inside]
            self._nearby[above, name] = any(_exists(os.path.join(place, name)) for place in places)
        return self._nearby[above, name]

    def named(self, name: str, directory: str) -> list[Entry]:
        """Return the checkpoints of a name: those in a directory, or else anywhere."""
        if (directory, name) in self.by_name:
            return [self.by_name[directory, name]]
        return list(self.by_base.get(name, ()))


class Series:
    """Finds the series that a name can mean."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.by_directory: dict[str, dict[str, Group]] = defaultdict(dict)
        self.by_blank: dict[tuple[str, str], dict[str, Group]] = defaultdict(dict)
        for one in groups:
            for entry in one.entries:
                self.by_directory[entry.directory][one.key] = one
                self.by_blank[entry.directory, entry.fields.blank][one.key] = one

    def meant(self, pointer: Pointer, directory: str) -> Collection[Group]:
        """Return the series that a pointer can mean: those of its target's name, or else all beside it."""
        beside = self.by_directory.get(directory, {}).values()
        if pointer.target is None:
            known = pointer.formats
            return [
                one for one in beside if known is None or any(entry.format in known for entry in one.entries)
            ]
        return self.called(directory, os.path.basename(pointer.target.rstrip("/\\"))) or beside

    def called(self, directory: str, name: str) -> Collection[Group]:
        """Return the series in a directory that a name would belong to."""
        return self.by_blank.get((directory, parse_name(name).blank), {}).values()


def follow(root: str, groups: Sequence[Group], faults: Mapping[str, str] | None = None) -> Pointed:
    """Return what all pointers in and around a directory say of the series in it.

    Args:
        root: The directory.
        groups: The series that lie in it.
        faults: What is wrong with checkpoints that seemed sound, by path: they speak for no series.
    """
    index = Index([entry for one in groups for entry in one.entries])
    pointed = Pointed()
    series = Series(groups)
    for directory in sorted({root, *series.by_directory}):
        names = names_in(directory)
        for pointer in (found for read in READERS for found in read(directory, names)):
            _apply(pointed, pointer, index, series.meant(pointer, directory))
        _notes(pointed, names, index, directory)
        _temporaries(pointed, names, index, directory)
    for one in groups:
        for pointer in from_newest(one, faults or {}):
            _apply(pointed, pointer, index, [one])
    _symlinks(pointed, root, index, series)
    for entry in (entry for one in groups for entry in one.entries):
        if is_named_best(entry.name):
            pointed.protect(entry, "named best")
    return pointed


def _apply(pointed: Pointed, pointer: Pointer, index: Index, meant: Collection[Group]) -> None:
    """Protect what a pointer names; where nobody can tell what that is, leave the series alone."""
    if pointer.target is None:
        for group in meant:
            pointed.skipped[group.key] = f"{shown(pointer.holder)}: {pointer.reason} can't be read"
        return
    if pointer.is_exact:
        _apply_exactly(pointed, pointer, pointer.target, index, meant)
        return
    name = os.path.basename(pointer.target.rstrip("/\\").replace("\\", "/"))
    places = [os.path.join(pointer.directory, pointer.target), pointer.target]
    found = index.named(name, pointer.directory)
    found += [entry for place in places if _exists(place) and (entry := index.at(place)) is not None]
    for one in found:
        pointed.protect(one, pointer.reason, pointer.holder)
    if not found and not any(map(_exists, places)) and not index.is_nearby(pointer.directory, name):
        for group in meant:
            lost = f"{pointer.reason} is {pointer.target}, which isn't there"
            pointed.skipped[group.key] = f"{shown(pointer.holder)}: {lost}"


def _apply_exactly(
    pointed: Pointed, pointer: Pointer, target: str, index: Index, meant: Collection[Group]
) -> None:
    place = os.path.join(pointer.directory, target)
    try:
        found = index.by_place.get(os.path.realpath(place)) or (index.at(place) if _exists(place) else None)
    except ValueError:  # a NUL in it
        found = None
    if found is not None:
        pointed.protect(found, pointer.reason, pointer.holder)
    elif not _exists(place):
        for group in meant:
            lost = f"{pointer.reason} is {target}, which isn't there (ckpttool unpin takes that back)"
            pointed.skipped[group.key] = f"{shown(pointer.holder)}: {lost}"


def _exists(path: str) -> bool:
    try:
        return os.path.exists(path) or os.path.exists(f"{path}{INDEX}")
    except ValueError:  # a NUL in it
        return False


def _notes(pointed: Pointed, names: Names, index: Index, directory: str) -> None:
    """Protect what a small text, whatever it is called, consists of the name of: ``best.txt``."""
    for name, file in names.items():
        if (directory, name) not in index.by_name and (noted := noted_name(file)) is not None:
            entry = index.by_name.get((directory, noted))
            if entry is not None:
                pointed.protect(entry, name, file.path)


def _temporaries(pointed: Pointed, names: Names, index: Index, directory: str) -> None:
    """Protect what a writer is at work on: its temporary file lies beside, or is the checkpoint itself."""
    written = {name: final for name in names if (final := temporary_for(name)) is not None}
    if not written:
        return
    stems = defaultdict(list)
    for name in names:
        stems[os.path.splitext(name)[0]].append(name)
    for name, final in written.items():
        for known in (name, final, *stems[final]):
            entry = index.by_name.get((directory, known))
            if entry is not None:
                pointed.protect(entry, _being_written(names[name]))


def _being_written(temporary: os.DirEntry[str]) -> str:
    """Return the reason, with the age of what a writer that was killed may have left behind."""
    try:
        seconds = time.time() - temporary.stat(follow_symlinks=False).st_mtime
    except OSError:  # it has just gone
        seconds = 0
    if seconds < _STALE_SECONDS:
        return WRITING
    hours = int(seconds // 3600)
    age = f"{hours // 24} d" if hours >= 48 else f"{hours} h"
    return f"{WRITING} ({temporary.name}, {age} old)"


def _symlinks(pointed: Pointed, root: str, index: Index, series: Series) -> None:
    """Protect what symlinks in the tree, or beside it, lead to; one that leads nowhere may have meant us."""
    above = os.path.join(root, os.pardir)
    beside = [entry.path for entry in names_in(above).values() if entry.is_symlink()]
    for link in [*beside, *_links_below(root)]:
        entry = index.at(link)
        reason = f"symlink {os.path.basename(link)}"
        if entry is not None and not _lies_in(link, entry):
            pointed.protect(entry, reason, link)
        elif entry is None and not _exists(link):
            _dangling(pointed, link, index, series)


def _dangling(pointed: Pointed, link: str, index: Index, series: Series) -> None:
    try:
        target = os.readlink(link)
    except OSError:  # it has just gone
        return
    name = os.path.basename(target)
    directory = os.path.dirname(link)
    if (directory, name) in index.by_name:
        pointed.protect(index.by_name[directory, name], f"symlink {os.path.basename(link)}", link)
        return
    for one in series.called(directory, name):
        pointed.skipped[one.key] = f"{shown(link)}: leads to {target}, which isn't there"


def _links_below(directory: str) -> Iterator[str]:
    """Yield the symlinks in a tree; none is followed, and what can't be read is passed over."""
    for name, entry in sorted(names_in(directory).items()):
        if entry.is_symlink():
            yield entry.path
        elif entry.is_dir(follow_symlinks=False) and not _is_ours(name):
            yield from _links_below(entry.path)


def _is_ours(name: str) -> bool:
    return name.startswith(OWN_PREFIX) or name in _NEVER_ENTERED


def _lies_in(link: str, entry: Entry) -> bool:
    """Tell whether a symlink is itself a part of the checkpoint that it leads to."""
    place = os.path.realpath(os.path.dirname(link))
    inside = [os.path.realpath(os.path.join(entry.directory, name)) for name in entry.unit.members]
    return any(place == path or place.startswith(path + os.sep) for path in inside)
