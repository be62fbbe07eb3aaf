"""Undo of a command's record in one directory: its steps in reverse order, with the pointers.

The files of a copied directory have other inodes than recorded. If they have the recorded sizes and times,
they are taken for the recorded files. Without their times they can't be identified, and nothing is done.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher

from ckpttool.core.errors import from_os_error
from ckpttool.core.report import Problem
from ckpttool.formats import list_kind
from ckpttool.storage import fs
from ckpttool.transaction.engines import engine_of
from ckpttool.transaction.files import Fingerprint, StalePlan, fingerprint
from ckpttool.transaction.history import CommandRecord, UndoStep, drop_step, read_record
from ckpttool.transaction.journal import Location, Operation, OperationList, Rewrite
from ckpttool.transaction.open_roots import OpenRoots, open_roots
from ckpttool.transaction.paths import shown
from ckpttool.transaction.pointer_files import text_at
from ckpttool.transaction.state_dir import StateDir

_PLANNED = {"trash": "it was moved to the trash", "rename": "it was renamed", "prune": "it was removed"}
"""Completes "it has changed since …"."""


@dataclass(slots=True)
class RecordUndo:
    """Result of undoing a record.

    Attributes:
        restored: The path that each restored checkpoint had until now, by its restored path.
        pointers: Paths of restored pointers.
        problems: Checkpoints that can't be restored, and why.
        warnings: Pointers that are left unchanged, and a note if the directory is a copy.
    """

    restored: dict[str, str] = field(default_factory=dict)
    pointers: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def undo_record(record: CommandRecord, dry_run: bool) -> RecordUndo:
    """Undo the steps of a record in reverse order; a step of a rename that can't be undone ends it."""
    # Each journal of a rename builds on the names that the one before has made. So if one can't be undone,
    # those before it can't be either.
    done = RecordUndo()
    for recorded in reversed(record.steps):
        step, is_last = recorded, recorded is record.steps[-1]
        if not (is_last or dry_run):  # undoing the later steps has rewritten the record
            current = read_record(record.directory, record.state_dir, record.identity)
            steps = () if current is None else current.steps
            step = next((step for step in steps if step.journal == recorded.journal), recorded)
        is_refused = _undo_step(record, step, done, is_last=is_last, dry_run=dry_run)
        if is_refused and record.kind == "rename":
            break
    return done


def _undo_step(
    record: CommandRecord, step: UndoStep, done: RecordUndo, *, is_last: bool, dry_run: bool
) -> bool:
    """Undo one step as far as possible; return whether a part of it was refused."""
    undoing, warning = operations_in_copy(record.directory, step.undoing, record.state_dir)
    if is_last and warning is not None:
        done.warnings.append(f"{shown(record.directory)}: {warning}")
    engine = engine_of(record.directory)
    fit, in_place, refused = engine.restorable(record, undoing, is_latest_step=is_last, dry_run=dry_run)
    if refused and record.kind == "rename" and undoing.pointers:
        fit = []  # pointers to renamed checkpoints are restored for all of them or none
    if fit or not undoing.groups:
        listed, left = _merge_pointers(record.directory, undoing, fit)
        if not dry_run:
            outcome, in_place = engine.restore(record, listed)
            refused |= outcome.failures
            fit = [number for number in fit if undoing.groups[number].path in outcome.done]
        if fit or not (undoing.groups or refused):
            done.pointers = list(dict.fromkeys([*done.pointers, *_pointer_paths(record, step, listed)]))
            if listed.operations:
                done.warnings += [f"{problem.path}: {problem.message}" for problem in left]
            else:  # no pointer or checkpoint was restored, so this is all there is to report
                done.problems += left
        if not (undoing.groups or refused or dry_run):
            try:
                drop_step(record.directory, record.state_dir, record.identity, step.journal)
            except OSError as error:
                raise from_os_error(error, record.path) from error
    for number in (one for one in fit if one not in in_place):
        path = _path(record, undoing.groups[number].path)
        done.restored.setdefault(path, _last_path(record, undoing, number))
    planned = _PLANNED[record.kind]
    done.problems += [
        Problem(_path(record, path), failure.text(planned), "not restored")
        for path, failure in refused.items()
    ]
    return bool(refused)


