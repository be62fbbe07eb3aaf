"""Executes lists of operations in an object store, as ``operations`` does on a file system.

The journal is an object next to the checkpoints. Objects that are moved to the trash are copied there. Then
the journal is replaced by one with the numbers of the committed groups: the point of no return. After that,
pointers are written and objects removed, in each checkpoint first the one without which it is incomplete.

```
journal written -> objects copied -> journal replaced -> pointers written -> objects removed -> recorded
    |________ recovery drops the copies ________|_________ recovery completes what was begun ________|
```

Nothing is locked: a command may take a running one for killed, and recover its journal. But commit and
recovery replace the journal on the condition that it is unchanged, so only one of them succeeds. After a
commit, recovery keeps a checkpoint that is still whole, since the user who killed the command may want it,
and also keeps its copies, since the command may still be running.

Objects that are moved to the stage are removed for good, unless the bucket keeps versions, from which they
can be restored. A restoration removes nothing from the directory, and drops a copy only once its object is in
place. So it needs no commit: recovery, or another command at the same time, just repeats it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

from ckpttool.core.errors import AccessDenied
from ckpttool.formats.interface import MANIFEST_SUFFIXES
from ckpttool.storage import remote
from ckpttool.storage.stores import ObjectReplaced, ObjectStatus, ObjectVersions, OlderVersions
from ckpttool.transaction.files import Fingerprint, StalePlan
from ckpttool.transaction.history import RecordKind, UndoStep, add_step, drop_groups
from ckpttool.transaction.journal import Move, OperationList, Rewrite
from ckpttool.transaction.journal_documents import (
    SCHEMA,
    identity_of,
    name_of,
    operations_document,
    operations_of,
)
from ckpttool.transaction.lock import ANOTHER_AT_WORK, BUSY
from ckpttool.transaction.old_journals import STORE_REMOVALS, store_removals_of
from ckpttool.transaction.operations import Failures
from ckpttool.transaction.pointer_files import MAX_TEXT, restored_pointer
from ckpttool.transaction.staged_output import error_text
from ckpttool.transaction.stages import journal_text
from ckpttool.transaction.state_dir import MAX_BYTES, TRASH, StateDir, parse_own
from ckpttool.transaction.store_directory import (
    StoreDirectory,
    identity_of_journal,
    journal_name,
    map_on_threads,
    require_of_store,
    results_or_errors,
)
from ckpttool.transaction.unlinking import StrandedCheckpoint

_FIRST = re.compile(
    r"\.metadata|.*\.index(?:\.json)?|commit_success\.txt|_CHECKPOINT_METADATA|_METADATA|saved_model\.pb"
)
"""Files that are written last into a checkpoint's directory, or that list the others."""
_MOST_MARKERS = 100
"""Limit on delete markers that hide one object."""
_WEIGHTS = re.compile(r".*\.(?:safetensors|bin|pt|pth|ckpt|h5|npz|pdparams)")


class StoredObject(NamedTuple):
    """Object that a list removes or restores.

    Attributes:
        group: Number of its checkpoint.
        path: Its path in the directory.
        copy: Path of its copy in the trash, relative to the directory; empty if it has only versions.
        file: Its fingerprint when the plan was made.
        is_first: Whether its checkpoint is incomplete without it: it is the first to leave, and the last to
            come back.
    """

    group: int
    path: str
    copy: str
    file: Fingerprint
    is_first: bool = False

    @property
    def status(self) -> ObjectStatus:
        """Its status when the plan was made."""
        return ObjectStatus(self.file.size, self.file.mtime_ns, self.file.version)


