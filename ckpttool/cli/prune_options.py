"""The options of ``prune`` and ``list``: from the command line, and ``[retention]`` of a configuration."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from ckpttool.cli.options import (
    check_option,
    config_option,
    dry_run_option,
    in_output,
    json_option,
    quiet_option,
    trash_option,
    verbose_option,
    yes_option,
)
from ckpttool.core.errors import CheckpointError, UsageError
from ckpttool.core.options import (
    EXECUTION_PANEL,
    SELECTION_PANEL,
    argument,
    group,
    jobs_option,
    option,
    options_of,
)
from ckpttool.io import fs
from ckpttool.runs.pruning.request import PruneRequest
from ckpttool.runs.retention.policies import Policies
from ckpttool.runs.retention.rules import RULES, Policy

if TYPE_CHECKING:
    from ckpttool.cli.config import ConfigDocument
    from ckpttool.cli.retention_config import Retention
    from ckpttool.runs.members.order import Group
    from ckpttool.runs.retention.policies import PathRule
    from ckpttool.transaction.paths import Problem

_REQUEST_OPTIONS = tuple(
    one.name for one in fields(PruneRequest) if one.name not in ("directory", "policy", "policies")
)
_NOT_WITH_EMPTY_TRASH = (
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


def directory_or_paths() -> Any:
    return argument(
        "[DIR]", "Directory of checkpoints. [default: paths in ckpttool.toml, or .]", default=None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneCommand:
    """The options of ``prune``."""

    directory: str | None = directory_or_paths()
    rules: Mapping[str, Any] = group(Policy)
    request: Mapping[str, Any] = group(PruneRequest)
    require_copy: str | None = option(
        "--require-copy",
        metavar="LOCATION",
        help="Keep what LOCATION is not proven to have, byte for byte.",
        panel=EXECUTION_PANEL,
    )
    config: str | None = config_option("Read paths and rules from this file.", SELECTION_PANEL)
    dry_run: bool = dry_run_option("Show what would be removed; remove nothing.")
    check: bool = check_option("Remove nothing; exit with 1 if something would be removed.")
    yes: bool = yes_option()
    trash: bool = trash_option()
    empty_trash: bool = option(
        "--empty-trash",
        help="Delete what is in the trash, and nothing else.",
        panel=EXECUTION_PANEL,
        default=False,
    )
    jobs: int | None = jobs_option()
    explain: str | None = in_output(
        "--explain", metavar="PATH", help="Explain why PATH is kept or removed; remove nothing."
    )
    json: bool = json_option()
    quiet: bool = quiet_option()
    verbose: bool = verbose_option()

    @property
    def is_dry(self) -> bool:
        """Tell whether nothing is changed."""
        return self.dry_run or self.check


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneOptions:
    """Which directories are pruned, and how.

    Attributes:
        paths: The directories, each of which is pruned for itself; empty if nobody named one.
        policies: Which policy each series has; None if there is no rule.
        request_options: Further attributes of a ``PruneRequest``, by their names.
        trash: Whether removed checkpoints go to the trash; those of failed series always do.
        yes: Whether nobody is asked.
        older_than: With ``--empty-trash``: only what was removed so many seconds ago.
        is_narrowed: Whether the command line's directory replaces those of the configuration.
        config: The configuration that was read.
        unread_config: A configuration that would have been read without a directory and rules.
    """

    paths: tuple[str, ...] = ()
    policies: Policies | None = None
    request_options: Mapping[str, Any] = field(default_factory=dict)
    trash: bool = False
    yes: bool = False
    older_than: int | None = None
    is_narrowed: bool = False
    config: str | None = None
    unread_config: str | None = None

    @property
    def recursive(self) -> bool:
        """Tell whether directories are descended into."""
        return bool(self.request_options.get("recursive", True))

    def requests(self) -> list[PruneRequest]:
        """Return one request for each directory; an error if no rule says what to keep."""
        if self.policies is None and self.request_options.get("failed") is None:
            more = "" if self.paths else "; or write a ckpttool.toml with [retention]"
            if self.unread_config is not None:
                more = f"; {self.unread_config} is not read, since a directory was given: --config reads it"
            raise UsageError(f"no rule says which checkpoints to keep (--keep N keeps the newest N{more})")
        return [
            PruneRequest(directory=path, policies=self.policies, **self.request_options)
            for path in self.directories()
        ]

    def directories(self) -> list[str]:
        """Return the directories, each once."""
        places: dict[str, str] = {}
        for path in self.paths or (os.curdir,):
            places.setdefault(fs.realpath(path), path)
        return list(places.values())


def read_prune_options(
    directories: Sequence[str],
    given: Mapping[str, Any],
    config: str | ConfigDocument | None = None,
    *,
    tells_unread: bool = False,
) -> PruneOptions:
    """Return the options of the command line, over those of a configuration.

    A configuration is searched for only if neither a directory nor a rule is given.

    Args:
        directories: Those of the command line.
        given: Its options, by the names of attributes.
        config: The configuration that it names, or one that was read already.
        tells_unread: Whether to search for a configuration that is not read, to mention it.
    """
    older_than = given.get("older_than") if "empty_trash" in given else None
    rules = {name: given[name] for name in RULES if name in given}
    if older_than is not None:  # it is of the trash then, and no rule
        del rules["older_than"]
    others = [*rules, *(name for name in _NOT_WITH_EMPTY_TRASH if name in given)]
    if "empty_trash" in given and others:
        raise UsageError(f"--empty-trash looks at no checkpoint (leave {_flag(others[0])} out)")
    policies = Policies(Policy(**rules)) if rules else None
    retention = None
    if config is not None or not (directories or rules or "failed" in given):
        retention = _retention_config(config, given)
    if retention is not None and policies is not None and retention.policies is not None:
        raise UsageError(f"{retention.path} has rules, and so has the command line (leave out one of them)")
    values = {} if retention is None else retention.values
    values.update(given, exclude=(*values.get("exclude", ()), *given.get("exclude", ())))
    paths = values.pop("paths", ())
    return PruneOptions(
        paths=tuple(directories) or paths,
        policies=policies if retention is None or retention.policies is None else retention.policies,
        request_options={name: values[name] for name in _REQUEST_OPTIONS if name in values},
        trash=values.get("trash", False) or values.get("failed") == "remove",
        yes=values.get("yes", False),
        older_than=older_than,
        is_narrowed=retention is not None and bool(directories),
        config=None if retention is None else retention.path,
        unread_config=_unread_config() if config is None and retention is None and tells_unread else None,
    )


def _unread_config() -> str | None:
    """Return the configuration with rules that is not read, or None; one that can't be read has none."""
    from ckpttool.cli.config import find_config, read_document

    try:
        path = find_config()
        tables = {} if path is None else read_document(path).tables
    except (UsageError, CheckpointError):  # nobody asked for it
        return None
    return path if tables.get("retention") else None


