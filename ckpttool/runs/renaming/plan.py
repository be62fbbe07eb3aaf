"""Which checkpoints of a directory get other names, and what has to follow; nothing is changed here."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckpttool.core.errors import UsageError
from ckpttool.runs.members.entry import Entry
from ckpttool.runs.pointers.kinds import kind_of
from ckpttool.runs.pointers.notes import may_protect, protecting_text
from ckpttool.runs.pointers.protection import Pointers, unseen_above
from ckpttool.runs.pointers.readers import names_in
from ckpttool.runs.pointers.symlinks import links_near
from ckpttool.runs.reasons import Code, code_of
from ckpttool.runs.renaming.name_warnings import name_doubts, namesake_warnings
from ckpttool.runs.renaming.names import RenamePlan, Renaming, plan_names
from ckpttool.runs.renaming.note_rewrites import NoteRewriter, note_directories
from ckpttool.runs.renaming.pointer_updates import link_holders, updates_for
from ckpttool.runs.renaming.reserved_names import (
    lost_lookups,
    manager_prefixes,
    reason_to_leave,
    stale_best_paths,
)
from ckpttool.runs.renaming.scene import PathRenames, Scene, Updates
from ckpttool.runs.renaming.template import FIELDS, Template, TemplateField, parse_template
from ckpttool.runs.scope import Scope
from ckpttool.runs.surveying.survey import survey_directory
from ckpttool.transaction.paths import Problem, require_directory, shown
from ckpttool.transaction.state_dir import enclosing_serial

NewNames = dict[str, dict[str, str]]
"""New names by old ones, by directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenameRequest(Scope):
    """What is to be renamed, and how: besides what is looked at, which is a ``Scope``.

    Attributes:
        directory: Where the checkpoints lie.
        template: What their names are to be.
        keeps: Why some keep their names, by path; what names others in them follows.
    """

    directory: str
    template: str
    keeps: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PlannedNames:
    """A plan, with what was found on the way.

    Attributes:
        plan: Which checkpoint gets which name.
        scene: Where they lie, and what leads there.
        update_count: How many pointers, links and other texts have to follow.
        problems: What must be looked at; it keeps nothing from being renamed.
        warnings: What is doubtful about the names.
        journals: What an interrupted command left.
    """

    plan: RenamePlan
    scene: Scene
    update_count: int = 0
    problems: tuple[Problem, ...] = ()
    warnings: tuple[str, ...] = ()
    journals: tuple[str, ...] = ()


def plan_rename(request: RenameRequest) -> PlannedNames:
    """Return which checkpoint gets which name; nothing on disk is changed.

    Raises:
        UsageError: The template is none, or the directory is a checkpoint itself.
        CheckpointError: The directory can't be looked at.
    """
    template = parse_template(request.template)
    root = require_directory(request.directory)
    if (serial := enclosing_serial(root)) is not None:
        raise UsageError(f"{root} is a part of the checkpoint {serial}")
    surveyed = survey_directory(root, request, enters_root=True)
    entries = tuple(entry for entry in surveyed.entries if entry.unit.path != root)
    if surveyed.entries and not entries:
        raise UsageError(f"{root} is a checkpoint itself (name the directory that it is in)")
    snapshot = surveyed.snapshot
    standing = {
        directory: names_in(directory, snapshot) for directory in {entry.directory for entry in entries}
    }
    left = {
        entry.path: why for entry in entries if (why := reason_to_leave(entry, standing[entry.directory]))
    }
    pointers = Pointers(
        root, surveyed.groups, recursive=request.recursive, asks_trackers=True, snapshot=snapshot
    )
    for path, reasons in pointers.protections().reasons.items():
        for reason in reasons:
            if code_of(reason) in (Code.BEING_WRITTEN, Code.PART_OF, Code.REGISTERED):
                left.setdefault(path, reason)
    left |= request.keeps
    unknown, there = _unknown_fields(template, [entry for entry in entries if entry.path not in left])
    for one in unknown:
        if not one.is_optional:
            problem = f"no checkpoint has a field {one.name} (there are {there})"
            raise UsageError(f"template {template.text!r}: {problem}")
    scene = Scene(
        root, entries, links_near(root, snapshot), note_directories(root, entries, snapshot), snapshot
    )
    plan, moved, updates = _plan_with_updates(template, scene, standing, left)
    errors = [Problem(shown(error.path), error.reason) for error in surveyed.errors]
    problems = [*errors, *(replace(one, message=f"left alone: {one.message}") for one in plan.left)]
    if not plan.refused:
        problems += _stale_notes(updates, NoteRewriter(scene, moved))
    warnings = [
        f"{shown(path)}: it can't be changed, and may have old names: {why}"
        for path, why in updates.faults.items()
    ]
    renamed = [(one.entry, one.name) for one in plan.renamings]
    warnings += [*lost_lookups(renamed), *stale_best_paths(entries, [entry for entry, _ in renamed])]
    warnings += [*surveyed.remarks, *name_doubts(plan.renamings, template)]
    warnings += namesake_warnings(plan.renamings, entries, standing)
    unknown, there = _unknown_fields(template, [entry for entry in entries if entry.path not in left])
    for one in unknown:
        problem = f"no checkpoint has a field {one.name}, which is left out of every name"
        warnings.append(f"{one.shown} of the template: {problem} (there are {there})")
    warnings += unseen_above(root, snapshot)
    return PlannedNames(plan, scene, updates.count, tuple(problems), tuple(warnings), surveyed.journals)


