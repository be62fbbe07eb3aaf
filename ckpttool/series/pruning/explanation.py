"""Why one checkpoint stays or goes: what each rule says of it, its place, and what protects it.

``AGAINST`` is the table, by the policy's attribute: what a rule that doesn't keep a checkpoint says of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

from ckpttool.amounts import duration
from ckpttool.errors import UsageError
from ckpttool.series.members.entry import Entry
from ckpttool.series.members.order import Group
from ckpttool.series.pruning.planning import PrunePlan
from ckpttool.series.retention.dates import PERIODS, save_time
from ckpttool.series.retention.plan import GroupPlan, fault_of, history_of
from ckpttool.series.retention.policy import Policy
from ckpttool.series.retention.rules import (
    RULES,
    History,
    metric_lack,
    newest_of_periods,
    number,
    rank_by_metric,
    stretches,
)


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a checkpoint stays or goes.

    Attributes:
        entry: The checkpoint.
        stays: Whether it stays.
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


def explain(planned: PrunePlan, path: str) -> Explanation:
    """Return why a checkpoint stays or goes."""
    group, group_plan, entry = _find(planned, path)
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
        against=tuple(_against(planned, group_plan, entry, history)),
        place=tuple(_place(group_plan.policy, entry, history)),
        key=group.key,
        asked=None if os.path.normpath(path) == os.path.normpath(entry.path) else path,
    )


def _find(planned: PrunePlan, path: str) -> tuple[Group, GroupPlan, Entry]:
    """Return the checkpoint at a path, or the innermost one that it is a part of."""
    known: dict[str, tuple[Group, GroupPlan, Entry]] = {}
    for group, group_plan in zip(planned.groups, planned.plan.groups, strict=True):
        for entry in (*(kept.entry for kept in group_plan.keep), *group_plan.remove):
            for name in {entry.name, *entry.unit.members}:
                known[os.path.realpath(os.path.join(entry.directory, name))] = group, group_plan, entry
    real = os.path.realpath(path)
    while real not in known:
        above = os.path.dirname(real)
        if above == real:
            raise UsageError(f"{path} is none of the checkpoints that were looked at")
        real = above
    return known[real]


def _against(planned: PrunePlan, group_plan: GroupPlan, entry: Entry, history: History) -> Iterator[str]:
    if planned.plan.removes_failed and group_plan.failed is not None:
        yield f"its series failed: {group_plan.failed}"
        return
    fault = fault_of(entry, planned.protections)
    if fault is not None:
        yield f"no rule counts it: {fault}"
        if entry in group_plan.remove:
            yield "--incomplete remove: the newest intact one is newer"
        return
    policy = group_plan.policy
    if policy is None:
        return
    for name in RULES:
        if name in policy.rules and name in AGAINST:
            kept_by_rule = {kept.path for kept, _ in RULES[name](policy, history)}
            if entry.path not in kept_by_rule:
                yield AGAINST[name](policy, history, entry)
    if entry.path in group_plan.unfitting:
        yield group_plan.unfitting[entry.path]


def _place(policy: Policy | None, entry: Entry, history: History) -> Iterator[str]:
    if entry not in history.intact:
        return
    place, count = history.intact.index(entry) + 1, len(history.intact)
    yield "the only intact one" if count == 1 else f"{_ordinal(place, 'newest')} of {count:,}"
    if policy is not None and policy.metric is not None and metric_lack(entry, policy.metric) is None:
        order = rank_by_metric(policy, history)
        rank = _ordinal(order.index(entry) + 1, "best")
        yield f"{rank} of {len(order):,} by {policy.metric} ({entry.recorded_metric(policy.metric):.6g})"


def _ordinal(place: int, superlative: str) -> str:
    """Return ``newest``, ``2nd newest``, ``11th newest``."""
    if place == 1:
        return superlative
    ending = "th" if place % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(place % 10, "th")
    return f"{place:,}{ending} {superlative}"


def _not_last(policy: Policy, history: History, entry: Entry) -> str:
    place = history.intact.index(entry) + 1
    return f"{_ordinal(place, 'newest')}, not one of the last {policy.keep_last:,}"


def _not_best(policy: Policy, history: History, entry: Entry) -> str:
    if metric_lack(entry, policy.metric or "") is not None:
        return f"no {policy.metric} of its own: it goes by that of what belongs with it"
    place = rank_by_metric(policy, history).index(entry) + 1
    value = entry.recorded_metric(policy.metric or "")
    rank = f"{_ordinal(place, 'best')} by {policy.metric} ({value:.6g})"
    return f"{rank}, not one of the best {policy.keep_best:,}"


def _not_first(count: str, policy: Policy, history: History, entry: Entry) -> str:
    each = getattr(policy, f"keep_every_{count}s")
    place = attrgetter(count)
    stretch = int(place(entry) // each)
    first = stretches(each, place, history)[stretch]
    text = f"{first.name} is the first at or after {count} {number(stretch * each)}"
    return f"{text}, not this ({number(place(entry))})"


def _not_newest(rule: str, policy: Policy, history: History, entry: Entry) -> str:
    word, count = rule.removeprefix("keep_"), getattr(policy, rule)
    when = next(dated.when for dated in history.by_time if dated.entry is entry)
    period = when.strftime(PERIODS[rule].format)
    periods = list(newest_of_periods(rule, history))
    if period not in {text for text, _ in periods[:count]}:
        return f"{word}: {period} is not one of the newest {count:,}"
    newest = next(entry for text, entry in periods if text == period)
    return f"{word}: {newest.name} is the newest of {period}"


def _not_within(policy: Policy, history: History, entry: Entry) -> str:
    span, since = policy.keep_within or 0, history.dated[0].seconds
    return f"{duration(int(since - save_time(entry)))} older than the newest, not within {duration(span)}"


def _not_younger(policy: Policy, history: History, entry: Entry) -> str:
    age = int((history.now or 0) - save_time(entry))
    return f"{duration(age)} old, not younger than {duration(policy.older_than or 0)}"


def _not_named(policy: Policy, history: History, entry: Entry) -> str:
    return f"its name is not {' or '.join(policy.keep_names)}"


AGAINST: Mapping[str, Callable[[Policy, History, Entry], str]] = {
    "keep_last": _not_last,
    "keep_best": _not_best,
    "keep_every_steps": partial(_not_first, "step"),
    "keep_every_epochs": partial(_not_first, "epoch"),
    **{name: partial(_not_newest, name) for name in PERIODS},
    "keep_within": _not_within,
    "older_than": _not_younger,
    "keep_names": _not_named,
}
