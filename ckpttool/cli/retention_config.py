"""Options of prune: those of the command line over ``[retention]`` and ``[[retention.rule]]``."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from ckpttool.cli.config import ConfigDocument, find_config, read_document
from ckpttool.cli.config_keys import path_from_config, paths_key, read
from ckpttool.cli.options import trash_option, yes_option
from ckpttool.core.errors import CheckpointError, UsageError
from ckpttool.core.options import Reach, attribute_names, group, jobs_option, option, options_of, same_option
from ckpttool.runs.retention.request import PathRule, Policies, PruneRequest
from ckpttool.runs.retention.rules import RULES, Policy
from ckpttool.runs.scope import Scope
from ckpttool.storage import fs

if TYPE_CHECKING:
    from ckpttool.core.report import Problem
    from ckpttool.runs.series import Group


def _log_from_config(path: str, directory: str) -> str:
    """Return a log of a configuration relative to the current directory, if it exists."""
    # A missing one is kept as it is: such a name is looked up in each directory of checkpoints.
    from ckpttool.runs.metrics import LogArgument
    from ckpttool.runs.trackers import metrics_tracker

    tracker, (prefix, _, place) = metrics_tracker(path), path.partition(":")
    if tracker is not None and tracker.is_directory and place:
        return f"{prefix}:{_log_from_config(place, directory)}"
    log = path_from_config(path, directory)
    return log if os.path.lexists(LogArgument.parse(log).name) else path


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Directories to prune, and how: options of the command line over ``[retention]`` of a configuration.

    Attributes:
        config: The configuration that was read; None without one.
        unread_config: A configuration with ``[retention]`` that isn't read, since the command line has a
            directory or a rule.
        directory_overrides_config: Whether the command line's directory replaces those of the configuration.
        policies: Policy of each series; None without a rule.
        paths: Directories, relative to the current one; empty for the current one itself.
        request: Attributes of a ``PruneRequest``.
        trash: Whether removed checkpoints are moved to the trash; those of failed runs always are.
        older_than: Minimum age in seconds of checkpoints that ``--empty-trash`` removes.
    """

    config: str | None = None
    unread_config: str | None = None
    directory_overrides_config: bool = False
    policies: Policies | None = None
    rules: Mapping[str, Any] = group(Policy)
    paths: tuple[str, ...] = paths_key("Directories to prune, relative to this file.")
    request: Mapping[str, Any] = group(PruneRequest)
    metrics: Sequence[str] = same_option(Scope, "metrics", resolve=_log_from_config)
    trash: bool = trash_option()
    yes: bool = yes_option()
    jobs: int | None = jobs_option(maximum=None)  # older versions had no limit in configurations
    path_rules: tuple[PathRule, ...] = option(
        "rule",
        help="Rules for some series instead of those above; the last one that matches decides.",
        reach=Reach.HARMLESS,
        default=(),
    )
    older_than: int | None = None

    @property
    def request_values(self) -> dict[str, Any]:
        """Return the attributes of a ``PruneRequest`` that are set, but for directory and policies."""
        own = {"metrics": self.metrics, "jobs": self.jobs}
        given = {name: value for name, value in own.items() if value not in (None, ())}
        return {**given, **self.request}

    @property
    def has_rules(self) -> bool:
        """Return whether rules say which checkpoints to keep."""
        return self.policies is not None or "failed" in self.request_values

    @property
    def is_recursive(self) -> bool:
        """Return whether subdirectories are searched."""
        return bool(self.request_values.get("recursive", True))

    @property
    def directories(self) -> list[str]:
        """Return the directories, each once."""
        places: dict[str, str] = {}
        for path in self.paths or (os.curdir,):
            places.setdefault(fs.realpath(path), path)
        return list(places.values())

    def requests(self, **other: Any) -> list[PruneRequest]:
        """Return one request for each directory, with other values of some attributes.

        Raises:
            UsageError: No rule says which checkpoints to keep.
        """
        if not self.has_rules:
            more = "" if self.paths else "; or write a ckpttool.toml with [retention]"
            if self.unread_config is not None:
                more = f"; {self.unread_config} is not read, since a directory was given: --config reads it"
            raise UsageError(f"no rule says which checkpoints to keep (--keep N keeps the newest N{more})")
        values = {**self.request_values, **other}
        return [PruneRequest(directory=path, policies=self.policies, **values) for path in self.directories]


def read_retention(document: ConfigDocument, *, given: Collection[str] = ()) -> Retention | None:
    """Return ``[retention]`` of a configuration; None if it is empty, as ``ckpttool init`` writes it.

    Args:
        given: Attributes that the command line gives, by their names.
    """
    if not document.table("retention"):
        return None
    values = read(Retention, document, "retention", given=given)
    try:
        default = Policy(**values["rules"]) if values["rules"] else None
    except UsageError as failure:
        raise document.wrong("retention", str(failure)) from failure
    listed = values.get("path_rules", ())
    here = os.path.dirname(document.path) or os.curdir
    policies = Policies(default, listed, here) if default or listed else None
    return Retention(config=document.path, policies=policies, **values)


