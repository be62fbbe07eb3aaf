"""The table of pointer kinds, lookups in it, and the protections by all of them.

``list`` and ``prune`` protect the targets of all kinds, ``rename`` rewords their texts, and ``undo`` searches
them for stale names. A new kind is a class and a row here; a framework's list of checkpoints is a row of the
format's traits instead, as removals change it, too.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial

from ckpttool.core.errors import CheckpointError, from_os_error
from ckpttool.formats import checkpoint_lists
from ckpttool.formats.discovery import Globs
from ckpttool.formats.pointer_kind import FilePlace, PointerKind, TextKind
from ckpttool.runs.pointers.notes import DataNote, JsonNote, Note, Notes
from ckpttool.runs.pointers.pin_lists import PinList
from ckpttool.runs.pointers.programs import (
    DIGESTS,
    LINE,
    SYMLINK,
    TRAINER_STATE,
    BestInside,
    IterationTracker,
    NamedBest,
    NeededFiles,
    RegisteredModels,
    ShardIndex,
    TensorDigests,
)
from ckpttool.runs.pointers.search import (
    CheckpointIndex,
    OnError,
    Pointer,
    PointerProtections,
    Search,
    SearchedKind,
    SeriesIndex,
    follow_pointer,
    names_in,
    pointers_of,
    reporting,
    temporary_for,
)
from ckpttool.runs.reasons import Code, Reason
from ckpttool.runs.series import Group
from ckpttool.storage import fs
from ckpttool.storage.fs import Names, Snapshot
from ckpttool.transaction.paths import shown

KINDS: tuple[PointerKind, ...] = (
    LINE,
    IterationTracker(),
    TRAINER_STATE,
    *checkpoint_lists(),
    Notes(),
    PinList(),
    RegisteredModels(),
    BestInside(),
    SYMLINK,
    NeededFiles(),
    NamedBest(),
    ShardIndex(),
    TensorDigests(),
    DIGESTS,
    JsonNote(),
    DataNote(),
    Note(),
)
"""All kinds: reasons to protect a checkpoint are in this order. A certain kind precedes others of a name."""


def searched_kinds() -> Iterator[SearchedKind]:
    """Yield the kinds with a search of their own."""
    return (kind for kind in KINDS if isinstance(kind, SearchedKind))


def text_kinds(place: FilePlace) -> Iterator[TextKind]:
    """Yield the kinds of texts in a kind of place: next to a checkpoint, inside, or its members."""
    return (kind for kind in KINDS if isinstance(kind, TextKind) and place in kind.places)


def kind_of(name: str, place: FilePlace = FilePlace.BESIDE) -> TextKind | None:
    """Return the kind of a file by its name and place; None if it has none."""
    matching = [kind for kind in text_kinds(place) if kind.matches(name)]
    return min(matching, key=lambda kind: not kind.is_certain, default=None)


def is_note(name: str) -> bool:
    """Return whether a file of this name may be a note."""
    return note_kind(name) is not None


def note_kind(name: str) -> Note | None:
    """Return the kind of note that a file of this name may be; None if it is certainly of another kind."""
    matching = [kind for kind in text_kinds(FilePlace.BESIDE) if kind.matches(name)]
    if any(kind.is_certain for kind in matching):
        return None
    return next((kind for kind in matching if isinstance(kind, Note)), None)


def pointers_in(directory: str, names: Names, snapshot: Snapshot, on_error: OnError) -> Iterator[Pointer]:
    """Yield the pointers in files of programs in a directory that protect their targets."""
    for kind in text_kinds(FilePlace.BESIDE):
        if kind.protects:
            try:
                yield from pointers_of(kind, directory, names, snapshot)
            except CheckpointError as error:
                on_error(error)


BEING_WRITTEN = Reason(Code.BEING_WRITTEN)

STALE_SECONDS = 3600
"""Seconds after which a temporary file is probably a leftover: no checkpoint takes an hour to write."""


class Pointers:
    """All pointers in and around a directory, each followed once.

    An unreadable file may name any checkpoint: the series that it can mean are left alone.
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
        snapshot: Snapshot | None = None,
    ) -> None:
        """Set the directory and its series.

        Args:
            root: The directory.
            groups: The series in it.
            recursive: Whether notes are searched in all directories below, too.
            exclude: Globs of unreadable files to ignore.
            asks_trackers: Whether trackers are asked, which is slow: only for removals and renames.
            errors: Errors of the survey.
            snapshot: Snapshot of the directories; a new one by default.
        """
        snapshot = snapshot or Snapshot()
        self._search = Search(
            root,
            groups,
            CheckpointIndex([entry for group in groups for entry in group.entries], snapshot),
            SeriesIndex(groups, snapshot),
            Globs(exclude, root),
            recursive,
            asks_trackers,
            is_note,
            errors=errors,
        )
        # ``prune`` asks for protections once more after looking into checkpoints. Only kinds that depend on
        # the faults found there are searched again.
        self._files = _found_in_files(self._search)
        self._found = {
            kind: _found(kind, self._search) for kind in searched_kinds() if not kind.depends_on_faults
        }

    def protections(self, faults: Collection[str] = ()) -> PointerProtections:
        """Return the protections by pointers, given the paths of faulty checkpoints."""
        protections, search = PointerProtections(), replace(self._search, faults=faults)
        protections.update(self._files)
        for kind in searched_kinds():
            protections.update(self._found[kind] if kind in self._found else _found(kind, search))
        return protections


