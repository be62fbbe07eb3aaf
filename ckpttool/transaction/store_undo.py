"""Restores what was removed from a store, from versions or from copies in the trash; empties the trash."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from enum import Enum, auto
from typing import Protocol

from ckpttool.core.errors import AccessDenied, from_os_error
from ckpttool.formats.tensorflow.state import NAME
from ckpttool.io import fs, remote
from ckpttool.io.stores import ObjectStatus
from ckpttool.transaction.lock import lock_directory
from ckpttool.transaction.paths import NotUndone, Problem, shown
from ckpttool.transaction.record_undo import RecordUndo
from ckpttool.transaction.staged_output import error_text
from ckpttool.transaction.store_removal import (
    RECORD,
    StoredCheckpoint,
    StoreDirectory,
    StoreRecord,
    Way,
    each,
    records_in,
    recover_store,
    restore_state,
    write_journal,
    write_record,
)
from ckpttool.transaction.trash import EmptiedTrash


class _Object(Enum):
    """What is in an object's place: itself, nothing but its copy or version, nothing at all, another one."""

    THERE = auto()
    GONE = auto()
    LOST = auto()
    TAKEN = auto()


class _Source(Protocol):
    """What objects are restored from."""

    def look(self, name: str, known: ObjectStatus) -> _Object:
        """Tell what is in an object's place."""

    def restore(self, name: str) -> None:
        """Bring an object back that is gone."""

    def drop(self, names: Iterable[str]) -> None:
        """Take away what objects were restored from, if nothing else does."""


class _Copies:
    def __init__(self, place: StoreDirectory, record: StoreRecord) -> None:
        self._place, self._record = place, record

    def look(self, name: str, known: ObjectStatus) -> _Object:
        copy_name = self._record.copy_of(name)
        now, copy = self._place.status(name), self._place.status(copy_name)
        if now is None:
            return _Object.LOST if copy is None else _Object.GONE
        # The copies go once all is back: without one, an undo was killed that had come so far.
        is_same = copy is None or now.matches(known) or self._place.is_same(name, now, copy_name, copy)
        return _Object.THERE if is_same else _Object.TAKEN

    def restore(self, name: str) -> None:
        copy = self._record.copy_of(name)
        status = self._place.status(copy)
        if status is None:
            raise FileNotFoundError(0, "its copy is gone", copy)
        self._place.copy(copy, name, status)

    def drop(self, names: Iterable[str]) -> None:
        for _, error in each(self._place.remove_now, map(self._record.copy_of, names)):
            raise error


class _Versions:
    def __init__(self, place: StoreDirectory, record: StoreRecord) -> None:
        self._place = place
        self._bucket = place.store.older_versions()
        tops = {name.partition("/")[0] for one in record.checkpoints for name in one.objects}
        self._versions = {
            name: found for top in tops for name, found in self._bucket.versions(place.key(top)).items()
        }

    def look(self, name: str, known: ObjectStatus) -> _Object:
        found = self._versions.get(self._place.key(name))
        if found is None or found.newest is None:
            return _Object.LOST
        is_same = (found.newest.size, found.newest.version) == (known.size, known.version)
        if found.marker is None:
            return _Object.THERE if is_same else _Object.TAKEN
        return _Object.GONE if is_same else _Object.LOST

    def restore(self, name: str) -> None:
        key = self._place.key(name)
        marker = self._versions[key].marker
        assert marker is not None  # it was looked at
        self._bucket.uncover(key, marker)

    def drop(self, names: Iterable[str]) -> None:
        pass  # the markers are what went


def _source(place: StoreDirectory, record: StoreRecord) -> _Source:
    return _Copies(place, record) if record.way is Way.COPIES else _Versions(place, record)


_WHY = {
    _Object.TAKEN: "another object has its name now",
    _Object.LOST: "nothing is left to restore it from",
}


