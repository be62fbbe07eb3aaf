"""Which checkpoints form a series, and which of them is newest.

Order: epoch and step from inside the checkpoint, the numbers in its name, the time recorded inside, and the
file's own time where all else is equal or unknown. A criterion counts only where all of a series have it.
"""

from __future__ import annotations

import os
import stat
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckpttool.errors import from_os_error
from ckpttool.series.entry import Entry, shown

CONTRADICTION_SECONDS = 60
"""Copies made in one go have times within moments of one another; a restarted run has not."""

_CRITERIA: tuple[Callable[[Entry], Any], ...] = (
    lambda entry: entry.inside[0],
    lambda entry: entry.inside[1],
    lambda entry: entry.fields.epoch,
    lambda entry: entry.fields.step,
    lambda entry: entry.fields.number,
    lambda entry: entry.saved_at,
)
_FROM_NAME: dict[Callable[[Entry], Any], Callable[[Entry], Any]] = {
    _CRITERIA[0]: lambda entry: entry.epoch,
    _CRITERIA[1]: lambda entry: entry.step,
}


@dataclass(frozen=True, slots=True)
class Group:
    """A series: checkpoints of one run under one name, the oldest first."""

    key: str
    entries: tuple[Entry, ...]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Chosen:
    """The checkpoint that stands for a path, how many others lie there, and which journals wait there."""

    path: str
    others: int
    journals: tuple[str, ...] = ()


def group(entries: Iterable[Entry]) -> tuple[Group, ...]:
    """Return the series among checkpoints, by their keys.

    One series is: same directory, same format, same name once its fields are blanked, same tensors. What
    isn't sound goes with the only series of its name, if there is just one.
    """
    named: dict[tuple[str, str], dict[tuple[str | None, str | None], list[Entry]]] = defaultdict(dict)
    unsound: list[Entry] = []
    for entry in entries:
        if entry.is_sound:
            kinds = named[entry.directory, entry.fields.blank]
            kinds.setdefault((entry.format, entry.signature), []).append(entry)
        else:
            unsound.append(entry)
    for entry in unsound:
        kinds = named[entry.directory, entry.fields.blank]
        only = next(iter(kinds)) if len(kinds) == 1 else (entry.format, None)
        kinds.setdefault(only, []).append(entry)
    groups = [
        _group(_key(place, kind, len(kinds) > 1), found)
        for place, kinds in named.items()
        for kind, found in kinds.items()
    ]
    return tuple(sorted(groups, key=lambda one: one.key))


def _key(place: tuple[str, str], kind: tuple[str | None, str | None], is_shared: bool) -> str:
    path = shown(os.path.join(*place))
    return f"{path}@{'-'.join(part or 'damaged' for part in kind)}" if is_shared else path


def _group(key: str, entries: list[Entry]) -> Group:
    ordered, warnings = in_order([replace(entry, group=key) for entry in entries])
    return Group(key, ordered, tuple(f"{key}: {warning}" for warning in warnings))


def in_order(entries: Sequence[Entry]) -> tuple[tuple[Entry, ...], list[str]]:
    """Return checkpoints from the oldest to the newest, and what is doubtful about that order."""
    known = [entry for entry in entries if entry.is_sound] or entries
    criteria = [one for one in _CRITERIA if all(one(entry) is not None for entry in known)]
    warnings = []
    if criteria[:2] == list(_CRITERIA[:2]) and _disagree(known):
        if _by_time(known) == sorted(known, key=lambda entry: (entry.inside[1], entry.modified_ns)):
            criteria[:2] = reversed(criteria[:2])
        first = "steps" if criteria[0] is _CRITERIA[1] else "epochs"
        warnings.append(f"epochs and steps disagree about the order; {first} decide")

    def position(entry: Entry) -> tuple[tuple[float, ...], int, str]:
        # What can't be opened has its place by its name; it is kept whatever that is.
        values = (_FROM_NAME.get(one, one)(entry) if one(entry) is None else one(entry) for one in criteria)
        place = tuple(-1.0 if value is None else value for value in values)
        return place, entry.modified_ns, entry.unit.path

    ordered = sorted(entries, key=position)
    distinct = {position(entry)[0] for entry in known}
    if len(distinct) < len(known):
        warnings.append("no number tells all checkpoints apart; the files' own times decide")
    elif contradiction := _contradiction([entry for entry in ordered if entry.is_sound]):
        warnings.append(contradiction)
    return tuple(ordered), warnings


def _by_time(entries: Sequence[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda entry: entry.modified_ns)


def _disagree(entries: Sequence[Entry]) -> bool:
    """Tell whether epochs and steps order checkpoints differently: one of them began again."""
    pairs = [(entry.inside[0] or 0, entry.inside[1] or 0) for entry in entries]
    return sorted(pairs) != sorted(pairs, key=lambda pair: (pair[1], pair[0]))


def _contradiction(ordered: Sequence[Entry]) -> str | None:
    if len(ordered) < 2:
        return None
    last, latest = ordered[-1], max(ordered, key=lambda entry: entry.modified_ns)
    if latest.modified_ns - last.modified_ns <= CONTRADICTION_SECONDS * 10**9:
        return None
    return f"{last.name} comes last, but {latest.name} was written later; was the run restarted?"


def newest_first(groups: Iterable[Group]) -> Iterable[Entry]:
    """Yield the checkpoints of all series, the newest of any first."""
    waiting = [list(one.entries) for one in groups]
    while waiting := [one for one in waiting if one]:
        ordered, _ = in_order([one[-1] for one in waiting])
        newest = ordered[-1]
        yield newest
        next(one for one in waiting if one[-1] is newest).pop()


def newest_in(path: str) -> Chosen:
    """Return the checkpoint that a path stands for: itself, or the newest in the directory.

    Raises:
        NotACheckpoint: There is none.
        CheckpointError: The path can't be looked at.
    """
    try:
        is_directory = stat.S_ISDIR(os.stat(path).st_mode)
    except OSError as error:
        raise from_os_error(error, path) from error
    except ValueError:  # a NUL in the path; whoever opens it says so
        is_directory = False
    if not is_directory:
        return Chosen(path, 0)
    from ckpttool.series.survey import standing_for

    return standing_for(path)
