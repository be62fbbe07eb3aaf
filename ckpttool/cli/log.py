"""``ckpttool log``: record checkpoints with a tracker."""

from __future__ import annotations

import sys
from typing import Annotated

from ckpttool.cli.options import Given, Jobs, Json, OptionsOf, PathText, Quiet, path_argument, typer_option
from ckpttool.cli.output import has_colour, print_json, say_error, say_warning
from ckpttool.cli.progress import progress
from ckpttool.core.errors import UsageError
from ckpttool.core.options import OUTPUT_PANEL
from ckpttool.runs.scope import Scope

To = Annotated[
    str | None,
    typer_option(
        "--to",
        metavar="TRACKER",
        help="Record there: mlflow:EXPERIMENT[/RUN], wandb:DIR or tensorboard:DIR.",
        panel=OUTPUT_PANEL,
    ),
]


def log(
    paths: Annotated[list[PathText], path_argument("PATH...", "Checkpoints, and directories of them.")],
    *,
    to: To = None,
    scope: Annotated[Given, OptionsOf(Scope, names=("exclude", "metrics"))],
    jobs: Jobs = None,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Verify checkpoints and record each with a tracker: verdict, SHA-256, size, epoch, step and metrics.

    What the tracker has already is not recorded again.
    """
    from ckpttool.runs.tracking import TARGETS
    from ckpttool.runs.tracking import log as record

    if to is None:
        raise UsageError(f"--to says where: {TARGETS}")
    with progress("verifying", 0) as advance:
        logged = record([str(path) for path in paths], to, **scope, jobs=jobs, advance=advance)
    for warning in logged.warnings:
        say_warning(warning)
    for path, reason in logged.errors.items():
        say_error(f"{path}: {reason} (not recorded)")
    if json:
        print_json(logged.to_dict())
    elif not quiet:
        from ckpttool.cli.render.text_changes import logged_text

        print(logged_text(logged, colour=has_colour(sys.stdout)))
    return int(bool(logged.errors) or not all(one.passes for one in logged.checkpoints))
