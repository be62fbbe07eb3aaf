"""What is to be kept of a series, and how much may go."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from decimal import Decimal
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, get_args

from ckpttool.errors import UsageError

if TYPE_CHECKING:
    from ckpttool.series.members.order import Group

Mode = Literal["min", "max"]
"""Which values of a metric are good."""

Incomplete = Literal["keep", "remove"]

COUNTED = (
    *("keep_last", "keep_best", "keep_every_steps", "keep_every_epochs"),
    *("keep_hourly", "keep_daily", "keep_weekly", "keep_monthly", "keep_yearly"),
)
"""The rules that have a number of at least 1."""

LIMITS = ("max_size", "max_total_size")
"""The rules that keep what is newest, as far as it fits into so many bytes."""

_LIMIT = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)%|(\d{1,9})", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Which checkpoints of each series are wanted: what any rule keeps stays.

    Attributes:
        keep_last: How many of the newest intact ones stay.
        keep_best, metric, mode: How many of the best stay, by which metric, and which of its values are good.
        keep_every_steps, keep_every_epochs: Of each stretch of so many steps, or epochs, the first stays.
        keep_hourly, keep_daily, keep_weekly, keep_monthly, keep_yearly: Of how many hours, days, ISO weeks,
            months and years with a checkpoint the newest one stays; in local time.
        keep_within: What is at most so many seconds older than the newest of its series stays.
        older_than: What was saved less than so many seconds ago stays: only what is older goes.
        keep_names: Globs of names that stay.
        max_size: Of each series, the newest that fit into so many bytes stay, and no older ones but for
            other rules.
        max_total_size: Likewise of all series together: the oldest of any go first.
        incomplete: Whether incomplete ones go that are older than the newest intact one.
    """

    keep_last: int | None = None
    keep_best: int | None = None
    metric: str | None = None
    mode: Mode | None = None
    keep_every_steps: int | None = None
    keep_every_epochs: int | None = None
    keep_hourly: int | None = None
    keep_daily: int | None = None
    keep_weekly: int | None = None
    keep_monthly: int | None = None
    keep_yearly: int | None = None
    keep_within: int | None = None
    older_than: int | None = None
    keep_names: tuple[str, ...] = ()
    max_size: int | None = None
    max_total_size: int | None = None
    incomplete: Incomplete = "keep"

    def __post_init__(self) -> None:
        best = {"--keep-best N": self.keep_best, "--metric NAME": self.metric, "--mode min|max": self.mode}
        missing = [name for name, value in best.items() if value is None]
        if missing and len(missing) < len(best):
            verb = "is" if len(missing) == 1 else "are"
            names = "--keep-best N, --metric NAME and --mode min|max"
            raise UsageError(f"{names} belong together ({' and '.join(missing)} {verb} missing)")
        if self.mode is not None and self.mode not in get_args(Mode):
            raise UsageError(f"--mode {self.mode} (min or max)")
        for name in (*COUNTED, "keep_within", "older_than", *LIMITS):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{option(name)} {value} would keep nothing (at least 1)")
        if not all(self.keep_names):
            raise UsageError("--keep-name needs a glob of names, such as 'best*'")
        if self.incomplete not in get_args(Incomplete):
            raise UsageError(f"--incomplete {self.incomplete} (keep or remove)")
        if not self.rules.keys() - {"incomplete"}:
            raise UsageError("no rule says what to keep (--keep N keeps the newest N)")

    @property
    def rules(self) -> dict[str, Any]:
        """Return the rules that were given, by name, with what belongs to them."""
        return dict(_given_rules(self))

    @property
    def has_limit(self) -> bool:
        """Tell whether there is a limit of size, which keeps what fits."""
        return any(name in self.rules for name in LIMITS)


@lru_cache
def _given_rules(policy: Policy) -> Mapping[str, Any]:
    rules = ((rule.name, getattr(policy, rule.name), rule.default) for rule in fields(policy))
    return {name: value for name, value, default in rules if value != default}


