"""Saves: all that one run wrote for one step, in one file or in several.

``model_3.pt`` and ``optim_3.pt``, ``G/3.pt`` and ``D/3.pt``, the ranks of ``step_3_rank0.pt`` are one save
each. It is complete if it has the parts that the run's other saves have, and stays or goes whole.
"""

from __future__ import annotations

import os
import re
from collections import ChainMap, Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise, zip_longest
from typing import NamedTuple

from ckpttool.core.checkpoint import Granularity
from ckpttool.core.report import counted
from ckpttool.runs.members.entry import Entry, Position, Save, StatePart
from ckpttool.runs.members.order import AVERAGED, CONTRADICTION_SECONDS, Group, order_entries
from ckpttool.runs.members.runs import field_texts
from ckpttool.runs.reasons import Code, Reason, code_of, fault
from ckpttool.transaction.files import Contents

_RANK = re.compile(
    r"(?<![a-z])(?:rank|tp|pp|dp|mp|fsdp|zero|shard|process|proc)[-_=.]?[0-9]+(?:[-_]of[-_][0-9]+)?(?![0-9])",
    re.IGNORECASE | re.ASCII,
)
_ROLE = re.compile(
    r"(?<![a-z])(?:net_?)?(?:models?|nets?|networks?|weights|params?|states?|training|optim(?:izers?)?|opt|"
    r"sched(?:ulers?)?|lr|scaler|ema|swa|gen(?:erator)?|dis(?:c|criminator)?|g|d|critic|actor|policy|value|"
    r"encoder|decoder)(?![a-z])",
    re.IGNORECASE | re.ASCII,
)
"""Words that tell the parts of a save apart, in names and in those of directories beside each other."""

_CRITIC = re.compile(r"d$|^dis|critic|value", re.IGNORECASE)

_SUFFIXES = re.compile(r"(?:\.[a-z][a-z0-9_]*)+$", re.IGNORECASE | re.ASCII)
_DIGITS = re.compile(r"[0-9]+")
_CLOSE = 10
"""Parts whose names don't say so are of one save if all between them is a tenth of the time to the next."""
_MOST_UNNAMED = 16
"""No save has more parts whose names don't say that they are parts."""


class _Line(NamedTuple):
    """The checkpoints of one name, such as ``optim_*.pt``, by the numbers in it.

    Attributes:
        words: What in its name tells parts of a save apart.
    """

    name: str
    words: tuple[str, ...]
    entries: Mapping[Position, Entry]

    @property
    def has_weights(self) -> bool:
        return any(entry.has_weights for entry in self.entries.values())

    @property
    def stem(self) -> str:
        return _SUFFIXES.sub("", self.name)

    @property
    def order(self) -> tuple[bool, bool, bool, int, str]:
        """What other parts of a save go by comes first: weights, no average of them, no critic of others."""
        is_average = AVERAGED.search(self.name) is not None
        is_critic = any(map(_CRITIC.search, self.words))
        return not self.has_weights, is_average, is_critic, -len(self.entries), self.name


def mark_saves(groups: Sequence[Group]) -> tuple[Group, ...]:
    """Return series in which checkpoints know their save; what belongs to an incomplete one is incomplete."""
    marked: dict[str, Entry] = {}
    for run in _runs_of_parts(entry for group in groups for entry in group.entries):
        saves: dict[Position, list[tuple[int, Entry]]] = defaultdict(list)
        for place, line in enumerate(run):
            for position, entry in line.entries.items():
                saves[position].append((place, entry))
        lacks = _lacks(run, saves)
        for position, parts in saves.items():
            save = Save(run[0].name, position)
            faulty = [part for _, part in parts if part.fault is not None]
            for place, part in parts:
                why = part.fault
                if why is None and faulty:
                    why = fault_beside(faulty[0], faulty[0].fault, part)
                elif why is None and position in lacks:
                    why = _fault_of_lack(part, lacks[position])
                marked[part.path] = replace(part, save=save, part=place, fault=why)
    return tuple(_with_entries(group, marked) for group in groups) if marked else tuple(groups)


def _with_entries(group: Group, marked: Mapping[str, Entry]) -> Group:
    entries = [marked.get(entry.path, entry) for entry in group.entries]
    if all(one.is_sound == other.is_sound for one, other in zip(entries, group.entries, strict=True)):
        return group._replace(entries=tuple(entries))
    ordered, warnings = order_entries(entries)
    return Group(group.key, ordered, tuple(f"{group.key}: {warning}" for warning in warnings))


def fault_beside(other: Entry, why: Reason | None, part: Entry) -> Reason:
    """Return what is wrong with a part of a save of which another one is faulty."""
    name = os.path.relpath(other.path, os.path.dirname(part.path) or os.curdir)
    kind = None if why is None else code_of(why)
    return fault(Code.INCOMPLETE, f"{name} of its save is {kind.value if kind else 'not intact'}")


