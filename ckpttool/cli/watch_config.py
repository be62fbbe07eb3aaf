"""``[watch]`` of a configuration, and which steps it and the other tables ask for."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpttool.cli.config import (
    ConfigDocument,
    Reach,
    Reader,
    WrongValue,
    naming_template,
    one_text,
    read_document,
    read_table,
    takes,
    texts,
)
from ckpttool.core.amounts import seconds
from ckpttool.core.errors import UsageError
from ckpttool.core.urls import is_remote

if TYPE_CHECKING:
    from ckpttool.cli.verify_config import VerifyConfig
    from ckpttool.runs.pruning.request import PruneRequest
    from ckpttool.runs.watching import Step
    from ckpttool.transaction.paths import Problem

VERIFY = "verify"
_NAMES = (VERIFY, "rename", "copy", "prune", "log")
DEFAULT_INTERVAL = 10


@takes(type="array", items={"enum": [*_NAMES]}, minItems=1)
def _steps(value: object, key: str) -> tuple[str, ...]:
    names: tuple[str, ...] = texts(value, key)
    if not set(names) <= {*_NAMES} or VERIFY not in names:
        raise WrongValue(key, value, f"a list of {', '.join(_NAMES)}; verify is always one of them")
    return names


@takes(type="string", minLength=1)
def read_interval(value: object, key: str) -> int:
    """Return seconds, of which there must be some: a look takes a status of each file."""
    try:
        interval = seconds(one_text(value, key))
    except UsageError as failure:
        raise WrongValue(key, value, "a time such as 10s or 5min") from failure
    if interval < 1:
        raise WrongValue(key, value, "a time of at least 1s")
    return interval


KEYS: Mapping[str, Reader] = {
    "paths": texts.described(
        "Directories to watch, relative to this file.", Reach.BELOW, default=[os.curdir]
    ),
    "steps": _steps.described(
        "Do only this. [default: verify, and all that is configured]",
        Reach.HARMLESS,
        examples=[[VERIFY, "prune"]],
    ),
    "copy-to": one_text.described(
        "Copy valid checkpoints there.", Reach.TARGET, examples=["s3://bucket/runs"]
    ),
    "log-to": one_text.described("Record valid checkpoints there.", Reach.TARGET, examples=["mlflow:digits"]),
    "interval": read_interval.described(
        "Time between two looks.", Reach.HARMLESS, default=f"{DEFAULT_INTERVAL}s"
    ),
}


def read_watch(document: ConfigDocument) -> dict[str, Any]:
    """Return what ``[watch]`` says, with paths as seen from the current directory."""
    values = read_table(document, "watch", document.table("watch"), KEYS)
    here = os.path.dirname(document.path)
    if "paths" in values:
        values["paths"] = [os.path.normpath(os.path.join(here, one)) for one in values["paths"]]
    target = values.get("copy-to")
    if target is not None and not is_remote(target):
        values["copy-to"] = os.path.normpath(os.path.join(here, target))
    tracker, mark, place = values.get("log-to", "").partition(":")
    if tracker in ("wandb", "tensorboard"):
        values["log-to"] = f"{tracker}{mark}{os.path.normpath(os.path.join(here, place))}"
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSettings:
    """What is watched, and what is done there.

    Attributes:
        config: What the configuration says of ``verify``; None without one.
        steps: What follows, by name, in its order.
    """

    directories: tuple[str, ...]
    interval: int = DEFAULT_INTERVAL
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
    values = read_watch(document)
    configured = {
        name: step
        for name, make in STEPS.items()
        if (step := make(document, values, exclude, jobs)) is not None
    }
    names = values.get("steps", (VERIFY, *configured))
    if missing := [name for name in names if name not in (VERIFY, *configured)]:
        raise document.wrong("watch", f"steps: {missing[0]} needs {_NEEDS[missing[0]]}")
    if {"copy", "prune"} <= {*names} and _slims(document):
        raise document.wrong("watch", "copy-to goes with no full in [retention]: what is slimmed is no copy")
    here = os.path.dirname(path) or os.curdir
    return WatchSettings(
        directories=tuple(directories) or tuple(values.get("paths", (here,))),
        interval=values.get("interval", DEFAULT_INTERVAL),
        config=checks,
        exclude=tuple(exclude),
        steps={name: step for name, step in configured.items() if name in names},
    )


# The steps ------------------------------------------------------------------------------------------


def _rename(
    document: ConfigDocument, values: Mapping[str, Any], exclude: Sequence[str], jobs: int | None
) -> Step | None:
    from ckpttool.runs.watch_steps import rename_step

    template = naming_template(document)
    return None if template is None else rename_step(template, exclude)


def _copy(
    document: ConfigDocument, values: Mapping[str, Any], exclude: Sequence[str], jobs: int | None
) -> Step | None:
    from ckpttool.runs.watch_steps import copy_step

    return copy_step(values["copy-to"], exclude, jobs) if "copy-to" in values else None


def _prune(
    document: ConfigDocument, values: Mapping[str, Any], exclude: Sequence[str], jobs: int | None
) -> Step | None:
    from ckpttool.cli.prune_options import read_prune_options, unmatched_rules
    from ckpttool.cli.retention_config import read_retention
    from ckpttool.runs.watch_steps import prune_step

    given: dict[str, Any] = {"exclude": tuple(exclude), "yes": True}  # who watches isn't asked
    given |= {} if jobs is None else {"jobs": jobs}
    retention = read_retention(document, given=given)
    if retention is None or (retention.policies is None and retention.values.get("failed") is None):
        return None
    options_for = partial(read_prune_options, given=given, config=document)

    def request_for(directory: str) -> PruneRequest:
        return options_for([directory]).requests()[0]

    def obstacles(request: PruneRequest) -> list[Problem]:
        return unmatched_rules(options_for([request.directory]), [request])

    return prune_step(request_for, obstacles, trash=options_for([os.curdir]).trash)


def _log(
    document: ConfigDocument, values: Mapping[str, Any], exclude: Sequence[str], jobs: int | None
) -> Step | None:
    from ckpttool.runs.watch_steps import log_step

    return log_step(values["log-to"], jobs) if "log-to" in values else None


def _slims(document: ConfigDocument) -> bool:
    from ckpttool.cli.retention_config import read_retention

    retention = read_retention(document, given=("yes",))
    policies = None if retention is None else retention.policies
    return policies is not None and any(one is not None and one.full is not None for one in policies.each)


MakeStep = Callable[[ConfigDocument, Mapping[str, Any], Sequence[str], "int | None"], "Step | None"]
STEPS: Mapping[str, MakeStep] = {"rename": _rename, "copy": _copy, "prune": _prune, "log": _log}
"""What follows once checkpoints are verified, in this order; each is None unless it is configured."""
_NEEDS = {
    "rename": "a template in [naming]",
    "copy": "copy-to",
    "prune": "a rule in [retention]",
    "log": "log-to",
}
