"""Removes checkpoints, for good or to the trash, so that a kill at any moment loses nothing that was to stay.

What goes for good is moved into the stage of a journal, and unlinked only there (``operations``): no half of
a checkpoint ever lies where one is looked for. On a full disk, something goes without a journal.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Literal

from ckpttool.core.errors import AccessDenied, CheckpointError, from_os_error, system_text
from ckpttool.storage import fs
from ckpttool.storage.work import in_order
from ckpttool.transaction.files import Fingerprint, StalePlan, contents, opened, status_of
from ckpttool.transaction.history import read_record, require_own_trash
from ckpttool.transaction.journal import FILES, Group, Location, Move, OperationList, Rewrite, Root
from ckpttool.transaction.lock import FULL
from ckpttool.transaction.mounts import require_unmounted
from ckpttool.transaction.open_roots import AlreadyGone, is_unchanged
from ckpttool.transaction.operations import Failures, Stage, UnknownCommit, begin_stage
from ckpttool.transaction.paths import shown
from ckpttool.transaction.pointer_files import list_rewrites
from ckpttool.transaction.settling import settle_now
from ckpttool.transaction.stages import NoRoom, remove_stage, require_system
from ckpttool.transaction.state_dir import state_dir_of
from ckpttool.transaction.unlinking import StrandedCheckpoint, purge_checked, require_removable

_MANY = 200
"""From so many checkpoints on a second thread is worth its start."""

_IS_SINGLE = attrgetter("is_single")


def removal_operations(
    groups: Sequence[Group],
    rewrites: Sequence[Rewrite] = (),
    kind: Literal["remove", "trash"] = "remove",
    identity: str | None = None,
) -> OperationList:
    """Return the operations that write pointers, then move checkpoints to the stage or to the trash.

    Args:
        groups: The checkpoints.
        rewrites: The pointers.
        kind: Where they go.
        identity: Of the command, if it can be undone.
    """
    place: Root = "trash" if kind == "trash" else "stage"
    moves = (
        Move(number, Location("directory", name), Location(place, os.path.join(FILES, name)))
        for number, group in enumerate(groups)
        for name in group.members
    )
    return OperationList(kind, tuple(groups), (*rewrites, *moves), identity)


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


def remove(directory: str, removals: Sequence[Group]) -> RemovalOutcome:
    """Remove checkpoints of one directory; what has changed since the plan was made stays.

    Lists of checkpoints name them no more. On a full disk each that goes makes room: what failed for want of
    it is tried again as long as some go.
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
        if list_rewrites(directory, _names(crowded)):  # lists are written before anything is removed
            if refusal is not None and not outcome.removed:
                raise refusal
            outcome.failed |= {one.path: "no space left for a journal" for one in crowded}
            break
        _unlink_at_once(directory, first, outcome)
        left = [one for one in crowded if one is not first]
    return outcome


def _names(removals: Iterable[Group]) -> set[str]:
    return {os.path.basename(one.path) for one in removals}


def _is_in_place(directory: str, removal: Group) -> bool:
    return all(fs.lexists(os.path.join(directory, name)) for name in removal.members)


def put_aside(directory: str, removals: Sequence[Group], identity: str) -> RemovalOutcome:
    """Move checkpoints of one directory into its trash; ``freed`` says how many bytes lie there then."""
    require_system(directory, "moved")
    state_dir = state_dir_of(directory)
    require_own_trash(state_dir)
    read_record(directory, state_dir, identity)  # what can't be recorded isn't begun
    outcome = RemovalOutcome()
    _remove_with_journal(directory, removals, outcome, identity)
    outcome.crowded.clear()
    return outcome


def _remove_with_journal(
    directory: str, removals: Sequence[Group], outcome: RemovalOutcome, identity: str | None = None
) -> None:
    """Remove checkpoints; if a pointer is rewritten, retry without those that fail."""
    while removals:
        rewrites = list_rewrites(directory, _names(removals))
        listed = removal_operations(removals, rewrites, "remove" if identity is None else "trash", identity)
        path = None
        try:
            try:
                with begin_stage(directory, listed) as stage:
                    path = stage.path
                    removals = _remove_in(stage, outcome)
                    _close(stage, outcome)
            except KeyboardInterrupt:
                if path is not None:
                    settle_now(directory, path)
                raise
        except OSError as error:
            reason = from_os_error(error, directory).reason
            raise AccessDenied(directory, f"{reason}; the next command recovers") from error
        if not outcome.stranded.isdisjoint(one.path for one in listed.groups):
            return  # the journal is kept: recovery puts back what it can
        try:
            remove_stage(path)
        except OSError as error:
            outcome.failed[path] = f"{system_text(error)}; the next prune removes it"


