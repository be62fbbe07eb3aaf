"""Removes checkpoints for good, so that a kill at any instruction loses nothing that was to stay.

What goes is moved into the stage of a journal, and unlinked only there (``operations``): no half of a
checkpoint ever lies where one is looked for. On a full disk, something goes without a journal.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter

from ckpttool.core.errors import AccessDenied, from_os_error, system_text
from ckpttool.io import fs
from ckpttool.io.work import in_order
from ckpttool.transaction.files import Fingerprint, StalePlan, opened, status_of
from ckpttool.transaction.journal import (
    NoRoom,
    OperationList,
    Recovery,
    Removal,
    remove_stage,
    require_system,
)
from ckpttool.transaction.lock import FULL
from ckpttool.transaction.mounts import require_unmounted
from ckpttool.transaction.operations import (
    AlreadyGone,
    Stage,
    StrandedCheckpoint,
    begin_stage,
    open_stage,
    purge_unchanged,
    removal_operations,
    require_removable,
)
from ckpttool.transaction.paths import shown
from ckpttool.transaction.pointer_files import state_rewrite
from ckpttool.transaction.stored_journals import read_journal

_MANY = 200
"""From so many checkpoints on a second thread is worth its start."""

_IS_SINGLE = attrgetter("is_single")


@dataclass(slots=True)
class RemovalOutcome:
    """What became of removals: ``failed`` says why, by path; ``freed`` is in bytes.

    What was gone already counts as removed, and frees nothing. ``crowded`` are those of the failed for which
    the disk was too full; of the ``stranded`` a part is gone, or all lies in the stage.
    """

    removed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    crowded: set[str] = field(default_factory=set)
    stranded: set[str] = field(default_factory=set)
    freed: int = 0

    def add(self, other: RemovalOutcome) -> None:
        """Add what became of others."""
        self.removed += other.removed
        self.failed |= other.failed
        self.crowded |= other.crowded
        self.stranded |= other.stranded
        self.freed += other.freed


def remove(directory: str, removals: Sequence[Removal]) -> RemovalOutcome:
    """Remove checkpoints of one directory; what has changed since the plan was made stays.

    A state file of TensorFlow names them no more. On a full disk each that goes makes room: what failed for
    want of it is tried again as long as some go.
    """
    require_system(directory, "removed")
    outcome = RemovalOutcome()
    left = list(removals)
    while left:
        once, refusal = RemovalOutcome(), None
        try:
            _remove_with_journal(directory, left, once)
            crowded = [one for one in left if one.path in once.crowded and _is_in_place(directory, one)]
        except NoRoom as failure:
            settled = {*once.removed, *once.failed} - once.crowded
            refusal, crowded = failure, [one for one in left if one.path not in settled]
        for one in crowded:
            once.failed.pop(one.path, None)
        once.crowded.clear()
        outcome.add(once)
        left = crowded
        if once.removed or not crowded:
            continue
        # There is no room for a journal, or for what moving to the stage takes: one goes without.
        first = next(filter(_IS_SINGLE, crowded), crowded[0])
        if state_rewrite(directory, _names(crowded)):  # the state file is written before anything goes
            if refusal is not None and not outcome.removed:
                raise refusal
            outcome.failed |= {one.path: "no space left for a journal" for one in crowded}
            break
        _unlink_at_once(directory, first, outcome)
        left = [one for one in crowded if one is not first]
    return outcome


def _names(removals: Iterable[Removal]) -> set[str]:
    return {os.path.basename(one.path) for one in removals}


def _is_in_place(directory: str, removal: Removal) -> bool:
    return all(fs.lexists(os.path.join(directory, name)) for name in removal.members)


def _remove_with_journal(directory: str, removals: Sequence[Removal], outcome: RemovalOutcome) -> None:
    """Remove checkpoints; if a pointer is rewritten, retry without those that fail."""
    while removals:
        listed = removal_operations(removals, state_rewrite(directory, _names(removals)))
        path = None
        try:
            try:
                with begin_stage(directory, listed) as stage:
                    path = stage.path
                    removals = _remove_in(stage, outcome)
                    _close(stage, outcome)
            except KeyboardInterrupt:
                if path is not None:
                    _settle(directory, path)
                    remove_stage(path)
                raise
        except OSError as error:
            reason = from_os_error(error, directory).reason
            raise AccessDenied(directory, f"{reason}; the next prune recovers") from error
        try:
            remove_stage(path)
        except OSError as error:
            outcome.failed[path] = f"{system_text(error)}; the next prune removes it"


def _remove_in(stage: Stage, outcome: RemovalOutcome) -> list[Removal]:
    """Run the operations and empty the stage; return the removals to retry in a new one."""
    groups = stage.listed.groups
    try:
        stage.write_pointers()
    except StalePlan as change:
        outcome.failed |= dict.fromkeys((one.path for one in groups), str(change))
        return []
    standing = [
        number
        for number, group in enumerate(groups)
        if _succeeds(outcome, group, partial(stage.set_aside, number))
    ]
    if stage.listed.rewrites and len(standing) < len(groups):
        restored = _restore(stage, standing, outcome)
        return [groups[number] for number in restored]
    try:
        if standing:
            stage.commit(standing)
    except OSError as error:
        for number in _restore(stage, standing, outcome):
            outcome.failed[groups[number].path] = system_text(error)
            if error.errno in FULL:
                outcome.crowded.add(groups[number].path)
    else:
        _purge(stage, standing, outcome)
    return []


def _restore(stage: Stage, numbers: Sequence[int], outcome: RemovalOutcome) -> list[int]:
    """Restore groups and the pointers to all that is in place; return the numbers of the restored."""
    groups = stage.listed.groups
    restored = [
        number
        for number in reversed(numbers)
        if _succeeds(outcome, groups[number], partial(stage.restore, number))
    ]
    gone = {*outcome.removed, *outcome.stranded}
    stage.restore_pointers([number for number, one in enumerate(groups) if one.path not in gone])
    return restored[::-1]


def _close(stage: Stage, outcome: RemovalOutcome) -> None:
    try:
        stage.close()
    except OSError as error:
        if not outcome.stranded:
            outcome.failed[stage.path] = system_text(error)


def _settle(directory: str, path: str) -> None:
    """Recover a stage right after Ctrl-C."""
    listed = read_journal(path, directory)
    if isinstance(listed, OperationList):
        with open_stage(directory, path, listed) as stage:
            stage.recover(Recovery())


def _purge(stage: Stage, numbers: Sequence[int], outcome: RemovalOutcome) -> None:
    """Unlink what was set aside; of many, two threads do one half each: the disk works meanwhile."""
    halves: Sequence[Sequence[int]] = (numbers,)
    if len(numbers) >= _MANY:
        # What has several names is counted as freed with the last of them: one thread has all of those.
        linked = [one for one in numbers if any(file.links > 1 for file in _files(stage, one))]
        single = [one for one in numbers if all(file.links == 1 for file in _files(stage, one))]
        halves = ([*linked, *single[::2]], single[1::2])
    stuck: list[int] = []
    for done, left in in_order(partial(_purge_part, stage), halves, len(halves)):
        outcome.add(done)
        stuck += left
    if not stuck:
        return
    try:
        stage.withdraw(stuck)
    except OSError as error:
        paths = [stage.listed.groups[number].path for number in stuck]
        outcome.failed |= dict.fromkeys(paths, f"{system_text(error)}; the next prune recovers")
        outcome.stranded |= {*paths}
    else:
        _restore(stage, stuck, outcome)


def _files(stage: Stage, number: int) -> Sequence[Fingerprint]:
    return stage.listed.groups[number].contents.files


def _purge_part(
    stage: Stage, numbers: Sequence[int], check: Callable[[], None]
) -> tuple[RemovalOutcome, list[int]]:
    """Unlink some groups; return what became of them, and those of which nothing could be unlinked."""
    outcome, stuck = RemovalOutcome(), list[int]()

    def unlink(number: int) -> None:
        for nbytes in stage.purge(number):
            outcome.freed += nbytes

    for number in numbers:
        check()
        group = stage.listed.groups[number]
        if _succeeds(outcome, group, partial(unlink, number)):
            outcome.removed.append(group.path)
        elif group.path not in outcome.stranded:
            stuck.append(number)
    return outcome, stuck


def _unlink_at_once(directory: str, removal: Removal, outcome: RemovalOutcome) -> None:
    """Unlink a checkpoint without a journal, so that there is room for one.

    A kill leaves nothing half-done of a single file; of others it leaves a part.
    """

    def unlink() -> None:
        with opened(directory) as place:
            if not any(status_of(name, place) for name in removal.members):
                raise AlreadyGone
            require_unmounted(place, removal.members)
            require_removable(place, removal.contents)
            for freed in purge_unchanged(place, removal, shown(directory)):
                outcome.freed += freed

    if _succeeds(outcome, removal, unlink):
        outcome.removed.append(removal.path)


def _succeeds(outcome: RemovalOutcome, removal: Removal, step: Callable[[], object]) -> bool:
    try:
        step()
    except AlreadyGone:
        outcome.removed.append(removal.path)
    except StalePlan as change:
        outcome.failed[removal.path] = str(change)
    except StrandedCheckpoint as rest:
        outcome.failed[removal.path] = str(rest)
        outcome.stranded.add(removal.path)
    except OSError as error:
        outcome.failed[removal.path] = system_text(error)
        if error.errno in FULL:
            outcome.crowded.add(removal.path)
    else:
        return True
    return False
