"""Undoes what one command did to one directory: its record's steps, the last first, with the pointers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from functools import partial

from ckpttool.errors import from_os_error
from ckpttool.formats.tensorflow.prefix import INDEX
from ckpttool.formats.tensorflow.state import NAME
from ckpttool.series.changing.copies import COPIED, LOST_TIMES, has_lost_times, is_of_copy, moves_of_copy
from ckpttool.series.changing.history import CommandRecord, UndoStep, drop_step, read_record
from ckpttool.series.changing.move_transaction import ChainedMoves, MoveOutcome, apply_moves, move_obstacles
from ckpttool.series.changing.moves import Move, Moves, Relink, Rewrite
from ckpttool.series.changing.pointer_files import text_at
from ckpttool.series.changing.stage import StalePlan
from ckpttool.series.changing.state_file import merged_state
from ckpttool.series.paths import shown
from ckpttool.series.reasons import NotUndone, Problem

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
        return apply_moves(record.directory, moves, record.home)

    with ExitStack() as stack:
        is_chain = record.kind == "rename" and len(record.steps) > 1 and not dry_run
        chain = stack.enter_context(ChainedMoves(record.directory, record.home)) if is_chain else None
        for number, noted in reversed(list(enumerate(record.steps))):
            is_last, has_more = noted is record.steps[-1], number > 0
            step = noted if is_last or dry_run else _current_step(record, noted)
            make = partial(chain.make, has_more=has_more) if chain else undo_alone
            is_refused = _undo_step(record, step, done, make, is_last=is_last, dry_run=dry_run)
            if is_refused and record.kind == "rename":
                if chain is not None:
                    _undo_chain(record, chain, done)
                break
    return done


def _current_step(record: CommandRecord, step: UndoStep) -> UndoStep:
    """Return a step as it is noted now that those after it were taken back."""
    found = read_record(record.directory, record.home, record.identity)
    return next((one for one in found.steps if one.journal == step.journal), step) if found else step


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
    wanted = moves_of_copy(record.directory, step.undoing)
    if is_last and is_of_copy(wanted, step.undoing):
        done.warnings.append(f"{shown(record.directory)}: {COPIED}")
    elif is_last and has_lost_times(record.directory, wanted):
        done.warnings.append(f"{shown(record.directory)}: {LOST_TIMES}")
    # Of what was renamed twice, only the last name can be looked at before it is gone.
    refused = dict(move_obstacles(record.directory, wanted)) if is_last or not dry_run else {}
    fit = tuple(move for move in wanted.moves if move.path not in refused)
    if refused and record.kind == "rename" and wanted.is_bound:
        fit = ()  # its pointers go with all of it
    if fit or not wanted.moves:
        moves, left = merge_pointers(record.directory, wanted, fit)
        if not dry_run:
            outcome = make(moves)
            refused |= outcome.failures
            fit = tuple(move for move in fit if move.path in outcome.moved)
        if fit or not (wanted.moves or refused):
            done.pointers = list(dict.fromkeys([*done.pointers, *_pointer_paths(record, step, moves)]))
            if moves.moves or moves.is_bound:
                done.warnings += [f"{one.path}: {one.message}" for one in left]
            else:  # there is nothing else that it could be told with
                done.problems += left
        if not (wanted.moves or refused or dry_run):
            try:
                drop_step(record, step)
            except OSError as error:
                raise from_os_error(error, record.path) from error
    called_now = _last_names(record)
    for move in fit:
        done.restored.setdefault(_path(record, move.path), _path_until_now(record, called_now, move))
    planned = _PLANNED.get(record.kind, "then")
    done.problems += [
        NotUndone.because(_path(record, path), failure.text(planned)) for path, failure in refused.items()
    ]
    return bool(refused)


def _undo_chain(record: CommandRecord, chain: ChainedMoves, done: RecordUndo) -> None:
    """Have what was taken back as it was, since one step couldn't be."""
    chain.undo()
    others = [path for path in done.restored if path not in {one.path for one in done.problems}]
    if others:
        first = next(iter(done.problems))
        why = f"{os.path.basename(first.path)} isn't, and all of them are taken back, or none"
        done.problems += [NotUndone.because(path, why) for path in others]
    done.restored.clear()
    done.pointers.clear()


def merge_pointers(directory: str, wanted: Moves, fit: Sequence[Move]) -> tuple[Moves, list[Problem]]:
    """Return moves with what pointers are to say now, and which of them are left as they are, and why.

    Args:
        directory: The directory that they lie in.
        wanted: What takes a journal back.
        fit: Those of its moves that can be made.
    """
    left: list[Problem] = []
    rewrites: list[Rewrite] = []
    for one in wanted.rewrites:
        try:
            found = _merge_pointer(directory, wanted, one, fit)
        except (OSError, ValueError, StalePlan) as failure:
            found = None
            left.append(Problem(_shown_path(directory, one), f"left as it is: {failure}"))
        if found is not None and found.before != found.after:
            rewrites.append(found)
        elif found is not None and found.after != one.after:
            text = "somebody else has written it since; it is left as it is"
            left.append(Problem(_shown_path(directory, one), text))
    relinks: list[Relink] = []
    for link in wanted.relinks:
        now = _link_target(os.path.join(directory, link.name))
        if now == link.before:
            relinks.append(link)
        elif now != link.after:
            left.append(Problem(_shown_path(directory, link), "it leads elsewhere; it is left as it is"))
    return replace(wanted, moves=tuple(fit), rewrites=tuple(rewrites), relinks=tuple(relinks)), left


