"""Removes checkpoints from a store, in which nothing can be renamed or locked.

A journal, ``.ckpttool-prune-<id>.json``, lies beside the checkpoints before the first object goes. Then of
each checkpoint the object goes without which it is incomplete, and after these all others; each only if it
still is what the plan saw. After a kill the next command that changes the directory finishes what was begun,
which is each checkpoint whose first object is gone, and leaves the others to the next plan.

With a trash, all is copied to ``.ckpttool-trash/<id>`` before. Nothing holds two commands apart: each may
take the other for killed. So copies are dropped only with the journal of one that has not begun to remove.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from typing import Any, NamedTuple, TypeVar

from ckpttool.core.errors import AccessDenied, DamagedCheckpoint, from_os_error
from ckpttool.formats.interface import SIDECARS
from ckpttool.formats.tensorflow.state import MAX_BYTES as MAX_STATE
from ckpttool.formats.tensorflow.state import NAME
from ckpttool.io import fs, remote
from ckpttool.io.stores import ObjectStatus, Replaced
from ckpttool.transaction.files import contents
from ckpttool.transaction.journal import IDENTITY, Group, Recovery, Rewrite
from ckpttool.transaction.paths import shown
from ckpttool.transaction.pointer_files import merged_state, state_without
from ckpttool.transaction.removal import RemovalOutcome
from ckpttool.transaction.staged_output import error_text
from ckpttool.transaction.state_dir import MAX_BYTES, TRASH

SCHEMA = "ckpttool.store-removal/1"
RECORD = "record.json"
COPIES = "0"
"""The directory in a command's place in the trash that the copies lie in."""
_PREFIX, _SUFFIX = ".ckpttool-prune-", ".json"
REQUESTS_AT_ONCE = 16
_COMPARED_AT_ONCE = 1 << 23
"""Bytes of an object that are read at once to be compared."""
_CHANGED = "it has changed since the plan was made"
_FIRST = re.compile(
    r"\.metadata|.*\.index(?:\.json)?|commit_success\.txt|_CHECKPOINT_METADATA|_METADATA|saved_model\.pb"
)
"""What is written last into a checkpoint's directory, or says what lies in it."""
_WEIGHTS = re.compile(r".*\.(?:safetensors|bin|pt|pth|ckpt|h5|npz|pdparams)")

T = TypeVar("T")


class Way(Enum):
    """How what is removed can be restored: not at all, from versions that a bucket keeps, or from copies."""

    NONE = "none"
    VERSIONS = "versions"
    COPIES = "copies"


class StoredCheckpoint(NamedTuple):
    """A checkpoint that goes: its name, and its objects by their names in its directory, as they go."""

    name: str
    objects: Mapping[str, ObjectStatus]

    @property
    def first(self) -> str:
        """Return the object that goes first."""
        return next(iter(self.objects))

    @property
    def nbytes(self) -> int:
        """Return the bytes of all objects."""
        return sum(one.size for one in self.objects.values())


class StoreRecord(NamedTuple):
    """What one command removes, or has removed, from one directory.

    Attributes:
        directory: Its URL.
        identity: Of the command.
        way: How it can be restored.
        checkpoints: What goes.
        state: What TensorFlow's state file said, and says since.
        is_copying: Whether nothing is removed yet, nor has the state file changed.
    """

    directory: str
    identity: str
    way: Way
    checkpoints: tuple[StoredCheckpoint, ...]
    state: Rewrite | None = None
    is_copying: bool = False

    def without(self, names: Collection[str]) -> StoreRecord:
        """Return the record without some checkpoints."""
        return self._replace(checkpoints=tuple(one for one in self.checkpoints if one.name not in names))

    @property
    def journal(self) -> str:
        """Return the name of the journal in the directory."""
        return f"{_PREFIX}{self.identity}{_SUFFIX}"

    @property
    def place(self) -> str:
        """Return the name of the command's place in the directory."""
        return f"{TRASH}/{self.identity}"

    def copy_of(self, name: str) -> str:
        """Return the name of an object's copy in the directory."""
        return f"{self.place}/{COPIES}/{name}"

    def path(self, checkpoint: StoredCheckpoint) -> str:
        """Return a checkpoint's URL."""
        return f"{self.directory}/{checkpoint.name}"


