"""Lists of pins, with remarks on checkpoints: their text, the directories that they cover, and protection.

A remark is a table of the list: ``[about."model_epoch_3.pth"]`` with ``note``, ``until`` and other keys. It
is stored in the list so that it moves with the list, and follows renames.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, datetime
from itertools import pairwise
from typing import Any, NamedTuple

from ckpttool.containers.toml import as_toml, change_strings, parse_toml, quote
from ckpttool.core.errors import AccessDenied, CheckpointError, DamagedCheckpoint, UsageError, from_os_error
from ckpttool.core.name_patterns import PIN_LISTS, PINS
from ckpttool.core.result import document_of
from ckpttool.core.text import closest, seconds
from ckpttool.formats.pointer_kind import MAX_STATE, NO_CHANGES, Changes, Renamer, TextKind
from ckpttool.formats.tensorflow.prefix import INDEX
from ckpttool.runs.pointers.search import CheckpointIndex, PointerProtections, Search, SearchedKind
from ckpttool.runs.series import Group
from ckpttool.runs.survey import resolve_checkpoint
from ckpttool.storage import fs
from ckpttool.storage.fs import Snapshot
from ckpttool.storage.source import NotRegular
from ckpttool.transaction.paths import is_within, shown
from ckpttool.transaction.state_dir import state_dir_of, user_name

TABLE = "about"
NOTE, UNTIL = "note", "until"
_FACT = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}", re.ASCII)
_MAX_FACT_CHARS = 10_000
_HEADING = re.compile(r"^[ \t]*\[.*\][ \t]*(?:#.*)?\r?$", re.MULTILINE)
"""A line that may begin a table."""
_CHANGED = "it was changed by another process"


@dataclass(frozen=True, slots=True)
class Remark:
    """Remark on one checkpoint.

    Attributes:
        note: A sentence or two.
        until: Last day of its pin, in local time; None if it doesn't expire.
        facts: Other facts, by plain words such as ``data``.
        fault: Description of invalid entries; None if all are valid.
    """

    note: str | None = None
    until: date | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    fault: str | None = None

    def document(self) -> dict[str, Any]:
        return document_of(self, "note", "until", "facts")

    @property
    def has_ended(self) -> bool:
        """Return whether its pin has expired; an unreadable date has not."""
        return self.until is not None and self.until < date.fromtimestamp(time.time())

    @property
    def is_empty(self) -> bool:
        """Return whether it has no content."""
        return self.note is None and self.until is None and not self.facts


NO_REMARK = Remark()


def remarks_in(text: str) -> dict[str, Remark]:
    """Return the remarks in a list, by the names of checkpoints in it.

    Raises:
        ValueError: It is no TOML.
    """
    tables = parse_toml(text).get(TABLE, {})
    if not isinstance(tables, Mapping):
        return {}
    return {name: _remark_of(table) for name, table in tables.items() if isinstance(table, Mapping)}


def _remark_of(table: Mapping[str, object]) -> Remark:
    note, day, faults = table.get(NOTE), table.get(UNTIL), list[str]()
    if note is not None and not isinstance(note, str):
        note = None
        faults.append(f"{NOTE} is not a string")
    until = _day(day)
    if day is not None and until is None:
        faults.append(f"{UNTIL} is not a date; the pin doesn't expire")
    facts = {
        key: str(one)
        for key, one in table.items()
        if key not in (NOTE, UNTIL) and isinstance(one, str | int | float | bool)
    }
    return Remark(note, until, facts, "; ".join(faults) or None)


def _day(value: object) -> date | None:
    if isinstance(value, datetime):
        return value.date()
    if isinstance(value, date):
        return value
    try:
        return date.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return None


def parse_until(text: str) -> date:
    """Return the day of ``2027-01-01``, or of ``90d`` from today.

    Raises:
        UsageError: It isn't a day, or is in the past.
    """
    today = date.fromtimestamp(time.time())
    try:
        until = date.fromisoformat(text)
    except ValueError:
        try:
            until = date.fromtimestamp(time.time() + seconds(text))
        except (UsageError, OverflowError, ValueError, OSError) as error:
            raise UsageError(f"--until {text}: not a date (such as 2027-01-01 or 90d)") from error
    if until < today:
        raise UsageError(f"--until {text}: that day is in the past")
    return until


def parse_facts(texts: Mapping[str, str]) -> dict[str, str | None]:
    """Return facts with None for a key with an empty text, which removes it.

    Raises:
        UsageError: A key is no plain word, or a text is too long.
    """
    for key, text in texts.items():
        if _FACT.fullmatch(key) is None or key in (NOTE, UNTIL):
            raise UsageError(f"--set {key}: expected a plain word, such as data, license or seed")
        if len(text) > _MAX_FACT_CHARS:
            raise UsageError(f"--set {key}: longer than {_MAX_FACT_CHARS:,} characters")
    return {key: text or None for key, text in texts.items()}


def merged(remark: Remark, other: Remark, facts: Mapping[str, str | None]) -> Remark:
    """Return a remark updated with another one and with facts; a fact of None is removed."""
    together = {**remark.facts, **{key: text for key, text in facts.items() if text is not None}}
    kept = {key: text for key, text in together.items() if facts.get(key, text) is not None}
    return replace(
        remark,
        note=remark.note if other.note is None else other.note or None,
        until=other.until or remark.until,
        facts=kept,
    )


def with_remark(text: str, name: str, remark: Remark) -> str:
    """Return the text of a list with a new remark on a checkpoint, and no other change.

    Raises:
        ValueError: It can't be edited in place.
    """
    tables = parse_toml(text)
    about = tables.pop(TABLE, {})
    if not isinstance(about, Mapping) or not _is_of_single_values(about.get(name, {})):
        raise ValueError(f"[{TABLE}] contains lists or nested tables")
    others = {key: value for key, value in about.items() if key != name}
    newline = "\r\n" if "\r\n" in text else "\n"
    before, own, after = _split_at_table(text, name)
    lines = [line.strip() for line in own.splitlines() if line.lstrip().startswith("#")]
    if not remark.is_empty or lines:
        lines = [f"[{TABLE}.{quote(name)}]", *lines]
        lines += [f"{NOTE} = {quote(remark.note)}"] if remark.note is not None else []
        lines += [f"{UNTIL} = {remark.until.isoformat()}"] if remark.until is not None else []
        lines += [f"{key} = {as_toml(value)}" for key, value in remark.facts.items()]
    # The table moves to the end of the list, with the comments in it.
    parts = (before, after, newline.join(lines))
    text = newline.join(part.rstrip("\r\n") + newline for part in parts if part.strip())
    # The table was found by matching lines, which a multi-line string could mislead. So the new text is
    # parsed, and must differ from the old one in this remark alone.
    now = parse_toml(text)
    other_remarks = {key: value for key, value in now.pop(TABLE, {}).items() if key != name}
    is_written = remarks_in(text).get(name, NO_REMARK) == replace(remark, fault=None)
    if now != tables or other_remarks != others or not is_written:
        raise ValueError(f"[{TABLE}] is written in a way that can't be edited in place")
    return text


def _is_of_single_values(table: object) -> bool:
    return isinstance(table, Mapping) and all(
        isinstance(one, str | int | float | bool | date) for one in table.values()
    )


def _split_at_table(text: str, name: str) -> tuple[str, str, str]:
    """Return the text before the table of a checkpoint, that table, and the text after it."""
    starts = [match.start() for match in _HEADING.finditer(text)]
    for start, end in pairwise([*starts, len(text)]):
        try:
            about = parse_toml(text[start:].split("\n", 1)[0].strip()).get(TABLE, {})
        except ValueError:
            continue
        if about == {name: {}}:
            return text[:start], text[start:end], text[end:]
    return text, "", ""


def rename_remarks(text: str, renamed: Mapping[str, str]) -> str:
    """Return the text of a list with the remarks of renamed checkpoints under their new names."""
    known = remarks_in(text)
    moving = {old: known[old] for old in renamed if old in known}
    # All old remarks are removed before a new one is written: names may be swapped.
    for old in moving:
        text = with_remark(text, old, NO_REMARK)
    for old, remark in moving.items():
        text = with_remark(text, renamed[old], remark)
    return text


def fault_text(file: str, name: str, remark: Remark) -> str:
    """Return the warning about an invalid remark."""
    return f"{shown(file)}: {TABLE} {name!r}: {remark.fault}"


KEY = "pinned"


_GLOB = re.compile(r"[*?]|\[.+\]")


class _NotAList(ValueError):
    """A file that can't be a list of pins: not a regular file, or too long."""


