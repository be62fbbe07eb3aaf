"""What is to be said of a choice: what was newer, what competes, what nobody could see, why there is none."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Sequence

from ckpttool.checkpoint import Granularity
from ckpttool.errors import AccessDenied, NotACheckpoint, NotFound, from_os_error
from ckpttool.report import counted
from ckpttool.series.members.choice import tiers
from ckpttool.series.members.entry import Entry
from ckpttool.series.paths import bare, shown
from ckpttool.series.surveying.survey import Survey, nothing_in

UNREADABLE = "unreadable"
"""What a fault begins with that says nothing of the checkpoint: nobody could look at it."""

_MAX_RIVALS = 3
"""More names than that nobody reads in one line."""


def measure(entry: Entry, metric: str) -> float | None:
    """Return a metric's value where it is known and a number, infinite ones included."""
    value = entry.metrics.get(metric, entry.loss if metric == "loss" else None)
    return None if value is None or math.isnan(value) else value


def hopeless(found: Survey) -> Iterator[Entry]:
    """Yield series of which nothing is sound, from the newest on: nobody can tell that they are older."""
    for one in found.groups:
        if not any(entry.is_sound for entry in one.entries):
            yield from reversed(one.entries)


def newer(found: Survey, chosen: Entry, before: int | None) -> Iterator[tuple[Entry, str]]:
    """Yield what is intact and newer than a choice, and what it lacks: a training can't go on from it."""
    lacking = []
    for entry in found.entries:
        is_wanted = before is None or entry.step is None or entry.step < before
        is_newer = entry.is_sound and not entry.holds_others and _is_newer(entry, chosen)
        lack = _lack(entry, chosen) if is_wanted and is_newer else None
        if lack is not None:
            lacking.append((entry, f"it is newer, {lack}"))
    yield from sorted(lacking, key=lambda one: _count(one[0]), reverse=True)


def _count(entry: Entry) -> tuple[float, float, int]:
    return entry.epoch or 0, entry.step or 0, entry.modified_ns


def _is_newer(one: Entry, other: Entry) -> bool:
    if one.step is not None and other.step is not None:
        return one.step > other.step
    return one.epoch is not None and other.epoch is not None and one.epoch > other.epoch


def _lack(entry: Entry, chosen: Entry) -> str | None:
    if not entry.has_weights:
        return "but without weights" if chosen.has_weights else None
    if chosen.granularity is Granularity.FULL and entry.granularity is not Granularity.FULL:
        return "but weights alone, without an optimizer's state"
    return None


def warnings(found: Survey, chosen: Entry, best: str | None, passed: Collection[str]) -> tuple[str, ...]:
    """Return what is doubtful about a choice: the order of its series, and other series as good.

    Args:
        found: What was found.
        chosen: The choice.
        best: The metric that it is the best by.
        passed: Paths of what was passed over: it competes with nothing.
    """
    told = [warning for one in found.groups if one.key == chosen.group for warning in one.warnings]
    for tier in tiers(found.groups):
        rivals = sorted(one.key for one in tier if any(_counts(entry, passed) for entry in one.entries))
        if best is None and len(rivals) > 1 and chosen.group in rivals:
            others = [key for key in rivals if key != chosen.group]
            names = ", ".join(others[:_MAX_RIVALS]) + (", …" if len(others) > _MAX_RIVALS else "")
            told.append(f"{len(rivals)} series compete; {chosen.group} was chosen over {names}")
    return tuple(told)


def _counts(entry: Entry, passed: Collection[str]) -> bool:
    return entry.is_sound and not entry.holds_others and entry.path not in passed


def unmeasured(found: Survey, best: str | None) -> Iterator[str]:
    """Yield how many lack the metric."""
    sound = [entry for entry in found.entries if entry.is_sound and not entry.holds_others]
    count = sum(best is not None and measure(entry, best) is None for entry in sound)
    if count:
        yield f"{found.root}: {count:,} of {counted(len(sound), 'checkpoint')} without a metric {best!r}"


def unseen(found: Survey, passed: Sequence[tuple[Entry, str]]) -> tuple[tuple[str, str], ...]:
    """Return what nobody could look at, and why: that there is none can't be said then."""
    errors = [one for one in found.errors if not isinstance(one, NotFound | NotACheckpoint)]
    faults = {one.path: one.fault for one in found.entries if one.fault} | {
        one.path: why for one, why in passed
    }
    unread = [(path, why) for path, why in faults.items() if why.startswith(UNREADABLE)]
    return (*((shown(one.path), one.reason) for one in errors), *unread)


def blind(root: str, places: Sequence[tuple[str, str]]) -> AccessDenied:
    """Return the error that says that nobody can tell whether there is one."""
    path, why = places[0]
    others = f" (and {len(places) - 1:,} more)" if len(places) > 1 else ""
    told = "no checkpoint to resume from was found, and not all could be looked at"
    return AccessDenied(shown(root), f"{told}: {path}: {why}{others}")


def none_safe(root: str, unsafe: Sequence[Entry]) -> AccessDenied:
    """Return the error that says that only unsafe ones are there: nobody is to begin anew for that."""
    others = f"; so are {len(unsafe) - 1:,} more" if len(unsafe) > 1 else ""
    told = f"no checkpoint is safe to resume from: {unsafe[0].path}: unsafe: {unsafe[0].danger}{others}"
    return AccessDenied(shown(root), told, expected="--allow-unsafe takes it all the same")


def require_merely_missing(directory: str) -> None:
    """Require that a directory that isn't there was never made: no link on the way leads nowhere.

    Raises:
        NotFound: A link does.
    """
    path = bare(directory)
    while path and not os.path.lexists(path):
        path = os.path.dirname(path)
    if path and not os.path.exists(path):
        raise from_os_error(FileNotFoundError(), path)


def why_none(found: Survey, *, recursive: bool, best: str | None, before: int | None) -> str:
    """Return why there is no answer."""
    count = len(found.entries)
    if not count:
        return f"{found.root}: {nothing_in(found.root, recursive=recursive)}"
    sound = [entry for entry in found.entries if entry.is_sound]
    if best is not None and sound and all(measure(one, best) is None for one in sound):
        return f"{found.root}: no checkpoint with a metric {best!r}{_known_metrics(sound)}"
    if before is not None and sound:
        return f"{found.root}: no intact checkpoint before step {before}"
    if count == 1:
        return f"{found.root}: its only checkpoint is not intact"
    return f"{found.root}: none of {count:,} checkpoints is intact"


def _known_metrics(entries: Sequence[Entry]) -> str:
    names = sorted({name for entry in entries for name in entry.metrics})
    names += ["loss"] if "loss" not in names and any(one.loss is not None for one in entries) else []
    return f" (there is {', '.join(names)})" if names else ""