class StoreDirectory:
    """A directory in a store, whose objects are asked about anew each time; all raise ``OSError``."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.store, prefix = remote.store_at(directory)
        self._prefix = f"{prefix}/" if prefix else ""

    def key(self, name: str) -> str:
        """Return the name that the store has for an object."""
        return self._prefix + name

    def status(self, name: str) -> ObjectStatus | None:
        """Return what is said of an object; None if there is none."""
        try:
            return self.store.status(self.key(name))
        except FileNotFoundError:
            return None

    def read(self, name: str) -> tuple[bytes, ObjectStatus] | None:
        """Return the bytes of a small object, and of which one they are; None if there is none."""
        status = self.status(name)
        if status is None:
            return None
        if status.size > MAX_BYTES:
            raise OSError(0, f"{status.size:,} bytes", f"{self.directory}/{name}")
        return self.store.read(self.key(name), 0, status.size, status) if status.size else b"", status

    def is_same(self, name: str, of: ObjectStatus, other: str, of_other: ObjectStatus) -> bool:
        """Compare two objects by size and version, or byte by byte if the versions differ."""
        if of.size != of_other.size:
            return False
        if of.version and of.version == of_other.version:
            return True
        return all(
            self.store.read(self.key(name), begin, end, of)
            == self.store.read(self.key(other), begin, end, of_other)
            for begin in range(0, of.size, _COMPARED_AT_ONCE)
            if (end := min(begin + _COMPARED_AT_ONCE, of.size))
        )

    def remove(self, name: str, of: ObjectStatus) -> None:
        """Remove an object as far as it is still the same; that it is gone already is fine."""
        with suppress(FileNotFoundError):
            self.store.remove(self.key(name), of)

    def replace(self, name: str, data: bytes, of: ObjectStatus | None) -> None:
        """Write an object in the place of one that is still the same, or of none."""
        try:
            self.store.write(self.key(name), [data], len(data), of)
        except (FileExistsError, FileNotFoundError) as error:
            raise Replaced(f"{self.directory}/{name}") from error

    def remove_now(self, name: str) -> None:
        """Remove an object of ours, whatever it is."""
        if (status := self.status(name)) is not None:
            self.remove(name, status)

    def copy(self, name: str, to: str, of: ObjectStatus) -> None:
        """Copy an object, and require that the copy has its size."""
        self.store.copy(self.key(name), self.key(to))
        copied = self.status(to)
        if copied is None or copied.size != of.size:
            raise Replaced(f"{self.directory}/{name}")


def each(step: Callable[[T], None], things: Iterable[T]) -> Iterator[tuple[T, OSError]]:
    """Do something with many things at once; yield those with which it failed, and why."""

    from concurrent.futures import ThreadPoolExecutor

    def attempt(thing: T) -> OSError | None:
        try:
            step(thing)
        except OSError as error:
            return error
        return None

    given = list(things)
    with ThreadPoolExecutor(REQUESTS_AT_ONCE) as threads:
        for thing, error in zip(given, threads.map(attempt, given), strict=True):
            if error is not None:
                yield thing, error


def keeps_versions(removals: Iterable[Sequence[str]]) -> bool:
    """Tell whether the store keeps a version of what is removed.

    Args:
        removals: The URLs of the objects of each checkpoint, of which the first is asked about.
    """

    def require_version(url: str) -> None:
        store, name = remote.store_at(url)
        if not store.keeps_version(name):
            raise FileNotFoundError

    urls = [urls[0] for urls in removals if urls]
    for _, error in each(require_version, urls):
        if not isinstance(error, FileNotFoundError):
            raise error
        return False
    return bool(urls)


# Remove ---------------------------------------------------------------------------------------------


def remove_from_store(directory: str, removals: Sequence[Group], identity: str, way: Way) -> RemovalOutcome:
    """Remove checkpoints of one directory; what has changed since the plan was made stays."""
    outcome = RemovalOutcome()
    place = StoreDirectory(directory)
    try:
        checkpoints = _unchanged(place, removals, outcome)
        if checkpoints:
            record = StoreRecord(directory, identity, way, checkpoints)
            _remove_with_journal(place, record, outcome)
    except OSError as error:
        reason = from_os_error(error, directory).reason
        raise AccessDenied(directory, f"{reason}; the next prune recovers") from error
    finally:
        remote.forget()
    return outcome


def _unchanged(
    place: StoreDirectory, removals: Sequence[Group], outcome: RemovalOutcome
) -> tuple[StoredCheckpoint, ...]:
    """Return what is still as the plan saw it, with the versions of its objects."""
    remote.forget()
    found: list[StoredCheckpoint] = []
    for removal in removals:
        try:
            is_same = contents(place.directory, removal.members).is_same_as(removal.contents)
        except FileNotFoundError:
            if not any(fs.lexists(f"{place.directory}/{name}") for name in removal.members):
                outcome.removed.append(removal.path)
                continue
            is_same = False
        if not is_same:
            outcome.failed[removal.path] = _CHANGED
            continue
        names = in_order(file.path for file in removal.contents.files)
        objects = {name: remote.look_at(f"{place.directory}/{name}").object for name in names}
        known = {name: status for name, status in objects.items() if status is not None}
        found.append(StoredCheckpoint(os.path.basename(removal.path), known))
    return tuple(found)


def in_order(names: Iterable[str]) -> list[str]:
    """Return the objects of a checkpoint as they go: first the one without which it is none."""

    def place(name: str) -> tuple[bool, bool, bool]:
        base = os.path.basename(name)
        return _FIRST.fullmatch(base) is None, base.endswith(SIDECARS), _WEIGHTS.fullmatch(base) is None

    return sorted(names, key=place)


def _remove_with_journal(place: StoreDirectory, record: StoreRecord, outcome: RemovalOutcome) -> None:
    if record.way is Way.COPIES:
        record = _copied(place, record, outcome)
        if not record.checkpoints:
            return
    else:
        record = record._replace(state=_state_rewrite(place, record))
        _begin(place, record)
    if record.state is not None and not _rewrite_state(place, record.state):
        outcome.failed |= {
            record.path(one): f"{NAME} has changed since the plan was made" for one in record.checkpoints
        }
        _drop(place, record)
        return
    _remove_objects(place, record, outcome)


def _begin(place: StoreDirectory, record: StoreRecord) -> None:
    """Write the journal; who may not write one removes nothing."""
    try:
        place.replace(record.journal, _document(record), None)
    except OSError as error:
        reason = f"{from_os_error(error, record.directory).reason}; nothing was removed"
        raise AccessDenied(record.directory, reason) from error


def _copied(place: StoreDirectory, record: StoreRecord, outcome: RemovalOutcome) -> StoreRecord:
    """Copy all to the trash; return what is to be removed now, as its journal says."""
    _begin(place, record._replace(is_copying=True))
    journal = place.status(record.journal)
    pairs = [(one, name) for one in record.checkpoints for name in one.objects]
    failed = {
        one.name: _CHANGED if isinstance(error, Replaced) else error_text(error)
        for (one, _), error in each(
            lambda pair: place.copy(pair[1], record.copy_of(pair[1]), pair[0].objects[pair[1]]), pairs
        )
    }
    outcome.failed |= {f"{record.directory}/{name}": why for name, why in failed.items()}
    _drop_copies(place, record, failed)
    record = record.without(failed)
    if not record.checkpoints:
        place.remove_now(record.journal)
        return record
    record = record._replace(state=_state_rewrite(place, record))
    try:
        place.replace(record.journal, _document(record), journal)
    except Replaced as error:
        _drop_copies(place, record, {one.name for one in record.checkpoints})
        reason = "another ckpttool took this prune for an interrupted one; nothing was removed"
        raise AccessDenied(record.directory, reason) from error
    return record


def _state_rewrite(place: StoreDirectory, record: StoreRecord) -> Rewrite | None:
    """Return what TensorFlow's state file is to say; None if it has nothing to do with what goes."""
    status = place.status(NAME)
    found = None if status is None or status.size > MAX_STATE else place.read(NAME)
    if found is None:
        return None
    return state_without(record.directory, found[0], {one.name for one in record.checkpoints})