class Pin(NamedTuple):
    """Entry of a list of pins.

    Attributes:
        file: Path of the list.
        name: Name in the list.
        path: Path of the checkpoint.
        remark: Remark on it.
    """

    file: str
    name: str
    path: str
    remark: Remark = NO_REMARK

    @property
    def exists(self) -> bool:
        """Return whether the pinned path exists."""
        return fs.exists(self.path) or fs.exists(f"{self.path}{INDEX}")


def pins_in(file: str, text: str) -> Iterator[Pin]:
    """Yield the pins in a file."""
    directory = os.path.dirname(file)
    try:
        names, remarks = pinned_names(text), remarks_in(text)
    except ValueError as error:
        raise unreadable(file, error) from error
    for name in names:
        path = shown(fs.normpath(os.path.join(directory, name)))
        yield Pin(file, name, path, remarks.get(name, NO_REMARK))


def pins_of(file: str) -> list[Pin]:
    """Return the pins in a list on disk; none if there is no list."""
    return list(pins_in(file, read_list(file)))


def pinned_names(text: str) -> list[str]:
    """Return the pinned names as they are written in a list.

    Raises:
        ValueError: It isn't TOML, or not a list of names; or the list is in a table, where it has no effect.
    """
    tables = parse_toml(text)
    if (place := _misplaced_key(tables)) is not None:
        raise ValueError(f"{place} has no effect; pins belong in {KEY}, before all tables")
    names = tables.get(KEY, [])
    if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
        raise ValueError(f"{KEY} is not a list of names")
    return names