def _path(record: CommandRecord, path: str) -> str:
    """Return the path of a recorded checkpoint under the current path of the directory."""
    if path == record.directory:
        return shown(path)
    return shown(os.path.join(record.directory, os.path.basename(path)))


def _last_path(record: CommandRecord, undoing: OperationList, number: int) -> str:
    """Return the path that a checkpoint has until it is restored."""
    if undoing.original_root(number) == "trash":
        return os.path.join(record.place, undoing.old_and_new_paths(number)[-1][0])
    group = undoing.groups[number]
    if record.kind == "prune":  # a bucket keeps versions under the same name
        return os.path.join(record.directory, os.path.basename(group.path))
    return os.path.join(record.directory, group.new_name or undoing.old_and_new_paths(number)[-1][0])


# Pointers ------------------------------------------------------------------------------------------


def _merge_pointers(
    directory: str, undoing: OperationList, fit: Sequence[int]
) -> tuple[OperationList, list[Problem]]:
    """Return the operations of an undo that restore some groups, with pointers merged with later changes.

    Returns:
        The operations, and the pointers that are left unchanged, with the reason.
    """
    left: list[Problem] = []
    pointers: list[Rewrite] = []
    for one in undoing.pointers:
        path = os.path.join(directory, one.name)
        try:
            merged = _merge_link(path, one) if one.is_link else _merge_text(directory, undoing, one, fit)
        except (OSError, ValueError, StalePlan) as failure:
            left.append(Problem(shown(path), f"left unchanged: {failure}"))
            continue
        if merged.before != merged.after:
            pointers.append(merged)
        elif merged.after != one.after:
            problem = "it points elsewhere now" if one.is_link else "modified since by another program"
            left.append(Problem(shown(path), f"{problem}; left unchanged"))
    return undoing.subset(fit).with_pointers(pointers), left


def _merge_link(path: str, one: Rewrite) -> Rewrite:
    """Return the rewrite that restores a symlink; it has equal targets if there is nothing to do."""
    try:
        now = fs.readlink(path)
    except OSError as error:
        if error.errno != errno.EINVAL and not fs.is_absence(error):
            raise
        now = None  # it isn't a symlink any more
    return one if now == one.before else one._replace(before=now, after=now)


def _merge_text(directory: str, undoing: OperationList, one: Rewrite, fit: Sequence[int]) -> Rewrite:
    """Return the rewrite that restores a pointer; it has equal texts if there is nothing to do."""
    if one.before is None or one.after is None:  # an index is made or removed as recorded, or not at all
        return one
    now = text_at(os.path.join(directory, undoing.old_path(one.name)))
    if now is None or now == one.after:
        return one._replace(before=one.after)
    if now == one.before and len(fit) == len(undoing.groups):
        return one
    if (checkpoint_list := list_kind(one.name)) is not None:
        names = {os.path.basename(undoing.groups[number].path) for number in fit}
        return one._replace(before=now, after=checkpoint_list.merged(now, one.before, one.after, names))
    # Lines that others wrote are kept: each line that we wrote becomes the one that it replaced.
    wrote, was = one.before.splitlines(keepends=True), one.after.splitlines(keepends=True)
    back: dict[str, str] = {}
    for kind, at, end, other, other_end in SequenceMatcher(None, wrote, was, autojunk=False).get_opcodes():
        if kind == "replace" and end - at == other_end - other:
            back |= dict(zip(wrote[at:end], was[other:other_end], strict=True))
    return one._replace(
        before=now, after="".join(back.get(line, line) for line in now.splitlines(keepends=True))
    )


