"""Takes back the last prune into the trash, or the last renaming: each checkpoint to its old name."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from ckpttool.errors import AccessDenied, CheckpointError, from_os_error
from ckpttool.formats.discovery import OWN_PREFIX
from ckpttool.series.changing.history import (
    CommandRecord,
    identities,
    moment_of,
    read_record,
    state_dirs,
    write_record,
)
from ckpttool.series.changing.lock import lock_directory
from ckpttool.series.changing.moves import TRASH, Kind
from ckpttool.series.changing.recovery import recover_directory
from ckpttool.series.changing.state_dir import OWNER
from ckpttool.series.changing.trash_ownership import (
    adopt_renamed_trashes,
    belongs_to_directory,
    directories_of_trash,
    is_of_other_directory,
    other_directory_problem,
    path_as_given,
    renamed_directory,
    trashes_under_other_names,
)
from ckpttool.series.paths import require_directory, shown
from ckpttool.series.pointers.notes import is_note, note_words, read_note
from ckpttool.series.pointers.pin_lists import lists_for, pins_in, read_list
from ckpttool.series.pointers.readers import READERS, names_in
from ckpttool.series.reasons import NotUndone, Problem
from ckpttool.series.undoing.record_undo import RecordUndo, undo_record
from ckpttool.wire.directories import walk

LEVELS_BELOW = 3
"""So far below is looked for something to take back, where a directory itself has nothing."""


@dataclass(frozen=True, slots=True)
class RestoredCheckpoint:
    """One checkpoint that has its old name again: by that, and by the path it had until now."""

    path: str
    was: str


@dataclass(frozen=True, slots=True)
class Undone:
    """What was taken back, or would be.

    Attributes:
        identity: Of the command that was taken back; None where there was none.
        kind: What it had done: "trash" or "rename".
        restored: What is back.
        pointers: The paths of the files that say again what they said, or what goes with what is back.
        dry_run: Whether nothing was changed.
        problems: What could not be taken back, and why.
        warnings: What became of an interrupted command, and which pointers are left as they are.
        below: In how many directories below something can be taken back, where here is nothing.
    """

    identity: str | None = None
    kind: Kind | None = None
    restored: tuple[RestoredCheckpoint, ...] = ()
    pointers: tuple[str, ...] = ()
    dry_run: bool = False
    problems: tuple[Problem, ...] = ()
    warnings: tuple[str, ...] = ()
    below: int = 0


def undo(directory: str, *, recursive: bool = False, dry_run: bool = False) -> Undone:
    """Take back the last prune into the trash, or the last renaming, of a directory.

    Of what could not be taken back once already, the command before is tried, too.

    Args:
        directory: The directory.
        recursive: Whether to take it back in all directories below, too, as far as it was one command.
        dry_run: Whether to change nothing.

    Raises:
        UsageError: It is a file.
        CheckpointError: It can't be looked at, locked or changed.
    """
    root = require_directory(directory)
    places = list(directories_with_trash(root)) if recursive else [root]
    with ExitStack() as stack:
        result, is_held = Undone(dry_run=dry_run), False
        for place in places if not dry_run else ():
            result = _held(stack, place, result)
        result = replace(result, warnings=(*result.warnings, *_followed(places, dry_run=dry_run)))
        others = [record for place in places for record in _anothers(place)]
        left = [
            other_directory_problem(one) for one in others if not recursive or renamed_directory(one) is None
        ]
        found = sorted({identity for place in places for identity in _recorded(place)}, reverse=True)
        if found:
            left_told = (f"{one.path}: {one.message}" for one in left)
            result = replace(result, warnings=(*result.warnings, *left_told))
        else:
            result = replace(result, problems=(*result.problems, *left))
        for number, identity in enumerate(found):
            records = [record for place in places for record in _records(place, identity)]
            if not records:
                raise AccessDenied(root, "its trash has gone, or was exchanged, since it was looked at")
            above = above_of(root, identity)
            if above is not None and not (dry_run or is_held):
                result, is_held = _held(stack, above.directory, result), True
                above = above_of(root, identity)  # what was settled may have changed it
            result = replace(result, identity=identity, kind=records[0].kind)
            result = _undone(result, records, above, is_tree=recursive)
            older = found[number + 1 :]
            if older and not dry_run:
                _mark(records)
            if result.restored or result.pointers:
                break
            if older and not all(record.is_told for record in records):
                return _with_hint(result, older[0])
        if not found and not recursive:
            return replace(result, below=_count_below(root))
    if result.kind == "rename":
        taken = (RenamedBack(one.path, one.was) for one in result.restored)
        waits = result.identity is not None and above_of(root, result.identity) is not None
        stale = stale_names(taken, result.pointers, above=not waits)
        result = replace(result, problems=(*result.problems, *stale))
    return result


def _count_below(root: str) -> int:
    """Return in how many directories not far below something can be taken back."""
    count = 0
    for place in directories_with_trash(root, levels=LEVELS_BELOW):
        with suppress(CheckpointError):  # whoever asks for it is told
            count += any(_recorded(place))
    return count


def _held(stack: ExitStack, place: str, result: Undone) -> Undone:
    """Lock a directory, and settle what was interrupted there."""
    stack.enter_context(lock_directory(place))
    settled = recover_directory(place)
    problems = (Problem(path, why) for path, why in settled.failed.items())
    return replace(
        result,
        problems=(*result.problems, *problems),
        warnings=(*result.warnings, *settled.moved),
    )


def _with_hint(result: Undone, older: str) -> Undone:
    hint = f"nothing of it is back; the next undo goes on with the command before, of {moment_of(older)}"
    return replace(result, warnings=(*result.warnings, hint))


def _undone(
    result: Undone, records: Sequence[CommandRecord], above: CommandRecord | None, *, is_tree: bool
) -> Undone:
    """Take back what some records of one command tell of; ``above`` has what points there from above."""
    restored: list[str] = []
    is_whole = True
    for record in records:
        others = [] if is_tree else _others(record)
        if others:
            why = f"it goes with what the same rename changed in {others[0]} (undo -r)"
            problem = NotUndone.because(shown(record.directory), why)
            result = replace(result, problems=(*result.problems, problem))
            continue
        done = undo_record(record, result.dry_run)
        result = _with(result, done)
        is_whole &= not done.problems
        if done.restored:
            restored.append(record.directory)
    if above is not None and restored:
        result = _with(result, undo_record_above(above, restored, is_whole, result.dry_run))
    return result


def _mark(records: Sequence[CommandRecord]) -> None:
    """Note of what is left that it was told: it is in the way of no older command any more."""
    for record in records:
        left = read_record(record.directory, record.home, record.identity)
        if left is None or left.is_told:
            continue
        try:
            write_record(replace(left, is_told=True))
        except OSError as error:
            raise from_os_error(error, left.path) from error


def _others(record: CommandRecord) -> list[str]:
    """Return the directories below in which a command renamed what a record alone has the pointers of."""
    if record.has_moves or not record.steps:
        return []
    return [
        shown(place)
        for place in directories_with_trash(record.directory)
        if place != record.directory and any(one.has_moves for one in _records(place, record.identity))
    ]


def above_of(root: str, identity: str) -> CommandRecord | None:
    """Return the record that a command left in the directory above of pointers alone, if it did."""
    above = os.path.dirname(root) or os.curdir
    real = os.path.dirname(os.path.realpath(root))
    if not os.path.isdir(above) or not os.path.samefile(above, real):
        above = real
    if os.path.samefile(above, root):
        return None
    try:
        return next(iter(_records(above, identity)), None)
    except AccessDenied:  # another's trash: nothing of ours is in it
        return None


def undo_record_above(
    above: CommandRecord, restored: Sequence[str], is_whole: bool, dry_run: bool
) -> RecordUndo:
    """Take back what points at checkpoints from the directory above, unless others wait for it, too.

    Args:
        above: What was changed there.
        restored: The directories below in which something is back, or would be.
        is_whole: Whether all of that is back, or would be.
        dry_run: Whether to change nothing.
    """
    places = [
        place
        for place in directories_with_trash(above.directory)
        if not os.path.samefile(place, above.directory)
    ]
    waiting = [place for place in places if any(_records(place, above.identity))]
    if dry_run and is_whole:
        back = set(map(os.path.realpath, restored))
        waiting = [place for place in waiting if os.path.realpath(place) not in back]
    if not waiting and not above.has_moves:
        return undo_record(above, dry_run)
    why = f"what points from here to what is back may still have its other names (undo -r {above.directory})"
    return RecordUndo(warnings=[f"{shown(above.directory)}: {why}"])


def directories_with_trash(root: str, *, levels: int | None = None) -> Iterator[str]:
    """Yield the directories in a tree that have a trash, in them or beside them.

    Args:
        root: The tree.
        levels: How many levels to descend; None is all.
    """
    seen: set[str] = set()
    for directory, names, _ in walk(root):
        for name in sorted(names):
            if name == TRASH or name.startswith(TRASH + OWNER):
                for place in [directory] if name == TRASH else directories_of_trash(directory, name):
                    if place not in seen:
                        seen.add(place)
                        yield place
        names[:] = sorted(name for name in names if not name.startswith(OWN_PREFIX) and name != ".git")
        if levels is not None and directory.removeprefix(root).count(os.sep) >= levels:
            names.clear()
    if root not in seen and any(identities(root, home) for home in state_dirs(root)):
        yield root


def _recorded(directory: str) -> Iterator[str]:
    """Yield the identities of what can be taken back in a directory."""
    yield from (record.identity for record in _all_records(directory) if not is_of_other_directory(record))


def _followed(places: Sequence[str], *, dry_run: bool) -> Iterator[str]:
    """Have the trashes of directories that got other names follow them; yield where they lay."""
    for place in places:
        for home in trashes_under_other_names(place) if dry_run else adopt_renamed_trashes(place):
            path = path_as_given(place, os.path.join(home.path, TRASH + home.suffix))
            yield f"{shown(place)}: its trash bears the name that it had before: {shown(path)}"


def _anothers(directory: str) -> Iterator[CommandRecord]:
    """Yield what was recorded beside a directory of another one that had its name."""
    yield from filter(is_of_other_directory, _all_records(directory))


def _all_records(directory: str) -> Iterator[CommandRecord]:
    for home in (*state_dirs(directory), *trashes_under_other_names(directory)):
        for identity in identities(directory, home):
            record = read_record(directory, home, identity)
            if record is not None and belongs_to_directory(record):
                yield record


def _records(directory: str, identity: str) -> Iterator[CommandRecord]:
    """Yield what a directory has recorded of one command."""
    for home in (*state_dirs(directory), *trashes_under_other_names(directory)):
        record = read_record(directory, home, identity) if identity in identities(directory, home) else None
        if record is not None and belongs_to_directory(record) and not is_of_other_directory(record):
            yield record


def _with(result: Undone, done: RecordUndo) -> Undone:
    return replace(
        result,
        restored=(*result.restored, *(RestoredCheckpoint(path, was) for path, was in done.restored.items())),
        pointers=(*result.pointers, *done.pointers),
        problems=(*result.problems, *done.problems),
        warnings=(*result.warnings, *done.warnings),
    )


_SLASHES = re.compile(r"[/\\]+")


class RenamedBack(NamedTuple):
    """A checkpoint that has its old name again, or would: its path, and the one that it had until then."""

    path: str
    was: str


def stale_names(taken: Iterable[RenamedBack], turned: Iterable[str], *, above: bool) -> Iterator[Problem]:
    """Yield the pointers and notes that name checkpoints as these were called until now.

    Args:
        taken: What has its old name again.
        turned: The paths of what says again what it said, or would.
        above: Whether notes in the directory above count, too.
    """
    passed = set(map(os.path.abspath, turned))
    by_directory: dict[str, dict[str, RenamedBack]] = defaultdict(dict)
    for one in taken:
        name = os.path.basename(one.was)
        by_directory[os.path.dirname(one.path) or os.curdir][name] = one
    for directory, known in by_directory.items():
        told: dict[str, RenamedBack] = {}
        for path, target in _pointers(directory):
            found = known.get("".join(_parts(target)[-1:]))
            if found is not None:
                told.setdefault(path, found)
        told |= {path: one for path, one in _noted(directory, known) if path not in told}
        if above:
            real = os.path.realpath(directory)
            around = {f"{os.path.basename(real)}/{name}": one for name, one in known.items()}
            told |= dict(_noted(os.path.dirname(real), around))
        moved = {os.path.abspath(one.was): os.path.abspath(one.path) for one in known.values()}
        for path, one in told.items():
            if _afterwards(os.path.abspath(path), moved) not in passed:
                yield Problem(shown(os.path.normpath(path)), _message(one))
        yield from _pinned(directory, moved, passed, known)


def _pinned(
    directory: str, moved: Mapping[str, str], passed: Collection[str], known: Mapping[str, RenamedBack]
) -> Iterator[Problem]:
    """Yield the pins of checkpoints that were set since these got the names that they lose."""
    for file in lists_for(directory):
        try:
            pins = list(pins_in(file, read_list(file)))
        except CheckpointError:  # whoever goes by them says so
            continue
        for pin in pins:
            path = os.path.abspath(pin.path)
            if path in moved and (os.path.abspath(file) not in passed or not os.path.lexists(path)):
                yield Problem(shown(os.path.normpath(file)), _message(known[os.path.basename(path)]))


def _message(one: RenamedBack) -> str:
    old, new = os.path.basename(one.path), os.path.basename(one.was)
    return f"it names {new}, which is called {old} again, and isn't changed: pin that if it is to stay"


def _afterwards(path: str, moved: Mapping[str, str]) -> str:
    """Return the path that a file has once all is taken back."""
    above, name = os.path.split(path)
    return os.path.join(moved.get(above, above), name)


def _pointers(directory: str) -> Iterator[tuple[str, str]]:
    """Yield the files of trainers in a directory, and in those in it, with what they name."""
    inside = [one.path for one in names_in(directory).values() if one.is_dir(follow_symlinks=False)]
    for place in (directory, *inside):
        names = names_in(place)
        for pointers in READERS:
            for pointer in pointers(place, names):
                if pointer.target is not None:
                    yield pointer.holder, pointer.target


def _noted(directory: str, known: Mapping[str, RenamedBack]) -> Iterator[tuple[str, RenamedBack]]:
    for name, file in names_in(directory).items():
        text = read_note(file) if is_note(name) else None
        if text is not None:
            levels = next(iter(known)).count("/") + 1
            named = (known.get("/".join(_parts(word)[-levels:])) for word in note_words(text))
            one = next((one for one in named if one is not None), None)
            if one is not None:
                yield file.path, one


def _parts(path: str) -> list[str]:
    return [part for part in _SLASHES.split(path) if part not in ("", os.curdir)]
