"""Series all of which are named best: one checkpoint for each improvement, so that the name says nothing."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

from ckpttool.naming import is_named_best
from ckpttool.series.members.entry import Entry
from ckpttool.series.members.order import Group
from ckpttool.series.reasons import Code, code_of
from ckpttool.series.retention.policy import Policy
from ckpttool.series.retention.rules import metric_value


def protecting_reasons(reasons: Sequence[str], entry: Entry, of_many: Collection[str]) -> Iterator[str]:
    """Yield the reasons that protect a checkpoint, without its name where that is of no account."""
    yield from (one for one in reasons if code_of(one) is not Code.NAMED_BEST or entry.path not in of_many)


def best_of_many(group: Group, policy: Policy | None, faults: Collection[str]) -> frozenset[str]:
    """Return the paths of those that their names alone don't protect.

    Names say nothing where they call all of a series the best, save by save: what the policy ranks by
    decides. Where it doesn't rank, the least and the greatest of each metric in the names stay for their
    names, and all where there is none.

    Args:
        group: The series.
        policy: What it is planned by.
        faults: Paths of what was found damaged.
    """
    intact = [one for one in group.entries if one.is_sound and one.path not in faults]
    if len(intact) < 2 or not all(map(_is_a_save_of_many, intact)):
        return frozenset()
    if len({(one.fields.epoch, one.fields.step) for one in intact}) < len(intact):
        return frozenset()
    metric = None if policy is None else policy.metric
    if metric is not None and all(metric_value(one, metric) is not None for one in intact):
        return frozenset(one.path for one in intact)
    metrics = set.intersection(*(set(one.fields.metrics) for one in intact))
    extreme = {one.path for metric in metrics for one in _extremes(intact, metric)}
    return frozenset(one.path for one in intact if one.path not in extreme) if metrics else frozenset()


def _is_a_save_of_many(entry: Entry) -> bool:
    """Tell whether a name says which save of a run it is; a bare number may be that of a fold."""
    fields = entry.fields
    is_counted = fields.number is None and (fields.epoch is not None or fields.step is not None)
    return is_counted and is_named_best(entry.name)


def _extremes(entries: Sequence[Entry], metric: str) -> list[Entry]:
    values = {one.path: one.fields.metrics[metric] for one in entries}
    known = [value for value in values.values() if math.isfinite(value)]
    ends = {min(known), max(known)} if known else set()
    return [one for one in entries if values[one.path] in ends or not math.isfinite(values[one.path])]
