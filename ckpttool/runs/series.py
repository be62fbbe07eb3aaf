"""Series of checkpoints: grouping, order, and the newest checkpoint.

Order: epoch and step from inside the checkpoint, the numbers in its name, the time recorded inside, and the
file's own time if all else is equal or unknown. A criterion counts only if it is known for all checkpoints of
a series.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

from ckpttool.core.checkpoint import Granularity
from ckpttool.formats.interface import natural_path
from ckpttool.formats.step_directory import DATA
from ckpttool.runs.entry import Entry
from ckpttool.runs.run_directories import (
    read_number_pairs,
    run_directory,
    split_into_runs,
    take_directory_counts,
)
from ckpttool.runs.scope import GroupBy
from ckpttool.transaction.paths import shown

Kind = tuple[str | None, Granularity | None, str | None]
"""Format, granularity and signature of a series; None for those that its checkpoints may differ in."""

CONTRADICTION_SECONDS = 60
"""Seconds up to which files' times count as equal: one ``cp`` gives all copies times that close together."""

Criterion = Callable[[Entry], Any]

_INSIDE: tuple[Criterion, ...] = (lambda entry: entry.counts_inside[0], lambda entry: entry.counts_inside[1])

_NAMED: tuple[Criterion, ...] = (
    lambda entry: entry.fields.epoch,
    lambda entry: entry.fields.step,
    lambda entry: entry.fields.number,
)

COUNTS: tuple[Criterion, ...] = (*_INSIDE, *_NAMED)
"""Epoch and step inside, then epoch, step and number of the name."""

CRITERIA: tuple[Criterion, ...] = (*COUNTS, lambda entry: entry.saved_at)
"""The counts, and the time inside."""

_OF_RUN: tuple[Criterion, ...] = (lambda entry: entry.step, lambda entry: entry.epoch)
_TIME: tuple[Criterion, ...] = (lambda entry: entry.save_time,)

_EPOCHS, _STEPS = (_INSIDE[0], _NAMED[0]), (_INSIDE[1], _NAMED[1])

AVERAGED = re.compile(r"(?:^|[^a-z])(?:pd)?(?:ema|swa|avg|averaged?)(?![a-z])", re.IGNORECASE)
"""Names of averaged weights: they are for inference, and a training doesn't resume from them."""

Rank = tuple[bool, bool, int, bool, bool]


class Group(NamedTuple):
    """A series: checkpoints of one run under one name, the oldest first."""

    key: str
    entries: tuple[Entry, ...]
    warnings: tuple[str, ...] = ()


def group(
    entries: Iterable[Entry],
    by: GroupBy | None = None,
    root: str = os.curdir,
    *,
    joins_slim: bool = False,
) -> tuple[Group, ...]:
    """Return the series among checkpoints, by their keys.

    By default, the checkpoints of a series have the same directory, format, signature of tensors, and name
    with blanked fields. An unsound one joins the series of its name, if there is just one.

    Args:
        entries: The checkpoints.
        by: Property that checkpoints of a series share, besides the signature: ``run`` (the directory of one
            training), ``parent`` (directory), ``prefix`` (directory, and the name with blanked fields),
            ``format`` (and directory), or ``none``. Only ``none`` joins runs.
        root: The directory in which they were found.
        joins_slim: Whether those with training state and those without it are one series.
    """
    by_pattern: dict[str, dict[Kind, list[Entry]]] = defaultdict(dict)
    kinds_of_name: dict[tuple[str, str], set[Kind]] = defaultdict(set)
    unsound: list[Entry] = []
    paired = [
        replace(entry, run=run_directory(entry.directory, root)) for entry in read_number_pairs(list(entries))
    ]
    for entry in take_directory_counts(paired, everywhere=by == "none"):
        if entry.is_sound:
            granularity = None if joins_slim and entry.has_weights else entry.granularity
            kind = (entry.format if by is None else None, granularity, entry.signature)
            by_pattern[_pattern(entry, by)].setdefault(kind, []).append(entry)
            kinds_of_name[entry.directory, entry.fields.blank].add(kind)
        else:
            unsound.append(entry)
    # The signature of an unsound checkpoint is unknown. It joins the only series of its directory and name,
    # else the only one of its pattern, and is a series of its own if that is ambiguous.
    for entry in unsound:
        kinds = by_pattern[_pattern(entry, by)]
        candidates = kinds_of_name[entry.directory, entry.fields.blank] & kinds.keys() or kinds.keys()
        only = next(iter(candidates)) if len(candidates) == 1 else (entry.format, None, None)
        kinds.setdefault(only, []).append(entry)
    groups: list[Group] = []
    for pattern, kinds in by_pattern.items():
        for series, members in _key_kinds(pattern, list(kinds.values())):
            runs = split_into_runs(members) if by is None else [members]
            for run in runs:
                begun = min(entry.fields.saved_at or "" for entry in run)
                key = f"{series}@{begun}" if len(runs) > 1 else series
                ordered, warnings = order_entries([replace(entry, group=key) for entry in run])
                groups.append(Group(key, ordered, tuple(f"{key}: {warning}" for warning in warnings)))
    return tuple(sorted(groups, key=lambda group: natural_path(group.key)))