def _pointer_paths(record: CommandRecord, step: UndoStep, listed: OperationList) -> list[str]:
    """Return the paths of restored pointers, without the indexes of checkpoints."""
    names = [one.name for one in listed.pointers if None not in (one.before, one.after)]
    journals = [one.journal for one in record.steps]
    # Undoing the steps before renames directories again, and with them the paths of pointers below.
    for earlier in reversed(record.steps[: journals.index(step.journal)]):
        groups = range(len(earlier.undoing.groups))
        first = {now: old for number in groups for now, old in earlier.undoing.old_and_new_paths(number)}
        parts = [name.partition(os.sep) for name in names]
        names = [first.get(name, name) + mark + rest for name, mark, rest in parts]
    return [shown(os.path.join(record.directory, name)) for name in names]


# Records in a copied directory ---------------------------------------------------------------------

COPIED = "this directory is a copy; its files have the recorded sizes and times, but other inodes"
LOST_TIMES = (
    "this directory is a copy without the original times; files of the same size can't be distinguished"
)

_SECOND = 10**9
"""In nanoseconds."""


def operations_in_copy(
    directory: str, listed: OperationList, state_dir: StateDir
) -> tuple[OperationList, str | None]:
    """Return operations with the fingerprints of the copied files, and a note if it is a copy.

    It is a copy if every file that exists has the recorded size and time, and none has the recorded inode.
    Fingerprints of missing files are unchanged.
    """
    if not fs.place_of(directory).can_rename:  # objects are compared by versions instead
        return listed, None
    # A single file with its recorded inode shows that this is the original, and one of another size has been
    # changed since. In both cases the recorded fingerprints are kept, and the undo compares them.
    now: dict[Fingerprint, Fingerprint] = {}
    others: list[tuple[Fingerprint, Fingerprint]] = []
    try:
        with open_roots(directory, listed, state_dir) as roots:
            for number, group in enumerate(listed.groups):
                rewritten = listed.rewritten_paths(number)
                for file in group.contents.files:
                    here = _file_at(roots, Location(listed.original_root(number), file.path))
                    if here is not None:
                        now[file] = here
                        if file.path not in rewritten:  # rewritten files are compared by their texts
                            others.append((file, here))
            if all(_is_copied(recorded, here) for recorded, here in others):
                has_other_inodes = any(recorded.inode != here.inode for recorded, here in others)
                return (_as_found(listed, now, roots), COPIED) if has_other_inodes else (listed, None)
    except OSError:  # executing the operations raises it again
        return listed, None
    has_lost_times = all(
        recorded.size == here.size and recorded.inode != here.inode for recorded, here in others
    )
    return listed, LOST_TIMES if has_lost_times else None


def _as_found(listed: OperationList, now: dict[Fingerprint, Fingerprint], roots: OpenRoots) -> OperationList:
    def found(recorded: Fingerprint, location: Location) -> Fingerprint:
        here = _file_at(roots, location)
        return (
            recorded if here is None or not _is_copied(recorded, here) else replace(here, path=recorded.path)
        )

    def operation(one: Operation) -> Operation:
        if isinstance(one, Rewrite):
            return one
        old = one.replaces and one.replaces._replace(file=found(one.replaces.file, one.target))
        return one._replace(file=one.file and found(one.file, one.source), replaces=old)

    groups = tuple(
        group._replace(
            contents=replace(
                group.contents, files=tuple(now.get(file, file) for file in group.contents.files)
            )
        )
        for group in listed.groups
    )
    return replace(listed, groups=groups, operations=tuple(map(operation, listed.operations)))


def _file_at(roots: OpenRoots, location: Location) -> Fingerprint | None:
    status = roots.status(location)
    return None if status is None else fingerprint(location.path, status)


def _is_copied(recorded: Fingerprint, here: Fingerprint) -> bool:
    # An archive may store times in whole seconds.
    has_time = here.mtime_ns in (recorded.mtime_ns, recorded.mtime_ns // _SECOND * _SECOND)
    is_itself = (recorded.device, recorded.inode) == (here.device, here.inode)
    return recorded.size == here.size and has_time and not is_itself
