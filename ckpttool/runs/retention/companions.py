"""Series that were written together: ``model_3.pt``, ``optim_3.pt`` and ``ema_3.pt`` are one epoch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from itertools import pairwise

from ckpttool.runs.members.entry import Entry
from ckpttool.runs.members.order import AVERAGED, CONTRADICTION_SECONDS, Group, is_flat
from ckpttool.runs.members.series_doubts import NOT_COUNTED, doubt_of
from ckpttool.runs.retention.plan import GroupPlan, RetentionPlan
from ckpttool.runs.retention.rules import Policy

Position = tuple[float | str | None, ...]
"""The numbers in a checkpoint's name."""
Positions = frozenset[Position]


def reasons_to_stay(plan: RetentionPlan, faults: Collection[str] = ()) -> dict[str, list[str]]:
    """Return why some of what would go stays, by path: what it belongs with stays in a sibling series.

    Of a run that failed nothing stays for that that is faulty.
    """
    reasons: dict[str, list[str]] = {}
    series = [[*(kept.entry for kept in group.keep), *group.remove] for group in plan.groups]
    for members, family in _families(series):
        keepers = _keepers([(number, plan.groups[number]) for number in family])
        for number in members:
            group = plan.groups[number]
            goes_whole = plan.removes_failed and group.failed is not None
            for entry in group.remove:
                if goes_whole and (not entry.is_sound or entry.path in faults):
                    continue
                kept = keepers.get(entry.fields.position, ())
                if other := next((other for holder, other in kept if holder != number), None):
                    reasons[entry.path] = [f"belongs with {other.name}"]
    return reasons


def _keepers(planned: Sequence[tuple[int, GroupPlan]]) -> Mapping[Position, list[tuple[int, Entry]]]:
    """Return two of the series that keep a position, and what they keep there."""
    keepers: dict[Position, list[tuple[int, Entry]]] = defaultdict(list)
    for number, group in planned:
        for kept in group.keep:
            known = keepers[kept.entry.fields.position]
            if kept.entry.is_sound and len(known) < 2 and all(holder != number for holder, _ in known):
                known.append((number, kept.entry))
    return keepers


def doubts_of(groups: Sequence[Group], declared: Collection[str] = ()) -> dict[str, str]:
    """Return why series may be none, by their keys; what goes with one that counts saves counts them, too."""
    doubts = {group.key: why for group in groups if (why := doubt_of(group, declared)) is not None}
    uncounted = {key for key, why in doubts.items() if why == NOT_COUNTED}
    for members, family in _families([group.entries for group in groups]) if uncounted else ():
        counting = [groups[number] for number in family if groups[number].key not in doubts]
        for group in (groups[number] for number in members if groups[number].key in uncounted):
            if any(_goes_with(group, other) for other in counting):
                uncounted.remove(group.key)
    return {key: why for key, why in doubts.items() if why != NOT_COUNTED or key in uncounted}


def _goes_with(group: Group, other: Group) -> bool:
    """Tell whether what has one number was written together: nothing of a later number came first.

    Times of a copy tell nothing. An optimizer's state and an average of weights go with a model all the same;
    weights may be another model's.
    """
    times: dict[Position, list[int]] = defaultdict(list)
    for entry in (*group.entries, *other.entries):
        times[entry.fields.position].append(entry.modified_ns)
    shared = sorted((position for position, both in times.items() if len(both) > 1), key=_sort_key)
    moment = CONTRADICTION_SECONDS * 10**9
    is_in_turn = all(max(times[one]) <= min(times[two]) + moment for one, two in pairwise(shared))
    return is_in_turn and (
        all(map(_accompanies_model, group.entries)) or not is_flat([*group.entries, *other.entries])
    )


def _accompanies_model(entry: Entry) -> bool:
    """Tell whether a checkpoint is an optimizer's state, or an average of weights."""
    return not entry.has_weights or AVERAGED.search(entry.name) is not None


