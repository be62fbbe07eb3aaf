"""Executes lists of operations in an object store, as ``operations`` does on a file system.

The journal is an object beside the checkpoints. Objects that move to the trash, or back, are copied. Then the
journal is replaced by one with the numbers of the committed groups, which is the point of no return; pointers
are written, and objects lose their old names, of each checkpoint first the one without which it is none.

```
journal written -> objects copied -> journal replaced -> pointers written -> old names removed -> recorded
    |________ recovery drops the copies ________|_________ recovery completes what was begun ________|
```

Nothing holds two commands apart: either may take the other for killed, and recover its journal. But of the
commit and the recovery of one journal only one can replace it. After a commit, a checkpoint of which nothing
was removed yet stays, as whoever killed the command may want to keep it; so do its copies, as the command
may still be at work.

What moves to the stage is removed for good, unless the bucket keeps versions: those are restored from there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from itertools import chain
from typing import Any, Literal, NamedTuple

from ckpttool.core.errors import AccessDenied, from_os_error
from ckpttool.formats.interface import SIDECARS
from ckpttool.formats.tensorflow.state import MAX_BYTES as MAX_STATE
from ckpttool.formats.tensorflow.state import NAME
from ckpttool.io import fs, remote
from ckpttool.io.stores import ObjectStatus, ObjectVersions, OlderVersions, Replaced
from ckpttool.transaction.files import Contents, Fingerprint, StalePlan, contents
from ckpttool.transaction.history import RecordKind, UndoStep, add_step, drop_groups
from ckpttool.transaction.journal import Group, Location, Move, OperationList, Relink, Rewrite
from ckpttool.transaction.journal_documents import SCHEMA, operations_document, operations_of
from ckpttool.transaction.lock import ANOTHER_AT_WORK, BUSY
from ckpttool.transaction.moves import MoveFailure, MoveOutcome, move_failure
from ckpttool.transaction.old_journals import STORE_REMOVALS, store_removals_of
from ckpttool.transaction.operations import Failures
from ckpttool.transaction.paths import shown
from ckpttool.transaction.pointer_files import restored_pointer, state_rewrite
from ckpttool.transaction.removal import RemovalOutcome, add_failure, removal_operations
from ckpttool.transaction.settling import Settled
from ckpttool.transaction.staged_output import error_text
from ckpttool.transaction.stages import journal_text
from ckpttool.transaction.state_dir import MAX_BYTES, TRASH, StateDir, parse_own
from ckpttool.transaction.store_directory import (
    StoreDirectory,
    failures_of,
    identity_of_journal,
    journal_name,
    journals_in,
)
from ckpttool.transaction.unlinking import StrandedCheckpoint

_FIRST = re.compile(
    r"\.metadata|.*\.index(?:\.json)?|commit_success\.txt|_CHECKPOINT_METADATA|_METADATA|saved_model\.pb"
)
"""Files that are written last into a checkpoint's directory, or list the others."""
_RECOVERS = "; the next command recovers"
_WEIGHTS = re.compile(r".*\.(?:safetensors|bin|pt|pth|ckpt|h5|npz|pdparams)")


class UndoMethod(Enum):
    """How a removal can be undone: not at all, from the bucket's older versions, from copies in the trash."""

    NONE = "none"
    VERSIONS = "versions"
    COPIES = "copies"


class StoredObject(NamedTuple):
    """Object that a list moves.

    Attributes:
        group: Number of its checkpoint.
        source, target: Old and new path.
        file: What it was when the plan was made.
        is_first: Whether its checkpoint is incomplete without it: it is the first to leave, and the last to
            come back.
    """

    group: int
    source: Location
    target: Location
    file: Fingerprint
    is_first: bool

    @property
    def status(self) -> ObjectStatus:
        """Return its status when the plan was made."""
        return ObjectStatus(self.file.size, self.file.mtime_ns, self.file.version)


