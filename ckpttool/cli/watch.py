"""``ckpttool watch``: as checkpoints land, verify them, and do what a configuration asks for."""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpttool.cli.options import config_option, interval_option, json_option, quiet_option
from ckpttool.cli.output import print_json, say, say_error, say_warning
from ckpttool.core.errors import UsageError
from ckpttool.core.options import EXECUTION_PANEL, SELECTION_PANEL, argument, jobs_option, option, same_option
from ckpttool.core.text import printable, seconds
from ckpttool.runs.scope import Scope
from ckpttool.storage import fs

if TYPE_CHECKING:
    from ckpttool.cli.watch_config import WatchSettings
    from ckpttool.runs.members.entry import Entry
    from ckpttool.runs.members.full_read import Progress
    from ckpttool.runs.watching import Judgement, WatchEvent, WatchRequest

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
    interval: str | None = interval_option("Look every TIME (30s). [default: 10s]")
    once: bool = option(
        "--once", help="Do what is to be done now, and end.", panel=EXECUTION_PANEL, default=False
    )
    exclude: Sequence[str] = same_option(Scope, "exclude")
    max_depth: int | None = same_option(Scope, "max_depth")
    jobs: int | None = jobs_option()
    json: bool = json_option("Print a line of JSON for each event.")
    quiet: bool = quiet_option("Print only what fails.")


def watch(command: WatchCommand) -> int:
    """Verify checkpoints as they land, and do what ckpttool.toml asks for: rename, copy, prune and log.

    A checkpoint has landed when it is complete and has not changed between two looks. Each is verified once.
    Without DIR, the nearest ckpttool.toml says what follows; with DIR, only one that --config names does.
    SIGTERM and Ctrl-C end the watch once what was begun is finished.
    """
    from ckpttool.cli.watch_config import watch_settings
    from ckpttool.runs.watching import DirectoryWatch
    from ckpttool.runs.watching import watch as watch_all

    jobs, quiet = command.jobs, command.quiet
    settings = watch_settings(command.directories, command.config, command.exclude, jobs)
    places = list({fs.realpath(one): one for one in settings.directories}.values())
    for place in places:
        if not fs.place_of(place).opens_by_path:
            raise UsageError(f"{place}: only directories of this machine can be watched")
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

    config = settings.config
    asked = repr((config.strict, config.rules)) if config and (config.strict or config.rules) else ""
    return WatchRequest(
        directory=directory,
        verify=lambda entry, progress: _verify(entry, progress, settings, jobs),
        asked=asked,
        steps=settings.steps,
        exclude=settings.exclude,
        max_depth=max_depth,
        jobs=jobs,
    )


def _verify(entry: Entry, progress: Progress, settings: WatchSettings, jobs: int | None) -> Judgement:
    """Verify a checkpoint as ``verify`` does; return the verdict, and what makes it fail, or None."""
    from ckpttool.cli.verify_config import settings_for
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
    return found, f"{word}: {f'{worst.where}: ' if worst.where else ''}{worst.message}"


# Ending ---------------------------------------------------------------------------------------------


@contextmanager
def _ending_by_signals() -> Iterator[tuple[Callable[[float], bool], Callable[[], bool]]]:
    """Yield what waits until somebody asks for the end, and what tells whether somebody has.

    A second signal does what it does without us.
    """
    woken, waker = socket.socketpair()
    before: dict[int, Any] = {}
    has_come = False

    def end(number: int, frame: object) -> None:
        nonlocal has_come
        has_come = True
        for one, handler in before.items():
            signal.signal(one, handler)
        waker.send(b".")

    def wait(seconds: float) -> bool:
        return not (has_come or select.select([woken], [], [], seconds)[0])

    with woken, waker:
        for one in (signal.SIGINT, signal.SIGTERM):
            before[one] = signal.signal(one, end)
        try:
            yield wait, lambda: has_come
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
        """Print what happened to stdout, and what failed to stderr."""
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
        """Return how many events of each kind there were."""
        parts = [f"{count:,} {status}" for status, count in self._counts.items()]
        return f"ended: {', '.join(parts) or 'nothing new'}"
