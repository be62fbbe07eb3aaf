"""What users should know before they give new names: what can't be read out of them, is lost, or stays."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from ckpttool.core.naming import NameFields, is_named_best, parse_name
from ckpttool.core.text import counted
from ckpttool.formats.discovery import OWN_PREFIX
from ckpttool.runs.members.entry import Entry
from ckpttool.runs.renaming.names import Renaming, unit_stem
from ckpttool.runs.renaming.template import FIELDS, FieldError, Template, render, run_of
from ckpttool.transaction.paths import shown

_UNNAMED = "value"
"""What a metric is called whose name doesn't stand beside it."""

_SHOWN = 1
"""How many checkpoints a warning names; the others are counted."""

_FILES_SHOWN = 3
"""How many files a warning names; the others are counted."""

_WORD_END = re.compile(r"[^0-9A-Za-z]|$")


def name_doubts(renamings: Sequence[Renaming], template: Template) -> list[str]:
    """Return a sentence for each kind of doubt about new names, with the checkpoints it concerns."""
    doubts: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for renaming in renamings:
        for kind, sentence in _doubts(renaming, template):
            doubts[kind].append((f"{renaming.entry.path} -> {renaming.name}", sentence or kind))
    warnings = [f"{_first([name for name, _ in cases])}: {cases[0][1]}" for cases in doubts.values()]
    undated = [renaming.entry.path for renaming in renamings if renaming.entry.saved_at is None]
    if undated and not template.names.isdisjoint(("date", "time")):
        warnings.append(
            f"{_first(undated)}: its date is that of its file: neither it nor its name says when it was saved"
        )
    return [*warnings, *_split_series(renamings)]


def _first(names: Sequence[str]) -> str:
    more = f" (and {len(names) - _SHOWN:,} more)" if len(names) > _SHOWN else ""
    return names[0] + more


def _doubts(renaming: Renaming, template: Template) -> Iterator[tuple[str, str]]:
    """Yield the doubts about a name: the kind of each, and what is said of this one, if more."""
    entry = renaming.entry
    old, new = entry.fields, parse_name(renaming.name)
    for name, read, inside in (("epoch", new.epoch, entry.inside[0]), ("step", new.step, entry.inside[1])):
        value = renaming.values.get(name)
        if read == value:
            continue
        if name in template.names and value is not None:
            yield f"its {name} would not be read out of this name (write it as {name}-{{{name}}})", ""
        elif read is not None:
            yield f"read as {name}", f"this name would be read as {name} {read}"
        elif inside is None and getattr(old, name) is not None:
            yield f"its {name} is only in its old name, and not in the new one", ""
    orders = (*entry.inside, new.epoch, new.step, new.number)
    if old.number is not None and all(value is None for value in orders):
        is_there = any(int(digits) == old.number for digits in re.findall(r"[0-9]{1,18}", renaming.name))
        lost = "would not be read out of the new one" if is_there else "isn't in the new one"
        yield f"the number in its old name, which orders it, {lost}", ""
    yield from _metric_doubts(renaming, template, old, new)
    date = renaming.values.get("date")
    moment = f"{date:%Y-%m-%dT%H:%M:%S}" if isinstance(date, datetime) else None
    if new.saved_at is not None and moment is not None and not moment.startswith(new.saved_at):
        yield "read as date", f"this name would be read as the date {new.saved_at}"
    if is_named_best(renaming.name) and not is_named_best(entry.name):
        yield "this name says that it is the best, which is never pruned", ""
    if (again := _name_after_next_rename(renaming, template)) != renaming.name:
        yield "again", f"the next rename by this template would call it {again}"


def _metric_doubts(
    renaming: Renaming, template: Template, old: NameFields, new: NameFields
) -> Iterator[tuple[str, str]]:
    entry = renaming.entry
    # A metric that says the same as the name may be known from nowhere else.
    lost = [
        name
        for name, value in old.metrics.items()
        if name not in template.names and entry.metrics.get(name, entry.loss) == value
    ]
    if lost and not set(lost) & new.metrics.keys():
        yield f"{lost[0]} is in its old name, and not in the new one", ""
    bare = [name for name in template.names.difference(FIELDS) if name in renaming.values]
    if _UNNAMED in new.metrics and _UNNAMED not in old.metrics and bare:
        name = next((name for name in bare if name not in new.metrics), bare[0])
        yield (
            f"the new name won't say that its number is {name} (use {name}={{{name}}})",
            "",
        )


def _name_after_next_rename(renaming: Renaming, template: Template) -> str:
    """Return what a template makes of a name that it made: another one would change with every rename."""
    unit = renaming.entry.unit._replace(path=renaming.to)
    stem = unit_stem(replace(renaming.entry, unit=unit))
    values = {**renaming.values, "name": stem, "run": run_of(stem, renaming.entry.directory)}
    try:
        new = render(template, values)
    except FieldError:
        return renaming.name
    suffix = renaming.name.removeprefix(stem)
    return new if suffix and new.endswith(suffix) else new + suffix


def _split_series(renamings: Sequence[Renaming]) -> Iterator[str]:
    """Yield the series whose checkpoints would be taken for several series by their new names."""
    series: dict[str, list[Renaming]] = defaultdict(list)
    for renaming in renamings:
        series[renaming.entry.group].append(renaming)
    for key, members in series.items():
        old = {renaming.entry.fields.blank for renaming in members}
        new = {parse_name(renaming.name).blank: renaming.name for renaming in members}
        if len(old) == 1 and len(new) > 1:
            names = " and ".join(list(new.values())[:2])
            yield f"{key}: by their new names these would be {len(new)} series, such as {names}"


def namesake_warnings(
    renamings: Sequence[Renaming], entries: Sequence[Entry], standing: Mapping[str, Collection[str]]
) -> Iterator[str]:
    """Yield, by directory, the files that are called after a checkpoint's old name, and don't follow it.

    ``epoch_3.json`` and ``epoch_3.pth.md5`` are called after ``epoch_3.pth``; only names with a number count.
    """
    parts = {(entry.directory, name) for entry in entries for name in (entry.name, *entry.unit.members)}
    old_names: dict[str, set[str]] = defaultdict(set)
    for renaming in renamings:
        entry = renaming.entry
        old_names[entry.directory] |= {n for n in (entry.name, unit_stem(entry)) if re.search("[0-9]", n)}
    for directory, stems in old_names.items():
        namesakes = sorted(
            name
            for name in standing.get(directory, ())
            if (directory, name) not in parts
            and not name.startswith(OWN_PREFIX)
            and any(name[: end.start()] in stems for end in _WORD_END.finditer(name, 1))
        )
        if namesakes:
            more = f" and {len(namesakes) - _FILES_SHOWN:,} more" if len(namesakes) > _FILES_SHOWN else ""
            begin, do = ("begins", "doesn't") if len(namesakes) == 1 else ("begin", "don't")
            names = f"{', '.join(namesakes[:_FILES_SHOWN])}{more}"
            count = counted(len(namesakes), "file")
            yield f"{shown(directory)}{os.sep}: {count} {begin} with an old name and {do} follow: {names}"
