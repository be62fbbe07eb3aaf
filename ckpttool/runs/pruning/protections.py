"""What protects checkpoints from every rule: pointers, their own state, and doubt about their series."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from shlex import quote

from ckpttool.core.errors import CheckpointError, from_os_error
from ckpttool.core.naming import is_named_best
from ckpttool.core.text import counted
from ckpttool.formats.discovery import OWN_PREFIX, discover
from ckpttool.formats.globs import Globs, last_name
from ckpttool.formats.interface import Unit
from ckpttool.formats.step_directory import StepDirectory
from ckpttool.formats.traits import traits_of
from ckpttool.runs.members.entry import Entry
from ckpttool.runs.members.order import Group
from ckpttool.runs.members.saves import series_of_saves
from ckpttool.runs.members.series_doubts import (
    METRICS_ALONE,
    NOTHING_TRAINED,
    UNORDERED,
    WITNESS,
    untrained_entries,
    witnesses,
)
from ckpttool.runs.pointers.targets import PointerProtections
from ckpttool.runs.reasons import Code, Reason, code_of
from ckpttool.runs.retention.plan import Protections
from ckpttool.runs.retention.policies import Policies
from ckpttool.runs.retention.rules import Policy
from ckpttool.runs.retention.save_plan import doubts_of
from ckpttool.runs.scope import Scope
from ckpttool.runs.surveying.survey import Survey
from ckpttool.storage import fs
from ckpttool.storage.atomic import is_scratch_name
from ckpttool.transaction.journal_documents import is_name
from ckpttool.transaction.mounts import HOLDS_MOUNT, is_mounted, mount_points


def own_reasons(survey: Survey, scope: Scope, min_age: int) -> dict[str, list[str]]:
    """Return why checkpoints stay for what they are and where they lie, by path, whatever points at them.

    ``min_age`` is in seconds: what changed later stays.
    """
    reasons: dict[str, list[str]] = {}
    youngest = (_now(survey.root) - min_age) * 1e9 if min_age else 0.0
    points = mount_points(below=survey.root) or ()
    excluded = Globs(scope.exclude, survey.root)
    for entry in survey.entries:
        globs = (glob for place in entry.places for glob in excluded.of(place))
        reasons[entry.path] = [
            *_entry_reasons(entry, points),
            *(f"--exclude {glob}" for glob in islice(globs, 1)),
            *([Reason(Code.TOO_YOUNG)] if min_age and entry.modified_ns > youngest else ()),
        ]
    return reasons


def foreign_reason(entry: Entry) -> str:
    """Return why a checkpoint stays that holds what isn't its own, where nobody has said that it goes."""
    names = entry.foreign_files
    more = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
    return f"{names[0]}{more} in it is not the checkpoint's own (--yes removes it)"


def _now(root: str) -> float:
    """Return what time it is where the files get theirs, in seconds since 1970."""
    try:
        return fs.place_of(root).clock(root)
    except OSError as error:
        raise from_os_error(error, root) from error


def protections_of(
    groups: Sequence[Group],
    pointed: PointerProtections,
    own: Mapping[str, Sequence[str]],
    faults: Mapping[str, str],
    *,
    series: Sequence[str],
    policies: Policies,
) -> Protections:
    """Return what protects the checkpoints of some series.

    Args:
        groups: The series.
        pointed: What points at their checkpoints.
        own: Why they stay for what they are, by path.
        faults: What reading found wrong with some, by path.
        series: Globs of what the user calls a series.
        policies: What each is planned by.
    """
    reasons: dict[str, list[str]] = {}
    named_series = set(map(last_name, series))
    for group in groups:
        one_of_many = best_of_many(group, policies.of(group), faults)
        for entry in group.entries:
            pointers = [
                reason
                for reason in pointed.reasons.get(entry.path, ())
                if code_of(reason) is not Code.NAMED_BEST or entry.path not in one_of_many
            ]
            reasons[entry.path] = [*pointers, *own[entry.path]]
    saves = series_of_saves(groups)
    for group in saves:
        for entry in untrained_entries(group):
            reasons[entry.path].append(NOTHING_TRAINED)
        for entry in witnesses(group, named_series, faults):
            reasons[entry.path].append(WITNESS)
    doubts = doubts_of(saves, named_series)
    for key, first in {group.key: group.entries[0] for group in saves}.items():
        if key in doubts and doubts[key] not in (METRICS_ALONE, UNORDERED):  # else the user can't know better
            doubts[key] += f" (if they are one series, say --series {quote(first.fields.blank)})"
    return Protections(reasons, pointed.skipped, faults, doubts, holders=pointed.holders)


