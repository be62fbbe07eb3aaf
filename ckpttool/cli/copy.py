"""``ckpttool copy``: copy checkpoints to another disk, or to or from a store."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpttool.cli.consent import Consent
from ckpttool.cli.options import dry_run_option, json_option, quiet_option, yes_option
from ckpttool.cli.output import FAILED, has_colour, print_json, say_error, say_warning, terminal_width
from ckpttool.cli.progress import ProgressLines
from ckpttool.core.options import group
from ckpttool.runs.copying import Copied, CopyRequest, CopyStatus, carry_out, keep_policy, plan_copy

if TYPE_CHECKING:
    from ckpttool.runs.pruning.planning import PrunePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyCommand:
    """The options of ``copy``."""

    request: CopyRequest = group(CopyRequest, is_record=True)
    dry_run: bool = dry_run_option("Show what would be copied; copy nothing.")
    yes: bool = yes_option()
    json: bool = json_option()
    quiet: bool = quiet_option()


def copy(command: CopyCommand) -> int:
    """Copy checkpoints to another disk, or to or from an object store.

    Only valid checkpoints are copied, and each copied file is verified. Files that DST already has are not
    sent again, so an interrupted copy can be continued. With rules, DST keeps only the checkpoints that they
    keep.
    """
    request = command.request
    lines = ProgressLines()
    with lines("looking for checkpoints", None):
        plan = plan_copy(request)
    with lines.of_all(one.work for one in plan.copies) as progress:
        copied = carry_out(plan, dry_run=command.dry_run, progress=progress)
    if not (command.json or command.quiet):
        from ckpttool.cli.render.text_changes import copy_text

        print(copy_text(copied, width=terminal_width(sys.stdout), colour=has_colour(sys.stdout)), flush=True)
    # Rules are applied to all of DST after the copies: what they remove depends on what has arrived.
    consent = Consent(is_given=command.yes)
    copied = keep_policy(
        copied,
        request,
        confirm=lambda planned: _agrees(planned, consent, is_silent=command.json or command.quiet),
        progress=lines,
    )
    return _report(copied, json=command.json, quiet=command.quiet)


def _agrees(planned: PrunePlan, consent: Consent, *, is_silent: bool) -> bool | None:
    """Show the removals at the destination, and ask for confirmation."""
    from ckpttool.cli.render.text_changes import plan_text, question

    stream = sys.stderr if is_silent else sys.stdout
    if consent.asks or not is_silent:
        text = plan_text(planned.plan.groups, width=terminal_width(stream), colour=has_colour(stream))
        print(f"\n{text}\n", file=stream, flush=True)
    return consent.answer_to(question(planned.plan, trash=False))


def _report(copied: Copied, *, json: bool, quiet: bool) -> int:
    """Print the warnings and the result, and return the exit status."""
    for warning in copied.warnings if not quiet else ():
        say_warning(warning)
    for one in copied.checkpoints if json or quiet else ():
        if not one.is_there:
            say_error(f"{one.path}: not copied: {one.why}")
    pruned = copied.pruned
    for problem in (*copied.problems, *(pruned.problems if pruned else ())):
        say_error(f"{problem.path}: {problem.message}")
    if json:
        print_json(copied.document())
    elif pruned is not None and not quiet:
        from ckpttool.cli.render.text_changes import total_line

        print(total_line(pruned))
    if copied.problems or any(one.status is CopyStatus.FAILED for one in copied.checkpoints):
        return FAILED
    return int(not copied.is_complete or (pruned is not None and bool(pruned.problems or pruned.declined)))
