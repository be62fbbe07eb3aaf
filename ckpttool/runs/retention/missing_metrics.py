"""What checkpoints lack that a policy asks for: a metric, a step, an epoch, a date that can be believed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from ckpttool.core.errors import UsageError
from ckpttool.core.text import counted
from ckpttool.formats.globs import MATCHED_NOTHING, Globs
from ckpttool.runs.members.entry import Entry
from ckpttool.runs.members.order import Group
from ckpttool.runs.reasons import Code, Reason
from ckpttool.runs.retention.dates import date_doubts
from ckpttool.runs.retention.rules import RULES, Policy, metric_lack

Chosen = Sequence[tuple[Group, Policy | None]]
"""Series, each with its policy."""


def require_metrics(chosen: Chosen) -> None:
    """Require that some checkpoint has the metric that a policy names."""
    for metric, sound in _sound_by_metric(chosen).items():
        if sound and all(entry.recorded_metric(metric) is None for entry in sound):
            known = {name for entry in sound for name in entry.metrics}
            known |= {"loss" for entry in sound if entry.loss is not None}
            there = f"there are {', '.join(sorted(known))}" if known else "none has any"
            raise UsageError(f"no checkpoint has a metric {metric!r} ({there}; --metrics FILE reads a log)")


def lack_warnings(chosen: Chosen, now: float | None) -> Iterator[str]:
    """Yield how many checkpoints a rule keeps because they lack what it asks for."""
    for metric, sound in _sound_by_metric(chosen).items():
        lacks = [metric_lack(entry, metric) is not None for entry in sound]
        yield from _kept_for_lack(lacks, f"no {metric}")
    for count in ("step", "epoch"):
        lacks = [
            getattr(entry, count) is None for entries in _sound_series(chosen, count) for entry in entries
        ]
        yield from _kept_for_lack(lacks, f"no {count}")
    lacks = []
    for entries in _sound_series(chosen, "date"):
        doubts = date_doubts(entries, now)
        lacks += [entry.path in doubts for entry in entries]
    yield from _kept_for_lack(lacks, "no date that can be believed")


def _kept_for_lack(lacks: Sequence[bool], what: str) -> Iterator[str]:
    if count := sum(lacks):
        verb, they = ("has", "it is") if count == 1 else ("have", "they are")
        yield f"{count:,} of {counted(len(lacks), 'checkpoint')} {verb} {what}; {they} kept"


def _sound_by_metric(chosen: Chosen) -> Mapping[str, list[Entry]]:
    """Return the sound checkpoints for which a policy names a metric, by the metric."""
    sound: dict[str, list[Entry]] = defaultdict(list)
    for group, policy in chosen:
        if policy is not None and policy.metric is not None:
            sound[policy.metric] += [entry for entry in group.entries if entry.is_sound]
    return sound


def _sound_series(chosen: Chosen, need: str) -> list[list[Entry]]:
    """Return the sound checkpoints of each series whose policy has a rule that goes by this."""
    return [
        [entry for entry in group.entries if entry.is_sound]
        for group, policy in chosen
        if policy is not None and any(RULES[name].needs == need for name in policy.rules)
    ]


def unmatched_names(chosen: Chosen, root: str) -> list[str]:
    """Return a warning for each glob of names to keep that no checkpoint has."""
    kept = [(group, policy.keep_names) for group, policy in chosen if policy is not None]
    globs = dict.fromkeys(glob for _, names in kept for glob in names)
    matcher = Globs(tuple(globs), root)
    matched = {
        glob
        for group, names in kept
        if names
        for entry in group.entries
        for path in entry.places
        for glob in matcher.of(path)
        if glob in names
    }
    return [
        Reason(Code.MATCHED_NOTHING, f"--keep-name {glob!r} {MATCHED_NOTHING}")
        for glob in globs
        if glob not in matched
    ]
