"""``[watch]`` of a configuration, and which steps it and the other tables ask for."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpttool.cli.config import ConfigDocument, read_document
from ckpttool.cli.config_keys import beside, naming_template, paths_key, read
from ckpttool.cli.options import interval_option
from ckpttool.core.amounts import seconds
from ckpttool.core.options import Reach, WrongValue, option
from ckpttool.core.urls import is_remote

if TYPE_CHECKING:
    from ckpttool.cli.verify_config import VerifyConfig
    from ckpttool.runs.pruning.request import PruneRequest
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
DEFAULT_INTERVAL = "10s"


def _target(place: str, directory: str) -> str:
    return place if is_remote(place) else beside(place, directory)


def _log_target(text: str, directory: str) -> str:
    tracker, mark, place = text.partition(":")
    is_directory = tracker in ("wandb", "tensorboard")
    return f"{tracker}{mark}{beside(place, directory)}" if is_directory else text


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchTable:
    """What ``[watch]`` says, with paths as seen from the current directory."""

    paths: tuple[str, ...] = paths_key("Directories to watch, relative to this file.")
    steps: tuple[str, ...] | None = option(
        "steps",
        help="Do only this. [default: verify, and all that is configured]",
        expected=_STEPS,
        schema={"type": "array", "items": {"enum": [*_NAMES]}, "minItems": 1},
        example=[VERIFY, "prune"],
        reach=Reach.HARMLESS,
    )
    copy_to: str | None = option(
        "copy-to",
        help="Copy valid checkpoints there.",
        resolve=_target,
        example="s3://bucket/runs",
        reach=Reach.TARGET,
    )
    log_to: str | None = option(
        "log-to",
        help="Record valid checkpoints there.",
        resolve=_log_target,
        example="mlflow:digits",
        reach=Reach.TARGET,
    )
    interval: str = interval_option("Time between two looks.", default=DEFAULT_INTERVAL)


def read_watch(document: ConfigDocument) -> WatchTable:
    """Return what ``[watch]`` says."""
    found = WatchTable(**read(WatchTable, document, "watch"))
    if found.steps is not None and VERIFY not in found.steps:
        raise document.wrong("watch", str(WrongValue(_STEPS).of("steps", [*found.steps])))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSettings:
    """What is watched, and what is done there.

    Attributes:
        interval: Seconds between two looks.
        config: What the configuration says of ``verify``; None without one.
        steps: What follows, by name, in its order.
    """

    directories: tuple[str, ...]
    interval: int = seconds(DEFAULT_INTERVAL)
    config: VerifyConfig | None = None
    exclude: tuple[str, ...] = ()
    steps: Mapping[str, Step] = field(default_factory=dict)


def watch_settings(
    directories: Sequence[str], config: str | None, exclude: Sequence[str], jobs: int | None
) -> WatchSettings:
    """Return what the command line asks for, and the configuration that it names, or else the nearest."""
    from ckpttool.cli.config import find_config
    from ckpttool.cli.verify_config import read_config

    path = config or (None if directories else find_config())
    if path is None:
        return WatchSettings(directories=tuple(directories) or (os.curdir,), exclude=tuple(exclude))
    document = read_document(path, is_named=config is not None)
    checks = read_config(document)
    exclude = (*checks.exclude, *exclude)
    table = read_watch(document)
    configured = dict(_configured_steps(document, table, exclude, jobs))
    names = table.steps or (VERIFY, *configured)
    if missing := [name for name in names if name not in (VERIFY, *configured)]:
        raise document.wrong("watch", f"steps: {missing[0]} needs {_NEEDS[missing[0]]}")
    if {"copy", "prune"} <= {*names} and _slims(document):
        raise document.wrong("watch", "copy-to goes with no full in [retention]: what is slimmed is no copy")
    return WatchSettings(
        directories=tuple(directories) or table.paths,
        interval=seconds(table.interval),
        config=checks,
        exclude=tuple(exclude),
        steps={name: step for name, step in configured.items() if name in names},
    )


# The steps ------------------------------------------------------------------------------------------


def _configured_steps(
    document: ConfigDocument, table: WatchTable, exclude: Sequence[str], jobs: int | None
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
    from ckpttool.cli.prune_options import read_prune_options, unmatched_rules
    from ckpttool.cli.retention_config import read_retention
    from ckpttool.runs.watch_steps import prune_step

    given: dict[str, Any] = {"exclude": tuple(exclude), "yes": True}  # who watches isn't asked
    given |= {} if jobs is None else {"jobs": jobs}
    retention = read_retention(document, given=given)
    if retention is None or (retention.policies is None and not retention.failed):
        return None
    options_for = partial(read_prune_options, given=given, config=document)

    def request_for(directory: str) -> PruneRequest:
        return options_for([directory]).requests()[0]

    def obstacles(request: PruneRequest) -> list[Problem]:
        return unmatched_rules(options_for([request.directory]), [request])

    return prune_step(request_for, obstacles, trash=options_for([os.curdir]).trash)


def _slims(document: ConfigDocument) -> bool:
    from ckpttool.cli.retention_config import read_retention

    retention = read_retention(document, given=("yes",))
    policies = None if retention is None else retention.policies
    return policies is not None and any(one is not None and one.full is not None for one in policies.each)
