"""Removes checkpoints for good, so that a kill at any instruction loses nothing that was to stay.

Everything happens below open directories, never through a symlink: what another process puts in a path's
place meanwhile is not touched. See ``journal`` for what is written down, and ``recovery`` for what is done
about it later.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter

from ckpttool.errors import AccessDenied, from_os_error
from ckpttool.transaction.files import opened
from ckpttool.transaction.journal import (
    Journal,
    NoRoom,
    Removal,
    begin_journal,
    journal_bytes,
    remove_stage,
    require_system,
)
from ckpttool.transaction.lock import FULL
from ckpttool.transaction.ownership import open_own
from ckpttool.transaction.paths import shown
from ckpttool.transaction.stage import (
    AlreadyGone,
    RemovalStage,
    StalePlan,
    StrandedCheckpoint,
    error_text,
    place_numbers,
    require_removable,
    status_of,
    unlink_all,
)
from ckpttool.transaction.state_dir import state_dir_of
from ckpttool.wire.atomic import sync_directory, write_in
from ckpttool.wire.directories import OpenDirectory
from ckpttool.work import in_order

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


def remove(directory: str, journal: Journal) -> RemovalOutcome:
    """Remove checkpoints of one directory; what has changed since the plan was made stays.

    On a full disk each that goes makes room: what failed for want of it is tried again as long as some go.
    """
    require_system(directory, "removed")
    outcome = RemovalOutcome()
    while journal.removals or journal.rewrites:
        refusal, so_far = None, len(outcome.removed)
        try:
            _remove_with_journal(directory, journal, outcome)
            journal = Journal(_crowded_out(directory, journal, outcome))
            if len(outcome.removed) > so_far:
                continue
        except NoRoom as failure:
            refusal = failure
        # There is no room for a journal, or for what moving to the stage takes: something goes without one.
        first = next(filter(_IS_SINGLE, journal.removals), next(iter(journal.removals), None))
        if first is None or journal.rewrites:  # pointers are rewritten before anything goes
            if refusal is not None and not outcome.removed:
                raise refusal
            outcome.failed |= {removal.path: "no space left for a journal" for removal in journal.removals}
            break
        _unlink_at_once(directory, first, outcome)
        journal = Journal(tuple(removal for removal in journal.removals if removal is not first))
    return outcome


def _remove_with_journal(directory: str, journal: Journal, outcome: RemovalOutcome) -> None:
    with journaled_stage(directory, journal) as stage:
        place, scratch = OpenDirectory(directory, stage.directory), OpenDirectory(stage.path, stage.inner)
        for rewrite in journal.rewrites:
            write_in(place, rewrite.name, rewrite.text.encode(), scratch)
        staged = [
            (number, removal)
            for number, removal in zip(place_numbers(journal.removals), journal.removals, strict=True)
            if _succeeds(outcome, removal, partial(stage.set_aside, number, removal))
        ]
        # What follows can't be taken back: that all of it is in the stage must be on the disk before.
        sync_directory(directory)
        _unlink_all(stage, staged, outcome)
        try:
            stage.close()
        except OSError as error:
            outcome.failed[stage.path] = error_text(error)


def _unlink_all(stage: RemovalStage, staged: Sequence[tuple[int, Removal]], outcome: RemovalOutcome) -> None:
    """Unlink what was set aside; of many, two threads do one half each: the disk works meanwhile."""
    if len(staged) < _MANY:
        _unlink_each(stage, staged, outcome)
        return
    # What has several names is counted as freed with the last of them: one thread has all of those.
    linked = [pair for pair in staged if any(file.links > 1 for file in pair[1].contents.files)]
    single = [pair for pair in staged if all(file.links == 1 for file in pair[1].contents.files)]
    halves = ([*linked, *single[::2]], single[1::2])
    for part in in_order(partial(_unlink_half, stage), halves, len(halves)):
        outcome.removed += part.removed
        outcome.failed |= part.failed
        outcome.crowded |= part.crowded
        outcome.stranded |= part.stranded
        outcome.freed += part.freed


def _unlink_half(
    stage: RemovalStage, half: Sequence[tuple[int, Removal]], check: Callable[[], None]
) -> RemovalOutcome:
    outcome = RemovalOutcome()
    _unlink_each(stage, half, outcome, check)
    return outcome


def _unlink_each(
    stage: RemovalStage,
    staged: Sequence[tuple[int, Removal]],
    outcome: RemovalOutcome,
    check: Callable[[], None] = lambda: None,
) -> None:
    for number, removal in staged:
        check()
        if _succeeds(outcome, removal, partial(_unlink_or_restore, stage, number, removal, outcome)):
            outcome.removed.append(removal.path)


def _unlink_or_restore(stage: RemovalStage, number: int, removal: Removal, outcome: RemovalOutcome) -> None:
    try:
        for nbytes in stage.unlink(number, removal):
            outcome.freed += nbytes
    except (StalePlan, OSError):
        stage.restore(number, removal)
        raise


def _crowded_out(directory: str, journal: Journal, outcome: RemovalOutcome) -> tuple[Removal, ...]:
    """Return what failed on a full disk and lies where it lay; it counts as failed no more."""
    crowded = tuple(
        removal
        for removal in journal.removals
        if removal.path in outcome.crowded
        and all(os.path.lexists(os.path.join(directory, name)) for name in removal.members)
    )
    for removal in crowded:
        del outcome.failed[removal.path]
    outcome.crowded.clear()
    return crowded


def _unlink_at_once(directory: str, removal: Removal, outcome: RemovalOutcome) -> None:
    """Unlink a checkpoint without a journal, so that there is room for one.

    A kill leaves nothing half-done of a single file; of others it leaves a part.
    """

    def unlink() -> None:
        with opened(directory) as place:
            if not any(status_of(name, place) for name in removal.members):
                raise AlreadyGone
            require_removable(place, removal.contents)
            for freed in unlink_all(place, removal, shown(directory)):
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
        outcome.failed[removal.path] = error_text(error)
        if error.errno in FULL:
            outcome.crowded.add(removal.path)
    else:
        return True
    return False


@contextmanager
def journaled_stage(directory: str, journal: Journal) -> Iterator[RemovalStage]:
    """Write a journal, yield the stage to work on, and take both away if all went well."""
    path = begin_journal(directory, state_dir_of(directory), journal_bytes(journal), "removed")
    try:
        with opened(directory) as place, open_own(directory, *os.path.split(path)) as inner:
            assert inner.descriptor is not None  # the system was asked
            stage = RemovalStage(path, place, inner.descriptor)
            try:
                yield stage
            finally:
                stage.abandon()
        remove_stage(path)
    except KeyboardInterrupt:
        from ckpttool.transaction.recovery import recover_stage

        recover_stage(directory, path)
        raise
    except OSError as error:
        reason = from_os_error(error, directory).reason
        raise AccessDenied(directory, f"{reason}; the next prune settles what was begun") from error
