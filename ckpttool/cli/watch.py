"""``ckpttool watch``: verify new checkpoints, and rename, copy, prune and log them as configured."""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpttool.cli.config import ConfigDocument, nearest_document
from ckpttool.cli.config_keys import naming_template, path_from_config, paths_key, read
from ckpttool.cli.options import config_option, interval_option, json_option, quiet_option
from ckpttool.cli.output import print_json, say, say_error, say_warning
from ckpttool.cli.verify_config import VerifyConfig, read_config, settings_for
from ckpttool.core.errors import UsageError
from ckpttool.core.options import (
    EXECUTION_PANEL,
    SELECTION_PANEL,
    Reach,
    WrongValue,
    argument,
    jobs_option,
    option,
    same_option,
)
from ckpttool.core.text import printable, seconds
from ckpttool.core.urls import is_url
from ckpttool.runs.scope import Scope
from ckpttool.storage import fs

if TYPE_CHECKING:
    from ckpttool.core.report import Problem
    from ckpttool.runs.entry import Entry
    from ckpttool.runs.look import Progress
    from ckpttool.runs.retention.request import PruneRequest
    from ckpttool.runs.watching import Judgement, Step, WatchEvent, WatchRequest

_FAILED = "failed"
_ON_STDERR = (_FAILED, "warning")


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchCommand:
    """The options of ``watch``."""

    directories: Sequence[str] = argument(
        "[DIR...]",
        "Directories of checkpoints. [default: paths in ckpttool.toml, or .]",
        default=(),
    )
    config: str | None = config_option("Read steps and rules from this file.", SELECTION_PANEL)
    interval: str | None = interval_option("Look for changes every TIME (30s). [default: 10s]")
    once: bool = option(
        "--once", help="Process the current checkpoints, and exit.", panel=EXECUTION_PANEL, default=False
    )
    exclude: Sequence[str] = same_option(Scope, "exclude")
    max_depth: int | None = same_option(Scope, "max_depth")
    jobs: int | None = jobs_option()
    json: bool = json_option("Print a line of JSON for each event.")
    quiet: bool = quiet_option("Print only failures.")


def watch(command: WatchCommand) -> int:
    """Verify checkpoints as they land, then rename, copy, prune and log them if ckpttool.toml says so.

    A checkpoint has landed when it is complete and has not changed between two looks. Each is verified once.
    Without DIR, the nearest ckpttool.toml sets the further steps; with DIR, only --config does. SIGTERM and
    Ctrl-C end the watch after the step in progress.
    """
    from ckpttool.runs.watching import DirectoryWatch
    from ckpttool.runs.watching import watch as watch_all

    jobs, quiet = command.jobs, command.quiet
    settings = watch_settings(command.directories, command.config, command.exclude, jobs)
    places = list({fs.realpath(one): one for one in settings.directories}.values())
    for place in places:
        if not fs.place_of(place).opens_by_path:
            raise UsageError(f"{place}: only local directories can be watched")
    every = seconds(command.interval or settings.interval)
    lines = _EventLines(json=command.json, quiet=quiet, is_one=len(places) == 1)
    with ExitStack() as stack:
        wait, is_ending = stack.enter_context(_ending_by_signals())
        watches = [
            stack.enter_context(
                DirectoryWatch(
                    _request(one, settings, command.max_depth, jobs),
                    lines.print,
                    is_ending=is_ending,
                )
            )
            for one in places
        ]
        if not quiet:
            steps = ", ".join(["verify", *settings.steps])
            if settings.config is None:
                steps = "verify only (--config FILE sets more steps)"
            again = "once" if command.once else f"every {every} s"
            say(f"watching {', '.join(map(printable, places))} {again}: {steps}")
        watch_all(watches, wait, interval=every, once=command.once)
    if not quiet:
        say(lines.summary)
    return int(any(one.has_problems for one in watches))


