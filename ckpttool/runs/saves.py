"""Saves: the files that one run wrote for one step.

``model_3.pt`` and ``optim_3.pt`` are one save, and so are ``G/3.pt`` and ``D/3.pt``, or all ranks of
``step_3_rank0.pt``. A save is complete if it has the parts that the run's other saves have. It is kept or
removed whole.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left, bisect_right
from collections import ChainMap, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from typing import NamedTuple

from ckpttool.core.checkpoint import Granularity
from ckpttool.core.naming import parse_name
from ckpttool.core.text import counted
from ckpttool.formats.step_directory import DATA
from ckpttool.runs.entry import Entry, Position, Save, StatePart
from ckpttool.runs.reasons import Code, Reason, fault
from ckpttool.runs.run_directories import field_texts
from ckpttool.runs.series import AVERAGED, CONTRADICTION_SECONDS, Group, order_entries
from ckpttool.transaction.files import Contents

_RANK = re.compile(
    r"(?<![a-z])(?:rank|tp|pp|dp|mp|fsdp|zero|shard|process|proc)[-_=.]?[0-9]+(?:[-_]of[-_][0-9]+)?(?![0-9])",
    re.IGNORECASE | re.ASCII,
)
_WORD = re.compile(
    r"(?<![a-z])(?:pd)?(?:"
    r"(?P<model>(?:models?|nets?|networks?|weights|params?)(?![a-z]))|"
    r"(?P<state>(?:states?|training|optim(?:izers?)?|opt|lr|scaler|sched(?:ulers?)?)(?![a-z]))|"
    r"(?P<rival>(?:net_?)?(?:gen(?:erator)?|dis(?:c|criminator)?|g|d|critic|actor|policy|value|q)"
    r"[-_]?[12ab]?(?![a-z0-9]))|"
    r"(?P<average>(?:ema|swa)(?![a-z]))|"
    r"(?P<component>(?:(?:text|image|audio|vision)_?)?(?:encoder|decoder)(?:_?[12])?(?![a-z0-9])|"
    r"(?:unet|vae|transformer|prior|backbone|neck|head|projector|teacher|student|controlnet|adapter|lora)"
    r"(?![a-z]))"
    r")",
    re.IGNORECASE | re.ASCII,
)
"""Words that distinguish the parts of a save, in names of files and of sibling directories.