class StoreStage:
    """Operations of one journal in progress in a store.

    Attributes:
        listed: Operations, with the committed groups.
        objects: Objects of each group, in the order in which they leave.
    """

    def __init__(
        self,
        place: StoreDirectory,
        identity: str,
        listed: OperationList,
        journal: ObjectStatus | None = None,
    ) -> None:
        """Take operations in a directory; ``journal`` is the status of their journal, if there is one."""
        self.listed = listed
        self.objects = [_objects_of(listed, number) for number in range(len(listed.groups))]
        self._place, self._identity, self._journal = place, identity, journal
        self._bucket: OlderVersions
        self._versions: dict[str, ObjectVersions] = {}

    @classmethod
    def read(cls, directory: str, name: str) -> StoreStage | None:
        """Read a journal in a directory; return None if it has just been completed."""
        place, identity = StoreDirectory(directory), identity_of_journal(name)
        found = place.read(name, MAX_BYTES)
        if found is None or identity is None:
            return None
        listed = parse_own(f"{directory}/{name}", found[0], "a journal", _listed)
        if listed.identity not in (None, identity):
            raise AccessDenied(f"{directory}/{name}", "it is another command's", expected="move it away")
        return cls(place, identity, listed, found[1])

    @property
    def directory(self) -> str:
        """Return the URL of the directory."""
        return self._place.directory

    # Forward ------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Write the journal."""
        self._write(None)

    def _write(self, done: Collection[int] | None) -> None:
        """Replace the journal by one with the numbers of the committed groups."""
        listed = replace(self.listed, done=None if done is None else frozenset(done))
        document = {**operations_document(listed), "done": None if done is None else sorted(done)}
        data = journal_text(self.directory, document)
        self._journal = self._place.replace(journal_name(self._identity), data, self._journal)
        self.listed = listed

    def forward(self) -> Failures:
        """Copy all that moves to the trash or back; return the errors by group."""
        self._load_versions()
        objects, is_back = list(chain.from_iterable(self.objects)), self.listed.kind == "restore"
        failures = _failures(self._copy, [one for one in objects if not (is_back and one.is_first)])
        last = [one for one in objects if is_back and one.is_first and one.group not in failures]
        return failures | _failures(self._copy, last)

    def _copy(self, one: StoredObject) -> None:
        if one.target.root == "stage" or (one.target.root == "directory" and self.is_back(one)):
            return
        if one.source.root == "stage":
            key = self._place.key(one.target.path)
            marker = self._versions[key].marker
            assert marker is not None  # is_back has seen it
            self._bucket.uncover(key, marker)
        else:
            self._place.copy(self._name(one.source), self._name(one.target), one.file.size)

    def commit(self, numbers: Collection[int], pointers: Sequence[Rewrite | Relink]) -> None:
        """Commit some groups, with the pointers that are written then.

        Raises:
            AccessDenied: Another command has recovered the journal; everything was reverted.
        """
        self.listed = self.listed.with_pointers(pointers)
        try:
            self._write(numbers)
        except Replaced as error:
            self.back(range(len(self.objects)))
            doing = "undo" if self.listed.kind == "restore" else "prune"
            done = "restored" if self.listed.kind == "restore" else "removed"
            reason = f"another ckpttool took this {doing} for an interrupted one; nothing was {done}"
            raise AccessDenied(self.directory, reason) from error

    def write_pointers(self) -> bool:
        """Write the pointers that still have their old text; return whether all have the new one now."""
        is_written = True
        for one in self.listed.pointers:
            is_written &= isinstance(one, Rewrite) and self._rewrite(one)
        return is_written

    def _rewrite(self, one: Rewrite) -> bool:
        found = self._place.read(one.name, MAX_STATE)
        text = None if found is None else found[0].decode("utf-8", "surrogateescape")
        if found is None or one.after is None or text not in (one.before, one.after):
            return False
        if text != one.after:
            try:
                self._place.replace(one.name, one.after.encode("utf-8", "surrogateescape"), found[1])
            except Replaced:
                return False
        return True

    def finish(self, numbers: Collection[int]) -> Failures:
        """Remove the old names of committed groups; return the errors by group.

        Of a group whose first object can't be removed, nothing is.
        """
        objects = [one for number in numbers for one in self.objects[number]]
        failures = _failures(self._leave, [one for one in objects if one.is_first])
        rest = [one for one in objects if not one.is_first and one.group not in failures]
        for number, error in _failures(self._leave, rest).items():
            failures[number] = StrandedCheckpoint(f"only a part of it was removed: {error_text(error)}")
            failures[number].__cause__ = error
        return failures

    def _leave(self, one: StoredObject) -> None:
        if one.source.root == "directory":
            self._place.remove(one.source.path, one.status)
        elif one.source.root == "trash":
            self._place.remove_now(self._name(one.source))

    def close(self, numbers: Collection[int]) -> None:
        """Record how some groups are undone, or that they are restored, and remove the journal."""
        self.record(numbers)
        self._place.remove_now(journal_name(self._identity))

    def record(self, numbers: Collection[int]) -> None:
        """Record how some groups are undone, or that they are restored."""
        listed, state_dir = self.listed.only(numbers), StateDir(self.directory)
        if listed.identity is None or not listed.groups:
            return
        remote.forget()
        if listed.kind == "restore":
            drop_groups(self.directory, state_dir, listed)
        else:
            step = UndoStep(journal_name(self._identity), listed.inverse())
            kind: RecordKind = "trash" if listed.kind == "trash" else "prune"
            add_step(self.directory, state_dir, listed.identity, kind, step)

    # Back ---------------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Revert everything before the commit, or before anything was removed, and remove the journal.

        Raises:
            AccessDenied: Another command has just committed the journal, or recovered it.
        """
        try:
            self._write(())
        except Replaced as error:
            raise AccessDenied(self.directory, ANOTHER_AT_WORK, code=BUSY) from error
        self.back(range(len(self.objects)))
        self._place.remove_now(journal_name(self._identity))

    def back(self, numbers: Collection[int]) -> None:
        """Remove the copies of some groups.

        A restored object stays if its version doesn't tell that it is the copy: comparing the bytes may take
        hours, and the next undo finds it in its place.
        """
        objects = [one for number in numbers for one in self.objects[number]]
        for _, error in failures_of(self._uncopy, objects):
            raise error

    def _uncopy(self, one: StoredObject) -> None:
        if one.target.root == "trash":
            self._place.remove_now(self._name(one.target))
        elif one.target.root == "directory":
            now = self._place.status(one.target.path)
            kept = one.status if one.source.root == "stage" else self._place.status(self._name(one.source))
            if now is not None and kept is not None and now.version and now.matches(kept):
                self._place.remove(one.target.path, now)

    def restore_pointers(self, numbers: Collection[int]) -> None:
        """Have pointers name some groups again that were not removed; what others wrote since stays."""
        names = {os.path.basename(self.listed.groups[number].path) for number in numbers}
        for one in self.listed.pointers if names else ():
            found = self._place.read(one.name, MAX_STATE)
            if found is None or not isinstance(one, Rewrite):
                continue
            try:
                is_all = len(names) == len(self.listed.done or ())
                text = found[0].decode("utf-8", "surrogateescape")
                back = restored_pointer(text, one, names, is_all=is_all)
            except ValueError:  # it names no checkpoint any more
                continue
            self._rewrite(back)

    # What is there ------------------------------------------------------------------------------------

    def incomplete(self) -> set[int]:
        """Return the groups that are incomplete in the directory, since their first object isn't there."""

        def require(one: StoredObject) -> None:
            if self._place.status(_path(one)) is None:
                raise FileNotFoundError

        found: set[int] = set()
        for one, error in failures_of(require, (objects[0] for objects in self.objects)):
            if not isinstance(error, FileNotFoundError):
                raise error
            found.add(one.group)
        return found

    def incomplete_names(self) -> set[str]:
        """Return the names in the directory of the checkpoints that are incomplete."""
        objects = chain.from_iterable(self.objects[number] for number in self.incomplete())
        return {_path(one).partition("/")[0] for one in objects}

    def is_back(self, one: StoredObject) -> bool:
        """Tell whether an object that is to be restored is in its place.

        Raises:
            StalePlan: Another object is, or there is nothing to restore it from.
        """
        name = one.target.path
        if one.source.root == "stage":
            newest, marker = self._versions.get(self._place.key(name), ObjectVersions(None, None))
            if newest is None or (newest.size, newest.version) != (one.file.size, one.file.version):
                raise self._not_restorable(one, is_taken=newest is not None and marker is None)
            return marker is None
        now, kept = self._place.status(name), self._place.status(self._name(one.source))
        if now is None:
            if kept is None or kept.size != one.file.size:
                raise self._not_restorable(one, is_taken=False)
            return False
        # The copies go last: without one, an undo was killed that had come so far.
        if kept is None or now.matches(one.status):
            return True
        if not self._place.is_same(name, now, self._name(one.source), kept):
            raise self._not_restorable(one, is_taken=True)
        return True

    def _not_restorable(self, one: StoredObject, *, is_taken: bool) -> StalePlan:
        problem = "another object has its name now" if is_taken else "nothing is left to restore it from"
        is_single = len(self.objects[one.group]) == 1
        return StalePlan(problem if is_single else f"{os.path.basename(one.target.path)}: {problem}")

    def missing(self) -> tuple[set[int], Failures]:
        """Return the groups of which something is to be restored, and why some groups can't be."""
        self._load_versions()
        found: set[int] = set()

        def look(one: StoredObject) -> None:
            if not self.is_back(one):
                found.add(one.group)

        failures = _failures(look, chain.from_iterable(self.objects))
        return found - failures.keys(), failures

    def copied_bytes(self) -> tuple[dict[int, int], Failures]:
        """Return the bytes of each group's copies in the trash, and which groups have changed there."""
        sizes: list[tuple[int, int]] = []

        def look(one: StoredObject) -> None:
            status = self._place.status(self._name(one.source))
            if status is not None and status.size != one.file.size:
                raise StalePlan(f"{one.source.path} has changed since it was put there")
            sizes.append((one.group, 0 if status is None else status.size))

        failures = _failures(look, chain.from_iterable(self.objects))
        freed = dict.fromkeys(range(len(self.objects)), 0)
        for number, size in sizes:
            freed[number] += size
        return freed, failures

    def _load_versions(self) -> None:
        """List the versions from which objects are restored; threads only look there."""
        objects = (one for one in chain.from_iterable(self.objects) if one.source.root == "stage")
        if tops := {one.target.path.partition("/")[0] for one in objects}:
            self._bucket = self._place.store.older_versions()
        for top in tops:
            self._versions |= self._bucket.versions(self._place.key(top))

    def _name(self, location: Location) -> str:
        """Return the name of an object in the directory, or of its copy in the trash."""
        return location.path if location.root == "directory" else f"{TRASH}/{self._identity}/{location.path}"


