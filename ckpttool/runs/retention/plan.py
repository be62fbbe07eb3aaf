"""Plans: the checkpoints of each series that a policy keeps or removes, with reasons.

Pure: no file is read or changed here. A checkpoint that any rule keeps is kept; a protected one is kept
regardless of rules. A save of several parts is kept or removed whole.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any, NamedTuple

from ckpttool.core.errors import UsageError
from ckpttool.core.result import document_of
from ckpttool.core.text import counted, file_size, size
from ckpttool.runs.entry import Entry
from ckpttool.runs.reasons import Code, Reason
from ckpttool.runs.retention.directory_rules import (
    Draft,
    Excess,
    RunRank,
    excess,
    rank_runs,
    reasons_from_outside,
    removals_for_limits,
    require_metrics,
    total_limit,
)
from ckpttool.runs.retention.request import Policies
from ckpttool.runs.retention.rules import RULES, History, Policy, newest_whole
from ckpttool.runs.saves import parts_of, series_of_saves
from ckpttool.runs.series import Group, newest_by_other_counts, order_entries

NO_RULE = "no rule in the configuration matches it"
NEWEST = Reason(Code.NEWEST)
NEWEST_UNREAD = Reason(Code.NEWEST, "newest (not verified: nothing is removed)")
FINITE = "newest intact and finite one of a failed run"


def _by_path() -> Any:
    """Return a dataclass field that maps paths of checkpoints to a text."""
    return field(default_factory=dict, metadata={"is_by_path": True})


def fields_by_path(record: type) -> list[str]:
    """Return the names of a record's fields that map paths of checkpoints to a text."""
    return [one.name for one in fields(record) if "is_by_path" in one.metadata]


@dataclass(frozen=True, slots=True)
class Protections:
    """Facts that override every rule.

    Attributes:
        reasons: Reasons to keep checkpoints, by path.
        skipped: Why a whole series is left alone, by its key.
        doubts: Why a series may not be one, by its key: it is left alone if the plan would change any of it.
        faults: Faults that full reads found, by path.
        failed: Why a whole series failed, by its key.
        removes_failed: Whether failed series are removed, except checkpoints that a rule or a reason keeps.
        finite: Path of the newest intact, finite checkpoint of each failed series, by its key; it is kept.
        unslimmable: Why a checkpoint can't be slimmed, by path.
        holders: The file that a reason comes from, by the checkpoint's path and the reason.
        root: Directory of the survey.
    """

    reasons: Mapping[str, Sequence[str]] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    faults: Mapping[str, str] = _by_path()
    doubts: Mapping[str, str] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    removes_failed: bool = False
    finite: Mapping[str, str] = field(default_factory=dict)
    unslimmable: Mapping[str, str] = _by_path()
    holders: Mapping[tuple[str, str], str] = field(default_factory=dict)
    root: str = os.curdir


