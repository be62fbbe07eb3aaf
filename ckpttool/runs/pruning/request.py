"""What is asked of ``prune``: where, which policy, and how much may go at most."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from functools import partial
from typing import Any, Literal

from ckpttool.core.errors import UsageError
from ckpttool.core.options import (
    AMOUNT,
    EXECUTION_PANEL,
    RULE_PANEL,
    Depth,
    Reach,
    attribute_names,
    option,
    require_known,
)
from ckpttool.core.text import seconds
from ckpttool.runs.retention.policies import Policies
from ckpttool.runs.retention.rules import Policy, PolicyKeywords
from ckpttool.runs.scope import Scope, ScopeKeywords

Failed = Literal["list", "remove"]

_LIMIT = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)%|(\d{1,9})", re.ASCII)


def max_removals(limit: str, total: int) -> int:
    """Return how many of ``total`` checkpoints a limit such as ``10`` or ``20%`` lets one prune remove."""
    match = _LIMIT.fullmatch(limit.strip())
    if match is None or (match[1] is not None and Decimal(match[1]) > 100):
        raise UsageError(f"--max-delete {limit}: no limit (such as 10 or 20%)")
    percent, count = match.groups()
    return int(count) if percent is None else int(Decimal(percent) * total // 100)


def _checked_limit(text: str) -> str:
    max_removals(text, 0)
    return text


_execution = partial(option, panel=EXECUTION_PANEL, reach=Reach.HARMLESS)


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneRequest(Scope):
    """What is to be thinned out, and how: besides what is looked at, which is a ``Scope``.

    Attributes:
        directory: Where the checkpoints lie.
        policy: Which of them are wanted.
        policies: Policies by path, instead of the one policy.
        jobs: Number of threads.
        require_copy: A directory or URL; what it isn't proven to have, byte for byte, stays.

    Raises:
        UsageError: There is nothing to go by, or ``max_delete`` is no limit.
    """

    directory: str
    policy: Policy | None = None
    policies: Policies | None = None
    depth: Depth = _execution(
        "--verify",
        help="First verify only the structure, or every byte, of what is kept. [default: full]",
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
        """Return the request that a directory and keywords make: attributes of it, and of its policy.

        Raises:
            TypeError: A keyword is neither.
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
        """Tell whether slimmed checkpoints belong to the series of whole ones: if a policy slims."""
        return self.all_policies.alteration is not None

    @property
    def all_policies(self) -> Policies:
        """Return the policies, of which there may be one alone, or none."""
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
