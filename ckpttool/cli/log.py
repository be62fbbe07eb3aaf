"""``ckpttool log``: record checkpoints in an experiment tracker."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from ckpttool.cli.options import json_option, output_option, quiet_option
from ckpttool.cli.output import has_colour, print_json, say_error, say_warning
from ckpttool.cli.progress import progress
from ckpttool.core.errors import UsageError
from ckpttool.core.options import argument, jobs_option, same_option
from ckpttool.runs.scope import Scope


@dataclass(frozen=True, slots=True, kw_only=True)
class LogCommand:
    """The options of ``log``."""

    paths: Sequence[str] = argument("PATH...", "Checkpoints, or directories of checkpoints.")
    to: str | None = output_option(
        "--to",
        metavar="TRACKER",
        help="Record in this tracker: mlflow:EXPERIMENT[/RUN], wandb:DIR or tensorboard:DIR.",
    )
    exclude: Sequence[str] = same_option(Scope, "exclude")
    metrics: Sequence[str] = same_option(Scope, "metrics")
    jobs: int | None = jobs_option()
    json: bool = json_option()
    quiet: bool = quiet_option()


def log(command: LogCommand) -> int:
    """Verify checkpoints and record each with a tracker: verdict, SHA-256, size, epoch, step and metrics.

    Checkpoints that the tracker already has are not recorded again.
    """
    from ckpttool.runs.tracking import log as record
    from ckpttool.runs.tracking import targets

    if command.to is None:
        raise UsageError(f"--to is required: {targets()}")
    with progress("verifying", 0) as advance:
        logged = record(
            command.paths,
            command.to,
            exclude=command.exclude,
            metrics=command.metrics,
            jobs=command.jobs,
            advance=advance,
        )
    for warning in logged.warnings:
        say_warning(warning)
    for path, reason in logged.errors.items():
        say_error(f"{path}: {reason} (not recorded)")
    if command.json:
        print_json(logged.to_dict())
    elif not command.quiet:
        from ckpttool.cli.render.text_changes import logged_text

        print(logged_text(logged, colour=has_colour(sys.stdout)))
    return int(bool(logged.errors) or not all(one.passes for one in logged.checkpoints))
