"""Pins: checkpoints that no policy removes, listed in a small file in their directory.

The file is ``.ckpttool-pins.toml`` with a list ``pinned`` of names; other content is preserved. A Fluid root,
and Accelerate's ``checkpoints``, allow no other entries: their pins are in the list of the directory above,
and begin with their name.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from typing import Any

from ckpttool.containers.toml import quote
from ckpttool.core.errors import AccessDenied, CheckpointError, Unsupported, from_os_error
from ckpttool.core.name_patterns import PIN_LISTS
from ckpttool.core.result import Result
from ckpttool.formats.discovery import OWN_PREFIX
from ckpttool.formats.interface import natural
from ckpttool.formats.tensorflow.prefix import INDEX
from ckpttool.runs.pointers.pin_lists import (
    NO_REMARK,
    Pin,
    Remark,
    changed_text,
    list_for,
    lists_for,
    merged,
    pins_above,
    pins_in,
    pins_of,
    read_list,
    remarks_in,
    unreadable,
    with_remark,
    write_list,
)
from ckpttool.runs.pointers.search import raise_error
from ckpttool.runs.survey import CheckpointPlace, place_of, resolve_checkpoint
from ckpttool.storage import fs
from ckpttool.storage.held import holding, holds
from ckpttool.transaction.engines import engine_of
from ckpttool.transaction.lock import BUSY, clear_stale, lock_directory
from ckpttool.transaction.paths import shown, without_trailing_slashes
from ckpttool.transaction.recovery import recover_directory

LOCK_TIMEOUT = 10.0
"""Seconds to wait for a lock that another command holds."""
_PAUSE = 0.1


@dataclass(frozen=True, slots=True, repr=False)
class Pinning(Result):
    """Result of ``pin`` or ``unpin``.

    Attributes:
        changed: Paths that were pinned, or unpinned.
        unchanged: Paths that were pinned, or unpinned, before.
        pins: All pins in these lists, after the change.
        recovered: Results of recovery from interrupted commands, each in a sentence.
    """

    changed: tuple[str, ...]
    unchanged: tuple[str, ...]
    pins: tuple[Pin, ...]
    recovered: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """Return it in a few words."""
        return f"{len(self.changed):,} changed, {len(self.pins):,} pinned"

    def document(self) -> dict[str, Any]:
        return pin_document(self.pins, self.changed)


def pin_document(
    pins: Iterable[Pin], changed: Iterable[str] = (), void: Iterable[tuple[Pin, str]] = ()
) -> dict[str, Any]:
    """Return the document of pins, with the changed ones, and with those that pin nothing and why."""
    document: dict[str, Any] = {
        "schema": "ckpttool.pin/1",
        "pinned": [one.path for one in pins],
        "missing": [one.path for one in pins if not one.exists],
        "changed": [*changed],
    }
    if about := {one.path: one.remark.document() for one in pins if not one.remark.is_empty}:
        document["about"] = about
    if rows := [{"file": shown(one.file), "name": one.name, "why": why} for one, why in void]:
        document["void"] = rows
    return document


def pin(
    paths: Iterable[str | os.PathLike[str]], *, note: str | None = None, until: date | None = None
) -> Pinning:
    """Pin checkpoints; if a path isn't one, none is pinned.

    Args:
        paths: The checkpoints.
        note: Reason of the pins; None keeps notes as they are.
        until: Last day of the pins, in local time; None keeps it as it is.

    Raises:
        CheckpointError: A path names no checkpoint, or a list of pins can't be read or written.
    """
    update = Remark(note, until)

    def add(file: str, text: str, named: Sequence[CheckpointPlace]) -> tuple[str, list[str]]:
        known = list(pins_in(file, text))
        new = [place for place in named if not any(_is_pin_of(place, pinned) for pinned in known)]
        new = [place for place in new if not _lists_pinning(place)]
        new = list({place.path: place for place in new}.values())
        if new:
            text = changed_text(file, text, added=[_name_in(file, place) for place in new])
        changed = [place.path for place in new]
        return text, changed if update.is_empty else [place.path for place in named]

    return _write_lists([*paths], add, update, {})


def remark(
    paths: Iterable[str | os.PathLike[str]],
    *,
    note: str | None = None,
    facts: Mapping[str, str | None] | None = None,
) -> Pinning:
    """Write remarks on checkpoints, without pinning them; an empty note, or a fact of None, is removed.

    Raises:
        CheckpointError: As for ``pin``.
    """

    def keep(file: str, text: str, named: Sequence[CheckpointPlace]) -> tuple[str, list[str]]:
        return text, [place.path for place in named]

    return _write_lists([*paths], keep, Remark(note), facts or {})


@holds("paths")
def _write_lists(
    paths: Sequence[str | os.PathLike[str]],
    change: Callable[[str, str, Sequence[CheckpointPlace]], tuple[str, list[str]]],
    update: Remark,
    facts: Mapping[str, str | None],
) -> Pinning:
    """Change the lists of checkpoints, each locked, and update remarks.

    ``change`` returns the text of a list, and the paths of changed checkpoints.
    """
    # All paths are resolved before the first list is written, so that a wrong path changes nothing. Each list
    # is read again under its lock.
    given = [os.fspath(path) for path in paths]
    recovered = tuple(_recover(given))
    places = [resolve_checkpoint(path) for path in given]
    for place in places:
        try:
            quote(place.name)
        except ValueError as error:
            raise Unsupported(place.path, "its name is not valid Unicode, as a pin must be") from error
    files: dict[str, list[CheckpointPlace]] = defaultdict(list)
    for place in places:
        files[list_for(place.directory)].append(place)
    changed: list[str] = []
    for file, named in files.items():
        with _lock_all(file, named):
            before = read_list(file)
            text, paths_changed = change(file, before, named)
            try:
                known = remarks_in(text)
                for name in dict.fromkeys(_name_in(file, place) for place in named):
                    old = known.get(name, NO_REMARK)
                    if (new := merged(old, update, facts)) != old:
                        text = with_remark(text, name, new)
            except ValueError as error:
                raise unreadable(file, error) from error
            if text != before:
                write_list(file, before, text)
            changed += paths_changed
    return replace(_pinning(files, places, changed), recovered=recovered)


def remarks_beside(directory: str) -> Mapping[str, Remark]:
    """Return the remarks in the list of a directory, by name; empty if it can't be read.

    Empty for a store, too, as each directory would take requests.
    """
    file = list_for(directory) if fs.place_of(directory).reads_are_free else ""
    if not file or not fs.lexists(file):
        return {}
    try:
        known = remarks_in(read_list(file))
    except (CheckpointError, ValueError):  # reported by the search of pointers
        return {}
    above = os.path.relpath(fs.realpath(directory), fs.realpath(os.path.dirname(file) or os.curdir))
    start = "" if above == os.curdir else f"{above}/".replace(os.sep, "/")
    return {name.removeprefix(start): one for name, one in known.items() if name.startswith(start)}


def remark_on(path: str) -> Remark:
    """Return the remark on a checkpoint from the nearest list that has one.

    An empty remark if no list can be read.
    """
    place = place_of(without_trailing_slashes(path))
    for file in lists_for(place.directory):
        try:
            known = remarks_in(read_list(file))
        except (CheckpointError, ValueError):
            continue
        if (found := known.get(_name_in(file, place))) is not None:
            return found
    return NO_REMARK


def unpin(paths: Iterable[str | os.PathLike[str]]) -> Pinning:
    """Remove pins, also those of missing checkpoints.

    Raises:
        CheckpointError: A path is neither a checkpoint nor pinned, or a list of pins can't be changed.
    """
    given = [os.fspath(path) for path in paths]
    lists = {
        file
        for path in given
        for file in lists_for(os.path.dirname(without_trailing_slashes(path)) or os.curdir)
    }
    with holding(*given, *lists):
        done = _unpin(given)
        # An empty list is removed: a kill may have left its lock, also in the directory above.
        clear_stale(
            {
                locked
                for directory in {
                    os.path.dirname(without_trailing_slashes(path)) or os.curdir for path in given
                }
                for locked in (directory, fs.dirname(fs.realpath(directory)))
            }
        )
        return done


def _unpin(given: Sequence[str]) -> Pinning:
    recovered = tuple(_recover(given))
    places = [_resolve_or_pinned(path) for path in given]
    files: dict[str, list[CheckpointPlace]] = defaultdict(list)
    for place in places:
        for file in _lists_pinning(place):
            files[file].append(place)
    changed: list[str] = []
    for file, named in files.items():
        with _lock_all(file, named):
            text = read_list(file)
            removed = [
                (place.path, pinned.name)
                for pinned in pins_in(file, text)
                for place in named
                if _is_pin_of(place, pinned)
            ]
            if removed:
                # A note outlives the pin; its last day was that of the pin, and would expire a later one.
                new = changed_text(file, text, renamed={name: None for _, name in removed})
                for name, remark in remarks_in(new).items():
                    if remark.until is not None and any(name == one for _, one in removed):
                        new = with_remark(new, name, replace(remark, until=None))
                write_list(file, text, new)
            changed += [path for path, _ in removed]
    return replace(_pinning(files, places, changed), recovered=recovered)


def pins_below(
    directory: str | os.PathLike[str], on_error: Callable[[CheckpointError], None] = raise_error
) -> tuple[Pin, ...]:
    """Return all pins of checkpoints in a directory tree; links aren't followed.

    Args:
        directory: The directory.
        on_error: Called with errors of lists and directories; by default they are raised.

    Raises:
        CheckpointError: The directory can't be read.
    """
    root = without_trailing_slashes(os.fspath(directory))
    try:
        fs.entries(root)
    except OSError as error:
        raise from_os_error(error, root) from error
    pins: list[Pin] = []

    def add(read: Callable[[], Iterable[Pin]]) -> None:
        try:
            pins.extend(read())
        except CheckpointError as error:
            on_error(error)

    def report(error: OSError) -> None:
        on_error(from_os_error(error, shown(os.fspath(error.filename or root))))

    add(lambda: list(pins_above(root)))
    for parent, names, _ in fs.walk(root, report):
        inside = (name for name in names if not name.startswith(OWN_PREFIX) and name != ".git")
        names[:] = sorted(inside, key=natural)
        for name in PIN_LISTS:
            file = os.path.join(parent, name)
            if fs.lexists(file):
                add(partial(pins_of, file))
    return tuple(pins)


def _lock_all(file: str, places: Iterable[CheckpointPlace]) -> ExitStack:
    """Return a stack that holds the locks of all directories that a list of pins covers."""
    # ``prune`` locks the directory of a checkpoint, and the list may be in the directory above. Both are
    # locked, so that neither a removal nor another change of the list happens meanwhile.
    directories = {os.path.dirname(file) or os.curdir, *(one.directory for one in places)}
    with ExitStack() as stack:
        for directory in sorted({fs.realpath(one): one for one in directories}.values()):
            if fs.isdir(directory):
                _lock(stack, directory)
        return stack.pop_all()


def _recover(paths: Iterable[str]) -> Iterator[str]:
    """Recover from interrupted commands in the directories of paths, and yield the results in words."""
    for directory in sorted({os.path.dirname(without_trailing_slashes(path)) or os.curdir for path in paths}):
        if not engine_of(directory).journals():
            continue
        with ExitStack() as stack:
            _lock(stack, directory)
            recovery = recover_directory(directory)
        yield from recovery.results
        yield from (f"{path}: {why}" for path, why in recovery.failed.items())


def _lock(stack: ExitStack, directory: str) -> None:
    until = time.monotonic() + LOCK_TIMEOUT
    while True:
        try:
            stack.enter_context(lock_directory(directory))
        except CheckpointError as error:
            if error.code != BUSY:
                raise AccessDenied(shown(directory), f"{error.reason}; no pin was changed") from error
            if time.monotonic() >= until:
                raise
            time.sleep(_PAUSE)
        else:
            return


def _name_in(file: str, place: CheckpointPlace) -> str:
    """Return a checkpoint's name in a list: its path relative to the list."""
    start = fs.realpath(os.path.dirname(file) or os.curdir)
    relative = os.path.relpath(fs.realpath(place.directory), start)
    return place.name if relative == os.curdir else f"{relative}/{place.name}".replace(os.sep, "/")


