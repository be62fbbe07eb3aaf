"""Series that were written together: ``model_3.pt``, ``optim_3.pt`` and ``ema_3.pt`` are one epoch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from itertools import pairwise

from ckpttool.series.members.entry import Entry
from ckpttool.series.members.order import AVERAGED, CONTRADICTION_SECONDS, Group, is_flat
from ckpttool.series.members.series_doubts import NOT_COUNTED, doubt_of
from ckpttool.series.retention.plan import GroupPlan, RetentionPlan
from ckpttool.series.retention.policy import Policy
from ckpttool.series.retention.rules import metric_value

Place = tuple[float | str | None, ...]
Places = frozenset[Place]


def reasons_to_stay(made: RetentionPlan, faults: Collection[str] = ()) -> dict[str, list[str]]:
    """Return why some of what would go stays, by path: what it belongs with stays in a sibling series.

    Of a run that failed nothing stays for that that is faulty.
    """
    reasons: dict[str, list[str]] = {}
    for members, family in _families([_entries(one) for one in made.groups]):
        keepers = _keepers([(number, made.groups[number]) for number in family])
        for number in members:
            one = made.groups[number]
            goes_whole = made.removes_failed and one.failed is not None
            for entry in one.remove:
                if goes_whole and (not entry.is_sound or entry.path in faults):
                    continue
                kept = keepers.get(entry.fields.position, ())
                if other := next((other for at, other in kept if at != number), None):
                    reasons[entry.path] = [f"belongs with {other.name}"]
    return reasons


def _keepers(planned: Sequence[tuple[int, GroupPlan]]) -> Mapping[Place, list[tuple[int, Entry]]]:
    """Return two of the series that keep a position, and what they keep there."""
    found: dict[Place, list[tuple[int, Entry]]] = defaultdict(list)
    for number, one in planned:
        for kept in one.keep:
            place = found[kept.entry.fields.position]
            if kept.entry.is_sound and len(place) < 2 and not any(at == number for at, _ in place):
                place.append((number, kept.entry))
    return found


def doubts_of(groups: Sequence[Group], told: Collection[str] = ()) -> dict[str, str]:
    """Return why series may be none, by their keys; what goes with one that counts saves counts them, too."""
    found = {one.key: why for one in groups if (why := doubt_of(one, told)) is not None}
    uncounted = {key for key, why in found.items() if why == NOT_COUNTED}
    for members, family in _families([one.entries for one in groups]) if uncounted else ():
        counting = [groups[number] for number in family if groups[number].key not in found]
        for one in (groups[number] for number in members if groups[number].key in uncounted):
            if any(_goes_with(one, other) for other in counting):
                uncounted.remove(one.key)
    return {key: why for key, why in found.items() if why != NOT_COUNTED or key in uncounted}


def _goes_with(group: Group, other: Group) -> bool:
    """Tell whether what has one number was written together: nothing of a later number came first.

    Times of a copy tell nothing. An optimizer's state and an average of weights go with a model all the same;
    weights may be another model's.
    """
    times: dict[Place, list[int]] = defaultdict(list)
    for entry in (*group.entries, *other.entries):
        times[entry.fields.position].append(entry.modified_ns)
    pairs = sorted((place for place, both in times.items() if len(both) > 1), key=_sort_key)
    moment = CONTRADICTION_SECONDS * 10**9
    is_in_turn = all(max(times[one]) <= min(times[two]) + moment for one, two in pairwise(pairs))
    return is_in_turn and (
        all(map(_is_beside, group.entries)) or not is_flat([*group.entries, *other.entries])
    )


def _is_beside(entry: Entry) -> bool:
    return not entry.has_weights or AVERAGED.search(entry.name) is not None


def metric_followers(chosen: Sequence[tuple[Group, Policy | None]]) -> frozenset[str]:
    """Return the paths of those that go by the metric of what belongs with them, having none of their own.

    These hold no weights, such as an optimizer, or the average of those that were measured.
    """
    metrics = {policy.metric for _, policy in chosen if policy is not None and policy.metric is not None}
    found: set[str] = set()
    for members, family in _families([one.entries for one, _ in chosen]) if metrics else ():
        known = {
            metric: _measured_places([(at, chosen[at][0]) for at in family], metric) for metric in metrics
        }
        for number in members:
            one, policy = chosen[number]
            metric = None if policy is None else policy.metric
            for entry in () if metric is None else one.entries:
                others = known[metric].get(entry.fields.position, ()) if metric is not None else ()
                if _has_none(entry, metric or "") and any(at != number for at in others):
                    found.add(entry.path)
    return frozenset(found)


def _has_none(entry: Entry, metric: str) -> bool:
    return _is_beside(entry) and entry.is_sound and metric_value(entry, metric) is None


def _measured_places(series: Sequence[tuple[int, Group]], metric: str) -> Mapping[Place, set[int]]:
    """Return two of the series that have a metric at a position, by the position."""
    found: dict[Place, set[int]] = defaultdict(set)
    for number, one in series:
        for entry in one.entries:
            place = found[entry.fields.position]
            if entry.is_sound and len(place) < 2 and metric_value(entry, metric) is not None:
                place.add(number)
    return found


def saved_together(groups: Sequence[Group]) -> dict[str, Hashable]:
    """Return what is equal for those with the same numbers in series that belong together, by path."""
    return {
        entry.path: (family[0], entry.fields.position)
        for members, family in _families([one.entries for one in groups])
        for number in members
        for entry in groups[number].entries
        if any(_numbers(entry))
    }


def add_failed_siblings(groups: Sequence[Group], failed: Mapping[str, str]) -> dict[str, str]:
    """Return series that failed, and those that were written together with one: they are the same run."""
    told = dict(failed)
    for members, family in _families([one.entries for one in groups]) if failed else ():
        first = next((groups[number].key for number in family if groups[number].key in failed), None)
        for number in members if first is not None else ():
            told.setdefault(groups[number].key, f"belongs with {first}, which failed")
    return told


def _entries(one: GroupPlan) -> list[Entry]:
    return [*(kept.entry for kept in one.keep), *one.remove]


def _families(series: Sequence[Sequence[Entry]]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield, by their places in a list, series that carry the same numbers, and all that are alike to them.

    Alike are series in one directory with the same newest numbers, of which one has all that the other has:
    it may have lost old ones.
    """
    kinds: dict[tuple[str, Place], dict[Places, list[int]]] = defaultdict(dict)
    for number, entries in enumerate(series):
        places = frozenset(entry.fields.position for entry in entries if any(_numbers(entry)))
        directories = {entry.directory for entry in entries}
        if len(places) > 1 and len(directories) == 1:
            known = kinds[directories.pop(), _newest(places)]
            known.setdefault(places, []).append(number)
    for found in kinds.values():
        alike = _nested_sets(found)
        for places, members in found.items():
            family = sorted([*members, *(number for other in alike[places] for number in found[other])])
            if len(family) > 1:
                yield members, family


def _nested_sets(found: Collection[Places]) -> Mapping[Places, list[Places]]:
    """Return the sets that contain, or are contained in, each set, of those that have its rarest place."""
    holders: dict[Place, list[Places]] = defaultdict(list)
    for places in found:
        for place in places:
            holders[place].append(places)
    alike: dict[Places, list[Places]] = {places: [] for places in found}
    for places in found:
        rarest = min((holders[place] for place in places), key=len)
        for other in rarest:
            if places < other:
                alike[places].append(other)
                alike[other].append(places)
    return alike


def _numbers(entry: Entry) -> Iterator[bool]:
    fields = entry.fields
    return (value is not None for value in (fields.epoch, fields.step, fields.number))


def _newest(places: Places) -> Place:
    return max(places, key=_sort_key)


def _sort_key(place: Place) -> tuple[tuple[bool, str], ...]:
    return tuple((value is not None, str(value).zfill(20)) for value in place)
