"""The request of ``prune``: a directory, and its policies by path."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from decimal import Decimal
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ckpttool.core.errors import UsageError
from ckpttool.core.options import (
    AMOUNT,
    EXECUTION_PANEL,
    RULE_PANEL,
    Depth,
    Reach,
    WrongValue,
    attribute_names,
    group,
    option,
    require_known,
)
from ckpttool.core.text import seconds
from ckpttool.runs.retention.rules import Policy, PolicyKeywords, Rule
from ckpttool.runs.scope import Scope, ScopeKeywords
from ckpttool.storage import fs

if TYPE_CHECKING:
    from ckpttool.runs.series import Group


_UNCLOSED = re.compile(r"\[(?!!?\]?[^\]]*\])")
_OF_ALL = "--max-total-size limits all series together, not some of them"


def glob_below(text: str) -> str:
    """Return a glob of paths below a configuration's directory."""
    glob = text.rstrip("/")
    parts = [part for part in glob.split("/") if part != os.curdir]
    if os.path.isabs(glob) or os.pardir in parts:
        raise WrongValue("a glob below the directory of this file")
    if not all(parts) or any("**" in part and part != "**" for part in parts):
        raise WrongValue("a glob like models/*.pth or **/*.pth, with ** as a whole name")
    # ``fnmatch`` takes a ``[`` that isn't closed literally, so that such a glob would match nothing.
    if any(_UNCLOSED.search(part) for part in parts):
        raise WrongValue("each [ needs a closing ]")
    return "/".join(parts)


def _series_glob(text: str) -> str:
    """Return a glob of series; the plain name of a directory means everything in it."""
    glob = glob_below(text)
    last = glob.rpartition("/")[2]
    is_directory = text.endswith("/") or not any(mark in last for mark in "*?[")
    return f"{glob}/**" if is_directory and last != "**" else glob


@dataclass(frozen=True, slots=True)
class PathRule:
    """A policy for the series whose paths match a glob: ``[[retention.rule]]``.

    Attributes:
        glob: Matches ``<directory>/<name with * for its fields>``, relative to the configuration's directory.
        policy: The policy.
        origin: Place in the configuration, for messages; empty if it has none.
    """

    glob: str = option(
        "path",
        help="Series that the rule is for, relative to this file.",
        parse=_series_glob,
        expected="a glob of series, such as runs/final/**",
        example="runs/final/**",
        reach=Reach.HARMLESS,
        default=MISSING,
    )
    policy: Policy = group(Policy, refused={"max_total_size": _OF_ALL}, is_record=True)
    origin: str = ""

    def __post_init__(self) -> None:
        if self.policy.max_total_size is not None:
            raise UsageError(_OF_ALL)