def _misplaced_key(tables: Mapping[str, object]) -> str | None:
    """Return a misspelt or misplaced key that was meant to pin."""
    # A list without the key pins nothing, so a typing mistake would let ``prune`` remove checkpoints that
    # their user believes to be pinned.
    for key in tables:
        if key != KEY and (key.lower().startswith("pin") or closest(key, [KEY])):
            return key
    tasks = [(key, value) for key, value in tables.items() if isinstance(value, dict)]
    while tasks:
        path, table = tasks.pop()
        if KEY in table:
            return f"{path}.{KEY}"
        tasks += [(f"{path}.{key}", value) for key, value in table.items() if isinstance(value, dict)]
    return None


class PinList(TextKind, SearchedKind):
    """TOML lists of pinned checkpoints, with remarks about checkpoints."""

    what = "pins"
    where = "DIR, all directories above and below"
    files = PIN_LISTS
    blocks_renames = True

    def names(self, text: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*pinned_names(text), *remarks_in(text)]))

    def reworded(self, text: str, new: Renamer, changes: Changes = NO_CHANGES) -> str:
        def renamed(name: str) -> str | None:
            path = fs.normpath(name)
            return new(path) or new(path.removesuffix(INDEX))

        names: dict[str, str | None] = {
            name: other for name in pinned_names(text) if (other := renamed(name)) is not None
        }
        text = change_strings(text, KEY, renamed=names) if names else text
        about = {name: other for name in remarks_in(text) if (other := new(fs.normpath(name))) is not None}
        return rename_remarks(text, about)

    def find(self, search: Search, found: PointerProtections) -> None:
        files: dict[str, str] = {}
        for file in _lists_for_all(search.root, search.series.by_directory, search.snapshot):
            directory, name = os.path.split(file)
            files.setdefault(os.path.join(search.snapshot.realpath(directory), name), file)
        for file in files.values():
            try:
                text = _list_text(file, search.snapshot)
                names, remarks = pinned_names(text), remarks_in(text)
            except (CheckpointError, ValueError) as error:
                why = error.found if isinstance(error, CheckpointError) else str(error)
                groups = search.series.below(os.path.dirname(file))
                _leave_alone(found, groups, file, f"{KEY} can't be read: {why}")
                continue
            for name in names:
                remark = remarks.get(name, NO_REMARK)
                if remark.fault is not None:
                    found.warnings.append(fault_text(file, name, remark))
                if not remark.has_ended:
                    _follow_pin(found, Pin(file, name, name, remark), search)