def _objects_of(listed: OperationList, number: int) -> list[StoredObject]:
    """Return the objects of a group in the order in which they leave."""
    found: list[StoredObject] = []
    for one in listed.of_groups[number]:
        if isinstance(one, Move):
            (root, path), (target, name) = one.source, one.target
            for file in listed.files_at(number, path):
                below = file.path[len(path) :]
                source, goal = Location(root, path + below), Location(target, name + below)
                found.append(StoredObject(number, source, goal, file, is_first=False))
    found.sort(key=lambda one: order_of_removal(one.file.path))
    return [found[0]._replace(is_first=True), *found[1:]] if found else []


def _path(one: StoredObject) -> str:
    """Return the path of an object in the directory."""
    return one.source.path if one.source.root == "directory" else one.target.path


def order_of_removal(path: str) -> tuple[bool, bool, bool, str]:
    """Return the sort key of an object of a checkpoint: first comes the one without which it is none."""
    name = os.path.basename(path)
    is_last = _FIRST.fullmatch(name) is None, name.endswith(SIDECARS), _WEIGHTS.fullmatch(name) is None
    return *is_last, path


def _failures(step: Callable[[StoredObject], object], objects: Iterable[StoredObject]) -> Failures:
    """Call a function with many objects at once; return the first error of each group."""
    failures = Failures()
    for one, error in failures_of(step, objects):
        has_changed = isinstance(error, Replaced)
        failures.setdefault(one.group, StalePlan("it has changed", since_plan=True) if has_changed else error)
    return failures


