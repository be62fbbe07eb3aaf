"""A retention policy, and the plan that it makes of a series: what stays, why, and what goes.

Pure: no file is touched here. Each rule is one function in ``RULES``; what any of them keeps stays.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields

from ckpttool.errors import UsageError
from ckpttool.series.entry import Entry
from ckpttool.series.order import Group, by_other_count, written_last

_DURATION = re.compile(r"(?:(\d{1,6})d)?(?:(\d{1,6})h)?(?:(\d{1,6})m)?(?:(\d{1,9})s?)?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Which checkpoints of each series are wanted.

    Attributes:
        keep_last: How many of the newest intact ones stay.
    """

    keep_last: int | None = None

    def __post_init__(self) -> None:
        if not self.rules:
            raise UsageError("no rule says what to keep (--keep N keeps the newest N)")
        if self.keep_last is not None and self.keep_last < 1:
            raise UsageError(f"--keep {self.keep_last} would keep nothing (at least 1)")

    @property
    def rules(self) -> dict[str, int]:
        """Return the rules that were given, by name."""
        given = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Protections:
    """What is stronger than every rule.

    Attributes:
        reasons: Why a checkpoint stays, by its path.
        skipped: Why a whole series is left alone, by its key.
        doubts: Why a whole series may be none, by its key: it is left alone where something of it would go.
        faults: What reading checkpoints in full found wrong, by their paths.
    """

    reasons: Mapping[str, Sequence[str]] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    faults: Mapping[str, str] = field(default_factory=dict)
    doubts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Kept:
    """A checkpoint that stays, and every reason for it."""

    entry: Entry
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """What becomes of one series, the newest first; ``skipped`` says why it is left alone."""

    key: str
    keep: tuple[Kept, ...]
    remove: tuple[Entry, ...] = ()
    skipped: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What becomes of all series."""

    policy: Policy
    groups: tuple[GroupPlan, ...]

    @property
    def removals(self) -> tuple[Entry, ...]:
        """Return all that goes."""
        return tuple(entry for one in self.groups for entry in one.remove)

    @property
    def freed_bytes(self) -> int:
        """Return the bytes that are freed: those of files none of whose names stays."""
        return freed_bytes(self.removals)


Rule = Callable[[Policy, Sequence[Entry]], Iterator[tuple[Entry, str]]]
"""Yields, of the intact checkpoints of a series with the newest first, those to keep, and why."""


def _last(policy: Policy, intact: Sequence[Entry]) -> Iterator[tuple[Entry, str]]:
    for entry in intact[: policy.keep_last or 0]:
        yield entry, f"last {policy.keep_last}"


def _written_last(policy: Policy, intact: Sequence[Entry]) -> Iterator[tuple[Entry, str]]:
    """Keep what a restarted run has just written, though its epochs come before older ones."""
    for entry in written_last(intact[::-1])[: policy.keep_last or 0]:
        yield entry, "written last"


def _other_newest(policy: Policy, intact: Sequence[Entry]) -> Iterator[tuple[Entry, str]]:
    """Keep the newest by epochs and by steps where these disagree."""
    if found := by_other_count(intact[::-1]):
        yield found[0], f"newest by {found[1]}"


RULES: tuple[Rule, ...] = (_last, _written_last, _other_newest)


def plan(groups: Sequence[Group], policy: Policy, protections: Protections) -> Plan:
    """Return what stays and what goes.

    Raises:
        UsageError: No rule would keep anything of a series.
    """
    return Plan(policy, tuple(_planned(one, policy, protections) for one in groups))


def _planned(group: Group, policy: Policy, protections: Protections) -> GroupPlan:
    newest_first = group.entries[::-1]
    reasons = _reasons(group.key, newest_first, policy, protections)
    skipped = protections.skipped.get(group.key)
    if skipped is None and not all(reasons[entry.path] for entry in newest_first):
        skipped = protections.doubts.get(group.key)
    if skipped is not None:
        untouched = (Kept(entry, tuple(reasons[entry.path])) for entry in newest_first)
        return GroupPlan(group.key, tuple(untouched), skipped=skipped)
    keep = [Kept(entry, tuple(reasons[entry.path])) for entry in newest_first if reasons[entry.path]]
    remove = [entry for entry in newest_first if not reasons[entry.path]]
    return GroupPlan(group.key, tuple(keep), tuple(remove))


def _reasons(
    key: str, newest_first: Sequence[Entry], policy: Policy, protections: Protections
) -> Mapping[str, list[str]]:
    """Return why each checkpoint stays, by its path; one without a reason goes."""
    reasons: dict[str, list[str]] = defaultdict(list)
    faults = {entry.path: fault_of(entry, protections) for entry in newest_first}
    intact = [entry for entry in newest_first if faults[entry.path] is None]
    if newest := _newest(newest_first, intact):
        reasons[newest.path].append("newest" if intact else "none is intact")
    for rule in RULES:
        for entry, reason in rule(policy, intact):
            reasons[entry.path].append(reason)
    if intact and sum(map(len, reasons.values())) == 1:
        raise UsageError(f"{key}: the policy would keep nothing of it")
    for entry in newest_first:
        reasons[entry.path] += protections.reasons.get(entry.path, ())
        if fault := faults[entry.path]:
            reasons[entry.path].append(fault)
    return reasons


def _newest(newest_first: Sequence[Entry], intact: Sequence[Entry]) -> Entry | None:
    if intact:
        return intact[0]
    incomplete = (entry for entry in newest_first if (entry.fault or "").startswith("incomplete"))
    return next(incomplete, None)


def fault_of(entry: Entry, protections: Protections) -> str | None:
    """Return what is wrong with a checkpoint, as far as it is known."""
    return entry.fault or protections.faults.get(entry.path)


def freed_bytes(entries: Sequence[Entry]) -> int:
    """Return the bytes of all files whose every name is among those of some checkpoints."""
    names: dict[tuple[int, int], int] = defaultdict(int)
    files = {}
    for entry in entries:
        for file in entry.contents.files:
            names[file.device, file.inode] += 1
            files[file.device, file.inode] = file
    return sum(file.size for key, file in files.items() if names[key] >= file.links)


def seconds(duration: str) -> int:
    """Return the seconds of a duration such as ``7d12h``, ``90m`` or ``30``.

    Raises:
        UsageError: It is none.
    """
    match = _DURATION.fullmatch(duration.strip())
    if match is None or not any(match.groups()):
        raise UsageError(f"no duration: {duration!r} (such as 7d12h, 90m or 30)")
    days, hours, minutes, rest = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest
