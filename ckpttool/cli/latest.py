"""``ckpttool latest``: the newest checkpoint that is intact, for a job to resume from."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpttool.cli.options import (
    Depth,
    Mode,
    json_option,
    mode_option,
    null_option,
    quiet_option,
)
from ckpttool.cli.output import COULD_NOT, grouped_messages, print_json, say, say_error, say_warning
from ckpttool.cli.paths import print_paths, say_inferred_mode, say_journals
from ckpttool.cli.progress import ProgressLines
from ckpttool.cli.streams import discard
from ckpttool.core.errors import UsageError
from ckpttool.core.options import EXECUTION_PANEL, SELECTION_PANEL, argument, jobs_option, option, same_option
from ckpttool.core.printable import printable
from ckpttool.runs.scope import Scope

if TYPE_CHECKING:
    from ckpttool.runs.resuming.latest import Latest

_MAX_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LatestOptions:
    """The options of ``latest``."""

    directories: Sequence[str] = argument(
        "[DIR...]", "Directories of checkpoints. [default: .]", default=(os.curdir,)
    )
    best: str | None = option(
        "--best",
        metavar="METRIC",
        complete="metric",
        help="Print the checkpoint with the best METRIC instead.",
        panel=SELECTION_PANEL,
    )
    mode: Mode | None = mode_option(SELECTION_PANEL)
    metrics: Sequence[str] = same_option(Scope, "metrics")
    before: str | None = option(
        "--before", metavar="STEP", help="Print the newest saved before this step.", panel=SELECTION_PANEL
    )
    allow_unsafe: bool = option(
        "--allow-unsafe",
        help="Also accept a checkpoint that runs code when loaded.",
        panel=SELECTION_PANEL,
        default=False,
    )
    resume_exact: bool = option(
        "--resume-exact",
        help="Accept only checkpoints from which a training resumes exactly.",
        panel=SELECTION_PANEL,
        default=False,
    )
    recursive: bool = same_option(Scope, "recursive")
    exclude: Sequence[str] = same_option(Scope, "exclude")
    max_depth: int | None = same_option(Scope, "max_depth")
    verify: Depth = option(
        "--verify",
        help="Check only the structure of the result, or every byte. [default: full]",
        panel=EXECUTION_PANEL,
        default="full",
    )
    wait: str | None = option(
        "--wait",
        metavar="TIME",
        help="Wait up to TIME (60 seconds, or 2m) until the newest is written.",
        panel=EXECUTION_PANEL,
    )
    missing_ok: bool = option(
        "--missing-ok",
        help="If there is no checkpoint yet, print nothing and exit with 0.",
        panel=EXECUTION_PANEL,
        default=False,
    )
    jobs: int | None = jobs_option()
    json: bool = json_option()
    null: bool = null_option()
    quiet: bool = quiet_option()


def latest(options: LatestOptions) -> int:
    """Print the path of the newest intact checkpoint.

    Of several directories, such as a disk and its copy in a store, the newest of all.
    """
    from ckpttool.core.amounts import seconds
    from ckpttool.runs.members.full_read import no_progress
    from ckpttool.runs.resuming.several_places import latest_of

    places, quiet = options.directories, options.quiet
    found = latest_of(
        places,
        recursive=options.recursive,
        exclude=options.exclude,
        max_depth=options.max_depth,
        metrics=options.metrics,
        depth=options.verify,
        best=options.best,
        mode=options.mode,
        before=_parse_step(options.before),
        allow_unsafe=options.allow_unsafe,
        resume_exact=options.resume_exact,
        missing_ok=options.missing_ok,
        wait=0.0 if options.wait is None else seconds(options.wait, is_lenient=True),
        tell=(lambda text: None) if quiet else _tell,
        jobs=options.jobs,
        progress=no_progress if quiet else ProgressLines(),
    )
    if not quiet:
        say_inferred_mode(options.best, options.mode)
        if found.waited_for:
            names = ", ".join(found.waited_for[:_MAX_NAMED])
            more = ", …" if len(found.waited_for) > _MAX_NAMED else ""
            _tell(f"waited {found.waited:.1f} s for {names}{more}")
        say_journals(found.journals)
        for path, message in grouped_messages(found.passed_over):
            say_warning(f"{path}: skipped: {message}")
        for warning in found.warnings:
            say_warning(warning)
        if found.entry is not None and found.resume is not None and sys.stderr.isatty():
            _tell(f"{found.entry.path} resumes {found.resume}")
    try:
        _print(found, json=options.json, null=options.null, quiet=quiet)
        sys.stdout.flush()
    except BrokenPipeError:  # elsewhere that is 1, which means here that there is none
        discard(sys.stdout)
        return COULD_NOT
    if found.entry is None and options.missing_ok and found.none_yet:
        if not quiet:
            _tell(f"{', '.join(places)}: no checkpoint yet")
        return 0
    if found.entry is None:
        say_error(found.reason or "")
    return int(found.entry is None)


def _parse_step(text: str | None) -> int | None:
    """Return the step that is given; a round one may be written as ``1e5``.

    Raises:
        UsageError: It is none.
    """
    if text is None:
        return None
    try:
        step = float(text)
        if step.is_integer() and step >= 0:
            return int(text) if text.isdecimal() else int(step)
    except ValueError:
        pass
    raise UsageError(f"--before {text}: no step (a whole number from 0 on)")


def _tell(text: str) -> None:
    say(f"ckpttool: {printable(text)}")
    sys.stderr.flush()


def _print(found: Latest, *, json: bool, null: bool, quiet: bool) -> None:
    if json:
        print_json(found.document())
    elif found.entry is not None and not quiet:
        if found.entry.path.endswith("\n") and not null:
            say_warning(f"{found.entry.path}: its name ends in a line break, which $(…) takes off (-0 helps)")
        print_paths([found.entry.path], null=null)
