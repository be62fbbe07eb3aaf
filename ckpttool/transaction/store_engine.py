"""Engine for directories in a store, which are changed by conditional requests instead of under a lock."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar, Literal

from ckpttool.core.errors import AccessDenied, from_os_error
from ckpttool.storage import fs, remote
from ckpttool.transaction.engine import Engine, UndoMethod
from ckpttool.transaction.files import Contents, Fingerprint, StalePlan, contents
from ckpttool.transaction.history import RECORD, CommandRecord
from ckpttool.transaction.journal import Group, OperationList
from ckpttool.transaction.operations import Failures
from ckpttool.transaction.paths import shown
from ckpttool.transaction.pointer_files import list_rewrites
from ckpttool.transaction.removal import removal_operations
from ckpttool.transaction.settling import Settled
from ckpttool.transaction.state_dir import TRASH
from ckpttool.transaction.store_directory import StoreDirectory, journals_in, keeps_versions
from ckpttool.transaction.store_operations import (
    StoredObject,
    StoreOperations,
    is_settled,
    order_of_removal,
)
from ckpttool.transaction.transaction import Failure, Outcome
from ckpttool.transaction.unlinking import StrandedCheckpoint

_RECOVERS = "; the next command recovers it"


class StoreEngine(Engine):
    """Commands on a directory in a store."""

    loss_warning: ClassVar[str | None] = "removals from this store can't be undone (--trash keeps copies)"

    def undo_method(self, removals: Sequence[tuple[str, Contents]], *, is_trash: bool) -> UndoMethod:
        if is_trash:
            return UndoMethod.TRASH
        files = [(directory, [file.path for file in found.files]) for directory, found in removals]
        urls = [f"{directory}/{min(paths, key=order_of_removal)}" for directory, paths in files if paths]
        try:
            return UndoMethod.VERSIONS if keeps_versions(urls) else UndoMethod.NONE
        except OSError as error:
            raise from_os_error(error, self.directory) from error

    def remove(self, removals: Sequence[Group], identity: str, method: UndoMethod) -> Outcome:
        outcome = Outcome()
        with _store_errors(self.directory, _RECOVERS):
            groups = _unchanged(self.directory, removals, outcome)
            if groups:
                kind: Literal["remove", "trash"] = "trash" if method is UndoMethod.TRASH else "remove"
                recorded_identity = None if method is UndoMethod.NONE else identity
                listed = removal_operations(groups, kind=kind, identity=recorded_identity)
                _remove(StoreOperations(self.directory, identity, listed), outcome)
        return outcome

    def restorable(
        self, record: CommandRecord, undoing: OperationList, *, is_latest_step: bool, dry_run: bool
    ) -> tuple[list[int], frozenset[int], dict[str, Failure]]:
        if not dry_run:  # restoring looks, too
            return [*range(len(undoing.groups))], frozenset(), {}
        with _store_errors(self.directory):
            missing, failures = self._undo(undoing).missing()
        numbers = [number for number in range(len(undoing.groups)) if number not in failures]
        outcome, in_place = _outcome(undoing, numbers, missing, failures)
        return numbers, in_place, outcome.failures

    def restore(self, record: CommandRecord, undoing: OperationList) -> tuple[Outcome, frozenset[int]]:
        with _store_errors(self.directory, _RECOVERS):
            operations = self._undo(undoing)
            missing, failures = operations.missing()
            operations.begin()
            numbers, failures = operations.restore(missing, failures)
            operations.remove_journal()
        return _outcome(undoing, numbers, missing, failures)

    def purge(
        self, record: CommandRecord, listed: OperationList, *, dry_run: bool
    ) -> Iterator[tuple[int, int | Exception]]:
        with _store_errors(self.directory):
            operations = self._undo(listed)
            freed, failures = operations.copied_bytes()
            fit = [number for number in freed if number not in failures]
            if not dry_run:
                failures |= operations.empty(fit)
            yield from ((number, failures.get(number, freed[number])) for number in freed)

    def _undo(self, undoing: OperationList) -> StoreOperations:
        assert undoing.identity is not None  # of the command that is undone
        return StoreOperations(self.directory, undoing.identity, undoing)

    def age(self, identity: str) -> float:
        """Return the age of a command's record by the store's clock, in seconds; 0 if it has none."""
        place = StoreDirectory(self.directory)
        status = place.status(f"{TRASH}/{identity}/{RECORD}")
        return 0 if status is None else place.store.clock() - status.modified_ns / 1e9

    def journals(self) -> list[str]:
        return journals_in(self.directory)

    def owner_of(self, journal: str) -> str | None:
        return None

    def hidden_names(self) -> frozenset[str]:
        names: set[str] = set()
        for url in self.journals():
            try:
                operations = StoreOperations.read(self.directory, os.path.basename(url))
                if operations is not None:
                    names |= operations.incomplete_names()
            except OSError as error:
                raise from_os_error(error, url) from error
        return frozenset(names)

    def leftovers(self) -> list[str]:
        return self.journals()

    def settle(self, path: str) -> Settled | None:
        """Settle a journal; return None if another command has just done it."""
        remote.forget()
        try:
            operations = StoreOperations.read(self.directory, os.path.basename(path))
            return None if operations is None else _settled(operations)
        finally:
            remote.forget()


@contextmanager
def _store_errors(directory: str, result: str = "") -> Iterator[None]:
    """Clear cached answers of the store, and convert its errors; messages end with ``result``."""
    remote.forget()
    try:
        yield
    except (OSError, StalePlan) as error:
        reason = from_os_error(error, directory).reason if isinstance(error, OSError) else str(error)
        raise AccessDenied(shown(directory), reason + result) from error
    finally:
        remote.forget()


def _unchanged(directory: str, removals: Sequence[Group], outcome: Outcome) -> list[Group]:
    """Return the groups that are unchanged since the plan, with the versions of their objects."""
    found: list[Group] = []
    for one in removals:
        try:
            is_same = contents(directory, one.members).is_same_as(one.contents)
        except FileNotFoundError:
            if not any(fs.lexists(f"{directory}/{name}") for name in one.members):
                outcome.done.append(one.path)
                continue
            is_same = False
        if is_same:
            files = tuple(_with_version(file, directory) for file in one.contents.files)
            found.append(one._replace(contents=Contents(files)))
        else:
            outcome.failures[one.path] = Failure("it has changed", since_plan=True)
    return found


def _with_version(file: Fingerprint, directory: str) -> Fingerprint:
    known = remote.cached_status(f"{directory}/{file.path}").object
    return file if known is None else replace(file, version=known.version)


def _remove(operations: StoreOperations, outcome: Outcome) -> None:
    groups = operations.listed.groups
    try:
        operations.begin()
    except OSError as error:
        reason = f"{from_os_error(error, operations.directory).reason}; nothing was removed"
        raise AccessDenied(operations.directory, reason) from error
    failures = operations.copy()
    remaining = [number for number in range(len(groups)) if number not in failures]
    if remaining:
        names = {os.path.basename(groups[number].path) for number in remaining}
        remote.forget()  # copying may take hours
        # The journal that commits has the old texts of the pointers, so that recovery can restore them. If
        # others have rewritten one since, it isn't overwritten, and nothing is removed.
        operations.commit(remaining, list_rewrites(operations.directory, names))
        if not operations.write_pointers():
            lists = ", ".join(one.name for one in operations.listed.pointers)
            change = StalePlan(f"{lists} has changed", since_plan=True)
            failures |= dict.fromkeys(remaining, change)
            remaining = []
    if remaining:
        left = operations.finish(remaining)
        failures |= left
        if is_settled(left):
            kept = [number for number, error in left.items() if not isinstance(error, StrandedCheckpoint)]
            operations.drop_copies(kept)
            operations.restore_pointers(kept)
            operations.close([number for number in remaining if number not in kept])
    else:
        operations.abandon()
    for number, failure in failures.items():
        outcome.fail(groups[number].path, failure)
    done = [groups[number] for number in remaining if number not in failures]
    outcome.done += [group.path for group in done]
    outcome.freed += sum(group.contents.nbytes for group in done)


def _outcome(
    listed: OperationList, numbers: Sequence[int], missing: Sequence[StoredObject], failures: Failures
) -> tuple[Outcome, frozenset[int]]:
    paths = [group.path for group in listed.groups]
    failed = {paths[number]: Failure.of(failure) for number, failure in failures.items()}
    return Outcome([paths[number] for number in numbers], failed), frozenset(numbers) - {
        one.group for one in missing
    }


def _settled(operations: StoreOperations) -> Settled:
    """Finish an interrupted undo; of a removal, finish the groups that have lost an object."""
    # Without locks, a running command can't be told from a killed one. So a removal is only finished for
    # checkpoints that are incomplete already; the others are kept, and pointers name them again.
    listed, settled = operations.listed, Settled(operations.listed)
    numbers = range(len(listed.groups))
    if listed.kind == "restore":
        settled.finished, failures = operations.restore(*operations.missing())
        settled.notes = {
            number: f"not restored: {Failure.of(one).text()}" for number, one in failures.items()
        }
        operations.remove_journal()  # the record has what is left
        return settled
    done = sorted(listed.done or ())
    settled.finished = sorted(operations.incomplete().intersection(done))
    if listed.kind == "trash":
        settled.reverted = [at for at in numbers if at not in settled.finished]
    if not listed.is_committed:
        operations.abandon()
        return settled
    failures = operations.finish(settled.finished)
    messages = {number: str(failure) for number, failure in failures.items()}
    if not is_settled(failures):
        settled.failures = messages
        return settled
    settled.notes = messages
    operations.restore_pointers([number for number in done if number not in settled.finished])
    operations.close(done)
    return settled