def _fault_of_lack(part: Entry, lines: Sequence[_Line]) -> Reason:
    """Return what is wrong with a part of a save that lacks others; they are called as this one is."""
    pattern = os.path.relpath(lines[0].name, part.directory)
    texts = field_texts(part)
    if pattern.count("*") == len(texts):
        pattern = "".join(chain.from_iterable(zip_longest(pattern.split("*"), texts, fillvalue="")))
    more = f" and {counted(len(lines) - 1, 'other part')}" if len(lines) > 1 else ""
    return fault(Code.INCOMPLETE, f"its save lacks {pattern}{more}")


def _lacks(run: Sequence[_Line], saves: Iterable[Position]) -> dict[Position, list[_Line]]:
    """Return what saves lack that most others have, from the first that has it on, by their numbers.

    What only differs from another part in its suffix, as a conversion does, is none that a save needs.
    """
    ordered = sorted(saves, key=_sort_key)
    missing: dict[Position, list[_Line]] = defaultdict(list)
    alike = Counter((line.words, line.stem) for line in run if line.has_weights)
    for line in run:
        is_twin = line.has_weights and alike[line.words, line.stem] > 1
        first = next(number for number, position in enumerate(ordered) if position in line.entries)
        later = ordered[first:]
        if not is_twin and 2 * len(line.entries) > len(later) - 1:
            for position in later:
                if position not in line.entries:
                    missing[position].append(line)
    return missing


# What belongs together ------------------------------------------------------------------------------


def _runs_of_parts(entries: Iterable[Entry]) -> Iterator[list[_Line]]:
    """Yield the names of each run that writes several files for a save; the one that others go by first."""
    by_place: dict[tuple[str, str], list[_Line]] = defaultdict(list)
    for (directory, blank), named in _by_name(entries).items():
        name = os.path.join(directory, blank)
        above, folder = os.path.split(directory)
        rest, words = _without_words(folder)
        place = above if not rest and words else directory
        stem, own_words = _without_words(_SUFFIXES.sub("", blank))
        suffix = _SUFFIXES.search(blank)
        own_words += _without_words(suffix[0])[1] if suffix else ()
        line = _Line(name, (*(words if place == above else ()), *own_words), named)
        by_place[place, stem].append(line)
    unnamed: dict[str, list[list[_Line]]] = defaultdict(list)
    for (place, _), lines in by_place.items():
        for run in _joined(lines):
            unnamed[place].append(run)
    for runs in unnamed.values():
        for run in _joined_by_time(runs):
            if len(run) > 1:
                yield sorted(run, key=lambda line: line.order)


def _by_name(entries: Iterable[Entry]) -> dict[tuple[str, str], dict[Position, Entry]]:
    """Return checkpoints by directory and name, and by its numbers; without what has these twice, or none."""
    named: dict[tuple[str, str], dict[Position, Entry]] = defaultdict(dict)
    twice: set[tuple[str, str]] = set()
    for entry in entries:
        fields = entry.fields
        name, position = (entry.directory, fields.blank), fields.position
        if all(number is None for number in (fields.epoch, fields.step, fields.number)) or entry.holds_others:
            continue
        if position in named[name]:
            twice.add(name)
        named[name][position] = entry
    return {name: found for name, found in named.items() if found and name not in twice}


def _without_words(name: str) -> tuple[str, tuple[str, ...]]:
    """Return a name without the words and ranks that tell parts of a save apart, and these."""
    found: list[str] = []

    def take(match: re.Match[str]) -> str:
        found.append(match[0].lower())
        return ""

    rest = _ROLE.sub(take, _RANK.sub(take, name))
    return re.sub(r"[-_.]+", "-", rest).strip("-"), tuple(found)


def _joined(lines: Sequence[_Line]) -> Iterator[list[_Line]]:
    """Yield names that differ in words for parts alone, with those that go together."""
    runs: list[list[_Line]] = []
    for line in sorted(lines, key=lambda line: line.order):
        run = next((run for run in runs if _are_in_turn(run[0], line)), None)
        if run is None:
            runs.append([line])
        else:
            run.append(line)
    yield from runs


def _joined_by_time(runs: Sequence[list[_Line]]) -> Iterator[list[_Line]]:
    """Yield runs of one directory; what an optimizer wrote, or who wrote at the same times, joins others."""
    joined: list[list[_Line]] = []
    alike = Counter(_DIGITS.sub("", run[0].name) for run in runs)  # folds and seeds are no parts
    by_position: dict[Position, list[list[_Line]]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run[0].order):
        newest = sorted(run[0].entries, key=_sort_key)[-2:]
        candidates = [other for position in newest for other in by_position[position]]
        fitting = None
        if alike[_DIGITS.sub("", run[0].name)] == 1 and len(candidates) <= 2 * _MOST_UNNAMED:
            fitting = next((other for other in candidates if _are_of_one_run(other[0], run[0])), None)
        if fitting is not None:
            fitting += run
            continue
        joined.append(run)
        for position in run[0].entries:
            by_position[position].append(run)
    yield from joined


