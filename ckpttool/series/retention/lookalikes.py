"""Single checkpoints that look like a series: names that differ in numbers, which nobody says count saves."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from shlex import quote

from ckpttool import name_patterns as patterns
from ckpttool.errors import UsageError
from ckpttool.report import counted
from ckpttool.series.members.entry import Entry
from ckpttool.series.members.order import Group, order_entries
from ckpttool.series.paths import shown
from ckpttool.series.retention.plan import Protections, plan
from ckpttool.series.retention.policy import Policy

_FEWEST_NUMBERS = 2
"""What has a single number that doesn't count saves is a series in doubt, which is told as such."""


def lookalikes(
    chosen: Sequence[tuple[Group, Policy | None]], protections: Protections, now: float
) -> Iterator[tuple[str, str]]:
    """Yield what to say of single checkpoints of which a policy would remove some if they were one series.

    Args:
        chosen: The series, each with its policy.
        protections: What is stronger than every rule.
        now: In seconds since 1970.
    """
    alike: dict[tuple[str, str, str | None, str | None], list[tuple[Entry, Policy]]] = defaultdict(list)
    for group, policy in chosen:
        entry = group.entries[0]
        is_alone = len(group.entries) == 1 and entry.is_sound and group.key not in protections.skipped
        if policy is not None and is_alone and (shape := _shape(entry.name)).count("*") >= _FEWEST_NUMBERS:
            alike[entry.directory, shape, entry.format, entry.signature].append((entry, policy))
    for (directory, shape, *_), found in alike.items():
        entries = order_entries([entry for entry, _ in found])[0]
        if len(entries) > 1 and _would_go(Group(shape, entries), found[0][1], protections, now):
            why = f"{counted(len(entries), 'checkpoint')} could be one series, and nothing says so"
            yield shown(os.path.join(directory, shape)), f"left alone: {why} (--series {quote(shape)} does)"


def _would_go(group: Group, policy: Policy, protections: Protections, now: float) -> bool:
    try:
        return bool(plan([group], policy, protections, now=now).removals)
    except UsageError:
        return False


def _shape(name: str) -> str:
    """Return a name with a ``*`` for each number but those that tell siblings apart: folds, seeds, ranks."""

    def blanked(match: re.Match[str]) -> str:
        return match[0] if patterns.SIBLING.search(name[: match.start()]) else "*"

    return re.sub(r"[0-9]+(?:\.[0-9]+)?", blanked, name)