def _found(kind: SearchedKind, search: Search) -> PointerProtections:
    found = PointerProtections()
    with reporting(search.error_handler(found)):
        kind.find(search, found)
    return found


def _found_in_files(search: Search) -> PointerProtections:
    """Return the protections by files of programs, and of checkpoints that are being written."""
    found = PointerProtections()
    # An error of one pointer or directory leaves alone the series that it could mean, and the search goes on.
    # An error that no inner handler takes leaves alone all series.
    with reporting(search.error_handler(found)):
        for directory in sorted({search.root, *search.series.by_directory}):
            unread = search.error_handler(found, partial(search.series.below, directory))
            names = names_in(directory, search.snapshot, search.error_handler(found))
            for pointer in pointers_in(directory, names, search.snapshot, unread):
                with reporting(unread):
                    candidates = search.series.candidates(pointer, directory)
                    follow_pointer(found, pointer, search.index, candidates)
            _protect_being_written(found, names, search.index, directory)
    return found


def _protect_being_written(
    found: PointerProtections, names: Names, index: CheckpointIndex, directory: str
) -> None:
    """Protect checkpoints with a writer's temporary file next to them, or under such a name."""
    # ``last.ckpt.tmp`` may be a new file that replaces ``last.ckpt``, or, for a checkpoint of several files,
    # a part of the checkpoint with that stem.
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
                found.protect(entry, _being_written_reason(names[name]))


def _being_written_reason(temporary: os.DirEntry[str]) -> str:
    """Return the reason, with the file's age if its writer was probably killed."""
    try:
        seconds = time.time() - temporary.stat(follow_symlinks=False).st_mtime
    except OSError:  # removed since it was listed
        seconds = 0
    if seconds < STALE_SECONDS:
        return BEING_WRITTEN
    hours = int(seconds // 3600)
    age = f"{hours // 24} d" if hours >= 48 else f"{hours} h"
    return Reason(Code.BEING_WRITTEN, f"{BEING_WRITTEN} ({temporary.name}, {age} old)")


def unreadable_parent_warnings(root: str, snapshot: Snapshot) -> Iterator[str]:
    """Yield a warning if the parent directory can't be listed, so that notes and links in it aren't read."""
    above = fs.dirname(snapshot.realpath(root))
    try:
        snapshot.names(above)
        return
    except OSError as error:
        reason = from_os_error(error, above).reason
        yield f"{shown(root)}: can't search the parent directory for names of checkpoints: {above}: {reason}"
