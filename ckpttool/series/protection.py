"""What pointers protect: every checkpoint that something leads to, and series whose pointer leads nowhere."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ckpttool.formats.discovery import OWN_PREFIX
from ckpttool.formats.tf_prefix import INDEX
from ckpttool.naming import is_named_best, parse_name
from ckpttool.series.entry import Entry, shown
from ckpttool.series.order import Group
from ckpttool.series.pointers import READERS, Names, Pointer, from_newest, names_in, noted_name, temporary_for

_NEVER_ENTERED = frozenset({".git"})
_STALE_SECONDS = 3600
"""No checkpoint takes an hour to write; what is older was probably left behind."""


@dataclass(slots=True)
class Pointed:
    """What pointers say: reasons by path of the checkpoint, and series to leave alone, by key."""

    reasons: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    skipped: dict[str, str] = field(default_factory=dict)

    def protect(self, entry: Entry, reason: str) -> None:
        """Add a reason to those for which a checkpoint stays."""
        if reason not in self.reasons[entry.path]:
            self.reasons[entry.path].append(reason)


class Index:
    """Finds the checkpoint that a path belongs to: real paths, and base names for runs that were moved."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        real = {directory: os.path.realpath(directory) for directory in {one.directory for one in entries}}
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

    def named(self, name: str, directory: str) -> list[Entry]:
        """Return the checkpoints of a name: those in a directory, or else anywhere."""
        if (directory, name) in self.by_name:
            return [self.by_name[directory, name]]
        return list(self.by_base.get(name, ()))


def follow(root: str, groups: Sequence[Group], faults: Mapping[str, str] | None = None) -> Pointed:
    """Return what all pointers in and around a directory say of the series in it.

    Args:
        root: The directory.
        groups: The series that lie in it.
        faults: What is wrong with checkpoints that seemed sound, by path: they speak for no series.
    """
    index = Index([entry for one in groups for entry in one.entries])
    pointed = Pointed()
    keys = defaultdict(list)
    for one in groups:
        keys[one.entries[0].directory].append(one)
    for directory in sorted({root, *keys}):
        names = names_in(directory)
        for pointer in (found for read in READERS for found in read(directory, names)):
            _apply(pointed, pointer, index, _meant(pointer, keys.get(directory, [])))
        _notes(pointed, names, index, directory)
        _temporaries(pointed, names, index, directory)
    for one in groups:
        for pointer in from_newest(one, faults or {}):
            _apply(pointed, pointer, index, [one])
    _symlinks(pointed, root, index, groups)
    for entry in (entry for one in groups for entry in one.entries):
        if is_named_best(entry.name):
            pointed.protect(entry, "named best")
    return pointed


def _meant(pointer: Pointer, groups: Sequence[Group]) -> Sequence[Group]:
    """Return the series that a pointer can mean: those of its target's name, or else all beside it."""
    if pointer.target is None:
        known = pointer.formats
        return [one for one in groups if known is None or any(entry.format in known for entry in one.entries)]
    blank = parse_name(os.path.basename(pointer.target.rstrip("/\\"))).blank
    return [one for one in groups if one.entries[0].fields.blank == blank] or groups


def _apply(pointed: Pointed, pointer: Pointer, index: Index, meant: Sequence[Group]) -> None:
    """Protect what a pointer names; where nobody can tell what that is, leave the series alone."""
    if pointer.target is None:
        for group in meant:
            pointed.skipped[group.key] = f"{shown(pointer.holder)}: {pointer.reason} can't be read"
        return
    name = os.path.basename(pointer.target.rstrip("/\\").replace("\\", "/"))
    places = [os.path.join(pointer.directory, pointer.target), pointer.target]
    found = index.named(name, pointer.directory)
    found += [entry for place in places if _exists(place) and (entry := index.at(place)) is not None]
    for one in found:
        pointed.protect(one, pointer.reason)
    if not found and not any(map(_exists, [*places, *_nearby(pointer.directory, name)])):
        for group in meant:
            lost = f"{pointer.reason} is {pointer.target}, which isn't there"
            pointed.skipped[group.key] = f"{shown(pointer.holder)}: {lost}"


def _exists(path: str) -> bool:
    try:
        return os.path.exists(path) or os.path.exists(f"{path}{INDEX}")
    except ValueError:  # a NUL in it
        return False


def _nearby(directory: str, name: str) -> Iterator[str]:
    """Yield where else a run that was moved as a whole may have it: beside its directory, or in a sibling."""
    above = os.path.join(directory, os.pardir)
    yield os.path.join(above, name)
    for entry in names_in(above).values():
        if entry.is_dir(follow_symlinks=False):
            yield os.path.join(entry.path, name)


def _notes(pointed: Pointed, names: Names, index: Index, directory: str) -> None:
    """Protect what a small text, whatever it is called, consists of the name of: ``best.txt``."""
    for name, file in names.items():
        if (directory, name) not in index.by_name and (noted := noted_name(file)) is not None:
            entry = index.by_name.get((directory, noted))
            if entry is not None:
                pointed.protect(entry, name)


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
        return "being written"
    hours = int(seconds // 3600)
    age = f"{hours // 24} d" if hours >= 48 else f"{hours} h"
    return f"being written ({temporary.name}, {age} old)"


def _symlinks(pointed: Pointed, root: str, index: Index, groups: Sequence[Group]) -> None:
    """Protect what symlinks in the tree, or beside it, lead to; one that leads nowhere may have meant us."""
    above = os.path.join(root, os.pardir)
    beside = [entry.path for entry in names_in(above).values() if entry.is_symlink()]
    for link in [*beside, *_links_below(root)]:
        entry = index.at(link)
        reason = f"symlink {os.path.basename(link)}"
        if entry is not None and not _lies_in(link, entry):
            pointed.protect(entry, reason)
        elif entry is None and not _exists(link):
            _dangling(pointed, link, index, groups)


def _dangling(pointed: Pointed, link: str, index: Index, groups: Sequence[Group]) -> None:
    try:
        target = os.readlink(link)
    except OSError:  # it has just gone
        return
    name = os.path.basename(target)
    directory = os.path.dirname(link)
    if (directory, name) in index.by_name:
        pointed.protect(index.by_name[directory, name], f"symlink {os.path.basename(link)}")
        return
    for one in groups:
        first = one.entries[0]
        if first.directory == directory and first.fields.blank == parse_name(name).blank:
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
