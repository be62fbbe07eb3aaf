"""Pointers in checkpoints: the best one named by the newest, files that another needs, names."""

from __future__ import annotations

import os
from collections import defaultdict
from functools import partial

from ckpttool.core.errors import AccessDenied, CheckpointError
from ckpttool.core.naming import is_named_best
from ckpttool.formats.interface import SetFormat
from ckpttool.runs.members.entry import Entry
from ckpttool.runs.members.needs import all_places, named_above
from ckpttool.runs.members.order import Group
from ckpttool.runs.pointers.files import TRAINER_STATE
from ckpttool.runs.pointers.readers import OnError, Pointer, names_in, pointers_of
from ckpttool.runs.pointers.search import Search, SearchedKind, follow_pointer, reporting
from ckpttool.runs.pointers.targets import PointerProtections
from ckpttool.runs.reasons import Code, Reason, code_of
from ckpttool.storage.snapshot import Snapshot

NAMED_BEST = Reason(Code.NAMED_BEST)


class BestInside(SearchedKind):
    """Best checkpoint that the newest of a series names: in a trainer's state, or in Lightning's pickle.

    Older ones may name what was removed since. A damaged one names nothing; one that can't be read may name
    anything.
    """

    what = "`best_model_checkpoint` and Lightning's `best_model_path`"
    where = "the newest checkpoint of a series"
    hint = "a symlink of that name to the best says which it is"
    depends_on_faults = True

    def find(self, search: Search, found: PointerProtections) -> None:
        for error in search.errors:  # what can't be looked at may be a newest checkpoint
            if isinstance(error, AccessDenied):
                search.unread(found, partial(search.reach.below, os.path.dirname(error.path)))(error)
        for group in search.groups:
            candidates = [group] if len(group.entries) > 1 else []
            unread = search.unread(found, partial(list, candidates))
            newest = self._newest(group, search, unread)
            for pointer in () if newest is None else self._pointers(newest, search.snapshot, unread):
                with reporting(unread):
                    follow_pointer(found, pointer, search.index, candidates)

    @staticmethod
    def _newest(group: Group, search: Search, on_error: OnError) -> Entry | None:
        for newest in reversed(group.entries):
            if newest.fault is not None and code_of(newest.fault) is Code.UNREADABLE:
                on_error(AccessDenied(newest.unit.path, newest.fault))
            if newest.is_sound and newest.path not in search.faults:
                return newest
        return None

    def _pointers(self, newest: Entry, snapshot: Snapshot, on_error: OnError) -> list[Pointer]:
        path = newest.unit.path
        pointers: list[Pointer] = []
        try:
            is_directory = any(os.sep in file.path for file in newest.contents.files)
            names = names_in(path, snapshot) if is_directory else {}
            pointers += (
                one._replace(holder=path) for one in pointers_of(TRAINER_STATE, path, names, snapshot)
            )
        except CheckpointError as error:
            on_error(error)
        return pointers + [Pointer(self, "best_model_path", path, best) for best in newest.best_paths]


class NamedBest(SearchedKind):
    """Name of a checkpoint that marks it as the best."""

    what = "names such as `best.pth`"
    where = "checkpoints"

    def find(self, search: Search, found: PointerProtections) -> None:
        for entry in search.entries:
            if is_named_best(entry.name):
                found.protect(entry, NAMED_BEST)


class NeededFiles(SearchedKind):
    """Files of a checkpoint that another needs: those in its index, and targets of symlinks in it.

    A checkpoint with parts of its own elsewhere is protected, too: they couldn't be removed with it.
    """

    what = "indexes, and symlinks in checkpoints"
    where = "DIR, two directories above, all below"

    def find(self, search: Search, found: PointerProtections) -> None:
        index, entries, unread = search.index, search.entries, search.unread(found)
        deeper: dict[str, list[Entry]] = defaultdict(list)
        for entry in entries:
            with reporting(unread):
                for place in all_places(entry.needs, search.snapshot):
                    other = index.enclosing(place)
                    if other is not None and other is not entry:
                        found.protect(other, _part_of(entry.name))
            for name in entry.unit.shared:
                if os.sep in name:
                    deeper[search.snapshot.realpath(os.path.join(entry.directory, name))].append(entry)
        for sharers in deeper.values():
            if len(sharers) == 1:
                found.protect(sharers[0], "has parts elsewhere")
        with reporting(unread):
            for place, holder in named_above(search.root, search.snapshot, unread).items():
                other = index.enclosing(place)
                if other is not None:
                    found.protect(other, _part_of(os.path.basename(holder)), holder)
        for entry in entries:
            if entry.fault is not None and code_of(entry.fault) is Code.UNREADABLE and _is_index(entry):
                error = AccessDenied(entry.unit.path, entry.fault)
                search.unread(found, partial(search.reach.below, entry.directory))(error)


def _is_index(entry: Entry) -> bool:
    """Return whether a checkpoint is an index of files; if that is unreadable, each is another checkpoint."""
    return isinstance(entry.unit.format, SetFormat) and entry.name.endswith(".json")


def _part_of(name: str) -> Reason:
    return Reason(Code.PART_OF, f"{Code.PART_OF.value} {name}")
