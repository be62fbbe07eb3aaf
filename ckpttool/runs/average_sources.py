"""Selects the checkpoints of a run to average: the newest, or the best by a metric; only intact ones."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ckpttool.core.errors import UsageError
from ckpttool.core.text import counted
from ckpttool.formats.discovery import last_name
from ckpttool.runs.entry import Entry
from ckpttool.runs.look import Progress, no_progress, read_all
from ckpttool.runs.retention.directory_rules import require_metrics
from ckpttool.runs.retention.rules import History, Policy, rank_by_metric
from ckpttool.runs.scope import WHOLE_TREE, Scope
from ckpttool.runs.series import AVERAGED, Group, group
from ckpttool.runs.survey import survey_directory


def newest_checkpoints(
    directory: str | os.PathLike[str],
    count: int,
    scope: Scope = WHOLE_TREE,
    *,
    jobs: int | None = None,
    progress: Progress = no_progress,
) -> list[str]:
    """Return the paths of the newest intact checkpoints with weights of the only series, the oldest first.

    Each is read in full.

    Raises:
        UsageError: There are several series, or fewer checkpoints.
        CheckpointError: The directory can't be looked at.
    """
    series = _only_series(directory, scope)
    return _first_intact(series.entries[::-1], count, series, jobs, progress)


def best_checkpoints(
    directory: str | os.PathLike[str],
    count: int,
    metric: str,
    mode: str | None = None,
    scope: Scope = WHOLE_TREE,
    *,
    jobs: int | None = None,
    progress: Progress = no_progress,
) -> list[str]:
    """Return the paths of the best intact checkpoints by a metric, in the order of training.

    Raises:
        UsageError: There are several series, fewer checkpoints, or no such metric.
        CheckpointError: The directory can't be looked at.
    """
    # Ranked as ``prune --keep-best`` ranks, the newer of two equal ones first, and then read in this order
    # until enough are intact: a damaged checkpoint costs one more read, not a wrong average.
    policy = Policy(keep_best=count, metric=metric, mode=mode)  # type: ignore[arg-type]
    series = _only_series(directory, scope)
    require_metrics([(series, policy)])
    ranked = rank_by_metric(policy, History(_sound(series)[::-1]))
    return _first_intact(ranked, count, series, jobs, progress)


def _only_series(directory: str | os.PathLike[str], scope: Scope) -> Group:
    """Return the only series of a directory with several checkpoints."""
    # With globs of ``--series``, only these series count; else series of averages don't, unless all are such.
    # Only weights are averaged, so slimmed checkpoints belong to the series of those with an optimizer.
    survey = survey_directory(directory, scope, enters_root=True)
    joined = group(survey.entries, scope.group_by, survey.root, joins_slim=True)
    several = [series for series in joined if len(_sound(series)) > 1]
    if scope.series:
        globs = set(map(last_name, scope.series))
        candidates = [series for series in several if os.path.basename(series.key) in globs]
    else:
        trained = [series for series in several if not AVERAGED.search(os.path.basename(series.key))]
        candidates = trained or several
    if not candidates:
        raise UsageError(f"{survey.root}: no series with several checkpoints with weights")
    if len(candidates) > 1:
        names = ", ".join(series.key for series in candidates)
        raise UsageError(f"{survey.root}: {len(candidates):,} series: {names} (--series GLOB chooses one)")
    return candidates[0]


def _sound(series: Group) -> list[Entry]:
    return [entry for entry in series.entries if entry.is_sound and entry.has_weights]


def _first_intact(
    candidates: Sequence[Entry], count: int, series: Group, jobs: int | None, progress: Progress
) -> list[str]:
    """Return the paths of the first ``count`` intact checkpoints, in training order."""
    chosen: list[str] = []
    for entry in candidates:
        if len(chosen) == count:
            break
        is_candidate = entry.is_sound and entry.has_weights and entry.danger is None
        if is_candidate and read_all(entry, jobs, progress).damage is None:
            chosen.append(entry.path)
    if len(chosen) < count:
        raise UsageError(f"{series.key}: {counted(len(chosen), 'intact checkpoint')} of {count:,} to average")
    return [entry.path for entry in series.entries if entry.path in chosen]
