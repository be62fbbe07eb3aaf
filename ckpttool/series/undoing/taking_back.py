"""Takes back what one record tells of, step by step, as far as nothing is in its way."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from ckpttool.errors import from_os_error
from ckpttool.formats.tensorflow.prefix import INDEX
from ckpttool.series.changing.history import Record, Step, without
from ckpttool.series.changing.moves import Move, Moves
from ckpttool.series.changing.moving import carry_out, why_not
from ckpttool.series.paths import shown
from ckpttool.series.problem import Problem
from ckpttool.series.undoing.copied import COPIED, LOST_TIMES, as_copied, has_lost_times, is_of_copy
from ckpttool.series.undoing.merging import merged

_SINCE = {"trash": "since it was put there", "rename": "since it was renamed"}


@dataclass(slots=True)
class TakenBack:
    """What became of a record.

    Attributes:
        restored: What is back, or would be: by its path, the one that it had until now.
        pointers: The paths of what says again what it said.
        problems: What could not be taken back, and why.
        warnings: Which pointers are left as they are.
    """

    restored: dict[str, str] = field(default_factory=dict)
    pointers: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def taken_back(record: Record, dry_run: bool) -> TakenBack:
    """Take back what a record tells of, the last step first; one that can't be stops those before it.

    Raises:
        CheckpointError: The directory can't be changed.
    """
    done = TakenBack()
    for step in reversed(record.steps):
        if _one(record, step, done, dry_run=dry_run) and record.kind == "rename":
            break
    return done


def _one(record: Record, step: Step, done: TakenBack, *, dry_run: bool) -> bool:
    """Take one step back, as far as nothing is in its way; tell whether something was."""
    is_last = step is record.steps[-1]
    wanted = as_copied(record.directory, step.undoing)
    if is_last and is_of_copy(wanted, step.undoing):
        done.warnings.append(f"{shown(record.directory)}: {COPIED}")
    elif is_last and has_lost_times(record.directory, wanted):
        done.warnings.append(f"{shown(record.directory)}: {LOST_TIMES}")
    # Of what was renamed twice, only the last name can be looked at before it is gone.
    refused = dict(why_not(record.directory, wanted)) if is_last or not dry_run else {}
    fit = tuple(move for move in wanted.moves if move.path not in refused)
    if refused and record.kind == "rename" and wanted.is_bound:
        fit = ()  # its pointers go with all of it
    if fit or not wanted.moves:
        moves, left = merged(record.directory, wanted, fit)
        if not dry_run:
            outcome = carry_out(record.directory, moves)
            refused |= outcome.failed
            fit = tuple(move for move in fit if move.path in outcome.moved)
        if fit or not (wanted.moves or refused):
            done.pointers += _pointers(record, moves)
            if moves.moves or moves.is_bound:
                done.warnings += [f"{one.path}: {one.message}" for one in left]
            else:  # there is nothing else that it could be told with
                done.problems += left
        if not (wanted.moves or refused or dry_run):
            _forget(record, step)
    for move in fit:
        done.restored.setdefault(_path(record, move.path), _was(move, wanted))
    done.problems += _problems(record, refused)
    return bool(refused)


def _problems(record: Record, refused: dict[str, str]) -> Iterator[Problem]:
    since = _SINCE.get(record.kind, "since then")
    for path, why in refused.items():
        told = why.replace("since the plan was made", since)
        yield Problem(_path(record, path), f"not taken back: {told}")


def _forget(record: Record, step: Step) -> None:
    try:
        without(record, step)
    except OSError as error:
        raise from_os_error(error, record.path) from error


def _pointers(record: Record, moves: Moves) -> list[str]:
    """Return the paths of what says again what it said; what comes and goes belongs to a checkpoint."""
    names = [one.name for one in moves.rewrites if None not in (one.before, one.after)]
    names += [link.name for link in moves.relinks]
    return [shown(os.path.join(record.directory, name)) for name in names]


def _path(record: Record, path: str) -> str:
    """Return the path of a checkpoint in the directory as it is called now, whatever it was called then."""
    if path == record.directory:
        return shown(path)
    return shown(os.path.join(record.directory, os.path.basename(path)))


def _was(move: Move, wanted: Moves) -> str:
    """Return the path that a checkpoint had until it was taken back."""
    now, old = move.members[0]
    base = os.path.basename(move.path)
    prefix = old.removesuffix(INDEX)
    if now.endswith(INDEX) and os.path.basename(prefix) == base:
        now = now.removesuffix(INDEX)
    else:
        now = _index(move, wanted) or next((new for new, one in move.members if _is_named(one, base)), now)
    return os.path.join(wanted.source, now)


def _is_named(member: str, base: str) -> bool:
    return os.path.basename(member) == base


def _index(move: Move, wanted: Moves) -> str | None:
    """Return the name of the index that goes as a checkpoint's comes: its text has other names in it."""
    base = os.path.basename(move.path)
    rewrites = wanted.rewrites
    for number, one in enumerate(rewrites):
        if one.name == base and one.before is None:
            near = (rewrites[at] for at in (number - 1, number + 1) if 0 <= at < len(rewrites))
            return next((other.name for other in near if other.after is None), None)
    return None
