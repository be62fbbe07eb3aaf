"""``ckpttool latest``: the newest checkpoint that is intact, for a job to resume from."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

from ckpttool.cli.options import (
    HERE,
    Depth,
    Given,
    Jobs,
    Json,
    Mode,
    Null,
    OptionsOf,
    PathText,
    Quiet,
    path_argument,
    typer_option,
)
from ckpttool.cli.output import COULD_NOT, grouped_messages, print_json, say, say_error, say_warning
from ckpttool.cli.paths import print_paths, say_inferred_mode, say_journals
from ckpttool.cli.progress import ProgressLines
from ckpttool.cli.render.terminal import printable
from ckpttool.cli.streams import discard
from ckpttool.core.errors import UsageError
from ckpttool.core.options import EXECUTION_PANEL, SELECTION_PANEL
from ckpttool.runs.scope import Scope

if TYPE_CHECKING:
    from ckpttool.runs.resuming.latest import Latest

_MAX_NAMED = 3

Directories = Annotated[
    list[PathText] | None, path_argument("[DIR...]", "Directories of checkpoints. [default: .]")
]
Verify = Annotated[
    Depth,
    typer_option(
        "--verify",
        help="Check only the structure of the result, or every byte. [default: full]",
        panel=EXECUTION_PANEL,
    ),
]
Best = Annotated[
    str | None,
    typer_option(
        "--best",
        metavar="METRIC",
        complete="metric",
        help="Print the checkpoint with the best METRIC instead.",
        panel=SELECTION_PANEL,
    ),
]
BestMode = Annotated[
    Mode | None,
    typer_option(
        "--mode",
        help="Take the lowest or the highest value as the best. [default: by the name]",
        panel=SELECTION_PANEL,
    ),
]
Before = Annotated[
    str | None,
    typer_option(
        "--before", metavar="STEP", help="Print the newest saved before this step.", panel=SELECTION_PANEL
    ),
]
AllowUnsafe = Annotated[
    bool,
    typer_option(
        "--allow-unsafe", help="Also accept a checkpoint that runs code when loaded.", panel=SELECTION_PANEL
    ),
]
ResumeExact = Annotated[
    bool,
    typer_option(
        "--resume-exact",
        help="Accept only checkpoints from which a training resumes exactly.",
        panel=SELECTION_PANEL,
    ),
]
MissingOk = Annotated[
    bool,
    typer_option(
        "--missing-ok",
        help="If there is no checkpoint yet, print nothing and exit with 0.",
        panel=EXECUTION_PANEL,
    ),
]
Wait = Annotated[
    str,
    typer_option(
        "--wait",
        metavar="TIME",
        help="Wait up to TIME (60 seconds, or 2m) until the newest is written.",
        panel=EXECUTION_PANEL,
    ),
]


def latest(
    directories: Directories = None,
    *,
    best: Best = None,
    mode: BestMode = None,
    logs: Annotated[Given, OptionsOf(Scope, ("metrics",))],
    before: Before = None,
    allow_unsafe: AllowUnsafe = False,
    resume_exact: ResumeExact = False,
    scope: Annotated[Given, OptionsOf(Scope, ("recursive", "exclude", "max_depth"))],
    verify: Verify = Depth.FULL,
    wait: Wait = "0",
    missing_ok: MissingOk = False,
    jobs: Jobs = None,
    json: Json = False,
    null: Null = False,
    quiet: Quiet = False,
) -> int:
    """Print the path of the newest intact checkpoint.

    Of several directories, such as a disk and its copy in a store, the newest of all.
    """
    from ckpttool.core.amounts import seconds
    from ckpttool.runs.members.full_read import no_progress
    from ckpttool.runs.resuming.several_places import latest_of

    places = [str(directory) for directory in directories or (HERE,)]
    found = latest_of(
        places,
        **scope,
        **logs,
        depth=verify.value,
        best=best,
        mode=None if mode is None else mode.value,
        before=_parse_step(before),
        allow_unsafe=allow_unsafe,
        resume_exact=resume_exact,
        missing_ok=missing_ok,
        wait=seconds(wait, is_lenient=True),
        tell=(lambda text: None) if quiet else _tell,
        jobs=jobs,
        progress=no_progress if quiet else ProgressLines(),
    )
    if not quiet:
        say_inferred_mode(best, mode)
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
        _print(found, json=json, null=null, quiet=quiet)
        sys.stdout.flush()
    except BrokenPipeError:  # elsewhere that is 1, which means here that there is none
        discard(sys.stdout)
        return COULD_NOT
    if found.entry is None and missing_ok and found.none_yet:
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
        from ckpttool.cli.render.json import latest_document

        print_json(latest_document(found))
    elif found.entry is not None and not quiet:
        if found.entry.path.endswith("\n") and not null:
            say_warning(f"{found.entry.path}: its name ends in a line break, which $(…) takes off (-0 helps)")
        print_paths([found.entry.path], null=null)
