"""Which checkpoints pointers protect, and which series stay whole because their pointer leads nowhere."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain
from shlex import quote
from typing import NamedTuple

from ckpttool.core.errors import AccessDenied, CheckpointError, NotFound, from_os_error
from ckpttool.core.naming import is_named_best, parse_name
from ckpttool.formats.discovery import OWN_PREFIX
from ckpttool.formats.globs import Globs
from ckpttool.formats.interface import SetFormat
from ckpttool.runs.members.entry import Entry
from ckpttool.runs.members.needs import all_places, named_above, places_on_the_way
from ckpttool.runs.members.order import Group
from ckpttool.runs.pointers.kinds import TRAINER_BEST
from ckpttool.runs.pointers.notes import Mentions, may_protect, protecting_text, read_note
from ckpttool.runs.pointers.pin_lists import Reach, follow_pins
from ckpttool.runs.pointers.readers import (
    BEST_INSIDE,
    Names,
    OnError,
    Pointer,
    from_newest,
    names_in,
    pointers_in,
    temporary_for,
)
from ckpttool.runs.pointers.registries import protect_registered
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
from ckpttool.runs.reasons import Code, Reason, code_of
from ckpttool.storage import fs
from ckpttool.transaction.paths import shown

NAMED_BEST = Reason(Code.NAMED_BEST)
BEING_WRITTEN = Reason(Code.BEING_WRITTEN)

_NEVER_ENTERED = frozenset({".git"})
_STALE_SECONDS = 3600
"""No checkpoint takes an hour to write; what is older was probably left behind."""


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
        formats = pointer.formats
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


@dataclass(frozen=True, slots=True)
class Search:
    """Where pointers are looked for, and what they may mean.

    Attributes:
        root: The directory.
        groups: The series in it.
        index: Finds their checkpoints.
        series: Finds the series that a name can mean.
        reach: Finds the series in a directory, and below it.
        ignored: What names none of them, if it can't be read.
        recursive: Whether notes are looked for in all directories below, too.
        asks_trackers: Whether trackers are asked.
        faults: Paths of checkpoints that turned out faulty.
        errors: What could not be looked at, which may be a newest checkpoint.
    """

    root: str
    groups: Sequence[Group]
    index: CheckpointIndex
    series: SeriesIndex
    reach: Reach
    ignored: Globs
    recursive: bool
    asks_trackers: bool
    faults: Collection[str] = ()
    errors: Collection[CheckpointError] = ()

    @property
    def entries(self) -> list[Entry]:
        """Return the checkpoints of all series."""
        return [entry for group in self.groups for entry in group.entries]

    @property
    def above(self) -> str:
        """Return the directory around."""
        return fs.dirname(fs.realpath(self.root))

    def unread(
        self, pointed: PointerProtections, groups: Callable[[], Iterable[Group]] | None = None
    ) -> OnError:
        """Return what leaves alone the series, by default all, that something can mean that can't be read."""

        def leave_alone(error: CheckpointError) -> None:
            if isinstance(error, NotFound) or self.ignored.of(error.path):  # it has just gone
                return
            hint = f"--exclude {quote(os.path.basename(error.path))} ignores it"
            why = f"{shown(error.path)}: {error.reason}, so nobody knows what it names ({hint})"
            for group in self.groups if groups is None else groups():
                pointed.leave_alone(group.key, why, error.path)

        return leave_alone


