"""Why one checkpoint stays or goes: what each rule says of it, its place, and what protects it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ckpttool.core.errors import UsageError
from ckpttool.core.result import document_of
from ckpttool.runs.members.entry import Entry
from ckpttool.runs.members.order import Group
from ckpttool.runs.members.saves import parts_of
from ckpttool.runs.pruning.planning import PrunePlan
from ckpttool.runs.retention.plan import GroupPlan, fault_of, history_of
from ckpttool.runs.retention.rules import RULES, History, Policy, metric_lack, ordinal, rank_by_metric
from ckpttool.storage import fs


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a checkpoint stays or goes.

    Attributes:
        entry: The checkpoint.
        stays: Whether it stays.
        slims: Whether it stays without its training state.
        reasons: All that speaks for it, though it may go all the same.
        against: What every rule says that doesn't keep it.
        place: Its place in its series: ``7th newest of 12``, and its rank by the policy's metric.
        key: The key of its series.
        asked: The path that was asked for, where it is a part of the checkpoint, or a link to it.
    """

    entry: Entry
    stays: bool
    reasons: tuple[str, ...]
    against: tuple[str, ...]
    place: tuple[str, ...] = ()
    key: str = ""
    asked: str | None = None
    slims: bool = False

    def document(self) -> dict[str, Any]:
        keys = ("path", "group", "stays", "slims", "place", "reasons", "against")
        return document_of(self, *keys, names={"path": "entry.path", "group": "key"})


def explain(planned: PrunePlan, path: str) -> Explanation:
    """Return why a checkpoint stays or goes."""
    group, group_plan, save, entry = _find(planned, path)
    kept = next((kept for kept in group_plan.keep if kept.entry is entry), None)
    history = history_of(group, planned.protections, planned.now)
    reasons: list[str] = []
    if group_plan.skipped is not None:
        reasons.append(f"its series is left alone: {group_plan.skipped}")
    for reason in kept.reasons if kept is not None else ():
        holder = planned.protections.holders.get((entry.path, reason))
        reasons.append(reason if holder is None else f"{reason} ({holder})")
    return Explanation(
        entry,
        stays=kept is not None,
        reasons=tuple(reasons),
        against=tuple(_against(planned, group_plan, save, entry, history)),
        place=tuple(_place(group_plan.policy, save, history)),
        key=group_plan.key,
        asked=None if fs.normpath(path) == fs.normpath(entry.path) else path,
        slims=entry in group_plan.slim,
    )


def _find(planned: PrunePlan, path: str) -> tuple[Group, GroupPlan, Entry, Entry]:
    """Return the checkpoint at a path, or the innermost one that it is a part of, after its save."""
    saves = {
        part.path: (group, save)
        for group in planned.groups
        for save in group.entries
        for part in parts_of(save)
    }
    known: dict[str, tuple[Group, GroupPlan, Entry, Entry]] = {}
    for group_plan in planned.plan.groups:
        for entry in (*(kept.entry for kept in group_plan.keep), *group_plan.remove):
            group, save = saves[entry.path]
            for name in {entry.name, *entry.unit.members}:
                known[fs.realpath(os.path.join(entry.directory, name))] = group, group_plan, save, entry
    real = fs.realpath(path)
    while real not in known:
        above = fs.dirname(real)
        if above == real:
            raise UsageError(f"{path} is none of the checkpoints that were looked at")
        real = above
    return known[real]


def _against(
    planned: PrunePlan, group_plan: GroupPlan, save: Entry, entry: Entry, history: History
) -> Iterator[str]:
    if planned.plan.removes_failed and group_plan.failed is not None:
        yield f"its series failed: {group_plan.failed}"
        return
    if group_plan.rank is not None and group_plan.rank.goes:
        yield group_plan.rank.reason
        return
    fault = fault_of(save, planned.protections)
    if fault is not None:
        yield f"no rule counts it: {fault}"
        if entry in group_plan.remove:
            yield "--incomplete remove: the newest intact one is newer"
        return
    policy = group_plan.policy
    if policy is None:
        return
    for name, rule in RULES.items():
        if name in policy.rules and rule.keep is not None and rule.against is not None:
            kept_by_rule = {kept.path for kept, _ in rule.keep(policy, history)}
            if save.path not in kept_by_rule or (rule.alters and entry in group_plan.slim):
                yield rule.against(policy, history, save)
    if entry.path in group_plan.whole:
        yield f"it stays whole: {group_plan.whole[entry.path]}"
    if entry.path in group_plan.unfitting:
        yield group_plan.unfitting[entry.path]


def _place(policy: Policy | None, entry: Entry, history: History) -> Iterator[str]:
    if entry not in history.intact:
        return
    place, count = history.intact.index(entry) + 1, len(history.intact)
    yield "the only intact one" if count == 1 else f"{ordinal(place, 'newest')} of {count:,}"
    if policy is not None and policy.metric is not None and metric_lack(entry, policy.metric) is None:
        order = rank_by_metric(policy, history)
        rank = ordinal(order.index(entry) + 1, "best")
        yield f"{rank} of {len(order):,} by {policy.metric} ({entry.recorded_metric(policy.metric):.6g})"
