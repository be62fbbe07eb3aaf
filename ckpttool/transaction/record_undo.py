"""Undoes what one command did to one directory: its record's steps, the last first, with the pointers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from functools import partial

from ckpttool.core.errors import from_os_error
from ckpttool.formats.tensorflow.prefix import INDEX
from ckpttool.formats.tensorflow.state import NAME
from ckpttool.io import fs
from ckpttool.transaction.copies import moves_of_copy
from ckpttool.transaction.files import StalePlan
from ckpttool.transaction.history import CommandRecord, UndoStep, drop_step, read_record
from ckpttool.transaction.journal import Move, Moves, Relink, Rewrite
from ckpttool.transaction.move_transaction import ChainedMoves, MoveOutcome, apply_moves, move_obstacles
from ckpttool.transaction.paths import NotUndone, Problem, shown
from ckpttool.transaction.pointer_files import base_name, merged_state, text_at

_PLANNED = {"trash": "it was put there", "rename": "it was renamed"}
"""When a user had a command do what is taken back now."""


@dataclass(slots=True)
class RecordUndo:
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


def undo_record(record: CommandRecord, dry_run: bool) -> RecordUndo:
    """Take back what a record tells of, the last step first; one that can't be stops those before it."""
    done = RecordUndo()

    def undo_alone(moves: Moves) -> MoveOutcome:
        return apply_moves(record.directory, moves, record.state_dir)

    with ExitStack() as stack:
        is_chain = record.kind == "rename" and len(record.steps) > 1 and not dry_run
        chain = stack.enter_context(ChainedMoves(record.directory, record.state_dir)) if is_chain else None
        for number, noted in reversed(list(enumerate(record.steps))):
            step, is_last = noted, noted is record.steps[-1]
            if not (is_last or dry_run):  # as it is noted now that those after it were taken back
                current = read_record(record.directory, record.state_dir, record.identity)
                steps = () if current is None else current.steps
                step = next((step for step in steps if step.journal == noted.journal), noted)
            make = partial(chain.make, has_more=number > 0) if chain else undo_alone
            is_refused = _undo_step(record, step, done, make, is_last=is_last, dry_run=dry_run)
            if is_refused and record.kind == "rename":
                if chain is not None:
                    chain.undo()
                    _report_nothing_restored(done)
                break
    return done


def _report_nothing_restored(done: RecordUndo) -> None:
    """Tell of all that was taken back that it isn't, since one step couldn't be."""
    others = [path for path in done.restored if path not in {problem.path for problem in done.problems}]
    if others:
        first = done.problems[0]
        why = f"{os.path.basename(first.path)} isn't, and all of them are taken back, or none"
        done.problems += [NotUndone.because(path, why) for path in others]
    done.restored.clear()
    done.pointers.clear()


def _undo_step(
    record: CommandRecord,
    step: UndoStep,
    done: RecordUndo,
    make: Callable[[Moves], MoveOutcome],
    *,
    is_last: bool,
    dry_run: bool,
) -> bool:
    """Take one step back, as far as nothing is in its way; tell whether something was."""
    undoing, warning = moves_of_copy(record.directory, step.undoing)
    if is_last and warning is not None:
        done.warnings.append(f"{shown(record.directory)}: {warning}")
    # Of what was renamed twice, only the last name can be looked at before it is gone.
    refused = dict(move_obstacles(record.directory, undoing)) if is_last or not dry_run else {}
    fit = tuple(move for move in undoing.moves if move.path not in refused)
    if refused and record.kind == "rename" and undoing.is_bound:
        fit = ()  # its pointers go with all of it
    if fit or not undoing.moves:
        moves, left = _merge_pointers(record.directory, undoing, fit)
        if not dry_run:
            outcome = make(moves)
            refused |= outcome.failures
            fit = tuple(move for move in fit if move.path in outcome.moved)
        if fit or not (undoing.moves or refused):
            done.pointers = list(dict.fromkeys([*done.pointers, *_pointer_paths(record, step, moves)]))
            if not moves.is_empty:
                done.warnings += [f"{problem.path}: {problem.message}" for problem in left]
            else:  # there is nothing else that it could be told with
                done.problems += left
        if not (undoing.moves or refused or dry_run):
            try:
                drop_step(record, step)
            except OSError as error:
                raise from_os_error(error, record.path) from error
    for move, was in _last_paths(record, fit):
        done.restored.setdefault(_path(record, move.path), was)
    planned = _PLANNED.get(record.kind, "then")
    done.problems += [
        NotUndone.because(_path(record, path), failure.text(planned)) for path, failure in refused.items()
    ]
    return bool(refused)


def _path(record: CommandRecord, path: str) -> str:
    """Return the path of a checkpoint in the directory as it is called now, whatever it was called then."""
    if path == record.directory:
        return shown(path)
    return shown(os.path.join(record.directory, os.path.basename(path)))