class StoreOperations:
    """Operations of one journal in progress in a store.

    Attributes:
        directory: URL of the directory.
        listed: Operations, with the committed groups.
        objects: Objects of each group, in the order in which they leave.
    """

    def __init__(
        self,
        directory: str,
        identity: str,
        listed: OperationList,
        journal: ObjectStatus | None = None,
        journal_id: str | None = None,
    ) -> None:
        """Use the operations of a removal or of its undo, and their journal if it is written already."""
        self.directory, self.listed = directory, listed
        self.objects = [_objects_of(listed, number, identity) for number in range(len(listed.groups))]
        self._place, self._identity, self._journal = StoreDirectory(directory), identity, journal
        self._journal_id = journal_id or os.urandom(4).hex()
        self._bucket: OlderVersions
        self._versions: dict[str, ObjectVersions] = {}

    @classmethod
    def read(cls, directory: str, name: str) -> StoreOperations | None:
        """Read a journal in a directory; return None if it has just been completed."""
        found, identity = StoreDirectory(directory).read(name, MAX_BYTES), identity_of_journal(name)
        if found is None or identity is None:
            return None
        listed, journal_id = parse_own(f"{directory}/{name}", found[0], "a journal", _listed)
        if listed.identity not in (None, identity):
            problem = "it belongs to another command"
            raise AccessDenied(f"{directory}/{name}", problem, expected="move it away")
        return cls(directory, identity, listed, found[1], journal_id)

    @property
    def _all(self) -> Iterator[StoredObject]:
        return chain.from_iterable(self.objects)

    def _of(self, numbers: Iterable[int]) -> Iterator[StoredObject]:
        return chain.from_iterable(self.objects[number] for number in numbers)

    # The journal --------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Write the journal.

        Raises:
            AccessDenied: The command has a journal already, and is running.
        """
        self._claim(None)

    def _claim(self, done: Collection[int] | None) -> None:
        try:
            self._write(done)
        except ObjectReplaced as error:
            raise AccessDenied(self.directory, ANOTHER_AT_WORK, code=BUSY) from error

    def _write(self, done: Collection[int] | None) -> None:
        """Replace the journal by one with the numbers of the committed groups."""
        listed = replace(self.listed, done=None if done is None else frozenset(done))
        added = {"id": self._journal_id, "done": None if done is None else sorted(done)}
        data = journal_text(self.directory, {**operations_document(listed), **added})
        name = journal_name(self._identity)
        try:
            self._journal = self._place.replace(name, data, self._journal)
        except ObjectReplaced:
            # If the answer to a successful request is lost, the request is repeated, and its condition fails.
            # The journal has a random ID, so one with the same bytes is the one that was just written.
            found = self._place.read(name, MAX_BYTES)
            if found is None or found[0] != data:
                raise
            self._journal = found[1]
        self.listed = listed

    def remove_journal(self) -> None:
        self._place.remove_now(journal_name(self._identity))

    # Removal ------------------------------------------------------------------------------------------

    def copy(self) -> Failures:
        """Copy objects to the trash; return the errors by group, and drop the copies of failed groups."""
        to_trash = [one for one in self._all if one.copy]
        failures = _errors_of_each(lambda one: self._place.copy(one.path, one.copy, one.file.size), to_trash)
        self.drop_copies(failures)
        return failures

    def commit(self, numbers: Collection[int], pointers: Sequence[Rewrite]) -> None:
        """Commit some groups, with the pointers that are written then.

        Raises:
            AccessDenied: Another command has recovered the journal; the copies are dropped.
        """
        self.listed = self.listed.with_pointers(pointers)
        try:
            self._write(numbers)
        except ObjectReplaced as error:
            self.drop_copies(range(len(self.objects)))
            reason = "another ckpttool took this prune for interrupted, and reverted it; nothing was removed"
            raise AccessDenied(self.directory, reason) from error

    def write_pointers(self) -> bool:
        """Write the pointers that still have their old text; return whether all have the new one now."""
        return all([self._rewrite(one) for one in self.listed.pointers])

    def finish(self, numbers: Collection[int]) -> Failures:
        """Remove the old names of committed groups; return the errors by group.

        If the first object of a group can't be removed, the others are kept.
        """
        # First objects go in a round of their own: a checkpoint that has lost one is incomplete for every
        # reader, and recovery completes its removal.
        failures = _errors_of_each(self._remove, (one for one in self._of(numbers) if one.is_first))
        rest = [one for one in self._of(numbers) if not one.is_first and one.group not in failures]
        for number, error in _errors_of_each(self._remove, rest).items():
            failures[number] = StrandedCheckpoint(f"only partly removed: {error_text(error)}")
            failures[number].__cause__ = error
        return failures

    def _remove(self, one: StoredObject) -> None:
        self._place.remove(one.path, one.status)

    def close(self, numbers: Collection[int]) -> None:
        """Record how some groups are undone, and remove the journal."""
        listed = self.listed.subset(numbers)
        if listed.identity is not None and listed.groups:
            remote.forget()
            kind: RecordKind = "trash" if listed.kind == "trash" else "prune"
            step = UndoStep(self._journal_id, listed.inverse())
            add_step(self.directory, StateDir(self.directory), listed.identity, kind, step)
        self.remove_journal()

    def abandon(self) -> None:
        """Drop all copies before the commit, or before anything was removed, and remove the journal.

        Raises:
            AccessDenied: Another command has just committed the journal, or recovered it.
        """
        self._claim(())
        self.drop_copies(range(len(self.objects)))
        self.remove_journal()

    def drop_copies(self, numbers: Iterable[int]) -> None:
        """Remove the copies of some groups from the trash."""
        for _ in map_on_threads(self._place.remove_now, (one.copy for one in self._of(numbers) if one.copy)):
            pass

    def incomplete(self) -> set[int]:
        """Return the groups that are incomplete in the directory, since they lack their first object."""
        firsts = [objects[0] for objects in self.objects]
        statuses = map_on_threads(lambda one: self._place.status(one.path), firsts)
        return {one.group for one, status in statuses if status is None}

    def incomplete_names(self) -> set[str]:
        """Return the names in the directory of the checkpoints that are incomplete."""
        return {one.path.partition("/")[0] for one in self._of(self.incomplete())}

    # Pointers -----------------------------------------------------------------------------------------

    def _text(self, name: str) -> tuple[str, ObjectStatus] | None:
        found = self._place.read(name, MAX_TEXT)
        return None if found is None else (found[0].decode("utf-8", "surrogateescape"), found[1])

    def _rewrite(self, one: Rewrite) -> bool:
        """Write a pointer that has its old text; return whether it has the new one now."""
        found = self._text(one.name)
        if found is None or one.after is None or found[0] not in (one.before, one.after):
            return False
        if found[0] != one.after:
            try:
                self._place.replace(one.name, one.after.encode("utf-8", "surrogateescape"), found[1])
            except ObjectReplaced:
                return False
        return True

    def restore_pointers(self, numbers: Collection[int]) -> None:
        """Add groups that were not removed to pointers again; later changes by others are kept."""
        if numbers:
            self._restore_names(
                self.listed.pointers, numbers, is_all=len(numbers) == len(self.listed.done or ())
            )

    def _restore_names(self, pointers: Iterable[Rewrite], numbers: Collection[int], *, is_all: bool) -> None:
        names = {os.path.basename(self.listed.groups[number].path) for number in numbers}
        for one in pointers:
            found = self._text(one.name)
            if found is None:
                continue
            try:
                back = restored_pointer(found[0], one, names, is_all=is_all)
            except ValueError:  # it names no checkpoint any more
                continue
            if not self._rewrite(back):
                raise ObjectReplaced(f"{self.directory}/{one.name}")

    # Restoration --------------------------------------------------------------------------------------

    def missing(self) -> tuple[list[StoredObject], Failures]:
        """Return the objects that are to be restored, and the errors of groups that can't be."""
        self._load_versions()
        results = list(results_or_errors(self.is_restored, self._all))
        failures = _failures(results)
        return [
            one for one, is_restored in results if is_restored is False and one.group not in failures
        ], failures

    def restore(self, missing: Sequence[StoredObject], failures: Failures) -> tuple[list[int], Failures]:
        """Restore missing objects, write pointers, and remove the trash of complete groups.

        Returns:
            The groups that are in place, and the errors of the others.
        """
        # The first object of a checkpoint is restored last: until then, the checkpoint counts as incomplete.
        failures = failures | self._restore_objects([one for one in missing if not one.is_first])
        failures |= self._restore_objects(
            [one for one in missing if one.is_first and one.group not in failures]
        )
        numbers = [number for number in range(len(self.objects)) if number not in failures]
        if numbers:
            rewrites = (one.inverse for one in self.listed.pointers)
            self._restore_names(rewrites, numbers, is_all=not failures)
            self.drop_copies(numbers)
            remote.forget()
            drop_groups(self.directory, StateDir(self.directory), self.listed.subset(numbers))
        return numbers, failures

    def _restore_objects(self, objects: Sequence[StoredObject]) -> Failures:
        """Copy objects from the trash, or remove the delete markers that hide them."""
        failures = _errors_of_each(self._copy_back, (one for one in objects if one.copy))
        hidden = [one for one in objects if not one.copy]
        for _ in range(_MOST_MARKERS if hidden else 0):  # each deletion has added a marker
            failures |= _errors_of_each(self._uncover, hidden)
            self._load_versions()
            results = list(results_or_errors(self.is_restored, hidden))
            failures |= _failures(results)
            hidden = [
                one for one, is_restored in results if is_restored is False and one.group not in failures
            ]
            if not hidden:
                break
        hiding = StalePlan(f"hidden by more than {_MOST_MARKERS} delete markers")
        return failures | dict.fromkeys((one.group for one in hidden), hiding)

    def _copy_back(self, one: StoredObject) -> None:
        if not self.is_restored(one):  # another undo may have been faster
            self._place.copy(one.copy, one.path, one.file.size)

    def _uncover(self, one: StoredObject) -> None:
        key = self._place.key(one.path)
        marker = self._versions[key].marker
        if marker is not None:
            self._bucket.uncover(key, marker)

    def is_restored(self, one: StoredObject) -> bool:
        """Return whether an object that is to be restored is in place.

        Raises:
            StalePlan: Another object has its name, or it has no copy or version to restore it from.
        """
        if not one.copy:
            newest, marker = self._versions.get(self._place.key(one.path), ObjectVersions(None, None))
            if newest is None or (newest.size, newest.version) != (one.file.size, one.file.version):
                raise self._not_restorable(one, is_taken=newest is not None and marker is None)
            return marker is None
        now, kept = self._place.status(one.path), self._place.status(one.copy)
        if now is None:
            if kept is None or kept.size != one.file.size:
                raise self._not_restorable(one, is_taken=False)
            return False
        if now.matches(one.status):
            return True
        # Copies are dropped last. So without a copy, an object of the right size was restored by a command
        # that was killed while it dropped them.
        is_same = now.size == one.file.size and (
            kept is None or self._place.is_same(one.path, now, one.copy, kept)
        )
        if not is_same:
            raise self._not_restorable(one, is_taken=True)
        return True

    def _not_restorable(self, one: StoredObject, *, is_taken: bool) -> StalePlan:
        problem = "another object has its name now" if is_taken else "it has no copy or older version"
        is_single = len(self.objects[one.group]) == 1
        return StalePlan(problem if is_single else f"{os.path.basename(one.path)}: {problem}")

    def _load_versions(self) -> None:
        """List the older versions from which objects are restored; threads only read the result."""
        if tops := {one.path.partition("/")[0] for one in self._all if not one.copy}:
            self._bucket = self._place.store.older_versions()
        for top in tops:
            self._versions |= self._bucket.versions(self._place.key(top))

    # The trash ----------------------------------------------------------------------------------------

    def copied_bytes(self) -> tuple[dict[int, int], Failures]:
        """Return the bytes of each group's copies in the trash, and errors of those that have changed."""

        def size_of(one: StoredObject) -> int:
            status = self._place.status(one.copy)
            if status is not None and status.size != one.file.size:
                raise StalePlan(f"{one.file.path} has changed since it was moved to the trash")
            return 0 if status is None else status.size

        results = list(results_or_errors(size_of, (one for one in self._all if one.copy)))
        freed = dict.fromkeys(range(len(self.objects)), 0)
        for one, size in results:
            freed[one.group] += size if isinstance(size, int) else 0
        return freed, _failures(results)

    def empty(self, numbers: Collection[int]) -> Failures:
        """Remove the copies of some groups from the trash for good; return the errors by group."""
        return _errors_of_each(
            lambda one: self._place.remove_now(one.copy), (o for o in self._of(numbers) if o.copy)
        )


