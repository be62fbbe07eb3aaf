"""Limits of size: which of the oldest don't fit, of one series and of all of them together.

What other rules keep has no say in this: it stays beside what fits, and may take more than the limit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from ckpttool.core.text import size
from ckpttool.runs.members.entry import Entry
from ckpttool.runs.retention.rules import RULES, Policy


@dataclass(frozen=True, slots=True)
class LimitedSeries:
    """A series as limits see it.

    Attributes:
        policy: Which limits it has; None where it has none.
        staying: What would stay if there were room for everything, the oldest first.
        held: Paths of what stays without room.
        undated: Why some have no date that can be believed, by path: nobody knows that others are newer.
    """

    policy: Policy | None
    staying: Sequence[Entry]
    held: Collection[str]
    undated: Mapping[str, str] = field(default_factory=dict)


class Excess(NamedTuple):
    """More than a limit allows.

    Attributes:
        rule: The limit, as a policy's attribute.
        limit: In bytes.
        taken: By all that stays.
        required: By what is protected, or kept by other rules: where this alone is too much, nothing that
            the limit could take away would make the rest fit.
    """

    rule: str
    limit: int
    taken: int
    required: int

    @property
    def nbytes(self) -> int:
        """Return how much it is over."""
        return self.taken - self.limit

    @property
    def is_inevitable(self) -> bool:
        """Tell whether the limit can't be met."""
        return self.required > self.limit

    def __str__(self) -> str:
        stays = f"{size(self.taken)} {'stay of it' if self.rule == 'max_size' else 'stay in all'}"
        return f"{stays}, {size(self.nbytes)} more than {RULES[self.rule].flags[0]} {size(self.limit)}"


def excess(rule: str, limit: int | None, kept: Sequence[Entry], required: Iterable[Entry]) -> Excess | None:
    """Return by how much what is kept passes a limit, or None where it doesn't, or there is none."""
    if limit is None or (taken := taken_bytes(kept)) <= limit:
        return None
    return Excess(rule, limit, taken, taken_bytes(required))


def removals_for_limits(series: Sequence[LimitedSeries]) -> dict[str, str]:
    """Return why checkpoints don't fit, by path: first in what their series may take, then in the total."""
    reasons: dict[str, str] = {}
    for one in series:
        if one.policy is not None and (limit := one.policy.max_size) is not None:
            why = f"--max-size {size(limit)}: the oldest go until the rest fits"
            reasons.update(dict.fromkeys(_drop_oldest(one.staying, one.held, limit), why))
    limit = total_limit(one.policy for one in series)
    if limit is None:
        return reasons
    saves: list[Entry] = []
    held: set[str] = set()
    for one in series:
        saves += [entry for entry in one.staying if entry.path not in reasons]
        # Of a series that this doesn't limit everything stays, however large all is together.
        is_limited = one.policy is not None and one.policy.max_total_size is not None
        held.update((*one.held, *one.undated) if is_limited else (entry.path for entry in one.staying))
    why = f"--max-total-size {size(limit)}: the oldest of all series go until the rest fits"
    reasons.update(dict.fromkeys(_drop_oldest(sorted(saves, key=attrgetter("save_time")), held, limit), why))
    return reasons


def total_limit(policies: Iterable[Policy | None]) -> int | None:
    """Return the limit of all series together, where there is one."""
    return next((one.max_total_size for one in policies if one is not None and one.max_total_size), None)


def _drop_oldest(saves: Sequence[Entry], held: Collection[str], limit: int) -> list[str]:
    """Return the paths of what goes, one save after another, until the rest takes no more than a limit."""
    names, sizes = _files(saves)
    total = sum(sizes.values())
    dropped = []
    for entry in saves:
        if total <= limit:
            break
        if entry.path in held:
            continue
        dropped.append(entry.path)
        for file in entry.contents.files:
            key = file.device, file.inode
            names[key] -= 1
            total -= 0 if names[key] else sizes[key]  # a file is freed with the last of its names
    return dropped


def taken_bytes(entries: Iterable[Entry]) -> int:
    """Return the bytes of all files of some checkpoints; those with several names count once."""
    return sum(_files(entries)[1].values())


def _files(entries: Iterable[Entry]) -> tuple[dict[tuple[int, int], int], dict[tuple[int, int], int]]:
    """Return how many names files have among those of some checkpoints, and their sizes."""
    names: dict[tuple[int, int], int] = defaultdict(int)
    sizes: dict[tuple[int, int], int] = {}
    for file in (file for entry in entries for file in entry.contents.files):
        names[file.device, file.inode] += 1
        sizes[file.device, file.inode] = file.size
    return names, sizes