@dataclass(frozen=True, slots=True)
class PathRule:
    """A policy for the series whose paths match a glob.

    Attributes:
        glob: Of ``<directory>/<name with * for its fields>``, relative to the configuration's directory.
        policy: The policy.
        origin: Where it stands, for messages.
    """

    glob: str
    policy: Policy
    origin: str = ""

    def __post_init__(self) -> None:
        if self.policy.max_total_size is not None:
            raise UsageError(f"{option('max_total_size')} is of all series, and no rule for some of them")


@dataclass(frozen=True, slots=True)
class Policies:
    """Which policy each series has: that of the last rule that matches its path, or else the default.

    Attributes:
        default: For series that no rule matches; None leaves them alone.
        rules: In the order of the configuration.
        directory: What the globs of the rules are relative to.
    """

    default: Policy | None = None
    rules: tuple[PathRule, ...] = ()
    directory: str = os.curdir

    def of(self, group: Group) -> Policy | None:
        """Return the policy of a series; None where it is left alone.

        Raises:
            UsageError: It spans several directories or names, and these have different policies.
        """
        if not self.rules:
            return self.default
        rules = {
            path: next((rule for rule in reversed(self.rules) if matches(rule.glob, path)), None)
            for path in self._paths(group)
        }
        (first, rule), *others = rules.items()
        for path, other in others:
            if other != rule:
                both = f"{first} ({_origin(rule)}) and {path} ({_origin(other)})"
                raise UsageError(f"{group.key} is one series with two policies: {both}")
        return self.default if rule is None else rule.policy

    def unmatched(self, groups: tuple[Group, ...]) -> list[PathRule]:
        """Return the rules that match no series."""
        paths = {path for group in groups for path in self._paths(group)} if self.rules else ()
        return [rule for rule in self.rules if not any(matches(rule.glob, path) for path in paths)]

    def _paths(self, group: Group) -> list[str]:
        base = os.path.realpath(self.directory)
        names = dict.fromkeys((entry.directory, entry.fields.blank) for entry in group.entries)
        real = {directory: os.path.realpath(directory) for directory, _ in names}
        paths = (os.path.relpath(os.path.join(real[directory], blank), base) for directory, blank in names)
        return [path.replace(os.sep, "/") for path in paths]


def _origin(rule: PathRule | None) -> str:
    return "no rule" if rule is None else rule.origin or rule.glob


def matches(glob: str, path: str) -> bool:
    """Tell whether a path matches a glob, name by name; ``**`` stands for any number of directories."""
    parts = glob.split("/")
    names = path.split("/")
    if os.pardir in names:
        return False
    reached = _skip_wildcards({0}, parts)
    for name in names:
        stays = {at for at in reached if at < len(parts) and parts[at] == "**"}
        moves = {at + 1 for at in reached - stays if at < len(parts) and fnmatchcase(name, parts[at])}
        reached = _skip_wildcards(stays | moves, parts)
    return len(parts) in reached


def _skip_wildcards(reached: set[int], parts: Sequence[str]) -> set[int]:
    """Return the places in a glob that are reached if each ``**`` may also stand for nothing."""
    for at, part in enumerate(parts):
        if at in reached and part == "**":
            reached = reached | {at + 1}
    return reached


def option(name: str) -> str:
    """Return the option that gives a policy's attribute."""
    named = {"keep_last": "--keep", "keep_names": "--keep-name"}
    return named.get(name, f"--{name.replace('_', '-')}")


@dataclass(frozen=True, slots=True)
class DeleteLimit:
    """How much one prune may remove: a number of checkpoints, or a share of them in percent."""

    count: int | None = None
    percent: Decimal | None = None

    def allows(self, removed: int, total: int) -> bool:
        """Tell whether so many of all checkpoints may go."""
        if self.count is not None:
            return removed <= self.count
        return self.percent is None or removed * 100 <= self.percent * total


def delete_limit(text: str) -> DeleteLimit:
    """Return the limit that ``10`` or ``20%`` means."""
    match = _LIMIT.fullmatch(text.strip())
    if match is None or (match[1] is not None and Decimal(match[1]) > 100):
        raise UsageError(f"--max-delete {text}: no limit (such as 10 or 20%)")
    percent, count = match.groups()
    return DeleteLimit(None if count is None else int(count), None if percent is None else Decimal(percent))