def _objects_of(listed: OperationList, number: int, identity: str) -> list[StoredObject]:
    """Return the objects of a group in the order in which they leave."""
    found: list[StoredObject] = []
    for one in listed.moves_by_group[number]:
        if isinstance(one, Move):
            for file in listed.files_at(number, one.source.path):
                below = file.path[len(one.source.path) :]
                paths = {root: path + below for root, path in (one.source, one.target)}
                copy = f"{TRASH}/{identity}/{paths['trash']}" if "trash" in paths else ""
                found.append(StoredObject(number, paths["directory"], copy, file))
    found.sort(key=lambda one: order_of_removal(one.file.path))
    return [found[0]._replace(is_first=True), *found[1:]] if found else []


def order_of_removal(path: str) -> tuple[bool, bool, bool, str]:
    """Return a sort key: indexes and metadata first, then weights, then the rest; manifests last."""
    name = os.path.basename(path)
    is_last = (
        _FIRST.fullmatch(name) is None,
        name.endswith(MANIFEST_SUFFIXES),
        _WEIGHTS.fullmatch(name) is None,
    )
    return *is_last, path


def _errors_of_each(function: Callable[[StoredObject], object], objects: Iterable[StoredObject]) -> Failures:
    """Call a function for objects on several threads; return the first error of each group."""
    return _failures(results_or_errors(function, objects))


def _failures(results: Iterable[tuple[StoredObject, object]]) -> Failures:
    """Return the first error of each group."""
    failures = Failures()
    for one, result in results:
        if isinstance(result, ObjectReplaced):
            failures.setdefault(one.group, StalePlan("it has changed", since_plan=True))
        elif isinstance(result, Exception):
            failures.setdefault(one.group, result)
    return failures


def is_settled(failures: Failures) -> bool:
    """Return whether a retry is pointless, since all failures are changes by others."""
    return all(isinstance(one.__cause__ or one, StalePlan) for one in failures.values())


def _listed(document: Mapping[str, Any]) -> tuple[OperationList, str]:
    """Return the operations of a journal in a store, of any version, and its ID."""
    if document["schema"] == STORE_REMOVALS:
        return store_removals_of(document), identity_of(document["identity"])
    if document["schema"] != SCHEMA:
        raise ValueError(f"schema {document['schema']!r}")
    listed = operations_of(document, document["done"])
    require_of_store(listed)
    return listed, name_of(document["id"])