def _request(
    directory: str, settings: WatchSettings, max_depth: int | None, jobs: int | None
) -> WatchRequest:
    from ckpttool.runs.watching import WatchRequest

    # Verdicts are recorded with ``asked``: with other rules or ``strict``, checkpoints are verified again.
    config = settings.config
    options = repr((config.strict, config.rules)) if config and (config.strict or config.rules) else ""
    return WatchRequest(
        directory=directory,
        verify=lambda entry, progress: _verify(entry, progress, settings, jobs),
        verify_options=options,
        steps=settings.steps,
        exclude=settings.exclude,
        max_depth=max_depth,
        jobs=jobs,
    )


def _verify(entry: Entry, progress: Progress, settings: WatchSettings, jobs: int | None) -> Judgement:
    """Verify a checkpoint as ``verify`` does; return the verdict, and the reason if it fails."""
    from ckpttool.core.report import Severity
    from ckpttool.ops.ignored_findings import apply_ignores
    from ckpttool.ops.verify import verify

    config = settings.config
    strict = config is not None and config.strict
    asked = None if config is None else settings_for(config, entry.unit.path)
    with progress(entry.path, entry.nbytes) as advance:
        found = verify(
            entry.unit,
            strict=strict,
            jobs=jobs,
            advance=advance,
            prediction=asked.request if asked else None,
            ignores=asked.ignores if asked else (),
        )
    judged = apply_ignores(found, asked.ignores, strict=strict) if asked and asked.ignores else found
    if judged.passes(strict=strict):
        return found, None
    findings = [one for one in judged.findings if one.ignored is None]
    worst = min(findings, key=lambda one: [*Severity].index(one.severity), default=None)
    if worst is None:
        return found, "not everything could be checked"
    word = "invalid" if not judged.is_valid else judged.safety.value
    return found, f"{word}: {worst.placed_message}"


# Configuration --------------------------------------------------------------------------------------


VERIFY = "verify"
_NEEDS = {
    "rename": "a template in [naming]",
    "copy": "copy-to",
    "prune": "a rule in [retention]",
    "log": "log-to",
}
"""The configuration that each step but verify needs."""
_NAMES = (VERIFY, *_NEEDS)
_STEPS = f"a list of {', '.join(_NAMES)}, which must include verify"
_target = partial(option, reach=Reach.TARGET)


def _copy_target(place: str, directory: str) -> str:
    return place if is_url(place) else path_from_config(place, directory)


def _log_target(text: str, directory: str) -> str:
    from ckpttool.runs.trackers import tracker_of

    tracker, (prefix, _, place) = tracker_of(text), text.partition(":")
    is_directory = tracker is not None and tracker.is_directory
    return f"{prefix}:{path_from_config(place, directory)}" if is_directory else text


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSettings:
    """The table ``[watch]``, with paths relative to the current directory, and the configured steps.

    Attributes:
        config: The table ``[verify]``; None without a configuration.
        exclude: Globs of skipped paths, of the command line and of ``[verify]``.
        steps: Each ``runs.watching.Step`` by its name, in the order of execution.
    """

    directories: tuple[str, ...] = paths_key("Directories to watch, relative to this file.")
    names: tuple[str, ...] | None = option(
        "steps",
        help="Run only these steps. [default: verify, and all that are configured]",
        expected=_STEPS,
        schema={"type": "array", "items": {"enum": [*_NAMES]}, "minItems": 1},
        example=[VERIFY, "prune"],
        reach=Reach.HARMLESS,
    )
    copy_to: str | None = _target(
        "copy-to",
        help="Copy valid checkpoints to this place.",
        resolve=_copy_target,
        example="s3://bucket/runs",
    )
    log_to: str | None = _target(
        "log-to",
        help="Record valid checkpoints in this tracker.",
        resolve=_log_target,
        example="mlflow:digits",
    )
    interval: str = interval_option("Time between two looks.", default="10s")
    config: VerifyConfig | None = None
    exclude: tuple[str, ...] = ()
    steps: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.names is not None and VERIFY not in self.names:
            raise WrongValue(_STEPS).of("steps", [*self.names])


def read_watch(document: ConfigDocument) -> WatchSettings:
    """Return the table ``[watch]``."""
    values = read(WatchSettings, document, "watch")
    try:
        return WatchSettings(**values)
    except UsageError as failure:
        raise document.wrong("watch", str(failure)) from failure