def metric_followers(chosen: Sequence[tuple[Group, Policy | None]]) -> frozenset[str]:
    """Return the paths of those that go by the metric of what belongs with them, having none of their own.

    These hold no weights, such as an optimizer, or the average of those that were measured.
    """
    metrics = {policy.metric for _, policy in chosen if policy is not None and policy.metric is not None}
    followers: set[str] = set()
    for members, family in _families([group.entries for group, _ in chosen]) if metrics else ():
        series = [(number, chosen[number][0]) for number in family]
        measured = {metric: _measured_positions(series, metric) for metric in metrics}
        for number in members:
            group, policy = chosen[number]
            if policy is None or policy.metric is None:
                continue
            for entry in group.entries:
                others = measured[policy.metric].get(entry.fields.position, ())
                is_unmeasured = entry.is_sound and entry.recorded_metric(policy.metric) is None
                if is_unmeasured and _accompanies_model(entry) and any(other != number for other in others):
                    followers.add(entry.path)
    return frozenset(followers)


def _measured_positions(series: Sequence[tuple[int, Group]], metric: str) -> Mapping[Position, set[int]]:
    """Return two of the series that have a metric at a position, by the position."""
    measured: dict[Position, set[int]] = defaultdict(set)
    for number, group in series:
        for entry in group.entries:
            known = measured[entry.fields.position]
            if entry.is_sound and len(known) < 2 and entry.recorded_metric(metric) is not None:
                known.add(number)
    return measured


def saved_together(groups: Sequence[Group]) -> dict[str, Hashable]:
    """Return what is equal for those with the same numbers in series that belong together, by path."""
    return {
        entry.path: (family[0], entry.fields.position)
        for members, family in _families([group.entries for group in groups])
        for number in members
        for entry in groups[number].entries
        if _is_numbered(entry)
    }


def add_failed_siblings(groups: Sequence[Group], failed: Mapping[str, str]) -> dict[str, str]:
    """Return series that failed, and those that were written together with one: they are the same run."""
    reasons = dict(failed)
    for members, family in _families([group.entries for group in groups]) if failed else ():
        first = next((groups[number].key for number in family if groups[number].key in failed), None)
        for number in members if first is not None else ():
            reasons.setdefault(groups[number].key, f"belongs with {first}, which failed")
    return reasons


def _families(series: Sequence[Sequence[Entry]]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield, by their places in a list, series that carry the same numbers, and all that are alike to them.

    Alike are series in one directory with the same newest numbers, of which one has all that the other has:
    it may have lost old ones.
    """
    kinds: dict[tuple[str, Position], dict[Positions, list[int]]] = defaultdict(dict)
    for number, entries in enumerate(series):
        positions = frozenset(entry.fields.position for entry in entries if _is_numbered(entry))
        directories = {entry.directory for entry in entries}
        if len(positions) > 1 and len(directories) == 1:
            known = kinds[directories.pop(), max(positions, key=_sort_key)]
            known.setdefault(positions, []).append(number)
    for by_positions in kinds.values():
        nested = _nested_sets(by_positions)
        for positions, members in by_positions.items():
            others = (number for other in nested[positions] for number in by_positions[other])
            family = sorted([*members, *others])
            if len(family) > 1:
                yield members, family


def _nested_sets(sets: Collection[Positions]) -> Mapping[Positions, list[Positions]]:
    """Return the sets that contain, or are contained in, each set.

    A set that contains another has its rarest position, too: only these are compared.
    """
    holders: dict[Position, list[Positions]] = defaultdict(list)
    for positions in sets:
        for position in positions:
            holders[position].append(positions)
    nested: dict[Positions, list[Positions]] = {positions: [] for positions in sets}
    for positions in sets:
        for other in min((holders[position] for position in positions), key=len):
            if positions < other:
                nested[positions].append(other)
                nested[other].append(positions)
    return nested


def _is_numbered(entry: Entry) -> bool:
    fields = entry.fields
    return any(value is not None for value in (fields.epoch, fields.step, fields.number))


def _sort_key(position: Position) -> tuple[tuple[bool, str], ...]:
    return tuple((value is not None, str(value).zfill(20)) for value in position)
