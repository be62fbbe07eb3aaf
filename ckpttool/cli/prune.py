"""``ckpttool prune``: apply a retention policy, explain its effect on one checkpoint, or empty the trash."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TextIO

from ckpttool.cli.consent import Consent
from ckpttool.cli.options import (
    check_option,
    config_option,
    directory_or_paths,
    dry_run_option,
    json_option,
    output_option,
    quiet_option,
    trash_option,
    verbose_option,
    yes_option,
)
from ckpttool.cli.output import (
    FAILED,
    grouped_messages,
    has_colour,
    print_json,
    say,
    say_error,
    say_warning,
    terminal_width,
)
from ckpttool.cli.paths import directory_name, say_inferred_mode, say_journals, with_directory
from ckpttool.cli.progress import ProgressLines
from ckpttool.core.errors import CheckpointError, UsageError
from ckpttool.core.options import EXECUTION_PANEL, SELECTION_PANEL, group, jobs_option, option
from ckpttool.core.text import printable
from ckpttool.runs.reasons import Code, code_of, true_of_all
from ckpttool.runs.retention.request import Policies, PruneRequest
from ckpttool.runs.retention.rules import Policy
from ckpttool.storage import fs

if TYPE_CHECKING:
    from ckpttool.cli.retention_config import Retention
    from ckpttool.core.report import Problem
    from ckpttool.runs.entry import Entry
    from ckpttool.runs.pruning.planning import PrunePlan
    from ckpttool.runs.pruning.prune import Pruned
    from ckpttool.runs.retention.plan import GroupPlan
    from ckpttool.transaction.trash import EmptiedTrash


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneCommand:
    """The options of ``prune``."""

    directory: str | None = directory_or_paths()
    rules: Mapping[str, Any] = group(Policy)
    request: Mapping[str, Any] = group(PruneRequest)
    require_copy: str | None = option(
        "--require-copy",
        metavar="LOCATION",
        help="Remove only checkpoints with an identical copy in LOCATION.",
        panel=EXECUTION_PANEL,
    )
    config: str | None = config_option("Read paths and rules from this file.", SELECTION_PANEL)
    dry_run: bool = dry_run_option("Show what would be removed; remove nothing.")
    check: bool = check_option("Remove nothing; exit with 1 if something would be removed.")
    yes: bool = yes_option()
    trash: bool = trash_option()
    empty_trash: bool = option(
        "--empty-trash",
        help="Delete the contents of the trash, and nothing else.",
        panel=EXECUTION_PANEL,
        default=False,
    )
    jobs: int | None = jobs_option()
    explain: str | None = output_option(
        "--explain", metavar="PATH", help="Explain why PATH is kept or removed; remove nothing."
    )
    json: bool = json_option()
    quiet: bool = quiet_option()
    verbose: bool = verbose_option()

    @property
    def is_dry(self) -> bool:
        """Return whether nothing is to be changed."""
        return self.dry_run or self.check

    @property
    def given(self) -> dict[str, Any]:
        """Return the given options of ``[retention]`` and of the trash, by attribute."""
        own = ("trash", "empty_trash", "jobs", "explain", "require_copy")
        values = {name: value for name in own if (value := getattr(self, name)) not in (None, False)}
        asks_nothing = self.yes or self.is_dry or self.explain is not None
        return {**self.rules, **self.request, **values, **({"yes": True} if asks_nothing else {})}


def prune(command: PruneCommand) -> int:
    """Remove old checkpoints, series by series, after verifying those that are kept.

    Without DIR and rules, [retention] in ckpttool.toml sets both. The newest intact checkpoint of each series
    is always kept, and so is any checkpoint that a link, a pointer or a pin refers to.
    """
    from ckpttool.cli.retention_config import retention_for

    retention = retention_for(
        [] if command.directory is None else [command.directory],
        command.given,
        command.config,
        finds_unread=not command.empty_trash,
    )
    if not command.quiet and "metric" in command.rules:
        say_inferred_mode(command.rules["metric"], command.rules.get("mode"))
    if command.explain is not None and not command.empty_trash:
        return _explain_checkpoint(retention, command.explain, command)
    carry_out = _empty_trashes if command.empty_trash else _prune_directories
    return carry_out(retention, command, Consent(is_given=retention.yes))


# Prune directories ----------------------------------------------------------------------------------


def _prune_directories(retention: Retention, command: PruneCommand, consent: Consent) -> int:
    """Prune the directories one by one, and return the worst exit status.

    An error in the only directory is raised; in one of several it is printed, and the others are pruned.
    """
    from ckpttool.cli.retention_config import unmatched_rules
    from ckpttool.transaction.journal import new_identity

    # All directories share one identity in the trash, so that one ``undo`` above them restores all. After
    # Ctrl-C, the results so far are printed to stderr, since the answer on stdout isn't complete.
    requests = retention.requests()
    _say_unread(retention, command)
    if problems := unmatched_rules(retention, requests):
        return _report_wrong_rules(retention, problems, command)
    trash = new_identity() if retention.trash else None
    outcomes: list[Pruned] = []
    failures = 0
    for request in requests:
        try:
            outcome = _prune_directory(request, trash, command, consent)
        except (CheckpointError, UsageError) as failure:
            if len(requests) == 1:
                raise
            failures += 1
            say_error(with_directory(failure, request.directory))
            continue
        except KeyboardInterrupt:
            _print(_without_duplicates(outcomes), command, consent, sys.stderr)
            raise
        outcomes.append(outcome if outcome.plan.groups else _without_checkpoints(outcome, request, command))
    return _report(outcomes, command, consent, failed=bool(failures))


def _prune_directory(
    request: PruneRequest, trash: str | None, command: PruneCommand, consent: Consent
) -> Pruned:
    from ckpttool.runs.pruning.prune import prune

    def confirm(planned: PrunePlan) -> bool | None:
        from ckpttool.cli.render.text_changes import question

        _print_plan(planned, command, consent)
        for_good = any(code_of(warning) is Code.FOR_GOOD for warning in planned.warnings)
        return consent.answer_to(question(planned.plan, trash=trash is not None, for_good=for_good))

    outcome = prune(
        request, dry_run=command.is_dry, confirm=confirm, progress=ProgressLines(), trash=trash or False
    )
    if outcome.declined:
        return replace(outcome, plan=outcome.plan.declined())
    if command.is_dry and trash is not None:  # checkpoints in the trash still take their space
        return replace(outcome, trash="", trashed_bytes=outcome.freed_bytes, freed_bytes=0)
    return outcome


def _without_checkpoints(outcome: Pruned, request: PruneRequest, command: PruneCommand) -> Pruned:
    """Return the outcome for a directory without checkpoints; those in subdirectories are a problem."""
    from ckpttool.core.report import Problem
    from ckpttool.runs.survey import NOTHING, nothing_in

    message = nothing_in(request.directory, recursive=request.recursive)
    if message != NOTHING:
        return replace(outcome, problems=(*outcome.problems, Problem(request.directory, message)))
    if not (command.quiet or command.json):
        say(f"{directory_name(request.directory)}: {message}")
    return outcome


def _say_unread(retention: Retention, command: PruneCommand) -> None:
    """Print which configuration is not read, and why."""
    if retention.unread_config is not None and not command.quiet:
        why = "since a directory or a rule was given (--config reads it)"
        say(f"{printable(retention.unread_config)} is not read, {why}")


def _report_wrong_rules(retention: Retention, problems: Sequence[Problem], command: PruneCommand) -> int:
    """Print the problems of the rules and return the exit status; nothing is removed."""
    from ckpttool.runs.pruning.prune import Pruned
    from ckpttool.runs.retention.plan import RetentionPlan

    plan = RetentionPlan(retention.policies or Policies(), ())
    outcome = Pruned(plan, 0, dry_run=command.is_dry, problems=tuple(problems))
    _say(outcome, quiet=command.quiet)
    if command.json:
        print_json(outcome.document())
    return 1


# Outcomes of several directories --------------------------------------------------------------------


def _combined(outcomes: Sequence[Pruned]) -> Pruned:
    """Return the outcomes of several directories as one."""
    # ``trash`` is None if checkpoints are removed, an identity if they were moved to the trash, and "" if a
    # dry run would move them, when there is no identity yet and nothing is freed.
    first = outcomes[0]
    if len(outcomes) == 1:
        return first
    plan = first.plan._replace(
        groups=tuple(group for one in outcomes for group in one.plan.groups),
        excess=tuple(excess for one in outcomes for excess in one.plan.excess),
    )
    freed = plan.freed_bytes if first.dry_run else sum(one.freed_bytes for one in outcomes)
    return replace(
        first,
        plan=plan,
        freed_bytes=0 if first.trash == "" else freed,
        trash=next((one.trash for one in outcomes if one.trash is not None), None),
        trashed_bytes=freed if first.trash == "" else sum(one.trashed_bytes for one in outcomes),
        declined=any(one.declined for one in outcomes),
        failed={path: why for one in outcomes for path, why in one.failed.items()},
        problems=tuple(problem for one in outcomes for problem in one.problems),
        warnings=tuple(true_of_all([one.warnings for one in outcomes])),
        journals=tuple(path for one in outcomes for path in one.journals),
        finished=tuple(path for one in outcomes for path in one.finished),
        put_back=tuple(path for one in outcomes for path in one.put_back),
    )


def _without_duplicates(outcomes: Sequence[Pruned]) -> list[Pruned]:
    """Return the outcomes of directories that may overlap, with each checkpoint only in the first one."""
    # ``paths = ["runs", "runs/exp1"]`` prunes some series twice, the second time without effect. Compared by
    # real directories: a checkpoint that is itself a link is a different one from its target.
    seen: set[str] = set()
    distinct = []
    for one in outcomes:
        places = {entry.directory for series in one.plan.groups for entry in _entries_of(series)}
        real = {place: fs.realpath(place) for place in places}
        groups = []
        for series in one.plan.groups:
            keep = tuple(kept for kept in series.keep if _real_path(kept.entry, real) not in seen)
            remove = tuple(entry for entry in series.remove if _real_path(entry, real) not in seen)
            if keep or remove:
                groups.append(replace(series, keep=keep, remove=remove))
        seen |= {_real_path(entry, real) for series in one.plan.groups for entry in _entries_of(series)}
        distinct.append(replace(one, plan=one.plan._replace(groups=tuple(groups))))
    return distinct


def _entries_of(group: GroupPlan) -> Iterator[Entry]:
    yield from (kept.entry for kept in group.keep)
    yield from group.remove


def _real_path(entry: Entry, real: Mapping[str, str]) -> str:
    return os.path.join(real[entry.directory], entry.name)


# Print plans and outcomes ---------------------------------------------------------------------------


def _report(outcomes: Sequence[Pruned], command: PruneCommand, consent: Consent, *, failed: bool) -> int:
    """Print the combined results and return the exit status; print nothing to stdout on failure."""
    if not outcomes:
        return FAILED
    outcomes = _without_duplicates(outcomes)
    outcome = _combined(outcomes)
    _say(outcome, quiet=command.quiet)
    if failed:
        _print(outcomes, command, consent, sys.stderr)
        return FAILED
    if command.json:
        print_json(outcome.document())
    else:
        _print(outcomes, command, consent, sys.stdout)
    would_change = command.check and outcome.plan.changes
    return int(bool(outcome.problems) or would_change or outcome.declined)


def _print(outcomes: Sequence[Pruned], command: PruneCommand, consent: Consent, stream: TextIO) -> None:
    """Print the plans that were not printed yet, and the total."""
    from ckpttool.cli.render.text_changes import total_line

    groups = [group for one in outcomes for group in one.plan.groups if not _was_shown(one, command, consent)]
    if command.quiet or not any(one.plan.groups for one in outcomes):
        return
    total = total_line(_combined(outcomes), colour=has_colour(stream))
    print(*filter(None, (_text(groups, command, stream), total)), sep="\n\n", file=stream)


def _was_shown(outcome: Pruned, command: PruneCommand, consent: Consent) -> bool:
    """Return whether the plan was printed before it was applied."""
    is_silent = command.json and not consent.asks
    had_changes = outcome.declined or outcome.plan.changes or bool(outcome.failed)
    return had_changes and not outcome.dry_run and not is_silent


def _text(groups: Sequence[GroupPlan], command: PruneCommand, stream: TextIO) -> str:
    from ckpttool.cli.render.text_changes import plan_text

    columns, colour = terminal_width(stream), has_colour(stream)
    return plan_text(groups, width=columns, colour=colour, verbose=command.verbose)


def _print_plan(planned: PrunePlan, command: PruneCommand, consent: Consent) -> None:
    """Print a plan before it is applied, so that the output explains the state after a kill."""
    if consent.asks:
        from ckpttool.cli.render.text_changes import excess_lines

        stream = sys.stderr if command.json else sys.stdout
        excess = "\n".join(excess_lines(planned.plan))
        print(
            *filter(None, (_text(planned.plan.groups, command, stream), excess)),
            sep="\n\n",
            end="\n\n",
            file=stream,
            flush=True,
        )
    elif not (command.json or command.quiet):
        print(_text(planned.plan.groups, command, sys.stdout), end="\n\n", flush=True)


def _say(outcome: Pruned, *, quiet: bool) -> None:
    """Print warnings and problems on stderr; a problem that many paths share is one line."""
    from ckpttool.transaction.journal import Recovery

    if not quiet:
        say_journals(outcome.journals)
        recovered = Recovery([*outcome.finished], [*outcome.put_back])
        for warning in (*recovered.results, *outcome.warnings):
            say_warning(warning)
    for path, message in grouped_messages(outcome.problems):
        say_error(f"{path}: {message}")


# Explain one checkpoint -----------------------------------------------------------------------------


def _explain_checkpoint(retention: Retention, path: str, command: PruneCommand) -> int:
    """Print why one checkpoint is kept or removed, and return the exit status; nothing is changed."""
    from ckpttool.cli.retention_config import unmatched_rules
    from ckpttool.runs.pruning.planning import explain, make_plan
    from ckpttool.runs.pruning.prune import Pruned

    request = _request_for(retention, path)
    _say_unread(retention, command)
    problems = unmatched_rules(retention, retention.requests())
    planned = make_plan(request, ProgressLines())
    explanation = explain(planned, path)
    if command.json:
        preview = Pruned(planned.plan, planned.plan.freed_bytes, dry_run=True, problems=planned.problems)
        print_json({**preview.document(), "explained": explanation.document()})
    elif not command.quiet:
        from ckpttool.cli.render.text_changes import explain_text

        print(explain_text(explanation, colour=has_colour(sys.stdout)))
    for problem in problems:
        say_error(f"{problem.path}: {problem.message}")
    return int(bool(problems))


def _request_for(retention: Retention, path: str) -> PruneRequest:
    """Return the request whose directory holds a path, directly or further down."""
    parent = os.path.dirname(path.rstrip(os.sep)) or os.curdir
    requests = retention.requests()
    for request in requests:
        if fs.realpath(request.directory) == fs.realpath(parent):
            return request
    place = fs.realpath(path)
    for request in requests:
        inside = os.path.join(fs.realpath(request.directory), "")
        if place.startswith(inside) and (request.recursive or _holds_checkpoint_at(inside, place)):
            return request
    if not retention.paths:
        return replace(requests[0], directory=parent)
    raise UsageError(f"{path} is in none of these directories: {', '.join(retention.paths)}")


def _holds_checkpoint_at(directory: str, place: str) -> bool:
    """Return whether a path is a checkpoint directly in a directory, or a file of one."""
    from ckpttool.formats.discovery import unit_at

    first, *_ = os.path.relpath(place, directory).split(os.sep)
    return unit_at(os.path.join(directory, first)) is not None


# Empty the trash ------------------------------------------------------------------------------------


def _empty_trashes(retention: Retention, command: PruneCommand, consent: Consent) -> int:
    """Empty the trash of all directories, and return the worst exit status."""
    # A dry run gives the numbers for the question. Its errors aren't reported: the second run has the same.
    if not consent.is_given:
        preview, _ = _empty_each(retention, dry_run=True)
        if any(one.removed for one in preview) and not _agrees_to_empty(preview, command, consent):
            return 1
    emptied, failures = _empty_each(retention, dry_run=command.is_dry)
    for failure in failures:
        say_error(failure)
    return _report_emptied(emptied, command, failed=bool(failures))


def _empty_each(retention: Retention, *, dry_run: bool) -> tuple[list[EmptiedTrash], list[str]]:
    """Return the outcome for each trash, and an error for each directory that can't be read.

    An error in the only directory is raised.
    """
    from ckpttool.runs.undo import directories_with_trash
    from ckpttool.transaction.paths import require_directory
    from ckpttool.transaction.trash import empty

    emptied: list[EmptiedTrash] = []
    failures: list[str] = []
    for path in retention.paths or (os.curdir,):
        try:
            root = require_directory(path)
            for place in dict.fromkeys(
                [root, *(directories_with_trash(root) if retention.is_recursive else ())]
            ):
                emptied.append(empty(place, retention.older_than, dry_run=dry_run))
        except CheckpointError as failure:
            if len(retention.paths) <= 1:
                raise
            failures.append(with_directory(failure, path))
    return emptied, failures


def _emptied_document(emptied: Sequence[EmptiedTrash]) -> dict[str, Any]:
    from ckpttool.runs.pruning.prune import SCHEMA

    return {
        "schema": SCHEMA,
        "dry_run": any(one.dry_run for one in emptied),
        "policy": {},
        "freed_bytes": sum(one.freed_bytes for one in emptied),
        "groups": [],
        "errors": [problem.document() for one in emptied for problem in one.problems],
        "emptied": [path for one in emptied for path in one.removed],
    }


def _agrees_to_empty(preview: Sequence[EmptiedTrash], command: PruneCommand, consent: Consent) -> bool:
    """Ask for confirmation; if stdin declines, print the plan's size."""
    from ckpttool.cli.render.text_changes import empty_question, empty_text

    agrees = consent.agrees_to(empty_question(preview))
    if not agrees and command.json:
        print_json(_emptied_document(preview))
    elif not (agrees or command.quiet or consent.asks):
        print(empty_text(preview))
    return agrees


def _report_emptied(emptied: Sequence[EmptiedTrash], command: PruneCommand, *, failed: bool) -> int:
    """Print the combined results and return the exit status; print nothing to stdout on failure."""
    problems = [problem for one in emptied for problem in one.problems]
    for warning in (warning for one in emptied for warning in one.warnings if not command.quiet):
        say_warning(warning)
    for problem in problems:
        say_error(f"{problem.path}: {problem.message}")
    if command.json and not failed:
        print_json(_emptied_document(emptied))
    elif not command.quiet:
        from ckpttool.cli.render.text_changes import empty_text

        print(empty_text(emptied), file=sys.stderr if failed else sys.stdout)
    would_change = command.check and any(one.removed for one in emptied)
    return FAILED if failed else int(bool(problems) or would_change)