def unreadable(file: str, error: Exception) -> DamagedCheckpoint:
    """Return the error that says that a list of pins can't be read, or changed."""
    expected = None if isinstance(error, _NotAList) else 'pinned = ["name", …]'
    return DamagedCheckpoint(shown(file), f"the pins can't be read: {error}", expected=expected)


def read_list(file: str) -> str:
    """Return the text of a list of pins, line endings included; empty if there is no list."""
    try:
        return _list_text(file, Snapshot())
    except ValueError as error:
        raise unreadable(file, error) from error


def _list_text(file: str, snapshot: Snapshot) -> str:
    """Return the text of a list of pins.

    Raises:
        ValueError: It isn't text, or can't be a list.
        CheckpointError: It can't be read.
    """
    if not snapshot.lexists(file):
        return ""
    try:
        content = snapshot.read(file, MAX_STATE)
    except FileNotFoundError as error:
        if snapshot.islink(file):
            raise from_os_error(error, file) from error
        return ""
    except NotRegular as error:
        raise _NotAList("not a regular file") from error
    except OSError as error:
        raise from_os_error(error, file) from error
    if len(content) > MAX_STATE:
        raise _NotAList(f"longer than {MAX_STATE:,} bytes")
    return content.decode()


def changed_text(
    file: str, text: str, *, renamed: Mapping[str, str | None] | None = None, added: Sequence[str] = ()
) -> str:
    """Return the text of a file with other pins in it."""
    try:
        return change_strings(text, KEY, renamed=renamed, added=added)
    except ValueError as error:
        raise unreadable(file, error) from error


def write_list(file: str, before: str, text: str) -> None:
    """Write a list of pins, or remove one that is empty now.

    Args:
        file: The list.
        before: Its text when it was read, which must still be the same: in a store there is no lock.
        text: Its new text.
    """
    is_empty = "".join(text.split()) in ("", f"{KEY}=[]")
    _require_trusted_link(file)
    target = fs.realpath(file)
    place = fs.place_of(target)
    place.refresh(target)
    try:
        expected = fs.stat(target) if fs.lexists(target) else None
        if read_list(file) != before:
            raise AccessDenied(shown(file), f"{_CHANGED}; no pin was changed")
        if not is_empty:
            place.write(target, text.encode(), expected)
        elif expected is not None:
            place.remove(target, expected)
    except OSError as error:
        reason = _CHANGED if fs.is_change(error) else from_os_error(error, file).reason
        raise AccessDenied(shown(file), f"{reason}; no pin was changed") from error
    finally:
        place.refresh(target)


def _require_trusted_link(file: str) -> None:
    """Raise AccessDenied if a symlink was made by another user than this one or its target's owner."""
    # The lists of all directories above are searched, and one of these may be writable by other users. Their
    # symlink of this name could point to any file of this user, which would be overwritten here.
    if not fs.islink(file) or not hasattr(os, "geteuid"):
        return
    maker = fs.lstat(file).st_uid
    trusted = {os.geteuid(), *((fs.stat(file).st_uid,) if fs.exists(file) else ())}
    if maker not in trusted:
        reason = f"a symlink that another user made, {user_name(maker)}; no pin was changed"
        raise AccessDenied(shown(file), reason, expected="remove it, or edit the list that it points to")