class Pointers:
    """All pointers in and around a directory, each followed once; ``SOURCES`` has their kinds.

    What can't be read may name anything: the series that it can mean are left alone. Only what the newest
    checkpoint of a series says of the best depends on what is known of the checkpoints: one that is damaged
    speaks for none.
    """

    def __init__(
        self,
        root: str,
        groups: Sequence[Group],
        *,
        recursive: bool = True,
        exclude: Sequence[str] = (),
        asks_trackers: bool = False,
        errors: Collection[CheckpointError] = (),
    ) -> None:
        """Follow them.

        Args:
            root: The directory.
            groups: The series in it.
            recursive: Whether notes are looked for in all directories below, too.
            exclude: Globs of what names none of them, if it can't be read.
            asks_trackers: Whether trackers are asked, which takes long: where something goes or is renamed.
            errors: What in the directory could not be looked at.
        """
        index = CheckpointIndex([entry for group in groups for entry in group.entries])
        ignored, series, reach = Globs(exclude, root), SeriesIndex(groups), Reach(groups)
        self._search = Search(
            root, groups, index, series, reach, ignored, recursive, asks_trackers, errors=errors
        )
        self._known = {one.what: _followed(one, self._search) for one in SOURCES if not one.is_of_newest}

    def protections(self, faults: Collection[str] = ()) -> PointerProtections:
        """Return what they say of the series, in which the checkpoints of some paths turned out faulty."""
        pointed = PointerProtections()
        search = replace(self._search, faults=faults)
        for source in SOURCES:
            pointed.update(self._known.get(source.what) or _followed(source, search))
        return pointed


def _followed(source: Source, search: Search) -> PointerProtections:
    pointed = PointerProtections()
    with _told(search.unread(pointed)):
        source.follow(search, pointed)
    return pointed


@contextmanager
def _told(on_error: OnError) -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        on_error(error)


def _follow_files(search: Search, pointed: PointerProtections) -> None:
    """Protect what the files of frameworks name, and what is being written, in the directories of series."""
    index, series = search.index, search.series
    for directory in sorted({search.root, *series.by_directory}):
        unread = search.unread(pointed, partial(search.reach.below, directory))
        names = names_in(directory, search.unread(pointed))
        for pointer in pointers_in(directory, names, unread):
            with _told(unread):
                _follow_pointer(pointed, pointer, index, series.candidates(pointer, directory))
        _protect_being_written(pointed, names, index, directory)


def _follow_newest(search: Search, pointed: PointerProtections) -> None:
    """Protect what the newest of each series calls the best; what can't be opened may be a newest."""
    for error in search.errors:
        if isinstance(error, AccessDenied):
            search.unread(pointed, partial(search.reach.below, os.path.dirname(error.path)))(error)
    for group in search.groups:
        candidates = [group] if len(group.entries) > 1 else []
        unread = search.unread(pointed, partial(list, candidates))
        for pointer in from_newest(group, search.faults, unread):
            with _told(unread):
                _follow_pointer(pointed, pointer, search.index, candidates)


def _follow_pins(search: Search, pointed: PointerProtections) -> None:
    follow_pins(pointed, search.root, search.groups, search.index)


def _follow_trackers(search: Search, pointed: PointerProtections) -> None:
    if search.asks_trackers:
        protect_registered(pointed, search.root, search.groups, search.index)


def _follow_names(search: Search, pointed: PointerProtections) -> None:
    for entry in search.entries:
        if is_named_best(entry.name):
            pointed.protect(entry, NAMED_BEST)


def _follow_pointer(
    pointed: PointerProtections, pointer: Pointer, index: CheckpointIndex, candidates: Collection[Group]
) -> None:
    """Protect what a pointer names; where nobody can tell what that is, leave the series alone."""
    if pointer.target is None:
        for group in candidates:
            pointed.leave_alone(group.key, f"{shown(pointer.holder)}: {pointer.reason} can't be read")
        return
    inside = [pointer.holder] if fs.isdir(pointer.holder) else []
    directories = [pointer.directory, *inside]
    paths = paths_of(pointer.target, pointer.directory)
    is_there = any(map(exists, paths))
    targets = targets_in_run(pointer.target, directories, index)
    targets = targets or renamed_targets(pointer.target, directories, index)
    if not targets and not is_there:
        targets = targets_elsewhere(pointer.target, directories, index)
    targets += [entry for path in paths if exists(path) and (entry := index.find(path)) is not None]
    for entry in targets:
        pointed.protect(entry, pointer.reason, pointer.holder)
    if targets or is_there or lies_nearby(pointer.target, directories):
        return
    dangling = f"{shown(pointer.holder)}: {pointer.reason} is {pointer.target}, which doesn't exist"
    if pointer.reason == BEST_INSIDE:
        dangling += " (a symlink of that name to the best says which it is)"
    if pointer.reason == TRAINER_BEST and was_here(pointer.target, directories):
        pointed.warnings.append(f"{dangling} any more; the Trainer goes on without it")
        return
    for group in candidates:
        pointed.leave_alone(group.key, dangling)