def _rewrite_state(place: StoreDirectory, rewrite: Rewrite) -> bool:
    """Make the state file say something else; tell whether it said what it was to say before."""
    found = place.read(rewrite.name)
    text = None if found is None else found[0].decode("utf-8", "surrogateescape")
    if found is None or text != rewrite.before or rewrite.after is None:
        return False
    try:
        place.replace(rewrite.name, rewrite.after.encode("utf-8", "surrogateescape"), found[1])
    except Replaced:
        return False
    return True


def _remove_objects(place: StoreDirectory, record: StoreRecord, outcome: RemovalOutcome) -> None:
    kept: set[str] = set()
    is_settled = True
    for one, error in each(lambda one: place.remove(one.first, one.objects[one.first]), record.checkpoints):
        outcome.failed[record.path(one)] = _CHANGED if isinstance(error, Replaced) else error_text(error)
        kept.add(one.name)
        is_settled &= isinstance(error, Replaced)
    begun = record.without(kept)
    left = _remove_rest(place, begun.checkpoints)
    for one in begun.checkpoints:
        if one.name in left:
            outcome.failed[record.path(one)] = f"only a part of it was removed: {error_text(left[one.name])}"
            outcome.stranded.add(record.path(one))
            is_settled &= isinstance(left[one.name], Replaced)
        else:
            outcome.removed.append(record.path(one))
            outcome.freed += one.nbytes
    if is_settled:
        if record.way is Way.COPIES:
            _drop_copies(place, record, kept)
        _finish(place, begun)


