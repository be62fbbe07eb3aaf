"""``[watch]`` of a configuration, and which steps it and the other tables ask for."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpttool.cli.config import ConfigDocument, read_document
from ckpttool.cli.config_keys import beside, naming_template, paths_key, read
from ckpttool.cli.options import interval_option
from ckpttool.cli.verify_config import VerifyConfig, read_config
from ckpttool.core.errors import UsageError
from ckpttool.core.options import Reach, WrongValue, option
from ckpttool.core.urls import is_url

if TYPE_CHECKING:
    from ckpttool.runs.pruning.request import PruneRequest
    from ckpttool.runs.retention.rules import Rule
    from ckpttool.runs.watching import Step
    from ckpttool.transaction.paths import Problem

VERIFY = "verify"
_NEEDS = {
    "rename": "a template in [naming]",
    "copy": "copy-to",
    "prune": "a rule in [retention]",
    "log": "log-to",
}
"""What each step but the first needs in a configuration."""
_NAMES = (VERIFY, *_NEEDS)
_STEPS = f"a list of {', '.join(_NAMES)}; verify is always one of them"
_target = partial(option, reach=Reach.TARGET)


def _copy_target(place: str, directory: str) -> str:
    return place if is_url(place) else beside(place, directory)


def _log_target(text: str, directory: str) -> str:
    from ckpttool.runs.metrics.trackers import tracker_of

    tracker, (prefix, _, place) = tracker_of(text), text.partition(":")
    is_directory = tracker is not None and tracker.is_directory
    return f"{prefix}:{beside(place, directory)}" if is_directory else text


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSettings:
    """What is watched, and what is done there: ``[watch]``, with paths as seen from the current directory.

    Attributes:
        config: What the configuration says of ``verify``; None without one.
        steps: What follows, by name, in its order: each a ``runs.watching.Step``.
    """

    directories: tuple[str, ...] = paths_key("Directories to watch, relative to this file.")
    names: tuple[str, ...] | None = option(
        "steps",
        help="Do only this. [default: verify, and all that is configured]",
        expected=_STEPS,
        schema={"type": "array", "items": {"enum": [*_NAMES]}, "minItems": 1},
        example=[VERIFY, "prune"],
        reach=Reach.HARMLESS,
    )
    copy_to: str | None = _target(
        "copy-to", help="Copy valid checkpoints there.", resolve=_copy_target, example="s3://bucket/runs"
    )
    log_to: str | None = _target(
        "log-to", help="Record valid checkpoints there.", resolve=_log_target, example="mlflow:digits"
    )
    interval: str = interval_option("Time between two looks.", default="10s")
    config: VerifyConfig | None = None
    exclude: tuple[str, ...] = ()
    steps: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.names is not None and VERIFY not in self.names:
            raise WrongValue(_STEPS).of("steps", [*self.names])


def read_watch(document: ConfigDocument) -> WatchSettings:
    """Return what ``[watch]`` says."""
    values = read(WatchSettings, document, "watch")
    try:
        return WatchSettings(**values)
    except UsageError as failure:
        raise document.wrong("watch", str(failure)) from failure


def watch_settings(
    directories: Sequence[str], config: str | None, exclude: Sequence[str], jobs: int | None
) -> WatchSettings:
    """Return what the command line asks for, and the configuration that it names, or else the nearest."""
    from ckpttool.cli.config import find_config

    path = config or (None if directories else find_config())
    if path is None:
        return WatchSettings(directories=tuple(directories) or (os.curdir,), exclude=tuple(exclude))
    document = read_document(path, is_named=config is not None)
    checks = read_config(document)
    exclude = (*checks.exclude, *exclude)
    table = read_watch(document)
    configured = dict(_configured_steps(document, table, exclude, jobs))
    names = table.names or (VERIFY, *configured)
    if missing := [name for name in names if name not in (VERIFY, *configured)]:
        raise document.wrong("watch", f"steps: {missing[0]} needs {_NEEDS[missing[0]]}")
    if {"copy", "prune"} <= {*names} and (rule := _alteration(document)) is not None:
        why = f"copy-to goes with no {rule.key} in [retention]: what is slimmed is no copy"
        raise document.wrong("watch", why)
    return replace(
        table,
        directories=tuple(directories) or table.directories,
        config=checks,
        exclude=tuple(exclude),
        steps={name: step for name, step in configured.items() if name in names},
    )


# The steps ------------------------------------------------------------------------------------------


def _configured_steps(
    document: ConfigDocument, table: WatchSettings, exclude: Sequence[str], jobs: int | None
) -> Iterator[tuple[str, Step]]:
    """Yield the names of the steps that the tables ask for, in their order, and the steps."""
    from ckpttool.runs.watch_steps import copy_step, log_step, rename_step

    if (template := naming_template(document)) is not None:
        yield "rename", rename_step(template, exclude)
    if table.copy_to is not None:
        yield "copy", copy_step(table.copy_to, exclude, jobs)
    if (step := _prune_step(document, exclude, jobs)) is not None:
        yield "prune", step
    if table.log_to is not None:
        yield "log", log_step(table.log_to, jobs)


def _prune_step(document: ConfigDocument, exclude: Sequence[str], jobs: int | None) -> Step | None:
    from ckpttool.cli.retention_config import read_retention, retention_for, unmatched_rules
    from ckpttool.runs.watch_steps import prune_step

    given: dict[str, Any] = {"exclude": tuple(exclude), "yes": True}  # who watches isn't asked
    given |= {} if jobs is None else {"jobs": jobs}
    retention = read_retention(document, given=given)
    if retention is None or not retention.has_rules:
        return None
    under = partial(retention_for, given=given, config=document)

    def request_for(directory: str) -> PruneRequest:
        return under([directory]).requests()[0]

    def obstacles(request: PruneRequest) -> list[Problem]:
        return unmatched_rules(under([request.directory]), [request])

    return prune_step(request_for, obstacles, trash=under([os.curdir]).trash)


def _alteration(document: ConfigDocument) -> Rule | None:
    from ckpttool.cli.retention_config import read_retention

    retention = read_retention(document, given=("yes",))
    return None if retention is None or retention.policies is None else retention.policies.alteration
