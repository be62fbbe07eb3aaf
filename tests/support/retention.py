"""What a policy makes of checkpoints: of entries without files, and of a directory that stays as it is."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from ckpttool import Policy, PruneRequest, prune
from ckpttool.formats.discovery import Globs
from ckpttool.runs import look
from ckpttool.runs.entry import Entry
from ckpttool.runs.pointers import kinds
from ckpttool.runs.pointers.programs import NeededFiles
from ckpttool.runs.pruning import prune as pruning
from ckpttool.runs.pruning.planning import Explanation, PrunePlan, explain, make_plan
from ckpttool.runs.pruning.prune import Pruned
from ckpttool.runs.retention.directory_rules import lack_warnings
from ckpttool.runs.retention.plan import (
    GroupPlan,
    Protections,
    RetentionPlan,
    plan_saves,
    protections_of_saves,
)
from ckpttool.runs.retention.request import PathRule, Policies
from ckpttool.runs.run_directories import apply_series_globs
from ckpttool.runs.saves import mark_saves, series_of_saves
from ckpttool.runs.scope import GroupBy
from ckpttool.runs.series import Group, group


def series_of(
    entries: Iterable[Entry], by: GroupBy | None = None, declared: Sequence[str] = ()
) -> tuple[Group, ...]:
    """Return the series that checkpoints of ``run/`` are, each from the oldest on; globs may declare some."""
    return mark_saves(group(apply_series_globs(list(entries), Globs(declared, "run")), by))


def policies(
    default: Policy | None, *rules: tuple[Any, ...], directory: str | os.PathLike[str] = "."
) -> Policies:
    """Return a policy, and others for the paths that match a glob: pairs of these, or with an origin."""
    return Policies(default, tuple(PathRule(*rule) for rule in rules), str(directory))


def plan_of(
    entries: Iterable[Entry], policy: Policy | Policies, *, now: float | None = None, **protections: Any
) -> RetentionPlan:
    """Return what becomes of checkpoints; ``protections`` say what is stronger than every rule."""
    return plan_saves(mark_saves(group(entries)), policy, Protections(**protections), now=now)


def series_plan(entries: Iterable[Entry], policy: Policy, **known: Any) -> GroupPlan:
    """Return what becomes of checkpoints that are one series."""
    (planned,) = plan_of(entries, policy, **known).groups
    return planned


def lacks(
    entries: Iterable[Entry],
    policy: Policy | None,
    now: float | None = None,
) -> list[str]:
    """Return what is said of checkpoints that lack what a policy goes by."""
    return list(lack_warnings([(series, policy) for series in group(entries)], now))


def why(entries: Sequence[Entry], name: str, policy: Policy, **protections: Any) -> Explanation:
    """Return why a checkpoint of ``run/`` stays or goes."""
    groups, protected = mark_saves(group(entries)), Protections(**protections)
    saves = series_of_saves(groups)
    retention = plan_saves(groups, policy, protected)
    planned = PrunePlan(retention, groups=saves, protections=protections_of_saves(saves, protected))
    explanation = explain(planned, f"run/{name}")
    assert explanation.is_kept == (explanation.entry not in planned.plan.removals)
    return explanation


def why_in(directory: str | os.PathLike[str], path: str | os.PathLike[str], **request: Any) -> Explanation:
    """Return why a checkpoint of a directory stays or goes."""
    planned = make_plan(PruneRequest(directory=os.fspath(directory), **request))
    return explain(planned, os.fspath(path))


def dry_run(directory: str | os.PathLike[str], **request: Any) -> Pruned:
    """Return what a prune of a directory would do."""
    return prune(PruneRequest(directory=os.fspath(directory), **request), dry_run=True)


def removed_names(pruned: Pruned) -> list[str]:
    """Return the names of what goes, sorted."""
    return sorted(entry.name for entry in pruned.plan.removals)


def kept_reasons(pruned: Pruned) -> dict[str, tuple[str, ...]]:
    """Return why each checkpoint that stays does, by its name."""
    return {kept.entry.name: kept.reasons for series in pruned.plan.groups for kept in series.keep}


def overlook_need(patch: pytest.MonkeyPatch, path: str | os.PathLike[str]) -> None:
    """Let every checkpoint need a path, and let plans overlook that: only the last check knows it."""
    needed_paths = look.needed_paths

    def with_another(*arguments: Any, **options: Any) -> tuple[str, ...]:
        return (*needed_paths(*arguments, **options), os.fspath(path))

    patch.setattr(look, "needed_paths", with_another)
    patch.setattr(kinds, "KINDS", tuple(kind for kind in kinds.KINDS if not isinstance(kind, NeededFiles)))
    patch.setattr(pruning, "listed_by_indexes_in", lambda directory, real, going: {})