def _pattern(entry: Entry, by: GroupBy | None) -> str:
    """Return the pattern of a series' paths: directory, and name with ``*`` for its fields."""
    if by == "none":
        return "all checkpoints"
    if entry.series is not None:
        return shown(entry.series)
    if by == "run":
        average = " (averages)" if AVERAGED.search(entry.name) else ""
        return f"{shown(os.path.join(entry.run, '*'))}{average}"
    if by == "parent":
        return shown(os.path.join(entry.directory, "*"))
    if by == "format":
        format = f"format {entry.format}" if entry.format else "no known format"
        return f"{shown(os.path.join(entry.directory, '*'))} ({format})"
    return shown(os.path.join(entry.directory, entry.fields.blank))


def _key_kinds(pattern: str, kinds: list[list[Entry]]) -> Iterator[tuple[str, list[Entry]]]:
    """Yield keys for series of one name and several kinds, with a description of each."""
    # Keys are shown to users and in documents, so they must differ. The format is added only if the kinds
    # have different ones; a number distinguishes kinds of the same description.
    if len(kinds) == 1:
        yield pattern, kinds[0]
        return
    formats = [{entry.format for entry in kind} for kind in kinds]
    says_format = len(set().union(*formats)) > 1 and all(len(names) == 1 for names in formats)
    by_words: dict[str, list[list[Entry]]] = defaultdict(list)
    for kind in sorted(kinds, key=lambda kind: min(natural_path(entry.path) for entry in kind)):
        first = kind[0]
        summary = first.content_summary if first.is_sound else "damaged"
        by_words[_comma_separated(first.format if says_format else None, summary)].append(kind)
    for words, same in by_words.items():
        for number, kind in enumerate(same, 1):
            yield f"{pattern} ({_comma_separated(words, f'kind {number}' if len(same) > 1 else None)})", kind


def _comma_separated(*words: str | None) -> str:
    return ", ".join(filter(None, words))


def order_entries(entries: Sequence[Entry]) -> tuple[tuple[Entry, ...], list[str]]:
    """Return checkpoints from the oldest to the newest, and warnings about that order."""
    sound = [entry for entry in entries if entry.is_sound]
    unsound = [entry for entry in entries if not entry.is_sound] if sound else []
    known = sound or list(entries)
    decided = decision(known)
    warnings = list(decided.warnings)
    ordered = sorted_by(known, decided.criteria)
    if not _are_distinct(known, positions(known, decided.criteria)):
        warnings.append("no number distinguishes all checkpoints; file times decide")
    elif sound and (contradiction := _contradiction(ordered)):
        warnings.append(contradiction)
    return tuple(_insert_unsound(ordered, unsound) if unsound else ordered), warnings


def _are_distinct(entries: Sequence[Entry], places: Sequence[tuple[Any, ...]]) -> bool:
    """Return whether positions distinguish all saves; two names of one file are one save."""
    # ``last.ckpt`` next to ``epoch=3.ckpt`` has the position of its copy: names that blank differently, of
    # files of one size, are taken for one save.
    by_place: dict[tuple[Any, ...], list[Entry]] = defaultdict(list)
    for entry, place in zip(entries, places, strict=True):
        by_place[place].append(entry)
    return all(
        len(same) == 1
        or (
            place
            and len({entry.fields.blank for entry in same}) == len(same)
            and len({e.nbytes for e in same}) == 1
        )
        for same in by_place.values()
    )


def has_order(entries: Sequence[Entry]) -> bool:
    """Return whether counts or recorded times order checkpoints, not just files' times."""
    return bool(criteria_known_for_all(entries))


