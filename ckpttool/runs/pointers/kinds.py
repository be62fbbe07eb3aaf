"""The table of pointer kinds, and lookups in it.

``list`` and ``prune`` protect what pointers of all kinds name, ``rename`` rewords their texts, ``undo`` looks
through them for names that are stale. A new kind is a class and a row here; a framework's list of checkpoints
is a row of the format's traits instead, as removals change it, too.
"""

from __future__ import annotations

from collections.abc import Iterator

from ckpttool.core.errors import CheckpointError
from ckpttool.formats import checkpoint_lists
from ckpttool.formats.pointer_kind import FilePlace, PointerKind, TextKind
from ckpttool.runs.pointers.checkpoints import BestInside, NamedBest, NeededFiles
from ckpttool.runs.pointers.files import (
    DIGESTS,
    LINE,
    TRAINER_STATE,
    IterationTracker,
    ShardIndex,
    TensorDigests,
)
from ckpttool.runs.pointers.notes import DataNote, JsonNote, Note, Notes
from ckpttool.runs.pointers.pin_lists import PinList
from ckpttool.runs.pointers.readers import OnError, Pointer, pointers_of
from ckpttool.runs.pointers.registries import RegisteredModels
from ckpttool.runs.pointers.search import SearchedKind
from ckpttool.runs.pointers.symlinks import SYMLINK
from ckpttool.storage.snapshot import Names, Snapshot

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
    """Yield the kinds of texts in a place."""
    return (kind for kind in KINDS if isinstance(kind, TextKind) and place in kind.places)


def kind_of(name: str, place: FilePlace = FilePlace.BESIDE) -> TextKind | None:
    """Return the kind of a file in a place by its name; None if there is none."""
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