class Policies(NamedTuple):
    """Policies of series: that of the last rule that matches a series' path, or else the default.

    Attributes:
        default: Policy of series that no rule matches; None leaves them alone.
        rules: Rules in the order of the configuration.
        directory: Directory that the globs of the rules are relative to.
    """

    default: Policy | None = None
    rules: tuple[PathRule, ...] = ()
    directory: str = os.curdir

    @property
    def each(self) -> Iterator[Policy | None]:
        """Yield all policies, the default first, which may be None."""
        yield self.default
        yield from (rule.policy for rule in self.rules)

    @property
    def alteration(self) -> Rule | None:
        """Return a rule of any policy that changes kept checkpoints."""
        rules = (one.alteration for one in self.each if one is not None)
        return next((rule for rule in rules if rule is not None), None)

    def of(self, group: Group) -> Policy | None:
        """Return the policy of a series; None leaves it alone.

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
        # Both sides are real paths, so that a symlink on the way to the directory changes no match.
        base = fs.realpath(self.directory)
        names = dict.fromkeys((entry.directory, entry.fields.blank) for entry in group.entries)
        real = {directory: fs.realpath(directory) for directory, _ in names}
        paths = (os.path.relpath(os.path.join(real[directory], blank), base) for directory, blank in names)
        return [path.replace(os.sep, "/") for path in paths]


def _origin(rule: PathRule | None) -> str:
    return "no rule" if rule is None else rule.origin or rule.glob


def matches(glob: str, path: str) -> bool:
    """Return whether a path matches a glob, name by name; ``**`` matches any number of directories."""
    # All positions in the glob that the names so far can reach, as in a non-deterministic automaton: linear
    # in the length of both, where backtracking would be exponential for many ``**``.
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
    """Return positions in a glob, extended by those after each ``**``, which may match nothing."""
    for at, part in enumerate(parts):
        if at in reached and part == "**":
            reached = reached | {at + 1}
    return reached


Failed = Literal["list", "remove"]

_LIMIT = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)%|(\d{1,9})", re.ASCII)


def max_removals(limit: str, total: int) -> int:
    """Return the number of ``total`` checkpoints that a limit such as ``10`` or ``20%`` allows to remove."""
    match = _LIMIT.fullmatch(limit.strip())
    if match is None or (match[1] is not None and Decimal(match[1]) > 100):
        raise UsageError(f"--max-delete {limit}: invalid limit (such as 10 or 20%)")
    percent, count = match.groups()
    return int(count) if percent is None else int(Decimal(percent) * total // 100)


def _checked_limit(text: str) -> str:
    max_removals(text, 0)
    return text


_execution = partial(option, panel=EXECUTION_PANEL, reach=Reach.HARMLESS)


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneRequest(Scope):
    """Request of ``prune``: besides the options of ``Scope``, a directory, policies and limits.

    Attributes:
        directory: Directory of the checkpoints.
        policy: The policy of all series.
        policies: Policies by path, instead of the one policy.
        jobs: Number of threads.
        require_copy: Directory or URL; checkpoints without a proven copy there are kept.

    Raises:
        UsageError: It has no policy, or ``max_delete`` isn't a limit.
    """

    directory: str
    policy: Policy | None = None
    policies: Policies | None = None
    depth: Depth = _execution(
        "--verify",
        help="First verify the structure, or every byte, of the checkpoints to keep. [default: full]",
        default="full",
    )
    min_age: int = _execution(
        "--min-age",
        metavar="TIME",
        help="Keep checkpoints changed less than TIME (2h) ago.",
        parse=seconds,
        default=0,
    )
    max_delete: str | None = _execution(
        "--max-delete",
        metavar="N|PCT",
        help="Change nothing if more than N checkpoints, or 20%, would be removed.",
        parse=_checked_limit,
        expected="a number, or a share such as 20%",
        schema=AMOUNT,
        example="20%",
    )
    failed: Failed | None = option(
        "--failed",
        help="Find failed runs: list them, or move all but their good checkpoints to the trash.",
        panel=RULE_PANEL,
        reach=Reach.HARMLESS,
    )
    jobs: int | None = None
    require_copy: str | None = None

    def __post_init__(self) -> None:
        if self.max_delete is not None:
            max_removals(self.max_delete, 0)
        policies = self.all_policies
        if policies.default is None and not policies.rules and self.failed is None:
            raise UsageError("no rule says which checkpoints to keep (--keep N keeps the newest N)")

    @classmethod
    def from_keywords(
        cls, directory: str | os.PathLike[str] | PruneRequest, keywords: Mapping[str, Any]
    ) -> PruneRequest:
        """Return the request for a directory with keywords: attributes of the request and of its policy.

        Raises:
            TypeError: A keyword is none of them.
        """
        require_known(keywords, cls, Policy)
        rules = {name: value for name, value in keywords.items() if name in attribute_names(Policy)}
        more = {name: value for name, value in keywords.items() if name not in rules}
        if isinstance(directory, PruneRequest):
            more = {one.name: getattr(directory, one.name) for one in fields(cls)} | more
        else:
            more["directory"] = os.fspath(directory)
        if rules:
            policy = more.get("policy")
            more["policy"] = Policy(**rules) if policy is None else replace(policy, **rules)
        return cls(**more)

    @property
    def joins_slim(self) -> bool:
        """Return whether slimmed and whole checkpoints are one series, as a policy slims."""
        return self.all_policies.alteration is not None

    @property
    def all_policies(self) -> Policies:
        """Return the policies; ``policy`` alone is the default one."""
        return self.policies or Policies(self.policy)


class PruneKeywords(ScopeKeywords, PolicyKeywords, total=False):
    """The attributes of ``PruneRequest`` but the directory, and those of ``Policy``, for type checkers."""

    policy: Policy | None
    policies: Policies | None
    depth: Depth
    min_age: int
    max_delete: str | None
    failed: Failed | None
    jobs: int | None
    require_copy: str | None