_NOT_OF_TRASH = (
    "failed",
    "trash",
    "explain",
    "require_copy",
    "max_delete",
    "min_age",
    "metrics",
    "group_by",
    "series",
)
"""Options besides the rules that are invalid with ``--empty-trash``."""


def retention_for(
    directories: Sequence[str],
    given: Mapping[str, Any],
    config: str | ConfigDocument | None = None,
    *,
    finds_unread: bool = False,
) -> Retention:
    """Return the options of the command line, over those of a configuration.

    A configuration is searched for only if neither a directory nor a rule is given.

    Args:
        directories: Those of the command line.
        given: Its options, by the names of attributes.
        config: The configuration that it names, or one that was read already.
        finds_unread: Whether to search for a configuration that isn't read, to mention it.
    """
    rules = {name: given[name] for name in RULES if name in given}
    is_of_trash = "empty_trash" in given
    older_than = rules.pop("older_than", None) if is_of_trash else None
    if is_of_trash and (others := [*rules, *(name for name in _NOT_OF_TRASH if name in given)]):
        options, name = {**options_of(Policy), **options_of(PruneRequest)}, others[0]
        flag = options[name].flags[0] if name in options else f"--{name.replace('_', '-')}"
        raise UsageError(f"--empty-trash can't be combined with {flag}")
    policies = Policies(Policy(**rules)) if rules else None
    found = None
    # With a directory or a rule on the command line, a forgotten configuration must not remove more.
    if config is not None or not (directories or rules or "failed" in given):
        found = _configured(config, given)
    if found is not None and policies is not None and found.policies is not None:
        raise UsageError(f"{found.config} has rules, and so has the command line (omit one of them)")
    base = found or Retention(paths=())
    # Options of the command line replace keys, except for --exclude, which adds to them: leaving one out must
    # not expose checkpoints that the configuration excludes.
    request = {name: value for name, value in given.items() if name in attribute_names(PruneRequest)}
    if excluded := (*base.request.get("exclude", ()), *given.get("exclude", ())):
        request["exclude"] = excluded
    request = {**base.request, **request}
    return replace(
        base,
        paths=tuple(directories) or base.paths,
        policies=base.policies or policies,
        request=request,
        trash=given.get("trash", base.trash) or request.get("failed") == "remove",
        yes=given.get("yes", base.yes),
        older_than=older_than,
        directory_overrides_config=found is not None and bool(directories),
        unread_config=_unread_config() if finds_unread and config is None and found is None else None,
    )


def _configured(config: str | ConfigDocument | None, given: Collection[str]) -> Retention | None:
    """Return ``[retention]`` of a configuration, or of the one that is found."""
    if config is None:
        found = find_config()
        return None if found is None else read_retention(read_document(found), given=given)
    document = read_document(config, is_named=True) if isinstance(config, str) else config
    retention = read_retention(document, given=given)
    if retention is None:
        raise UsageError(f"{document.path}: nothing is set in [retention]")
    return retention


def _unread_config() -> str | None:
    """Return the configuration with ``[retention]`` that isn't read, or None; also if it can't be read."""
    try:
        path = find_config()
        tables = {} if path is None else read_document(path).tables
    except (UsageError, CheckpointError):  # the command doesn't read the file, so its errors don't matter
        return None
    return path if tables.get("retention") else None


# Rules for some series ------------------------------------------------------------------------------

_WILD = re.compile(r"[*?[]")


def unmatched_rules(retention: Retention, requests: Sequence[PruneRequest]) -> list[Problem]:
    """Return a problem for each rule of a configuration that no series in any of the directories matches."""
    # Such a rule is probably misspelled, and the other rules would remove the checkpoints that it should
    # keep: so nothing may be removed. Exceptions are rules for paths outside of the command line's directory,
    # and for unreadable directories, which are reported anyway.
    from ckpttool.core.report import Problem

    if retention.policies is None or not retention.policies.rules:
        return []
    groups, unseen = _groups(requests)
    base = os.path.realpath(retention.policies.directory)
    problems = []
    for rule in retention.policies.unmatched(tuple(groups)):
        # The innermost directory of all paths that the rule can match: its names before the first wildcard.
        names = takewhile(lambda name: not _WILD.search(name), rule.glob.split("/"))
        place = os.path.join(base, *names)
        is_elsewhere = retention.directory_overrides_config and not any(
            _is_within(place, fs.realpath(request.directory)) for request in requests
        )
        is_unseen = any(_is_within(place, one) or _is_within(one, place) for one in unseen)
        if not (is_elsewhere or is_unseen):
            message = f"no series matches {rule.glob!r}; nothing was removed"
            problems.append(Problem(rule.origin or "path", message))
    return problems


def _groups(requests: Sequence[PruneRequest]) -> tuple[list[Group], list[str]]:
    """Return the series of all directories, and the directories that can't be read."""
    from ckpttool.runs.survey import survey_directory

    groups: list[Group] = []
    unseen = []
    for request in requests:
        try:
            survey = survey_directory(request.directory, replace(request, metrics=()))
        except CheckpointError:  # pruning it raises the same
            unseen.append(fs.realpath(request.directory))
        else:
            groups += survey.groups
    return groups, unseen


def _is_within(path: str, directory: str) -> bool:
    return os.path.join(path, "").startswith(os.path.join(directory, ""))