Rivals (a generator and a discriminator) are trained together; a component may be trained after another one.
"""

_CRITIC = re.compile(r"d[-_]?[12ab]?$|^dis|critic|value", re.IGNORECASE)
_SUFFIXES = re.compile(r"(?:\.[a-z][a-z0-9_]*)+$", re.IGNORECASE | re.ASCII)

_ENDED = 3
"""Number of saves at the end without a part after which the run counts as not writing it any more."""
_GAPS = 4
"""A part is required if at most one of this many saves lacks it, between its first and its last one."""


class _Line(NamedTuple):
    """The checkpoints of one name, such as ``optim_*.pt``, by the numbers in it.

    Attributes:
        name: Its directory and blanked name.
        words: Words in its name and its directory's that distinguish parts of a save, each with its kind.
        entries: The checkpoints by position.
    """

    name: str
    words: frozenset[tuple[str, str]]
    entries: Mapping[Position, Entry]

    @property
    def has_weights(self) -> bool:
        return any(entry.has_weights for entry in self.entries.values())

    @property
    def is_full(self) -> bool:
        return any(entry.granularity is Granularity.FULL for entry in self.entries.values())

    @property
    def is_data(self) -> bool:
        return all(entry.format in DATA for entry in self.entries.values())

    @property
    def is_average(self) -> bool:
        return AVERAGED.search(self.name) is not None

    @property
    def order(self) -> tuple[bool, bool, bool, int, str]:
        """Sort key of parts: weights first, no averages, no critics."""
        is_second = any(kind == "state" or _CRITIC.search(word) for kind, word in self.words)
        return not self.has_weights, self.is_average, is_second, -len(self.entries), self.name


def mark_saves(groups: Sequence[Group]) -> tuple[Group, ...]:
    """Return series with the save of each checkpoint; the parts of an incomplete save are incomplete."""
    # Files of one name are a line (``optim_*.pt``), and lines whose names differ only in words such as
    # ``model``, ``optim`` or ``rank0`` are a run of parts, if they share numbers. The checkpoints of all
    # lines at one position are a save. It lacks a line if the saves around have it, or if it is newer than
    # the line's last, and the line hasn't ended: then it is still being written, or was interrupted.
    marked: dict[str, Entry] = {}
    for run in _runs_of_parts(entry for group in groups for entry in group.entries):
        saves: dict[Position, list[tuple[int, Entry]]] = defaultdict(list)
        for place, line in enumerate(run):
            for position, entry in line.entries.items():
                saves[position].append((place, entry))
        needed = [_is_needed(line, run) or line is run[0] for line in run]
        missing = _missing_lines(
            [line for line, is_needed in zip(run, needed, strict=True) if is_needed], saves
        )
        for position, parts in saves.items():
            save = Save(run[0].name, position)
            faulty = [(part, part.fault) for place, part in parts if part.fault is not None and needed[place]]
            for place, part in parts:
                why = part.fault
                if why is None and faulty:
                    why = fault_beside(*faulty[0], part)
                elif why is None and position in missing:
                    why = _missing_part_fault(part, missing[position])
                marked[part.path] = replace(part, save=save, part=place, fault=why)
    return tuple(_with_entries(group, marked) for group in groups) if marked else tuple(groups)


def _with_entries(group: Group, marked: Mapping[str, Entry]) -> Group:
    entries = [marked.get(entry.path, entry) for entry in group.entries]
    if all(one.is_sound == other.is_sound for one, other in zip(entries, group.entries, strict=True)):
        return group._replace(entries=tuple(entries))
    ordered, warnings = order_entries(entries)
    return Group(group.key, ordered, tuple(f"{group.key}: {warning}" for warning in warnings))


def fault_beside(other: Entry, why: str, part: Entry) -> Reason:
    """Return the fault of a part whose save has a faulty part."""
    name = os.path.relpath(other.path, os.path.dirname(part.path) or os.curdir)
    return fault(Code.INCOMPLETE, f"{name} of its save is {why}")


def _missing_part_fault(part: Entry, lines: Sequence[_Line]) -> Reason:
    """Return the fault of a part whose save lacks others, with the name of the first."""
    # The missing file's name is that of its line with this part's numbers in place of ``*``.
    pattern = os.path.relpath(lines[0].name, part.directory)
    texts = field_texts(part)
    if pattern.count("*") != len(texts):  # only one of the names has a metric
        texts = tuple(str(number) for number in part.fields.position if number is not None)
    if pattern.count("*") == len(texts):
        pattern = "".join(chain.from_iterable(zip_longest(pattern.split("*"), texts, fillvalue="")))
    more = f" and {counted(len(lines) - 1, 'other part')}" if len(lines) > 1 else ""
    return fault(Code.INCOMPLETE, f"its save lacks {pattern}{more}")


def _missing_lines(needed: Sequence[_Line], saves: Iterable[Position]) -> dict[Position, list[_Line]]:
    """Return the required lines that saves lack, though saves around have them, by position."""
    # Positions between a line's first and last must have it, unless gaps are frequent: then it is written
    # less often (an optimizer's state only every tenth save). After its last one, up to two saves lack it;
    # with more, the run has stopped writing it.
    ordered = sorted(saves, key=_sort_key)
    missing: dict[Position, list[_Line]] = defaultdict(list)
    for line in needed:
        places = [number for number, position in enumerate(ordered) if position in line.entries]
        first, last = places[0], places[-1]
        gaps = [position for position in ordered[first:last] if position not in line.entries]
        later = ordered[last + 1 :]
        if _GAPS * len(gaps) <= last + 1 - first:
            for position in [*gaps, *(later if len(later) < _ENDED else ())]:
                missing[position].append(line)
    return missing


def _is_needed(line: _Line, run: Sequence[_Line]) -> bool:
    """Return whether the saves of a run need a line: all ranks, rivals, components and optimizer states."""
    # A conversion to another format isn't needed, nor are other files next to a checkpoint with weights and
    # optimizer state: a training resumes without them.
    kinds = {kind for kind, _ in line.words}
    others = [other for other in run if other is not line]
    if kinds & {"rank", "rival", "component"}:
        return not any(other.words == line.words for other in others)
    if any(other.is_full for other in others) or (line.is_data and not run[0].is_data):
        return False
    if line.is_average:
        return len(line.entries) > 1
    return "state" in kinds or not (
        line.has_weights and any(other.has_weights and not other.is_average for other in others)
    )


# Parts of a save ----------------------------------------------------------------------------------


def _runs_of_parts(entries: Iterable[Entry]) -> Iterator[list[_Line]]:
    """Yield the lines of each run that writes several files for a save, the main one first."""
    # Lines of one directory whose names are equal without part words have one stem: ``model_*`` and
    # ``optim_*``. Sibling directories whose whole names are part words (``G``, ``D``) count as one: theirs is
    # the one above.
    by_stem: dict[tuple[str, str], list[_Line]] = defaultdict(list)
    for (directory, blank), named in _by_name(entries).items():
        above, folder = os.path.split(directory)
        rest, words = _without_words(folder)
        place = above if words and not rest else directory
        stem, own = _without_words(_SUFFIXES.sub("", blank))
        suffix = _SUFFIXES.search(blank)
        if suffix is not None:
            own |= _without_words(suffix[0])[1]
        words = own if place == directory else own | words
        by_stem[place, stem].append(_Line(os.path.join(directory, blank), words, named))
    by_place: dict[str, list[list[_Line]]] = defaultdict(list)
    for (place, _), lines in by_stem.items():
        by_place[place] += _joined(lines)
    for runs in by_place.values():
        for run in _with_states(runs):
            if len(run) > 1:
                yield sorted(run, key=lambda line: line.order)


def _by_name(entries: Iterable[Entry]) -> dict[tuple[str, str], dict[Position, Entry]]:
    """Return checkpoints by directory and name, and by position; the last written of equal positions."""
    named: dict[tuple[str, str], list[Entry]] = defaultdict(list)
    for entry in entries:
        if not entry.holds_others:
            named[entry.directory, entry.fields.blank].append(entry)
    found: dict[tuple[str, str], dict[Position, Entry]] = defaultdict(dict)
    for (directory, blank), same in named.items():
        is_declared = len({_position(entry) for entry in same}) < len(same)
        for entry in sorted(same, key=lambda entry: entry.modified_ns):
            # A series that the user declared may have the names of several parts.
            name = parse_name(entry.name).blank if is_declared else blank
            found[directory, name][_position(entry)] = entry
    return found


def _position(entry: Entry) -> Position:
    """Return the numbers in a checkpoint's name, and the time if it has none."""
    *numbers, saved_at = entry.fields.position
    return (*numbers, saved_at if all(number is None for number in numbers) else None)