def _remove_in(stage: Stage, outcome: RemovalOutcome) -> list[Group]:
    """Run the operations and empty the stage; return the removals to retry in a new one."""
    groups = stage.listed.groups
    try:
        failures = stage.forward()
    except StalePlan as change:
        outcome.failed |= dict.fromkeys((one.path for one in groups), str(change))
        _add_failures(stage, stage.back_all(), outcome)
        return []
    except OSError:
        _add_failures(stage, stage.back_all(), outcome)
        raise
    standing = [number for number in range(len(groups)) if number not in failures]
    try:
        changed = stage.prepare(standing) if standing and not (stage.listed.pointers and failures) else {}
        failures |= changed
        _add_failures(stage, failures, outcome)
        if failures and (changed or stage.listed.pointers):
            restored = _restore(stage, standing, outcome)
            return [groups[number] for number in restored if number not in changed]
        if standing:
            stage.commit(standing)
    except UnknownCommit:
        raise
    except (OSError, CheckpointError) as error:
        for number in _restore(stage, standing, outcome):
            add_failure(outcome, groups[number], error)
    else:
        if stage.listed.kind == "remove":
            _purge(stage, standing, outcome)
        else:
            outcome.removed += [groups[number].path for number in standing]
            outcome.freed += sum(groups[number].contents.nbytes for number in standing)
    return []


def _restore(stage: Stage, numbers: Sequence[int], outcome: RemovalOutcome) -> list[int]:
    """Restore groups and the pointers to all that is in place; return the numbers of the restored."""
    groups = stage.listed.groups
    gone = {*outcome.removed, *outcome.stranded}
    failures = stage.back([number for number, one in enumerate(groups) if one.path not in gone])
    _add_failures(stage, failures, outcome)
    return [number for number in numbers if number not in failures]


def _add_failures(stage: Stage, failures: Failures, outcome: RemovalOutcome) -> None:
    for number, failure in failures.items():
        add_failure(outcome, stage.listed.groups[number], failure)


def _close(stage: Stage, outcome: RemovalOutcome) -> None:
    try:
        stage.close()
    except OSError as error:
        if not outcome.stranded:
            outcome.failed[stage.path] = system_text(error)


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
        outcome.failed |= dict.fromkeys(paths, f"{system_text(error)}; the next command recovers")
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


def _unlink_at_once(directory: str, removal: Group, outcome: RemovalOutcome) -> None:
    """Unlink a checkpoint without a journal, so that there is room for one.

    A kill leaves nothing half-done of a single file; of others it leaves a part.
    """

    def unlink() -> None:
        with opened(directory) as place:
            if not any(status_of(name, place) for name in removal.members):
                raise AlreadyGone
            require_unmounted(place, removal.members)
            require_removable(place, removal.contents)

            def check() -> None:
                if not is_unchanged(contents(place, removal.members), removal.contents):
                    raise StalePlan("it has changed", since_plan=True)

            for freed in purge_checked(place, removal.contents, shown(directory), check):
                outcome.freed += freed

    if _succeeds(outcome, removal, unlink):
        outcome.removed.append(removal.path)


def _succeeds(outcome: RemovalOutcome, group: Group, step: Callable[[], object]) -> bool:
    try:
        step()
    except (StalePlan, StrandedCheckpoint, OSError) as failure:
        add_failure(outcome, group, failure)
        return False
    return True


def add_failure(outcome: RemovalOutcome, group: Group, failure: Exception) -> None:
    """Add why a checkpoint was not removed; one that is gone already counts as removed."""
    if isinstance(failure, AlreadyGone):
        outcome.removed.append(group.path)
    elif isinstance(failure, OSError):
        outcome.failed[group.path] = system_text(failure)
        if failure.errno in FULL:
            outcome.crowded.add(group.path)
    else:
        outcome.failed[group.path] = str(failure)
        if isinstance(failure, StrandedCheckpoint):
            outcome.stranded.add(group.path)