def undo_store_record(record: StoreRecord, dry_run: bool) -> RecordUndo:
    """Restore what one command removed from a directory, as far as nothing else is in its place."""
    done = RecordUndo()
    place = StoreDirectory(record.directory)
    try:
        source = _source(place, record)
        if not dry_run:
            write_journal(place, record)
        settled = [one for one in record.checkpoints if _restore(source, record, one, done, dry_run)]
        if dry_run:
            return done
        if restore_state(place, record, [one.name for one in settled]):
            done.pointers.append(shown(f"{record.directory}/{NAME}"))
        place.remove_now(record.journal)
        source.drop(name for one in settled for name in one.objects)
        write_record(place, record.without({one.name for one in settled}))
    except OSError as error:
        reason = f"{from_os_error(error, record.directory).reason}; the next undo goes on"
        raise AccessDenied(shown(record.directory), reason) from error
    finally:
        remote.forget()
    return done


def _restore(
    source: _Source, record: StoreRecord, checkpoint: StoredCheckpoint, done: RecordUndo, dry_run: bool
) -> bool:
    """Restore a checkpoint, what makes it one last; tell whether all of it is there then."""
    path = shown(record.path(checkpoint))
    places = _look(source, checkpoint)
    for name, state in places.items():
        if state in _WHY:
            why = _WHY[state] if name == checkpoint.name else f"{os.path.basename(name)}: {_WHY[state]}"
            done.problems.append(NotUndone.because(path, why))
            return False
    gone = [name for name, state in places.items() if state is _Object.GONE]
    if not dry_run:
        rest = [name for name in gone if name != checkpoint.first]
        for step in (rest, [name for name in gone if name == checkpoint.first]):
            for _, error in each(source.restore, step):
                done.problems.append(NotUndone.because(path, error_text(error)))
                return False
    if gone:
        done.restored[path] = path
    return True


def _look(source: _Source, checkpoint: StoredCheckpoint) -> dict[str, _Object]:
    places: dict[str, _Object] = {}

    def look(name: str) -> None:
        places[name] = source.look(name, checkpoint.objects[name])

    for _, error in each(look, checkpoint.objects):
        raise error
    return {name: places[name] for name in checkpoint.objects}


# Empty the trash ------------------------------------------------------------------------------------


def empty_store_trash(directory: str, older_than: int | None = None, dry_run: bool = False) -> EmptiedTrash:
    """Remove the copies that the records of a directory's trash list, and the records."""
    with nullcontext() if dry_run else lock_directory(directory):
        return _empty(directory, older_than, dry_run)


def _empty(directory: str, older_than: int | None, dry_run: bool) -> EmptiedTrash:
    place = StoreDirectory(directory)
    removed: list[str] = []
    freed = 0
    problems: list[Problem] = []
    if not dry_run:
        recovery = recover_store(directory)
        problems += [Problem(path, why) for path, why in recovery.failed.items()]
    try:
        for record in records_in(directory):
            if older_than is not None and _age(place, record) < older_than:
                continue
            if record.way is Way.COPIES:
                removed += [shown(record.path(one)) for one in record.checkpoints]
                freed += sum(one.nbytes for one in record.checkpoints)
            if not dry_run:
                if record.way is Way.COPIES:
                    names = (name for one in record.checkpoints for name in one.objects)
                    _Copies(place, record).drop(names)
                write_record(place, record.without({one.name for one in record.checkpoints}))
                remote.forget()
                problems += _unlisted(record)
    except OSError as error:
        raise from_os_error(error, directory) from error
    finally:
        remote.forget()
    return EmptiedTrash(tuple(removed), freed, dry_run, tuple(problems))


def _age(place: StoreDirectory, record: StoreRecord) -> float:
    """Return how long ago a command was done, in seconds by the store's clock."""
    status = place.status(f"{record.place}/{RECORD}")
    return 0 if status is None else place.store.clock() - status.modified_ns / 1e9


def _unlisted(record: StoreRecord) -> Sequence[Problem]:
    trash = f"{record.directory}/{record.place}"
    files = [f"{directory}/{name}" for directory, _, names in fs.walk(trash, _raise) for name in names]
    return [Problem(shown(path), "no record lists it; it is left as it is") for path in files]


def _raise(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
