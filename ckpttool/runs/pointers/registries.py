"""Protection of models that have a name in a tracker: registered ones, and artifacts with an alias."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator, Sequence

from ckpttool.core.errors import CheckpointError, NotFound
from ckpttool.ops.digests import sums_of_file
from ckpttool.runs.members.entry import Entry
from ckpttool.runs.metrics.trackers import TrackedModel, tracked_models
from ckpttool.runs.pointers.search import Search, SearchedKind
from ckpttool.runs.pointers.targets import CheckpointIndex, PointerProtections
from ckpttool.runs.reasons import Code, Reason


class RegisteredModels(SearchedKind):
    """Models with a name in trackers; asking takes long, so that only removals and renamings do."""

    what = "models with a name in MLflow or Weights & Biases"
    where = "DIR, all directories above"

    def find(self, search: Search, found: PointerProtections) -> None:
        if not search.asks_trackers:
            return
        try:
            models = list(tracked_models(search.root))
        except CheckpointError as failure:
            for group in search.groups:
                found.leave_alone(group.key, f"can't tell which models are registered: {failure}")
            return
        if not models:
            return
        entries = search.entries
        real = {entry.path: search.snapshot.realpath(entry.unit.path) for entry in entries}
        for model in models:
            # What is known by its content may have any name.
            reason = model.reason if model.file is not None else Reason(Code.REGISTERED, model.reason)
            for entry in _entries_of(model, entries, real, search.index):
                found.protect(entry, reason, model.holder)


def _entries_of(
    model: TrackedModel, entries: Sequence[Entry], real: dict[str, str], index: CheckpointIndex
) -> Iterator[Entry]:
    """Yield the checkpoints that are a model: at its place, around it, in it, or of the same content."""
    if model.place:
        place = index.snapshot.realpath(model.place)
        if (around := index.enclosing(place)) is not None:
            yield around
        below = os.path.join(place, "")
        yield from (entry for entry in entries if real[entry.path].startswith(below))
    if model.identity and model.identity in model.place:  # the store may have been moved since
        tail = _tail(model.place, model.identity)
        yield from (
            entry for entry in entries if _contains_other(_tail(real[entry.path], model.identity), tail)
        )
    if model.file is not None:
        yield from _of_same_content(model.file, entries)


def _tail(path: str, identity: str) -> str:
    """Return what follows a name in a path; empty where it has none of that name."""
    _, mark, tail = path.partition(f"/{identity}")
    return f"{tail}/" if mark else ""


def _contains_other(one: str, other: str) -> bool:
    """Tell whether one of two paths lies in the other; both end with a slash unless they are none."""
    return bool(one and other) and (one.startswith(other) or other.startswith(one))


def _of_same_content(file: tuple[str, int, str], entries: Sequence[Entry]) -> Iterator[Entry]:
    """Yield the checkpoints that have a file of this content; those of its size and name need no look."""
    name, nbytes, digest = file
    same = [(entry, path) for entry in entries for path, size in _files(entry) if size == nbytes]
    named = [one for one in same if os.path.basename(one[1]) == name]
    if len(named) != 1:
        named = [one for one in named or same if _md5(one[1]) == digest] or named
    yield from (entry for entry, _ in named)


def _files(entry: Entry) -> Iterator[tuple[str, int]]:
    for one in entry.contents.files:
        yield os.path.join(entry.directory, one.path), one.size


def _md5(path: str) -> str:
    """Return a file's MD5 as Weights & Biases writes it."""
    try:
        digest = sums_of_file(path, ("md5",)).digests["md5"]
    except NotFound:  # it has just gone
        return ""
    return base64.b64encode(bytes.fromhex(digest)).decode()