def list_for(directory: str) -> str:
    """Return the path of the list for pins of checkpoints in a directory."""
    # A Fluid root and Accelerate's ``checkpoints`` allow no other entries, so their list is in the directory
    # above; such a place has a suffix. An existing list under an older name is kept.
    home = state_dir_of(directory)
    place = home.path if home.suffix else directory
    return next(_lists_in(place, Snapshot()), os.path.join(place, PINS))


def _lists_in(directory: str, snapshot: Snapshot) -> Iterator[str]:
    paths = (os.path.join(directory, name) for name in PIN_LISTS)
    return (path for path in paths if snapshot.lexists(path))


def lists_for(directory: str, snapshot: Snapshot | None = None) -> list[str]:
    """Return the lists that may pin checkpoints in a directory, the nearest first.

    The search ends after the home directory, and at the root of the file system. Without a snapshot, files on
    disk are read.
    """
    snapshot = snapshot or Snapshot()
    real = snapshot.realpath(directory)
    lists = [os.path.join(directory, os.path.basename(file)) for file in _lists_in(real, snapshot)]
    for above in _directories_above(real, snapshot):
        for file in _lists_in(above, snapshot):
            # As a user would write it from the directory, if that path leads there.
            near = fs.normpath(os.path.join(directory, os.path.relpath(above, real)))
            is_near = snapshot.realpath(near) == above
            lists.append(os.path.join(near, os.path.basename(file)) if is_near else file)
    return lists


def _directories_above(directory: str, snapshot: Snapshot) -> Iterator[str]:
    # Lists in a home directory cover all of a user's runs, and those above it would be other users'. The
    # search also ends at the border of a file system, or of a store.
    home = snapshot.realpath(os.path.expanduser("~"))
    parent = fs.dirname(directory)
    while directory not in (home, parent) and _device(directory, snapshot) in (
        _device(parent, snapshot),
        None,
    ):
        yield parent
        directory, parent = parent, fs.dirname(parent)


def _device(directory: str, snapshot: Snapshot) -> int | str | None:
    if root := fs.root_of(directory):
        return root
    try:
        return snapshot.status(directory).st_dev
    except OSError as error:
        if fs.is_absence(error):
            return None
        raise from_os_error(error, directory) from error


def pins_above(directory: str) -> Iterator[Pin]:
    """Yield the pins of checkpoints in a directory tree that are in lists above it."""
    real = fs.realpath(directory)
    for file in lists_for(directory):
        above = os.path.dirname(file)
        if fs.realpath(above) == real:
            continue
        for pinned in pins_of(file):
            path = fs.realpath(_pin_path(pinned))
            if is_within(path, real) and path != real:
                shown_path = shown(os.path.join(directory, os.path.relpath(path, real)))
                yield Pin(file, pinned.name, shown_path, pinned.remark)


def _pin_path(pinned: Pin) -> str:
    return fs.normpath(os.path.join(os.path.dirname(pinned.file), pinned.name))


def pin_fault(pinned: Pin) -> str | None:
    """Return why a pin has no effect although its path exists; None if it is valid."""
    if (fault := _name_fault(pinned, Snapshot())) is not None:
        return fault
    try:
        resolve_checkpoint(_pin_path(pinned))
    except CheckpointError as error:
        return f"which is not a checkpoint: {error.found}"
    return None


def _name_fault(pinned: Pin, snapshot: Snapshot) -> str | None:
    if not pinned.name.strip() or "\0" in pinned.name:
        return "which is not a name"
    directory = snapshot.realpath(os.path.dirname(pinned.file))
    path = _pin_path(pinned)
    above, name = os.path.split(path)
    # The name itself may be a symlink to another directory: the symlink is pinned.
    real = snapshot.realpath(path) if name == os.pardir else os.path.join(snapshot.realpath(above), name)
    if not is_within(fs.normpath(real), directory):
        return "which is outside the directory of the list"
    return None


