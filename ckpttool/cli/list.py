"""``ckpttool list``: the checkpoints of a directory tree, series by series."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from ckpttool.cli.options import (
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
from ckpttool.cli.output import (
    COULD_NOT,
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
from ckpttool.cli.render.terminal import printable
from ckpttool.core.errors import CheckpointError, UsageError
from ckpttool.core.options import OUTPUT_PANEL, RULE_PANEL, SELECTION_PANEL
from ckpttool.io.executors import executor_at
from ckpttool.ops.workload import Workload
from ckpttool.runs.retention.rules import Policy
from ckpttool.runs.scope import Scope

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from ckpttool.cli.prune_options import PruneOptions
    from ckpttool.ops.workload import Part
    from ckpttool.runs.listing import DirectoryPreview, ListedDirectory, Listing
    from ckpttool.runs.members.full_read import Progress
    from ckpttool.transaction.paths import Problem

Directories = Annotated[
    list[PathText] | None,
    path_argument("[DIR...]", "Directories of checkpoints. [default: paths in ckpttool.toml, or .]"),
]
Sort = Annotated[
    str | None,
    typer_option(
        "--sort",
        metavar="KEY",
        complete="sort key",
        help="Sort by epoch, step, age, size, name or a metric, the smallest first.",
        panel=OUTPUT_PANEL,
    ),
]
Reverse = Annotated[bool, typer_option("--reverse", help="Reverse the order.", panel=OUTPUT_PANEL)]
Best = Annotated[
    str | None,
    typer_option(
        *("--best", "--metric"),
        metavar="METRIC",
        complete="metric",
        help="Mark the best of each series by this metric.",
        panel=OUTPUT_PANEL,
    ),
]
BestMode = Annotated[
    Mode | None,
    typer_option(
        "--mode",
        help="Take the lowest or the highest value as the best. [default: by the name]",
        panel=OUTPUT_PANEL,
    ),
]
Flat = Annotated[
    bool | None,
    typer_option(
        "--flat/--grouped",
        help="Show one table, or one for each series. [default: grouped on a terminal, flat elsewhere]",
        panel=OUTPUT_PANEL,
    ),
]
Long = Annotated[
    bool,
    typer_option(*("--long", "-l", "--verbose", "-v"), help="Show all details, in full.", panel=OUTPUT_PANEL),
]
Plot = Annotated[
    str | None,
    typer_option(
        "--plot",
        metavar="FILE",
        help="Plot a metric of all runs in one panel: .svg or .png.",
        panel=OUTPUT_PANEL,
    ),
]
CadenceFlag = Annotated[
    bool,
    typer_option(
        "--cadence",
        help="Show how often each series is saved, and what that costs.",
        panel=OUTPUT_PANEL,
    ),
]
Mtbf = Annotated[
    str | None,
    typer_option(
        "--mtbf",
        metavar="TIME",
        help="With --cadence: the best interval if a failure comes every TIME (24h).",
        panel=OUTPUT_PANEL,
    ),
]
SaveTime = Annotated[
    str | None,
    typer_option(
        "--save-time",
        metavar="TIME",
        help="With --cadence: how long a save takes (12s). [default: as far as files tell]",
        panel=OUTPUT_PANEL,
    ),
]
Verify = Annotated[
    Depth,
    typer_option(
        "--verify",
        help="Check only the structure, or read every byte.",
        panel=SELECTION_PANEL,
        show_default=True,
    ),
]
Config = Annotated[
    str | None,
    typer_option(
        "--config",
        metavar="FILE",
        help="Show what prune would do with this configuration.",
        panel=RULE_PANEL,
    ),
]
Rules = Annotated[
    Given,
    OptionsOf(
        Policy,
        help={
            "keep_best": "Keep the N best by --best.",
            "keep_best_runs": "Remove all runs but the N best by --best; other rules hold within these.",
            "older_than": "Remove only checkpoints saved more than TIME (30d) ago.",
        },
    ),
]
_MOST_PROBLEMS = 10
"""More than that push the list itself off the screen."""


def list_(
    directories: Directories = None,
    sort: Sort = None,
    reverse: Reverse = False,
    metric: Best = None,
    mode: BestMode = None,
    flat: Flat = None,
    long: Long = False,
    plot: Plot = None,
    cadence: CadenceFlag = False,
    mtbf: Mtbf = None,
    save_time: SaveTime = None,
    json: Json = False,
    null: Null = False,
    quiet: Quiet = False,
    verify: Verify = Depth.QUICK,
    *,
    scope: Annotated[
        Given,
        OptionsOf(
            Scope,
            ("recursive", "metrics", "group_by", "series", "exclude", "max_depth"),
        ),
    ],
    jobs: Jobs = None,
    workload: Annotated[Given, OptionsOf(Workload, ("part", "executor"))],
    rules: Rules,
    config: Config = None,
) -> int:
    """List the checkpoints in directory trees, series by series, the oldest first.

    With rules of prune, show what they would keep and remove. Without DIR and rules, [retention] in
    ckpttool.toml sets both, as it does for prune. Nothing on disk is changed.
    """
    if (mtbf or save_time) and not cadence:
        raise UsageError("--mtbf and --save-time go with --cadence")
    given = {**scope, **rules, **({} if jobs is None else {"jobs": jobs})}
    options = list_options(directories or (), given, metric, mode, config)
    paths = options.directories()
    if plot is not None:
        from ckpttool.cli.reports import check_plot

        if plot.lower().endswith(".html"):
            raise UsageError(f"--plot {plot}: ckpttool report writes a page (-o {plot})")
        check_plot(plot, [*paths, *options.request_options.get("metrics", ())])
    part, address = workload.get("part"), workload.get("executor")
    has_order = sort or reverse or metric or plot or cadence
    if part is not None and (not json or has_order or rules or options.config is not None):
        raise UsageError(
            "--part goes with --json, and without an order, --best, --plot, --cadence, rules or "
            "a configuration"
        )
    with executor_at(address) if address else nullcontext() as executor:
        places, listing = read_listing(
            options, metric, mode, verify, sort=sort, reverse=reverse, executor=executor, part=part
        )
    if not quiet:
        say_inferred_mode(metric, mode)
        if options.config is not None and config is None:
            hint = "ckpttool list . lists everything here"
            say(f"{printable(options.config)} selects what is listed, as it does for prune ({hint})")
        warn(listing, everything=long or not sys.stderr.isatty(), verbose=long)
    if plot is not None and listing.checkpoints:
        from ckpttool.cli.render.plot import kind_of
        from ckpttool.cli.render.plot_results import series_picture
        from ckpttool.cli.reports import write_report

        title = paths[0] if len(paths) == 1 else os.curdir
        write_report("--plot", plot, series_picture(kind_of(plot), title, listing))
    if part is not None:
        from ckpttool.cli.part_documents import list_part_document

        print_json(list_part_document(listing, part, verify.value))
        return status_of(places, listing)
    if cadence and listing.checkpoints:
        _show_cadence(listing, _span(mtbf, "--mtbf"), _span(save_time, "--save-time"), json=json, quiet=quiet)
        return status_of(places, listing)
    output = ListOutput(json=json, null=null, quiet=quiet, flat=flat, long=long, wanted=(metric, sort))
    _show(listing, [place for place, is_read in places if is_read], output)
    return status_of(places, listing)


def _span(text: str | None, flag: str) -> float | None:
    """Return a duration in seconds; zero is none."""
    from ckpttool.core.amounts import seconds

    if text is None:
        return None
    if not (value := seconds(text)):
        raise UsageError(f"{flag} {text}: expected more than 0")
    return value


def _show_cadence(
    listing: Listing, mtbf: float | None, save_time: float | None, *, json: bool, quiet: bool
) -> None:
    """Print how often the series that have several checkpoints are saved."""
    from ckpttool.runs.cadence import cadence_of

    cadences = [
        (series.key, cadence_of(series.in_order, mtbf=mtbf, save_time=save_time))
        for series in listing.series
        if len(series.checkpoints) > 1
    ]
    if json:
        from ckpttool.cli.render.json import list_document

        print_json(list_document(listing, dict(cadences)))
    elif not quiet and cadences:
        from ckpttool.cli.render.text_cadence import cadence_text

        columns = width(sys.stdout) if sys.stdout.isatty() else None
        print(cadence_text(cadences, mtbf=mtbf, width=columns, colour=has_colour(sys.stdout)))
    elif not quiet:
        say("no series of several checkpoints")


def list_options(
    directories: Sequence[str],
    given: Mapping[str, Any],
    metric: str | None,
    mode: Mode | None,
    config: str | None,
) -> PruneOptions:
    """Return what is listed and by which rules; ``--keep-best`` goes by the metric whose best is marked."""
    from ckpttool.cli.prune_options import read_prune_options

    if given.keys() & {"keep_best", "keep_best_runs"}:
        own = {"metric": metric, "mode": None if mode is None else mode.value}
        given = {**given, **{name: value for name, value in own.items() if value is not None}}
    return read_prune_options(
        [str(directory) for directory in directories],
        {**given, "yes": True},
        config,  # nobody is asked
    )


def read_listing(
    options: PruneOptions,
    metric: str | None,
    mode: Mode | None,
    verify: Depth,
    *,
    sort: str | None = None,
    reverse: bool = False,
    executor: Executor | None = None,
    part: Part | None = None,
) -> tuple[list[tuple[ListedDirectory, bool]], Listing]:
    """Return the directories, each with whether it could be read, and what lies in them."""
    from ckpttool.runs.listing import listing_of

    places, problems = _places_to_list(options, verify)
    progress = ProgressLines()
    previews = _preview(places, progress, executor, must_read_all=part is not None)
    listing = listing_of(
        list(previews.values()),
        sort=sort,
        reverse=reverse,
        best=metric,
        mode=None if mode is None else mode.value,
        depth=verify.value,
        jobs=options.request_options.get("jobs"),
        progress=progress,
        executor=executor,
        part=part,
    )
    return (
        [(place, place.directory in previews) for place in places],
        replace(listing, problems=(*problems, *listing.problems)),
    )


def status_of(places: Sequence[tuple[ListedDirectory, bool]], listing: Listing) -> int:
    """Return the exit status: 2 if a directory could not be read, 1 if something needs attention."""
    return int(bool(listing.problems)) if all(is_read for _, is_read in places) else COULD_NOT


class ListOutput(NamedTuple):
    """How the list is output."""

    json: bool
    null: bool
    quiet: bool
    flat: bool | None
    long: bool
    wanted: tuple[str | None, ...]


def _places_to_list(options: PruneOptions, depth: Depth) -> tuple[list[ListedDirectory], list[Problem]]:
    """Return what is looked at, with what prune would do there, and why it would do nothing."""
    from ckpttool.cli.prune_options import unmatched_rules
    from ckpttool.runs.listing import ListedDirectory

    values = {**options.request_options}
    scope = Scope(**{one.name: values[one.name] for one in fields(Scope) if one.name in values})
    if options.policies is None and options.request_options.get("failed") is None:
        return [ListedDirectory(path, scope) for path in options.directories()], []
    requests = replace(options, request_options={**values, "depth": depth}).requests()
    if problems := unmatched_rules(options, requests):
        return [ListedDirectory(one.directory, scope) for one in requests], problems
    return [ListedDirectory(one.directory, scope, one) for one in requests], []


def _preview(
    places: Sequence[ListedDirectory],
    progress: Progress,
    executor: Executor | None,
    *,
    must_read_all: bool = False,
) -> dict[str, DirectoryPreview]:
    """Return what lies in directories, by their paths; an error in one of several is printed."""
    from ckpttool.runs.listing import preview_directory

    previews = {}
    for place in places:
        try:
            previews[place.directory] = preview_directory(place, progress, executor)
        except (CheckpointError, UsageError) as failure:
            if len(places) == 1 or must_read_all:
                raise
            say_error(with_directory(failure, place.directory))
    return previews


def warn(listing: Listing, *, everything: bool, verbose: bool = False) -> None:
    """Say on stderr what must not be missed; of many problems the first, where people read them."""
    say_journals(listing.journals)
    for warning in listing.warnings:
        say_warning(warning)
    shown = listing.problems if everything else listing.problems[:_MOST_PROBLEMS]
    for problem in shown:
        say_warning(f"{problem.path}: {problem.message}")
    if left := len(listing.problems) - len(shown):
        say_warning(f"{left:,} more have problems (-v shows all)")
    say_unread(listing.unread, "not listed", everything=verbose)


def _show(listing: Listing, places: Sequence[ListedDirectory], output: ListOutput) -> None:
    if output.json:
        from ckpttool.cli.render.json import list_document

        print_json(list_document(listing))
    elif output.quiet:
        pass
    elif not listing.checkpoints:
        for place in places:
            say_empty(place.directory, recursive=place.scope.recursive)
    elif output.null:
        print_paths([one.entry.path for one in listing.checkpoints], null=True)
    else:
        _print(listing, output)


def _print(listing: Listing, output: ListOutput) -> None:
    """Print tables on a terminal, or if they are asked for; elsewhere a line of fields a checkpoint."""
    import time

    from ckpttool.cli.render.text_list import ListStyle, flat_text, list_text, tab_separated_text

    is_terminal = sys.stdout.isatty() or bool(os.environ.get("FORCE_COLOR"))
    if output.flat is None and not is_terminal:
        print(tab_separated_text(listing, time.time()))
        return
    style = ListStyle(
        now=time.time(),
        width=width(sys.stdout) if is_terminal else None,
        long=output.long,
        colour=has_colour(sys.stdout),
        wanted=tuple(name for name in output.wanted if name is not None),
    )
    if output.flat:
        print(flat_text(listing, style))
    else:
        from ckpttool.cli.render.text_runs import runs_text

        print(*filter(None, (runs_text(listing, style), list_text(listing, style))), sep="\n\n")