def _follow_notes(search: Search, pointed: PointerProtections) -> None:
    """Protect what small texts name, in and around a directory, whatever these are called: ``best.txt``."""
    index, unread = search.index, search.unread(pointed)
    mentions = Mentions(index)
    around = ((directory, names_in(directory, unread)) for directory in (search.above, search.root))
    below = directories_below(search.root, index, unread) if search.recursive else ()
    for directory, names in chain(around, below):
        for name, file in names.items():
            if (directory, name) in index.by_name or not may_protect(name):
                continue
            text = read_note(file, unread)
            with _told(unread):
                for entry in mentions.of(protecting_text(text), directory, name) if text else ():
                    pointed.protect(entry, Reason(Code.NAMED_IN, name), file.path)


def directories_below(
    directory: str, index: CheckpointIndex, on_error: OnError
) -> Iterator[tuple[str, Names]]:
    """Yield the directories below one in which notes may lie: not those that are checkpoints, or ours."""
    pending = [directory]
    while pending:
        parent = pending.pop()
        names = names_in(parent, on_error)
        if parent != directory and (os.path.dirname(parent), os.path.basename(parent)) not in index.by_name:
            yield parent, names
        below = []
        for name, entry in sorted(names.items()):
            is_open = (parent, name) not in index.by_name or index.holds_others(entry.path)
            if is_open and entry.is_dir(follow_symlinks=False) and not _is_ours(name):
                below.append(entry.path)
        pending += reversed(below)