def order_by_numbers(entries: Sequence[Entry]) -> tuple[Entry, ...] | None:
    """Return checkpoints from the oldest to the newest, by their counts.

    None if one isn't sound, or if two have the same epoch, step and number.
    """
    counts = set(positions(entries, criteria_known_for_all(entries, COUNTS)))
    if len(counts) < len(entries) or not all(entry.is_sound for entry in entries):
        return None
    return order_entries(entries)[0]


def _insert_unsound(sound: Sequence[Entry], unsound: Sequence[Entry]) -> Iterator[Entry]:
    """Yield sound checkpoints in their order, each followed by the unsound ones whose names come after it.

    One without numbers in its name follows the newest.
    """
    # The counts inside an unsound one are unknown, so its name decides: it follows the sound one whose name
    # has the same numbers, or the next lower ones.
    first: dict[Any, str] = {}
    for entry in sound:
        first.setdefault(_named_position(entry), entry.path)
    known = [] if None in first else sorted(first)
    named = {entry.path: _named_position(entry) for entry in unsound}
    followers: dict[str | None, list[Entry]] = defaultdict(list)
    for entry in sorted(unsound, key=lambda entry: (named[entry.path] or (), entry.modified_ns, entry.path)):
        position = named[entry.path]
        if position is None or None in first:
            followers[sound[-1].path].append(entry)
        else:
            count = bisect_right(known, position)
            followers[first[known[count - 1]] if count else None].append(entry)
    yield from followers[None]
    for entry in sound:
        yield entry
        yield from followers[entry.path]


def _named_position(entry: Entry) -> tuple[Any, ...] | None:
    """Return the position by the numbers and date in a name; None for a name without them."""
    fields = entry.fields
    *numbers, saved_at = fields.epoch, fields.step, fields.number, fields.saved_at
    if saved_at is None and all(number is None for number in numbers):
        return None
    return (*(-1 if number is None else number for number in numbers), saved_at or "")


class Decision(NamedTuple):
    """Criteria that order a series.

    Attributes:
        criteria: Criteria that decide, the most significant first.
        usual: Criteria that would decide without a contradiction.
        counts: Epochs and steps that contradict each other, or None.
        named: Counts in names that contradict those inside.
        warnings: Contradictions, with the deciding criterion.
    """

    criteria: Sequence[Criterion]
    usual: Sequence[Criterion]
    counts: tuple[Criterion, Criterion] | None
    named: Sequence[Criterion]
    warnings: Sequence[str]


def decision(entries: Sequence[Entry]) -> Decision:
    """Return the criteria that order checkpoints.

    Files' times may resolve a contradiction. Otherwise epochs take precedence over steps, and counts inside
    over those in names, unless they restart while those in names continue.
    """
    # Counts are reset by restarts: a fine-tuning begins again at epoch 0 from the weights of step 10,000, or
    # a script passes its own counter to the trainer. The wrong order would remove the newest checkpoint, so
    # each contradiction is a warning, and the times of files decide only if they are unambiguous:
    # - epochs against steps: if each checkpoint with more steps was written over a minute after the one
    #   before;
    # - names against counts inside: if the times support the names, or if the counts inside restart while
    #   those in names go on, and the times don't support the counts inside.
    usual = criteria = criteria_known_for_all(entries)
    warnings = []
    counts = _disagreeing_counts(entries)
    if counts is not None:
        epochs, steps = counts
        if _times_confirm(entries, steps):
            criteria = [steps, epochs, *(one for one in usual if one not in counts)]
        first = "steps" if criteria[0] is steps else "epochs"
        warnings.append(f"epochs and steps disagree about the order; {first} decide")
    named = _contradicting_names(entries, criteria)
    if named:
        decides = _times_support(entries, named, criteria) or (
            _counts_restart(entries, named) and not _times_support(entries, criteria, named)
        )
        first = "the names decide" if decides else "the contents decide"
        criteria = [*named, *(one for one in criteria if one not in named)] if decides else criteria
        warnings = [] if decides else warnings
        warnings.append(f"the names and the contents disagree about the order; {first}")
    return Decision(criteria, usual, counts, named, warnings)


def _disagreeing_counts(entries: Sequence[Entry]) -> tuple[Criterion, Criterion] | None:
    """Return the counts of epochs and steps if they give different orders: one was reset."""
    epochs, steps = (next(iter(criteria_known_for_all(entries, kind)), None) for kind in (_EPOCHS, _STEPS))
    if epochs is None or steps is None:
        return None
    pairs = [(epochs(entry), steps(entry)) for entry in entries]
    is_same = sorted(pairs) == sorted(pairs, key=lambda pair: (pair[1], pair[0]))
    return None if is_same else (epochs, steps)