def _is_settled(failures: Failures) -> bool:
    """Tell whether trying again could change nothing, since others have changed what was left."""
    return all(isinstance(one.__cause__ or one, StalePlan) for one in failures.values())


def _listed(document: Mapping[str, Any]) -> OperationList:
    """Return the operations of a journal in a store, of any version."""
    if document["schema"] == STORE_REMOVALS:
        return store_removals_of(document)
    if document["schema"] != SCHEMA:
        raise ValueError(f"schema {document['schema']!r}")
    listed = operations_of(document, document["done"])
    if not all(
        isinstance(one, Move) or (isinstance(one, Rewrite) and one.name == NAME) for one in listed.operations
    ):
        raise ValueError("an operation that no store knows")
    if not all(group.contents.files for group in listed.groups):
        raise ValueError("a checkpoint without an object")
    return listed


@contextmanager
def _fresh(directory: str, result: str = "") -> Iterator[None]:
    """Forget what the store said before, and convert what it refuses; the message ends with ``result``."""
    remote.forget()
    try:
        yield
    except (OSError, StalePlan) as error:
        reason = from_os_error(error, directory).reason if isinstance(error, OSError) else str(error)
        raise AccessDenied(shown(directory), reason + result) from error
    finally:
        remote.forget()


# Removal --------------------------------------------------------------------------------------------


