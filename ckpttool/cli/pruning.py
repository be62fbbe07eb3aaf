"""Carries ``prune`` out, directory by directory, asks, and says what came of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TextIO

from ckpttool.cli.asking import Consent
from ckpttool.cli.outcomes import apart, together
from ckpttool.cli.output import has_colour, print_json, progress, say, say_error, say_warning, width
from ckpttool.cli.series import called, once_each, say_journals
from ckpttool.cli.unmatched import unmatched_rules
from ckpttool.errors import CheckpointError, UsageError
from ckpttool.render.escape import printable

if TYPE_CHECKING:
    from ckpttool.cli.retaining import Wishes
    from ckpttool.series.pruning.planning import Planned, Request
    from ckpttool.series.pruning.prune import Pruned
    from ckpttool.series.reasons import Problem
    from ckpttool.series.retention.plan import GroupPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """What is changed, and what is shown.

    Attributes:
        dry_run: Whether nothing is changed.
        check: Whether something that would go is worth status 1.
        consent: Who agrees to it.
        json, quiet, verbose: What is printed.
    """

    consent: Consent
    dry_run: bool = False
    check: bool = False
    json: bool = False
    quiet: bool = False
    verbose: bool = False


def pruned(wanted: Wishes, manner: Manner) -> int:
    """Thin out all directories, each for itself, and return the exit status: the worst of theirs.

    Raises:
        UsageError, CheckpointError: The only directory can't be thinned out.
    """
    from ckpttool.series.changing.moves import new_identity

    requests = wanted.requests()
    say_unread(wanted, manner)
    if wrong := unmatched_rules(wanted, requests):
        return _refused(wanted, wrong, manner)
    trash = new_identity() if wanted.trash else None
    outcomes: list[Pruned] = []
    failures = 0
    for request in requests:
        try:
            outcome = _carried_out(request, trash, manner)
        except (CheckpointError, UsageError) as failure:
            if len(requests) == 1:
                raise
            failures += 1
            say_error(placed(failure, request.directory))
            continue
        except KeyboardInterrupt:
            _print(apart(outcomes), manner, sys.stderr)
            raise
        outcomes.append(outcome if outcome.plan.groups else _of_nothing(outcome, request, manner))
    return _told(outcomes, manner, failed=bool(failures))


def _of_nothing(outcome: Pruned, request: Request, manner: Manner) -> Pruned:
    """Return what came of a directory without a checkpoint: a problem where some lie below."""
    from ckpttool.series.reasons import Problem
    from ckpttool.series.surveying.survey import NOTHING, nothing_in

    told = nothing_in(request.directory, recursive=request.recursive)
    if told != NOTHING:
        return replace(outcome, problems=(*outcome.problems, Problem(request.directory, told)))
    if not (manner.quiet or manner.json):
        say(f"{called(request.directory)}: {told}")
    return outcome


def say_unread(wanted: Wishes, manner: Manner) -> None:
    """Say which configuration is not read, and why."""
    if wanted.unread is not None and not manner.quiet:
        why = "since a directory or a rule was given (--config reads it)"
        say(f"{printable(wanted.unread)} is not read, {why}")


def _refused(wanted: Wishes, wrong: Sequence[Problem], manner: Manner) -> int:
    """Say what is wrong with the rules, for which nothing is looked at further, and return the status."""
    from ckpttool.series.pruning.prune import Pruned
    from ckpttool.series.retention.plan import RetentionPlan
    from ckpttool.series.retention.policy import Policies

    plan = RetentionPlan(wanted.policies or Policies(), ())
    outcome = Pruned(plan, 0, dry_run=manner.dry_run, problems=tuple(wrong))
    _say(outcome, quiet=manner.quiet)
    if manner.json:
        from ckpttool.render.json_prune import prune_document

        print_json(prune_document(outcome))
    return 1


def placed(failure: Exception, directory: str) -> str:
    """Return what failed, with the directory in which it did."""
    text = str(failure)
    return text if text.startswith(directory) else f"{directory}: {text}"


def _carried_out(request: Request, trash: str | None, manner: Manner) -> Pruned:
    from ckpttool.series.pruning.prune import prune

    def confirm(planned: Planned) -> bool:
        _print_plan(planned, trash, manner)
        return manner.consent.to("Remove them?" if trash is None else "Move them to the trash?")

    done = prune(request, dry_run=manner.dry_run, confirm=confirm, progress=progress, trash=trash or False)
    if done.declined:
        return _left(done)
    return _aside(done) if manner.dry_run and trash is not None else done


def _left(declined: Pruned) -> Pruned:
    """Return what became of a plan that somebody said no to: all of it is still there."""
    from ckpttool.series.retention.plan import KeptEntry

    groups = tuple(
        replace(one, keep=(*one.keep, *(KeptEntry(entry, ("declined",)) for entry in one.remove)), remove=())
        for one in declined.plan.groups
    )
    return replace(declined, plan=replace(declined.plan, groups=groups))


def _aside(preview: Pruned) -> Pruned:
    """Return what would be done, where it would be put into the trash: no bytes would be freed."""
    return replace(preview, trash="", trashed_bytes=preview.freed_bytes, freed_bytes=0)


def _told(outcomes: Sequence[Pruned], manner: Manner, *, failed: bool) -> int:
    """Say what came of it; where a directory failed as a whole, stdout stays empty."""
    if not outcomes:
        return 2
    outcomes = apart(outcomes)
    outcome = together(outcomes)
    _say(outcome, quiet=manner.quiet)
    if failed:
        _print(outcomes, manner, sys.stderr)
        return 2
    if manner.json:
        from ckpttool.render.json_prune import prune_document

        print_json(prune_document(outcome))
    else:
        _print(outcomes, manner, sys.stdout)
    would_go = manner.check and bool(outcome.plan.removals)
    return int(bool(outcome.problems) or would_go or outcome.declined)


def _print(outcomes: Sequence[Pruned], manner: Manner, stream: TextIO) -> None:
    """Print the plans that were not shown yet, and what all came to."""
    from ckpttool.render.text_prune import total_line

    groups = [group for one in outcomes for group in one.plan.groups if not _was_shown(one, manner)]
    if manner.quiet or not any(one.plan.groups for one in outcomes):
        return
    total = total_line(together(outcomes))
    print(*filter(None, (_text(groups, manner, stream), total)), sep="\n\n", file=stream)


def _was_shown(outcome: Pruned, manner: Manner) -> bool:
    """Tell whether a plan was printed before it was carried out: something was to go."""
    is_silent = manner.json and not manner.consent.asks
    had_removals = outcome.declined or bool(outcome.plan.removals) or bool(outcome.failed)
    return had_removals and not outcome.dry_run and not is_silent


def _text(groups: Sequence[GroupPlan], manner: Manner, stream: TextIO) -> str:
    from ckpttool.render.text_prune import plan_text

    columns = width(stream) if stream.isatty() or "COLUMNS" in os.environ else None
    return plan_text(groups, width=columns, colour=has_colour(stream), verbose=manner.verbose)


def _print_plan(planned: Planned, trash: str | None, manner: Manner) -> None:
    """Show a plan before anything goes: what a kill leaves has its explanation then."""
    if manner.consent.asks:
        from ckpttool.render.text_prune import total_line
        from ckpttool.series.pruning.prune import Pruned

        stream = sys.stderr if manner.json else sys.stdout
        preview = Pruned(planned.plan, planned.plan.freed_bytes, dry_run=True)
        total = total_line(preview if trash is None else _aside(preview))
        print(_text(planned.plan.groups, manner, stream), total, sep="\n\n", file=stream, flush=True)
    elif not (manner.json or manner.quiet):
        print(_text(planned.plan.groups, manner, sys.stdout), end="\n\n", flush=True)


def _say(outcome: Pruned, *, quiet: bool) -> None:
    """Say on stderr what must not be missed; of what failed alike, once."""
    if not quiet:
        _warn(outcome)
    for path, told in once_each(outcome.problems):
        say_error(f"{path}: {told}")


def _warn(outcome: Pruned) -> None:
    say_journals(outcome.journals)
    for path in outcome.finished:
        say_warning(f"{path}: an interrupted prune had begun to remove it; that is finished now")
    for path in outcome.put_back:
        say_warning(f"{path}: an interrupted prune had begun to remove it; it is back now")
    for warning in outcome.warnings:
        say_warning(warning)