def _times_confirm(entries: Sequence[Entry], count: Criterion) -> bool:
    """Return whether files' times confirm a count: each next one was written over a minute later."""
    ordered = sorted(entries, key=lambda entry: (count(entry), entry.modified_ns))
    times = [entry.modified_ns for entry in ordered]
    return all(later - earlier > CONTRADICTION_SECONDS * 10**9 for earlier, later in pairwise(times))


def _contradicting_names(entries: Sequence[Entry], criteria: Sequence[Criterion]) -> list[Criterion]:
    """Return the counts in names, if they are all different and contradict the order inside."""
    # Numbers of different names (``model_3``, ``best_1``) count different things, and a number counts saves
    # only after a word such as ``model``.
    named = criteria_known_for_all(entries, _NAMED)
    if not named or not any(criterion in _INSIDE for criterion in criteria):
        return []
    has_one_name = len({entry.fields.blank for entry in entries}) == 1
    if not has_one_name or not all(entry.fields.is_ordinal for entry in entries):
        return []
    rows = sorted(zip(positions(entries, named), positions(entries, criteria), strict=True))
    are_distinct = all(one[0] < two[0] for one, two in pairwise(rows))
    is_same = all(one[1] <= two[1] for one, two in pairwise(rows))
    return named if are_distinct and not is_same else []


def _counts_restart(entries: Sequence[Entry], named: Sequence[Criterion]) -> bool:
    """Return whether counts inside restart while those in names continue."""
    # By names, the difference of both counts grows at each restart and never shrinks. Names may count from 0
    # and the trainer from 1, hence -1 at first.
    inside = criteria_known_for_all(entries, _INSIDE)
    if len(set(positions(entries, inside))) < len(entries):
        return True
    count = named[0]
    same = next((kind[0] for kind in (_EPOCHS, _STEPS) if count in kind), inside[0])
    if same not in inside:
        return False
    offsets = [count(entry) - same(entry) for entry in sorted_by(entries, named)]
    return offsets[0] >= -1 and all(one <= two for one, two in pairwise(offsets))


def _times_support(
    entries: Sequence[Entry], criteria: Sequence[Criterion], others: Sequence[Criterion]
) -> bool:
    """Return whether files' times support one order over another, and aren't those of a copy."""
    # The last of an order must be the file written last, the last of the other order an earlier one, and the
    # order may not go back in time more often than the other.
    times, other_times = (
        [entry.modified_ns for entry in sorted_by(entries, one)] for one in (criteria, others)
    )
    latest = max(times)
    is_last = times[-1] == latest > other_times[-1]
    return is_last and not is_flat(entries) and _descents(times) <= _descents(other_times)


def _descents(times: Sequence[int]) -> int:
    return sum(later <= earlier for earlier, later in pairwise(times))


def is_flat(entries: Sequence[Entry]) -> bool:
    """Return whether all files were written within a minute, as by a copy: their times mean nothing then."""
    times = [entry.modified_ns for entry in entries]
    return max(times) - min(times) <= CONTRADICTION_SECONDS * 10**9


def criteria_known_for_all(
    entries: Sequence[Entry], criteria: Sequence[Criterion] = CRITERIA
) -> list[Criterion]:
    """Return the criteria whose value is known for all checkpoints."""
    return [criterion for criterion in criteria if all(criterion(entry) is not None for entry in entries)]


def positions(entries: Sequence[Entry], criteria: Sequence[Criterion]) -> list[tuple[Any, ...]]:
    """Return the sort keys of checkpoints by some criteria."""
    return [tuple(criterion(entry) for criterion in criteria) for entry in entries]


def sorted_by(entries: Sequence[Entry], criteria: Sequence[Criterion]) -> list[Entry]:
    """Return checkpoints from the oldest to the newest by criteria, ties by their files' times."""

    def position(entry: Entry) -> tuple[Any, ...]:
        return (*(criterion(entry) for criterion in criteria), entry.modified_ns, entry.unit.path)

    return sorted(entries, key=position)