def _protect_being_written(
    pointed: PointerProtections, names: Names, index: CheckpointIndex, directory: str
) -> None:
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
        return BEING_WRITTEN
    hours = int(seconds // 3600)
    age = f"{hours // 24} d" if hours >= 48 else f"{hours} h"
    return Reason(Code.BEING_WRITTEN, f"{BEING_WRITTEN} ({temporary.name}, {age} old)")


def _follow_symlinks(search: Search, pointed: PointerProtections) -> None:
    """Protect what symlinks in the tree, or beside it, lead to; one that leads nowhere may have meant us."""
    if not fs.place_of(search.root).has_links:
        return
    unread = search.unread(pointed)
    beside = [entry.path for entry in names_in(search.above, unread).values() if entry.is_symlink()]
    for link in [*beside, *links_below(search.root, unread)]:
        with _told(unread):
            _follow_symlink(pointed, link, search.index, search.series)


def _follow_symlink(
    pointed: PointerProtections, link: str, index: CheckpointIndex, series: SeriesIndex
) -> None:
    try:
        target = fs.readlink(link)
    except OSError as error:
        raise from_os_error(error, link) from error
    _, *places = places_on_the_way(link)
    entries = [entry for place in places if (entry := index.enclosing(place)) is not None]
    for entry in entries:
        if not _lies_in(link, entry):
            pointed.protect(entry, f"symlink {os.path.basename(link)}", link)
    if not entries and not exists(link):
        _follow_dangling(pointed, link, target, index, series)


def _follow_dangling(
    pointed: PointerProtections, link: str, target: str, index: CheckpointIndex, series: SeriesIndex
) -> None:
    name = os.path.basename(target)
    directory = os.path.dirname(link)
    if (directory, name) in index.by_name:
        pointed.protect(index.by_name[directory, name], f"symlink {os.path.basename(link)}", link)
        return
    for group in series.by_name(directory, name):
        pointed.leave_alone(group.key, f"{shown(link)}: leads to {target}, which doesn't exist")


def _lies_in(link: str, entry: Entry) -> bool:
    """Tell whether a symlink is itself a part of the checkpoint that it leads to."""
    directory = fs.realpath(os.path.dirname(link))
    members = [fs.realpath(os.path.join(entry.directory, name)) for name in entry.unit.members]
    return any(directory == path or directory.startswith(path + os.sep) for path in members)


def links_below(directory: str, on_error: OnError) -> Iterator[str]:
    """Yield the symlinks in a tree; none is followed."""
    pending = [directory]
    while pending:
        below = []
        for name, entry in sorted(names_in(pending.pop(), on_error).items()):
            if entry.is_symlink():
                yield entry.path
            elif entry.is_dir(follow_symlinks=False) and not _is_ours(name):
                below.append(entry.path)
        pending += reversed(below)


def _follow_needs(search: Search, pointed: PointerProtections) -> None:
    """Protect what another checkpoint needs a file of, and what has parts that couldn't go with it."""
    index, entries, unread = search.index, search.entries, search.unread(pointed)
    deeper: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        with _told(unread):
            for place in all_places(entry.needs):
                other = index.enclosing(place)
                if other is not None and other is not entry:
                    pointed.protect(other, _part_of(entry.name))
        for name in entry.unit.shared:
            if os.sep in name:
                deeper[fs.realpath(os.path.join(entry.directory, name))].append(entry)
    for sharers in deeper.values():
        if len(sharers) == 1:
            pointed.protect(sharers[0], "has parts elsewhere")
    with _told(unread):
        for place, holder in named_above(search.root, unread).items():
            other = index.enclosing(place)
            if other is not None:
                pointed.protect(other, _part_of(os.path.basename(holder)), holder)
    for entry in entries:
        if entry.fault is not None and code_of(entry.fault) is Code.UNREADABLE and _is_index(entry):
            error = AccessDenied(entry.unit.path, entry.fault)
            search.unread(pointed, partial(search.reach.below, entry.directory))(error)


def _is_index(entry: Entry) -> bool:
    """Tell whether a checkpoint is the index of files that are others if nobody knows what it names."""
    return isinstance(entry.unit.format, SetFormat) and entry.name.endswith(".json")


def _part_of(name: str) -> Reason:
    return Reason(Code.PART_OF, f"{Code.PART_OF.value} {name}")


def unseen_above(root: str) -> Iterator[str]:
    """Yield a warning where the directory above another can't be listed: texts and links there go unseen."""
    above = fs.dirname(fs.realpath(root))
    try:
        fs.entries(above)
        return
    except OSError as error:
        reason = from_os_error(error, above).reason
        yield f"{shown(root)}: texts above it that name a checkpoint can't be looked for: {reason}: {above}"


def _is_ours(name: str) -> bool:
    return name.startswith(OWN_PREFIX) or name in _NEVER_ENTERED


class Source(NamedTuple):
    """A kind of pointer: what it is, and where it is looked for, in the words of the reference.

    ``is_of_newest``: whether it depends on which checkpoints are faulty.
    """

    what: str
    where: str
    follow: Callable[[Search, PointerProtections], None]
    is_of_newest: bool = False


SOURCES = (
    Source(
        "`latest`, `last_checkpoint`, Megatron's tracker, TensorFlow's `checkpoint`, `trainer_state.json`",
        "DIR, beside checkpoints",
        _follow_files,
    ),
    Source("small texts such as `best.txt`", "DIR, the directory above, all below", _follow_notes),
    Source("pins", "DIR, all directories above and below", _follow_pins),
    Source(
        "models with a name in MLflow or Weights & Biases", "DIR, all directories above", _follow_trackers
    ),
    Source(
        "`best_model_checkpoint` and Lightning's `best_model_path`",
        "the newest checkpoint of a series",
        _follow_newest,
        is_of_newest=True,
    ),
    Source("symlinks", "DIR, the directory above, all below", _follow_symlinks),
    Source("indexes, and symlinks in checkpoints", "DIR, two directories above, all below", _follow_needs),
    Source("names such as `best.pth`", "checkpoints", _follow_names),
)
"""What protects a checkpoint from every rule; the reference of ``prune`` has these rows."""