def _last_paths(record: CommandRecord, moves: Iterable[Move]) -> Iterator[tuple[Move, str]]:
    """Yield moves with the paths that their checkpoints had until they were taken back."""
    renamings: list[dict[str, str]] = []
    for step in record.steps:
        names: dict[str, str] = {}
        rewrites = step.undoing.rewrites
        for number, one in enumerate(rewrites):
            if one.before is None:  # an index that comes as another goes for it: it has other names in it
                near = (rewrites[at] for at in (number - 1, number + 1) if 0 <= at < len(rewrites))
                other = next((two.name for two in near if two.after is None), None)
                if other is not None:
                    names[one.name] = other
        names |= {os.path.basename(old): now for move in step.undoing.moves for now, old in move.members}
        renamings.append(names)
    for move in moves:
        base = os.path.basename(move.path)
        last = move.members[0][0]
        for name in (base, base + INDEX):
            now = name
            for names in renamings:
                now = names.get(now) or now
            if now != name:
                last = now.removesuffix(INDEX) if name != base else now
                break
        yield move, os.path.join(record.steps[-1].undoing.source, last)


# Pointers ------------------------------------------------------------------------------------------


def _merge_pointers(directory: str, undoing: Moves, fit: Sequence[Move]) -> tuple[Moves, list[Problem]]:
    """Return moves with what pointers are to say now, and which of them are left as they are, and why.

    Args:
        directory: The directory that they lie in.
        undoing: What takes a journal back.
        fit: Those of its moves that can be made.
    """
    left: list[Problem] = []
    rewrites: list[Rewrite] = []
    for rewrite in undoing.rewrites:
        path = shown(os.path.join(directory, rewrite.name))
        try:
            merged = _merge_text(directory, undoing, rewrite, fit)
        except (OSError, ValueError, StalePlan) as failure:
            left.append(Problem(path, f"left as it is: {failure}"))
            continue
        if merged.before != merged.after:
            rewrites.append(merged)
        elif merged.after != rewrite.after:
            left.append(Problem(path, "somebody else has written it since; it is left as it is"))
    relinks: list[Relink] = []
    for link in undoing.relinks:
        path = os.path.join(directory, link.name)
        try:
            now = fs.readlink(path)
        except OSError:  # it has gone, or is no symlink any more
            now = None
        if now == link.before:
            relinks.append(link)
        elif now != link.after:
            left.append(Problem(shown(path), "it leads elsewhere; it is left as it is"))
    return replace(undoing, moves=tuple(fit), rewrites=tuple(rewrites), relinks=tuple(relinks)), left


def _merge_text(directory: str, undoing: Moves, one: Rewrite, fit: Sequence[Move]) -> Rewrite:
    """Return how a pointer is taken back; one whose text stays is left."""
    if one.before is None or one.after is None:  # an index that comes, or goes: as recorded, or not at all
        return one
    first, mark, rest = one.name.partition(os.sep)
    old_names = {new: old for move in undoing.moves for old, new in move.members}
    if mark and undoing.source == undoing.target and first in old_names:  # in what is still to move
        now = text_at(os.path.join(directory, old_names[first], rest))
    else:
        now = text_at(os.path.join(directory, one.name))
    if now is None or now == one.after:
        return Rewrite(one.name, one.after, one.after)
    if now == one.before and len(fit) == len(undoing.moves):
        return one
    if one.name == NAME:
        return Rewrite(one.name, now, merged_state(now, one, {base_name(move.path) for move in fit}))
    # What others wrote stays: only the lines that we wrote are again those that they replaced.
    wrote, was = one.before.splitlines(keepends=True), one.after.splitlines(keepends=True)
    back: dict[str, str] = {}
    for kind, at, end, other, other_end in SequenceMatcher(None, wrote, was, autojunk=False).get_opcodes():
        if kind == "replace" and end - at == other_end - other:
            back |= dict(zip(wrote[at:end], was[other:other_end], strict=True))
    return Rewrite(one.name, now, "".join(back.get(line, line) for line in now.splitlines(keepends=True)))


def _pointer_paths(record: CommandRecord, step: UndoStep, moves: Moves) -> list[str]:
    """Return the paths of what says again what it said; what comes and goes belongs to a checkpoint."""
    names = [rewrite.name for rewrite in moves.rewrites if None not in (rewrite.before, rewrite.after)]
    names += [link.name for link in moves.relinks]
    journals = [one.journal for one in record.steps]
    # A pointer lies in a directory that has other names once the steps before are taken back, too.
    for earlier in reversed(record.steps[: journals.index(step.journal)]):
        first = {now: old for move in earlier.undoing.moves for now, old in move.members}
        parts = [name.partition(os.sep) for name in names]
        names = [first.get(name, name) + mark + rest for name, mark, rest in parts]
    return [shown(os.path.join(record.directory, name)) for name in names]