def _merge_pointer(directory: str, wanted: Moves, one: Rewrite, fit: Sequence[Move]) -> Rewrite | None:
    """Return how a pointer is taken back; one whose text stays is left."""
    if one.before is None or one.after is None:  # an index that comes, or goes: as recorded, or not at all
        return one
    now = text_at(_path_before_undo(directory, wanted, one.name))
    if now is None or now == one.after:
        return Rewrite(one.name, one.after, one.after)
    if now == one.before and len(fit) == len(wanted.moves):
        return one
    if one.name == NAME:
        return Rewrite(one.name, now, merged_state(now, one, {_base_name(move.path) for move in fit}))
    return Rewrite(one.name, now, _restore_lines(now, one.before, one.after))


def _path_before_undo(directory: str, wanted: Moves, name: str) -> str:
    """Return where a pointer lies before it is taken back: in a directory that is still to move, perhaps."""
    first, mark, rest = name.partition(os.sep)
    now = {new: old for move in wanted.moves for old, new in move.members}
    if mark and wanted.source == wanted.target and first in now:
        return os.path.join(directory, now[first], rest)
    return os.path.join(directory, name)


def _link_target(path: str) -> str | None:
    try:
        return os.readlink(path)
    except OSError:  # it has gone, or is no symlink any more
        return None


def _restore_lines(now: str, ours: str, before: str) -> str:
    """Return a text in which the lines that we wrote are again those that they replaced."""
    wrote, was = ours.splitlines(keepends=True), before.splitlines(keepends=True)
    back: dict[str, str] = {}
    for kind, at, end, other, other_end in SequenceMatcher(None, wrote, was, autojunk=False).get_opcodes():
        if kind == "replace" and end - at == other_end - other:
            back |= dict(zip(wrote[at:end], was[other:other_end], strict=True))
    return "".join(back.get(line, line) for line in now.splitlines(keepends=True))


def _pointer_paths(record: CommandRecord, step: UndoStep, moves: Moves) -> list[str]:
    """Return the paths of what says again what it said; what comes and goes belongs to a checkpoint."""
    names = [one.name for one in moves.rewrites if None not in (one.before, one.after)]
    names += [link.name for link in moves.relinks]
    journals = [one.journal for one in record.steps]
    for earlier in reversed(record.steps[: journals.index(step.journal)]):
        first = {now: old for move in earlier.undoing.moves for now, old in move.members}
        parts = [name.partition(os.sep) for name in names]
        names = [first.get(name, name) + mark + rest for name, mark, rest in parts]
    return [shown(os.path.join(record.directory, name)) for name in names]


def _path(record: CommandRecord, path: str) -> str:
    """Return the path of a checkpoint in the directory as it is called now, whatever it was called then."""
    if path == record.directory:
        return shown(path)
    return shown(os.path.join(record.directory, os.path.basename(path)))


def _path_until_now(record: CommandRecord, called_now: Callable[[str], str], move: Move) -> str:
    """Return the path that a checkpoint had until it was taken back."""
    base = os.path.basename(move.path)
    for name in (base, base + INDEX):
        now = called_now(name)
        if now != name:
            now = now.removesuffix(INDEX) if name != base else now
            return os.path.join(record.steps[-1].undoing.source, now)
    return os.path.join(record.steps[-1].undoing.source, move.members[0][0])


def _last_names(record: CommandRecord) -> Callable[[str], str]:
    """Return what tells the name that a command has made of another, step by step."""
    steps = [
        dict(_renamed_rewrites(step.undoing))
        | {os.path.basename(old): now for move in step.undoing.moves for now, old in move.members}
        for step in record.steps
    ]

    def called_now(name: str) -> str:
        for names in steps:
            name = names.get(name) or name
        return name

    return called_now


def _renamed_rewrites(undoing: Moves) -> Iterator[tuple[str, str]]:
    """Yield texts that come with those that go for them: indexes, which have other names in them then."""
    rewrites = undoing.rewrites
    for number, one in enumerate(rewrites):
        if one.before is None:
            near = (rewrites[at] for at in (number - 1, number + 1) if 0 <= at < len(rewrites))
            other = next((two.name for two in near if two.after is None), None)
            if other is not None:
                yield one.name, other


def _shown_path(directory: str, one: Rewrite | Relink) -> str:
    return shown(os.path.join(directory, one.name))


def _base_name(path: str) -> str:
    return os.path.basename(path.replace("\\", "/").rstrip("/"))