def _remove_rest(place: StoreDirectory, checkpoints: Sequence[StoredCheckpoint]) -> dict[str, OSError]:
    """Remove all but the first objects; return of which checkpoints some could not be removed, and why."""
    pairs = [(one, name) for one in checkpoints for name in one.objects if name != one.first]
    failures = each(lambda pair: place.remove(pair[1], pair[0].objects[pair[1]]), pairs)
    return {one.name: error for (one, _), error in failures}


def _finish(place: StoreDirectory, record: StoreRecord) -> None:
    """Note what can be restored, and take the journal away."""
    if record.way is not Way.NONE and record.checkpoints:
        name = f"{record.place}/{RECORD}"
        place.replace(name, _document(record), place.status(name))
    place.remove_now(record.journal)


def _drop(place: StoreDirectory, record: StoreRecord) -> None:
    """Take back what was begun before the first object was removed."""
    place.remove_now(record.journal)
    if record.way is Way.COPIES:
        _drop_copies(place, record, {one.name for one in record.checkpoints})


def _drop_copies(place: StoreDirectory, record: StoreRecord, names: Collection[str]) -> None:
    copies = [record.copy_of(name) for one in record.checkpoints if one.name in names for name in one.objects]
    for _, error in each(place.remove_now, copies):
        raise error


# Journals and records -------------------------------------------------------------------------------