def absence_message(pinned: Pin) -> str:
    """Return the message for a pin whose path doesn't exist."""
    hint = ": pins are names, not globs" if _GLOB.search(pinned.name) else ""
    return f"doesn't exist{hint} (ckpttool unpin removes the pin)"


def _lists_for_all(root: str, directories: Iterable[str], snapshot: Snapshot) -> Iterator[str]:
    """Yield the lists that may pin checkpoints in directories; those above the root only once."""
    yield from lists_for(root, snapshot)
    known = {root}
    for directory in sorted(directories):
        if not is_within(directory, root):
            yield from lists_for(directory, snapshot)
            continue
        while directory not in known:
            known.add(directory)
            yield from _lists_in(directory, snapshot)
            directory = os.path.dirname(directory) or os.curdir


def _follow_pin(found: PointerProtections, pinned: Pin, search: Search) -> None:
    # The checkpoint at the path itself is protected, or else the target of a symlink there, or the checkpoint
    # around the path. A pin whose path is missing may be misspelt, or its checkpoint was renamed by another
    # program: the series that its name fits are left alone. If even its directory is missing, that was moved
    # or removed as a whole: only checkpoints of the same name are protected, and all others may be removed.
    index, series, snapshot = search.index, search.series, search.snapshot
    directory, path = os.path.dirname(pinned.file), _pin_path(pinned)
    if (fault := _name_fault(pinned, snapshot)) is not None:
        _leave_alone(found, series.below(directory), pinned.file, f"{KEY} has {pinned.name!r}, {fault}")
        return
    beside, name = os.path.split(path)
    entry = index.by_path.get(os.path.join(snapshot.realpath(beside), name))
    entry = entry or index.by_path.get(snapshot.realpath(path))
    if entry is None and snapshot.exists(path):
        entry = index.find(path)
    if entry is not None:
        found.protect(entry, reason_of(pinned), pinned.file)
    elif not (snapshot.exists(path) or snapshot.exists(f"{path}{INDEX}")):
        dangling = f"{KEY} is {pinned.name}, which {absence_message(pinned)}"
        if snapshot.isdir(beside or os.curdir):
            _leave_alone(found, series.beside(path), pinned.file, dangling)
        elif _GLOB.search(pinned.name):
            _leave_alone(found, series.by_name_below(path, directory), pinned.file, dangling)
        else:
            _protect_namesakes(found, pinned, index, dangling)
    else:
        groups = series.below(path if snapshot.isdir(path) else beside)
        fault = pin_fault(pinned) if groups else None
        if fault is not None:
            _leave_alone(found, groups, pinned.file, f"{KEY} has {pinned.name!r}, {fault}")


def reason_of(pinned: Pin) -> str:
    """Return the reason of a pin: ``pinned: figure 2 (until 2027-01-01)``."""
    note = "" if pinned.remark.note is None else f": {' '.join(pinned.remark.note.split())}"
    until = "" if pinned.remark.until is None else f" (until {pinned.remark.until})"
    return f"{KEY}{note}{until}"


def _protect_namesakes(found: PointerProtections, pinned: Pin, index: CheckpointIndex, dangling: str) -> None:
    """Protect checkpoints with the name of a pin whose directory was moved or removed."""
    directory, name = index.snapshot.realpath(os.path.dirname(pinned.file)), os.path.basename(pinned.name)
    for path in index.paths.get(name, ()):
        if is_within(path, directory):
            found.protect(index.by_path[path], f"perhaps {KEY}: {pinned.name}", pinned.file)
    found.warnings.append(f"{shown(pinned.file)}: {dangling}; kept all checkpoints below it named {name}")


def _leave_alone(found: PointerProtections, groups: Iterable[Group], file: str, why: str) -> None:
    for group in groups:
        found.leave_alone(group.key, f"{shown(file)}: {why}")
