"""Removal of checkpoints, for good or to the trash, that loses nothing else if it is killed.

A checkpoint that is removed for good is moved into the stage of a journal, and unlinked only there
(``operations``), so half of one is never found in the directory. On a full disk, one is unlinked without a
journal.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Literal

from ckpttool.core.errors import CheckpointError
from ckpttool.storage import fs
from ckpttool.transaction.files import StalePlan
from ckpttool.transaction.journal import FILES, Group, Location, Move, OperationList, Rewrite, Root
from ckpttool.transaction.open_roots import open_roots
from ckpttool.transaction.paths import shown
from ckpttool.transaction.pointer_files import list_rewrites
from ckpttool.transaction.stages import NoRoom
from ckpttool.transaction.state_dir import state_dir_of
from ckpttool.transaction.transaction import Failure, Outcome, Transaction
from ckpttool.transaction.unlinking import StrandedCheckpoint, purge_checked

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
        rewrites: The rewrites of pointers.
        kind: "remove" to the stage, for good, or to the "trash".
        identity: Identity of the command; None if it can't be undone.
    """
    place: Root = "trash" if kind == "trash" else "stage"
    moves = (
        Move(number, Location("directory", name), Location(place, os.path.join(FILES, name)))
        for number, group in enumerate(groups)
        for name in group.members
    )
    return OperationList(kind, tuple(groups), (*rewrites, *moves), identity)


def remove(directory: str, removals: Sequence[Group]) -> Outcome:
    """Remove checkpoints of one directory; those that have changed since the plan was made are kept.

    Lists of checkpoints no longer name them. On a full disk, each removal makes room: those that fail for
    lack of it are repeated as long as others succeed.
    """
    # Each round removes what it can. Removals that failed for lack of space are in the next one, as long as a
    # round has freed some.
    outcome = Outcome()
    left = list(removals)
    while left:
        once, refusal = Outcome(), None
        try:
            _remove_with_journal(directory, left, once)
        except NoRoom as failure:
            refusal = failure
        except CheckpointError as failure:
            outcome.add(once)
            return _interrupted(left, outcome, failure)
        crowded = [one for one in left if _lacks_room(directory, one, once, is_refused=refusal is not None)]
        for one in crowded:
            once.failures.pop(one.path, None)
        outcome.add(once)
        left = crowded
        if once.done or not crowded:
            continue
        # The disk has no room for a journal, or for the new names in the stage. One checkpoint is unlinked
        # without a journal to make some: preferably a single file, of which a kill can't leave a part.
        first = next(filter(_IS_SINGLE, crowded), crowded[0])
        if list_rewrites(directory, _names(crowded)):  # a list is rewritten before, which takes room, too
            if refusal is not None and not outcome.done:
                raise refusal
            outcome.failures |= {one.path: Failure("no space left for a journal") for one in crowded}
            break
        _unlink_at_once(directory, first, outcome)
        left = [one for one in crowded if one is not first]
    return outcome


def _interrupted(removals: Sequence[Group], outcome: Outcome, failure: CheckpointError) -> Outcome:
    """Return an outcome in which the remaining removals failed; raise the error if nothing was removed."""
    if not outcome.done:
        raise failure
    known = {*outcome.done, *outcome.failures}
    others = (one.path for one in removals if one.path not in known)
    outcome.failures |= dict.fromkeys(others, Failure(failure.reason))
    return outcome


def _lacks_room(directory: str, removal: Group, outcome: Outcome, *, is_refused: bool) -> bool:
    """Return whether a removal is to be repeated once the disk has room."""
    if removal.path in outcome.failures:
        is_in_place = all(fs.lexists(os.path.join(directory, name)) for name in removal.members)
        return outcome.failures[removal.path].is_disk_full and is_in_place
    return is_refused and removal.path not in outcome.done


def _names(removals: Iterable[Group]) -> set[str]:
    return {os.path.basename(one.path) for one in removals}


def move_to_trash(directory: str, removals: Sequence[Group], identity: str) -> Outcome:
    """Move checkpoints of one directory into its trash; ``freed`` is the number of bytes moved."""
    outcome = Outcome()
    try:
        _remove_with_journal(directory, removals, outcome, identity)
    except CheckpointError as failure:
        return _interrupted(removals, outcome, failure)
    return outcome


def _remove_with_journal(
    directory: str, removals: Sequence[Group], outcome: Outcome, identity: str | None = None
) -> None:
    """Remove checkpoints; if a pointer is rewritten, retry without those that fail."""
    # A list names exactly the checkpoints that remain. So if one of them can't be removed, all are moved
    # back, and the list is rewritten for the others.
    while removals:
        rewrites = list_rewrites(directory, _names(removals))
        listed = removal_operations(removals, rewrites, "remove" if identity is None else "trash", identity)
        removal = Transaction(directory, listed)
        try:
            with removal:
                removal.commit()
                removal.close()
        finally:
            outcome.add(removal.outcome)
        once = removal.outcome
        removals = [one for one in removals if one.path not in once.failures and one.path not in once.done]
        if once.stranded:  # until its journal is recovered, nothing else is begun
            why = Failure("another checkpoint could not be restored; the next command recovers it")
            outcome.failures |= dict.fromkeys((one.path for one in removals), why)
            return


def _unlink_at_once(directory: str, removal: Group, outcome: Outcome) -> None:
    """Unlink a checkpoint without a journal, to make room for one.

    A kill may leave a part of a checkpoint that has several files.
    """
    try:
        with open_roots(directory, removal_operations([removal]), state_dir_of(directory)) as roots:
            place = roots.descriptors["directory"]
            for freed in purge_checked(
                place, removal.contents, shown(directory), lambda: roots.require_ready(0)
            ):
                outcome.freed += freed
        outcome.done.append(removal.path)
    except (StalePlan, StrandedCheckpoint, OSError) as failure:
        outcome.fail(removal.path, failure)