def _plan_with_updates(
    template: Template, scene: Scene, standing: Mapping[str, Mapping[str, object]], left: dict[str, str]
) -> tuple[RenamePlan, PathRenames, Updates]:
    """Return a plan, its names, and what has to follow it; what can't follow leaves alone what it names."""
    managed = {directory: manager_prefixes(directory) for directory in standing}
    while True:
        plan = plan_names(scene.entries, template, standing, left, managed)
        moved = PathRenames(names_of(plan.renamings), scene.snapshot)
        updates = updates_for(scene, moved)
        reasons = dict(_reasons_to_stay(plan, scene, moved, updates))
        if not reasons:
            return plan, moved, updates
        left |= reasons


def _reasons_to_stay(
    plan: RenamePlan, scene: Scene, moved: PathRenames, updates: Updates
) -> Iterator[tuple[str, str]]:
    """Yield what has to keep its name since something that names it can't be changed, and why."""
    entries = {(one.entry.directory, one.entry.name): one.entry for one in plan.renamings}
    for holder in link_holders(scene, entries, moved):
        yield entries[holder].path, "a symlink in it leads to a checkpoint that gets another name"
    by_directory: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries.values():
        by_directory[entry.directory].append(entry)
    for path, why in updates.faults.items():
        directory, name = os.path.split(path)
        kind = kind_of(name)
        blocks_renames = kind is not None and kind.blocks_renames
        formats = None if kind is None else kind.formats
        for entry in by_directory[directory or os.curdir]:
            is_meant = blocks_renames and (formats is None or entry.format in formats)
            if is_meant or name in entry.unit.members:
                yield entry.path, f"{shown(path)} names it, and can't be changed: {why}"


def _unknown_fields(template: Template, entries: Sequence[Entry]) -> tuple[list[TemplateField], str]:
    """Return the metrics in a template that no checkpoint has, and which fields there are."""
    known = {name for entry in entries for name in entry.metrics if entry.metric(name) is not None}
    known |= {"loss" for entry in entries if entry.metric("loss") is not None}
    there = (*FIELDS, *sorted(known))
    unknown = [field for field in template.fields if entries and field.name not in there]
    return unknown, ", ".join(there)


def _stale_notes(updates: Updates, notes: NoteRewriter) -> Iterator[Problem]:
    """Yield the notes that will name checkpoints by names that these don't have any more."""
    for note in updates.notes:
        names = list(notes.lost(note))
        if not names:
            continue
        more, those = (f" (and {len(names) - 1:,} more)", "them") if len(names) > 1 else ("", "that")
        protects = may_protect(note.name) and protecting_text(note.before)
        lost = f": prune won't keep {those} for it any more" if protects else ""
        path = shown(os.path.join(note.directory, note.name))
        yield Problem(path, f"{note.name} names {names[0]}{more} and isn't changed{lost}")


def names_of(renamings: Iterable[Renaming]) -> NewNames:
    """Return new names by old ones, by directory."""
    names: NewNames = defaultdict(dict)
    for one in renamings:
        names[one.entry.directory] |= one.names
    return names
