"""Series that were written together: ``model_3.pt``, ``optim_3.pt`` and ``ema_3.pt`` are one epoch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import product

from ckpttool.series.entry import Entry
from ckpttool.series.retention import GroupPlan, Plan

Place = tuple[float | str | None, ...]
Places = Mapping[Place, Entry]


def belonging(made: Plan) -> dict[str, list[str]]:
    """Return why some of what would go stays, by path: what it belongs with stays in a sibling series."""
    reasons: dict[str, list[str]] = {}
    for one, other in _siblings(made):
        kept = {kept.entry.fields.position: kept.entry for kept in one.keep if kept.entry.is_sound}
        for entry in other.remove:
            if entry.fields.position in kept and entry.path not in reasons:
                reasons[entry.path] = [f"belongs with {kept[entry.fields.position].name}"]
    return reasons


def _siblings(made: Plan) -> Iterator[tuple[GroupPlan, GroupPlan]]:
    """Yield pairs of series in one directory that carry the same numbers, both ways round."""
    places: dict[str, list[tuple[GroupPlan, Places]]] = defaultdict(list)
    for one in made.groups:
        entries = [*(kept.entry for kept in one.keep), *one.remove]
        numbered = {entry.fields.position: entry for entry in entries if any(_numbers(entry))}
        if len(numbered) > 1:
            places[entries[0].directory].append((one, numbered))
    for found in places.values():
        kept = {kept.entry.fields.position for one, _ in found for kept in one.keep}
        # Mostly all series keep the same: then there is nothing to compare.
        divided = [pair for pair in found if any(entry.fields.position in kept for entry in pair[0].remove)]
        for (one, numbers), (other, others) in product(found, divided):
            if one is not other and _are_alike(numbers, others):
                yield one, other


def _numbers(entry: Entry) -> Iterator[bool]:
    fields = entry.fields
    return (value is not None for value in (fields.epoch, fields.step, fields.number))


def _are_alike(one: Places, other: Places) -> bool:
    """Tell whether two series carry the same numbers, but for old ones that one of them has lost."""
    shared = one.keys() & other.keys()
    if len(shared) < 2 or len(shared) < min(len(one), len(other)):
        return False
    return _newest(one) == _newest(other)


def _newest(places: Places) -> Place:
    return max(places, key=lambda place: tuple((value is not None, str(value).zfill(20)) for value in place))