class KeptEntry(NamedTuple):
    """Checkpoint to keep, with the reasons.

    Attributes:
        slims: Whether it is slimmed; for a part, whether its save is.
    """

    entry: Entry
    reasons: tuple[str, ...]
    slims: bool = False

    def document(self) -> dict[str, Any]:
        return document_of(
            self, "path", "reasons", "safety", names={"path": "entry.path", "safety": "entry.safety"}
        )


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Plan of one series, the newest first.

    Attributes:
        key: The key of the series.
        keep: Checkpoints to keep.
        remove: Checkpoints to remove.
        skipped: Why it is left alone.
        policy: Its policy; None if no rule of the configuration is for it.
        failed: Why it is a failed run, if the caller looks for failed runs.
        rank: The rank of its run, if its policy ranks runs.
        excess: Excess of the kept checkpoints over the limit of size.
        over_limit: Limit that has no room for a checkpoint, by path; other rules may still keep it.
        whole: Why a checkpoint isn't slimmed, though it is old enough, by path.
    """

    key: str
    keep: tuple[KeptEntry, ...]
    remove: tuple[Entry, ...] = ()
    skipped: str | None = None
    policy: Policy | None = None
    failed: str | None = None
    rank: RunRank | None = None
    excess: Excess | None = None
    over_limit: Mapping[str, str] = _by_path()
    whole: Mapping[str, str] = _by_path()

    @property
    def slim(self) -> tuple[Entry, ...]:
        """Return the checkpoints to slim; parts of saves without training state are left out."""
        kept_slim = (kept.entry for kept in self.keep if kept.slims)
        return tuple(entry for entry in kept_slim if entry.has_weights and entry.state.nbytes)

    def declined(self) -> GroupPlan:
        """Return the plan without its changes, after the user declined it."""
        kept = (kept._replace(slims=False) for kept in self.keep)
        declined = (KeptEntry(entry, ("declined",)) for entry in self.remove)
        return replace(self, keep=(*kept, *declined), remove=())

    def with_whole(self, failed: Mapping[str, str]) -> GroupPlan:
        """Return the plan in which some checkpoints are left whole; ``failed`` has reasons by path."""
        keep = (kept._replace(slims=kept.slims and kept.entry.path not in failed) for kept in self.keep)
        whole = {one.path: failed[one.path] for one in self.slim if one.path in failed}
        return replace(self, keep=tuple(keep), whole={**self.whole, **whole})

    def slim_bytes(self, entry: Entry) -> int:
        """Return an estimate of the bytes that slimming a checkpoint frees."""
        has_dtype = self.policy is not None and self.policy.dtype is not None
        return entry.state.nbytes + (entry.state.cast_bytes if has_dtype else 0)

    def document(self) -> dict[str, Any]:
        names = {"policy": "policy.rules", "run": "rank.reason"}
        return {
            **document_of(self, "key", "keep"),
            "remove": [
                {
                    "path": entry.path,
                    "bytes": entry.contents.nbytes,
                    "unfitting": self.over_limit.get(entry.path),
                    **document_of(entry, "safety", "strangers", names={"strangers": "foreign_files"}),
                }
                for entry in self.remove
            ],
            "slim": [{"path": entry.path, "freed_bytes": self.slim_bytes(entry)} for entry in self.slim],
            "whole": [{"path": path, "reason": reason} for path, reason in self.whole.items()],
            **document_of(self, "skipped", "policy", "failed", "run", names=names),
            "excess": None if self.excess is None else str(self.excess),
            "excess_bytes": 0 if self.excess is None else self.excess.nbytes,
        }


class RetentionPlan(NamedTuple):
    """Plan of all series.

    Attributes:
        policies: Policies of the plan.
        groups: Plan of each series.
        removes_failed: Whether failed series are removed.
        excess: Excess of all kept checkpoints over ``max_total_size``, at most one.
    """

    policies: Policies
    groups: tuple[GroupPlan, ...]
    removes_failed: bool = False
    excess: tuple[Excess, ...] = ()

    @property
    def policy(self) -> Policy | None:
        """Return the default policy; None if there is none."""
        return self.policies.default

    @property
    def rules(self) -> dict[str, Any]:
        """Return the rules of the default policy."""
        return {} if self.policy is None else self.policy.rules

    @property
    def removals(self) -> tuple[Entry, ...]:
        """Return all checkpoints to remove."""
        return tuple(entry for group in self.groups for entry in group.remove)

    @property
    def slimmed(self) -> tuple[Entry, ...]:
        """Return all checkpoints to slim."""
        return tuple(entry for group in self.groups for entry in group.slim)

    @property
    def changed(self) -> tuple[Entry, ...]:
        """Return the checkpoints to remove or slim."""
        return (*self.removals, *self.slimmed)

    @property
    def freed_bytes(self) -> int:
        """Return the bytes freed: of files that lose all their names, and an estimate for slimming."""
        return freed_bytes(self.removals) + self.slim_bytes

    @property
    def slim_bytes(self) -> int:
        """Return an estimate of the bytes that slimming frees."""
        return sum(group.slim_bytes(entry) for group in self.groups for entry in group.slim)

    @property
    def is_estimate(self) -> bool:
        """Return whether the freed bytes are an estimate, as files are written anew."""
        return any(not entry.state.files for entry in self.slimmed)

    @property
    def changes(self) -> bool:
        """Return whether any checkpoint is removed or slimmed."""
        return bool(self.changed)

    def _repr_html_(self) -> str:
        """Return a table of kept and removed checkpoints, for notebooks."""
        return self.html_with(f"{counted(len(self.removals), 'checkpoint')} to remove")

    def html_with(self, caption: str) -> str:
        """Return a table of kept and removed checkpoints below a caption, removals first in each series."""
        from ckpttool.core.notebook import html_table

        columns = ("checkpoint", "plan", "reasons", "size")
        count = sum(len(group.keep) + len(group.remove) for group in self.groups)
        return html_table(caption, columns, chain.from_iterable(map(_html_rows, self.groups)), count)

    def declined(self) -> RetentionPlan:
        """Return the plan without its changes, after the user declined it."""
        return self._replace(groups=tuple(group.declined() for group in self.groups))


def _html_rows(group: GroupPlan) -> Iterator[tuple[object, ...]]:
    for entry in group.remove:
        yield entry.path, "remove", group.over_limit.get(entry.path), file_size(entry.nbytes)
    for kept in group.keep:
        reasons = ", ".join(kept.reasons) or group.skipped
        yield kept.entry.path, "slim" if kept.slims else "keep", reasons, file_size(kept.entry.nbytes)


def plan(
    groups: Sequence[Group], policy: Policy | Policies, protections: Protections, *, now: float | None = None
) -> RetentionPlan:
    """Return the plan of some series; each checkpoint is one save."""
    # Three passes, as some rules compare series: runs are ranked first, then each series is drafted by its
    # own rules, and then limits of size choose among all drafts. A run beyond the best ones is removed whole:
    # pointers in the run itself no longer protect its checkpoints, only reasons from outside it do.
    policies = policy if isinstance(policy, Policies) else Policies(policy)
    chosen = [(group, policies.of(group)) for group in groups]
    require_metrics(chosen)
    histories = [history_of(group, protections, now) for group in groups]
    ranks = rank_runs(
        [(*one, history) for one, history in zip(chosen, histories, strict=True)], protections.reasons
    )
    removed_runs = [group for group in groups if group.key in ranks and ranks[group.key].is_removed]
    if removed_runs:
        entries = [entry for group in removed_runs for entry in group.entries]
        without = dict.fromkeys((entry.path for entry in entries), ())
        outside = reasons_from_outside(entries, protections.reasons, protections.holders)
        protections = replace(protections, reasons={**protections.reasons, **without, **outside})
    drafts = [
        _draft(group, chosen_policy, protections, history, ranks.get(group.key))
        for (group, chosen_policy), history in zip(chosen, histories, strict=True)
    ]
    too_large = removals_for_limits(drafts)
    planned = tuple(
        _group_plan(group, draft, too_large, protections) for group, draft in zip(groups, drafts, strict=True)
    )
    kept = [kept.entry for group_plan in planned for kept in group_plan.keep]
    required = [
        kept.entry
        for group_plan, draft in zip(planned, drafts, strict=True)
        for kept in group_plan.keep
        if group_plan.skipped or draft.reasons[kept.entry.path] or kept.entry.path in draft.undated
    ]
    limit = total_limit(draft.policy for draft in drafts)
    over = excess("max_total_size", limit, kept, required)
    return RetentionPlan(policies, planned, protections.removes_failed, () if over is None else (over,))


def _draft(
    group: Group,
    policy: Policy | None,
    protections: Protections,
    history: History,
    rank: RunRank | None,
) -> Draft:
    """Return the plan of a series before limits; a failed series to remove needs no policy."""
    # Reasons come from four sources: the series itself (its newest), rules, protections, and faults, as a
    # damaged checkpoint isn't removed by rules about intact ones. A series that is removed whole (failed, or
    # beyond the best runs) has its faults and its newest ignored; of a failed one, the newest finite is kept.
    is_beyond_best = rank is not None and rank.is_removed
    is_removed_whole = is_beyond_best or (protections.removes_failed and group.key in protections.failed)
    if policy is None and not is_removed_whole:
        reasons = {entry.path: [NO_RULE] for entry in group.entries}
        return Draft(None, reasons, group.entries, reasons.keys())
    newest_first = group.entries[::-1]
    faults = {entry.path: fault_of(entry, protections) for entry in newest_first}
    intact = history.intact
    if is_beyond_best:
        always: Mapping[str, Sequence[str]] = {}
    elif is_removed_whole:
        finite = protections.finite.get(group.key)
        always = {} if finite is None else {finite: [FINITE]}
    else:
        always = newest_reasons(newest_first, history)
    ruled = {} if policy is None or is_beyond_best else _rule_reasons(policy, history)
    protected = {path for path in faults if protections.reasons.get(path)}
    kept_faults = {path: [fault] for path, fault in faults.items() if fault and not is_removed_whole}
    if policy is not None and policy.incomplete == "remove" and intact and not is_removed_whole:
        # Incomplete ones before the newest intact one, in order and in time, won't be finished.
        for entry in newest_first[newest_first.index(intact[0]) + 1 :]:
            is_outdated = entry.is_incomplete and entry.modified_ns <= intact[0].modified_ns
            if is_outdated and not (entry.path in protected or entry.path in ruled):
                del kept_faults[entry.path]
    reasons = {
        entry.path: _unique(
            always.get(entry.path, ()),
            ruled.get(entry.path, ()),
            protections.reasons.get(entry.path, ()),
            kept_faults.get(entry.path, ()),
        )
        for entry in newest_first
    }
    # A policy that would remove checkpoints is refused if none of its rules keeps an intact one, although the
    # newest is kept in any case.
    has_limit = policy is not None and policy.has_limit
    keeps_any = any(entry.path in ruled for entry in intact)
    if intact and not (keeps_any or is_removed_whole or has_limit) and not all(reasons.values()):
        raise UsageError(f"{group.key}: the policy would keep no checkpoint")
    kept = [entry for entry in group.entries if reasons[entry.path]]
    if is_beyond_best:  # limits of size mustn't keep more of it
        return Draft(policy, reasons, kept, faults.keys(), rank=rank)
    unlimited = {*always, *kept_faults, *protected}
    slim = _older_whole(policy, history, always.keys() | protected) if policy and not is_removed_whole else []
    if policy is None or not policy.has_limit:
        return Draft(policy, reasons, kept, unlimited, rank=rank, slim=slim)
    may_fit = {*unlimited, *(entry.path for entry in intact)}
    candidates = [entry for entry in group.entries if entry.path in may_fit]
    undated = {} if policy.max_total_size is None else {one.path: why for one, why in history.undated}
    return Draft(policy, reasons, candidates, unlimited, undated, rank, slim)


def _older_whole(policy: Policy, history: History, kept_whole: Collection[str]) -> list[Entry]:
    """Return the intact checkpoints with training state that ``full`` slims if they are kept."""
    if policy.full is None:
        return []
    whole = {*kept_whole, *(entry.path for entry in newest_whole(policy, history))}
    with_state = (one for one in history.intact if one.has_weights and one.state.nbytes)
    return [one for one in with_state if one.path not in whole and one.danger is None]


def history_of(group: Group, protections: Protections, now: float | None) -> History:
    """Return the history of a series for the rules: its intact checkpoints, in order."""
    # Symlinks aren't counted: the owner of the target may delete it. The rest is ordered anew: without the
    # damaged ones, whose counts are unknown, more criteria may be known for all.
    sound = [entry for entry in group.entries if entry.is_sound]
    intact = [entry for entry in sound if entry.path not in protections.faults and not entry.is_link]
    ordered = order_entries(intact)[0] if len(intact) < len(sound) else intact
    paths = {entry.path for entry in intact}
    others = [entry for entry in group.entries if entry.path not in paths]
    return History(ordered[::-1], now, protections.root, others)


def newest_reasons(newest_first: Sequence[Entry], history: History) -> dict[str, list[str]]:
    """Return reasons to keep the newest checkpoints, by path: in order, in time, or by another count."""
    if not history.intact:
        incomplete = [entry for entry in newest_first if entry.is_incomplete]
        return {entry.path: ["none is intact"] for entry in incomplete[:1]}
    reasons: dict[str, list[str]] = defaultdict(list)
    newest = history.intact[0]
    reasons[newest.path].append(NEWEST)
    if newest.danger is not None:
        for entry in [entry for entry in history.intact if entry.danger is None][:1]:
            reasons[entry.path].append("newest that isn't unsafe")
    for entry in history.written_last[:1]:
        reasons[entry.path].append("written last")
    for entry, count in newest_by_other_counts(history.intact):
        reasons[entry.path].append(f"newest by {count}")
    return reasons


def _rule_reasons(policy: Policy, history: History) -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = defaultdict(list)
    given = policy.rules
    for name, rule in RULES.items():
        for entry, reason in rule.keep(policy, history) if name in given and rule.keep else ():
            reasons[entry.path].append(reason)
    return reasons


def _group_plan(
    group: Group, draft: Draft, too_large: Mapping[str, str], protections: Protections
) -> GroupPlan:
    policy, failed = draft.policy, protections.failed.get(group.key)
    reasons = draft.reasons_with_limits(too_large)
    newest_first = group.entries[::-1]
    remove = tuple(entry for entry in newest_first if not reasons[entry.path])
    whole: dict[str, str] = {}
    slim: set[str] = set()
    for entry in (entry for entry in draft.slim if reasons[entry.path]):
        if not entry.holds_state:
            whole[entry.path] = f"only {size(entry.state.nbytes)} of it are training state"
        elif entry.path in protections.unslimmable:
            whole[entry.path] = protections.unslimmable[entry.path]
        else:
            slim.add(entry.path)
    changes = bool(remove or slim)
    # A doubt about a series is only reported if it matters, that is if the plan would change the series.
    skipped = protections.skipped.get(group.key) or (protections.doubts.get(group.key) if changes else None)
    if skipped is None and policy is None and not remove:
        skipped = NO_RULE
    if skipped is not None:
        remove, slim = (), set()
    kept = newest_first if not remove else tuple(entry for entry in newest_first if reasons[entry.path])
    keep = tuple(KeptEntry(entry, tuple(reasons[entry.path]), entry.path in slim) for entry in kept)
    if skipped is not None or policy is None:
        return GroupPlan(group.key, keep, remove, skipped, policy, failed, draft.rank)
    required = [entry for entry in kept if draft.reasons[entry.path]]
    over = excess("max_size", policy.max_size, kept, required)
    over_limit = {entry.path: too_large[entry.path] for entry in newest_first if entry.path in too_large}
    return GroupPlan(group.key, keep, remove, None, policy, failed, draft.rank, over, over_limit, whole)


def fault_of(entry: Entry, protections: Protections) -> str | None:
    """Return the fault of a checkpoint, found by the survey or a full read; None if none is known."""
    return entry.fault or protections.faults.get(entry.path)


def freed_bytes(entries: Sequence[Entry]) -> int:
    """Return the bytes of files all of whose hard links belong to these checkpoints."""
    # The file system frees a file with its last link, and some links may be outside of the directory.
    names: dict[tuple[int, int], int] = defaultdict(int)
    files = {}
    for entry in entries:
        for file in entry.contents.files:
            names[file.device, file.inode] += 1
            files[file.device, file.inode] = file
    return sum(file.size for key, file in files.items() if names[key] >= file.links)


def _unique(*reasons: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(chain(*reasons)))


def plan_saves(
    groups: Sequence[Group], policy: Policy | Policies, protections: Protections, *, now: float | None = None
) -> RetentionPlan:
    """Return the plan of some series, planned by saves, with a row for each part."""
    # A save may have parts in several series (``epoch=3.pt`` and ``epoch=3_optim.pt``). Series of whole saves
    # are planned, with the protections of all their parts, and each part gets the decision on its save.
    saves = series_of_saves(groups)
    planned = plan(saves, policy, protections_of_saves(saves, protections), now=now)
    by_part: dict[str, tuple[Entry, GroupPlan]] = {}
    for made in planned.groups:
        for entry in (*(kept.entry for kept in made.keep), *made.remove):
            by_part |= {part.path: (entry, made) for part in parts_of(entry)}
    return planned._replace(groups=tuple(_part_plan(group, by_part, protections) for group in groups))


def protections_of_saves(saves: Sequence[Group], protections: Protections) -> Protections:
    """Return the protections of saves: those of any part, or of a part's series."""
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
    """Return the plan of a series whose checkpoints may be parts of saves."""
    plans = {made.key: made for entry in group.entries for _, made in [by_part[entry.path]]}
    main = plans.get(group.key) or next(iter(plans.values()))
    if all(not entry.save for entry in group.entries):
        return main
    # The first parts of these saves may be in several series, so each part gets the decision on its own save.
    # The excess is reported once, for the series of first parts.
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
    """Return reasons to keep a part: those of its save that apply to it, else the part that it follows."""
    # A save has the reasons of all its parts. Those that only another part has (its pointer, its fault) are
    # left out; without any other reason, this part is kept because of that one.
    if not kept.reasons:  # a skipped series
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