def _is_pin_of(place: CheckpointPlace, pinned: Pin) -> bool:
    """Return whether a pin means a checkpoint, by any of its names."""
    # A user may write the prefix of a TensorFlow checkpoint, its index, or another of its files. Directories
    # are compared as real paths, as the list may be reached by a symlink.
    directory, name = os.path.split(fs.normpath(os.path.join(os.path.dirname(pinned.file), pinned.name)))
    is_beside = fs.realpath(directory) == fs.realpath(place.directory)
    return is_beside and (name in place.names or name.removesuffix(INDEX) == place.name)


def _resolve_or_pinned(path: str) -> CheckpointPlace:
    """Return the place of the checkpoint at a path, which may be missing if it is pinned."""
    try:
        return resolve_checkpoint(path)
    except CheckpointError:
        missing = place_of(without_trailing_slashes(path))
        if _lists_pinning(missing):
            return missing
        raise


def _lists_pinning(place: CheckpointPlace) -> list[str]:
    """Return the lists that pin a checkpoint, the nearest first."""
    lists = {file: pins_of(file) for file in lists_for(place.directory)}
    return [file for file, pins in lists.items() if any(_is_pin_of(place, pinned) for pinned in pins)]


def _pinning(files: Iterable[str], places: Sequence[CheckpointPlace], changed: Sequence[str]) -> Pinning:
    unchanged = dict.fromkeys(one.path for one in places if one.path not in changed)
    pins = [pinned for file in files for pinned in pins_of(file)]
    return Pinning(tuple(dict.fromkeys(changed)), tuple(unchanged), tuple(pins))