def _entry_reasons(entry: Entry, mount_points: Collection[str]) -> Iterator[str]:
    """Yield why a checkpoint is not to be touched, whatever points at it."""
    if entry.holds_others:
        yield "holds other checkpoints"
    elif others := list(_other_checkpoints_in(entry)):
        first = os.path.relpath(others[0].path, entry.unit.path)
        yield f"holds {counted(len(others), 'other checkpoint')}: {first}{', …' if len(others) > 1 else ''}"
    if entry.is_step_directory:
        # Pins, or a trash, that a command left there when it took each file for a checkpoint.
        names = (name for file in entry.contents.files for name in file.path.split(os.sep))
        kept = (name for name in names if name.startswith(OWN_PREFIX) and not is_scratch_name(name))
        yield from islice((f"{name} lies in it" for name in kept), 1)
    if entry.is_link:
        yield "is a symlink"
    if not all(map(is_name, entry.unit.members)):
        yield "has parts elsewhere"
    if entry.contents.crosses or is_mounted(entry.directory, entry.unit.members, mount_points):
        yield HOLDS_MOUNT


def _other_checkpoints_in(entry: Entry) -> Iterator[Unit]:
    """Yield checkpoints inside one that would go with it and are none of its parts."""
    format = entry.unit.format
    if format is None or not format.takes_in or isinstance(format, StepDirectory):  # all in it is of the save
        return
    for path in entry.contents.directories:
        if path.count(os.sep) == 1:  # directly below
            try:
                below = list(discover(os.path.join(entry.directory, path)))
            except CheckpointError:  # it goes only if it is as it was when it could be looked at
                continue
            for unit in below:
                kind = unit.format
                if kind is not None and (kind.takes_in or not traits_of(kind.name).is_part_of_others):
                    yield unit


def best_of_many(group: Group, policy: Policy | None, faults: Collection[str]) -> frozenset[str]:
    """Return the paths of those that their names alone don't protect.

    Names say nothing if they call all of a series the best, save by save: one for each improvement. Then
    the metric that the policy ranks by decides. Without one, the least and the greatest of each metric in
    the names stay for their names; if there is no metric in them, all stay.
    """
    intact = [entry for entry in group.entries if entry.is_sound and entry.path not in faults]
    if len(intact) < 2:
        return frozenset()
    for entry in intact:
        fields = entry.fields
        # A bare number may be that of a fold rather than of a save.
        is_save = fields.number is None and (fields.epoch is not None or fields.step is not None)
        if not is_save or not is_named_best(entry.name):
            return frozenset()
    if len({(entry.fields.epoch, entry.fields.step) for entry in intact}) < len(intact):
        return frozenset()
    ranked_by = None if policy is None else policy.metric
    if ranked_by is not None and all(entry.recorded_metric(ranked_by) is not None for entry in intact):
        return frozenset(entry.path for entry in intact)
    metrics = set.intersection(*(set(entry.fields.metrics) for entry in intact))
    extreme: set[str] = set()
    for metric in metrics:
        values = {entry.path: entry.fields.metrics[metric] for entry in intact}
        finite = [value for value in values.values() if math.isfinite(value)]
        ends = {min(finite), max(finite)} if finite else set()
        extreme |= {path for path, value in values.items() if value in ends or not math.isfinite(value)}
    return frozenset(entry.path for entry in intact if entry.path not in extreme) if metrics else frozenset()