def remove_from_store(
    directory: str, removals: Sequence[Group], identity: str, method: UndoMethod
) -> RemovalOutcome:
    """Remove checkpoints of one directory; what has changed since the plan was made stays."""
    outcome = RemovalOutcome()
    with _fresh(directory, _RECOVERS):
        groups = _unchanged(directory, removals, outcome)
        if groups:
            kind: Literal["remove", "trash"] = "trash" if method is UndoMethod.COPIES else "remove"
            noted = None if method is UndoMethod.NONE else identity
            listed = removal_operations(groups, kind=kind, identity=noted)
            _remove(StoreStage(StoreDirectory(directory), identity, listed), outcome)
    return outcome


def _unchanged(directory: str, removals: Sequence[Group], outcome: RemovalOutcome) -> list[Group]:
    """Return what is still as the plan saw it, with the versions of its objects."""
    found: list[Group] = []
    for one in removals:
        try:
            is_same = contents(directory, one.members).is_same_as(one.contents)
        except FileNotFoundError:
            if not any(fs.lexists(f"{directory}/{name}") for name in one.members):
                outcome.removed.append(one.path)
                continue
            is_same = False
        if is_same:
            found.append(one._replace(contents=_with_versions(directory, one.contents)))
        else:
            outcome.failed[one.path] = "it has changed since the plan was made"
    return found


def _with_versions(directory: str, noted: Contents) -> Contents:
    def with_version(file: Fingerprint) -> Fingerprint:
        known = remote.look_at(f"{directory}/{file.path}").object
        return file if known is None else replace(file, version=known.version)

    return Contents(tuple(map(with_version, noted.files)))


def _remove(stage: StoreStage, outcome: RemovalOutcome) -> None:
    groups = stage.listed.groups
    try:
        stage.begin()
    except OSError as error:
        reason = f"{from_os_error(error, stage.directory).reason}; nothing was removed"
        raise AccessDenied(stage.directory, reason) from error
    failures = stage.forward()
    standing = [number for number in range(len(groups)) if number not in failures]
    stage.back([*failures])
    if standing:
        names = {os.path.basename(groups[number].path) for number in standing}
        remote.forget()  # copying may take hours
        stage.commit(standing, state_rewrite(stage.directory, names))
        if not stage.write_pointers():
            change = StalePlan(f"{NAME} has changed", since_plan=True)
            failures |= dict.fromkeys(standing, change)
            standing = []
    if standing:
        left = stage.finish(standing)
        failures |= left
        if _is_settled(left):
            kept = [number for number, error in left.items() if not isinstance(error, StrandedCheckpoint)]
            stage.back(kept)
            stage.close([number for number in standing if number not in kept])
    else:
        stage.abandon()
    for number, failure in failures.items():
        add_failure(outcome, groups[number], failure)
    done = [groups[number] for number in standing if number not in failures]
    outcome.removed += [group.path for group in done]
    outcome.freed += sum(group.contents.nbytes for group in done)


# Undo -----------------------------------------------------------------------------------------------


def obstacles_in_store(directory: str, listed: OperationList) -> Iterator[tuple[int, MoveFailure]]:
    """Yield the groups that can't be restored, by number, with the reason; changes nothing."""
    with _fresh(directory):
        _, failures = _undo_stage(directory, listed).missing()
        yield from ((number, move_failure(failure)) for number, failure in failures.items())


