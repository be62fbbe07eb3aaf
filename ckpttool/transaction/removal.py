"""Removes checkpoints, for good or to the trash, so that a kill at any moment loses nothing that was to stay.

What goes for good is moved into the stage of a journal, and unlinked only there (``operations``): no half of
a checkpoint ever lies where one is looked for. On a full disk, something goes without a journal.
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


def remove(directory: str, removals: Sequence[Group]) -> Outcome:
    """Remove checkpoints of one directory; what has changed since the plan was made stays.

    Lists of checkpoints name them no more. On a full disk each that goes makes room: what failed for want of
    it is tried again as long as some go.
    """
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
        # There is no room for a journal, or for what moving to the stage takes: one goes without.
        first = next(filter(_IS_SINGLE, crowded), crowded[0])
        if list_rewrites(directory, _names(crowded)):  # lists are written before anything is removed
            if refusal is not None and not outcome.done:
                raise refusal
            outcome.failures |= {one.path: Failure("no space left for a journal") for one in crowded}
            break
        _unlink_at_once(directory, first, outcome)
        left = [one for one in crowded if one is not first]
    return outcome


def _interrupted(removals: Sequence[Group], outcome: Outcome, failure: CheckpointError) -> Outcome:
    """Return an outcome in which the other removals failed, too; raise the error if nothing was removed."""
    if not outcome.done:
        raise failure
    known = {*outcome.done, *outcome.failures}
    others = (one.path for one in removals if one.path not in known)
    outcome.failures |= dict.fromkeys(others, Failure(failure.reason))
    return outcome


def _lacks_room(directory: str, removal: Group, outcome: Outcome, *, is_refused: bool) -> bool:
    """Return whether a removal is to be tried again once there is room."""
    if removal.path in outcome.failures:
        is_in_place = all(fs.lexists(os.path.join(directory, name)) for name in removal.members)
        return outcome.failures[removal.path].is_crowded and is_in_place
    return is_refused and removal.path not in outcome.done


def _names(removals: Iterable[Group]) -> set[str]:
    return {os.path.basename(one.path) for one in removals}


def put_aside(directory: str, removals: Sequence[Group], identity: str) -> Outcome:
    """Move checkpoints of one directory into its trash; ``freed`` says how many bytes lie there then."""
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
            why = Failure("another one could not be put back; the next command recovers")
            outcome.failures |= dict.fromkeys((one.path for one in removals), why)
            return


def _unlink_at_once(directory: str, removal: Group, outcome: Outcome) -> None:
    """Unlink a checkpoint without a journal, so that there is room for one.

    A kill leaves nothing half-done of a single file; of others it leaves a part.
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