def newest_by_other_counts(entries: Sequence[Entry]) -> Iterator[tuple[Entry, str]]:
    """Yield the newest checkpoints by counts that didn't decide, with the count's name."""
    decided = decision(entries)
    others: list[tuple[Sequence[Criterion], str]] = []
    if decided.counts is not None:
        others += [(decided.counts, "epoch"), (decided.counts[::-1], "step")]
    if decided.named:
        others += [(decided.named, "its name"), (decided.usual, "its contents")]
    seen = {sorted_by(entries, decided.criteria)[-1].path} if others else set()
    for criteria, name in others:
        newest = sorted_by(entries, criteria)[-1]
        if newest.path not in seen:
            seen.add(newest.path)
            yield newest, name


def newest_candidates(entries: Sequence[Entry]) -> list[Entry]:
    """Return candidates for the newest checkpoint: by order, by time, or by a count that didn't decide."""
    newest = [entries[-1]]
    if not is_flat(entries):
        newest.append(max(entries, key=lambda entry: entry.modified_ns))
    sound = [entry for entry in entries if entry.is_sound]
    newest += [entry for entry, _ in newest_by_other_counts(sound)] if sound else []
    return list({entry.path: entry for entry in newest}.values())


def written_last(entries: Sequence[Entry]) -> list[Entry]:
    """Return checkpoints, the last written first, if files' times contradict their order; else none."""
    ordered, _ = order_entries(entries)
    return sorted(ordered, key=lambda entry: -entry.modified_ns) if _contradiction(ordered) else []


def _contradiction(ordered: Sequence[Entry]) -> str | None:
    if len(ordered) < 2:
        return None
    last, latest = ordered[-1], max(ordered, key=lambda entry: entry.modified_ns)
    if latest.modified_ns - last.modified_ns <= CONTRADICTION_SECONDS * 10**9:
        return None
    return f"{last.name} comes last, but {latest.name} was written later; was the run restarted?"


def newest_first(
    groups: Iterable[Group], is_meant: Callable[[Entry], bool] = lambda entry: True
) -> Iterator[Entry]:
    """Yield the checkpoints of all series: those best to resume from first, and of these the newest.

    Within a run, steps decide, else epochs. Counts of different runs aren't comparable: between runs, the
    time of the save decides.
    """
    # The series of a tier are merged: each step compares the newest remaining checkpoint of each run, yields
    # the one saved last, and takes it from its series.
    for tier in tiers(groups):
        waiting = [list(filter(is_meant, group.entries)) for group in tier]
        while waiting := [series for series in waiting if series]:
            by_run: dict[str, list[Entry]] = defaultdict(list)
            for series in waiting:
                by_run[series[-1].run].append(series[-1])
            newest = sorted_by([_newest_of_run(entries) for entries in by_run.values()], _TIME)[-1]
            yield newest
            next(series for series in waiting if series[-1] is newest).pop()


def _newest_of_run(entries: Sequence[Entry]) -> Entry:
    """Return the newest among the last checkpoints of a run's series."""
    if len(entries) == 1:
        return entries[0]
    return sorted_by(entries, criteria_known_for_all(entries, _OF_RUN) or _TIME)[-1]


def tiers(groups: Iterable[Group]) -> list[list[Group]]:
    """Return series in tiers, the best to resume from first; within a tier, the newest checkpoint wins."""
    known = list(groups)
    sharded = {
        (entry.directory, entry.format)
        for group in known
        for entry in group.entries
        if len(entry.unit.parts) > 1
    }
    ranked: dict[Rank, list[Group]] = {}
    for group in known:
        ranked.setdefault(_rank(group, sharded), []).append(group)
    return [ranked[rank] for rank in sorted(ranked)]


def _rank(group: Group, sharded: Collection[tuple[str, str | None]]) -> Rank:
    """Return the sort key of a series, least for the best to resume from."""
    # In this order: a data format that may hold anything, not only a model; a single file next to sharded
    # checkpoints, which could be a stray shard; how much of a training it holds; no count; an average.
    sound = [entry for entry in group.entries if entry.is_sound]
    if not sound:
        return True, True, 4, True, True
    newest = sound[-1]
    number = newest.fields.number if newest.fields.is_ordinal else None
    is_uncounted = all(value is None for value in (newest.epoch, newest.step, number))
    if newest.has_weights:
        level = 0 if newest.granularity is Granularity.FULL else 1
    else:
        level = 2 if newest.granularity is Granularity.PARTIAL else 3
    has_sharded_siblings = (newest.directory, newest.format) in sharded
    is_stray = has_sharded_siblings and len(newest.unit.parts) == 1 and not newest.parts
    return newest.format in DATA, is_stray, level, is_uncounted, bool(AVERAGED.search(newest.name))
