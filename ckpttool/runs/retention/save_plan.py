"""The plan for saves of several parts: each stays or goes whole."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpttool.runs.members.entry import Entry
from ckpttool.runs.members.order import Group
from ckpttool.runs.members.saves import parts_of, series_of_saves
from ckpttool.runs.members.series_doubts import NOT_COUNTED, doubt_of
from ckpttool.runs.retention.plan import (
    GroupPlan,
    KeptEntry,
    Protections,
    RetentionPlan,
    fault_of,
    fields_by_path,
    plan,
)
from ckpttool.runs.retention.policies import Policies
from ckpttool.runs.retention.rules import Policy


def plan_saves(
    groups: Sequence[Group], policy: Policy | Policies, protections: Protections, *, now: float | None = None
) -> RetentionPlan:
    """Return what stays and what goes of some series, by what protects their checkpoints one by one."""
    saves = series_of_saves(groups)
    planned = plan(saves, policy, of_saves(saves, protections), now=now)
    by_part: dict[str, tuple[Entry, GroupPlan]] = {}
    for made in planned.groups:
        for entry in (*(kept.entry for kept in made.keep), *made.remove):
            by_part |= {part.path: (entry, made) for part in parts_of(entry)}
    return planned._replace(groups=tuple(_part_plan(group, by_part, protections) for group in groups))


def of_saves(saves: Sequence[Group], protections: Protections) -> Protections:
    """Return what protects saves: whatever protects one of their parts, or the series of one."""
    entries = [entry for group in saves for entry in group.entries]

    def first_of(known: Mapping[str, str]) -> dict[str, str]:
        found = (
            (one, next((known[part.path] for part in parts_of(one) if part.path in known), None))
            for one in entries
        )
        return {one.path: why for one, why in found if why is not None}

    def of_series(known: Mapping[str, str]) -> dict[str, str]:
        reasons: dict[str, str] = {}
        for group in saves if known else ():
            keys = dict.fromkeys(
                [group.key, *(part.group for one in group.entries for part in parts_of(one))]
            )
            why = next((known[key] for key in keys if key in known), None)
            if why is not None:
                reasons[group.key] = why
        return reasons

    texts: dict[str, Any] = {
        name: first_of(getattr(protections, name)) for name in fields_by_path(Protections)
    }
    return replace(
        protections,
        reasons={
            one.path: list(
                dict.fromkeys(why for part in parts_of(one) for why in protections.reasons.get(part.path, ()))
            )
            for one in entries
        },
        skipped=of_series(protections.skipped),
        holders={
            (one.path, why): protections.holders[part.path, why]
            for one in entries
            for part in parts_of(one)
            for why in protections.reasons.get(part.path, ())
            if (part.path, why) in protections.holders
        },
        **texts,
    )


def _part_plan(
    group: Group, by_part: Mapping[str, tuple[Entry, GroupPlan]], protections: Protections
) -> GroupPlan:
    """Return what becomes of a series of which each checkpoint may be a part of a save."""
    plans = {made.key: made for entry in group.entries for _, made in [by_part[entry.path]]}
    main = plans.get(group.key) or next(iter(plans.values()))
    if all(not entry.save for entry in group.entries):
        return main
    kept = {one.entry.path: one for made in plans.values() for one in made.keep}
    saves = {entry.path: by_part[entry.path][0] for entry in group.entries}
    newest_first = group.entries[::-1]
    texts: dict[str, Any] = {}
    for name in fields_by_path(GroupPlan):
        known = {path: text for made in plans.values() for path, text in getattr(made, name).items()}
        texts[name] = {path: known[save.path] for path, save in saves.items() if save.path in known}
    return replace(
        main,
        key=group.key,
        keep=tuple(
            one._replace(entry=entry, reasons=_reasons(entry, one, protections))
            for entry in newest_first
            if (one := kept.get(saves[entry.path].path)) is not None
        ),
        remove=tuple(entry for entry in newest_first if saves[entry.path].path not in kept),
        excess=main.excess if main.key == group.key else None,
        **texts,
    )


def _reasons(entry: Entry, kept: KeptEntry, protections: Protections) -> tuple[str, ...]:
    """Return why a part stays: what is true of its save, or of itself; else the part that it belongs with."""
    if not kept.reasons:  # the series is left alone
        return ()
    own: dict[str, set[str]] = {}
    for part in parts_of(kept.entry):
        own[part.path] = set(protections.reasons.get(part.path, ()))
        own[part.path] |= {why for why in (fault_of(part, protections),) if why is not None}
    mine = own.pop(entry.path, set())
    others = set().union(*own.values()) - mine
    reasons = [why for why in kept.reasons if why not in others]
    fault = fault_of(entry, protections)
    if fault is not None and fault not in reasons:
        reasons.append(fault)
    if reasons:
        return tuple(reasons)
    holder = next(
        part
        for part in parts_of(kept.entry)
        if part.path in own and own[part.path].intersection(kept.reasons)
    )
    return (f"belongs with {holder.name}",)


def doubts_of(groups: Sequence[Group], declared: Collection[str] = ()) -> dict[str, str]:
    """Return why series of saves may be none, by their keys; one that counts saves speaks for all parts."""
    doubts: dict[str, str] = {}
    for saves in groups:
        why = doubt_of(saves, declared)
        if why is not None and not (why == NOT_COUNTED and _is_counted_beside(saves, declared)):
            doubts[saves.key] = why
    return doubts


def _is_counted_beside(saves: Group, declared: Collection[str]) -> bool:
    """Tell whether other parts of the saves count them."""
    lines: dict[tuple[str, str], list[Entry]] = defaultdict(list)
    for part in (part for entry in saves.entries for part in entry.parts[1:]):
        lines[part.directory, part.fields.blank].append(part)
    return any(doubt_of(Group(saves.key, tuple(line)), declared) is None for line in lines.values())
