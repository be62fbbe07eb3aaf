"""Takes back the last prune into the trash, or the last renaming: each checkpoint to its old name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace

from ckpttool.formats.discovery import OWN_PREFIX
from ckpttool.formats.tf_prefix import INDEX
from ckpttool.series.history import Record, Step, homes, identities, read_record
from ckpttool.series.home import OWNER
from ckpttool.series.lock import locked
from ckpttool.series.merging import merged
from ckpttool.series.moves import TRASH, Kind, Move, Moves
from ckpttool.series.moving import carry_out, why_not
from ckpttool.series.planning import Problem, require_directory
from ckpttool.series.recovery import settle_all


@dataclass(frozen=True, slots=True)
class Restored:
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
    """

    identity: str | None = None
    kind: Kind | None = None
    restored: tuple[Restored, ...] = ()
    pointers: tuple[str, ...] = ()
    dry_run: bool = False
    problems: tuple[Problem, ...] = ()
    warnings: tuple[str, ...] = ()


def undo(directory: str, *, recursive: bool = False, dry_run: bool = False) -> Undone:
    """Take back the last prune into the trash, or the last renaming, of a directory.

    Args:
        directory: The directory.
        recursive: Whether to take it back in all directories below, too, as far as it was one command.
        dry_run: Whether to change nothing.

    Raises:
        UsageError: It is a file.
        CheckpointError: It can't be looked at, locked or changed.
    """
    root = require_directory(directory)
    places = list(with_trash(root)) if recursive else [root]
    with ExitStack() as stack:
        problems: list[Problem] = []
        warnings: list[str] = []
        for place in places if not dry_run else ():
            stack.enter_context(locked(place))
            settled = settle_all(place)
            problems += [Problem(path, why) for path, why in settled.failed.items()]
            warnings += settled.moved
        last = max((identity for place in places for identity in _recorded(place)), default=None)
        result = Undone(last, dry_run=dry_run, problems=tuple(problems), warnings=tuple(warnings))
        for place in places if last is not None else ():
            for home in homes(place):
                record = read_record(place, home, last) if last in identities(place, home) else None
                if record is not None:
                    result = _with(result, record, _taken_back(record, dry_run))
    return result


def with_trash(root: str) -> Iterator[str]:
    """Yield the directories in a tree that have a trash, in them or beside them."""
    seen: set[str] = set()
    for directory, names, _ in os.walk(root):
        for name in sorted(names):
            if name == TRASH or name.startswith(TRASH + OWNER):
                place = directory if name == TRASH else os.path.join(directory, name[len(TRASH + OWNER) :])
                if place not in seen and os.path.isdir(place):
                    seen.add(place)
                    yield place
        names[:] = sorted(name for name in names if not name.startswith(OWN_PREFIX) and name != ".git")
    if root not in seen and any(identities(root, home) for home in homes(root)):
        yield root


def _recorded(directory: str) -> Iterator[str]:
    """Yield the identities of what can be taken back in a directory."""
    for home in homes(directory):
        for identity in identities(directory, home):
            if read_record(directory, home, identity) is not None:
                yield identity


@dataclass(slots=True)
class _TakenBack:
    restored: list[Restored]
    pointers: list[str]
    problems: list[Problem]
    warnings: list[str]


def _with(result: Undone, record: Record, done: _TakenBack) -> Undone:
    return replace(
        result,
        kind=record.kind,
        restored=(*result.restored, *done.restored),
        pointers=(*result.pointers, *done.pointers),
        problems=(*result.problems, *done.problems),
        warnings=(*result.warnings, *done.warnings),
    )


def _taken_back(record: Record, dry_run: bool) -> _TakenBack:
    """Take back what a record tells of, the last step first; one that can't be stops those before it."""
    done = _TakenBack([], [], [], [])
    for step in reversed(record.steps):
        if _one(record, step, done, dry_run=dry_run) and record.kind == "rename":
            break
    return done


def _one(record: Record, step: Step, done: _TakenBack, *, dry_run: bool) -> bool:
    """Take one step back, as far as nothing is in its way; tell whether something was."""
    wanted = step.undoing
    is_last = step is record.steps[-1]
    # Of what was renamed twice, only the last name can be looked at before it is gone.
    refused = dict(why_not(record.directory, wanted)) if is_last or not dry_run else {}
    fit = tuple(move for move in wanted.moves if move.path not in refused)
    if refused and record.kind == "rename" and wanted.is_bound:
        fit = ()  # its pointers go with all of it
    moves, warnings = merged(record.directory, wanted, fit) if fit or not wanted.moves else (None, [])
    if moves is not None and not dry_run:
        outcome = carry_out(record.directory, moves)
        refused |= outcome.failed
        fit = tuple(move for move in fit if move.path in outcome.moved)
    if moves is not None and (fit or not wanted.moves):
        names = [one.name for one in moves.rewrites] + [link.name for link in moves.relinks]
        done.pointers += [os.path.join(record.directory, name) for name in names]
        done.warnings += warnings
    known = {one.path for one in done.restored}
    done.restored += [Restored(move.path, _was(move, wanted)) for move in fit if move.path not in known]
    done.problems += [Problem(path, f"not taken back: {why}") for path, why in refused.items()]
    return bool(refused)


def _was(move: Move, wanted: Moves) -> str:
    now, old = move.members[0]
    prefix = old.removesuffix(INDEX)
    is_prefix = now.endswith(INDEX) and os.path.basename(prefix) == os.path.basename(move.path)
    return os.path.join(wanted.source, now.removesuffix(INDEX) if is_prefix else now)
