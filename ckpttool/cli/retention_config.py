"""``[retention]`` and ``[[retention.rule]]`` of a configuration."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpttool.cli.config import ConfigDocument
from ckpttool.cli.config_keys import beside, paths_key, read
from ckpttool.cli.options import trash_option, yes_option
from ckpttool.core.errors import UsageError
from ckpttool.core.options import Reach, group, jobs_option, option, same_option
from ckpttool.runs.pruning.request import PruneRequest
from ckpttool.runs.retention.policies import PathRule, Policies
from ckpttool.runs.retention.rules import Policy
from ckpttool.runs.scope import Scope


def _log_beside(path: str, directory: str) -> str:
    """Return a log's path as seen from here; one that isn't there is looked for in each directory."""
    from ckpttool.runs.metrics.log_metrics import LogArgument

    tracker, _, place = path.partition(":")
    if tracker == "wandb" and place and not os.path.lexists(path):
        return f"{tracker}:{_log_beside(place, directory)}"
    log = beside(path, directory)
    return log if os.path.lexists(LogArgument.parse(log).name) else path


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What a configuration says of ``prune``.

    Attributes:
        path: Where it stands.
        policies: Which policy each series has.
        paths: The directories, as seen from the current one.
    """

    path: str
    policies: Policies | None
    rules: Mapping[str, Any] = group(Policy)
    failed: Mapping[str, Any] = group(PruneRequest, ("failed",))
    paths: tuple[str, ...] = paths_key("Directories to prune, relative to this file.")
    scope: Mapping[str, Any] = group(Scope)
    metrics: Sequence[str] = same_option(Scope, "metrics", resolve=_log_beside)
    request: Mapping[str, Any] = group(PruneRequest, ("min_age", "max_delete", "depth"))
    trash: bool = trash_option()
    yes: bool = yes_option()
    jobs: int | None = jobs_option(maximum=None)  # files were never limited
    path_rules: tuple[PathRule, ...] = option(
        "rule",
        help="Rules for some series instead of those above; the last one that matches decides.",
        reach=Reach.HARMLESS,
        default=(),
    )

    @property
    def values(self) -> dict[str, Any]:
        """Return the values but for those of policies, by attribute."""
        own = {name: getattr(self, name) for name in ("paths", "metrics", "trash", "yes", "jobs")}
        given = {name: value for name, value in own.items() if value not in (None, ())}
        return {**self.failed, **self.scope, **self.request, **given}


def read_retention(document: ConfigDocument, *, given: Collection[str] = ()) -> Retention | None:
    """Return what a configuration says of ``prune``; None if it says nothing.

    Args:
        given: Attributes that the command line gives, by their names.
    """
    if not document.table("retention"):  # as `ckpttool init` writes it
        return None
    values = read(Retention, document, "retention", given=given)
    try:
        default = Policy(**values["rules"]) if values["rules"] else None
    except UsageError as failure:
        raise document.wrong("retention", str(failure)) from failure
    listed = values.get("path_rules", ())
    here = os.path.dirname(document.path) or os.curdir
    policies = Policies(default, listed, here) if default or listed else None
    return Retention(path=document.path, policies=policies, **values)
