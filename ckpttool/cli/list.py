"""``ckpttool list``: list the checkpoints of directory trees, series by series."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from ckpttool.cli.options import (
    config_option,
    executor_option,
    json_option,
    null_option,
    output_option,
    quiet_option,
)
from ckpttool.cli.output import (
    FAILED,
    has_colour,
    print_json,
    say,
    say_error,
    say_warning,
    width,
)
from ckpttool.cli.paths import (
    print_paths,
    say_empty,
    say_inferred_mode,
    say_journals,
    say_unread,
    with_directory,
)
from ckpttool.cli.progress import ProgressLines
from ckpttool.core.errors import CheckpointError, UsageError
from ckpttool.core.options import (
    OUTPUT_PANEL,
    RULE_PANEL,
    SELECTION_PANEL,
    Depth,
    Mode,
    argument,
    group,
    jobs_option,
    mode_option,
    option,
    same_option,
)
from ckpttool.core.text import counted, printable, seconds
from ckpttool.integrations.dask import executor_at
from ckpttool.ops.workload import Part, Workload
from ckpttool.runs.retention.rules import Policy
from ckpttool.runs.scope import Scope

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from ckpttool.cli.retention_config import Retention
    from ckpttool.core.report import Problem
    from ckpttool.runs.listing import DirectoryPreview, Listing
    from ckpttool.runs.look import Progress

_SCOPE = ("recursive", "metrics", "group_by", "series", "exclude", "max_depth")


def best_option() -> Any:
    return output_option(
        *("--best", "--metric"),
        metavar="METRIC",
        complete="metric",
        help="Mark the best of each series by this metric.",
    )


def verify_option() -> Any:
    return option(
        "--verify",
        help="Check only the structure, or read every byte.",
        panel=SELECTION_PANEL,
        default="quick",
    )


def rules_group() -> Any:
    """Return the options of ``prune`` that select the checkpoints to keep."""
    return group(
        Policy,
        help={
            "keep_best": "Keep the N best by --best.",
            "keep_best_runs": "Remove all runs but the N best by --best; other rules apply within these.",
            "older_than": "Remove only checkpoints saved more than TIME (30d) ago.",
        },
    )


def plan_config_option() -> Any:
    return config_option("Show what prune would do with this configuration.", RULE_PANEL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListCommand:
    """The options of ``list``."""

    directories: Sequence[str] = argument(
        "[DIR...]", "Directories of checkpoints. [default: paths in ckpttool.toml, or .]", default=()
    )
    sort: str | None = output_option(
        "--sort",
        metavar="KEY",
        complete="sort key",
        help="Sort by epoch, step, age, size, name or a metric, the smallest first.",
    )
    reverse: bool = output_option("--reverse", help="Reverse the order.", default=False)
    metric: str | None = best_option()
    mode: Mode | None = mode_option(OUTPUT_PANEL)
    flat: bool | None = output_option(
        "--flat",
        negation="--grouped",
        help="Show one table, or one for each series. [default: grouped on a terminal, flat elsewhere]",
    )
    long: bool = output_option(
        *("--long", "-l", "--verbose", "-v"), help="Show all details in full.", default=False
    )
    plot: str | None = output_option(
        "--plot", metavar="FILE", help="Plot a metric of all runs in one panel: .svg or .png.", is_output=True
    )
    cadence: bool = output_option(
        "--cadence",
        help="Show how often each series is saved, and its cost in time and space.",
        default=False,
    )
    mtbf: str | None = output_option(
        "--mtbf",
        metavar="TIME",
        help="With --cadence: show the best interval for one failure every TIME (24h).",
    )
    save_time: str | None = output_option(
        "--save-time",
        metavar="TIME",
        help="With --cadence: set the duration of a save (12s). [default: from the files, if possible]",
    )
    json: bool = json_option()
    null: bool = null_option()
    quiet: bool = quiet_option()
    verify: Depth = verify_option()
    scope: Mapping[str, Any] = group(Scope, _SCOPE)
    jobs: int | None = jobs_option()
    part: Part | None = same_option(Workload, "part")
    executor: str | None = executor_option()
    rules: Mapping[str, Any] = rules_group()
    config: str | None = plan_config_option()


_MOST_PROBLEMS = 10
"""Problems shown on a terminal; more would push the list itself off the screen."""


def list_(command: ListCommand) -> int:
    """List the checkpoints in directory trees, series by series, the oldest first.

    With prune rules, show which checkpoints they would keep and remove. Without DIR and rules, [retention]
    in ckpttool.toml sets both, as for prune. Nothing on disk changes.
    """
    metric, mode, plot, quiet = command.metric, command.mode, command.plot, command.quiet
    if (command.mtbf or command.save_time) and not command.cadence:
        raise UsageError("--mtbf and --save-time are only valid with --cadence")
    given = {**command.scope, **command.rules, **({} if command.jobs is None else {"jobs": command.jobs})}
    retention = retention_for_list(command.directories, given, metric, mode, command.config)
    paths = retention.directories
    if plot is not None:
        from ckpttool.cli.report_files import check_plot

        if plot.lower().endswith(".html"):
            raise UsageError(f"--plot {plot}: use ckpttool report -o {plot} to write a page")
        check_plot(plot, [*paths, *retention.request_values.get("metrics", ())])
    # All parts must have the same rows in the same order, whatever each has verified, or their documents
    # couldn't be merged. Ranks, plots and plans need the verdicts of all.
    part = command.part
    needs_all = command.sort or command.reverse or metric or plot or command.cadence
    if part is not None and (not command.json or needs_all or command.rules or retention.config is not None):
        raise UsageError(
            "--part needs --json, and can't be combined with an order, --best, --plot, --cadence, rules or "
            "a configuration"
        )
    with executor_at(command.executor) if command.executor else nullcontext() as executor:
        listing, read = read_listing(
            retention,
            metric,
            mode,
            command.verify,
            sort=command.sort,
            reverse=command.reverse,
            executor=executor,
            part=part,
        )
    if not quiet:
        say_inferred_mode(metric, mode)
        if retention.config is not None and command.config is None:
            hint = "ckpttool list . lists everything here"
            say(f"{printable(retention.config)} selects the listed checkpoints, as for prune ({hint})")
        say_problems(listing, everything=command.long or not sys.stderr.isatty(), verbose=command.long)
    if plot is not None and listing.checkpoints:
        from ckpttool.cli.render.plot_results import series_picture
        from ckpttool.cli.report_files import write_report
        from ckpttool.integrations.matplotlib import kind_of

        title = paths[0] if len(paths) == 1 else os.curdir
        write_report("--plot", plot, series_picture(kind_of(plot), title, listing))
    if part is not None:
        from ckpttool.cli.part_documents import list_part_document

        print_json(list_part_document(listing, part, command.verify))
    elif command.cadence and listing.checkpoints:
        _show_cadence(listing, command)
    else:
        _show(listing, read, retention, command)
    return status_of(listing, paths, read)


def _positive_seconds(text: str | None, flag: str) -> float | None:
    if text is None:
        return None
    if not (value := seconds(text)):
        raise UsageError(f"{flag} {text}: expected more than 0")
    return value


def _show_cadence(listing: Listing, command: ListCommand) -> None:
    """Print how often the series that have several checkpoints are saved."""
    from ckpttool.runs.cadence import cadence_of

    mtbf = _positive_seconds(command.mtbf, "--mtbf")
    save_time = _positive_seconds(command.save_time, "--save-time")
    cadences = [
        (series.key, cadence_of(series.in_order, mtbf=mtbf, save_time=save_time))
        for series in listing.series
        if len(series.checkpoints) > 1
    ]
    if command.json:
        document, known = listing.document(), dict(cadences)
        for row in document["series"]:
            if row["key"] in known:
                row["cadence"] = known[row["key"]].document()
        print_json(document)
    elif not command.quiet and cadences:
        from ckpttool.cli.render.text_list import cadence_text

        columns = width(sys.stdout) if sys.stdout.isatty() else None
        print(cadence_text(cadences, mtbf=mtbf, width=columns, colour=has_colour(sys.stdout)))
    elif not command.quiet:
        say("no series with several checkpoints")


def retention_for_list(
    directories: Sequence[str],
    given: Mapping[str, Any],
    metric: str | None,
    mode: Mode | None,
    config: str | None,
) -> Retention:
    """Return the directories and rules; ``--keep-best`` ranks by the metric of ``--best``."""
    from ckpttool.cli.retention_config import retention_for

    if given.keys() & {"keep_best", "keep_best_runs"}:
        own = {"metric": metric, "mode": mode}
        given = {**given, **{name: value for name, value in own.items() if value is not None}}
    # As if --yes were given: nothing is removed, so a configuration with ``yes = true`` needn't be trusted.
    return retention_for(directories, {**given, "yes": True}, config)


def read_listing(
    retention: Retention,
    metric: str | None,
    mode: Mode | None,
    verify: Depth,
    *,
    sort: str | None = None,
    reverse: bool = False,
    executor: Executor | None = None,
    part: Part | None = None,
) -> tuple[Listing, list[str]]:
    """Return the listing, with a plan if rules are given, and the directories that were read."""
    from ckpttool.runs.listing import listing_of

    scopes, problems = _scopes(retention, verify)
    progress = ProgressLines()
    previews = _preview(scopes, progress, executor, must_read_all=part is not None)
    listing = listing_of(
        list(previews.values()),
        sort=sort,
        reverse=reverse,
        best=metric,
        mode=mode,
        depth=verify,
        jobs=retention.request_values.get("jobs"),
        progress=progress,
        executor=executor,
        part=part,
    )
    return replace(listing, problems=(*problems, *listing.problems)), [*previews]


def status_of(listing: Listing, directories: Sequence[str], read: Sequence[str]) -> int:
    """Return the exit status: 2 if a directory could not be read, 1 if something needs attention."""
    return int(bool(listing.problems)) if len(read) == len(directories) else FAILED


def _scopes(retention: Retention, depth: Depth) -> tuple[dict[str, Scope], list[Problem]]:
    """Return by directory its prune request, or without rules a scope; and problems of the rules."""
    from ckpttool.cli.retention_config import unmatched_rules

    # With a rule that matches no series, prune would remove nothing, so the list shows no plan either.
    requests = retention.requests(depth=depth) if retention.has_rules else []
    problems = unmatched_rules(retention, requests)
    if requests and not problems:
        return {one.directory: one for one in requests}, []
    values = retention.request_values
    scope = Scope(**{one.name: values[one.name] for one in fields(Scope) if one.name in values})
    return dict.fromkeys(retention.directories, scope), problems


def _preview(
    scopes: Mapping[str, Scope],
    progress: Progress,
    executor: Executor | None,
    *,
    must_read_all: bool = False,
) -> dict[str, DirectoryPreview]:
    """Return the previews of directories by path; errors in one of several are printed."""
    from ckpttool.runs.listing import preview_directory

    previews = {}
    for directory, scope in scopes.items():
        try:
            previews[directory] = preview_directory(directory, scope, progress, executor)
        except (CheckpointError, UsageError) as failure:
            if (
                len(scopes) == 1 or must_read_all
            ):  # else this part would be cut from fewer checkpoints than the others
                raise
            say_error(with_directory(failure, directory))
    return previews


def say_problems(listing: Listing, *, everything: bool, verbose: bool = False) -> None:
    """Print warnings and errors; on a terminal, only the first of many."""
    say_journals(listing.journals)
    for warning in listing.warnings:
        say_warning(warning)
    shown = listing.problems if everything else listing.problems[:_MOST_PROBLEMS]
    for problem in shown:
        say_warning(f"{problem.path}: {problem.message}")
    if left := len(listing.problems) - len(shown):
        say_warning(f"{counted(left, 'more problem')} (-v shows all)")
    say_unread(listing.unread, "not listed", everything=verbose)


def _show(listing: Listing, read: Sequence[str], retention: Retention, command: ListCommand) -> None:
    if command.json:
        print_json(listing.document())
    elif command.quiet:
        pass
    elif not listing.checkpoints:
        for directory in read:
            say_empty(directory, recursive=retention.is_recursive)
    elif command.null:
        print_paths([one.entry.path for one in listing.checkpoints], null=True)
    else:
        _print(listing, command)


def _print(listing: Listing, command: ListCommand) -> None:
    """Print tables on a terminal or if requested, and otherwise a line of fields for each checkpoint."""
    import time

    from ckpttool.cli.render.text_list import ListStyle, flat_text, list_text, tab_separated_text

    # CI systems set FORCE_COLOR to get the output of a terminal in their logs: tables, not fields.
    is_terminal = sys.stdout.isatty() or bool(os.environ.get("FORCE_COLOR"))
    if command.flat is None and not is_terminal:
        print(tab_separated_text(listing, time.time()))
        return
    style = ListStyle(
        now=time.time(),
        width=width(sys.stdout) if is_terminal else None,
        long=command.long,
        colour=has_colour(sys.stdout),
        wanted=tuple(name for name in (command.metric, command.sort) if name is not None),
    )
    if command.flat:
        print(flat_text(listing, style))
    else:
        from ckpttool.cli.render.text_list import runs_text

        print(*filter(None, (runs_text(listing, style), list_text(listing, style))), sep="\n\n")