def _are_of_one_run(one: _Line, other: _Line) -> bool:
    """Tell whether names that don't say so are of parts of one save: by what they hold, or by their times."""
    if one.has_weights and (not other.has_weights or AVERAGED.search(other.name)):
        return _are_in_turn(one, other)
    shared = _shared(one, other)
    if len(shared) < 2 or 2 * len(shared) <= min(len(one.entries), len(other.entries)):
        return False
    times = [_times(position, one, other) for position in shared]
    gaps = [later[0] - earlier[0] for earlier, later in pairwise(times)]
    return min(gaps) > 0 and all(
        _CLOSE * (last - first) <= gap for (first, last), gap in zip(times, [*gaps, gaps[-1]], strict=True)
    )


def _are_in_turn(one: _Line, other: _Line) -> bool:
    """Tell whether what has one number was written together: nothing of a later number came first."""
    shared = _shared(one, other)
    times = [_times(position, one, other) for position in shared]
    moment = CONTRADICTION_SECONDS * 10**9
    is_enough = 2 * len(shared) > min(len(one.entries), len(other.entries))
    return is_enough and all(first[1] <= second[0] + moment for first, second in pairwise(times))


def _shared(one: _Line, other: _Line) -> list[Position]:
    return sorted(one.entries.keys() & other.entries.keys(), key=_sort_key)


def _times(position: Position, one: _Line, other: _Line) -> tuple[int, int]:
    """Return when the first and the last of two parts of a save were written."""
    first, last = sorted(line.entries[position].modified_ns for line in (one, other))
    return first, last


def _sort_key(position: Position) -> tuple[tuple[bool, float, str], ...]:
    return tuple(
        (value is not None, value if isinstance(value, int | float) else 0, str(value)) for value in position
    )


# Series of saves ------------------------------------------------------------------------------------


def series_of_saves(groups: Sequence[Group]) -> tuple[Group, ...]:
    """Return series of saves: what was written together is one entry, in the series of its first part."""
    parts: dict[Hashable, list[Entry]] = defaultdict(list)
    keys: dict[str, str] = {}
    for entry in (entry for group in groups for entry in group.entries):
        parts[entry.save or entry.path].append(entry)
        if entry.save is not None and entry.part == 0:
            keys[entry.save.run] = entry.group
    saves: dict[str, list[Entry]] = defaultdict(list)
    has_stray: set[str] = set()
    for first in (entry for group in groups for entry in group.entries):
        save = parts[first.save or first.path]
        if len(save) > 1:
            save.sort(key=lambda entry: entry.part)
        if first is save[0]:
            is_stray = first.save is not None and first.part > 0
            key = keys.get(first.save.run, first.group) if first.save and is_stray else first.group
            has_stray |= {key} if is_stray else set()
            saves[key].append(_merged(save))
    return tuple(
        group._replace(entries=order_entries(found)[0] if group.key in has_stray else tuple(found))
        for group in groups
        if (found := saves.get(group.key))
    )


def parts_of(entry: Entry) -> tuple[Entry, ...]:
    """Return the parts of the save that an entry stands for; an entry of one file is its only part."""
    return entry.parts or (entry,)


def _merged(parts: Sequence[Entry]) -> Entry:
    """Return the entry of a save: its first part's, with what is known of the others."""
    first = parts[0]
    if len(parts) == 1:
        return first
    directory = first.directory
    files = {os.path.join(part.directory, file.path): file for part in parts for file in part.contents.files}
    return replace(
        first,
        contents=Contents(
            tuple(replace(file, path=os.path.relpath(path, directory)) for path, file in files.items()),
            crosses=any(part.contents.crosses for part in parts),
            symlinks=frozenset(first.unit.members if any(part.is_link for part in parts) else ()),
        ),
        fault=next((part.fault for part in parts if part.fault is not None), None),
        danger=next((part.danger for part in parts if part.danger is not None), None),
        loss=next((part.loss for part in parts if part.loss is not None), None),
        metrics=ChainMap(*(dict(part.metrics) for part in parts)),
        has_weights=any(part.has_weights for part in parts),
        granularity=_granularity(parts),
        best_paths=tuple(path for part in parts for path in part.best_paths),
        linked_bytes=sum(part.nbytes for part in parts) if any(part.is_link for part in parts) else None,
        parts=tuple(parts),
        state=StatePart(
            sum(part.state.nbytes for part in parts if part.has_weights),
            cast_bytes=sum(part.state.cast_bytes for part in parts),
        ),
    )


def _granularity(parts: Sequence[Entry]) -> Granularity | None:
    """Return how much of a training all parts of a save hold: weights and an optimizer's state are all."""
    found = {(part.granularity, part.has_weights) for part in parts}
    if {(Granularity.PARTIAL, True), (Granularity.PARTIAL, False)} <= found:
        return Granularity.FULL
    return next((one for one in Granularity if any(one is granularity for granularity, _ in found)), None)