def _without_words(name: str) -> tuple[str, frozenset[tuple[str, str]]]:
    """Return a name without the words for parts of a save, and these words with their kinds."""
    found: set[tuple[str, str]] = set()

    def take(match: re.Match[str]) -> str:
        found.add((match.lastgroup or "rank", match[0].lower()))
        return ""

    rest = _WORD.sub(take, _RANK.sub(take, name))
    return re.sub(r"[-_.]+", "-", rest).strip("-"), frozenset(found)


def _joined(lines: Sequence[_Line]) -> Iterator[list[_Line]]:
    """Yield groups of lines of one stem that belong together."""
    runs: list[list[_Line]] = []
    for line in sorted(lines, key=lambda line: line.order):
        run = next((run for run in runs if _are_parts_of_one_save(run[0], line)), None)
        if run is None:
            runs.append([line])
        else:
            run.append(line)
    yield from runs


def _with_states(runs: Sequence[list[_Line]]) -> Iterator[list[_Line]]:
    """Yield the runs of one directory; lines of optimizer states join the only weights with their numbers."""
    # ``net5.pt`` and ``moments_5.pt`` have no words in common. Files without weights still belong to the
    # weights with their number, if only one run of weights has it.
    weights = [run for run in runs if run[0].has_weights]
    by_position: dict[Position, list[list[_Line]]] = defaultdict(list)
    for run in weights:
        for position in run[0].entries:
            by_position[position].append(run)
    alone = []
    for run in (run for run in runs if not run[0].has_weights):
        newest = max(run[0].entries, key=_sort_key)
        before = max(by_position, key=_sort_key, default=newest)  # the newest may have no weights yet
        found = by_position.get(newest) or by_position.get(before, [])
        is_numbered = any(number is not None for number in newest)
        is_known = any(entry.is_sound for entry in run[0].entries.values())
        if is_numbered and is_known and len(found) == 1 and _are_parts_of_one_save(found[0][0], run[0]):
            found[0].extend(run)
        else:
            alone.append(run)
    yield from (*weights, *alone)


