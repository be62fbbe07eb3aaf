"""Which checkpoints form a series, and which of them is newest.

Order: epoch and step from inside the checkpoint, the numbers in its name, the time recorded inside, and the
file's own time where all else is equal or unknown. A criterion counts only where all of a series have it.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ckpttool.series.members.counts import (
    CONTRADICTION_SECONDS,
    COUNTS,
    decision,
    had_by_all,
    in_order_of,
    is_flat,
    newest_otherwise,
    places,
)
from ckpttool.series.members.entry import Entry
from ckpttool.series.members.runs import in_runs, with_directories, with_pairs
from ckpttool.series.paths import shown

GroupBy = Literal["parent", "prefix", "format", "none"]

Kind = tuple[str | None, str | None]
"""Format and signature; of these, what the checkpoints of a series share."""


@dataclass(frozen=True, slots=True)
class Group:
    """A series: checkpoints of one run under one name, the oldest first."""

    key: str
    entries: tuple[Entry, ...]
    warnings: tuple[str, ...] = ()


def group(entries: Iterable[Entry], by: GroupBy | None = None) -> tuple[Group, ...]:
    """Return the series among checkpoints, by their keys.

    One series is: same directory, same format, same name once its fields are blanked, same tensors. What
    isn't sound goes with the only series of its name, if there is just one.

    Args:
        entries: The checkpoints.
        by: Besides the tensors, what alone has to be the same: ``parent`` (directory), ``prefix`` (directory,
            and the name once its fields are blanked), ``format`` (and directory), or nothing. Only the last
            spans directories: what lies in several may be several runs.
    """
    named: dict[str, dict[Kind, list[Entry]]] = defaultdict(dict)
    homes: dict[tuple[str, str], set[Kind]] = defaultdict(set)
    unsound: list[Entry] = []
    found = with_pairs(list(entries))
    for entry in with_directories(found, everywhere=by == "none"):
        if entry.is_sound:
            kind = (entry.format if by is None else None, entry.signature)
            named[_place(entry, by)].setdefault(kind, []).append(entry)
            homes[entry.directory, entry.fields.blank].add(kind)
        else:
            unsound.append(entry)
    for entry in unsound:
        kinds = named[_place(entry, by)]
        alike = homes[entry.directory, entry.fields.blank] & kinds.keys() or kinds.keys()
        only = next(iter(alike)) if len(alike) == 1 else (entry.format, None)
        kinds.setdefault(only, []).append(entry)
    groups = [
        one
        for place, kinds in named.items()
        for key, found in _keyed(place, list(kinds.values()))
        for one in _groups(key, found, by)
    ]
    return tuple(sorted(groups, key=lambda one: one.key))


def _place(entry: Entry, by: GroupBy | None) -> str:
    """Return what checkpoints of one series have in common, but for the tensors, as people read it."""
    if by == "none":
        return "all checkpoints"
    if entry.series is not None:
        return shown(entry.series)
    if by == "parent":
        return shown(os.path.join(entry.directory, "*"))
    if by == "format":
        told = f"format {entry.format}" if entry.format else "no known format"
        return f"{shown(os.path.join(entry.directory, '*'))} ({told})"
    return shown(os.path.join(entry.directory, entry.fields.blank))


def _groups(key: str, entries: list[Entry], by: GroupBy | None) -> Iterator[Group]:
    runs = in_runs(entries) if by is None else [entries]
    for run in runs:
        begun = min(entry.fields.saved_at or "" for entry in run)
        yield _group(f"{key}@{begun}" if len(runs) > 1 else key, run)


def _keyed(path: str, kinds: list[list[Entry]]) -> Iterator[tuple[str, list[Entry]]]:
    """Yield keys for what has one name and is of several kinds: each says in words what it holds."""
    if len(kinds) == 1:
        yield path, kinds[0]
        return
    formats = [{entry.format for entry in found} for found in kinds]
    is_told = len(set().union(*formats)) > 1 and all(len(one) == 1 for one in formats)
    named: dict[str, list[list[Entry]]] = defaultdict(list)
    for found in sorted(kinds, key=lambda found: min(entry.path for entry in found)):
        first = found[0]
        holds = first.holds if first.is_sound else "damaged"
        named[_listed(first.format if is_told else None, holds)].append(found)
    for words, alike in named.items():
        for number, found in enumerate(alike, 1):
            yield f"{path} ({_listed(words, f'kind {number}' if len(alike) > 1 else None)})", found


def _listed(*words: str | None) -> str:
    return ", ".join(filter(None, words))


def _group(key: str, entries: list[Entry]) -> Group:
    ordered, warnings = in_order([replace(entry, group=key) for entry in entries])
    return Group(key, ordered, tuple(f"{key}: {warning}" for warning in warnings))


def in_order(entries: Sequence[Entry]) -> tuple[tuple[Entry, ...], list[str]]:
    """Return checkpoints from the oldest to the newest, and what is doubtful about that order."""
    sound = [entry for entry in entries if entry.is_sound]
    unsound = [entry for entry in entries if not entry.is_sound] if sound else []
    known = sound or list(entries)
    found = decision(known)
    warnings = list(found.warnings)
    ordered = in_order_of(known, found.criteria)
    if len(set(places(known, found.criteria))) < len(known):
        warnings.append("no number tells all checkpoints apart; the files' own times decide")
    elif sound and (contradiction := _contradiction(ordered)):
        warnings.append(contradiction)
    return tuple(_with_unsound(ordered, unsound) if unsound else ordered), warnings


def is_ordered(entries: Sequence[Entry]) -> bool:
    """Tell whether there is more than files' times to order checkpoints: something that all of them have."""
    return bool(had_by_all(entries))