def journals_in(directory: str) -> list[str]:
    """Return the URLs of the journals in a directory, the oldest first."""
    try:
        names = sorted(fs.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise from_os_error(error, directory) from error
    return [f"{directory}/{name}" for name in names if _identity_of(name) is not None]


def _identity_of(name: str) -> str | None:
    if not (name.startswith(_PREFIX) and name.endswith(_SUFFIX)):
        return None
    identity = name[len(_PREFIX) : -len(_SUFFIX)]
    return identity if IDENTITY.fullmatch(identity) else None


def begun_names(directory: str) -> frozenset[str]:
    """Return the names in a directory of which a part has gone already, as journals tell."""
    names: set[str] = set()
    for url in journals_in(directory):
        place, journal = StoreDirectory(directory), os.path.basename(url)
        try:
            found = place.read(journal)
            record = None if found is None else parse_record(found[0], directory, journal)
            for one in record.checkpoints if record is not None and not record.is_copying else ():
                if place.status(one.first) is None:
                    names |= {name.partition("/")[0] for name in one.objects}
        except OSError as error:
            raise from_os_error(error, url) from error
    return frozenset(names)


def recover_store(directory: str) -> Recovery:
    """Finish what was begun in a directory when it was interrupted; the rest is left to the next plan."""
    recovery = Recovery()
    remote.forget()
    for url in journals_in(directory):
        place = StoreDirectory(directory)
        name = os.path.basename(url)
        try:
            found = place.read(name)
            if found is not None:
                _recover(place, parse_record(found[0], directory, name), found[1], recovery)
        except OSError as error:
            reason = f"what was interrupted can't be recovered: {error_text(error)}"
            raise AccessDenied(shown(url), reason) from error
        finally:
            remote.forget()
    return recovery


def _recover(place: StoreDirectory, record: StoreRecord, journal: ObjectStatus, recovery: Recovery) -> None:
    if record.is_copying:
        place.remove(record.journal, journal)
        _drop_copies(place, record, {one.name for one in record.checkpoints})
        return
    begun = tuple(one for one in record.checkpoints if place.status(one.first) is None)
    left = {
        name: error for name, error in _remove_rest(place, begun).items() if not isinstance(error, Replaced)
    }
    recovery.finished += [record.path(one) for one in begun if one.name not in left]
    recovery.failed |= {f"{record.directory}/{name}": error_text(error) for name, error in left.items()}
    if left:
        return
    if record.state is not None:
        names = {one.name for one in begun}
        restore_state(place, record, [one.name for one in record.checkpoints if one.name not in names])
    # Of what had not begun the copies stay, too: whoever made them may be at work still.
    _finish(place, record if record.way is Way.COPIES else record._replace(checkpoints=begun))


def restore_state(place: StoreDirectory, record: StoreRecord, names: Collection[str]) -> bool:
    """Let the state file list checkpoints again that were to go; tell whether it says something else now."""
    found = place.read(NAME)
    if record.state is None or not names or found is None:
        return False
    now = found[0].decode("utf-8", "surrogateescape")
    try:
        text = merged_state(now, Rewrite(NAME, record.state.after, record.state.before), names)
    except ValueError:  # it is another one now
        return False
    if text == now:
        return False
    place.replace(NAME, text.encode("utf-8", "surrogateescape"), found[1])
    return True


def records_in(directory: str) -> list[StoreRecord]:
    """Return what was removed from a directory and may be restored, the oldest first."""
    trash = f"{directory}/{TRASH}"
    try:
        identities = sorted(name for name in fs.listdir(trash) if IDENTITY.fullmatch(name))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise from_os_error(error, trash) from error
    place = StoreDirectory(directory)
    records = []
    for identity in identities:
        name = f"{TRASH}/{identity}/{RECORD}"
        try:
            found = place.read(name)
        except OSError as error:
            raise from_os_error(error, f"{directory}/{name}") from error
        if found is not None:
            records.append(parse_record(found[0], directory, name))
    return records


def write_journal(place: StoreDirectory, record: StoreRecord) -> None:
    """Note what is on its way: whatever lacks its first object goes again if a kill comes."""
    place.replace(record.journal, _document(record), place.status(record.journal))


def write_record(place: StoreDirectory, record: StoreRecord) -> None:
    """Write what can still be restored; a record without a checkpoint goes."""
    name = f"{record.place}/{RECORD}"
    if record.checkpoints:
        place.replace(name, _document(record), place.status(name))
    else:
        place.remove_now(name)


def _document(record: StoreRecord) -> bytes:
    document = {
        "schema": SCHEMA,
        "identity": record.identity,
        "way": record.way.value,
        "copying": record.is_copying,
        "checkpoints": [
            {"name": one.name, "objects": [[name, *status] for name, status in one.objects.items()]}
            for one in record.checkpoints
        ],
        "state": None if record.state is None else [record.state.before, record.state.after],
    }
    return json.dumps(document).encode()


def parse_record(data: bytes, directory: str, name: str) -> StoreRecord:
    """Return what a journal or a record says.

    Raises:
        DamagedCheckpoint: It isn't one of ours.
    """
    try:
        document = json.loads(data)
        if document["schema"] != SCHEMA or IDENTITY.fullmatch(document["identity"]) is None:
            raise ValueError("another schema")
        if document["identity"] not in name:
            raise ValueError("it is another command's")
        state = document["state"]
        return StoreRecord(
            directory,
            document["identity"],
            Way(document["way"]),
            tuple(map(_checkpoint, document["checkpoints"])),
            None if state is None else Rewrite(NAME, _text(state[0]), _text(state[1])),
            is_copying=document["copying"] is True,
        )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        problem = f"a journal or record that isn't one of ours: {error}"
        raise DamagedCheckpoint(f"{directory}/{name}", problem, expected="move it away to go on") from error


def _checkpoint(document: Mapping[str, Any]) -> StoredCheckpoint:
    objects = {
        _inner(name): ObjectStatus(int(size), int(modified), _text(version))
        for name, size, modified, version in document["objects"]
    }
    if not objects:
        raise ValueError("a checkpoint without an object")
    return StoredCheckpoint(_inner(document["name"]), objects)


def _inner(name: object) -> str:
    """Return a name that stays below its directory."""
    text = _text(name)
    if any(part in ("", os.curdir, os.pardir) for part in text.split("/")):
        raise ValueError(f"no name: {text!r}")
    return text


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"no text: {value!r}")
    return value
