"""Removes checkpoints for good, so that a kill at any instruction loses nothing that was to stay.

Everything happens below open directories, never through a symlink: what another process puts in a path's
place meanwhile is not touched. See ``journal`` for what is written down, and ``recovery`` for what is done
about it later.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from ckpttool.errors import AccessDenied, from_os_error
from ckpttool.series.files import opened
from ckpttool.series.home import home_of
from ckpttool.series.journal import JOURNAL, STAGE_PREFIX, TEMPORARY, Journal, Removal, dumps
from ckpttool.series.lock import FULL
from ckpttool.series.stage import Changed, Gone, Stage, unlink_file
from ckpttool.wire.atomic import sync_directory, write_atomically

_BELOW_DIRECTORIES = os.rename in os.supports_dir_fd


class NoRoom(AccessDenied):
    """The disk, or a quota, is full."""


@dataclass(slots=True)
class Outcome:
    """What became of removals: ``failed`` says why, by path; ``freed`` is in bytes.

    What was gone already counts as removed, and frees nothing. ``crowded`` are those of the failed for which
    the disk was too full.
    """

    removed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    crowded: set[str] = field(default_factory=set)
    freed: int = 0


def remove(directory: str, journal: Journal) -> Outcome:
    """Remove checkpoints of one directory; what has changed since the plan was made stays.

    Raises:
        AccessDenied: The directory can't be changed; nothing was.
    """
    _require_system(directory)
    outcome = Outcome()
    while journal.removals or journal.rewrites:
        refusal, so_far = None, len(outcome.removed)
        try:
            _carry_out(directory, journal, outcome)
            journal = Journal(_crowded(directory, journal, outcome))
            if len(outcome.removed) > so_far:
                continue
        except NoRoom as failure:
            refusal = failure
        single = next(filter(_is_single_file, journal.removals), None)
        if single is None or journal.rewrites:  # pointers are rewritten before anything goes
            _give_up(journal, outcome, refusal)
            break
        _unlink_at_once(directory, single, outcome)
        journal = Journal(tuple(one for one in journal.removals if one is not single))
    return outcome


def _carry_out(directory: str, journal: Journal, outcome: Outcome) -> None:
    with begun(directory, journal) as stage:
        for rewrite in journal.rewrites:
            write_atomically(os.path.join(directory, rewrite.name), rewrite.text.encode())
        staged = [
            number
            for number, removal in enumerate(journal.removals)
            if _tried(outcome, removal, partial(stage.set_aside, number, removal))
        ]
        sync_directory(directory)
        for number in staged:
            removal = journal.removals[number]
            if _tried(outcome, removal, partial(_unlink, stage, number, removal, outcome)):
                outcome.removed.append(removal.path)


def _crowded(directory: str, journal: Journal, outcome: Outcome) -> tuple[Removal, ...]:
    """Return what failed on a full disk and lies where it lay; it counts as failed no more."""
    crowded = tuple(
        one
        for one in journal.removals
        if one.path in outcome.crowded
        and all(os.path.lexists(os.path.join(directory, name)) for name in one.members)
    )
    for one in crowded:
        del outcome.failed[one.path]
    outcome.crowded.clear()
    return crowded


def _is_single_file(removal: Removal) -> bool:
    return len(removal.members) == len(removal.contents.files) == 1 and not removal.contents.directories


def _unlink_at_once(directory: str, removal: Removal, outcome: Outcome) -> None:
    """Unlink a checkpoint that is a single file. That needs no journal: nothing can be left half-done."""

    def unlink() -> None:
        with opened(directory) as home:
            outcome.freed += unlink_file(home, removal.contents.files[0])

    if _tried(outcome, removal, unlink):
        outcome.removed.append(removal.path)


def _give_up(journal: Journal, outcome: Outcome, refusal: NoRoom | None) -> None:
    """Note what stays for want of room; ``refusal`` is why there is no journal.

    Raises:
        NoRoom: Nothing was removed at all.
    """
    if refusal is not None and not outcome.removed:
        raise refusal
    outcome.failed |= {one.path: "no space left for a journal" for one in journal.removals}


def _require_system(directory: str) -> None:
    if not _BELOW_DIRECTORIES:
        raise AccessDenied(directory, "this system can't remove below open directories; nothing was removed")


def _tried(outcome: Outcome, removal: Removal, step: Callable[[], object]) -> bool:
    try:
        step()
    except Gone:
        outcome.removed.append(removal.path)
    except Changed as change:
        outcome.failed[removal.path] = str(change)
    except OSError as error:
        outcome.failed[removal.path] = (error.strerror or str(error)).lower()
        if error.errno in FULL:
            outcome.crowded.add(removal.path)
    else:
        return True
    return False


def _unlink(stage: Stage, number: int, removal: Removal, outcome: Outcome) -> None:
    try:
        for nbytes in stage.unlink(number, removal):
            outcome.freed += nbytes
    except Changed:
        stage.put_back(number, removal)
        raise


@contextmanager
def begun(directory: str, journal: Journal) -> Iterator[Stage]:
    """Write a journal, yield the stage to work on, and take both away if all went well.

    Raises:
        NoRoom: The disk is too full for a journal; nothing was changed.
        AccessDenied: The journal can't be written; nothing was changed.
    """
    around, suffix = home_of(directory)
    name = f"{STAGE_PREFIX}{os.urandom(4).hex()}{suffix}"
    path = os.path.join(around, name)
    try:
        os.mkdir(path, 0o700)
        try:
            write_atomically(os.path.join(path, JOURNAL), dumps(journal))
            sync_directory(around)
        except BaseException:
            clear(path)
            raise
    except OSError as error:
        reason = from_os_error(error, directory).reason
        if error.errno in FULL:
            message = f"{reason} for the journal; nothing was removed: free a few kB and prune again"
            raise NoRoom(directory, message) from error
        raise AccessDenied(directory, f"{reason}; nothing was removed") from error
    try:
        with opened(directory) as home, opened(around) as place, opened(name, place) as inner:
            yield Stage(path, home, inner)
        clear(path)
    except KeyboardInterrupt:
        from ckpttool.series.recovery import settle

        settle(directory, path)
        raise
    except OSError as error:
        reason = from_os_error(error, directory).reason
        raise AccessDenied(directory, f"{reason}; the next prune settles what was begun") from error


def clear(path: str) -> bool:
    """Remove an owned directory with its journal; tell whether nothing else was left in it."""
    names = os.listdir(path)
    ours = [name for name in names if name == JOURNAL or _is_temporary(name)]
    if len(ours) < len(names):
        return False
    for name in ours:
        os.unlink(os.path.join(path, name))
    os.rmdir(path)
    return True


def _is_temporary(name: str) -> bool:
    return name.startswith(STAGE_PREFIX) and name.endswith(TEMPORARY)
