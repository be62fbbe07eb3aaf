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
    metric_value,
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
    group, made, entry = _find(planned, path)
    stays = any(kept.entry is entry for kept in made.keep)
    said = next((kept.reasons for kept in made.keep if kept.entry is entry), ())
    history = history_of(group, planned.protections, planned.now)
    against = list(_against(planned, made, entry, history))
    reasons = [_add_holder(planned, entry, reason) for reason in said]
    if made.skipped is not None:
        reasons.insert(0, f"its series is left alone: {made.skipped}")
    place = tuple(_place(made.policy, entry, history))
    asked = None if os.path.normpath(path) == os.path.normpath(entry.path) else path
    return Explanation(entry, stays, tuple(reasons), tuple(against), place, group.key, asked)


def _find(planned: PrunePlan, path: str) -> tuple[Group, GroupPlan, Entry]:
    """Return the checkpoint at a path, or the innermost one that it is a part of."""
    known: dict[str, tuple[Group, GroupPlan, Entry]] = {}
    for group, made in zip(planned.groups, planned.plan.groups, strict=True):
        for entry in _entries(made):
            for place in _places(entry):
                known[place] = group, made, entry
    place = os.path.realpath(path)
    while place not in known:
        above = os.path.dirname(place)
        if above == place:
            raise UsageError(f"{path} is none of the checkpoints that were looked at")
        place = above
    return known[place]


def _places(entry: Entry) -> set[str]:
    names = {entry.name, *entry.unit.members}
    return {os.path.realpath(os.path.join(entry.directory, name)) for name in names}


def _entries(made: GroupPlan) -> Iterator[Entry]:
    yield from (kept.entry for kept in made.keep)
    yield from made.remove


def _goes_whole(planned: PrunePlan, made: GroupPlan) -> bool:
    return planned.plan.removes_failed and made.failed is not None


def _add_holder(planned: PrunePlan, entry: Entry, reason: str) -> str:
    holder = planned.protections.holders.get((entry.path, reason))
    return reason if holder is None else f"{reason} ({holder})"


def _place(policy: Policy | None, entry: Entry, history: History) -> Iterator[str]:
    if entry not in history.intact:
        return
    place, count = history.intact.index(entry) + 1, len(history.intact)
    yield "the only intact one" if count == 1 else f"{_ordinal(place, 'newest')} of {count:,}"
    if policy is not None and policy.metric is not None and metric_lack(entry, policy.metric) is None:
        order = rank_by_metric(policy, history)
        rank = _ordinal(order.index(entry) + 1, "best")
        yield f"{rank} of {len(order):,} by {policy.metric} ({metric_value(entry, policy.metric):.6g})"


def _ordinal(place: int, superlative: str) -> str:
    """Return ``newest``, ``2nd newest``, ``11th newest``."""
    if place == 1:
        return superlative
    ending = "th" if place % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(place % 10, "th")
    return f"{place:,}{ending} {superlative}"


def _against(planned: PrunePlan, made: GroupPlan, entry: Entry, history: History) -> Iterator[str]:
    if _goes_whole(planned, made):
        yield f"its series failed: {made.failed}"
        return
    fault = fault_of(entry, planned.protections)
    if fault is not None:
        yield f"no rule counts it: {fault}"
        if entry in made.remove:
            yield "--incomplete remove: the newest intact one is newer"
        return
    policy = made.policy
    if policy is None:
        return
    for name in RULES:
        if name in policy.rules and name in AGAINST and not _keeps(name, policy, history, entry):
            yield AGAINST[name](policy, history, entry)
    if entry.path in made.unfitting:
        yield made.unfitting[entry.path]


def _keeps(name: str, policy: Policy, history: History, entry: Entry) -> bool:
    return any(kept.path == entry.path for kept, _ in RULES[name](policy, history))


def _not_last(policy: Policy, history: History, entry: Entry) -> str:
    place = history.intact.index(entry) + 1
    return f"{_ordinal(place, 'newest')}, not one of the last {policy.keep_last:,}"


def _not_best(policy: Policy, history: History, entry: Entry) -> str:
    if metric_lack(entry, policy.metric or "") is not None:
        return f"no {policy.metric} of its own: it goes by that of what belongs with it"
    place = rank_by_metric(policy, history).index(entry) + 1
    value = metric_value(entry, policy.metric or "")
    told = f"{_ordinal(place, 'best')} by {policy.metric} ({value:.6g})"
    return f"{told}, not one of the best {policy.keep_best:,}"


def _not_first(count: str, policy: Policy, history: History, entry: Entry) -> str:
    each = getattr(policy, f"keep_every_{count}s")
    place = attrgetter(count)
    stretch = int(place(entry) // each)
    first = stretches(each, place, history)[stretch]
    told = f"{first.name} is the first at or after {count} {number(stretch * each)}"
    return f"{told}, not this ({number(place(entry))})"


def _not_newest(rule: str, policy: Policy, history: History, entry: Entry) -> str:
    word, count = rule.removeprefix("keep_"), getattr(policy, rule)
    when = next(dated.when for dated in history.by_time if dated.entry is entry)
    told = when.strftime(PERIODS[rule].format)
    found = list(newest_of_periods(rule, history))
    if told not in {period for period, _ in found[:count]}:
        return f"{word}: {told} is not one of the newest {count:,}"
    newest = next(one for period, one in found if period == told)
    return f"{word}: {newest.name} is the newest of {told}"


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
