"""What users should know before they give new names: what can't be read out of them, is lost, or stays."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from ckpttool.formats.discovery import OWN_PREFIX
from ckpttool.naming import NameFields, is_named_best, parse_name
from ckpttool.report import counted
from ckpttool.series.members.entry import Entry
from ckpttool.series.paths import shown
from ckpttool.series.renaming.names import Renaming, unit_stem
from ckpttool.series.renaming.template import FIELDS, FieldError, Template, is_dated_by_file, render, run_of

_UNNAMED = "value"
"""What a metric is called whose name doesn't stand beside it."""


_SHOWN = 1
"""How many names a warning tells; the others are counted."""


_NAMES_SHOWN = 3
"""How many names a warning tells; the others are counted."""


_BEHIND = re.compile(r"[^0-9A-Za-z]|$")


_DIGIT = re.compile(r"[0-9]")


def left_beside(
    renamings: Sequence[Renaming], entries: Sequence[Entry], standing: Mapping[str, Collection[str]]
) -> Iterator[str]:
    """Yield, by directory, what is called after a checkpoint that gets another name, and won't follow it.

    ``epoch_3.json`` and ``epoch_3.pth.md5`` are called after ``epoch_3.pth``; only names with a number count.
    """
    parts = {(entry.directory, name) for entry in entries for name in (entry.name, *entry.unit.members)}
    stems: dict[str, set[str]] = defaultdict(set)
    for one in renamings:
        stems[one.entry.directory] |= set(filter(_DIGIT.search, (one.entry.name, unit_stem(one.entry))))
    for directory, known in stems.items():
        others = (name for name in standing.get(directory, ()) if (directory, name) not in parts)
        left = sorted(name for name in others if not name.startswith(OWN_PREFIX) and _is_after(name, known))
        if left:
            more = f" and {len(left) - _NAMES_SHOWN:,} more" if len(left) > _NAMES_SHOWN else ""
            is_one = len(left) == 1
            told = "begins with an old name and doesn't" if is_one else "begin with an old name and don't"
            names = f"{', '.join(left[:_NAMES_SHOWN])}{more}"
            yield f"{shown(directory)}{os.sep}: {counted(len(left), 'file')} {told} follow: {names}"


def _is_after(name: str, known: Collection[str]) -> bool:
    return any(name[: match.start()] in known for match in _BEHIND.finditer(name, 1))


def doubts(renamings: Sequence[Renaming], template: Template) -> list[str]:
    """Return a sentence for each thing that is doubtful about new names, and of which it is said."""
    told: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for one in renamings:
        for kind, what in _doubts(one, template):
            told[kind].append((f"{one.entry.path} -> {one.name}", what or kind))
    warnings = [f"{_first([name for name, _ in found])}: {found[0][1]}" for found in told.values()]
    undated = [one for one in renamings if is_dated_by_file(one.entry)]
    if undated and not template.names.isdisjoint(("date", "time")):
        names = [one.entry.path for one in undated]
        warnings.append(
            f"{_first(names)}: its date is that of its file: neither it nor its name says when it was saved"
        )
    return [*warnings, *_parted(renamings)]


def _first(names: Sequence[str]) -> str:
    more = f" (and {len(names) - _SHOWN:,} more)" if len(names) > _SHOWN else ""
    return names[0] + more


def _doubts(one: Renaming, template: Template) -> Iterator[tuple[str, str]]:
    """Yield what is doubtful about a name: of what kind that is, and what is said of this one, if more."""
    old, new = one.entry.fields, parse_name(one.name)
    for name, told in (("epoch", new.epoch), ("step", new.step)):
        value = one.values.get(name)
        if told == value:
            continue
        if name in template.names and value is not None:
            yield f"its {name} would not be read out of this name (write it as {name}-{{{name}}})", ""
        elif told is not None:
            yield f"read as {name}", f"this name would be read as {name} {told}"
        elif _stands_in_name_alone(one, name):
            yield f"its {name} stands in its old name alone, and not in the new one", ""
    if _loses_order(one, old, new):
        is_there = any(int(digits) == old.number for digits in re.findall(r"[0-9]{1,18}", one.name))
        lost = "would not be read out of the new one" if is_there else "isn't in the new one"
        yield f"the number in its old name, which orders it, {lost}", ""
    yield from _metric_doubts(one, template, old, new)
    if new.saved_at is not None and _differs(one, new.saved_at):
        yield "read as date", f"this name would be read as the date {new.saved_at}"
    if is_named_best(one.name) and not is_named_best(one.entry.name):
        yield "this name says that it is the best, which is never pruned", ""
    if (again := _again(one, template)) != one.name:
        yield "again", f"the next rename by this template would call it {again}"


def _metric_doubts(
    one: Renaming, template: Template, old: NameFields, new: NameFields
) -> Iterator[tuple[str, str]]:
    lost = [name for name in old.metrics if name not in template.names and _is_named_metric(one, name)]
    if lost and not set(lost) & new.metrics.keys():
        yield f"{lost[0]} stands in its old name, and not in the new one", ""
    bare = [name for name in template.names.difference(FIELDS) if name in one.values]
    if _UNNAMED in new.metrics and _UNNAMED not in old.metrics and bare:
        name = next((name for name in bare if name not in new.metrics), bare[0])
        yield (
            f"{name} would be read out of this name as a metric without one (write it as {name}={{{name}}})",
            "",
        )


def _stands_in_name_alone(one: Renaming, name: str) -> bool:
    inside = one.entry.inside[0] if name == "epoch" else one.entry.inside[1]
    return inside is None and getattr(one.entry.fields, name) is not None


def _loses_order(one: Renaming, old: NameFields, new: NameFields) -> bool:
    is_inside = any(value is not None for value in one.entry.inside)
    is_told = any(value is not None for value in (new.epoch, new.step, new.number))
    return old.number is not None and not is_inside and not is_told


def _is_named_metric(one: Renaming, name: str) -> bool:
    """Tell whether a metric in a name may be known from nowhere else."""
    return one.entry.metrics.get(name, one.entry.loss) == one.entry.fields.metrics.get(name)


def _differs(one: Renaming, saved_at: str) -> bool:
    value = one.values.get("date")
    return isinstance(value, datetime) and not f"{value:%Y-%m-%dT%H:%M:%S}".startswith(saved_at)


def _again(one: Renaming, template: Template) -> str:
    """Return what a template makes of what it made: names that it would change again settle nowhere."""
    unit = replace(one.entry.unit, path=one.to)
    stem = unit_stem(replace(one.entry, unit=unit))
    values = {**one.values, "name": stem, "run": run_of(stem, one.entry.directory)}
    try:
        new = render(template, values)
    except FieldError:
        return one.name
    suffix = one.name.removeprefix(stem)
    return new if suffix and new.endswith(suffix) else new + suffix


def _parted(renamings: Sequence[Renaming]) -> Iterator[str]:
    """Yield the series whose checkpoints would be taken for several series by their new names."""
    groups: Mapping[str, list[Renaming]] = defaultdict(list)
    for one in renamings:
        groups[one.entry.group].append(one)
    for key, found in groups.items():
        old = {one.entry.fields.blank for one in found}
        new = {parse_name(one.name).blank: one.name for one in found}
        if len(old) == 1 and len(new) > 1:
            names = " and ".join(list(new.values())[:2])
            yield f"{key}: by their new names these would be {len(new)} series, such as {names}"
