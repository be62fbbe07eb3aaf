"""``ckpttool prune``: thin out by a retention policy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckpttool.cli.latest import Depth, Verify
from ckpttool.cli.options import Exclude, Jobs, Json, MaxDepth, Quiet, Verbose
from ckpttool.cli.output import has_colour, print_json, progress, say, say_error, say_warning
from ckpttool.cli.series import Directory, Recursive, say_journals

if TYPE_CHECKING:
    from typing import TextIO

    from ckpttool.series.planning import Planned, Request
    from ckpttool.series.pruning import Pruned


Keep = Annotated[
    int | None,
    typer.Option(
        "--keep", "--keep-last", metavar="N", help="Keep the newest N intact ones.", show_default=False
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", "-n", help="Say what would go; remove nothing.")]
Check = Annotated[bool, typer.Option("--check", help="Remove nothing; status 1 if something would go.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")]
Series = Annotated[
    list[str],
    typer.Option(
        "--series",
        metavar="GLOB",
        help="What matches is one series, though its names don't say so.",
        show_default=False,
    ),
]
MinAge = Annotated[
    str, typer.Option("--min-age", metavar="TIME", help="Keep what changed less than TIME (2h, 7d) ago.")
]


def prune(
    directory: Directory = Path(),
    keep: Keep = None,
    dry_run: DryRun = False,
    check: Check = False,
    yes: Yes = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    recursive: Recursive = False,
    exclude: Exclude = [],  # noqa: B006 - Typer copies it
    max_depth: MaxDepth = None,
    series: Series = [],  # noqa: B006 - Typer copies it
    min_age: MinAge = "0",
    verify: Verify = Depth.FULL,
    jobs: Jobs = None,
) -> int:
    """Remove old checkpoints, series by series; what stays is verified first."""
    from ckpttool.series.planning import Request
    from ckpttool.series.pruning import prune as carry_out
    from ckpttool.series.retention import Policy, seconds

    request = Request(
        directory=str(directory),
        policy=Policy(keep_last=keep),
        recursive=recursive,
        exclude=exclude,
        max_depth=max_depth,
        series=series,
        min_age=seconds(min_age),
        depth=verify.value,
        jobs=jobs,
    )
    is_dry = dry_run or check
    asks = sys.stdin.isatty() and sys.stderr.isatty() and not (yes or is_dry)

    def confirm(planned: Planned) -> bool:
        return not asks or _asked(planned, sys.stderr if json else sys.stdout, verbose)

    pruned = carry_out(request, dry_run=is_dry, confirm=confirm, progress=progress)
    _say(pruned, quiet=quiet)
    if json:
        from ckpttool.render.json_prune import prune_document

        print_json(prune_document(pruned))
    elif not pruned.plan.groups:
        _say_nothing(request, quiet)
    elif not quiet:
        _print(pruned, was_shown=asks and bool(pruned.plan.removals), verbose=verbose)
    would_go = check and bool(pruned.plan.removals)
    return int(bool(pruned.problems) or would_go or pruned.declined)


def _asked(planned: Planned, stream: TextIO, verbose: bool) -> bool:
    """Show a plan and ask whether to carry it out."""
    from ckpttool.render.text_prune import prune_text
    from ckpttool.series.pruning import Pruned

    preview = Pruned(planned.plan, planned.plan.freed_bytes, dry_run=True)
    print(prune_text(preview, colour=has_colour(stream), verbose=verbose), file=stream, flush=True)
    # Click's own confirmation writes a blank to stdout, where only the answer belongs.
    print("Remove them? [y/N] ", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline()
    if not answer:
        raise typer.Abort
    return answer.strip().lower() in ("y", "yes")


def _say(pruned: Pruned, *, quiet: bool) -> None:
    """Say on stderr what must not be missed; of what failed alike, once."""
    if not quiet:
        _warn(pruned)
    alike: dict[str, list[str]] = {}
    for problem in pruned.problems:
        alike.setdefault(problem.message, []).append(problem.path)
    for message, paths in alike.items():
        others = f" (and {len(paths) - 1:,} more)" if len(paths) > 1 else ""
        say_error(f"{paths[0]}: {message}{others}")


def _warn(pruned: Pruned) -> None:
    say_journals(pruned.journals)
    for path in pruned.finished:
        say_warning(f"{path}: an interrupted prune had begun to remove it; that is finished now")
    for path in pruned.put_back:
        say_warning(f"{path}: an interrupted prune had begun to remove it; it is back now")
    for warning in pruned.warnings:
        say_warning(warning)


def _say_nothing(request: Request, quiet: bool) -> None:
    from ckpttool.series.survey import nothing_in

    if not quiet:
        say(f"{request.directory}: {nothing_in(request.directory, recursive=request.recursive)}")


def _print(pruned: Pruned, *, was_shown: bool, verbose: bool) -> None:
    from ckpttool.render.text_prune import prune_text, total_line

    if was_shown:
        print(total_line(pruned))
    else:
        print(prune_text(pruned, colour=has_colour(sys.stdout), verbose=verbose))
