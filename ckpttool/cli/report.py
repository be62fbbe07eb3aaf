"""``ckpttool report``: one page of HTML about a directory of checkpoints, to open or to send."""

from __future__ import annotations

import sys
from typing import Annotated

from ckpttool.cli.list import (
    Best,
    BestMode,
    Config,
    Rules,
    Verify,
    list_options,
    read_listing,
    status_of,
    warn,
)
from ckpttool.cli.options import Depth, Given, Jobs, OptionsOf, Quiet, typer_option
from ckpttool.cli.output import say
from ckpttool.cli.paths import directory_name, say_inferred_mode
from ckpttool.cli.prune import Directory
from ckpttool.core.options import OUTPUT_PANEL
from ckpttool.runs.scope import Scope

Output = Annotated[
    str,
    typer_option(
        *("--output", "-o"),
        metavar="FILE",
        help="Write the page to this file.",
        panel=OUTPUT_PANEL,
        show_default=True,
    ),
]


def report(
    directory: Directory = None,
    output: Output = "report.html",
    metric: Best = None,
    mode: BestMode = None,
    verify: Verify = Depth.QUICK,
    quiet: Quiet = False,
    *,
    scope: Annotated[
        Given, OptionsOf(Scope, ("recursive", "metrics", "group_by", "series", "exclude", "max_depth"))
    ],
    jobs: Jobs = None,
    rules: Rules,
    config: Config = None,
) -> int:
    """Write one HTML page: curves of all runs, sizes, verdicts, and tables to sort and filter.

    With rules of prune, it shows what they would keep and free. The page needs no network.
    """
    import time

    from ckpttool.cli.render.report import report_page
    from ckpttool.cli.reports import check_targets, write_report

    given = {**scope, **rules, **({} if jobs is None else {"jobs": jobs})}
    options = list_options([] if directory is None else [directory], given, metric, mode, config)
    paths = options.directories()
    check_targets({"--output": output}, [*paths, *options.request_options.get("metrics", ())])
    places, listing = read_listing(options, metric, mode, verify)
    if not quiet:
        say_inferred_mode(metric, mode)
        warn(listing, everything=not sys.stderr.isatty())
    depth = "every byte was read" if verify is Depth.FULL else "only the structure was read"
    subtitle = f"{time.strftime('%Y-%m-%d %H:%M %Z')}; {depth}"
    write_report("--output", output, report_page(", ".join(map(directory_name, paths)), subtitle, listing))
    if not quiet:
        say(f"wrote {output}: {len(listing.checkpoints):,} checkpoints in {len(listing.series):,} series")
    return status_of(places, listing)