def _retention_config(config: str | ConfigDocument | None, given: Collection[str]) -> Retention | None:
    """Return ``[retention]`` of a configuration, or of the one that is found."""
    from ckpttool.cli.config import find_config, read_document
    from ckpttool.cli.retention_config import read_retention

    if config is None:
        found = find_config()
        return None if found is None else read_retention(read_document(found), given=given)
    document = read_document(config, is_named=True) if isinstance(config, str) else config
    retention = read_retention(document, given=given)
    if retention is None:
        raise UsageError(f"{document.path}: nothing is set in [retention]")
    return retention


def _flag(name: str) -> str:
    options = {**options_of(Policy), **options_of(PruneRequest)}
    return options[name].flags[0] if name in options else f"--{name.replace('_', '-')}"


_WILD = re.compile(r"[*?[]")


def unmatched_rules(options: PruneOptions, requests: Sequence[PruneRequest]) -> list[Problem]:
    """Return a problem for each rule of a configuration that no series in any of the directories matches.

    Such a rule is most likely misspelled, and what it was to keep would be pruned by the rules for all
    others: so nothing may be removed. A rule for what lies outside of the command line's directory is not
    meant, nor one for what can't be read, which is an error of its own.
    """
    from ckpttool.transaction.paths import Problem

    if options.policies is None or not options.policies.rules:
        return []
    groups, unseen = _groups(requests)
    base = os.path.realpath(options.policies.directory)
    problems = []
    for rule in options.policies.unmatched(tuple(groups)):
        place = _fixed_directory(rule, base)
        is_elsewhere = options.is_narrowed and not any(
            _is_within(place, fs.realpath(request.directory)) for request in requests
        )
        is_unseen = any(_is_within(place, one) or _is_within(one, place) for one in unseen)
        if not (is_elsewhere or is_unseen):
            message = f"no series matches {rule.glob!r}; nothing was removed"
            problems.append(Problem(rule.origin or "path", message))
    return problems


def _groups(requests: Sequence[PruneRequest]) -> tuple[list[Group], list[str]]:
    """Return the series of all directories, and the directories that can't be read."""
    from ckpttool.runs.surveying.survey import survey_directory

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


def _fixed_directory(rule: PathRule, base: str) -> str:
    """Return the directory that everything lies in which a rule can match."""
    names = rule.glob.split("/")
    return os.path.join(base, *takewhile(lambda name: not _WILD.search(name), names))


def _is_within(path: str, directory: str) -> bool:
    return os.path.join(path, "").startswith(os.path.join(directory, ""))