def _are_parts_of_one_save(one: _Line, other: _Line) -> bool:
    """Return whether two lines are parts of one save: they share numbers, and their contents fit.

    Two files of weights belong together if they were written together, or if their words say so.
    """
    shared = sorted(one.entries.keys() & other.entries.keys(), key=_sort_key)
    if 2 * len(shared) <= min(len(one.entries), len(other.entries)):
        return False
    sides = [{kind for kind, _ in words} for words in (one.words - other.words, other.words - one.words)]
    have_part_words = any({"rank", "average", "state"} & kinds for kinds in sides)
    have_part_words |= all("rival" in kinds for kinds in sides)
    if have_part_words or not (one.has_weights and other.has_weights):
        return True
    return any(number is not None for number in shared[0]) and _are_written_together(one, other, shared)


def _are_written_together(one: _Line, other: _Line, shared: Sequence[Position]) -> bool:
    """Return whether no other file of either name was written between the two of each save."""
    # A run writes both files of a save before any of the next one. Runs in one directory that write at their
    # own pace have other files in between.
    moment = CONTRADICTION_SECONDS * 10**9
    times = sorted(entry.modified_ns for line in (one, other) for entry in line.entries.values())
    for position in shared:
        first, last = sorted(line.entries[position].modified_ns for line in (one, other))
        between = bisect_left(times, last) - bisect_right(times, first)
        if between > 0 and last - first > moment:
            return False
    return True


def _sort_key(position: Position) -> tuple[tuple[bool, float, str], ...]:
    return tuple(
        (value is not None, value if isinstance(value, int | float) else 0, str(value)) for value in position
    )


# Series of saves ------------------------------------------------------------------------------------


def series_of_saves(groups: Sequence[Group]) -> tuple[Group, ...]:
    """Return series of saves: the parts of one save are one entry, in the series of the first part."""
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
    """Return the parts of a save; an entry of one file is its only part."""
    return entry.parts or (entry,)


def _merged(parts: Sequence[Entry]) -> Entry:
    """Return the entry of a save: its first part's, with the metrics, files and state of all."""
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
    """Return how much of a training the parts of a save hold together; weights with state make it full."""
    found = {(part.granularity, part.has_weights) for part in parts}
    if {(Granularity.PARTIAL, True), (Granularity.PARTIAL, False)} <= found:
        return Granularity.FULL
    return next((one for one in Granularity if any(one is granularity for granularity, _ in found)), None)