def watch_settings(
    directories: Sequence[str], config: str | None, exclude: Sequence[str], jobs: int | None
) -> WatchSettings:
    """Return the settings of the command line, over those of the named or the nearest configuration."""
    from ckpttool.cli.retention_config import read_retention

    document = None if directories and not config else nearest_document(config)
    if document is None:
        return WatchSettings(directories=tuple(directories) or (os.curdir,), exclude=tuple(exclude))
    checks = read_config(document)
    exclude = (*checks.exclude, *exclude)
    table = read_watch(document)
    configured = dict(_configured_steps(document, table, exclude, jobs))
    names = table.names or (VERIFY, *configured)
    if missing := [name for name in names if name not in (VERIFY, *configured)]:
        raise document.wrong("watch", f"steps: {missing[0]} needs {_NEEDS[missing[0]]}")
    if {"copy", "prune"} <= {*names}:
        retention = read_retention(document, given=("yes",))
        rule = None if retention is None or retention.policies is None else retention.policies.alteration
        if rule is not None:
            why = (
                f"copy-to can't be combined with {rule.key} in [retention]: slimmed checkpoints are no copies"
            )
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
    """Yield name and step for each configured step, in the order of execution."""
    # Renamed before the copy, so that the copy has the final names. Pruned after it, so that a checkpoint is
    # copied before it is removed.
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

    given: dict[str, Any] = {"exclude": tuple(exclude), "yes": True}  # a watch asks no questions
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


# Ending ---------------------------------------------------------------------------------------------


@contextmanager
def _ending_by_signals() -> Iterator[tuple[Callable[[float], bool], Callable[[], bool]]]:
    """Yield a function that waits for a time or a signal, and one that returns whether a signal was received.

    A second signal has its usual effect.
    """
    # The handler only sets a flag and writes to a socket, which wakes ``select``: Python resumes a ``sleep``
    # after a signal, and an exception in the handler could interrupt a removal. It restores the earlier
    # handlers at once, so that a second Ctrl-C ends a step that takes too long.
    woken, waker = socket.socketpair()
    before: dict[int, Any] = {}
    was_received = False

    def end(number: int, frame: object) -> None:
        nonlocal was_received
        was_received = True
        for one, handler in before.items():
            signal.signal(one, handler)
        waker.send(b".")

    def wait(seconds: float) -> bool:
        return not (was_received or select.select([woken], [], [], seconds)[0])

    with woken, waker:
        for one in (signal.SIGINT, signal.SIGTERM):
            before[one] = signal.signal(one, end)
        try:
            yield wait, lambda: was_received
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


# Printing -------------------------------------------------------------------------------------------


class _EventLines:
    """Prints events, a line each, and counts them."""

    def __init__(self, *, json: bool, quiet: bool, is_one: bool) -> None:
        self._json, self._quiet, self._is_one = json, quiet, is_one
        self._width = 0
        self._counts: Counter[str] = Counter()

    def print(self, event: WatchEvent) -> None:
        """Print an event to stdout, or a failure to stderr."""
        status = event.status
        self._counts[status] += 1
        if status == _FAILED:
            step = "" if event.step in ("look", "verify") else f"{event.step}: "
            say_error(f"{event.path}: {step}{event.reason}")
        elif status == "warning" and not self._quiet:
            say_warning(f"{event.step}: {event.reason}")
        if self._json and not (self._quiet and status != _FAILED):
            moment = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            print_json({"schema": "ckpttool.watch/1", "time": moment, **event.document()})
        elif not (self._quiet or self._json or status in _ON_STDERR):
            name = printable(os.path.relpath(event.path, event.directory) if self._is_one else event.path)
            self._width = max(self._width, len(name))
            print(f"{time.strftime('%H:%M:%S')}  {name:{self._width}}  {printable(event.words)}", flush=True)

    @property
    def summary(self) -> str:
        """Return the number of events of each kind."""
        parts = [f"{count:,} {status}" for status, count in self._counts.items()]
        return f"ended: {', '.join(parts) or 'nothing new'}"
