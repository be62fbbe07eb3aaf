"""What several checkpoints say that one alone doesn't: pairs of numbers that grow together, dates of runs."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import pairwise

from ckpttool.naming import NameFields, pair_fields
from ckpttool.series.members.entry import Entry

_NUMBERS = re.compile(r"[0-9]{1,18}(?:\.[0-9]+)?", re.ASCII)


def as_told(entries: Sequence[Entry], globs: Sequence[str]) -> list[Entry]:
    """Return checkpoints; those whose names match a glob are of one series, whatever else their names say."""
    return [replace(entry, fields=_fields_as_told(entry, globs)) for entry in entries]


def _fields_as_told(entry: Entry, globs: Sequence[str]) -> NameFields:
    fields = entry.fields
    glob = next((glob for glob in globs if fnmatchcase(entry.name, glob)), None)
    if glob is None:
        return fields
    numbers = [one for one in _NUMBERS.findall(os.path.splitext(entry.name)[0]) if one.isdigit()]
    is_placed = any(place is not None for place in fields.position)
    number = fields.number if is_placed or not numbers else int(numbers[-1])
    return replace(fields, blank=glob, number=number)


def with_pairs(entries: Sequence[Entry]) -> list[Entry]:
    """Return checkpoints; ``checkpoint_1_100.pt`` and ``checkpoint_2_200.pt`` have an epoch and a step then.

    A pair is one where both numbers grow together; otherwise the first may be a fold.
    """
    pairs = {entry.path: fields for entry in entries if (fields := pair_fields(entry.name)) is not None}
    places: dict[tuple[str, str], list[NameFields]] = defaultdict(list)
    for entry in entries:
        if fields := pairs.get(entry.path):
            places[entry.directory, fields.blank].append(fields)
    grown = {place for place, found in places.items() if _grow(found)}
    return [
        _named(entry, fields) if fields and (entry.directory, fields.blank) in grown else entry
        for entry, fields in ((entry, pairs.get(entry.path)) for entry in entries)
    ]


def _grow(found: Sequence[NameFields]) -> bool:
    numbers = sorted((fields.epoch or 0, fields.step or 0) for fields in found)
    steps = [step for _, step in numbers]
    is_growing = len(steps) > 1 and all(one < two for one, two in pairwise(steps))
    return is_growing and all(epoch < step for epoch, step in numbers)


def _named(entry: Entry, fields: NameFields) -> Entry:
    epoch, step = entry.inside
    return replace(
        entry,
        fields=fields,
        epoch=fields.epoch if epoch is None else epoch,
        step=fields.step if step is None else step,
    )


def in_runs(entries: list[Entry]) -> list[list[Entry]]:
    """Return the runs among checkpoints of one name: where dates go on, but epochs begin again, is another.

    ``2026-01-01_e1``, ``…_e2`` and ``2026-01-02_e1`` are two runs; ``2026-01-02_e3`` would go on.
    """
    dated = [entry for entry in entries if entry.fields.saved_at and _count(entry) != _NO_COUNT]
    if len(dated) < len(entries):
        return [entries]
    ordered = sorted(dated, key=lambda entry: (entry.fields.saved_at or "", _count(entry)))
    runs = [ordered[:1]]
    for before, entry in pairwise(ordered):
        is_later = entry.fields.saved_at != before.fields.saved_at
        if is_later and _count(entry) <= _count(before):
            runs.append([])
        runs[-1].append(entry)
    return runs


_NO_COUNT = (-1, -1)


def _count(entry: Entry) -> tuple[float, float]:
    return -1 if entry.epoch is None else entry.epoch, -1 if entry.step is None else entry.step
