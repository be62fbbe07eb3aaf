"""``ckpttool rename``: rename checkpoints by a template."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from ckpttool.cli.consent import Consent
from ckpttool.cli.options import (
    check_option,
    config_option,
    directory_argument,
    dry_run_option,
    json_option,
    quiet_option,
    yes_option,
)
from ckpttool.cli.output import (
    FAILED,
    grouped_messages,
    has_colour,
    print_json,
    say_error,
    say_warning,
    terminal_width,
)
from ckpttool.cli.paths import say_empty, say_journals
from ckpttool.core.errors import UsageError
from ckpttool.core.options import NAMING_PANEL, group, option
from ckpttool.runs.scope import Scope

if TYPE_CHECKING:
    from ckpttool.core.report import Problem
    from ckpttool.runs.renaming.rename import PlannedNames, RenameResult


@dataclass(frozen=True, slots=True, kw_only=True)
class RenameCommand:
    """The options of ``rename``."""

    directory: str = directory_argument()
    template: str | None = option(
        *("--template", "-t"),
        metavar="T",
        help="Use this template: '{run}-epoch-{epoch}-step-{step}'. [default: template in [naming]]",
        panel=NAMING_PANEL,
    )
    config: str | None = config_option("Read [naming] from this file.", NAMING_PANEL)
    scope: Mapping[str, Any] = group(Scope, ("recursive", "exclude", "max_depth", "series", "metrics"))
    dry_run: bool = dry_run_option("Show what would be renamed; rename nothing.")
    check: bool = check_option("Rename nothing; exit with 1 if a name would change.")
    yes: bool = yes_option()
    json: bool = json_option()
    quiet: bool = quiet_option()


def rename(command: RenameCommand) -> int:
    """Rename checkpoints by a template, and update the links and pointers to them.

    Fields are run, name, format, epoch, step, number, date, time, and any metric. {field?} is left out, with
    the separator before it, if a checkpoint lacks it. The plan is printed before anything is renamed; without
    a terminal, rename doesn't ask. Some trainers find only checkpoints with the names that they gave; a
    warning names these trainers. ckpttool undo restores the old names.
    """
    from ckpttool.cli.render.text_changes import rename_question, rename_text, rename_total_line
    from ckpttool.runs.renaming.rename import RenameRequest
    from ckpttool.runs.renaming.rename import rename as carry_out

    directory, json, quiet = command.directory, command.json, command.quiet
    request = RenameRequest(directory=directory, template=_template(command), **command.scope)
    is_dry = command.dry_run or command.check
    consent = Consent(is_given=command.yes or is_dry)
    is_shown = consent.asks or not (json or quiet)
    was_shown = False

    def confirm(planned: PlannedNames) -> bool:
        nonlocal was_shown
        if is_shown:  # printed before the change, so that after a kill the output shows it
            was_shown = True
            _print_plan(planned, sys.stderr if json else sys.stdout)
            if not quiet:
                _warn(planned)
            _say_problems(planned.problems)
        return consent.agrees_to(rename_question(planned))

    renamed = carry_out(request, dry_run=is_dry, confirm=confirm)
    _say_outcome(renamed, quiet=quiet, was_warned=was_shown)
    if renamed.is_refused:
        say_error(f"{directory}: nothing was renamed (--exclude skips checkpoints that can't be renamed)")
        return FAILED
    if json:
        print_json(renamed.document())
    elif not quiet and renamed.planned.plan.count:
        columns, colour = terminal_width(sys.stdout), has_colour(sys.stdout)
        text = rename_text(renamed, width=columns, colour=colour)
        print(rename_total_line(renamed) if was_shown else text)
    empty_fails = not renamed.planned.plan.count and say_empty(
        directory, recursive=request.recursive, quiet=quiet or json, checks=command.check
    )
    would_rename = command.check and bool(renamed.planned.plan.renamings)
    return int(bool(renamed.problems) or would_rename or empty_fails or renamed.declined)


def _template(command: RenameCommand) -> str:
    """Return the template of the command line, else of a configuration.

    Raises:
        UsageError: There is none, or its configuration isn't trusted for this directory.
        CheckpointError: The configuration can't be read.
    """
    from ckpttool.cli.config import is_below, nearest_document
    from ckpttool.cli.config_keys import naming_template

    directory, config = command.directory, command.config
    if command.template is not None:
        if config is not None:
            raise UsageError("--template and --config are mutually exclusive")
        return command.template
    document = nearest_document(config)
    template = None if document is None else naming_template(document)
    # A configuration that was found from the working directory mustn't rename files elsewhere, such as those
    # of ``rename /data/runs``, unless the user trusts it.
    if document is None or template is None:
        where = "" if document is None else f"; {document.path} has no template in [naming]"
        raise UsageError(f"no template for the names (--template '{{run}}-e{{epoch:04d}}'{where})")
    if not is_below(os.path.abspath(directory), os.path.dirname(document.path)):
        document.require_trust(
            document.origin("naming"), f"{directory} is outside the directory of this file"
        )
    return template


def _print_plan(planned: PlannedNames, stream: TextIO) -> None:
    from ckpttool.cli.render.text_changes import rename_lines
    from ckpttool.runs.renaming.rename import RenameResult

    pairs = tuple((one.entry.path, one.to) for one in planned.plan.renamings)
    result = RenameResult(planned, pairs, dry_run=True)
    text = rename_lines(result, width=terminal_width(stream), colour=has_colour(stream))
    print(text, end="\n\n", file=stream, flush=True)


def _warn(planned: PlannedNames) -> None:
    for warning in planned.warnings:
        say_warning(warning)


def _say_outcome(renamed: RenameResult, *, quiet: bool, was_warned: bool) -> None:
    """Print warnings and errors, without those that were printed with the plan."""
    if not quiet:
        say_journals(renamed.planned.journals)
        for recovery in renamed.recoveries:
            for sentence in recovery.results:
                say_warning(sentence)
        if not was_warned:
            _warn(renamed.planned)
    known = renamed.planned.problems if was_warned else ()
    _say_problems([one for one in renamed.problems if one not in known])


def _say_problems(problems: Sequence[Problem]) -> None:
    for path, message in grouped_messages(problems):
        say_error(f"{path}: {message}")