def in_numbered_order(entries: Sequence[Entry]) -> tuple[Entry, ...] | None:
    """Return checkpoints from the oldest to the newest, by what they and their names count.

    None where one isn't sound, or where epochs, steps and numbers don't tell them all apart.
    """
    found = set(places(entries, had_by_all(entries, COUNTS)))
    if len(found) < len(entries) or not all(entry.is_sound for entry in entries):
        return None
    return in_order(entries)[0]


def _with_unsound(sound: Sequence[Entry], unsound: Sequence[Entry]) -> Iterator[Entry]:
    """Yield sound checkpoints in their order, each with the unsound ones that its name comes before."""
    behind: dict[str | None, list[Entry]] = defaultdict(list)
    places = {entry.path: _named_place(entry) for entry in unsound}
    last_before = _last_before(sound)
    for entry in sorted(unsound, key=lambda one: (places[one.path] or (), one.modified_ns, one.path)):
        behind[last_before(places[entry.path])].append(entry)
    yield from behind[None]
    for entry in sound:
        yield entry
        yield from behind[entry.path]


def _named_place(entry: Entry) -> tuple[object, ...] | None:
    """Return the place that a name gives in its series, or None where it gives none."""
    fields = entry.fields
    *numbers, saved_at = fields.epoch, fields.step, fields.number, fields.saved_at
    if saved_at is None and all(number is None for number in numbers):
        return None
    return (*(-1 if number is None else number for number in numbers), saved_at or "")


def _last_before(sound: Sequence[Entry]) -> Callable[[Any], str | None]:
    """Return what finds the path of the sound one that a place follows: the newest where nobody can tell."""
    first: dict[Any, str] = {}
    for entry in sound:
        first.setdefault(_named_place(entry), entry.path)
    if None in first:
        return lambda place: sound[-1].path
    places = sorted(first)

    def found(place: Any) -> str | None:
        if place is None:
            return sound[-1].path
        count = bisect_right(places, place)
        return first[places[count - 1]] if count else None

    return found


def may_be_newest(entries: Sequence[Entry]) -> list[Entry]:
    """Return what may be the newest of a series: by its order, by time, or by another count.

    Args:
        entries: In their order.
    """
    found = [entries[-1]]
    if not is_flat(entries):
        found.append(max(entries, key=lambda entry: entry.modified_ns))
    sound = [entry for entry in entries if entry.is_sound]
    found += [entry for entry, _ in newest_otherwise(sound)] if sound else []
    return list({entry.path: entry for entry in found}.values())


def written_last(entries: Sequence[Entry]) -> list[Entry]:
    """Return checkpoints with the last written first where their times contradict their order; else none."""
    ordered, _ = in_order(entries)
    return sorted(ordered, key=lambda entry: -entry.modified_ns) if _contradiction(ordered) else []


def _contradiction(ordered: Sequence[Entry]) -> str | None:
    if len(ordered) < 2:
        return None
    last, latest = ordered[-1], max(ordered, key=lambda entry: entry.modified_ns)
    if latest.modified_ns - last.modified_ns <= CONTRADICTION_SECONDS * 10**9:
        return None
    return f"{last.name} comes last, but {latest.name} was written later; was the run restarted?"