def restore_in_store(directory: str, listed: OperationList) -> MoveOutcome:
    """Restore checkpoints; those that are in place already don't count as moved."""
    outcome = MoveOutcome()
    with _fresh(directory, _RECOVERS):
        gone, failures = _undo_stage(directory, listed).missing()
        _fail(listed, failures, outcome)
        if failures and listed.is_indivisible:
            return outcome
        if gone:
            _restore(_undo_stage(directory, listed.only(gone)), outcome)
        if there := [at for at in range(len(listed.groups)) if at not in gone and at not in failures]:
            stage = _undo_stage(directory, listed.only(there))
            if not gone:
                stage.write_pointers()
            _drop_copies(stage, range(len(there)))
            stage.record(range(len(there)))
    return outcome


def _undo_stage(directory: str, listed: OperationList) -> StoreStage:
    assert listed.identity is not None  # of the command that is undone
    return StoreStage(StoreDirectory(directory), listed.identity, listed)


def _restore(stage: StoreStage, outcome: MoveOutcome) -> None:
    stage.begin()
    listed = stage.listed
    failures = stage.forward()
    _fail(listed, failures, outcome)
    standing = [number for number in range(len(listed.groups)) if number not in failures]
    if failures and (listed.is_indivisible or not standing):
        stage.abandon()
        return
    stage.back([*failures])
    stage.commit(standing, listed.pointers)
    stage.write_pointers()
    _drop_copies(stage, standing)
    stage.close(standing)
    outcome.moved += [listed.groups[number].path for number in standing]


def _drop_copies(stage: StoreStage, numbers: Collection[int]) -> None:
    for failure in stage.finish(numbers).values():
        raise failure


def _fail(listed: OperationList, failures: Failures, outcome: MoveOutcome) -> None:
    outcome.failures |= {listed.groups[at].path: move_failure(one) for at, one in failures.items()}


def remove_copies(
    directory: str, listed: OperationList, *, dry_run: bool
) -> Iterator[tuple[int, int | Exception]]:
    """Remove the copies of checkpoints from the trash; yield the bytes of each group, or its error."""
    with _fresh(directory):
        stage = _undo_stage(directory, listed)
        freed, failures = stage.copied_bytes()
        fit = [number for number in freed if number not in failures]
        if not dry_run:
            failures |= stage.finish(fit)
        yield from ((number, failures.get(number, freed[number])) for number in freed)


# Recovery -------------------------------------------------------------------------------------------


def settle_in_store(directory: str, name: str) -> tuple[OperationList, Settled] | None:
    """Settle a journal; return None if another command has just done it."""
    remote.forget()
    try:
        stage = StoreStage.read(directory, name)
        return None if stage is None else (stage.listed, _settled(stage))
    finally:
        remote.forget()


def _settled(stage: StoreStage) -> Settled:
    """Complete the committed groups of which something was removed, and revert the others."""
    listed, settled = stage.listed, Settled()
    is_undo, is_committed = listed.kind == "restore", listed.is_committed
    done = sorted(listed.done or ())
    settled.finished = done if is_undo else sorted(stage.incomplete().intersection(done))
    if listed.kind != "remove":
        settled.put_back = [at for at in range(len(listed.groups)) if at not in settled.finished]
    if not is_committed:
        stage.abandon()
        return settled
    if is_undo:
        stage.write_pointers()
    failures = stage.finish(settled.finished)
    told = {number: str(failure) for number, failure in failures.items()}
    if not _is_settled(failures):
        settled.failures = told
        return settled
    settled.notes = told
    left = [number for number in done if number not in settled.finished]
    stage.restore_pointers(left)
    stage.close(done if listed.kind == "trash" else settled.finished)
    return settled


def incomplete_in_store(directory: str) -> frozenset[str]:
    """Return the names in a directory of checkpoints that an interrupted command left incomplete."""
    names: set[str] = set()
    for url in journals_in(directory):
        try:
            stage = StoreStage.read(directory, os.path.basename(url))
            if stage is not None:
                names |= stage.incomplete_names()
        except OSError as error:
            raise from_os_error(error, url) from error
    return frozenset(names)
